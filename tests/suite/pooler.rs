//! A transaction pooler is found out and told of, and what cannot go through it is refused.

use std::time::Duration;

use musterd::store::connect::Target;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use url::Url;

use crate::suite::support::config::{TestConfig, json, stderr, stdout};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::manifests::has;
use crate::suite::support::pgbouncer::{self, PgBouncer};
use crate::suite::support::services;
use crate::suite::support::sql::value;
use crate::suite::support::tasks::{RUNNING_PROCEDURES, becomes};
use crate::suite::support::wait::{SOON, within};
use crate::suite::support::worker::ask;

/// What `doctor` says of the pooler: verdict and finding.
async fn doctor(db: &TestDb, database: &str) -> (String, String) {
    let config = TestConfig::new(db, &format!("[database]\n{database}"));
    let answer = json(&config.musterd(&["doctor", "--json"]).await);
    let checks = answer["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == "pooler").unwrap_or_else(|| panic!("{answer}"));
    (check["verdict"].as_str().unwrap().into(), check["found"].as_str().unwrap().into())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_is_found_out_and_said_by_log_and_doctor() {
    if !has("pgbouncer") {
        return;
    }
    let db = TestDb::new().await;
    let eager = PgBouncer::start("");
    for pooler in [&eager, pgbouncer::shared()] {
        let url = format!("url = {:?}", pooler.url(&db));
        let daemon = Daemon::builder(&db, &format!("[database]\n{url}")).start();
        let told =
            |line: &str| line.contains("leads to a transaction pooler and database.direct_url is not set");
        daemon.wait_for_log(SOON, told).await;
        daemon.wait_ready().await;
        let (verdict, found) = doctor(&db, &url).await;
        assert_eq!(
            (verdict.as_str(), found.as_str()),
            ("warn", "database.url leads to a transaction pooler")
        );

        let both = format!("{url}\ndirect_url = {:?}", db.url());
        let other = Daemon::builder(&db, &format!("[database]\n{both}")).start();
        other.wait_for_log(SOON, |line| line.contains("go past it by database.direct_url")).await;
        assert_eq!(doctor(&db, &both).await.0, "pass");

        // Past the pooler through the pooler.
        let twice = format!("{url}\ndirect_{url}");
        let (verdict, found) = doctor(&db, &twice).await;
        assert_eq!(verdict, "fail", "{found}");
        let refused = TestConfig::new(&db, &format!("[database]\n{twice}")).musterd(&["run"]).await;
        assert_eq!(refused.status.code(), Some(1));
        assert!(
            stderr(&refused).contains("database.direct_url leads to a transaction pooler, too"),
            "{refused:?}"
        );
    }
    // The server itself, told and not told.
    for database in [format!("url = {:?}", db.url()), format!("url = {:?}\npooler = \"none\"", db.url())] {
        let (verdict, found) = doctor(&db, &database).await;
        assert_eq!((verdict.as_str(), found.as_str()), ("pass", "none: database.url is a direct connection"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_does_not_go_through_a_pooler() {
    if !has("pgbouncer") {
        return;
    }
    let db = TestDb::empty().await;
    let url = pgbouncer::shared().url(&db);
    let pooled = TestConfig::new(&db, &format!("[database]\nurl = {url:?}"));
    let refused = pooled.musterd(&["migrate"]).await;
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(stderr(&refused).contains("set database.direct_url"), "{refused:?}");
    let count = "SELECT count(*) FROM pg_namespace WHERE nspname = 'musterd'";
    let client = db.client().await;
    assert_eq!(value(&client, count).await, "0");
    let past = TestConfig::new(&db, &format!("[database]\nurl = {url:?}\ndirect_url = {:?}", db.url()));
    let done = past.musterd(&["migrate"]).await;
    assert!(done.status.success(), "{done:?}");
    assert_eq!(value(&client, count).await, "1");
}

/// What was begun through the pooler is stopped through it; without that the server would go on for an hour.
#[tokio::test(flavor = "multi_thread")]
async fn an_aborted_procedure_is_cancelled_through_a_pooler() {
    if !has("pgbouncer") {
        return;
    }
    let db = TestDb::new().await;
    let client = db.client().await;
    let sleep = "CREATE PROCEDURE public.forever(bigint, jsonb) LANGUAGE sql AS 'SELECT pg_sleep(3600)'";
    client.batch_execute(sleep).await.unwrap();
    let toml = format!(
        "[database]\nurl = {:?}\ndirect_url = {:?}\n\
         [handlers.forever]\nkind = \"sql\"\nprocedure = \"public.forever\"\ntimeout = \"2h\"",
        pgbouncer::shared().url(&db),
        db.url()
    );
    let daemon = Daemon::builder(&db, &toml).start();
    daemon.wait_ready().await;
    let task: i64 = ask(&client, "SELECT musterd.enqueue('forever')").await;
    becomes(&client, RUNNING_PROCEDURES, "1").await;
    assert_eq!(value(&client, &format!("SELECT musterd.abort({task})")).await, "aborted");
    becomes(&client, RUNNING_PROCEDURES, "0").await;
}

/// A pooler that has not passed a request on yet forgets it when whoever asked has gone.
#[tokio::test(flavor = "multi_thread")]
async fn who_asks_for_a_query_to_be_cancelled_stays_until_it_was_heard() {
    let db = TestDb::new().await;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let mut url = Url::parse(db.url()).unwrap();
    url.set_port(Some(listener.local_addr().unwrap().port())).unwrap();
    let target = Target::parse(url.as_str()).unwrap().unnamed();
    let asking = async {
        let client = target.open("test").await.unwrap();
        target.cancel(&client.cancel_token()).await.unwrap();
        client.close().await;
    };
    let pooler = async {
        let (mut first, _) = listener.accept().await.unwrap();
        let mut server = TcpStream::connect(("127.0.0.1", services::postgres().port())).await.unwrap();
        let request = async {
            let (mut second, _) = listener.accept().await.unwrap();
            second.read_exact(&mut [0; 8]).await.unwrap();
            second.write_all(b"N").await.unwrap();
            second.read_exact(&mut [0; 16]).await.unwrap();
            // Nothing more comes, not even the end: there is no event to wait for.
            let more = tokio::time::timeout(Duration::from_secs(1), second.read_u8()).await;
            assert!(more.is_err(), "it did not stay: {more:?}");
        };
        let (_, ()) = tokio::join!(copy_bidirectional(&mut first, &mut server), request);
    };
    within(SOON, async { tokio::join!(asking, pooler) }).await;
}

/// PgBouncer 1.18 dies of a request to cancel whose sender goes while it is passed on. A query that has failed needs none.
#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_survives_commands_whose_procedure_fails() {
    if !has("pgbouncer") {
        return;
    }
    let db = TestDb::new().await;
    let client = db.client().await;
    let raise =
        "CREATE PROCEDURE public.refuse(bigint, jsonb) LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$";
    client.batch_execute(raise).await.unwrap();
    let pooler = PgBouncer::start("");
    let toml = format!(
        "[database]\nurl = {:?}\n[handlers.refuse]\nkind = \"sql\"\nprocedure = \"public.refuse\"",
        pooler.url(&db)
    );
    let config = TestConfig::new(&db, &toml);
    for _ in 0..15 {
        let tried = config.musterd(&["handler", "test", "refuse", "--payload", "{}", "--json"]).await;
        assert!(stdout(&tried).contains("P0001"), "{tried:?}");
        // Says so if it is gone.
        pooler.url(&db);
    }
}
