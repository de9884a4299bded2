//! Work that ended long ago, and a pass of retention over it.

use musterd::metrics::Metrics;
use musterd::objects;
use musterd::store::retention;
use musterd::upkeep::retention::{Config, Gone, Meter, Pass};
use std::time::Duration;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use crate::suite::outputs::ground;
use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::store;
use crate::suite::support::sql::value;

/// Makes this `[retention]` the one that counts, as a worker does when it starts.
pub(crate) async fn declare(client: &Client, toml: &str) {
    let config: Config = toml::from_str(toml).unwrap();
    retention::declare(client, &config.policy()).await.unwrap();
}

/// A batch of `command` that has ended: every third row failed, the others have a result. `more`: further arguments of its submit.
pub(crate) async fn ended(client: &Client, command: &str, rows: i32, more: &str) -> i64 {
    let submit = format!(
        "SELECT musterd.submit_batch('{command}', (SELECT jsonb_agg(jsonb_build_object('n', n)) FROM generate_series(1, {rows}) n){more})"
    );
    let id: i64 = value(client, &submit).await.parse().unwrap();
    let failed = rows / 3;
    client
        .batch_execute(&format!(
            "UPDATE musterd.batches SET next_line = rows + 1 WHERE id = {id};
             INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed, results)
             SELECT {id}, n, gen_random_uuid(), 1, 1, 1, int4multirange(int4range(n, n + 1)), 1, 0, (n * 10)::text
               FROM generate_series(1, {rows}) n WHERE n % 3 <> 0;
             INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed)
             SELECT {id}, 0, gen_random_uuid(), 1, 1, 1, '{{}}', 0, {failed} WHERE {failed} > 0;
             INSERT INTO musterd.failures (batch_id, line, generation, attempt, error_group, error)
             SELECT {id}, n, 1, 3, hashtext('boom'), 'boom ' || n FROM generate_series(1, {rows}) n WHERE n % 3 = 0"
        ))
        .await
        .unwrap();
    let end = format!(
        "SELECT musterd.complete_scope({id}, 1, {rows}, {rows} - {failed}, {failed}, p_recorded => {rows})"
    );
    assert_eq!(value(client, &end).await, "completed");
    id
}

/// Lets a task or batch have begun and ended this many days ago.
pub(crate) async fn age(client: &Client, id: i64, days: i32) {
    client
        .batch_execute(&format!(
            "UPDATE musterd.batches SET summarized_at = now() - interval '{days} days' WHERE id = {id} AND summarized_at IS NOT NULL;
             UPDATE musterd.task_records SET created_at = now() - interval '{days} days',
                    finished_at = CASE WHEN finished_at IS NOT NULL THEN now() - interval '{days} days' END WHERE id = {id}"
        ))
        .await
        .unwrap();
}

/// A top-level task that succeeded this many days ago.
pub(crate) async fn task(client: &Client, command: &str, days: i32, more: &str) -> i64 {
    let enqueue = format!("SELECT musterd.enqueue('{command}', '{{\"secret\": 1}}'{more})");
    let id: i64 = value(client, &enqueue).await.parse().unwrap();
    client
        .batch_execute(&format!(
            "UPDATE musterd.task_records SET state = 'succeeded', result = '7', finished_at = now() WHERE id = {id}"
        ))
        .await
        .unwrap();
    age(client, id, days).await;
    id
}

/// A pass of retention that does not rest and walks through all tasks, with the outputs that `toml` configures.
pub(crate) async fn pass(db: &TestDb, toml: &str) -> Gone {
    let config = ground::config(db, toml);
    let pass = Pass {
        store: store(db),
        objects: objects::Store::open(&config.outputs).unwrap(),
        metrics: Metrics::default(),
        rests: 0.0,
        walk_every: Duration::ZERO,
        stop: CancellationToken::new(),
        meter: Meter::default(),
    };
    pass.run().await.unwrap()
}

/// How many tuples there are of a batch's rows.
pub(crate) async fn tuples(client: &Client, id: i64) -> String {
    let count = |table: &str| format!("(SELECT count(*) FROM musterd.{table} WHERE batch_id = {id})");
    let counts = ["chunks", "outcomes", "failures", "failures_history"].map(count);
    value(client, &format!("SELECT concat_ws(' ', {})", counts.join(", "))).await
}
