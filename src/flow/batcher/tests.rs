use super::*;
use tokio::sync::Notify;

mod properties;

/// Remembers what every flush wrote; a gate can hold a flush up.
#[derive(Clone, Default)]
struct Book {
    flushes: Arc<Mutex<Vec<Vec<u32>>>>,
    taken: Arc<Notify>,
    written: Arc<Notify>,
    gate: Option<Arc<Semaphore>>,
}

impl Writer for Book {
    type Update = u32;

    fn weight(_: &u32) -> Weight {
        Weight { updates: 1, room: 1, bytes: 0, waited_for: false }
    }

    async fn write(&mut self, updates: Vec<u32>) -> u64 {
        self.taken.notify_one();
        if let Some(gate) = &self.gate {
            gate.acquire().await.unwrap().forget();
        }
        let rows = updates.len() as u64;
        self.flushes.lock().unwrap().push(updates);
        self.written.notify_one();
        rows
    }
}

impl Book {
    fn gated() -> Self {
        Self { gate: Some(Arc::new(Semaphore::new(0))), ..Self::default() }
    }

    fn flushes(&self) -> Vec<Vec<u32>> {
        self.flushes.lock().unwrap().clone()
    }
}

fn config(max_size: u32, capacity: u32) -> Config {
    Config {
        max_size: NonZeroU32::new(max_size).unwrap(),
        capacity: NonZeroU32::new(capacity).unwrap(),
        max_interval: Duration::from_secs(5),
    }
}

const PLAIN: Weight = Weight { updates: 1, room: 1, bytes: 0, waited_for: false };
const WAITED_FOR: Weight = Weight { waited_for: true, ..PLAIN };

/// Feeds the batcher while it runs; both end together.
async fn run_with(batcher: Batcher<Book>, feed: impl Future<Output = ()>) {
    tokio::join!(batcher.run(), feed);
}

#[tokio::test(start_paused = true)]
async fn a_flush_starts_when_enough_has_gathered() {
    let book = Book::default();
    let (sender, batcher) = channel(&config(3, 10), book.clone(), BatcherMetrics::default());
    let began = tokio::time::Instant::now();
    let feed = async {
        for update in 0..3 {
            sender.send(update, PLAIN).await.unwrap();
        }
        book.written.notified().await;
        assert!(began.elapsed() < Duration::from_secs(1), "no update had to wait for the clock");
        assert_eq!(book.flushes(), [[0, 1, 2]]);
        drop(sender);
    };
    run_with(batcher, feed).await;
}

#[tokio::test(start_paused = true)]
async fn an_update_that_a_fiber_waits_for_is_written_at_once() {
    let book = Book::default();
    let (sender, batcher) = channel(&config(100, 500), book.clone(), BatcherMetrics::default());
    let began = tokio::time::Instant::now();
    let feed = async {
        sender.send(1, PLAIN).await.unwrap();
        sender.send(2, WAITED_FOR).await.unwrap();
        book.written.notified().await;
        assert!(began.elapsed() < Duration::from_secs(1));
        assert_eq!(book.flushes(), [[1, 2]]);
        drop(sender);
    };
    run_with(batcher, feed).await;
}

#[tokio::test(start_paused = true)]
async fn a_lone_update_waits_no_longer_than_the_interval() {
    let book = Book::default();
    let (sender, batcher) = channel(&config(100, 500), book.clone(), BatcherMetrics::default());
    let began = tokio::time::Instant::now();
    let feed = async {
        sender.send(1, PLAIN).await.unwrap();
        book.written.notified().await;
        let waited = began.elapsed();
        assert!(
            waited >= Duration::from_millis(4_900) && waited <= Duration::from_millis(5_100),
            "{waited:?}"
        );
        drop(sender);
    };
    run_with(batcher, feed).await;
}

#[tokio::test(start_paused = true)]
async fn what_gathers_during_a_flush_is_one_flush_and_a_full_channel_makes_producers_wait() {
    let book = Book::gated();
    let gate = book.gate.clone().unwrap();
    let (sender, batcher) = channel(&config(2, 4), book.clone(), BatcherMetrics::default());
    let feed = async {
        sender.send(0, PLAIN).await.unwrap();
        sender.send(1, PLAIN).await.unwrap();
        // The first flush has been taken and is held up: its two places are free again.
        book.taken.notified().await;
        for update in 2..6 {
            sender.send(update, PLAIN).await.unwrap();
        }
        let seventh = tokio::time::timeout(Duration::from_secs(60), sender.send(6, PLAIN)).await;
        assert!(seventh.is_err(), "the channel holds four and there is no room for a fifth");
        gate.add_permits(1);
        book.written.notified().await;
        sender.send(6, PLAIN).await.unwrap();
        gate.add_permits(100);
        drop(sender);
    };
    run_with(batcher, feed).await;
    let flushes = book.flushes();
    assert_eq!(flushes[0], [0, 1]);
    assert_eq!(flushes[1][..4], [2, 3, 4, 5], "one flush takes all that gathered");
    assert_eq!(flushes.concat(), [0, 1, 2, 3, 4, 5, 6], "nothing is lost and nothing is written twice");
}

#[tokio::test(start_paused = true)]
async fn an_update_heavier_than_the_channel_goes_through_alone() {
    let book = Book::default();
    let (sender, batcher) = channel(&config(2, 4), book.clone(), BatcherMetrics::default());
    let feed = async {
        let heavy = Weight { updates: 1_000, room: 1_000, bytes: 1 << 30, waited_for: false };
        sender.send(7, heavy).await.unwrap();
        drop(sender);
    };
    run_with(batcher, feed).await;
    assert_eq!(book.flushes(), [[7]]);
}

#[tokio::test(start_paused = true)]
async fn the_end_writes_what_is_left() {
    let book = Book::default();
    let (sender, batcher) = channel(&config(100, 500), book.clone(), BatcherMetrics::default());
    let feed = async {
        sender.send(1, PLAIN).await.unwrap();
        drop(sender);
    };
    run_with(batcher, feed).await;
    assert_eq!(book.flushes(), [[1]]);
}

/// Not enough to write, a database that takes its time, nothing to write: it waits, and is not stuck.
#[tokio::test(start_paused = true)]
async fn a_batcher_that_waits_is_alive() {
    let book = Book::gated();
    let pulses = crate::pulse::Pulses::new(Duration::from_secs(1));
    let (sender, batcher) = channel(&config(100, 500), book.clone(), BatcherMetrics::default());
    let batcher = batcher.watched(pulses.begin("batcher"));
    let feed = async {
        sender.send(1, PLAIN).await.unwrap();
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(pulses.stuck(), [], "it waits for more");
        book.taken.notified().await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(pulses.stuck(), [], "it waits for the database");
        book.gate.as_ref().unwrap().add_permits(1);
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(pulses.stuck(), [], "it waits for the next");
        drop(sender);
    };
    run_with(batcher, feed).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(pulses.stuck(), [], "it has ended");
}
