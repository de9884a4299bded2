//! Everything there is: the database, what is on its way to it, and the workers' memories.
//!
//! Nothing counts up for ever. A fresh token is one that no part of the state knows, which is all that a random uuid is; so the states are
//! finitely many although workers may claim, die and start again without end.

use super::promises::Promise;

/// A set of lines: line n is bit n.
pub(super) type Lines = u8;
pub(super) type Token = u8;
/// A worker's id: its place in the roll.
pub(super) type Id = usize;
/// Where a block is stored. Places are used again, as the ids of blocks are after a crash of PostgreSQL.
pub(super) type Place = usize;

pub(super) fn first(lines: u8) -> Lines {
    (1 << lines) - 1
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Owner {
    pub(super) id: Id,
    pub(super) token: Token,
}

/// A row of `blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Block {
    pub(super) lines: Lines,
    pub(super) owner: Option<Owner>,
}

/// A row of `outcomes`: all that a lost reply is asked about by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Outcome {
    pub(super) token: Token,
    pub(super) part: u8,
    pub(super) lines: Lines,
}

/// A row of `workers`, and the key in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Seen {
    /// The heartbeat in Redis.
    pub(super) beat: bool,
    /// `seen_at` is younger than the TTL.
    pub(super) seen: bool,
    pub(super) dead: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Claim {
    pub(super) id: Id,
    pub(super) token: Token,
}

/// A flush of one block, on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Write {
    pub(super) place: Place,
    pub(super) token: Token,
    pub(super) part: u8,
    pub(super) done: Lines,
    /// Those of them that failed.
    pub(super) failed: Lines,
    pub(super) close: bool,
    /// Its sender still listens on this connection.
    pub(super) heard: bool,
}

/// What a completer saw in one snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Look {
    pub(super) generation: u8,
    pub(super) rows: u8,
    pub(super) succeeded: u32,
    pub(super) failed: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Mode {
    Running,
    Paused,
    Down,
}

/// A claim that a worker waits for; the token was made before it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Waiting {
    pub(super) token: Token,
    /// The reply, once it is there: a block, or none.
    pub(super) reply: Option<Option<(Place, Lines)>>,
}

/// A block in a worker's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Hold {
    pub(super) place: Place,
    pub(super) token: Token,
    pub(super) open: Lines,
    /// Lines that ran and whose outcome is not acknowledged.
    pub(super) done: Lines,
    pub(super) failed: Lines,
    pub(super) parts: u8,
    pub(super) flushing: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Worker {
    pub(super) mode: Mode,
    pub(super) id: Id,
    pub(super) lease: bool,
    pub(super) claim: Option<Waiting>,
    pub(super) hold: Option<Hold>,
    /// Asked for a look at the batch.
    pub(super) asks: bool,
}

/// How much may still go wrong, or be done by an operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Left {
    /// Crashes, pauses, broken connections, losses of Redis.
    pub(super) faults: u8,
    pub(super) failures: u8,
    pub(super) give_backs: u8,
    pub(super) appends: u8,
    pub(super) redrives: u8,
    pub(super) aborts: u8,
    /// A `DELETE FROM musterd.blocks` by hand.
    pub(super) deletes: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    // PostgreSQL
    pub(super) rows: u8,
    /// Lines below it were carved.
    pub(super) next: u8,
    pub(super) blocks: Vec<Option<Block>>,
    pub(super) outcomes: Vec<Outcome>,
    pub(super) succeeded: Lines,
    pub(super) failed: Lines,
    pub(super) generation: u8,
    pub(super) aborting: bool,
    /// Lines of blocks that were deleted by hand.
    pub(super) deleted: Lines,
    /// How many succeeded and failed, once it has ended.
    pub(super) summary: Option<(u32, u32)>,
    pub(super) roll: Vec<Seen>,
    // The network
    pub(super) claims: Vec<Claim>,
    pub(super) writes: Vec<Write>,
    // The processes
    pub(super) workers: Vec<Worker>,
    /// A block that a recoverer has listed and not freed yet.
    pub(super) listed: Option<(Place, Token)>,
    pub(super) looks: Vec<Look>,
    pub(super) left: Left,
    /// The promise that the last step broke.
    pub(super) broken: Option<Promise>,
}

impl State {
    pub(super) fn recorded(&self) -> Lines {
        self.succeeded | self.failed
    }

    pub(super) fn has_ended(&self) -> bool {
        self.summary.is_some()
    }

    pub(super) fn holder(&self, place: Place) -> Option<Owner> {
        self.blocks.get(place).copied().flatten().and_then(|block| block.owner)
    }

    pub(super) fn is_dead(&self, id: Id) -> bool {
        self.roll[id].dead
    }

    pub(super) fn breaks(&mut self, promise: Promise) {
        self.broken = self.broken.or(Some(promise));
    }

    /// A token that nothing knows.
    pub(super) fn fresh_token(&self) -> Token {
        let known = |token: &Token| {
            self.blocks.iter().flatten().any(|block| block.owner.is_some_and(|owner| owner.token == *token))
                || self.outcomes.iter().any(|outcome| outcome.token == *token)
                || self.claims.iter().any(|claim| claim.token == *token)
                || self.writes.iter().any(|write| write.token == *token)
                || self.listed.is_some_and(|(_, listed)| listed == *token)
                || self.workers.iter().any(|worker| {
                    worker.claim.is_some_and(|claim| claim.token == *token)
                        || worker.hold.is_some_and(|hold| hold.token == *token)
                })
        };
        (0..).find(|token| !known(token)).expect("there are more tokens than places for them")
    }

    /// Writes a new worker into the roll.
    pub(super) fn sign_on(&mut self) -> Id {
        self.roll.push(Seen { beat: true, seen: true, dead: false });
        self.roll.len() - 1
    }

    pub(super) fn store(&mut self, block: Block) -> Place {
        match self.blocks.iter().position(Option::is_none) {
            Some(free) => {
                self.blocks[free] = Some(block);
                free
            }
            None => {
                self.blocks.push(Some(block));
                self.blocks.len() - 1
            }
        }
    }

    /// Brings states that nothing can tell apart to one form, and forgets what nothing can ask about any more.
    pub(super) fn tidy(&mut self) {
        while self.blocks.last().is_some_and(Option::is_none) {
            self.blocks.pop();
        }
        let (writes, workers) = (&self.writes, &self.workers);
        self.outcomes.retain(|outcome| {
            writes.iter().any(|write| write.token == outcome.token)
                || workers.iter().any(|worker| worker.hold.is_some_and(|hold| hold.token == outcome.token))
        });
        // Which of two alike workers is the first makes no difference.
        self.workers.sort_by_key(|worker| {
            let hold = worker
                .hold
                .map(|hold| (hold.place, hold.open, hold.done, hold.failed, hold.parts, hold.flushing));
            (worker.mode, worker.lease, worker.claim.map(|claim| claim.reply), hold, worker.asks)
        });
        self.rename_workers();
        self.rename_tokens();
        self.outcomes.sort_unstable();
        self.claims.sort_unstable();
        self.writes.sort_unstable();
        self.looks.sort_unstable();
    }

    /// Numbers the workers that are still named anywhere; the roll forgets the others.
    fn rename_workers(&mut self) {
        let mut names: Vec<Id> = Vec::new();
        let mut name = |id: &mut Id| {
            let place = names.iter().position(|known| known == id).unwrap_or_else(|| {
                names.push(*id);
                names.len() - 1
            });
            *id = place;
        };
        for worker in &mut self.workers {
            match worker.mode {
                Mode::Down => worker.id = 0,
                _ => name(&mut worker.id),
            }
        }
        self.blocks
            .iter_mut()
            .flatten()
            .filter_map(|block| block.owner.as_mut())
            .for_each(|owner| name(&mut owner.id));
        self.claims.iter_mut().for_each(|claim| name(&mut claim.id));
        self.roll = names.iter().map(|id| self.roll[*id]).collect();
    }

    fn rename_tokens(&mut self) {
        let mut names: Vec<Token> = Vec::new();
        let mut name = |token: &mut Token| {
            let place = names.iter().position(|known| known == token).unwrap_or_else(|| {
                names.push(*token);
                names.len() - 1
            });
            *token = place as Token;
        };
        for worker in &mut self.workers {
            worker.claim.iter_mut().for_each(|claim| name(&mut claim.token));
            worker.hold.iter_mut().for_each(|hold| name(&mut hold.token));
        }
        self.blocks
            .iter_mut()
            .flatten()
            .filter_map(|block| block.owner.as_mut())
            .for_each(|owner| name(&mut owner.token));
        self.listed.iter_mut().for_each(|(_, token)| name(token));
        self.writes.iter_mut().for_each(|write| name(&mut write.token));
        self.claims.iter_mut().for_each(|claim| name(&mut claim.token));
        self.outcomes.iter_mut().for_each(|outcome| name(&mut outcome.token));
    }
}
