//! The parts of a worker: a line each in a table, and a function each that makes it from what they share.

use super::{Daemon, declared, enlisted, listener::Listener, look};
use crate::{
    flow::{
        batcher::{self, Batcher},
        claim::{Desk, Dispatcher},
        complete::{self, CheckLoop, Checks, Completer},
        fiber::{Bench, FactsCache},
        outputs::Uploader,
        pace::Pace,
        rivals::{self, Rival},
        solo::Room,
        watch::Watch,
        writer::{Gate, OutcomeWriter, WriterParts},
    },
    held::Held,
    http,
    liveness::{heartbeat::Heartbeat, redis::StatusCache, roll, session::Session},
    periodic::{self, Periodic, Rhythm},
    signal::Stop,
    store::{blocks::Block, pages::ChunkCache, tasks::Task},
    supervisor::{
        Census, Count,
        OnDeath::{self, Restart, Stop as StopDaemon},
        PartResult, Stage, Start, Supervisor,
    },
    upkeep::{
        reconcile::Reconcile,
        recovery::{self, Recovery},
        registry,
        retention::Retention,
        sweep::Sweep,
        timeouts::{self, Timeouts},
    },
};
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Weak},
};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// A kind of part: the stage in which it stops, what its death means, and what makes it.
type Row = (&'static str, Stage, OnDeath, fn(&mut Shared, &mut Add<'_>));

/// Every part. What is restarted can be made again; what stops the daemon owns something there is only one of.
const PARTS: [Row; 12] = [
    ("recovery", Stage::Upkeep, Restart, Shared::recovery),
    ("registry", Stage::Upkeep, Restart, Shared::registry),
    ("reconcile", Stage::Upkeep, Restart, Shared::reconcile),
    ("sweep", Stage::Upkeep, Restart, Shared::sweep),
    ("retention", Stage::Upkeep, Restart, Shared::retention),
    ("claims", Stage::Claims, StopDaemon, Shared::claims),
    ("batcher", Stage::Writes, StopDaemon, Shared::batcher),
    ("completer", Stage::Completion, StopDaemon, Shared::completer),
    // Until the last flush: its session lock is what keeps a worker that drains from being taken for dead.
    ("listener", Stage::Completion, Restart, Shared::listener),
    ("timeouts", Stage::Timeouts, Restart, Shared::timeouts),
    ("heartbeat", Stage::Heartbeat, Restart, Shared::heartbeat),
    ("http", Stage::Http, StopDaemon, Shared::http),
];

/// What the parts of one worker share.
struct Shared {
    daemon: Daemon,
    stop: Stop,
    held: Held,
    session: Session,
    watch: Watch,
    /// What can ask for checks stops before the completer or with it: that ends when no part can ask any more.
    checks: Checks,
    check_loop: Option<CheckLoop>,
    batcher: Option<Batcher<OutcomeWriter>>,
    /// The dispatchers take it: the batcher ends when the last fiber has handed over what it had, so no other part keeps it alive.
    bench: Option<Arc<Bench>>,
    fibers: Weak<Bench>,
    writable: watch::Receiver<bool>,
    /// The dispatchers of each queue, to be woken.
    wakes: HashMap<String, Rival>,
}

/// Adds parts of one kind.
type Add<'a> = dyn FnMut(Option<String>, Start) + 'a;

/// The parts of `daemon`, ready to run until `stop`.
pub(super) fn of(daemon: Daemon, stop: &Stop) -> Supervisor {
    let mut shared = Shared::new(daemon, stop);
    look::install(&shared.daemon.metrics, &shared.daemon.store, &shared.held);
    let (held, metrics) = (shared.held.clone(), shared.daemon.metrics.clone());
    let census = Census::new(move || Count { blocks: held.len(), given_back: metrics.rows_given_back.get() });
    let mut supervisor = Supervisor::new(shared.daemon.health.clone()).census(census);
    for (name, stage, on_death, make) in PARTS {
        make(&mut shared, &mut |own, start| match own {
            Some(own) => supervisor.add(own, stage, on_death, start),
            None => supervisor.add(name, stage, on_death, start),
        });
    }
    supervisor
}

impl Shared {
    fn new(daemon: Daemon, stop: &Stop) -> Self {
        let (held, watch) = (Held::default(), Watch::default());
        let (checks, check_loop) = complete::channel(completer(&daemon));
        let (gate, writable) = Gate::new();
        let writer = OutcomeWriter::new(WriterParts {
            pool: daemon.store.writes.clone(),
            general: daemon.store.general.clone(),
            held: held.clone(),
            checks: checks.clone(),
            health: daemon.health.clone(),
            gate,
            metrics: daemon.metrics.clone(),
        });
        let (outcomes, batcher) =
            batcher::channel(&daemon.config.batcher, writer, daemon.metrics.batcher.clone());
        let bench = Arc::new(Bench {
            store: daemon.store.clone(),
            handlers: daemon.handlers.clone(),
            outcomes,
            checks: checks.clone(),
            held: held.clone(),
            pace: Pace::default(),
            task_pace: Pace::default(),
            retry: daemon.config.retry.clone(),
            max_crashes: i32::try_from(daemon.config.liveness.max_crashes).unwrap_or(i32::MAX),
            metrics: daemon.metrics.clone(),
            now: stop.now.clone(),
            facts: FactsCache::default(),
            chunks: ChunkCache::default(),
            lease: daemon.lease.clone(),
            room: Room::default(),
            watch: watch.clone(),
        });
        Self {
            session: Session::new(daemon.config.database.has_session()),
            stop: stop.clone(),
            held,
            watch,
            checks,
            check_loop: Some(check_loop),
            batcher: Some(batcher),
            fibers: Arc::downgrade(&bench),
            bench: Some(bench),
            writable,
            wakes: HashMap::new(),
            daemon,
        }
    }

    fn recovery(&mut self, add: &mut Add<'_>) {
        let daemon = &self.daemon;
        let recovery = Recovery {
            store: daemon.store.clone(),
            config: daemon.config.liveness.clone(),
            identity: daemon.identity.clone(),
            lease: daemon.lease.clone(),
            session: self.session.clone(),
            roll: daemon.roll.clone(),
            checks: self.checks.clone(),
            metrics: daemon.metrics.clone(),
            pace: recovery::Pace::default(),
        };
        add(None, every(Rhythm::Every(recovery::LOOK_EVERY), recovery));
    }

    /// Without Redis there is none to keep tidy.
    fn registry(&mut self, add: &mut Add<'_>) {
        let Some(roll) = self.daemon.roll.clone() else { return };
        let tidy =
            registry::Tidy { store: self.daemon.store.clone(), roll, cursor: roll::FIRST_PAGE.to_owned() };
        add(None, every(Rhythm::Every(self.daemon.config.liveness.recovery_interval), tidy));
    }

    fn reconcile(&mut self, add: &mut Add<'_>) {
        let reconcile = Reconcile {
            store: self.daemon.store.clone(),
            identity: self.daemon.identity.clone(),
            held: self.held.clone(),
            checks: self.checks.clone(),
            metrics: self.daemon.metrics.clone(),
            missing: HashSet::new(),
        };
        add(None, every(Rhythm::Every(self.daemon.config.liveness.reconcile_interval), reconcile));
    }

    fn sweep(&mut self, add: &mut Add<'_>) {
        let config = &self.daemon.config.completion;
        let rhythm = Rhythm::Between(config.sweep_min, config.sweep_max);
        let sweep = Sweep {
            store: self.daemon.store.clone(),
            checks: self.checks.clone(),
            metrics: self.daemon.metrics.clone(),
            declared: declared(&self.daemon.config, &self.daemon.handlers),
        };
        let start = move |stop| {
            let mut sweep = sweep.clone();
            async move {
                // What an earlier life left behind does not wait for the first sweep: a worker is often started again
                // because its outputs could not be uploaded.
                sweep.tick().await?;
                periodic::run(sweep, rhythm, stop).await;
                Ok(())
            }
        };
        add(None, Start::again(start));
    }

    fn retention(&mut self, add: &mut Add<'_>) {
        let Daemon { store, objects, metrics, config, .. } = &self.daemon;
        let (store, objects, metrics) = (store.clone(), objects.clone(), metrics.clone());
        let every = config.retention.every;
        let start = move |stop: CancellationToken| {
            let (store, objects, metrics) = (store.clone(), objects.clone(), metrics.clone());
            let retention = Retention { store, objects, metrics, every, stop: stop.clone() };
            async move {
                periodic::run(retention, Retention::rhythm(every), stop).await;
                Ok(())
            }
        };
        add(None, Start::again(start));
    }

    /// Two for each queue: its tasks and its rows.
    fn claims(&mut self, add: &mut Add<'_>) {
        let Some(bench) = self.bench.take() else { return };
        for (queue, settings) in &self.daemon.config.queues {
            let (rows, tasks) = rivals::pair();
            self.wakes.insert(queue.clone(), rows.clone());
            let idle = Arc::new(Semaphore::new(settings.fibers.get() as usize));
            let desk = |name: &str, rival| Desk {
                queue: queue.clone(),
                settings: settings.clone(),
                config: self.daemon.config.claim.clone(),
                identity: self.daemon.identity.clone(),
                bench: Arc::clone(&bench),
                idle: Arc::clone(&idle),
                rival,
                writable: self.writable.clone(),
                session: self.session.clone(),
                drain: self.stop.drain.clone(),
                pulse: self.daemon.health.pulse(name),
            };
            let name = format!("tasks {queue}");
            let dispatcher = Dispatcher::<Task>::new(desk(&name, tasks));
            add(Some(name), once(|stop| dispatcher.run(stop)));
            let name = format!("queue {queue}");
            let dispatcher = Dispatcher::<Block>::new(desk(&name, rows));
            add(Some(name), once(|stop| dispatcher.run(stop)));
        }
    }

    fn batcher(&mut self, add: &mut Add<'_>) {
        let Some(batcher) = self.batcher.take() else { return };
        let batcher = batcher.watched(self.daemon.health.pulse("batcher"));
        add(None, once(|_| batcher.run()));
    }

    fn completer(&mut self, add: &mut Add<'_>) {
        let Some(check_loop) = self.check_loop.take() else { return };
        let (check_loop, now) =
            (check_loop.watched(self.daemon.health.pulse("completer")), self.stop.now.clone());
        add(None, once(|_| check_loop.run(now)));
    }

    fn listener(&mut self, add: &mut Add<'_>) {
        let listener = Listener {
            target: self.daemon.store.direct.clone(),
            identity: self.daemon.identity.clone(),
            session: self.session.clone(),
            wakes: Arc::new(std::mem::take(&mut self.wakes)),
            held: self.held.clone(),
            checks: self.checks.clone(),
            health: self.daemon.health.clone(),
        };
        let start = move |stop| {
            let listener = listener.clone();
            async move {
                listener.run(stop).await;
                Ok(())
            }
        };
        add(None, Start::again(start));
    }

    fn timeouts(&mut self, add: &mut Add<'_>) {
        let timeouts = Timeouts {
            watch: self.watch.clone(),
            metrics: self.daemon.metrics.clone(),
            bench: Weak::clone(&self.fibers),
        };
        add(None, every(Rhythm::Every(timeouts::LOOK_EVERY), timeouts));
    }

    fn heartbeat(&mut self, add: &mut Add<'_>) {
        let daemon = &self.daemon;
        let heart = Heartbeat {
            config: daemon.config.liveness.clone(),
            redis: daemon.config.redis.clone(),
            presence: daemon.presence.clone(),
            target: daemon.store.direct.clone(),
            enlisted: enlisted(&daemon.config, &daemon.handlers),
            identity: daemon.identity.clone(),
            lease: daemon.lease.clone(),
            session: self.session.clone(),
            held: self.held.clone(),
            health: daemon.health.clone(),
            metrics: daemon.metrics.clone(),
            drain: self.stop.drain.clone(),
        };
        let start = move |stop| {
            let heart = heart.clone();
            async move { Ok(heart.run(stop).await?) }
        };
        add(None, Start::again(start));
    }

    fn http(&mut self, add: &mut Add<'_>) {
        let Daemon { port, health, metrics, api, .. } = &self.daemon;
        let serving = (port.clone(), health.clone(), metrics.clone(), Some(api.clone()));
        add(None, once(|stop| http::serve(serving.0, serving.1, serving.2, serving.3, stop)));
    }
}

fn completer(daemon: &Daemon) -> Completer {
    let cache = |roll: &roll::Roll| StatusCache::new(roll.client().clone(), &daemon.config.redis.key_prefix);
    Completer {
        store: daemon.store.clone(),
        uploader: Uploader { pool: daemon.store.uploads.clone(), objects: daemon.objects.clone() },
        config: daemon.config.completion.clone(),
        cache: daemon.roll.as_ref().map(cache),
        metrics: daemon.metrics.clone(),
    }
}

/// A loop that a clock drives. A restart begins with what it was made with.
fn every<P: Periodic + Clone>(rhythm: Rhythm, task: P) -> Start {
    Start::again(move |stop| {
        let task = task.clone();
        async move {
            periodic::run(task, rhythm, stop).await;
            PartResult::Ok(())
        }
    })
}

fn once<F>(run: impl FnOnce(CancellationToken) -> F + Send + 'static) -> Start
where
    F: Future<Output = ()> + Send + 'static,
{
    Start::once(|stop| async move {
        run(stop).await;
        Ok(())
    })
}
