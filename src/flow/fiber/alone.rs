//! How long a suspect stays alone. A process that dies of it does so soon, as a rule; one that is innocent may take hours, and the
//! other work of the process does not wait for that.

use super::Bench;
use crate::error_text::describe;
use crate::{flow::solo::Solitude, held::Key};
use std::{error::Error, pin::pin, time::Duration};

/// A suspect with two deaths behind it is alone for this long; four times as long with every further death.
const FIRST: Duration = Duration::from_secs(30);
/// Until the next try to write down that it is not alone any more.
const AGAIN: Duration = Duration::from_secs(5);

fn solitude_after(crashes: i32) -> Duration {
    let further = u32::try_from(crashes - 2).unwrap_or_default().min(10);
    FIRST * 4_u32.pow(further)
}

impl Bench {
    /// Runs a suspect alone, and after a while beside others. `lift` writes down that it is not alone any more: from then on a death is not
    /// its doing alone.
    pub(in crate::flow) async fn alone_for_a_while<E, F>(
        &self,
        (key, crashes): (Key, i32),
        solitude: Solitude,
        run: impl Future<Output = ()>,
        lift: impl Fn() -> F,
    ) where
        E: Error + 'static,
        F: Future<Output = Result<bool, E>>,
    {
        let mut run = pin!(run);
        let end = async {
            tokio::time::sleep(solitude_after(crashes)).await;
            while let Err(error) = lift().await {
                tracing::warn!(error = describe(&error), "a suspect stays alone; trying again");
                tokio::time::sleep(AGAIN).await;
            }
            self.held.join_others(key);
            tracing::info!(
                alone_s = solitude_after(crashes).as_secs(),
                "a suspect runs on; other work goes on beside it"
            );
            drop(solitude);
        };
        tokio::select! {
            biased;
            () = &mut run => {}
            () = end => run.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_further_death_makes_the_solitude_longer() {
        let seconds = |crashes| solitude_after(crashes).as_secs();
        assert_eq!([0, 2, 3, 4, 5].map(seconds), [30, 30, 120, 480, 1_920]);
        assert!(seconds(i32::MAX) > 24 * 60 * 60);
    }
}
