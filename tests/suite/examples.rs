//! Every example of `--help` and every command of the manual is run as it is written, in a place where it makes sense.
//!
//! What cannot be run here is in one table, with the reason; it is parsed all the same when it is ours.

mod found;
mod json;
mod world;

pub(crate) use found::commands;
use found::{Found, all};
use futures::StreamExt;
use world::World;

use crate::suite::support::config::{finish, stderr, stdout};
use crate::suite::support::daemon::http_get;

/// Where and how an example is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    /// In a world with a worker, where batch 17 is done; the exit code.
    Done(i32),
    /// The same; the exit code depends on the machine.
    Whatever,
    /// In a world without a worker, where batch 17 is open.
    Open,
    /// In a world without a worker, where task 17 is in this state.
    Task(&'static str),
    /// A GET on the worker's own port.
    Get,
    /// Not run, and why; but it is parsed.
    Parsed(&'static str),
    /// Not ours, and why it is not run.
    Elsewhere(&'static str),
}

/// The first that is part of the command says what is done with it; a command that has none is run in a world with a worker.
const PLANS: [(&str, Plan); 25] = [
    ("musterd run", Plan::Parsed("works until it is told to stop; tests/suite/process.rs runs it")),
    ("musterd dev", Plan::Parsed("has a PostgreSQL of its own; tests/suite/dev.rs runs it")),
    ("make ", Plan::Elsewhere("a target of the Makefile, which CI runs")),
    ("docker ", Plan::Elsewhere("needs a container runtime")),
    ("kubectl ", Plan::Elsewhere("needs a cluster")),
    ("man ./man", Plan::Elsewhere("needs the program man; cli_shell.rs looks at the page")),
    ("curl ", Plan::Get),
    ("musterd submit bad.ndjson", Plan::Done(1)),
    ("musterd enqueue echo --file bad.ndjson", Plan::Done(1)),
    ("musterd config check --config wrong.toml", Plan::Done(2)),
    ("musterd doctor --strict", Plan::Whatever),
    ("musterd batch hold 17", Plan::Open),
    ("musterd batch release 17", Plan::Open),
    ("musterd batch append 17", Plan::Open),
    ("musterd batch abort 17", Plan::Open),
    ("musterd queue pause", Plan::Open),
    ("musterd queue resume", Plan::Open),
    ("musterd submit monday.csv", Plan::Open),
    ("musterd task abort 17", Plan::Task("scheduled")),
    ("musterd task retry 17", Plan::Task("failed")),
    ("musterd task wait 17", Plan::Task("succeeded")),
    ("musterd task show 17", Plan::Task("waiting")),
    ("musterd why task 17", Plan::Task("waiting")),
    ("musterd why batch 17", Plan::Open),
    ("musterd enqueue report", Plan::Open),
];

fn plan(command: &str) -> Plan {
    PLANS.iter().find(|(part, _)| command.contains(part)).map_or(Plan::Done(0), |(_, plan)| *plan)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_example_and_every_command_of_the_manual_runs_as_it_is_written() {
    let found = all().await;
    assert!(found.len() > 60, "{} commands: {found:?}", found.len());
    for (part, plan) in PLANS {
        let is_used = found.iter().any(|found| found.command.contains(part));
        assert!(is_used, "no command has {part:?}, which is planned as {plan:?}");
    }
    // One after the other where they share a world, beside each other where each has its own.
    let done = World::done().await;
    let turn = tokio::sync::Mutex::new(());
    let problems: Vec<String> = futures::stream::iter(&found)
        .map(|found| run(found, &done, &turn))
        .buffer_unordered(4)
        .filter_map(std::future::ready)
        .collect()
        .await;
    assert!(problems.is_empty(), "{} of {}:\n{}", problems.len(), found.len(), problems.join("\n"));
}

/// Runs one as it is planned; what went wrong with it.
async fn run(found: &Found, done: &World, turn: &tokio::sync::Mutex<()>) -> Option<String> {
    let Found { command, place } = found;
    let (world, expected) = match plan(command) {
        Plan::Elsewhere(_) => return None,
        Plan::Get => {
            let path = command.split_once("127.0.0.1:9464").expect("our port").1;
            let (status, answer) = http_get(done.config().http_port(), path).await.unwrap();
            return (status != 200).then(|| format!("{place}: {command}: {answer}"));
        }
        Plan::Parsed(_) => (None, Some(0)),
        Plan::Done(code) => (None, Some(code)),
        Plan::Whatever => (None, None),
        Plan::Open => (Some(World::open().await), Some(0)),
        Plan::Task(state) => (Some(World::task(state).await), Some(0)),
    };
    let parsed_only = matches!(plan(command), Plan::Parsed(_));
    let line = if parsed_only { format!("{command} --help") } else { command.clone() };
    let output = match &world {
        Some(world) => finish(world.shell(&line)).await,
        None => {
            let _turn = turn.lock().await;
            finish(done.shell(&line)).await
        }
    };
    let right = expected.is_none_or(|code| output.status.code() == Some(code));
    let said = format!("{}{}", stdout(&output), stderr(&output));
    (!right || said.contains("panicked"))
        .then(|| format!("{place}: {line}\n  ended with {:?}: {said}", output.status.code()))
}
