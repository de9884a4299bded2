//! A model of the walk of a block, checked in every order of its steps. tests/model/README.md says what it covers and what not.

#[cfg(test)]
mod model {
    mod checks;
    mod database;
    mod guards;
    mod possible;
    mod promises;
    mod reach;
    mod state;
    mod walk;
}
