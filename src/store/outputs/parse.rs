//! The outputs of a row: a JSON object with a text for every file. Only what is asked for is taken out of it.

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;

/// Calls `see` with every name of an object.
pub(super) fn names(json: &str, see: impl FnMut(&str)) -> Result<(), serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(json);
    deserializer.deserialize_map(Names(see))?;
    deserializer.end()
}

/// The text under `name`, if there is one; what is no string as its JSON, null as nothing.
pub(super) fn text(json: &str, name: &str) -> Option<String> {
    if json.is_empty() {
        return None;
    }
    let raw = serde_json::Deserializer::from_str(json).deserialize_map(Pick(name)).ok()??;
    match raw.get() {
        "null" => Some(String::new()),
        text => Some(serde_json::from_str(text).unwrap_or_else(|_| text.to_owned())),
    }
}

struct Names<F>(F);

impl<'de, F: FnMut(&str)> Visitor<'de> for Names<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while map.next_key_seed(Key(&mut self.0))?.is_some() {
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }
}

struct Pick<'n>(&'n str);

impl<'de> Visitor<'de> for Pick<'_> {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(is_it) = map.next_key_seed(Key(|name: &str| name == self.0))? {
            // Of several of one name the last counts, as in jsonb.
            match is_it {
                true => found = Some(map.next_value()?),
                false => _ = map.next_value::<IgnoredAny>()?,
            }
        }
        Ok(found)
    }
}

/// A name, looked at without being copied.
struct Key<F>(F);

impl<'de, T, F: FnMut(&str) -> T> DeserializeSeed<'de> for Key<F> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<T, F: FnMut(&str) -> T> Visitor<'_> for Key<F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: Error>(mut self, name: &str) -> Result<T, E> {
        Ok((self.0)(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_found_by_its_name_however_it_is_written() {
        let json = r#"{"a.txt":"one\n","\u00fc":"two \"\u20ac\"","n":17,"o":{"a.txt":"no"},"z":null,"a.txt":"last"}"#;
        assert_eq!(text(json, "a.txt").as_deref(), Some("last"));
        assert_eq!(text(json, "ü").as_deref(), Some("two \"€\""));
        assert_eq!((text(json, "n").as_deref(), text(json, "z").as_deref()), (Some("17"), Some("")));
        assert_eq!(
            (text(json, "b"), text("", "a"), text("[]", "a"), text("{", "a")),
            (None, None, None, None)
        );
    }

    #[test]
    fn all_names_are_seen() {
        let mut seen = Vec::new();
        names(r#"{"a.txt":"x", "\u00fc":{"b":1}}"#, |name| seen.push(name.to_owned())).unwrap();
        assert_eq!(seen, ["a.txt", "ü"]);
        assert!(names("7", |_| ()).is_err() && names("{} x", |_| ()).is_err());
    }
}
