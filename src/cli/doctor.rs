//! `musterd doctor`: pass, warn or fail for everything a worker needs, and what to do.

use super::{Exit, Global, screen};
use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use musterd::{
    config::load,
    doctor::{self, Check, Verdict},
    telemetry,
};

const EXAMPLES: &str = "\
Examples:
  musterd doctor --config musterd.toml
  musterd doctor --json
  musterd doctor --strict        a warning counts as a failure";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Doctor {
    /// Exit with 1 for a warning too.
    #[arg(long)]
    strict: bool,
}

impl Doctor {
    pub(super) async fn execute(self, global: &Global) -> Result<Exit> {
        let loaded = load(&global.given())?;
        // The table has all of it; a log line in the middle would only disturb.
        telemetry::init(&telemetry::Config { level: "off".into(), ..loaded.config.log.clone() });
        let checks = doctor::examine(&loaded).await;
        let worst = checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Pass);
        if global.json {
            screen::json(&serde_json::json!({ "verdict": worst, "checks": checks }))?;
        } else {
            print(&checks)?;
        }
        let failed = worst == Verdict::Fail || (self.strict && worst == Verdict::Warn);
        Ok(if failed { Exit::Failed } else { Exit::Done })
    }
}

fn print(checks: &[Check]) -> Result<()> {
    let mut table = screen::table([
        screen::whole("check"),
        screen::whole("verdict"),
        screen::prose("found"),
        screen::prose("what to do"),
    ]);
    for check in checks {
        let verdict = match check.verdict {
            Verdict::Pass => screen::word("pass", screen::Tone::Good),
            Verdict::Warn => screen::word("warn", screen::Tone::Doubtful),
            Verdict::Fail => screen::word("fail", screen::Tone::Bad),
        };
        table.add_row([
            Cell::new(&check.name),
            verdict,
            Cell::new(&check.found),
            Cell::new(check.advice.as_deref().unwrap_or_default()),
        ]);
    }
    table.print()
}
