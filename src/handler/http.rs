//! `http` handlers: a block is one POST, its rows are answered in one reply. At least once.
//!
//! Whatever keeps a reply from coming whole (a slow or broken connection, 5xx, 429, half a body) is a failed try of the rows
//! concerned; a refusal (other 4xx) is final. A service that struggles is asked less: see `http/limit.rs`.

mod address;
mod limit;
mod rate;
mod send;
mod sign;

pub use limit::Limiter;
pub use rate::{RateError, RateLimit};
pub use sign::{BadSecret, Signer};

use super::{
    BlockCall, BuildError, Config, Handler, Intake, Outcome, OutcomeSink, Report, RowCall, TaskCall,
    TaskOutcome,
    protocol::{self, Leftovers},
    sql::Database,
    tap::Tap,
};
use crate::{
    error_text::describe,
    renewed::{Renewed, Stamp},
    secret::Secret,
    store::pages::InputRow,
};
use futures::{FutureExt, future::BoxFuture};
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use send::Answer;
use std::{num::NonZeroUsize, sync::Arc, time::Duration};

/// Rows of one request, unless the configuration says otherwise.
const BLOCK_SIZE: usize = 100;
const CONCURRENCY: u32 = 8;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_REPLY_BYTES: usize = 16 << 20;
const MAX_REQUEST_BYTES: usize = 16 << 20;

/// What is made of secrets and certificates.
#[derive(Debug)]
struct Kit {
    client: reqwest::Client,
    headers: HeaderMap,
    signer: Option<Signer>,
}

impl Kit {
    fn new(name: &str, config: &Config, concurrency: usize) -> Result<Self, BuildError> {
        Ok(Self {
            client: client(name, config, concurrency)?,
            headers: headers(name, config)?,
            signer: match &config.secret {
                Some(secret) => {
                    Some(Signer::new(&now(name, secret)?).map_err(|source| BuildError::Secret {
                        name: name.to_owned(),
                        source: source.into(),
                    })?)
                }
                None => None,
            },
        })
    }

    fn stamps(config: &Config) -> Vec<Stamp> {
        let secrets = config.headers.values().chain(&config.bearer_token).chain(&config.secret);
        let secrets = secrets.filter(|secret| secret.file().is_some()).map(Stamp::of_secret);
        secrets.chain(config.ca_file.as_deref().map(Stamp::of_file)).collect()
    }
}

/// A secret as its file has it now.
fn now(name: &str, secret: &Secret) -> Result<Secret, BuildError> {
    secret.current().map_err(|source| BuildError::Secret { name: name.to_owned(), source: source.into() })
}

/// Posts to one URL.
#[derive(Debug)]
pub struct Http {
    name: String,
    url: url::Url,
    kit: Renewed<Kit>,
    block_size: NonZeroUsize,
    max_reply_bytes: usize,
    max_request_bytes: usize,
    limiter: Limiter,
    rate: Option<rate::Turns>,
    tap: Tap,
}

impl Http {
    /// The configuration was checked. `database` is for the rate limit, which all replicas share.
    pub(super) fn new(
        name: &str,
        config: &Config,
        database: Option<Arc<Database>>,
        tap: Tap,
    ) -> Result<Self, BuildError> {
        let concurrency = config.concurrency.map_or(CONCURRENCY, |given| given.get()) as usize;
        let rate = match (config.rate_limit, database) {
            (Some(limit), Some(database)) => Some(rate::Turns::new(name, limit, database)),
            _ => None,
        };
        let url = config.url.as_deref().unwrap_or_default();
        let (looked, made, own) = (config.clone(), config.clone(), name.to_owned());
        Ok(Self {
            name: name.to_owned(),
            kit: Renewed::new(
                format!("handlers.{name}"),
                move || Kit::stamps(&looked),
                move || Kit::new(&own, &made, concurrency),
            )?,
            url: url.parse().map_err(|_| BuildError::Url { name: name.to_owned() })?,
            block_size: config.block_size.or(NonZeroUsize::new(BLOCK_SIZE)).unwrap_or(NonZeroUsize::MIN),
            max_reply_bytes: config.max_reply_bytes.unwrap_or(MAX_REPLY_BYTES),
            max_request_bytes: config.max_request_bytes.unwrap_or(MAX_REQUEST_BYTES),
            limiter: Limiter::new(name, concurrency),
            rate,
            tap,
        })
    }

    /// One request for `rows`; rows that are too many for one go in halves.
    async fn ask(&self, call: &BlockCall<'_>, rows: &[InputRow<'_>], sink: &OutcomeSink) {
        let mut pieces = vec![rows];
        while let Some(piece) = pieces.pop() {
            let halves = piece.split_at_checked(piece.len() / 2).filter(|(one, _)| !one.is_empty());
            let body = match protocol::rows_request(call, piece) {
                Ok(body) => body,
                Err(error) => {
                    sink.rows(piece, &Outcome::Failed(format!("the row is not JSON: {error}").into()));
                    continue;
                }
            };
            let answer = if body.len() > self.max_request_bytes {
                Answer::TooLarge(
                    format!("the request of {} bytes is above max_request_bytes", body.len()).into(),
                )
            } else {
                self.exchange(body, &protocol::request_key(call, piece), call.timeout, call.traceparent).await
            };
            match (answer, halves) {
                (Answer::Reply(bytes), _) => self.report_reply(call, piece, &bytes, sink),
                (Answer::TooLarge(_), Some((one, other))) => pieces.extend([other, one]),
                (Answer::TooLarge(error) | Answer::Refused(error), _) => {
                    sink.rows(piece, &Outcome::Failed(error));
                }
                (Answer::Later { error, after }, _) => {
                    sink.rows(piece, &Outcome::Retry { error, after });
                }
                // Nor are the other pieces asked for now.
                (Answer::Unavailable { error, after }, _) => {
                    return sink.report(Report::Unavailable { error, after });
                }
            }
        }
    }

    fn report_reply(&self, call: &BlockCall<'_>, rows: &[InputRow<'_>], reply: &[u8], sink: &OutcomeSink) {
        match protocol::read_rows(reply) {
            Ok(reply) => {
                let (assigned, left) = protocol::assign(rows.iter().map(|row| row.line), reply);
                if !left.is_none() {
                    let Leftovers { duplicate, unknown, unreadable, missing } = left;
                    tracing::warn!(
                        handler = self.name,
                        batch = call.block.batch,
                        duplicate,
                        unknown,
                        unreadable,
                        missing,
                        "the reply does not answer what was asked"
                    );
                }
                assigned.into_iter().for_each(|(line, outcome)| sink.row(line, outcome));
            }
            Err(error) => {
                tracing::warn!(handler = self.name, batch = call.block.batch, "the reply cannot be read");
                sink.rows(rows, &Outcome::Retry { error: describe(&error).into(), after: None });
            }
        }
    }
}

impl Handler for Http {
    fn may_block(&self) -> bool {
        false
    }

    fn rest(&self) -> Option<Duration> {
        self.limiter.rest().max(self.rate.as_ref().and_then(rate::Turns::rest))
    }

    fn intake(&self) -> Intake {
        Intake::Together(self.block_size)
    }

    fn row<'a>(&'a self, _: RowCall<'a>) -> BoxFuture<'a, Outcome> {
        let refusal = "this handler takes rows together".to_owned();
        futures::future::ready(Outcome::Failed(refusal.into())).boxed()
    }

    fn block<'a>(
        &'a self,
        call: BlockCall<'a>,
        rows: &'a [InputRow<'a>],
        sink: OutcomeSink,
    ) -> BoxFuture<'a, ()> {
        async move { self.ask(&call, rows, &sink).await }.boxed()
    }

    fn task<'a>(&'a self, call: TaskCall<'a>) -> BoxFuture<'a, TaskOutcome> {
        async move {
            let body = match protocol::task_request(&call) {
                Ok(body) => body,
                Err(error) => return TaskOutcome::Failed(format!("the payload is not JSON: {error}").into()),
            };
            match self.exchange(body, &call.idempotency_key(), call.timeout, call.traceparent).await {
                Answer::Reply(bytes) => protocol::read_task(&bytes).unwrap_or_else(|error| {
                    TaskOutcome::Retry { error: describe(&error).into(), after: None }
                }),
                Answer::TooLarge(error) | Answer::Refused(error) => TaskOutcome::Failed(error),
                Answer::Later { error, after } => TaskOutcome::Retry { error, after },
                Answer::Unavailable { error, after } => {
                    TaskOutcome::Postponed { error, crashed: false, after: Some(after) }
                }
            }
        }
        .boxed()
    }
}

fn client(name: &str, config: &Config, concurrency: usize) -> Result<reqwest::Client, BuildError> {
    let mut builder = reqwest::Client::builder()
        .user_agent(concat!("musterd/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        // Through a proxy it could not be known which addresses are reached.
        .no_proxy()
        .connect_timeout(config.connect_timeout.unwrap_or(CONNECT_TIMEOUT))
        .pool_max_idle_per_host(concurrency)
        .dns_resolver(Arc::new(address::Resolver { allow_private: config.allow_private.unwrap_or(true) }));
    if let Some(file) = &config.ca_file {
        let unreadable = |source| BuildError::CaFile { name: name.to_owned(), file: file.clone(), source };
        let pem = std::fs::read(file).map_err(unreadable)?;
        let failed = |source| BuildError::Client { name: name.to_owned(), source };
        for certificate in reqwest::Certificate::from_pem_bundle(&pem).map_err(failed)? {
            builder = builder.add_root_certificate(certificate);
        }
    }
    builder.build().map_err(|source| BuildError::Client { name: name.to_owned(), source })
}

/// The headers of every request; their values are never shown.
fn headers(name: &str, config: &Config) -> Result<HeaderMap, BuildError> {
    let odd = |source: Box<dyn std::error::Error + Send + Sync>| BuildError::Secret {
        name: name.to_owned(),
        source,
    };
    let mut headers = HeaderMap::new();
    let mut add = |header: HeaderName, text: &str| {
        let mut value = HeaderValue::try_from(text).map_err(|error| odd(error.into()))?;
        value.set_sensitive(true);
        headers.insert(header, value);
        Ok::<(), BuildError>(())
    };
    for (header, value) in &config.headers {
        let header = HeaderName::try_from(header.as_str()).map_err(|error| odd(error.into()))?;
        add(header, now(name, value)?.expose())?;
    }
    if let Some(token) = &config.bearer_token {
        add(AUTHORIZATION, &format!("Bearer {}", now(name, token)?.expose()))?;
    }
    Ok(headers)
}

/// What is wrong with the keys of this kind.
pub(super) fn check(name: &str, config: &Config, problems: &mut crate::problems::Problems) {
    let key = |field: &str| format!("handlers.{name}.{field}");
    match config.url.as_deref().map(url::Url::parse) {
        None => {
            problems.error(key("url"), "must say where to POST, such as \"http://127.0.0.1:8080/charge\"")
        }
        Some(Err(error)) => problems.error(key("url"), format!("is not a URL: {error}")),
        Some(Ok(url)) => {
            for complaint in address::complaints(&url, config.allow_private.unwrap_or(true)) {
                problems.error(key("url"), complaint);
            }
        }
    }
    if let Some(Err(error)) = config.secret.as_ref().map(Signer::new) {
        problems.error(key("secret"), error.to_string());
    }
    for (header, value) in &config.headers {
        let fits =
            HeaderName::try_from(header.as_str()).is_ok() && HeaderValue::try_from(value.expose()).is_ok();
        problems.unless(
            fits,
            &key(&format!("headers.{header}")),
            "is not a header: no line feeds, visible characters only",
        );
    }
    let token = config.bearer_token.as_ref().map(|token| HeaderValue::try_from(token.expose()));
    problems.unless(
        !matches!(token, Some(Err(_))),
        &key("bearer_token"),
        "has characters that no header may have",
    );
    if let Some(file) = config.ca_file.as_ref().filter(|file| !file.is_file()) {
        problems.error(key("ca_file"), format!("there is no file {}", file.display()));
    }
}
