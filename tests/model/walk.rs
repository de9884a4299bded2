//! The steps of workers, recovery, completion, operators and of all that goes wrong, in any order.

use super::{
    database::Answer,
    guards::Guards,
    promises::{Promise, properties},
    state::{Block, Claim, Hold, Id, Left, Lines, Mode, Place, Seen, State, Waiting, Worker, Write},
};
use stateright::{Model, Property};

/// One batch and its workers; what may go wrong is bounded, the order of things is not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    pub(super) guards: Guards,
    pub(super) rows: u8,
    pub(super) block_size: u8,
    pub(super) workers: usize,
    /// Completers that may have looked and not written yet.
    pub(super) looks: usize,
    pub(super) left: Left,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    SendClaim(usize),
    ClaimArrives(usize),
    TakeReply(usize),
    BreakClaim(usize),
    Run { worker: usize, fails: bool },
    SendWrite { worker: usize, close: bool },
    WriteArrives(usize),
    BreakWrite(usize),
    Crash(usize),
    Restart(usize),
    Pause(usize),
    Resume(usize),
    TtlPasses(Id),
    LoseRedis,
    Renew(usize),
    Judge(Id),
    ListOrphan(Place),
    FreeOrphan,
    Reconcile { worker: usize, place: Place },
    Look,
    Complete(usize),
    Heal,
    Append,
    Redrive,
    Abort,
    DeleteBlock(Place),
}

/// All of them are taken in the checks.
pub(super) const KINDS_OF_STEPS: usize = 26;

impl Model for Walk {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let mut state = State {
            rows: self.rows,
            next: 0,
            blocks: vec![],
            outcomes: vec![],
            succeeded: 0,
            failed: 0,
            generation: 1,
            aborting: false,
            deleted: 0,
            summary: None,
            roll: vec![],
            claims: vec![],
            writes: vec![],
            workers: vec![],
            listed: None,
            looks: vec![],
            left: self.left,
            broken: None,
        };
        for _ in 0..self.workers {
            let id = state.sign_on();
            state.workers.push(Worker {
                mode: Mode::Running,
                id,
                lease: true,
                claim: None,
                hold: None,
                asks: false,
            });
        }
        state.tidy();
        vec![state]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        // One broken promise is enough.
        if state.broken.is_some() {
            return;
        }
        for worker in 0..state.workers.len() {
            self.steps_of(state, worker, steps);
        }
        steps.extend((0..state.claims.len()).map(Step::ClaimArrives));
        steps.extend((0..state.writes.len()).map(Step::WriteArrives));
        self.steps_of_upkeep(state, steps);
        self.steps_of_completion(state, steps);
        self.steps_of_operators(state, steps);
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        self.take(&mut state, step)?;
        state.tidy();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties()
    }
}

impl Walk {
    fn take(&self, state: &mut State, step: Step) -> Option<()> {
        match step {
            Step::SendClaim(index) => {
                let claim = Claim { id: state.workers[index].id, token: state.fresh_token() };
                state.workers[index].claim = Some(Waiting { token: claim.token, reply: None });
                state.claims.push(claim);
            }
            Step::ClaimArrives(index) => {
                let claim = state.claims.remove(index);
                let reply = state.claim(claim, self.block_size);
                let waits =
                    |worker: &&mut Worker| worker.claim.is_some_and(|waiting| waiting.token == claim.token);
                if let Some(worker) = state.workers.iter_mut().find(waits) {
                    worker.claim = Some(Waiting { token: claim.token, reply: Some(reply) });
                }
            }
            Step::TakeReply(index) => self.take_reply(state, index)?,
            Step::BreakClaim(index) => {
                fault(state);
                state.workers[index].claim = None;
            }
            Step::Run { worker, fails } => run(state, worker, fails)?,
            Step::SendWrite { worker, close } => send_write(state, worker, close)?,
            Step::WriteArrives(index) => self.write_arrives(state, index),
            Step::BreakWrite(index) => self.send_again(state, index)?,
            Step::Crash(index) => {
                fault(state);
                forget_all(state, index);
                state.workers[index].mode = Mode::Down;
            }
            Step::Restart(index) => {
                let id = state.sign_on();
                state.workers[index] =
                    Worker { mode: Mode::Running, id, lease: true, claim: None, hold: None, asks: false };
            }
            Step::Pause(index) => {
                fault(state);
                state.workers[index].mode = Mode::Paused;
            }
            Step::Resume(index) => state.workers[index].mode = Mode::Running,
            Step::TtlPasses(id) => {
                let seen = &mut state.roll[id];
                (seen.beat, seen.seen) = (false, false);
                state
                    .workers
                    .iter_mut()
                    .filter(|worker| worker.id == id)
                    .for_each(|worker| worker.lease = false);
            }
            Step::LoseRedis => {
                fault(state);
                state.roll.iter_mut().for_each(|seen| seen.beat = false);
            }
            Step::Renew(index) => renew(state, index),
            Step::Judge(id) => judge(state, id),
            Step::ListOrphan(place) => state.listed = state.holder(place).map(|owner| (place, owner.token)),
            Step::FreeOrphan => {
                let (place, token) = state.listed.take()?;
                state.free(place, token, &self.guards);
            }
            Step::Reconcile { place, .. } => {
                let block = state.blocks[place].take();
                state.blocks[place] =
                    block.filter(|block| block.lines != 0).map(|block| Block { owner: None, ..block });
            }
            Step::Look => {
                state.looks.push(state.look());
                state.workers.iter_mut().for_each(|worker| worker.asks = false);
            }
            Step::Complete(index) => {
                let look = state.looks.remove(index);
                state.complete(look, &self.guards);
            }
            Step::Heal => state.heal(),
            Step::Append => {
                state.left.appends -= 1;
                state.rows += 1;
            }
            Step::Redrive => {
                state.left.redrives -= 1;
                state.redrive();
            }
            Step::Abort => {
                state.left.aborts -= 1;
                state.abort();
            }
            Step::DeleteBlock(place) => {
                state.left.deletes -= 1;
                state.deleted |= state.blocks[place].take()?.lines;
            }
        }
        Some(())
    }

    fn take_reply(&self, state: &mut State, index: usize) -> Option<()> {
        let worker = &mut state.workers[index];
        let Waiting { token, reply } = worker.claim.take()?;
        let Some((place, lines)) = reply? else { return Some(()) };
        worker.hold = Some(Hold { place, token, open: lines, done: 0, failed: 0, parts: 0, flushing: false });
        let (id, lease) = (worker.id, worker.lease);
        let is_mine = state.holder(place).is_some_and(|owner| owner.token == token);
        let by_hand = state.left.deletes < self.left.deletes;
        if !is_mine && lease && !state.is_dead(id) && !by_hand {
            state.breaks(Promise::OnlyFromTheDead);
        }
        Some(())
    }

    /// The server takes a write, and its sender hears of it if it still listens.
    fn write_arrives(&self, state: &mut State, index: usize) {
        let write = state.writes.remove(index);
        let answer = state.write(&write, &self.guards);
        let recorded: Lines = state
            .outcomes
            .iter()
            .filter(|outcome| outcome.token == write.token)
            .fold(0, |lines, outcome| lines | outcome.lines);
        let holds = |worker: &&mut Worker| worker.hold.is_some_and(|hold| hold.token == write.token);
        let Some(worker) = state.workers.iter_mut().filter(|_| write.heard).find(holds) else { return };
        let Some(hold) = worker.hold.as_mut() else { return };
        hold.flushing = false;
        hold.open &= !write.done;
        hold.done &= !write.done;
        hold.failed &= !write.done;
        let goes_on = matches!(answer, Answer::Written | Answer::AppliedBefore) && !write.close;
        if !goes_on {
            worker.hold = None;
            // Only without the sweep does it matter who asks.
            worker.asks = !self.guards.sweep && self.guards.ask;
        }
        match answer {
            Answer::Written | Answer::AppliedBefore if write.done & !recorded != 0 => {
                state.breaks(Promise::ToldTheTruth);
            }
            Answer::Inconsistent => state.breaks(Promise::OneAccount),
            _ => {}
        }
    }

    /// The connection broke. The write may have been applied, may be applied later, and is sent again.
    fn send_again(&self, state: &mut State, index: usize) -> Option<()> {
        fault(state);
        let hold = state.workers[index].hold?;
        let sent = state.writes.iter_mut().find(|write| write.heard && write.token == hold.token)?;
        sent.heard = false;
        let mut again = Write { heard: true, ..*sent };
        if !self.guards.same_content {
            (again.done, again.failed) = (hold.done, hold.failed);
        }
        state.writes.push(again);
        Some(())
    }
}

fn fault(state: &mut State) {
    state.left.faults -= 1;
}

/// A process ends, or gives up what it has: nothing listens for its replies any more.
fn forget_all(state: &mut State, index: usize) {
    let worker = &mut state.workers[index];
    if let Some(hold) = worker.hold {
        state
            .writes
            .iter_mut()
            .filter(|write| write.token == hold.token)
            .for_each(|write| write.heard = false);
    }
    (worker.claim, worker.hold, worker.lease, worker.asks) = (None, None, false, false);
}

fn run(state: &mut State, index: usize, fails: bool) -> Option<()> {
    let worker = &mut state.workers[index];
    let hold = worker.hold.as_mut()?;
    let waits = hold.open & !hold.done;
    let line: Lines = 1 << waits.trailing_zeros();
    hold.done |= line;
    if fails {
        hold.failed |= line;
        state.left.failures -= 1;
    }
    let id = worker.id;
    if state.is_dead(id) {
        state.breaks(Promise::DeadStartNothing);
    }
    Some(())
}

fn send_write(state: &mut State, index: usize, close: bool) -> Option<()> {
    let hold = state.workers[index].hold.as_mut()?;
    hold.flushing = true;
    hold.parts += 1;
    let Hold { place, token, open, done, failed, parts, .. } = *hold;
    if close && open != done && !state.aborting {
        state.left.give_backs -= 1;
    }
    state.writes.push(Write { place, token, part: parts, done, failed, close, heard: true });
    Some(())
}

/// A beat. A worker that finds itself dead gives up all it has and takes a new id.
fn renew(state: &mut State, index: usize) {
    let id = state.workers[index].id;
    if state.is_dead(id) {
        forget_all(state, index);
        state.workers[index].id = state.sign_on();
    } else {
        state.roll[id] = Seen { beat: true, seen: true, dead: false };
    }
    state.workers[index].lease = true;
}

fn judge(state: &mut State, id: Id) {
    state.roll[id].dead = true;
    if state.workers.iter().any(|worker| worker.mode == Mode::Running && worker.id == id && worker.lease) {
        state.breaks(Promise::LivingStayAlive);
    }
}
