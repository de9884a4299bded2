//! S22: a secret appears nowhere. Every secret key gets a canary of its own, then everything that speaks is listened to.

use std::time::Duration;

use musterd::config::SECRET_KEYS;
use rustix::process::Signal;

use crate::suite::support::config::{TestConfig, finish, stderr, stdout};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;
use crate::suite::support::work::Ledger;
use crate::suite::support::{run, services};

const SOON: Duration = Duration::from_secs(60);
/// The first part of every canary; what follows names the key it was put in.
const CANARY: &str = "canary";

/// A role whose password is a canary, so that the database's own key can have one and the worker still works.
async fn role(db: &TestDb) -> String {
    let role = run::unique("canary_role");
    let make = format!("CREATE ROLE \"{role}\" SUPERUSER LOGIN PASSWORD '{CANARY}-database-url'");
    db.client().await.batch_execute(&make).await.unwrap();
    role
}

/// A configuration with a canary in every key that holds a secret.
fn toml(role: &str, address: &str, redis: u16) -> String {
    let nobody = services::free_port();
    format!(
        "[database]\n\
         url = \"postgres://{role}:{CANARY}-database-url@{address}\"\n\
         direct_url = \"postgres://{role}:{CANARY}-database-url@{address}?password={CANARY}-database-url\"\n\
         pooler = \"none\"\n\
         [redis]\nurl = \"redis://:{CANARY}-redis-url@127.0.0.1:{redis}\"\n\
         [liveness]\nbackend = \"redis\"\nheartbeat_interval = \"500ms\"\n\
         [retry]\nmax_attempts = 1\n\
         [outputs]\nstore = \"s3\"\n\
         [outputs.s3]\nbucket = \"b\"\nendpoint = \"http://127.0.0.1:{nobody}\"\nregion = \"r\"\n\
         access_key = \"{CANARY}-outputs-s3-access_key\"\nsecret_key = \"{CANARY}-outputs-s3-secret_key\"\n\
         [handlers.call]\nkind = \"http\"\nurl = \"http://127.0.0.1:{nobody}/\"\nallow_private = true\n\
         bearer_token = \"{CANARY}-bearer_token\"\n\
         secret = \"whsec_Y2FuYXJ5LXdlYmhvb2stc2VjcmV0LWNhbmFyeQ==\"\n\
         [handlers.call.headers]\nX-Api-Key = \"{CANARY}-header\"\n\
         [handlers.write]\nbuiltin = \"echo\"\noutput = \"out.ndjson\"\n"
    )
}

/// What must be found nowhere: the canaries, and the webhook's secret in both of its forms.
const NEVER: [&str; 3] = [CANARY, "Y2FuYXJ5LXdlYmhvb2stc2VjcmV0", "whsec_"];

fn clean(what: &str, text: &str) {
    for secret in NEVER {
        // The role's own name is no secret, and is a canary only by its beginning.
        let text = text.replace("canary_role", "role");
        let found = text.lines().find(|line| line.contains(secret));
        assert_eq!(found, None, "{secret} in {what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_in_every_secret_key_appears_in_nothing_that_speaks() {
    let db = TestDb::new().await;
    let role = role(&db).await;
    let (_, address) = db.url().rsplit_once('@').unwrap();
    // A Redis with another password: what it refuses is told, without what it was offered.
    let redis = services::own_redis();
    let toml = toml(&role, address, redis.address().port());
    for key in SECRET_KEYS {
        let name = key.rsplit_once('.').unwrap().1;
        assert!(toml.contains(&format!("\n{name} = ")), "{key} has no canary here");
    }
    let daemon = Daemon::builder(&db, &toml).log("trace").start();
    daemon.wait_ready().await;
    let ledger = Ledger { client: db.client().await };
    // Rows that call a service which is not there, and rows whose output goes to a store which is not there.
    let called = ledger.submit("call", 2).await;
    ledger.submit("write", 2).await;
    assert_eq!(ledger.end_of(called, SOON).await.state, "failed");
    eventually(SOON, "the upload fails", async || {
        daemon.log().iter().any(|line| line.contains("outputs cannot be uploaded")).then_some(())
    })
    .await;

    let config = daemon.config();
    let mut commands = vec![
        vec!["config", "show"],
        vec!["config", "check"],
        vec!["doctor"],
        vec!["worker", "list"],
        vec!["handler", "list"],
        vec!["batch", "list"],
        vec!["batch", "rows", "1"],
        vec!["why", "batch", "1"],
        vec!["why", "queue", "default"],
        vec!["top"],
        vec!["handler", "test", "call", "--input", "rows.ndjson"],
    ];
    let with_json: Vec<Vec<&str>> =
        commands.iter().map(|args| args.iter().copied().chain(["--json"]).collect()).collect();
    commands.extend(with_json);
    std::fs::write(config.dir().join("rows.ndjson"), "1\n").unwrap();
    for args in &commands {
        let mut command = config.command(args);
        command.env("RUST_LOG", "trace");
        let output = finish(command).await;
        let said = format!("{}{}", stdout(&output), stderr(&output));
        assert!(!said.is_empty(), "{args:?} said nothing");
        clean(&format!("{args:?}"), &said);
    }
    for path in ["/metrics", "/readyz", "/livez", "/nothing"] {
        clean(path, &daemon.get(path).await.unwrap().1);
    }
    let stored = "SELECT concat_ws(' ', (SELECT json_agg(w) FROM musterd.workers w), (SELECT json_agg(r) FROM musterd.results r),
                         (SELECT json_agg(c) FROM musterd.commands c), (SELECT json_agg(t) FROM musterd.tasks t))";
    clean("the tables", ledger.client.query_one(stored, &[]).await.unwrap().get(0));
    daemon.signal(Signal::TERM);
    daemon.signal(Signal::TERM);
    daemon.wait_exit(SOON).await;
    clean("the log", &daemon.log().join("\n"));
}

/// A mistake in a secret is told without the secret.
#[tokio::test(flavor = "multi_thread")]
async fn errors_about_a_secret_do_not_quote_it() {
    let db = TestDb::new().await;
    let (_, address) = db.url().rsplit_once('@').unwrap();
    let wrong = [
        format!("database.url=postgres://u:{CANARY}@127.0.0.1:1/x"),
        format!("database.url=postgres://nobody:{CANARY}@{address}"),
        format!("database.url=host=127.0.0.1 port=1 password={CANARY} user=u dbname=d nonsense={CANARY}"),
        format!("database.url=ftp://u:{CANARY}@host/x"),
        format!("redis.url=redis://:{CANARY}@:::/"),
        format!("outputs.s3.secret_key=[{CANARY}]"),
    ];
    for flag in wrong {
        for args in [vec!["doctor"], vec!["config", "check"], vec!["batch", "list"], vec!["run"]] {
            let config =
                TestConfig::new(&db, "[liveness]\nbackend = \"redis\"\n[http]\nlisten = \"127.0.0.1:0\"");
            // What is right is not started: a worker would not end.
            if args == ["run"] && !flag.starts_with("database") {
                continue;
            }
            let mut command = config.command(&args);
            command.arg("--set").arg(&flag).env("RUST_LOG", "trace");
            let output = finish(command).await;
            clean(&format!("{args:?} {flag}"), &format!("{}{}", stdout(&output), stderr(&output)));
        }
    }
}
