//! The private server, started for real.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::Duration;

use super::*;
use crate::tether::Tether;

/// A temporary directory that the server's user can pass through.
fn root() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    fs::set_permissions(root.path(), Permissions::from_mode(0o711)).unwrap();
    root
}

/// A throw-away server need not wait for the disk.
fn quick(options: Options) -> Options {
    options.setting("fsync", "off").setting("shared_buffers", "16MB")
}

/// Logs in and asks one question.
fn ask(url: &str, question: &str) -> Result<String, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls)
            .await
            .map_err(|error| format!("{error:?}"))?;
        let answer = async { client.query_one(question, &[]).await.map(|row| row.get::<_, String>(0)) };
        tokio::select! {
            answer = answer => answer.map_err(|error| format!("{error:?}")),
            ended = connection => Err(format!("{ended:?}")),
        }
    })
}

#[test]
fn it_starts_with_a_password_keeps_its_data_and_stops() {
    let root = root();
    let dir = root.path().join("dev");
    let first = EmbeddedPostgres::start(quick(Options::kept(&dir))).unwrap();
    assert_eq!(
        ask(first.url(), "SELECT current_user || '@' || current_database()").unwrap(),
        "musterd@musterd"
    );
    assert_eq!(ask(first.url(), "SHOW server_encoding").unwrap(), "UTF8");
    assert_eq!(ask(first.url(), "SHOW listen_addresses").unwrap(), "127.0.0.1");
    let password = fs::read_to_string(dir.join("password")).unwrap();
    let guessed = first.url().replace(&password, "guessed");
    let refused = ask(&guessed, "SELECT 'let in'").unwrap_err();
    assert!(refused.contains("28P01"), "{refused}");
    assert!(!format!("{first:?}").contains(&password));
    for file in ["password", "postgres.log", "dev.lock"] {
        assert_eq!(fs::metadata(dir.join(file)).unwrap().permissions().mode() & 0o777, 0o600, "{file}");
    }
    ask(first.url(), "CREATE TABLE kept AS SELECT 'still here'::text AS note").unwrap_err(); // no row comes back
    first.stop().unwrap();
    assert!(!dir.join("data/postmaster.pid").exists(), "stopped cleanly");

    let second = EmbeddedPostgres::start(quick(Options::kept(&dir))).unwrap();
    assert_eq!(ask(second.url(), "SELECT note FROM kept").unwrap(), "still here");
    let held = EmbeddedPostgres::start(Options::kept(&dir)).unwrap_err();
    assert!(matches!(held, EmbeddedError::Held { .. }), "{held}");
    assert_eq!(
        ask(second.url(), "SELECT note FROM kept").unwrap(),
        "still here",
        "the second try did no harm"
    );
}

#[test]
fn an_ephemeral_one_leaves_nothing_even_when_dropped() {
    let root = root();
    let dir = root.path().join("dev");
    let server = EmbeddedPostgres::start(quick(Options::ephemeral(&dir))).unwrap();
    let pid = server.pid();
    assert!(dir.join("data/PG_VERSION").exists());
    drop(server);
    assert!(!dir.exists());
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn a_bad_setting_is_explained_with_the_servers_own_words() {
    let root = root();
    let dir = root.path().join("dev");
    let options = quick(Options::ephemeral(&dir)).setting("max_connections", "many");
    let error = EmbeddedPostgres::start(options).unwrap_err();
    assert!(matches!(error, EmbeddedError::Exited { .. }), "{error}");
    assert!(error.to_string().contains("max_connections"), "{error}");
    assert!(!dir.exists(), "a failed ephemeral start leaves nothing");
}

#[test]
fn a_torn_initdb_is_done_again() {
    let root = root();
    let dir = root.path().join("dev");
    // What a SIGKILL in the middle of the first start leaves: our lock file, a password, half a data directory.
    fs::create_dir_all(dir.join("data.new/base")).unwrap();
    fs::write(dir.join("data.new/PG_VERSION"), "15").unwrap();
    fs::write(dir.join("dev.lock"), "1").unwrap();
    fs::write(dir.join("password"), "of the torn one").unwrap();
    let server = EmbeddedPostgres::start(quick(Options::kept(&dir))).unwrap();
    assert_eq!(ask(server.url(), "SELECT current_database()::text").unwrap(), "musterd");
    assert!(!dir.join("data.new").exists());
}

#[test]
fn a_server_left_running_is_stopped_and_replaced() {
    let root = root();
    let dir = root.path().join("dev");
    EmbeddedPostgres::start(quick(Options::kept(&dir))).unwrap().stop().unwrap();

    // A server on the same data that the next owner did not start.
    let user = ServerUser::choose().unwrap();
    let binaries = find_binaries().unwrap();
    let orphan = {
        let directory = Directory::claim(&dir, false, &user, &binaries).unwrap();
        let cluster = Cluster { directory: &directory, binaries: &binaries, user: &user };
        let mut command = server::server_command(&cluster, &[], 5432);
        command.args(["-c", "listen_addresses="]).stdout(Stdio::null()).stderr(Stdio::null());
        let orphan = Tether::spawn(command, rustix::process::Signal::INT).unwrap();
        while !heal::PidFile::read(&directory.data()).is_some_and(|file| file.ready) {
            assert_eq!(orphan.wait(Duration::from_millis(10)), None, "it should start");
        }
        orphan
    };

    let server = EmbeddedPostgres::start(quick(Options::kept(&dir))).unwrap();
    assert_ne!(server.pid(), orphan.pid());
    assert!(orphan.status().unwrap().success(), "it was stopped in order, not killed");
    assert_eq!(ask(server.url(), "SELECT 'up'").unwrap(), "up");
}

#[test]
fn the_lock_file_of_a_killed_server_does_not_stop_the_next() {
    let root = root();
    let dir = root.path().join("dev");
    let killed = EmbeddedPostgres::start(quick(Options::kept(&dir))).unwrap();
    killed.server.kill_for_test();
    assert!(killed.ended().is_some());
    drop(killed);
    let file = dir.join("data/postmaster.pid");
    let text = fs::read_to_string(&file).unwrap();
    // And to make it worse, its number now belongs to a living process that PostgreSQL would respect.
    let user = ServerUser::choose().unwrap();
    let mut command = std::process::Command::new("sleep");
    command.arg("600").current_dir("/");
    user.run(&mut command);
    let other = Tether::spawn(command, rustix::process::Signal::KILL).unwrap();
    let rest = text.split_once('\n').unwrap().1;
    fs::write(&file, format!("{}\n{rest}", other.pid())).unwrap();

    let server = EmbeddedPostgres::start(quick(Options::kept(&dir))).unwrap();
    assert_eq!(ask(server.url(), "SELECT 'up'").unwrap(), "up");
    assert_eq!(other.status(), None, "the innocent process was left alone");
    other.signal(rustix::process::Signal::KILL).unwrap();
    other.wait(Duration::from_secs(10)).unwrap();
}

#[test]
fn an_announced_server_is_found_until_it_stops() {
    let (root, state) = (root(), tempfile::tempdir().unwrap());
    let mut server = EmbeddedPostgres::start(quick(Options::ephemeral(root.path().join("dev")))).unwrap();
    assert!(pointer::discover_in(state.path()).is_none());
    server.announce_in(state.path()).unwrap();
    let found = pointer::discover_in(state.path()).unwrap();
    assert_eq!((found.url.as_str(), found.pid), (server.url(), std::process::id()));
    server.stop().unwrap();
    assert!(pointer::discover_in(state.path()).is_none());
    assert!(!state.path().join("running-dev.json").exists());
}
