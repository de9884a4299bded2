//! What `--json` prints is an interface: its keys are pinned, command by command.

use std::collections::BTreeMap;

use serde_json::Value;

use super::world::World;
use crate::suite::support::config::{finish, stdout};

const BATCH: &str = "aborted aborting archive command created_at data_gone_at data_held failed finished_at generation id keep outputs \
                     outputs_gone parent_id priority queue queued record_until rows running state succeeded";
const BATCH_SHOWN: &str = "aborted aborting archive canary command created_at data_gone_at data_held failed finished_at generation id keep \
                           outputs outputs_gone parent_id priority queue queued record_until redrives rows running state succeeded";
const TASK: &str = "after attempt children children_by_state command crashes created_at data_gone_at dedup_key error finished_at id idempotency_key \
                    max_attempts open_children parent_id payload priority queue result run_at state worker";
const WORKER: &str = "blocks commands ended_at host id last_beat_seconds pid queues rows seen_at started_at state tasks \
                      trouble version";
const QUEUE: &str = "batches_open block_size fibers mode name paused rows_held rows_queued tasks_queued tasks_running tasks_scheduled workers";

/// The keys of an object, or of the first thing of a list.
fn keys(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let mut keys: Vec<&str> = map.keys().map(String::as_str).collect();
            keys.sort_unstable();
            keys.join(" ")
        }
        Value::Array(things) => format!("[{}]", things.first().map(keys).unwrap_or_default()),
        other => panic!("neither object nor list: {other}"),
    }
}

/// Runs each command with `--json`; the keys of what it prints.
async fn keys_of(world: &World, commands: &[&str]) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for command in commands {
        let output = finish(world.shell(&format!("{command} --json"))).await;
        let text = stdout(&output);
        // A stream of them: each line is one.
        let first = text.lines().next().filter(|line| line.starts_with('{') && line.ends_with('}'));
        let value = serde_json::from_str(first.unwrap_or(&text));
        let value: Value = value.unwrap_or_else(|error| panic!("{command}: {error}: {output:?}"));
        found.insert((*command).to_owned(), keys(&value));
    }
    found
}

fn expected(table: &[(&str, &str)]) -> BTreeMap<String, String> {
    table.iter().map(|(command, keys)| ((*command).to_owned(), (*keys).to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_keys_of_json_stay_what_they_are() {
    let (workers, queues, tasks) = (format!("[{WORKER}]"), format!("[{QUEUE}]"), format!("[{TASK}]"));
    let done = [
        ("musterd batch list", "batches next_before"),
        ("musterd batch show 17", BATCH_SHOWN),
        ("musterd batch watch 17", BATCH),
        ("musterd batch rows 17", "batch next_from rows"),
        ("musterd batch outputs 17", "bytes file_count files generation location manifest"),
        ("musterd submit people.csv --command noop", "id repeated rows"),
        ("musterd submit people.csv --command noop --wait", BATCH),
        ("musterd submit people.csv --command noop --dry-run", "bytes errors more_errors ok rows"),
        ("musterd queue list", &queues),
        ("musterd worker list", &workers),
        ("musterd worker show web-1-4711-1763350000000000000", WORKER),
        ("musterd handler list", "[kind name procedure queue workers]"),
        ("musterd handler test charge --input sample.ndjson", "exchanges handler ok rows took_ms"),
        ("musterd config show", "config sources"),
        ("musterd config check", "ok problems"),
        ("musterd doctor", "checks verdict"),
        ("musterd migrate --status", "[applied_on name state version]"),
        ("musterd top", "at batches queues rows_per_second workers"),
        ("musterd why batch 17", "reasons subject"),
        ("musterd why queue default", "reasons subject"),
    ];
    let world = World::done().await;
    let commands: Vec<&str> = done.iter().map(|(command, _)| *command).collect();
    assert_eq!(keys_of(&world, &commands).await, expected(&done));
    let open = [
        ("musterd batch hold 17", "id state"),
        ("musterd batch release 17", "id state"),
        ("musterd batch append 17 tuesday.csv", "added id repeated rows"),
        ("musterd batch abort 17", "id state"),
        ("musterd queue pause default", "name paused"),
        ("musterd queue resume default", "name paused"),
        ("musterd enqueue report", "id"),
        ("musterd enqueue report --file payloads.ndjson", "first_id last_id tasks"),
        ("musterd task show 18", TASK),
        ("musterd task list", &tasks),
        ("musterd task retry 18", "id state"),
        ("musterd task abort 18", "id state"),
        ("musterd why task 18", "reasons subject"),
    ];
    let world = World::open().await;
    let commands: Vec<&str> = open.iter().map(|(command, _)| *command).collect();
    assert_eq!(keys_of(&world, &commands).await, expected(&open));
}
