//! The daemon inside the test's process, for handlers that the test writes itself: on threads of its own, which those
//! handlers may block.

use std::sync::Arc;
use std::time::Duration;

use musterd::config::{Given, load};
use musterd::daemon::Daemon;
use musterd::handler::{self, Handler};
use musterd::signal::Stop;
use musterd::supervisor::Ended;

use super::config::TestConfig;

/// A running daemon; dropping it gives back what it runs.
#[derive(Debug)]
pub(crate) struct Embedded {
    stop: Stop,
    thread: Option<std::thread::JoinHandle<Ended>>,
}

impl Embedded {
    /// Starts a daemon that runs `command` with `handler`; each row may take `timeout`.
    pub(crate) fn start(
        config: &TestConfig,
        command: &str,
        handler: Arc<dyn Handler>,
        timeout: Duration,
    ) -> Self {
        let given = Given { file: Some(config.file().into()), env: Some(Vec::new()), ..Given::default() };
        let config = load(&given).unwrap().config;
        let settings = handler::Config { timeout, ..handler::Config::default() };
        let handlers = config.registry().unwrap().with(command, handler, settings);
        let stop = Stop::default();
        let told = stop.clone();
        let run = move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
            runtime
                .block_on(async { Daemon::prepare(config, handlers).await.unwrap().run(told).await.unwrap() })
        };
        let thread = std::thread::Builder::new().name("daemon".into()).spawn(run).unwrap();
        Self { stop, thread: Some(thread) }
    }

    /// Drains it.
    pub(crate) async fn stop(mut self) -> Ended {
        self.stop.drain.cancel();
        let thread = self.thread.take().unwrap();
        tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap()
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.stop.drain.cancel();
        self.stop.now.cancel();
    }
}
