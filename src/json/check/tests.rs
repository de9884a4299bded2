//! The line that a value becomes, and what PostgreSQL makes of its size.

use std::borrow::Cow;

use super::*;

fn text(text: &str) -> Cow<'_, str> {
    one_line(text).unwrap().text
}

#[test]
fn a_value_that_is_one_line_is_not_copied() {
    for value in ["1", "\"a\\nb\"", "{\"a\": [1, null]}", " {} ", "\n[1,\t2]\r\n"] {
        assert!(matches!(text(value), Cow::Borrowed(line) if line == value.trim()), "{value:?}");
    }
}

#[test]
fn line_ends_between_tokens_become_spaces() {
    assert_eq!(text("{\r\n\"a\"\n:\r1}\n"), "{  \"a\" : 1}");
    assert_eq!(text("[\n1\n]"), "[ 1 ]");
}

#[test]
fn a_refusal_names_the_byte_of_the_text_as_given() {
    let refusal = one_line("\n [1,]").unwrap_err();
    assert_eq!((refusal.offset, refusal.fault), (5, Fault::Expected("a value")));
    assert_eq!(one_line(" \n").unwrap_err().fault, Fault::Expected("a value"));
}

#[test]
fn the_expansion_is_what_postgresql_adds() {
    for (value, expansion) in [
        ("1", 0),
        ("[1,2,3]", 2),
        ("{\"a\":1,\"b\":[2,3]}", 4),
        ("[1, 2, 3]", 0),
        ("  [1,2,3]  ", 2),
        ("[1,   2,3]", 0),
        ("[1,2e5]", 1 + 3),
        ("\"1,2:3\"", 0),
    ] {
        assert_eq!(one_line(value).unwrap().expansion, expansion, "{value}");
    }
    assert_eq!(check("  [1,2,3]  "), Ok(0), "it fits in the text as given");
}

#[test]
fn what_no_limit_would_stop_is_refused_for_its_size() {
    let strings = |len: usize| format!("\"{}\"", "x".repeat(len - 2));
    assert!(one_line(&strings(LARGEST)).is_ok());
    assert_eq!(one_line(&strings(LARGEST + 1)).unwrap_err().fault, Fault::Size);
    // 256 times 131072 digits; two more bytes for every comma, and those of the brackets, pass it.
    let digits = |count: usize| format!("[{}]", vec!["1e131071"; count].join(","));
    assert!(check(&digits(255)).is_ok());
    assert_eq!(check(&digits(256)).unwrap_err().fault, Fault::Size);
}
