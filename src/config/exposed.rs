//! What others can read: connections beyond this machine that do not verify their server, and files that every user may open.
//!
//! These are warnings: a network or a machine may be private. `musterd doctor --strict` fails for them.

use super::{Config, Leaf};
use crate::problems::Problems;
use crate::{
    handler, http,
    loopback::is_loopback,
    secret::Secret,
    store::connect::{ParseError, SslMode, Target},
};
use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

pub(super) fn check(config: &Config, leaves: &[&Leaf], problems: &mut Problems) {
    database("database.url", config.database.target(), problems);
    if config.database.direct_url.is_some() {
        database("database.direct_url", config.database.direct_target(), problems);
    }
    if config.liveness.backend.uses_redis(&config.redis) {
        redis(&config.redis.url(), problems);
    }
    for (name, handler) in &config.handlers {
        service(name, handler, problems);
    }
    let endpoint = &config.outputs.s3.endpoint;
    if is_plain(endpoint) {
        let message = "is http:// and not on this machine: what is stored can be read and changed on its way; use https://";
        problems.warning("outputs.s3.endpoint", message);
    }
    for leaf in leaves {
        if let Some(file) = leaf.file.as_ref().filter(|file| is_open_to_all(file)) {
            problems.warning(leaf.key(), open_file(file));
        }
    }
    files_of_the_port(&config.http, problems);
}

fn database(key: &str, target: Result<Target, ParseError>, problems: &mut Problems) {
    let Ok(target) = target else { return };
    if target.is_remote() && target.ssl_mode() != SslMode::VerifyFull {
        problems.warning(
            key,
            format!(
                "leads to another machine with sslmode={}, which does not verify that it is the right one: passwords and rows can \
                 be read on their way; set sslmode=verify-full, and sslrootcert for an authority of your own",
                target.ssl_mode()
            ),
        );
    }
}

fn redis(url: &Secret, problems: &mut Problems) {
    let Some((scheme, rest)) = url.expose().split_once("://") else { return };
    let plain = scheme.trim_end_matches("-cluster").trim_end_matches("-sentinel");
    let authority = rest.rsplit_once('@').map_or(rest, |(_, authority)| authority);
    let hosts = authority.split(['/', '?']).next().unwrap_or_default();
    let is_remote = hosts.split(',').any(|host| !is_loopback(without_port(host)));
    if ["redis", "valkey"].contains(&plain) && is_remote {
        problems.warning("redis.url", "leads to another machine without TLS: use rediss://");
    }
}

fn without_port(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    }
}

fn service(name: &str, handler: &handler::Config, problems: &mut Problems) {
    let has_secrets =
        handler.bearer_token.is_some() || handler.secret.is_some() || !handler.headers.is_empty();
    if has_secrets && handler.url.as_deref().is_some_and(is_plain) {
        problems.warning(
            format!("handlers.{name}.url"),
            "is http:// and not on this machine: its token, its headers and its rows can be read on their way; use https://",
        );
    }
}

/// Whether a URL leads beyond this machine without TLS.
fn is_plain(url: &str) -> bool {
    let url = url::Url::parse(url).ok().filter(|url| url.scheme() == "http");
    url.is_some_and(|url| !url.host_str().is_some_and(is_loopback))
}

fn files_of_the_port(config: &http::Config, problems: &mut Problems) {
    let tokens = [
        ("http.read_tokens_file", &config.read_tokens_file),
        ("http.write_tokens_file", &config.write_tokens_file),
        ("http.tls_key_file", &config.tls_key_file),
    ];
    for (key, path) in tokens {
        let files = path.iter().flat_map(|path| match std::fs::read_dir(path) {
            Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
            Err(_) => vec![path.clone()],
        });
        if let Some(file) = files.into_iter().find(|file: &PathBuf| is_open_to_all(file)) {
            problems.warning(key, open_file(&file));
        }
    }
}

fn is_open_to_all(file: &Path) -> bool {
    file.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o004 != 0)
}

fn open_file(file: &Path) -> String {
    format!(
        "the file {} can be read by every user of this machine: chmod o-r (of a mounted Secret: defaultMode 0440, and fsGroup)",
        file.display()
    )
}

#[cfg(test)]
mod tests {
    use crate::config::{Given, load};
    use std::os::unix::fs::PermissionsExt;

    fn warned(flags: &[&str]) -> Vec<String> {
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let loaded = load(&Given { flags, env: Some(Vec::new()), ..Given::default() }).unwrap();
        loaded.warnings.into_iter().map(|warning| warning.key).collect()
    }

    #[test]
    fn what_leaves_this_machine_unverified_is_warned_of() {
        let work = ["handlers.work.kind=http", "handlers.work.bearer_token=canary"];
        for (flag, key) in [
            ("database.url=postgres://db.example/m", "database.url"),
            ("database.url=postgres://db.example/m?sslmode=require", "database.url"),
            ("database.url=host=localhost hostaddr=192.0.2.1 sslmode=prefer", "database.url"),
            ("redis.url=redis://:p@cache.example:6379", "redis.url"),
            ("redis.url=redis://cache.example", "redis.url"),
            ("handlers.work.url=http://pay.example/charge", "handlers.work.url"),
            ("outputs.s3.endpoint=http://minio:9000", "outputs.s3.endpoint"),
        ] {
            let flags = [&work[..], &["handlers.work.url=https://x.example", "liveness.backend=redis", flag]]
                .concat();
            assert_eq!(warned(&flags), [key], "{flag}");
        }
        for flag in [
            "database.url=postgres://db.example/m?sslmode=verify-full",
            "database.url=postgres://127.0.0.1/m",
            "database.url=host=/run/postgresql",
            "redis.url=rediss://cache.example",
            "redis.url=redis://:p@localhost:6379/0",
            "handlers.work.url=https://pay.example/charge",
            "handlers.work.url=http://127.0.0.1:8080/charge",
            "outputs.s3.endpoint=https://s3.example",
        ] {
            let flags = [&work[..], &["handlers.work.url=https://x.example", "liveness.backend=redis", flag]]
                .concat();
            assert_eq!(warned(&flags), [""; 0], "{flag}");
        }
    }

    #[test]
    fn files_that_every_user_can_read_are_warned_of() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("secret");
        std::fs::write(&file, "postgres://localhost/m").unwrap();
        let (url, tokens) = (
            format!("database.url_file={}", file.display()),
            format!("http.read_tokens_file={}", dir.path().display()),
        );
        for (mode, keys) in
            [(0o644, &["database.url", "http.read_tokens_file"][..]), (0o640, &[]), (0o600, &[])]
        {
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(warned(&[&url, &tokens]), keys, "{mode:o}");
        }
    }
}
