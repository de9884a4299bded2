//! `musterd batch outputs`: what a batch has written, and a copy of it that is known to be right.

use super::{download::download, open};
use crate::cli::{Exit, Global, screen};
use anyhow::{Context, Result, bail};
use clap::Args;
use comfy_table::Cell;
use indicatif::HumanBytes;
use musterd::{
    config::Config,
    flow::outputs::Manifest,
    json::Json,
    objects::{Key, Store},
};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  musterd batch outputs 17
  musterd batch outputs 17 --download ./results       copies every file, and checks it";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(in crate::cli) struct Outputs {
    /// The batch's id.
    id: i64,
    /// Copy the files into this directory, and check them against the manifest.
    #[arg(long, value_name = "DIR")]
    download: Option<PathBuf>,
}

impl Outputs {
    pub(super) async fn execute(self, global: &Global, config: &Config) -> Result<Exit> {
        let (client, progress) = open(global, config, self.id).await?;
        client.close().await;
        let ended = progress.is_over();
        if let Some(at) = progress.data_gone_at.filter(|_| progress.outputs_gone) {
            bail!("the output files of batch {} went with its data on {at:.0}", self.id);
        }
        let outputs = match (progress.outputs, ended) {
            (Some(outputs), _) => outputs,
            (None, true) => return self.none(global, "has no outputs"),
            (None, false) => return self.none(global, "has not ended; its outputs are written when it does"),
        };
        if global.json && self.download.is_none() {
            screen::json(&outputs)?;
            return Ok(Exit::Done);
        }
        let store = Store::open(&config.outputs)?;
        let manifest = read_manifest(&store, &outputs).await?;
        match &self.download {
            Some(dir) => download(global, &store, &manifest, dir).await,
            None => print(&store, &manifest),
        }
    }

    /// Nothing to show is a fine answer; nothing to download is not what was asked for.
    fn none(&self, global: &Global, why: &str) -> Result<Exit> {
        if self.download.is_some() {
            bail!("batch {} {why}", self.id);
        }
        match global.json {
            true => screen::json(&serde_json::Value::Null)?,
            false => screen::line(&format!("batch {} {why}", self.id))?,
        }
        Ok(Exit::Done)
    }
}

async fn read_manifest(store: &Store, outputs: &Json) -> Result<Manifest> {
    let outputs: serde_json::Value = serde_json::from_str(outputs.text())?;
    let key = Key::new(outputs["manifest"].as_str().unwrap_or_default())?;
    let text =
        store.read(&key).await.context("cannot read the manifest; are [outputs] those of the workers?")?;
    serde_json::from_slice(&text).with_context(|| format!("{} is no manifest", store.location(&key)))
}

fn print(store: &Store, manifest: &Manifest) -> Result<Exit> {
    let mut table = screen::table([
        screen::whole("file"),
        screen::spare("size", 1),
        screen::spare("rows", 2),
        screen::spare("sha256", 3),
        screen::whole("where"),
    ]);
    for file in &manifest.files {
        table.add_row([
            Cell::new(&file.name),
            Cell::new(HumanBytes(file.bytes)),
            Cell::new(screen::grouped(i64::try_from(file.rows).unwrap_or(i64::MAX))),
            Cell::new(&file.sha256),
            Cell::new(store.location(&Key::new(&*file.key)?)),
        ]);
    }
    table.print()?;
    Ok(Exit::Done)
}
