//! Output files as the results hold them: read line by line from one snapshot in which their batch is closed.

use super::batches::{self, Look};
use bytes::Bytes;
use deadpool_postgres::{Object, Transaction};
use futures::{Stream, TryStreamExt, stream};
use std::pin::Pin;
use tokio_postgres::{Error, IsolationLevel, Portal, RowStream};

/// One file of a batch, and where in the batch its text begins and ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSpan {
    pub name: String,
    pub first: i32,
    pub last: i32,
}

/// A transaction that sees one state of the database for as long as it lives, and changes nothing.
#[derive(Debug)]
pub struct Snapshot<'a>(Transaction<'a>);

/// An upload takes as long as it takes; only a worker that is gone must not hold the snapshot for ever.
const PATIENCE: &str =
    "SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = '10min'";

/// In the order of the primary key, from the first line on: a sort would read and keep the whole file first.
const IN_ORDER: &str =
    "SET LOCAL enable_sort = off; SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off";

/// Rows asked for at a time. Their bytes are taken as they come: what is not read stays with the server.
const PAGE: i32 = 1_000;

impl<'a> Snapshot<'a> {
    pub async fn begin(client: &'a mut Object) -> Result<Self, Error> {
        let transaction = client
            .build_transaction()
            .isolation_level(IsolationLevel::RepeatableRead)
            .read_only(true)
            .start()
            .await?;
        transaction.batch_execute(PATIENCE).await?;
        Ok(Self(transaction))
    }

    /// Whether the batch is over in this snapshot. What is read afterwards is of the same moment.
    pub async fn look(&self, id: i64) -> Result<Look, Error> {
        batches::look(&*self.0, id).await
    }

    /// The batch's files by name: one pass over the results that have text for any.
    pub async fn files(&self, batch: i64) -> Result<Vec<FileSpan>, Error> {
        const SQL: &str = "SELECT k.name, pg_catalog.min(r.line), pg_catalog.max(r.line)
              FROM musterd.results r
             CROSS JOIN LATERAL pg_catalog.jsonb_object_keys(r.outputs) AS k (name)
             WHERE r.batch_id = $1 AND r.outputs IS NOT NULL
             GROUP BY k.name
             ORDER BY k.name COLLATE \"C\"";
        let rows = self.0.query(SQL, &[&batch]).await?;
        self.0.batch_execute(IN_ORDER).await?;
        let file =
            |row: &tokio_postgres::Row| FileSpan { name: row.get(0), first: row.get(1), last: row.get(2) };
        Ok(rows.iter().map(file).collect())
    }

    /// The text of one file, a piece for every row that adds to it, in the order of the lines.
    pub fn text<'s>(
        &'s self,
        batch: i64,
        file: &'s FileSpan,
    ) -> impl Stream<Item = Result<Bytes, Error>> + Send + 's {
        stream::try_unfold(None, move |reading: Option<Reading>| async move {
            let mut reading = match reading {
                Some(reading) => reading,
                None => self.open(batch, file).await?,
            };
            loop {
                if let Some(row) = reading.page.try_next().await? {
                    reading.rows += 1;
                    let text = Bytes::copy_from_slice(row.get::<_, &str>(0).as_bytes());
                    return Ok(Some((text, Some(reading))));
                }
                if reading.rows < PAGE {
                    return Ok(None);
                }
                reading.page = Box::pin(self.0.query_portal_raw(&reading.portal, PAGE).await?);
                reading.rows = 0;
            }
        })
    }

    async fn open(&self, batch: i64, file: &FileSpan) -> Result<Reading, Error> {
        const SQL: &str = "SELECT r.outputs ->> $2
              FROM musterd.results r
             WHERE r.batch_id = $1 AND r.line BETWEEN $3 AND $4 AND r.outputs ? $2
             ORDER BY r.line";
        let statement = self.0.prepare_cached(SQL).await?;
        let portal = self.0.bind(&statement, &[&batch, &file.name, &file.first, &file.last]).await?;
        let page = Box::pin(self.0.query_portal_raw(&portal, PAGE).await?);
        Ok(Reading { portal, page, rows: 0 })
    }
}

/// A cursor on the server, and the page that is on its way from it.
struct Reading {
    portal: Portal,
    page: Pin<Box<RowStream>>,
    /// Of this page, so far.
    rows: i32,
}

/// Whether an upload of this state of the batch can never be the one that its end refers to.
pub async fn is_overtaken(client: &Object, closed: &batches::Closed, manifest: &str) -> Result<bool, Error> {
    const SQL: &str = "SELECT (b.generation, b.rows) <> ($2, $3)
               OR (b.summarized_at IS NOT NULL AND b.outputs ->> 'manifest' IS DISTINCT FROM $4)
          FROM musterd.batches b WHERE b.id = $1";
    let row = client.query_opt(SQL, &[&closed.id, &closed.generation, &closed.rows, &manifest]).await?;
    Ok(row.is_some_and(|row| row.get(0)))
}
