//! Asking the SQL API: answers as text, refusals as their SQLSTATE and words.

use tokio_postgres::{Client, SimpleQueryMessage};

/// The rows of the last query of `sql`, values joined by `|`, as psql would print them.
pub(crate) async fn rows(client: &Client, sql: &str) -> Vec<String> {
    let messages = client.simple_query(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    let text = |message: SimpleQueryMessage| match message {
        SimpleQueryMessage::Row(row) => {
            Some((0..row.len()).map(|at| row.get(at).unwrap_or("")).collect::<Vec<_>>().join("|"))
        }
        _ => None,
    };
    messages.into_iter().filter_map(text).collect()
}

/// The only value of `sql`, as text.
pub(crate) async fn value(client: &Client, sql: &str) -> String {
    let rows = rows(client, sql).await;
    assert_eq!(rows.len(), 1, "{sql}: {rows:?}");
    rows.into_iter().next().unwrap()
}

/// Why `sql` was refused: `SQLSTATE message`.
pub(crate) async fn refusal(client: &Client, sql: &str) -> String {
    match client.simple_query(sql).await {
        Ok(answer) => panic!("not refused: {sql}: {answer:?}"),
        Err(error) => {
            let db = error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error:?}"));
            format!("{} {}", db.code().code(), db.message())
        }
    }
}
