//! From every state the end can still be reached: whatever has gone wrong, nothing is stuck for ever.
//!
//! The checker follows steps forward; this asks backward, from the states in which the batch has ended.

use super::{
    state::State,
    walk::{Step, Walk},
};
use stateright::Model;
use std::{
    collections::{HashMap, HashSet},
    mem::{Discriminant, discriminant},
};

/// What there is to be found in all states.
#[derive(Debug)]
pub(super) struct Reached {
    pub(super) states: usize,
    /// A state from which the batch can never end.
    pub(super) stuck: Option<State>,
    /// The kinds of steps that were taken.
    pub(super) steps: HashSet<Discriminant<Step>>,
}

pub(super) fn all(walk: &Walk) -> Reached {
    let mut steps = HashSet::new();
    let mut places: HashMap<State, u32> = HashMap::new();
    let mut states: Vec<State> = Vec::new();
    // The states before a state.
    let mut before: Vec<Vec<u32>> = Vec::new();
    for state in walk.init_states() {
        places.insert(state.clone(), 0);
        states.push(state);
        before.push(Vec::new());
    }
    let mut at = 0;
    while at < states.len() {
        for (step, next) in walk.next_steps(&states[at]) {
            steps.insert(discriminant(&step));
            let place = *places.entry(next).or_insert_with_key(|next| {
                states.push(next.clone());
                before.push(Vec::new());
                states.len() as u32 - 1
            });
            before[place as usize].push(at as u32);
        }
        at += 1;
    }
    let mut ends = vec![false; states.len()];
    let mut open: Vec<u32> = Vec::new();
    for (place, state) in states.iter().enumerate() {
        if state.has_ended() {
            ends[place] = true;
            open.push(place as u32);
        }
    }
    while let Some(place) = open.pop() {
        for &earlier in &before[place as usize] {
            if !std::mem::replace(&mut ends[earlier as usize], true) {
                open.push(earlier);
            }
        }
    }
    let stuck = ends.iter().position(|ends| !ends).map(|place| states[place].clone());
    Reached { states: states.len(), stuck, steps }
}
