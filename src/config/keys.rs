//! Which keys exist, asked of the types themselves, so that no list can go stale.

use serde::de::{self, Deserialize, Deserializer, Visitor};
use std::fmt;

/// The field names that `T` accepts as a struct.
pub(super) fn fields_of<'de, T: Deserialize<'de>>() -> &'static [&'static str] {
    match T::deserialize(AskForFields) {
        Err(Fields(fields)) => fields,
        Ok(_) => &[],
    }
}

/// A deserializer that answers with the names it was asked for.
struct AskForFields;

#[derive(Debug)]
struct Fields(&'static [&'static str]);

impl fmt::Display for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl std::error::Error for Fields {}

impl de::Error for Fields {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self(&[])
    }
}

impl<'de> Deserializer<'de> for AskForFields {
    type Error = Fields;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Fields> {
        Err(Fields(fields))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Fields> {
        Err(Fields(&[]))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Whether a key exists, and the known keys it might have been meant for.
pub(super) enum Known {
    Yes,
    No { did_you_mean: Option<String> },
}

/// The nearest of `candidates`, if one is near enough to be a slip of the fingers.
pub(super) fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize)]
    #[expect(dead_code, reason = "only the names matter")]
    struct Sample {
        first: u8,
        #[serde(rename = "zweite")]
        second: Option<String>,
    }

    #[test]
    fn a_struct_tells_its_names() {
        assert_eq!(fields_of::<Sample>(), ["first", "zweite"]);
    }

    #[test]
    fn only_a_slip_is_taken_for_another_word() {
        let keys = ["heartbeat_interval", "heartbeat_ttl", "backend"];
        assert_eq!(nearest("hartbeat_interval", keys.into_iter()), Some("heartbeat_interval"));
        assert_eq!(nearest("colour", keys.into_iter()), None);
    }
}
