//! A value that people must never see in a log, an error or a listing.

use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;

/// What stands where a secret would.
pub const REDACTED: &str = "[redacted]";

/// Text that prints and serializes as `[redacted]`; only [`Secret::expose`] gives it away.
#[derive(Clone, Default, Deserialize)]
#[serde(transparent)]
pub struct Secret(SecretString);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(SecretString::from(text.into()))
    }

    /// The text itself. Hand it to the client that needs it and keep no copy.
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }

    pub fn is_empty(&self) -> bool {
        self.expose().is_empty()
    }

    /// A URL with its password hidden, fit for people; anything else is hidden whole.
    pub fn masked_url(&self) -> String {
        let Ok(mut url) = url::Url::parse(self.expose()) else { return REDACTED.to_owned() };
        if url.password().is_some() && url.set_password(Some("redacted")).is_err() {
            return REDACTED.to_owned();
        }
        // A password may also be given as a parameter, as libpq allows.
        if url.query_pairs().any(|(name, _)| name.contains("password")) {
            url.set_query(Some(REDACTED));
        }
        url.to_string().replace(":redacted@", &format!(":{REDACTED}@"))
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self::new(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(if self.is_empty() { "" } else { REDACTED })
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.expose() == other.expose()
    }
}

impl Eq for Secret {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_way_of_printing_shows_the_text() {
        let secret = Secret::new("canary");
        assert_eq!(format!("{secret:?}"), REDACTED);
        assert_eq!(serde_json::to_string(&secret).unwrap(), "\"[redacted]\"");
    }

    #[test]
    fn a_masked_url_keeps_everything_but_the_password() {
        let url = Secret::new("postgres://app:canary@db:5432/musterd");
        assert_eq!(url.masked_url(), "postgres://app:[redacted]@db:5432/musterd");
        let parameter = Secret::new("postgres://db/musterd?user=app&password=canary");
        assert!(!parameter.masked_url().contains("canary"));
        assert_eq!(Secret::new("host=db password=canary").masked_url(), REDACTED);
    }
}
