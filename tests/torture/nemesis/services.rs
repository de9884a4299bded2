//! Redis, S3, and the service behind the handlers.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;

use super::super::dice::Dice;
use super::super::faults::Reruns;
use super::super::sink::{Mood, TIMEOUT};
use super::super::world::World;
use super::{Kind, during};
use crate::suite::support::proxy::{Fault, FaultProxy};

pub(crate) const KINDS: &[Kind] = &[
    (5, "FLUSHALL", flush_all),
    (2, "Redis from an old dump", old_dump),
    (4, "garbage in Redis", garbage),
    (4, "Redis away", redis_away),
    (4, "S3 refuses", s3_refuses),
    (4, "S3 loses replies", s3_loses),
    (8, "the service errs", sink_errs),
    (4, "the service's network", sink_network),
];

/// Speaks to Redis past its proxy, command after command.
fn redis(address: SocketAddr, commands: &[&[&str]]) -> Result<()> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    for command in commands {
        let mut text = format!("*{}\r\n", command.len());
        for word in *command {
            text += &format!("${}\r\n{word}\r\n", word.len());
        }
        stream.write_all(text.as_bytes())?;
        let mut answer = [0; 512];
        ensure!(stream.read(&mut answer)? > 0, "Redis hung up");
    }
    Ok(())
}

fn address(world: &World) -> SocketAddr {
    world.redis.lock().unwrap().address()
}

fn flush_all<'a>(world: &'a World, _dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    during(world, "FLUSHALL", Reruns::None, async { redis(address(world), &[&["FLUSHALL"]]) }).boxed()
}

/// What it knew some seconds ago: workers that are gone live again, blocks that are done are in hand.
fn old_dump<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let time = dice.seconds(2.0, 6.0);
    async move {
        redis(address(world), &[&["SAVE"]])?;
        tokio::time::sleep(time).await;
        let restart = async {
            let mut redis = world.redis.lock().unwrap();
            redis.stop();
            redis.restart();
        };
        during(world, "Redis from an old dump", Reruns::None, restart).await;
        Ok(())
    }
    .boxed()
}

/// Wrong types in the keys of the workers, forged heartbeats of dead ones, names of no worker.
fn garbage<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let which = dice.between(0, 3);
    let work = async move {
        let workers = world
            .admin()
            .await?
            .query("SELECT id FROM musterd.workers ORDER BY started_at DESC LIMIT 6", &[])
            .await?;
        let registry = "TORTURE_WORKER_REGISTRY";
        for row in &workers {
            let id: String = row.get(0);
            let (beat, rows) = (format!("TORTURE_{{{id}}}_HEARTBEAT"), format!("TORTURE_{{{id}}}_ROWS"));
            let nonsense = "00000000-0000-0000-0000-000000000000";
            let commands: &[&[&str]] = match which {
                0 => &[&["DEL", &beat], &["SADD", &beat, "x"], &["SET", &rows, "x"], &["SET", registry, "x"]],
                1 => &[&["SET", &beat, "alive"], &["SADD", &rows, nonsense, "\u{1}", "x y z"]],
                2 => &[&["DEL", &beat, &rows], &["SADD", registry, "ghost", "a-1-2", "{}", "x x"]],
                _ => {
                    &[&["SET", &beat, "", "PX", "1"], &["LPUSH", "TORTURE_{x}_ROWS", "1"], &["DEL", registry]]
                }
            };
            redis(address(world), commands)?;
        }
        Ok(())
    };
    during(world, "garbage in Redis", Reruns::None, work).boxed()
}

async fn through(proxy: &FaultProxy, fault: Fault, time: Duration) {
    proxy.set(fault);
    if fault == Fault::RefuseNew {
        proxy.reset_all();
    }
    tokio::time::sleep(time).await;
    proxy.set(Fault::None);
}

/// Also for longer than the TTL: PostgreSQL is the other witness.
fn redis_away<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let (fault, time) =
        (dice.weighted(&[(1, Fault::Blackhole), (1, Fault::RefuseNew)]), dice.seconds(0.5, 8.0));
    async move {
        during(world, "Redis away", Reruns::None, through(&world.redis_proxy, fault, time)).await;
        Ok(())
    }
    .boxed()
}

fn s3_refuses<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let time = dice.seconds(0.5, 4.0);
    async move {
        during(world, "S3 refuses", Reruns::None, through(&world.s3_proxy, Fault::RefuseNew, time)).await;
        Ok(())
    }
    .boxed()
}

fn s3_loses<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let (fault, time) =
        (dice.weighted(&[(1, Fault::HoldReplies), (2, Fault::CutRepliesAfter(20))]), dice.seconds(0.5, 4.0));
    async move {
        during(world, "S3 loses replies", Reruns::None, through(&world.s3_proxy, fault, time)).await;
        Ok(())
    }
    .boxed()
}

/// The ledger has what it said: each such run says that there will be another.
fn sink_errs<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let mood = dice.weighted(&[
        (2, Mood::Broken),
        (1, Mood::Busy),
        (1, Mood::Away),
        (1, Mood::Silent),
        (1, Mood::Garbled),
        (1, Mood::Half),
    ]);
    let time = dice.seconds(0.2, 1.5);
    let work = async move {
        world.sink.set(mood);
        tokio::time::sleep(time).await;
        world.sink.set(Mood::Well);
        Ok(())
    };
    during(world, "the service errs", Reruns::None, work).boxed()
}

/// What it says is lost: its rows are asked for again.
fn sink_network<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let fault = dice.weighted(&[
        (1, Fault::RefuseNew),
        (1, Fault::HoldReplies),
        (1, Fault::CutRepliesAfter(200)),
        (1, Fault::HalfClose),
        (1, Fault::Latency(Duration::from_millis(50))),
    ]);
    let time = dice.seconds(0.2, 1.5);
    async move {
        let work = async {
            through(&world.sink_proxy, fault, time).await;
            // Requests that were under way have until their timeout.
            tokio::time::sleep(TIMEOUT).await;
        };
        during(world, "the service's network", Reruns::Http, work).await;
        Ok(())
    }
    .boxed()
}
