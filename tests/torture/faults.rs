//! Every fault of a run, with its time and whom it concerns: what a repeated run of a row may be explained by.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970: of one machine, so that it can be compared with the times of the database.
pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

/// Whose rows may run again because of a fault. Most faults are no reason for any row to run twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reruns {
    None,
    /// What this replica was running.
    Of(usize),
    /// What any replica asked of the service.
    Http,
    All,
}

#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: &'static str,
    pub(crate) reruns: Reruns,
    pub(crate) began: f64,
    /// Infinite while it lasts.
    pub(crate) ended: f64,
    /// Of a process: its number.
    pub(crate) pid: Option<u32>,
}

/// All of them, in the order of their beginnings.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults(Arc<Mutex<Vec<Fault>>>);

impl Faults {
    /// Begins one; `end` gets the number.
    pub(crate) fn begin(&self, kind: &'static str, reruns: Reruns) -> usize {
        self.add(Fault { kind, reruns, began: now(), ended: f64::INFINITY, pid: None })
    }

    pub(crate) fn end(&self, number: usize) {
        self.0.lock().unwrap()[number].ended = now();
    }

    pub(crate) fn add(&self, fault: Fault) -> usize {
        let mut all = self.0.lock().unwrap();
        all.push(fault);
        all.len() - 1
    }

    pub(crate) fn all(&self) -> Vec<Fault> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn by_kind(&self) -> BTreeMap<&'static str, usize> {
        let mut kinds = BTreeMap::new();
        for fault in self.0.lock().unwrap().iter() {
            *kinds.entry(fault.kind).or_default() += 1;
        }
        kinds
    }
}

/// Whether one of `faults` was a reason to run again what `replica` ran from `began` on and another ran from `again` on.
pub(crate) fn explained(faults: &[Fault], replica: usize, http: bool, began: f64, again: f64) -> bool {
    faults.iter().any(|fault| {
        let concerns = match fault.reruns {
            Reruns::None => false,
            Reruns::Of(number) => number == replica,
            Reruns::Http => http,
            Reruns::All => true,
        };
        concerns && fault.began <= again && fault.ended >= began
    })
}
