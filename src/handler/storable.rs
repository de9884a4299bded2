//! What PostgreSQL cannot hold is found out where an outcome comes in, before it costs a flush: it fails its own row.

use super::{Done, Failed, Outcome};
use crate::{
    error_group::ErrorGroup,
    json::{Json, check},
    objects::file_name_problem,
    store::{flush::Failure, tasks::TaskEnd},
};
use std::{borrow::Cow, collections::BTreeMap};

/// A success as it is stored: every value is one line of JSON that `jsonb` can hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    pub result: Option<Json>,
    /// Output text by file name, as a JSON object.
    pub outputs: Option<Json>,
    pub append: Vec<Json>,
}

impl Done {
    /// Checks everything that is to be stored; the error is the row's.
    pub fn stored(self) -> Result<Stored, String> {
        let result = self.result.map(one_line).transpose();
        let append: Result<Vec<Json>, (usize, String)> = self
            .append
            .into_iter()
            .enumerate()
            .map(|(place, row)| one_line(row).map_err(|fault| (place + 1, fault)))
            .collect();
        Ok(Stored {
            result: result.map_err(|fault| format!("the result cannot be stored: {fault}"))?,
            outputs: outputs_json(&self.outputs)?,
            append: append
                .map_err(|(place, fault)| format!("appended row {place} cannot be stored: {fault}"))?,
        })
    }
}

impl Failed {
    /// What is stored of a line that failed. What cannot be stored of it is named in its error, and the rest is kept.
    pub fn stored(self, line: i32) -> Failure {
        let (mut error, mut problems) = (self.error, Vec::new());
        let result = self.result.map(one_line).transpose().unwrap_or_else(|fault| {
            problems.push(format!("the result cannot be stored: {fault}"));
            None
        });
        let outputs = outputs_json(&self.outputs).unwrap_or_else(|fault| {
            problems.push(fault);
            None
        });
        // The group is that of what the handler said.
        let group = ErrorGroup::of(&error, self.code.as_deref());
        if !problems.is_empty() {
            error = format!("{} ({})", text(error), problems.join("; "));
        }
        Failure { line, error: text(error), code: self.code, group, result, outputs }
    }
}

impl Failed {
    /// What is stored of a task that failed.
    pub fn of_task(self) -> TaskEnd {
        let Failure { error, result, .. } = self.stored(0);
        TaskEnd::Failed { error, result }
    }
}

/// The text of an error as it can be stored: without NUL, and no longer than a person would read.
pub(crate) fn text(mut error: String) -> String {
    const LONGEST: usize = 8 << 10;
    if error.contains('\0') {
        error = error.replace('\0', "\u{fffd}");
    }
    if error.len() > LONGEST {
        error.truncate(error.floor_char_boundary(LONGEST));
        error.push('…');
    }
    error
}

impl Outcome {
    /// The outcome as it will be stored: a success that cannot be is a failure.
    pub fn checked(self) -> Self {
        match self {
            Self::Succeeded(done) => match done.clone().stored() {
                Ok(_) => Self::Succeeded(done),
                Err(error) => Self::Failed(error.into()),
            },
            other => other,
        }
    }
}

/// JSON that PostgreSQL can hold, on one line.
fn one_line(json: Json) -> Result<Json, String> {
    let line = check::one_line(json.text()).map_err(|refusal| refusal.fault.to_string())?;
    match line.text {
        Cow::Borrowed(text) if text.len() == json.len() => Ok(json),
        text => Ok(Json::from_text(text.into_owned())),
    }
}

/// Output text by file name. Text for the same file is joined in the order it was given. A name that cannot be a
/// file's is the row's own error.
fn outputs_json(outputs: &[(String, String)]) -> Result<Option<Json>, String> {
    if outputs.is_empty() {
        return Ok(None);
    }
    let mut by_name: BTreeMap<&str, String> = BTreeMap::new();
    for (name, text) in outputs {
        if let Some(problem) = file_name_problem(name) {
            return Err(format!("{name:?} cannot name an output file: {problem}"));
        }
        if text.contains('\0') {
            return Err("the output text cannot be stored: it has a NUL character".to_owned());
        }
        by_name.entry(name).or_default().push_str(text);
    }
    Json::of(&by_name).map(Some).map_err(|error| format!("the outputs cannot be written: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(result: &str) -> Done {
        Done { result: Some(Json::from_text(result)), ..Done::default() }
    }

    #[test]
    fn values_come_out_on_one_line_and_otherwise_as_they_were() {
        let stored = done("{\"a\":\n  1.10,\r\n\"b\": \"\\n\"}").stored().unwrap();
        assert_eq!(stored.result.unwrap().text(), "{\"a\":   1.10,  \"b\": \"\\n\"}");
    }

    #[test]
    fn a_row_that_failed_keeps_its_error_and_says_what_of_it_cannot_be_stored() {
        let failed = |result: &str, name: &str| Failed {
            result: Some(Json::from_text(result)),
            outputs: vec![(name.into(), "x\n".into())],
            ..Failed::coded("declined", "no\0".into())
        };
        let good = failed("{\n}", "a.txt").stored(7);
        assert_eq!((good.line, &*good.error, good.code.as_deref()), (7, "no\u{fffd}", Some("declined")));
        assert_eq!(good.result.unwrap().text(), "{ }");
        assert_eq!(good.outputs.unwrap().text(), r#"{"a.txt":"x\n"}"#);
        let bad = failed(r#""\u0000""#, "a/b").stored(7);
        assert!(bad.result.is_none() && bad.outputs.is_none() && bad.group == good.group);
        assert!(
            bad.error.starts_with("no") && bad.error.contains("result cannot be stored"),
            "{}",
            bad.error
        );
        assert!(bad.error.contains("cannot name an output file"), "{}", bad.error);
    }

    #[test]
    fn what_cannot_be_stored_fails_its_own_row() {
        for text in [r#""\u0000""#, r#""\ud800""#, "1e200000", "[1,", "", &"[".repeat(200)] {
            assert!(done(text).stored().unwrap_err().contains("the result cannot be stored"), "{text}");
        }
        let outputs =
            |name: &str, text: &str| Done { outputs: vec![(name.into(), text.into())], ..Done::default() };
        assert!(outputs("a/b", "x").stored().is_err() && outputs("a", "\0").stored().is_err());
        assert_eq!(outputs("a", "x\n").stored().unwrap().outputs.unwrap().text(), r#"{"a":"x\n"}"#);
        let append = Done { append: vec![Json::from_text("1"), Json::from_text("{")], ..Done::default() };
        assert!(append.stored().unwrap_err().contains("appended row 2"));
    }
}
