//! The deployment's files as values: rendered by kubectl, read by Python's YAML, without a cluster.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Map, Value, json};

use super::run;

/// The tree of this source.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where `make setup-test` puts the tools of these tests. Without one the test is skipped, and says so; in CI a skip is a
/// failure.
pub(crate) fn has(what: &str) -> bool {
    let there = Command::new("sh")
        .arg(root().join("scripts/setup.sh"))
        .args(["--check", what])
        .status()
        .is_ok_and(|status| status.success());
    // No distribution of ours has Valkey; who packs it elsewhere may stop, and Redis is tested all the same.
    let must = std::env::var_os("CI").is_some() && what != "valkey";
    assert!(there || !must, "{what} is missing: make setup-test");
    if !there {
        println!("SKIPPED: {what} is missing: make setup-test");
    }
    there
}

/// A program that must succeed; what it printed.
pub(crate) fn run_it(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}:\n{}{}", text(&output.stdout), text(&output.stderr));
    output
}

/// Python with the tools beside the build.
pub(crate) fn python(args: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command.args(args).env("PYTHONPATH", root().join("target/deploy-tools/python"));
    command
}

/// The documents of a YAML text.
pub(crate) fn yaml(text: &[u8]) -> Vec<Value> {
    let read = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin))))";
    let mut child = python(&["-c", read]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "not YAML");
    serde_json::from_slice(&output.stdout).unwrap()
}

pub(crate) fn yaml_file(path: &str) -> Value {
    let text = std::fs::read(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    yaml(&text).remove(0)
}

/// Everything that may be applied: the base, and every overlay.
pub(crate) fn overlays() -> Vec<String> {
    let mut all = vec!["deploy/base".to_owned()];
    for entry in std::fs::read_dir(root().join("deploy/overlays")).unwrap() {
        all.push(format!("deploy/overlays/{}", entry.unwrap().file_name().to_str().unwrap()));
    }
    all.sort();
    assert!(all.len() >= 3, "{all:?}");
    all
}

/// What `kubectl kustomize` makes of a directory.
pub(crate) fn render(overlay: &str) -> (PathBuf, Vec<Value>) {
    let text = match is_old() {
        false => run_it(Command::new("kubectl").arg("kustomize").arg(root().join(overlay))).stdout,
        true => {
            let copy = run::new_dir("kustomize");
            run_it(Command::new("cp").arg("-r").arg(root().join("deploy")).arg(&copy));
            translate(&copy.join("deploy"));
            run_it(Command::new("kubectl").arg("kustomize").arg(copy.join(overlay))).stdout
        }
    };
    let file = run::new_dir("rendered").join("all.yaml");
    std::fs::write(&file, &text).unwrap();
    let documents = yaml(&text);
    assert!(documents.len() > 4, "{overlay} renders {} documents", documents.len());
    (file, documents)
}

/// Debian's kubectl is 1.20, which has kustomize 2 inside; the words of today's kustomize were not known then.
fn is_old() -> bool {
    let output = run_it(Command::new("kubectl").args(["version", "--client", "-o", "json"])).stdout;
    let version: Value = serde_json::from_slice(&output).unwrap();
    let minor = version["clientVersion"]["minor"].as_str().unwrap_or_default();
    version["kustomizeVersion"].is_null()
        && minor.trim_end_matches('+').parse::<u32>().is_ok_and(|minor| minor < 22)
}

/// The same kustomizations in the words of kustomize 2.
fn translate(dir: &Path) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            translate(&path);
        } else if path.file_name().is_some_and(|name| name == "kustomization.yaml") {
            let Value::Object(mut today) = yaml(&std::fs::read(&path).unwrap()).remove(0) else { panic!() };
            older_words(dir, &mut today);
            // JSON is YAML.
            std::fs::write(&path, Value::Object(today).to_string()).unwrap();
        }
    }
}

fn older_words(dir: &Path, kustomization: &mut Map<String, Value>) {
    let (bases, files): (Vec<Value>, Vec<Value>) = list(kustomization.remove("resources"))
        .into_iter()
        .partition(|resource| dir.join(resource.as_str().unwrap()).is_dir());
    kustomization.insert("bases".into(), bases.into());
    kustomization.insert("resources".into(), files.into());
    for label in list(kustomization.remove("labels")) {
        kustomization.insert("commonLabels".into(), label["pairs"].clone());
    }
    let patches: Vec<Value> =
        list(kustomization.remove("patches")).into_iter().map(|patch| patch["path"].clone()).collect();
    kustomization.insert("patchesStrategicMerge".into(), patches.into());
    for generator in list_mut(kustomization.get_mut("configMapGenerator")) {
        generator.as_object_mut().unwrap().remove("options");
    }
}

fn list(value: Option<Value>) -> Vec<Value> {
    match value {
        Some(Value::Array(list)) => list,
        Some(other) => vec![other],
        None => Vec::new(),
    }
}

fn list_mut(value: Option<&mut Value>) -> impl Iterator<Item = &mut Value> {
    value.and_then(Value::as_array_mut).into_iter().flatten()
}

/// The documents of a kind.
pub(crate) fn of_kind<'a>(documents: &'a [Value], kind: &str) -> Vec<&'a Value> {
    documents.iter().filter(|document| document["kind"] == kind).collect()
}

/// Every path of keys in a value, lists left out: `spec.template.metadata`.
pub(crate) fn paths(value: &Value, prefix: &str, into: &mut std::collections::BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                into.insert(path.clone());
                paths(value, &path, into);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| paths(value, prefix, into)),
        _ => {}
    }
}

/// A value somewhere in a document that must be there.
pub(crate) fn at<'a>(document: &'a Value, pointer: &str) -> &'a Value {
    document.pointer(pointer).unwrap_or_else(|| panic!("no {pointer} in {}", json!(document)))
}
