//! Rows per second of every kind of handler, beside `builtin`, through the real binary on a private PostgreSQL.
//!
//! `make bench-handlers`. The last lines compare exec with the Python example to the same program fed by bare Python over a
//! pipe: the handler alone, on rows that are there already as they are for bare Python, and the whole walk from and to the
//! database, which shares the machine with the program.
#![expect(clippy::print_stdout, reason = "a benchmark prints what it measured")]
#![expect(clippy::unwrap_used, reason = "a benchmark that cannot run stops")]

use axum::{Router, routing::post};
use musterd::tether::Tether;
use musterd::{
    config::{Given, load},
    embedded::{EmbeddedPostgres, Options},
    handler::{BlockCall, Entry, Outcome, Report, run_block},
    json::Json,
    store::{
        blocks::{BlockRef, Parts},
        connect::Target,
        migrate,
        pages::InputRow,
    },
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::task::JoinSet;

/// Of what is compared with bare Python.
const ROUNDS: usize = 3;

const SCORE: &str = include_str!("../docs/handlers/sql_score.sql");
/// Feeds the example as musterd does, all rows ahead, and reads the replies.
const BARE: &str = r#"
import json, subprocess, sys, threading, time
program, count = sys.argv[1], int(sys.argv[2])
child = subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def line(n):
    return json.dumps({"protocol": "muster/1", "kind": "row", "command": "greet", "batch": {"id": 1, "context": {}},
        "block": {"id": "6f1c8a3e-8f57-4d1c-9a55-0f2f6a0d8f11", "attempt": 1}, "timeout": 300.0,
        "row": {"line": n, "input": {"name": f"name {n}", "customer": f"c{n}", "spent": n}, "idempotency_key": f"1/{n}",
                "attempt": 1}}, separators=(",", ":")) + "\n"
lines = [line(n).encode() for n in range(1, count + 1)]
child.stdin.write(lines[0]); child.stdin.flush(); child.stdout.readline()
began = time.monotonic()
def feed():
    for at in range(1, count, 500):
        child.stdin.write(b"".join(lines[at:at + 500])); child.stdin.flush()
    child.stdin.close()
threading.Thread(target=feed).start()
answered = sum(1 for text in child.stdout if json.loads(text)["outcome"] == "succeeded")
assert answered == count - 1, answered
print((count - 1) / (time.monotonic() - began))
"#;

#[tokio::main]
async fn main() {
    let rows: i64 = std::env::var("ROWS").ok().and_then(|rows| rows.parse().ok()).unwrap_or(200_000);
    let dir = tempfile::tempdir().unwrap();
    open_to_all(dir.path());
    let options = Options::ephemeral(dir.path().join("postgres"));
    let server = tokio::task::spawn_blocking(|| EmbeddedPostgres::start(options).unwrap()).await.unwrap();
    let mut client = Target::parse(server.url()).unwrap().open("bench").await.unwrap();
    migrate::migrate(&mut client).await.unwrap();
    client.batch_execute(SCORE).await.unwrap();
    let port = serve();
    let config = write_config(dir.path(), server.url(), port);
    let mut command = Command::new(env!("CARGO_BIN_EXE_musterd"));
    command.arg("run").arg("--config").arg(&config).current_dir(dir.path());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let worker = Tether::spawn(command, Signal::KILL).unwrap();

    println!("{:<28} {:>12}", "handler", "rows/s");
    let mut exec = 0.0;
    for (command, what, count) in [
        ("noop", "builtin noop", rows),
        ("echo", "builtin echo", rows),
        ("http", "http, blocks of 100", rows),
        ("score", "sql function", rows),
        ("greet", "exec, one Python process", rows / 2),
    ] {
        // A first small one, so that connections, processes and the pace are there.
        run(&client, command, 2_000).await;
        let rate = run(&client, command, count).await;
        println!("{what:<28} {rate:>12.0}");
        if command == "greet" {
            exec = rate;
        }
    }
    worker.signal(Signal::TERM).unwrap();
    worker.wait(Duration::from_secs(30));
    let (mut alone, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        alone.push(alone_with(&config, rows / 2).await);
        bare.push(in_bare_python(rows / 2));
    }
    let ratios = alone.iter().zip(&bare).map(|(alone, bare)| alone / bare).collect();
    let (alone, bare) = (median(alone), median(bare));
    println!("{:<28} {alone:>12.0}", "exec, without the database");
    println!("{:<28} {bare:>12.0}", "the same in bare Python");
    println!("{:<28} {:>12.2}", "exec alone / bare", median(ratios));
    println!("{:<28} {:>12.2}", "exec, whole walk / bare", exec / bare);
    client.close().await;
    tokio::task::spawn_blocking(move || server.stop().unwrap()).await.unwrap();
}

/// Submits and waits; rows per second by the database's clock, from the submit to the end of the batch.
async fn run(client: &tokio_postgres::Client, command: &str, rows: i64) -> f64 {
    let submit = "SELECT musterd.submit_batch($1, ARRAY (SELECT jsonb_build_object('name', 'name ' || n, 'customer', 'c' || n,
                         'spent', n) FROM generate_series(1, $2::bigint) n), queue => $3)";
    let queue = if command == "greet" { "one" } else { "default" };
    let id: i64 = client.query_one(submit, &[&command, &rows, &queue]).await.unwrap().get(0);
    // From when the rows are there to be claimed: submitting is measured elsewhere.
    let began = std::time::Instant::now();
    loop {
        let sql = "SELECT succeeded FROM musterd.batches WHERE id = $1 AND summarized_at IS NOT NULL";
        if let Some(row) = client.query_opt(sql, &[&id]).await.unwrap() {
            assert_eq!(i64::from(row.get::<_, i32>(0)), rows, "{command}");
            return rows as f64 / began.elapsed().as_secs_f64();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The handler on blocks that are in memory, two at a time as two fibers would have them; rows per second.
async fn alone_with(config: &Path, count: i64) -> f64 {
    let given = Given { file: Some(config.into()), env: Some(Vec::new()), ..Given::default() };
    let config = load(&given).unwrap().config;
    let entry = config.registry().unwrap().get("greet").unwrap().clone();
    let lines: Vec<i32> = (1..=i32::try_from(count).unwrap()).collect();
    let input = |line: &i32| {
        let row = json!({ "name": format!("name {line}"), "customer": format!("c{line}"), "spent": line });
        (*line, row.to_string())
    };
    let mut blocks: Vec<Vec<(i32, String)>> =
        lines.chunks(500).map(|block| block.iter().map(input).collect()).collect();
    assert_eq!(through(&entry, blocks.pop().unwrap()).await, 500);
    let blocks = Arc::new(Mutex::new(blocks));
    let began = std::time::Instant::now();
    let mut fibers = JoinSet::new();
    for _ in 0..2 {
        let (entry, blocks) = (entry.clone(), Arc::clone(&blocks));
        fibers.spawn(async move {
            let mut done = 0;
            while let Some(block) = { blocks.lock().unwrap().pop() } {
                done += through(&entry, block).await;
            }
            done
        });
    }
    let done: usize = fibers.join_all().await.into_iter().sum();
    assert_eq!(done + 500, lines.len());
    done as f64 / began.elapsed().as_secs_f64()
}

/// Rows of the block that succeeded.
async fn through(entry: &Entry, rows: Vec<(i32, String)>) -> usize {
    let rows: Vec<InputRow<'_>> = rows.iter().map(|(line, input)| InputRow { line: *line, input }).collect();
    let (context, parts) = (Json::from_text("{}"), Parts::default());
    let block = BlockRef { id: 1, token: uuid::Uuid::new_v4(), batch: 1 };
    let timeout = Duration::from_secs(300);
    let call = BlockCall {
        command: "greet",
        context: &context,
        block,
        uid: uuid::Uuid::nil(),
        parts: &parts,
        attempt: 1,
        timeout,
        traceparent: None,
    };
    let mut running = run_block(&*entry.handler, call, &rows);
    let mut succeeded = 0;
    while let Some(reports) = running.next().await {
        let is_success = |report: &&Report| matches!(report, Report::Row(_, Outcome::Succeeded(_)));
        succeeded += reports.iter().filter(is_success).count();
    }
    succeeded
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn in_bare_python(count: i64) -> f64 {
    let output = Command::new("python3")
        .args(["-c", BARE])
        .arg(example("exec_python.py"))
        .arg(count.to_string())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

/// A service that does nothing, in a thread of its own.
fn serve() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let work = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let answer = |axum::Json(request): axum::Json<Value>| async move {
                let rows: Vec<Value> = request["rows"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(|row| json!({ "line": row["line"], "outcome": "succeeded", "result": { "ok": true } }))
                    .collect();
                axum::Json(json!({ "rows": rows }))
            };
            let router = Router::new().route("/", post(answer));
            axum::serve(tokio::net::TcpListener::from_std(listener).unwrap(), router).await.unwrap();
        });
    };
    std::thread::Builder::new().name("service".into()).spawn(work).unwrap();
    port
}

fn write_config(dir: &Path, url: &str, port: u16) -> PathBuf {
    let python = example("exec_python.py").display().to_string();
    let text = format!(
        "[database]\nurl = {url:?}\n[liveness]\nbackend = \"postgres\"\n[http]\nlisten = \"127.0.0.1:0\"\n\
         [queues.one]\nfibers = 2\n\
         [handlers.http]\nkind = \"http\"\nurl = \"http://127.0.0.1:{port}/\"\n\
         [handlers.score]\nkind = \"sql\"\nfunction = \"app.score\"\n\
         [handlers.greet]\nkind = \"exec\"\nargv = [\"python3\", {python:?}]\nprocesses = 1\nqueue = \"one\"\n"
    );
    let file = dir.join("musterd.toml");
    std::fs::write(&file, text).unwrap();
    file
}

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/handlers").join(name)
}

/// The server's user must get through, when the benchmark is run by root.
fn open_to_all(dir: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o711)).unwrap();
}
