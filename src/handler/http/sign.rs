//! Signatures by the rules of Standard Webhooks: HMAC-SHA256 over `id.timestamp.body`.

use crate::secret::Secret;
use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Signs requests with one key.
#[derive(Clone)]
pub struct Signer(Hmac<Sha256>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSecret {
    #[error("must be the key in base64, with or without whsec_ before it")]
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
    pub fn new(secret: &Secret) -> Result<Self, BadSecret> {
        let text = secret.expose();
        let key =
            STANDARD.decode(text.strip_prefix("whsec_").unwrap_or(text)).map_err(|_| BadSecret::NotBase64)?;
        if !(24..=64).contains(&key.len()) {
            return Err(BadSecret::Length);
        }
        Hmac::new_from_slice(&key).map(Self).map_err(|_| BadSecret::Length)
    }

    /// The three headers of a request whose id is the same at every try.
    pub fn headers(&self, id: &str, body: &str) -> [(&'static str, String); 3] {
        let timestamp = jiff::Timestamp::now().as_second();
        let signature = self.sign(id, timestamp, body);
        [
            ("webhook-id", id.to_owned()),
            ("webhook-timestamp", timestamp.to_string()),
            ("webhook-signature", format!("v1,{signature}")),
        ]
    }

    pub fn sign(&self, id: &str, timestamp: i64, body: &str) -> String {
        let mut mac = self.0.clone();
        mac.update(format!("{id}.{timestamp}.").as_bytes());
        mac.update(body.as_bytes());
        STANDARD.encode(mac.finalize().into_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made with Python: base64(hmac.digest(base64.b64decode(key), b"msg_1.1614265330." + body, "sha256")).
    #[test]
    fn a_signature_is_what_others_compute() {
        let signer = Signer::new(&Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")).unwrap();
        let signature = signer.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, r#"{"test": 2432232314}"#);
        assert_eq!(signature, "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn weak_and_odd_keys_are_refused() {
        assert_eq!(Signer::new(&Secret::new("whsec_***")).unwrap_err(), BadSecret::NotBase64);
        assert_eq!(Signer::new(&Secret::new("c2hvcnQ=")).unwrap_err(), BadSecret::Length);
    }
}
