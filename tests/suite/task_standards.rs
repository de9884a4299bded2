//! The standards of docs/standards.md that are about tables rather than races: plans, and the page itself.

use crate::suite::support::database::TestDb;
use crate::suite::support::tasks::texts;

const CLAIM: &str = include_str!("../../src/store/sql/claim_tasks.sql");

fn claim(scope: &str) -> String {
    CLAIM
        .replace("/*order*/", "t.priority,")
        .replace("/*scope*/", scope)
        .replace("/*count*/", "8")
        .replace("$1", "'default'")
        .replace("$2", "'w'")
        .replace("$3", "ARRAY[gen_random_uuid()]")
        .replace("$4", "'{c,d}'")
        .replace("$5", "7")
        .replace("$6", "'{c}'")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_claims_and_the_ends_of_tasks_read_an_index() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "ALTER TABLE musterd.tasks DISABLE TRIGGER USER;
             INSERT INTO musterd.tasks (command, queue, priority, state, parent_id)
             SELECT 'c', 'default', n % 7, CASE WHEN n % 4 = 0 THEN 'queued' ELSE 'succeeded' END::musterd.state,
                    CASE WHEN n > 100 AND n % 8 = 0 THEN n / 100 END
               FROM generate_series(1, 60000) n;
             ANALYZE musterd.tasks",
        )
        .await
        .unwrap();
    let statements = [
        claim(""),
        claim("AND t.parent_id IS NULL"),
        claim("AND t.parent_id = $5").replace("$5", "7"),
        "SELECT FROM musterd.tasks c WHERE c.parent_id = 7 AND c.state IN ('held', 'scheduled', 'queued', 'running', 'waiting')".into(),
        "SELECT FROM musterd.tasks p WHERE p.state = 'waiting' ORDER BY p.priority, p.id LIMIT 1".into(),
        "SELECT FROM musterd.tasks t WHERE t.worker = 'w' AND t.worker IS NOT NULL".into(),
        "SELECT FROM musterd.tasks d WHERE d.queue = 'default' AND d.state = 'scheduled' AND d.run_at <= now()".into(),
    ];
    for statement in statements {
        let plan = texts(&client, &format!("EXPLAIN {statement}")).await.join("\n");
        assert!(!plan.contains("Seq Scan on tasks"), "{statement}\n{plan}");
    }
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
