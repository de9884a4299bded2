//! Reads rows page by page: first which lines there are, in one statement, then their inputs and results.
//!
//! Chunks and outcomes are written once and never changed, so what is read second fits what was found first, with or without a
//! transaction around it. Memory is bounded by bytes: a page ends early when its values are large, and the next one asks for fewer
//! lines.

use super::{
    RowView, Which,
    sets::{Set, choose},
};
use crate::{error_group::ErrorGroup, json::Json, lines::Lines};
use futures::{TryStreamExt, pin_mut};
use tokio_postgres::{Error, GenericClient, RowStream, Statement, types::ToSql};

/// Lines that the first page asks for; how many more the next one does at most; and the most of any.
const FIRST: i64 = 100;
const GROWTH: i64 = 4;
const MOST_SETS: i64 = 1_000;
const MOST_LINES: i64 = 10_000;
/// What a page should weigh.
const PAGE_BYTES: usize = 2 << 20;
/// Chunks, or single lines, that one statement reads.
const CHUNKS: i64 = 8;
const SINGLES: usize = 100;
/// Lines are scattered when whole chunks would bring more than this many rows for each that is wanted.
const SCATTERED: usize = 4;

/// Which values of a row are read beside its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::store) enum Values {
    All,
    Inputs,
}

pub(in crate::store) struct Reader {
    batch: i64,
    which: Which,
    values: Values,
    /// `None` when all was read.
    from: Option<i32>,
    step: i64,
    prepared: Vec<(&'static str, Statement)>,
}

impl Reader {
    pub(in crate::store) fn new(batch: i64, which: Which, from: i32) -> Self {
        let from = Some(from.max(1));
        Self { batch, which, values: Values::All, from, step: FIRST, prepared: Vec::new() }
    }

    pub(in crate::store) fn of(self, values: Values) -> Self {
        Self { values, ..self }
    }

    /// The next rows: at most `limit`, and about `most_bytes` (but one row at least). `None` behind the last.
    /// Every page may come by another transaction of the same session.
    pub(in crate::store) async fn next_page(
        &mut self,
        client: &impl GenericClient,
        limit: i64,
        most_bytes: usize,
    ) -> Result<Option<Vec<RowView>>, Error> {
        let Some(from) = self.from else { return Ok(None) };
        let asked = limit.min(self.step);
        let mut sets = self.find(client, from, asked).await?;
        let chosen = choose(&sets, from, asked as usize);
        let inputs = self.inputs(client, &chosen, most_bytes).await?;
        let mut rows: Vec<RowView> =
            inputs.rows.into_iter().map(|(at, input)| view(&mut sets, chosen[at], input)).collect();
        let mut next = inputs.next;
        if self.values == Values::All {
            let cut = self.add_results(client, &mut rows, (&sets, &chosen), most_bytes).await?;
            next = cut.or(next);
            let cut = self.add_failures(client, &mut rows, (&sets, &chosen), most_bytes).await?;
            next = cut.or(next);
        }
        let bytes: usize = rows.iter().map(RowView::weight).sum();
        let is_last = (chosen.len() as i64) < asked;
        self.from = match next {
            Some(line) => Some(line),
            None if is_last => None,
            None => chosen.last().and_then(|(line, _)| line.checked_add(1)),
        };
        self.adapt(rows.len() as i64, bytes);
        Ok(Some(rows))
    }

    /// As many lines as should weigh a page, judged by what was read.
    fn adapt(&mut self, rows: i64, bytes: usize) {
        let fit = PAGE_BYTES as i64 * rows.max(1) / bytes.max(1) as i64;
        let most =
            if matches!(self.which, Which::All | Which::Failed | Which::InGroup(_) | Which::FailedIn(_)) {
                MOST_LINES
            } else {
                MOST_SETS
            };
        self.step = fit.clamp(1, self.step * GROWTH).min(most);
    }

    async fn find(&mut self, client: &impl GenericClient, from: i32, asked: i64) -> Result<Vec<Set>, Error> {
        let statement = self.statement(client, self.which.sql()).await?;
        let mut params: Vec<&(dyn ToSql + Sync)> = vec![&self.batch, &from, &asked];
        let which = self.which;
        params.extend(which.fourth());
        Ok(client.query(&statement, &params).await?.iter().map(Set::read).collect())
    }

    /// Reads the inputs of chosen lines, in order, until they weigh more than `most_bytes`.
    async fn inputs(
        &mut self,
        client: &impl GenericClient,
        chosen: &[(i32, usize)],
        most_bytes: usize,
    ) -> Result<Inputs, Error> {
        let mut read = Inputs { rows: Vec::with_capacity(chosen.len()), next: None };
        let (mut at, mut bytes) = (0, 0);
        while let (Some((first, _)), Some((last, _))) = (chosen.get(at), chosen.last()) {
            let is_scattered = (last - first) as usize / SCATTERED >= chosen.len() - at;
            let few = &chosen[at..chosen.len().min(at + SINGLES)];
            let pieces = match is_scattered {
                true => self.single_lines(client, few).await?,
                false => self.whole_chunks(client, *first, *last).await?,
            };
            pin_mut!(pieces);
            let before = at;
            while let Some(piece) = pieces.try_next().await? {
                let (mut line, end, text): (i32, i32, &str) = (piece.get(0), piece.get(1), piece.get(2));
                let mut values = text.split('\n');
                // Chosen lines of which there is no chunk are passed by.
                at += chosen[at..].iter().take_while(|(wanted, _)| *wanted < line).count();
                while line <= end
                    && let (Some((wanted, _)), Some(value)) = (chosen.get(at), values.next())
                {
                    if *wanted == line {
                        if bytes > most_bytes {
                            read.next = Some(line);
                            return Ok(read);
                        }
                        bytes += value.len();
                        read.rows.push((at, Json::from_text(value)));
                        at += 1;
                    }
                    line += 1;
                }
            }
            if at == before {
                // Nothing came: the rows are not there, and asking again would not bring them.
                break;
            }
        }
        Ok(read)
    }

    async fn whole_chunks(
        &mut self,
        client: &impl GenericClient,
        first: i32,
        last: i32,
    ) -> Result<RowStream, Error> {
        let statement = self.statement(client, include_str!("../sql/read.sql")).await?;
        let params: [&(dyn ToSql + Sync); 4] = [&self.batch, &first, &last, &CHUNKS];
        client.query_raw(&statement, params).await
    }

    async fn single_lines(
        &mut self,
        client: &impl GenericClient,
        chosen: &[(i32, usize)],
    ) -> Result<RowStream, Error> {
        let statement = self.statement(client, include_str!("../sql/read_scattered.sql")).await?;
        let lines: Lines = chosen.iter().map(|(line, _)| *line).collect();
        let params: [&(dyn ToSql + Sync); 3] = [&self.batch, &lines, &(chosen.len() as i64)];
        client.query_raw(&statement, params).await
    }

    /// Adds the results of rows that succeeded. When they are too large for one page, rows at its end are dropped: the
    /// answer is the line of the first of those.
    async fn add_results(
        &mut self,
        client: &impl GenericClient,
        rows: &mut Vec<RowView>,
        (sets, chosen): (&[Set], &[(i32, usize)]),
        most_bytes: usize,
    ) -> Result<Option<i32>, Error> {
        const SQL: &str = "SELECT o.lines, o.results FROM musterd.outcomes o
             WHERE o.batch_id = $1 AND o.first_line > 0 AND o.first_line = ANY ($2::int[]) AND o.results IS NOT NULL";
        let last = rows.last().map(|row| row.line).unwrap_or_default();
        let kept = chosen.iter().take_while(|(line, _)| *line <= last);
        let mut outcomes: Vec<i32> = kept.filter_map(|(_, set)| sets[*set].outcome).collect();
        outcomes.sort_unstable();
        outcomes.dedup();
        if outcomes.is_empty() {
            return Ok(None);
        }
        let statement = self.statement(client, SQL).await?;
        let params: [&(dyn ToSql + Sync); 2] = [&self.batch, &outcomes];
        let found = client.query_raw(&statement, params).await?;
        pin_mut!(found);
        let (mut cut, mut bytes) = (None, 0);
        while let Some(outcome) = found.try_next().await? {
            let (lines, results): (Lines, &str) = (outcome.get(0), outcome.get(1));
            bytes += fill_in(rows, &lines, results);
            while bytes > most_bytes && rows.len() > 1 {
                let dropped = rows.split_off(rows.len().div_ceil(2));
                bytes -= dropped.iter().filter_map(|row| row.result.as_ref()).map(Json::len).sum::<usize>();
                cut = dropped.first().map(|row| row.line);
            }
        }
        Ok(cut)
    }

    /// Adds what is stored beside the errors of rows that failed, as [`Self::add_results`] does.
    async fn add_failures(
        &mut self,
        client: &impl GenericClient,
        rows: &mut Vec<RowView>,
        (sets, chosen): (&[Set], &[(i32, usize)]),
        most_bytes: usize,
    ) -> Result<Option<i32>, Error> {
        const SQL: &str = "SELECT f.line, f.error_group, f.error_code, f.result FROM musterd.failures f
             WHERE f.batch_id = $1 AND f.line = ANY ($2::int[]) AND ($3::int IS NULL OR f.generation = $3)
            UNION ALL
            SELECT f.line, f.error_group, f.error_code, f.result FROM musterd.failures_history f
             WHERE f.batch_id = $1 AND f.line = ANY ($2::int[]) AND f.generation = $3
             ORDER BY line";
        let lines: Vec<i32> = rows.iter().filter(|row| row.state == "failed").map(|row| row.line).collect();
        if lines.is_empty() {
            return Ok(None);
        }
        let generation = chosen.first().and_then(|(_, set)| sets[*set].generation);
        let statement = self.statement(client, SQL).await?;
        let params: [&(dyn ToSql + Sync); 3] = [&self.batch, &lines, &generation];
        let found = client.query_raw(&statement, params).await?;
        pin_mut!(found);
        let mut bytes = 0;
        while let Some(failure) = found.try_next().await? {
            let line: i32 = failure.get(0);
            let Ok(at) = rows.binary_search_by_key(&line, |row| row.line) else { continue };
            let result: Option<Json> = failure.get(3);
            bytes += result.as_ref().map_or(0, Json::len);
            let row = &mut rows[at];
            row.error_group = Some(ErrorGroup(failure.get(1)));
            (row.error_code, row.result) = (failure.get(2), result);
            if bytes > most_bytes && at + 1 < rows.len() {
                rows.truncate(at + 1);
                return Ok(line.checked_add(1));
            }
        }
        Ok(None)
    }

    async fn statement(
        &mut self,
        client: &impl GenericClient,
        sql: &'static str,
    ) -> Result<Statement, Error> {
        if let Some((_, statement)) = self.prepared.iter().find(|(known, _)| std::ptr::eq(*known, sql)) {
            return Ok(statement.clone());
        }
        let statement = client.prepare(sql).await?;
        self.prepared.push((sql, statement.clone()));
        Ok(statement)
    }
}

/// Inputs that were read, each with the place of its line among the chosen.
struct Inputs {
    rows: Vec<(usize, Json)>,
    /// The first line that is left for the next page, if they were too large for one.
    next: Option<i32>,
}

fn view(sets: &mut [Set], (line, set): (i32, usize), input: Json) -> RowView {
    let set = &mut sets[set];
    RowView {
        line,
        state: set.state,
        attempt: set.attempt,
        error: set.error.take(),
        error_group: None,
        error_code: None,
        input,
        result: None,
        finished_at: set.finished_at,
        started_at: set.started_at,
        run_seconds: set.run_seconds,
    }
}

/// Gives rows their values out of those of an outcome: one for each of its lines, in order. How many bytes they have.
fn fill_in(rows: &mut [RowView], lines: &Lines, values: &str) -> usize {
    let (mut at, mut bytes) = (0, 0);
    for (line, value) in lines.iter().zip(values.split('\n')) {
        if rows.get(at).is_none_or(|row| row.line != line) {
            at += rows[at..].partition_point(|row| row.line < line);
        }
        let Some(row) = rows.get_mut(at) else { break };
        if row.line == line && row.state == "succeeded" && !value.is_empty() {
            bytes += value.len();
            row.result = Some(Json::from_text(value));
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(line: i32) -> RowView {
        let input = Json::from_text("{}");
        RowView {
            line,
            state: "succeeded",
            attempt: None,
            error: None,
            error_group: None,
            error_code: None,
            input,
            result: None,
            finished_at: None,
            started_at: None,
            run_seconds: None,
        }
    }

    #[test]
    fn values_go_to_their_lines_whatever_of_them_is_on_the_page() {
        let mut rows: Vec<RowView> = [3, 4, 7, 9].into_iter().map(row).collect();
        let lines: Lines = [1, 3, 5, 7, 8, 9, 11].into_iter().collect();
        assert_eq!(fill_in(&mut rows, &lines, "1\n33\n5\nnull\n8\n\n11"), 6);
        let found: Vec<Option<&str>> = rows.iter().map(|row| row.result.as_ref().map(Json::text)).collect();
        assert_eq!(found, [Some("33"), None, Some("null"), None]);
    }
}
