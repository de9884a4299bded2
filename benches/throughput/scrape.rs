//! Reads what a worker reports about itself: its metrics over HTTP, its memory from the kernel.

use anyhow::{Context, Result};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// The answer to `GET path`, if it is a good one.
pub(crate) async fn get(port: u16, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    anyhow::ensure!(answer.starts_with("HTTP/1.1 200"), "{path}: {}", answer.lines().next().unwrap_or(""));
    Ok(answer)
}

/// The value of a metric without labels.
pub(crate) fn value(metrics: &str, name: &str) -> Option<f64> {
    let line =
        metrics.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

/// A quantile of a histogram, taken to be even within each bucket.
pub(crate) fn quantile(metrics: &str, name: &str, quantile: f64) -> Option<f64> {
    let prefix = format!("{name}_bucket{{le=\"");
    let buckets: Vec<(f64, f64)> = metrics
        .lines()
        .filter_map(|line| {
            let (bound, count) = line.strip_prefix(&prefix)?.split_once("\"} ")?;
            let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().ok()? };
            Some((bound, count.split(' ').next()?.parse().ok()?))
        })
        .collect();
    let wanted = buckets.last()?.1 * quantile;
    let (mut below, mut seen) = (0.0, 0.0);
    for (bound, count) in buckets {
        if count >= wanted {
            let inside = if count > seen { (wanted - seen) / (count - seen) } else { 1.0 };
            return Some(if bound.is_infinite() { below } else { below + (bound - below) * inside });
        }
        (below, seen) = (bound, count);
    }
    None
}

/// The most memory a process has had, in bytes.
pub(crate) fn peak_memory(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    let kilobytes: f64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kilobytes * 1024.0)
}
