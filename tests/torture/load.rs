//! Producers and operators at open loop: each operation has its time, however long the ones before it take, and is tried until it
//! is answered. What was answered is in the book, for the checker.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;

use super::plan::{Batch, Op};
use super::postgres::{Session, open};
use super::world::World;

const PRODUCERS: usize = 12;

/// What was accepted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Book {
    pub(crate) batches: BTreeMap<i64, Accepted>,
    /// In the order of their acceptance.
    order: Vec<i64>,
    /// Tasks that were enqueued, with their payloads, and their idempotency keys.
    pub(crate) tasks: BTreeMap<i64, Value>,
    latest_tasks: Vec<i64>,
    pub(crate) operations: BTreeMap<&'static str, u64>,
    pub(crate) refused: BTreeMap<String, u64>,
    /// What must never be answered.
    pub(crate) wrong: Vec<String>,
}

#[derive(Clone, Debug)]
pub(crate) struct Accepted {
    pub(crate) command: &'static str,
    pub(crate) rows: i64,
    pub(crate) appended: i64,
    pub(crate) aborted: bool,
    pub(crate) redriven: bool,
    pub(crate) budget: bool,
}

pub(crate) type Shared = Arc<Mutex<Book>>;

/// Does everything at its time; returns when all of it was answered.
pub(crate) async fn run(world: &Arc<World>, plan: Vec<(Duration, Op)>, book: &Shared) {
    let (sender, receiver) = mpsc::unbounded_channel::<Op>();
    let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
    let mut producers = JoinSet::new();
    let keys = Arc::new(AtomicU64::new(1));
    for _ in 0..PRODUCERS {
        let producer = Producer {
            url: world.front_url(),
            session: None,
            world: Arc::clone(world),
            book: Arc::clone(book),
            keys: Arc::clone(&keys),
        };
        producers.spawn(producer.serve(Arc::clone(&receiver)));
    }
    let began = Instant::now();
    for (at, op) in plan {
        tokio::time::sleep_until(began + at).await;
        sender.send(op).unwrap();
    }
    drop(sender);
    while let Some(ended) = producers.join_next().await {
        ended.unwrap();
    }
}

struct Producer {
    url: String,
    session: Option<Session>,
    world: Arc<World>,
    book: Shared,
    keys: Arc<AtomicU64>,
}

/// The database refused it for good.
struct Refused;

impl Producer {
    async fn serve(mut self, queue: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Op>>>) {
        loop {
            let Some(op) = queue.lock().await.recv().await else { return };
            // A refusal is an answer, too; it was counted.
            let _ = self.perform(op).await;
        }
    }

    async fn perform(&mut self, op: Op) -> Result<(), Refused> {
        match op {
            Op::Batch(batch) => self.submit(batch).await?,
            Op::Append { pick, rows } => {
                let Some(batch) =
                    self.pick(pick, |batch| batch.command != "kills" && batch.command != "panics")
                else {
                    return Ok(());
                };
                let key = self.key();
                let inputs: Value = (1..=rows).map(|n| json!({ "n": n })).collect();
                let sql = "SELECT musterd.append_rows($1, $2::jsonb, $3)";
                self.ask("append", sql, &[&batch, &inputs, &key]).await?;
                self.book.lock().unwrap().batches.get_mut(&batch).unwrap().appended += rows;
            }
            Op::Set { command, count, failing } => self.enqueue_many(command, count, failing).await?,
            Op::Single { command, payload, dedup } => self.enqueue(command, payload, dedup).await?,
            Op::Uncle { pick } => {
                let Some(batch) = self.pick(pick, |_| true) else { return Ok(()) };
                let (key, payload) = (self.key(), json!({ "n": batch, "uncle_of": batch }));
                let sql = "SELECT musterd.enqueue_after('work', $1::jsonb, ARRAY[$2::bigint], idempotency_key => $3, max_attempts => 30)";
                let rows = self.ask("uncle", sql, &[&payload, &batch, &key]).await?;
                self.book.lock().unwrap().tasks.insert(rows[0].get(0), payload);
            }
            Op::HoldAndRelease { pick, held } => {
                let Some(batch) = self.pick(pick, |_| true) else { return Ok(()) };
                self.ask("hold", "SELECT musterd.hold($1)", &[&batch]).await?;
                tokio::time::sleep(held).await;
                self.ask("release", "SELECT musterd.release($1)", &[&batch]).await?;
            }
            Op::Abort { pick } => {
                let Some(batch) = self.pick(pick, |_| true) else { return Ok(()) };
                self.book.lock().unwrap().batches.get_mut(&batch).unwrap().aborted = true;
                self.ask("abort", "SELECT musterd.abort($1)", &[&batch]).await?;
            }
            Op::Redrive { pick } => {
                let Some(batch) = self.pick(pick, |_| true) else { return Ok(()) };
                self.book.lock().unwrap().batches.get_mut(&batch).unwrap().redriven = true;
                self.ask("redrive", "SELECT musterd.redrive($1)", &[&batch]).await?;
            }
            Op::Retry { pick } => {
                let task = {
                    let book = self.book.lock().unwrap();
                    let latest = &book.latest_tasks[book.latest_tasks.len().saturating_sub(50)..];
                    latest.get(pick as usize % latest.len().max(1)).copied()
                };
                let Some(task) = task else { return Ok(()) };
                self.ask("retry a task", "SELECT musterd.retry_task($1)", &[&task]).await?;
            }
            Op::Pause { queue, paused } => {
                self.ask("pause", "SELECT musterd.pause_queue($1)", &[&queue]).await?;
                tokio::time::sleep(paused).await;
                self.ask("resume", "SELECT musterd.resume_queue($1)", &[&queue]).await?;
            }
        }
        Ok(())
    }

    /// One of the latest batches of a kind.
    fn pick(&self, pick: u64, of: impl Fn(&Accepted) -> bool) -> Option<i64> {
        let book = self.book.lock().unwrap();
        let latest: Vec<i64> =
            book.order.iter().rev().filter(|id| of(&book.batches[*id])).take(15).copied().collect();
        latest.get(pick as usize % latest.len().max(1)).copied()
    }

    fn key(&self) -> String {
        format!("torture-{}", self.keys.fetch_add(1, Ordering::Relaxed))
    }

    async fn submit(&mut self, batch: Batch) -> Result<(), Refused> {
        const SQL: &str = "SELECT musterd.submit_batch($1::text, $2::jsonb, idempotency_key => $3, max_attempts => 30, max_failed => $4,
             on_budget => $5, on_done => $6, hold => $7)";
        let (key, count) = (self.key(), batch.rows.len() as i64);
        let rows = Value::Array(batch.rows);
        let on_done = batch.on_done.then_some("notify");
        let params: [&(dyn ToSql + Sync); 7] = [
            &batch.command,
            &rows,
            &key,
            &batch.max_failed,
            &batch.on_budget,
            &on_done,
            &batch.hold.is_some(),
        ];
        let id: i64 = if batch.twice {
            let mut other = Self { session: None, ..self.copy() };
            let (one, two) = tokio::join!(
                self.ask("submit twice", SQL, &params),
                other.ask("submit twice", SQL, &params),
            );
            let (one, two): (i64, i64) = (one?[0].get(0), two?[0].get(0));
            if one != two {
                self.wrong(format!("one key, two batches: {one} and {two}"));
            }
            one
        } else {
            self.ask("submit", SQL, &params).await?[0].get(0)
        };
        {
            let mut book = self.book.lock().unwrap();
            let accepted = Accepted {
                command: batch.command,
                rows: count,
                appended: 0,
                aborted: false,
                redriven: false,
                budget: batch.on_budget.is_some(),
            };
            if book.batches.insert(id, accepted).is_some() {
                book.wrong.push(format!("batch {id} was accepted twice, under two keys"));
            }
            book.order.push(id);
        }
        if let Some(held) = batch.hold {
            tokio::time::sleep(held).await;
            self.ask("release", "SELECT musterd.release($1)", &[&id]).await?;
        }
        Ok(())
    }

    async fn enqueue_many(&mut self, command: &str, count: i64, failing: i64) -> Result<(), Refused> {
        const SQL: &str =
            "SELECT musterd.enqueue_many($1, $2::jsonb[], idempotency_key => $3, max_attempts => $4)";
        let payload =
            |n| json!({ "n": n, "do": if n == failing && command != "echo" { "fail" } else { "ok" } });
        let payloads: Vec<Value> = (1..=count).map(payload).collect();
        let (key, attempts) = (self.key(), if command == "effect" { 3 } else { 30 });
        let rows = self.ask("enqueue many", SQL, &[&command, &payloads, &key, &attempts]).await?;
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        let mut book = self.book.lock().unwrap();
        if ids.len() != payloads.len() {
            book.wrong.push(format!("{} tasks for {} payloads", ids.len(), payloads.len()));
        }
        book.tasks.extend(ids.into_iter().zip(payloads));
        Ok(())
    }

    async fn enqueue(&mut self, command: &str, payload: Value, dedup: Option<i64>) -> Result<(), Refused> {
        const SQL: &str = "SELECT musterd.enqueue($1, $2::jsonb, idempotency_key => $3, dedup_key => $4, max_attempts => $5)";
        // A task of a dedup key is another's too: its payload is that of the first.
        let key = dedup.is_none().then(|| self.key());
        let dedup_key = dedup.map(|number| format!("dedup-{number}"));
        let payload = if dedup.is_some() { json!({ "n": 0, "do": "ok" }) } else { payload };
        let attempts = if command == "effect" { 3 } else { 30 };
        let rows = self.ask("enqueue", SQL, &[&command, &payload, &key, &dedup_key, &attempts]).await?;
        let id: i64 = rows[0].get(0);
        let mut book = self.book.lock().unwrap();
        book.tasks.insert(id, payload);
        if command != "family" {
            book.latest_tasks.push(id);
        }
        Ok(())
    }

    fn copy(&self) -> Self {
        Self {
            url: self.url.clone(),
            session: None,
            world: Arc::clone(&self.world),
            book: Arc::clone(&self.book),
            keys: Arc::clone(&self.keys),
        }
    }

    fn wrong(&self, what: String) {
        self.book.lock().unwrap().wrong.push(what);
    }

    /// Asks until there is an answer.
    async fn ask(
        &mut self,
        what: &'static str,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<Vec<Row>, Refused> {
        *self.book.lock().unwrap().operations.entry(what).or_default() += 1;
        loop {
            let session = match self.session.take() {
                Some(session) => session,
                None => match open(&self.url).await {
                    Ok(session) => session,
                    Err(_) => {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                },
            };
            match tokio::time::timeout(Duration::from_secs(15), session.query(sql, params)).await {
                Ok(Ok(rows)) => {
                    self.session = Some(session);
                    return Ok(rows);
                }
                Ok(Err(error)) if error.code().is_some_and(is_refusal) => {
                    let code = error.code().map_or("", SqlState::code);
                    let reason = format!("{what}: {code}");
                    *self.book.lock().unwrap().refused.entry(reason).or_default() += 1;
                    self.session = Some(session);
                    return Err(Refused);
                }
                // Not answered, or not now: once more, with the same key, on another connection.
                _ => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }
}

/// Whether the database has said no, and not only that it cannot now.
fn is_refusal(code: &SqlState) -> bool {
    let class = &code.code()[..2];
    !matches!(class, "08" | "57" | "53" | "40" | "58" | "XX") && !matches!(code.code(), "25006" | "55P03")
}
