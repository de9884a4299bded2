//! Spans that are sent to a collector, as the variables `OTEL_*` say: OTLP over HTTP, through our own client.

use async_trait::async_trait;
use axum::http::{Request, Response};
use bytes::Bytes;
use opentelemetry::{
    Context, KeyValue, Value,
    trace::{
        Span as _, SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState, Tracer as _,
        TracerProvider as _,
    },
};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithHttpConfig};
use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};
use std::{sync::OnceLock, time::SystemTime};
use tokio::runtime::Handle;

/// Where spans go; not set unless the environment names a collector.
static PROVIDER: OnceLock<SdkTracerProvider> = OnceLock::new();

/// The variables that name a collector.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];

/// Begins to send spans if the environment says where to; what is wrong with that is said, and lived with.
pub fn start() {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_disabled =
        std::env::var("OTEL_SDK_DISABLED").is_ok_and(|value| value.eq_ignore_ascii_case("true"));
    if is_disabled || !ENDPOINTS.into_iter().any(set) || PROVIDER.get().is_some() {
        return;
    }
    let client = match reqwest::Client::builder().build() {
        Ok(client) => client,
        Err(error) => return tracing::warn!(error = %error, "no spans are sent"),
    };
    let Ok(runtime) = Handle::try_current() else { return };
    let sender = Sender { client, runtime };
    let exporter = match SpanExporter::builder().with_http().with_http_client(sender).build() {
        Ok(exporter) => exporter,
        Err(error) => return tracing::warn!(error = %error, "no spans are sent"),
    };
    let mut resource = Resource::builder();
    if !set("OTEL_SERVICE_NAME") {
        resource = resource.with_service_name("musterd");
    }
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let resource = resource.with_attribute(version).build();
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
    let _ = PROVIDER.set(provider);
}

/// Sends what is left. Not from within the runtime: it waits.
pub fn stop() {
    if let Some(provider) = PROVIDER.get()
        && let Err(error) = provider.shutdown()
    {
        tracing::warn!(error = %error, "not all spans were sent");
    }
}

#[derive(Debug)]
pub(super) struct Recorded(opentelemetry_sdk::trace::Span);

impl Recorded {
    pub(super) fn begin(name: &'static str, parent: Option<&str>, began: SystemTime) -> Option<Self> {
        let tracer = PROVIDER.get()?.tracer("musterd");
        let context = parent
            .and_then(remote)
            .map_or_else(Context::new, |parent| Context::new().with_remote_span_context(parent));
        let builder = tracer.span_builder(name).with_start_time(began);
        Some(Self(builder.start_with_context(&tracer, &context)))
    }

    /// None of one that a sampler left out: what hung below it would hang in the air.
    pub(super) fn traceparent(&self) -> Option<String> {
        let context = self.0.span_context();
        let (trace, span, flags) = (context.trace_id(), context.span_id(), context.trace_flags().to_u8());
        context.is_sampled().then(|| format!("00-{trace}-{span}-{flags:02x}"))
    }

    pub(super) fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        self.0.set_attribute(KeyValue::new(key, value));
    }
}

/// A `traceparent` as the parent of a span.
fn remote(traceparent: &str) -> Option<SpanContext> {
    let mut parts = traceparent.split('-').skip(1);
    let trace = TraceId::from_hex(parts.next()?).ok()?;
    let span = SpanId::from_hex(parts.next()?).ok()?;
    let flags = TraceFlags::new(u8::from_str_radix(parts.next()?, 16).ok()?);
    let context = SpanContext::new(trace, span, flags, true, TraceState::default());
    context.is_valid().then_some(context)
}

/// The exporter has a thread of its own and no runtime; requests run on ours.
#[derive(Debug)]
struct Sender {
    client: reqwest::Client,
    runtime: Handle,
}

#[async_trait]
impl HttpClient for Sender {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        let sending = self.runtime.spawn(async move {
            let answer = client.execute(request.try_into()?).await?;
            let status = answer.status();
            Ok::<_, reqwest::Error>((status, answer.bytes().await?))
        });
        let (status, body) = sending.await??;
        let mut response = Response::new(body);
        *response.status_mut() = status;
        Ok(response)
    }
}
