//! What holds for any updates of any producers and a database of any speed, by a clock that the test drives.

use super::*;
use proptest::prelude::*;

/// What a producer does next: waits, and sends an update of this weight.
#[derive(Clone, Copy, Debug)]
struct Send {
    after: Duration,
    weight: Weight,
}

/// An update and when it was in the channel.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sent {
    producer: usize,
    number: usize,
    weight: Weight,
    at: Instant,
}

#[derive(Clone, Debug)]
struct Flush {
    began: Instant,
    ended: Instant,
    updates: Vec<Sent>,
}

/// Takes a while for each flush, and remembers it.
#[derive(Clone)]
struct Slow {
    takes: Duration,
    flushes: Arc<Mutex<Vec<Flush>>>,
    /// Room taken by updates that wait.
    waiting: Arc<Mutex<u32>>,
}

impl Writer for Slow {
    type Update = Sent;

    fn weight(update: &Sent) -> Weight {
        update.weight
    }

    async fn write(&mut self, updates: Vec<Sent>) -> u64 {
        let began = Instant::now();
        *self.waiting.lock().unwrap() -= updates.iter().map(|sent| sent.weight.room).sum::<u32>();
        tokio::time::sleep(self.takes).await;
        self.flushes.lock().unwrap().push(Flush { began, ended: Instant::now(), updates });
        0
    }
}

fn sends() -> impl Strategy<Value = Vec<Send>> {
    let weight = (1..12_u32, prop::bool::weighted(0.1)).prop_map(|(updates, waited_for)| Weight {
        updates,
        room: updates.min(4),
        bytes: 0,
        waited_for,
    });
    let after =
        prop_oneof![3 => Just(0), 2 => 1..50_u64, 1 => 400..3_000_u64].prop_map(Duration::from_millis);
    prop::collection::vec((after, weight).prop_map(|(after, weight)| Send { after, weight }), 0..40)
}

/// Runs the producers beside the batcher to its end.
async fn run(
    producers: Vec<Vec<Send>>,
    takes: Duration,
    config: &Config,
) -> (Vec<Flush>, Vec<Vec<Sent>>, u32) {
    let slow = Slow { takes, flushes: Arc::default(), waiting: Arc::default() };
    let (sender, batcher) = channel(config, slow.clone(), BatcherMetrics::default());
    let fullest = Mutex::new(0);
    let feeds = producers.into_iter().enumerate().map(|(producer, sends)| {
        let (sender, waiting, fullest) = (sender.clone(), Arc::clone(&slow.waiting), &fullest);
        async move {
            let mut sent = Vec::new();
            for (number, Send { after, weight }) in sends.into_iter().enumerate() {
                tokio::time::sleep(after).await;
                let update = Sent { producer, number, weight, at: Instant::now() };
                sender.send(update, weight).await.unwrap();
                sent.push(Sent { at: Instant::now(), ..update });
                let mut waiting = waiting.lock().unwrap();
                *waiting += weight.room;
                let mut fullest = fullest.lock().unwrap();
                *fullest = (*fullest).max(*waiting);
            }
            sent
        }
    });
    let feeds: Vec<_> = feeds.collect();
    drop(sender);
    let ((), sent) = tokio::join!(batcher.run(), futures::future::join_all(feeds));
    let (flushes, fullest) = (slow.flushes.lock().unwrap().clone(), *fullest.lock().unwrap());
    (flushes, sent, fullest)
}

/// A model of when a flush may start, held against each that did.
fn is_as_the_model_says(flushes: &[Flush], sent: &[Vec<Sent>], fullest: u32, config: &Config) {
    const TICK: Duration = Duration::from_millis(2);
    let all: Vec<Sent> = flushes.iter().flat_map(|flush| flush.updates.clone()).collect();
    for (producer, sent) in sent.iter().enumerate() {
        let written: Vec<usize> =
            all.iter().filter(|update| update.producer == producer).map(|update| update.number).collect();
        assert_eq!(written, (0..sent.len()).collect::<Vec<_>>(), "each once, in the order of its producer");
    }
    assert!(fullest <= config.capacity.get() + 4, "{fullest} wait in a channel of {}", config.capacity);
    let at = |update: &Sent| sent[update.producer][update.number].at;
    let last = sent.iter().flatten().map(|sent| sent.at).max();
    for (place, flush) in flushes.iter().enumerate() {
        let free = place.checked_sub(1).map(|before| flushes[before].ended);
        assert!(free.is_none_or(|free| free <= flush.began), "one flush at a time");
        // What makes it due: enough, a caller that waits, an update that waited long enough, or the end.
        let updates: u32 = flush.updates.iter().map(|update| update.weight.updates).sum();
        let oldest = flush.updates.iter().map(at).min().expect("a flush writes something");
        let is_due = updates >= config.max_size.get()
            || flush.updates.iter().any(|update| update.weight.waited_for)
            || flush.began + TICK >= oldest + config.max_interval
            || last.is_some_and(|last| flush.began >= last);
        assert!(is_due, "{updates} updates were written for no reason: {flush:?}");
        // And it starts when it is due: no update waits for more than the interval and the flush before.
        let from = oldest.max(free.unwrap_or(oldest));
        assert!(flush.began <= from + config.max_interval + TICK, "an update waited too long: {flush:?}");
        let waited_for = flush.updates.iter().filter(|update| update.weight.waited_for).map(at).min();
        if let Some(since) = waited_for {
            let from = since.max(free.unwrap_or(since));
            assert!(flush.began <= from + TICK, "a caller waited for others to gather: {flush:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_updates_are_written_once_and_when_they_are_due(
        producers in prop::collection::vec(sends(), 1..4),
        takes in prop_oneof![Just(0_u64), 1..30_u64, 500..2_000_u64],
        max_size in 1..20_u32,
    ) {
        let config = Config {
            max_size: NonZeroU32::new(max_size).unwrap(),
            capacity: NonZeroU32::new(20).unwrap(),
            max_interval: Duration::from_secs(1),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let (flushes, sent, fullest) = runtime.block_on(run(producers, Duration::from_millis(takes), &config));
        is_as_the_model_says(&flushes, &sent, fullest, &config);
    }
}
