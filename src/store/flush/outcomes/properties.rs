//! Values stand by their lines, in whatever order and pieces the outcomes of rows come.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// What becomes of a row.
#[derive(Clone, Debug, PartialEq)]
enum Fate {
    Succeeds { result: bool, outputs: bool },
    Fails,
}

/// Lines around the end of a stripe, with their fates, in any order.
fn fates() -> impl Strategy<Value = Vec<(i32, Fate)>> {
    let fate = prop_oneof![
        4 => (any::<bool>(), any::<bool>()).prop_map(|(result, outputs)| Fate::Succeeds { result, outputs }),
        1 => Just(Fate::Fails),
    ];
    prop::collection::btree_map(STRIPE - 40..STRIPE + 40, fate, 0..60)
        .prop_map(|fates| fates.into_iter().collect::<Vec<_>>())
        .prop_shuffle()
}

fn result_of(line: i32) -> Json {
    Json::from_text(format!("{{\"r\":{line}}}"))
}

fn outputs_of(line: i32) -> Json {
    Json::from_text(format!("{{\"o\":\"{line}\"}}"))
}

fn add(outcomes: &mut Outcomes, line: i32, fate: &Fate) {
    match fate {
        Fate::Succeeds { result: false, outputs: false } => outcomes.succeed_all(&Lines::span(line, line)),
        Fate::Succeeds { result, outputs } => {
            outcomes.succeed(line, result.then(|| result_of(line)), outputs.then(|| outputs_of(line)));
        }
        Fate::Fails => outcomes.fail(line, format!("e{line}")),
    }
}

/// The fates, read back from what is written.
fn read(outcomes: &mut Outcomes) -> BTreeMap<i32, Fate> {
    let mut read = BTreeMap::new();
    let value = |joined: &Option<String>, place: usize| {
        joined.as_ref().map_or("", |joined| joined.split('\n').nth(place).unwrap()).to_owned()
    };
    for stripe in outcomes.stripes() {
        assert_eq!(stripe.lines.len(), stripe.succeeded as usize);
        for joined in stripe.results.iter().chain(&stripe.outputs) {
            assert_eq!(joined.split('\n').count(), stripe.lines.len(), "a value for each line");
        }
        for (place, line) in stripe.lines.iter().enumerate() {
            let (result, outputs) = (value(&stripe.results, place), value(&stripe.outputs, place));
            assert!(result.is_empty() || result == result_of(line).text(), "line {line} has {result}");
            assert!(outputs.is_empty() || outputs == outputs_of(line).text(), "line {line} has {outputs}");
            let fate = Fate::Succeeds { result: !result.is_empty(), outputs: !outputs.is_empty() };
            assert_eq!(read.insert(line, fate), None, "line {line} stands twice");
        }
    }
    for failure in outcomes.failures() {
        assert_eq!(failure.error, format!("e{}", failure.line));
        assert_eq!(read.insert(failure.line, Fate::Fails), None, "line {} stands twice", failure.line);
    }
    read
}

proptest! {
    #[test]
    fn every_value_stands_by_its_line(fates in fates(), cut in any::<prop::sample::Index>(), halvings in 0..4) {
        let expected: BTreeMap<i32, Fate> = fates.iter().cloned().collect();
        // Handed over in two pieces, merged, and taken apart again as a flush that is refused takes it apart.
        let cut = cut.index(fates.len() + 1);
        let (mut whole, mut late) = (Outcomes::default(), Outcomes::default());
        fates[..cut].iter().for_each(|(line, fate)| add(&mut whole, *line, fate));
        fates[cut..].iter().for_each(|(line, fate)| add(&mut late, *line, fate));
        whole.extend(late);
        prop_assert_eq!(whole.done(), expected.keys().copied().collect::<Lines>());
        prop_assert_eq!(read(&mut whole.clone()), expected.clone());
        let mut pieces = vec![whole];
        for _ in 0..halvings {
            pieces = pieces.into_iter().flat_map(|piece| match piece.halve() {
                Some((one, other)) => vec![one, other],
                None => vec![piece],
            }).collect();
        }
        let mut apart = BTreeMap::new();
        for piece in &mut pieces {
            for (line, fate) in read(piece) {
                prop_assert_eq!(apart.insert(line, fate), None, "line {} is in two pieces", line);
            }
        }
        prop_assert_eq!(apart, expected);
    }
}
