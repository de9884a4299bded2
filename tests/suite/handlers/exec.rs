//! `exec`: whatever the program does, it costs the row it was at, and the rows behind it nothing.

use serde_json::json;

use super::{Ended, SOON, Site, all_succeeded, exec_config, python};

/// One process, so that what happens to it happens in order.
const ALONE: &str = "processes = 1\n[queues.default]\nfibers = 1\n";

/// The rows that needed another try.
fn retried(rows: &[Ended]) -> Vec<i32> {
    rows.iter().filter(|row| row.attempt > 1).map(|row| row.line).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_piped_through_long_lived_processes() {
    let file = python(
        "reply['result'] = {'n': n, 'pid': os.getpid(), 'key': row['idempotency_key'], 'kind': request['kind']}",
    );
    let site = Site::start(&exec_config(&file, "processes = 2\n")).await;
    let rows = site.run("work", 300).await;
    all_succeeded(&rows, 300);
    let pids: std::collections::HashSet<i64> =
        rows.iter().map(|row| row.result.as_ref().unwrap()["pid"].as_i64().unwrap()).collect();
    assert!((1..=2).contains(&pids.len()), "{pids:?}");
    let last = rows[299].result.as_ref().unwrap();
    assert_eq!((&last["n"], &last["kind"]), (&json!(300), &json!("row")));
    assert!(last["key"].as_str().unwrap().ends_with("/300"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_is_a_failed_try_of_its_row_alone() {
    let file = python(
        "if n == 3 and row['attempt'] == 1:\n    sys.stderr.write('out of cheese\\n')\n    sys.exit(7)",
    );
    let site = Site::start(&exec_config(&file, ALONE)).await;
    let rows = site.run("work", 10).await;
    all_succeeded(&rows, 10);
    assert_eq!(retried(&rows), [3]);
    let line = site.daemon.wait_for_log(SOON, |line| line.contains("a process was replaced")).await;
    assert!(line.contains("exit status 7") && !line.contains("out of cheese"), "{line}");
    site.daemon
        .wait_for_log(SOON, |line| line.contains("last words") && line.contains("out of cheese"))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_program_says_is_in_the_log_with_its_row() {
    let file = python("sys.stderr.write('z' * 3000 + '\\n')");
    let site = Site::start(&exec_config(&file, ALONE)).await;
    all_succeeded(&site.run("work", 1).await, 1);
    let said = site.daemon.wait_for_log(SOON, |line| line.contains("the program says")).await;
    assert!(said.contains("\"line\":1") && said.contains("\"handler\":\"work\""), "{said}");
    assert!(said.contains("\"batch\":1") && said.contains("zzzz") && said.len() < 1500, "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_always_crashes_fails_and_nobody_else_does() {
    let file = python("if n == 2:\n    os.kill(os.getpid(), signal.SIGSEGV)");
    let site = Site::start(&exec_config(&file, ALONE)).await;
    let rows = site.run("work", 5).await;
    let failed: Vec<i32> = rows.iter().filter(|row| row.state == "failed").map(|row| row.line).collect();
    assert_eq!((rows.len(), failed), (5, vec![2]));
    assert_eq!((rows[1].attempt, retried(&rows)), (3, vec![2]));
    assert!(rows[1].error.contains("signal 11"), "{}", rows[1].error);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hang_ends_with_its_process_and_the_rows_behind_it_are_not_charged() {
    let file = python("if n == 2 and row['attempt'] == 1:\n    time.sleep(600)");
    // Long enough for Python to start on a busy machine.
    let site = Site::start(&exec_config(&file, ALONE).replace("30s", "4s")).await;
    let rows = site.run("work", 6).await;
    all_succeeded(&rows, 6);
    assert_eq!(retried(&rows), [2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn noise_half_lines_huge_lines_and_wrong_lines_cost_one_row_each() {
    let file = python(
        "if row['attempt'] == 1:\n\
         \x20   if n == 2:\n        print('hello, I am a library')\n\
         \x20   if n == 4:\n        sys.stdout.write('{\"line\": 4, \"outc')\n        sys.stdout.flush()\n        sys.exit(0)\n\
         \x20   if n == 6:\n        sys.stdout.write('x' * 200000 + '\\n')\n\
         \x20   if n == 8:\n        reply['line'] = 9\n\
         \x20   if n == 10:\n        reply['outcome'] = 'splendid'\n\
         \x20   if n == 12:\n        os.close(1)\n        time.sleep(600)",
    );
    let site = Site::start(&exec_config(&file, &format!("max_reply_bytes = 100000\n{ALONE}"))).await;
    let rows = site.run("work", 13).await;
    all_succeeded(&rows, 13);
    assert_eq!(retried(&rows), [2, 4, 6, 8, 10, 12]);
    let log = site.daemon.log().join("\n");
    for reason in [
        "no reply",
        "in the middle of a reply",
        "longer than max_reply_bytes",
        "answered line 9",
        "closed its output",
    ] {
        assert!(log.contains(reason), "{reason} is missing from the log");
    }
    assert_eq!(
        log.matches("a process was replaced").count(),
        5,
        "a malformed outcome is no reason to replace anybody"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_environment_is_cleared_but_for_the_list_and_no_shell_reads_argv() {
    let file =
        python("reply['result'] = {'env': dict(os.environ), 'argv': sys.argv[1:], 'cwd': os.getcwd()}");
    let config = exec_config(&file, "env = [\"PATH\", \"MUSTERD_SUITE_SEEN\"]\ncwd = \"/\"\n")
        .replace("program.py\"]", "program.py\", \"$HOME; echo *\"]");
    let db = crate::suite::support::database::TestDb::new().await;
    let daemon = crate::suite::support::daemon::Daemon::builder(&db, &format!("{}{config}", super::QUICK))
        .env("MUSTERD_SUITE_SEEN", "yes")
        .env("MUSTERD_SUITE_SECRET", "canary")
        .start();
    daemon.wait_ready().await;
    let site = Site { client: db.client().await, daemon, db };
    let result = site.run("work", 1).await.remove(0).result.unwrap();
    let env = result["env"].as_object().unwrap();
    assert_eq!(env["MUSTERD_SUITE_SEEN"], json!("yes"));
    assert!(!env.contains_key("MUSTERD_SUITE_SECRET") && !env.contains_key("HOME"), "{env:?}");
    assert_eq!((&result["argv"], &result["cwd"]), (&json!(["$HOME; echo *"]), &json!("/")));
    assert!(!site.db.name().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_wants_too_much_memory_gets_none() {
    let file = python("if n == 1:\n    reply['result'] = len(bytearray(1 << 30))");
    let site = Site::start(&exec_config(&file, &format!("max_memory = 500000000\n{ALONE}"))).await;
    let rows = site.run("work", 2).await;
    assert_eq!(rows.iter().map(|row| row.state.as_str()).collect::<Vec<_>>(), ["failed", "succeeded"]);
    assert!(rows[0].error.contains("MemoryError"), "{}", rows[0].error);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_is_one_line_and_its_timeout_ends_the_process() {
    let file = python("reply = {'outcome': 'succeeded', 'result': {'n': n, 'kind': request['kind']}}");
    let more = format!(
        "{ALONE}[handlers.hasty]\nkind = \"exec\"\ntimeout = \"300ms\"\nargv = [\"sleep\", \"600\"]\n"
    );
    let site = Site::start(&exec_config(&file, &more)).await;
    let (state, result, _) = site.task("work", &json!({ "n": 5 })).await;
    assert_eq!((state.as_str(), result), ("succeeded", Some(json!({ "n": 5, "kind": "task" }))));
    let (state, _, error) = site.task("hasty", &json!({ "n": 13 })).await;
    assert!(state == "failed" && error.contains("timeout"), "{state}: {error}");
    let (state, ..) = site.task("work", &json!({ "n": 6 })).await;
    assert_eq!(state, "succeeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_may_bring_more_rows_and_a_crash_brings_none() {
    let file = python(
        "if n < 3:\n    reply['append'] = [{'n': n + 1}]\n\
         if n == 2 and row['attempt'] == 1:\n    sys.stdout.write('{\"line\": 2, \"append\": [{\"n\": 9}]')\n    sys.stdout.flush()\n    sys.exit(1)",
    );
    let site = Site::start(&exec_config(&file, ALONE)).await;
    let rows = site.run("work", 1).await;
    all_succeeded(&rows, 3);
    assert_eq!(retried(&rows), [2]);
}
