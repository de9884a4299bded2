//! How long things took: deaths until they were declared, by path; batches from their last row to their end.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Value, json};

use super::super::faults::Reruns;
use super::super::world::TTL;
use super::{Evidence, Figures};

pub(crate) async fn measure(evidence: &Evidence<'_>, figures: &mut Figures) -> Result<()> {
    let sql = "SELECT EXTRACT(EPOCH FROM b.summarized_at - o.last)::float8
                 FROM musterd.batches b
                 JOIN LATERAL (SELECT max(finished_at) AS last FROM musterd.outcomes o WHERE o.batch_id = b.id) o ON o.last IS NOT NULL
                WHERE b.summarized_at IS NOT NULL AND NOT b.aborting AND b.generation = 1";
    let took: Vec<f64> = evidence.session.query(sql, &[]).await?.iter().map(|row| row.get(0)).collect();
    figures.insert("from the last row to the end of a batch, s".into(), summary(took));
    deaths(evidence, figures).await
}

/// Workers that were declared dead, with the fault that says why. One without is a living worker that was taken for dead.
async fn deaths(evidence: &Evidence<'_>, figures: &mut Figures) -> Result<()> {
    let reasons = reasons(evidence);
    let sql = "SELECT w.id, w.pid, EXTRACT(EPOCH FROM w.ended_at)::float8 FROM musterd.workers w WHERE w.state = 'dead'";
    let (mut by_path, mut without): (BTreeMap<String, Vec<f64>>, Vec<String>) = Default::default();
    for row in evidence.session.query(sql, &[]).await? {
        let (id, pid, ended): (String, i32, f64) = (row.get(0), row.get(1), row.get(2));
        let killed = evidence.faults.iter().find(|fault| {
            fault.pid == Some(pid as u32) && fault.began <= ended && fault.kind != "SIGSTOP for a moment"
        });
        let path = reasons.get(&id).cloned().unwrap_or_else(|| "unknown".into());
        match killed {
            Some(fault) if fault.kind == "SIGKILL" => {
                by_path.entry(path).or_default().push(ended - fault.began)
            }
            Some(_) => {}
            None => {
                let slack = TTL.as_secs_f64() + 5.0;
                let fault = evidence.faults.iter().any(|fault| {
                    fault.reruns != Reruns::None && fault.began <= ended && fault.ended + slack >= ended
                });
                if !fault {
                    without.push(id);
                }
            }
        }
    }
    for (path, took) in by_path {
        figures.insert(format!("from SIGKILL to declared dead, {path}, s"), summary(took));
    }
    figures.insert("living workers declared dead".into(), without.len().into());
    Ok(())
}

/// Why each was declared dead, as its judge said.
fn reasons(evidence: &Evidence<'_>) -> BTreeMap<String, String> {
    let mut reasons = BTreeMap::new();
    for replica in &evidence.world.replicas {
        for line in replica.log().lines().filter(|line| line.contains("declared dead")) {
            let line: Value = serde_json::from_str(line).unwrap_or_default();
            let fields = if line["fields"].is_object() { &line["fields"] } else { &line };
            if let (Some(worker), Some(why)) = (fields["worker"].as_str(), fields["why"].as_str()) {
                let path = if why.contains("lock") { "by its lock" } else { "by its silence" };
                reasons.insert(worker.to_owned(), path.to_owned());
            }
        }
    }
    reasons
}

pub(crate) fn summary(mut values: Vec<f64>) -> Value {
    values.sort_by(f64::total_cmp);
    let at =
        |share: f64| values.get(((values.len() as f64 - 1.0) * share).round().max(0.0) as usize).copied();
    let round = |value: Option<f64>| value.map(|value| (value * 1000.0).round() / 1000.0);
    json!({ "count": values.len(), "p50": round(at(0.5)), "p99": round(at(0.99)), "max": round(at(1.0)) })
}
