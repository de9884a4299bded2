//! The connections of one replica, apart by purpose: a slow reader cannot starve a claim or a flush.

use super::{
    Config,
    connect::{ConnectError, Plans, SessionSettings, Target},
};
use deadpool_postgres::Pool;
use std::{num::NonZeroU32, time::Duration};

/// Uploads of a replica at a time; each reads its batch on a connection of its own, for as long as it takes.
pub const UPLOADS: u32 = 2;
/// Connections beside the general pool: one each to claim, to flush, to listen and to beat, and the uploads'.
const RESERVED: u32 = 4 + UPLOADS;
/// Fewer general connections than this and reading rows waits for finishing batches.
const LEAST_GENERAL: u32 = 2;
/// What a replica cannot work with less than.
pub const LEAST_CONNECTIONS: u32 = RESERVED + LEAST_GENERAL;

/// The door to PostgreSQL.
#[derive(Clone, Debug)]
pub struct Store {
    /// Claims blocks.
    pub claims: Pool,
    /// Writes outcomes; one flush at a time.
    pub writes: Pool,
    /// Everything else: reading rows, finishing batches, upkeep.
    pub general: Pool,
    /// Reads what is uploaded.
    pub uploads: Pool,
    /// Past any pooler.
    pub direct: Target,
}

/// The connections of the HTTP API, beside the others: whatever is asked of it, the work goes on. Opened when needed.
#[derive(Clone, Debug)]
pub struct ApiPools {
    /// For a question and its answer.
    pub asks: Pool,
    /// For uploads, whose statement takes as long as its client does.
    pub uploads: Pool,
    /// For exports, whose statements are short.
    pub exports: Pool,
}

impl ApiPools {
    pub fn open(
        config: &Config,
        asks: NonZeroU32,
        uploads: NonZeroU32,
        exports: NonZeroU32,
    ) -> Result<Self, OpenError> {
        let target = config.target()?;
        let usual = config.session();
        let patient = usual.map(|usual| SessionSettings { statement_timeout: Duration::ZERO, ..usual });
        Ok(Self {
            asks: target.pool(asks, "musterd api", usual)?,
            uploads: target.pool(uploads, "musterd api", patient)?,
            exports: target.pool(exports, "musterd api", usual)?,
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("database.url: {0}")]
    Url(#[from] super::connect::ParseError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(
        "database.direct_url leads to a transaction pooler, too: notifications and the session lock would be \
         another client's; name the server itself, or leave it out"
    )]
    DirectIsPooled,
}

impl Store {
    /// The pools; connects to nothing yet.
    pub fn open(config: &Config) -> Result<Self, OpenError> {
        let target = config.target()?;
        let pool = |size: u32, name: &str, session: Option<SessionSettings>| {
            target.pool(NonZeroU32::new(size).unwrap_or(NonZeroU32::MIN), name, session)
        };
        let usual = config.session();
        let by_index = usual.map(|usual| SessionSettings { plans: Plans::OnceByIndex, ..usual });
        let general = config.max_connections.get().saturating_sub(RESERVED).max(LEAST_GENERAL);
        Ok(Self {
            claims: pool(1, "musterd claim", by_index)?,
            writes: pool(1, "musterd write", by_index)?,
            general: pool(general, "musterd", usual)?,
            uploads: pool(UPLOADS, "musterd outputs", usual)?,
            // Behind a pooler without a way past it there is nothing to pin: a SET would stay with another client.
            direct: match config.has_session() {
                true => config.direct_target()?.pinned(),
                false => config.direct_target()?,
            },
        })
    }
}
