//! `musterd doctor`: each thing that can be missing is told from the others, with what to do about it.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;

use musterd::embedded::{EmbeddedPostgres, Options};
use serde_json::Value;

use crate::suite::support::config::{TestConfig, json, stderr, stdout};
use crate::suite::support::database::TestDb;
use crate::suite::support::manifests::has;
use crate::suite::support::redis::{Maker, Redis};
use crate::suite::support::run;
use crate::suite::support::services::{self, S3};

/// One finding: verdict, what was found, what to do.
async fn finding(config: &TestConfig, name: &str) -> (String, String, String) {
    let output = config.musterd(&["doctor", "--json"]).await;
    let (shown, answer) = (format!("{}{}", stdout(&output), stderr(&output)), json(&output));
    assert!(!shown.contains("canary"), "{shown}");
    let checks = answer["checks"].as_array().unwrap();
    let check =
        checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("{name}: {answer}"));
    let failed = checks.iter().any(|check| check["verdict"] == "fail");
    assert_eq!(output.status.code(), Some(i32::from(failed)), "{answer}");
    let text = |key: &str| check[key].as_str().unwrap_or_default().to_owned();
    (text("verdict"), text("found"), text("advice"))
}

async fn fails(config: &TestConfig, name: &str, found: &str, advice: &str) {
    let (verdict, what, what_to_do) = finding(config, name).await;
    assert_eq!(verdict, "fail", "{name}: {what}");
    assert!(what.contains(found) && what_to_do.contains(advice), "{name}: {what} | {what_to_do}");
    assert!(!what.contains(&what_to_do), "said twice: {what} | {what_to_do}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warning_fails_only_when_asked_to() {
    // The server of the tests does not sync, which costs durability: a warning.
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    let output = config.musterd(&["doctor"]).await;
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let line =
        |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).expect(name).to_owned();
    for name in [
        "configuration",
        "PostgreSQL",
        "schema",
        "rights",
        "clock",
        "pooler",
        "Redis",
        "outputs",
        "handler noop",
    ] {
        assert!(line(name).contains(" pass "), "{}", line(name));
    }
    assert!(line("fsync").contains(" warn ") && line("fsync").contains("turn it on"), "{text}");
    assert_eq!(config.musterd(&["doctor", "--strict"]).await.status.code(), Some(1));
    assert_eq!(json(&config.musterd(&["doctor", "--json"]).await)["verdict"], Value::from("warn"));
}

/// On a server with which nothing else is wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_to_another_machine_that_is_not_verified_fails_when_asked_to() {
    let server = tokio::task::spawn_blocking(|| {
        let server =
            EmbeddedPostgres::start(Options::ephemeral(run::new_dir("strict").join("postgres"))).unwrap();
        run::kill_at_end(server.pid());
        server
    });
    let server = server.await.unwrap();
    let db = TestDb::empty().await;
    // The same server by another way to write its address, which is none of the names of this machine.
    let (here, elsewhere) = (server.url().to_owned(), server.url().replace("127.0.0.1", "127.1"));
    assert_ne!(here, elsewhere);
    let at = |url: &str| TestConfig::new(&db, &format!("[database]\nurl = {url:?}"));
    let (here, elsewhere) = (at(&here), at(&elsewhere));
    let migrated = here.musterd(&["migrate"]).await;
    assert!(migrated.status.success(), "{}", stderr(&migrated));
    let code = async |config: &TestConfig, args: &[&str]| {
        let output = config.musterd(args).await;
        (output.status.code(), format!("{}{}", stdout(&output), stderr(&output)))
    };
    let (strict, text) = code(&here, &["doctor", "--strict"]).await;
    assert_eq!(strict, Some(0), "{text}");
    let (usual, text) = code(&elsewhere, &["doctor"]).await;
    assert_eq!(usual, Some(0), "{text}");
    let line = text.lines().find(|line| line.trim_start().starts_with("database.url")).expect(&text);
    assert!(line.contains(" warn ") && line.contains("sslmode=verify-full"), "{text}");
    assert_eq!(text.matches(" warn ").count(), 1, "{text}");
    let (strict, text) = code(&elsewhere, &["doctor", "--strict"]).await;
    assert_eq!(strict, Some(1), "{text}");
}

fn with_redis(db: &TestDb, url: &str) -> TestConfig {
    TestConfig::new(db, &format!("[liveness]\nbackend = \"redis\"\n[redis]\nurl = \"{url}\""))
}

/// Gives a Redis a password.
fn lock(redis: &Redis) {
    let mut stream = std::net::TcpStream::connect(redis.address()).unwrap();
    stream.write_all(b"CONFIG SET requirepass right-canary\r\n").unwrap();
    let mut answer = [0; 3];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+OK");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_redis_is_told_from_a_wrong_and_from_a_missing_password() {
    let db = TestDb::new().await;
    let redis = services::own_redis();
    let address = redis.address();
    let open = finding(&with_redis(&db, &format!("redis://{address}")), "Redis").await;
    assert!(open.0 == "pass" && open.1.contains(&address.to_string()), "{open:?}");

    lock(&redis);
    let right = finding(&with_redis(&db, &format!("redis://:right-canary@{address}")), "Redis").await;
    assert_eq!(right.0, "pass", "{right:?}");
    let wrong = with_redis(&db, &format!("redis://:wrong-canary@{address}"));
    fails(&wrong, "Redis", "refused the user or password", "fix the user and password").await;
    let none = with_redis(&db, &format!("redis://{address}"));
    fails(&none, "Redis", "asks for a password", "add the password").await;

    redis.stop();
    fails(&wrong, "Redis", "cannot be reached: Connection refused", "start Redis").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_and_valkey_are_called_by_their_names() {
    let db = TestDb::new().await;
    let named = async |redis: &Redis, name: &str| {
        let found = finding(&with_redis(&db, &redis.url()), "Redis").await;
        assert!(found.0 == "pass" && found.1.starts_with(name), "{found:?}");
    };
    named(services::redis(), "Redis ").await;
    if has("valkey") {
        // Its `redis_version` is that of the Redis it once was, 7.2.4.
        named(&Redis::start(Maker::Valkey, services::free_port(), &[]), "Valkey 9.").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_trouble_with_postgresql_has_its_own_words() {
    let empty = TestDb::empty().await;
    fails(&TestConfig::new(&empty, ""), "schema", "no musterd schema", "run `musterd migrate`").await;

    let database = |url: &str| TestConfig::new(&empty, &format!("[database]\nurl = \"{url}\""));
    let (user, rest) = empty.url().rsplit_once(':').unwrap();
    let (head, place) = (user, rest);
    let (scheme_and_user, address) = head.rsplit_once('@').unwrap();
    let (user, _password) = scheme_and_user.rsplit_once(':').unwrap();
    let wrong = database(&format!("{user}:wrong-canary@{address}:{place}"));
    fails(&wrong, "PostgreSQL", "password authentication failed", "check user, password").await;
    let none = database(&format!("{user}@{address}:{place}"));
    fails(&none, "PostgreSQL", "asks for a password and there is none", "add the password").await;
    let gone = database(&format!("{user}:canary@127.0.0.1:1/x"));
    fails(&gone, "PostgreSQL", "nothing listens there", "start the server").await;
    let (_, other) = place.split_once('/').unwrap();
    let missing = database(&empty.url().replace(other, "nowhere"));
    fails(&missing, "PostgreSQL", "does not exist", "createdb").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_rights_are_named() {
    let db = TestDb::new().await;
    let role = run::unique("reader");
    let make =
        format!("CREATE ROLE \"{role}\" LOGIN PASSWORD 'canary'; GRANT musterd_observer TO \"{role}\"");
    db.client().await.batch_execute(&make).await.unwrap();
    let (_, address) = db.url().rsplit_once('@').unwrap();
    let url = format!("postgres://{role}:canary@{address}");
    let config = TestConfig::new(&db, &format!("[database]\nurl = \"{url}\""));
    fails(&config, "rights", "may not insert on musterd.", "GRANT musterd_worker").await;
    db.client().await.batch_execute(&format!("GRANT musterd_worker TO \"{role}\"")).await.unwrap();
    let rights = finding(&config, "rights").await;
    assert_eq!(rights.0, "pass", "{rights:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_tokens_that_cannot_be_read_are_found() {
    let db = TestDb::new().await;
    let file = run::new_dir("doctor").join("tokens");
    let config =
        TestConfig::new(&db, &format!("[http]\nwrite_tokens_file = {:?}", file.display().to_string()));
    fails(&config, "http.write_tokens_file", "No such file", "make it readable").await;
    std::fs::write(&file, "").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::write(&file, b"alice:\xff-canary-0123456789abcdef").unwrap();
    fails(&config, "http.write_tokens_file", "UTF-8", "make it readable").await;
    std::fs::write(&file, "x".repeat((1 << 20) + 1)).unwrap();
    fails(&config, "http.write_tokens_file", "more than 1048576 bytes", "at most 1 MiB").await;
    std::fs::write(&file, "alice:canary-0123456789abcdef").unwrap();
    let (verdict, found, _) = finding(&config, "http.write_tokens_file").await;
    assert_eq!((verdict.as_str(), found.as_str()), ("pass", "1 tokens"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_cannot_be_written_is_told_with_the_reason() {
    let db = TestDb::new().await;
    let in_the_way = run::new_dir("doctor").join("file");
    std::fs::write(&in_the_way, "").unwrap();
    let file = TestConfig::new(&db, &format!("[outputs]\ndir = \"{}/outputs\"", in_the_way.display()));
    fails(&file, "outputs", "Not a directory", "fix [outputs]").await;

    let bucket = services::s3().new_bucket();
    let s3 = |bucket: &str, secret: &str| TestConfig::new(&db, &s3_outputs(bucket, secret));
    let right = finding(&s3(&bucket, S3::SECRET_KEY), "outputs").await;
    assert_eq!(right.0, "pass", "{right:?}");
    let wrong = s3(&bucket, "wrong-canary");
    fails(&wrong, "outputs", "does not accept the credentials", "correct outputs.s3.access_key").await;
}

fn s3_outputs(bucket: &str, secret: &str) -> String {
    let (endpoint, key) = (services::s3().endpoint(), S3::ACCESS_KEY);
    format!(
        "[outputs]\nstore = \"s3\"\n[outputs.s3]\nendpoint = \"{endpoint}\"\nbucket = \"{bucket}\"\n\
         access_key = \"{key}\"\nsecret_key = \"{secret}\""
    )
}

/// Every relation of the database, with the number of its rows.
async fn contents(db: &TestDb) -> Vec<String> {
    let sql = "SELECT c.oid::regclass::text || ' ' || CASE WHEN c.relkind = 'r' THEN
                      (xpath('/row/n/text()', query_to_xml('SELECT count(*) AS n FROM ' || c.oid::regclass, false, true, '')))[1]::text
                      ELSE c.relkind::text END
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') ORDER BY 1";
    db.client().await.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

fn files(dir: &std::path::Path) -> Vec<std::ffi::OsString> {
    std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().file_name()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn it_leaves_nothing_behind() {
    let redis = services::own_redis();
    let bucket = services::s3().new_bucket();
    let dir = run::new_dir("doctor");
    let everywhere = format!(
        "[liveness]\nbackend = \"redis\"\n[redis]\nurl = \"redis://{}\"\n{}",
        redis.address(),
        s3_outputs(&bucket, S3::SECRET_KEY)
    );
    let in_files = format!("[outputs]\ndir = \"{}\"", dir.join("not-there-yet").display());
    for db in [TestDb::new().await, TestDb::empty().await] {
        let before = contents(&db).await;
        for toml in [&everywhere, &in_files] {
            let outputs = finding(&TestConfig::new(&db, toml), "outputs").await;
            assert!(outputs.0 == "pass" && outputs.1.contains("wrote, read and removed"), "{outputs:?}");
        }
        assert_eq!(contents(&db).await, before);
    }
    assert_eq!(files(&dir), [""; 0]);
    assert_eq!(files(&run::dir().join("s3").join(&bucket)), [""; 0]);
    let mut stream = std::net::TcpStream::connect(redis.address()).unwrap();
    stream.write_all(b"DBSIZE\r\n").unwrap();
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b":0\r\n", "keys are left in Redis");
}
