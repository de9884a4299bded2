//! The corpus of JSON texts, asked of the live server: what we say about a text is what PostgreSQL says.

#[path = "../corpus/jsonb.rs"]
mod jsonb;

use jsonb::{Verdict, cases};
use musterd::flow::input::check;

use crate::suite::support::database::TestDb;

#[tokio::test(flavor = "multi_thread")]
async fn postgresql_says_of_every_text_what_the_corpus_says() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute("CREATE TEMP TABLE kept (value jsonb)").await.unwrap();
    let statement = client.prepare("INSERT INTO kept VALUES ($1::text::jsonb)").await.unwrap();
    let mut wrong = Vec::new();
    for (verdict, text) in cases() {
        let stored = client.execute(&statement, &[&text]).await;
        let short: String = text.chars().take(60).collect();
        if stored.is_ok() == (verdict == Verdict::Refused) {
            wrong.push(format!("{verdict:?} {short}: {stored:?}"));
        }
        if check(&text).is_ok() && stored.is_err() {
            wrong.push(format!("we would take it and PostgreSQL does not: {short}: {stored:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
