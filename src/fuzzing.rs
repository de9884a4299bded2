//! What the targets in fuzz/ run: each function takes any bytes, and panics when a promise about them does not hold.
//!
//! The promises stand here, beside the code, and not in fuzz/: a test replays the corpus of each target at every `cargo test`.

mod input;
mod protocol;

pub use input::{csv, json, rows};
pub use protocol::protocol;

/// The stream between the driver and a pooler, rewritten.
pub fn wire(bytes: &[u8]) {
    crate::store::connect::fuzz_wire(bytes);
}

/// A file of the API's tokens, and the headers that a request brings.
pub fn tokens(bytes: &[u8]) {
    crate::http::api::tokens::fuzz_tokens(bytes);
    if let Ok(text) = str::from_utf8(bytes)
        && let Some(trace) = crate::traceparent::Traceparent::parse(text)
    {
        let again = crate::traceparent::Traceparent::parse(trace.as_str());
        assert_eq!(again.as_ref(), Some(&trace), "what was taken is taken again");
    }
}

/// Query parameters and the fields of a JSON object.
pub fn fields(bytes: &[u8]) {
    crate::http::api::fuzz_fields(bytes);
}

/// A name, which is that of the program and of the corpus, and what it runs.
type Target = (&'static str, fn(&[u8]));

pub const TARGETS: [Target; 7] = [
    ("csv", csv),
    ("rows", rows),
    ("json", json),
    ("protocol", protocol),
    ("wire", wire),
    ("tokens", tokens),
    ("fields", fields),
];

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// What a target found once stays in its corpus.
    #[test]
    fn the_corpus_of_every_target_passes() {
        let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
        for (name, target) in super::TARGETS {
            assert!(fuzz.join(format!("targets/{name}.rs")).is_file(), "fuzz/targets/{name}.rs is missing");
            let mut count = 0;
            for file in std::fs::read_dir(fuzz.join("corpus").join(name)).unwrap() {
                let path = file.unwrap().path();
                let bytes = std::fs::read(&path).unwrap();
                if std::panic::catch_unwind(|| target(&bytes)).is_err() {
                    panic!("{} fails", path.display());
                }
                count += 1;
            }
            assert!(count >= 5, "{name} has {count} files in its corpus");
        }
    }
}
