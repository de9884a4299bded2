//! The JSON API under `/v1`: what the command line can do, for programs. Its answers are the command line's `--json`.

mod batches;
mod events;
mod fields;
mod files;
#[cfg(feature = "fuzzing")]
pub(crate) use fields::fuzzing::any_request as fuzz_fields;
mod guard;
mod history;
mod lanes;
mod openapi;
mod problem;
mod rate;
pub(super) mod slots;
mod submit;
mod tasks;
pub(crate) mod tokens;
mod upload;

use super::{Config, RequestSlot};
use crate::{
    flow::input::Limits,
    objects,
    store::{self, ApiPools, OpenError},
};
use axum::{
    Router,
    handler::Handler,
    http::{Method, StatusCode},
    middleware,
    response::{IntoResponse, Response},
    routing::{MethodFilter, MethodRouter},
};
use deadpool_postgres::Object;
use guard::Client;
pub(super) use guard::{is_addressed_here, is_forwarded};
use problem::Problem;
use rate::Rates;
use slots::{Slot, Slots};
use std::{net::SocketAddr, ops::Deref, sync::Arc};
use tokens::{Scope, Tokens};
use tokio_util::sync::CancellationToken;
use upload::Patience;

/// What the API stands on. Clones are the same.
#[derive(Clone, Debug)]
pub struct Api(Arc<Shared>);

#[derive(Debug)]
pub struct Shared {
    config: Config,
    limits: Limits,
    pools: ApiPools,
    objects: objects::Store,
    tokens: Tokens,
    rates: Rates,
    reads: Arc<Slots>,
    writes: Arc<Slots>,
    uploads: Arc<Slots>,
    downloads: Arc<Slots>,
    followers: Arc<Slots>,
    /// Whether only this machine can reach us.
    is_loopback: bool,
    /// Payloads on one page of a list.
    page_bytes: usize,
    /// Ends those who follow something.
    stop: CancellationToken,
}

impl Deref for Api {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

/// A page is gathered in memory: this much, or one row of whatever size.
const PAGE_BYTES: usize = 16 << 20;
/// Requests that only read, and as many that write, that are worked on at a time beside streams. Each has a connection, and may have a body
/// or an answer in memory. Readers cannot take the writers' places.
const MOST_REQUESTS: usize = 256;

impl Api {
    /// Connects only when one is asked for.
    pub fn open(
        config: &Config,
        database: &store::Config,
        limits: Limits,
        objects: objects::Store,
        address: Option<SocketAddr>,
    ) -> Result<Self, OpenError> {
        let [uploads, downloads, followers] =
            [config.max_uploads, config.max_downloads, config.max_followers].map(|most| most.get() as usize);
        Ok(Self(Arc::new(Shared {
            limits,
            pools: ApiPools::open(database, config.connections, config.max_uploads, config.max_downloads)?,
            objects,
            tokens: Tokens::new(config.read_tokens_file.clone(), config.write_tokens_file.clone()),
            rates: Rates::new(config.rate_limit),
            reads: Slots::new(MOST_REQUESTS + downloads + followers),
            writes: Slots::new(MOST_REQUESTS + uploads),
            uploads: Slots::new(uploads),
            downloads: Slots::new(downloads),
            followers: Slots::new(followers),
            is_loopback: address.unwrap_or(config.listen).ip().to_canonical().is_loopback(),
            page_bytes: PAGE_BYTES,
            stop: CancellationToken::new(),
            config: config.clone(),
        })))
    }

    /// Ends what would otherwise go on for as long as its client likes.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }

    async fn client(&self) -> Result<Object, Problem> {
        Ok(self.pools.asks.get().await?)
    }

    async fn upload_client(&self) -> Result<Object, Problem> {
        Ok(self.pools.uploads.get().await?)
    }

    async fn export_client(&self) -> Result<Object, Problem> {
        Ok(self.pools.exports.get().await?)
    }

    /// A place among the requests that read, or those that write, until its answer is taken.
    fn request_slot(&self, client: &Client, wanted: Scope) -> Result<RequestSlot, Problem> {
        let slots = match wanted {
            Scope::Read => &self.reads,
            Scope::Write => &self.writes,
        };
        let slot = self.slot(slots, client, wanted, "requests at a time")?;
        Ok(RequestSlot(Arc::new(slot)))
    }

    fn upload_slot(&self, client: &Client) -> Result<Slot, Problem> {
        self.slot(&self.uploads, client, Scope::Write, "uploads at a time (http.max_uploads)")
    }

    fn download_slot(&self, client: &Client) -> Result<Slot, Problem> {
        let what = "exports and downloads at a time (http.max_downloads)";
        self.slot(&self.downloads, client, Scope::Read, what)
    }

    fn follower_slot(&self, client: &Client) -> Result<Slot, Problem> {
        self.slot(&self.followers, client, Scope::Read, "followers at a time (http.max_followers)")
    }

    fn slot(&self, slots: &Arc<Slots>, client: &Client, wanted: Scope, what: &str) -> Result<Slot, Problem> {
        let is_alone = !self.tokens.are_wanted() || client.is_alone(wanted);
        slots.take(client, is_alone).ok_or_else(|| Problem::busy(what))
    }

    fn patience(&self) -> Patience {
        Patience { idle: self.config.body_timeout, whole: self.config.upload_timeout }
    }
}

/// The routes as they are added, with a list of them for those who describe the API.
#[derive(Default)]
struct Book {
    router: Router<Api>,
    pages: Vec<(&'static str, Method)>,
}

impl Book {
    fn get<H: Handler<T, Api>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add(path, Method::GET, MethodRouter::new().on(MethodFilter::GET, handler))
    }

    fn post<H: Handler<T, Api>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add(path, Method::POST, MethodRouter::new().on(MethodFilter::POST, handler))
    }

    fn add(mut self, path: &'static str, method: Method, route: MethodRouter<Api>) -> Self {
        self.pages.push((path, method));
        Self { router: self.router.route(path, route), pages: self.pages }
    }
}

fn book() -> Book {
    Book::default()
        .get("/openapi.json", openapi::document)
        .get("/batches", batches::list)
        .post("/batches", submit::submit)
        .get("/batches/{id}", batches::show)
        .get("/batches/{id}/rows", batches::rows)
        .get("/batches/{id}/errors", batches::errors)
        .get("/batches/{id}/export", files::rows)
        .get("/batches/{id}/outputs", files::outputs)
        .get("/batches/{id}/outputs/{file}", files::download)
        .get("/batches/{id}/events", events::events)
        .post("/batches/{id}/append", submit::append)
        .post("/batches/{id}/hold", batches::hold)
        .post("/batches/{id}/release", batches::release)
        .post("/batches/{id}/redrive", batches::redrive)
        .post("/batches/{id}/abort", batches::abort)
        .post("/batches/{id}/hold-data", batches::hold_data)
        .post("/batches/{id}/release-data", batches::release_data)
        .get("/tasks", tasks::list)
        .post("/tasks", tasks::enqueue)
        .post("/tasks/many", tasks::enqueue_many)
        .get("/tasks/{id}", tasks::show)
        .post("/tasks/{id}/abort", tasks::abort)
        .post("/tasks/{id}/retry", tasks::retry)
        .get("/queues", lanes::queues)
        .get("/queues/{name}", lanes::queue)
        .post("/queues/{name}/pause", lanes::pause)
        .post("/queues/{name}/resume", lanes::resume)
        .get("/errors", history::errors)
        .get("/events", history::list)
        .get("/workers", lanes::workers)
        .get("/workers/{worker}", lanes::worker)
        .get("/why/batch/{id}", lanes::why_batch)
        .get("/why/task/{id}", lanes::why_task)
        .get("/why/queue/{name}", lanes::why_queue)
        .get("/why/retention", lanes::why_retention)
}

/// Everything under `/v1`.
pub(super) fn router(api: Option<Api>) -> Router {
    let Some(api) = api else {
        return Router::new().nest("/v1", Router::new().fallback(async || Problem::starting()));
    };
    let v1 = book()
        .router
        .fallback(async || Problem::not_found("such path"))
        .method_not_allowed_fallback(async || {
            Problem::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "this path does not take this method",
            )
        })
        .layer(middleware::from_fn_with_state(api.clone(), guard::guard))
        .layer(tower_http::catch_panic::CatchPanicLayer::custom(panicked))
        .with_state(api);
    Router::new().nest("/v1", v1).fallback(async || Problem::not_found("such path"))
}

fn panicked(panic: Box<dyn std::any::Any + Send>) -> Response {
    let reason = crate::error_text::panic_message(panic.as_ref());
    tracing::error!(reason, "a request panicked");
    Problem::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "internal",
        "this is a fault of the server; its log says more",
    )
    .into_response()
}
