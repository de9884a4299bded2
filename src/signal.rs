//! SIGTERM and SIGINT as two events: first drain, then give back at once.

use futures::StreamExt;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook_tokio::Signals;
use tokio_util::sync::CancellationToken;

/// What the outside asks of the process. Tests make their own.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    /// Finish what has started, then end.
    pub drain: CancellationToken,
    /// Stop waiting for what has started: give it back and end.
    pub now: CancellationToken,
}

/// Signals turned into a [`Stop`]; `listen` runs until the process ends.
pub struct Listener {
    signals: Signals,
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Listener")
    }
}

impl Listener {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { signals: Signals::new([SIGTERM, SIGINT])? })
    }

    pub async fn listen(mut self, stop: Stop) {
        while let Some(signal) = self.signals.next().await {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("signal");
            if stop.drain.is_cancelled() {
                tracing::warn!(signal = name, "{name} again: giving back what is running");
                stop.now.cancel();
            } else {
                tracing::info!(signal = name, "{name}: draining; once more to give back at once");
                stop.drain.cancel();
            }
        }
    }
}
