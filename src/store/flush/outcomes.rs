//! What became of some lines of a block, gathered for one write: sets and joined values, not a value for every row.

use crate::{error_group::ErrorGroup, json::Json, lines::Lines};
use std::time::{Duration, Instant};

/// A succeeded line that has something to store beside its success.
#[derive(Clone, Debug, PartialEq)]
struct Stored {
    line: i32,
    result: Option<Json>,
    /// Text for output files, as a JSON object by file name.
    outputs: Option<Json>,
}

/// A line that failed, with what its handler leaves of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub line: i32,
    pub error: String,
    pub code: Option<String>,
    pub group: ErrorGroup,
    pub result: Option<Json>,
    /// Text for output files, as a JSON object by file name.
    pub outputs: Option<Json>,
}

impl Failure {
    /// With nothing but the text of an error.
    pub fn plain(line: i32, error: String) -> Self {
        let group = ErrorGroup::of(&error, None);
        Self { line, error, code: None, group, result: None, outputs: None }
    }

    fn bytes(&self) -> usize {
        let of = |json: &Option<Json>| json.as_ref().map_or(0, Json::len);
        self.error.len() + of(&self.result) + of(&self.outputs)
    }
}

/// A row to be added to the batch, and the line that asks for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Append {
    pub line: i32,
    pub input: Json,
}

/// Outcomes of lines of one block. Every value is one line of JSON that `jsonb` can hold: it was checked where it came in.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcomes {
    succeeded: Lines,
    stored: Vec<Stored>,
    failures: Vec<Failure>,
    appended: Vec<Append>,
    bytes: usize,
    /// When the first of these rows was started.
    began: Option<Instant>,
    /// How long the handler ran for all of them.
    took: Duration,
}

/// What one tuple of `outcomes` says.
#[derive(Debug, PartialEq, Eq)]
pub struct Stripe {
    pub lines: Lines,
    pub succeeded: i32,
    pub results: Option<String>,
    pub outputs: Option<String>,
}

/// Lines of a tuple lie in one stripe of so many, so that the outcome of a line is found by an index.
const STRIPE: i32 = 10_000;

impl Outcomes {
    /// The lines of `lines` succeeded, and there is nothing to store for any of them.
    pub fn succeed_all(&mut self, lines: &Lines) {
        self.succeeded.extend(lines);
    }

    pub fn succeed(&mut self, line: i32, result: Option<Json>, outputs: Option<Json>) {
        self.succeeded.insert(line);
        if result.is_some() || outputs.is_some() {
            self.bytes += result.as_ref().map_or(0, Json::len) + outputs.as_ref().map_or(0, Json::len);
            self.stored.push(Stored { line, result, outputs });
        }
    }

    pub fn fail(&mut self, line: i32, error: String) {
        self.add_failure(Failure::plain(line, error));
    }

    pub fn add_failure(&mut self, failure: Failure) {
        self.bytes += failure.bytes();
        self.failures.push(failure);
    }

    /// A row for the batch, by a line whose outcome is here.
    pub fn append(&mut self, line: i32, input: Json) {
        self.bytes += input.len();
        self.appended.push(Append { line, input });
    }

    /// The handler ran so long for rows whose outcomes are here.
    pub fn ran(&mut self, began: Instant, took: Duration) {
        self.began = Some(self.began.map_or(began, |first| first.min(began)));
        self.took += took;
    }

    pub fn began(&self) -> Option<Instant> {
        self.began
    }

    /// How long a row took on average, as far as the handler's time was taken.
    pub fn row_took(&self) -> Option<Duration> {
        let rows = u32::try_from(self.len()).ok().filter(|rows| *rows > 0)?;
        self.began.map(|_| self.took / rows)
    }

    pub fn is_empty(&self) -> bool {
        self.succeeded.is_empty() && self.failures.is_empty()
    }

    /// How many lines have an outcome here.
    pub fn len(&self) -> usize {
        self.succeeded.len() + self.failures.len()
    }

    pub fn failed(&self) -> usize {
        self.failures.len()
    }

    pub fn succeeded(&self) -> usize {
        self.succeeded.len()
    }

    pub fn failures(&self) -> &[Failure] {
        &self.failures
    }

    pub fn appended(&self) -> &[Append] {
        &self.appended
    }

    /// Bytes of results, output texts, errors and appended rows.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What it takes of the channel: one for each tuple to be written, and one for fifty rows that succeeded, so that what a
    /// crash would repeat stays bounded.
    pub fn weight(&self) -> u32 {
        (1 + self.failures.len() + self.appended.len() + self.succeeded.len() / 50) as u32
    }

    /// All lines that have an outcome here.
    pub fn done(&self) -> Lines {
        let mut done = self.succeeded.clone();
        for failure in &self.failures {
            done.insert(failure.line);
        }
        done
    }

    pub fn extend(&mut self, other: Self) {
        self.succeeded.extend(&other.succeeded);
        self.stored.extend(other.stored);
        self.failures.extend(other.failures);
        self.appended.extend(other.appended);
        self.bytes += other.bytes;
        if let Some(began) = other.began {
            self.ran(began, other.took);
        }
    }

    /// One tuple for each stripe that has lines that succeeded; one without lines when there is none.
    pub fn stripes(&mut self) -> Vec<Stripe> {
        self.stored.sort_by_key(|stored| stored.line);
        self.appended.sort_by_key(|append| append.line);
        let (Some(first), Some(last)) = (self.succeeded.first(), self.succeeded.last()) else {
            return vec![Stripe { lines: Lines::new(), succeeded: 0, results: None, outputs: None }];
        };
        let stripes = (first - 1) / STRIPE..=(last - 1) / STRIPE;
        let one = |stripe: i32| {
            let lines = self.succeeded.within(&(stripe * STRIPE + 1..(stripe + 1) * STRIPE + 1));
            let from = self.stored.partition_point(|stored| (stored.line - 1) / STRIPE < stripe);
            let to = self.stored.partition_point(|stored| (stored.line - 1) / STRIPE <= stripe);
            let stored = &self.stored[from..to];
            Stripe {
                succeeded: lines.len() as i32,
                results: join(&lines, stored, |stored| stored.result.as_ref()),
                outputs: join(&lines, stored, |stored| stored.outputs.as_ref()),
                lines,
            }
        };
        stripes.map(one).filter(|stripe| stripe.succeeded > 0).collect()
    }

    /// Two halves of the lines, or `None` when there is only one line left (or none).
    pub fn halve(&self) -> Option<(Self, Self)> {
        let lines: Vec<i32> = self.done().iter().collect();
        if lines.len() < 2 {
            return None;
        }
        let middle = lines[lines.len() / 2];
        Some((self.part(i32::MIN..middle), self.part(middle..i32::MAX)))
    }

    fn part(&self, bounds: std::ops::Range<i32>) -> Self {
        let mut part = Self { succeeded: self.succeeded.within(&bounds), ..Self::default() };
        for Stored { line, result, outputs } in
            self.stored.iter().filter(|s| bounds.contains(&s.line)).cloned()
        {
            part.succeed(line, result, outputs);
        }
        for failure in self.failures.iter().filter(|f| bounds.contains(&f.line)).cloned() {
            part.add_failure(failure);
        }
        for Append { line, input } in self.appended.iter().filter(|a| bounds.contains(&a.line)).cloned() {
            part.append(line, input);
        }
        if let (Some(began), Some(row_took)) = (self.began, self.row_took()) {
            part.ran(began, row_took * part.len() as u32);
        }
        part
    }

    /// The same outcomes with nothing in them that could be at fault.
    pub fn without_values(&self) -> Self {
        let mut bare =
            Self { succeeded: self.succeeded.clone(), began: self.began, took: self.took, ..Self::default() };
        self.failures.iter().for_each(|failure| bare.fail(failure.line, "failed".to_owned()));
        bare
    }

    /// The same lines, all failed with `error`.
    pub fn all_failed(&self, error: &str) -> Self {
        let mut failed = Self { began: self.began, took: self.took, ..Self::default() };
        self.done().iter().for_each(|line| failed.fail(line, error.to_owned()));
        failed
    }
}

/// A value for each line, in their order, separated by line feeds; empty where a line has none. `None`: no line has one.
fn join<'a>(
    lines: &Lines,
    stored: &'a [Stored],
    value: impl Fn(&'a Stored) -> Option<&'a Json>,
) -> Option<String> {
    let bytes: usize = stored.iter().filter_map(&value).map(Json::len).sum();
    if stored.iter().all(|stored| value(stored).is_none()) {
        return None;
    }
    let mut joined = String::with_capacity(bytes + lines.len());
    let mut rest = stored.iter().peekable();
    for (index, line) in lines.iter().enumerate() {
        if index > 0 {
            joined.push('\n');
        }
        if let Some(stored) = rest.next_if(|stored| stored.line == line)
            && let Some(value) = value(stored)
        {
            joined.push_str(value.text());
        }
    }
    Some(joined)
}

#[cfg(test)]
mod properties;

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Option<Json> {
        Some(Json::from_text(text))
    }

    #[test]
    fn values_stand_in_the_order_of_their_lines_however_they_came() {
        let mut outcomes = Outcomes::default();
        outcomes.succeed(3, json("\"c\""), None);
        outcomes.succeed(1, json("\"a\""), json("{}"));
        outcomes.succeed(2, None, None);
        outcomes.fail(5, "no".into());
        outcomes.succeed_all(&Lines::span(6, 7));
        let stripes = outcomes.stripes();
        assert_eq!(stripes.len(), 1);
        assert_eq!(stripes[0].lines.to_string(), "{[1,4),[6,8)}");
        assert_eq!(stripes[0].results.as_deref(), Some("\"a\"\n\n\"c\"\n\n"));
        assert_eq!(stripes[0].outputs.as_deref(), Some("{}\n\n\n\n"));
        assert_eq!(outcomes.done().to_string(), "{[1,4),[5,8)}");
    }

    #[test]
    fn nothing_to_store_is_null_and_nothing_succeeded_is_a_tuple_without_lines() {
        let mut outcomes = Outcomes::default();
        outcomes.succeed_all(&Lines::span(1, 500));
        assert_eq!(outcomes.stripes()[0].results, None);
        let mut failed = outcomes.all_failed("no");
        assert_eq!((failed.failed(), failed.stripes()[0].succeeded), (500, 0));
    }

    #[test]
    fn a_tuple_never_crosses_a_stripe() {
        let mut outcomes = Outcomes::default();
        outcomes.succeed_all(&Lines::span(9_999, 10_002));
        outcomes.succeed(10_003, json("1"), None);
        let stripes = outcomes.stripes();
        let seen: Vec<String> = stripes.iter().map(|stripe| stripe.lines.to_string()).collect();
        assert_eq!(seen, ["{[9999,10001)}", "{[10001,10004)}"]);
        assert_eq!((stripes[0].results.as_deref(), stripes[1].results.as_deref()), (None, Some("\n\n1")));
    }

    #[test]
    fn halves_have_every_line_once() {
        let mut outcomes = Outcomes::default();
        outcomes.succeed(1, json("1"), None);
        outcomes.fail(2, "no".into());
        outcomes.succeed(3, None, json("{}"));
        outcomes.append(3, Json::from_text("7"));
        let began = Instant::now();
        outcomes.ran(began, Duration::from_millis(30));
        let (one, other) = outcomes.halve().unwrap();
        assert_eq!((one.len(), other.len(), other.appended().len()), (1, 2, 1));
        assert!(one.halve().is_none());
        assert_eq!((one.began(), one.row_took()), (Some(began), Some(Duration::from_millis(10))));
        let mut both = one;
        both.extend(other);
        assert_eq!(both.done(), outcomes.done());
        assert_eq!((both.began(), both.row_took()), (outcomes.began(), outcomes.row_took()));
        assert_eq!((both.bytes(), both.stripes()), (outcomes.bytes(), outcomes.stripes()));
    }
}
