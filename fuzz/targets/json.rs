#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| musterd::fuzzing::json(bytes));
