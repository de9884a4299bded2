//! What an S3 server says when it refuses, and what to make of it.

use serde::Deserialize;

use crate::objects::error::{ObjectError, Op};

/// How much of a server's explanation is worth repeating.
const MESSAGE: usize = 300;

/// An error document. Nothing else of it is kept: it repeats what was signed.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct Refusal {
    code: String,
    message: String,
}

impl Refusal {
    /// Reads an error document; anything else (a proxy's HTML, nothing) is an empty refusal.
    pub(super) fn read(body: &[u8]) -> Self {
        let text = String::from_utf8_lossy(body);
        let mut refusal: Self = quick_xml::de::from_str(&text).unwrap_or_default();
        if let Some((end, _)) = refusal.message.char_indices().nth(MESSAGE) {
            refusal.message.truncate(end);
        }
        refusal
    }

    pub(super) fn is_empty(&self) -> bool {
        self.code.is_empty()
    }

    pub(super) fn into_error(
        self,
        op: Op,
        at: String,
        status: u16,
        bucket: &str,
        endpoint: &str,
    ) -> ObjectError {
        let Self { code, message } = self;
        match (code.as_str(), status) {
            ("NoSuchKey", _) | ("", 404) => ObjectError::NotFound { op, at },
            ("NoSuchBucket", _) => {
                let (bucket, endpoint) = (bucket.to_owned(), endpoint.to_owned());
                ObjectError::NoSuchBucket { op, at, bucket, endpoint }
            }
            ("RequestTimeTooSkewed", _) => ObjectError::Clock { op, at, message },
            _ if is_about_credentials(&code) => ObjectError::Credentials { op, at, code, message },
            (_, 401) => ObjectError::Credentials { op, at, code, message },
            (_, 403) => ObjectError::Forbidden { op, at, code, message },
            _ => ObjectError::Server { op, at, status, code, message },
        }
    }
}

fn is_about_credentials(code: &str) -> bool {
    let codes =
        ["SignatureDoesNotMatch", "InvalidAccessKeyId", "NotSignedUp", "InvalidToken", "ExpiredToken"];
    codes.contains(&code)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(status: u16, code: &str) -> ObjectError {
        let body = format!(
            "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>why</Message><StringToSign>canary</StringToSign></Error>"
        );
        Refusal::read(body.as_bytes()).into_error(Op::Write, "s3://b/k".into(), status, "b", "http://h")
    }

    #[test]
    fn each_refusal_has_its_error() {
        use ObjectError as E;
        assert!(matches!(error(404, "NoSuchKey"), E::NotFound { .. }));
        assert!(matches!(error(404, "NoSuchBucket"), E::NoSuchBucket { .. }));
        assert!(matches!(error(403, "SignatureDoesNotMatch"), E::Credentials { .. }));
        assert!(matches!(error(403, "InvalidAccessKeyId"), E::Credentials { .. }));
        assert!(matches!(error(400, "ExpiredToken"), E::Credentials { .. }));
        assert!(matches!(error(403, "AccessDenied"), E::Forbidden { .. }));
        assert!(matches!(error(403, "RequestTimeTooSkewed"), E::Clock { .. }));
        assert!(matches!(error(404, "NoSuchUpload"), E::Server { .. }));
    }

    #[test]
    fn a_busy_server_passes_and_a_wrong_request_does_not() {
        assert!(error(503, "SlowDown").is_transient());
        assert!(error(500, "InternalError").is_transient());
        assert!(!error(400, "AuthorizationHeaderMalformed").is_transient());
        assert!(!error(301, "PermanentRedirect").is_transient());
    }

    #[test]
    fn what_was_signed_is_not_repeated() {
        let error = error(403, "SignatureDoesNotMatch");
        assert!(error.to_string().contains("why"));
        assert!(!format!("{error} {error:?}").contains("canary"));
    }

    #[test]
    fn other_documents_are_empty_refusals() {
        let done = "<CompleteMultipartUploadResult><ETag>\"e\"</ETag></CompleteMultipartUploadResult>";
        for body in ["", "   ", "<html><body>Bad gateway</body></html>", "not XML", done] {
            assert!(Refusal::read(body.as_bytes()).is_empty(), "{body}");
        }
        // As S3 sends it when it fails after having answered 200.
        assert!(
            !Refusal::read(b"  <?xml version=\"1.0\"?>\n<Error><Code>InternalError</Code></Error>")
                .is_empty()
        );
    }
}
