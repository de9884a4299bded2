//! Flushes that meet a recovery, an abort, or a network that swallows the answer: applied once, or refused.

use musterd::json::Json;
use musterd::store::batches::Completion;
use musterd::store::flush::Close;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::suite::support::database::TestDb;
use crate::suite::support::gate::Gate;
use crate::suite::support::ledger::{
    REFUSED, backend, carve, closing_with_retry, complete, lines, look, open_lines, session, success, take,
    write, write_all, written,
};
use crate::suite::support::proxy::{Fault, FaultProxy};
use crate::suite::support::schedule::Schedule;
use crate::suite::support::services;
use crate::suite::support::wait::{eventually, within};
use crate::suite::support::worker::{
    PATIENCE, Script, Worker, ask, assert_accounts_balance, end_of, free_all_blocks, progress, submit,
    succeeded,
};

const LEDGER: &str =
    "SELECT (SELECT count(*) FROM musterd.results) || '/' || (SELECT count(*) FROM musterd.outcomes)
                             || '/' || (SELECT string_agg(lines::text, ' ' ORDER BY id) FROM musterd.blocks)";

#[tokio::test(flavor = "multi_thread")]
async fn a_zombie_writes_nothing() {
    let db = TestDb::new().await;
    let (client, zombie) = (db.client().await, session(&db).await);
    submit(&client, "work", 5, "").await;
    let block = carve(&zombie, 1, 5).await.remove(0);
    client.execute("UPDATE musterd.blocks SET token = gen_random_uuid()", &[]).await.unwrap();
    let before: String = ask(&client, LEDGER).await;
    for close in [None, Some(Close::default()), closing_with_retry(&[1, 2])] {
        assert_eq!(write(&zombie, success(&block, 1..=5, close)).await, REFUSED);
        assert_eq!(ask::<String>(&client, LEDGER).await, before);
    }
    // An id handed out again after a crash of the server is the block of another worker.
    free_all_blocks(&client).await;
    assert_eq!(write(&zombie, success(&block, 1..=5, None)).await, REFUSED);
    // In one flush with a zombie's block, the others are written.
    submit(&client, "work", 5, "").await;
    let held = carve(&zombie, 1, 5).await.remove(0);
    let mut both = [success(&block, 1..=5, None), success(&held, 1..=5, Some(Close::default()))];
    assert_eq!(write_all(&zombie, &mut both).await, [false, true]);
    assert_eq!(ask::<String>(&client, LEDGER).await, "5/1/{[1,6)}", "of the second batch only");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_that_meets_a_recovery_waits_and_is_refused() {
    let db = TestDb::new().await;
    let (client, zombie) = (db.client().await, session(&db).await);
    submit(&client, "work", 5, "").await;
    let block = carve(&zombie, 1, 5).await.remove(0);
    let waiting = backend(&zombie).await;
    for (end, expected) in [("ROLLBACK", written(2)), ("COMMIT", REFUSED)] {
        let recovery = db.client().await;
        let token = Uuid::new_v4();
        recovery.batch_execute("BEGIN").await.unwrap();
        recovery.execute("UPDATE musterd.blocks SET token = $1", &[&token]).await.unwrap();
        let rows = if end == "ROLLBACK" { 1..=2 } else { 3..=5 };
        let (answer, ()) = tokio::join!(write(&zombie, success(&block, rows, None)), async {
            eventually(PATIENCE, "the flush waits", async || {
                let sql = format!("SELECT cardinality(pg_blocking_pids({waiting})) > 0");
                ask::<bool>(&client, &sql).await.then_some(())
            })
            .await;
            recovery.batch_execute(end).await.unwrap();
        });
        assert_eq!(answer, expected, "{end}");
    }
    assert_eq!(ask::<i64>(&client, "SELECT count(*) FROM musterd.results").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_partial_flush_and_a_recovery_the_rest_is_fenced_and_nothing_runs_again() {
    let db = TestDb::new().await;
    let (client, first, second) = (db.client().await, session(&db).await, session(&db).await);
    let batch = submit(&client, "work", 10, "").await;
    let block = carve(&first, 1, 10).await.remove(0);
    assert_eq!(write(&first, success(&block, 1..=3, None)).await, written(3));
    // The recovery splits what the first one held: only what is open is left of it.
    client
        .batch_execute(
            "WITH gone AS (DELETE FROM musterd.blocks RETURNING *)
             INSERT INTO musterd.blocks (batch_id, lines, rows, queue, command, priority, crashes)
             SELECT batch_id, p.lines, musterd.count_lines(p.lines), queue, command, priority, 1
               FROM gone, LATERAL (VALUES (gone.lines * '{[1,6)}'), (gone.lines * '{[6,11)}')) p (lines)",
        )
        .await
        .unwrap();
    // A worker holds one suspect at a time: the second comes when the first is another worker's.
    let mut taken = take(&second, 2).await;
    client
        .batch_execute("UPDATE musterd.blocks SET worker = 'another' WHERE worker IS NOT NULL")
        .await
        .unwrap();
    taken.extend(take(&second, 2).await);
    assert_eq!(lines(&taken), [(4, 5), (6, 10)]);
    assert_eq!(open_lines(&second, &taken[0]).await, [4, 5]);
    assert_eq!(open_lines(&second, &taken[1]).await, [6, 7, 8, 9, 10]);
    assert_eq!(write(&first, success(&block, 4..=10, Some(Close::default()))).await, REFUSED);
    assert_eq!(write(&second, success(&taken[1], 6..=10, Some(Close::default()))).await, written(5));
    // Lines that have a result keep it, whichever worker writes them again: the whole write is refused, the block stays as it is.
    let before: String = ask(&client, LEDGER).await;
    assert_eq!(write(&second, success(&taken[0], 1..=5, Some(Close::default()))).await, REFUSED);
    assert_eq!(ask::<String>(&client, LEDGER).await, before);
    assert_eq!(write(&second, success(&taken[0], 4..=5, Some(Close::default()))).await, written(2));
    let mut second = second;
    let closed = look(&second, batch).await.unwrap();
    assert_eq!(complete(&mut second, &closed).await, Completion::Completed);
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_and_an_abort_do_not_wait_for_each_other() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let batch = submit(&client, "work", 10, "").await;
    let block = carve(&worker, 1, 5).await.remove(0);
    let mut schedule = Schedule::new(&db, &["operator"]).await;
    let abort = format!("SELECT musterd.abort({batch})");
    // A flush in the middle of an abort.
    schedule.run("operator", "BEGIN").await;
    schedule.run("operator", &abort).await;
    assert_eq!(write(&worker, success(&block, [1], None)).await, written(1));
    schedule.run("operator", "ROLLBACK").await;
    // An abort in the middle of a flush.
    worker.batch_execute("BEGIN; SELECT * FROM musterd.blocks FOR UPDATE").await.unwrap();
    worker
        .batch_execute(&format!(
            "INSERT INTO musterd.outcomes (batch_id, first_line, token, part, generation, attempt, lines, succeeded, failed)
             VALUES ({batch}, 2, gen_random_uuid(), 1, 1, 1, '{{[2,3)}}', 1, 0)"
        ))
        .await
        .unwrap();
    assert_eq!(schedule.run("operator", &abort).await.rows(), ["aborting"]);
    worker.batch_execute("ROLLBACK").await.unwrap();
    // What its holder has is still taken until the batch has ended, and refused afterwards.
    assert_eq!(write(&worker, success(&block, [2], None)).await, written(1));
    let mut completer = session(&db).await;
    assert_eq!(look(&completer, batch).await, None, "a block is in hand");
    assert_eq!(write(&worker, success(&block, [3], Some(Close::default()))).await, written(1));
    let closed = look(&completer, batch).await.unwrap();
    assert_eq!(complete(&mut completer, &closed).await, Completion::Completed);
    assert_eq!(write(&worker, success(&block, [4], None)).await, REFUSED);
    assert_eq!(progress(&client, batch).await.aborted, 7);
    assert_accounts_balance(&client).await;
}

/// The sessions of this name that go through the proxy.
async fn sessions(client: &Client, name: &str) -> Vec<i32> {
    let sql = "SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_activity
                WHERE datname = current_database() AND application_name = $1";
    client.query_one(sql, &[&name]).await.unwrap().get(0)
}

/// Resets what goes through the proxy, and lets the network work again once the answers can not come any more.
async fn lose_connections(proxy: &FaultProxy, client: &Client, name: &str) {
    let before = sessions(client, name).await;
    assert!(!before.is_empty());
    proxy.reset_all();
    eventually(PATIENCE, "the session is gone", async || {
        let now = sessions(client, name).await;
        before.iter().all(|pid| !now.contains(pid)).then_some(())
    })
    .await;
    proxy.set(Fault::None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_whose_reply_is_lost_is_applied_once_and_not_called_fenced() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    let gate = Gate::closed();
    let at_gate = gate.clone();
    let script = Script::new(move |call| {
        let gate = at_gate.clone();
        async move {
            if call.input == "5" {
                gate.pass().await;
            }
            succeeded()
        }
    });
    let toml = format!(
        "[queues.default]\nfibers = 1\n[database]\nurl = \"{}\"\ndirect_url = \"{}\"\npooler = \"none\"",
        proxy.rewrite(db.url()),
        db.url()
    );
    let worker = Worker::start(&db, &toml, &[("work", script.clone())]).await;
    // The statements are prepared: what follows is nothing but the transaction.
    let first = submit(&client, "work", 3, "").await;
    assert_eq!(end_of(&client, first).await.0, "succeeded");
    let batch = submit(&client, "work", 5, "").await;
    within(PATIENCE, gate.entered()).await;
    let done = "SELECT count(*) FROM musterd.results WHERE line = 5";
    proxy.set(Fault::HoldReplies);
    gate.open();
    eventually(PATIENCE, "the flush is committed", async || {
        (ask::<i64>(&client, done).await == 1).then_some(())
    })
    .await;
    lose_connections(&proxy, &client, "musterd write").await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 5, 0, 0));
    assert!(script.runs().values().all(|runs| *runs == 1));
    assert_eq!(worker.metric("musterd_fenced_total").await, 0.0);
    assert!(worker.metric("musterd_batcher_rollbacks_total").await >= 1.0, "the reply was not lost");
    assert!(worker.stop().await.is_clean());
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_reply_is_lost_is_adopted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    let script = Script::succeeding();
    // No poll: the worker asks when it is told to, by way of a connection that is not the proxy's.
    let toml = format!(
        "[claim]\npoll_interval = \"1h\"\n[database]\nurl = \"{}\"\ndirect_url = \"{}\"\npooler = \"none\"",
        proxy.rewrite(db.url()),
        db.url()
    );
    let worker = Worker::start_exactly(&db, &toml, &[("work", script.clone())]).await;
    let first = submit(&client, "work", 3, "").await;
    assert_eq!(end_of(&client, first).await.0, "succeeded");
    // Half of the lines in a free block: whichever kind the worker asks for first, there is something.
    let batch = submit(&client, "work", 40, "hold => true").await;
    client
        .batch_execute(&format!(
            "UPDATE musterd.batches SET next_line = 21 WHERE id = {batch};
             INSERT INTO musterd.blocks (batch_id, lines, rows, queue, command, priority)
             VALUES ({batch}, '{{[1,21)}}', 20, 'default', 'work', 100)"
        ))
        .await
        .unwrap();
    eventually(PATIENCE, "the worker has nothing to ask", async || {
        let at_rest = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
             AND application_name = 'musterd claim' AND state = 'idle' AND state_change < now() - interval '300 ms'";
        (ask::<i64>(&client, at_rest).await == 1).then_some(())
    })
    .await;
    // The claim of rows waits for this lock, so the reply that is lost is its own, not that of a look for tasks.
    let holder = db.client().await;
    holder.batch_execute("BEGIN; LOCK TABLE musterd.blocks IN SHARE ROW EXCLUSIVE MODE").await.unwrap();
    assert_eq!(ask::<String>(&client, &format!("SELECT musterd.release({batch})")).await, "running");
    let claims = |what: &str| {
        format!(
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database()
                 AND application_name = 'musterd claim' AND {what}"
        )
    };
    let (waits, has_ended) = (claims("wait_event_type = 'Lock'"), claims("state = 'idle'"));
    loop {
        eventually(PATIENCE, "the claim waits for the lock", async || {
            ask::<bool>(&client, &waits).await.then_some(())
        })
        .await;
        proxy.set(Fault::HoldReplies);
        holder.batch_execute("COMMIT").await.unwrap();
        let has_claimed = eventually(PATIENCE, "the claim ends", async || {
            // In this order: what has ended and claimed nothing never will.
            let has_ended = ask::<bool>(&client, &has_ended).await;
            let owned = "SELECT count(*) > 0 FROM musterd.blocks WHERE worker IS NOT NULL";
            (ask::<bool>(&client, owned).await || has_ended).then_some(())?;
            Some(ask::<bool>(&client, owned).await)
        })
        .await;
        if has_claimed {
            break;
        }
        // A claim waits for a lock for a tenth of a second, which on a slow machine is over before the COMMIT. It learns that now, and
        // the next one meets the lock again.
        holder.batch_execute("BEGIN; LOCK TABLE musterd.blocks IN SHARE ROW EXCLUSIVE MODE").await.unwrap();
        proxy.set(Fault::None);
    }
    assert_eq!(script.calls().len(), 3, "the worker does not know of them");
    lose_connections(&proxy, &client, "musterd claim").await;
    assert_eq!(end_of(&client, batch).await, ("succeeded".into(), 40, 0, 0));
    assert!(script.runs().values().all(|runs| *runs == 1));
    assert!(worker.stop().await.is_clean());
    assert_accounts_balance(&client).await;
}

/// Rows come with an outcome that is new, or not at all.
#[tokio::test(flavor = "multi_thread")]
async fn appended_rows_are_there_once_and_only_with_their_outcome() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, session(&db).await);
    let batch = submit(&client, "work", 4, "").await;
    let block = carve(&worker, 1, 4).await.remove(0);
    let appending = |lines: std::ops::RangeInclusive<i32>| {
        let mut write = success(&block, lines.clone(), None);
        for line in lines {
            write.outcomes.append(line, Json::from_text(format!("\"{line}a\"")));
            write.outcomes.append(line, Json::from_text("\"b\""));
        }
        write
    };
    let rows = "SELECT b.rows || ' ' || coalesce((SELECT string_agg(r.input #>> '{}', ' ' ORDER BY r.line)
                  FROM musterd.rows r WHERE r.line > 4), '') FROM musterd.batches b";
    // Another worker has it: neither outcome nor rows.
    let mut zombie = appending(1..=2);
    zombie.block.token = Uuid::new_v4();
    assert_eq!(write(&worker, zombie).await, REFUSED);
    assert_eq!(ask::<String>(&client, rows).await, "4 ");
    // Twice, as after a lost reply; then with one that is new beside those that are done: nothing of it.
    let first = appending(1..=2);
    assert_eq!(write(&worker, first.clone()).await, written(2));
    assert_eq!(write(&worker, first).await, REFUSED);
    assert_eq!(write(&worker, appending(1..=3)).await, REFUSED);
    assert_eq!(ask::<String>(&client, rows).await, "8 1a b 2a b");
    assert_eq!(write(&worker, appending(3..=3)).await, written(1));
    assert_eq!(ask::<String>(&client, rows).await, "10 1a b 2a b 3a b");
    assert_eq!(lines(&carve(&worker, 1, 100).await), [(5, 10)], "they run like all others");
    // A flush that appends takes the batch before the block, as everybody does.
    let mut schedule = Schedule::new(&db, &["operator"]).await;
    schedule.run("operator", "BEGIN").await;
    schedule.run("operator", &format!("SELECT musterd.abort({batch})")).await;
    let waiting = backend(&worker).await;
    let (done, ()) = tokio::join!(write(&worker, appending(4..=4)), async {
        eventually(PATIENCE, "the flush waits for the batch", async || {
            let blocked = format!("SELECT cardinality(pg_blocking_pids({waiting})) > 0");
            ask::<bool>(&client, &blocked).await.then_some(())
        })
        .await;
        schedule.run("operator", "COMMIT").await;
    });
    assert_eq!(done, written(1), "what the row did is recorded");
    let count = "SELECT rows FROM musterd.batches";
    assert_eq!(ask::<i32>(&client, count).await, 10, "a batch that is being aborted takes no more rows");
}
