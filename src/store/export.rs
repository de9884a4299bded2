//! The rows of a batch with what became of them, read page by page from one snapshot.

use super::listing::{
    Which,
    reader::{Reader, Values},
};
use tokio_postgres::{Client, Error, IsolationLevel, Transaction};

pub use super::listing::RowView;

/// What is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    All,
    Failed,
}

impl From<Rows> for Which {
    fn from(rows: Rows) -> Self {
        match rows {
            Rows::All => Self::All,
            Rows::Failed => Self::Failed,
        }
    }
}

/// One state of the database for as long as it lives.
pub struct Snapshot<'a>(Transaction<'a>);

impl std::fmt::Debug for Snapshot<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Snapshot")
    }
}

/// A page is a matter of milliseconds, whatever the size of the batch: by index, and planned for the lines it asks for.
const BY_INDEX: &str =
    "SET LOCAL jit = off; SET LOCAL enable_seqscan = off; SET LOCAL plan_cache_mode = force_custom_plan";

/// Bytes of inputs, and of results, that a page may have; one row at least.
const PAGE_BYTES: usize = 8 << 20;

impl<'a> Snapshot<'a> {
    pub async fn begin(client: &'a mut Client) -> Result<Self, Error> {
        let transaction = client
            .build_transaction()
            .isolation_level(IsolationLevel::RepeatableRead)
            .read_only(true)
            .start()
            .await?;
        transaction.batch_execute(BY_INDEX).await?;
        Ok(Self(transaction))
    }

    /// The rows in line order.
    pub fn rows(&self, batch: i64, rows: Rows) -> Pages<'_, 'a> {
        Pages(Reader::new(&self.0, batch, rows.into(), 1))
    }

    /// The same without results.
    pub fn inputs(&self, batch: i64, rows: Rows) -> Pages<'_, 'a> {
        Pages(Reader::new(&self.0, batch, rows.into(), 1).of(Values::Inputs))
    }
}

/// Rows, a few at a time: as many lines as their bytes allow.
pub struct Pages<'s, 'a>(Reader<'s, Transaction<'a>>);

impl std::fmt::Debug for Pages<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pages")
    }
}

impl Pages<'_, '_> {
    /// The next rows; `None` behind the last.
    pub async fn next(&mut self) -> Result<Option<Vec<RowView>>, Error> {
        self.0.next_page(i64::MAX, PAGE_BYTES).await
    }
}
