//! `exec`: an answer belongs to what was asked. What a program writes beside the point is taken for no other answer.

use serde_json::json;

use super::{SOON, Site, all_succeeded, exec_config, python};
use crate::suite::support::wait::eventually;

/// One process, so that what happens to it happens in order.
const ALONE: &str = "processes = 1\n[queues.default]\nfibers = 1\n";

/// Runs tasks one after the other; each result must be its own.
async fn all_get_their_own(site: &Site, tasks: i64) {
    for n in 1..=tasks {
        let (state, result, error) = site.task("work", &json!({ "n": n })).await;
        assert_eq!((state.as_str(), result), ("succeeded", Some(json!({ "n": n }))), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_too_many_shifts_no_answer() {
    // The same reply twice, once: a forgotten print.
    let file = python("if n == 1 and row['attempt'] == 1:\n    print(json.dumps(reply))");
    let site = Site::start(&exec_config(&file, ALONE)).await;
    all_get_their_own(&site, 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_comes_late_is_found_before_the_next_request() {
    let file = python(
        "sys.stdout.write(json.dumps(reply) + '\\n')\nsys.stdout.flush()\n\
         if n == 1:\n    time.sleep(0.3)\n    print(json.dumps(reply), flush=True)\n    open('late', 'w').close()\n\
         continue",
    );
    let site = Site::start(&exec_config(&file, ALONE)).await;
    all_get_their_own(&site, 1).await;
    let late = site.daemon.config().dir().join("late");
    eventually(SOON, "it has written more", async || late.exists().then_some(())).await;
    for n in 2..=4 {
        let (state, result, _) = site.task("work", &json!({ "n": n })).await;
        assert_eq!((state.as_str(), result), ("succeeded", Some(json!({ "n": n }))));
    }
    site.daemon.wait_for_log(SOON, |line| line.contains("writes more to stdout than it is asked for")).await;
}

/// Writes every reply once more, when it has read the next request; `more` may name the requests.
fn late_writer(more: &str) -> std::path::PathBuf {
    python(&format!(
        "{more}reply['result']['pid'] = os.getpid()\n\
         if 'spare' in globals():\n    print(json.dumps(spare), flush=True)\n    time.sleep(0.3)\n\
         spare = reply\n\
         print(json.dumps(reply), flush=True)\n\
         open(f'written-{{n}}', 'w').close()\n\
         continue"
    ))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spare_line_that_comes_behind_the_next_request_is_taken_once_at_most() {
    let site = Site::start(&exec_config(&late_writer(""), ALONE)).await;
    let mut pids = std::collections::HashSet::new();
    for n in 1..=6 {
        let (state, result, error) = site.task("work", &json!({ "n": n })).await;
        let result = result.unwrap_or_default();
        assert_eq!(state, "succeeded", "{error}");
        // The reply that comes late is there before the next request is.
        let written = site.daemon.config().dir().join(format!("written-{n}"));
        eventually(SOON, "the program has written its reply", async || written.exists().then_some(())).await;
        // Nothing tells the spare line of the first task from a reply to the second.
        let expected = if n == 2 { 1 } else { n };
        assert_eq!(result["n"], expected, "{result}");
        pids.insert(result["pid"].as_i64());
    }
    // The first two lines are of one process; from then on each serves one task.
    assert_eq!(pids.len(), 5);
    let rows = site.run("work", 3).await;
    assert_eq!(rows.iter().filter(|row| row.state == "succeeded" && row.attempt <= 3).count(), 3, "{rows:?}");
    let wrong: Vec<_> =
        rows.iter().filter(|row| row.result.as_ref().is_some_and(|result| result["n"] != row.line)).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    site.daemon.wait_for_log(SOON, |line| line.contains("writes more to stdout than it is asked for")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spare_line_of_a_program_that_names_its_requests_is_never_taken() {
    let named = "reply['idempotency_key'] = row['idempotency_key']\n";
    let site = Site::start(&exec_config(&late_writer(named), ALONE)).await;
    for n in 1..=5 {
        let (state, result, error) = site.task("work", &json!({ "n": n })).await;
        assert_eq!((state.as_str(), &result.unwrap_or_default()["n"]), ("succeeded", &json!(n)), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_line_of_one_batch_is_no_answer_to_another() {
    let file = python(
        "if n == 1 and request['batch']['id'] == 1:\n\
         \x20   print(json.dumps(dict(reply, result={'stale': True})), file=sys.stdout)\n\
         \x20   reply['result'] = {'n': 1, 'pid': os.getpid()}",
    );
    // Of its two lines the first is the answer of batch 1, and the second answers nothing.
    let site = Site::start(&exec_config(&file, ALONE)).await;
    let first = site.run("work", 1).await;
    all_succeeded(&first, 1);
    let second = site.run("work", 1).await;
    assert_eq!(second[0].result, Some(json!({ "n": 1 })), "{second:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_names_another_request_is_none() {
    // It names another task, by id and by key, and then none.
    let file = python(
        "reply['idempotency_key'] = row['idempotency_key']\nreply['id'] = row.get('id')\n\
         if n == 2 and row['attempt'] == 1:\n    reply['id'] = 1\n    reply['idempotency_key'] = None if 'id' in row else 'x/2'\n\
         if n == 3 and row['attempt'] == 1:\n    reply['idempotency_key'] = 'task/1'\n\
         if n == 4 and row['attempt'] == 1:\n    del reply['id'], reply['idempotency_key']",
    );
    let site = Site::start(&exec_config(&file, ALONE)).await;
    all_get_their_own(&site, 5).await;
    let replaced = || site.daemon.log().iter().filter(|line| line.contains("a process was replaced")).count();
    assert_eq!(replaced(), 3);
    // Rows name themselves by line, and may by key. The second comes first to a process that has named nothing yet: it is in one
    // block with the first, and no retry can come between them.
    let batch =
        site.submit_rows("work", &json!([{ "n": 2 }, { "n": 4 }, { "n": 3 }, { "n": 1 }, { "n": 5 }])).await;
    let rows = site.ended(batch).await;
    all_succeeded(&rows, 5);
    let retried: Vec<i32> = rows.iter().filter(|row| row.attempt > 1).map(|row| row.line).collect();
    assert_eq!(retried, [1, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_output_costs_its_own_row_and_little_memory() {
    let file = python(
        "if row['attempt'] == 1 and n == 2:\n    while True:\n        sys.stdout.write('x' * 65536)\n\
         if row['attempt'] == 1 and n == 4:\n    while True:\n        sys.stdout.write('{\"line\": 4}\\n')\n\
         if row['attempt'] == 1 and n == 6:\n    for i in range(200000):\n        sys.stderr.write('noise ' * 20 + '\\n')",
    );
    let site = Site::start(&exec_config(&file, &format!("max_reply_bytes = 1000000\n{ALONE}"))).await;
    let before = site.daemon.memory().1;
    let rows = site.run("work", 8).await;
    all_succeeded(&rows, 8);
    let retried: Vec<i32> = rows.iter().filter(|row| row.attempt > 1).map(|row| row.line).collect();
    // Line 4's first answer has no outcome, which is a failed try; the lines behind it find another process.
    assert_eq!(retried.iter().filter(|line| ![2, 4, 5].contains(*line)).count(), 0, "{retried:?}");
    let grown = site.daemon.memory().1 - before;
    assert!(grown < 200, "{grown} MiB more");
}
