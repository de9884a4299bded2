//! What is submitted and asked for, and when: made from the seed before anything runs, so that a seed repeats it.

use std::time::Duration;

use serde_json::{Value, json};

use super::dice::Dice;

/// One thing that a producer or an operator does.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Batch(Batch),
    /// To one of the latest batches.
    Append {
        pick: u64,
        rows: i64,
    },
    /// Plain tasks in one call.
    Set {
        command: &'static str,
        count: i64,
        failing: i64,
    },
    Single {
        command: &'static str,
        payload: Value,
        dedup: Option<i64>,
    },
    /// An uncle of one of the latest batches.
    Uncle {
        pick: u64,
    },
    HoldAndRelease {
        pick: u64,
        held: Duration,
    },
    Abort {
        pick: u64,
    },
    Redrive {
        pick: u64,
    },
    Retry {
        pick: u64,
    },
    Pause {
        queue: &'static str,
        paused: Duration,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Batch {
    pub(crate) command: &'static str,
    pub(crate) rows: Vec<Value>,
    pub(crate) max_failed: i32,
    pub(crate) on_budget: Option<&'static str>,
    pub(crate) on_done: bool,
    /// Sent a second time, beside the first.
    pub(crate) twice: bool,
    /// A child of a task: the latest batch's. Not held, so that its parent can end.
    pub(crate) hold: Option<Duration>,
}

/// The operations in their order, each with its time.
pub(crate) fn plan(seed: u64, length: Duration, load: f64) -> Vec<(Duration, Op)> {
    let mut ops = Vec::new();
    for (name, mean, make) in KINDS {
        let mut dice = Dice::new(seed, name);
        let mut at = dice.gap(mean / load);
        while at < length {
            let op = make(&mut dice);
            ops.push((at, op));
            at += dice.gap(mean / load);
        }
    }
    ops.sort_by_key(|(at, _)| *at);
    ops
}

type Make = fn(&mut Dice) -> Op;

/// What, the mean number of seconds from one to the next, and how it is made.
const KINDS: &[(&str, f64, Make)] = &[
    ("work batch", 1.6, |dice| batch(dice, "work")),
    ("score batch", 3.0, |dice| batch(dice, "score")),
    ("pipe batch", 6.0, |dice| small_batch(dice, "pipe", 150)),
    ("echo batch", 5.0, |dice| batch(dice, "echo")),
    ("panics batch", 20.0, |dice| small_batch(dice, "panics", 20)),
    ("kills batch", 60.0, |dice| small_batch(dice, "kills", 8)),
    ("append", 3.0, |dice| Op::Append { pick: dice.number(), rows: dice.between(1, 60) }),
    ("set", 5.0, set),
    ("single", 0.3, single),
    ("family", 3.0, family),
    ("uncle", 10.0, |dice| Op::Uncle { pick: dice.number() }),
    ("hold", 5.0, |dice| Op::HoldAndRelease { pick: dice.number(), held: dice.seconds(0.0, 3.0) }),
    ("abort", 20.0, |dice| Op::Abort { pick: dice.number() }),
    ("redrive", 10.0, |dice| Op::Redrive { pick: dice.number() }),
    ("retry", 10.0, |dice| Op::Retry { pick: dice.number() }),
    ("pause", 40.0, |dice| Op::Pause {
        queue: dice.weighted(&[(2, "default"), (1, "kin")]),
        paused: dice.seconds(0.2, 2.0),
    }),
];

fn batch(dice: &mut Dice, command: &'static str) -> Op {
    let (least, most) =
        dice.weighted(&[(5, (0, 0)), (10, (1, 1)), (45, (2, 50)), (28, (51, 500)), (12, (501, 5000))]);
    let count = dice.between(least, most);
    Op::Batch(of_rows(dice, command, count))
}

fn small_batch(dice: &mut Dice, command: &'static str, most: i64) -> Op {
    let count = dice.between(1, most);
    Op::Batch(of_rows(dice, command, count))
}

fn of_rows(dice: &mut Dice, command: &'static str, count: i64) -> Batch {
    // Most batches are calm. In the others some rows, and of the hanging ones very few, do something else.
    let special: &[(u32, &str)] = match (command, count) {
        ("work", ..=200) => &[
            (12, "ok"),
            (2, "fail"),
            (2, "retry"),
            (2, "bad"),
            (1, "miss"),
            (1, "slow"),
            (1, "hang"),
            (4, "append"),
            (4, "output"),
        ],
        ("work", _) => &[(12, "ok"), (2, "fail"), (2, "retry"), (1, "miss"), (3, "output")],
        ("pipe", _) => {
            &[(12, "ok"), (2, "fail"), (2, "retry"), (1, "slow"), (1, "exit"), (1, "hang"), (1, "bad")]
        }
        ("score", _) => &[(12, "ok"), (2, "fail"), (2, "retry"), (1, "slow"), (1, "raise")],
        _ => &[(1, "ok")],
    };
    let special = dice.weighted(special);
    let share = match special {
        "ok" => 0.0,
        "hang" | "exit" | "raise" => (2.0 / count.max(1) as f64).min(0.5),
        "slow" => 0.02,
        "output" => 0.3,
        _ => 0.05,
    };
    let row = |number: i64, dice: &mut Dice| match share > 0.0 && dice.chance(share) {
        true => json!({ "n": number, "do": special }),
        false => json!({ "n": number }),
    };
    let rows = (1..=count).map(|number| row(number, dice)).collect();
    let budget = matches!(special, "fail" | "bad") && dice.chance(0.3);
    Batch {
        command,
        rows,
        max_failed: if budget { 1 } else { dice.weighted(&[(1, 0), (3, 100_000)]) },
        on_budget: budget.then(|| dice.weighted(&[(2, "hold"), (1, "abort")])),
        on_done: dice.chance(0.5),
        twice: dice.chance(0.1),
        hold: dice.chance(0.1).then(|| dice.seconds(0.1, 3.0)),
    }
}

fn set(dice: &mut Dice) -> Op {
    let command = dice.weighted(&[(3, "effect"), (3, "echo"), (1, "work")]);
    let most = if command == "work" { 60 } else { 500 };
    let count = dice.between(1, most);
    let failing = if dice.chance(0.2) { dice.between(1, count) } else { 0 };
    Op::Set { command, count, failing }
}

fn single(dice: &mut Dice) -> Op {
    let command = dice.weighted(&[(4, "effect"), (4, "work"), (2, "pipe"), (2, "echo")]);
    let special: &[(u32, &str)] = match command {
        "work" | "pipe" => {
            &[(60, "ok"), (3, "fail"), (3, "retry"), (2, "slow"), (2, "bad"), (1, "hang"), (1, "exit")]
        }
        "effect" => &[(20, "ok"), (1, "fail")],
        _ => &[(1, "ok")],
    };
    let payload = json!({ "n": dice.between(1, 1 << 40), "do": dice.weighted(special) });
    let dedup = dice.chance(0.1).then(|| dice.between(1, 5));
    Op::Single { command, payload, dedup }
}

fn family(dice: &mut Dice) -> Op {
    let children = dice.between(1, 6);
    let mut payload = json!({ "n": dice.between(1, 1 << 40), "do": "family", "children": children, "sibling": dice.chance(0.3) });
    if dice.chance(0.2) {
        payload["failing"] = dice.between(1, children).into();
    }
    Op::Single { command: "family", payload, dedup: None }
}
