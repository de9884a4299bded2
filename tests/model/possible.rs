//! Which steps are possible in a state.

use super::{
    state::{Block, Hold, Mode, Place, Seen, State, Worker},
    walk::{Step, Walk},
};

impl Walk {
    pub(super) fn steps_of(&self, state: &State, index: usize, steps: &mut Vec<Step>) {
        let worker = &state.workers[index];
        let may_fault = state.left.faults > 0;
        match worker.mode {
            Mode::Down => return steps.push(Step::Restart(index)),
            Mode::Paused => return steps.push(Step::Resume(index)),
            Mode::Running => {}
        }
        if may_fault {
            steps.extend([Step::Crash(index), Step::Pause(index)]);
        }
        let fresh = Seen { beat: true, seen: true, dead: false };
        if !worker.lease || state.roll[worker.id] != fresh {
            steps.push(Step::Renew(index));
        }
        if let Some(claim) = worker.claim {
            if claim.reply.is_some() {
                steps.push(Step::TakeReply(index));
            }
            if may_fault {
                steps.push(Step::BreakClaim(index));
            }
        } else if worker.hold.is_none() && worker.lease && has_work(state) {
            steps.push(Step::SendClaim(index));
        }
        if let Some(hold) = worker.hold {
            self.steps_of_hold(state, index, hold, steps);
        }
        if self.guards.reconcile {
            let lost = (0..state.blocks.len()).filter(|place| self.is_lost(state, worker, *place));
            steps.extend(lost.map(|place| Step::Reconcile { worker: index, place }));
        }
    }

    fn steps_of_hold(&self, state: &State, worker: usize, hold: Hold, steps: &mut Vec<Step>) {
        let waits = hold.open & !hold.done;
        if waits != 0 && (state.workers[worker].lease || !self.guards.lease) {
            steps.push(Step::Run { worker, fails: false });
            if state.left.failures > 0 {
                steps.push(Step::Run { worker, fails: true });
            }
        }
        if hold.flushing {
            if state.left.faults > 0 {
                steps.push(Step::BreakWrite(worker));
            }
            return;
        }
        // A block that is not run to its end is given back: in a drain, at a lost lease, when its batch is aborted.
        if waits == 0 || state.aborting || state.left.give_backs > 0 {
            steps.push(Step::SendWrite { worker, close: true });
        }
        if waits != 0 && hold.done != 0 {
            steps.push(Step::SendWrite { worker, close: false });
        }
    }

    pub(super) fn steps_of_upkeep(&self, state: &State, steps: &mut Vec<Step>) {
        for (id, seen) in state.roll.iter().enumerate() {
            let renews = state.workers.iter().any(|worker| worker.mode == Mode::Running && worker.id == id);
            if !renews && (seen.beat || seen.seen) {
                steps.push(Step::TtlPasses(id));
            }
            if state.may_judge(*seen, &self.guards) {
                steps.push(Step::Judge(id));
            }
        }
        if state.left.faults > 0 && state.roll.iter().any(|seen| seen.beat) {
            steps.push(Step::LoseRedis);
        }
        match state.listed {
            Some(_) => steps.push(Step::FreeOrphan),
            None if self.guards.recovery => {
                let orphan =
                    |place: &Place| state.holder(*place).is_some_and(|owner| state.is_dead(owner.id));
                steps.extend((0..state.blocks.len()).filter(orphan).map(Step::ListOrphan));
            }
            None => {}
        }
    }

    pub(super) fn steps_of_completion(&self, state: &State, steps: &mut Vec<Step>) {
        if state.is_over() {
            let ends = state.aborting || state.is_balanced() || !self.guards.set_equation;
            let is_asked = state.workers.iter().any(|worker| worker.asks && worker.mode == Mode::Running);
            if ends && state.looks.len() < self.looks && (self.guards.sweep || is_asked) {
                steps.push(Step::Look);
            } else if !ends && self.guards.heal {
                steps.push(Step::Heal);
            }
        }
        steps.extend((0..state.looks.len()).map(Step::Complete));
    }

    pub(super) fn steps_of_operators(&self, state: &State, steps: &mut Vec<Step>) {
        let left = &state.left;
        let may_steer = !state.has_ended() && !state.aborting;
        if left.appends > 0 && may_steer {
            steps.push(Step::Append);
        }
        if left.aborts > 0 && may_steer {
            steps.push(Step::Abort);
        }
        if left.redrives > 0 && state.has_ended() && state.failed != 0 && !state.aborting {
            steps.push(Step::Redrive);
        }
        if left.deletes > 0 {
            let stored = (0..state.blocks.len()).filter(|place| state.blocks[*place].is_some());
            steps.extend(stored.map(Step::DeleteBlock));
        }
    }

    /// Whether the database says that this worker holds a block of which it knows nothing.
    fn is_lost(&self, state: &State, worker: &Worker, place: Place) -> bool {
        state.holder(place).is_some_and(|owner| {
            let holds = worker.hold.is_some_and(|hold| hold.token == owner.token);
            let waits = self.guards.doubtful && worker.claim.is_some_and(|claim| claim.token == owner.token);
            owner.id == worker.id && !holds && !waits
        })
    }
}

fn has_work(state: &State) -> bool {
    let is_free = |block: &Block| block.owner.is_none();
    !state.has_ended()
        && !state.aborting
        && (state.next < state.rows || state.blocks.iter().flatten().any(is_free))
}
