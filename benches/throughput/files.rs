//! Files of rows to submit, and the same rows as a stream of binary COPY.

use anyhow::Result;
use bytes::{BufMut, Bytes, BytesMut};
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

/// The smallest object that differs from row to row.
fn small(line: i32) -> String {
    format!(r#"{{"n": {line}}}"#)
}

/// A row as users have them. Every value is a string, so that CSV and NDJSON hold the same rows.
fn customer(line: i32) -> [(&'static str, String); 4] {
    // The digits of a product look random, so neighbours have as little in common as in a real file.
    let mixed = u64::from(line.unsigned_abs()).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    [
        ("customer", format!("c{line}")),
        ("email", format!("user{}@example.com", mixed % 10_000_019)),
        ("country", ["DE", "FR", "IT", "PL", "SE", "US"][(mixed >> 32) as usize % 6].to_owned()),
        ("amount", format!("{}.{:02}", (mixed >> 40) % 1_000, (mixed >> 50) % 100)),
    ]
}

/// The JSON of a row, without spaces as most programs write it.
fn customer_json(line: i32) -> String {
    let fields: Vec<String> =
        customer(line).iter().map(|(name, value)| format!(r#""{name}":"{value}""#)).collect();
    format!("{{{}}}", fields.join(","))
}

pub(crate) fn write_small(path: &Path, rows: i32) -> Result<()> {
    write_lines(path, (1..=rows).map(small))
}

pub(crate) fn write_ndjson(path: &Path, rows: i32) -> Result<()> {
    write_lines(path, (1..=rows).map(customer_json))
}

pub(crate) fn write_csv(path: &Path, rows: i32) -> Result<()> {
    let header = customer(0).map(|(name, _)| name).join(",");
    let lines = (1..=rows).map(|line| customer(line).map(|(_, value)| value).join(","));
    write_lines(path, std::iter::once(header).chain(lines))
}

fn write_lines(path: &Path, lines: impl Iterator<Item = String>) -> Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    for line in lines {
        writeln!(file, "{line}")?;
    }
    file.flush()?;
    Ok(())
}

/// `COPY … (batch_id, line, input) FROM STDIN (FORMAT binary)` of the same rows, in pieces ready to be sent.
pub(crate) fn copy_stream(rows: i32) -> Vec<Bytes> {
    const PIECE: usize = 256 << 10;
    const JSONB_VERSION: u8 = 1;
    let mut pieces = Vec::new();
    let mut bytes = BytesMut::with_capacity(2 * PIECE);
    bytes.put_slice(b"PGCOPY\n\xff\r\n\0");
    bytes.put_i32(0); // flags
    bytes.put_i32(0); // length of the header's extension
    for line in 1..=rows {
        let json = customer_json(line);
        bytes.put_i16(3);
        bytes.put_i32(8);
        bytes.put_i64(1);
        bytes.put_i32(4);
        bytes.put_i32(line);
        bytes.put_i32(json.len() as i32 + 1);
        bytes.put_u8(JSONB_VERSION);
        bytes.put_slice(json.as_bytes());
        if bytes.len() >= PIECE {
            pieces.push(bytes.split().freeze());
            bytes.reserve(2 * PIECE);
        }
    }
    bytes.put_i16(-1);
    pieces.push(bytes.freeze());
    pieces
}
