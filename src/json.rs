//! JSON as text, from PostgreSQL to the handler and back, parsed only where it has to be.

pub mod check;
mod number;
mod scan;
pub(crate) mod special;

use bytes::{BufMut, BytesMut};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{error::Error, fmt};
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

/// The text of one JSON value, as `jsonb` gives and takes it. It may be wrong when a handler wrote it:
/// PostgreSQL is the judge.
#[derive(Clone, PartialEq, Eq)]
pub struct Json(Box<str>);

impl Json {
    pub fn from_text(text: impl Into<Box<str>>) -> Self {
        Self(text.into())
    }

    /// The JSON of anything that serializes.
    pub fn of(value: &impl Serialize) -> Result<Self, serde_json::Error> {
        serde_json::to_string(value).map(Self::from_text)
    }

    pub fn text(&self) -> &str {
        &self.0
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Payloads do not belong in logs: only the size is shown.
impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Json({} bytes)", self.0.len())
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let raw: &serde_json::value::RawValue =
            serde_json::from_str(&self.0).map_err(serde::ser::Error::custom)?;
        raw.serialize(serializer)
    }
}

/// Any JSON, as it stands in the text it is part of.
impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <Box<serde_json::value::RawValue>>::deserialize(deserializer)?;
        Ok(Self::from_text(raw.get()))
    }
}

/// The byte before the text in jsonb's binary form.
const JSONB_VERSION: u8 = 1;

impl<'a> FromSql<'a> for Json {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        let text = match (ty, raw) {
            (&Type::JSONB, [JSONB_VERSION, text @ ..]) => text,
            (&Type::JSONB, _) => return Err("jsonb of an unknown version".into()),
            (_, text) => text,
        };
        Ok(Self(std::str::from_utf8(text)?.into()))
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::JSON | Type::JSONB)
    }
}

impl ToSql for Json {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        if *ty == Type::JSONB {
            out.put_u8(JSONB_VERSION);
        }
        out.put_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::JSON | Type::JSONB)
    }

    to_sql_checked!();
}
