//! The pages for those who come from another system: their SQL, as it stands there, on a small copy of the tables of that system.

use std::path::Path;

use serde_json::{Value, json as value};
use tokio_postgres::Client;

use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::tasks::{QUICK, becomes, number, text, texts};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The statements of a page, block by block.
fn statements(page: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join("docs").join(page)).unwrap();
    let blocks = text.split("```sql\n").skip(1);
    blocks.map(|rest| rest.split("```").next().unwrap_or_default().to_owned()).collect()
}

async fn copy_of(system: &str) -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    let file = root().join("tests/fixtures/moving").join(format!("{system}.sql"));
    client.batch_execute(&std::fs::read_to_string(file).unwrap()).await.unwrap();
    (db, client)
}

/// Inputs of a batch in their order.
async fn inputs(client: &Client, batch: i64) -> Vec<Value> {
    let sql = "SELECT input FROM musterd.rows WHERE batch_id = $1 ORDER BY line";
    client.query(sql, &[&batch]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn open_batches_and_slow_queries_of_alya_are_copied_and_run() {
    let (db, client) = copy_of("alya").await;
    let [batches, slow_queries, status] = &statements("moving-from-alya.md")[..] else {
        panic!("the page has other statements now");
    };
    let first = texts(&client, batches).await;
    assert_eq!(first.len(), 2, "{first:?}");
    assert_eq!(texts(&client, batches).await, first, "a repeat copies nothing twice");
    let asked = texts(&client, slow_queries).await;
    assert_eq!(asked.len(), 1);
    assert_eq!(texts(&client, slow_queries).await, asked);
    client.batch_execute(status).await.unwrap();

    let open = number(&client, "SELECT batch FROM alya.batch_status WHERE id::text LIKE '%1'").await;
    assert_eq!(
        inputs(&client, open).await,
        [value!({"name": "Ada 3"}), value!({"name": "Ada 4"}), value!({"name": "Ada 5"})]
    );
    let states = "SELECT right(id::text, 1), status, nsuccess FROM alya.batch_status ORDER BY id";
    assert_eq!(texts(&client, states).await, ["1|queued|0", "2|wait|0"]);
    let task = "SELECT command, payload FROM musterd.tasks WHERE idempotency_key LIKE 'alya/%4'";
    assert_eq!(
        text(&client, task).await,
        r#"bank.statement|{"input": {"from": "2023-01-01"}, "context": {"account": 7}}"#
    );

    let python = root().join("docs/handlers/exec_python.py").display().to_string();
    let handler = format!("[handlers.\"bank.greet\"]\nkind = \"exec\"\nargv = [\"python3\", {python:?}]\n");
    let _daemon = Daemon::builder(&db, &format!("{QUICK}{handler}")).start();
    becomes(&client, states, "1|success|3,2|wait|0").await;
    client
        .batch_execute("SELECT musterd.release(batch) FROM alya.batch_status WHERE status = 'wait'")
        .await
        .unwrap();
    becomes(&client, states, "1|success|3,2|success|1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_statbus_are_copied_and_their_handlers_run_as_they_are() {
    let (db, client) = copy_of("statbus").await;
    let [rename, handlers, configuration, tasks] = &statements("moving-from-statbus.md")[..] else {
        panic!("the page has other statements now");
    };
    client.batch_execute(rename).await.unwrap();
    let migrated = TestConfig::new(&db, "").musterd(&["migrate", "--with-worker-schema"]).await;
    assert!(migrated.status.success(), "{migrated:?}");
    client.batch_execute(handlers).await.unwrap();
    let toml = texts(&client, configuration).await.join("\n");
    let copied = texts(&client, tasks).await;
    assert_eq!(copied.len(), 2, "the parent that waited, and the one behind it: {copied:?}");
    assert_eq!(texts(&client, tasks).await, copied, "a repeat copies nothing twice");
    let pending = "SELECT command, state, priority, payload FROM worker.tasks ORDER BY priority";
    assert_eq!(
        texts(&client, pending).await,
        [r#"derive_units|pending|5|{"parts": 2}"#, "derive_reports|pending|9|{}"]
    );

    let _daemon = Daemon::builder(&db, &format!("{QUICK}{toml}")).start();
    becomes(&client, "SELECT state, count(*) FROM worker.tasks GROUP BY 1", "completed|4").await;
    assert_eq!(texts(&client, "SELECT part FROM public.refreshed").await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_blue_banded_bee_are_copied_in_the_order_of_their_scores() {
    let (db, client) = copy_of("blue_banded_bee").await;
    let [pace, jobs, progress] = &statements("moving-from-blue-banded-bee.md")[..] else {
        panic!("the page has other statements now");
    };
    let toml = texts(&client, pace).await.join("\n");
    let limits: Vec<&str> = toml.lines().filter(|line| line.starts_with("rate_limit")).collect();
    assert_eq!(limits, [r#"rate_limit = "5/s""#, r#"rate_limit = "720/h""#, r#"rate_limit = "40/h""#]);
    let checked = TestConfig::new(&db, &toml).musterd(&["config", "check"]).await;
    assert!(checked.status.success(), "{checked:?}");

    let copied = texts(&client, jobs).await;
    assert_eq!(copied.len(), 2, "{copied:?}");
    assert_eq!(texts(&client, jobs).await, copied, "a repeat copies nothing twice");
    client.batch_execute(progress).await.unwrap();
    let counters = "SELECT id, status, total_tasks, pending_tasks, completed_tasks, progress::int FROM bee.job_progress ORDER BY id";
    assert_eq!(texts(&client, counters).await, ["j1|pending|3|3|0|0", "j2|pending|2|2|0|0"]);
    let first = number(&client, "SELECT batch FROM bee.job_progress WHERE id = 'j1'").await;
    let urls: Vec<String> =
        inputs(&client, first).await.iter().map(|row| row["url"].as_str().unwrap().to_owned()).collect();
    assert_eq!(urls, ["https://example.org/", "https://example.org/shop", "https://example.org/deep"]);
    let batches = "SELECT command, queue, priority FROM musterd.batches ORDER BY priority";
    assert_eq!(texts(&client, batches).await, ["crawl:example.org|crawl|0", "crawl:example.net|crawl|60"]);

    // The crawler of the test answers every row; the counters follow.
    let script = r#"argv = ["sh", "-c", '''while IFS= read -r request; do
        line=$(printf "%s" "$request" | sed -n "s/.*\"row\":{\"line\":\([0-9]*\).*/\1/p")
        printf "{\"line\":%s,\"outcome\":\"succeeded\"}\n" "$line"; done''']"#;
    let handler = |domain: &str| {
        format!("[handlers.\"crawl:{domain}\"]\nkind = \"exec\"\nqueue = \"crawl\"\n{script}\n")
    };
    let handlers = format!("{QUICK}[queues.crawl]\n{}{}", handler("example.org"), handler("example.net"));
    let _daemon = Daemon::builder(&db, &handlers).start();
    becomes(&client, counters, "j1|completed|3|0|3|100,j2|completed|2|0|2|100").await;
}
