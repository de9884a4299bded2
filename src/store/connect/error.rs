//! Why a connection failed, distinguished by cause, with what to do about each.

use std::error::Error;
use std::io;

use deadpool_postgres::{BuildError, PoolError};
use rustls::CertificateError;
use tokio_postgres::error::SqlState;

use super::{ParseError, Target, TlsError};
use crate::error_text::describe;

/// A connection that could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    #[error(transparent)]
    Parse(#[from] ParseError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// `detail` is what the server or the system said itself, where it adds to the cause; it begins with a blank.
    #[error("PostgreSQL at {target}: {cause}{detail}; {}", .cause.hint())]
    Failed { target: String, cause: Cause, detail: String },
    #[error("building the connection pool: report it")]
    Pool { source: BuildError },
    #[error("the connection pool gave nothing: it is closed, the process is ending")]
    PoolClosed { source: PoolError },
}

/// What the attempt failed of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    #[error("nothing listens there")]
    Refused,
    #[error("there is no such socket")]
    NoSocket,
    #[error("the host name is not known")]
    NoSuchHost,
    #[error("no answer in time")]
    Timeout,
    #[error("every connection of the pool was busy for too long")]
    Exhausted,
    #[error("the server does not know us")]
    Authentication,
    #[error("the server asks for a password and there is none")]
    NoPassword,
    #[error("the database does not exist")]
    NoDatabase,
    #[error("we may not connect to this database")]
    NotPermitted,
    #[error("the server has no connection left for us")]
    TooManyConnections,
    #[error("the server is starting up or shutting down")]
    NotReady,
    #[error("no host accepts the kind of session that target_session_attrs asks for")]
    SessionAttrs,
    #[error("the server does not speak TLS")]
    TlsRefused,
    #[error("the server's certificate is for another name")]
    CertificateName,
    #[error("the server's certificate is not signed by an authority we trust")]
    CertificateIssuer,
    #[error("the server's certificate is not acceptable")]
    Certificate,
    #[error("the TLS handshake failed")]
    TlsHandshake,
    #[error("the connection failed")]
    Other,
}

impl Cause {
    /// What to do about it.
    pub fn hint(self) -> &'static str {
        match self {
            Self::Refused => "start the server, or correct host and port",
            Self::NoSocket => "start the server, or correct the socket's directory and the port",
            Self::NoSuchHost => "correct the host, or check DNS",
            Self::Timeout => "check firewall, address and load, or raise connect_timeout",
            Self::Exhausted => "raise database.max_connections, or look for long transactions",
            Self::Authentication => "check user, password and the server's pg_hba.conf",
            Self::NoPassword => "add the password to the connection string",
            Self::NoDatabase => "create it (createdb), or correct the database's name",
            Self::NotPermitted => "GRANT CONNECT ON DATABASE to this user",
            Self::TooManyConnections => "raise the server's max_connections, lower ours, or use a pooler",
            Self::NotReady => "wait a little, then try again",
            Self::SessionAttrs => "add the primary to the hosts, or drop target_session_attrs",
            Self::TlsRefused => "switch on ssl in the server, or lower sslmode if the network is trusted",
            Self::CertificateName => {
                "connect by a name in the certificate's subjectAltName (a common name is not read), or use verify-ca"
            }
            Self::CertificateIssuer => "set sslrootcert to the certificate of the CA that signed it",
            Self::Certificate => "renew it, and check the clocks of both sides",
            Self::TlsHandshake => {
                "check that both sides share a TLS version, and sslcert if the server asks for one"
            }
            Self::Other => "the server's log says more",
        }
    }
}

impl ConnectError {
    pub(super) fn failed(target: &Target, source: tokio_postgres::Error) -> Self {
        let cause = classify(&source);
        Self::Failed { target: target.to_string(), cause, detail: detail(cause, &source) }
    }

    pub(super) fn timeout(target: &Target) -> Self {
        Self::Failed { target: target.to_string(), cause: Cause::Timeout, detail: String::new() }
    }

    pub(super) fn exhausted(target: &Target) -> Self {
        Self::Failed { target: target.to_string(), cause: Cause::Exhausted, detail: String::new() }
    }

    /// The cause, when it was the attempt that failed and not the setting up.
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Self::Failed { cause, .. } => Some(*cause),
            _ => None,
        }
    }

    /// What went wrong, without what to do about it.
    pub fn finding(&self) -> String {
        match self {
            Self::Failed { target, cause, detail } => format!("{target}: {cause}{detail}"),
            other => describe(other),
        }
    }

    /// What to do about it, for a column of its own; the message says it too.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Parse(_) => "correct the connection string",
            Self::Tls(_) => "correct the ssl parameters of the connection string, or the files they name",
            Self::Failed { cause, .. } => cause.hint(),
            Self::Pool { .. } => "report it",
            Self::PoolClosed { .. } => "nothing: the process is ending",
        }
    }
}

fn detail(cause: Cause, error: &tokio_postgres::Error) -> String {
    match (error.as_db_error(), cause) {
        (Some(server), _) => format!(" ({})", server.message()),
        (None, Cause::Other | Cause::TlsHandshake | Cause::Certificate | Cause::NoSuchHost) => {
            format!(" ({})", describe(error))
        }
        // The cause says all there is.
        _ => String::new(),
    }
}

fn classify(error: &tokio_postgres::Error) -> Cause {
    if let Some(code) = error.code() {
        return by_sqlstate(code);
    }
    let io = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let tls = io.and_then(|io| io.get_ref()).and_then(|inner| inner.downcast_ref::<rustls::Error>());
    // The driver keeps its kinds to itself; its outer text is the only sign of them. Tests hold each one.
    match (error.to_string().as_str(), tls, io) {
        (_, Some(tls), _) => by_tls(tls),
        ("error performing TLS handshake", None, None) => Cause::TlsRefused,
        ("error performing TLS handshake", ..) => Cause::TlsHandshake,
        ("authentication error", ..) => Cause::Authentication,
        // Hosts and ports were counted when the string was read: a missing password is all that is left.
        ("invalid configuration", ..) => Cause::NoPassword,
        ("error connecting to server", _, Some(io)) => by_io(io),
        _ => Cause::Other,
    }
}

fn by_sqlstate(code: &SqlState) -> Cause {
    match *code {
        SqlState::INVALID_PASSWORD | SqlState::INVALID_AUTHORIZATION_SPECIFICATION => Cause::Authentication,
        SqlState::INVALID_CATALOG_NAME => Cause::NoDatabase,
        SqlState::INSUFFICIENT_PRIVILEGE => Cause::NotPermitted,
        SqlState::TOO_MANY_CONNECTIONS => Cause::TooManyConnections,
        SqlState::CANNOT_CONNECT_NOW => Cause::NotReady,
        _ => Cause::Other,
    }
}

fn by_io(error: &io::Error) -> Cause {
    match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::ConnectionRefused, _) => Cause::Refused,
        (io::ErrorKind::NotFound, _) => Cause::NoSocket,
        (io::ErrorKind::TimedOut, _) => Cause::Timeout,
        // Without the system's number it comes from the driver, after the server's answer.
        (io::ErrorKind::PermissionDenied, None) => Cause::SessionAttrs,
        // The resolver's errors have neither a kind nor a number.
        (_, None) => Cause::NoSuchHost,
        _ => Cause::Other,
    }
}

fn by_tls(error: &rustls::Error) -> Cause {
    match error {
        rustls::Error::InvalidCertificate(reason) => match reason {
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                Cause::CertificateName
            }
            CertificateError::UnknownIssuer => Cause::CertificateIssuer,
            _ => Cause::Certificate,
        },
        _ => Cause::TlsHandshake,
    }
}
