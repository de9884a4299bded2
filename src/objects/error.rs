//! What can go wrong with a store, distinguished by what a person would do about it.

use std::fmt;
use std::io;
use std::path::Path;
use std::time::Duration;

use super::Key;

/// What was being done when it went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Write,
    Read,
    Delete,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Write => "write",
            Op::Read => "read",
            Op::Delete => "delete",
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    #[error("{key:?} cannot name an object: {problem}")]
    Key { key: String, problem: &'static str },
    #[error("open the output store: {key} {problem}")]
    Config { key: &'static str, problem: String },
    #[error(
        "open the S3 store: no credentials; set outputs.s3.access_key and outputs.s3.secret_key, or AWS_ACCESS_KEY_ID \
         and AWS_SECRET_ACCESS_KEY in the environment"
    )]
    NoCredentials,
    #[error("{op} {at}: there is no such object")]
    NotFound { op: Op, at: String },
    #[error(
        "{op} {at}: the server does not accept the credentials ({code}: {message}); correct outputs.s3.access_key and \
         outputs.s3.secret_key (or AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN)"
    )]
    Credentials { op: Op, at: String, code: String, message: String },
    #[error(
        "{op} {at}: the server forbids it ({code}: {message}); allow this key s3:PutObject, s3:GetObject, \
         s3:DeleteObject and s3:AbortMultipartUpload on the bucket"
    )]
    Forbidden { op: Op, at: String, code: String, message: String },
    #[error(
        "{op} {at}: bucket {bucket:?} does not exist at {endpoint}; create it, or correct outputs.s3.bucket, \
         outputs.s3.region and outputs.s3.endpoint"
    )]
    NoSuchBucket { op: Op, at: String, bucket: String, endpoint: String },
    #[error("{op} {at}: this machine's clock and the server's disagree ({message}); set the clock (NTP)")]
    Clock { op: Op, at: String, message: String },
    #[error(
        "{op} {at}: the server answered {status} ({code}: {message}); if it goes on, look at the server's log, \
         outputs.s3.region and outputs.s3.endpoint"
    )]
    Server { op: Op, at: String, status: u16, code: String, message: String },
    #[error(
        "{op} {at}: no connection to {endpoint} ({cause}); check that the server runs, outputs.s3.endpoint and the \
         network between"
    )]
    Unreachable { op: Op, at: String, endpoint: String, cause: String },
    #[error(
        "{op} {at}: the certificate of {endpoint} is not trusted ({cause}); name its authority in outputs.s3.ca_file, \
         or correct the host in outputs.s3.endpoint"
    )]
    Untrusted { op: Op, at: String, endpoint: String, cause: String },
    #[error(
        "{op} {at}: no answer within {}; raise outputs.s3.timeout if the network is slow, else look at the server",
        humantime::format_duration(*after)
    )]
    Timeout { op: Op, at: String, after: Duration },
    #[error("write {at}: more than {max} bytes, the most a multipart upload can take; split the output")]
    TooLarge { at: String, max: u64 },
    #[error(
        "{op} {at}: no space left (disk, quota or file size limit); free some, or move outputs.dir to a larger disk"
    )]
    DiskFull { op: Op, at: String },
    #[error("{op} {at}: not permitted ({source}); let the user musterd runs as write in outputs.dir")]
    Denied { op: Op, at: String, source: io::Error },
    #[error("{op} {at}: {source}")]
    Io { op: Op, at: String, source: io::Error },
    #[error("read what is to be written to {at}: {source}")]
    Source { at: String, source: io::Error },
    #[error("read back {at}: it is not what was written; the store or something before it alters objects")]
    Altered { at: String },
}

impl ObjectError {
    /// True for what passes by itself. The rest waits for a person: try it again too, since they may fix it at any
    /// time, but say so once and clearly.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Timeout { .. } | Self::Io { .. } => true,
            Self::Server { status, .. } => *status >= 500 || matches!(status, 408 | 409 | 429),
            _ => false,
        }
    }

    /// One word for what went wrong, whatever the object: the same repair fixes all of the same kind.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Key { .. } => "key",
            Self::Config { .. } | Self::NoCredentials => "config",
            Self::NotFound { .. } => "not found",
            Self::Credentials { .. } => "credentials",
            Self::Forbidden { .. } => "forbidden",
            Self::NoSuchBucket { .. } => "no such bucket",
            Self::Clock { .. } => "clock",
            Self::Server { .. } => "server",
            Self::Unreachable { .. } => "unreachable",
            Self::Untrusted { .. } => "untrusted",
            Self::Timeout { .. } => "timeout",
            Self::TooLarge { .. } => "too large",
            Self::DiskFull { .. } => "disk full",
            Self::Denied { .. } => "denied",
            Self::Io { .. } => "io",
            Self::Source { .. } => "source",
            Self::Altered { .. } => "altered",
        }
    }

    pub(super) fn config(key: &'static str, problem: impl fmt::Display) -> Self {
        Self::Config { key, problem: problem.to_string() }
    }

    /// An error of the file system, by what to do about it.
    pub(super) fn from_io(op: Op, path: &Path, source: io::Error) -> Self {
        use io::ErrorKind as Kind;
        let at = path.display().to_string();
        match source.kind() {
            Kind::NotFound if op != Op::Write => Self::NotFound { op, at },
            Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge => Self::DiskFull { op, at },
            Kind::PermissionDenied | Kind::ReadOnlyFilesystem => Self::Denied { op, at, source },
            _ => Self::Io { op, at, source },
        }
    }

    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }

    pub(super) fn source_of(key: &Key, source: io::Error) -> Self {
        Self::Source { at: key.to_string(), source }
    }
}
