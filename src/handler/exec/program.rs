//! What to start: a program without a shell, as whom, in which directory, and within which limits.

use super::{ENVIRONMENT, scratch::Scratch, watch};
use crate::{
    handler::{BuildError, Config},
    passwd::ids_of,
    tether::Tether,
};
use rustix::process::{Resource, Rlimit, Signal};
use std::{
    ffi::OsString,
    io,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) handler: String,
    argv: Vec<String>,
    env: Vec<(OsString, OsString)>,
    cwd: Option<PathBuf>,
    /// User and group to become; none when it runs as we do.
    user: Option<(u32, u32)>,
    no_new_privs: bool,
    limits: Vec<(Resource, u64)>,
}

impl Program {
    pub(super) fn new(handler: &str, config: &Config) -> Result<Self, BuildError> {
        let names: Vec<String> = match &config.env {
            Some(names) => names.clone(),
            None => ENVIRONMENT.map(str::to_owned).to_vec(),
        };
        let env = names.iter().filter_map(|name| Some((name.into(), std::env::var_os(name)?))).collect();
        Ok(Self {
            handler: handler.to_owned(),
            argv: config.argv.clone(),
            env,
            cwd: config.cwd.clone(),
            user: config.user.as_deref().map(|user| find_user(handler, user)).transpose()?.flatten(),
            no_new_privs: config.no_new_privs.unwrap_or(true),
            limits: limits(config),
        })
    }

    pub(super) fn name(&self) -> &str {
        self.argv.first().map_or("", String::as_str)
    }

    /// Starting a process blocks; a caller that gives up meanwhile leaves nothing behind.
    pub(super) async fn start(&self) -> io::Result<Owned> {
        let program = self.clone();
        tokio::task::spawn_blocking(move || Owned::spawn(&program)).await.map_err(io::Error::other)?
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.name());
        command.args(self.argv.iter().skip(1)).env_clear().envs(self.env.iter().cloned());
        if let Some(dir) = &self.cwd {
            command.current_dir(dir);
        }
        if let Some((uid, gid)) = self.user {
            // The standard library drops root's other groups then.
            command.uid(uid).gid(gid);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

/// The ids of a user to become. `None`: we are that user.
fn find_user(handler: &str, user: &str) -> Result<Option<(u32, u32)>, BuildError> {
    let error = |reason: String| BuildError::User { name: handler.to_owned(), user: user.to_owned(), reason };
    let passwd = std::fs::read_to_string("/etc/passwd")
        .map_err(|source| error(format!("/etc/passwd cannot be read: {source}")))?;
    let ids =
        ids_of(&passwd, user).ok_or_else(|| error("there is no such user in /etc/passwd".to_owned()))?;
    let own = rustix::process::geteuid();
    if own.as_raw() == ids.0 {
        return Ok(None);
    }
    match own.is_root() {
        true => Ok(Some(ids)),
        false => Err(error("only root can start programs as another user: run musterd as root, or as that user, or leave user out".to_owned())),
    }
}

/// The limits that the kernel keeps.
fn limits(config: &Config) -> Vec<(Resource, u64)> {
    let seconds = |time: Duration| time.as_secs().max(1);
    let given = [
        (Resource::As, config.max_memory.map(|bytes| bytes.get())),
        (Resource::Cpu, config.max_cpu_time.map(seconds)),
        (Resource::Nofile, config.max_open_files.map(|files| files.get())),
        (Resource::Fsize, config.max_file_size.map(|bytes| bytes.get())),
        (Resource::Nproc, config.max_user_processes.map(|processes| processes.get())),
    ];
    given.into_iter().filter_map(|(resource, limit)| Some((resource, limit?))).collect()
}

/// A child that dies with its owner in this process.
#[derive(Debug)]
pub(super) struct Owned(pub(super) Tether);

impl Owned {
    #[expect(unsafe_code, reason = "limits and the word to the watch must be set between fork and exec")]
    fn spawn(program: &Program) -> io::Result<Self> {
        let mut command = program.command();
        let scratch = Scratch::new(&program.handler, program.user);
        if let Some(scratch) = &scratch {
            command.env("TMPDIR", scratch.path());
        }
        let (limits, line) = (program.limits.clone(), watch::line());
        let no_new_privs = program.no_new_privs;
        let hook = move || {
            for (resource, limit) in &limits {
                // What we may not have ourselves we cannot give.
                let most = rustix::process::getrlimit(*resource).maximum.unwrap_or(u64::MAX).min(*limit);
                rustix::process::setrlimit(*resource, Rlimit { current: Some(most), maximum: Some(most) })?;
            }
            #[cfg(target_os = "linux")]
            if no_new_privs {
                rustix::thread::set_no_new_privs(true)?;
            }
            // Before the program can start anything itself: no moment is left in which no process would clear up after it.
            if let Some(line) = &line {
                line.begins();
            }
            Ok(())
        };
        #[cfg(not(target_os = "linux"))]
        let _ = no_new_privs;
        // SAFETY: the hook makes system calls only, on values that were copied before the fork.
        unsafe { command.pre_exec(hook) };
        let dir = scratch.as_ref().map(|scratch| scratch.path().to_owned()).unwrap_or_default();
        let begins = move |group| watch::began(group, &dir);
        // The directory first: what we do not come to, the watch does.
        let ends = move |group| {
            drop(scratch);
            watch::ended(group);
        };
        Tether::spawn_group(command, Signal::KILL, begins, ends).map(Self)
    }

    /// Waits, at most for `limit`, until it has ended by itself; then it is killed.
    pub(super) fn end_within(self, limit: Duration) {
        let _ = self.0.wait(limit);
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // Ended already is fine; its group went with it.
        let _ = self.0.signal_group(Signal::KILL);
    }
}
