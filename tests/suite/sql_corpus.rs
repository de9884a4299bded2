//! The corpus of JSON texts, asked of the live server: what we say about a text is what PostgreSQL says.

#[path = "../corpus/jsonb.rs"]
mod jsonb;

use jsonb::{Verdict, cases};
use musterd::flow::input::check;
use tokio_postgres::Client;

use crate::suite::support::database::TestDb;

/// From 16 on PostgreSQL takes a nought with any exponent. We refuse what 14 and 15 refuse, whichever the server is.
pub(crate) async fn takes_every_nought(client: &Client) -> bool {
    let sql = "SELECT current_setting('server_version_num')::int >= 160000";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Whether the number at the beginning of `text` is a nought with an exponent.
pub(crate) fn is_nought(text: &str) -> bool {
    text.split_once(['e', 'E']).is_some_and(|(digits, _)| digits.chars().all(|digit| "-0.".contains(digit)))
}

#[tokio::test(flavor = "multi_thread")]
async fn postgresql_says_of_every_text_what_the_corpus_says() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute("CREATE TEMP TABLE kept (value jsonb)").await.unwrap();
    let statement = client.prepare("INSERT INTO kept VALUES ($1::text::jsonb)").await.unwrap();
    let any_nought = takes_every_nought(&client).await;
    let mut wrong = Vec::new();
    for (verdict, text) in cases() {
        let stored = client.execute(&statement, &[&text]).await;
        let short: String = text.chars().take(60).collect();
        if stored.is_ok() == (verdict == Verdict::Refused) && !(any_nought && is_nought(&text)) {
            wrong.push(format!("{verdict:?} {short}: {stored:?}"));
        }
        if check(&text).is_ok() && stored.is_err() {
            wrong.push(format!("we would take it and PostgreSQL does not: {short}: {stored:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
