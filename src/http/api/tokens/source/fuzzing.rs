//! What holds for any file of tokens: each line is a token with a good name, or is counted as none.

use super::{Parsed, SHORTEST};
use crate::queue::is_valid_name;
use sha2::{Digest, Sha256};

pub(crate) fn any_file(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let parsed = Parsed::of(text);
    let lines: Vec<&str> =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    assert_eq!(
        parsed.tokens.len() + parsed.too_short + parsed.bad_names,
        lines.len(),
        "every line is accounted for"
    );
    for token in &parsed.tokens {
        assert!(is_valid_name(&token.name), "{:?} is no name", token.name);
        let is_it = |candidate: &str| candidate.len() >= SHORTEST && token.hash == *Sha256::digest(candidate);
        let of_line = |line: &&str| is_it(line.split_once(':').map_or(*line, |(_, token)| token.trim()));
        assert!(lines.iter().any(of_line), "a token stands in the file");
    }
}
