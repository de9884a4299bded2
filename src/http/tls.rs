//! TLS on the port, if it is asked for: one certificate with its key, read again when the files change.

use super::{Config, HttpError};
use crate::renewed::{Renewed, Stamp};
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use std::{path::Path, sync::Arc};
use tokio_rustls::TlsAcceptor;

/// Makes the TLS of one connection after the other.
pub(super) type Acceptor = Renewed<TlsAcceptor>;

/// `None` when the port is plain.
pub(super) fn acceptor(config: &Config) -> Result<Option<Acceptor>, HttpError> {
    let (Some(cert), Some(key)) = (config.tls_cert_file.clone(), config.tls_key_file.clone()) else {
        return Ok(None);
    };
    let (looked, made) = ((cert.clone(), key.clone()), (cert, key));
    let look = move || vec![Stamp::of_file(&looked.0), Stamp::of_file(&looked.1)];
    Renewed::new("http.tls_cert_file", look, move || make(&made.0, &made.1)).map(Some)
}

fn make(cert: &Path, key: &Path) -> Result<TlsAcceptor, HttpError> {
    let unusable = |path: &Path, reason: String| HttpError::Tls { path: path.to_owned(), reason };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect)
        .map_err(|error| unusable(cert, error.to_string()))?;
    let own = PrivateKeyDer::from_pem_file(key).map_err(|error| unusable(key, error.to_string()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, own));
    let mut config = config.map_err(|error| unusable(cert, error.to_string()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
