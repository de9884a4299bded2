use super::*;
use crate::{json::Json, store::tasks::TaskRef};
use uuid::Uuid;

const HOUR: Duration = Duration::from_secs(3600);

fn a_moment() {
    std::thread::park_timeout(Duration::from_millis(5));
}

fn block() -> Watched {
    let block = BlockRef { id: 1, token: Uuid::new_v4(), batch: 7 };
    Watched::Block(WatchedBlock {
        block,
        parts: Parts::default(),
        command: "slow".to_owned(),
        attempt: 1,
        max_attempts: 3,
    })
}

fn task(id: i64) -> Task {
    Task {
        reference: TaskRef { id, token: Uuid::new_v4() },
        parent: None,
        queue: "default".to_owned(),
        command: "slow".to_owned(),
        payload: Json::from_text("{}"),
        attempt: 1,
        max_attempts: None,
        crashes: 0,
        solo_crashes: 0,
        is_solo: false,
        timeout: None,
        traceparent: None,
        waited: None,
    }
}

fn tasks(count: i64) -> Watched {
    Watched::Tasks(Arc::new((1..=count).map(task).collect()))
}

fn ids(tasks: &[Task]) -> Vec<i64> {
    tasks.iter().map(|task| task.reference.id).collect()
}

#[test]
fn a_row_past_its_deadline_is_given_up_once_and_its_fiber_learns_of_it() {
    let watch = Watch::default();
    let guard = watch.post(block());
    guard.begin_row(3, HOUR);
    assert_eq!(watch.overdue(Duration::ZERO).count, 0);
    assert!(guard.end());
    guard.begin_row(4, Duration::ZERO);
    a_moment();
    let late = watch.overdue(Duration::ZERO);
    assert_eq!((late.count, late.news.len(), late.news[0].line()), (1, 1, 4));
    let late = watch.overdue(Duration::ZERO);
    assert_eq!((late.count, late.news.len()), (1, 0), "seen before");
    assert!(!guard.end());
    assert_eq!(watch.overdue(Duration::ZERO).count, 0);
    guard.begin_row(5, Duration::ZERO);
    drop(guard);
    a_moment();
    assert_eq!(watch.overdue(Duration::ZERO).count, 0);
}

#[test]
fn the_tasks_behind_one_that_blocks_are_given_back_once() {
    let watch = Watch::default();
    let guard = watch.post(tasks(4));
    assert!(guard.advance());
    guard.begin(Duration::ZERO);
    a_moment();
    let late = watch.overdue(Duration::ZERO);
    assert_eq!(late.news[0].task().map(|task| task.reference.id), Some(2));
    assert_eq!(ids(late.news[0].take_rest()), [3, 4]);
    assert_eq!(late.news[0].task().map(|task| task.reference.id), Some(2), "the same as before");
    assert_eq!(ids(guard.take_rest()), [0; 0]);
    assert!(!guard.end() && !guard.advance());
}

#[test]
fn tasks_that_wait_for_too_long_are_taken_from_a_fiber_that_does_not_give_them_back() {
    let watch = Watch::default();
    let (blocked, alone, patient) = (watch.post(tasks(3)), watch.post(tasks(1)), watch.post(tasks(3)));
    [&blocked, &alone, &patient].iter().for_each(|guard| guard.begin(HOUR));
    assert_eq!(ids(patient.take_rest()), [2, 3]);
    assert_eq!(ids(&watch.stranded(HOUR)), [0; 0]);
    a_moment();
    assert_eq!(ids(&watch.stranded(Duration::ZERO)), [2, 3]);
    assert_eq!(ids(&watch.stranded(Duration::ZERO)), [0; 0]);
    assert!(blocked.end(), "the one that runs goes on");
    assert!(!blocked.advance());
}
