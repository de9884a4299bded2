//! What holds for every source: what was written is read back, and nothing makes the reader panic or run on for ever.

use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn text() -> impl Strategy<Value = String> {
    "[^\u{0}]{0,12}"
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1_000_000_i32..1_000_000).prop_map(|n| Value::from(f64::from(n) / 64.0)),
        text().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((text(), inner), 0..5)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

fn blank() -> impl Strategy<Value = String> {
    "[ \t\r\n]{0,3}"
}

/// What was read, parsed again by another reader.
fn values(outcomes: Vec<Outcome>) -> Vec<Value> {
    outcomes.into_iter().map(|outcome| serde_json::from_str(&outcome.unwrap().1).unwrap()).collect()
}

fn delimiters() -> impl Strategy<Value = (char, char)> {
    prop::sample::select(vec![(',', '"'), (';', '"'), ('\t', '"'), (',', '\''), ('|', '\\')])
}

proptest! {
    #[test]
    fn ndjson_is_read_back(rows in prop::collection::vec((value(), "[ \t]{0,3}", "(\r?\n){1,2}"), 0..12)) {
        let source: String = rows.iter().map(|(value, blank, end)| format!("{blank}{value}{blank}{end}")).collect();
        let written: Vec<Value> = rows.into_iter().map(|(value, ..)| value).collect();
        prop_assert_eq!(values(read(source, Format::Ndjson)), written);
    }

    #[test]
    fn an_array_is_read_back(rows in prop::collection::vec((value(), blank(), any::<bool>()), 0..12), blank in blank()) {
        let elements: Vec<String> = rows.iter().map(|(value, blank, pretty)| {
            let text = if *pretty { serde_json::to_string_pretty(value).unwrap() } else { value.to_string() };
            format!("{blank}{text}{blank}")
        }).collect();
        let source = format!("{blank}[{blank}{}]{blank}", elements.join(","));
        let written: Vec<Value> = rows.into_iter().map(|(value, ..)| value).collect();
        prop_assert_eq!(values(read(source, Format::JsonArray)), written);
    }

    #[test]
    fn csv_is_read_back(
        records in (1_usize..5).prop_flat_map(|columns| prop::collection::vec(prop::collection::vec(text(), columns), 0..8)),
        (delimiter, quote) in delimiters(),
        crlf in any::<bool>(),
    ) {
        let columns = records.first().map_or(1, Vec::len);
        let names: Vec<String> = (0..columns).map(|column| format!("c{column}{delimiter}{quote}\n")).collect();
        let end = if crlf { ::csv::Terminator::CRLF } else { ::csv::Terminator::Any(b'\n') };
        let mut writer = ::csv::WriterBuilder::new()
            .delimiter(delimiter as u8).quote(quote as u8).terminator(end).from_writer(Vec::new());
        writer.write_record(&names).unwrap();
        records.iter().for_each(|record| writer.write_record(record).unwrap());
        let source = writer.into_inner().unwrap();

        let written: Vec<Value> = records.iter().map(|record| {
            Value::Object(names.iter().cloned().zip(record.iter().cloned().map(Value::from)).collect())
        }).collect();
        prop_assert_eq!(values(read(source, Format::Csv(CsvOptions::new(delimiter, quote).unwrap()))), written);
    }

    /// The check accepts nothing that another strict reader refuses, and what it refuses as syntax the other refuses too.
    #[test]
    fn soup_of_json_characters_is_judged_as_serde_judges_it(soup in "[\\[\\]{}:,\" \n\t0-2eE.+tfn\\\\u\u{1}å-]{0,12}") {
        let theirs = serde_json::from_str::<&serde_json::value::RawValue>(&soup).is_ok();
        match check(&soup) {
            Ok(_) => prop_assert!(theirs, "{soup:?}"),
            Err(refusal) if refusal.fault.is_syntax() => prop_assert!(!theirs, "{soup:?}: {refusal:?}"),
            Err(_) => {}
        }
    }

    /// Whatever stands between the tokens, the line is the same value and has no line end.
    #[test]
    fn one_line_is_the_same_value(value in value(), blank in blank(), pretty in any::<bool>()) {
        let text = if pretty { serde_json::to_string_pretty(&value).unwrap() } else { value.to_string() };
        let given = format!("{blank}{text}{blank}");
        let line = one_line(&given).unwrap();
        prop_assert!(!line.text.contains(['\n', '\r']));
        prop_assert_eq!(line.text.len(), text.len());
        prop_assert_eq!(serde_json::from_str::<Value>(&line.text).unwrap(), value);
    }

    #[test]
    fn a_damaged_value_is_judged_as_serde_judges_it(value in value(), at in any::<prop::sample::Index>(), with in "[\\[\\]{}:,\" 0e.-]{0,1}") {
        let mut damaged: Vec<char> = value.to_string().chars().collect();
        let at = at.index(damaged.len());
        damaged.splice(at..=at, with.chars());
        let damaged: String = damaged.into_iter().collect();
        let theirs = serde_json::from_str::<&serde_json::value::RawValue>(&damaged).is_ok();
        let ours = check(&damaged);
        let refused = matches!(ours, Err(refusal) if refusal.fault.is_syntax());
        prop_assert_eq!(!refused, theirs, "{:?}: {:?}", damaged, ours);
    }

    /// That it returns at all is the property; how it is handed out makes no difference either, and `read` compares.
    #[test]
    fn byte_soup_never_panics_and_always_ends(
        soup in prop::collection::vec(prop_oneof![
            any::<u8>(), prop::sample::select(&b"[]{}:,\"\\\r\n \t0123456789eE.-+untrfalse;'"[..]),
        ], 0..200),
        limit in prop::sample::select(vec![0_usize, 1, 5, 30, 1000]),
    ) {
        for format in [Format::Ndjson, Format::JsonArray, Format::Csv(CsvOptions::default())] {
            let outcomes = read_within(&soup, format, Limits { max_row_bytes: limit });
            prop_assert!(outcomes.len() <= soup.len() + 2);
            for (line, row) in outcomes.into_iter().flatten() {
                prop_assert!(row.len() <= limit && line >= 1 && !row.contains(['\n', '\r']));
                serde_json::from_str::<&serde_json::value::RawValue>(&row).unwrap();
            }
        }
        Format::guess(None, &soup);
    }

    #[test]
    fn the_search_for_special_bytes_finds_the_first(bytes in prop::collection::vec(any::<u8>(), 0..40), from in 0_usize..40) {
        let from = from.min(bytes.len());
        let first = bytes[from..].iter().position(|byte| *byte < 0x20 || matches!(byte, b'"' | b'\\'));
        prop_assert_eq!(special::find_special(&bytes, from), first.map_or(bytes.len(), |found| from + found));
    }
}
