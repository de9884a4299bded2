//! Many tasks by one call: one statement, ids in the order of the payloads, all of them or none.

use crate::suite::sql_tasks::seeded;
use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::schedule::Schedule;
use crate::suite::support::sql::{refusal, rows, value};

const NUMBERS: &str = "ARRAY (SELECT to_jsonb(n) FROM generate_series(1, 1000) n)";

/// A call with these arguments.
fn many(arguments: &str) -> String {
    format!("SELECT musterd.enqueue_many({arguments})")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ids_come_in_the_order_of_the_payloads() {
    let (_db, client) = seeded().await;
    let ids = rows(&client, &many(&format!("'derive', {NUMBERS}"))).await;
    let numbers: Vec<i64> = ids.iter().map(|id| id.parse().unwrap()).collect();
    assert!(numbers.len() == 1000 && numbers.is_sorted(), "{numbers:?}");
    let in_order = "SELECT payload FROM musterd.tasks ORDER BY id";
    let payloads: Vec<String> = (1..=1000).map(|n| n.to_string()).collect();
    assert_eq!(rows(&client, in_order).await, payloads);
    let filled = "SELECT DISTINCT queue, state, priority, on_child_failure, run_at = created_at, attempt FROM musterd.tasks";
    assert_eq!(rows(&client, filled).await, ["analytics|queued|100|wait|t|1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_argument_reaches_every_task() {
    let (_db, client) = seeded().await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let call = many(&format!(
        "'derive', ARRAY['1', '[2, 3]', NULL]::jsonb[], queue => 'side', priority => -5, delay => '1 h', max_attempts => 7,
         timeout => '90 s', traceparent => '{trace}', on_child_failure => 'abort_siblings'"
    ));
    assert_eq!(rows(&client, &call).await.len(), 3);
    let kept = "SELECT payload, queue, priority, state, run_at > now() + interval '59 min', max_attempts, timeout, traceparent,
                       on_child_failure, idempotency_key FROM musterd.tasks ORDER BY id";
    let same = format!("side|-5|scheduled|t|7|00:01:30|{trace}|abort_siblings|");
    let expected = ["1", "[2, 3]", "{}"].map(|payload| format!("{payload}|{same}"));
    assert_eq!(rows(&client, kept).await, expected, "a null payload is {{}}, as that of enqueue is");
    let at = many("'derive', ARRAY['1'::jsonb], run_at => '2099-12-24'");
    let id = value(&client, &at).await;
    let due = format!("SELECT state, run_at = '2099-12-24' FROM musterd.tasks WHERE id = {id}");
    assert_eq!(value(&client, &due).await, "scheduled|t");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_queue_is_woken_once_for_all_of_them() {
    let (_db, client) = seeded().await;
    client.batch_execute("BEGIN; SET LOCAL track_functions = 'pl'").await.unwrap();
    rows(&client, &many(&format!("'derive', {NUMBERS}"))).await;
    let calls = "SELECT calls FROM pg_stat_xact_user_functions WHERE schemaname = 'musterd' AND funcname = 'issue_first_tickets'";
    assert_eq!(value(&client, calls).await, "1");
    client.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.tasks").await, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_in_words_and_nothing_is_added() {
    let (_db, client) = seeded().await;
    let task = |arguments: &str| format!("'c', ARRAY['\"canary\"'::jsonb], {arguments}");
    let wrong = [
        ("'c', NULL".to_owned(), "payloads is null"),
        ("'c', ARRAY[ARRAY['\"canary\"'::jsonb]]".to_owned(), "payloads has 2 dimensions, expected one"),
        ("NULL, ARRAY['\"canary\"'::jsonb]".to_owned(), "command is null"),
        ("'a b', ARRAY['\"canary\"'::jsonb]".to_owned(), "command \"a b\" cannot be a name"),
        ("'a b', '{}'".to_owned(), "command \"a b\" cannot be a name"),
        (task("queue => ''"), "queue is empty"),
        (task("max_attempts => 0"), "max_attempts is 0"),
        (task("timeout => '0'"), "timeout is 00:00:00"),
        (task("on_child_failure => 'x'"), "on_child_failure is \"x\""),
        (task("delay => '1 h', run_at => now()"), "give run_at or delay, not both"),
        (task("delay => '290000 years'"), "delay is more than a hundred years ahead"),
        (task("run_at => 'infinity'"), "run_at is more than a hundred years ahead"),
        (task("idempotency_key => ''"), "idempotency_key is empty"),
        (
            task("idempotency_key => repeat('k', 254)"),
            "idempotency_key with the number of a payload has 256 characters",
        ),
    ];
    for (arguments, words) in wrong {
        let call = many(&arguments);
        let error = client.simple_query(&call).await.expect_err(&call);
        let told = error.as_db_error().unwrap();
        assert_eq!((told.code().code(), told.detail()), ("22023", None), "{call}: {told:?}");
        assert!(told.message().starts_with(words), "{call}: {told:?}");
        assert!(!format!("{told:?}").contains("canary"), "{call}: {told:?}");
    }
    assert!(rows(&client, &many("'c', '{}'")).await.is_empty());
    assert!(rows(&client, &many("'c', '{}', idempotency_key => 'k'")).await.is_empty());
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.tasks").await, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_stands_for_the_whole_call() {
    let (_db, client) = seeded().await;
    let call = |payloads: &str, more: &str| {
        many(&format!("'derive', '{payloads}'::jsonb[], idempotency_key => 'k'{more}"))
    };
    let ids = rows(&client, &call("{1,1,2}", "")).await;
    assert_eq!(ids.len(), 3);
    let keys = "SELECT idempotency_key FROM musterd.tasks ORDER BY id";
    assert_eq!(rows(&client, keys).await, ["k/1", "k/2", "k/3"]);
    assert_eq!(rows(&client, &call("{1,1,2}", "")).await, ids);
    // A client that tries again has other times and another trace; the command may have another queue by then.
    client
        .batch_execute("SELECT musterd.register_command('derive', 'elsewhere', 'sql', 'app.derive')")
        .await
        .unwrap();
    assert_eq!(rows(&client, &call("{1,1,2}", ", delay => '1 h', traceparent => 't'")).await, ids);
    let others = [
        ("{1,1}", ""),
        ("{1,1,2,3}", ""),
        ("{1,2,1}", ""),
        ("{1,1,2}", ", priority => 5"),
        ("{1,1,2}", ", queue => 'q'"),
    ];
    for (payloads, more) in others {
        let said = refusal(&client, &call(payloads, more)).await;
        let words = format!("23505 idempotency key \"k\" was used by task {} with a different body", ids[0]);
        assert_eq!(said, words, "{payloads}{more}");
    }
    // One of its keys belongs to another request.
    client.batch_execute("SELECT musterd.enqueue('derive', idempotency_key => 'other/2')").await.unwrap();
    let said = refusal(&client, &many("'derive', '{1,2,3}'::jsonb[], idempotency_key => 'other'")).await;
    assert!(said.starts_with("23505 idempotency key \"other\" was used by task"), "{said}");
    assert_eq!(value(&client, "SELECT count(*) FROM musterd.tasks").await, "4");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_calls_with_one_key_at_once_make_one_set_of_tasks() {
    let db = TestDb::new().await;
    let mut schedule = Schedule::new(&db, &["a", "b"]).await;
    let call = many("'c', '{1,2,3}'::jsonb[], idempotency_key => 'k'");
    schedule.run("a", "BEGIN").await;
    let first = schedule.run("a", &call).await.rows();
    schedule.blocks("b", &call).await;
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.rows(), first);

    let call = many("'c', '{1,2,3}'::jsonb[], idempotency_key => 'k2'");
    schedule.run("a", "BEGIN").await;
    let first = schedule.run("a", &call).await.rows();
    schedule.blocks("b", &call).await;
    schedule.run("a", "ROLLBACK").await;
    let second = schedule.resumes("b").await.rows();
    assert!(second.len() == 3 && second != first, "{first:?} {second:?}");
    assert_eq!(value(&db.client().await, "SELECT count(*) FROM musterd.tasks").await, "6");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_may_and_an_observer_may_not() {
    let db = TestDb::new().await;
    let call = many("'c', '{1,2}'::jsonb[], idempotency_key => 'k'");
    let plain = many("'c', '{1,2}'::jsonb[]");
    let login = db.login("musterd_producer").await;
    let (client, _connection) = connect(&login.url).await;
    for call in [&plain, &call] {
        assert_eq!(rows(&client, call).await.len(), 2);
    }
    let inner = "SELECT musterd.add_tasks_by_key(NULL, NULL, NULL)";
    assert!(refusal(&client, inner).await.starts_with("42501"));
    let login = db.login("musterd_observer").await;
    let (client, _connection) = connect(&login.url).await;
    assert!(refusal(&client, &plain).await.starts_with("42501"));
}
