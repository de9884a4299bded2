//! `http`: whatever the service does, every row ends as it should and nobody else's row is touched.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use super::server::{Act, Request, Server};
use super::{Site, all_succeeded};

/// Misbehaves in one way the first time a line is asked for, and behaves after that.
async fn once(misbehave: impl Fn(&Request) -> Act + Send + Sync + 'static) -> Server {
    Server::start(move |request: Request| {
        let first = request.body["block"]["attempt"] == 1;
        let act = if first { misbehave(&request) } else { request.all("succeeded") };
        async move { act }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_is_one_signed_request_with_everything_in_it() {
    let server = Server::start(|request: Request| async move { request.all("succeeded") }).await;
    let site = Site::start(&server.config(
        "block_size = 10\nsecret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\nbearer_token = \"t0ken\"\n\
         [handlers.work.headers]\nX-Team = \"billing\"\n",
    ))
    .await;
    all_succeeded(&site.run("work", 25).await, 25);
    let seen = server.seen();
    assert!(seen.iter().all(|request| request.lines().len() <= 10));
    assert!(seen.len() <= 5, "{} requests for 25 rows", seen.len());
    let one = &seen[0];
    assert_eq!(
        (one.headers["authorization"].as_str(), one.headers["x-team"].as_str()),
        ("Bearer t0ken", "billing")
    );
    assert_eq!(one.headers["idempotency-key"], one.headers["webhook-id"]);
    assert_eq!((&one.body["protocol"], &one.body["kind"]), (&json!("muster/1"), &json!("rows")));
    let uid: uuid::Uuid = site.client.query_one("SELECT uid FROM musterd.batches", &[]).await.unwrap().get(0);
    let batch = musterd::handler::batch_key(one.body["batch"]["id"].as_i64().unwrap(), uid);
    assert_eq!(batch, format!("{}-{}", one.body["batch"]["id"], &uid.simple().to_string()[..8]));
    assert_eq!(one.body["rows"][0]["idempotency_key"], json!(format!("{batch}/{}", one.lines()[0])));
    // Checked as a receiver would: with the key, the id, the time and the body as it came.
    let signer =
        musterd::handler::http::Signer::new(&"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".into()).unwrap();
    let time: i64 = one.headers["webhook-timestamp"].parse().unwrap();
    let expected = signer.sign(&one.headers["webhook-id"], time, &one.text);
    assert_eq!(one.headers["webhook-signature"], expected);
    assert!((jiff::Timestamp::now().as_second() - time).abs() < 300);
    let log = site.daemon.log().join("\n");
    assert!(!log.contains("t0ken") && !log.contains("MfKQ9r8"), "secrets do not belong in the log");
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_replies_are_tried_again() {
    for (what, act) in [
        ("500", (|_| Act::Reply(500, "oops".into())) as fn(&Request) -> Act),
        ("503", |_| Act::ReplyWith(503, vec![("retry-after", "0".into())], "busy".into())),
        ("half a reply", |request| match request.all("succeeded") {
            Act::Reply(_, body) => Act::Half(body),
            other => other,
        }),
        ("a reset", |_| Act::Reset),
        ("no JSON", |_| Act::Reply(200, "<html>".into())),
        ("an empty body", |_| Act::Reply(200, String::new())),
    ] {
        let server = once(act).await;
        let site = Site::start(&server.config("")).await;
        let rows = site.run("work", 5).await;
        all_succeeded(&rows, 5);
        assert!(rows.iter().all(|row| row.attempt == 2), "{what}: {rows:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_lines_cost_only_the_rows_they_are_about() {
    let server = once(|request| {
        let mut rows: Vec<_> = request
            .lines()
            .iter()
            .map(|line| json!({ "line": line, "outcome": "succeeded", "result": line }))
            .collect();
        rows[0]["outcome"] = json!("splendid");
        rows[1]["line"] = json!(4711);
        rows[2] = json!({ "line": 3, "outcome": "failed", "error": "the card is stolen" });
        rows.push(json!({ "line": 4, "outcome": "failed", "error": "said twice" }));
        rows.push(json!("nonsense"));
        Act::Reply(200, json!({ "rows": rows }).to_string())
    })
    .await;
    let site = Site::start(&server.config("")).await;
    let rows = site.run("work", 6).await;
    let states: Vec<(&str, i32)> = rows.iter().map(|row| (row.state.as_str(), row.attempt)).collect();
    assert_eq!(
        states,
        [
            ("succeeded", 2),
            ("succeeded", 2),
            ("failed", 1),
            ("succeeded", 1),
            ("succeeded", 1),
            ("succeeded", 1)
        ]
    );
    assert_eq!(rows[2].error, "the card is stolen");
    site.daemon.wait_for_log(super::SOON, |line| line.contains("does not answer what was asked")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_final_and_says_what_the_service_said() {
    let server = Server::start(|_| async { Act::Reply(422, "no such account".into()) }).await;
    let site = Site::start(&server.config("")).await;
    let rows = site.run("work", 2).await;
    assert!(rows.iter().all(|row| row.state == "failed" && row.attempt == 1), "{rows:?}");
    assert!(rows[0].error.contains("422") && rows[0].error.contains("no such account"), "{rows:?}");
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_service_costs_a_try_and_no_more_time_than_the_timeout() {
    let server = Server::start(|request: Request| async move {
        if request.body["block"]["attempt"] == 1 {
            std::future::pending::<()>().await;
        }
        request.all("succeeded")
    })
    .await;
    let config = server.config("").replace("30s", "200ms");
    let site = Site::start(&config).await;
    let rows = site.run("work", 3).await;
    all_succeeded(&rows, 3);
    assert!(rows.iter().all(|row| row.attempt == 2), "{rows:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn too_much_at_once_goes_in_halves_down_to_the_row() {
    let server = Server::start(|request: Request| async move {
        if request.lines().len() > 2 || request.lines().contains(&5) {
            Act::Reply(413, "large".into())
        } else {
            request.all("succeeded")
        }
    })
    .await;
    let site = Site::start(&server.config("")).await;
    let rows = site.run("work", 8).await;
    let failed: Vec<i32> = rows.iter().filter(|row| row.state == "failed").map(|row| row.line).collect();
    assert_eq!((rows.len(), failed), (8, vec![5]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unstorable_result_fails_its_own_row_only() {
    let server = Server::start(|request: Request| async move {
        let rows: Vec<String> = request
            .lines()
            .iter()
            .map(|line| {
                format!(
                    r#"{{"line":{line},"outcome":"succeeded","result":{}}}"#,
                    if *line == 2 { r#""\u0000""# } else { "1.50" }
                )
            })
            .collect();
        Act::Reply(200, format!(r#"{{"rows":[{}]}}"#, rows.join(",")))
    })
    .await;
    let site = Site::start(&server.config("")).await;
    let rows = site.run("work", 3).await;
    assert_eq!(
        rows.iter().map(|row| row.state.as_str()).collect::<Vec<_>>(),
        ["succeeded", "failed", "succeeded"]
    );
    let text: String = site
        .client
        .query_one("SELECT result::text FROM musterd.results WHERE line = 1", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(text, "1.50", "passed through, not read as a float");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_a_request_of_its_own_and_may_spawn() {
    let children = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&children);
    let server = Server::start(move |request: Request| {
        let counted = Arc::clone(&counted);
        async move {
            if request.body["task"]["parent_id"].is_null() {
                let spawn: Vec<_> = (0..3)
                    .map(|n| json!({ "command": "work", "payload": { "n": n }, "child_key": n.to_string() }))
                    .collect();
                return Act::Reply(
                    200,
                    json!({ "outcome": "succeeded", "result": { "made": 3 }, "spawn": spawn }).to_string(),
                );
            }
            counted.fetch_add(1, Ordering::SeqCst);
            Act::Reply(200, json!({ "outcome": "succeeded" }).to_string())
        }
    })
    .await;
    let site = Site::start(&server.config("")).await;
    let (state, result, _) = site.task("work", &json!({ "top": true })).await;
    assert_eq!((state.as_str(), result), ("succeeded", Some(json!({ "made": 3 }))));
    assert_eq!(children.load(Ordering::SeqCst), 3);
}

/// Runs two rows that never succeed; the error says why.
async fn fail_with(config: &str, words: &str) {
    let site = Site::start(config).await;
    let rows = site.run("work", 2).await;
    assert!(rows.iter().all(|row| row.state == "failed" && row.error.contains(words)), "{words}: {rows:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_is_not_followed() {
    let elsewhere = Server::start(|request: Request| async move { request.all("succeeded") }).await;
    let url = elsewhere.url();
    let server = Server::start(move |_| {
        let act = Act::ReplyWith(307, vec![("location", url.clone())], String::new());
        async move { act }
    })
    .await;
    fail_with(&server.config(""), "redirects are not followed").await;
    assert!(elsewhere.seen().is_empty(), "what was meant for one service went to another");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_above_the_limit_is_not_read() {
    let server = Server::start(|_| async { Act::Endless(4 << 20) }).await;
    fail_with(&server.config("max_reply_bytes = 1000000\n"), "longer than max_reply_bytes").await;
    let server = Server::start(|request: Request| async move {
        match request.all("succeeded") {
            Act::Reply(status, body) => Act::Reply(status, body + &" ".repeat(2_000)),
            other => other,
        }
    })
    .await;
    fail_with(&server.config("max_reply_bytes = 2000\n"), "longer than max_reply_bytes").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_stay_below_their_limit_and_a_row_above_it_fails() {
    let server = Server::start(|request: Request| async move { request.all("succeeded") }).await;
    let site = Site::start(&server.config("max_request_bytes = 1000\n[queues.default]\nfibers = 1\n")).await;
    let mut rows: Vec<_> = (1..=20).map(|n| json!({ "n": n })).collect();
    rows[6] = json!({ "n": "x".repeat(1_000) });
    let batch = site.submit_rows("work", &rows.into()).await;
    let rows = site.ended(batch).await;
    let failed: Vec<i32> = rows.iter().filter(|row| row.state == "failed").map(|row| row.line).collect();
    assert_eq!((rows.len(), failed), (20, vec![7]));
    assert!(rows[6].error.contains("above max_request_bytes"), "{}", rows[6].error);
    assert!(server.seen().iter().all(|request| request.text.len() <= 1_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_leads_to_a_private_address_leads_nowhere_unless_it_may() {
    let server = Server::start(|request: Request| async move { request.all("succeeded") }).await;
    let by_name = server.config("allow_private = false\n").replace("127.0.0.1", "localhost");
    fail_with(&by_name, "addresses that are not allowed").await;
    assert!(server.seen().is_empty());
    let site = Site::start(&by_name.replace("false", "true")).await;
    all_succeeded(&site.run("work", 2).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_may_bring_more_rows() {
    // Page by page: each row knows of the next one only. The second is answered wrongly at first.
    let server = Server::start(|request: Request| async move {
        let mut rows = Vec::new();
        for row in request.body["rows"].as_array().unwrap() {
            let (n, attempt) = (row["input"]["n"].as_i64().unwrap(), &row["attempt"]);
            let append: Vec<_> = (n < 4).then(|| json!({ "n": n + 1 })).into_iter().collect();
            let outcome = if n == 2 && *attempt == 1 { "retry" } else { "succeeded" };
            rows.push(json!({ "line": row["line"], "outcome": outcome, "result": n, "append": append }));
        }
        Act::Reply(200, json!({ "rows": rows }).to_string())
    })
    .await;
    let site = Site::start(&server.config("")).await;
    let rows = site.run("work", 1).await;
    all_succeeded(&rows, 4);
    let results: Vec<_> = rows.iter().map(|row| row.result.clone().unwrap()).collect();
    assert_eq!(results, [json!(1), json!(2), json!(3), json!(4)]);
    assert_eq!(rows.iter().map(|row| row.attempt).collect::<Vec<_>>(), [1, 2, 1, 1]);
}
