//! JSON arrays, rule by rule.

use super::*;

fn array(text: impl AsRef<[u8]>) -> Vec<Outcome> {
    read(text, Format::JsonArray)
}

#[test]
fn elements_may_span_lines_and_become_one_line_each() {
    let rows = array("\n[\n {\"a\":\n\r [1, \"],\\\"\"]} , 2\n,\n\"x\\\\\",null]\n\n");
    let first = "{\"a\":   [1, \"],\\\"\"]}";
    assert_eq!(rows, [row(3, first), row(4, "2"), row(6, "\"x\\\\\""), row(6, "null")]);
    assert_eq!(array("[]"), []);
    assert_eq!(array(" [ \n ] "), []);
    assert_eq!(array(""), []);
    assert_eq!(array(" \n"), []);
}

#[test]
fn what_is_not_an_array_is_refused() {
    for (text, error) in [
        ("\n {}", "line 2, column 2: a JSON array must begin with `[`"),
        ("[", "line 1, column 2: the input ends before the array's `]`"),
        ("[\n1", "line 2, column 2: the input ends before"),
        ("[\"a", "line 1, column 4: the input ends before"),
        ("[] x", "line 1, column 4: there is more after"),
        ("[]\n[]", "line 2, column 1: there is more after"),
        ("[,1]", "line 1, column 2: not JSON: expected a value"),
        ("[1}, 2]", "line 1, column 3: not JSON: expected the end of the row"),
        ("[{\"a\" 1}, 2]", "line 1, column 7: not JSON: expected `:`"),
        ("[\n{\n\"a\": tru\n}]", "line 3, column 6: not JSON: expected a value"),
    ] {
        let outcomes = array(text);
        assert_error(&outcomes, 0, error);
        assert_eq!(outcomes[1..], [Err("stopped".to_owned())], "{text}");
    }
}

#[test]
fn rows_before_the_fault_are_given_out() {
    for (text, error) in [
        ("[1,]", "line 1, column 4: not JSON: expected a value"),
        ("[1,,2]", "line 1, column 4: not JSON: expected a value"),
        ("[1,\n2", "line 2, column 2: the input ends before"),
        ("[1]]", "line 1, column 4: there is more after"),
        ("[1, 2 3]", "line 1, column 7: not JSON: expected the end of the row"),
    ] {
        let outcomes = array(text);
        assert_eq!(outcomes[0], row(1, "1"));
        assert_error(&outcomes, 1, error);
        assert_eq!(outcomes[2..], [Err("stopped".to_owned())], "{text}");
    }
}

#[test]
fn an_element_that_cannot_be_stored_does_not_end_the_array() {
    let outcomes = array(b"[1, \"\\u0000\", \"\xFF\",\n 1e400000, 2]");
    assert_eq!(outcomes[0], row(1, "1"));
    assert_error(&outcomes, 1, "line 1, column 6: PostgreSQL cannot store the character NUL");
    assert_error(&outcomes, 2, "line 1, column 16: invalid UTF-8");
    assert_error(&outcomes, 3, "line 2, column 2: PostgreSQL cannot hold this number");
    assert_eq!(outcomes[4..], [row(2, "2")]);
}

#[test]
fn an_element_over_the_limit_is_passed_by() {
    let text = format!("[1, [\"{}\\\"],\", 2], \"12345678\", \"123456789\"]", "],".repeat(100_000));
    let outcomes = read_within(text, Format::JsonArray, Limits { max_row_bytes: 10 });
    assert_eq!(outcomes[0], row(1, "1"));
    assert_error(&outcomes, 1, "line 1: the row has more than 10 bytes");
    assert_eq!(outcomes[2], row(1, "\"12345678\""));
    assert_error(&outcomes, 3, "line 1: the row has more than 10 bytes");
    assert_eq!(outcomes.len(), 4);
}
