//! The program behind the `exec` handler: this one, started by a replica as `torture __exec REPLICA PORT`.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::faults::now;
use super::ledger::Run;
use super::work::{self, Say};

pub(crate) fn serve(replica: i32, port: u16) -> Result<()> {
    let ledger = TcpStream::connect(("127.0.0.1", port))?;
    let mut answers = BufReader::new(ledger.try_clone()?);
    let mut ledger = ledger;
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line?)?;
        // The clock of a replica, and so of its programs, may be wrong: the ledger's reader has no other. `now` is the system's own.
        let began = now();
        let is_task = request["kind"] == "task";
        let (work, input) = match is_task {
            true => (&request["task"], &request["task"]["payload"]),
            false => (&request["row"], &request["row"]["input"]),
        };
        let attempt = work["attempt"].as_i64().context("no attempt")?;
        let said = work::say(input, attempt);
        if said == Say::Hang {
            pause(Duration::from_secs(60));
        }
        pause(Duration::from_millis(work::takes(input)));
        let number = if is_task { &work["id"] } else { &work["line"] }.as_i64().context("no number")?;
        let run = Run {
            http: false,
            replica,
            scope: if is_task { 0 } else { request["batch"]["id"].as_i64().context("no batch")? },
            line: number,
            attempt: attempt as i32,
            block: request["block"]["id"].as_str().map(str::to_owned),
            began,
            ended: now(),
            said: said.word().into(),
        };
        ledger.write_all(format!("{}\n", serde_json::to_string(&run)?).as_bytes())?;
        answers.read_line(&mut String::new())?;
        if said == Say::Exit {
            return Ok(());
        }
        let mut reply = match (is_task, said) {
            (true, said) => work::task_reply(number, input, said),
            (false, Say::Failed) => json!({ "outcome": "failed", "error": "asked to fail" }),
            (false, Say::Retry | Say::Missing) => {
                json!({ "outcome": "retry", "error": "asked to", "retry_after": 0.05 })
            }
            (false, Say::Unstorable) => json!({ "outcome": "succeeded", "result": "\u{0}" }),
            (false, _) => json!({ "outcome": "succeeded", "result": work::result(input) }),
        };
        if !is_task {
            reply["line"] = number.into();
        }
        reply["idempotency_key"] = work["idempotency_key"].clone();
        let mut out = std::io::stdout().lock();
        writeln!(out, "{reply}")?;
        out.flush()?;
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "a program of one thread: it blocks nothing but itself")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}
