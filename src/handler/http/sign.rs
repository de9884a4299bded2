//! Signatures by the rules of Standard Webhooks: HMAC-SHA256 over `id.timestamp.body`.

use crate::secret::Secret;
use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Signs requests with one key, or, while it is being changed, with several: the receiver accepts any of them.
#[derive(Clone)]
pub struct Signer(Vec<Hmac<Sha256>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSecret {
    #[error("must be the key in base64, with or without whsec_ before it; several with blanks between them")]
    NotBase64,
    #[error("must have 24 to 64 bytes, as the rules of Standard Webhooks ask")]
    Length,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Signer")
    }
}

impl Signer {
    /// The keys have blanks or line ends between them.
    pub fn new(secret: &Secret) -> Result<Self, BadSecret> {
        let keys = secret.expose().split_ascii_whitespace().map(key).collect::<Result<Vec<_>, _>>()?;
        if keys.is_empty() { Err(BadSecret::Length) } else { Ok(Self(keys)) }
    }

    /// The three headers of a request whose id is the same at every try.
    pub fn headers(&self, id: &str, body: &str) -> [(&'static str, String); 3] {
        let timestamp = jiff::Timestamp::now().as_second();
        let signatures = self.sign(id, timestamp, body);
        [
            ("webhook-id", id.to_owned()),
            ("webhook-timestamp", timestamp.to_string()),
            ("webhook-signature", signatures),
        ]
    }

    /// The value of `webhook-signature`: a signature for each key, in the order of the keys.
    pub fn sign(&self, id: &str, timestamp: i64, body: &str) -> String {
        let signature = |key: &Hmac<Sha256>| {
            let mut mac = key.clone();
            mac.update(format!("{id}.{timestamp}.").as_bytes());
            mac.update(body.as_bytes());
            format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
        };
        self.0.iter().map(signature).collect::<Vec<_>>().join(" ")
    }
}

fn key(text: &str) -> Result<Hmac<Sha256>, BadSecret> {
    let key =
        STANDARD.decode(text.strip_prefix("whsec_").unwrap_or(text)).map_err(|_| BadSecret::NotBase64)?;
    if !(24..=64).contains(&key.len()) {
        return Err(BadSecret::Length);
    }
    Hmac::new_from_slice(&key).map_err(|_| BadSecret::Length)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made with Python: base64(hmac.digest(base64.b64decode(key), b"msg_1.1614265330." + body, "sha256")).
    #[test]
    fn a_signature_is_what_others_compute() {
        let signer = Signer::new(&Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")).unwrap();
        let signature = signer.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, r#"{"test": 2432232314}"#);
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn while_a_key_is_changed_each_of_them_signs() {
        let (old, new) =
            ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "bmV3LWtleS1uZXcta2V5LW5ldy1rZXktbmV3LWtleS0=");
        let sign = |secret: &str| Signer::new(&Secret::new(secret)).unwrap().sign("id", 7, "{}");
        assert_eq!(sign(&format!("{new}\n{old}\n")), format!("{} {}", sign(new), sign(old)));
        let half_wrong = Secret::new(format!("{new} short"));
        assert!(Signer::new(&half_wrong).is_err());
        assert_eq!(Signer::new(&Secret::new(" ")).unwrap_err(), BadSecret::Length);
    }

    #[test]
    fn weak_and_odd_keys_are_refused() {
        assert_eq!(Signer::new(&Secret::new("whsec_***")).unwrap_err(), BadSecret::NotBase64);
        assert_eq!(Signer::new(&Secret::new("c2hvcnQ=")).unwrap_err(), BadSecret::Length);
    }
}
