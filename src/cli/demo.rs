//! `musterd dev --demo`: a file of rows goes the whole way, before your eyes, and its output stays for you to look at.

use super::{Exit, Global, batch, screen};
use anyhow::{Context, Result};
use indicatif::{HumanBytes, HumanCount};
use musterd::{
    config::Config,
    embedded,
    flow::{
        input::{CsvOptions, Format, Limits},
        submit::{self, Given, MaxFailed, Meter, Order},
    },
    json::Json,
    store::{batches::Progress, connect::OneShot},
};
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const COMMAND: &str = "demo";
const OUTPUT: &str = "people.ndjson";

/// The handler of the demo, and for a throw-away server a place for its output that is not thrown away.
pub(super) fn settings(ephemeral: bool) -> Vec<String> {
    let mut settings = vec![
        format!("handlers.{COMMAND}.kind=builtin"),
        format!("handlers.{COMMAND}.builtin=echo"),
        format!("handlers.{COMMAND}.output={OUTPUT}"),
    ];
    if ephemeral {
        settings.push(format!("outputs.dir={}", lasting_dir().display()));
    }
    settings
}

/// `outputs` where we are, as a worker without a configuration would have it; where that cannot be, a temporary one.
fn lasting_dir() -> PathBuf {
    let here = Path::new("outputs");
    match std::fs::create_dir_all(here).and_then(|()| tempfile_in(here)) {
        Ok(()) => here.to_owned(),
        Err(_) => std::env::temp_dir().join(format!("musterd-demo-{}", std::process::id())),
    }
}

fn tempfile_in(dir: &Path) -> std::io::Result<()> {
    let probe = dir.join(format!(".musterd-probe-{}", std::process::id()));
    File::create(&probe)?;
    std::fs::remove_file(probe)
}

/// Runs the demonstration against the worker of this process.
pub(super) async fn run(global: &Global, config: &Config, dir: &Path, rows: u32) -> Result<Exit> {
    let rate = |took: Duration| HumanCount((f64::from(rows) / took.as_secs_f64().max(1e-3)) as u64);
    let say = |text: String| if global.json { Ok(()) } else { screen::line(&text) };
    let path = embedded::private_dir(dir).join("demo.csv");
    let bytes = generate(&path, rows).with_context(|| format!("cannot write {}", path.display()))?;
    say(String::new())?;
    say(format!("generated   a CSV file of {} rows, {}", HumanCount(rows.into()), HumanBytes(bytes)))?;

    let mut client = global.connect(&config.database).await?;
    let began = Instant::now();
    let (id, took) = (submit(&mut client, &path).await?, began.elapsed());
    say(format!("submitted   as batch {id} in {:.1} s, {} rows/s", took.as_secs_f64(), rate(took)))?;
    let view = if global.json { batch::View::Silent } else { batch::View::for_people() };
    let progress = batch::follow(&client, id, view).await?;
    let (all, run) = (began.elapsed(), began.elapsed() - took);
    client.close().await;

    say(String::new())?;
    batch::summary(global, &progress)?;
    say(String::new())?;
    say(format!(
        "run         in {:.1} s, {} rows/s; {:.1} s in all",
        run.as_secs_f64(),
        rate(run),
        all.as_secs_f64()
    ))?;
    where_it_is(&progress).into_iter().try_for_each(say)?;
    Ok(if progress.state == musterd::state::State::Succeeded { Exit::Done } else { Exit::Failed })
}

fn generate(path: &Path, rows: u32) -> std::io::Result<u64> {
    const NAMES: [&str; 6] = ["Ada", "Grace", "Edsger", "Barbara", "Donald", "Frances"];
    const CITIES: [&str; 4] = ["Oslo", "Lagos", "Lima", "Osaka"];
    let mut out = BufWriter::new(File::create(path)?);
    writeln!(out, "id,name,city,amount")?;
    for id in 1..=rows as usize {
        let (name, city) = (NAMES[id % NAMES.len()], CITIES[id % CITIES.len()]);
        writeln!(out, "{id},{name},{city},{}.{:02}", id % 1000, id % 100)?;
    }
    out.into_inner().map_err(std::io::IntoInnerError::into_error)?.metadata().map(|file| file.len())
}

async fn submit(client: &mut OneShot, path: &Path) -> Result<i64> {
    let order = Order {
        command: COMMAND.into(),
        queue: None,
        context: Json::from_text("{}"),
        priority: None,
        idempotency_key: None,
        hold: false,
        max_attempts: None,
        row_timeout: None,
        max_failed: MaxFailed::Rows(0),
        on_done: None,
        on_budget: None,
        canary: None,
        keep: None,
        traceparent: None,
    };
    let format = Format::Csv(CsvOptions::default());
    let given = Given { source: File::open(path)?, format, limits: Limits::default(), exported: false };
    Ok(submit::submit(client, &order, given, Meter::default()).await?.id)
}

/// Where to look for what the rows have written.
fn where_it_is(progress: &Progress) -> Vec<String> {
    let outputs = progress.outputs.as_ref().map_or("null", |outputs| outputs.text());
    let outputs: serde_json::Value = serde_json::from_str(outputs).unwrap_or_default();
    let manifest = Path::new(outputs["location"].as_str().unwrap_or_default());
    let file = &outputs["files"][0];
    let size = HumanBytes(file["bytes"].as_u64().unwrap_or_default());
    vec![
        format!("output      {} ({size})", manifest.with_file_name(OUTPUT).display()),
        format!("sha256      {}", file["sha256"].as_str().unwrap_or_default()),
        format!("manifest    {}", manifest.display()),
    ]
}
