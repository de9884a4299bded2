//! `sql` tasks and what breaks beside them: a crash of the server, a lost network and the server's own trouble charge no task
//! that is not to blame, and a procedure that crashes its backend every time comes to an end.

use std::time::Duration;

use musterd::embedded::{EmbeddedPostgres, Options};
use rustix::process::{Pid, Signal, kill_process};
use tokio_postgres::{Client, NoTls};

use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::{TestDb, connect};
use crate::suite::support::proxy::FaultProxy;
use crate::suite::support::tasks::{
    QUICK, RUNNING_PROCEDURES, SOON, becomes, end_of, field, number, text, texts,
};
use crate::suite::support::wait::eventually;
use crate::suite::support::{run, services};
use crate::suite::task_sql::enqueue;

const PROCEDURES: &str = "
    CREATE SCHEMA app;
    CREATE TABLE app.effects (task_id bigint NOT NULL);
    CREATE TABLE app.open ();
    CREATE SEQUENCE app.tries;
    CREATE PROCEDURE app.note(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO app.effects VALUES (p_task_id); PERFORM pg_sleep(0.3); END $$;
    CREATE PROCEDURE app.gated(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO app.effects VALUES (p_task_id);
        WHILE NOT EXISTS (SELECT FROM app.open) LOOP PERFORM pg_sleep(0.02); END LOOP;
    END $$;
    CREATE PROCEDURE app.crashing(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM nextval('app.tries');
        COPY (SELECT 1) TO PROGRAM 'kill -9 $PPID';
        PERFORM pg_sleep(3600);
    END $$;
    CREATE PROCEDURE app.raising(p_task_id bigint, p_payload jsonb) LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM nextval('app.tries');
        RAISE EXCEPTION 'no' USING ERRCODE = p_payload ->> 'code';
    END $$;";

fn config(more: &str) -> String {
    let handlers: String = ["note", "gated", "crashing", "raising"]
        .iter()
        .map(|name| format!("[handlers.{name}]\nkind = \"sql\"\nprocedure = \"app.{name}\"\n"))
        .collect();
    format!("{QUICK}{handlers}{more}")
}

/// A server of its own: the others' tests would not survive what happens to it.
struct Server(EmbeddedPostgres);

impl Server {
    async fn start() -> Self {
        let options = Options::ephemeral(run::new_dir("crashing").join("postgres")).setting("fsync", "off");
        let started = tokio::task::spawn_blocking(move || EmbeddedPostgres::start(options).unwrap());
        let server = started.await.unwrap();
        run::kill_at_end(server.pid());
        let (mut client, _connection) = connect(server.url()).await;
        musterd::store::migrate::migrate(&mut client).await.unwrap();
        client.batch_execute(PROCEDURES).await.unwrap();
        Self(server)
    }

    /// A session, as soon as the server takes one.
    async fn client(&self) -> Client {
        eventually(SOON, "the server is there again", async || {
            let (client, connection) = tokio_postgres::connect(self.0.url(), NoTls).await.ok()?;
            #[expect(clippy::disallowed_methods, reason = "ends with its client")]
            tokio::spawn(async move { drop(connection.await) });
            client.batch_execute("SELECT 1").await.ok().map(|()| client)
        })
        .await
    }

    /// Kills the backend of a session that has nothing to do with any task.
    async fn crash(&self) {
        let stranger = self.client().await;
        let pid: i32 = stranger.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        eventually(SOON, "the stranger's session is gone", async || {
            stranger.batch_execute("SELECT 1").await.is_err().then_some(())
        })
        .await;
    }

    fn config(&self, more: &str) -> String {
        config(&format!("{more}[database]\nurl = {:?}\n", self.0.url()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        run::forget(self.0.pid());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_that_run_while_another_session_crashes_the_server_are_charged_nothing() {
    let server = Server::start().await;
    let toml = server.config("[queues.default]\nfibers = 4\n");
    let _daemon = Daemon::builder(&TestDb::empty().await, &toml).start();
    let client = server.client().await;
    client.batch_execute("SELECT musterd.enqueue('gated') FROM generate_series(1, 4)").await.unwrap();
    for _ in 0..3 {
        becomes(&server.client().await, RUNNING_PROCEDURES, "4").await;
        server.crash().await;
    }
    let client = server.client().await;
    becomes(&client, RUNNING_PROCEDURES, "4").await;
    client.batch_execute("INSERT INTO app.open DEFAULT VALUES").await.unwrap();
    becomes(&client, "SELECT state, count(*) FROM musterd.tasks GROUP BY 1", "succeeded|4").await;
    let charged = "SELECT DISTINCT attempt, crashes, solo_crashes FROM musterd.tasks";
    assert_eq!(texts(&client, charged).await, ["1|0|0"]);
    assert_eq!(text(&client, "SELECT count(*), count(DISTINCT task_id) FROM app.effects").await, "4|4");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_procedure_that_crashes_its_backend_every_time_ends_and_its_neighbours_succeed() {
    let server = Server::start().await;
    let toml = server.config("[queues.default]\nfibers = 4\n[liveness]\nmax_crashes = 2\n");
    let client = server.client().await;
    let neighbours = "SELECT musterd.enqueue('note') FROM generate_series(1, 6)";
    client.batch_execute(neighbours).await.unwrap();
    let crashing = enqueue(&client, "'crashing'").await;
    let _daemon = Daemon::builder(&TestDb::empty().await, &toml).start();
    eventually(SOON, "the task that crashes the server ends", async || {
        let client = server.client().await;
        let state = format!("SELECT state::text FROM musterd.tasks WHERE id = {crashing}");
        // The server may go down in the middle of the question.
        let row = client.query_one(&state, &[]).await.ok()?;
        (row.get::<_, &str>(0) == "failed").then_some(())
    })
    .await;
    let client = server.client().await;
    let error = field(&client, crashing, "error").await;
    assert!(error.contains("lost the connection it ran on 2 times while nothing else ran"), "{error}");
    // Twice beside others, twice alone.
    assert_eq!(field(&client, crashing, "attempt || ' ' || crashes || ' ' || solo_crashes").await, "1 3 1");
    let others =
        "SELECT DISTINCT state, attempt, crashes, solo_crashes FROM musterd.tasks WHERE command = 'note'";
    becomes(&client, others, "succeeded|1|0|0").await;
    assert_eq!(text(&client, "SELECT count(*), count(DISTINCT task_id) FROM app.effects").await, "6|6");
}

async fn with_procedures() -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(PROCEDURES).await.unwrap();
    (db, client)
}

/// Waits for a task to run in a session that is not the one of before.
async fn runs_again(client: &Client, before: &str) -> String {
    let pid = RUNNING_PROCEDURES.replace("count(*)", "string_agg(pid::text, ',')");
    eventually(SOON, "it runs in a new session", async || {
        let now = text(client, &pid).await;
        (!now.is_empty() && now != before && !now.contains(',')).then_some(now)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_is_lost_charges_no_task() {
    let (db, client) = with_procedures().await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    let through = format!("[database]\nurl = \"{}\"\n[liveness]\nmax_crashes = 1\n", proxy.rewrite(db.url()));
    let _daemon = Daemon::builder(&db, &config(&through)).start();
    let id = enqueue(&client, "'gated', max_attempts => 1").await;
    let mut session = String::new();
    for _ in 0..3 {
        session = runs_again(&client, &session).await;
        proxy.reset_all();
        // What still runs there is not to be taken for the next try.
        client.batch_execute(&format!("SELECT pg_terminate_backend({session})")).await.unwrap();
    }
    runs_again(&client, &session).await;
    client.batch_execute("INSERT INTO app.open DEFAULT VALUES").await.unwrap();
    assert_eq!(end_of(&client, id).await, "succeeded");
    assert_eq!(field(&client, id, "attempt || ' ' || crashes || ' ' || solo_crashes").await, "1 0 0");
    assert_eq!(number(&client, "SELECT count(*) FROM app.effects").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_alone_makes_a_suspect_and_only_alone_is_it_failed_for_it() {
    let (db, client) = with_procedures().await;
    let proxy = FaultProxy::start(([127, 0, 0, 1], services::postgres().port()).into()).await;
    // The session beside those of the procedures goes past the proxy, and stays.
    let through = format!(
        "[database]\nurl = {:?}\ndirect_url = {:?}\npooler = \"none\"\n[liveness]\nmax_crashes = 2\n",
        proxy.rewrite(db.url()),
        db.url()
    );
    let _daemon = Daemon::builder(&db, &config(&through)).start();
    let id = enqueue(&client, "'gated', max_attempts => 1").await;
    let mut session = String::new();
    for crashes in 0..4 {
        session = runs_again(&client, &session).await;
        let counted = "crashes || ' ' || solo_crashes || ' ' || (alone_at IS NOT NULL)";
        let solo = crashes - 2;
        assert_eq!(field(&client, id, counted).await, format!("{crashes} {} {}", solo.max(0), solo >= 0));
        proxy.reset_all();
        client.batch_execute(&format!("SELECT pg_terminate_backend({session})")).await.unwrap();
    }
    assert_eq!(end_of(&client, id).await, "failed");
    let error = field(&client, id, "error").await;
    assert!(error.contains("lost the connection it ran on 2 times while nothing else ran"), "{error}");
    assert_eq!(number(&client, "SELECT count(*) FROM app.effects").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_read_only_for_a_while_costs_no_attempt() {
    let (db, client) = with_procedures().await;
    let switch =
        |to: &str| format!("ALTER DATABASE \"{}\" SET default_transaction_read_only = {to}", db.name());
    client.batch_execute(&switch("on")).await.unwrap();
    // The worker's own sessions are pinned to writing, those of the handlers are not. Not through a pooler, where both would be
    // read-only.
    let toml = config(&format!("[database]\nurl = {:?}\npooler = \"none\"\n", db.url()));
    let _daemon = Daemon::builder(&db, &toml).start();
    let id = enqueue(&client, "'note', max_attempts => 1").await;
    let postponed = format!("SELECT error LIKE '%SQLSTATE 25006%' FROM musterd.tasks WHERE id = {id}");
    becomes(&client, &postponed, "t").await;
    // Long enough for all attempts, were they charged.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(field(&client, id, "attempt || ' ' || crashes").await, "1 0");
    client.batch_execute(&switch("off")).await.unwrap();
    let end_sessions = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND application_name = 'musterd sql'";
    client.batch_execute(end_sessions).await.unwrap();
    assert_eq!(end_of(&client, id).await, "succeeded");
    // Not its crashes: a session that is ended while it tries the task again counts as one.
    assert_eq!(field(&client, id, "attempt").await, "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_the_server_that_is_met_every_time_is_charged_after_a_few_tries() {
    let (db, client) = with_procedures().await;
    let _daemon = Daemon::builder(&db, &config("")).start();
    for code in ["53400", "53200"] {
        client.batch_execute("ALTER SEQUENCE app.tries RESTART").await.unwrap();
        let id = enqueue(&client, &format!("'raising', '{{\"code\": \"{code}\"}}', max_attempts => 2")).await;
        assert_eq!(end_of(&client, id).await, "failed");
        assert_eq!(field(&client, id, "attempt").await, "2");
        assert_eq!(
            number(&client, "SELECT last_value FROM app.tries").await,
            5,
            "three more than its attempts"
        );
    }
    // The server's own trouble is never charged.
    let id = enqueue(&client, "'raising', '{\"code\": \"58030\"}', max_attempts => 1").await;
    client.batch_execute("ALTER SEQUENCE app.tries RESTART").await.unwrap();
    becomes(&client, "SELECT last_value >= 8 FROM app.tries", "t").await;
    assert_eq!(
        field(&client, id, "attempt || ' ' || (state IN ('queued', 'scheduled', 'running'))").await,
        "1 true"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_daemon_the_same_states_are_the_servers_trouble() {
    let (_db, client) = with_procedures().await;
    client
        .batch_execute("SELECT musterd.register_command('raising', 'default', 'sql', 'app.raising')")
        .await
        .unwrap();
    for (code, is_raised) in
        [("25006", true), ("58030", true), ("53100", true), ("53400", false), ("53200", false)]
    {
        let id = enqueue(&client, &format!("'raising', '{{\"code\": \"{code}\"}}', max_attempts => 1")).await;
        let processed = client.batch_execute("CALL musterd.process_tasks()").await;
        let raised = processed.err().and_then(|error| Some(error.code()?.code().to_owned()));
        assert_eq!(raised.as_deref(), is_raised.then_some(code), "{code}");
        assert_eq!(field(&client, id, "state").await, if is_raised { "queued" } else { "failed" }, "{code}");
        client.batch_execute(&format!("DELETE FROM musterd.tasks WHERE id = {id}")).await.unwrap();
    }
}
