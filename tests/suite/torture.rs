//! The statements of the ledger at random from several connections: claims, flushes, zombies, repeats, recovery of the living,
//! give-backs, appends, holds, aborts, ends, redrives. No line is lost or recorded twice, and what was acknowledged is there.
//!
//! Every test database refuses what must not be (see `support/audit.rs`), so a wrong step fails where it is made. Twenty seconds;
//! longer with `MUSTERD_TEST_TORTURE=600` (seconds of random steps).

mod dice;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use deadpool_postgres::Object;
use futures::future::join_all;
use musterd::json::Json;
use musterd::store::batches;
use musterd::store::blocks::{self, Block, Priorities, Size, Wanted};
use musterd::store::flush::{BlockWrite, Close, Outcomes};
use musterd::store::recovery::{self, Ran};
use musterd::store::tasks::Scope;
use uuid::Uuid;

use self::dice::Dice;
use crate::suite::support::database::TestDb;
use crate::suite::support::ledger::{complete, look, session, write_all};
use crate::suite::support::worker::{ask, assert_accounts_balance};

const CONNECTIONS: u64 = 6;

/// A block that a worker has or had: it writes on as if it still had it.
struct Claim {
    block: Block,
    /// What it wrote, and whether that was acknowledged.
    writes: Vec<(BlockWrite, bool)>,
}

/// What is known about all connections together.
#[derive(Default)]
struct Memory {
    claims: Vec<Claim>,
    /// Lines whose success, or failure, was acknowledged.
    succeeded: BTreeSet<(i64, i32)>,
    failed: BTreeSet<(i64, i32)>,
    steps: BTreeMap<&'static str, u64>,
}

type Shared = Mutex<Memory>;

/// One connection, which is a worker of its own.
struct Hand<'a> {
    client: Object,
    name: String,
    dice: Dice,
    memory: &'a Shared,
}

/// Claims blocks of `size` lines, as the worker `name`.
async fn claim(client: &Object, name: &str, count: usize, size: i32, kind: &str) -> Vec<Block> {
    let tokens: Vec<Uuid> = (0..count).map(|_| Uuid::new_v4()).collect();
    let wanted = Wanted {
        queue: "default",
        worker: name,
        tokens: &tokens,
        commands: &["work".to_owned()],
        durable: &[],
        sizes: &[Size { most: size, least: size }],
        fibers: 1,
        scope: Scope::Any,
        behind_tasks: None,
    };
    match kind {
        "carve" => blocks::carve(client, &wanted, Priorities::Best).await.unwrap(),
        "take" => blocks::take(client, &wanted, Priorities::Ignored).await.unwrap(),
        _ => blocks::take_solo(client, &wanted).await.unwrap().into_iter().collect(),
    }
}

/// Success of these lines, each with its own number as its result.
fn succeed(outcomes: &mut Outcomes, lines: impl IntoIterator<Item = i32>) {
    for line in lines {
        outcomes.succeed(line, Some(Json::from_text(line.to_string())), None);
    }
}

/// Owned blocks, at random.
async fn owned(client: &Object, count: i64) -> Vec<(i64, Uuid, i64)> {
    let sql =
        "SELECT id, token, batch_id FROM musterd.blocks WHERE worker IS NOT NULL ORDER BY random() LIMIT $1";
    client
        .query(sql, &[&count])
        .await
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(2)))
        .collect()
}

/// Brings everything to its end, in good order.
async fn drain(client: &mut Object, memory: &Shared) {
    for id in open_batches(client).await {
        client.query("SELECT musterd.release($1)", &[&id]).await.unwrap();
    }
    client.execute("UPDATE musterd.blocks SET available_at = now()", &[]).await.unwrap();
    loop {
        let dead: Vec<(i64, Uuid)> =
            owned(client, 500).await.into_iter().map(|(id, token, _)| (id, token)).collect();
        recovery::free_if_held(client, &dead, 3, &Ran::default()).await.unwrap();
        let mut mine = claim(client, "drain", 8, 500, "carve").await;
        mine.extend(claim(client, "drain", 8, 500, "take").await);
        mine.extend(claim(client, "drain", 1, 500, "solo").await);
        if mine.is_empty() {
            break;
        }
        for block in mine {
            let mut outcomes = Outcomes::default();
            succeed(&mut outcomes, block.lines.iter());
            let write = BlockWrite {
                block: block.reference,
                part: block.parts.next(),
                outcomes,
                close: Some(Close::default()),
            };
            let lines = block.lines.iter().map(|line| (block.reference.batch, line));
            assert_eq!(write_all(client, &mut [write]).await, [true]);
            memory.lock().unwrap().succeeded.extend(lines);
        }
    }
    for batch in batches::over(client).await.unwrap() {
        assert_eq!(batches::heal(client, batch).await.unwrap(), 0, "lines of batch {batch} were lost");
    }
    for id in open_batches(client).await {
        let closed = look(client, id).await.unwrap_or_else(|| panic!("batch {id} is not over"));
        assert_eq!(complete(client, &closed).await, batches::Completion::Completed, "batch {id}");
    }
}

async fn open_batches(client: &Object) -> Vec<i64> {
    let sql = "SELECT id FROM musterd.batches WHERE summarized_at IS NULL";
    client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_order_of_the_steps_loses_or_doubles_a_line() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let seconds = std::env::var("MUSTERD_TEST_TORTURE").ok().and_then(|text| text.parse().ok()).unwrap_or(12);
    let end = Instant::now() + Duration::from_secs(seconds);
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let memory = Shared::default();
    let mut hands = Vec::new();
    for number in 0..CONNECTIONS {
        let (client, name) = (session(&db).await, format!("w{number}"));
        let alive = "INSERT INTO musterd.workers (id, host, pid, version) VALUES ($1, 'h', 1, 'v')";
        client.execute(alive, &[&name]).await.unwrap();
        hands.push(Hand { client, name, dice: Dice::new(seed ^ number), memory: &memory });
    }
    join_all(hands.into_iter().map(async |mut hand| {
        while Instant::now() < end {
            hand.step().await;
        }
    }))
    .await;
    drain(&mut session(&db).await, &memory).await;

    let Memory { succeeded, failed, steps, .. } = memory.into_inner().unwrap();
    println!("{steps:?}");
    assert_accounts_balance(&client).await;
    let wrong = "SELECT count(*) FROM musterd.results WHERE state = 'succeeded' AND result IS DISTINCT FROM to_jsonb(line)";
    assert_eq!(ask::<i64>(&client, wrong).await, 0, "a value is with another line");
    let recorded = async |sql: &str| -> BTreeSet<(i64, i32)> {
        client.query(sql, &[]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect()
    };
    let now = recorded("SELECT batch_id, line FROM musterd.results WHERE state = 'succeeded'").await;
    assert!(
        now == succeeded,
        "acknowledged and not there, or there and not acknowledged: {:?}",
        now.symmetric_difference(&succeeded).take(5).collect::<Vec<_>>()
    );
    let ever = recorded("SELECT batch_id, line FROM musterd.failures UNION SELECT batch_id, line FROM musterd.failures_history").await;
    assert!(failed.is_subset(&ever), "{:?}", failed.difference(&ever).take(5).collect::<Vec<_>>());
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    assert_eq!(ask::<i64>(&client, deadlocks).await, 0);
    assert!(steps["flush"] > 50 && steps["repeat"] > 5 && steps["recover"] > 5, "{steps:?}");
}
