//! NDJSON, rule by rule.

use super::*;

fn lines(text: impl AsRef<[u8]>) -> Vec<Outcome> {
    read(text, Format::Ndjson)
}

#[test]
fn any_json_value_is_a_row() {
    let rows = lines("{\"a\": 1}\n[1,2]\r\n\"text\"\n  -1.5e3\t\nnull");
    assert_eq!(
        rows,
        [row(1, "{\"a\": 1}"), row(2, "[1,2]"), row(3, "\"text\""), row(4, "-1.5e3"), row(5, "null")]
    );
}

#[test]
fn blank_lines_are_no_rows_and_still_count_as_lines() {
    assert_eq!(lines("\n1\n \t\r\n\n2\n\n"), [row(2, "1"), row(5, "2")]);
    assert_eq!(lines(""), []);
    assert_eq!(lines("\n\n"), []);
}

#[test]
fn what_is_not_json_has_a_line_and_a_column_and_the_next_line_is_read() {
    let outcomes = lines("1\n  {\"å\": x}\n2\n[1,]\n3 4\n");
    assert_eq!(outcomes[0], row(1, "1"));
    assert_error(&outcomes, 1, "line 2, column 9: not JSON: expected a value");
    assert_eq!(outcomes[2], row(3, "2"));
    assert_error(&outcomes, 3, "line 4, column 4: not JSON: expected a value");
    assert_error(&outcomes, 4, "line 5, column 3: not JSON: expected the end of the row");
}

#[test]
fn a_row_may_not_span_lines() {
    let outcomes = lines("{\"a\":\n1}\n");
    assert_error(&outcomes, 0, "line 1, column 6: not JSON: expected a value");
    assert_error(&outcomes, 1, "line 2, column 2: not JSON: expected the end of the row");
}

#[test]
fn a_carriage_return_between_tokens_becomes_a_space() {
    assert_eq!(lines("[1,\r2]\r\n\r{\r}\n"), [row(1, "[1, 2]"), row(2, "{ }")]);
}

#[test]
fn the_spaces_that_postgresql_writes_count_and_those_it_leaves_out_do_not() {
    let within = |text: &str| read_within(text, Format::Ndjson, Limits { max_row_bytes: 16 });
    assert_eq!(within(r#"{"a": 1, "b": 2}"#), [row(1, r#"{"a": 1, "b": 2}"#)]);
    assert_eq!(within(r#"{"a":1,"b":2}"#), [row(1, r#"{"a":1,"b":2}"#)]);
    assert_eq!(within("[1,2,3,4,      5]").len(), 1);
    assert_error(&within("[1,2,3,4,      5]"), 0, "line 1: the row has more than 16 bytes");
    assert_error(
        &within(r#"{"a":1,"b":22}"#),
        0,
        "line 1: PostgreSQL would write the row as more than 16 bytes",
    );
}

#[test]
fn broken_utf_8_is_refused_at_its_place() {
    let outcomes = lines(b"1\n\"\xC3\xA5\xFF\"\n\"\xED\xA0\x80\"\n2\n");
    assert_error(&outcomes, 1, "line 2, column 3: invalid UTF-8");
    assert_error(&outcomes, 2, "line 3, column 2: invalid UTF-8");
    assert_eq!(outcomes[3], row(4, "2"));
}

#[test]
fn what_cannot_be_stored_says_so() {
    let outcomes = lines("{\"a\\u0000b\": 1}\n\"\\ud83d\"\n1e400000\n\"a\0b\"\n");
    assert_error(&outcomes, 0, "line 1, column 4: PostgreSQL cannot store the character NUL");
    assert_error(&outcomes, 1, "line 2, column 2: half of a surrogate pair");
    assert_error(&outcomes, 2, "line 3, column 1: PostgreSQL cannot hold this number");
    assert_error(&outcomes, 3, "line 4, column 3: PostgreSQL cannot store the character NUL");
}

#[test]
fn a_row_over_the_limit_is_passed_by() {
    let limits = Limits { max_row_bytes: 10 };
    let text = format!("\"12345678\"\r\n\"123456789\"\n\"{}\"\n1\n\"{}", "x".repeat(200_000), "y".repeat(99));
    let outcomes = read_within(text, Format::Ndjson, limits);
    assert_eq!(
        outcomes[0],
        row(1, "\"12345678\""),
        "the limit itself is allowed, its line end does not count"
    );
    assert_error(&outcomes, 1, "line 2: the row has more than 10 bytes");
    assert_error(&outcomes, 2, "line 3: the row has more than 10 bytes");
    assert_eq!(outcomes[3], row(4, "1"));
    assert_error(&outcomes, 4, "line 5: the row has more than 10 bytes");
}

#[test]
fn a_row_that_postgresql_could_not_write_out_again_is_refused() {
    let few = format!("[{}]", ["1e131071"; 7].join(","));
    let many = format!("[{}]", ["1e131071"; 8].join(","));
    let outcomes = lines(format!("{few}\n{many}\n"));
    assert_eq!(outcomes[0], row(1, &few));
    assert_error(&outcomes, 1, "line 2: PostgreSQL would write the row as more than 1048576 bytes");
}
