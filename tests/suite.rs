//! Every integration test, in one program: the servers they need are started once and shared.

#[cfg(test)]
mod suite {
    mod support;

    mod alive;
    mod batch_cli;
    mod canary;
    mod cli_config;
    mod cli_doctor;
    mod cli_migrate;
    mod cli_shell;
    mod clocks;
    mod connect;
    mod connect_server;
    mod dead;
    mod dev;
    mod drain;
    mod examples;
    mod handlers;
    mod harness;
    mod harness_death;
    mod health;
    mod hostile;
    mod latency;
    mod manual;
    mod memory;
    mod migrate;
    mod objects;
    mod outputs;
    mod poison;
    mod process;
    mod reconcile;
    mod redis;
    mod replicas;
    mod schedules;
    mod schedules_claim;
    mod schedules_complete;
    mod schedules_flush;
    mod sql_batches;
    mod sql_corpus;
    mod sql_races;
    mod sql_roles;
    mod sql_submit;
    mod sql_tasks;
    mod submit_race;
    mod task_cli;
    mod task_examples;
    mod task_families;
    mod task_modes;
    mod task_schedules;
    mod task_sql;
    mod task_standards;
    mod top;
    mod walk_crash;
    mod walk_drain;
    mod walk_operators;
    mod walk_rows;
    mod why;
    mod writes_poison;
    mod writes_trouble;
    mod zombie;
}
