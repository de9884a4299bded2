//! Connections against a real server: what each sslmode believes, and what each failure is called.

use std::error::Error;
use std::net::TcpListener;
use std::num::NonZeroU32;
use std::time::Duration;

use deadpool_postgres::Timeouts;
use musterd::store::connect::{Cause, ConnectError, Plans, SessionSettings, Target};

use crate::suite::connect_server::{PASSWORD, Server, Tls};
use crate::suite::support::database::TestDb;

const ONE: NonZeroU32 = NonZeroU32::MIN;

/// Whether the connection that came about is encrypted, or why none did; the same for those that go through a pooler, which
/// negotiate by themselves.
async fn try_it(target: &Target) -> Result<bool, Cause> {
    let answer = try_one(target).await;
    assert_eq!(try_one(&target.clone().unnamed()).await, answer, "unnamed: {target}");
    answer
}

async fn try_one(target: &Target) -> Result<bool, Cause> {
    let client = match target.open("suite").await {
        Ok(client) => client,
        Err(error) => return Err(cause_of(&error)),
    };
    let sql = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    let encrypted = client.query_one(sql, &[]).await.unwrap().get(0);
    client.close().await;
    Ok(encrypted)
}

/// The cause, after a look at everything that could be printed: advice yes, password no.
fn cause_of(error: &ConnectError) -> Cause {
    let mut said = format!("{error} {error:?}");
    let mut source = error.source();
    while let Some(inner) = source {
        said.push_str(&format!(" {inner} {inner:?}"));
        source = inner.source();
    }
    assert!(!said.contains("canary"), "{said}");
    assert!(error.to_string().contains(error.hint()), "{error}");
    error.cause().unwrap_or_else(|| panic!("no cause: {said}"))
}

#[tokio::test]
async fn each_sslmode_believes_what_libpq_says() {
    let server = Server::start(Tls::On).await;
    let (right, wrong) = (server.file("ca.pem"), server.file("other-ca.pem"));
    let itself = server.file("server.pem");
    let by_name = "host=localhost";
    let by_address = "host=127.0.0.1";
    let table = [
        ("disable", None, by_name, Ok(false)),
        ("disable", Some(&wrong), by_name, Ok(false)),
        ("allow", None, by_name, Ok(true)),
        ("prefer", None, by_name, Ok(true)),
        ("prefer", Some(&wrong), by_name, Err(Cause::CertificateIssuer)),
        ("require", None, by_name, Ok(true)),
        ("require", None, by_address, Ok(true)),
        ("require", Some(&right), by_address, Ok(true)),
        ("require", Some(&wrong), by_name, Err(Cause::CertificateIssuer)),
        ("verify-ca", Some(&right), by_name, Ok(true)),
        ("verify-ca", Some(&right), by_address, Ok(true)),
        ("verify-ca", Some(&wrong), by_name, Err(Cause::CertificateIssuer)),
        ("verify-ca", Some(&wrong), by_address, Err(Cause::CertificateIssuer)),
        ("verify-ca", Some(&itself), by_address, Ok(true)),
        ("verify-full", Some(&right), by_name, Ok(true)),
        ("verify-full", Some(&right), by_address, Err(Cause::CertificateName)),
        ("verify-full", Some(&wrong), by_name, Err(Cause::CertificateIssuer)),
        ("verify-full", Some(&wrong), by_address, Err(Cause::CertificateIssuer)),
        ("verify-full", Some(&itself), by_name, Ok(true)),
        ("verify-full", Some(&itself), by_address, Err(Cause::CertificateName)),
    ];
    for (mode, root, host, expected) in table {
        let root = root.map(|path| format!("sslrootcert={path}")).unwrap_or_default();
        let target = server.target("postgres", &format!("{host} sslmode={mode} {root}"));
        assert_eq!(try_it(&target).await, expected, "sslmode={mode} {root} {host}");
    }
    // The system's store holds no CA of ours: the name may be right, the issuer is a stranger.
    match server.target("postgres", "sslmode=verify-full").open("suite").await {
        Err(ConnectError::Tls(_)) => {}
        Err(error) => assert_eq!(cause_of(&error), Cause::CertificateIssuer),
        Ok(_) => panic!("the system store trusted a certificate made for this test"),
    }
}

#[tokio::test]
async fn a_client_certificate_opens_what_a_password_does_not() {
    let server = Server::start(Tls::On).await;
    server.execute("CREATE ROLE certified LOGIN PASSWORD 'unused'").await;
    let (cert, key) = (server.file("client.pem"), server.file("client.key"));
    let with = format!("sslmode=require sslcert={cert} sslkey={key}");
    assert_eq!(try_it(&server.target("certified", &with)).await, Ok(true));
    assert_eq!(try_it(&server.target("certified", "sslmode=require")).await, Err(Cause::Authentication));
    // Files that are not there, or not what they should be, are told by their path before anything is sent.
    for (more, path) in [
        ("sslmode=verify-ca sslrootcert=/nowhere/ca.pem", "/nowhere/ca.pem"),
        (&format!("sslmode=require sslcert={cert} sslkey={cert}"), cert.as_str()),
        (&format!("sslmode=require sslcert={key} sslkey={key}"), key.as_str()),
    ] {
        let error = server.target("certified", more).open("suite").await.expect_err(more);
        assert!(matches!(error, ConnectError::Tls(_)) && error.to_string().contains(path), "{more}: {error}");
    }
}

#[tokio::test]
async fn a_server_without_tls_is_refused_by_those_who_require_it() {
    let server = Server::start(Tls::Off).await;
    let root = format!("sslrootcert={}", server.file("ca.pem"));
    for mode in ["disable", "allow", "prefer"] {
        assert_eq!(try_it(&server.target("postgres", &format!("sslmode={mode}"))).await, Ok(false), "{mode}");
    }
    for mode in ["require", "verify-ca", "verify-full"] {
        let target = server.target("postgres", &format!("sslmode={mode} {root}"));
        assert_eq!(try_it(&target).await, Err(Cause::TlsRefused), "{mode}");
    }
    let socket = server.file("");
    let by_socket = format!(
        "host={socket} port={} user=postgres password='{PASSWORD}' dbname=postgres sslmode=verify-full",
        server.port
    );
    let by_url = format!(
        "postgres://postgres:{}@{}:{}/postgres",
        PASSWORD.replace(' ', "%20"),
        socket.replace('/', "%2F"),
        server.port
    );
    for socket in [by_socket, by_url] {
        let client = Target::parse(&socket).unwrap().open("suite").await.unwrap();
        client.close().await;
    }
}

#[tokio::test]
async fn every_failure_has_its_name() {
    let server = Server::start(Tls::Off).await;
    server
        .execute(
            "CREATE ROLE crowded LOGIN CONNECTION LIMIT 0 PASSWORD 's3cret canary'; \
             CREATE ROLE stranger LOGIN PASSWORD 's3cret canary'; \
             CREATE DATABASE closed; REVOKE CONNECT ON DATABASE closed FROM PUBLIC; \
             CREATE DATABASE standby; ALTER DATABASE standby SET default_transaction_read_only = on",
        )
        .await;
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_port = silent.local_addr().unwrap().port();
    let table = [
        ("postgres", "password=canary".to_string(), Cause::Authentication),
        ("nobody", String::new(), Cause::Authentication),
        ("postgres", "dbname=missing".to_string(), Cause::NoDatabase),
        ("stranger", "dbname=closed".to_string(), Cause::NotPermitted),
        ("crowded", String::new(), Cause::TooManyConnections),
        ("postgres", "dbname=standby target_session_attrs=read-write".to_string(), Cause::SessionAttrs),
        ("postgres", format!("port={free}"), Cause::Refused),
        ("postgres", format!("port={silent_port} connect_timeout=1"), Cause::Timeout),
    ];
    for (user, more, expected) in table {
        assert_eq!(try_it(&server.target(user, &more)).await, Err(expected), "{user} {more}");
    }
    let elsewhere =
        [("host=db.invalid user=u", Cause::NoSuchHost), ("host=/nowhere user=u", Cause::NoSocket)];
    for (text, expected) in elsewhere {
        assert_eq!(try_it(&Target::parse(text).unwrap()).await, Err(expected), "{text}");
    }
    let no_password = format!("host=127.0.0.1 port={} user=postgres", server.port);
    assert_eq!(try_it(&Target::parse(&no_password).unwrap()).await, Err(Cause::NoPassword));
    // Of several hosts the first that answers is taken.
    let at = format!("host=127.0.0.1,127.0.0.1 port={free},{}", server.port);
    let several = format!("{at} user=postgres password='{PASSWORD}' dbname=postgres");
    assert_eq!(try_it(&Target::parse(&several).unwrap()).await, Ok(false));
}

#[tokio::test]
async fn a_pool_pins_its_sessions_and_replaces_the_dead() {
    let server = Server::start(Tls::Off).await;
    server
        .execute(
            "ALTER ROLE postgres SET default_transaction_isolation = 'serializable'; \
             ALTER ROLE postgres SET search_path = 'evil'; ALTER ROLE postgres SET timezone = 'Asia/Tokyo'; \
             ALTER ROLE postgres SET default_transaction_read_only = on",
        )
        .await;
    let target = server.target("postgres", "");
    let session = SessionSettings {
        statement_timeout: Duration::from_millis(4321),
        lock_timeout: Duration::from_secs(3),
        idle_in_transaction_session_timeout: Duration::ZERO,
        plans: Plans::OnceByIndex,
    };
    let shown = "SELECT concat_ws('|', current_setting('default_transaction_isolation'), \
                 current_setting('search_path'), current_setting('timezone'), \
                 current_setting('default_transaction_read_only'), current_setting('statement_timeout'), \
                 current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout'), \
                 current_setting('jit'), current_setting('plan_cache_mode'), current_setting('enable_seqscan'), \
                 current_setting('application_name'))";
    for (session, expected) in [
        (
            Some(session),
            "read committed|pg_catalog, pg_temp|UTC|off|4321ms|3s|0|off|force_generic_plan|off|pool",
        ),
        (
            Some(SessionSettings { plans: Plans::Usual, ..session }),
            "read committed|pg_catalog, pg_temp|UTC|off|4321ms|3s|0|off|auto|on|pool",
        ),
        (None, "serializable|evil|Asia/Tokyo|on|0|0|0|on|auto|on|pool"),
    ] {
        let pool = target.pool(ONE, "pool", session).unwrap();
        let client = pool.get().await.unwrap();
        let settings: String = client.query_one(shown, &[]).await.unwrap().get(0);
        assert_eq!(settings, expected);
    }

    let pool = target.pool(ONE, "pool", Some(session)).unwrap();
    let client = pool.get().await.unwrap();
    let hurry = Timeouts { wait: Some(Duration::from_millis(10)), ..pool.timeouts() };
    let busy = pool.timeout_get(&hurry).await.expect_err("the only connection is out");
    assert_eq!(cause_of(&target.explain(busy)), Cause::Exhausted);

    let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let killer = server.superuser("postgres").await;
    killer.query_one("SELECT pg_terminate_backend($1)", &[&pid]).await.unwrap();
    // The end of the session reaches us as the answer to whatever is asked next.
    client.query_one("SELECT 1", &[]).await.expect_err("the session was ended");
    while !client.is_closed() {
        tokio::task::yield_now().await;
    }
    drop(client);
    let again: i32 =
        pool.get().await.unwrap().query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    assert_ne!(again, pid);
}

#[tokio::test]
async fn a_pool_fails_in_the_words_of_a_connection() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let target = Target::parse(&format!("host=127.0.0.1 port={free} user=u password=canary")).unwrap();
    let pool = target.pool(ONE, "pool", None).unwrap();
    assert_eq!(cause_of(&target.explain(pool.get().await.expect_err("nobody listens"))), Cause::Refused);
    let timeouts = pool.timeouts();
    let all = [timeouts.wait, timeouts.create, timeouts.recycle];
    assert_eq!(all, [Some(Duration::from_secs(5)); 3]);
    assert!(!format!("{:?}", pool.manager()).contains("canary"));
    pool.close();
    let closed = target.explain(pool.get().await.expect_err("the pool is closed"));
    assert!(matches!(closed, ConnectError::PoolClosed { .. }), "{closed}");
}

#[tokio::test]
async fn what_postgresql_says_is_described_without_the_rows_it_quotes() {
    let db = TestDb::new().await;
    let error = db
        .client()
        .await
        .batch_execute("CREATE TEMP TABLE t (a text UNIQUE); INSERT INTO t VALUES ('canary'), ('canary')")
        .await
        .unwrap_err();
    assert!(format!("{error:?}").contains("canary"), "the driver knows: {error:?}");
    let described = musterd::error_text::describe(&error);
    assert!(described.contains("duplicate key value") && !described.contains("canary"), "{described}");
}

#[tokio::test]
async fn a_pooled_session_that_has_become_read_only_is_replaced() {
    let db = TestDb::new().await;
    let pool = Target::parse(db.url()).unwrap().pool(ONE, "pool", None).unwrap();
    let first = pool.get().await.unwrap();
    first.batch_execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY").await.unwrap();
    drop(first);
    for _ in 0..32 {
        let client = pool.get().await.unwrap();
        if client.batch_execute("CREATE TEMP TABLE t ()").await.is_ok() {
            return;
        }
    }
    panic!("a session that cannot write is handed out again and again");
}
