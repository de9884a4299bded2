//! Whether each handler can be reached: the service answers, the program is there, the procedure may be called.

use super::Check;
use crate::{
    config::Config,
    handler::{self, Kind, sql::QualifiedName},
    store::{connect::OneShot, health},
};
use std::{os::unix::fs::PermissionsExt, path::Path, path::PathBuf, time::Duration};

const CONNECT_LIMIT: Duration = Duration::from_secs(5);

pub(super) async fn examine(config: &Config) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut connection = None;
    if config.handlers.values().any(|handler| handler.kind == Kind::Sql)
        && let Ok(target) = config.database.target()
    {
        connection = target.unnamed().open("musterd doctor").await.ok();
    }
    for (name, own) in &config.handlers {
        let name = format!("handler {name}");
        let found = format!("{}, queue {}", own.kind.as_str(), own.queue);
        checks.push(match own.kind {
            Kind::Builtin => Check::pass(&name, found),
            Kind::Http => http(&name, own, found).await,
            Kind::Exec => exec(&name, own, found),
            Kind::Sql => sql(&name, own, found, connection.as_ref()).await,
        });
    }
    if let Some(connection) = connection {
        connection.close().await;
    }
    checks
}

/// A connection, and no more: what a service does with an empty request is its own affair.
async fn http(name: &str, config: &handler::Config, found: String) -> Check {
    let Some(url) = config.url.as_deref().and_then(|url| url::Url::parse(url).ok()) else {
        return Check::fail(name, "no url", "set url");
    };
    let (host, port) = (url.host_str().unwrap_or_default(), url.port_or_known_default().unwrap_or(80));
    let host = host.trim_matches(['[', ']']);
    let connect = tokio::net::TcpStream::connect((host, port));
    match tokio::time::timeout(CONNECT_LIMIT, connect).await {
        Ok(Ok(_)) => Check::pass(name, format!("{found}, {host}:{port} accepts connections")),
        Ok(Err(error)) => Check::warn(
            name,
            format!("{host}:{port}: {error}"),
            "start the service, or fix url; rows wait and are tried again",
        ),
        Err(_) => {
            Check::warn(name, format!("{host}:{port} does not answer"), "look at the network and its rules")
        }
    }
}

fn exec(name: &str, config: &handler::Config, found: String) -> Check {
    let program = config.argv.first().map(String::as_str).unwrap_or_default();
    match find(program, config.cwd.as_deref()) {
        Some(path) => Check::pass(name, format!("{found}, {}", path.display())),
        None => Check::fail(
            name,
            format!("{program} is not a program that can be run"),
            "install it, or fix argv",
        ),
    }
}

/// As the system looks for it: a path as it stands, a bare name in the directories of PATH.
fn find(program: &str, cwd: Option<&Path>) -> Option<PathBuf> {
    let runs = |path: &PathBuf| {
        path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    if program.contains('/') {
        return Some(cwd.unwrap_or(Path::new("")).join(program)).filter(runs);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(runs)
}

async fn sql(name: &str, config: &handler::Config, found: String, connection: Option<&OneShot>) -> Check {
    let Some(connection) = connection else {
        return Check::warn(name, "not looked at: no connection to the database", "fix database.url first");
    };
    let routines = [
        (&config.procedure, "(bigint, jsonb)", health::Routine::Procedure),
        (&config.function, "(bigint, jsonb, jsonb)", health::Routine::Function),
    ];
    for (routine, arguments, kind) in routines {
        let Some(parsed) = routine.as_deref().and_then(|text| QualifiedName::parse(text).ok()) else {
            continue;
        };
        let signature = format!("{parsed}{arguments}");
        match health::routine_trouble(connection, &signature, kind, config.role.as_deref()).await {
            Ok(None) => {}
            Ok(Some(trouble)) => {
                return Check::fail(
                    name,
                    format!("{signature} {trouble}"),
                    "create it, or GRANT EXECUTE on it, or fix the name",
                );
            }
            Err(error) => {
                return Check::warn(name, crate::error_text::describe(&error), "could not be found out");
            }
        }
    }
    Check::pass(name, found)
}
