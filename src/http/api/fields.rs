//! What a request says, by name: query parameters and fields of a JSON object. Every mistake is reported, all at once; a
//! name that no route knows is one.

use super::problem::{Mistake, Problem};
use crate::{json::Json, json::check::check, queue, store::tasks};
use axum::{
    extract::{FromRequestParts, RawPathParams},
    http::{HeaderMap, request::Parts},
};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use std::{collections::BTreeMap, time::Duration};

#[cfg(feature = "fuzzing")]
pub(super) mod fuzzing;

/// Names and numbers of the path.
#[derive(Debug)]
pub(super) struct Place(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for Place {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let params = RawPathParams::from_request_parts(parts, state)
            .await
            .map_err(|_| Problem::mistake("path", "is not UTF-8"))?;
        Ok(Self(params.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()))
    }
}

impl Place {
    fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }

    pub(super) fn id(&self) -> Result<i64, Problem> {
        id(self.get("id")).map_err(|problem| Problem::mistake("id", problem))
    }

    /// Of a queue.
    pub(super) fn name(&self) -> Result<String, Problem> {
        name(self.get("name")).map_err(|problem| Problem::mistake("name", problem))
    }

    /// A word that is looked up and goes nowhere else.
    pub(super) fn word(&self, name: &str) -> Result<&str, Problem> {
        let word = self.get(name);
        match word.contains('\0') {
            true => Err(Problem::mistake(name, "has a NUL in it")),
            false => Ok(word),
        }
    }
}

/// The parameters of a query.
#[derive(Debug)]
pub(super) struct Query {
    given: BTreeMap<String, Vec<String>>,
    mistakes: Vec<Mistake>,
}

impl<S: Sync> FromRequestParts<S> for Query {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        Ok(Self::parse(parts.uri.query().unwrap_or_default()))
    }
}

impl Query {
    fn parse(query: &str) -> Self {
        let mut given: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            given.entry(name.into_owned()).or_default().push(value.into_owned());
        }
        Self { given, mistakes: Vec::new() }
    }

    fn blame(&mut self, name: &str, problem: impl Into<String>) {
        self.mistakes.push(Mistake { name: name.into(), problem: problem.into() });
    }

    pub(super) fn many<T>(&mut self, name: &str, parse: impl Fn(&str) -> Result<T, String>) -> Vec<T> {
        let given = self.given.remove(name).unwrap_or_default();
        let (mut values, mut problems) = (Vec::new(), Vec::new());
        for text in given {
            match parse(&text) {
                Ok(value) => values.push(value),
                Err(problem) => problems.push(problem),
            }
        }
        problems.into_iter().for_each(|problem| self.blame(name, problem));
        values
    }

    pub(super) fn one<T>(&mut self, name: &str, parse: impl Fn(&str) -> Result<T, String>) -> Option<T> {
        let mut values = self.many(name, parse);
        if values.len() > 1 {
            self.blame(name, "is given more than once");
        }
        values.pop()
    }

    pub(super) fn required<T: Default>(
        &mut self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> T {
        if !self.given.contains_key(name) {
            self.blame(name, "is required");
        }
        self.one(name, parse).unwrap_or_default()
    }

    pub(super) fn flag(&mut self, name: &str) -> bool {
        self.one(name, one_of(&["true", "false"])).is_some_and(|word| word == "true")
    }

    pub(super) fn refuse(&mut self, name: &str, problem: &str) {
        self.blame(name, problem);
    }

    /// Everything that was asked for has been taken: what is left is a mistake.
    pub(super) fn done(mut self) -> Result<(), Problem> {
        let unknown: Vec<String> = std::mem::take(&mut self.given).into_keys().collect();
        unknown.iter().for_each(|name| self.blame(&shown(name), "there is no such parameter"));
        if self.mistakes.is_empty() { Ok(()) } else { Err(Problem::mistakes(self.mistakes)) }
    }
}

/// The fields of a JSON object.
#[derive(Debug)]
pub(super) struct Object {
    given: BTreeMap<String, Box<RawValue>>,
    mistakes: Vec<Mistake>,
}

impl Object {
    pub(super) fn parse(body: &[u8]) -> Result<Self, Problem> {
        let text = str::from_utf8(body).map_err(|_| Problem::mistake("body", "is not UTF-8"))?;
        // Our own reader says where, and quotes nothing.
        check(text).map_err(|refusal| {
            Problem::mistake("body", format!("at byte {}: {}", refusal.offset, refusal.fault))
        })?;
        match serde_json::from_str(text) {
            Ok(given) => Ok(Self { given, mistakes: Vec::new() }),
            Err(_) => Err(Problem::mistake("body", "must be a JSON object")),
        }
    }

    fn blame(&mut self, name: &str, problem: impl Into<String>) {
        self.mistakes.push(Mistake { name: name.into(), problem: problem.into() });
    }

    /// A value as JSON; `null` is a value.
    pub(super) fn json(&mut self, name: &str) -> Option<Json> {
        self.given.remove(name).map(|raw| Json::from_text(raw.get()))
    }

    /// A field that `null` leaves out, too.
    pub(super) fn one<T: DeserializeOwned, U>(
        &mut self,
        name: &str,
        expected: &str,
        parse: impl Fn(T) -> Result<U, String>,
    ) -> Option<U> {
        let raw = self.given.remove(name)?;
        if raw.get() == "null" {
            return None;
        }
        let value = serde_json::from_str(raw.get()).map_err(|_| format!("must be {expected}"));
        match value.and_then(parse) {
            Ok(value) => Some(value),
            Err(problem) => {
                self.blame(name, problem);
                None
            }
        }
    }

    pub(super) fn text<U>(&mut self, name: &str, parse: impl Fn(&str) -> Result<U, String>) -> Option<U> {
        self.one(name, "a string", |text: String| parse(&text))
    }

    pub(super) fn required(&mut self, name: &str) -> bool {
        let is_there = self.given.get(name).is_some_and(|raw| raw.get() != "null");
        if !is_there {
            self.blame(name, "is required");
        }
        is_there
    }

    pub(super) fn refuse(&mut self, name: &str, problem: &str) {
        self.blame(name, problem);
    }

    pub(super) fn done(mut self) -> Result<(), Problem> {
        let unknown: Vec<String> = std::mem::take(&mut self.given).into_keys().collect();
        unknown.iter().for_each(|name| self.blame(&shown(name), "there is no such field"));
        if self.mistakes.is_empty() { Ok(()) } else { Err(Problem::mistakes(self.mistakes)) }
    }
}

/// A name that a client made up, fit to be shown.
fn shown(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(50).collect()
}

/// The longest idempotency or dedup key.
const LONGEST_KEY: usize = 255;

/// The header `Idempotency-Key`.
pub(super) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    const NAME: &str = "idempotency-key";
    let mut given = headers.get_all(NAME).iter();
    let Some(first) = given.next() else { return Ok(None) };
    if given.next().is_some() {
        return Err(Problem::mistake(NAME, "is given more than once"));
    }
    let text = first.to_str().map_err(|_| Problem::mistake(NAME, "must be printable ASCII"))?;
    key(text).map(Some).map_err(|problem| Problem::mistake(NAME, problem))
}

pub(super) fn key(text: &str) -> Result<String, String> {
    match text {
        "" => Err("is empty".into()),
        _ if text.chars().count() > LONGEST_KEY => Err(format!("must have at most {LONGEST_KEY} characters")),
        _ if text.chars().any(char::is_control) => Err("has a control character in it".into()),
        _ => Ok(text.to_owned()),
    }
}

/// Of a queue or a command.
pub(super) fn name(text: &str) -> Result<String, String> {
    match queue::is_valid_name(text) {
        true => Ok(text.to_owned()),
        false => {
            Err("a name is letters, digits and _-.: only, at most 100, and begins with none of -.:".into())
        }
    }
}

pub(super) fn id(text: &str) -> Result<i64, String> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(id) if is_plain && id > 0 => Ok(id),
        _ => Err("must be the number of one".into()),
    }
}

pub(super) fn number<T>(least: T, most: T) -> impl Fn(&str) -> Result<T, String>
where
    T: std::str::FromStr + PartialOrd + std::fmt::Display,
{
    move |text| match text.parse() {
        Ok(number) if number >= least && number <= most && !text.starts_with('+') => Ok(number),
        _ => Err(format!("must be a whole number from {least} to {most}")),
    }
}

pub(super) fn one_of(words: &'static [&'static str]) -> impl Fn(&str) -> Result<&'static str, String> {
    move |text| match words.iter().find(|word| **word == text) {
        Some(word) => Ok(word),
        None => Err(format!("must be one of {}", words.join(", "))),
    }
}

/// A hundred years: what is longer is a slip, and near what a timestamp can hold.
const LONGEST: Duration = Duration::from_secs(100 * 366 * 86_400);

pub(super) fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration <= LONGEST => Ok(duration),
        Ok(_) => Err("must be at most a hundred years".into()),
        Err(_) => Err("must be a time such as 500ms, 30s or 1h 30m".into()),
    }
}

/// How long an attempt may take.
pub(super) fn time_limit(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        limit if limit > tasks::LONGEST_TIMEOUT => Err("must be at most 24 days".into()),
        limit if limit < Duration::from_millis(1) => Err("must be at least 1ms".into()),
        limit => Ok(limit),
    }
}

pub(super) fn priority(text: &str) -> Result<i32, String> {
    number(*tasks::PRIORITIES.start(), *tasks::PRIORITIES.end())(text)
}

pub(super) fn max_attempts(text: &str) -> Result<i32, String> {
    number(1, tasks::MOST_ATTEMPTS)(text)
}

/// JSON in a text.
pub(super) fn json_text(text: &str) -> Result<Json, String> {
    check(text).map_err(|refusal| {
        format!("not JSON that can be stored: at byte {}: {}", refusal.offset, refusal.fault)
    })?;
    Ok(Json::from_text(text))
}
