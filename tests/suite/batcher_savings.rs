//! What the batcher is for, counted: 95 % of the transactions and of the trigger runs are saved, and no update is lost.
//!
//! Writers end the tasks of one job, whose counts a trigger keeps. `make bench-batcher` measures the same at length.

use std::sync::Arc;
use std::time::Duration;

use musterd::flow::batcher::{self, Weight, Writer};
use musterd::metrics::BatcherMetrics;
use tokio::task::JoinSet;
use tokio_postgres::Client;

use crate::suite::support::database::TestDb;
use crate::suite::support::tasks::{number, text};
use crate::suite::support::wait::within;

const TASKS: i64 = 2_000;
const WRITERS: i64 = 20;
/// Much longer than it takes; a batcher that has stopped is found out.
const LIMIT: Duration = Duration::from_secs(120);

/// A run of the trigger is a row with its transaction.
const TABLES: &str = "
    CREATE SCHEMA app;
    CREATE TABLE app.jobs (id int PRIMARY KEY, done int NOT NULL DEFAULT 0);
    CREATE TABLE app.tasks (id bigint PRIMARY KEY, job_id int NOT NULL, status text NOT NULL DEFAULT 'running');
    CREATE TABLE app.runs (xid text NOT NULL DEFAULT pg_current_xact_id()::text);
    CREATE FUNCTION app.count_done() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO app.runs DEFAULT VALUES;
        UPDATE app.jobs j SET done = j.done + c.done
          FROM (SELECT job_id, count(*) FILTER (WHERE status = 'done') AS done FROM changed GROUP BY job_id) c WHERE j.id = c.job_id;
        RETURN NULL;
    END $$;
    CREATE TRIGGER counts AFTER UPDATE ON app.tasks REFERENCING NEW TABLE AS changed
        FOR EACH STATEMENT EXECUTE FUNCTION app.count_done();
    INSERT INTO app.jobs (id) VALUES (1);";

/// One statement and one transaction for all updates of a flush, as the document has it.
struct EndWriter(Arc<Client>);

impl Writer for EndWriter {
    type Update = i64;

    fn weight(_: &i64) -> Weight {
        Weight { updates: 1, room: 1, bytes: 0, waited_for: false }
    }

    async fn write(&mut self, mut tasks: Vec<i64>) -> u64 {
        tasks.sort_unstable();
        const SQL: &str =
            "UPDATE app.tasks t SET status = 'done' FROM unnest($1::bigint[]) AS u (id) WHERE t.id = u.id";
        self.0.execute(SQL, &[&tasks]).await.unwrap()
    }
}

async fn job() -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(TABLES).await.unwrap();
    let tasks = "INSERT INTO app.tasks (id, job_id) SELECT n, 1 FROM generate_series(1, $1::bigint) n";
    client.execute(tasks, &[&TASKS]).await.unwrap();
    (db, client)
}

/// Transactions and trigger runs that the job cost, when every task is counted.
async fn cost(client: &Client) -> (i64, i64) {
    let whole = "SELECT (SELECT count(*) FROM app.tasks WHERE status = 'done'), (SELECT done FROM app.jobs)";
    assert_eq!(text(client, whole).await, format!("{TASKS}|{TASKS}"), "an update was lost, or counted twice");
    (
        number(client, "SELECT count(DISTINCT xid) FROM app.runs").await,
        number(client, "SELECT count(*) FROM app.runs").await,
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn the_batcher_saves_95_percent_of_the_transactions_and_trigger_runs() {
    let (db, client) = job().await;
    let writer = EndWriter(Arc::new(db.client().await));
    let (sender, batcher) = batcher::channel(&batcher::Config::default(), writer, BatcherMetrics::default());
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let sender = sender.clone();
        writers.spawn(async move {
            for task in (1..=TASKS).filter(|task| task % WRITERS == writer) {
                sender.send(task, EndWriter::weight(&task)).await.unwrap();
            }
        });
    }
    drop(sender);
    within(LIMIT, batcher.run()).await;
    within(LIMIT, writers.join_all()).await;
    let (transactions, trigger_runs) = cost(&client).await;

    let (_db, client) = job().await;
    for task in 1..=TASKS {
        client.execute("UPDATE app.tasks SET status = 'done' WHERE id = $1", &[&task]).await.unwrap();
    }
    assert_eq!(cost(&client).await, (TASKS, TASKS), "one of each for every update");
    assert!(transactions * 20 <= TASKS, "{transactions} transactions for {TASKS} updates");
    assert!(trigger_runs * 20 <= TASKS, "{trigger_runs} trigger runs for {TASKS} updates");
}
