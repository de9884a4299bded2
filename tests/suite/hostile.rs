//! Defaults of a role that would break a careless worker: isolation, search_path, read-only, time zone.

use crate::suite::support::database::TestDb;
use crate::suite::support::worker::{
    Script, Worker, assert_accounts_balance, end_of, retry, submit, succeeded,
};

/// Names of ours and of PostgreSQL's own, in a schema that comes before theirs; whoever uses one of them fails.
const EVIL: &str = "
CREATE SCHEMA evil;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
CREATE VIEW evil.batches AS SELECT 1 / 0 AS id;
CREATE VIEW evil.blocks AS SELECT 1 / 0 AS id;
CREATE VIEW evil.tasks AS SELECT 1 / 0 AS id;
CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE sql AS $$ SELECT 'infinity'::timestamptz $$;
CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT 'infinity'::timestamptz $$;
CREATE FUNCTION evil.floor(numeric) RETURNS numeric LANGUAGE sql AS $$ SELECT 1 / 0.0 $$;
CREATE FUNCTION evil.cardinality(anyarray) RETURNS int LANGUAGE sql AS $$ SELECT 1 / 0 $$;
CREATE FUNCTION evil.pg_notify(text, text) RETURNS void LANGUAGE sql AS $$ SELECT 1 / 0 $$;
CREATE FUNCTION evil.set_config(text, text, boolean) RETURNS text LANGUAGE sql AS $$ SELECT (1 / 0)::text $$;
CREATE FUNCTION evil.make_interval(secs double precision) RETURNS interval LANGUAGE sql AS $$ SELECT interval '1 year' $$;
";
/// Operators cannot be named by their schema in every place: only a pinned search_path keeps these out.
const EVIL_OPERATORS: &str = "
CREATE FUNCTION evil.never(bigint, bigint) RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;
CREATE FUNCTION evil.never(text, text) RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;
CREATE OPERATOR evil.= (leftarg = bigint, rightarg = bigint, function = evil.never);
CREATE OPERATOR evil.= (leftarg = text, rightarg = text, function = evil.never);
";

async fn works_with_hostile_defaults(more: &str, toml: &str) {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = db.login("musterd_worker").await;
    let defaults = [
        "default_transaction_isolation = 'serializable'",
        "search_path = evil, pg_catalog",
        "timezone = 'Asia/Kathmandu'",
        "datestyle = 'SQL, DMY'",
        "intervalstyle = 'sql_standard'",
        "standard_conforming_strings = off",
        "bytea_output = 'escape'",
    ];
    client.batch_execute(&format!("{EVIL} {more}")).await.unwrap();
    for default in defaults {
        client.batch_execute(&format!("ALTER ROLE \"{}\" SET {default}", login.name)).await.unwrap();
    }
    let script = Script::new(|call| async move {
        if call.line % 10 == 3 && call.attempt == 1 { retry("again") } else { succeeded() }
    });
    let toml = format!("[database]\nurl = \"{}\"\n{toml}", login.url);
    let mut workers = Vec::new();
    for _ in 0..2 {
        workers.push(Worker::start(&db, &toml, &[("work", script.clone())]).await);
    }
    let mut batches = Vec::new();
    for size in [0, 1, 300, 50] {
        batches.push(submit(&client, "work", size, "on_done => 'tell', row_timeout => '1 min'").await);
    }
    for batch in batches {
        assert_eq!(end_of(&client, batch).await.0, "succeeded");
    }
    assert_eq!(script.calls().len(), 351 + 35);
    for worker in workers {
        assert!(worker.stop().await.is_clean());
    }
    assert_accounts_balance(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_our_own_are_pinned_whatever_the_role_says() {
    works_with_hostile_defaults(EVIL_OPERATORS, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_pooler_every_statement_says_itself_what_it_needs() {
    works_with_hostile_defaults("", "pooler = \"transaction\"").await;
}
