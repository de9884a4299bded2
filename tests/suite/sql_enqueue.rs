//! What a task may be when it is enqueued: its name, its time, its keys, and what is refused.

use crate::suite::sql_tasks::seeded;
use crate::suite::support::sql::{refusal, value};

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_insert_is_a_task_and_the_command_names_its_queue() {
    let (_db, client) = seeded().await;
    let insert = |values: &str| {
        format!(
            "INSERT INTO musterd.tasks (command, run_at) VALUES {values} RETURNING queue, state, priority, payload"
        )
    };
    assert_eq!(value(&client, &insert("('derive', now())")).await, "analytics|queued|100|{}");
    assert_eq!(
        value(&client, &insert("('derive', now() + interval '1 h')")).await,
        "analytics|scheduled|100|{}"
    );
    assert_eq!(value(&client, &insert("('nobody_knows_it', now())")).await, "default|queued|100|{}");
    assert!(
        refusal(&client, "SELECT musterd.enqueue('x', delay => '1 h', run_at => now())")
            .await
            .starts_with("22023")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_in_words_and_without_the_payload() {
    let (_db, client) = seeded().await;
    let parent = value(&client, "SELECT musterd.enqueue('derive')").await;
    let child = format!("musterd.spawn('', '\"canary\"', {parent})");
    let task = |arguments: &str| format!("musterd.enqueue('c', '\"canary\"', {arguments})");
    let batch = |arguments: &str| format!("musterd.submit_batch('c', '[\"canary\"]', {arguments})");
    let wrong = [
        ("musterd.enqueue(NULL, '\"canary\"')".to_owned(), "command is null"),
        ("musterd.enqueue('', '\"canary\"')".to_owned(), "command is empty"),
        ("musterd.enqueue('a b', '\"canary\"')".to_owned(), "command \"a b\" cannot be a name"),
        (task("queue => ''"), "queue is empty"),
        (task("max_attempts => 0"), "max_attempts is 0"),
        (task("timeout => '0'"), "timeout is 00:00:00"),
        (task("max_attempts => 1001"), "max_attempts is 1001"),
        (task("timeout => '25 days'"), "timeout is 25 days"),
        (task("priority => 1000001"), "priority is 1000001"),
        (task("priority => -1000001"), "priority is -1000001"),
        (task("on_child_failure => 'x'"), "on_child_failure is \"x\""),
        (task("dedup_key => ''"), "dedup_key is empty"),
        (task("idempotency_key => repeat('k', 256)"), "idempotency_key has 256 characters"),
        ("musterd.spawn('c', '\"canary\"', p_child_key => 'k')".to_owned(), "a child_key needs a parent"),
        (child, "command of a child of task"),
        ("musterd.submit_batch(NULL, '[\"canary\"]')".to_owned(), "command is null"),
        (batch("queue => 'a b'"), "queue \"a b\" cannot be a name"),
        (batch("max_attempts => 0"), "max_attempts is 0"),
        (batch("max_attempts => 1001"), "max_attempts is 1001"),
        (batch("row_timeout => '25 days'"), "row_timeout is 25 days"),
        (batch("priority => 1000001"), "priority is 1000001"),
        (batch("max_failed => -1"), "max_failed is -1"),
        (batch("max_failed_percent => 'NaN'"), "max_failed_percent is NaN"),
        (batch("on_done => ''"), "on_done is empty"),
        (batch("idempotency_key => ''"), "idempotency_key is empty"),
        ("musterd.register_command(NULL)".to_owned(), "name is null"),
        ("musterd.register_command('c', queue => '')".to_owned(), "queue is empty"),
        ("musterd.register_command('c', kind => 'x')".to_owned(), "kind is \"x\""),
        ("musterd.pause_queue(NULL)".to_owned(), "name is null"),
        ("musterd.resume_queue('')".to_owned(), "name is empty"),
        ("musterd.enqueue_after('c')".to_owned(), "after is null"),
        ("musterd.enqueue_after('c', after => '{}')".to_owned(), "after is empty"),
    ];
    for (call, words) in wrong {
        let error = client.simple_query(&format!("SELECT {call}")).await.expect_err(&call);
        let told = error.as_db_error().unwrap();
        assert_eq!((told.code().code(), told.detail()), ("22023", None), "{call}: {told:?}");
        assert!(told.message().starts_with(words), "{call}: {told:?}");
        assert!(!format!("{told:?}").contains("canary"), "{call}: {told:?}");
    }
    let insert = "INSERT INTO musterd.tasks (command, payload) VALUES ('a b', '\"canary\"')";
    assert_eq!(refusal(&client, insert).await, "22023 command \"a b\" cannot be a name");
    // What a handler's reply asks for.
    client.batch_execute(&format!("SELECT guard.claim({parent})")).await.unwrap();
    for (spawn, after, words) in [
        ("'[{\"command\": \"\"}]'", "NULL", format!("22023 command of a child of task {parent} is empty")),
        ("NULL", "'[{\"command\": \"\"}]'", format!("22023 command of an uncle of task {parent} is empty")),
    ] {
        let finish = format!(
            "SELECT musterd.finish_tasks(ARRAY[ROW ({parent}, token, 'succeeded', NULL, NULL, 0, {spawn}, {after})::musterd.task_outcome])
               FROM musterd.task_claims WHERE tasks @> {parent}::bigint"
        );
        assert_eq!(refusal(&client, &finish).await, words);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_one_here_if_it_is_one_in_the_configuration() {
    let (_db, client) = seeded().await;
    let long = ["x".repeat(100), "x".repeat(101)];
    let names = [
        "",
        "a",
        "_",
        "9",
        "a b",
        "a.b:c-d_e",
        "-a",
        ".a",
        ":a",
        "a\n",
        "\na",
        "é",
        "aé",
        "a/b",
        "A",
        "ſ",
        "K",
    ];
    for name in names.into_iter().chain(long.iter().map(String::as_str)) {
        let said = client.query_one("SELECT musterd.is_name($1)", &[&name]).await.unwrap();
        assert_eq!(said.get::<_, bool>(0), musterd::queue::is_valid_name(name), "{name:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_that_has_passed_is_now_and_one_in_a_hundred_years_is_refused() {
    let (_db, client) = seeded().await;
    let past =
        ["run_at => '-infinity'", "run_at => '2001-01-01'", "delay => '-290000 years'", "delay => NULL"];
    for when in past {
        let id = value(&client, &format!("SELECT musterd.enqueue('c', {when})")).await;
        let kept = format!("SELECT state, run_at = created_at FROM musterd.tasks WHERE id = {id}");
        assert_eq!(value(&client, &kept).await, "queued|t", "{when}");
    }
    let later = "SELECT musterd.enqueue('c', delay => '100 years')";
    let id = value(&client, later).await;
    let far = [
        "run_at => 'infinity'",
        "run_at => '20000-01-01'",
        "delay => '290000 years'",
        "delay => '101 years'",
    ];
    for when in far {
        for call in
            [format!("enqueue('c', {when})"), format!("enqueue_after('c', after => '{{{id}}}', {when})")]
        {
            let said = refusal(&client, &format!("SELECT musterd.{call}")).await;
            assert!(
                said.starts_with("22023") && said.ends_with("more than a hundred years ahead"),
                "{call}: {said}"
            );
        }
    }
    let insert = "INSERT INTO musterd.tasks (command, run_at) VALUES ('c', 'infinity')";
    assert!(refusal(&client, insert).await.starts_with("22023 run_at is more than a hundred years ahead"));
    // It replaces what waits, too.
    client.batch_execute("SELECT musterd.enqueue('c', dedup_key => 'k', delay => '1 h')").await.unwrap();
    let replaced =
        "SELECT musterd.enqueue('c', dedup_key => 'k', dedup_replace => true, run_at => '-infinity')";
    let id = value(&client, replaced).await;
    let now =
        format!("SELECT state, run_at > created_at - interval '1 h' FROM musterd.tasks WHERE id = {id}");
    assert_eq!(value(&client, &now).await, "queued|t");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dedup_key_joins_what_waits_for_its_first_claim() {
    let (_db, client) = seeded().await;
    let enqueue = |value: u32, more: &str| {
        format!("SELECT musterd.enqueue('work', '{{\"v\": {value}}}', dedup_key => 'k'{more})")
    };
    let id = value(&client, &enqueue(1, "")).await;
    let task = format!("SELECT payload ->> 'v', state FROM musterd.tasks WHERE id = {id}");
    assert_eq!(value(&client, &enqueue(2, "")).await, id);
    assert_eq!(value(&client, &task).await, "1|queued");
    assert_eq!(value(&client, &enqueue(3, ", dedup_replace => true, delay => '1 h'")).await, id);
    assert_eq!(value(&client, &task).await, "3|scheduled");
    // Claimed once, even if it is to be tried again: a newer request is a task of its own.
    let claim = format!("UPDATE musterd.task_records SET claimed_at = now() WHERE id = {id}");
    client.batch_execute(&claim).await.unwrap();
    let newer = value(&client, &enqueue(4, "")).await;
    assert_ne!(newer, id);
    let same = "SELECT musterd.enqueue('i', '{\"v\": 1}', idempotency_key => 'ik')";
    assert_eq!(value(&client, same).await, value(&client, same).await);
    let other = "SELECT musterd.enqueue('i', '{\"v\": 2}', idempotency_key => 'ik')";
    assert!(refusal(&client, other).await.starts_with("23505"));
}
