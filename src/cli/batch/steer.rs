//! `musterd batch hold | release | abort`: each prints the state afterwards.

use super::{find, open, show};
use crate::cli::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use musterd::{
    config::Config,
    flow::{
        complete::{CompleteError, Completer},
        outputs::Uploader,
    },
    metrics::Metrics,
    objects,
    store::{
        Store,
        batches::{Completion, Progress},
        connect::OneShot,
        steering::{self, Steer, steer},
    },
};
use std::time::{Duration, Instant};

const HOLD_EXAMPLES: &str = "\
Examples:
  musterd batch hold 17
  musterd batch release 17";

const ABORT_EXAMPLES: &str = "\
Examples:
  musterd batch abort 17
  musterd batch abort 17 --json";

#[derive(Debug, Args)]
#[command(after_help = HOLD_EXAMPLES)]
pub(in crate::cli) struct Hold {
    /// The batch's id.
    id: i64,
}

#[derive(Debug, Args)]
#[command(after_help = HOLD_EXAMPLES)]
pub(in crate::cli) struct Release {
    /// The batch's id.
    id: i64,
}

#[derive(Debug, Args)]
#[command(after_help = ABORT_EXAMPLES)]
pub(in crate::cli) struct Abort {
    /// The batch's id.
    id: i64,
}

impl Hold {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        steer_and_show(global, config, self.id, Steer::Hold).await
    }
}

impl Release {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        steer_and_show(global, config, self.id, Steer::Release).await
    }
}

async fn steer_and_show(global: &Global, config: &Config, id: i64, what: Steer) -> Result<Exit> {
    let client = global.connect(&config.database).await?;
    steer(&client, id, what, None).await?;
    let progress = find(&client, id).await?;
    client.close().await;
    report(global, &progress)
}

fn report(global: &Global, progress: &Progress) -> Result<Exit> {
    let state = show::state(progress);
    match global.json {
        true => screen::json(&serde_json::json!({ "id": progress.id, "state": state }))?,
        false => screen::line(&format!("batch {}: {state}", progress.id))?,
    }
    Ok(Exit::Done)
}

/// How long an abort waits for the workers to let go; they need milliseconds when they live.
const PATIENCE: Duration = Duration::from_secs(10);
const ASK_EVERY: Duration = Duration::from_millis(20);

impl Abort {
    /// Asks for the abort, and waits for the end. When no worker holds anything the end is ours to write.
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        let (client, _) = open(global, config, self.id).await?;
        steer(&client, self.id, Steer::Abort, None).await?;
        let progress = self.see_it_end(config, &client).await?;
        client.close().await;
        report(global, &progress)?;
        if !progress.is_over() && !global.json {
            screen::line(
                "nothing more of it starts; it ends when the workers have let go of its last blocks",
            )?;
        }
        Ok(Exit::Done)
    }

    async fn see_it_end(&self, config: &Config, client: &OneShot) -> Result<Progress> {
        let until = Instant::now() + PATIENCE;
        loop {
            let progress = find(client, self.id).await?;
            let hands = steering::hands_on(client, self.id).await?;
            let no_worker_comes = hands.owned && !hands.workers;
            if progress.is_over() || no_worker_comes || Instant::now() > until {
                return Ok(progress);
            }
            if !hands.owned {
                self.complete(config, hands.workers).await?;
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// The same completion as a worker's. Files are left to a worker as long as there is one.
    async fn complete(&self, config: &Config, workers: bool) -> Result<()> {
        let store = Store::open(&config.database)?;
        let uploader =
            Uploader { pool: store.uploads.clone(), objects: objects::Store::open(&config.outputs)? };
        let (metrics, config) = (Metrics::default(), config.completion.clone());
        let completer = Completer { store, uploader, config, cache: None, metrics };
        let completed = match completer.complete(self.id).await {
            Ok(Completion::NeedsUpload) if !workers => completer.complete_with_outputs(self.id, false).await,
            completed => completed,
        };
        match completed {
            // A worker is at it.
            Ok(_) | Err(CompleteError::Contended { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
