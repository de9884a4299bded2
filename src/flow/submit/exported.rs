//! A row as `batch export` wrote it, taken back to the input it came from.

use crate::{
    flow::input::{Format, Limits},
    json::check::one_line,
};
use serde_json::value::RawValue;
use std::collections::BTreeMap;

/// What an export adds to an input's own fields.
pub const ADDED: [&str; 7] =
    ["_line", "_state", "_attempt", "_error", "_result", "_started_at", "_run_seconds"];
/// The whole input, where it is no object of plain fields.
pub const WHOLE: &str = "_input";

/// Appends the input of a row to `out`, without what the export added. In CSV the whole input is JSON inside a field, and
/// empty in the rows that do without.
pub(super) fn append_input(
    row: &[u8],
    format: Format,
    limits: Limits,
    out: &mut Vec<u8>,
) -> Result<(), String> {
    let mut fields: BTreeMap<String, Box<RawValue>> =
        serde_json::from_slice(row).map_err(|_| "it is no object".to_owned())?;
    if !fields.contains_key("_line") {
        return Err("it has no field _line".into());
    }
    let whole = fields.remove(WHOLE).map(|whole| match format {
        Format::Csv(_) => serde_json::from_str::<String>(whole.get()).unwrap_or_default(),
        Format::Ndjson | Format::JsonArray => whole.get().to_owned(),
    });
    if let Some(whole) = whole.filter(|whole| !whole.is_empty()) {
        return append_whole(&whole, limits, out)
            .map_err(|why| format!("its {WHOLE} cannot be stored: {why}"));
    }
    ADDED.iter().for_each(|name| drop(fields.remove(*name)));
    serde_json::to_writer(out, &fields).map_err(|error| error.to_string())
}

/// The row that held it was checked as a string, which it no longer is.
fn append_whole(whole: &str, limits: Limits, out: &mut Vec<u8>) -> Result<(), String> {
    let line = one_line(whole).map_err(|refusal| refusal.to_string())?;
    let limit = limits.max_row_bytes;
    if line.expansion.saturating_add(line.text.len() as u64) > limit as u64 {
        return Err(format!("PostgreSQL would write it as more than {limit} bytes"));
    }
    out.extend_from_slice(line.text.as_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CSV: &str = "csv";
    const NDJSON: &str = "ndjson";

    fn input(format: &str, row: &str) -> Result<String, String> {
        let format = Format::guess(Some(format), b"").unwrap();
        let mut input = Vec::new();
        append_input(row.as_bytes(), format, Limits { max_row_bytes: 1000 }, &mut input)?;
        Ok(String::from_utf8(input).unwrap())
    }

    #[test]
    fn what_the_export_added_goes_and_the_rest_stays_exact() {
        let row = r#"{"name":"Ann","_line":"3","_state":"failed","_attempt":"2","_error":"x","_result":""}"#;
        assert_eq!(input(CSV, row).unwrap(), r#"{"name":"Ann"}"#);
        let row =
            r#"{"_line":3,"_state":"failed","_attempt":2,"_error":null,"_result":null,"_input":[1e2,0.10]}"#;
        assert_eq!(input(NDJSON, row).unwrap(), "[1e2,0.10]");
        assert_eq!(input(NDJSON, r#"{"_line":3,"_input":"word"}"#).unwrap(), r#""word""#);
        let row = r#"{"a":"","_line":"3","_input":"12345678901234567890"}"#;
        assert_eq!(input(CSV, row).unwrap(), "12345678901234567890");
        assert_eq!(input(CSV, r#"{"a":"b","_line":"3","_input":""}"#).unwrap(), r#"{"a":"b"}"#);
    }

    #[test]
    fn an_input_inside_a_field_is_checked_as_the_value_it_becomes() {
        let row = r#"{"_line":"1","_input":"{\n\"a\":\r\n1 }"}"#;
        assert_eq!(input(CSV, row).unwrap(), r#"{ "a":  1 }"#);
        assert!(input(CSV, r#"{"_line":"1","_input":"1e990"}"#).is_ok());
        assert!(
            input(CSV, r#"{"_line":"1","_input":"1e1000"}"#).unwrap_err().contains("more than 1000 bytes")
        );
    }

    #[test]
    fn what_is_no_export_is_refused() {
        assert!(input(CSV, r#"{"name":"Ann"}"#).unwrap_err().contains("_line"));
        assert!(input(NDJSON, "[1]").unwrap_err().contains("no object"));
        assert!(input(CSV, r#"{"_line":"1","_input":"{broken"}"#).unwrap_err().contains("_input"));
    }
}
