//! The daemon: its parts, wired once, run by the supervisor until they are asked to stop.

mod listener;
mod look;
mod parts;

use crate::{
    config::Config,
    error_text::describe,
    flow::input::Limits,
    handler::{BuildError, Entry, Registry},
    health::Health,
    http,
    liveness::{self, identity::Identity, lease::Lease, presence::Presence, roll::Roll},
    metrics::{Metrics, Names},
    objects,
    signal::Stop,
    store::{
        OpenError, Store,
        connect::ConnectError,
        migrate, pooler, retention,
        workers::{self, Declared, DeclaredCommand, Enlisted},
    },
    supervisor::{Ended, Owned, STARTING},
    worker_id::WorkerId,
};
use std::net::SocketAddr;
use tokio_util::sync::CancellationToken;

#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Handler(#[from] BuildError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the database is not ready for this version")]
    Schema(#[from] migrate::SchemaState),
    #[error("could not register this worker")]
    Register { source: tokio_postgres::Error },
    #[error(transparent)]
    Http(#[from] http::HttpError),
    #[error("outputs")]
    Outputs(#[from] objects::ObjectError),
    #[error("redis.url")]
    Redis(#[from] liveness::redis::RedisError),
}

/// Runs a worker with the handlers of its configuration until `stop`.
pub async fn run(config: Config, stop: Stop) -> Result<Ended, DaemonError> {
    let commands = config.handlers.keys().cloned().collect();
    let prepare = Box::pin(Daemon::prepare_with(config, commands, |config| config.registry()));
    match stop.drain.run_until_cancelled(prepare).await {
        Some(daemon) => daemon?.run(stop).await,
        None => {
            tracing::info!("stopped before it had started");
            Ok(Ended::default())
        }
    }
}

/// A daemon that has everything it needs to start.
#[derive(Debug)]
pub struct Daemon {
    config: Config,
    handlers: Registry,
    identity: Identity,
    lease: Lease,
    store: Store,
    objects: objects::Store,
    health: Health,
    metrics: Metrics,
    port: http::Port,
    api: http::Api,
    roll: Option<Roll>,
    presence: Presence,
}

impl Daemon {
    /// A daemon with these handlers.
    pub async fn prepare(config: Config, handlers: Registry) -> Result<Self, DaemonError> {
        let commands = handlers.commands();
        Self::prepare_with(config, commands, |_| Ok(handlers)).await
    }

    /// Checks database and port, and makes the worker known. Nothing is claimed yet. The handlers are made when it is known
    /// what is between us and the database, which some of them use.
    ///
    /// Health is answered meanwhile: a database that is slow to answer must not look like a dead process.
    async fn prepare_with(
        config: Config,
        commands: Vec<String>,
        handlers: impl FnOnce(&Config) -> Result<Registry, BuildError>,
    ) -> Result<Self, DaemonError> {
        let names = Names::new(config.queues.keys().cloned(), commands);
        let (health, metrics) = (Health::watching(config.liveness.stuck_after), Metrics::new(names));
        health.unready(STARTING, "starting");
        let port = http::bind(&config.http).await?;
        let stop = CancellationToken::new();
        let serving = http::serve(port.clone(), health.clone(), metrics.clone(), None, stop.clone());
        let starting = async {
            // Whether it started or not: who has asked until then gets an answer.
            let _stop = stop.drop_guard();
            Box::pin(Self::start(config, handlers, port, health, metrics)).await
        };
        Box::pin(async { tokio::join!(starting, serving).0 }).await
    }

    async fn start(
        mut config: Config,
        handlers: impl FnOnce(&Config) -> Result<Registry, BuildError>,
        port: http::Port,
        health: Health,
        metrics: Metrics,
    ) -> Result<Self, DaemonError> {
        config.database.pooler = pooler::find_out(&config.database).await?;
        let handlers = handlers(&config)?;
        let store = Store::open(&config.database)?;
        let objects = objects::Store::open(&config.outputs)?;
        let limits = Limits { max_row_bytes: config.submit.max_row_bytes };
        let api = http::Api::open(&config.http, &config.database, limits, objects.clone(), port.address())?;
        let worker = WorkerId::new();
        let client = store.direct.open("musterd start").await?;
        if let migrate::Fit::Newer { database, binary } = migrate::check(&client).await? {
            tracing::warn!(
                database,
                binary,
                "the schema is newer than this binary and still serves it; deploy the newer musterd"
            );
        }
        workers::register(&client, &worker, &enlisted(&config, &handlers), &declared(&config, &handlers))
            .await
            .map_err(|source| DaemonError::Register { source })?;
        retention::declare(&client, &config.retention.policy())
            .await
            .map_err(|source| DaemonError::Register { source })?;
        let lease = Lease::new(config.liveness.heartbeat_ttl);
        client.close().await;
        let presence = Presence::new(&metrics);
        let roll = if config.liveness.backend.uses_redis(&config.redis) {
            Some(Roll::open(&config.redis, &presence, config.liveness.heartbeat_ttl)?)
        } else {
            None
        };
        let identity = Identity::new(worker);
        Ok(Self {
            config,
            handlers,
            identity,
            lease,
            store,
            objects,
            health,
            metrics,
            port,
            api,
            roll,
            presence,
        })
    }

    /// Where the HTTP port is, also when the configuration asked for any.
    pub fn address(&self) -> Option<SocketAddr> {
        self.port.address()
    }

    /// Works until `stop`, then drains.
    pub async fn run(self, stop: Stop) -> Result<Ended, DaemonError> {
        let address = self.address().map(|address| address.to_string());
        tracing::info!(worker = %self.identity.id(), version = env!("CARGO_PKG_VERSION"), http = address,
            commands = self.handlers.commands().join(","), "starting");
        let (store, identity, roll) = (self.store.clone(), self.identity.clone(), self.roll.clone());
        let grace = self.config.shutdown.grace;
        let mut ended = parts::of(self, &stop).run(stop, grace).await;
        let worker = identity.id();
        ended.owned = goodbye(&store, &worker).await;
        if let Some(roll) = roll {
            roll.close().await;
        }
        if let Owned::Something(left) = ended.owned {
            tracing::error!(left, "blocks are still owned; another worker will recover them");
        }
        tracing::info!(worker = %worker, clean = ended.is_clean(), drained_ms = ended.drained_in.as_millis() as u64,
            rows_given_back = ended.rows_given_back, owned = ended.owned.as_number(), stuck = ended.stuck_stages(), "stopped");
        Ok(ended)
    }
}

/// What the list says of this worker.
fn enlisted(config: &Config, handlers: &Registry) -> Enlisted {
    Enlisted { queues: config.queues.keys().cloned().collect(), commands: handlers.commands() }
}

/// The commands and queues as the database is to know them.
fn declared(config: &Config, handlers: &Registry) -> Declared {
    let command = |(name, entry): (&str, &Entry)| DeclaredCommand {
        name: name.to_owned(),
        queue: entry.config.queue.clone(),
        kind: entry.config.kind.as_str(),
        procedure: entry.config.procedure.clone(),
    };
    Declared::new(handlers.iter().map(command).collect(), &config.queues)
}

/// Takes the worker off the list and asks what it still owns.
async fn goodbye(store: &Store, worker: &WorkerId) -> Owned {
    let farewell = async {
        let client = store.direct.open("musterd stop").await?;
        let said = workers::deregister(&client, worker).await;
        client.close().await;
        said.map_err(|source| DaemonError::Register { source })
    };
    let limit = std::time::Duration::from_secs(5);
    match tokio::time::timeout(limit, farewell).await {
        Ok(Ok(0)) => Owned::Nothing,
        Ok(Ok(left)) => Owned::Something(left),
        Ok(Err(error)) => {
            tracing::warn!(error = describe(&error), "could not say goodbye to the database");
            Owned::Unknown
        }
        Err(_) => {
            tracing::warn!("the database did not answer to our goodbye");
            Owned::Unknown
        }
    }
}
