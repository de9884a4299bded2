//! The corpus of JSON texts, asked of the live server: what we say about a text is what PostgreSQL says.

#[path = "../corpus/jsonb.rs"]
mod jsonb;

use jsonb::{Verdict, cases};
use musterd::json::check::{Fault, check};
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

/// The texts of the fuzz target of the check, each of which takes a way of its own through it; and, where `make fuzz` has run, those that it found.
fn fuzzed() -> Vec<String> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let dirs = ["fuzz/corpus/json", "target/fuzz-corpus/json"].map(|dir| root.join(dir));
    let files = dirs.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten();
    files.filter_map(|file| String::from_utf8(std::fs::read(file.unwrap().path()).unwrap()).ok()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn postgresql_says_of_every_text_of_the_fuzzer_what_we_say() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute("CREATE TEMP TABLE kept (value jsonb)").await.unwrap();
    let statement = client.prepare("INSERT INTO kept VALUES ($1::text::jsonb)").await.unwrap();
    let any_nought = takes_every_nought(&client).await;
    let texts = fuzzed();
    assert!(texts.len() >= 20, "{} texts", texts.len());
    let mut wrong = Vec::new();
    for text in &texts {
        let stored = client.execute(&statement, &[text]).await.is_ok();
        let ours = check(text);
        let is_ours_alone = ours.as_ref().is_err_and(|refusal| match refusal.fault {
            Fault::Depth | Fault::Size => true,
            Fault::NumberRange => any_nought && is_nought(&text[refusal.offset..]),
            _ => false,
        });
        if stored != ours.is_ok() && !is_ours_alone {
            wrong.push(format!("{text:?}: {ours:?}, and stored is {stored}"));
        }
    }
    assert!(wrong.is_empty(), "of {} texts: {wrong:#?}", texts.len());
    println!("{} texts of the fuzzer are judged as PostgreSQL judges them", texts.len());
}
