//! A listener on what goes to a handler and what comes back, for `musterd handler test`. A daemon has none.

use serde::Serialize;
use tokio::sync::mpsc;

/// One request and its reply, as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Exchange {
    pub request: String,
    pub reply: String,
}

#[derive(Clone, Debug, Default)]
pub struct Tap(Option<mpsc::UnboundedSender<Exchange>>);

impl Tap {
    pub fn new() -> (Self, mpsc::UnboundedReceiver<Exchange>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(Some(sender)), receiver)
    }

    pub(super) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The text is made only when there is a listener.
    pub(super) fn saw(&self, exchange: impl FnOnce() -> (String, String)) {
        if let Some(sender) = &self.0 {
            let (request, reply) = exchange();
            // A listener that has gone away has heard enough.
            let _ = sender.send(Exchange { request, reply });
        }
    }
}
