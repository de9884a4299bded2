//! Inputs: read as chunks of lines, split here, and kept for a moment for the small blocks that share a chunk.

use super::{
    blocks::Block,
    query::{QueryError, failed},
};
use crate::lines::Lines;
use deadpool_postgres::Object;
use futures::{StreamExt, pin_mut};
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio_postgres::types::ToSql;
use uuid::Uuid;

/// One row of a batch: its line and its input, as it was submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputRow<'a> {
    pub line: i32,
    pub input: &'a str,
}

/// Consecutive lines of a batch as they are stored: one JSON value a line.
#[derive(Clone, Debug)]
struct Piece {
    first: i32,
    last: i32,
    text: Arc<str>,
}

/// Some lines of a block in memory. A block is read page by page, so that large rows do not add up.
#[derive(Debug, Default)]
pub struct Page {
    lines: Lines,
    pieces: Vec<Piece>,
}

impl Page {
    /// The lines it was read for, whether or not they were found.
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    /// The rows in the order of their lines, as slices of the page.
    pub fn rows(&self) -> Vec<InputRow<'_>> {
        let mut rows = Vec::with_capacity(self.lines.len());
        for piece in &self.pieces {
            let mut rest = &*piece.text;
            for line in piece.first..=piece.last {
                let end = memchr::memchr(b'\n', rest.as_bytes()).unwrap_or(rest.len());
                if self.lines.contains(line) {
                    rows.push(InputRow { line, input: &rest[..end] });
                }
                rest = rest.get(end + 1..).unwrap_or_default();
            }
        }
        rows
    }
}

/// Bytes of chunks that are kept.
const CACHED_BYTES: usize = 4 << 20;
/// A chunk larger than this holds few rows; keeping it would push all others out.
const LARGEST_CACHED: usize = 1 << 20;

/// The chunks that were read last.
#[derive(Clone, Debug, Default)]
pub struct ChunkCache(Arc<Mutex<VecDeque<(Uuid, Piece)>>>);

impl ChunkCache {
    fn find(&self, uid: Uuid, line: i32) -> Option<Piece> {
        let holds =
            |(owner, piece): &&(Uuid, Piece)| *owner == uid && (piece.first..=piece.last).contains(&line);
        self.lock().iter().find(holds).map(|(_, piece)| piece.clone())
    }

    fn keep(&self, uid: Uuid, piece: &Piece) {
        if piece.text.len() > LARGEST_CACHED {
            return;
        }
        let mut cached = self.lock();
        cached.push_front((uid, piece.clone()));
        let mut bytes = 0;
        let mut fits = |(_, piece): &(Uuid, Piece)| {
            bytes += piece.text.len();
            bytes <= CACHED_BYTES
        };
        let most = cached.iter().take_while(|kept| fits(kept)).count();
        cached.truncate(most);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Uuid, Piece)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lines are scattered when whole chunks would bring more than this many rows for each that is wanted.
const SCATTERED: usize = 4;

/// Reads some of the lines in `wanted`, from the first on: no more chunks, or single rows where lines are scattered, once there
/// are as many `bytes`. With one byte it is the first alone.
pub async fn read(
    client: &Object,
    cache: &ChunkCache,
    block: &Block,
    wanted: &Lines,
    bytes: usize,
) -> Result<Page, QueryError> {
    let (Some(first), Some(last)) = (wanted.first(), wanted.last()) else {
        return Ok(Page { lines: Lines::new(), pieces: Vec::new() });
    };
    // A block that lies within a chunk of which another block was read just now.
    if let Some(piece) = cache.find(block.uid, first).filter(|piece| last <= piece.last) {
        return Ok(Page { lines: wanted.clone(), pieces: vec![piece] });
    }
    let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
    let is_scattered = (last - first) as usize / SCATTERED >= wanted.len();
    let pieces = if is_scattered {
        const SQL: &str = include_str!("sql/read_scattered.sql");
        fetch(client, SQL, &[&block.reference.batch, wanted, &bytes]).await?
    } else {
        const SQL: &str = include_str!("sql/read.sql");
        let pieces = fetch(client, SQL, &[&block.reference.batch, &first, &last, &bytes]).await?;
        // What is shared with the next block; a chunk that lies within this one is not asked for again.
        pieces.iter().filter(|piece| piece.last > last).for_each(|piece| cache.keep(block.uid, piece));
        pieces
    };
    // All up to the last that came; if none came, the rows are not there, and asking again would not bring them.
    let read = pieces.last().map_or(last, |piece| piece.last.min(last));
    Ok(Page { lines: wanted.within(&(first..read + 1)), pieces })
}

/// The last line of the chunk that holds `line`; `None` when there is no such chunk.
pub async fn last_line(client: &Object, block: &Block, line: i32) -> Result<Option<i32>, QueryError> {
    const SQL: &str = "SELECT c.last_line FROM musterd.chunks c WHERE c.batch_id = $1 AND c.first_line <= $2
         ORDER BY c.first_line DESC LIMIT 1";
    let statement = client.prepare_cached(SQL).await.map_err(failed("prepare finding a chunk"))?;
    let row = client.query_opt(&statement, &[&block.reference.batch, &line]).await;
    Ok(row.map_err(failed("find a chunk"))?.map(|row| row.get(0)))
}

async fn fetch(client: &Object, sql: &str, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<Piece>, QueryError> {
    let statement = client.prepare_cached(sql).await.map_err(failed("prepare reading rows"))?;
    let found = client.query_raw(&statement, params.iter().copied()).await.map_err(failed("read rows"))?;
    pin_mut!(found);
    let mut pieces = Vec::new();
    while let Some(row) = found.next().await {
        let row = row.map_err(failed("read rows"))?;
        let text: &str = row.get(2);
        pieces.push(Piece { first: row.get(0), last: row.get(1), text: text.into() });
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(first: i32, last: i32) -> Piece {
        let text: Vec<String> = (first..=last).map(|line| format!("{{\"n\":{line}}}")).collect();
        Piece { first, last, text: text.join("\n").into() }
    }

    #[test]
    fn a_page_gives_the_wanted_lines_of_its_chunks() {
        let lines: Lines = [2, 3, 500, 501].into_iter().collect();
        let page = Page { lines, pieces: vec![piece(1, 500), piece(501, 502)] };
        let rows = page.rows();
        let seen: Vec<(i32, &str)> = rows.iter().map(|row| (row.line, row.input)).collect();
        assert_eq!(seen, [(2, "{\"n\":2}"), (3, "{\"n\":3}"), (500, "{\"n\":500}"), (501, "{\"n\":501}")]);
    }

    #[test]
    fn a_cache_keeps_the_latest_within_its_bytes_and_never_another_batch_s() {
        let cache = ChunkCache::default();
        let (one, other) = (Uuid::new_v4(), Uuid::new_v4());
        cache.keep(one, &piece(1, 500));
        assert!(
            cache.find(one, 500).is_some()
                && cache.find(one, 501).is_none()
                && cache.find(other, 1).is_none()
        );
        let large = |first| Piece { first, last: first, text: "x".repeat(LARGEST_CACHED).into() };
        (1000..1004).for_each(|first| cache.keep(other, &large(first)));
        assert!(cache.find(one, 1).is_none(), "pushed out");
        assert!(cache.find(other, 1003).is_some() && cache.lock().len() <= 4);
    }
}
