//! The daemon: its parts, wired once, run by the supervisor until they are told to stop.

use crate::{
    config::Config,
    flow::{
        batcher,
        claim::Dispatcher,
        complete::{self, Checks, Completer},
        fiber::{Bench, FactsCache},
        held::Held,
        pace::Pace,
        task_claim::TaskDispatcher,
        writer::{Gate, OutcomeWriter},
    },
    handler::Registry,
    http,
    liveness::{self, redis::StatusCache},
    metrics::Metrics,
    periodic::{self, Rhythm, describe},
    signal::Stop,
    store::{
        OpenError, Store,
        connect::ConnectError,
        listen::{self, News},
        migrate, workers,
    },
    supervisor::{Ended, Health, STARTING, Stage, Supervisor},
    upkeep::sweep::Sweep,
    worker_id::WorkerId,
};
use std::{collections::HashMap, net::SocketAddr, sync::Arc};
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;

#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the database is not ready for this version")]
    Schema(#[from] migrate::SchemaState),
    #[error("could not register this worker")]
    Register { source: tokio_postgres::Error },
    #[error(transparent)]
    Http(#[from] http::HttpError),
    #[error("redis.url")]
    Redis(#[from] liveness::redis::RedisError),
}

/// Runs a worker with the handlers of its configuration until `stop`.
pub async fn run(config: Config, stop: Stop) -> Result<Ended, DaemonError> {
    let handlers = Registry::from_config(&config)?;
    match stop.drain.run_until_cancelled(Daemon::prepare(config, handlers)).await {
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
    worker: WorkerId,
    store: Store,
    health: Health,
    metrics: Metrics,
    port: http::Port,
    cache: Option<StatusCache>,
}

impl Daemon {
    /// Checks database and port, and makes the worker known. Nothing is claimed yet.
    ///
    /// Health is answered meanwhile: a database that is slow to answer must not look like a dead process.
    pub async fn prepare(config: Config, handlers: Registry) -> Result<Self, DaemonError> {
        let (health, metrics) = (Health::default(), Metrics::default());
        health.unready(STARTING, "starting");
        let port = http::bind(&config.http).await?;
        let never = CancellationToken::new();
        let serving = http::serve(port.clone(), health.clone(), metrics.clone(), never);
        let starting = Self::start(config, handlers, port, health, metrics);
        tokio::select! {
            started = starting => started,
            Err(error) = serving => Err(error.into()),
        }
    }

    async fn start(
        config: Config,
        handlers: Registry,
        port: http::Port,
        health: Health,
        metrics: Metrics,
    ) -> Result<Self, DaemonError> {
        let store = Store::open(&config.database)?;
        let worker = WorkerId::new();
        let client = store.direct.open("musterd start").await?;
        migrate::check(&client).await?;
        workers::register(&client, &worker, &config, &handlers)
            .await
            .map_err(|source| DaemonError::Register { source })?;
        client.close().await;
        let cache = match config.liveness.backend {
            liveness::Backend::Redis => Some(StatusCache::open(&config.redis)?),
            liveness::Backend::Postgres => None,
        };
        Ok(Self { config, handlers, worker, store, health, metrics, port, cache })
    }

    /// Where the HTTP port is, also when the configuration asked for any.
    pub fn address(&self) -> Option<SocketAddr> {
        self.port.address()
    }

    /// Works until `stop`, then drains.
    pub async fn run(self, stop: Stop) -> Result<Ended, DaemonError> {
        let address = self.address().map(|address| address.to_string());
        tracing::info!(worker = %self.worker, version = env!("CARGO_PKG_VERSION"), http = address,
            commands = self.handlers.commands().join(","), "starting");
        let (store, worker, cache) = (self.store.clone(), self.worker.clone(), self.cache.clone());
        let grace = self.config.shutdown.grace;
        let ended = self.parts(&stop).run(stop, grace).await;
        goodbye(&store, &worker).await;
        if let Some(cache) = cache {
            cache.close().await;
        }
        tracing::info!(worker = %worker, clean = ended.is_clean(), drained_ms = ended.drained_in.as_millis() as u64,
            "stopped");
        Ok(ended)
    }

    fn parts(self, stop: &Stop) -> Supervisor {
        let mut supervisor = Supervisor::new(self.health.clone());
        let held = Held::default();

        let completer = Completer {
            store: self.store.clone(),
            config: self.config.completion.clone(),
            cache: self.cache.clone(),
            metrics: self.metrics.clone(),
        };
        let (checks, check_loop) = complete::channel(completer);
        let (gate, writable) = Gate::new();
        let writer = OutcomeWriter {
            pool: self.store.writes.clone(),
            held: held.clone(),
            checks: checks.clone(),
            health: self.health.clone(),
            gate,
            metrics: self.metrics.clone(),
        };
        let (outcomes, batcher) =
            batcher::channel(&self.config.batcher, writer, self.metrics.batcher.clone());
        let bench = Arc::new(Bench {
            store: self.store.clone(),
            handlers: self.handlers.clone(),
            outcomes,
            checks: checks.clone(),
            held: held.clone(),
            pace: Pace::default(),
            retry: self.config.retry.clone(),
            metrics: self.metrics.clone(),
            now: stop.now.clone(),
            facts: FactsCache::default(),
        });

        let mut wakes = HashMap::new();
        for (queue, settings) in &self.config.queues {
            let (wake, wake_tasks) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
            wakes.insert(queue.clone(), [Arc::clone(&wake), Arc::clone(&wake_tasks)]);
            let idle = Arc::new(Semaphore::new(settings.fibers.get() as usize));
            let task_dispatcher = TaskDispatcher {
                queue: queue.clone(),
                settings: settings.clone(),
                poll_interval: self.config.claim.poll_interval,
                worker: self.worker.clone(),
                bench: Arc::clone(&bench),
                idle: Arc::clone(&idle),
                wake: wake_tasks,
                writable: writable.clone(),
                drain: stop.drain.clone(),
            };
            supervisor.once("tasks", Stage::Work, |stop| async move {
                task_dispatcher.run(stop).await;
                Ok(())
            });
            let dispatcher = Dispatcher {
                queue: queue.clone(),
                settings: settings.clone(),
                config: self.config.claim.clone(),
                worker: self.worker.clone(),
                bench: Arc::clone(&bench),
                idle,
                wake,
                writable: writable.clone(),
                drain: stop.drain.clone(),
            };
            supervisor.once("queue", Stage::Work, |stop| async move {
                dispatcher.run(stop).await;
                Ok(())
            });
        }
        drop(bench);
        supervisor.once("batcher", Stage::Write, |_| async move {
            batcher.run().await;
            Ok(())
        });
        supervisor.once("completer", Stage::Finish, |_| async move {
            check_loop.run().await;
            Ok(())
        });
        // Both can ask for checks: they stop before the completer, which ends when nobody can.
        add_listener(&mut supervisor, &self.store, wakes, held, checks.clone());
        add_sweep(&mut supervisor, &self.store, &self.config.completion, checks);
        let (port, health, metrics) = (self.port, self.health, self.metrics);
        supervisor.once("http", Stage::Http, |stop| async move {
            Ok(http::serve(port, health, metrics, stop).await?)
        });
        supervisor
    }
}

fn add_listener(
    supervisor: &mut Supervisor,
    store: &Store,
    wakes: HashMap<String, [Arc<Notify>; 2]>,
    held: Held,
    checks: Checks,
) {
    let (target, wakes) = (store.direct.clone(), Arc::new(wakes));
    supervisor.part("listener", Stage::Claim, move |stop| {
        let (target, wakes, held, checks) =
            (target.clone(), Arc::clone(&wakes), held.clone(), checks.clone());
        async move {
            let holding = held.clone();
            let tell = move |news: News| match news {
                News::Work(queue) => {
                    wakes.get(&queue).into_iter().flatten().for_each(|wake| wake.notify_one());
                }
                News::Abort(id) => {
                    held.abort(id);
                    checks.ask(id);
                }
                News::Check(id) => checks.ask(id),
                News::AnythingMissed => wakes.values().flatten().for_each(|wake| wake.notify_one()),
            };
            Ok(listen::listen(&target, &stop, move || holding.ids(), tell).await?)
        }
    });
}

fn add_sweep(supervisor: &mut Supervisor, store: &Store, config: &complete::Config, checks: Checks) {
    let (store, rhythm) = (store.clone(), Rhythm::Between(config.sweep_min, config.sweep_max));
    supervisor.part("sweep", Stage::Claim, move |stop| {
        let sweep = Sweep { store: store.clone(), checks: checks.clone() };
        async move {
            periodic::run(sweep, rhythm, stop).await;
            Ok(())
        }
    });
}

/// Takes the worker off the list. It may fail: a row of a worker that is gone does no harm.
async fn goodbye(store: &Store, worker: &WorkerId) {
    let farewell = async {
        let client = store.direct.open("musterd stop").await?;
        let said = workers::deregister(&client, worker).await;
        client.close().await;
        said.map_err(|source| DaemonError::Register { source })
    };
    if let Err(error) = farewell.await {
        tracing::warn!(error = describe(&error), "could not say goodbye to the database");
    }
}
