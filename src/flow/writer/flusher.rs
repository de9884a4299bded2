//! One flush, and what to do when it fails: wait for the database, take the group apart, or find the row at fault.

use super::{Note, Trouble};
use crate::{
    backoff,
    error_text::describe,
    failpoint::is_mutant,
    metrics::Metrics,
    store::{
        blocks::Parts,
        fault::{self, Fault},
        flush::{self, BlockWrite, Close, Outcomes, Patience, Purpose, Unanswered},
    },
};
use deadpool_postgres::{Object, Pool};
use tokio_postgres::Error;

/// What became of one write.
#[derive(Debug)]
pub(super) enum Answer {
    Written,
    /// A flush before, whose reply was lost, had written it.
    AppliedBefore,
    /// Another worker has the block.
    Refused,
    /// Not now: another transaction is in the way, or the database takes nothing of this block. What is left is in the write.
    Aside(String),
}

/// How a write of one group failed.
pub(super) enum Failed {
    /// Of a group, one member may be the cause.
    Busy(Error),
    /// The database refuses a value.
    Row(Error),
}

/// Writes groups of blocks, and of tasks: see `tasks.rs`.
#[derive(Clone, Debug)]
pub(super) struct Flusher {
    pub(super) pool: Pool,
    pub(super) trouble: Trouble,
    pub(super) metrics: Metrics,
}

impl Flusher {
    /// Writes all that can be written now. Waits only for a database that is away, or that a person has to fix.
    pub(super) async fn write(&self, writes: &mut [BlockWrite], notes: &mut [Note]) -> Vec<Answer> {
        match self.outlast(writes, Patience::Group).await {
            Ok(answers) => answers,
            Err(Failed::Busy(error)) if writes.len() == 1 => vec![Answer::Aside(reason(&error))],
            Err(failed) => {
                let (Failed::Busy(error) | Failed::Row(error)) = failed;
                tracing::warn!(
                    error = reason(&error),
                    blocks = writes.len(),
                    "a flush is refused; taking it apart"
                );
                let mut answers = Vec::with_capacity(writes.len());
                for (write, note) in writes.iter_mut().zip(notes) {
                    answers.push(self.write_alone(write, note).await);
                }
                answers
            }
        }
    }

    /// One block. A value that cannot be stored fails its own row.
    pub(super) async fn write_alone(&self, write: &mut BlockWrite, note: &mut Note) -> Answer {
        match self.outlast(std::slice::from_mut(write), Patience::Alone).await {
            Ok(mut answers) => answers.pop().unwrap_or(Answer::Refused),
            Err(Failed::Busy(error)) => Answer::Aside(reason(&error)),
            Err(Failed::Row(error)) if write.outcomes.is_empty() => Answer::Aside(reason(&error)),
            Err(Failed::Row(_)) => self.write_apart(write, note).await,
        }
    }

    /// Halves the rows until the ones at fault stand alone; those are failed with PostgreSQL's words, their neighbours are
    /// stored. The block closes last, when every row has its outcome. What is left when something else comes in the way
    /// stays in `write`.
    async fn write_apart(&self, write: &mut BlockWrite, note: &mut Note) -> Answer {
        let (block, parts) = (write.block, note.parts.clone());
        let mut pieces = vec![std::mem::take(&mut write.outcomes)];
        while let Some(piece) = pieces.pop() {
            let mut one = [BlockWrite { block, part: parts.next(), outcomes: piece, close: None }];
            let answer = match self.outlast(&mut one, Patience::Alone).await {
                Ok(mut answers) => answers.pop().unwrap_or(Answer::Refused),
                Err(Failed::Row(error)) => match one[0].outcomes.halve() {
                    Some((first, second)) => {
                        pieces.extend([second, first]);
                        continue;
                    }
                    None => self.blame(&mut one[0], &parts, &error).await,
                },
                Err(Failed::Busy(error)) => Answer::Aside(reason(&error)),
            };
            let [BlockWrite { outcomes, .. }] = one;
            match answer {
                Answer::Refused => return Answer::Refused,
                Answer::Aside(reason) => {
                    write.outcomes = outcomes;
                    pieces.into_iter().for_each(|piece| write.outcomes.extend(piece));
                    write.part = parts.next();
                    return Answer::Aside(reason);
                }
                _ => {
                    note.succeeded += outcomes.succeeded() as u64;
                    note.failed += outcomes.failed() as u64;
                }
            }
        }
        if let Some(close) = write.close.clone() {
            let mut end =
                [BlockWrite { block, part: parts.next(), outcomes: Outcomes::default(), close: Some(close) }];
            match self.outlast(&mut end, Patience::Alone).await {
                Ok(answers) if matches!(answers[..], [Answer::Refused]) => return Answer::Refused,
                Ok(_) => {}
                Err(Failed::Busy(error) | Failed::Row(error)) => {
                    write.part = parts.next();
                    return Answer::Aside(reason(&error));
                }
            }
        }
        Answer::Written
    }

    /// One row is refused. Its values are to blame only if the database would take the same outcome without them, and refuses
    /// the row itself once more: else the trouble is not the row's.
    async fn blame(&self, write: &mut BlockWrite, parts: &Parts, error: &Error) -> Answer {
        let bare = write.outcomes.without_values();
        let mut rehearsed = [BlockWrite { part: parts.next(), outcomes: bare, ..write.clone() }];
        let takes_bare = match self.pool.get().await {
            Ok(client) => flush::write_if_held(&client, &mut rehearsed, Purpose::Rehearse, Patience::Alone)
                .await
                .is_ok(),
            Err(_) => false,
        };
        if !takes_bare {
            return Answer::Aside(reason(error));
        }
        match self.outlast(std::slice::from_mut(write), Patience::Alone).await {
            Ok(mut answers) => return answers.pop().unwrap_or(Answer::Refused),
            Err(Failed::Busy(error)) => return Answer::Aside(reason(&error)),
            Err(Failed::Row(_)) => {}
        }
        write.outcomes = write.outcomes.all_failed(&cannot_be_stored(error));
        write.part = parts.next();
        match self.outlast(std::slice::from_mut(write), Patience::Alone).await {
            Ok(mut answers) => answers.pop().unwrap_or(Answer::Refused),
            Err(Failed::Busy(error) | Failed::Row(error)) => Answer::Aside(reason(&error)),
        }
    }

    /// Tries until the database has answered; gives up only when a member of the group may be the cause.
    async fn outlast(&self, writes: &mut [BlockWrite], patience: Patience) -> Result<Vec<Answer>, Failed> {
        let mut tries = Tries::of(self);
        loop {
            let client = tries.session().await;
            match self.attempt(&client, writes, patience).await {
                Ok(answers) => {
                    tries.written();
                    return Ok(answers);
                }
                Err(_) if is_mutant("drop_failed_flush") => {
                    return Ok(writes.iter().map(|_| Answer::Written).collect());
                }
                Err(error) => tries.failed(client, error).await?,
            }
        }
    }

    async fn attempt(
        &self,
        client: &Object,
        writes: &mut [BlockWrite],
        patience: Patience,
    ) -> Result<Vec<Answer>, Error> {
        let written = flush::write_if_held(client, writes, Purpose::Write, patience).await?;
        let mut answers: Vec<Answer> =
            written.iter().map(|written| if *written { Answer::Written } else { Answer::Refused }).collect();
        let unanswered: Vec<usize> = (0..writes.len()).filter(|index| !written[*index]).collect();
        if unanswered.is_empty() {
            return Ok(answers);
        }
        let asked: Vec<&BlockWrite> = unanswered.iter().map(|index| &writes[*index]).collect();
        let found = flush::ask_about(client, &asked).await?;
        for (index, found) in unanswered.into_iter().zip(found) {
            match found {
                Unanswered::Applied => answers[index] = Answer::AppliedBefore,
                Unanswered::NotHeld => {}
                Unanswered::Inconsistent => self.give_back(client, &writes[index]).await?,
            }
        }
        Ok(answers)
    }

    /// The block is held, but some of the lines that are said to be done are not open: what this worker believes is wrong.
    /// Its open lines go back and run again.
    async fn give_back(&self, client: &Object, write: &BlockWrite) -> Result<(), Error> {
        self.metrics.batcher.inconsistent.inc();
        tracing::error!(token = %write.block.token, batch = write.block.batch, lines = %write.outcomes.done(),
            "this worker's account of a block differs from the database's; the block is given back");
        let close = BlockWrite {
            outcomes: Outcomes::default(),
            close: Some(Close::default()),
            // Parts count up from 1: no other write of this token has this one.
            part: -write.part,
            block: write.block,
        };
        flush::write_if_held(client, &mut [close], Purpose::Write, Patience::Alone).await.map(|_| ())
    }
}

/// The tries of one flush, of rows or of tasks: each waits for the database, and only for the database.
pub(super) struct Tries<'a> {
    flusher: &'a Flusher,
    failures: u32,
    /// A reply was lost on the way: a try may have been committed.
    pub(super) no_reply: bool,
}

impl<'a> Tries<'a> {
    pub(super) fn of(flusher: &'a Flusher) -> Self {
        Self { flusher, failures: 0, no_reply: false }
    }

    pub(super) async fn session(&mut self) -> Object {
        loop {
            match self.flusher.pool.get().await {
                Ok(client) => return client,
                Err(error) => self.wait(&error).await,
            }
        }
    }

    pub(super) fn written(&self) {
        self.flusher.metrics.batcher.transactions.inc();
        self.flusher.trouble.ends();
    }

    /// Waits before the next try, unless a member of the group may be the cause.
    pub(super) async fn failed(&mut self, client: Object, error: Error) -> Result<(), Failed> {
        self.flusher.metrics.batcher.rollbacks.inc();
        let fault = fault::of(&error);
        // The session is as good as before, and the search for the row needs it many times.
        if fault == Fault::Row {
            return Err(Failed::Row(error));
        }
        // The session may be in any state; a new one is cheap.
        drop(Object::take(client));
        match fault {
            Fault::Busy => return Err(Failed::Busy(error)),
            Fault::Systemic => self.flusher.trouble.is_systemic(&error),
            Fault::Transient | Fault::Row => self.no_reply |= error.code().is_none(),
        }
        self.wait(&error).await;
        Ok(())
    }

    async fn wait(&mut self, error: &(dyn std::error::Error + Sync + 'static)) {
        self.failures += 1;
        self.flusher.trouble.begins(self.failures, error);
        tokio::time::sleep(backoff::of_database(self.failures)).await;
    }
}

/// The first line only: PostgreSQL's DETAIL, on the next, quotes the row.
fn reason(error: &Error) -> String {
    describe(error).lines().next().unwrap_or_default().to_owned()
}

pub(super) fn cannot_be_stored(error: &Error) -> String {
    format!("the result cannot be stored: {}", fault::words(error))
}
