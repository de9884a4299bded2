//! A body as the reader of rows wants it: bytes from the network, through a small channel, to the thread that reads.
//!
//! The end of a body is said, not inferred: a channel that merely closes is a client that hung up, and its rows are
//! not to be taken for all there are.

use super::{
    guard::{media_type, unsupported},
    problem::Problem,
};
use axum::{
    body::{Body, BodyDataStream},
    http::{HeaderMap, StatusCode, header},
};
use bytes::{Buf, Bytes};
use futures::StreamExt;
use std::{
    io::{self, ErrorKind, Read},
    time::Duration,
};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};

#[derive(Debug)]
enum Piece {
    Bytes(Bytes),
    End,
    Broken(ErrorKind),
}

/// The side of the thread.
#[derive(Debug)]
pub(super) struct Upload {
    pieces: mpsc::Receiver<Piece>,
    current: Bytes,
    ended: bool,
}

impl Read for Upload {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() && !self.ended {
            match self.pieces.blocking_recv() {
                Some(Piece::Bytes(bytes)) => self.current = bytes,
                Some(Piece::End) => self.ended = true,
                Some(Piece::Broken(kind)) => return Err(kind.into()),
                None => return Err(ErrorKind::UnexpectedEof.into()),
            }
        }
        let count = self.current.len().min(out.len());
        out[..count].copy_from_slice(&self.current[..count]);
        self.current.advance(count);
        Ok(count)
    }
}

/// The side of the network.
pub(super) struct Pump {
    body: BodyDataStream,
    pieces: mpsc::Sender<Piece>,
    idle: Duration,
    until: Instant,
}

/// How long one piece, and the whole body, may take to come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) idle: Duration,
    pub(super) whole: Duration,
}

pub(super) fn bridge(body: Body, patience: Patience) -> (Upload, Pump) {
    let (pieces, received) = mpsc::channel(4);
    let until = Instant::now() + patience.whole;
    let pump = Pump { body: body.into_data_stream(), pieces, idle: patience.idle, until };
    (Upload { pieces: received, current: Bytes::new(), ended: false }, pump)
}

/// After a refusal, what of the rest is read so that the client gets to see it: most send everything before they look.
const DISCARDED: u64 = 64 << 20;
const DISCARDED_FOR: Duration = Duration::from_secs(5);

impl Pump {
    /// Runs `work`, which reads the other side, while the body is pumped to it.
    pub(super) async fn drive<T, E>(mut self, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let mut work = std::pin::pin!(work);
        let done = tokio::select! {
            done = &mut work => done,
            () = self.run() => work.await,
        };
        if done.is_err() {
            self.discard().await;
        }
        done
    }

    async fn run(&mut self) {
        loop {
            let piece = self.next().await;
            let is_last = !matches!(piece, Piece::Bytes(_));
            // The reader is gone: the work has an error of its own to report.
            if self.pieces.send(piece).await.is_err() || is_last {
                return;
            }
        }
    }

    async fn next(&mut self) -> Piece {
        let until = self.until.min(Instant::now() + self.idle);
        match timeout_at(until, self.body.next()).await {
            Ok(Some(Ok(bytes))) => Piece::Bytes(bytes),
            Ok(Some(Err(_))) => Piece::Broken(ErrorKind::ConnectionReset),
            Ok(None) => Piece::End,
            Err(_) => Piece::Broken(ErrorKind::TimedOut),
        }
    }

    async fn discard(&mut self) {
        let reading = async {
            let mut left = DISCARDED;
            while let Some(Ok(bytes)) = self.body.next().await {
                left = left.saturating_sub(bytes.len() as u64);
                if left == 0 {
                    return;
                }
            }
        };
        // However it ends: it was a courtesy.
        let _ = timeout(DISCARDED_FOR, reading).await;
    }
}

/// The whole of a small body of JSON.
pub(super) async fn json_body(
    headers: &HeaderMap,
    body: Body,
    most: usize,
    patience: Duration,
) -> Result<Bytes, Problem> {
    if media_type(headers).as_deref() != Some("application/json") {
        return Err(unsupported("the body must be application/json"));
    }
    refuse_encodings(headers)?;
    match timeout(patience, axum::body::to_bytes(body, most)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(_)) => {
            let detail = format!("the body has more than {most} bytes (http.max_body_bytes), or broke off");
            Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail))
        }
        Err(_) => {
            let detail = "the body did not come in time (http.body_timeout)";
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "timeout", detail))
        }
    }
}

/// Bodies are taken as they are.
pub(super) fn refuse_encodings(headers: &HeaderMap) -> Result<(), Problem> {
    match headers.get(header::CONTENT_ENCODING) {
        Some(encoding) if encoding != "identity" => Err(unsupported("the body must not be compressed")),
        _ => Ok(()),
    }
}
