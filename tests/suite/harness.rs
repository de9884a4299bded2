//! The harness itself: what tests rely on is tested, too.

use std::time::Duration;

use s3::creds::Credentials;
use s3::{Bucket, Region};

use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::gate::Gate;
use crate::suite::support::proxy::{Fault, FaultProxy};
use crate::suite::support::services::{self, S3};
use crate::suite::support::wait::{SOON, eventually, within};

async fn tables(db: &TestDb) -> i64 {
    let count = "SELECT count(*) FROM pg_class WHERE relname = 'mine'";
    db.client().await.query_one(count, &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_test_has_a_migrated_database_of_its_own() {
    let (one, other) = tokio::join!(TestDb::new(), TestDb::new());
    one.client().await.batch_execute("CREATE TABLE mine (id int)").await.unwrap();
    assert_eq!((tables(&one).await, tables(&other).await), (1, 0));
    let schema = "SELECT count(*) FROM pg_namespace WHERE nspname = 'musterd'";
    assert_eq!(other.client().await.query_one(schema, &[]).await.unwrap().get::<_, i64>(0), 1);
    let empty = TestDb::empty().await;
    assert_eq!(empty.client().await.query_one(schema, &[]).await.unwrap().get::<_, i64>(0), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_goes_with_its_test_even_while_somebody_is_connected() {
    let db = TestDb::new().await;
    let name = db.name().to_owned();
    let (_lingering, _connection) = connect(db.url()).await;
    drop(db);
    let watcher = TestDb::empty().await;
    let client = watcher.client().await;
    eventually(SOON, "the database is dropped", async || {
        let exists = "SELECT 1 FROM pg_database WHERE datname = $1";
        client.query_opt(exists, &[&name]).await.unwrap().is_none().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_answers_and_prefixes_differ() {
    use fred::prelude::{Builder, ClientLike, Config, KeysInterface};
    let client = Builder::from_config(Config::from_url(&services::redis().url()).unwrap()).build().unwrap();
    client.init().await.unwrap();
    let (one, other) = (services::redis_prefix(), services::redis_prefix());
    let _: () = client.set(format!("{one}_key"), "value", None, None, false).await.unwrap();
    assert_eq!(
        client.get::<Option<String>, _>(format!("{one}_key")).await.unwrap().as_deref(),
        Some("value")
    );
    assert_eq!(client.get::<Option<String>, _>(format!("{other}_key")).await.unwrap(), None);
}

#[test]
fn a_redis_of_ones_own_can_be_stopped() {
    let redis = services::own_redis();
    assert_ne!(redis.address(), services::redis().address());
    redis.stop();
    assert!(std::net::TcpStream::connect(redis.address()).is_err());
}

fn bucket(name: &str, secret: &str) -> Box<Bucket> {
    let region = Region::Custom { region: S3::REGION.into(), endpoint: services::s3().endpoint() };
    let credentials = Credentials::new(Some(S3::ACCESS_KEY), Some(secret), None, None, None).unwrap();
    Bucket::new(name, region, credentials).unwrap().with_path_style()
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_keeps_an_object_and_refuses_a_wrong_secret() {
    // As main does: two libraries of ours bring rustls, and neither may choose for the other.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let name = services::s3().new_bucket();
    let ours = bucket(&name, S3::SECRET_KEY);
    ours.put_object("dir/a b+ü.json", b"{}").await.unwrap();
    assert_eq!(ours.get_object("dir/a b+ü.json").await.unwrap().as_slice(), b"{}");
    let stranger = bucket(&name, "guessed");
    let refused = stranger.get_object("dir/a b+ü.json").await.unwrap_err().to_string();
    assert!(refused.contains("403"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gate_shows_who_came_and_lets_them_go_together() {
    let gate = Gate::closed();
    let mut walkers = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let gate = gate.clone();
        walkers.spawn(async move { gate.pass().await });
    }
    within(SOON, gate.entered_by(2)).await;
    assert!(walkers.try_join_next().is_none());
    gate.open();
    within(SOON, walkers.join_all()).await;
    within(SOON, gate.pass()).await;
}

#[tokio::test]
#[should_panic(expected = "nothing after 1ms at")]
async fn what_never_comes_is_a_failure_with_its_place() {
    within(Duration::from_millis(1), std::future::pending::<()>()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_proxy_passes_holds_cuts_and_refuses() {
    let db = TestDb::new().await;
    let postgres = services::postgres();
    let proxy = FaultProxy::start(([127, 0, 0, 1], postgres.port()).into()).await;
    let url = proxy.rewrite(db.url());
    let (client, _connection) = connect(&url).await;
    client.batch_execute("CREATE TABLE done (id int)").await.unwrap();

    // The server does it, the client does not hear of it.
    proxy.set(Fault::HoldReplies);
    let insert = client.batch_execute("INSERT INTO done VALUES (1)");
    tokio::pin!(insert);
    let direct = db.client().await;
    let seen = eventually(SOON, "the insert is committed", async || {
        direct.query_opt("SELECT id FROM done", &[]).await.unwrap()
    });
    tokio::select! {
        _ = &mut insert => panic!("the reply came through"),
        _ = seen => {}
    }
    proxy.set(Fault::None);
    within(SOON, insert).await.unwrap();

    proxy.set(Fault::CutRepliesAfter(3));
    within(SOON, client.batch_execute("SELECT 1")).await.unwrap_err();
    proxy.set(Fault::RefuseNew);
    assert!(tokio_postgres::connect(&url, tokio_postgres::NoTls).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_proxy_delays_swallows_and_resets() {
    let db = TestDb::new().await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    let (client, _connection) = connect(&proxy.rewrite(db.url())).await;
    let delay = Duration::from_millis(50);
    proxy.set(Fault::Latency(delay));
    let begun = std::time::Instant::now();
    client.batch_execute("SELECT 1").await.unwrap();
    assert!(begun.elapsed() >= 2 * delay, "there and back");

    proxy.set(Fault::Blackhole);
    let swallowed = client.batch_execute("CREATE TABLE swallowed (id int)");
    tokio::pin!(swallowed);
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut swallowed).await.is_err());
    proxy.reset_all();
    within(SOON, swallowed).await.unwrap_err();
    let exists = "SELECT to_regclass('swallowed') IS NOT NULL";
    assert!(!db.client().await.query_one(exists, &[]).await.unwrap().get::<_, bool>(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_proxy_cuts_after_a_commit_and_closes_by_half() {
    let db = TestDb::new().await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    let url = proxy.rewrite(db.url());
    let direct = db.client().await;
    let exists = async |table: &str| -> bool {
        let sql = format!("SELECT to_regclass('{table}') IS NOT NULL");
        direct.query_one(&sql, &[]).await.unwrap().get(0)
    };
    let (client, _connection) = connect(&url).await;
    proxy.set(Fault::CutCommits);
    within(SOON, client.batch_execute("SELECT 1")).await.unwrap();
    let transaction = client.batch_execute("BEGIN; CREATE TABLE committed (id int); COMMIT");
    within(SOON, transaction).await.unwrap_err();
    assert!(exists("committed").await, "the server was cut off before it had committed");

    proxy.set(Fault::None);
    let (client, _connection) = connect(&url).await;
    proxy.set(Fault::HalfClose);
    within(SOON, client.batch_execute("CREATE TABLE unheard (id int)")).await.unwrap_err();
    eventually(SOON, "what was sent has arrived", async || exists("unheard").await.then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_is_filled_in_and_what_the_test_says_stays() {
    let db = TestDb::empty().await;
    let config = TestConfig::new(&db, "[http]\nlisten = \"127.0.0.1:1\"\n[queues.default]\nfibers = 3");
    assert_eq!(config.http_port(), 1);
    let table: toml::Table = std::fs::read_to_string(config.file()).unwrap().parse().unwrap();
    assert_eq!(table["database"]["url"].as_str(), Some(db.url()));
    assert_eq!(table["liveness"]["backend"].as_str(), Some("postgres"));
    assert_eq!(table["queues"]["default"]["fibers"].as_integer(), Some(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_binary_is_run_and_its_end_is_seen() {
    let db = TestDb::new().await;
    let daemon = Daemon::builder(&db, "").log("debug").start();
    daemon.signal(rustix::process::Signal::KILL);
    daemon.wait_exit(SOON).await;
}
