//! Mechanisms of the schema that `MUSTERD_MUTANT=name` takes out of every test database, to see that a test notices. Those of
//! the program are in `src/failpoint/mutants.rs`.

use tokio_postgres::Client;

/// A mutant, a function of the schema, a piece of it, and what stands there instead.
const FUNCTIONS: &[(&str, &str, &str, &str)] = &[
    (
        "no_parent_lock",
        "musterd.enforce_no_grandchildren()",
        "WHERE t.id = NEW.parent_id FOR SHARE",
        "WHERE t.id = NEW.parent_id",
    ),
    (
        "no_advisory_lock",
        "musterd.complete_scopes(musterd.scope_end[], boolean, boolean)",
        "IF NOT p_insist THEN",
        "IF false THEN",
    ),
    (
        "no_set_equation",
        "musterd.audit(bigint)",
        "IF v_inside < v_rows THEN",
        "succeeded := v_rows - failed; doubled := 0; outside := 0; IF false THEN",
    ),
    (
        "no_ticket_guard",
        "musterd.finish_tasks(musterd.task_outcome[], boolean)",
        "AND t.ticket = o.number AND",
        "AND",
    ),
];

/// Other statements.
const STATEMENTS: &[(&str, &str)] =
    &[("no_part_key", "ALTER TABLE musterd.outcomes DROP CONSTRAINT outcomes_pkey")];

/// Takes the mechanism out that the environment names. A mutant that changes nothing is a mistake, and fails.
pub(crate) async fn apply(client: &Client) {
    let Ok(mutant) = std::env::var("MUSTERD_MUTANT") else { return };
    for (_, function, from, to) in FUNCTIONS.iter().filter(|(name, ..)| *name == mutant) {
        let sql = "SELECT pg_get_functiondef($1::text::regprocedure)";
        let text: String = client.query_one(sql, &[function]).await.unwrap().get(0);
        assert!(text.contains(from), "{mutant}: {function} has no {from:?}");
        client.batch_execute(&text.replace(from, to)).await.unwrap();
    }
    for (_, statement) in STATEMENTS.iter().filter(|(name, _)| *name == mutant) {
        client.batch_execute(statement).await.unwrap();
    }
}
