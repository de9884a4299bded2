//! Looks at everything a worker needs and says what to do about what is missing.

mod handlers;

use crate::{
    config::{Config, Loaded},
    error_text::describe,
    http::api::tokens,
    liveness::{Backend, redis},
    objects,
    store::{
        connect::OneShot,
        health,
        migrate::{self, Fit, SchemaState, WorkerSchemaState},
        pooler,
    },
};
use serde::Serialize;
use std::time::Duration;

/// One thing looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: String,
    pub verdict: Verdict,
    pub found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// From good to bad, so that the worst is the greatest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Pass,
    Warn,
    Fail,
}

impl Check {
    fn pass(name: &str, found: impl Into<String>) -> Self {
        Self { name: name.into(), verdict: Verdict::Pass, found: found.into(), advice: None }
    }

    fn warn(name: &str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name: name.into(), verdict: Verdict::Warn, found: found.into(), advice: Some(advice.into()) }
    }

    fn fail(name: &str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name: name.into(), verdict: Verdict::Fail, found: found.into(), advice: Some(advice.into()) }
    }
}

/// More than this and times read by people, logs and database disagree.
const SKEW: Duration = Duration::from_secs(2);

pub async fn examine(loaded: &Loaded) -> Vec<Check> {
    let config = &loaded.config;
    let mut checks = configuration(loaded);
    checks.extend(postgres(config).await);
    checks.push(redis_check(config).await);
    checks.push(outputs(config).await);
    checks.extend(tokens(config));
    checks.extend(handlers::examine(config).await);
    checks
}

fn configuration(loaded: &Loaded) -> Vec<Check> {
    let set = loaded.values.iter().filter(|value| value.source != "default").count();
    let found = format!("{set} of {} keys set, the rest at their defaults", loaded.values.len());
    let mut checks = vec![Check::pass("configuration", found)];
    for warning in &loaded.warnings {
        checks.push(Check::warn(&warning.key, &warning.message, "see docs/configuration.md"));
    }
    checks
}

async fn postgres(config: &Config) -> Vec<Check> {
    const NAME: &str = "PostgreSQL";
    let target = match config.database.target() {
        Ok(target) => target,
        Err(error) => return vec![Check::fail(NAME, error.to_string(), "fix database.url")],
    };
    // Unnamed whatever the configuration says: that there is a pooler is to be found out.
    let connection = match target.unnamed().open("musterd doctor").await {
        Ok(connection) => connection,
        Err(error) => return vec![Check::fail(NAME, error.finding(), error.hint())],
    };
    let mut checks = match inside(config, &connection).await {
        Ok(checks) => checks,
        Err(error) => vec![Check::fail(NAME, describe(&error), "see the server's log")],
    };
    checks.push(pooler(config, &connection).await);
    connection.close().await;
    checks
}

async fn inside(config: &Config, connection: &OneShot) -> Result<Vec<Check>, tokio_postgres::Error> {
    let server = health::server(connection).await?;
    let mut checks = Vec::new();
    checks.push(if server.version_num >= health::OLDEST {
        Check::pass("PostgreSQL", format!("{} as {}", server.version, server.user))
    } else {
        let found = format!("version {}", server.version);
        Check::fail("PostgreSQL", found, "Muster needs PostgreSQL 14 or later")
    });
    let schema = migrate::check(connection).await;
    let missing = matches!(schema, Err(SchemaState::Missing));
    checks.push(match schema {
        Ok(Fit::Exact) => Check::pass("schema", "up to date"),
        Ok(Fit::Newer { database, binary }) => Check::warn(
            "schema",
            format!("at V{database}, newer than this binary (V{binary}), which it still serves"),
            "deploy the newer musterd",
        ),
        Err(state @ SchemaState::Unreadable { .. }) => Check::fail(
            "schema",
            describe(&state),
            "GRANT musterd_worker TO this user, or run as the schema's owner",
        ),
        Err(state) => apart("schema", &describe(&state), ": ", "run `musterd migrate`"),
    });
    // Without a schema there is nothing to have rights on.
    if !missing {
        checks.push(rights(connection).await?);
        checks.push(worker_schema(connection).await);
        if config.outputs.store == objects::Kind::File {
            // A user who may not ask was reported above.
            let machines = health::machines(connection).await.unwrap_or_default();
            checks.extend(scattered_outputs(&machines));
        }
    }
    checks.push(clock(server.clock_offset));
    for setting in health::harmful_settings(connection, config.database.max_connections.get()).await? {
        checks.push(Check::warn(&setting.name, setting.found, setting.advice));
    }
    Ok(checks)
}

/// The names of another worker over our tables: good to have or not to have, but not half.
async fn worker_schema(connection: &OneShot) -> Check {
    const NAME: &str = "worker schema";
    match migrate::worker_schema(connection).await {
        Ok(state @ WorkerSchemaState::Outdated) => Check::warn(NAME, state.as_str(), "run `musterd migrate`"),
        Ok(state) => Check::pass(NAME, state.as_str()),
        Err(error) => Check::warn(NAME, describe(&error), "see the server's log"),
    }
}

async fn rights(connection: &OneShot) -> Result<Check, tokio_postgres::Error> {
    let missing = health::missing_rights(connection).await?;
    Ok(if missing.is_empty() {
        Check::pass("rights", "may read and write every table of the schema")
    } else {
        Check::fail(
            "rights",
            format!("may not {}", missing.join(", ")),
            "GRANT musterd_worker TO this user, or run as the schema's owner",
        )
    })
}

fn clock(offset: Duration) -> Check {
    let found = format!("{} apart from this machine", humantime::format_duration(offset));
    if offset <= SKEW {
        Check::pass("clock", found)
    } else {
        Check::warn("clock", found, "nothing breaks, but times in logs mislead: run NTP on both machines")
    }
}

/// Files of a directory are where the worker is that ended the batch.
fn scattered_outputs(machines: &[String]) -> Option<Check> {
    let found = format!(
        "outputs.store is \"file\", and workers run on {} machines: {}",
        machines.len(),
        machines.join(", ")
    );
    let advice = "each of them writes the output files of the batches that it ends into its own outputs.dir, and the API of another does not \
                  find them: set outputs.store = \"s3\", or give all of them one directory";
    (machines.len() > 1).then(|| Check::warn("output files", found, advice))
}

/// A transaction pooler takes LISTEN and session locks away without saying so.
async fn pooler(config: &Config, connection: &OneShot) -> Check {
    const NAME: &str = "pooler";
    let second = match config.database.target() {
        Ok(target) => target.unnamed().open("musterd doctor").await,
        Err(error) => return Check::fail(NAME, error.to_string(), "fix database.url"),
    };
    let pooled = match &second {
        Ok(second) => pooler::ask(connection, second).await,
        Err(error) => return Check::warn(NAME, error.finding(), error.hint()),
    };
    match (pooled, config.database.direct_url.is_some()) {
        (Ok(false), false) => Check::pass(NAME, "none: database.url is a direct connection"),
        (Ok(false), true) => Check::warn(
            NAME,
            "none found, though database.direct_url is set",
            "remove direct_url if database.url is direct",
        ),
        (Ok(true), true) => past_it(config).await,
        (Ok(true), false) => Check::warn(
            NAME,
            "database.url leads to a transaction pooler",
            "set database.direct_url: without it workers poll, and dead ones are found later",
        ),
        (Err(error), _) => Check::warn(NAME, describe(&error), "could not be found out"),
    }
}

/// Whether `direct_url` does lead past the pooler.
async fn past_it(config: &Config) -> Check {
    const NAME: &str = "pooler";
    let asked = match config.database.direct_target() {
        Ok(target) => pooler::lends_sessions(&target).await,
        Err(error) => Err(error.into()),
    };
    match asked {
        Ok(false) => Check::pass(NAME, "a transaction pooler, with database.direct_url past it"),
        Ok(true) => Check::fail(
            NAME,
            "database.direct_url leads to a transaction pooler, too",
            "name the server itself there, or leave it out",
        ),
        Err(error) => {
            Check::fail(NAME, format!("database.direct_url: {}", describe(&error)), "fix database.direct_url")
        }
    }
}

async fn redis_check(config: &Config) -> Check {
    const NAME: &str = "Redis";
    if !config.liveness.backend.uses_redis(&config.redis) {
        let why = match config.liveness.backend {
            Backend::Auto => "not used: redis.url is not set",
            Backend::Redis | Backend::Postgres => "not used: liveness.backend is \"postgres\"",
        };
        return Check::pass(NAME, why);
    }
    match redis::probe(&config.redis).await {
        Ok(found) => Check::pass(NAME, found),
        Err(error) => Check::fail(NAME, describe(&error), error.advice()),
    }
}

async fn outputs(config: &Config) -> Check {
    const NAME: &str = "outputs";
    let store = match objects::Store::open(&config.outputs) {
        Ok(store) => store,
        Err(error) => return apart(NAME, &describe(&error), "; ", "fix [outputs]"),
    };
    match store.probe().await {
        Ok(()) => {
            Check::pass(NAME, format!("wrote, read and removed a file at {}", config.outputs.describe()))
        }
        Err(error) => {
            apart(NAME, &describe(&error), "; ", "fix [outputs]; batches with outputs wait until then")
        }
    }
}

/// The files of the API's tokens. One that cannot be read ends its tokens a minute later.
fn tokens(config: &Config) -> Vec<Check> {
    let files = [
        ("http.read_tokens_file", &config.http.read_tokens_file),
        ("http.write_tokens_file", &config.http.write_tokens_file),
    ];
    let set = files.into_iter().filter_map(|(key, path)| Some((key, path.as_ref()?)));
    set.map(|(key, path)| match tokens::examine(path) {
        (valid, problems) if problems.is_empty() => Check::pass(key, format!("{valid} tokens")),
        (valid, problems) => Check::fail(
            key,
            format!("{}; {valid} tokens are valid", problems.join("; ")),
            "make it readable, UTF-8, at most 1 MiB, a line for each token: NAME:TOKEN",
        ),
    })
    .collect()
}

/// A failure whose message ends with what to do: the two in their own columns.
fn apart(name: &str, message: &str, divider: &str, otherwise: &str) -> Check {
    match message.rsplit_once(divider) {
        Some((found, advice)) => Check::fail(name, found, advice),
        None => Check::fail(name, message, otherwise),
    }
}
