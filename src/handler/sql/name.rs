//! Names of PostgreSQL that come from a configuration: parsed, then quoted, never pasted.

use std::fmt;

/// `schema.name` or `name`, folded to lower case where it was not quoted, as PostgreSQL does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QualifiedName(Vec<String>);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("is empty: write schema.procedure")]
    Empty,
    #[error("has more than two parts: write schema.procedure")]
    TooManyParts,
    #[error("has a part that is no name of PostgreSQL: write letters, digits and _, or quote it with \"…\"")]
    NotAName,
    #[error("has a quoted part that does not end: close it with \"")]
    Unclosed,
}

impl QualifiedName {
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let mut parts = Vec::new();
        let mut rest = text.trim();
        if rest.is_empty() {
            return Err(NameError::Empty);
        }
        loop {
            let (part, after) = take_part(rest)?;
            parts.push(part);
            match after.strip_prefix('.') {
                Some(after) => rest = after,
                None if after.is_empty() => break,
                None => return Err(NameError::NotAName),
            }
        }
        if parts.len() > 2 { Err(NameError::TooManyParts) } else { Ok(Self(parts)) }
    }
}

fn take_part(text: &str) -> Result<(String, &str), NameError> {
    match text.strip_prefix('"') {
        Some(quoted) => take_quoted(quoted),
        None => {
            let end = text.find('.').unwrap_or(text.len());
            let (part, after) = text.split_at(end);
            let starts_well = part.starts_with(|c: char| c.is_alphabetic() || c == '_');
            let goes_on_well = part.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '$');
            if starts_well && goes_on_well {
                Ok((part.to_lowercase(), after))
            } else {
                Err(NameError::NotAName)
            }
        }
    }
}

fn take_quoted(text: &str) -> Result<(String, &str), NameError> {
    let mut part = String::new();
    let mut characters = text.char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' if characters.peek().is_some_and(|(_, next)| *next == '"') => {
                characters.next();
                part.push('"');
            }
            '"' if part.is_empty() => return Err(NameError::NotAName),
            '"' => return Ok((part, &text[at + 1..])),
            '\0' => return Err(NameError::NotAName),
            other => part.push(other),
        }
    }
    Err(NameError::Unclosed)
}

/// A name as it can stand in any statement.
pub(super) fn quote(name: &str) -> String {
    format!("\"{}\"", name.trim_matches('"').replace('"', "\"\""))
}

impl fmt::Display for QualifiedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quoted: Vec<String> =
            self.0.iter().map(|part| format!("\"{}\"", part.replace('"', "\"\""))).collect();
        f.write_str(&quoted.join("."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_folded_and_quoted() {
        let cases = [
            ("app.derive_units", r#""app"."derive_units""#),
            ("App.Derive", r#""app"."derive""#),
            (r#""App"."odd ""name""#, r#""App"."odd ""name""#),
            ("derive", r#""derive""#),
            (r#""a.b".c"#, r#""a.b"."c""#),
        ];
        for (text, quoted) in cases {
            assert_eq!(QualifiedName::parse(text).unwrap().to_string(), quoted, "{text}");
        }
    }

    #[test]
    fn what_is_no_name_is_refused() {
        let cases = [
            ("", NameError::Empty),
            ("a.b.c", NameError::TooManyParts),
            ("a;DROP TABLE x", NameError::NotAName),
            ("a.", NameError::NotAName),
            ("1a", NameError::NotAName),
            ("\"a", NameError::Unclosed),
            ("\"\"", NameError::NotAName),
            ("f()", NameError::NotAName),
        ];
        for (text, error) in cases {
            assert_eq!(QualifiedName::parse(text), Err(error), "{text:?}");
        }
    }
}
