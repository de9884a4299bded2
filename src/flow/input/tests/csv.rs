//! CSV, rule by rule.

use super::*;

fn csv(text: impl AsRef<[u8]>) -> Vec<Outcome> {
    read(text, Format::Csv(CsvOptions::default()))
}

fn dialect(text: &str, delimiter: char, quote: char) -> Vec<Outcome> {
    read(text, Format::Csv(CsvOptions::new(delimiter, quote).unwrap()))
}

#[test]
fn the_header_names_the_fields_and_every_value_is_a_string() {
    let rows = csv("id,name\n1,Ann\r\n2,\n,\"\"");
    let want = [
        row(2, r#"{"id":"1","name":"Ann"}"#),
        row(3, r#"{"id":"2","name":""}"#),
        row(4, r#"{"id":"","name":""}"#),
    ];
    assert_eq!(rows, want);
    assert_eq!(csv("id,name\n"), [], "a header alone is an empty batch");
    assert_eq!(csv("id,name"), []);
}

#[test]
fn quotes_hold_delimiters_line_ends_and_quotes() {
    let rows = csv("a,\"b\"\"c\"\n\"x,\ny\",\"\"\"q\"\"\"\r\n\"1\r\n2\",3\n4,5\" pipe\n");
    assert_eq!(rows[0], row(2, r#"{"a":"x,\ny","b\"c":"\"q\""}"#));
    assert_eq!(rows[1], row(4, r#"{"a":"1\r\n2","b\"c":"3"}"#), "lines are those of the source");
    assert_eq!(rows[2], row(6, r#"{"a":"4","b\"c":"5\" pipe"}"#), "a quote inside a plain field is text");
}

#[test]
fn control_characters_and_backslashes_are_escaped() {
    assert_eq!(csv("a\n\t\u{1b}\\n\u{7f}\n"), [row(2, "{\"a\":\"\\t\\u001b\\\\n\u{7f}\"}")]);
}

#[test]
fn other_dialects() {
    assert_eq!(dialect("a;b\n1,5;'x;''y\"'\n", ';', '\''), [row(2, r#"{"a":"1,5","b":"x;'y\""}"#)]);
    assert_eq!(dialect("a\tb\n\t \n", '\t', '"'), [row(2, r#"{"a":"","b":" "}"#)]);
}

#[test]
fn blank_lines_are_no_rows() {
    assert_eq!(csv("\r\n\na\n\n1\n\r\n\"\"\n\n"), [row(5, r#"{"a":"1"}"#), row(7, r#"{"a":""}"#)]);
}

#[test]
fn an_empty_source_has_no_rows() {
    for text in ["", "\n\r\n\n", "\u{feff}", "a,b\n"] {
        assert_eq!(csv(text), [], "{text:?}");
    }
}

#[test]
fn a_bad_header_stops_the_reading() {
    for (text, error) in [
        ("a,,b\n1,2,3\n", "line 1: column 2 of the header has no name"),
        ("a, \n1,2\n", "line 1: column 2 of the header has no name"),
        ("\na,b,a\n1,2,3\n", "line 2: columns 1 and 3 of the header are both called \"a\""),
        ("a,b\"\"c,\"b\"\"\"\"c\"\n", "line 1: columns 2 and 3 of the header are both called \"b\\\"\\\"c\""),
        ("a\rb\r1\r", "line 1, column 2: a carriage return without a line feed"),
        ("a,b\0\n", "line 1, column 4: PostgreSQL cannot store the character NUL"),
        ("a,\"b\n", "line 1, column 3: this quote is never closed"),
    ] {
        let outcomes = csv(text);
        assert_error(&outcomes, 0, error);
        assert_eq!(outcomes[1..], [Err("stopped".to_owned())], "{text:?}");
    }
    assert_error(&csv(b"a,\xFF\n1,2\n"), 0, "line 1, column 3: invalid UTF-8");
}

#[test]
fn a_bad_record_is_refused_and_the_next_one_is_read() {
    let text = b"a,b\n1\n1,2,3\n\"x\"y,2\nok,\n\xC3\xA5,z\xFF\n1,\0\nq\rr,1\n\"\r\",\"\"\rx\nok,\"\n";
    let outcomes = csv(text);
    for (index, error) in [
        (0, "line 2: 1 fields where the header has 2"),
        (1, "line 3: 3 fields where the header has 2"),
        (2, "line 4, column 4: text after a closing quote"),
        (4, "line 6, column 4, field \"b\": invalid UTF-8"),
        (5, "line 7, column 3, field \"b\": PostgreSQL cannot store the character NUL"),
        (6, "line 8, column 2, field \"a\": a carriage return without a line feed"),
        (7, "line 9, column 8: text after a closing quote"),
        (8, "line 10, column 4: this quote is never closed"),
    ] {
        assert_error(&outcomes, index, error);
    }
    assert_eq!(outcomes[3], row(5, r#"{"a":"ok","b":""}"#));
    assert_eq!(outcomes.len(), 9);
}

#[test]
fn a_row_over_the_limit_is_passed_by() {
    let long = "\"\"x,\n".repeat(50_000);
    let text = format!("a\n1\n\"{long}\"\n12345678901\n123456789012\n1\n");
    let outcomes = read_within(text, Format::Csv(CsvOptions::default()), Limits { max_row_bytes: 20 });
    assert_eq!(outcomes[0], row(2, r#"{"a":"1"}"#));
    assert_error(&outcomes, 1, "line 3: the row has more than 20 bytes");
    assert_eq!(outcomes[2], row(50_004, r#"{"a":"12345678901"}"#), "PostgreSQL's JSON is what is measured");
    assert_error(&outcomes, 3, "line 50005: PostgreSQL would write the row as more than 20 bytes");
    assert_eq!(outcomes[4..], [row(50_006, r#"{"a":"1"}"#)]);
}
