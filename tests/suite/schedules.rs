//! Schedules over real connections: what PostgreSQL does when sessions meet at a row.

use crate::suite::support::database::TestDb;
use crate::suite::support::schedule::Schedule;

async fn two_sessions(db: &TestDb) -> Schedule {
    db.client()
        .await
        .batch_execute("CREATE TABLE lanes (id int PRIMARY KEY, turn int NOT NULL); INSERT INTO lanes VALUES (1, 0), (2, 0)")
        .await
        .unwrap();
    Schedule::new(db, &["a", "b"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_waits_for_the_row_and_sees_what_was_committed() {
    let db = TestDb::new().await;
    let mut schedule = two_sessions(&db).await;
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", "UPDATE lanes SET turn = 5 WHERE id = 1").await.touched(), 1);
    schedule.blocks("b", "UPDATE lanes SET turn = turn + 1 WHERE id = 1 RETURNING turn").await;
    assert!(schedule.is_blocked("b").await);
    schedule.run("a", "COMMIT").await;
    assert_eq!(schedule.resumes("b").await.rows(), ["6"]);
    assert!(!schedule.is_blocked("b").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn skip_locked_passes_over_what_another_holds() {
    let db = TestDb::new().await;
    let mut schedule = two_sessions(&db).await;
    let claim = "SELECT id FROM lanes ORDER BY id FOR UPDATE SKIP LOCKED LIMIT 1";
    schedule.run("a", "BEGIN").await;
    assert_eq!(schedule.run("a", claim).await.rows(), ["1"]);
    assert_eq!(schedule.run("b", claim).await.rows(), ["2"]);
    schedule.run("a", "ROLLBACK").await;
    assert_eq!(schedule.run("b", claim).await.rows(), ["1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_ends_with_its_sqlstate() {
    let db = TestDb::new().await;
    let mut schedule = two_sessions(&db).await;
    for (session, row) in [("a", 1), ("b", 2)] {
        // The one that looks for deadlocks first is their victim.
        let patience = if session == "b" { "10ms" } else { "10min" };
        schedule.run(session, &format!("SET deadlock_timeout = '{patience}'")).await;
        schedule.run(session, "BEGIN").await;
        schedule.run(session, &format!("UPDATE lanes SET turn = 1 WHERE id = {row}")).await;
    }
    schedule.blocks("a", "UPDATE lanes SET turn = 2 WHERE id = 2").await;
    assert_eq!(schedule.run("b", "UPDATE lanes SET turn = 2 WHERE id = 1").await.sqlstate(), "40P01");
    schedule.run("b", "ROLLBACK").await;
    assert_eq!(schedule.resumes("a").await.touched(), 1);
}

#[tokio::test(flavor = "multi_thread")]
#[should_panic(expected = "b was not blocked")]
async fn a_statement_that_should_wait_and_does_not_fails_its_test() {
    let db = TestDb::new().await;
    let mut schedule = two_sessions(&db).await;
    schedule.blocks("b", "UPDATE lanes SET turn = turn + 1 WHERE id = 1").await;
}
