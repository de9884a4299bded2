//! The rows of a batch with what became of them, streamed from one snapshot.

use crate::json::Json;
use futures::{Stream, TryStreamExt};
use tokio_postgres::{Client, Error, IsolationLevel, Row, Transaction};

/// What is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    All,
    Failed,
}

#[derive(Debug)]
pub struct Exported {
    pub line: i32,
    pub state: String,
    pub attempt: Option<i32>,
    pub error: Option<String>,
    pub input: Json,
    pub result: Option<Json>,
}

impl Exported {
    fn read(row: &Row) -> Self {
        Self {
            line: row.get(0),
            state: row.get(1),
            attempt: row.get(2),
            error: row.get(3),
            input: row.get(4),
            result: row.get(5),
        }
    }
}

/// The fields that inputs have, in the order in which they first appear.
#[derive(Debug)]
pub struct Fields {
    pub names: Vec<String>,
    /// Some inputs are no objects, or have no fields at all.
    pub others: bool,
}

/// One state of the database for as long as it lives.
pub struct Snapshot<'a>(Transaction<'a>);

impl std::fmt::Debug for Snapshot<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Snapshot")
    }
}

/// Joined and read in the order of the keys, as it comes: never sorted, never gathered.
const STREAMING: &str =
    "SET LOCAL statement_timeout = 0; SET LOCAL enable_sort = off; SET LOCAL enable_hashjoin = off;
    SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off";

impl<'a> Snapshot<'a> {
    pub async fn begin(client: &'a mut Client) -> Result<Self, Error> {
        let transaction = client
            .build_transaction()
            .isolation_level(IsolationLevel::RepeatableRead)
            .read_only(true)
            .start()
            .await?;
        Ok(Self(transaction))
    }

    /// A pass over the inputs: CSV has to name its columns before its rows.
    pub async fn fields(&self, batch: i64, rows: Rows) -> Result<Fields, Error> {
        const ALL: &str = "FROM musterd.rows i";
        const FAILED: &str =
            "FROM musterd.results r JOIN musterd.rows i ON i.batch_id = r.batch_id AND i.line = r.line";
        let (from, failed) = match rows {
            Rows::All => (ALL, ""),
            Rows::Failed => (FAILED, "AND r.batch_id = $1 AND r.state = 'failed'"),
        };
        let sql = format!(
            "SELECT k.name {from}
              LEFT JOIN LATERAL pg_catalog.jsonb_object_keys(
                   CASE pg_catalog.jsonb_typeof(i.input) WHEN 'object' THEN i.input ELSE '{{}}' END) AS k (name) ON true
             WHERE i.batch_id = $1 {failed}
             GROUP BY k.name
             ORDER BY pg_catalog.min(i.line), pg_catalog.length(k.name), k.name COLLATE \"C\""
        );
        self.0.batch_execute("SET LOCAL statement_timeout = 0").await?;
        let found: Vec<Option<String>> =
            self.0.query(&sql, &[&batch]).await?.iter().map(|row| row.get(0)).collect();
        let others = found.contains(&None);
        Ok(Fields { names: found.into_iter().flatten().collect(), others })
    }

    /// The rows in line order. What is not read stays with the server.
    pub async fn rows(
        &self,
        batch: i64,
        rows: Rows,
    ) -> Result<impl Stream<Item = Result<Exported, Error>>, Error> {
        const ALL: &str = "SELECT line, state::text, attempt, error, input, result
              FROM musterd.batch_rows WHERE batch_id = $1 ORDER BY line";
        const FAILED: &str = "SELECT r.line, r.state::text, r.attempt, r.error, i.input, r.result
              FROM musterd.results r JOIN musterd.rows i ON i.batch_id = r.batch_id AND i.line = r.line
             WHERE r.batch_id = $1 AND r.state = 'failed' ORDER BY r.line";
        let sql = if rows == Rows::All { ALL } else { FAILED };
        self.0.batch_execute(STREAMING).await?;
        let found = self.0.query_raw(sql, [batch]).await?;
        Ok(found.map_ok(|row| Exported::read(&row)))
    }
}
