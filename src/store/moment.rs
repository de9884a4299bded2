//! Moments read from a row. PostgreSQL knows earlier and later ones than a calendar has, and two that are infinite: they
//! are shown as the nearest that can be said. A value in a column is never a reason to panic.

use jiff::Timestamp;
use std::error::Error;
use tokio_postgres::{
    Row,
    types::{FromSql, Type},
};

/// The moment in a column that is never null.
pub(super) fn of(row: &Row, column: &str) -> Timestamp {
    row.get::<_, Moment>(column).0
}

/// The moment in a column that may be null.
pub(super) fn maybe(row: &Row, column: &str) -> Option<Timestamp> {
    row.get::<_, Option<Moment>>(column).map(|moment| moment.0)
}

#[derive(Debug, PartialEq)]
struct Moment(Timestamp);

/// Microseconds from 1970, where jiff begins to count, to 2000, where PostgreSQL does.
const EPOCH: i64 = 946_684_800_000_000;

impl<'a> FromSql<'a> for Moment {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        let since_1970 = i64::from_be_bytes(raw.try_into()?).saturating_add(EPOCH);
        let nearest = if since_1970 < 0 { Timestamp::MIN } else { Timestamp::MAX };
        Ok(Self(Timestamp::from_microsecond(since_1970).unwrap_or(nearest)))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_of_the_column_is_a_moment() {
        let read = |value: i64| Moment::from_sql(&Type::TIMESTAMPTZ, &value.to_be_bytes()).unwrap().0;
        assert_eq!(read(0).to_string(), "2000-01-01T00:00:00Z");
        assert_eq!(read(-EPOCH), Timestamp::UNIX_EPOCH);
        // The infinities, the last and the first year of PostgreSQL.
        assert_eq!((read(i64::MAX), read(i64::MIN)), (Timestamp::MAX, Timestamp::MIN));
        assert_eq!(read(9_223_371_331_199_999_999), Timestamp::MAX);
        assert_eq!(read(-211_813_488_000_000_000), "-004713-11-24T00:00:00Z".parse::<Timestamp>().unwrap());
    }
}
