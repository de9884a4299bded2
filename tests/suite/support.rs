//! What tests stand on: real servers, a fresh database each, the real binary, and no sleeps.
//!
//! Not every test uses every helper.
#![expect(dead_code, reason = "helpers are here for the tests that are still to come")]

#[path = "support/audit.rs"]
pub(crate) mod audit;
#[path = "support/config.rs"]
pub(crate) mod config;
#[path = "support/daemon.rs"]
pub(crate) mod daemon;
#[path = "support/database.rs"]
pub(crate) mod database;
#[path = "support/embedded.rs"]
pub(crate) mod embedded;
#[path = "support/gate.rs"]
pub(crate) mod gate;
#[path = "support/ledger.rs"]
pub(crate) mod ledger;
#[path = "support/manifests.rs"]
pub(crate) mod manifests;
#[path = "support/mutants.rs"]
pub(crate) mod mutants;
#[path = "support/pgbouncer.rs"]
pub(crate) mod pgbouncer;
#[path = "support/process.rs"]
pub(crate) mod process;
#[path = "support/proxy.rs"]
pub(crate) mod proxy;
#[path = "support/redis.rs"]
pub(crate) mod redis;
#[path = "support/redis_deaths.rs"]
pub(crate) mod redis_deaths;
#[path = "support/redis_kinds.rs"]
pub(crate) mod redis_kinds;
#[path = "support/run.rs"]
pub(crate) mod run;
#[path = "support/schedule.rs"]
pub(crate) mod schedule;
#[path = "support/services.rs"]
pub(crate) mod services;
#[path = "support/sql.rs"]
pub(crate) mod sql;
#[path = "support/tasks.rs"]
pub(crate) mod tasks;
#[path = "support/wait.rs"]
pub(crate) mod wait;
#[path = "support/work.rs"]
pub(crate) mod work;
#[path = "support/worker.rs"]
pub(crate) mod worker;
