//! libpq's `ssl…` parameters, spoken in rustls.
//!
//! As libpq: `prefer` and `require` do not verify unless a root certificate is given, then they verify the chain
//! as `verify-ca` does; `sslrootcert=system` goes with `verify-full` only. Otherwise than libpq: `allow` is
//! `prefer`, TLS is tried first; `verify-full` without `sslrootcert` uses the system's certificates; nothing is
//! read from `~/.postgresql`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::verifier::{NameCheck, Trust, Verifier};

/// What PostgreSQL calls itself in the handshake; needed for `sslnegotiation=direct`.
const ALPN: &[u8] = b"postgresql";

/// libpq's `sslmode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SslMode {
    /// Never TLS.
    Disable,
    /// As `prefer`.
    Allow,
    /// TLS when the server has it.
    #[default]
    Prefer,
    /// TLS or nothing.
    Require,
    /// TLS, from a server whose certificate leads to the root.
    VerifyCa,
    /// The same, and the certificate names the host.
    VerifyFull,
}

impl FromStr for SslMode {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Ok(match text {
            "disable" => Self::Disable,
            "allow" => Self::Allow,
            "prefer" => Self::Prefer,
            "require" => Self::Require,
            "verify-ca" => Self::VerifyCa,
            "verify-full" => Self::VerifyFull,
            _ => return Err(()),
        })
    }
}

impl fmt::Display for SslMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Disable => "disable",
            Self::Allow => "allow",
            Self::Prefer => "prefer",
            Self::Require => "require",
            Self::VerifyCa => "verify-ca",
            Self::VerifyFull => "verify-full",
        })
    }
}

/// Where trusted certificates come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Roots {
    System,
    File(PathBuf),
}

/// The certificate that this side shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) cert: PathBuf,
    pub(super) key: PathBuf,
}

/// All the `ssl…` parameters of one connection string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TlsSettings {
    pub(super) mode: SslMode,
    pub(super) roots: Option<Roots>,
    pub(super) identity: Option<Identity>,
}

/// The files behind the `ssl…` parameters are not usable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    #[error("reading certificates from {path}: check that the file is there, readable and PEM", path = path.display())]
    Certificates { path: PathBuf, source: pem::Error },
    #[error("no certificate in {path}: it must hold at least one in PEM form", path = path.display())]
    NoCertificates { path: PathBuf },
    #[error("reading the private key {path} (sslkey): it must be an unencrypted PEM key", path = path.display())]
    Key { path: PathBuf, source: pem::Error },
    #[error("a certificate in {path} cannot be a root: give the CA's certificate in sslrootcert", path = path.display())]
    Root { path: PathBuf, source: rustls::Error },
    #[error("the system has no certificates to trust: install ca-certificates or set sslrootcert to a file")]
    NoSystemRoots,
    #[error("sslcert and sslkey do not fit together: the key must be the one of the certificate")]
    Identity { source: rustls::Error },
    #[error("setting up TLS: this build lacks what rustls needs; report it")]
    Setup { source: rustls::Error },
    #[error("setting up certificate checks: set sslrootcert to the CA's certificate")]
    Verifier { source: rustls::client::VerifierBuilderError },
}

impl TlsSettings {
    /// Reads the files and builds the connector. With `disable` it is never asked for a handshake.
    pub(super) fn connector(&self) -> Result<MakeRustlsConnect, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let verifier = Verifier { trust: self.trust(&provider)?, provider: Arc::clone(&provider) };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|source| TlsError::Setup { source })?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match &self.identity {
            Some(identity) => builder
                .with_client_auth_cert(certificates(&identity.cert)?, identity.private_key()?)
                .map_err(|source| TlsError::Identity { source })?,
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(MakeRustlsConnect::new(config))
    }

    /// Those that are read.
    pub(super) fn files(&self) -> impl Iterator<Item = &Path> {
        let root = match &self.roots {
            Some(Roots::File(path)) => Some(path.as_path()),
            _ => None,
        };
        let identity =
            self.identity.iter().flat_map(|identity| [identity.cert.as_path(), identity.key.as_path()]);
        root.into_iter().chain(identity)
    }

    fn trust(&self, provider: &Arc<CryptoProvider>) -> Result<Trust, TlsError> {
        let name = match self.mode {
            SslMode::VerifyFull => NameCheck::Required,
            _ => NameCheck::Skipped,
        };
        let (roots, given) = match (self.mode, &self.roots) {
            (SslMode::Disable, _) => return Ok(Trust::Anyone),
            (_, Some(Roots::File(path))) => file_roots(path)?,
            (SslMode::VerifyFull, _) => (system_roots()?, Vec::new()),
            _ => return Ok(Trust::Anyone),
        };
        let webpki = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
            .build()
            .map_err(|source| TlsError::Verifier { source })?;
        Ok(Trust::Chain { webpki, given, name })
    }
}

impl Identity {
    fn private_key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_file(&self.key)
            .map_err(|source| TlsError::Key { path: self.key.clone(), source })
    }
}

fn certificates(path: &PathBuf) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|source| TlsError::Certificates { path: path.clone(), source })?;
    if found.is_empty() { Err(TlsError::NoCertificates { path: path.clone() }) } else { Ok(found) }
}

fn file_roots(path: &PathBuf) -> Result<(RootCertStore, Vec<CertificateDer<'static>>), TlsError> {
    let given = certificates(path)?;
    let mut roots = RootCertStore::empty();
    for certificate in &given {
        roots.add(certificate.clone()).map_err(|source| TlsError::Root { path: path.clone(), source })?;
    }
    Ok((roots, given))
}

fn system_roots() -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    // One broken file among the system's hundred must not take the others away.
    let (trusted, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if trusted == 0 { Err(TlsError::NoSystemRoots) } else { Ok(roots) }
}
