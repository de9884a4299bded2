//! `musterd batch hold-data | release-data`: whether retention may take the rows of a batch.

use super::find;
use crate::cli::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use musterd::{
    config::Config,
    store::steering::{Steer, steer},
};

const EXAMPLES: &str = "\
Examples:
  musterd batch hold-data 17
  musterd batch release-data 17";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct HoldData {
    /// The batch's id.
    id: i64,
}

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct ReleaseData {
    /// The batch's id.
    id: i64,
}

impl HoldData {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        keep(global, config, self.id, Steer::HoldData).await
    }
}

impl ReleaseData {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        keep(global, config, self.id, Steer::ReleaseData).await
    }
}

async fn keep(global: &Global, config: &Config, id: i64, what: Steer) -> Result<Exit> {
    let client = global.connect(&config.database).await?;
    steer(&client, id, what, None).await?;
    let progress = find(&client, id).await?;
    client.close().await;
    match (global.json, progress.data_held) {
        (true, held) => screen::json(&serde_json::json!({ "id": id, "data_held": held }))?,
        (false, true) => screen::line(&format!("batch {id}: its data stays until release-data"))?,
        (false, false) => screen::line(&format!("batch {id}: its data goes when retention says so"))?,
    }
    Ok(Exit::Done)
}
