//! A value that people must never see in a log, an error or a listing.

use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize, Serializer};
use std::{
    fmt,
    io::{self, Read},
    path::Path,
    sync::Arc,
};

/// What stands where a secret would.
pub const REDACTED: &str = "[redacted]";

/// Text that prints and serializes as `[redacted]`; only [`Secret::expose`] gives it away. One that came from a file remembers it.
#[derive(Clone, Default, Deserialize)]
#[serde(from = "String")]
pub struct Secret {
    text: SecretString,
    file: Option<Arc<Path>>,
}

/// More than any secret needs.
const LARGEST_FILE: u64 = 1 << 20;

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: SecretString::from(text.into()), file: None }
    }

    /// What a file holds, without the line feed at its end.
    pub fn from_file(path: &Path) -> io::Result<Self> {
        let mut text = String::new();
        std::fs::File::open(path)?.take(LARGEST_FILE + 1).read_to_string(&mut text)?;
        if text.len() as u64 > LARGEST_FILE {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it has more than 1 MiB"));
        }
        Ok(Self { file: Some(path.into()), ..Self::new(text.trim_end_matches(['\n', '\r'])) })
    }

    /// What its file holds now; without a file, itself. A file that is being written may be empty for a moment.
    pub fn current(&self) -> io::Result<Self> {
        let Some(path) = &self.file else { return Ok(self.clone()) };
        match Self::from_file(path)? {
            empty if empty.is_empty() => Err(io::Error::new(io::ErrorKind::InvalidData, "it is empty")),
            current => Ok(current),
        }
    }

    /// The file it came from.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The text itself. Hand it to the client that needs it and keep no copy.
    pub fn expose(&self) -> &str {
        self.text.expose_secret()
    }

    pub fn is_empty(&self) -> bool {
        self.expose().is_empty()
    }

    /// A URL with its passwords hidden, fit for people; anything else is hidden whole.
    ///
    /// Read as loosely as any reader of URLs might: everything from the first colon to the last `@` may be a password.
    pub fn masked_url(&self) -> String {
        let Some((scheme, rest)) = self.expose().split_once("://") else { return REDACTED.to_owned() };
        if !scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c)) {
            return REDACTED.to_owned();
        }
        let (user, rest) = match rest.rsplit_once('@') {
            Some((credentials, rest)) => (Some(credentials), rest),
            None => (None, rest),
        };
        let user = user.map(|credentials| match credentials.split_once(':') {
            Some((user, _)) => format!("{user}:{REDACTED}@"),
            None => format!("{credentials}@"),
        });
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let query: Vec<String> =
            query.split('&').filter(|given| !given.is_empty()).map(masked_parameter).collect();
        let mark = if query.is_empty() { "" } else { "?" };
        format!("{scheme}://{}{place}{mark}{}", user.unwrap_or_default(), query.join("&"))
    }

    /// The same for an address of a service, whose whole query may be a key.
    pub fn masked_address(&self) -> String {
        let masked = self.masked_url();
        match masked.split_once(['?', '#']) {
            Some((place, _)) => format!("{place}?{REDACTED}"),
            None => masked,
        }
    }
}

/// A password may also be given as a parameter, as libpq allows; a name that is written in odd ways may be one.
fn masked_parameter(parameter: &str) -> String {
    let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
    match name.contains('%') || name.to_ascii_lowercase().contains("password") {
        true => format!("{name}={REDACTED}"),
        false => format!("{name}={value}"),
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
        for (given, shown) in [
            ("postgres://app:#canary@db/m", "postgres://app:[redacted]@db/m"),
            ("postgres://app:12#canary@db/m", "postgres://app:[redacted]@db/m"),
            (
                "postgres://app:canary/canary?canary@db/m?sslmode=require",
                "postgres://app:[redacted]@db/m?sslmode=require",
            ),
            ("postgres://db/m?user=app&password=canary", "postgres://db/m?user=app&password=[redacted]"),
            ("postgres://db/m?%70assword=canary", "postgres://db/m?%70assword=[redacted]"),
            ("postgres://localhost/musterd", "postgres://localhost/musterd"),
            ("redis://:canary@cache:6379", "redis://:[redacted]@cache:6379"),
            (
                "redis-sentinel://s:1?sentinelPassword=canary&node=t:1",
                "redis-sentinel://s:1?sentinelPassword=[redacted]&node=t:1",
            ),
            ("host=db password=canary", REDACTED),
            ("can ary://x", REDACTED),
        ] {
            assert_eq!(Secret::new(given).masked_url(), shown, "{given}");
        }
        let address = Secret::new("https://u:canary@api.example/charge?key=canary#canary");
        assert_eq!(address.masked_address(), "https://u:[redacted]@api.example/charge?[redacted]");
        assert_eq!(Secret::new("http://h/p").masked_address(), "http://h/p");
    }

    #[test]
    fn a_secret_of_a_file_is_read_again_and_never_taken_while_it_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "one\n").unwrap();
        let secret = Secret::from_file(&path).unwrap();
        std::fs::write(&path, "two\r\n").unwrap();
        assert_eq!((secret.expose(), secret.current().unwrap().expose()), ("one", "two"));
        std::fs::write(&path, "").unwrap();
        assert!(secret.current().is_err());
        std::fs::write(&path, vec![b'x'; 1 << 21]).unwrap();
        assert!(secret.current().is_err());
        assert_eq!(Secret::new("three").current().unwrap().expose(), "three");
    }
}
