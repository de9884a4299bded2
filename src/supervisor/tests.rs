use super::*;
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU32, Ordering},
};

fn log() -> (Arc<Mutex<Vec<&'static str>>>, impl Fn(&'static str) + Clone + Send + 'static) {
    let log = Arc::new(Mutex::new(Vec::new()));
    let writer = Arc::clone(&log);
    (log, move |word| writer.lock().unwrap().push(word))
}

fn restarted<F>(
    supervisor: &mut Supervisor,
    name: &'static str,
    stage: Stage,
    start: impl FnMut(CancellationToken) -> F + Send + 'static,
) where
    F: Future<Output = PartResult> + Send + 'static,
{
    supervisor.add(name, stage, OnDeath::Restart, Start::again(start));
}

fn vital<F>(
    supervisor: &mut Supervisor,
    name: &'static str,
    stage: Stage,
    start: impl FnOnce(CancellationToken) -> F + Send + 'static,
) where
    F: Future<Output = PartResult> + Send + 'static,
{
    supervisor.add(name, stage, OnDeath::Stop, Start::once(start));
}

#[tokio::test]
async fn stages_stop_in_the_direction_of_the_data() {
    let (log, say) = log();
    let mut supervisor = Supervisor::new(Health::default());
    for (name, stage) in [("heartbeat", Stage::Heartbeat), ("claim", Stage::Claims), ("write", Stage::Writes)]
    {
        let say = say.clone();
        vital(&mut supervisor, name, stage, move |stop| async move {
            stop.cancelled().await;
            say(name);
            Ok(())
        });
    }
    let stop = Stop::default();
    stop.drain.cancel();
    let ended = supervisor.run(stop, Duration::from_secs(5)).await;
    assert!(ended.is_clean());
    assert_eq!(*log.lock().unwrap(), ["claim", "write", "heartbeat"]);
}

#[tokio::test(start_paused = true)]
async fn a_part_that_panics_is_started_again_and_one_that_must_not_die_ends_the_daemon() {
    let starts = Arc::new(AtomicU32::new(0));
    let mut supervisor = Supervisor::new(Health::default());
    let counted = Arc::clone(&starts);
    restarted(&mut supervisor, "flaky", Stage::Upkeep, move |stop| {
        let n = counted.fetch_add(1, Ordering::SeqCst);
        async move {
            assert!(n >= 2, "start number {n}");
            stop.cancelled().await;
            Ok(())
        }
    });
    let watched = Arc::clone(&starts);
    vital(&mut supervisor, "vital", Stage::Writes, move |_| async move {
        while watched.load(Ordering::SeqCst) < 3 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Err("disk on fire".into())
    });
    let ended = supervisor.run(Stop::default(), Duration::from_secs(5)).await;
    let died = ended.died.expect("the vital part died");
    assert_eq!((died.part.as_str(), died.reason.as_str()), ("vital", "disk on fire"));
    assert_eq!(starts.load(Ordering::SeqCst), 3, "two panics, two restarts");
}

#[tokio::test(start_paused = true)]
async fn a_part_that_dies_again_and_again_makes_the_daemon_unready_until_it_lives() {
    let (health, stop) = (Health::default(), Stop::default());
    let mut supervisor = Supervisor::new(health.clone());
    let starts = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&starts);
    restarted(&mut supervisor, "broken", Stage::Upkeep, move |stop| {
        let n = counted.fetch_add(1, Ordering::SeqCst);
        async move {
            assert!(n >= 7, "no such table");
            stop.cancelled().await;
            Ok(())
        }
    });
    let watch = async {
        let mut unready = Vec::new();
        while starts.load(Ordering::SeqCst) < 8 {
            tokio::time::sleep(Duration::from_millis(10)).await;
            let said = health.not_ready_because();
            if unready.last() != Some(&said) {
                unready.push(said);
            }
        }
        tokio::time::sleep(Duration::from_secs(59)).await;
        assert!(!health.not_ready_because().is_empty(), "it has not lived for long");
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(health.not_ready_because(), Vec::<String>::new());
        stop.drain.cancel();
        unready
    };
    let (ended, unready) = tokio::join!(supervisor.run(stop.clone(), Duration::from_secs(5)), watch);
    assert!(ended.is_clean());
    assert_eq!(unready.len(), 4, "{unready:?}");
    assert_eq!(unready[0], Vec::<String>::new(), "a few deaths are no reason");
    assert!(
        unready[1][0].starts_with("part broken: died 5 times in a row: panicked: no such table"),
        "{unready:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn at_the_end_of_the_grace_what_runs_is_told_to_give_back() {
    let stop = Stop::default();
    let mut supervisor = Supervisor::new(Health::default());
    let now = stop.now.clone();
    vital(&mut supervisor, "fibers", Stage::Claims, move |_| async move {
        now.cancelled().await;
        Ok(())
    });
    stop.drain.cancel();
    let ended = supervisor.run(stop.clone(), Duration::from_secs(25)).await;
    assert!(ended.is_clean(), "{ended:?}");
    assert!(stop.now.is_cancelled());
}

#[tokio::test(start_paused = true)]
async fn a_part_that_ignores_everything_is_named_and_abandoned() {
    let mut supervisor = Supervisor::new(Health::default());
    vital(&mut supervisor, "deaf", Stage::Claims, |_| std::future::pending());
    let stop = Stop::default();
    stop.drain.cancel();
    let ended = supervisor.run(stop, Duration::from_secs(25)).await;
    assert_eq!(ended.stuck, [Stage::Claims]);
}

#[tokio::test]
async fn readiness_follows_the_supervisor() {
    let health = Health::default();
    health.unready(STARTING, "starting");
    let mut supervisor = Supervisor::new(health.clone());
    let (at_work, seen) = (health.clone(), Arc::new(Mutex::new(Vec::new())));
    let record = Arc::clone(&seen);
    let stop = Stop::default();
    let drain = stop.drain.clone();
    vital(&mut supervisor, "witness", Stage::Claims, move |stop| async move {
        record.lock().unwrap().push(at_work.not_ready_because());
        drain.cancel();
        stop.cancelled().await;
        record.lock().unwrap().push(at_work.not_ready_because());
        Ok(())
    });
    supervisor.run(stop, Duration::from_secs(5)).await;
    let seen = seen.lock().unwrap();
    assert_eq!(*seen, [vec![], vec!["shutdown: draining".to_owned()]]);
}
