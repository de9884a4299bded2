//! The servers of a run: one PostgreSQL, one Redis, one S3, each started by the first test that asks for it.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{LazyLock, OnceLock, mpsc};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use musterd::embedded::{EmbeddedPostgres, Options};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;

use super::redis::{Maker, Redis};
use super::run;

/// This run's PostgreSQL. Tests use a database of their own: see [`super::database::TestDb`].
pub(crate) fn postgres() -> &'static EmbeddedPostgres {
    static POSTGRES: LazyLock<EmbeddedPostgres> = LazyLock::new(|| {
        let options = Options::ephemeral(run::dir().join("postgres"))
            // Nothing here has to survive a crash of the machine.
            .setting("fsync", "off")
            .setting("full_page_writes", "off")
            .setting("max_connections", "400");
        let server = EmbeddedPostgres::start(options).unwrap_or_else(|error| panic!("{error}"));
        run::kill_at_end(server.pid());
        server
    });
    &POSTGRES
}

/// This run's Redis. Tests share it, each below a [`redis_prefix`] of its own.
pub(crate) fn redis() -> &'static Redis {
    static REDIS: LazyLock<Redis> = LazyLock::new(own_redis);
    &REDIS
}

/// A Redis for a test that stops, empties or breaks it. Ends when dropped, or with the run.
pub(crate) fn own_redis() -> Redis {
    Redis::start(Maker::Redis, free_port(), &[])
}

/// A key prefix that no other test has.
pub(crate) fn redis_prefix() -> String {
    run::unique("TEST")
}

/// The S3 server of a run; it checks signatures.
#[derive(Debug)]
pub(crate) struct S3 {
    address: SocketAddr,
}

impl S3 {
    pub(crate) const ACCESS_KEY: &str = "musterd-test";
    pub(crate) const SECRET_KEY: &str = "musterd-test-secret";
    pub(crate) const REGION: &str = "us-east-1";

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Makes a new bucket and gives its name.
    pub(crate) fn new_bucket(&self) -> String {
        let name = run::unique("bucket");
        std::fs::create_dir(run::dir().join("s3").join(&name)).unwrap();
        name
    }

    fn start() -> Self {
        let (report, address) = mpsc::channel();
        // A thread and a runtime of its own: those of the test that happens to ask first end with that test.
        std::thread::Builder::new()
            .name("s3".into())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(serve_s3(report));
            })
            .unwrap();
        Self { address: address.recv().expect("the S3 server starts") }
    }
}

/// This run's S3 server. Tests share it, each with a bucket of its own.
pub(crate) fn s3() -> &'static S3 {
    static SERVER: LazyLock<S3> = LazyLock::new(S3::start);
    &SERVER
}

async fn serve_s3(report: mpsc::Sender<SocketAddr>) {
    let root = run::dir().join("s3");
    std::fs::create_dir(&root).unwrap();
    let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(&root).unwrap());
    service.set_auth(SimpleAuth::from_single(S3::ACCESS_KEY, S3::SECRET_KEY));
    let service = service.build();
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    report.send(listener.local_addr().unwrap()).unwrap();

    let http = Builder::new(TokioExecutor::new());
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        connections.spawn(http.serve_connection(TokioIo::new(stream), service.clone()).into_owned());
        while connections.try_join_next().is_some() {}
    }
}

/// A port nobody listens on, given out once. It lies below the range from which the system takes the ports of
/// outgoing connections, so that none of the hundreds a test run opens can take it before its server does (nor the
/// port ten thousand above it, where a Redis of a cluster speaks to its peers).
pub(crate) fn free_port() -> u16 {
    static NEXT: OnceLock<AtomicU16> = OnceLock::new();
    // Another run on this machine most likely begins elsewhere.
    let next = NEXT.get_or_init(|| AtomicU16::new(u16::try_from(std::process::id() % 500 * 20).unwrap()));
    loop {
        let port = 11_000 + next.fetch_add(1, Ordering::Relaxed) % 10_000;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}
