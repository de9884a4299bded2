//! PostgreSQL: sessions ended, the server killed, the standby promoted, no writing, no room, locks, old snapshots, forged messages.

use std::time::Duration;

use anyhow::{Context, Result};
use futures::FutureExt;
use futures::future::BoxFuture;

use super::super::dice::Dice;
use super::super::faults::Reruns;
use super::super::world::World;
use super::{Kind, during};

pub(crate) const KINDS: &[Kind] = &[
    (6, "sessions terminated", terminate_all),
    (6, "some sessions terminated", terminate_some),
    (3, "PostgreSQL killed", restart),
    (2, "standby promoted", promote),
    (3, "read only", read_only),
    (3, "disk full", disk_full),
    (4, "a table locked", lock_table),
    (4, "an operator's lock", lock_rows),
    (2, "an advisory lock", lock_advisory),
    (2, "a long snapshot", long_snapshot),
    (8, "forged messages", forge),
];

/// An operator's session: its statements do not wait for ever.
const LIMITS: &str = "SET lock_timeout = '3s'; SET statement_timeout = '20s'";

async fn statement(world: &World, sql: &str) -> Result<()> {
    let session = world.admin().await?;
    session.batch_execute(LIMITS).await?;
    Ok(session.batch_execute(sql).await?)
}

/// In a transaction that stays open for `time`. An operator who cannot have the lock goes away.
async fn held_open(world: &World, sql: &str, time: Duration) -> Result<()> {
    let session = world.admin().await?;
    session.batch_execute(LIMITS).await?;
    session.batch_execute("BEGIN").await?;
    if session.batch_execute(sql).await.is_ok() {
        tokio::time::sleep(time).await;
    }
    // The connection may have been terminated meanwhile by another fault.
    let _ = session.batch_execute("ROLLBACK").await;
    Ok(())
}

fn terminate_all<'a>(world: &'a World, _dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let sql = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
    during(world, "sessions terminated", Reruns::None, statement(world, sql)).boxed()
}

fn terminate_some<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let of = dice.between(2, 6);
    async move {
        let sql = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
              WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND pid % {of} = 0"
        );
        during(world, "some sessions terminated", Reruns::None, statement(world, &sql)).await
    }
    .boxed()
}

/// Claims commit asynchronously: a crash of the server may take the latest of them back, and what they started runs again.
fn restart<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let rest = dice.seconds(0.0, 0.5);
    let crash = async move {
        world.cluster.lock().await.crash_and_restart().await?;
        tokio::time::sleep(rest).await;
        anyhow::Ok(())
    };
    during(world, "PostgreSQL killed", Reruns::All, crash).boxed()
}

fn promote<'a>(world: &'a World, _dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let promote = async move {
        let mut cluster = world.cluster.lock().await;
        cluster.promote().await?;
        world.follow(&cluster);
        // Until the new standby has it nothing commits.
        cluster.add_standby().await.context("the new standby")
    };
    during(world, "standby promoted", Reruns::All, promote).boxed()
}

fn read_only<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let time = dice.seconds(0.5, 3.0);
    let work = async move {
        let session = world.admin().await?;
        session.batch_execute("ALTER SYSTEM SET default_transaction_read_only = on").await?;
        session.batch_execute("SELECT pg_reload_conf()").await?;
        tokio::time::sleep(time).await;
        session.batch_execute("ALTER SYSTEM RESET default_transaction_read_only").await?;
        Ok(session.batch_execute("SELECT pg_reload_conf()").await?)
    };
    during(world, "read only", Reruns::None, work).boxed()
}

/// The server may end by itself for want of room, as after a crash.
fn disk_full<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let time = dice.seconds(0.5, 3.0);
    let work = async move {
        let mut cluster = world.cluster.lock().await;
        cluster.fill_disk()?;
        tokio::time::sleep(time).await;
        cluster.empty_disk();
        if cluster.revive().await? {
            world.follow(&cluster);
        }
        Ok(())
    };
    async move {
        if !world.has_disks {
            return Ok(());
        }
        during(world, "disk full", Reruns::All, work).await
    }
    .boxed()
}

fn lock_table<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let table = dice.weighted(&[
        (3, "blocks"),
        (2, "outcomes"),
        (2, "batches"),
        (2, "task_records"),
        (1, "task_claims"),
        (1, "workers"),
    ]);
    let mode = dice.weighted(&[(1, "SHARE"), (1, "EXCLUSIVE"), (1, "ACCESS EXCLUSIVE")]);
    let time = dice.seconds(0.3, 2.0);
    async move {
        let sql = format!("LOCK TABLE musterd.{table} IN {mode} MODE");
        during(world, "a table locked", Reruns::None, held_open(world, &sql, time)).await
    }
    .boxed()
}

/// Left open for as long as several sweeps and recoveries take.
fn lock_rows<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let sql = dice.weighted(&[
        (2, "SELECT FROM musterd.batches WHERE summarized_at IS NULL ORDER BY random() LIMIT 5 FOR UPDATE SKIP LOCKED"),
        (2, "SELECT FROM musterd.task_records WHERE state = 'queued' ORDER BY random() LIMIT 20 FOR UPDATE SKIP LOCKED"),
        (2, "SELECT FROM musterd.blocks ORDER BY random() LIMIT 5 FOR UPDATE SKIP LOCKED"),
        (1, "SELECT FROM musterd.task_claims ORDER BY random() LIMIT 2 FOR UPDATE SKIP LOCKED"),
        (1, "SELECT FROM musterd.task_tickets ORDER BY random() LIMIT 2 FOR UPDATE SKIP LOCKED"),
        (1, "SELECT FROM musterd.workers ORDER BY random() LIMIT 1 FOR UPDATE SKIP LOCKED"),
    ]);
    let time = dice.seconds(1.0, 4.5);
    during(world, "an operator's lock", Reruns::None, held_open(world, sql, time)).boxed()
}

fn lock_advisory<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let sql = "SELECT pg_try_advisory_xact_lock(hashtextextended('musterd.scope:' || b.id, 0)) FROM musterd.batches b
                WHERE b.summarized_at IS NULL LIMIT 20";
    let time = dice.seconds(1.0, 4.0);
    during(world, "an advisory lock", Reruns::None, held_open(world, sql, time)).boxed()
}

fn long_snapshot<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let sql = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM musterd.batches";
    let time = dice.seconds(3.0, 8.0);
    during(world, "a long snapshot", Reruns::None, held_open(world, sql, time)).boxed()
}

/// NOTIFY needs no right.
fn forge<'a>(world: &'a World, dice: &'a mut Dice) -> BoxFuture<'a, Result<()>> {
    let channel = dice.weighted(&[
        (4, "musterd_abort"),
        (2, "musterd_check"),
        (2, "musterd_wake"),
        (1, "musterd_done"),
        (1, "musterd_hold"),
    ]);
    async move {
        let sql = format!(
            "SELECT pg_notify('{channel}', t.id::text) FROM musterd.task_records t WHERE t.state IN ('running', 'queued', 'waiting')
              ORDER BY random() LIMIT 200;
             SELECT pg_notify('{channel}', x) FROM unnest(ARRAY['', 'x', '-1', '99999999999999999999', '{{}}', 'default']) x"
        );
        during(world, "forged messages", Reruns::None, statement(world, &sql)).await
    }
    .boxed()
}
