//! The watch: a tiny process of its own session that outlives musterd by a moment and kills what it left behind.
//!
//! The kernel's parent-death signal reaches children only. The watch is told the process group of every child, by the child
//! itself before it becomes the program, over a pipe whose other end only musterd and its children-to-be have. When the pipe
//! ends, musterd is gone, however it went, and every group that is still told is killed, grandchildren and all.

use rustix::process::{Pid, Signal};
use std::{
    collections::HashSet,
    io::{self, BufRead, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    process::{Command, Stdio},
    sync::OnceLock,
};

/// The hidden subcommand that is the watch.
pub const SUBCOMMAND: &str = "__watch";

/// The watch of this process; a program that embeds the library has none, as it has no such subcommand.
static LINE: OnceLock<Option<Line>> = OnceLock::new();

#[derive(Debug)]
pub(super) struct Line(OwnedFd);

/// Starts the watch, once, from the program that has the subcommand; before the first child.
pub fn start() {
    LINE.get_or_init(|| match launch() {
        Ok(line) => Some(line),
        Err(error) => {
            tracing::warn!(%error, "no watch: should musterd be killed, programs started by its handlers' programs may stay");
            None
        }
    });
}

/// The watch, if there is one.
pub(super) fn line() -> Option<&'static Line> {
    LINE.get().and_then(Option::as_ref)
}

fn launch() -> io::Result<Line> {
    // The very program that runs, also when its file was replaced meanwhile.
    let own = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
    let mut child = Command::new(own)
        .arg(SUBCOMMAND)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(io::Error::other("its pipes are missing"));
    };
    // Ready when it is in a session of its own: a signal to our group does not reach it any more.
    let mut ready = String::new();
    io::BufReader::new(stdout).read_line(&mut ready)?;
    if ready.trim() != "ready" {
        return Err(io::Error::other("it did not start"));
    }
    Ok(Line(stdin.into()))
}

impl Line {
    /// For a child between fork and exec: tells the watch of its own group. Makes system calls only.
    pub(super) fn begins(&self) -> io::Result<()> {
        let mut text = [0; 12];
        let length =
            format_line(b'+', rustix::process::getpid().as_raw_nonzero().get().unsigned_abs(), &mut text);
        write_all(self.0.as_fd(), &text[..length])
    }

    /// Tells the watch to forget a group that was killed.
    pub(super) fn ended(&self, group: u32) {
        let mut text = [0; 12];
        let length = format_line(b'-', group, &mut text);
        // The pipe breaks only when the watch is gone; then there is nobody to tell.
        let _ = write_all(self.0.as_fd(), &text[..length]);
    }
}

/// `+123\n`, without asking anybody for memory.
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

/// Short enough for a pipe to take it whole.
fn write_all(pipe: BorrowedFd<'_>, text: &[u8]) -> io::Result<()> {
    loop {
        match rustix::io::write(pipe, text) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The life of the watch: listens until its owner is gone, then clears up.
pub fn run() -> io::Result<()> {
    rustix::process::setsid()?;
    writeln!(io::stdout(), "ready")?;
    io::stdout().flush()?;
    let mut groups = HashSet::new();
    for line in io::stdin().lock().lines() {
        let line = line?;
        match line.split_at_checked(1).map(|(sign, number)| (sign, number.parse())) {
            Some(("+", Ok(group))) => drop(groups.insert(group)),
            Some(("-", Ok(group))) => drop(groups.remove(&group)),
            _ => {}
        }
    }
    for group in groups.into_iter().filter_map(|group: i32| Pid::from_raw(group)) {
        // One that has ended by itself is fine.
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    Ok(())
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
