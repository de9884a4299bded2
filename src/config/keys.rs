//! Which keys exist, asked of the types themselves, so that no list can go stale.

use super::Config;
use crate::{backoff, flow, handler, http, liveness, objects, queue, store, supervisor, telemetry};
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

/// Whether there is such a key.
pub(super) fn known(path: &[String]) -> Known {
    let names: Vec<&str> = path.iter().map(String::as_str).collect();
    let (name, siblings) = match names.as_slice() {
        [section] => (*section, fields_of::<Config>()),
        [section, ..] if !fields_of::<Config>().contains(section) => (*section, fields_of::<Config>()),
        ["outputs", "s3", name, ..] => (*name, fields_of::<objects::S3Config>()),
        ["queues", _] | ["handlers", _] => return Known::Yes,
        ["queues", _, name, ..] => (*name, fields_of::<queue::Config>()),
        ["handlers", _, name, ..] => (*name, fields_of::<handler::Config>()),
        [section, name, ..] => (*name, section_fields(section)),
        [] => return Known::Yes,
    };
    if siblings.contains(&name) {
        return Known::Yes;
    }
    let did_you_mean = nearest(name, siblings.iter().copied()).map(|near| {
        let mut path = path.to_vec();
        let at = path.iter().position(|part| part == name).unwrap_or_default();
        path.truncate(at + 1);
        path[at] = near.to_owned();
        path.join(".")
    });
    Known::No { did_you_mean }
}

/// The keys of a section.
pub(super) fn section_fields(section: &str) -> &'static [&'static str] {
    match section {
        "database" => fields_of::<store::Config>(),
        "redis" => fields_of::<liveness::RedisConfig>(),
        "liveness" => fields_of::<liveness::Config>(),
        "claim" => fields_of::<flow::claim::Config>(),
        "batcher" => fields_of::<flow::batcher::Config>(),
        "completion" => fields_of::<flow::complete::Config>(),
        "shutdown" => fields_of::<supervisor::Config>(),
        "outputs" => fields_of::<objects::Config>(),
        "http" => fields_of::<http::Config>(),
        "log" => fields_of::<telemetry::Config>(),
        "retry" => fields_of::<backoff::Config>(),
        "submit" => fields_of::<flow::submit::Config>(),
        _ => &[],
    }
}

/// The nearest of `candidates`, if one is near enough to be a slip of the fingers.
fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
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
