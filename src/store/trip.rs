//! A transaction in one round trip: everything is sent in one go and answered in order.
//!
//! A statement that fails makes the server refuse those behind it, and the COMMIT a rollback. All is sent before the first answer is
//! waited for, so a caller that is cancelled in the middle leaves no open transaction in a pooled session.

use tokio_postgres::{Client, Error};

pub(super) const COMMIT: &str = "COMMIT";
pub(super) const ROLLBACK: &str = "ROLLBACK";

/// Runs `work` between `begin` and `end`. Both send what they have when they are polled for the first time, and wait for nothing before.
pub(super) async fn run<T>(
    client: &Client,
    begin: &str,
    work: impl Future<Output = Result<T, Error>>,
    end: impl Future<Output = Result<(), Error>>,
) -> Result<T, Error> {
    let (begun, done, ended) = tokio::join!(biased; client.batch_execute(begin), work, end);
    begun?;
    let done = done?;
    ended?;
    Ok(done)
}
