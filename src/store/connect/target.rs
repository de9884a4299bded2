//! Where PostgreSQL is and how to be let in, checked as far as that goes without asking the server.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use tokio_postgres::config::{Host, SslMode as DriverMode, SslNegotiation, TargetSessionAttrs};

use crate::loopback::is_loopback;
use crate::renewed::Stamp;
use crate::secret::Secret;

use super::params::Params;
use super::parse_error::{ParseError, refuse_unknown};
use super::tls::{Identity, Roots, SslMode, TlsSettings};

/// How long one host may take to answer, unless `connect_timeout` says otherwise. Never for ever.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that vanished is noticed by keepalives after 30 + 3 × 10 s, or 30 s after data was sent to it.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;
const USER_TIMEOUT: Duration = Duration::from_secs(30);
/// Where Debian's and Red Hat's servers put their socket; libpq's default host there.
const SOCKET_DIR: &str = "/var/run/postgresql";

/// A parsed connection string. Shows host, port, user, database and sslmode, and nothing else.
#[derive(Clone, PartialEq, Eq)]
pub struct Target {
    pub(super) driver: tokio_postgres::Config,
    pub(super) tls: TlsSettings,
    /// See [`Target::unnamed`].
    pub(super) unnamed: bool,
    /// See [`Target::pinned`].
    pub(super) pinned: bool,
    /// Where the string is read again for every new connection.
    source: Option<Secret>,
}

impl Target {
    /// The target of a connection string. One that came from a file is read again for every new connection.
    pub fn of(url: &Secret) -> Result<Self, ParseError> {
        let source = url.file().is_some().then(|| url.clone());
        Ok(Self { source, ..Self::parse(url.expose())? })
    }

    /// The target as its file describes it now; as it was while that cannot be used.
    pub(super) fn renewed(&self) -> Self {
        let Some(source) = &self.source else { return self.clone() };
        let read = source.current().map_err(|error| error.to_string());
        let parsed = read.and_then(|url| Self::parse(url.expose()).map_err(|error| error.to_string()));
        match parsed {
            Ok(target) => {
                let target = if self.unnamed { target.unnamed() } else { target };
                let target = if self.pinned { target.pinned() } else { target };
                Self { source: self.source.clone(), ..target }
            }
            Err(error) => {
                tracing::debug!(error, "the file of the connection string cannot be used");
                self.clone()
            }
        }
    }

    /// What connections to this target are made of.
    pub(super) fn stamps(&self) -> Vec<Stamp> {
        let secret = self.source.as_ref().map(Stamp::of_secret);
        secret.into_iter().chain(self.renewed().tls.files().map(Stamp::of_file)).collect()
    }

    /// Reads a `postgres://` URL or `key=value` pairs, with the parameters and meanings of libpq.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let mut params = Params::read(text)?;
        refuse_unknown(&params)?;
        let tls = take_tls(&mut params)?;
        // libpq counts it in milliseconds, the driver in seconds; two names for one thing.
        let user_timeout = params.take("tcp_user_timeout").map(|ms| milliseconds(&ms)).transpose()?;
        if let Some(count) = params.take("keepalives_count") {
            params.set("keepalives_retries", count);
        }
        let attrs = params.take("target_session_attrs").map(|attrs| session_attrs(&attrs)).transpose()?;
        fill_hosts(&mut params);
        let given = |key| params.keys().any(|known| known == key);
        let mut driver: tokio_postgres::Config = params.to_pairs().parse()?;
        if !given("keepalives_idle") {
            driver.keepalives_idle(KEEPALIVE_IDLE);
        }
        if !given("keepalives_interval") {
            driver.keepalives_interval(KEEPALIVE_INTERVAL);
        }
        if !given("keepalives_retries") {
            driver.keepalives_retries(KEEPALIVE_RETRIES);
        }
        driver.tcp_user_timeout(user_timeout.unwrap_or(USER_TIMEOUT));
        // Of several hosts one may be a standby, on which nothing can be claimed.
        let usual = match driver.get_hosts().len() {
            ..2 => TargetSessionAttrs::Any,
            _ => TargetSessionAttrs::ReadWrite,
        };
        driver.target_session_attrs(attrs.unwrap_or(usual));
        if driver.get_connect_timeout().is_none() {
            driver.connect_timeout(CONNECT_TIMEOUT);
        }
        check_counts(&driver)?;
        driver.ssl_mode(driver_mode(&driver, tls.mode)?);
        Ok(Self { driver, tls, unnamed: false, pinned: false, source: None })
    }

    /// The `sslmode` in force.
    pub fn ssl_mode(&self) -> SslMode {
        self.tls.mode
    }

    /// Whether connections leave this machine.
    pub fn is_remote(&self) -> bool {
        let addresses = self.driver.get_hostaddrs();
        match addresses.is_empty() {
            true => self
                .driver
                .get_hosts()
                .iter()
                .any(|host| matches!(host, Host::Tcp(name) if !is_loopback(name))),
            false => addresses.iter().any(|address| !address.to_canonical().is_loopback()),
        }
    }

    /// The database's name, when one was given; the server takes the user's otherwise.
    pub fn database(&self) -> Option<&str> {
        self.driver.get_dbname()
    }

    /// All hosts, with their ports: `db1:5432,db2:5433`.
    pub fn hosts(&self) -> String {
        let ports = self.driver.get_ports();
        let port = |i: usize| ports.get(i).or(ports.first()).copied().unwrap_or(5432);
        let shown = |(i, host): (usize, &Host)| match host {
            Host::Tcp(name) if name.contains(':') => format!("[{name}]:{}", port(i)),
            Host::Tcp(name) => format!("{name}:{}", port(i)),
            Host::Unix(dir) => format!("{}:{}", dir.display(), port(i)),
        };
        self.driver.get_hosts().iter().enumerate().map(shown).collect::<Vec<_>>().join(",")
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hosts())?;
        if let Some(database) = self.database() {
            write!(f, ", database {database}")?;
        }
        if let Some(user) = self.driver.get_user() {
            write!(f, ", user {user}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("hosts", &self.hosts())
            .field("user", &self.driver.get_user())
            .field("dbname", &self.database())
            .field("sslmode", &self.tls.mode)
            .finish_non_exhaustive()
    }
}

fn take_tls(params: &mut Params) -> Result<TlsSettings, ParseError> {
    let roots = params.take("sslrootcert").map(|root| match root.as_str() {
        "system" => Roots::System,
        path => Roots::File(path.into()),
    });
    // `ssl=true` is what JDBC writes; libpq takes it for `require`.
    let short = params.take("ssl").map(|ssl| match ssl.as_str() {
        "true" => Ok(SslMode::Require),
        _ => Err(ParseError::Invalid { key: "ssl", use_instead: "ssl=true, or sslmode" }),
    });
    let mode = match params.take("sslmode") {
        Some(mode) => mode.parse().map_err(|()| ParseError::Invalid {
            key: "sslmode",
            use_instead: "disable, allow, prefer, require, verify-ca or verify-full",
        })?,
        None if roots == Some(Roots::System) => SslMode::VerifyFull,
        None => short.transpose()?.unwrap_or_default(),
    };
    let weak = match (mode, &roots) {
        (SslMode::VerifyFull, _) => false,
        // Anyone can buy a certificate that leads to a public root.
        (_, Some(Roots::System)) | (SslMode::VerifyCa, None) => true,
        _ => false,
    };
    if weak {
        let use_instead = "sslmode=verify-full, or a file of your own CA in sslrootcert";
        return Err(ParseError::Invalid { key: "sslmode", use_instead });
    }
    let identity = match (params.take("sslcert"), params.take("sslkey")) {
        (Some(cert), Some(key)) => Some(Identity { cert: cert.into(), key: key.into() }),
        (None, None) => None,
        _ => return Err(ParseError::Invalid { key: "sslcert", use_instead: "sslcert and sslkey together" }),
    };
    Ok(TlsSettings { mode, roots, identity })
}

fn milliseconds(text: &str) -> Result<Duration, ParseError> {
    let invalid = ParseError::Invalid { key: "tcp_user_timeout", use_instead: "a number of milliseconds" };
    text.parse().map(Duration::from_millis).map_err(|_| invalid)
}

fn session_attrs(text: &str) -> Result<TargetSessionAttrs, ParseError> {
    Ok(match text {
        "any" => TargetSessionAttrs::Any,
        "read-write" | "primary" => TargetSessionAttrs::ReadWrite,
        "read-only" | "standby" => TargetSessionAttrs::ReadOnly,
        _ => {
            let use_instead = "any, read-write, primary, read-only or standby";
            return Err(ParseError::Invalid { key: "target_session_attrs", use_instead });
        }
    })
}

/// No host means the local server, as for libpq; a bare `hostaddr` is its own name.
fn fill_hosts(params: &mut Params) {
    let local = if Path::new(SOCKET_DIR).is_dir() { SOCKET_DIR } else { "localhost" };
    let hosts = match (params.take("host"), params.take("hostaddr")) {
        (hosts, Some(addresses)) => {
            params.set("hostaddr", addresses.clone());
            hosts.unwrap_or(addresses)
        }
        (Some(hosts), None) => hosts,
        (None, None) => String::new(),
    };
    let filled: Vec<_> = hosts.split(',').map(|host| if host.is_empty() { local } else { host }).collect();
    params.set("host", filled.join(","));
}

fn check_counts(driver: &tokio_postgres::Config) -> Result<(), ParseError> {
    let hosts = driver.get_hosts().len();
    if driver.get_ports().len() > 1 && driver.get_ports().len() != hosts {
        return Err(ParseError::Invalid { key: "port", use_instead: "one port, or one for each host" });
    }
    if !driver.get_hostaddrs().is_empty() && driver.get_hostaddrs().len() != hosts {
        return Err(ParseError::Invalid { key: "hostaddr", use_instead: "one address for each host" });
    }
    Ok(())
}

/// The driver's mode for ours. A Unix socket has no TLS and, as in libpq, needs none.
fn driver_mode(driver: &tokio_postgres::Config, mode: SslMode) -> Result<DriverMode, ParseError> {
    let sockets = driver.get_hosts().iter().filter(|host| matches!(host, Host::Unix(_))).count();
    let direct = driver.get_ssl_negotiation() == SslNegotiation::Direct;
    let all_sockets = sockets == driver.get_hosts().len();
    Ok(match mode {
        _ if all_sockets => DriverMode::Disable,
        SslMode::Disable => DriverMode::Disable,
        SslMode::Allow | SslMode::Prefer if direct => {
            let use_instead = "sslmode=require or stronger beside it";
            return Err(ParseError::Invalid { key: "sslnegotiation", use_instead });
        }
        SslMode::Allow | SslMode::Prefer => DriverMode::Prefer,
        SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull if sockets > 0 => {
            let use_instead = "either Unix sockets or TCP hosts when TLS is required";
            return Err(ParseError::Invalid { key: "host", use_instead });
        }
        SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull => DriverMode::Require,
    })
}
