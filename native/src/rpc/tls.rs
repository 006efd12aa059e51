//! TLS of either side, by rustls.

use std::sync::Arc;

use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// A server's side.
///
/// # Errors
/// What is wrong with one of the PEM texts.
pub fn acceptor(certificate: &[u8], key: &[u8], client_ca: Option<&[u8]>) -> Result<TlsAcceptor, String> {
    let builder = match client_ca {
        None => ServerConfig::builder().with_no_client_auth(),
        Some(ca) => {
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots(ca, "the client CA")?)).build();
            ServerConfig::builder().with_client_cert_verifier(verifier.map_err(|error| error.to_string())?)
        }
    };
    let mut config = builder
        .with_single_cert(chain(certificate, "the certificate")?, private_key(key)?)
        .map_err(|error| format!("certificate and key: {error}"))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// A client's side.
///
/// # Errors
/// What is wrong with one of the PEM texts.
pub fn connector(ca: &[u8], own: Option<(&[u8], &[u8])>) -> Result<TlsConnector, String> {
    let builder = ClientConfig::builder().with_root_certificates(roots(ca, "the CA")?);
    let mut config = match own {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => builder
            .with_client_auth_cert(chain(certificate, "the certificate")?, private_key(key)?)
            .map_err(|error| format!("certificate and key: {error}"))?,
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

/// The name that a server's certificate must have.
///
/// # Errors
/// It is no name and no address.
pub fn server_name(host: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(host.to_owned()).map_err(|_| format!("{host:?} is not a host name"))
}

fn chain(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match chain {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        Ok(_) => Err(format!("{what}: no certificate in it")),
        Err(error) => Err(format!("{what}: {error}")),
    }
}

fn private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| format!("the key: {error}"))
}

fn roots(pem: &[u8], what: &str) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    for certificate in chain(pem, what)? {
        store.add(certificate).map_err(|error| format!("{what}: {error}"))?;
    }
    Ok(store)
}
