//! The network between each replica and PostgreSQL, and between the producers and PostgreSQL.

use std::time::Duration;

use anyhow::Result;
use futures::FutureExt;
use futures::future::BoxFuture;

use super::super::dice::Dice;
use super::super::faults::Reruns;
use super::super::world::{REPLICAS, TTL, World};
use super::{Kind, during};
use crate::suite::support::proxy::{Fault, FaultProxy};

pub(crate) const KINDS: &[Kind] = &[
    (4, "slow network", slow),
    (4, "packets dropped", dropped),
    (2, "packets dropped past the TTL", dropped_long),
    (4, "replies held", held),
    (6, "connections reset", reset),
    (4, "connections refused", refused),
    (2, "connections refused past the TTL", refused_long),
    (8, "cut after COMMIT", cut),
    (4, "replies cut short", cut_short),
    (3, "half closed", half_closed),
    (1, "PgBouncer dies", pooler),
];

/// The proxy of a replica, or of the producers.
fn one<'a>(world: &'a World, dice: &mut Dice) -> (Option<usize>, &'a FaultProxy) {
    let number = dice.between(0, REPLICAS as i64) as usize;
    match world.databases.get(number) {
        Some(proxy) => (Some(number), proxy),
        None => (None, &world.front),
    }
}

/// A fault that makes no row run twice, however it hits.
async fn short(
    world: &World,
    dice: &mut Dice,
    kind: &'static str,
    fault: Fault,
    time: Duration,
) -> Result<()> {
    let (_, proxy) = one(world, dice);
    during(world, kind, Reruns::None, apply(proxy, fault, time)).await;
    Ok(())
}

/// One that lasts long enough for the replica to be declared dead.
async fn long(world: &World, dice: &mut Dice, kind: &'static str, fault: Fault) -> Result<()> {
    let time = TTL + dice.seconds(1.0, 3.0);
    let (number, proxy) = one(world, dice);
    let reruns = number.map_or(Reruns::None, Reruns::Of);
    let apply = async {
        if fault == Fault::RefuseNew {
            proxy.set(fault);
            proxy.reset_all();
        }
        apply(proxy, fault, time).await;
    };
    during(world, kind, reruns, apply).await;
    Ok(())
}

async fn apply(proxy: &FaultProxy, fault: Fault, time: Duration) {
    proxy.set(fault);
    tokio::time::sleep(time).await;
    proxy.set(Fault::None);
}

macro_rules! short {
    ($name:ident, $kind:literal, $fault:expr, $least:literal..$most:literal) => {
        fn $name<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
            async move {
                let time = dice.seconds($least, $most);
                let fault = $fault(dice);
                short(world, dice, $kind, fault, time).await
            }
            .boxed()
        }
    };
}

short!(slow, "slow network", |dice: &mut Dice| Fault::Latency(dice.seconds(0.01, 0.06)), 0.5..3.0);
short!(dropped, "packets dropped", |_: &mut Dice| Fault::Blackhole, 0.2..2.0);
short!(held, "replies held", |_: &mut Dice| Fault::HoldReplies, 0.2..2.0);
short!(refused, "connections refused", |_: &mut Dice| Fault::RefuseNew, 0.2..2.0);
short!(cut, "cut after COMMIT", |_: &mut Dice| Fault::CutCommits, 0.05..1.0);
short!(half_closed, "half closed", |_: &mut Dice| Fault::HalfClose, 0.05..0.3);
short!(
    cut_short,
    "replies cut short",
    |dice: &mut Dice| Fault::CutRepliesAfter(dice.between(1, 5_000) as usize),
    0.1..1.0
);

fn dropped_long<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    long(world, dice, "packets dropped past the TTL", Fault::Blackhole).boxed()
}

fn refused_long<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    long(world, dice, "connections refused past the TTL", Fault::RefuseNew).boxed()
}

fn reset<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    async move {
        let (_, proxy) = one(world, dice);
        during(world, "connections reset", Reruns::None, async { proxy.reset_all() }).await;
        Ok(())
    }
    .boxed()
}

fn pooler<'a>(world: &'a World, _dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    async move {
        during(world, "PgBouncer dies", Reruns::None, async { world.start_pooler_again() }).await;
        Ok(())
    }
    .boxed()
}
