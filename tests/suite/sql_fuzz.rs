//! Thousands of random texts, judged by our check and by the live server. What the check accepts, the server casts to jsonb
//! and writes within the size that the check promised; what the check refuses, the server refuses too, unless it is too deep
//! only for us.

use musterd::json::check::{Fault, check, one_line};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::suite::sql_corpus::{is_nought, takes_every_nought};
use crate::suite::support::database::TestDb;

/// Numbers around what numeric holds, among ordinary ones.
fn number() -> impl Strategy<Value = String> {
    let exponents = prop_oneof![
        8 => -30_i64..30,
        1 => 131_060_i64..131_080,
        1 => -16_390_i64..-16_370,
        1 => prop::sample::select(vec![1_073_741_822, 1_073_741_823, -1_073_741_823, i64::MAX]),
    ];
    let mantissa = "-?(0|[1-9][0-9]{0,5})(\\.[0-9]{1,5})?";
    prop_oneof![
        3 => mantissa.prop_map(|number| number),
        2 => (mantissa, "[eE]\\+?", exponents).prop_map(|(number, e, exponent)| {
            let e = if exponent < 0 { &e[..1] } else { &e };
            format!("{number}{e}{exponent}")
        }),
        1 => "[-+]?[0-9]{0,3}\\.?[0-9]{0,2}[eE]?[-+]?[0-9]{0,3}".prop_map(|number| number),
    ]
}

fn string() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        20 => "[^\u{0}-\u{1f}\"\\\\]{0,6}".prop_map(|text| text),
        6 => "\\\\[\"\\\\/bfnrt]".prop_map(|text| text),
        3 => "\\\\u[0-9a-fA-F]{4}".prop_map(|text| text),
        2 => Just(r"\ud83d\ude00".to_owned()),
        1 => "\\\\ud[89a-f][0-9]{2}(\\\\ud[89a-f][0-9]{2})?".prop_map(|text| text),
        1 => prop::sample::select(vec![r"\u0000", r"\u001f", "\u{7f}", "\u{2028}", "\t", "\n", r"\x", r"\u12"])
            .prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 0..4).prop_map(|pieces| format!("\"{}\"", pieces.concat()))
}

fn blank() -> impl Strategy<Value = String> {
    prop_oneof![6 => Just(String::new()), 1 => "[ \t\r\n]{1,3}".prop_map(|blank| blank)]
}

fn text() -> impl Strategy<Value = String> {
    let literals = prop::sample::select(vec!["null", "true", "false"]).prop_map(str::to_owned);
    let leaf = prop_oneof![3 => number(), 3 => string(), 1 => literals];
    let value = leaf.prop_recursive(5, 30, 5, |inner| {
        let spaced = (blank(), inner, blank())
            .prop_map(|(before, text, after)| format!("{before}{text}{after}"))
            .boxed();
        let pair = (blank(), string(), blank(), spaced.clone())
            .prop_map(|(before, key, after, value)| format!("{before}{key}{after}:{value}"));
        prop_oneof![
            prop::collection::vec(spaced, 0..5).prop_map(|items| format!("[{}]", items.join(","))),
            prop::collection::vec(pair, 0..5).prop_map(|pairs| format!("{{{}}}", pairs.join(","))),
        ]
    });
    (blank(), value, blank()).prop_map(|(before, text, after)| format!("{before}{text}{after}"))
}

/// One character taken out or replaced, now and then.
fn damaged() -> impl Strategy<Value = String> {
    let with = prop_oneof![3 => Just(None), 1 => "[\\[\\]{}:,\"\\\\ 0e.\u{1}\u{a0}-]{0,1}".prop_map(Some)];
    (text(), any::<prop::sample::Index>(), with).prop_map(|(text, at, with)| {
        let Some(with) = with else { return text };
        let mut characters: Vec<char> = text.chars().collect();
        let at = at.index(characters.len());
        characters.splice(at..=at, with.chars());
        characters.into_iter().collect()
    })
}

/// The size of the text that the server writes, or null when it refuses the cast.
const PRINTED: &str = "CREATE FUNCTION pg_temp.printed(given text) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    RETURN octet_length(given::jsonb::text);
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
    RETURN NULL;
END $$";

#[tokio::test(flavor = "multi_thread")]
async fn what_we_say_of_any_text_is_what_postgresql_says() {
    const TEXTS: usize = 6000;
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(PRINTED).await.unwrap();
    let mut runner = TestRunner::default();
    let strategy = damaged();
    let texts: Vec<String> = (0..TEXTS).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect();
    let ask = "SELECT pg_temp.printed(t.given), pg_temp.printed(t.line)
                 FROM unnest($1::text[], $2::text[]) WITH ORDINALITY t (given, line, place) ORDER BY t.place";
    let lines: Vec<String> = texts
        .iter()
        .map(|text| one_line(text).map_or_else(|_| text.clone(), |line| line.text.into()))
        .collect();
    let answers = client.query(ask, &[&texts, &lines]).await.unwrap();

    let any_nought = takes_every_nought(&client).await;
    let mut accepted = 0;
    for (text, answer) in texts.iter().zip(answers) {
        let (printed, as_line): (Option<i64>, Option<i64>) = (answer.get(0), answer.get(1));
        match (check(text), one_line(text)) {
            (Ok(expansion), Ok(line)) => {
                accepted += 1;
                let printed = printed.unwrap_or_else(|| panic!("PostgreSQL refuses {text:?}")) as u64;
                assert_eq!(as_line, Some(printed as i64), "{text:?} as a line");
                assert!(printed <= text.len() as u64 + expansion, "{text:?} is written as {printed} bytes");
                assert!(printed <= line.text.len() as u64 + line.expansion, "{text:?} as a line");
                assert!(!line.text.contains(['\n', '\r']) && line.text == line.text.trim(), "{text:?}");
            }
            (Err(refusal), Err(same)) => {
                assert_eq!(refusal, same, "{text:?}");
                let ours_alone = match refusal.fault {
                    Fault::Depth => true,
                    Fault::NumberRange => any_nought && is_nought(&text[refusal.offset..]),
                    _ => false,
                };
                assert!(printed.is_none() || ours_alone, "only we refuse {text:?}: {refusal}");
            }
            (checked, line) => panic!("{text:?}: {checked:?} {line:?}"),
        }
    }
    assert!((TEXTS / 3..TEXTS * 19 / 20).contains(&accepted), "{accepted} of {TEXTS} texts were JSON");
}
