//! What ran, when and where: written by the handlers to a database that no fault touches, before they answer.

use std::sync::Arc;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::postgres::{Session, open};
use crate::suite::support::services;

const TABLES: &str = "CREATE TABLE runs (
    http boolean NOT NULL, replica int NOT NULL, scope bigint NOT NULL, line bigint NOT NULL, attempt int NOT NULL,
    block text, began float8 NOT NULL, ended float8 NOT NULL, said text NOT NULL)";

/// One run of a row (`scope` is its batch), or of a task (`scope` is 0 and `line` its id).
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Run {
    pub(crate) http: bool,
    pub(crate) replica: i32,
    pub(crate) scope: i64,
    pub(crate) line: i64,
    pub(crate) attempt: i32,
    pub(crate) block: Option<String>,
    pub(crate) began: f64,
    pub(crate) ended: f64,
    pub(crate) said: String,
}

#[derive(Clone, Debug)]
pub(crate) struct Ledger(Arc<Session>);

impl Ledger {
    pub(crate) async fn start() -> Result<Self> {
        let server = tokio::task::spawn_blocking(|| services::postgres().url().to_owned()).await?;
        let admin = open(&server).await?;
        admin.batch_execute("CREATE DATABASE ledger").await?;
        let (server, _) = server.rsplit_once('/').unwrap();
        let session = open(&format!("{server}/ledger")).await?;
        session.batch_execute(TABLES).await?;
        Ok(Self(Arc::new(session)))
    }

    pub(crate) async fn write(&self, runs: &[Run]) {
        const SQL: &str = "INSERT INTO runs SELECT * FROM unnest($1::boolean[], $2::int[], $3::bigint[], $4::bigint[], $5::int[],
             $6::text[], $7::float8[], $8::float8[], $9::text[])";
        let statement = self.0.prepare(SQL).await.unwrap();
        let column = |of: fn(&Run) -> i64| -> Vec<i64> { runs.iter().map(of).collect() };
        let http: Vec<bool> = runs.iter().map(|run| run.http).collect();
        let replica: Vec<i32> = runs.iter().map(|run| run.replica).collect();
        let attempt: Vec<i32> = runs.iter().map(|run| run.attempt).collect();
        let (scope, line) = (column(|run| run.scope), column(|run| run.line));
        let block: Vec<Option<&str>> = runs.iter().map(|run| run.block.as_deref()).collect();
        let began: Vec<f64> = runs.iter().map(|run| run.began).collect();
        let ended: Vec<f64> = runs.iter().map(|run| run.ended).collect();
        let said: Vec<&str> = runs.iter().map(|run| &*run.said).collect();
        let params: [&(dyn tokio_postgres::types::ToSql + Sync); 9] =
            [&http, &replica, &scope, &line, &attempt, &block, &began, &ended, &said];
        self.0.execute(&statement, &params).await.unwrap();
    }

    /// Every run, row by row in the order of time.
    pub(crate) async fn read(&self) -> Result<Vec<Run>> {
        let sql = "SELECT * FROM runs ORDER BY scope, line, began";
        let run = |row: &tokio_postgres::Row| Run {
            http: row.get(0),
            replica: row.get(1),
            scope: row.get(2),
            line: row.get(3),
            attempt: row.get(4),
            block: row.get(5),
            began: row.get(6),
            ended: row.get(7),
            said: row.get(8),
        };
        Ok(self.0.query(sql, &[]).await?.iter().map(run).collect())
    }

    /// Takes runs from programs, one JSON object a line, and answers each with an empty line once it is written.
    pub(crate) async fn listen(&self, tasks: &mut JoinSet<()>) -> Result<u16> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let ledger = self.clone();
        tasks.spawn(async move {
            let mut programs = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                programs.spawn(serve(ledger.clone(), stream));
                while programs.try_join_next().is_some() {}
            }
        });
        Ok(port)
    }
}

async fn serve(ledger: Ledger, stream: TcpStream) {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // A program that was killed while it wrote leaves half a line.
        let Ok(run) = serde_json::from_str::<Run>(&line) else { return };
        ledger.write(&[run]).await;
        if write.write_all(b"\n").await.is_err() {
            return;
        }
    }
}
