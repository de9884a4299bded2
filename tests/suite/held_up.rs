//! S25 and L10: one thing that cannot go on, for whatever reason, holds up nothing but itself, and goes on when it can.

use std::time::Duration;

use tokio_postgres::Client;

use crate::suite::batch_cli::json_of;
use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::tasks::{QUICK, SOON, becomes, end_of, number, text, texts};
use crate::suite::support::work::{End, Ledger};

const SHORT: &str = "[liveness]\nheartbeat_interval = \"500ms\"\nheartbeat_ttl = \"4s\"\nrecovery_interval = \"1s\"\nrows_ttl = \"1m\"\n\
    settle = \"200ms\"\nreconcile_interval = \"500ms\"\n";

/// Makes every update of one record (of a table with this id column) fail, or of all when `id` is 0: as a trigger of another
/// application does.
async fn refuse(client: &Client, table: &str, column: &str, id: i64) {
    let sql = format!(
        "CREATE OR REPLACE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             IF {id} IN (0, OLD.{column}) THEN RAISE EXCEPTION 'not this one'; END IF;
             RETURN NEW;
         END $$;
         CREATE OR REPLACE TRIGGER refuse BEFORE UPDATE ON musterd.{table} FOR EACH ROW EXECUTE FUNCTION public.refuse()"
    );
    client.batch_execute(&sql).await.unwrap();
}

async fn refuse_no_more(client: &Client, table: &str) {
    client.batch_execute(&format!("DROP TRIGGER refuse ON musterd.{table}")).await.unwrap();
}

/// Makes a function of ours fail for one batch or scope: whatever is wrong with what is stored of it, asking about it fails.
async fn spoil(client: &Client, signature: &str, body: &str) {
    client
        .batch_execute(&format!(
            "CREATE OR REPLACE FUNCTION {signature} LANGUAGE plpgsql STABLE AS $$ BEGIN {body}; END $$"
        ))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_record_takes_no_outcome_waits_alone_and_keeps_its_outcome() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let client = &ledger.client;
    let stuck = number(client, "SELECT musterd.enqueue('noop', run_at => now() + interval '1 hour')").await;
    refuse(client, "task_records", "id", stuck).await;
    client.batch_execute("ALTER TABLE musterd.task_records DISABLE TRIGGER refuse").await.unwrap();
    text(client, &format!("SELECT musterd.retry_task({stuck})")).await;
    client.batch_execute("ALTER TABLE musterd.task_records ENABLE TRIGGER refuse").await.unwrap();
    let daemon = Daemon::builder(&db, QUICK).start();
    daemon.wait_for_log(SOON, |line| line.contains("is put aside") && line.contains("not this one")).await;
    for _ in 0..3 {
        let other = number(client, "SELECT musterd.enqueue('noop')").await;
        assert_eq!(end_of(client, other).await, "succeeded");
    }
    assert_eq!(ledger.end_of(ledger.submit("noop", 50).await, SOON).await, End::succeeded(50));
    assert_eq!(daemon.get("/readyz").await.unwrap().0, 200);
    // Now of every task: the trouble is nobody's.
    refuse(client, "task_records", "id", 0).await;
    let innocent = number(client, "SELECT musterd.enqueue('noop')").await;
    daemon
        .wait_for_log(SOON, |line| {
            line.contains("is put aside") && line.contains(&format!("\"task\":{innocent}"))
        })
        .await;
    refuse_no_more(client, "task_records").await;
    assert_eq!(end_of(client, innocent).await, "succeeded");
    assert_eq!(end_of(client, stuck).await, "succeeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scope_that_cannot_be_asked_about_keeps_no_other_from_its_end() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let client = &ledger.client;
    let submit = "SELECT musterd.submit_batch('fail', ARRAY (SELECT to_jsonb(g) FROM generate_series(1, 400) g), max_failed => 10, on_budget => 'hold')";
    let odd = number(client, submit).await;
    let definition = text(client, "SELECT pg_get_functiondef('musterd.failed_now'::regproc)").await;
    let sick = format!("IF p_batch.id = {odd} THEN RAISE division_by_zero; END IF; RETURN 0");
    spoil(client, "musterd.failed_now(p_batch musterd.batches) RETURNS bigint", &sick).await;
    let config = format!("{QUICK}[handlers.fail]\nrate = 1.0\nduration = \"20ms\"\n");
    let daemon = Daemon::builder(&db, &config).start();
    daemon.wait_for_log(SOON, |line| line.contains("whether a scope is over cannot be asked")).await;
    for _ in 0..3 {
        assert_eq!(
            ledger.end_of(ledger.submit("noop", 3).await, Duration::from_secs(30)).await,
            End::succeeded(3)
        );
    }
    client.batch_execute(&definition).await.unwrap();
    becomes(client, &format!("SELECT state FROM musterd.tasks WHERE id = {odd}"), "held").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_cannot_be_audited_keeps_nothing_else_from_being_healed() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let client = &ledger.client;
    let (odd, lost) = (ledger.submit("noop", 3).await, ledger.submit("noop", 3).await);
    // Nothing is left to run of either, and nothing is recorded.
    client.batch_execute("UPDATE musterd.batches SET next_line = rows + 1").await.unwrap();
    let ticketless = number(client, "SELECT musterd.enqueue('noop')").await;
    client.batch_execute("DELETE FROM musterd.task_tickets; UPDATE musterd.task_records SET created_at = now() - interval '1 hour'").await.unwrap();
    let definition = text(client, "SELECT pg_get_functiondef('musterd.audit'::regproc)").await;
    let sick = format!(
        "IF p_batch = {odd} THEN RAISE division_by_zero; END IF; SELECT a.* INTO succeeded, failed, doubled, outside, missing, recorded FROM musterd.sound_audit(p_batch) a"
    );
    client.batch_execute(&definition.replace("musterd.audit(", "musterd.sound_audit(")).await.unwrap();
    let signature = "musterd.audit(p_batch bigint, OUT succeeded int, OUT failed int, OUT doubled bigint, OUT outside bigint,
                                   OUT missing int4multirange, OUT recorded bigint)";
    spoil(client, signature, &sick).await;
    let daemon = Daemon::builder(&db, QUICK).start();
    assert_eq!(ledger.end_of(lost, SOON).await, End::succeeded(3));
    assert_eq!(end_of(client, ticketless).await, "succeeded");
    daemon
        .wait_for_log(SOON, |line| {
            line.contains("a batch could not be healed") && line.contains(&format!("\"batch\":{odd}"))
        })
        .await;
    client.batch_execute(&definition).await.unwrap();
    assert_eq!(ledger.end_of(odd, SOON).await, End::succeeded(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_or_a_claim_that_cannot_be_freed_keeps_no_other_with_the_dead() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let client = &ledger.client;
    // What a worker held that is gone: two blocks and two tasks. One of each takes no change.
    let (stuck, other) = (ledger.submit_block("noop", 3).await, ledger.submit_block("noop", 3).await);
    let tasks = [
        number(client, "SELECT musterd.enqueue('noop')").await,
        number(client, "SELECT musterd.enqueue('noop')").await,
    ];
    let hold = "UPDATE musterd.blocks SET worker = 'gone-1-1', token = gen_random_uuid(), claimed_at = now();
        INSERT INTO musterd.task_claims (token, worker, queue, command, tasks, number, open, crashes)
        SELECT gen_random_uuid(), 'gone-1-1', queue, command, tasks, number, count, 0 FROM musterd.task_tickets;
        DELETE FROM musterd.task_tickets";
    client.batch_execute(hold).await.unwrap();
    let refusals = format!(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
         CREATE TRIGGER refuse BEFORE UPDATE ON musterd.task_records FOR EACH ROW WHEN (OLD.id = {}) EXECUTE FUNCTION public.refuse();
         CREATE TRIGGER refuse BEFORE DELETE ON musterd.blocks FOR EACH ROW WHEN (OLD.batch_id = {stuck}) EXECUTE FUNCTION public.refuse()",
        tasks[0]
    );
    client.batch_execute(&refusals).await.unwrap();
    let daemon = Daemon::builder(&db, &format!("{SHORT}{QUICK}")).start();
    assert_eq!(ledger.end_of(other, SOON).await, End::succeeded(3));
    assert_eq!(end_of(client, tasks[1]).await, "succeeded");
    daemon.wait_for_log(SOON, |line| line.contains("cannot be freed now")).await;
    refuse_no_more(client, "blocks").await;
    refuse_no_more(client, "task_records").await;
    assert_eq!(ledger.end_of(stuck, SOON).await, End::succeeded(3));
    assert_eq!(end_of(client, tasks[0]).await, "succeeded");
}

/// What the configuration declares does not need a restart to come back.
#[tokio::test(flavor = "multi_thread")]
async fn commands_and_queues_that_were_deleted_by_hand_are_declared_again() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let client = &ledger.client;
    let config = format!("{QUICK}[queues.own]\nmode = \"structured\"\n[handlers.echo]\nqueue = \"own\"\n");
    let daemon = Daemon::builder(&db, &config).start();
    daemon.wait_ready().await;
    let declared = "SELECT name, queue, kind FROM musterd.commands UNION ALL SELECT name, mode, fibers::text FROM musterd.queues ORDER BY 1, 2";
    let before = texts(client, declared).await;
    client.batch_execute("DELETE FROM musterd.commands; DELETE FROM musterd.queues").await.unwrap();
    becomes(client, &format!("SELECT (SELECT count(*) FROM ({declared}) d)"), &before.len().to_string())
        .await;
    assert_eq!(texts(client, declared).await, before);
    let task = number(client, "SELECT musterd.enqueue('echo')").await;
    assert_eq!(text(client, &format!("SELECT queue FROM musterd.tasks WHERE id = {task}")).await, "own");
    assert_eq!(end_of(client, task).await, "succeeded");
}

/// `why` says that it is held, and what it says to do helps.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_was_closed_by_hand_can_be_released() {
    let db = TestDb::new().await;
    let ledger = Ledger::open(&db).await;
    let batch = ledger.submit("noop", 5).await;
    ledger.client.batch_execute("UPDATE musterd.batches SET open = false").await.unwrap();
    let config = TestConfig::new(&db, "");
    let said = json_of(&config, &["why", "batch", &batch.to_string()]).await;
    assert_eq!(said["reasons"][0]["code"], "held", "{said}");
    let _daemon = Daemon::builder(&db, QUICK).start();
    text(&ledger.client, &format!("SELECT musterd.release({batch})")).await;
    assert_eq!(ledger.end_of(batch, SOON).await, End::succeeded(5));
    // One that has ended stays as it is.
    assert_eq!(text(&ledger.client, &format!("SELECT musterd.release({batch})")).await, "succeeded");
}
