use super::*;
use crate::{
    handler::{BlockCall, Done, Outcome, TaskOutcome},
    json::Json,
    store::{
        blocks::{BlockRef, Parts},
        pages::InputRow,
    },
};
use std::time::Duration;

fn assigned(asked: &[i32], reply: &str) -> (Vec<(i32, Outcome)>, Leftovers) {
    let (rows, left) = assign(asked.iter().copied(), read_rows(reply.as_bytes()).unwrap());
    (rows.into_iter().map(|(line, outcome)| (line, outcome.checked())).collect(), left)
}

fn call<'a>(context: &'a Json, parts: &'a Parts, attempt: i32, timeout: u64) -> BlockCall<'a> {
    BlockCall {
        command: "c",
        context,
        block: BlockRef { id: 1, token: uuid::Uuid::nil(), batch: 9 },
        uid: uuid::Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef),
        parts,
        attempt,
        timeout: Duration::from_secs(timeout),
        traceparent: Some("00-0-0-00"),
    }
}

fn ok(result: &str) -> Outcome {
    Outcome::Succeeded(Done { result: Some(Json::from_text(result)), ..Done::default() })
}

fn error_of(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::Failed(failed) | Outcome::Retry { error: failed, .. } => &failed.error,
        Outcome::Succeeded(_) => panic!("{outcome:?}"),
    }
}

#[test]
fn results_are_passed_through_as_they_stand() {
    let text = r#"{"b":1.000, "a": [1e3 ,"\u00e9"], "b":2}"#;
    let (rows, left) =
        assigned(&[7], &format!(r#"{{"rows":[{{"line":7,"outcome":"succeeded","result":{text}}}]}}"#));
    assert_eq!(rows, [(7, ok(text))]);
    assert!(left.is_none());
}

#[test]
fn one_outcome_may_stand_for_all_and_rows_overrule_it() {
    let (rows, left) = assigned(
        &[1, 2, 3],
        r#"{"outcome":"succeeded","rows":[{"line":2,"outcome":"failed","error":"no"}]}"#,
    );
    assert!(matches!(rows[0].1, Outcome::Succeeded(_)) && matches!(rows[2].1, Outcome::Succeeded(_)));
    assert_eq!(rows[1].1, Outcome::Failed("no".into()));
    assert!(left.is_none());
}

#[test]
fn missing_duplicate_unknown_and_malformed_rows_touch_no_other_row() {
    let reply = r#"{"rows":[
        {"line":1,"outcome":"succeeded","result":1},
        {"line":1,"outcome":"failed","error":"twice"},
        {"line":2,"outcome":"sucess"},
        {"line":"three","outcome":"succeeded"},
        "not even an object",
        {"line":99,"outcome":"failed","error":"whose?"},
        {"line":4,"outcome":"retry","error":"later","retry_after":2.5},
        {"line":5,"outcome":"succeeded","result":"\u0000"}]}"#;
    let (rows, left) = assigned(&[1, 2, 3, 4, 5, 6], reply);
    assert_eq!(rows[0], (1, ok("1")));
    assert!(error_of(&rows[1].1).contains("sucess"), "{rows:?}");
    assert_eq!(error_of(&rows[2].1), "no outcome for this line in the reply");
    let later = Outcome::Retry { error: "later".into(), after: Some(Duration::from_millis(2500)) };
    assert_eq!(rows[3], (4, later));
    assert!(
        matches!(&rows[4].1, Outcome::Failed(failed) if failed.error.contains("cannot be stored")),
        "{rows:?}"
    );
    assert!(matches!(rows[5].1, Outcome::Retry { .. }));
    assert_eq!(left, Leftovers { duplicate: 1, unknown: 1, unreadable: 2, missing: 2 });
}

#[test]
fn what_is_no_reply_is_told_with_its_beginning() {
    for reply in ["", "<html>Bad gateway</html>", r#"{"rows":["#, "[]", r#"{"rows":7}"#, "{}", "\u{0}"] {
        let error = read_rows(reply.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("reply"), "{reply}: {error}");
    }
    assert!(read_rows(b"\xff\xfe").is_err());
    let long = read_rows("x".repeat(10_000).as_bytes()).unwrap_err().to_string();
    assert!(long.len() < 1_000, "{long}");
    assert!(read_row(br#"{"outcome":"succeeded"}"#).is_err());
    assert_eq!(read_row(br#"{"line":3,"outcome":"succeeded","result":null}"#).unwrap().0, 3);
}

#[test]
fn odd_waits_do_no_harm() {
    for wait in ["-1", "1e300", "null", "0"] {
        let (rows, _) = assigned(&[1], &format!(r#"{{"outcome":"retry","retry_after":{wait}}}"#));
        assert!(matches!(rows[0].1, Outcome::Retry { .. }), "{wait}: {rows:?}");
    }
}

#[test]
fn a_task_says_what_comes_next() {
    let reply = br#"{"outcome":"succeeded","result":{"n":1},"spawn":[{"command":"c","payload":{"a": 1},"child_key":"k"}],"after":[{"command":"u"}]}"#;
    let TaskOutcome::Done(done) = read_task(reply).unwrap() else { panic!() };
    assert_eq!(done.spawn[0].payload, Some(Json::from_text(r#"{"a": 1}"#)));
    assert_eq!((done.spawn[0].command.as_str(), done.after[0].command.as_str()), ("c", "u"));
    let bad = read_task(br#"{"outcome":"succeeded","spawn":[{"payload":{}}]}"#).unwrap();
    assert!(matches!(&bad, TaskOutcome::Retry { error, .. } if error.error.contains("command")), "{bad:?}");
}

#[test]
fn a_request_says_everything_and_stays_on_one_line() {
    let context = Json::from_text("{\"k\":\n1}");
    let rows = [InputRow { line: 3, input: "{\"a\": 1.10}" }];
    let parts = Parts::default();
    let call = call(&context, &parts, 2, 30);
    let line = RowLines::new(&call).unwrap().line(&rows[0]);
    assert!(!line.contains(['\n', '\r']), "{line}");
    assert!(line.contains("1.10"), "{line}");
    let row: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(row["row"]["idempotency_key"], "9-01234567/3");
    assert_eq!(row["kind"], "row");
    let request: serde_json::Value = serde_json::from_str(&rows_request(&call, &rows).unwrap()).unwrap();
    assert_eq!(request["protocol"], VERSION);
    assert_eq!((request["rows"][0]["attempt"].as_i64(), request["timeout"].as_f64()), (Some(2), Some(30.0)));
    assert!(request["deadline"].as_str().unwrap().ends_with('Z'));
}

#[test]
fn rows_to_append_stand_in_a_row_s_own_entry_and_are_checked() {
    let (rows, _) = assigned(
        &[1, 2],
        r#"{"rows":[{"line":1,"outcome":"succeeded","append":[{"a":1.0},null]},
                    {"line":2,"outcome":"succeeded","append":[1,"\u0000"]}]}"#,
    );
    let append = vec![Json::from_text(r#"{"a":1.0}"#), Json::from_text("null")];
    assert_eq!(rows[0].1, Outcome::Succeeded(Done { append, ..Done::default() }));
    assert!(
        matches!(&rows[1].1, Outcome::Failed(failed) if failed.error.starts_with("appended row 2 ")),
        "{rows:?}"
    );
    let (rows, _) = assigned(&[1, 2], r#"{"outcome":"succeeded","append":[1]}"#);
    assert!(rows.iter().all(
        |(_, outcome)| matches!(outcome, Outcome::Retry { error, .. } if error.error.contains("own entry"))
    ));
    let task = read_task(br#"{"outcome":"succeeded","append":[1]}"#).unwrap();
    assert!(matches!(task, TaskOutcome::Failed(failed) if failed.error.contains("append_rows")));
    // Nor has a task a file: that is said, whatever became of it.
    for outcome in ["succeeded", "failed"] {
        let reply = format!(r#"{{"outcome":"{outcome}","error":"no","result":1,"outputs":{{"a.txt":"x"}}}}"#);
        let task = read_task(reply.as_bytes()).unwrap();
        assert!(
            matches!(task, TaskOutcome::Failed(failed) if failed.error.contains("whose batch has files"))
        );
    }
}

/// The keys of an object are those of the schema's definition: none missing, none unheard of.
fn fits(value: &serde_json::Value, schema: &serde_json::Value, definition: &str) {
    let definition = &schema["$defs"][definition];
    for key in definition["required"].as_array().unwrap() {
        assert!(value.get(key.as_str().unwrap()).is_some(), "{key} is missing in {value}");
    }
    for key in value.as_object().unwrap().keys() {
        assert!(definition["properties"].get(key).is_some(), "{key} is not in the schema");
    }
}

#[test]
fn requests_are_what_the_schema_says() {
    let schema: serde_json::Value =
        serde_json::from_str(include_str!("../../../docs/protocol/v1/request.schema.json")).unwrap();
    let context = Json::from_text("{}");
    let rows = [InputRow { line: 1, input: "1" }];
    let parts = Parts::default();
    let call = call(&context, &parts, 1, 1);
    let request: serde_json::Value = serde_json::from_str(&rows_request(&call, &rows).unwrap()).unwrap();
    fits(&request, &schema, "rows");
    fits(&request["batch"], &schema, "batch");
    fits(&request["block"], &schema, "block");
    fits(&request["rows"][0], &schema, "one");
    let line = RowLines::new(&call).unwrap().line(&rows[0]);
    fits(&serde_json::from_str(&line).unwrap(), &schema, "row");
}

#[test]
fn the_replies_in_the_manual_are_understood() {
    let manual = include_str!("../../../docs/protocol.md");
    let schema: serde_json::Value =
        serde_json::from_str(include_str!("../../../docs/protocol/v1/reply.schema.json")).unwrap();
    let blocks: Vec<&str> =
        manual.split("```json\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    let [_, rows, _, task, _, row] = blocks.as_slice() else { panic!("{} blocks", blocks.len()) };
    let (assigned, left) = assigned(&[1, 2], rows);
    assert!(left.is_none() && matches!(assigned[0].1, Outcome::Succeeded(_)), "{assigned:?}");
    assert!(matches!(assigned[1].1, Outcome::Retry { after: Some(_), .. }), "{assigned:?}");
    let TaskOutcome::Done(done) = read_task(task.as_bytes()).unwrap() else { panic!("{task}") };
    assert_eq!((done.spawn.len(), done.after.len()), (1, 1));
    fits(&serde_json::from_str(task).unwrap(), &schema, "task");
    assert_eq!(read_row(row.as_bytes()).unwrap().0, 1);
    fits(&serde_json::from_str(row).unwrap(), &schema, "row");
}
