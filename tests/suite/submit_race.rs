//! One idempotency key, many submitters: one batch, all its rows or none, whoever is cut off.

use std::io::{Cursor, Read};

use futures::future::join_all;
use musterd::flow::input::{Format, Limits};
use musterd::flow::submit::{Given, MaxFailed, Meter, Order, SubmitError, Submitted, submit};
use musterd::json::Json;
use musterd::store::submissions::SubmissionError;
use tokio::sync::Barrier;

use crate::suite::support::database::TestDb;
use crate::suite::support::worker::{Script, Worker, ask, assert_accounts_balance, end_of};

fn order(key: &str) -> Order {
    Order {
        command: "work".into(),
        queue: None,
        context: Json::from_text("{}"),
        priority: None,
        idempotency_key: Some(key.into()),
        hold: false,
        max_attempts: None,
        row_timeout: None,
        max_failed: MaxFailed::Rows(0),
        on_done: None,
        on_budget: None,
        canary: None,
        keep: None,
        traceparent: None,
    }
}

/// Rows as NDJSON; `first` makes one body different from another.
fn body(first: u32, rows: u32) -> impl Read + Send + 'static {
    Cursor::new((first..first + rows).map(|n| format!("{{\"n\":{n}}}\n")).collect::<String>())
}

async fn send(db: &TestDb, key: &str, body: impl Read + Send + 'static) -> Result<Submitted, SubmitError> {
    let mut client = db.client().await;
    let given = Given { source: body, format: Format::Ndjson, limits: Limits::default(), exported: false };
    submit(&mut client, &order(key), given, Meter::default()).await
}

const BATCHES: &str = "SELECT count(*) FROM musterd.batches";
const STRAY_ROWS: &str = "SELECT count(*) FROM musterd.rows i
    WHERE NOT EXISTS (SELECT FROM musterd.batches b WHERE b.id = i.batch_id AND i.line <= b.rows)";

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_submitters_with_one_key_make_one_batch() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let together = Barrier::new(64);
    let one = async |number: u32| {
        together.wait().await;
        // Every eighth has other rows under the same key.
        let sent = send(&db, "once", body(if number.is_multiple_of(8) { 9 } else { 1 }, 500));
        if number % 4 == 1 {
            // Cut off somewhere on the way.
            let limit = std::time::Duration::from_millis(u64::from(number));
            return tokio::time::timeout(limit, sent).await.ok();
        }
        Some(sent.await)
    };
    let answers = join_all((0..64).map(one)).await;
    assert_eq!(ask::<i64>(&client, BATCHES).await, 1);
    assert_eq!(ask::<i64>(&client, STRAY_ROWS).await, 0);
    let id: i64 = ask(&client, "SELECT id FROM musterd.batches").await;
    let first: String = ask(&client, "SELECT min((input ->> 'n')::int)::text FROM musterd.rows").await;
    let winner_is_usual = first == "1";
    let (mut accepted, mut made) = (0, 0);
    for (number, answer) in answers.into_iter().enumerate() {
        let same_body = (number % 8 != 0) == winner_is_usual;
        match answer {
            None => {}
            Some(Ok(submitted)) => {
                assert!(same_body, "{number}");
                assert_eq!((submitted.id, submitted.rows), (id, 500));
                accepted += 1;
                made += usize::from(!submitted.repeated);
            }
            Some(Err(SubmitError::Store(
                SubmissionError::Conflict { .. } | SubmissionError::Refused { .. },
            ))) => assert!(!same_body, "{number}"),
            Some(Err(error)) => panic!("{number}: {error}"),
        }
    }
    assert!(accepted > 0 && made <= 1, "{accepted} {made}");

    let script = Script::succeeding();
    let _worker = Worker::start(&db, "", &[("work", script.clone())]).await;
    assert_eq!(end_of(&client, id).await, ("succeeded".into(), 500, 0, 0));
    assert_eq!(script.calls().len(), 500);
    assert_accounts_balance(&client).await;
    // Long after its end the key still stands for it.
    let late = send(&db, "once", body(if winner_is_usual { 1 } else { 9 }, 500)).await.unwrap();
    assert_eq!((late.id, late.repeated), (id, true));
}

/// Gives some rows and then fails, as a broken pipe would.
struct Breaking(Cursor<Vec<u8>>);

impl Read for Breaking {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self.0.read(buffer)? {
            0 => Err(std::io::ErrorKind::ConnectionReset.into()),
            size => Ok(size),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_submission_that_breaks_off_leaves_nothing_and_its_key_free() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut some = Vec::new();
    body(1, 100_000).read_to_end(&mut some).unwrap();
    some.truncate(some.len() / 2);
    for bad in [b"{\"n\":\"\\u0000\"}\n".to_vec(), b"{\"n\":1e400000}\n".to_vec(), b"{\"n\"\n".to_vec()] {
        let mut bytes = b"{\"n\":1}\n{\"n\":2}\n".to_vec();
        bytes.extend(bad);
        let refused = send(&db, "key", Cursor::new(bytes)).await.unwrap_err().to_string();
        assert!(refused.contains('3'), "names the line: {refused}");
    }
    send(&db, "key", Breaking(Cursor::new(some))).await.unwrap_err();
    assert_eq!(ask::<i64>(&client, BATCHES).await, 0);
    assert_eq!(ask::<i64>(&client, "SELECT count(*) FROM musterd.rows").await, 0);
    assert!(!send(&db, "key", body(1, 10)).await.unwrap().repeated);
}
