//! The daemon: its parts, wired once, run by the supervisor until they are told to stop.

mod listener;
mod look;

use crate::{
    config::Config,
    flow::{
        batcher,
        claim::{Desk, Dispatcher},
        complete::{self, Checks, Completer},
        fiber::{Bench, FactsCache},
        held::Held,
        input::Limits,
        outputs::Uploader,
        pace::Pace,
        rivals,
        solo::Room,
        watch::Watch,
        writer::{Gate, OutcomeWriter, WriterParts},
    },
    handler::{BuildError, Registry},
    http,
    liveness::{
        self,
        heartbeat::Heartbeat,
        identity::Identity,
        lease::Lease,
        presence::Presence,
        redis::StatusCache,
        roll::{self, Roll},
        session::Session,
    },
    metrics::{Metrics, Names},
    objects,
    periodic::{self, Periodic, Rhythm, describe},
    signal::Stop,
    store::{
        OpenError, Store,
        blocks::Block,
        connect::ConnectError,
        migrate,
        pages::ChunkCache,
        pooler, retention,
        tasks::Task,
        workers::{self, Declared, Enlisted},
    },
    supervisor::{Census, Count, Ended, Health, Owned, STARTING, Stage, Supervisor},
    upkeep::{
        reconcile::Reconcile,
        recovery::{self, Recovery},
        registry,
        retention::Retention,
        sweep::Sweep,
        timeouts::{self, Timeouts},
    },
    worker_id::WorkerId,
};
use listener::Listener;
use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::{Arc, Weak},
};
use tokio::sync::Semaphore;
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
    let prepare = Box::pin(Daemon::prepare_with(config, commands, Registry::from_config));
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
        let (enlisted, declared) = (Enlisted::of(&config, &handlers), Declared::of(&config, &handlers));
        workers::register(&client, &worker, &enlisted, &declared)
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
        let mut ended = self.parts(&stop).run(stop, grace).await;
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

    fn parts(self, stop: &Stop) -> Supervisor {
        let held = Held::default();
        let (counted, metrics) = (held.clone(), self.metrics.clone());
        let census =
            Census::new(move || Count { blocks: counted.len(), given_back: metrics.rows_given_back.get() });
        let mut supervisor = Supervisor::new(self.health.clone()).census(census);
        let cache = self
            .roll
            .as_ref()
            .map(|roll| StatusCache::new(roll.client().clone(), &self.config.redis.key_prefix));
        let session = Session::new(self.config.database.has_session());
        let watch = Watch::default();

        let completer = Completer {
            store: self.store.clone(),
            uploader: Uploader { pool: self.store.uploads.clone(), objects: self.objects.clone() },
            config: self.config.completion.clone(),
            cache,
            metrics: self.metrics.clone(),
        };
        let (checks, check_loop) = complete::channel(completer);
        let (gate, writable) = Gate::new();
        let writer = OutcomeWriter::new(WriterParts {
            pool: self.store.writes.clone(),
            general: self.store.general.clone(),
            held: held.clone(),
            checks: checks.clone(),
            health: self.health.clone(),
            gate,
            metrics: self.metrics.clone(),
        });
        let (outcomes, batcher) =
            batcher::channel(&self.config.batcher, writer, self.metrics.batcher.clone());
        let bench = Arc::new(Bench {
            store: self.store.clone(),
            handlers: self.handlers.clone(),
            outcomes,
            checks: checks.clone(),
            held: held.clone(),
            pace: Pace::default(),
            task_pace: Pace::default(),
            retry: self.config.retry.clone(),
            max_crashes: i32::try_from(self.config.liveness.max_crashes).unwrap_or(i32::MAX),
            metrics: self.metrics.clone(),
            now: stop.now.clone(),
            facts: FactsCache::default(),
            chunks: ChunkCache::default(),
            lease: self.lease.clone(),
            room: Room::default(),
            watch: watch.clone(),
        });

        let mut wakes = HashMap::new();
        for (queue, settings) in &self.config.queues {
            let (rows, tasks) = rivals::pair();
            wakes.insert(queue.clone(), rows.clone());
            let idle = Arc::new(Semaphore::new(settings.fibers.get() as usize));
            let desk = |name: &str, rival| Desk {
                queue: queue.clone(),
                settings: settings.clone(),
                config: self.config.claim.clone(),
                identity: self.identity.clone(),
                bench: Arc::clone(&bench),
                idle: Arc::clone(&idle),
                rival,
                writable: writable.clone(),
                session: session.clone(),
                drain: stop.drain.clone(),
                pulse: self.health.pulse(name),
            };
            let name = format!("tasks {queue}");
            let dispatcher = Dispatcher::<Task>::new(desk(&name, tasks));
            supervisor.once(name, Stage::Work, |stop| async move {
                dispatcher.run(stop).await;
                Ok(())
            });
            let name = format!("queue {queue}");
            let dispatcher = Dispatcher::<Block>::new(desk(&name, rows));
            supervisor.once(name, Stage::Work, |stop| async move {
                dispatcher.run(stop).await;
                Ok(())
            });
        }
        let given_up_by = Arc::downgrade(&bench);
        drop(bench);
        let batcher = batcher.watched(self.health.pulse("batcher"));
        let check_loop = check_loop.watched(self.health.pulse("completer"));
        look::install(&self.metrics, &self.store, &held);
        supervisor.once("batcher", Stage::Write, |_| async move {
            batcher.run().await;
            Ok(())
        });
        let now = stop.now.clone();
        supervisor.once("completer", Stage::Finish, |_| async move {
            check_loop.run(now).await;
            Ok(())
        });
        // What can ask for checks stops before the completer or with it: that ends when nobody can ask any more.
        let ear = Listener {
            target: self.store.direct.clone(),
            identity: self.identity.clone(),
            session: session.clone(),
            wakes: Arc::new(wakes),
            held: held.clone(),
            checks: checks.clone(),
            health: self.health.clone(),
        };
        // Until the last flush: its lock is what keeps a worker that drains from being taken for dead.
        supervisor.part("listener", Stage::Finish, move |stop| {
            let ear = ear.clone();
            async move {
                ear.run(stop).await;
                Ok(())
            }
        });
        self.add_sweep(&mut supervisor, checks.clone());
        self.add_upkeep(&mut supervisor, &session, &held, checks, watch, given_up_by);
        self.add_heartbeat(&mut supervisor, session, held, stop);
        let (port, health, metrics, api) = (self.port, self.health, self.metrics, self.api);
        supervisor.once("http", Stage::Http, |stop| async move {
            http::serve(port, health, metrics, Some(api), stop).await;
            Ok(())
        });
        supervisor
    }

    fn add_upkeep(
        &self,
        supervisor: &mut Supervisor,
        session: &Session,
        held: &Held,
        checks: Checks,
        watch: Watch,
        bench: Weak<Bench>,
    ) {
        let (store, identity, metrics) = (self.store.clone(), self.identity.clone(), self.metrics.clone());
        let (config, lease) = (self.config.liveness.clone(), self.lease.clone());
        let (session, roll, asks) = (session.clone(), self.roll.clone(), checks.clone());
        supervisor.part("recovery", Stage::Claim, move |stop| {
            let recovery = Recovery {
                store: store.clone(),
                config: config.clone(),
                identity: identity.clone(),
                lease: lease.clone(),
                session: session.clone(),
                roll: roll.clone(),
                checks: asks.clone(),
                metrics: metrics.clone(),
                pace: recovery::Pace::default(),
            };
            tick(recovery, Rhythm::Every(recovery::LOOK_EVERY), stop)
        });
        if let Some(roll) = self.roll.clone() {
            let (store, every) = (self.store.clone(), self.config.liveness.recovery_interval);
            supervisor.part("registry", Stage::Claim, move |stop| {
                let (store, roll, cursor) = (store.clone(), roll.clone(), roll::FIRST_PAGE.to_owned());
                tick(registry::Tidy { store, roll, cursor }, Rhythm::Every(every), stop)
            });
        }
        let (store, identity, metrics) = (self.store.clone(), self.identity.clone(), self.metrics.clone());
        let (held, every) = (held.clone(), self.config.liveness.reconcile_interval);
        supervisor.part("reconcile", Stage::Claim, move |stop| {
            let reconcile = Reconcile {
                store: store.clone(),
                identity: identity.clone(),
                held: held.clone(),
                checks: checks.clone(),
                metrics: metrics.clone(),
                missing: HashSet::new(),
            };
            tick(reconcile, Rhythm::Every(every), stop)
        });
        let (store, objects, metrics) = (self.store.clone(), self.objects.clone(), self.metrics.clone());
        let every = self.config.retention.every;
        supervisor.part("retention", Stage::Claim, move |stop| {
            let retention = Retention {
                store: store.clone(),
                objects: objects.clone(),
                metrics: metrics.clone(),
                every,
                stop: stop.clone(),
            };
            tick(retention, Retention::rhythm(every), stop)
        });
        let metrics = self.metrics.clone();
        supervisor.part("timeouts", Stage::Upkeep, move |stop| {
            let timeouts = Timeouts { watch: watch.clone(), metrics: metrics.clone(), bench: bench.clone() };
            tick(timeouts, Rhythm::Every(timeouts::LOOK_EVERY), stop)
        });
    }

    fn add_sweep(&self, supervisor: &mut Supervisor, checks: Checks) {
        let (store, metrics) = (self.store.clone(), self.metrics.clone());
        let declared = Declared::of(&self.config, &self.handlers);
        let rhythm = Rhythm::Between(self.config.completion.sweep_min, self.config.completion.sweep_max);
        supervisor.part("sweep", Stage::Claim, move |stop| {
            let (store, checks) = (store.clone(), checks.clone());
            let mut sweep = Sweep { store, checks, metrics: metrics.clone(), declared: declared.clone() };
            async move {
                // What an earlier life left behind does not wait for the first sweep: a worker is often started again
                // because its outputs could not be uploaded.
                sweep.tick().await?;
                periodic::run(sweep, rhythm, stop).await;
                Ok(())
            }
        });
    }

    fn add_heartbeat(&self, supervisor: &mut Supervisor, session: Session, held: Held, stop: &Stop) {
        let heart = Heartbeat {
            config: self.config.liveness.clone(),
            redis: self.config.redis.clone(),
            presence: self.presence.clone(),
            target: self.store.direct.clone(),
            enlisted: Enlisted::of(&self.config, &self.handlers),
            identity: self.identity.clone(),
            lease: self.lease.clone(),
            session,
            held,
            health: self.health.clone(),
            metrics: self.metrics.clone(),
            drain: stop.drain.clone(),
        };
        supervisor.part("heartbeat", Stage::Heartbeat, move |stop| {
            let heart = heart.clone();
            async move { Ok(heart.run(stop).await?) }
        });
    }
}

type PartResult = Result<(), Box<dyn std::error::Error + Send + Sync>>;

async fn tick<P: periodic::Periodic>(task: P, rhythm: Rhythm, stop: CancellationToken) -> PartResult {
    periodic::run(task, rhythm, stop).await;
    Ok(())
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
