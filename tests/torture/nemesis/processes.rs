//! Replicas that die, stop, are asked to end, and are all away at once.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use futures::FutureExt;
use futures::future::BoxFuture;
use rustix::process::Signal;

use super::super::dice::Dice;
use super::super::faults::{Fault, Reruns, now};
use super::super::replica::Replica;
use super::super::world::{REPLICAS, TTL, World};
use super::{Kind, during};

pub(crate) const KINDS: &[Kind] = &[
    (10, "SIGKILL", kill),
    (6, "SIGSTOP past the TTL", stop),
    (4, "SIGSTOP for a moment", stop_shortly),
    (6, "SIGTERM", terminate),
    (5, "a failpoint", failpoint),
    (1, "all replicas away", all_away),
];

/// Steps at which a replica is made to die, to sleep or to fail. Each is visited often.
const STEPS: &[&str] = &[
    "flush.begin",
    "flush.committed",
    "tasks.before_commit",
    "tasks.committed",
    "complete.counted",
    "complete.committed",
    "fiber.start",
    "claim.fibers",
    "recovery.listed",
    "sql.before_commit",
    "sql.committed",
    "sql.block.before_commit",
    "sql.block.committed",
];

fn one(world: &World, dice: &mut Dice) -> (usize, Arc<Replica>) {
    let number = dice.between(0, REPLICAS as i64 - 1) as usize;
    (number, Arc::clone(&world.replicas[number]))
}

fn note(world: &World, kind: &'static str, replica: usize, began: f64, pid: Option<u32>) {
    world.faults.add(Fault { kind, reruns: Reruns::Of(replica), began, ended: now(), pid });
}

fn kill<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    async move {
        let (number, replica) = one(world, dice);
        let began = now();
        let pid = replica.signal(Signal::KILL);
        note(world, "SIGKILL", number, began, pid);
        Ok(())
    }
    .boxed()
}

fn stop<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let time = TTL + dice.seconds(1.5, 5.0);
    async move { pause(world, dice, "SIGSTOP past the TTL", time).await }.boxed()
}

fn stop_shortly<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let time = dice.seconds(0.1, 1.5);
    async move { pause(world, dice, "SIGSTOP for a moment", time).await }.boxed()
}

async fn pause(world: &World, dice: &mut Dice, kind: &'static str, time: Duration) -> Result<()> {
    let (number, replica) = one(world, dice);
    // A moment's pause makes no row run again; but a request may time out in it.
    let began = now();
    let pid = replica.signal(Signal::STOP);
    tokio::time::sleep(time).await;
    replica.signal(Signal::CONT);
    note(world, kind, number, began, pid);
    Ok(())
}

fn terminate<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    async move {
        let (number, replica) = one(world, dice);
        let began = now();
        let Some(pid) = replica.signal(Signal::TERM) else { return Ok(()) };
        // What it has not finished in its grace goes back and runs elsewhere.
        let status = replica.wait_exit(pid, Duration::from_secs(25)).await;
        note(world, "SIGTERM", number, began, Some(pid));
        if status.is_none() && replica.pid() == Some(pid) {
            replica.ends.lock().unwrap().push("SIGTERM: still there after 25 s".into());
            replica.signal(Signal::KILL);
        }
        Ok(())
    }
    .boxed()
}

/// Started again, it dies at the n-th visit of a step, or sleeps there.
fn failpoint<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    async move {
        let (number, replica) = one(world, dice);
        let step = STEPS[dice.between(0, STEPS.len() as i64 - 1) as usize];
        let action = dice.weighted(&[(3, "abort"), (1, "sleep(1s)"), (2, "error")]);
        replica.arm(format!("{step}={}*{action}", dice.between(1, 20)));
        let began = now();
        let pid = replica.signal(Signal::KILL);
        note(world, "a failpoint", number, began, pid);
        Ok(())
    }
    .boxed()
}

fn all_away<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let time = TTL + dice.seconds(2.0, 4.0);
    let away = async move {
        for replica in &world.replicas {
            replica.want(false);
            replica.signal(Signal::KILL);
        }
        tokio::time::sleep(time).await;
        world.replicas.iter().for_each(|replica| replica.want(true));
        Ok(())
    };
    during(world, "all replicas away", Reruns::All, away).boxed()
}
