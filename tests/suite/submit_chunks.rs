//! What a submission stores: chunks of rows, one line each, without gaps, and the rows that a view makes of them.

use std::io::Cursor;

use musterd::flow::input::{CsvOptions, Format, Limits};
use musterd::flow::submit::{
    Appended, Given, MaxFailed, Meter, Order, SubmitError, Submitted, append, submit,
};
use musterd::json::Json;
use tokio_postgres::Client;

use crate::suite::support::database::TestDb;
use crate::suite::support::worker::ask;

fn order(idempotency_key: Option<&str>) -> Order {
    Order {
        command: "work".into(),
        queue: None,
        context: Json::from_text("{}"),
        priority: None,
        idempotency_key: idempotency_key.map(str::to_owned),
        hold: true,
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

fn given(text: impl Into<String>, format: Format) -> Given<Cursor<String>> {
    Given { source: Cursor::new(text.into()), format, limits: Limits::default(), exported: false }
}

async fn send(client: &mut Client, key: Option<&str>, text: &str) -> Result<Submitted, SubmitError> {
    submit(client, &order(key), given(text, Format::Ndjson), Meter::default()).await
}

async fn add(client: &mut Client, id: i64, text: &str) -> Appended {
    append(client, id, None, given(text, Format::Ndjson), Meter::default()).await.unwrap()
}

fn numbers(first: usize, last: usize) -> String {
    (first..=last).map(|number| format!("{number}\n")).collect()
}

/// First and last lines of the chunks.
async fn chunks(client: &Client, id: i64) -> Vec<(i32, i32)> {
    let sql = "SELECT first_line, last_line FROM musterd.chunks WHERE batch_id = $1 ORDER BY first_line";
    client.query(sql, &[&id]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// The inputs of all lines, by the view.
async fn inputs(client: &Client, id: i64) -> Vec<(i32, String)> {
    let sql = "SELECT line, input::text FROM musterd.rows WHERE batch_id = $1 ORDER BY line";
    client.query(sql, &[&id]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_stored_in_chunks_and_read_as_rows() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let submitted = send(&mut client, None, &numbers(1, 1201)).await.unwrap();
    assert_eq!(submitted.rows, 1201);
    assert_eq!(chunks(&client, submitted.id).await, [(1, 500), (501, 1000), (1001, 1201)]);
    let want: Vec<_> = (1..=1201).map(|line| (line, line.to_string())).collect();
    assert_eq!(inputs(&client, submitted.id).await, want);
}

#[tokio::test(flavor = "multi_thread")]
async fn large_rows_make_small_chunks() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let row = |length: usize| format!("\"{}\"\n", "x".repeat(length));
    let text = [row(200_000), row(200_000), row(1_000_000), row(1), row(1)].concat();
    let id = send(&mut client, None, &text).await.unwrap().id;
    assert_eq!(chunks(&client, id).await, [(1, 2), (3, 3), (4, 5)]);
    assert_eq!(inputs(&client, id).await.len(), 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn appended_rows_follow_without_a_gap() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let id = send(&mut client, None, "1\n2\n").await.unwrap().id;
    assert_eq!(
        add(&mut client, id, &numbers(3, 603)).await,
        Appended { id, added: 601, rows: 603, repeated: false }
    );
    assert_eq!(add(&mut client, id, "").await, Appended { id, added: 0, rows: 603, repeated: false });
    assert_eq!(add(&mut client, id, "604\n").await, Appended { id, added: 1, rows: 604, repeated: false });
    assert_eq!(chunks(&client, id).await, [(1, 2), (3, 502), (503, 603), (604, 604)]);
    let want: Vec<_> = (1..=604).map(|line| (line, line.to_string())).collect();
    assert_eq!(inputs(&client, id).await, want);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_over_several_lines_is_stored_as_one() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let array = given("[\n {\n  \"a\": \"x\\ny\",\r\n  \"b\": [\n1]\n }, 2\n]", Format::JsonArray);
    let id = submit(&mut client, &order(None), array, Meter::default()).await.unwrap().id;
    let csv = given("a\n\"x\ny\"\n\"\r\n\"\n", Format::Csv(CsvOptions::default()));
    append(&mut client, id, None, csv, Meter::default()).await.unwrap();
    let want = [r#"{"a": "x\ny", "b": [1]}"#, "2", r#"{"a": "x\ny"}"#, r#"{"a": "\r\n"}"#];
    let found: Vec<String> = inputs(&client, id).await.into_iter().map(|(_, input)| input).collect();
    assert_eq!(found, want);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_without_rows_has_no_chunk() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let id = send(&mut client, None, "\n").await.unwrap().id;
    assert_eq!(chunks(&client, id).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_request_with_a_key_is_hashed() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    send(&mut client, None, "1\n").await.unwrap();
    let first = send(&mut client, Some("key"), &numbers(1, 600)).await.unwrap();
    let hashed = "SELECT string_agg(coalesce(octet_length(request_hash), 0)::text, ' ' ORDER BY id) FROM musterd.task_records";
    assert_eq!(ask::<String>(&client, hashed).await, "0 32");

    let again = send(&mut client, Some("key"), &numbers(1, 600)).await.unwrap();
    assert_eq!(again, Submitted { id: first.id, rows: 600, repeated: true });
    for other in [numbers(1, 599), numbers(1, 601), numbers(1, 600).replace("7\n8\n", "78\n")] {
        assert!(send(&mut client, Some("key"), &other).await.unwrap_err().to_string().contains("key"));
    }
    let mut order = order(Some("key"));
    order.hold = false;
    let refused = submit(&mut client, &order, given(numbers(1, 600), Format::Ndjson), Meter::default()).await;
    assert!(refused.is_err(), "other options");
}
