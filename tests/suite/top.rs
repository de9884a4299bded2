//! What people see on a real terminal: `musterd top` follows the window and gives it back, and tables fit into it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use musterd::tether::Tether;
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};

use crate::suite::support::config::{TestConfig, json, stdout};
use crate::suite::support::daemon::Daemon;
use crate::suite::support::database::TestDb;
use crate::suite::support::wait::eventually;
use crate::suite::support::work::Ledger;

const SOON: Duration = Duration::from_secs(60);

/// A terminal of the kernel's, with a program on it and an emulator that reads it.
struct Screen {
    keys: File,
    line: File,
    before: Termios,
    parser: Arc<Mutex<vt100::Parser>>,
    /// Every byte of it.
    said: Arc<Mutex<Vec<u8>>>,
    program: Tether,
}

impl Screen {
    fn open(config: &TestConfig, args: &[&str], environment: &[(&str, &str)]) -> Self {
        Self::sized(config, args, environment, (120, 40))
    }

    /// Columns and lines; a window of no size is emulated as the usual one.
    fn sized(
        config: &TestConfig,
        args: &[&str],
        environment: &[(&str, &str)],
        (columns, rows): (u16, u16),
    ) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let line = File::options().read(true).write(true).open(name).unwrap();
        let before = tcgetattr(&line).unwrap();
        // A session of its own with this as its terminal: only then does a new size come as a signal.
        let inner = config.command(args);
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(inner.get_program()).args(inner.get_args());
        command.current_dir(config.dir()).env_clear().env("TERM", "xterm-256color").env("HOME", config.dir());
        command.envs(std::env::var_os("PATH").map(|path| ("PATH", path))).envs(environment.iter().copied());
        let end = || Stdio::from(OwnedFd::from(line.try_clone().unwrap()));
        command.stdin(end()).stdout(end()).stderr(end());
        let parser = Arc::new(Mutex::new(vt100::Parser::new(
            size(if rows == 0 { 24 } else { rows }),
            size(if columns == 0 { 80 } else { columns }),
            0,
        )));
        let said = Arc::<Mutex<Vec<u8>>>::default();
        let (mut output, seen) = (File::from(master.try_clone().unwrap()), Arc::clone(&parser));
        let heard = Arc::clone(&said);
        resize_line(&line, columns, rows);
        let read = move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut buffer) {
                heard.lock().unwrap().extend_from_slice(&buffer[..count]);
                seen.lock().unwrap().process(&buffer[..count]);
            }
        };
        std::thread::Builder::new().name("screen".into()).spawn(read).unwrap();
        let program = Tether::spawn(command, Signal::KILL).unwrap();
        Self { keys: File::from(master), line, before, parser, said, program }
    }

    fn resize(&self, columns: u16, rows: u16) {
        self.parser.lock().unwrap().screen_mut().set_size(size(rows), size(columns));
        resize_line(&self.line, columns, rows);
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    fn text(&self) -> String {
        self.parser.lock().unwrap().screen().contents()
    }

    /// Whether anything on it is in another colour than the terminal's own.
    fn is_coloured(&self) -> bool {
        let parser = self.parser.lock().unwrap();
        let (rows, columns) = parser.screen().size();
        let cells = (0..rows.get()).flat_map(|row| (0..columns.get()).map(move |column| (row, column)));
        let mut cells = cells.filter_map(|(row, column)| parser.screen().cell(row, column));
        cells.any(|cell| cell.fgcolor() != vt100::Color::Default || cell.bgcolor() != vt100::Color::Default)
    }

    /// Waits until the screen is as wanted.
    async fn shows(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let found = eventually(SOON, what, async || {
            let text = self.text();
            if let Some(status) = self.program.status() {
                panic!("ended with {status} before it showed {what}: {text}");
            }
            Some(text).filter(|text| wanted(text))
        });
        found.await
    }

    /// Waits for the end, and asserts that the terminal is as it was.
    async fn ends_and_gives_the_terminal_back(&self) -> Option<i32> {
        let status = eventually(SOON, "it ends", async || self.program.status()).await;
        let after = tcgetattr(&self.line).unwrap();
        let modes = |termios: &Termios| {
            (termios.input_modes, termios.output_modes, termios.control_modes, termios.local_modes)
        };
        assert_eq!(modes(&after), modes(&self.before), "the terminal is not as it was");
        eventually(SOON, "the screen is the shell's again", async || {
            let parser = self.parser.lock().unwrap();
            (!parser.screen().alternate_screen() && !parser.screen().hide_cursor()).then_some(())
        })
        .await;
        status.code()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.program.signal(Signal::KILL);
        self.program.wait(Duration::from_secs(10));
    }
}

fn size(count: u16) -> std::num::NonZero<u16> {
    count.try_into().unwrap()
}

fn resize_line(line: &File, columns: u16, rows: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(line, size).unwrap();
}

/// The number before ` rows/s` in the title.
fn rate(text: &str) -> Option<u64> {
    let title = text.lines().next()?.split(" rows/s").next()?;
    title.split_whitespace().last()?.replace(',', "").parse().ok()
}

async fn busy(db: &TestDb) -> (Daemon, Ledger) {
    let toml = "[queues.default]\nfibers = 2\n[queues.bulk]\n[handlers.sleep]\nduration = \"10ms\"";
    let daemon = Daemon::builder(db, toml).start();
    daemon.wait_ready().await;
    let ledger = Ledger { client: db.client().await };
    ledger.submit("sleep", 1_000_000).await;
    (daemon, ledger)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_shows_everything_live_follows_its_size_and_is_given_back() {
    let db = TestDb::new().await;
    let (daemon, ledger) = busy(&db).await;
    let worker = ledger.worker_of(&daemon).await;
    let mut screen = Screen::open(daemon.config(), &["top", "--interval", "200ms"], &[]);
    let text = screen.shows("figures that move", |text| rate(text).is_some_and(|rate| rate > 0)).await;
    for wanted in
        ["▸Queues (2)", "bulk", "default", "Batches (1)", "sleep", "1,000,000", "Workers (1)", &worker]
    {
        assert!(text.contains(wanted), "{wanted:?} is missing:\n{text}");
    }
    assert!(screen.is_coloured(), "a worker that is alive is green");
    let waiting = |text: &str| -> Option<String> {
        let line = text.lines().find(|line| line.contains(" default ") && line.contains(" open "))?;
        line.split_whitespace().nth(2).map(str::to_owned)
    };
    let first = waiting(&text).unwrap();
    screen.shows("fewer rows wait", |text| waiting(text).is_some_and(|now| now != first)).await;

    screen.resize(46, 16);
    // Columns are given up, where a screen that was merely cut would show the beginning of the next one.
    let text = screen
        .shows("the narrow screen", |text| text.contains("Queues (2)") && !text.contains(" TASKS"))
        .await;
    assert!(text.contains("ROWS WAITING") && text.contains("q leave"), "{text}");
    screen.resize(120, 40);
    screen.shows("the wide screen", |text| text.contains("LAST BEAT")).await;

    // The second queue is chosen, and paused; then the next part.
    screen.press("\x1b[B");
    screen.press("p");
    screen.shows("the queue is paused", |text| text.contains(" default  paused ")).await;
    assert_eq!(
        ledger.number("SELECT count(*) FROM musterd.queues WHERE paused AND name = 'default'").await,
        1
    );
    screen.press("\t");
    screen.shows("the next part", |text| text.contains("▸Batches (1)")).await;
    screen.press("q");
    assert_eq!(screen.ends_and_gives_the_terminal_back().await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_gives_the_terminal_back() {
    let db = TestDb::new().await;
    let daemon = Daemon::builder(&db, "").start();
    daemon.wait_ready().await;
    let screen = Screen::open(daemon.config(), &["top"], &[("NO_COLOR", "1")]);
    screen.shows("the screen", |text| text.contains("alive")).await;
    assert!(!screen.is_coloured(), "{}", screen.text());
    screen.program.signal(Signal::TERM).unwrap();
    assert_eq!(screen.ends_and_gives_the_terminal_back().await, Some(0));
}

#[cfg(feature = "failpoints")]
#[tokio::test(flavor = "multi_thread")]
async fn a_panic_gives_the_terminal_back_and_is_seen() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    let environment = [("MUSTERD_FAILPOINTS", "top.drawn=3*panic")];
    let screen = Screen::open(&config, &["top", "--interval", "100ms"], &environment);
    assert_eq!(screen.ends_and_gives_the_terminal_back().await, Some(101));
    eventually(SOON, "what it said", async || screen.text().contains("failpoint top.drawn").then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_that_does_not_know_its_size_is_taken_for_the_usual_one() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    let mut screen = Screen::sized(&config, &["top"], &[], (0, 0));
    screen.shows("the screen", |text| text.contains("Workers (0)") && text.contains("q leave")).await;
    screen.press("q");
    assert_eq!(screen.ends_and_gives_the_terminal_back().await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn no_table_breaks_a_word_however_narrow_the_terminal() {
    let db = TestDb::new().await;
    let daemon = Daemon::builder(&db, "").start();
    daemon.wait_ready().await;
    let config = daemon.config();
    std::fs::write(config.dir().join("rows.ndjson"), "1\n2\n3\n").unwrap();
    for work in
        [["submit", "rows.ndjson", "--command", "noop", "--wait"].as_slice(), &["enqueue", "noop", "--wait"]]
    {
        stdout(&config.musterd(work).await);
    }
    let tables: [(&[&str], &[&str]); 7] = [
        (&["batch", "list"], &["BATCH", "STATE", "COMMAND", "FAILED", "succeeded", "noop"]),
        (&["batch", "show", "1"], &["SUCCEEDED", "succeeded", "ABORTED", "QUEUE", "default"]),
        (&["batch", "rows", "1"], &["LINE", "STATE", "succeeded"]),
        (&["task", "list"], &["TASK", "STATE", "COMMAND", "succeeded"]),
        (&["queue", "list"], &["QUEUE", "STATE", "WAITING", "default", "open"]),
        (&["worker", "list"], &["WORKER", "STATE", "alive"]),
        (&["handler", "list"], &["COMMAND", "WORKERS", "noop", "sleep"]),
    ];
    for (args, wanted) in tables {
        let piped = stdout(&config.musterd(args).await);
        for window in [(80, 24), (40, 24), (0, 0)] {
            let screen = Screen::sized(config, args, &[], window);
            let whole =
                |text: &str| wanted.iter().all(|word| text.split_whitespace().any(|seen| seen == *word));
            let what = format!("{args:?} at {window:?} shows {wanted:?}");
            let shown = eventually(SOON, &what, async || {
                Some(screen.text()).filter(|text| screen.program.status().is_some() && whole(text))
            });
            // Times go on; everything else is as a program reads it, word for word.
            for word in
                shown.await.split_whitespace().filter(|word| !word.starts_with(|c: char| c.is_ascii_digit()))
            {
                assert!(
                    piped.split_whitespace().any(|seen| seen == word),
                    "{args:?} at {window:?}: {word:?}"
                );
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_terminal_it_is_one_picture_or_one_object() {
    let db = TestDb::new().await;
    let (daemon, ledger) = busy(&db).await;
    ledger.has_results(1, 1, SOON).await;
    ledger.submit("nobodys", 1).await;
    let text = stdout(&daemon.config().musterd(&["top", "--interval", "1s"]).await);
    assert!(
        text.contains("Queues (2)") && text.contains("Batches (2)") && !text.contains('\u{1b}'),
        "{text}"
    );
    assert!(!text.contains("q leave") && rate(&text).is_some(), "{text}");
    let picture = eventually(SOON, "rows are done between two looks", async || {
        let picture = json(&daemon.config().musterd(&["top", "--json", "--interval", "1s"]).await);
        (picture["rows_per_second"].as_f64() > Some(0.0)).then_some(picture)
    })
    .await;
    let mut keys: Vec<&String> = picture.as_object().unwrap().keys().collect();
    keys.sort();
    assert_eq!(keys, ["at", "batches", "queues", "rows_per_second", "workers"]);
    // Queues by name, the newest batch first; what moves has a rate and an end, each in its own place.
    let (queues, batches) = (&picture["queues"], &picture["batches"]);
    assert_eq!((&queues[0]["name"], &queues[1]["name"]), (&"bulk".into(), &"default".into()));
    assert_eq!((&batches[0]["command"], &batches[1]["rows"]), (&"nobodys".into(), &1_000_000.into()));
    for still in [&queues[0], &batches[0]] {
        // Nought is not negative.
        assert_eq!(still["rows_per_second"].to_string(), "0.0", "{picture}");
    }
    for moving in [&queues[1], &batches[1]] {
        assert_eq!(moving["rows_per_second"], picture["rows_per_second"], "{picture}");
    }
    assert!(batches[0]["seconds_left"].is_null() && batches[1]["seconds_left"].is_number(), "{picture}");
    // One is not many.
    assert!(text.contains("  1 worker  2 batches  "), "{text}");
    assert!(picture["workers"][0]["last_beat_seconds"].is_number(), "{picture}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_are_coloured_on_a_terminal_alone_and_not_if_nobody_wants_it() {
    let db = TestDb::new().await;
    let config = TestConfig::new(&db, "");
    for (environment, coloured) in
        [(&[][..], true), (&[("NO_COLOR", "")], true), (&[("NO_COLOR", "1")], false)]
    {
        let screen = Screen::open(&config, &["doctor"], environment);
        eventually(SOON, "it ends", async || screen.program.status()).await;
        eventually(SOON, "its table", async || screen.text().contains("handler noop").then_some(())).await;
        assert_eq!(screen.is_coloured(), coloured, "{environment:?}: {}", screen.text());
        assert_eq!(screen.said.lock().unwrap().contains(&0x1b), coloured, "no other sequence either");
    }
    let piped = stdout(&config.musterd(&["doctor"]).await);
    assert!(piped.contains("handler noop") && !piped.contains('\u{1b}'), "{piped}");
}
