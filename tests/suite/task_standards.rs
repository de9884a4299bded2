//! The standards of docs/standards.md that are about tables rather than races: plans, and the page itself.

use crate::suite::support::database::TestDb;
use crate::suite::support::tasks::texts;

/// The pages of the cache that a statement touches.
async fn pages(client: &tokio_postgres::Client, statement: &str) -> u64 {
    let plan = texts(client, &format!("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) {statement}"))
        .await
        .join("\n");
    let buffers = plan.lines().find(|line| line.trim().starts_with("Buffers:")).expect(&plan);
    let counts = buffers.split_whitespace().filter_map(|word| word.split_once('='));
    counts.filter(|(what, _)| matches!(*what, "hit" | "read")).map(|(_, n)| n.parse::<u64>().unwrap()).sum()
}

/// What has ended, and what no worker of the queue can run, costs a claim nothing: neither one by priority nor one that ignores it.
#[tokio::test(flavor = "multi_thread")]
async fn no_claim_reads_what_has_ended_or_what_others_are_to_run() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let claim = |any: bool| {
        format!(
            "SELECT * FROM musterd.claim_tasks('default', 'w', ARRAY[gen_random_uuid(), gen_random_uuid()], '{{c,d}}', '{{8,8}}', '{{}}',
                                              p_any_priority => {any})"
        )
    };
    // Ended ones first, which have the small ids; then those of another command; the last few are to be claimed.
    let fill =
        "INSERT INTO musterd.tasks (command, priority) SELECT 'c', n % 7 FROM generate_series(1, 40000) n;
         UPDATE musterd.task_records SET state = 'succeeded', finished_at = now();
         DELETE FROM musterd.task_tickets;
         SELECT count(musterd.enqueue('others', priority => 1)) FROM generate_series(1, 5000);
         SELECT count(musterd.enqueue('c', priority => n % 3)) FROM generate_series(1, 200) n";
    client.batch_execute(fill).await.unwrap();
    for analyzed in [false, true] {
        if analyzed {
            client.batch_execute("VACUUM ANALYZE").await.unwrap();
        }
        for any in [false, true] {
            // The first call reads the catalogue.
            texts(&client, &claim(any)).await;
            let pages = pages(&client, &claim(any)).await;
            assert!(pages < 600, "{pages} pages, any priority: {any}, analyzed: {analyzed}");
        }
    }
    for statement in [
        "SELECT FROM musterd.task_records c WHERE c.parent_id = 7 AND musterd.is_unfinished(c.state)",
        "SELECT FROM musterd.task_records p WHERE p.state = 'waiting' ORDER BY p.priority, p.id LIMIT 1",
        "SELECT FROM musterd.task_records t WHERE t.queue = 'default' AND musterd.is_open(t.state) AND t.run_at > now()",
    ] {
        let plan = texts(&client, &format!("EXPLAIN {statement}")).await.join("\n");
        assert!(!plan.contains("Seq Scan on task_records"), "{statement}\n{plan}");
    }
}

/// A trigger that fires before each row of an update, even of other columns than those that are written, makes the server lock every row
/// first: the end of a task would write an eighth more WAL.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_task_locks_no_record_before_it_writes_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let before_each_updated_row = "SELECT g.tgname FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
          WHERE g.tgrelid = 'musterd.task_records'::regclass AND p.pronamespace = 'musterd'::regnamespace
            AND g.tgtype & 1 <> 0 AND g.tgtype & 2 <> 0 AND g.tgtype & 16 <> 0";
    assert_eq!(texts(&client, before_each_updated_row).await, Vec::<String>::new());
}

/// A page that names a test that is not there is worth nothing.
#[test]
fn every_test_that_the_page_names_exists() {
    let page = include_str!("../../docs/standards.md");
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite");
    let named: Vec<(&str, &str)> = page.split('`').filter_map(|word| word.split_once("::")).collect();
    assert!(named.len() > 8, "{named:?}");
    for (file, name) in named {
        let source = std::fs::read_to_string(root.join(format!("{file}.rs")))
            .unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(source.contains(&format!("fn {name}(")), "{file}::{name}");
    }
}
