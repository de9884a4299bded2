//! Output files: what the database names is in the store, and is what the rows say.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::{Evidence, Figures, Findings};
use crate::suite::support::run;

pub(crate) async fn check(
    evidence: &Evidence<'_>,
    findings: &mut Findings,
    figures: &mut Figures,
) -> Result<()> {
    let sql = "SELECT b.id, b.outputs, COALESCE((SELECT string_agg(s.outputs ->> 'lines.txt', '' ORDER BY s.line)
                      FROM musterd.results s WHERE s.batch_id = b.id AND s.outputs IS NOT NULL), ''), b.aborting
                 FROM musterd.batches b WHERE b.summarized_at IS NOT NULL
                  AND EXISTS (SELECT FROM musterd.outcomes o WHERE o.batch_id = b.id AND o.outputs IS NOT NULL)";
    let mut files = 0;
    for row in evidence.session.query(sql, &[]).await? {
        let (id, outputs, text, aborting): (i64, Option<Value>, String, bool) =
            (row.get(0), row.get(1), row.get(2), row.get(3));
        match outputs {
            // One that is aborted may end without its files.
            None if aborting => {}
            None => findings.lost.push(format!("batch {id} has outputs and no files")),
            Some(outputs) => {
                files += 1;
                if let Err(error) = compare(evidence, &outputs, &text) {
                    findings.wrong.push(format!("the files of batch {id}: {error:#}; {outputs}"));
                }
            }
        }
    }
    figures.insert("output files".into(), files.into());
    Ok(())
}

fn compare(evidence: &Evidence<'_>, outputs: &Value, text: &str) -> Result<()> {
    let file = &outputs["files"][0];
    let key = file["key"].as_str().context("no key")?;
    let stored = std::fs::read(bucket(evidence).join(key)).context("not in the store")?;
    anyhow::ensure!(stored == text.as_bytes(), "{} bytes are stored, {} were said", stored.len(), text.len());
    let hash = hex::encode(Sha256::digest(&stored));
    anyhow::ensure!(file["sha256"] == hash.as_str(), "its hash is {hash}");
    Ok(())
}

pub(crate) fn bucket(evidence: &Evidence<'_>) -> PathBuf {
    run::dir().join("s3").join(&evidence.world.bucket)
}
