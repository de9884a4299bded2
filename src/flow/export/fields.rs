//! The columns of a CSV export: the fields that inputs have, in the order in which they first appear.

use super::ExportError;
use crate::store::export::Pages;
use serde::{
    Deserialize,
    de::{Deserializer, IgnoredAny, MapAccess, Visitor},
};
use std::{borrow::Cow, collections::HashSet, fmt};

/// More columns than this are no table any more, and every row would be compared with all of them.
pub(super) const MOST_FIELDS: usize = 10_000;
/// Bytes of all names together.
const MOST_BYTES: usize = 4 << 20;

#[derive(Debug, Default)]
pub(super) struct Fields {
    pub(super) names: Vec<String>,
    /// Some inputs are no objects, or have no fields at all.
    pub(super) others: bool,
    known: HashSet<String>,
    bytes: usize,
}

impl Fields {
    pub(super) async fn of(mut pages: Pages<'_>) -> Result<Self, ExportError> {
        let mut fields = Self::default();
        while let Some(page) = pages.next().await? {
            for row in page {
                fields.add(row.input.text())?;
            }
        }
        Ok(fields)
    }

    fn add(&mut self, input: &str) -> Result<(), ExportError> {
        // What is no object gives an error, which is an answer, too.
        let has_fields =
            serde_json::Deserializer::from_str(input).deserialize_map(Names(self)).unwrap_or(false);
        self.others |= !has_fields;
        match self.names.len() > MOST_FIELDS || self.bytes > MOST_BYTES {
            true => Err(ExportError::TooManyFields),
            false => Ok(()),
        }
    }

    /// Whether every one of the names is a column.
    pub(super) fn have_all<'n>(&self, mut names: impl Iterator<Item = &'n String>) -> bool {
        names.all(|name| self.known.contains(name))
    }

    fn see(&mut self, name: &str) {
        if !self.known.contains(name) && self.names.len() <= MOST_FIELDS && self.bytes <= MOST_BYTES {
            self.bytes += name.len();
            self.known.insert(name.to_owned());
            self.names.push(name.to_owned());
        }
    }
}

/// Collects the names of an object; answers whether there were any.
struct Names<'f>(&'f mut Fields);

impl<'de> Visitor<'de> for Names<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut any = false;
        while let Some(name) = map.next_key::<Name<'de>>()? {
            map.next_value::<IgnoredAny>()?;
            self.0.see(&name.0);
            any = true;
        }
        Ok(any)
    }
}

/// A name, copied only when it is written with escapes.
#[derive(Deserialize)]
struct Name<'n>(#[serde(borrow)] Cow<'n, str>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_come_in_the_order_in_which_fields_first_appear() {
        let mut fields = Fields::default();
        for input in [r#"{"b":1,"a":{"x":2}}"#, r#"{"c":[1],"a":null,"\u00fc":3}"#] {
            fields.add(input).unwrap();
        }
        assert_eq!((&*fields.names, fields.others), (&["b", "a", "c", "ü"].map(String::from)[..], false));
        for input in ["{}", "7", "\"word\"", "[{}]", "null"] {
            let mut fields = Fields::default();
            fields.add(input).unwrap();
            assert!(fields.others && fields.names.is_empty(), "{input}");
        }
    }

    #[test]
    fn too_many_fields_are_refused_however_they_come() {
        let mut fields = Fields::default();
        for n in 0..MOST_FIELDS {
            fields.add(&format!("{{\"f{n}\":0}}")).unwrap();
        }
        assert!(matches!(fields.add("{\"one more\":0}"), Err(ExportError::TooManyFields)));
        let many: Vec<String> = (0..=MOST_FIELDS).map(|n| format!("\"f{n}\":0")).collect();
        let row = format!("{{{}}}", many.join(","));
        assert!(matches!(Fields::default().add(&row), Err(ExportError::TooManyFields)));
        let long = format!("{{\"{}\":0}}", "x".repeat(MOST_BYTES + 1));
        assert!(matches!(Fields::default().add(&long), Err(ExportError::TooManyFields)));
    }
}
