//! `musterd migrate`: the tables, created or brought up to date, under a lock.

use super::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use musterd::store::migrate;

const EXAMPLES: &str = "\
Examples:
  musterd migrate --config musterd.toml
  musterd migrate --status
  musterd migrate --dry-run";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Migrate {
    /// Only show which migrations the database has.
    #[arg(long, conflicts_with = "dry_run")]
    status: bool,
    /// Only print the SQL that would be run.
    #[arg(long)]
    dry_run: bool,
}

impl Migrate {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let mut client = global.connect(&loaded.config.database).await?;
        if self.status {
            return status(global, &client).await;
        }
        if self.dry_run {
            return dry_run(global, &client).await;
        }
        let report = migrate::migrate(&mut client).await?;
        if global.json {
            screen::json(&serde_json::json!({
                "applied": report.applied.iter().map(|step| format!("V{}__{}", step.version, step.name)).collect::<Vec<_>>(),
                "version": report.version,
            }))?;
        } else if report.applied.is_empty() {
            screen::line(&format!("nothing to do: the database is at V{}", report.version))?;
        } else {
            for step in &report.applied {
                screen::line(&format!("applied V{} {}", step.version, step.name))?;
            }
            screen::line(&format!("the database is at V{}", report.version))?;
        }
        Ok(Exit::Done)
    }
}

async fn status(global: &Global, client: &tokio_postgres::Client) -> Result<Exit> {
    let migrations = migrate::status(client).await?;
    if global.json {
        screen::json(&migrations)?;
        return Ok(Exit::Done);
    }
    let mut table = screen::table(["version", "name", "state", "applied"]);
    for migration in &migrations {
        table.add_row([
            format!("V{}", migration.version),
            migration.name.clone(),
            migration.state.as_str().to_owned(),
            migration.applied_on.map(|at| at.to_string()).unwrap_or_default(),
        ]);
    }
    screen::print(&table)?;
    Ok(Exit::Done)
}

async fn dry_run(global: &Global, client: &tokio_postgres::Client) -> Result<Exit> {
    let pending = migrate::pending(client).await?;
    if global.json {
        screen::json(&pending)?;
        return Ok(Exit::Done);
    }
    for migration in &pending {
        screen::line(&format!("-- V{} {}\n{}", migration.version, migration.name, migration.sql))?;
    }
    if pending.is_empty() {
        screen::line("-- nothing to do")?;
    }
    Ok(Exit::Done)
}
