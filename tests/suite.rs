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
    mod schedules;
}
