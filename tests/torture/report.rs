//! What a run came to: a table for people, or one JSON object.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::check::{Figures, Findings};
use super::load::Book;
use super::postgres::Cluster;
use super::world::World;

/// How many findings of a kind are shown.
const SHOWN: usize = 10;

pub(crate) struct Report<'a> {
    pub(crate) seed: u64,
    pub(crate) figures: Figures,
    pub(crate) findings: Findings,
    pub(crate) kinds: BTreeMap<&'static str, usize>,
    /// What the nemesis could not do.
    pub(crate) trouble: Vec<String>,
    pub(crate) world: &'a World,
    pub(crate) book: &'a Book,
}

impl Report<'_> {
    pub(crate) fn print(&self, as_json: bool) {
        if as_json {
            println!("{}", self.json());
        } else {
            println!("{}", self.text());
        }
    }

    fn json(&self) -> Value {
        json!({
            "seed": self.seed,
            "green": self.findings.is_clean(),
            "figures": self.figures,
            "faults": self.kinds,
            "operations": self.book.operations,
            "refused": self.book.refused,
            "findings": self.findings,
            "trouble": self.trouble,
            "skipped": self.world.skipped,
        })
    }

    fn text(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN).set_header(["", ""]);
        for (what, found) in self.findings.all() {
            table.add_row([what.to_owned(), found.len().to_string()]);
        }
        for (what, value) in &self.figures {
            table.add_row([what.clone(), figure(value)]);
        }
        table.add_row(["faults".to_owned(), self.kinds.values().sum::<usize>().to_string()]);
        for (kind, count) in &self.kinds {
            table.add_row([format!("  {kind}"), count.to_string()]);
        }
        for (operation, count) in &self.book.operations {
            table.add_row([format!("asked: {operation}"), count.to_string()]);
        }
        for (reason, count) in &self.book.refused {
            table.add_row([format!("refused: {reason}"), count.to_string()]);
        }
        let mut text = table.to_string();
        for replica in &self.world.replicas {
            text += &format!(
                "\nreplica {}: {} {}",
                replica.kind.number,
                replica.kind.binary.display(),
                replica.kind.note
            );
        }
        for (what, found) in self.findings.all() {
            for finding in found.iter().take(SHOWN) {
                text += &format!("\n{what}: {finding}");
            }
        }
        for line in self.world.skipped.iter().map(|line| format!("\nskipped: {line}")) {
            text += &line;
        }
        for line in self.trouble.iter().take(SHOWN).map(|line| format!("\nnemesis: {line}")) {
            text += &line;
        }
        let verdict = if self.findings.is_clean() { "green" } else { "RED" };
        text + &format!("\nseed {}: {verdict}", self.seed)
    }

    /// Beside the findings: the logs of replicas and servers, the faults with their times, and the ledger.
    pub(crate) fn keep_logs(&self, dir: &Path) -> Result<()> {
        let dir = dir.join(self.seed.to_string());
        std::fs::create_dir_all(&dir)?;
        for replica in &self.world.replicas {
            std::fs::copy(replica.dir.join("log"), dir.join(format!("replica-{}.log", replica.kind.number)))?;
        }
        for entry in std::fs::read_dir(Cluster::logs())?.flatten() {
            std::fs::copy(
                entry.path(),
                dir.join(format!("postgres-{}", entry.file_name().to_string_lossy())),
            )?;
        }
        let faults = self.world.faults.all();
        let line = |fault: &super::faults::Fault| {
            let took = fault.ended - fault.began;
            format!("{:.3} {:+.3} {} {:?} {:?}\n", fault.began, took, fault.kind, fault.reruns, fault.pid)
        };
        std::fs::write(dir.join("faults"), faults.iter().map(line).collect::<String>())?;
        std::fs::write(dir.join("report.json"), self.json().to_string())?;
        println!("logs: {}", dir.display());
        Ok(())
    }
}

fn figure(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", ")
        }
        value => value.to_string(),
    }
}
