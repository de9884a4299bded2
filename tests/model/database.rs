//! The server's side: one transaction is one step. The statements are those of src/store/sql and migrations/V4__batches.sql.

use super::{
    guards::Guards,
    promises::Promise,
    state::{Block, Claim, Lines, Look, Outcome, Owner, Place, Seen, State, Token, Write, first},
};

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Written,
    AppliedBefore,
    Refused,
    Inconsistent,
}

impl State {
    /// `take.sql`, else `carve.sql`.
    pub(super) fn claim(&mut self, claim: Claim, block_size: u8) -> Option<(Place, Lines)> {
        if self.aborting || self.has_ended() {
            return None;
        }
        let owner = Some(Owner { id: claim.id, token: claim.token });
        let free = |block: &Option<Block>| block.is_some_and(|block| block.owner.is_none());
        if let Some(place) = self.blocks.iter().position(free) {
            let block = self.blocks[place].as_mut()?;
            block.owner = owner;
            return Some((place, block.lines));
        }
        if self.next >= self.rows {
            return None;
        }
        let end = self.rows.min(self.next + block_size);
        let lines = first(end) & !first(self.next);
        self.next = end;
        Some((self.store(Block { lines, owner }), lines))
    }

    /// `lock.sql` to `shrink.sql`; and `applied(batch, token, part)` when nothing was answered.
    pub(super) fn write(&mut self, write: &Write, guards: &Guards) -> Answer {
        let block = self.blocks.get(write.place).copied().flatten();
        let is_current = |block: &Block| block.owner.is_some_and(|owner| owner.token == write.token);
        let passes = |block: &Block| {
            (is_current(block) || !guards.token) && (write.done & !block.lines == 0 || !guards.subset)
        };
        let Some(block) = block.filter(passes) else { return self.answer_unwritten(write, guards) };
        if !is_current(&block) {
            self.breaks(Promise::CurrentToken);
        }
        if write.done & self.recorded() != 0 {
            self.breaks(Promise::RecordedOnce);
        }
        if self.has_ended() {
            self.breaks(Promise::EndedStays);
        }
        self.succeeded |= write.done & !write.failed;
        self.failed |= write.failed;
        self.outcomes.push(Outcome { token: write.token, part: write.part, lines: write.done });
        let rest = block.lines & !write.done;
        if !write.close {
            self.blocks[write.place] = Some(Block { lines: rest, ..block });
            return Answer::Written;
        }
        self.blocks[write.place] = None;
        if rest != 0 && !self.aborting {
            self.store(Block { lines: rest, owner: None });
        }
        Answer::Written
    }

    fn answer_unwritten(&self, write: &Write, guards: &Guards) -> Answer {
        let is_it =
            |outcome: &Outcome| outcome.token == write.token && (outcome.part == write.part || !guards.part);
        if self.outcomes.iter().any(is_it) {
            Answer::AppliedBefore
        } else if self.holder(write.place).is_some_and(|owner| owner.token == write.token) {
            Answer::Inconsistent
        } else {
            Answer::Refused
        }
    }

    /// `bury_if_silent`: by what Redis and the table of workers say.
    pub(super) fn may_judge(&self, seen: Seen, guards: &Guards) -> bool {
        !seen.dead && !seen.beat && (!seen.seen || !guards.second_witness)
    }

    /// `free_blocks.sql`.
    pub(super) fn free(&mut self, place: Place, token: Token, guards: &Guards) {
        let Some(owner) = self.holder(place) else { return };
        if owner.token != token && guards.recovery_token {
            return;
        }
        if !self.is_dead(owner.id) {
            self.breaks(Promise::OnlyFromTheDead);
        }
        let block = self.blocks[place].take();
        self.blocks[place] = block
            .filter(|block| !self.aborting && block.lines != 0)
            .map(|block| Block { owner: None, ..block });
    }

    /// Whether nothing is left to run: `batches_over`.
    pub(super) fn is_over(&self) -> bool {
        !self.has_ended()
            && match self.aborting {
                true => self.blocks.iter().flatten().all(|block| block.owner.is_none()),
                false => self.next >= self.rows && self.blocks.is_empty(),
            }
    }

    /// The set equation: outcomes and failures together are all lines.
    pub(super) fn is_balanced(&self) -> bool {
        self.recorded() == first(self.rows)
    }

    pub(super) fn look(&self) -> Look {
        Look {
            generation: self.generation,
            rows: self.rows,
            succeeded: self.succeeded.count_ones(),
            failed: self.failed.count_ones(),
        }
    }

    /// `complete_batch` and `finish_batch`, under the batch's lock.
    pub(super) fn complete(&mut self, look: Look, guards: &Guards) {
        if self.has_ended() && guards.not_ended {
            return;
        }
        let (over, now) = (self.is_over() || self.has_ended(), self.look());
        let is_same = (look.generation, look.rows) == (now.generation, now.rows) || !guards.same_rows;
        // When aborting, the counts prove nothing: they must be those of now.
        if !over || !is_same || (self.aborting && look != now) {
            return;
        }
        if self.has_ended() {
            self.breaks(Promise::EndsOnce);
        }
        if !self.aborting && !self.is_balanced() || look != now {
            self.breaks(Promise::EndsBalanced);
        }
        self.blocks.clear();
        self.summary = Some((look.succeeded, look.failed));
    }

    /// `heal_batch`.
    pub(super) fn heal(&mut self) {
        let missing = first(self.rows) & !self.recorded();
        self.deleted &= !missing;
        self.store(Block { lines: missing, owner: None });
    }

    /// `redrive`.
    pub(super) fn redrive(&mut self) {
        let lines = std::mem::take(&mut self.failed);
        self.store(Block { lines, owner: None });
        self.generation += 1;
        self.summary = None;
    }

    /// `abort_batch`.
    pub(super) fn abort(&mut self) {
        self.aborting = true;
        self.blocks
            .iter_mut()
            .filter(|block| block.is_some_and(|block| block.owner.is_none()))
            .for_each(|block| *block = None);
    }
}
