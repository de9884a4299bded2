//! The trace context of a submitter reaches the handler, whichever door it came by.

use serde_json::Value;

use super::caller::{Caller, JSON, NDJSON, PATIENCE};
use super::{ended, start};
use crate::suite::support::config::{finish, json};
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A handler that answers with the trace it was given.
const TELLING: &str = r#"
[handlers.tell]
kind = "exec"
argv = ["sh", "-c", '''
while IFS= read -r request; do
    trace=$(printf '%s' "$request" | sed -n 's/.*"traceparent":"\([^"]*\)".*/\1/p')
    line=$(printf '%s' "$request" | sed -n 's/.*"row":{"line":\([0-9]*\),.*/"line":\1,/p')
    printf '{%s"outcome":"succeeded","result":"%s"}\n' "$line" "$trace"
done''']
"#;

async fn told_to_row(caller: &Caller, id: &Value) -> Value {
    assert_eq!(ended(caller, id).await["state"], "succeeded");
    caller.get(&format!("/v1/batches/{id}/rows")).await.json(200)["rows"][0]["result"].clone()
}

async fn told_to_task(caller: &Caller, id: &Value) -> Value {
    eventually(PATIENCE, "the task ends", async || {
        let task = caller.get(&format!("/v1/tasks/{id}")).await.json(200);
        (task["state"] == "succeeded").then(|| task["result"].clone())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_context_is_handed_on_and_anything_else_is_ignored() {
    let db = TestDb::new().await;
    let (daemon, caller) = start(&db, TELLING).await;
    for (given, expected) in [(vec![TRACE], TRACE), (vec!["nonsense"], ""), (vec![TRACE, TRACE], "")] {
        let mut headers: Vec<(&str, &str)> = given.iter().map(|trace| ("traceparent", *trace)).collect();
        headers.push(NDJSON);
        let id = caller.post("/v1/batches?command=tell", &headers, "1").await.json(201)["id"].clone();
        assert_eq!(told_to_row(&caller, &id).await, expected, "{given:?}");
        headers.pop();
        headers.push(JSON);
        let id = caller.post("/v1/tasks", &headers, r#"{"command":"tell"}"#).await.json(201)["id"].clone();
        assert_eq!(told_to_task(&caller, &id).await, expected, "{given:?}");
    }

    let rows = daemon.config().dir().join("rows.ndjson");
    std::fs::write(&rows, "1\n").unwrap();
    let submit = ["submit", rows.to_str().unwrap(), "--command", "tell", "--json"];
    let enqueue = ["enqueue", "tell", "--json"];
    for (args, option, environment, expected) in [
        (&submit[..], Some(TRACE), None, TRACE),
        (&submit, None, Some(TRACE), TRACE),
        (&submit, None, Some("nonsense"), ""),
        (&enqueue, Some(TRACE), Some("nonsense"), TRACE),
        (&enqueue, None, Some(TRACE), TRACE),
    ] {
        let mut command = daemon.config().command(args);
        command.args(option.iter().flat_map(|trace| ["--traceparent", trace]));
        command.envs(environment.map(|trace| ("TRACEPARENT", trace)));
        let id = json(&finish(command).await)["id"].clone();
        let told = match args[0] {
            "submit" => told_to_row(&caller, &id).await,
            _ => told_to_task(&caller, &id).await,
        };
        assert_eq!(told, expected, "{args:?}");
    }
}
