//! What goes wrong, and when: lanes of faults side by side, each made from the seed.

pub(crate) mod database;
pub(crate) mod network;
pub(crate) mod processes;
pub(crate) mod services;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use futures::future::BoxFuture;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::dice::Dice;
use super::faults::Reruns;
use super::world::World;

/// One fault: begins, lasts as its dice say, and is over when this returns.
pub(crate) type Make = for<'a> fn(&'a World, &'a mut Dice) -> BoxFuture<'a, Result<()>>;

/// A kind of fault with its weight.
pub(crate) type Kind = (u32, &'static str, Make);

/// The lanes: a name, the mean pause between two faults in seconds, and the kinds.
const LANES: &[(&str, f64, &[Kind])] = &[
    ("processes", 4.0, processes::KINDS),
    ("network", 3.0, network::KINDS),
    ("database", 4.0, database::KINDS),
    ("services", 3.0, services::KINDS),
];

/// Until `length` is over; then every fault is. Says what the nemesis itself could not do.
pub(crate) async fn run(world: &Arc<World>, seed: u64, length: Duration, only: &[String]) -> Vec<String> {
    let until = Instant::now() + length;
    let mut lanes = JoinSet::new();
    for (name, pause, kinds) in LANES {
        let kinds: Vec<Kind> = kinds.iter().copied().filter(|(_, kind, _)| is_wanted(kind, only)).collect();
        if !kinds.is_empty() {
            lanes.spawn(lane(Arc::clone(world), Dice::new(seed, name), *pause, kinds, until));
        }
    }
    let mut trouble = Vec::new();
    while let Some(ended) = lanes.join_next().await {
        trouble.extend(ended.unwrap());
    }
    trouble
}

fn is_wanted(kind: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|wanted| kind.contains(wanted.as_str()))
}

async fn lane(
    world: Arc<World>,
    mut dice: Dice,
    pause: f64,
    kinds: Vec<Kind>,
    until: Instant,
) -> Vec<String> {
    let choices: Vec<(u32, usize)> = kinds.iter().enumerate().map(|(place, kind)| (kind.0, place)).collect();
    let mut trouble = Vec::new();
    loop {
        let gap = dice.gap(pause);
        if Instant::now() + gap > until {
            return trouble;
        }
        tokio::time::sleep(gap).await;
        let (_, name, make) = kinds[dice.weighted(&choices)];
        // Each fault has dice of its own: how long one took changes nothing about the next.
        let mut own = Dice::new(dice.number(), name);
        if let Err(error) = make(&world, &mut own).await {
            trouble.push(format!("{name}: {error:#}"));
        }
    }
}

/// A fault of this kind for as long as `work` takes.
pub(crate) async fn during<T>(
    world: &World,
    kind: &'static str,
    reruns: Reruns,
    work: impl Future<Output = T>,
) -> T {
    let number = world.faults.begin(kind, reruns);
    let done = work.await;
    world.faults.end(number);
    done
}
