//! The configuration: typed, complete, and refused with every mistake named at once.
//!
//! Each section is described beside what it configures. This file composes them, finds unknown keys,
//! and checks what concerns more than one section.

mod exposed;
mod keys;
mod layers;
mod lines;
mod wanted;

use crate::handler::{BuildError, Registry, tap::Tap};
use crate::problems::{Problem, Problems};
use crate::secret::{REDACTED, Secret};
use crate::{backoff, flow, handler, http, liveness, objects, queue, store, supervisor, telemetry, upkeep};
use ::config::{Map, Value, ValueKind};
use keys::{Known, known};
pub use layers::{ENV_PREFIX, Given, SHIPPED};
use layers::{Layers, Leaf};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, time::Duration};
use wanted::Wanted;

/// Keys that hold a secret: redacted wherever they are shown, and readable from a file by `<key>_file`.
pub const SECRET_KEYS: [&str; 5] =
    ["database.url", "database.direct_url", "redis.url", "outputs.s3.access_key", "outputs.s3.secret_key"];

/// Whether a key holds a secret: those above, and those of handlers, whatever the handler's name.
fn is_secret(key: &str) -> bool {
    let path: Vec<&str> = key.split('.').collect();
    SECRET_KEYS.contains(&key)
        || matches!(path.as_slice(), ["handlers", .., "bearer_token" | "secret"] if path.len() >= 3)
        // The name of a header may have dots.
        || matches!(path.as_slice(), ["handlers", _, below @ .., _] if below.contains(&"headers"))
}

/// What Kubernetes gives a pod between SIGTERM and SIGKILL by default.
const KUBERNETES_GRACE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub database: store::Config,
    pub redis: liveness::RedisConfig,
    pub liveness: liveness::Config,
    pub claim: flow::claim::Config,
    pub batcher: flow::batcher::Config,
    pub completion: flow::complete::Config,
    pub shutdown: supervisor::Config,
    pub outputs: objects::Config,
    pub http: http::Config,
    pub log: telemetry::Config,
    pub queues: BTreeMap<String, queue::Config>,
    pub retry: backoff::Config,
    pub retention: upkeep::retention::Config,
    pub handlers: BTreeMap<String, handler::Config>,
    pub submit: flow::submit::Config,
}

/// A configuration that may be used, with the source of every value.
#[derive(Debug)]
pub struct Loaded {
    pub config: Config,
    pub values: Vec<Shown>,
    pub warnings: Vec<Problem>,
}

/// One effective value as people may see it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shown {
    pub key: String,
    pub value: serde_json::Value,
    pub source: String,
}

#[derive(Debug, thiserror::Error)]
#[error("{problems}")]
pub struct ConfigError {
    pub problems: Problems,
}

impl Loaded {
    /// The effective values as one tree, secrets hidden.
    pub fn nested(&self) -> serde_json::Value {
        let mut root = serde_json::Map::new();
        for shown in &self.values {
            let mut table = &mut root;
            let mut names: Vec<&str> = shown.key.split('.').collect();
            let last = names.pop().unwrap_or_default();
            for name in names {
                let entry = table.entry(name).or_insert_with(|| serde_json::json!({}));
                if !entry.is_object() {
                    *entry = serde_json::json!({});
                }
                table = entry.as_object_mut().expect("made an object in the line above");
            }
            table.insert(last.to_owned(), shown.value.clone());
        }
        root.into()
    }
}

/// Reads all layers, or says everything that is wrong with them.
pub fn load(given: &Given) -> Result<Loaded, ConfigError> {
    let mut problems = Problems::default();
    let leaves: Vec<Leaf> = Layers::merge(given, &mut problems).leaves.into_values().collect();
    let (sound, unsound): (Vec<&Leaf>, Vec<&Leaf>) =
        leaves.iter().partition(|leaf| is_sound(leaf, &mut problems));
    let mut config = assemble(&sound, &mut problems);
    for leaf in &sound {
        if let (Some(file), Some(secret)) = (&leaf.file, config.secret_at(&leaf.path))
            && let Ok(read) = Secret::from_file(file)
        {
            // From here on it knows where it came from, and can be read again.
            *secret = read;
        }
    }
    // A queue of which nothing could be read is there all the same.
    for queue in unsound.iter().filter(|leaf| leaf.path[0] == "queues").filter_map(|leaf| leaf.path.get(1)) {
        config.queues.entry(queue.clone()).or_default();
    }
    problems.extend(config.problems(&sound), |key| !is_beside_the_point(key, &unsound));
    // Of values that will be used: beside an error they may be none.
    if !problems.has_errors() {
        exposed::check(&config, &sound, &mut problems);
    }
    let set = leaves.iter().filter(|leaf| !leaf.is_default());
    problems.locate(&set.map(|leaf| (leaf.key(), leaf.source.as_str())).collect::<Vec<_>>());
    if problems.has_errors() {
        return Err(ConfigError { problems });
    }
    let values = sound.iter().map(|leaf| shown(leaf)).collect();
    Ok(Loaded { config, values, warnings: problems.warnings().cloned().collect() })
}

/// Whether a key has been complained of already, or belongs to a handler whose kind is not known.
fn is_beside_the_point(key: &str, unsound: &[&Leaf]) -> bool {
    unsound.iter().any(|leaf| match leaf.path.as_slice() {
        [handlers, name, kind] if handlers == "handlers" && kind == "kind" => {
            key.starts_with(&format!("handlers.{name}."))
        }
        _ => leaf.key() == key,
    })
}

/// Whether a value has a key that exists and the type that key wants.
///
/// Each is tried alone against the defaults, so that one bad value does not hide the next.
fn is_sound(leaf: &Leaf, problems: &mut Problems) -> bool {
    let key = leaf.key();
    if let Known::No { did_you_mean } = known(&leaf.path) {
        let hint = did_you_mean.map(|known| format!("; did you mean {known}?")).unwrap_or_default();
        problems.error(&key, format!("no such key{hint}"));
        return false;
    }
    match leaf.alone().try_deserialize::<Config>() {
        Ok(_) => true,
        Err(error) => {
            problems.error(&key, complaint(leaf, error));
            false
        }
    }
}

/// What may stand there and what does, in a person's words; a secret's value is left out.
fn complaint(leaf: &Leaf, error: ::config::ConfigError) -> String {
    let key = leaf.key();
    if is_secret(&key) {
        return "the value has the wrong type".into();
    }
    let Some(rule) = Wanted::at::<Config>(&leaf.path).and_then(|wanted| wanted.rule(&key)) else {
        return reason(error);
    };
    let found = match &leaf.value.kind {
        ValueKind::String(text) => format!("{text:?}"),
        ValueKind::Table(_) => "a table".into(),
        ValueKind::Array(_) => "a list".into(),
        other => other.to_string(),
    };
    format!("{rule}, not {found}")
}

/// The config crate's error without its wrapping.
fn reason(error: ::config::ConfigError) -> String {
    match error {
        ::config::ConfigError::Type { unexpected, expected, .. } => {
            format!("expected {expected}, found {unexpected}")
        }
        ::config::ConfigError::At { error, .. } => reason(*error),
        ::config::ConfigError::Message(message) => message,
        other => other.to_string(),
    }
}

fn assemble(sound: &[&Leaf], problems: &mut Problems) -> Config {
    let mut tree = Map::new();
    for leaf in sound {
        plant(&mut tree, &leaf.path, leaf.value.clone());
    }
    match Value::new(None, ValueKind::Table(tree)).try_deserialize() {
        Ok(config) => config,
        Err(error) => {
            // Every value was good alone, so this is a value beside a table of the same name.
            problems.error("configuration", reason(error));
            Config::default()
        }
    }
}

fn plant(table: &mut Map<String, Value>, path: &[String], value: Value) {
    let Some((name, below)) = path.split_first() else { return };
    if below.is_empty() {
        table.entry(name.clone()).or_insert(value);
        return;
    }
    let inner = table.entry(name.clone()).or_insert_with(|| Value::new(None, ValueKind::Table(Map::new())));
    if let ValueKind::Table(inner) = &mut inner.kind {
        plant(inner, below, value);
    }
}

fn shown(leaf: &Leaf) -> Shown {
    let key = leaf.key();
    let text = || Secret::new(leaf.value.clone().into_string().unwrap_or_default());
    let value = match key.as_str() {
        // The endpoint is no secret, but people write users and passwords into URLs.
        "database.url" | "database.direct_url" | "redis.url" | "outputs.s3.endpoint"
            if !text().is_empty() =>
        {
            text().masked_url().into()
        }
        key if is_secret(key) && !text().is_empty() => REDACTED.into(),
        key if key.starts_with("handlers.") && key.ends_with(".url") => text().masked_address().into(),
        _ => leaf.value.clone().try_deserialize().unwrap_or(serde_json::Value::Null),
    };
    Shown { key, value, source: leaf.source.clone() }
}

impl Config {
    /// Makes the handlers that this configuration declares.
    pub fn registry(&self) -> Result<Registry, BuildError> {
        Registry::open(&self.handlers, &self.queues, &self.database, &Tap::default())
    }

    /// The secret of a key.
    fn secret_at(&mut self, path: &[String]) -> Option<&mut Secret> {
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        match path.as_slice() {
            ["database", "url"] => Some(&mut self.database.url),
            ["database", "direct_url"] => self.database.direct_url.as_mut(),
            ["redis", "url"] => self.redis.url.as_mut(),
            ["outputs", "s3", "access_key"] => Some(&mut self.outputs.s3.access_key),
            ["outputs", "s3", "secret_key"] => Some(&mut self.outputs.s3.secret_key),
            ["handlers", name, "bearer_token"] => self.handlers.get_mut(*name)?.bearer_token.as_mut(),
            ["handlers", name, "secret"] => self.handlers.get_mut(*name)?.secret.as_mut(),
            ["handlers", name, "headers", header @ ..] => {
                self.handlers.get_mut(*name)?.headers.get_mut(&header.join("."))
            }
            _ => None,
        }
    }

    /// What is wrong with values that are good each by itself.
    fn problems(&self, leaves: &[&Leaf]) -> Problems {
        let mut problems = Problems::default();
        self.check(&mut problems);
        for leaf in leaves.iter().filter(|leaf| !leaf.is_default()) {
            if let [section, name, field, ..] = leaf.path.as_slice()
                && section == "handlers"
                && let Some(handler) = self.handlers.get(name)
            {
                handler.kind.refuse_foreign(name, field, &mut problems);
            }
        }
        problems
    }

    fn check(&self, problems: &mut Problems) {
        // Taken apart so that a new section does not compile until it is checked.
        let Self {
            database,
            redis,
            liveness,
            claim,
            batcher,
            completion,
            shutdown,
            outputs,
            http,
            log,
            queues,
            retry,
            retention,
            handlers,
            submit,
        } = self;
        database.check(problems);
        liveness.check(problems);
        redis.check(problems);
        claim.check(problems);
        batcher.check(problems);
        completion.check(problems);
        for (key, problem) in outputs.check() {
            problems.error(key, problem);
        }
        http.check(problems);
        log.check(problems);
        retry.check(problems);
        retention.check(problems);
        submit.check(problems);
        for (name, queue) in queues {
            queue.check(name, problems);
        }
        for (name, handler) in handlers {
            handler.check(name, queues.keys(), problems);
        }
        if shutdown.grace >= KUBERNETES_GRACE {
            problems.warning(
                "shutdown.grace",
                "is not under Kubernetes' default of 30s between SIGTERM and SIGKILL: raise \
                 terminationGracePeriodSeconds above it, or the drain is cut short",
            );
        }
    }
}

#[cfg(test)]
mod tests;
