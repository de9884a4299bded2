//! What a key wants, asked of the types themselves: no list of keys can go stale, and a message can say what is allowed, in a
//! person's words.

use serde::de::{self, DeserializeSeed, Deserializer, Expected, MapAccess, Visitor, value::StrDeserializer};
use std::fmt;

/// The kind of value that belongs at a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    OneOf(&'static [&'static str]),
    /// With these keys; with none where any will do.
    Table(&'static [&'static str]),
    List,
    /// What the type's own visitor says it expects.
    Other(String),
}

impl Wanted {
    /// What `T` wants at `path`; `None` where there is no such place.
    pub(super) fn at<'de, T: de::Deserialize<'de>>(path: &'de [String]) -> Option<Self> {
        T::deserialize(Probe { path }).err().and_then(|Asked(wanted)| wanted)
    }

    /// What may stand there; `None` where the type's own complaint says it better.
    pub(super) fn rule(&self, key: &str) -> Option<String> {
        Some(match self {
            Self::OneOf(words) => format!("must be {}", listed(words)),
            Self::Table(_) => format!("must be a table ([{key}])"),
            Self::List => "must be a list of texts, such as [\"python3\", \"work.py\"]".into(),
            Self::Other(expected) => match expected.as_str() {
                "u16" => "must be a whole number from 0 to 65535".into(),
                "u32" => "must be a whole number from 0 to 4294967295".into(),
                "i32" => "must be a whole number from -2147483648 to 2147483647".into(),
                "u64" | "usize" => "must be a whole number, 0 or more".into(),
                "a nonzero u16" => "must be a whole number from 1 to 65535".into(),
                "a nonzero u32" => "must be a whole number from 1 to 4294967295".into(),
                "a nonzero u64" | "a nonzero usize" => "must be a whole number, 1 or more".into(),
                "f64" => "must be a number".into(),
                "a boolean" => "must be true or false".into(),
                "a time or never" => "must be a time, such as \"30d\" or \"1y\", or \"never\"".into(),
                "a duration" => "must be a time, such as \"30s\" or \"5m\"".into(),
                "socket address" => "must be an address and a port, such as 127.0.0.1:9464".into(),
                _ => return None,
            },
        })
    }
}

/// `a`, `a or b`, `a, b or c`.
fn listed(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [most @ .., last] => format!("{} or {last}", most.join(", ")),
    }
}

/// A deserializer that goes down a path and answers with what it is asked for at its end.
#[derive(Clone, Copy)]
struct Probe<'a> {
    path: &'a [String],
}

#[derive(Debug)]
struct Asked(Option<Wanted>);

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl std::error::Error for Asked {}

impl de::Error for Asked {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self(None)
    }
}

impl<'de> Probe<'de> {
    fn answer<T>(self, wanted: Wanted) -> Result<T, Asked> {
        Err(Asked(self.path.is_empty().then_some(wanted)))
    }

    fn descend<V: Visitor<'de>>(self, keys: &'static [&'static str], visitor: V) -> Result<V::Value, Asked> {
        match self.path.split_first() {
            None => self.answer(Wanted::Table(keys)),
            Some((name, below)) => visitor.visit_map(Entry { name: Some(name), below }),
        }
    }
}

impl<'de> Deserializer<'de> for Probe<'de> {
    type Error = Asked;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Asked> {
        self.answer(Wanted::Other((&visitor as &dyn Expected).to_string()))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Asked> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Asked> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Asked> {
        self.answer(Wanted::List)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Asked> {
        self.descend(&[], visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        keys: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Asked> {
        self.descend(keys, visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Asked> {
        self.answer(Wanted::OneOf(variants))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct tuple
        tuple_struct identifier ignored_any
    }
}

/// A table with the one name that leads on.
struct Entry<'a> {
    name: Option<&'a str>,
    below: &'a [String],
}

impl<'de> MapAccess<'de> for Entry<'de> {
    type Error = Asked;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Asked> {
        self.name.take().map(|name| seed.deserialize(StrDeserializer::new(name))).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Asked> {
        seed.deserialize(Probe { path: self.below })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn every_place_says_what_it_wants() {
        let at = |key: &str| {
            let path: Vec<String> = key.split('.').map(str::to_owned).collect();
            Wanted::at::<Config>(&path).and_then(|wanted| wanted.rule(key))
        };
        let cases = [
            ("liveness.backend", "must be auto, redis or postgres"),
            ("handlers.x.kind", "must be builtin, sql, http or exec"),
            ("queues.default.fibers", "must be a whole number from 1 to 4294967295"),
            ("http.listen", "must be an address and a port, such as 127.0.0.1:9464"),
            ("retry", "must be a table ([retry])"),
            ("handlers.x.env", "must be a list of texts, such as [\"python3\", \"work.py\"]"),
            ("shutdown.grace", "must be a time, such as \"30s\" or \"5m\""),
            ("handlers.x.allow_private", "must be true or false"),
            ("handlers.x.rate", "must be a number"),
        ];
        for (key, rule) in cases {
            assert_eq!(at(key).as_deref(), Some(rule), "{key}");
        }
        assert_eq!(at("nowhere.at.all"), None);
    }
}
