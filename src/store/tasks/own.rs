//! The statements around procedures of the user's, in the transaction they run in.

use super::{Finish, TaskRef, end};
use deadpool_postgres::ClientWrapper;
use tokio_postgres::{Error, Statement};
use uuid::Uuid;

/// Begins the transaction of an attempt, isolation stated and not taken from the role's defaults. Inside it a COMMIT of the
/// procedure's own fails, as it must.
pub const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// The rights and the search path of our own statements again, after the procedure.
pub const AS_OURSELVES: &str = "RESET ROLE; SET LOCAL search_path = pg_catalog, pg_temp";

/// What [`OwnTasks::finish`] raises when a task is no longer held.
pub const NOT_HELD: &str = "MU001";

/// The task's id as the procedure gets it: set for the transaction by [`OwnTasks::announce`], so that a CALL outside of that
/// transaction fails instead of having effects that no rollback takes back.
pub const OWN_ID: &str = "pg_catalog.current_setting('musterd.task_id')::pg_catalog.int8";

/// Prepared on one session.
#[derive(Debug)]
pub struct OwnTasks {
    announce: Statement,
    finish: Statement,
}

impl OwnTasks {
    pub async fn prepare(client: &ClientWrapper) -> Result<Self, Error> {
        const ANNOUNCE: &str = "SELECT pg_catalog.set_config('musterd.task_id', $1, true),
                   pg_catalog.set_config('musterd.task_token', $2, true)";
        const FINISH: &str =
            "SELECT pg_catalog.array_agg(f.task_id), pg_catalog.array_agg(f.task_state::text),
                   pg_catalog.array_agg(f.scope_id) FROM musterd.finish_own_tasks($1, $2) f";
        let (announce, finish) =
            tokio::try_join!(client.prepare_cached(ANNOUNCE), client.prepare_cached(FINISH))?;
        Ok(Self { announce, finish })
    }

    /// Says whose attempt the next CALL is; the functions that a procedure calls ask for it.
    pub async fn announce(&self, client: &ClientWrapper, task: TaskRef) -> Result<(), Error> {
        let (id, token) = (task.id.to_string(), task.token.to_string());
        client.query(&self.announce, &[&id, &token]).await.map(drop)
    }

    /// Ends the tasks as succeeded, or raises [`NOT_HELD`]. The last one is the one that was announced last.
    pub async fn finish(&self, client: &ClientWrapper, tasks: &[TaskRef]) -> Result<Finish, Error> {
        let (ids, tokens): (Vec<i64>, Vec<Uuid>) = tasks.iter().map(|task| (task.id, task.token)).unzip();
        Ok(end::read(&client.query_one(&self.finish, &[&ids, &tokens]).await?))
    }
}
