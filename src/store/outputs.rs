//! Output files as the outcomes hold them: read in line order from one snapshot in which their batch is closed.
//!
//! The server gives whole outcomes and the worker splits and parses them, a few lines at a time: what is in memory is the text of
//! one outcome and of one page, whatever the size of the file.

mod parse;

use super::batches::{self, Look};
use bytes::Bytes;
use deadpool_postgres::{Object, Transaction};
use futures::{Stream, TryStreamExt, pin_mut, stream};
use std::{collections::HashMap, ops::RangeInclusive};
use tokio_postgres::{Error, IsolationLevel, types::ToSql};

/// One file of a batch, and where in the batch its text begins and ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSpan {
    pub name: String,
    pub first: i32,
    pub last: i32,
}

/// A batch with more files than this is not uploaded: each is an object of its own.
pub const MOST_FILES: usize = 10_000;

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error("could not read the outputs")]
    Query(#[from] Error),
    #[error(
        "the rows of batch {batch} name more than {MOST_FILES} output files; let them share files, or abort the batch: \
         it then ends without them"
    )]
    TooMany { batch: i64 },
}

/// A transaction that sees one state of the database for as long as it lives, and changes nothing.
#[derive(Debug)]
pub struct Snapshot<'a>(Transaction<'a>);

/// An upload takes as long as it takes; only a worker that is gone must not hold the snapshot for ever. PostgreSQL 17 has a limit
/// for the whole transaction, too; older servers do not know its name.
const PATIENCE: &str = "SET LOCAL statement_timeout = 0;
    SET LOCAL idle_in_transaction_session_timeout = '10min';
    SET LOCAL jit = off; SET LOCAL enable_seqscan = off;
    SELECT pg_catalog.set_config(s.name, '0', true) FROM pg_catalog.pg_settings s WHERE s.name = 'transaction_timeout'";

/// Lines of a page: at first, how many more the next one has at most, and at most. A page lies within a stripe, as outcomes do.
const FIRST: i32 = 1_000;
const GROWTH: i32 = 4;
const STRIPE: i32 = 10_000;
/// What the text of a page should weigh, and what it may.
const PAGE_BYTES: usize = 1 << 20;
const MOST_BYTES: usize = 4 << 20;
/// Longer names are no file's; of those only the beginning is kept.
const NAME_BYTES: usize = 250;

impl<'a> Snapshot<'a> {
    pub async fn begin(client: &'a mut Object) -> Result<Self, Error> {
        let transaction = client
            .build_transaction()
            .isolation_level(IsolationLevel::RepeatableRead)
            .read_only(true)
            .start()
            .await?;
        transaction.batch_execute(PATIENCE).await?;
        Ok(Self(transaction))
    }

    /// Takes the advisory lock for the upload of a batch, until the end of the transaction; false when another session has it.
    /// A courtesy between workers: two uploads of a batch do no harm.
    pub async fn try_lock(&self, id: i64) -> Result<bool, Error> {
        const SQL: &str = "SELECT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('musterd.upload:' || $1::bigint, 0))";
        Ok(self.0.query_one(SQL, &[&id]).await?.get(0))
    }

    /// What the batch is in this snapshot; `None` when it is not over. What is read afterwards is of the same moment.
    pub async fn look(&self, id: i64) -> Result<Option<Look>, Error> {
        Ok(batches::look_within(&*self.0, &[id]).await?.pop())
    }

    /// The batch's files by name: one pass over the outcomes that have text for any.
    pub async fn files(&self, batch: i64) -> Result<Vec<FileSpan>, FilesError> {
        const SQL: &str = "SELECT o.lines, o.outputs FROM musterd.output_texts o WHERE o.batch_id = $1";
        let outcomes = self.0.query_raw(SQL, [batch]).await?;
        pin_mut!(outcomes);
        let mut files: HashMap<String, (i32, i32)> = HashMap::new();
        while let Some(outcome) = outcomes.try_next().await? {
            let (lines, outputs): (crate::lines::Lines, &str) = (outcome.get(0), outcome.get(1));
            for (line, output) in
                lines.iter().zip(outputs.split('\n')).filter(|(_, output)| !output.is_empty())
            {
                let add = |name: &str| {
                    let name = &name[..name.floor_char_boundary(NAME_BYTES)];
                    match files.get_mut(name) {
                        Some((first, last)) => (*first, *last) = (line.min(*first), line.max(*last)),
                        None => _ = files.insert(name.to_owned(), (line, line)),
                    }
                };
                if parse::names(output, add).is_err() {
                    tracing::error!(
                        batch,
                        line,
                        "the outputs of this row are no JSON object and were left out"
                    );
                }
                if files.len() > MOST_FILES {
                    return Err(FilesError::TooMany { batch });
                }
            }
        }
        let mut files: Vec<FileSpan> =
            files.into_iter().map(|(name, (first, last))| FileSpan { name, first, last }).collect();
        files.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        Ok(files)
    }

    /// The text of one file, a piece for every row that adds to it, in the order of the lines.
    pub fn text<'s>(
        &'s self,
        batch: i64,
        file: &'s FileSpan,
    ) -> impl Stream<Item = Result<Bytes, Error>> + Send + 's {
        let pages = stream::try_unfold(Pages::of(file), move |mut pages| async move {
            let Some(lines) = pages.next() else { return Ok(None) };
            let page = self.page(batch, &file.name, lines).await?;
            pages.adapt(&page);
            let pieces = page.pieces.into_iter().map(|(_, text)| Ok(Bytes::from(text)));
            Ok::<_, Error>(Some((stream::iter(pieces), pages)))
        });
        pages.try_flatten()
    }

    async fn page(&self, batch: i64, name: &str, lines: RangeInclusive<i32>) -> Result<Page, Error> {
        const SQL: &str = "SELECT o.lines, o.outputs FROM musterd.output_texts o
             WHERE o.batch_id = $1
               -- An outcome lies within one stripe.
               AND o.first_line > ($2::int - 1) / 10000 * 10000 AND o.first_line <= $3::int
               AND o.lines && pg_catalog.int4range($2, $3 + 1)";
        let statement = self.0.prepare_cached(SQL).await?;
        let params: [&(dyn ToSql + Sync); 3] = [&batch, lines.start(), lines.end()];
        let outcomes = self.0.query_raw(&statement, params).await?;
        pin_mut!(outcomes);
        let mut page = Page::of(lines);
        while let Some(outcome) = outcomes.try_next().await? {
            let (lines, outputs): (crate::lines::Lines, &str) = (outcome.get(0), outcome.get(1));
            for (line, output) in lines.iter().zip(outputs.split('\n')) {
                if page.lines.contains(&line)
                    && let Some(text) = parse::text(output, name)
                {
                    page.add(line, text);
                }
            }
        }
        page.pieces.sort_unstable_by_key(|(line, _)| *line);
        Ok(page)
    }
}

/// Text of some lines.
#[derive(Debug)]
struct Page {
    /// All text of these lines is here.
    lines: RangeInclusive<i32>,
    pieces: Vec<(i32, String)>,
    bytes: usize,
}

impl Page {
    fn of(lines: RangeInclusive<i32>) -> Self {
        Self { lines, pieces: Vec::new(), bytes: 0 }
    }

    fn add(&mut self, line: i32, text: String) {
        self.bytes += text.len();
        self.pieces.push((line, text));
        while self.bytes > MOST_BYTES && self.pieces.len() > 1 {
            self.halve();
        }
    }

    /// Drops the upper half; the next page reads it.
    fn halve(&mut self) {
        self.pieces.sort_unstable_by_key(|(line, _)| *line);
        let dropped = self.pieces.split_off(self.pieces.len().div_ceil(2));
        self.bytes -= dropped.iter().map(|(_, text)| text.len()).sum::<usize>();
        if let Some((first, _)) = dropped.first() {
            self.lines = *self.lines.start()..=first - 1;
        }
    }
}

/// The pages of a file: as many lines each as should weigh a page, judged by the one before.
#[derive(Debug)]
struct Pages {
    next: i32,
    last: i32,
    step: i32,
}

impl Pages {
    fn of(file: &FileSpan) -> Self {
        Self { next: file.first, last: file.last, step: FIRST }
    }

    fn next(&self) -> Option<RangeInclusive<i32>> {
        let stripe = ((self.next - 1) / STRIPE).saturating_add(1).saturating_mul(STRIPE);
        let end = self.next.saturating_add(self.step - 1).min(stripe).min(self.last);
        (self.next <= self.last).then_some(self.next..=end)
    }

    fn adapt(&mut self, page: &Page) {
        let lines = (page.lines.end() - page.lines.start() + 1) as usize;
        let fit = i32::try_from(PAGE_BYTES * lines / page.bytes.max(1)).unwrap_or(i32::MAX);
        self.step = fit.clamp(1, self.step.saturating_mul(GROWTH)).min(STRIPE);
        self.next = page.lines.end() + 1;
    }
}

/// Whether an upload of this state of the batch can never be the one that its end refers to. One of an earlier generation is left
/// where it is: that generation ended with it, or may have.
pub async fn is_overtaken(client: &Object, closed: &batches::Closed, manifest: &str) -> Result<bool, Error> {
    const SQL: &str = "SELECT b.generation = $3
               AND (b.rows <> $4 OR (b.summarized_at IS NOT NULL AND b.outputs ->> 'manifest' IS DISTINCT FROM $5))
          FROM musterd.batches b WHERE b.id = $1 AND b.uid = $2";
    let batches::Closed { id, uid, generation, rows, .. } = closed;
    let row = client.query_opt(SQL, &[id, uid, generation, rows, &manifest]).await?;
    Ok(row.is_some_and(|row| row.get(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_of(pages: &mut Pages, bytes_a_line: usize) -> Vec<RangeInclusive<i32>> {
        let mut seen = Vec::new();
        while let Some(lines) = pages.next() {
            let mut page = Page::of(lines.clone());
            lines.for_each(|line| {
                if page.lines.contains(&line) {
                    page.add(line, "x".repeat(bytes_a_line));
                }
            });
            assert!(page.bytes <= MOST_BYTES || page.pieces.len() == 1);
            seen.push(page.lines.clone());
            pages.adapt(&page);
        }
        seen
    }

    #[test]
    fn pages_follow_each_other_within_stripes_and_shrink_with_the_size_of_the_text() {
        let file = FileSpan { name: "a".into(), first: 7, last: 25_000 };
        let small = lines_of(&mut Pages::of(&file), 1);
        assert_eq!(small, [7..=1_006, 1_007..=5_006, 5_007..=10_000, 10_001..=20_000, 20_001..=25_000]);
        let large = lines_of(&mut Pages::of(&FileSpan { last: 300, ..file }), 1 << 20);
        assert!(large[1..].iter().all(|lines| lines.end() - lines.start() < 4), "{large:?}");
        assert_eq!((large[0].start(), large.last().unwrap().end()), (&7, &300));
        assert!(large.windows(2).all(|pair| pair[0].end() + 1 == *pair[1].start()));
    }

    #[test]
    fn a_page_that_grows_too_large_keeps_its_first_lines() {
        let mut page = Page::of(1..=100);
        for line in [50, 1, 99, 2, 3] {
            page.add(line, "x".repeat(MOST_BYTES / 4));
        }
        assert_eq!(page.lines, 1..=49);
        let kept: Vec<i32> = page.pieces.iter().map(|(line, _)| *line).collect();
        assert_eq!(kept, [1, 2, 3]);
    }
}
