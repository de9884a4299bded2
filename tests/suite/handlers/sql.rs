//! `sql` over blocks: effects and results are one thing, whatever dies in between.

use std::time::Duration;

use rustix::process::Signal;

use super::{QUICK, SOON, Site, all_succeeded, ended, submit_rows};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::proxy::{Fault, FaultProxy};
use crate::suite::support::wait::eventually;
use crate::suite::support::worker::free_all_blocks;

const HANDLER: &str = "[handlers.work]\nkind = \"sql\"\nfunction = \"app.work\"\n";

/// Every row leaves an effect; 13 cannot be done with anybody, 7 is refused, 5 wants another try once, 3 is forgotten once.
const FUNCTION: &str = "CREATE SCHEMA app;
    CREATE TABLE app.effects (batch bigint, line int, n int);
    CREATE FUNCTION app.work(batch bigint, context jsonb, rows jsonb)
    RETURNS TABLE (line int, outcome text, result jsonb, error text) LANGUAGE plpgsql AS $$
    BEGIN
        IF EXISTS (SELECT FROM jsonb_to_recordset(rows) AS r (input jsonb) WHERE r.input ->> 'n' = '13') THEN
            RAISE EXCEPTION 'thirteen is too many';
        END IF;
        RETURN QUERY
        WITH given AS (SELECT r.line, (r.input ->> 'n')::int AS n, r.attempt
                         FROM jsonb_to_recordset(rows) AS r (line int, input jsonb, attempt int)),
             written AS (INSERT INTO app.effects SELECT work.batch, g.line, g.n FROM given g)
        SELECT g.line,
               CASE WHEN g.n = 7 THEN 'failed' WHEN g.n = 5 AND g.attempt = 1 THEN 'retry' ELSE 'succeeded' END,
               jsonb_build_object('double', g.n * 2), CASE WHEN g.n = 7 THEN 'seven is refused' END
          FROM given g WHERE g.n <> 3 OR g.attempt > 1;
    END $$";

#[tokio::test(flavor = "multi_thread")]
async fn a_function_over_blocks_answers_row_by_row_and_its_failure_is_found() {
    let db = TestDb::new().await;
    db.client().await.batch_execute(FUNCTION).await.unwrap();
    let daemon = Daemon::builder(&db, &format!("{QUICK}{HANDLER}")).start();
    daemon.wait_ready().await;
    let site = Site { client: db.client().await, daemon, db };
    let batch = site.submit("work", 40).await;
    let rows = site.ended(batch).await;
    let failed: Vec<(i32, i32)> =
        rows.iter().filter(|row| row.state == "failed").map(|row| (row.line, row.attempt)).collect();
    assert_eq!((rows.len(), failed), (40, vec![(7, 1), (13, 3)]));
    assert!(rows[12].error.contains("thirteen is too many"), "{:?}", rows[12]);
    assert_eq!((rows[4].attempt, rows[2].attempt, rows[0].attempt), (2, 2, 1));
    assert_eq!(rows[19].result, Some(serde_json::json!({ "double": 40 })));
    let tally = "SELECT sum(succeeded)::int, sum(failed)::int FROM musterd.outcomes WHERE batch_id = $1";
    let row = site.client.query_one(tally, &[&batch]).await.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, i32>(1)), (38, 2));
    assert!(!site.db.name().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_function_is_told_in_postgresql_s_words() {
    let site = Site::start(HANDLER).await;
    let rows = site.run("work", 3).await;
    assert!(rows.iter().all(|row| row.state == "failed" && row.error.contains("SQLSTATE 3F000")), "{rows:?}");
}

/// Kills so many workers in the middle of their work; in the end every line has one effect and one result.
async fn effects_equal_results_after(kills: u32) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(FUNCTION).await.unwrap();
    // Every call takes a while, so that a kill finds some of them under way.
    let slow = "CREATE FUNCTION app.slowly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.02); RETURN NULL; END $$;
        CREATE TRIGGER slowly AFTER INSERT ON app.effects FOR EACH STATEMENT EXECUTE FUNCTION app.slowly();";
    client.batch_execute(slow).await.unwrap();
    let config = format!("{QUICK}{HANDLER}block_size = 7\n[queues.default]\nfibers = 4\n");
    let rows: Vec<_> = (0..kills * 120).map(|n| serde_json::json!({ "n": 100 + n })).collect();
    let batch = submit_rows(&client, "work", &rows.into()).await;
    for kill in 0..=kills {
        let daemon = Daemon::builder(&db, &config).start();
        daemon.wait_ready().await;
        if kill == kills {
            let rows = ended(&client, batch).await;
            all_succeeded(&rows, kills as usize * 120);
            break;
        }
        // Some effects later, which is at another place of the walk every time.
        let effects = "SELECT count(*) FROM app.effects";
        let before: i64 = client.query_one(effects, &[]).await.unwrap().get(0);
        eventually(SOON, "some more effects", async || {
            let now: i64 = client.query_one(effects, &[]).await.unwrap().get(0);
            (now > before).then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_millis(u64::from(rand::random::<u8>() % 40))).await;
        daemon.signal(Signal::KILL);
        daemon.wait_exit(SOON).await;
        drop(daemon);
        // What recovery does for a worker that is dead.
        free_all_blocks(&client).await;
    }
    let twice = "SELECT count(*) FROM (SELECT line FROM app.effects GROUP BY line HAVING count(*) <> 1) x";
    assert_eq!(
        client.query_one(twice, &[]).await.unwrap().get::<_, i64>(0),
        0,
        "an effect is missing or doubled"
    );
    let same = "SELECT count(*) FROM musterd.results r JOIN app.effects e ON e.batch = r.batch_id AND e.line = r.line
                 WHERE r.state = 'succeeded' AND r.result ->> 'double' = (e.n * 2)::text";
    assert_eq!(client.query_one(same, &[]).await.unwrap().get::<_, i64>(0), i64::from(kills) * 120);
}

#[tokio::test(flavor = "multi_thread")]
async fn effects_equal_results_after_random_kills() {
    effects_equal_results_after(4).await;
}

/// Run by hand, for the record: `cargo test --test suite twenty_random_kills -- --ignored`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute; the shorter one above runs always"]
async fn effects_equal_results_after_twenty_random_kills() {
    effects_equal_results_after(20).await;
}

/// Whoever fires a trigger waits here until the test opens it.
struct Gate(tokio_postgres::Client);

impl Gate {
    async fn shut(db: &TestDb, trigger: &str) -> Self {
        let holder = db.client().await;
        let gate = format!(
            "CREATE TABLE app.gate (id int PRIMARY KEY); INSERT INTO app.gate VALUES (1);
             CREATE FUNCTION app.wait() RETURNS trigger LANGUAGE plpgsql
                 AS $$ BEGIN PERFORM 1 FROM app.gate FOR SHARE; RETURN NULL; END $$;
             {trigger} EXECUTE FUNCTION app.wait();"
        );
        holder.batch_execute(&gate).await.unwrap();
        holder.batch_execute("BEGIN; SELECT 1 FROM app.gate FOR UPDATE").await.unwrap();
        Self(holder)
    }

    async fn is_waited_at(&self) {
        eventually(SOON, "somebody waits at the gate", async || {
            let waiting = "SELECT 1 FROM pg_locks
                            WHERE NOT granted AND transactionid = pg_current_xact_id_if_assigned()::xid LIMIT 1";
            self.0.query_opt(waiting, &[]).await.unwrap().map(drop)
        })
        .await;
    }

    async fn open(self) {
        self.0.batch_execute("COMMIT").await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_lost_its_block_leaves_no_effect() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(FUNCTION).await.unwrap();
    // The first call waits for the test; its block is given to another meanwhile.
    let gate = Gate::shut(&db, "CREATE TRIGGER wait AFTER INSERT ON app.effects FOR EACH STATEMENT").await;
    let daemon = Daemon::builder(&db, &format!("{QUICK}{HANDLER}")).start();
    daemon.wait_ready().await;
    let batch = submit_rows(&client, "work", &serde_json::json!([{ "n": 1 }])).await;
    gate.is_waited_at().await;
    let steal = "UPDATE musterd.blocks SET token = gen_random_uuid() WHERE worker IS NOT NULL";
    assert_eq!(client.execute(steal, &[]).await.unwrap(), 1);
    gate.open().await;
    daemon.wait_for_log(SOON, |line| line.contains("effects were rolled back")).await;
    let count: i64 = client.query_one("SELECT count(*) FROM app.effects", &[]).await.unwrap().get(0);
    assert_eq!(count, 0);
    let results = "SELECT count(*) FROM musterd.results WHERE batch_id = $1";
    assert_eq!(client.query_one(results, &[&batch]).await.unwrap().get::<_, i64>(0), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_commit_repeats_no_effect() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(FUNCTION).await.unwrap();
    // At COMMIT itself the server waits for the test.
    let at_commit = "CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON app.effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW";
    let gate = Gate::shut(&db, at_commit).await;
    let server = url::Url::parse(db.url()).unwrap();
    let proxy = FaultProxy::start(([127, 0, 0, 1], server.port().unwrap()).into()).await;
    let config = format!("{QUICK}{HANDLER}[database]\nurl = {:?}\n", proxy.rewrite(db.url()));
    let daemon = Daemon::builder(&db, &config).start();
    daemon.wait_ready().await;
    let rows = serde_json::json!([{ "n": 100 }, { "n": 101 }, { "n": 102 }]);
    let batch = submit_rows(&client, "work", &rows).await;
    gate.is_waited_at().await;
    proxy.set(Fault::HoldReplies);
    gate.open().await;
    eventually(SOON, "the server has committed", async || {
        let written = "SELECT 1 FROM musterd.results WHERE batch_id = $1 LIMIT 1";
        client.query_opt(written, &[&batch]).await.unwrap().map(drop)
    })
    .await;
    proxy.reset_all();
    proxy.set(Fault::None);
    let rows = ended(&client, batch).await;
    all_succeeded(&rows, 3);
    assert!(rows.iter().all(|row| row.attempt == 1), "nobody is charged: {rows:?}");
    let effects: i64 = client.query_one("SELECT count(*) FROM app.effects", &[]).await.unwrap().get(0);
    assert_eq!(effects, 3);
}

/// A function that crashes the server must find its claim again afterwards, or nobody counts how often it does.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_for_a_function_is_committed_before_it_runs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(FUNCTION).await.unwrap();
    let note = "CREATE TABLE app.claims (command text, mode text);
        CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN INSERT INTO app.claims VALUES (NEW.command, current_setting('synchronous_commit')); RETURN NULL; END $$;
        CREATE TRIGGER note AFTER INSERT ON musterd.blocks FOR EACH ROW
            WHEN (NEW.worker IS NOT NULL) EXECUTE FUNCTION app.note();";
    client.batch_execute(note).await.unwrap();
    let daemon = Daemon::builder(&db, &format!("{QUICK}{HANDLER}")).start();
    daemon.wait_ready().await;
    for command in ["noop", "work"] {
        let batch = submit_rows(&client, command, &serde_json::json!([{ "n": 1 }])).await;
        all_succeeded(&ended(&client, batch).await, 1);
    }
    let claims = client.query("SELECT DISTINCT command, mode FROM app.claims ORDER BY 1", &[]).await.unwrap();
    let claims: Vec<(String, String)> = claims.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(claims, [("noop".into(), "off".into()), ("work".into(), "on".into())]);
}

/// An effect goes with a result that is new, or not at all.
#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_has_a_result_by_then_has_no_second_effect() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(FUNCTION).await.unwrap();
    let gate = Gate::shut(&db, "CREATE TRIGGER wait AFTER INSERT ON app.effects FOR EACH STATEMENT").await;
    let one_block = "block_size = 3\n[queues.default]\nfibers = 1\n";
    let daemon = Daemon::builder(&db, &format!("{QUICK}{HANDLER}{one_block}")).start();
    let rows = serde_json::json!([{ "n": 100 }, { "n": 101 }, { "n": 102 }]);
    let batch = submit_rows(&client, "work", &rows).await;
    gate.is_waited_at().await;
    // As if a commit whose reply was lost had come through only now.
    let late = "WITH recorded AS (SELECT guard.result($1, 2, 'succeeded'))
        UPDATE musterd.blocks SET lines = lines - '{[2,3)}'::int4multirange, rows = rows - 1 FROM recorded WHERE batch_id = $1";
    assert_eq!(client.execute(late, &[&batch]).await.unwrap(), 1);
    gate.open().await;
    all_succeeded(&ended(&client, batch).await, 3);
    let lines = "SELECT array_agg(line ORDER BY line) FROM app.effects";
    assert_eq!(client.query_one(lines, &[]).await.unwrap().get::<_, Vec<i32>>(0), [1, 3]);
    drop(daemon);
}

#[tokio::test(flavor = "multi_thread")]
async fn conflicts_are_tried_again_within_the_attempt() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let function = "CREATE SCHEMA app; CREATE SEQUENCE app.tries;
        CREATE FUNCTION app.work(batch bigint, context jsonb, rows jsonb)
        RETURNS TABLE (line int, outcome text, result jsonb, error text) LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('app.tries') <= 3 THEN
                RAISE EXCEPTION 'in the way' USING ERRCODE = '40001';
            END IF;
            RETURN QUERY SELECT r.line, 'succeeded', NULL::jsonb, NULL FROM jsonb_to_recordset(rows) AS r (line int);
        END $$";
    client.batch_execute(function).await.unwrap();
    let one_block = "block_size = 3\n[queues.default]\nfibers = 1\n";
    let daemon = Daemon::builder(&db, &format!("{QUICK}{HANDLER}{one_block}")).start();
    let batch = submit_rows(&client, "work", &serde_json::json!([{ "n": 1 }, { "n": 2 }])).await;
    let rows = ended(&client, batch).await;
    all_succeeded(&rows, 2);
    assert!(rows.iter().all(|row| row.attempt == 1), "{rows:?}");
    let tries: i64 = client.query_one("SELECT last_value FROM app.tries", &[]).await.unwrap().get(0);
    assert_eq!(tries, 4, "of the rows together: nobody was looked for");
    drop(daemon);
}
