//! Spans for OpenTelemetry: what takes time, as a part of its submitter's trace. Built without the feature `otel`, or
//! run without a place to send them to, they are nothing and cost nothing.

#[cfg(feature = "otel")]
mod recorded;

use std::borrow::Cow;

/// A piece of work under way; it ends when dropped.
#[derive(Debug)]
pub struct Span {
    #[cfg(feature = "otel")]
    recorded: Option<recorded::Recorded>,
}

/// A moment at which a span may turn out to have begun.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    #[cfg(feature = "otel")]
    at: std::time::SystemTime,
}

impl Moment {
    pub fn now() -> Self {
        Self {
            #[cfg(feature = "otel")]
            at: std::time::SystemTime::now(),
        }
    }
}

impl Span {
    /// A span that begins now; of the trace of `parent`, a `traceparent`, if there is one.
    pub fn begin(name: &'static str, parent: Option<&str>) -> Self {
        Self::since(name, parent, Moment::now())
    }

    /// The same for what began earlier.
    #[cfg_attr(not(feature = "otel"), expect(unused_variables, reason = "nothing is sent"))]
    pub fn since(name: &'static str, parent: Option<&str>, began: Moment) -> Self {
        Self {
            #[cfg(feature = "otel")]
            recorded: recorded::Recorded::begin(name, parent, began.at),
        }
    }

    /// Adds a number. Ids and counts, never a payload.
    #[cfg_attr(not(feature = "otel"), expect(unused_variables, unused_mut, reason = "nothing is sent"))]
    pub fn number(mut self, key: &'static str, value: i64) -> Self {
        #[cfg(feature = "otel")]
        self.recorded.iter_mut().for_each(|span| span.set(key, value));
        self
    }

    /// Adds a name.
    #[cfg_attr(not(feature = "otel"), expect(unused_variables, unused_mut, reason = "nothing is sent"))]
    pub fn name(mut self, key: &'static str, value: &str) -> Self {
        #[cfg(feature = "otel")]
        self.recorded.iter_mut().for_each(|span| span.set(key, value.to_owned()));
        self
    }

    /// The `traceparent` for what this work calls: itself if it is sent, else `parent`, as it was.
    pub fn or_parent<'a>(&self, parent: Option<&'a str>) -> Option<Cow<'a, str>> {
        #[cfg(feature = "otel")]
        if let Some(own) = self.recorded.as_ref().and_then(recorded::Recorded::traceparent) {
            return Some(own.into());
        }
        parent.map(Cow::Borrowed)
    }

    /// Ends it here.
    pub fn end(self) {}
}

#[cfg(feature = "otel")]
pub use recorded::{start, stop};
