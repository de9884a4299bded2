//! Which keys exist, asked of the types themselves, so that no list can go stale.

use super::{Config, wanted::Wanted};
use serde::Deserialize;

/// The keys that `T` has at `path`; none where it is no table, or one of any keys.
pub(super) fn keys_at<'de, T: Deserialize<'de>>(path: &'de [String]) -> &'static [&'static str] {
    match Wanted::at::<T>(path) {
        Some(Wanted::Table(keys)) => keys,
        _ => &[],
    }
}

/// Whether a key exists, and the known keys it might have been meant for.
pub(super) enum Known {
    Yes,
    No { did_you_mean: Option<String> },
}

/// Whether there is such a key.
pub(super) fn known(path: &[String]) -> Known {
    for (at, name) in path.iter().enumerate() {
        let siblings = keys_at::<Config>(&path[..at]);
        if !siblings.is_empty() && !siblings.contains(&name.as_str()) {
            let near = nearest(name, siblings.iter().copied());
            let meant = |near: &str| [&path[..at], &[near.to_owned()]].concat().join(".");
            return Known::No { did_you_mean: near.map(meant) };
        }
    }
    Known::Yes
}

/// The nearest of `candidates`, if one is near enough to be a slip of the fingers.
fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize)]
    #[expect(dead_code, reason = "only the names matter")]
    struct Sample {
        first: u8,
        #[serde(rename = "zweite")]
        second: Option<String>,
    }

    #[test]
    fn a_struct_tells_its_names() {
        assert_eq!(keys_at::<Sample>(&[]), ["first", "zweite"]);
    }

    #[test]
    fn only_a_slip_is_taken_for_another_word() {
        let keys = ["heartbeat_interval", "heartbeat_ttl", "backend"];
        assert_eq!(nearest("hartbeat_interval", keys.into_iter()), Some("heartbeat_interval"));
        assert_eq!(nearest("colour", keys.into_iter()), None);
    }
}
