//! One request and what came of it.

use super::{Http, rate::NoTurn};
use crate::backoff::LONGEST_ASKED;
use crate::error_text::describe;
use crate::handler::{Failed, protocol};
use reqwest::{
    Response, StatusCode,
    header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER},
};
use std::time::Duration;

/// What a request came to.
#[derive(Debug)]
pub(super) enum Answer {
    /// 2xx, whole.
    Reply(Vec<u8>),
    /// Not now, or not whole.
    Later { error: Failed, after: Option<Duration> },
    /// The service says no.
    Refused(Failed),
    /// The service, or our own limit, says that it is too much at once.
    TooLarge(Failed),
    /// The service wants to be left alone for so long: it was not asked.
    Unavailable { error: String, after: Duration },
}

/// How much of an error page is worth reading.
const ERROR_PAGE: usize = 2_000;
/// A service that asks for more than this gets it for the rows concerned, not for everybody.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

impl Http {
    /// Waits for its turn, sends, and reads the answer whole.
    pub(super) async fn exchange(
        &self,
        body: String,
        key: &str,
        timeout: Duration,
        trace: Option<&str>,
    ) -> Answer {
        let permit = match self.limiter.acquire().await {
            Ok(permit) => permit,
            Err(after) => return unavailable(after),
        };
        // The turn comes last: a request that waits for anything else after it would come late and in a crowd.
        if let Some(rate) = &self.rate
            && let Err(NoTurn { error, after }) = rate.wait(timeout).await
        {
            return Answer::Unavailable { error, after };
        }
        let kit = self.kit.get();
        let mut request = kit
            .client
            .post(self.url.clone())
            .timeout(timeout)
            .headers(kit.headers.clone())
            .header(CONTENT_TYPE, "application/json")
            .header("idempotency-key", key);
        if let Some(trace) = trace {
            request = request.header("traceparent", trace);
        }
        if let Some(signer) = &kit.signer {
            for (name, value) in signer.headers(key, &body) {
                request = request.header(name, value);
            }
        }
        let asked = self.tap_text(&body);
        let (answer, strain) = match request.body(body).send().await {
            Ok(response) => self.read(response).await,
            Err(error) => {
                // A service that does not answer in time, or at all, is not helped by more requests.
                (later(failure(&error, timeout)), Strain::Struggling(None))
            }
        };
        match strain {
            Strain::None => permit.went_well(),
            Strain::Struggling(pause) => permit.was_too_much(pause.map(|pause| pause.min(LONGEST_PAUSE))),
        }
        self.tap.saw(|| (asked.unwrap_or_default(), summary(&answer)));
        answer
    }

    fn tap_text(&self, body: &str) -> Option<String> {
        self.tap.is_on().then(|| format!("POST {}\n{body}", self.url))
    }

    async fn read(&self, response: Response) -> (Answer, Strain) {
        let status = response.status();
        let after = retry_after(response.headers());
        if status.is_success() {
            return match body(response, self.max_reply_bytes).await {
                Ok(bytes) => (Answer::Reply(bytes), Strain::None),
                Err(Unread::TooLong) => {
                    let error = format!("the reply is longer than max_reply_bytes, {}", self.max_reply_bytes);
                    (later(error), Strain::None)
                }
                Err(Unread::Broken(error)) => {
                    (later(format!("the reply broke off: {error}")), Strain::Struggling(None))
                }
            };
        }
        let page = body(response, ERROR_PAGE).await.unwrap_or_default();
        // The page may differ from row to row; the status is what they have in common.
        let code = format!("http {}", status.as_u16());
        let error = Failed::coded(code, format!("the service answered {status}: {}", protocol::quote(&page)));
        match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                (Answer::Later { error, after }, Strain::Struggling(after))
            }
            StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT | StatusCode::REQUEST_TIMEOUT => {
                (Answer::Later { error, after }, Strain::Struggling(None))
            }
            StatusCode::PAYLOAD_TOO_LARGE => (Answer::TooLarge(error), Strain::None),
            _ if status.is_client_error() => (Answer::Refused(error), Strain::None),
            _ if status.is_redirection() => (
                later(format!("the service answered {status}; redirects are not followed: change url")),
                Strain::None,
            ),
            _ => (Answer::Later { error, after }, Strain::None),
        }
    }
}

/// What an answer says about the service's health.
enum Strain {
    None,
    Struggling(Option<Duration>),
}

fn later(error: String) -> Answer {
    Answer::Later { error: error.into(), after: None }
}

fn unavailable(after: Duration) -> Answer {
    let error = format!("the service asked for a pause, of which {}s are left", after.as_secs().max(1));
    Answer::Unavailable { error, after }
}

fn summary(answer: &Answer) -> String {
    match answer {
        Answer::Reply(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Answer::Unavailable { error, .. } => error.clone(),
        Answer::Later { error, .. } | Answer::Refused(error) | Answer::TooLarge(error) => error.error.clone(),
    }
}

/// Without the URL: its query may hold a secret.
fn failure(error: &reqwest::Error, timeout: Duration) -> String {
    if error.is_timeout() {
        let what = if error.is_connect() { "no connection in time" } else { "no whole reply" };
        return format!("{what}; the timeout is {}", humantime::format_duration(timeout));
    }
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    let what = if error.is_connect() { "cannot connect" } else { "the request failed" };
    format!("{what}: {}", describe(cause))
}

enum Unread {
    TooLong,
    Broken(String),
}

/// The body, of at most `most` bytes. Of a longer one nothing is kept.
async fn body(mut response: Response, most: usize) -> Result<Vec<u8>, Unread> {
    if response.content_length().is_some_and(|length| length > most as u64) {
        return Err(Unread::TooLong);
    }
    let mut bytes = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if bytes.len() + chunk.len() > most => return Err(Unread::TooLong),
            Ok(Some(chunk)) => bytes.extend_from_slice(&chunk),
            Ok(None) => return Ok(bytes),
            Err(error) => return Err(Unread::Broken(describe(&error.without_url()))),
        }
    }
}

/// `Retry-After` in either form: seconds, or a date. A header comes from outside and may say anything: it is capped here.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let wait = if is_number {
        // Too many digits for a number is a very long time, too.
        Duration::from_secs(text.parse().unwrap_or(u64::MAX))
    } else {
        let until = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
        until.duration_since(jiff::Timestamp::now()).try_into().unwrap_or(Duration::ZERO)
    };
    Some(wait.min(LONGEST_ASKED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_seconds_or_a_date() {
        let of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, text.parse().unwrap());
            retry_after(&headers)
        };
        assert_eq!(of("7"), Some(Duration::from_secs(7)));
        assert_eq!(of("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::ZERO));
        for far in [
            "Fri, 31 Dec 2100 23:59:59 GMT",
            "1763380800000",
            "99999999999999",
            "999999999999999999999999",
            "18446744073709551615",
        ] {
            assert_eq!(of(far), Some(LONGEST_ASKED), "{far}");
        }
        assert_eq!(of("soon"), None);
        assert_eq!(of("-3"), None);
    }
}
