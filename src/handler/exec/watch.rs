//! The watch: a tiny process of its own session that outlives musterd by a moment and kills what it left behind.
//!
//! The kernel's parent-death signal reaches children only. The watch hears of the process group of every child, from the child
//! itself before it becomes the program, and from musterd, over a socket whose other end only musterd and its
//! children-to-be have. When the socket ends, musterd is gone, however it went, and every group on the list is killed,
//! grandchildren and all.
//!
//! The watch may die, too. No program and no row suffers: a word to it cannot kill and does not wait. A thread notices its
//! end, starts another and gives it the list.

use rustix::{
    net::SendFlags,
    process::{Pid, Signal, WaitId, WaitIdOptions},
};
use std::{
    collections::{BTreeMap, HashMap},
    io::{self, BufRead, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The hidden subcommand that is the watch.
pub const SUBCOMMAND: &str = "__watch";

/// The first wait before a watch that died is started again, and the longest.
const RESTART: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// The watch of this process; a program that embeds the library has none, as it has no such subcommand.
static WATCH: Mutex<State> =
    Mutex::new(State { is_wanted: false, line: None, pid: None, groups: BTreeMap::new() });

struct State {
    is_wanted: bool,
    line: Option<Line>,
    /// Cleared before it is reaped, so that it is never the number of another process.
    pid: Option<Pid>,
    /// The living groups, and the temporary directory of each.
    groups: BTreeMap<u32, PathBuf>,
}

/// Our end of the socket.
#[derive(Clone, Debug)]
pub(super) struct Line(Arc<OwnedFd>);

/// Starts the watch, once, from the program that has the subcommand; before the first child.
pub fn start() {
    let mut state = lock();
    if std::mem::replace(&mut state.is_wanted, true) {
        return;
    }
    let first = launch();
    let child = first.map(|launched| state.adopt(launched));
    drop(state);
    if let Err(error) = &child {
        tracing::warn!(%error, "no watch: should musterd be killed, what its handlers' programs started may stay");
    }
    let supervisor = std::thread::Builder::new().name("watch".into());
    if let Err(error) = supervisor.spawn(move || supervise(child.ok())) {
        tracing::warn!(%error, "the watch is not supervised: should it die, it is not started again");
    }
}

/// The watch, if there is one.
pub(super) fn line() -> Option<Line> {
    lock().line.clone()
}

/// A group lives from now on.
pub(super) fn began(group: u32, dir: &Path) {
    let mut state = lock();
    state.groups.insert(group, dir.to_owned());
    state.tell(&entry(group, dir));
}

/// A group was killed, and its number may soon be another's.
pub(super) fn ended(group: u32) {
    let mut state = lock();
    state.groups.remove(&group);
    state.tell(format!("-{group}\n").as_bytes());
}

/// Whether this process is the leader of a living group, or the watch.
pub(super) fn knows(pid: Pid) -> bool {
    let state = lock();
    state.pid == Some(pid) || state.groups.contains_key(&pid.as_raw_nonzero().get().unsigned_abs())
}

fn lock() -> MutexGuard<'static, State> {
    WATCH.lock().unwrap_or_else(PoisonError::into_inner)
}

fn entry(group: u32, dir: &Path) -> Vec<u8> {
    let mut text = format!("+{group} ").into_bytes();
    text.extend_from_slice(dir.as_os_str().as_encoded_bytes());
    text.push(b'\n');
    text
}

impl State {
    fn adopt(&mut self, (child, line): (Child, Line)) -> Child {
        self.pid = Some(Pid::from_child(&child));
        self.line = Some(line);
        let groups: Vec<Vec<u8>> = self.groups.iter().map(|(group, dir)| entry(*group, dir)).collect();
        groups.iter().for_each(|text| self.tell(text));
        child
    }

    /// One that does not listen any more would kill by an old list one day: it is killed, and the next one gets a new list.
    fn tell(&mut self, text: &[u8]) {
        let Some(line) = &self.line else { return };
        if line.send(text).is_err()
            && let Some(pid) = self.pid
        {
            // Dead already is fine.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

/// Waits for the watch's end and starts another, for as long as this process lives.
fn supervise(mut child: Option<Child>) {
    let mut losses = 0;
    loop {
        if let Some(mut ended) = child.take() {
            let status = wait(&mut ended);
            losses += 1;
            tracing::warn!(
                ?status,
                losses,
                "the watch of the handlers' programs has ended; starting another"
            );
        }
        // Woken by nothing: a plain wait, on a thread that has nothing else to do.
        std::thread::park_timeout(crate::backoff::delay(RESTART.0, RESTART.1, losses.max(1)));
        match launch() {
            Ok(launched) => child = Some(lock().adopt(launched)),
            Err(error) => {
                losses += 1;
                tracing::debug!(%error, losses, "the watch cannot be started; trying again");
            }
        }
    }
}

fn wait(child: &mut Child) -> Option<std::process::ExitStatus> {
    let pid = Pid::from_child(child);
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while let Err(rustix::io::Errno::INTR) = rustix::process::waitid(WaitId::Pid(pid), options) {}
    let mut state = lock();
    (state.pid, state.line) = (None, None);
    drop(state);
    child.wait().ok()
}

fn launch() -> io::Result<(Child, Line)> {
    // The very program that runs, also when its file was replaced meanwhile.
    let own = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
    let (ours, its) = UnixStream::pair()?;
    #[cfg(target_vendor = "apple")]
    rustix::net::sockopt::set_socket_nosigpipe(&ours, true)?;
    let mut child = Command::new(own)
        .arg(SUBCOMMAND)
        .env_clear()
        .stdin(Stdio::from(OwnedFd::from(its)))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    // Ready when it is in a session of its own: a signal to our group does not reach it any more.
    let mut ready = String::new();
    if let Some(stdout) = child.stdout.take() {
        io::BufReader::new(stdout).read_line(&mut ready)?;
    }
    if ready.trim() != "ready" {
        let _ = child.kill();
        child.wait()?;
        return Err(io::Error::other("it did not start"));
    }
    Ok((child, Line(Arc::new(ours.into()))))
}

impl Line {
    /// For a child between fork and exec: tells the watch of its own group. Makes system calls only. Without a watch the
    /// program runs as well.
    pub(super) fn begins(&self) {
        let mut text = [0; 12];
        let length =
            format_line(b'+', rustix::process::getpid().as_raw_nonzero().get().unsigned_abs(), &mut text);
        let _ = self.send(&text[..length]);
    }

    /// Neither waits nor raises SIGPIPE, which the standard library has set to kill by the time a child comes here.
    fn send(&self, text: &[u8]) -> io::Result<()> {
        #[cfg(not(target_vendor = "apple"))]
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        #[cfg(target_vendor = "apple")]
        let flags = SendFlags::DONTWAIT;
        loop {
            match rustix::net::send(self.0.as_fd(), text, flags) {
                Ok(sent) if sent == text.len() => return Ok(()),
                Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// `+123\n`, without asking for memory.
fn format_line(sign: u8, mut number: u32, text: &mut [u8; 12]) -> usize {
    let mut digits = [0; 10];
    let mut count = 0;
    loop {
        digits[count] = b'0' + (number % 10) as u8;
        count += 1;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    text[0] = sign;
    for place in 0..count {
        text[1 + place] = digits[count - 1 - place];
    }
    text[1 + count] = b'\n';
    count + 2
}

/// The life of the watch: listens until its owner is gone, then clears up.
pub fn run() -> io::Result<()> {
    rustix::process::setsid()?;
    writeln!(io::stdout(), "ready")?;
    io::stdout().flush()?;
    let mut groups: HashMap<i32, Group> = HashMap::new();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let (number, dir) = line.split_once(' ').map_or((line.as_str(), None), |(n, dir)| (n, Some(dir)));
        match number.split_at_checked(1).map(|(sign, number)| (sign, number.parse())) {
            Some(("+", Ok(group))) => {
                let dir = dir.filter(|dir| !dir.is_empty()).map(PathBuf::from);
                groups.insert(group, Group { leader_began: beginning_of(group), dir });
            }
            Some(("-", Ok(group))) => drop(groups.remove(&group)),
            _ => {}
        }
    }
    groups.into_iter().for_each(|(number, group)| group.clear_up(number));
    Ok(())
}

/// A group as the watch knows it.
struct Group {
    /// When its leader began to run, in ticks of the system's clock.
    leader_began: Option<u64>,
    dir: Option<PathBuf>,
}

impl Group {
    fn clear_up(self, number: i32) {
        // A child that could not become its program has said that it begins, and no word of its end followed: by now the
        // number may be another process's. A leader that is gone leaves the number to the rest of its group.
        let now = beginning_of(number);
        if now.is_none() || now == self.leader_began {
            // A group that has ended by itself is fine, and so is a directory that is gone.
            let _ =
                Pid::from_raw(number).map(|group| rustix::process::kill_process_group(group, Signal::KILL));
        }
        let _ = self.dir.map(std::fs::remove_dir_all);
    }
}

/// The 22nd field of a process's line, counted behind its name, which may hold anything. Linux alone has one.
fn beginning_of(process: i32) -> Option<u64> {
    let line = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    line.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_written_without_help() {
        for number in [0, 7, 10, 4_194_304, u32::MAX] {
            let mut text = [0; 12];
            let length = format_line(b'+', number, &mut text);
            assert_eq!(std::str::from_utf8(&text[..length]).unwrap(), format!("+{number}\n"));
        }
    }
}
