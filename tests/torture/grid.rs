//! The grid: every named step of the program, times what can happen there (the process dies, it sleeps for longer than the TTL, the step
//! fails), with the real binary, two replicas and one checker.
//!
//! The steps are read from the source, so that a new one is in the grid by itself.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use comfy_table::{Table, presets};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_postgres::Client;

use crate::suite::support::audit;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::run;

/// The step of a command that is no worker.
const ELSEWHERE: &[&str] = &["top.drawn"];
const LIMIT: Duration = Duration::from_secs(60);
/// Past the TTL of the configuration below.
const SLEEP: &str = "sleep(6s)";

const CONFIG: &str = r#"
[liveness]
heartbeat_interval = "500ms"
heartbeat_ttl = "4s"
recovery_interval = "1s"
reconcile_interval = "500ms"
settle = "1s"
rows_ttl = "20s"
[claim]
poll_interval = "200ms"
[batcher]
max_interval = "500ms"
[completion]
sweep_min = "1s"
sweep_max = "2s"
[retry]
base = "50ms"
max = "200ms"
[handlers.written]
kind = "builtin"
builtin = "echo"
output = "lines.txt"
[handlers.score]
kind = "sql"
function = "app.score"
[handlers.effect]
kind = "sql"
procedure = "app.effect"
"#;

/// Something of everything that a worker does, and blocks of a worker that is in no list.
const LOAD: &str = "
CREATE SCHEMA app;
CREATE TABLE app.effects (scope bigint, line bigint);
CREATE FUNCTION app.score(batch bigint, context jsonb, rows jsonb)
RETURNS TABLE (line int, outcome text, result jsonb, error text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO app.effects SELECT score.batch, (r ->> 'line')::int FROM jsonb_array_elements(rows) r;
    RETURN QUERY SELECT (r ->> 'line')::int, 'succeeded', r -> 'input', NULL::text FROM jsonb_array_elements(rows) r;
END $$;
CREATE PROCEDURE app.effect(id bigint, payload jsonb) LANGUAGE sql AS $$ INSERT INTO app.effects VALUES (0, id) $$;
SELECT musterd.submit_batch(c, (SELECT jsonb_agg(n) FROM generate_series(1, 40) n), on_done => 'noop')
  FROM unnest(ARRAY['echo', 'written', 'score']) c;
SELECT musterd.enqueue_many(c, (SELECT array_agg(to_jsonb(n)) FROM generate_series(1, 20) n)) FROM unnest(ARRAY['echo', 'effect']) c;
WITH b AS (UPDATE musterd.batches SET next_line = 11 WHERE command = 'echo' RETURNING *)
INSERT INTO musterd.blocks (batch_id, lines, rows, queue, command, priority, worker, token, claimed_at)
SELECT id, '{[1,11)}', 10, queue, command, priority, 'ghost-1-1', gen_random_uuid(), now() FROM b;";

#[derive(Clone, Debug)]
struct Cell {
    step: String,
    action: &'static str,
}

/// Whether all of it is well. `only`: steps whose names have this in them.
pub(crate) async fn run(only: &str, as_json: bool) -> Result<bool> {
    let mut cells = Vec::new();
    for (step, can_fail) in steps()?.into_iter().filter(|(step, _)| step.contains(only)) {
        let actions = ["abort", SLEEP, "error"];
        let some = &actions[..if can_fail { 3 } else { 2 }];
        cells.extend(some.iter().map(|action| Cell { step: step.clone(), action }));
    }
    let (slots, mut work) = (Arc::new(Semaphore::new(3)), JoinSet::new());
    for (place, cell) in cells.into_iter().enumerate() {
        let slots = Arc::clone(&slots);
        work.spawn(async move {
            let _slot = slots.acquire().await;
            let began = Instant::now();
            let answer = try_cell(&cell).await;
            (place, cell, answer, began.elapsed().as_secs_f64())
        });
    }
    let mut done = Vec::new();
    while let Some(cell) = work.join_next().await {
        done.push(cell?);
    }
    done.sort_by_key(|(place, ..)| *place);
    let well = done.iter().all(|(_, _, answer, _)| answer.is_ok());
    let word =
        |answer: &Result<()>| answer.as_ref().map_or_else(|error| format!("{error:#}"), |()| "well".into());
    if as_json {
        let cell = |(_, cell, answer, took): &(usize, Cell, Result<()>, f64)| json!({ "step": cell.step, "action": cell.action, "answer": word(answer), "seconds": took });
        println!("{}", done.iter().map(cell).collect::<serde_json::Value>());
        return Ok(well);
    }
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(["step", "abort", "sleep past the TTL", "error"]);
    let mut rows: Vec<[String; 4]> = Vec::new();
    for (_, cell, answer, took) in &done {
        if rows.last().is_none_or(|row| row[0] != cell.step) {
            rows.push([cell.step.clone(), String::new(), String::new(), "cannot fail".into()]);
        }
        let column = ["abort", SLEEP, "error"]
            .iter()
            .position(|action| *action == cell.action)
            .context("an action")?;
        let row = rows.last_mut().context("a row")?;
        row[column + 1] = format!("{}, {took:.1} s", word(answer));
    }
    for row in rows {
        table.add_row(row);
    }
    println!("{table}\n{} cells: {}", done.len(), if well { "green" } else { "RED" });
    Ok(well)
}

/// Every step in the source, with whether it can be made to fail.
fn steps() -> Result<Vec<(String, bool)>> {
    let mut found = Vec::new();
    let mut dirs = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir)?.flatten() {
            let path = entry.path();
            if path.is_dir() {
                dirs.push(path);
            } else {
                let text = std::fs::read_to_string(&path)?;
                for call in text.split("failpoint!(\"").skip(1) {
                    let (name, rest) = call.split_once('"').context("a name that does not end")?;
                    found.push((name.to_owned(), rest.starts_with(',')));
                }
            }
        }
    }
    found.retain(|(name, _)| !ELSEWHERE.contains(&name.as_str()));
    found.sort();
    found.dedup();
    Ok(found)
}

/// One replica meets the step alone; then another comes, and together they bring everything to its end.
async fn try_cell(cell: &Cell) -> Result<()> {
    let db = TestDb::new().await;
    let client = db.client().await;
    audit::install(&client).await;
    client.batch_execute(LOAD).await?;
    let toml = format!("{CONFIG}[outputs]\ndir = {:?}\n", run::new_dir("outputs").display().to_string());
    let failpoint = format!("{}=1*{}", cell.step, cell.action);
    let one = Daemon::builder(&db, &toml).log("info").env("MUSTERD_FAILPOINTS", &failpoint).start();
    let met = one.wait_for_log(LIMIT, |line| line.contains("on purpose") && line.contains(&cell.step));
    tokio::time::timeout(LIMIT, met).await.context("the step was not visited")?;
    let two = Daemon::builder(&db, &toml).log("info").start();
    all_ended(&client).await?;
    check(&client).await?;
    if cell.action == "abort" {
        ensure!(one.has_ended(), "it lives on");
    } else {
        leaves_well(&one).await.context("the one")?;
    }
    leaves_well(&two).await.context("the other")
}

async fn leaves_well(daemon: &Daemon) -> Result<()> {
    daemon.signal(rustix::process::Signal::TERM);
    let status = daemon.wait_exit(LIMIT).await;
    ensure!(status.success(), "ended with {status}");
    Ok(())
}

async fn all_ended(client: &Client) -> Result<()> {
    let open = "SELECT (SELECT count(*) FROM musterd.batches WHERE summarized_at IS NULL)
                     + (SELECT count(*) FROM musterd.task_records WHERE NOT musterd.is_final(state))
                     + (SELECT count(*) FROM musterd.blocks) + (SELECT count(*) FROM musterd.task_claims)";
    let began = Instant::now();
    loop {
        let left: i64 = client.query_one(open, &[]).await?.get(0);
        if left == 0 {
            return Ok(());
        }
        ensure!(began.elapsed() < LIMIT, "{left} batches, tasks, blocks and claims are open after {LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn check(client: &Client) -> Result<()> {
    let questions = [
        (
            "batches that have not succeeded",
            "SELECT count(*) FROM musterd.task_records WHERE state <> 'succeeded'",
        ),
        (
            "rows without their result",
            "SELECT 120 - count(*) FROM musterd.results s JOIN musterd.rows r USING (batch_id, line) WHERE s.result = r.input",
        ),
        (
            "on_done tasks too few or too many",
            "SELECT abs(3 - count(*)) FROM musterd.task_records WHERE command = 'noop'",
        ),
        (
            "effects too few or too many",
            "SELECT abs(60 - count(*)) + 60 - count(DISTINCT (scope, line)) FROM app.effects",
        ),
        (
            "batches without files",
            "SELECT count(*) FROM musterd.batches WHERE command = 'written' AND outputs IS NULL",
        ),
        ("changes after an end", "SELECT count(*) FROM public.violations"),
        ("deadlocks", "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"),
    ];
    for (what, question) in questions {
        let count: i64 = client.query_one(&format!("SELECT ({question})::bigint"), &[]).await?.get(0);
        ensure!(count == 0, "{count} {what}");
    }
    Ok(())
}
