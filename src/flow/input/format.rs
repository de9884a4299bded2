//! What a source is written in: said by the user, or guessed from its name and its first bytes.

use super::InputError;
use super::source::BOM;

/// How the rows of a source are written down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A header row, then one record per row: a JSON object of strings.
    Csv(CsvOptions),
    /// One JSON value per line; blank lines are skipped and are no rows.
    Ndjson,
    /// One JSON array, whose elements are the rows.
    JsonArray,
}

/// The two characters that make a CSV dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CsvOptions {
    delimiter: u8,
    quote: u8,
}

impl Default for CsvOptions {
    fn default() -> Self {
        Self { delimiter: b',', quote: b'"' }
    }
}

impl CsvOptions {
    /// One of the two, as people write it: a tab may be `\t`.
    pub fn character(text: &str) -> Result<char, String> {
        let text = if text == "\\t" { "\t" } else { text };
        let mut characters = text.chars();
        match (characters.next(), characters.next()) {
            (Some(one), None) => Ok(one),
            _ => Err("must be one character (\\t for a tab)".into()),
        }
    }

    /// Accepts two different ASCII characters that are not line ends.
    pub fn new(delimiter: char, quote: char) -> Result<Self, InputError> {
        let delimiter_byte = dialect_byte(delimiter)?;
        let quote_byte = dialect_byte(quote)?;
        if delimiter_byte == quote_byte {
            return Err(InputError::CsvOptions(quote));
        }
        Ok(Self { delimiter: delimiter_byte, quote: quote_byte })
    }

    pub fn delimiter(self) -> u8 {
        self.delimiter
    }

    pub fn quote(self) -> u8 {
        self.quote
    }

    /// The common dialect whose delimiter is the most frequent in the header; a comma when there is none.
    fn guess(head: &[u8]) -> Self {
        let counts = delimiter_counts(head);
        let most = counts.iter().map(|(_, count)| *count).max().unwrap_or(0);
        let found = counts.iter().find(|(_, count)| *count == most);
        Self { delimiter: found.map_or(b',', |(delimiter, _)| *delimiter), ..Self::default() }
    }
}

fn dialect_byte(character: char) -> Result<u8, InputError> {
    match u8::try_from(character) {
        Ok(byte) if byte.is_ascii() && !matches!(byte, b'\n' | b'\r' | 0) => Ok(byte),
        _ => Err(InputError::CsvOptions(character)),
    }
}

impl Format {
    /// The format that a file's extension and its first bytes speak for; `None` when they do not say.
    ///
    /// A kilobyte of `head` is enough. Extensions decide where they can; the bytes choose the CSV
    /// delimiter, distinguish an array from lines in a `.json` file, and decide alone for standard input.
    pub fn guess(extension: Option<&str>, head: &[u8]) -> Option<Self> {
        let head = head.strip_prefix(BOM).unwrap_or(head);
        let first = head.iter().copied().find(|byte| !byte.is_ascii_whitespace());
        let extension = extension.map(str::to_ascii_lowercase);
        match (extension.as_deref(), first) {
            (Some("csv"), _) => Some(Self::Csv(CsvOptions::guess(head))),
            (Some("tsv" | "tab"), _) => {
                Some(Self::Csv(CsvOptions { delimiter: b'\t', ..CsvOptions::default() }))
            }
            (Some("ndjson" | "jsonl"), _) => Some(Self::Ndjson),
            (_, Some(b'[')) => Some(Self::JsonArray),
            (_, Some(b'{')) | (Some("json"), Some(_)) => Some(Self::Ndjson),
            // An object or an array it is not; a delimiter outside quotes is no JSON at all.
            _ if delimiter_counts(head).iter().any(|(_, count)| *count > 0) => {
                Some(Self::Csv(CsvOptions::guess(head)))
            }
            _ => None,
        }
    }
}

/// How often each common delimiter stands in the first line, outside quotes; preferred ones first.
fn delimiter_counts(head: &[u8]) -> [(u8, usize); 3] {
    let mut counts = [(b',', 0), (b';', 0), (b'\t', 0)];
    let mut quoted = false;
    for byte in head {
        match byte {
            b'"' => quoted = !quoted,
            b'\n' if !quoted => break,
            _ if quoted => {}
            _ => counts
                .iter_mut()
                .filter(|(delimiter, _)| delimiter == byte)
                .for_each(|(_, count)| *count += 1),
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn csv(delimiter: char) -> Option<Format> {
        Some(Format::Csv(CsvOptions::new(delimiter, '"').unwrap()))
    }

    #[test]
    fn the_extension_decides_where_it_can() {
        assert_eq!(Format::guess(Some("CSV"), b"a\n"), csv(','));
        assert_eq!(Format::guess(Some("tsv"), b"a,b\n"), csv('\t'));
        assert_eq!(Format::guess(Some("jsonl"), b"[1]\n[2]\n"), Some(Format::Ndjson));
        assert_eq!(Format::guess(Some("ndjson"), b""), Some(Format::Ndjson));
        assert_eq!(Format::guess(Some("json"), b"\n [1]"), Some(Format::JsonArray));
        assert_eq!(Format::guess(Some("json"), b"1\n2\n"), Some(Format::Ndjson));
    }

    #[test]
    fn the_header_chooses_the_delimiter() {
        assert_eq!(Format::guess(Some("csv"), b"a;b;c\n1,5;2,5;3\n"), csv(';'));
        assert_eq!(Format::guess(Some("csv"), b"a\tb\n"), csv('\t'));
        assert_eq!(
            Format::guess(Some("csv"), b"\"a;b;c\",d\n"),
            csv(','),
            "delimiters in quotes do not count"
        );
    }

    #[test]
    fn the_first_bytes_decide_alone() {
        assert_eq!(Format::guess(None, b"\xEF\xBB\xBF [1]"), Some(Format::JsonArray));
        assert_eq!(Format::guess(Some("txt"), b"{\"a\":1}\n"), Some(Format::Ndjson));
        assert_eq!(Format::guess(None, b"\"id\",name\n"), csv(','));
        assert_eq!(Format::guess(None, b"\"one, two\"\n"), None, "a JSON string, or a CSV of one column");
        assert_eq!(Format::guess(None, b""), None);
    }

    #[test]
    fn a_dialect_that_cannot_be_read_is_refused() {
        for (delimiter, quote) in [('"', '"'), ('\n', '"'), (',', '\r'), ('→', '"'), (',', '\0')] {
            assert!(matches!(CsvOptions::new(delimiter, quote), Err(InputError::CsvOptions(_))));
        }
    }
}
