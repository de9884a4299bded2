//! `make torture`: the whole system under random faults, with a checker that accounts for every row afterwards.
//!
//! Four replicas that differ, real servers, a network that breaks, and handlers that misbehave. The seed repeats what is submitted and
//! what goes wrong, and when; what becomes of it depends on the machine. Green means: nothing lost, nothing run again without a
//! fault that explains it, nothing ended twice, nothing stuck.

#[cfg(test)]
#[path = "suite/support.rs"]
pub(crate) mod support;

/// Where the helpers look for each other.
#[cfg(test)]
mod suite {
    pub(crate) use crate::support;
}

#[cfg(test)]
mod torture {
    pub(crate) mod check;
    pub(crate) mod dice;
    pub(crate) mod faults;
    pub(crate) mod grid;
    pub(crate) mod ledger;
    pub(crate) mod load;
    pub(crate) mod nemesis;
    pub(crate) mod options;
    pub(crate) mod pipe;
    pub(crate) mod plan;
    pub(crate) mod postgres;
    pub(crate) mod replica;
    pub(crate) mod report;
    pub(crate) mod sink;
    pub(crate) mod work;
    pub(crate) mod world;

    /// Set when this process has mounts of its own.
    pub(crate) const PRIVATE_MOUNTS: &str = "TORTURE_PRIVATE_MOUNTS";
}

#[cfg(test)]
fn main() -> std::process::ExitCode {
    torture::options::main()
}
