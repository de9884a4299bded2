//! The rows of a batch with what became of them, read page by page.

use super::{
    listing::{
        Which,
        reader::{Reader, Values},
    },
    retention,
};
use crate::error_group::ErrorGroup;
use tokio_postgres::{Client, Error, IsolationLevel};

pub use super::listing::RowView;

/// What is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    All,
    Failed,
    /// Those of them that failed with an error of this group.
    InGroup(ErrorGroup),
}

impl From<Rows> for Which {
    fn from(rows: Rows) -> Self {
        match rows {
            Rows::All => Self::All,
            Rows::Failed => Self::Failed,
            Rows::InGroup(group) => Self::InGroup(group),
        }
    }
}

/// A page is a matter of milliseconds, whatever the size of the batch: by index, and planned for the lines it asks for.
const BY_INDEX: &str =
    "SET LOCAL jit = off; SET LOCAL enable_seqscan = off; SET LOCAL plan_cache_mode = force_custom_plan";

/// Bytes of inputs, and of results, that a page may have; one row at least.
const PAGE_BYTES: usize = 8 << 20;

/// Rows in line order, a few at a time: as many lines as their bytes allow.
///
/// Each page is one short transaction, over before the page is handed out: however long its taker takes, no snapshot is held
/// meanwhile. So a row is shown as it was when its page was read.
pub struct Pages<'c> {
    client: &'c mut Client,
    reader: Reader,
    batch: i64,
}

impl std::fmt::Debug for Pages<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pages")
    }
}

impl<'c> Pages<'c> {
    pub fn of_rows(client: &'c mut Client, batch: i64, rows: Rows) -> Self {
        Self { client, reader: Reader::new(batch, rows.into(), 1), batch }
    }

    /// The same without results.
    pub fn of_inputs(client: &'c mut Client, batch: i64, rows: Rows) -> Self {
        Self { client, reader: Reader::new(batch, rows.into(), 1).of(Values::Inputs), batch }
    }

    /// The next rows; `None` behind the last.
    pub async fn next(&mut self) -> Result<Option<Vec<RowView>>, Error> {
        let transaction = self
            .client
            .build_transaction()
            .isolation_level(IsolationLevel::RepeatableRead)
            .read_only(true)
            .start()
            .await?;
        transaction.batch_execute(BY_INDEX).await?;
        let page = self.reader.next_page(&transaction, i64::MAX, PAGE_BYTES).await?;
        if page.is_none() {
            // An end that came because retention took the rows is none.
            retention::check_data(&transaction, self.batch).await?;
        }
        transaction.commit().await?;
        Ok(page)
    }
}
