//! Mechanisms that a test can take out of the program, one at a time, to see that a test notices: `MUSTERD_MUTANT=name`.
//!
//! Those that live in a statement are taken out of its text. Those that live in the schema are taken out by the tests themselves.

#[cfg(not(feature = "failpoints"))]
pub const fn is_mutant(_: &str) -> bool {
    false
}

#[cfg(not(feature = "failpoints"))]
pub const fn patched(sql: &'static str) -> &'static str {
    sql
}

#[cfg(feature = "failpoints")]
pub use enabled::{is_mutant, patched};

#[cfg(feature = "failpoints")]
mod enabled {
    use std::{
        collections::HashMap,
        sync::{LazyLock, Mutex, PoisonError},
    };

    static MUTANT: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("MUSTERD_MUTANT").ok());

    /// A mutant, a piece of a statement, and what stands there instead.
    const PATCHES: &[(&str, &str, &str)] = &[
        ("no_token_guard", "ON u.id = b.id AND u.token = b.token", "ON u.id = b.id"),
        ("no_token_guard", "AND b.token = ($2::uuid[])[s.slot]", ""),
        ("no_token_guard", "AND b.token = ($2::uuid[])[f.slot]", ""),
        ("no_token_guard", "AND b.token = c.token", ""),
        ("no_done_guard", "AND ($3::int4multirange[])[s.slot] <@ b.lines", ""),
        ("no_done_guard", "AND ($3::int4multirange[])[f.slot] <@ b.lines", ""),
        ("no_done_guard", "AND c.done <@ b.lines", ""),
        ("recover_the_living", "AND musterd.is_alive(w.state)", "AND false"),
        ("recover_the_living", "AND w.state IN ('alive', 'draining')", "AND false"),
        (
            "no_postgres_witness",
            "w.seen_at < pg_catalog.clock_timestamp()",
            "w.seen_at < pg_catalog.clock_timestamp() + interval '1 day'",
        ),
        (
            "no_postgres_witness",
            "s.seen_at < pg_catalog.clock_timestamp()",
            "s.seen_at < pg_catalog.clock_timestamp() + interval '1 day'",
        ),
    ];

    pub fn is_mutant(name: &str) -> bool {
        MUTANT.as_deref() == Some(name)
    }

    /// The statement without what the mutant lacks.
    pub fn patched(sql: &'static str) -> &'static str {
        static PATCHED: LazyLock<Mutex<HashMap<&'static str, &'static str>>> = LazyLock::new(Mutex::default);
        let patches = || PATCHES.iter().filter(|(name, from, _)| is_mutant(name) && sql.contains(from));
        if patches().next().is_none() {
            return sql;
        }
        let mut all = PATCHED.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(sql).or_insert_with(|| {
            let text = patches().fold(sql.to_owned(), |text, (_, from, to)| text.replace(from, to));
            Box::leak(text.into_boxed_str())
        })
    }
}
