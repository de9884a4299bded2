//! What a connection may do next.

use musterd::lines::Lines;
use musterd::store::batches::{self, Look};
use musterd::store::blocks::{self, BlockRef};
use musterd::store::flush::{self, BlockWrite, Close, Outcomes, Patience, Purpose, Unanswered};
use musterd::store::recovery::{self, Ran};
use tokio_postgres::error::SqlState;

use super::{Claim, Hand, Memory, claim, complete, open_batches, owned, succeed};

/// Batches that are open at a time; those that ended are driven again, or replaced.
const OPEN: usize = 3;

impl Hand<'_> {
    pub(super) async fn step(&mut self) {
        let name = match self.dice.below(100) {
            0..12 => self.claim("carve").await,
            12..28 => self.claim("take").await,
            28..30 => self.claim("solo").await,
            30..38 => self.recover().await,
            38..43 => self.reconcile().await,
            43..80 => self.flush().await,
            80..90 => self.repeat().await,
            90..93 => self.append().await,
            93..95 => self.steer().await,
            95..97 => self.submit().await,
            _ => self.end().await,
        };
        *self.memory().steps.entry(name).or_default() += 1;
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap()
    }

    async fn claim(&mut self, kind: &'static str) -> &'static str {
        let (count, size) = (1 + self.dice.below(3), 1 + self.dice.below(60) as i32);
        let taken = claim(&self.client, &self.name, count, size, kind).await;
        for block in &taken {
            if block.solo && self.dice.chance(80) {
                blocks::mark_alone_if_held(&self.client, block.reference).await.unwrap();
            }
        }
        let mut memory = self.memory();
        memory.claims.extend(taken.into_iter().map(|block| Claim { block, writes: Vec::new() }));
        // The oldest are forgotten: most of what they could still try was tried.
        let old = memory.claims.len().saturating_sub(400);
        memory.claims.drain(..old);
        kind
    }

    /// Frees blocks as if their owners were dead; most of them live.
    async fn recover(&mut self) -> &'static str {
        let dead: Vec<_> =
            owned(&self.client, 2).await.into_iter().map(|(id, token, _)| (id, token)).collect();
        recovery::free_if_held(&mut self.client, &dead, 3, &Ran::default()).await.unwrap();
        "recover"
    }

    /// Frees blocks as if their owner had forgotten them.
    async fn reconcile(&mut self) -> &'static str {
        let list = owned(&self.client, 2).await;
        let lost: Vec<BlockRef> =
            list.into_iter().map(|(id, token, batch)| BlockRef { id, token, batch }).collect();
        for name in 0..super::CONNECTIONS {
            recovery::give_back_if_owned(&self.client, &format!("w{name}"), &lost).await.unwrap();
        }
        "reconcile"
    }

    /// Writes something for up to three claims, living or not, in one transaction.
    async fn flush(&mut self) -> &'static str {
        let mut writes: Vec<BlockWrite> = Vec::new();
        for _ in 0..1 + self.dice.below(3) {
            let Some(write) = self.write_for_some_claim() else { continue };
            if writes.iter().all(|other| other.block.token != write.block.token) {
                writes.push(write);
            }
        }
        writes.sort_by_key(|write| write.block.id);
        let Some(answers) = self.send(&mut writes).await else { return "locked" };
        for (write, written) in writes.into_iter().zip(answers) {
            self.note(&write, written);
            if !written && self.ask_about(&write).await == Unanswered::Inconsistent {
                // What this worker believes is wrong: it gives the block back, as the daemon does.
                let close = Some(Close::default());
                let back = BlockWrite {
                    outcomes: Outcomes::default(),
                    close,
                    part: -write.part,
                    block: write.block,
                };
                self.send(&mut [back]).await;
            }
        }
        "flush"
    }

    /// Some lines of a claim end, well or not; perhaps the block, too. One in ten says so of lines that are done already.
    fn write_for_some_claim(&mut self) -> Option<BlockWrite> {
        let mut dice = self.dice.clone();
        let memory = self.memory();
        let claim = memory.claims.get(dice.below(memory.claims.len()))?;
        let mut open = claim.block.lines.clone();
        if !dice.chance(10) {
            for (write, _) in claim.writes.iter().filter(|(_, written)| *written) {
                open = open.minus(&write.outcomes.done());
            }
        }
        let percent = if dice.chance(30) { 100 } else { dice.below(100) };
        let mut done = dice.some(open.iter(), percent);
        let mut outcomes = Outcomes::default();
        for line in dice.some(done.clone(), 10) {
            done.retain(|other| *other != line);
            outcomes.fail(line, "no".into());
        }
        // In any order: handlers answer as they please.
        if dice.chance(50) {
            done.reverse();
        }
        succeed(&mut outcomes, done);
        let retry: Lines = dice.some(claim.block.lines.iter(), 30).into_iter().collect();
        let close = dice.chance(30).then(|| Close { retry, error: Some("again".into()), ..Close::default() });
        let write =
            BlockWrite { block: claim.block.reference, part: claim.block.parts.next(), outcomes, close };
        drop(memory);
        self.dice = dice;
        // The daemon writes nothing that says nothing.
        (!write.outcomes.is_empty() || write.close.is_some()).then_some(write)
    }

    /// Sends a write again, as after a lost reply: it is not applied twice, and known if it was.
    async fn repeat(&mut self) -> &'static str {
        let mut dice = self.dice.clone();
        let old = {
            let memory = self.memory();
            let claim = memory.claims.get(dice.below(memory.claims.len()));
            claim.and_then(|claim| claim.writes.get(dice.below(claim.writes.len())).cloned())
        };
        self.dice = dice;
        let Some((mut write, was_written)) = old else { return "nothing to repeat" };
        if was_written {
            let Some(answers) = self.send(std::slice::from_mut(&mut write)).await else { return "locked" };
            assert_eq!(answers, [false], "applied twice: {write:?}");
            assert_eq!(self.ask_about(&write).await, Unanswered::Applied, "{write:?}");
        } else {
            assert_ne!(self.ask_about(&write).await, Unanswered::Applied, "{write:?}");
        }
        "repeat"
    }

    /// `None`: another transaction was in the way for too long, and nothing was written.
    async fn send(&self, writes: &mut [BlockWrite]) -> Option<Vec<bool>> {
        match flush::write_if_held(&self.client, writes, Purpose::Write, Patience::Group).await {
            Ok(answers) => Some(answers),
            Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => None,
            Err(error) => panic!("{error:?}: {writes:?}"),
        }
    }

    async fn ask_about(&self, write: &BlockWrite) -> Unanswered {
        flush::ask_about(&self.client, &[write]).await.unwrap()[0]
    }

    fn note(&self, write: &BlockWrite, written: bool) {
        let mut memory = self.memory();
        let batch = write.block.batch;
        if written {
            let bad: Vec<i32> = write.outcomes.failures().iter().map(|failure| failure.line).collect();
            let good = write.outcomes.done().iter().filter(|line| !bad.contains(line)).collect::<Vec<_>>();
            for line in good {
                assert!(
                    memory.succeeded.insert((batch, line)),
                    "line {line} of batch {batch} succeeded twice"
                );
            }
            memory.failed.extend(bad.into_iter().map(|line| (batch, line)));
        }
        if let Some(claim) = memory.claims.iter_mut().find(|claim| claim.block.reference == write.block) {
            claim.writes.push((write.clone(), written));
        }
    }

    async fn append(&mut self) -> &'static str {
        let Some(batch) = self.some_open_batch().await else { return self.submit().await };
        let sql = "SELECT musterd.append_rows($1, ARRAY(SELECT to_jsonb(g) FROM generate_series(1, 1 + (random() * 30)::int) g))";
        match self.client.query(sql, &[&batch]).await {
            // It has ended, or is being aborted, meanwhile.
            Err(error) if error.code() == Some(&SqlState::CHECK_VIOLATION) => {}
            answer => drop(answer.unwrap()),
        }
        "append"
    }

    /// Holds, releases or (seldom) aborts.
    async fn steer(&mut self) -> &'static str {
        let Some(batch) = self.some_open_batch().await else { return self.submit().await };
        let call = match self.dice.below(20) {
            0 => "abort",
            1..8 => "hold",
            _ => "release",
        };
        self.client.query(&format!("SELECT musterd.{call}($1)"), &[&batch]).await.unwrap();
        call
    }

    async fn submit(&mut self) -> &'static str {
        if open_batches(&self.client).await.len() >= OPEN {
            return "enough";
        }
        let sql = "SELECT musterd.submit_batch('work', ARRAY(SELECT to_jsonb(g) FROM generate_series(1, 1 + (random() * 900)::int) g),
                                               max_failed => 1000000)";
        self.client.query(sql, &[]).await.unwrap();
        "submit"
    }

    /// Ends what is over, audits it, and drives some of it again.
    async fn end(&mut self) -> &'static str {
        for batch in batches::over(&self.client).await.unwrap() {
            assert_eq!(
                batches::heal(&self.client, batch).await.unwrap(),
                0,
                "lines of batch {batch} were lost"
            );
        }
        let over = batches::unfinished(&self.client).await.unwrap();
        for look in batches::look(&self.client, &over).await.unwrap() {
            let Look::Closed(closed) = look else { panic!("{look:?}") };
            complete(&mut self.client, &closed).await;
            if self.dice.chance(50) {
                match self.client.query("SELECT musterd.redrive($1)", &[&closed.id]).await {
                    // It was aborted, which is for good.
                    Err(error) if error.code() == Some(&SqlState::CHECK_VIOLATION) => {}
                    answer => drop(answer.unwrap()),
                }
            }
        }
        "end"
    }

    async fn some_open_batch(&mut self) -> Option<i64> {
        let open = open_batches(&self.client).await;
        open.get(self.dice.below(open.len())).copied()
    }
}
