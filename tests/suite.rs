//! Every integration test, in one program: the servers they need are started once and shared.

#[cfg(test)]
mod suite {
    mod support;

    mod connect;
    mod connect_server;
    mod harness;
    mod harness_death;
    mod migrate;
    mod objects;
    mod replicas;
    mod schedules;
    mod walk_crash;
    mod walk_drain;
    mod walk_operators;
    mod walk_rows;
    mod writes_poison;
    mod writes_trouble;
}
