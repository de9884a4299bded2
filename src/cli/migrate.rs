//! `musterd migrate`: the tables, created or brought up to date, under a lock.

use super::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use musterd::store::{
    migrate::{self, Fit, WorkerSchemaState},
    pooler,
};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  musterd migrate --config musterd.toml
  musterd migrate --status
  musterd migrate --dry-run
  musterd migrate --with-worker-schema
  musterd migrate --wait 10m     change nothing; return when the schema is there";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Migrate {
    /// Only show which migrations the database has.
    #[arg(long, conflicts_with = "dry_run")]
    status: bool,
    /// Only print the SQL that would be run.
    #[arg(long)]
    dry_run: bool,
    /// Change nothing: wait at most so long until another process has brought the schema up to date.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, conflicts_with_all = ["status", "dry_run"])]
    wait: Option<Duration>,
    /// Also install the schema worker: worker.tasks, worker.spawn and the other names of the STATBUS worker.
    #[arg(long, conflicts_with_all = ["status", "wait"])]
    with_worker_schema: bool,
}

impl Migrate {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = global.load()?;
        let mut client = global.connect(&loaded.config.database).await?;
        if let Some(limit) = self.wait {
            return wait(global, &client, limit).await;
        }
        if self.status {
            return status(global, &client).await;
        }
        if self.dry_run {
            return dry_run(global, &client, self.with_worker_schema).await;
        }
        refuse_pooler(&loaded.config.database).await?;
        let report = match self.with_worker_schema {
            true => migrate::migrate_with_worker_schema(&mut client).await?,
            false => migrate::migrate(&mut client).await?,
        };
        if global.json {
            screen::json(&serde_json::json!({
                "applied": report.applied.iter().map(|step| format!("V{}__{}", step.version, step.name)).collect::<Vec<_>>(),
                "version": report.version,
                "worker_schema": report.worker_schema,
            }))?;
            return Ok(Exit::Done);
        }
        if report.applied.is_empty() {
            screen::line(&format!("nothing to do: the database is at V{}", report.version))?;
        } else {
            for step in &report.applied {
                screen::line(&format!("applied V{} {}", step.version, step.name))?;
            }
            screen::line(&format!("the database is at V{}", report.version))?;
        }
        if report.worker_schema == WorkerSchemaState::Installed {
            screen::line("the schema worker is installed")?;
        }
        Ok(Exit::Done)
    }
}

async fn wait(global: &Global, client: &tokio_postgres::Client, limit: Duration) -> Result<Exit> {
    let version = match migrate::wait(client, limit).await? {
        Fit::Exact => migrate::status(client).await?.last().map_or(0, |step| step.version),
        Fit::Newer { database, .. } => database,
    };
    match global.json {
        true => screen::json(&serde_json::json!({ "version": version }))?,
        false => screen::line(&format!("the database is at V{version}"))?,
    }
    Ok(Exit::Done)
}

/// The lock of migrations is a session's: through a transaction pooler it would stay with another client.
async fn refuse_pooler(config: &musterd::store::Config) -> Result<()> {
    if pooler::lends_sessions(&config.direct_target()?).await? {
        anyhow::bail!(
            "migrations cannot go through a transaction pooler: set database.direct_url to the server itself"
        );
    }
    Ok(())
}

async fn status(global: &Global, client: &tokio_postgres::Client) -> Result<Exit> {
    let migrations = migrate::status(client).await?;
    if global.json {
        screen::json(&migrations)?;
        return Ok(Exit::Done);
    }
    let mut table = screen::table([
        screen::whole("version"),
        screen::whole("name"),
        screen::whole("state"),
        screen::spare("applied", 1),
    ]);
    for migration in &migrations {
        table.add_row([
            format!("V{}", migration.version),
            migration.name.clone(),
            migration.state.as_str().to_owned(),
            migration.applied_on.map(|at| at.to_string()).unwrap_or_default(),
        ]);
    }
    table.print()?;
    screen::line(&format!("the schema worker is {}", migrate::worker_schema(client).await?.as_str()))?;
    Ok(Exit::Done)
}

async fn dry_run(global: &Global, client: &tokio_postgres::Client, with_worker_schema: bool) -> Result<Exit> {
    let pending = migrate::pending(client).await?;
    if global.json {
        screen::json(&pending)?;
        return Ok(Exit::Done);
    }
    for migration in &pending {
        screen::line(&format!("-- V{} {}\n{}", migration.version, migration.name, migration.sql))?;
    }
    if with_worker_schema {
        screen::line(migrate::worker_schema_sql())?;
    } else if pending.is_empty() {
        screen::line("-- nothing to do")?;
    }
    Ok(Exit::Done)
}
