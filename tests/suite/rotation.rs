//! Secrets and certificates that change while a worker runs: it goes on with the new ones, without a restart.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::{Arc, Mutex};

use musterd::objects::Key;
use musterd::secret::Secret;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::{self, pki_types::PrivateKeyDer};

use crate::suite::api::caller::Caller;
use crate::suite::connect_server::{Server, Tls};
use crate::suite::handlers::server::{Request, Server as Service};
use crate::suite::objects::server::{S3Server, SECRET, open};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::redis::{Maker, Redis};
use crate::suite::support::redis_kinds::cli;
use crate::suite::support::wait::{SOON, eventually};
use crate::suite::support::work::{End, Ledger};
use crate::suite::support::worker::ask;
use crate::suite::support::{run, services};

/// Writes as secrets are rotated: by a new file in the place of the old one.
fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, path).unwrap();
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_goes_on_with_a_new_password_of_the_database() {
    let db = TestDb::new().await;
    let (login, client) = (db.login("musterd_worker").await, db.client().await);
    let file = run::new_dir("rotation").join("url");
    replace(&file, &login.url);
    let daemon = Daemon::builder(&db, "").env("MUSTERD__DATABASE__URL_FILE", text(&file)).start();
    daemon.wait_ready().await;
    let caller = Caller::of(&daemon);
    caller.get("/v1/queues").await.json(200);

    let name = &login.name;
    client.batch_execute(&format!("ALTER ROLE \"{name}\" PASSWORD 'changed'")).await.unwrap();
    replace(&file, &login.url.replace(":secret@", ":changed@"));
    let ended: i64 = ask(
        &client,
        &format!("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{name}'"),
    )
    .await;
    assert!(ended >= 4, "claims, writes, LISTEN and the heartbeat: {ended}");

    client.execute("SELECT musterd.enqueue('noop')", &[]).await.unwrap();
    eventually(SOON, "a task runs", async || {
        ask::<bool>(&client, "SELECT bool_and(state = 'succeeded') FROM musterd.tasks").await.then_some(())
    })
    .await;
    daemon.wait_ready().await;
    caller.get("/v1/queues").await.json(200);
    let listening = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE usename = '{name}' AND application_name IN ('musterd listen', 'musterd heartbeat')"
    );
    eventually(SOON, "it listens and beats", async || {
        (ask::<i64>(&client, &listening).await == 2).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_goes_on_with_a_new_authority_and_a_new_certificate_of_its_own() {
    let server = Server::start(Tls::On).await;
    server.execute("CREATE ROLE certified LOGIN").await;
    let more = format!(
        "sslmode=verify-full sslrootcert={} sslcert={} sslkey={}",
        server.file("ca.pem"),
        server.file("client.pem"),
        server.file("client.key")
    );
    let pool = server.target("certified", &more).pool(NonZeroU32::MIN, "rotation", None).unwrap();
    drop(pool.get().await.unwrap());
    server.rotate().await;
    let encrypted = eventually(SOON, "a connection with the new certificates", async || {
        let client = pool.get().await.ok()?;
        let sql = "SELECT ssl AND client_dn LIKE '%certified%' FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
        Some(client.query_one(sql, &[]).await.ok()?.get::<_, bool>(0))
    })
    .await;
    assert!(encrypted);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_goes_on_with_a_new_token_and_a_new_key() {
    let service = Service::start(|request: Request| async move { request.all("succeeded") }).await;
    let dir = run::new_dir("rotation");
    let (token, secret) = (dir.join("token"), dir.join("secret"));
    replace(&token, "one\n");
    replace(&secret, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
    let files = format!(
        "bearer_token_file = {:?}\nsecret_file = {:?}\nblock_size = 1\n",
        text(&token),
        text(&secret)
    );
    let db = TestDb::new().await;
    let client = db.client().await;
    let _daemon = Daemon::builder(&db, &service.config(&files)).start();
    let asked = async || {
        let before = service.seen().len();
        client.execute("SELECT musterd.submit_batch('work', ARRAY ['1'::jsonb])", &[]).await.unwrap();
        eventually(SOON, "the service is asked", async || service.seen().get(before).cloned()).await
    };
    assert_eq!(asked().await.headers["authorization"], "Bearer one");
    replace(&token, "two\n");
    replace(&secret, "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA");
    let request = eventually(SOON, "the new token is used", async || {
        Some(asked().await).filter(|request| request.headers["authorization"] == "Bearer two")
    })
    .await;
    let signer =
        musterd::handler::http::Signer::new(&"whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA".into()).unwrap();
    let time = request.headers["webhook-timestamp"].parse().unwrap();
    let expected = signer.sign(&request.headers["webhook-id"], time, &request.text);
    assert_eq!(request.headers["webhook-signature"], expected);
}

/// Speaks TLS before a service that does not, with a certificate that can be replaced.
struct Front {
    port: u16,
    certificate: Arc<Mutex<TlsAcceptor>>,
    connections: Arc<Mutex<JoinSet<()>>>,
    _accepting: JoinSet<()>,
}

impl Front {
    async fn before(service: u16, ca_file: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let newest = Arc::new(Mutex::new(certificate(ca_file)));
        let connections = Arc::new(Mutex::new(JoinSet::new()));
        let (certificate, all) = (Arc::clone(&newest), Arc::clone(&connections));
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = newest.lock().unwrap().clone();
                connections.lock().unwrap().spawn(async move {
                    // A client that does not trust us goes away.
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let mut service = TcpStream::connect(("127.0.0.1", service)).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut stream, &mut service).await;
                });
            }
        });
        Self { port, certificate, connections: all, _accepting: accepting }
    }

    /// Shows another certificate; connections with the one of before end.
    fn rotate(&self, ca_file: &Path) {
        *self.certificate.lock().unwrap() = certificate(ca_file);
        self.connections.lock().unwrap().abort_all();
    }
}

/// A new certificate that no authority but itself vouches for.
fn certificate(ca_file: &Path) -> TlsAcceptor {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
    let config =
        rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
    replace(ca_file, &made.cert.pem());
    TlsAcceptor::from(Arc::new(config))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_goes_on_with_a_new_authority() {
    let service = Service::start(|request: Request| async move { request.all("succeeded") }).await;
    let dir = run::new_dir("rotation");
    let ca_file = dir.join("ca.pem");
    let front = Front::before(service.port, &ca_file).await;
    let handler = format!(
        "[retry]\nbase = \"50ms\"\nmax = \"50ms\"\nmax_attempts = 1000\n[handlers.work]\nkind = \"http\"\n\
         url = \"https://127.0.0.1:{}/work\"\nca_file = {:?}\n",
        front.port,
        text(&ca_file)
    );
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let _daemon = Daemon::builder(&db, &handler).start();
    let batch = ledger.submit("work", 3).await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(3));
    // The service has a new certificate, and the worker's authority is still the old one.
    let new = dir.join("new.pem");
    front.rotate(&new);
    let before = service.seen().len();
    let batch = ledger.submit("work", 3).await;
    let retried = format!("SELECT count(*) FROM musterd.blocks WHERE batch_id = {batch} AND attempt > 1");
    eventually(SOON, "it is tried again", async || (ledger.number(&retried).await > 0).then_some(())).await;
    assert_eq!(service.seen().len(), before, "a certificate that nothing vouches for was believed");
    std::fs::rename(&new, &ca_file).unwrap();
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_goes_on_with_a_new_key() {
    let server = S3Server::start().await;
    let file = run::new_dir("rotation").join("key");
    replace(&file, "not the key");
    let mut config = server.config();
    config.s3.secret_key = Secret::from_file(&file).unwrap();
    let store = open(&config);
    let key = Key::new("one").unwrap();
    store.put_stream(&key, &b"content"[..]).await.unwrap_err();
    replace(&file, SECRET);
    eventually(SOON, "the new key is used", async || store.put_stream(&key, &b"content"[..]).await.ok())
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_goes_on_with_a_new_password_of_redis() {
    let port = services::free_port();
    let _redis = Redis::start(Maker::Redis, port, &[]);
    cli(port, &["CONFIG", "SET", "requirepass", "one"]);
    let file = run::new_dir("rotation").join("url");
    replace(&file, &format!("redis://:one@127.0.0.1:{port}"));
    let db = TestDb::new().await;
    let toml = "[liveness]\nbackend = \"redis\"\nheartbeat_interval = \"1s\"";
    let _daemon = Daemon::builder(&db, toml).env("MUSTERD__REDIS__URL_FILE", text(&file)).start();
    let keys = |password: &str| cli(port, &["--no-auth-warning", "-a", password, "DBSIZE"]);
    eventually(SOON, "it beats", async || (keys("one").trim() != "0").then_some(())).await;
    cli(port, &["--no-auth-warning", "-a", "one", "CONFIG", "SET", "requirepass", "two"]);
    replace(&file, &format!("redis://:two@127.0.0.1:{port}"));
    cli(port, &["--no-auth-warning", "-a", "two", "CLIENT", "KILL", "TYPE", "normal"]);
    cli(port, &["--no-auth-warning", "-a", "two", "FLUSHALL"]);
    eventually(SOON, "it beats again", async || (keys("two").trim() != "0").then_some(())).await;
}
