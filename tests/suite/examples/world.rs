//! Places in which the examples make sense: the ids, the files, the handlers and the worker that they speak of exist.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::suite::support::config::TestConfig;
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::work::Ledger;

const HANDLERS: &str = "[handlers.charge]\nbuiltin = \"echo\"\noutput = \"receipts.ndjson\"\n\
    [handlers.greet]\nbuiltin = \"echo\"\n[handlers.report]\nbuiltin = \"noop\"\n[queues.bulk]\n";

const FILES: [(&str, &str); 10] = [
    ("people.csv", "name,town\nAda,London\nGrace,New York\n"),
    ("monday.csv", "name\nAda\n"),
    ("tuesday.csv", "name\nGrace\n"),
    ("orders.ndjson", "{\"id\": 1}\n{\"id\": 2}\n"),
    ("payloads.ndjson", "{\"id\": 1}\n{\"id\": 2}\n"),
    ("sample.ndjson", "{\"id\": 1}\n"),
    ("rows.ndjson", "{\"id\": 1}\n"),
    ("bad.ndjson", "{\"id\": 1}\n{id: 2}\n"),
    ("failed.csv", "id,_line,_state,_attempt,_error,_result,_started_at,_run_seconds\n1,1,failed,3,no,,,\n"),
    ("wrong.toml", "[liveness]\nhartbeat_ttl = \"60s\"\n"),
];

pub(super) struct World {
    /// Lives as long as the world.
    _db: TestDb,
    place: Place,
}

enum Place {
    Worked(Box<Daemon>),
    Quiet(TestConfig),
}

impl World {
    /// A worker runs; batches 1, 17 and 18 are done, 17 with an output file; a worker of a long id was here.
    pub(super) async fn done() -> Self {
        let db = TestDb::new().await;
        let daemon = Daemon::builder(&db, HANDLERS).start();
        daemon.wait_ready().await;
        let ledger = Ledger { client: db.client().await };
        let first = ledger.submit("charge", 1).await;
        assert_eq!(first, 1);
        next_id_is_17(&ledger).await;
        for id in [17, 18] {
            assert_eq!(ledger.submit("charge", 3).await, id);
        }
        for id in [1, 17, 18] {
            assert_eq!(ledger.end_of(id, Duration::from_secs(60)).await.state, "succeeded");
        }
        let worker = "INSERT INTO musterd.workers (id, host, pid, version, state, ended_at)
                      VALUES ('web-1-4711-1763350000000000000', 'web-1', 4711, '0.1.0', 'stopped', now())";
        ledger.client.execute(worker, &[]).await.unwrap();
        Self { _db: db, place: Place::Worked(Box::new(daemon)) }
    }

    /// Nobody works; batch 17 has rows that wait, task 18 is scheduled.
    pub(super) async fn open() -> Self {
        let (world, ledger) = Self::quiet().await;
        assert_eq!(ledger.submit("charge", 3).await, 17);
        ledger.client.execute("SELECT musterd.enqueue('report', delay => '1 day')", &[]).await.unwrap();
        world
    }

    /// Nobody works; task 17 is in this state.
    pub(super) async fn task(state: &str) -> Self {
        let (world, ledger) = Self::quiet().await;
        let client = &ledger.client;
        client.execute("SELECT musterd.enqueue('report', delay => '1 day')", &[]).await.unwrap();
        if state == "waiting" {
            client.execute("SELECT musterd.spawn('report', p_parent_id => 17)", &[]).await.unwrap();
        }
        let set = "UPDATE musterd.task_records SET state = $1::text::musterd.state,
                          finished_at = CASE WHEN $1 IN ('failed', 'succeeded') THEN now() END WHERE id = 17";
        if state != "scheduled" {
            client.execute(set, &[&state]).await.unwrap();
        }
        world
    }

    async fn quiet() -> (Self, Ledger) {
        let db = TestDb::new().await;
        let ledger = Ledger { client: db.client().await };
        next_id_is_17(&ledger).await;
        let config = TestConfig::new(&db, HANDLERS);
        (Self { _db: db, place: Place::Quiet(config) }, ledger)
    }

    pub(super) fn config(&self) -> &TestConfig {
        match &self.place {
            Place::Worked(daemon) => daemon.config(),
            Place::Quiet(config) => config,
        }
    }

    /// A line as a person would type it, in the directory with the files, with the program and its configuration at hand.
    pub(super) fn shell(&self, line: &str) -> Command {
        let dir = self.config().dir();
        for (name, text) in FILES {
            std::fs::write(dir.join(name), text).unwrap();
        }
        // What jq would do with it is jq's.
        let line = line.split(" | jq ").next().unwrap();
        let programs = Path::new(env!("CARGO_BIN_EXE_musterd")).parent().unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("sh");
        command.args(["-c", line]).current_dir(dir).env_clear();
        command.env("HOME", dir).env("XDG_STATE_HOME", dir.join("state"));
        command.env("PATH", format!("{}:{path}", programs.display()));
        command.env("MUSTERD_CONFIG", self.config().file());
        command
    }
}

async fn next_id_is_17(ledger: &Ledger) {
    ledger
        .client
        .batch_execute("ALTER TABLE musterd.task_records ALTER COLUMN id RESTART WITH 17")
        .await
        .unwrap();
}
