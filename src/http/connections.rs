//! The connections of the port, each in a task of its own, and none of them for ever.
//!
//! A connection waits for the head of a request, or is busy with one. The busy ones are few: the API counts what it does
//! at a time. Waiting costs a client nothing, so a client that waits has [`PATIENCE`], and when too many do, the one that has
//! waited longest goes. No client is turned away: a probe asks as soon as it is connected, and is answered however many
//! others only hold a connection open. A client that is answered and does not read is cut off ([`Paced`]).

use super::{
    Peer, Port, RequestSlot,
    pace::{Deadline, Limits, Paced, reset_at_close, watch_over},
};
use axum::{
    Router,
    body::Body,
    extract::{ConnectInfo, Request},
};
use bytes::Bytes;
use hyper::{
    body::{Frame, SizeHint},
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use std::{
    collections::BTreeMap,
    pin::{Pin, pin},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::JoinSet,
    time::Instant,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// The head of a request comes within this time, from the connection's beginning or from the answer before.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections that wait for one.
const MOST_WAITING: usize = 256;
/// What is read ahead of one connection: a head must fit in it.
const READ_AHEAD: usize = 64 << 10;

/// Answers until `stop`, and then what has been asked until then.
pub(super) async fn serve(port: &Port, app: Router, stop: CancellationToken) {
    let visitors = Arc::<Connections>::default();
    let mut connections = JoinSet::new();
    while let Some((stream, peer)) = stop.run_until_cancelled(port.accept()).await {
        while connections.try_join_next().is_some() {}
        // A client that is gone already is noticed soon enough.
        let _ = watch_over(&stream, port.limits.progress);
        let tls = port.tls.as_ref().map(|tls| tls.get());
        let visit = Visit { peer: Peer(peer), seat: visitors.enter(), limits: port.limits, tls };
        connections.spawn(visit.begin(stream, app.clone(), stop.clone()));
    }
    while connections.join_next().await.is_some() {}
}

/// One connection.
struct Visit {
    peer: Peer,
    seat: Arc<Seat>,
    limits: Limits,
    tls: Option<Arc<TlsAcceptor>>,
}

impl Visit {
    async fn begin(self, stream: TcpStream, app: Router, stop: CancellationToken) {
        let deadline = Deadline::default();
        let stream = Paced::new(stream, self.limits.progress, deadline.clone(), reset_at_close);
        let Some(tls) = self.tls.clone() else { return self.converse(stream, deadline, app, stop).await };
        let accepting = tokio::time::timeout(PATIENCE, tls.accept(stream));
        let accepted = tokio::select! {
            accepted = accepting => accepted,
            () = self.seat.close.cancelled() => return,
            () = stop.cancelled() => return,
        };
        // A client that does not get through the handshake knows.
        if let Ok(Ok(stream)) = accepted {
            self.converse(stream, deadline, app, stop).await;
        }
    }

    async fn converse<S: AsyncRead + AsyncWrite + Unpin>(
        self,
        stream: S,
        deadline: Deadline,
        app: Router,
        stop: CancellationToken,
    ) {
        let Self { peer, seat, limits, .. } = self;
        let app = TowerToHyperService::new(app);
        let service = service_fn(|request| {
            let mut request: Request<_> = request;
            request.extensions_mut().insert(ConnectInfo(peer));
            let (busy, answer) = (seat.leave(), app.call(request));
            let deadline = &deadline;
            async move {
                answer.await.map(|response| {
                    deadline.set(Instant::now() + limits.whole + PATIENCE);
                    let slot = response.extensions().get::<RequestSlot>().cloned();
                    response.map(|body| Answer { body, _busy: busy, _slot: slot })
                })
            }
        });
        let mut connection = pin!(
            http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(PATIENCE)
                .max_buf_size(READ_AHEAD)
                .serve_connection(TokioIo::new(stream), service)
        );
        // However a connection ends: its client knows.
        tokio::select! {
            _ = connection.as_mut() => return,
            () = seat.close.cancelled() => return,
            () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    }
}

/// Who waits, by the order in which they began to.
#[derive(Debug, Default)]
struct Connections {
    arrivals: AtomicU64,
    waiting: Mutex<BTreeMap<u64, CancellationToken>>,
}

impl Connections {
    fn enter(self: &Arc<Self>) -> Arc<Seat> {
        let close = CancellationToken::new();
        let seat = Seat { connections: Arc::clone(self), number: AtomicU64::default(), close };
        seat.wait();
        Arc::new(seat)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, CancellationToken>> {
        // Every change is a single step, so a panic elsewhere leaves the map whole.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection's place among those who wait.
#[derive(Debug)]
struct Seat {
    connections: Arc<Connections>,
    number: AtomicU64,
    /// Ends the connection.
    close: CancellationToken,
}

impl Seat {
    /// Begins to wait; who has waited longest goes if that is one too many.
    fn wait(&self) {
        let number = self.connections.arrivals.fetch_add(1, Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
        let mut waiting = self.connections.lock();
        waiting.insert(number, self.close.clone());
        if waiting.len() > MOST_WAITING
            && let Some((_, longest)) = waiting.pop_first()
        {
            longest.cancel();
        }
    }

    /// Waits no more, until what is returned is dropped.
    fn leave(self: &Arc<Self>) -> Busy {
        self.connections.lock().remove(&self.number.load(Ordering::Relaxed));
        Busy(Arc::clone(self))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.connections.lock().remove(&self.number.load(Ordering::Relaxed));
    }
}

/// A request that is being answered.
#[derive(Debug)]
struct Busy(Arc<Seat>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.wait();
    }
}

/// The body of an answer: a client that still gets it does not wait.
#[derive(Debug)]
struct Answer {
    body: Body,
    _busy: Busy,
    /// What the API counts: an answer that is not taken is still being worked on.
    _slot: Option<RequestSlot>,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_closed(seats: &[Arc<Seat>]) -> Vec<usize> {
        (0..seats.len()).filter(|index| seats[*index].close.is_cancelled()).collect()
    }

    #[test]
    fn one_too_many_closes_the_longest_waiting_and_none_that_is_busy() {
        let visitors = Arc::<Connections>::default();
        let mut seats: Vec<Arc<Seat>> = (0..MOST_WAITING).map(|_| visitors.enter()).collect();
        let busy = seats[0].leave();
        seats.push(visitors.enter());
        assert_eq!(is_closed(&seats), [0; 0], "there was room for one");
        seats.push(visitors.enter());
        assert_eq!(is_closed(&seats), [1]);
        // Answered, it is the last of those who wait.
        drop(busy);
        assert_eq!(is_closed(&seats), [1, 2]);
        // Who goes by itself makes room.
        seats.pop();
        seats.push(visitors.enter());
        assert_eq!(is_closed(&seats), [1, 2]);
        seats.clear();
        assert!(visitors.lock().is_empty());
    }
}
