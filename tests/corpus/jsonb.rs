//! JSON texts and what PostgreSQL 15 says to each as jsonb, asked of a real server; the live suite asks again.

/// What becomes of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// PostgreSQL stores it, and so do we.
    Stored,
    /// PostgreSQL refuses it, and so do we.
    Refused,
    /// PostgreSQL would store it; we refuse it because those who read it later could not.
    OursAlone,
}

use Verdict::{OursAlone, Refused, Stored};

/// A text as pieces, each repeated; so that long ones stay short here.
pub(crate) type Pieces = &'static [(&'static str, usize)];

pub(crate) fn text(pieces: Pieces) -> String {
    pieces.iter().map(|(piece, times)| piece.repeat(*times)).collect()
}

/// Texts that need no repeating.
pub(crate) const SHORT: &[(Verdict, &[&str])] = &[
    // Values, and whitespace around them.
    (Stored, &["null", "true", "false", "0", "\"\"", "[]", "{}", " \t\r\n1 \t\r\n", "[ ]", "{ }", "[1 , 2]"]),
    (
        Stored,
        &[
            "{\"a\" : 1 , \"a\" : 2}",
            "{\"\":{}}",
            "[[],{},[{}]]",
            "\"å→😀\u{7f}\u{80}\u{2028}\u{ffff}\u{10ffff}\"",
        ],
    ),
    (
        Refused,
        &["", " ", "nul", "nulll", "True", "NULL", "undefined", "NaN", "Infinity", "-Infinity", "'a'", "a"],
    ),
    (
        Refused,
        &[
            "\u{a0}1",
            "\u{feff}1",
            "1\u{0c}",
            "\u{0b}1",
            "1 2",
            "1,",
            ",1",
            "[1]]",
            "{}{}",
            "// x\n1",
            "/**/1",
            "1;",
        ],
    ),
    // Arrays and objects.
    (
        Refused,
        &["[", "]", "[1", "[1,", "[1,]", "[,1]", "[,]", "[1 2]", "[1;2]", "[1}", "[1,,2]", "{", "}", "{]"],
    ),
    (
        Refused,
        &[
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1",
            "{\"a\":1,",
            "{\"a\":1,}",
            "{\"a\" 1}",
            "{a:1}",
            "{1:1}",
            "{'a':1}",
        ],
    ),
    (
        Refused,
        &[
            "{:1}",
            "{,}",
            "{\"a\":1 \"b\":2}",
            "{\"a\":1;\"b\":2}",
            "{\"a\"::1}",
            "{null:1}",
            "{[]:1}",
            "{\"a\":1]",
        ],
    ),
    // Strings.
    (
        Stored,
        &[
            r#""\"\\\/\b\f\n\r\t""#,
            r#""\u0001\u001f\u007f\uFFFF\uffff\uAbCd""#,
            r#""\ud83d\ude00""#,
            r#""\uD83D\uDE00x""#,
        ],
    ),
    (Stored, &[r#""\\u0000""#, r#""\u0001""#, r#"{"\u0041":1}"#, r#""\udbff\udfff""#, r#""\ud800\udc00""#]),
    (
        Refused,
        &[
            "\"",
            "\"a",
            "\"a\\\"",
            "\"\\",
            "\"\\\"",
            r#""\a""#,
            r#""\x41""#,
            r#""\'""#,
            r#""\0""#,
            r#""\U0041""#,
        ],
    ),
    (
        Refused,
        &["\"a\nb\"", "\"a\tb\"", "\"\u{1}\"", "\"\u{1f}\"", "\"\u{8}\"", "{\"a\rb\":1}", "\"a\"b", "a\"b\""],
    ),
    (
        Refused,
        &[
            r#""\u""#,
            r#""\u1""#,
            r#""\u12""#,
            r#""\u123""#,
            r#""\u123g""#,
            r#""\u+123""#,
            r#""\u 123""#,
            r#""\u-001""#,
        ],
    ),
    (Refused, &[r#""\u0000""#, r#""a\u0000b""#, r#"{"\u0000":1}"#, r#"{"a":["\u0000"]}"#]),
    (
        Refused,
        &[
            r#""\ud800""#,
            r#""\udbff""#,
            r#""\udc00""#,
            r#""\udfff""#,
            r#""\ud800x""#,
            r#""\ud800\n""#,
            r#""\ud800\u0041""#,
        ],
    ),
    (
        Refused,
        &[
            r#""\ud800\ud800""#,
            r#""\ud800\ud800\udc00""#,
            r#""\udc00\ud800""#,
            r#""\ud800\\udc00""#,
            r#""\ud83d\ude""#,
        ],
    ),
    (Refused, &[r#"{"\ud800":1}"#, r#"{"a\udc00":1}"#]),
    // Numbers, as they are written.
    (
        Stored,
        &[
            "-0", "-0.0", "10", "-10.01", "1e5", "1E5", "1e+5", "1e-5", "0e0", "0E-0", "1e005", "0.10",
            "[0,-1]",
        ],
    ),
    (
        Refused,
        &[
            "01", "-01", "00", "0.", ".5", "-.5", "1.", "1.e5", "+1", "--1", "-", "+", "1e", "1e+", "1e-",
            "e5",
        ],
    ),
    (
        Refused,
        &[
            "1e5.5", "1ee5", "1.2.3", "0x10", "1_000", "1a", "1.5f", "- 1", "1 .5", "1e 5", "１", "-a",
            "[-]", "1-2",
        ],
    ),
    // Numbers, and what numeric holds.
    (
        Stored,
        &["1e131071", "-1e131071", "1e+131071", "9.99e131071", "10e131070", "0.001e131074", "0.1e131072"],
    ),
    (
        Refused,
        &["1e131072", "-1e131072", "10e131071", "100e131070", "0.001e131075", "0.1e131073", "1e400000"],
    ),
    (Stored, &["1e-16383", "-1e-16383", "1.5e-16382", "0.1e-16382", "0e-16383", "0.0e-16382", "-0e-16383"]),
    (
        Refused,
        &[
            "1e-16384",
            "1.5e-16383",
            "0.1e-16383",
            "10e-16384",
            "0e-16384",
            "0.0e-16383",
            "1e-400000",
            "0e-400000",
        ],
    ),
    (
        Stored,
        &["0e131072", "0e400000", "-0e400000", "0.000e400000", "0e1073741822", "1e00000000000000000001"],
    ),
    (
        Refused,
        &[
            "0e1073741823",
            "0e-1073741823",
            "0e2147483648",
            "0e4294967296",
            "1e4294967296",
            "0e9223372036854775808",
        ],
    ),
    (
        Refused,
        &[
            "0e18446744073709551616",
            "1e18446744073709551617",
            "1e-18446744073709551617",
            "[1,1e400000]",
            "{\"a\":1e400000}",
        ],
    ),
];

pub(crate) const LONG: &[(Verdict, Pieces)] = &[
    (Stored, &[("9", 131_072)]),
    (Refused, &[("9", 131_073)]),
    (Stored, &[("-", 1), ("9", 131_072), (".", 1), ("9", 16_383)]),
    (Stored, &[("0.", 1), ("1", 16_383)]),
    (Refused, &[("0.", 1), ("1", 16_384)]),
    (Refused, &[("0.", 1), ("0", 16_384)]),
    (Refused, &[("1.", 1), ("0", 16_384)]),
    (Stored, &[("1.", 1), ("0", 16_384), ("e1", 1)]),
    (Stored, &[("0.", 1), ("0", 20_000), ("1e20001", 1)]),
    (Stored, &[("0.", 1), ("0", 20_000), ("1e151072", 1)]),
    (Stored, &[("0.", 1), ("0", 20_000), ("1e151072", 1), (" ", 3)]),
    (Refused, &[("0.", 1), ("0", 20_000), ("1e151073", 1)]),
    (Stored, &[("9", 131_073), ("e-1", 1)]),
    (Stored, &[("9", 140_000), ("e-16383", 1)]),
    (Refused, &[("9", 140_000), ("e-16384", 1)]),
    (Stored, &[("1e", 1), ("0", 1_000), ("5", 1)]),
    (Stored, &[("\"", 1), ("x", 500_000), ("\"", 1)]),
    (Stored, &[("{\"", 1), ("k", 500_000), ("\":1}", 1)]),
    (Stored, &[("[", 100), ("]", 100)]),
    (Stored, &[("{\"a\":", 100), ("1", 1), ("}", 100)]),
    (Stored, &[("[{\"a\":", 50), ("null", 1), ("}]", 50)]),
    (Stored, &[("[", 1), ("[[]],", 1_000), ("1]", 1)]),
    (OursAlone, &[("[", 101), ("]", 101)]),
    (OursAlone, &[("{\"a\":", 101), ("1", 1), ("}", 101)]),
    (OursAlone, &[("[", 6_000), ("]", 6_000)]),
    (Refused, &[("[", 20_000), ("]", 20_000)]),
    (Refused, &[("{\"a\":", 20_000), ("1", 1), ("}", 20_000)]),
    (Refused, &[("[", 100), ("]", 99)]),
    (Refused, &[("[", 100), ("]", 99), ("}", 1)]),
];

/// Every text with its verdict.
pub(crate) fn cases() -> impl Iterator<Item = (Verdict, String)> {
    let short =
        SHORT.iter().flat_map(|(verdict, texts)| texts.iter().map(|text| (*verdict, (*text).to_owned())));
    short.chain(LONG.iter().map(|(verdict, pieces)| (*verdict, text(pieces))))
}
