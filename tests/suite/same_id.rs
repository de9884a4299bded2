//! An id that is handed out again, as after a failover to a standby that had not seen the first batch, is another batch.

use std::sync::Mutex;

use futures::future::BoxFuture;
use musterd::handler::{Handler, Outcome, RowCall};
use tokio_postgres::Client;

use crate::suite::support::audit::by_hand;
use crate::suite::support::config::TestConfig;
use crate::suite::support::database::TestDb;
use crate::suite::support::embedded::Embedded;
use crate::suite::support::worker::{PATIENCE, QUICK, ask, end_of, retry, succeeded};

/// What a row was called with: input, context, key.
type Seen = (String, String, String);

/// Remembers what it is called with. The first attempt of a row that says so fails.
#[derive(Default)]
struct Remembering(Mutex<Vec<Seen>>);

impl Handler for Remembering {
    fn row<'a>(&'a self, call: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        let seen = (call.input.to_owned(), call.context.text().to_owned(), call.idempotency_key());
        self.0.lock().unwrap().push(seen);
        let outcome =
            if call.input.contains("again") && call.attempt == 1 { retry("again") } else { succeeded() };
        Box::pin(std::future::ready(outcome))
    }
}

/// Submits a batch of a tenant, as the first that ever was.
async fn first_batch(client: &Client, tenant: &str, attempts: i32) -> i64 {
    client.batch_execute("ALTER SEQUENCE musterd.task_records_id_seq RESTART").await.unwrap();
    let submit = format!(
        "SELECT musterd.submit_batch('work', ARRAY(SELECT to_jsonb(CASE n WHEN 2 THEN 'again ' ELSE '' END || '{tenant}' || n)
                                                     FROM generate_series(1, 30) n),
                                     context => jsonb_build_object('tenant', '{tenant}'), max_attempts => {attempts})"
    );
    ask(client, &submit).await
}

/// FINDINGS 14.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_with_an_id_that_was_handed_out_before_gets_nothing_of_the_old_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let handler = std::sync::Arc::new(Remembering::default());
    let daemon = Embedded::start(&TestConfig::new(&db, QUICK), "work", handler.clone(), PATIENCE);
    let a = first_batch(&client, "A", 2).await;
    assert_eq!(end_of(&client, a).await, ("succeeded".into(), 30, 0, 0));
    // The standby that takes over has never seen it.
    let forget = "DELETE FROM musterd.chunks; DELETE FROM musterd.outcomes; DELETE FROM musterd.failures;
                  DELETE FROM musterd.batches; DELETE FROM musterd.task_tickets; DELETE FROM musterd.tasks";
    by_hand(&client, forget).await;
    let before = std::mem::take(&mut *handler.0.lock().unwrap());
    let b = first_batch(&client, "B", 1).await;
    assert_eq!(b, a, "the same id");
    assert_eq!(end_of(&client, b).await, ("failed".into(), 29, 1, 0), "with one attempt a row");
    let after = handler.0.lock().unwrap().clone();
    assert_eq!((before.len(), after.len()), (31, 30));
    assert!(
        before.iter().all(|(input, context, _)| input.contains('A') && context.contains("\"A\"")),
        "{before:?}"
    );
    assert!(
        after.iter().all(|(input, context, _)| input.contains('B') && context.contains("\"B\"")),
        "{after:?}"
    );
    let same_key = after.iter().find(|(.., key)| before.iter().any(|(.., old)| old == key));
    assert_eq!(same_key, None, "a receiver would take it for a repeat");
    assert!(daemon.stop().await.is_clean());
}
