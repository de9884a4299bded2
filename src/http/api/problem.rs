//! Every error of the API is a problem document (RFC 9457): what is wrong and what to do, never a payload or a secret.

use crate::{
    error_text::describe,
    flow::{export::ExportError, input::InputError, submit::SubmitError},
    objects::ObjectError,
    store::{
        fault::{self, Fault},
        retention,
        steering::SteeringError,
        submissions::SubmissionError,
    },
};
use axum::{
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use deadpool_postgres::PoolError;
use serde::Serialize;
use tokio_postgres::error::SqlState;

/// An error as the client gets it.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    status: StatusCode,
    code: &'static str,
    detail: String,
    errors: Vec<Mistake>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

/// One thing that is wrong with the request.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Mistake {
    /// The parameter, field or header.
    pub(crate) name: String,
    pub(crate) problem: String,
}

#[derive(Serialize)]
struct Document<'a> {
    r#type: &'static str,
    title: &'a str,
    status: u16,
    detail: &'a str,
    code: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    errors: &'a [Mistake],
}

pub(crate) const MEDIA_TYPE: &str = "application/problem+json";

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Self {
        Self { status, code, detail: detail.into(), errors: Vec::new(), headers: Vec::new() }
    }

    pub(crate) fn with(mut self, name: HeaderName, value: impl TryInto<HeaderValue>) -> Self {
        self.headers.extend(value.try_into().ok().map(|value| (name, value)));
        self
    }

    /// Says when to come back.
    pub(crate) fn retry_after(self, seconds: u64) -> Self {
        self.with(header::RETRY_AFTER, seconds.max(1).to_string())
    }

    pub(crate) fn not_found(what: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", format!("there is no {what}"))
    }

    /// The request cannot be understood: every mistake of it at once.
    pub(crate) fn mistakes(errors: Vec<Mistake>) -> Self {
        let sentences: Vec<String> =
            errors.iter().map(|mistake| format!("{}: {}", mistake.name, mistake.problem)).collect();
        Self { errors, ..Self::new(StatusCode::BAD_REQUEST, "invalid_request", sentences.join("; ")) }
    }

    pub(crate) fn mistake(name: &str, problem: impl Into<String>) -> Self {
        Self::mistakes(vec![Mistake { name: name.into(), problem: problem.into() }])
    }

    pub(crate) fn internal(error: &(dyn std::error::Error + 'static)) -> Self {
        tracing::error!(error = describe(error), "a request failed");
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal",
            "this is a fault of the server; its log says more",
        )
    }

    fn unavailable(detail: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", detail).retry_after(2)
    }

    pub(crate) fn starting() -> Self {
        Self::unavailable("the daemon is starting; try again")
    }

    /// As many of these as may be at a time are under way.
    pub(crate) fn busy(what: &str) -> Self {
        let detail = format!("too many {what}; try again");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "busy", detail).retry_after(2)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let document = Document {
            r#type: "about:blank",
            title: self.status.canonical_reason().unwrap_or("Error"),
            status: self.status.as_u16(),
            detail: &self.detail,
            code: self.code,
            errors: &self.errors,
        };
        // A struct of texts and numbers: it cannot fail.
        let body = serde_json::to_vec(&document).unwrap_or_default();
        let mut response = (self.status, [(header::CONTENT_TYPE, MEDIA_TYPE)], body).into_response();
        response.headers_mut().extend(self.headers);
        response
    }
}

impl From<PoolError> for Problem {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Timeout(deadpool_postgres::TimeoutType::Wait) => {
                Self::busy("requests at a time (http.connections)")
            }
            error => {
                tracing::warn!(error = describe(&error), "the API has no connection to the database");
                Self::unavailable("the database cannot be reached; try again")
            }
        }
    }
}

impl From<tokio_postgres::Error> for Problem {
    fn from(error: tokio_postgres::Error) -> Self {
        if let Some(problem) = error.as_db_error().and_then(in_words) {
            return problem;
        }
        match fault::of(&error) {
            // The words of the server may quote the value.
            Fault::Row => Self::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                "not_storable",
                "the database cannot store a value of this request",
            ),
            Fault::Transient | Fault::Busy => {
                tracing::warn!(error = describe(&error), "a request failed in the database");
                Self::unavailable("the database did not answer in time or was interrupted; try again")
            }
            Fault::Systemic => Self::internal(&error),
        }
    }
}

/// Our functions raise in a person's words. A constraint of a table does not, and its words are the server's.
fn in_words(error: &tokio_postgres::error::DbError) -> Option<Problem> {
    let (status, code) = match *error.code() {
        ref code if code.code() == retention::GONE => (StatusCode::GONE, "data_gone"),
        SqlState::NO_DATA_FOUND => (StatusCode::NOT_FOUND, "not_found"),
        SqlState::UNIQUE_VIOLATION => (StatusCode::CONFLICT, "conflict"),
        SqlState::INVALID_PARAMETER_VALUE => (StatusCode::UNPROCESSABLE_ENTITY, "not_storable"),
        SqlState::CHECK_VIOLATION if error.constraint().is_none() => (StatusCode::CONFLICT, "conflict"),
        _ => return None,
    };
    let hint = error.hint().map(|hint| format!(" ({hint})")).unwrap_or_default();
    Some(Problem::new(status, code, format!("{}{hint}", error.message())))
}

impl From<SteeringError> for Problem {
    fn from(error: SteeringError) -> Self {
        match error {
            SteeringError::Unknown { id } => Self::not_found(&format!("batch {id}")),
            SteeringError::Query { source, .. } => source.into(),
        }
    }
}

impl From<SubmitError> for Problem {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::Input(error) => error.into(),
            SubmitError::TooMany => too_large(error.to_string()),
            SubmitError::NotExported { .. } => invalid_rows(error.to_string()),
            SubmitError::Store(SubmissionError::Query { source, .. }) => source.into(),
            SubmitError::Store(error) => Self::new(StatusCode::CONFLICT, "conflict", error.to_string()),
            SubmitError::ReaderDied => Self::internal(&error),
        }
    }
}

impl From<InputError> for Problem {
    fn from(error: InputError) -> Self {
        match &error {
            InputError::Read { source, .. } if source.kind() == std::io::ErrorKind::TimedOut => Self::new(
                StatusCode::REQUEST_TIMEOUT,
                "timeout",
                "the body did not come in time (http.body_timeout, http.upload_timeout); nothing was submitted",
            ),
            InputError::Read { .. } => Self::new(
                StatusCode::BAD_REQUEST,
                "broken_off",
                "the body broke off before its end; nothing was submitted",
            ),
            InputError::RowTooLarge { .. } | InputError::RowExpands { .. } => too_large(error.to_string()),
            _ => invalid_rows(error.to_string()),
        }
    }
}

fn too_large(detail: String) -> Problem {
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail)
}

fn invalid_rows(detail: String) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_rows", detail)
}

impl From<ExportError> for Problem {
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::Query(error) => error.into(),
            ExportError::Write(_) => Self::internal(&error),
            // The inputs do not fit into the columns that were asked for.
            _ => Self::new(StatusCode::CONFLICT, "conflict", error.to_string()),
        }
    }
}

impl From<ObjectError> for Problem {
    fn from(error: ObjectError) -> Self {
        match &error {
            ObjectError::NotFound { .. } => Self::not_found("such output file any more"),
            _ => {
                tracing::warn!(error = describe(&error), "an output file could not be read");
                Self::unavailable("the store of the output files did not give it; try again")
            }
        }
    }
}
