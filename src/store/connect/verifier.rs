//! How far a server's certificate is believed: fully, but for its name, or not at all.
//!
//! Handshake signatures are checked in every case: the peer holds the key of the certificate it shows.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, SignatureScheme};

/// Whether the certificate must name the host that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameCheck {
    Required,
    Skipped,
}

/// What is asked of the certificate.
#[derive(Debug)]
pub(super) enum Trust {
    /// Nothing: encryption alone, as libpq's `prefer` and `require` without a root certificate.
    Anyone,
    /// A chain to a trusted root, or the very certificate that was given as the root.
    Chain { webpki: Arc<WebPkiServerVerifier>, given: Vec<CertificateDer<'static>>, name: NameCheck },
}

/// The verifier handed to rustls.
#[derive(Debug)]
pub(super) struct Verifier {
    pub(super) trust: Trust,
    pub(super) provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Trust::Chain { webpki, given, name } = &self.trust else {
            return Ok(ServerCertVerified::assertion());
        };
        let verdict = webpki.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        // PostgreSQL's manual makes a self-signed certificate that is its own root; webpki takes no
        // root for a server, so the very same bytes are believed without a chain. In their time: webpki looks at
        // the dates first.
        if given.iter().any(|root| root == end_entity) {
            if let Err(Error::InvalidCertificate(
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
            )) = verdict
            {
                return verdict;
            }
            if *name == NameCheck::Required {
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
            }
            return Ok(ServerCertVerified::assertion());
        }
        match verdict {
            // The name is looked at last, after chain and dates: nothing else is forgiven with it.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if *name == NameCheck::Skipped => Ok(ServerCertVerified::assertion()),
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, date_time_ymd};
    use rustls::RootCertStore;
    use std::time::Duration;

    /// What is said of a self-signed certificate that is its own root, so many years after 1970.
    fn pinned(is_ca: IsCa, year: u64) -> Result<(), Error> {
        let mut params = CertificateParams::new(["db".to_owned()]).unwrap();
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2030, 1, 1));
        params.is_ca = is_ca;
        let itself = params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(itself.clone()).unwrap();
        let webpki = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let (webpki, given) = (webpki.build().unwrap(), vec![itself.clone()]);
        let verifier =
            Verifier { trust: Trust::Chain { webpki, given, name: NameCheck::Required }, provider };
        let now = UnixTime::since_unix_epoch(Duration::from_secs(year * 366 * 24 * 3600));
        verifier.verify_server_cert(&itself, &[], &"db".try_into().unwrap(), &[], now).map(drop)
    }

    #[test]
    fn a_certificate_that_is_its_own_root_is_believed_in_its_time_only() {
        for is_ca in [IsCa::NoCa, IsCa::Ca(BasicConstraints::Unconstrained)] {
            pinned(is_ca, 55).unwrap();
            for year in [40, 65] {
                let refused = pinned(is_ca, year).unwrap_err();
                assert!(matches!(refused, Error::InvalidCertificate(_)), "{year}: {refused:?}");
            }
        }
    }
}
