//! The list of workers, and what their configurations declare.

use crate::{config::Config, handler::Registry, worker_id::WorkerId};
use tokio_postgres::{Client, Error};

/// Makes a worker known, with its queues and commands.
pub async fn register(
    client: &Client,
    worker: &WorkerId,
    config: &Config,
    handlers: &Registry,
) -> Result<(), Error> {
    let queues: Vec<&String> = config.queues.keys().collect();
    let commands = handlers.commands();
    let pid = i32::try_from(std::process::id()).unwrap_or_default();
    client
        .execute(
            "INSERT INTO musterd.workers (id, host, pid, version, queues, commands) VALUES ($1, $2, $3, $4, $5, $6)",
            &[
                &worker.as_str(),
                &crate::worker_id::host(),
                &pid,
                &env!("CARGO_PKG_VERSION"),
                &queues,
                &commands,
            ],
        )
        .await?;
    for (name, entry) in handlers.iter() {
        client
            .query(
                "SELECT musterd.register_command($1, $2, $3, $4)",
                &[&name, &entry.config.queue, &entry.config.kind.as_str(), &entry.config.procedure],
            )
            .await?;
    }
    declare_queues(client, config).await
}

async fn declare_queues(client: &Client, config: &Config) -> Result<(), Error> {
    for (name, queue) in &config.queues {
        let mode = match queue.mode {
            crate::queue::Mode::Parallel => "parallel",
            crate::queue::Mode::Structured => "structured",
        };
        let (fibers, block_size) = (queue.fibers.get() as i32, queue.block_size.get() as i32);
        client
            .execute(
                "INSERT INTO musterd.queues (name, mode, fibers, block_size) VALUES ($1, $2, $3, $4)
                 ON CONFLICT (name) DO UPDATE
                    SET mode = EXCLUDED.mode, fibers = EXCLUDED.fibers, block_size = EXCLUDED.block_size,
                        updated_at = pg_catalog.now()",
                &[&name, &mode, &fibers, &block_size],
            )
            .await?;
    }
    Ok(())
}

/// The worker has ended in good order.
pub async fn deregister(client: &Client, worker: &WorkerId) -> Result<(), Error> {
    client
        .execute(
            "UPDATE musterd.workers SET state = 'stopped', seen_at = pg_catalog.now() WHERE id = $1",
            &[&worker.as_str()],
        )
        .await
        .map(|_| ())
}
