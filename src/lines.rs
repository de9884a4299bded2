//! A set of line numbers, kept as ranges: PostgreSQL's `int4multirange` on this side.
//!
//! Ranges are half open, sorted, not empty, and neither overlap nor touch. So a block of 500 lines is one pair of numbers,
//! and what is left of it after a flush is a difference.

use bytes::{Buf, BufMut, BytesMut};
use std::{error::Error, fmt, ops::Range};
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

/// Ranges that a person may write.
const MOST_RANGES: usize = 10_000;

#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Lines(Vec<Range<i32>>);

impl Lines {
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// The lines from `first` to `last`, both included.
    pub fn span(first: i32, last: i32) -> Self {
        let mut lines = Self::new();
        lines.add_range(first..last.saturating_add(1));
        lines
    }

    /// Lines as a person writes them: `5-90,200`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut lines = Self::new();
        for piece in text.split(',') {
            let (first, last) = piece.trim().split_once('-').unwrap_or((piece.trim(), piece.trim()));
            let number =
                |text: &str| text.trim().parse::<i32>().ok().filter(|line| (1..i32::MAX).contains(line));
            match (number(first), number(last)) {
                (Some(first), Some(last)) if first <= last => lines.add_range(first..last + 1),
                _ => return Err("expected lines such as 5-90,200".into()),
            }
            if lines.0.len() > MOST_RANGES {
                return Err(format!("has more than {MOST_RANGES} ranges"));
            }
        }
        Ok(lines)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many lines there are.
    pub fn len(&self) -> usize {
        self.0.iter().map(|range| (range.end - range.start) as usize).sum()
    }

    pub fn first(&self) -> Option<i32> {
        self.0.first().map(|range| range.start)
    }

    pub fn last(&self) -> Option<i32> {
        self.0.last().map(|range| range.end - 1)
    }

    pub fn contains(&self, line: i32) -> bool {
        let after = self.0.partition_point(|range| range.start <= line);
        after > 0 && line < self.0[after - 1].end
    }

    pub fn ranges(&self) -> &[Range<i32>] {
        &self.0
    }

    pub fn iter(&self) -> impl Iterator<Item = i32> + '_ {
        self.0.iter().cloned().flatten()
    }

    /// Adds a line; false when it was there. Cheap when lines come in order.
    pub fn insert(&mut self, line: i32) -> bool {
        if let Some(last) = self.0.last_mut()
            && line == last.end
        {
            last.end += 1;
            return true;
        }
        if self.contains(line) {
            return false;
        }
        self.add_range(line..line + 1);
        true
    }

    /// Adds a range of lines.
    pub fn add_range(&mut self, added: Range<i32>) {
        if added.is_empty() {
            return;
        }
        // Those that overlap or touch it become one with it.
        let from = self.0.partition_point(|range| range.end < added.start);
        let to = self.0.partition_point(|range| range.start <= added.end);
        let start =
            self.0.get(from).filter(|_| from < to).map_or(added.start, |range| range.start.min(added.start));
        let end = if from < to { self.0[to - 1].end.max(added.end) } else { added.end };
        self.0.splice(from..to, std::iter::once(start..end));
    }

    /// Adds all of `other`.
    pub fn extend(&mut self, other: &Self) {
        other.0.iter().for_each(|range| self.add_range(range.clone()));
    }

    /// Takes one line out.
    pub fn remove(&mut self, line: i32) -> bool {
        let after = self.0.partition_point(|range| range.start <= line);
        let Some(range) =
            after.checked_sub(1).and_then(|at| self.0.get(at)).filter(|range| line < range.end).cloned()
        else {
            return false;
        };
        let pieces = [range.start..line, line + 1..range.end];
        self.0.splice(after - 1..after, pieces.into_iter().filter(|piece| !piece.is_empty()));
        true
    }

    /// The lines of this set that are not in `other`.
    pub fn minus(&self, other: &Self) -> Self {
        let mut left = Vec::with_capacity(self.0.len());
        let mut cuts = other.0.iter().peekable();
        for range in &self.0 {
            let mut start = range.start;
            while let Some(cut) = cuts.peek() {
                if cut.end <= start {
                    cuts.next();
                    continue;
                }
                if cut.start >= range.end {
                    break;
                }
                if cut.start > start {
                    left.push(start..cut.start);
                }
                start = cut.end;
                if start >= range.end {
                    break;
                }
                cuts.next();
            }
            if start < range.end {
                left.push(start..range.end);
            }
        }
        Self(left)
    }

    /// The lines that are in both.
    pub fn within(&self, bounds: &Range<i32>) -> Self {
        let cut = |range: &Range<i32>| range.start.max(bounds.start)..range.end.min(bounds.end);
        Self(self.0.iter().map(cut).filter(|range| !range.is_empty()).collect())
    }
}

impl FromIterator<i32> for Lines {
    fn from_iter<I: IntoIterator<Item = i32>>(lines: I) -> Self {
        let mut set = Self::new();
        for line in lines {
            set.insert(line);
        }
        set
    }
}

/// As PostgreSQL writes it.
impl fmt::Display for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (index, range) in self.0.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}[{},{})", range.start, range.end)?;
        }
        f.write_str("}")
    }
}

impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The flag byte of a range whose lower bound is included and whose upper bound is not.
const LOWER_INCLUDED: u8 = 0x02;
const NUMBER: i32 = 4;
/// Flag byte, and each bound behind its length.
const RANGE: i32 = 1 + 2 * (4 + NUMBER);

impl ToSql for Lines {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.put_i32(i32::try_from(self.0.len())?);
        for range in &self.0 {
            out.put_i32(RANGE);
            out.put_u8(LOWER_INCLUDED);
            for bound in [range.start, range.end] {
                out.put_i32(NUMBER);
                out.put_i32(bound);
            }
        }
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::INT4MULTI_RANGE
    }

    to_sql_checked!();
}

const CUT_OFF: &str = "an int4multirange that ends too early";

fn number(raw: &mut &[u8]) -> Result<i32, &'static str> {
    raw.try_get_i32().map_err(|_| CUT_OFF)
}

impl<'a> FromSql<'a> for Lines {
    fn from_sql(_: &Type, mut raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        let count = number(&mut raw)?;
        let mut ranges = Vec::with_capacity(usize::try_from(count)?.min(10_000));
        for _ in 0..count {
            let (length, flags) = (number(&mut raw)?, raw.try_get_u8().map_err(|_| CUT_OFF)?);
            if (length, flags) != (RANGE, LOWER_INCLUDED) {
                return Err("an int4multirange without bounds".into());
            }
            let [_, start, _, end] =
                [number(&mut raw)?, number(&mut raw)?, number(&mut raw)?, number(&mut raw)?];
            ranges.push(start..end);
        }
        Ok(Self(ranges))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::INT4MULTI_RANGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_people_write_them() {
        assert_eq!(Lines::parse("5-90,200, 7").unwrap().to_string(), "{[5,91),[200,201)}");
        for bad in ["", "0", "5-", "9-3", "a", "1,,2", "-4", "1-2-3", "2147483647"] {
            assert!(Lines::parse(bad).is_err(), "{bad}");
        }
    }
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set(lines: &Lines) -> BTreeSet<i32> {
        lines.iter().collect()
    }

    fn is_normal(lines: &Lines) -> bool {
        lines.0.iter().all(|range| !range.is_empty())
            && lines.0.windows(2).all(|pair| pair[0].end < pair[1].start)
    }

    proptest! {
        #[test]
        fn it_is_the_set_it_stands_for(one in prop::collection::vec(1..60_i32, 0..60), other in prop::collection::vec(1..60_i32, 0..60)) {
            let (a, b): (Lines, Lines) = (one.iter().copied().collect(), other.iter().copied().collect());
            let (sa, sb): (BTreeSet<i32>, BTreeSet<i32>) = (one.iter().copied().collect(), other.iter().copied().collect());
            prop_assert_eq!(set(&a), sa.clone());
            prop_assert_eq!(a.len(), sa.len());
            let mut both = a.clone();
            both.extend(&b);
            prop_assert_eq!(set(&both), &sa | &sb);
            let left = a.minus(&b);
            prop_assert_eq!(set(&left), &sa - &sb);
            let mut fewer = a.clone();
            for line in &other {
                prop_assert_eq!(fewer.contains(*line), fewer.remove(*line));
            }
            prop_assert_eq!(set(&fewer), &sa - &sb);
            prop_assert!(is_normal(&a) && is_normal(&both) && is_normal(&left) && is_normal(&fewer));
            prop_assert_eq!(set(&a.within(&(10..20))), sa.range(10..20).copied().collect::<BTreeSet<_>>());
            for line in 0..62 {
                prop_assert_eq!(a.contains(line), sa.contains(&line));
            }
        }

        #[test]
        fn it_survives_the_way_to_postgres_and_back(lines in prop::collection::vec(1..1000_i32, 0..100)) {
            let lines: Lines = lines.into_iter().collect();
            let mut bytes = BytesMut::new();
            lines.to_sql(&Type::INT4MULTI_RANGE, &mut bytes).unwrap();
            prop_assert_eq!(Lines::from_sql(&Type::INT4MULTI_RANGE, &bytes).unwrap(), lines);
        }
    }

    #[test]
    fn lines_in_order_are_one_range() {
        let mut lines = Lines::new();
        (1..=500).for_each(|line| assert!(lines.insert(line)));
        assert!(!lines.insert(250));
        assert_eq!(lines.to_string(), "{[1,501)}");
        assert!(lines.remove(7) && !lines.remove(7));
        assert_eq!(lines.to_string(), "{[1,7),[8,501)}");
    }
}
