//! A gate in the way of the code under test: the test sees it arrive, and lets it go on when it wants.

use tokio::sync::watch;

/// Closed until opened; then open for good.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    entered: watch::Sender<usize>,
    open: watch::Sender<bool>,
}

impl Gate {
    pub(crate) fn closed() -> Self {
        Self { entered: watch::Sender::new(0), open: watch::Sender::new(false) }
    }

    /// For the code under test: says that it is here, and waits until the gate is open.
    pub(crate) async fn pass(&self) {
        self.entered.send_modify(|count| *count += 1);
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
    }

    /// For the test: waits until somebody has come to the gate.
    pub(crate) async fn entered(&self) {
        self.entered_by(1).await;
    }

    /// For the test: waits until `count` have come to the gate.
    pub(crate) async fn entered_by(&self, count: usize) {
        self.entered.subscribe().wait_for(|entered| *entered >= count).await.unwrap();
    }

    /// For the test: lets everybody go on.
    pub(crate) fn open(&self) {
        self.open.send_replace(true);
    }
}
