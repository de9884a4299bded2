//! Where values come from: the shipped file, the user's file, the environment, flags; later ones win.

use super::{Config, is_secret, lines, wanted::Wanted};
use crate::{problems::Problems, secret::Secret};
use config::{Environment, File, FileFormat, Map, Source, Value, ValueKind};
use std::{
    collections::{BTreeMap, btree_map::Entry},
    path::{Path, PathBuf},
};

/// The file we ship is the defaults: one list, with a sentence for every key.
pub const SHIPPED: &str = include_str!("../../config/musterd.toml");

pub const ENV_PREFIX: &str = "MUSTERD";

/// The source of what is not set.
const DEFAULT: &str = "default";

/// What a user gave besides the defaults.
#[derive(Clone, Debug, Default)]
pub struct Given {
    pub file: Option<PathBuf>,
    /// `section.key=value`, from `--set`.
    pub flags: Vec<String>,
    /// The variables to read; `None` reads the process's own.
    pub env: Option<Vec<(String, String)>>,
    /// What a running `musterd dev` sets, beneath everything else that is given.
    pub dev: Vec<(String, String)>,
}

/// One value with its dotted path and a person's word for its source.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    pub(super) path: Vec<String>,
    pub(super) value: Value,
    pub(super) source: String,
    /// The file whose contents the value is.
    pub(super) file: Option<PathBuf>,
}

impl Leaf {
    pub(super) fn is_default(&self) -> bool {
        self.source == DEFAULT
    }

    pub(super) fn key(&self) -> String {
        self.path.join(".")
    }

    /// This value alone, as a tree from the root.
    pub(super) fn alone(&self) -> Value {
        self.path.iter().rev().fold(self.value.clone(), |inner, name| {
            Value::new(None, ValueKind::Table(Map::from_iter([(name.clone(), inner)])))
        })
    }
}

/// All layers laid over each other; the last one to name a key wins.
pub(super) struct Layers<'a> {
    pub(super) leaves: BTreeMap<Vec<String>, Leaf>,
    problems: &'a mut Problems,
}

/// How a layer writes its keys: nested tables, or one flat table of dotted names.
#[derive(Clone, Copy, PartialEq)]
enum Shape {
    Nested,
    Dotted,
}

impl<'a> Layers<'a> {
    pub(super) fn merge(given: &Given, problems: &'a mut Problems) -> Self {
        let mut layers = Self { leaves: BTreeMap::new(), problems };
        layers.lay(File::from_str(SHIPPED, FileFormat::Toml).collect(), Shape::Nested, |_| DEFAULT.into());
        let dev: Map<String, Value> =
            given.dev.iter().map(|(key, value)| (key.clone(), Value::new(None, value.clone()))).collect();
        layers.lay(Ok(dev), Shape::Dotted, |_| "the running `musterd dev`".into());
        if let Some(path) = &given.file {
            layers.lay_file(path);
        }
        layers.lay(environment(given).collect(), Shape::Dotted, variable_of);
        let flags = layers.flags(&given.flags);
        layers.lay(Ok(flags), Shape::Dotted, |path| format!("flag --set {}", path.join(".")));
        layers
    }

    fn lay_file(&mut self, path: &Path) {
        let name = path.display().to_string();
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => {
                return self.problems.error(name, format!("cannot read the configuration file: {error}"));
            }
        };
        if let Err(error) = text.parse::<toml::Table>() {
            return self.problems.error(name, format!("not valid TOML{}", toml_mistake(&text, &error)));
        }
        let lines = lines::of(&text);
        self.lay(File::from_str(&text, FileFormat::Toml).collect(), Shape::Nested, |path| {
            let line = lines.get(path).map(|line| format!(":{line}")).unwrap_or_default();
            format!("file {name}{line}")
        });
    }

    fn flags(&mut self, flags: &[String]) -> Map<String, Value> {
        let mut table = Map::new();
        for flag in flags {
            match flag.split_once('=') {
                Some((key, value)) => {
                    table.insert(key.trim().to_owned(), Value::new(None, value.to_owned()));
                }
                None => self.problems.error(format!("--set {flag}"), "must be written section.key=value"),
            }
        }
        table
    }

    fn lay(
        &mut self,
        layer: Result<Map<String, Value>, config::ConfigError>,
        shape: Shape,
        source: impl Fn(&[String]) -> String,
    ) {
        let table = match layer {
            Ok(table) => table,
            Err(error) => return self.problems.error(source(&[]), error.to_string()),
        };
        let mut found = Vec::new();
        flatten(&[], &table, shape, &mut found);
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        let mut laid = BTreeMap::new();
        for (path, value) in found {
            let leaf = Leaf { source: source(&path), path, value, file: None };
            let written = leaf.key();
            let Some(leaf) = self.open_secret_file(leaf) else { continue };
            match laid.entry(leaf.path.clone()) {
                Entry::Occupied(other) => {
                    let twice = format!("is set twice, by {} and by {written}: keep one", other.get());
                    self.problems.error(leaf.key(), twice);
                }
                Entry::Vacant(place) => {
                    place.insert(written);
                    self.leaves.insert(leaf.path.clone(), leaf);
                }
            }
        }
    }

    /// `secret_file = "path"` stands for `secret = "<what the file holds>"`, in any layer.
    fn open_secret_file(&mut self, mut leaf: Leaf) -> Option<Leaf> {
        let key = leaf.key();
        let Some(secret_key) = key.strip_suffix("_file").filter(|key| is_secret(key)) else {
            return Some(leaf);
        };
        let file = leaf.value.clone().into_string().unwrap_or_default();
        match Secret::from_file(Path::new(&file)) {
            Ok(secret) => {
                leaf.value = Value::new(None, secret.expose().to_owned());
                leaf.source = format!("{}, contents of {file}", leaf.source);
                leaf.path = secret_key.split('.').map(str::to_owned).collect();
                leaf.file = Some(file.into());
                Some(leaf)
            }
            Err(error) => {
                self.problems.error(key, format!("cannot read the secret's file {file}: {error}"));
                None
            }
        }
    }
}

fn environment(given: &Given) -> Environment {
    // Without try_parsing: it would turn the password 00123 into the number 123.
    let environment =
        Environment::with_prefix(ENV_PREFIX).prefix_separator("__").separator("__").ignore_empty(true);
    match &given.env {
        Some(variables) => environment.source(Some(variables.iter().cloned().collect())),
        None => environment,
    }
}

/// Where a file stops being TOML, and why. The line itself is not quoted: it may hold a password.
fn toml_mistake(text: &str, error: &toml::de::Error) -> String {
    let place = error.span().and_then(|span| text.get(..span.start)).map(|before| {
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        format!(" (line {line}, column {column})")
    });
    format!("{}: {}", place.unwrap_or_default(), error.message().replace('\n', ", "))
}

fn variable_of(path: &[String]) -> String {
    format!("environment {ENV_PREFIX}__{}", path.join("__").to_uppercase())
}

/// A variable or flag is text. Where a list or a table belongs it is read as TOML writes one; else it stays as it is.
fn parsed(path: &[String], value: &Value) -> Value {
    let Some(Wanted::List | Wanted::Table(_)) = Wanted::at::<Config>(path) else { return value.clone() };
    let Ok(text) = value.clone().into_string() else { return value.clone() };
    let read = File::from_str(&format!("value = {text}"), FileFormat::Toml).collect();
    match read.ok().filter(|table| table.len() == 1).and_then(|mut table| table.remove("value")) {
        Some(read) if matches!(read.kind, ValueKind::Array(_) | ValueKind::Table(_)) => read,
        _ => value.clone(),
    }
}

/// Every value that is not a table. An empty table counts as one: it may stand where a value belongs.
fn flatten(
    above: &[String],
    table: &Map<String, Value>,
    shape: Shape,
    found: &mut Vec<(Vec<String>, Value)>,
) {
    for (name, value) in table {
        let mut path = above.to_vec();
        match shape {
            Shape::Nested => path.push(name.clone()),
            Shape::Dotted => path.extend(name.split('.').map(str::to_owned)),
        }
        let value = match shape {
            Shape::Nested => value.clone(),
            Shape::Dotted => parsed(&path, value),
        };
        match &value.kind {
            // Below a name that was taken apart the names are as they were written.
            ValueKind::Table(inner) if !inner.is_empty() => flatten(&path, inner, Shape::Nested, found),
            _ => found.push((path, value)),
        }
    }
}
