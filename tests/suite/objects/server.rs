//! A real S3 server in the test's process, over HTTP or TLS, and a proxy that can hold back its answers.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use musterd::objects::{Config, Kind, S3Config, Store};
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{S3Result, s3_error};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::{self, pki_types::PrivateKeyDer};

pub(crate) const BUCKET: &str = "outputs";
pub(crate) const SECRET: &str = "canary-secret";

/// Stops with the value that holds it.
pub(crate) struct S3Server {
    pub(crate) root: TempDir,
    pub(crate) endpoint: String,
    pub(crate) ca_file: PathBuf,
    _tasks: JoinSet<()>,
}

impl S3Server {
    pub(crate) async fn start() -> Self {
        Self::serve(None).await
    }

    /// With a certificate that only the authority in `ca_file` vouches for.
    pub(crate) async fn start_tls() -> Self {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        let server = Self::serve(Some(TlsAcceptor::from(Arc::new(config)))).await;
        std::fs::write(&server.ca_file, made.cert.pem()).unwrap();
        server
    }

    async fn serve(tls: Option<TlsAcceptor>) -> Self {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join(BUCKET)).unwrap();
        let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root.path()).unwrap());
        builder.set_access(Buckets(root.path().to_owned()));
        builder.set_auth(SimpleAuth::from_single("AK", SECRET));
        let (service, listener) = (builder.build(), TcpListener::bind("127.0.0.1:0").await.unwrap());
        let scheme = if tls.is_some() { "https" } else { "http" };
        let endpoint = format!("{scheme}://{}", listener.local_addr().unwrap());
        let ca_file = root.path().join("ca.pem");
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, service, tls));
        Self { root, endpoint, ca_file, _tasks: tasks }
    }

    pub(crate) fn config(&self) -> Config {
        config(&self.endpoint)
    }

    pub(crate) fn store(&self) -> Store {
        open(&self.config())
    }

    /// Uploads the server has begun and neither completed nor aborted, and parts it keeps.
    pub(crate) fn unfinished(&self) -> Vec<String> {
        names(self.root.path()).into_iter().filter(|name| name.starts_with(".upload")).collect()
    }
}

/// Refuses what is signed by nobody, and buckets that were not made, which s3s-fs by itself makes at a first write.
struct Buckets(PathBuf);

#[async_trait::async_trait]
impl S3Access for Buckets {
    async fn check(&self, request: &mut S3AccessContext<'_>) -> S3Result<()> {
        match request.s3_path().get_bucket_name() {
            _ if request.credentials().is_none() => Err(s3_error!(AccessDenied)),
            Some(bucket) if !self.0.join(bucket).is_dir() => Err(s3_error!(NoSuchBucket)),
            _ => Ok(()),
        }
    }
}

pub(crate) fn config(endpoint: &str) -> Config {
    let s3 = S3Config {
        endpoint: endpoint.into(),
        bucket: BUCKET.into(),
        prefix: "pre fix/".into(),
        access_key: "AK".into(),
        secret_key: SECRET.into(),
        ..S3Config::default()
    };
    Config { store: Kind::S3, s3, ..Config::default() }
}

pub(crate) fn open(config: &Config) -> Store {
    Store::open_with(config, |_| None).unwrap()
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

async fn accept(listener: TcpListener, service: S3Service, tls: Option<TlsAcceptor>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (service, tls) = (service.clone(), tls.clone());
        connections.spawn(async move {
            match tls {
                None => talk(stream, service).await,
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        talk(stream, service).await;
                    }
                }
            }
        });
    }
}

async fn talk(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, service: S3Service) {
    // An error here is a client that went away: many of these tests do just that.
    let _ = Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
}

/// Stands before a server and keeps its answers until it is let go.
pub(crate) struct Holder {
    pub(crate) endpoint: String,
    held: Arc<Notify>,
    gate: Arc<Semaphore>,
    _tasks: JoinSet<()>,
}

impl Holder {
    pub(crate) async fn before(server: &S3Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (held, gate) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
        let upstream = server.endpoint.trim_start_matches("http://").parse().unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(relay_all(listener, upstream, held.clone(), gate.clone()));
        Self { endpoint, held, gate, _tasks: tasks }
    }

    /// Waits until the server has answered something, and nobody has heard it.
    pub(crate) async fn holds_an_answer(&self) {
        self.held.notified().await;
    }

    pub(crate) fn let_go(&self) {
        self.gate.close();
    }
}

async fn relay_all(listener: TcpListener, upstream: SocketAddr, held: Arc<Notify>, gate: Arc<Semaphore>) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let server = TcpStream::connect(upstream).await.unwrap();
        connections.spawn(relay(client, server, held.clone(), gate.clone()));
    }
}

async fn relay(client: TcpStream, server: TcpStream, held: Arc<Notify>, gate: Arc<Semaphore>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let requests = async { tokio::io::copy(&mut from_client, &mut to_server).await.map(drop) };
    let answers = async {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let length = from_server.read(&mut buffer).await?;
            if length == 0 {
                return std::io::Result::Ok(());
            }
            held.notify_one();
            // Never has a permit: returns when the gate is closed, which is what opens it for good.
            let _ = gate.acquire().await;
            to_client.write_all(&buffer[..length]).await?;
        }
    };
    let _ = tokio::join!(requests, answers);
}
