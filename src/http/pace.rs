//! Writing to clients that may not read: a client takes something in time, and the whole answer in time, or it is cut off.
//!
//! What is behind an answer (a slot, a connection to the database, pages in memory) is then free again.

use std::{
    io::{self, IoSlice},
    os::fd::AsFd,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};

/// What a client may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// For the next bytes.
    pub(super) progress: Duration,
    /// For one answer.
    pub(super) whole: Duration,
}

/// When the present answer of a connection must be over.
#[derive(Clone, Debug, Default)]
pub(super) struct Deadline(Arc<Mutex<Option<Instant>>>);

impl Deadline {
    pub(super) fn set(&self, until: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
    }

    fn get(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream whose writes end with an error when its other end does not take them.
#[derive(Debug)]
pub(super) struct Paced<S> {
    stream: S,
    progress: Duration,
    deadline: Deadline,
    waiting: Option<Pin<Box<Sleep>>>,
    cut_off: fn(&S),
}

impl<S> Paced<S> {
    /// `cut_off` is called before the error: what was written and not taken is not to be sent any more.
    pub(super) fn new(stream: S, progress: Duration, deadline: Deadline, cut_off: fn(&S)) -> Self {
        Self { stream, progress, deadline, waiting: None, cut_off }
    }

    fn too_late<T>(&self) -> Poll<io::Result<T>> {
        (self.cut_off)(&self.stream);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn in_time<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        let (now, until) = (Instant::now(), self.deadline.get());
        if until.is_some_and(|until| until <= now) {
            return self.too_late();
        }
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let latest = now + self.progress;
        let sleep = || Box::pin(sleep_until(until.map_or(latest, |until| until.min(latest))));
        ready!(self.waiting.get_or_insert_with(sleep).as_mut().poll(context));
        self.too_late()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, out)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Paced<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.in_time(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.in_time(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.in_time(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// A silent peer is asked whether it is there after this time, this often.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// Has the system end connections whose other end is gone, or leaves what was sent to it lying for longer than `progress`: also
/// what fits into the system's buffers, such as a few events for a follower.
pub(super) fn watch_over(socket: impl AsFd, progress: Duration) -> io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_PROBES)?;
    #[cfg(target_os = "linux")]
    sockopt::set_tcp_user_timeout(&socket, u32::try_from(progress.as_millis()).unwrap_or(u32::MAX))?;
    #[cfg(not(target_os = "linux"))]
    let _ = progress;
    Ok(())
}

/// Has the system throw away what it has not sent when the connection is closed: a client that takes a few bytes a second would
/// keep it for hours.
pub(super) fn reset_at_close(socket: &impl AsFd) {
    // Refused only for what is no connection any more.
    let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test(start_paused = true)]
    async fn a_write_ends_when_nothing_is_taken_in_time() {
        let (mut reader, writer) = tokio::io::duplex(8);
        let mut paced = Paced::new(writer, Duration::from_secs(30), Deadline::default(), |_| {});
        let began = Instant::now();
        // Something is taken every 20 s, for a while.
        let writing = paced.write_all(&[7; 100]);
        let reading = async {
            for _ in 0..3 {
                tokio::time::sleep(Duration::from_secs(20)).await;
                reader.read_exact(&mut [0; 8]).await.unwrap();
            }
            tokio::time::sleep(Duration::from_secs(3600)).await;
        };
        tokio::select! {
            written = writing => assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut),
            () = reading => panic!("the writer waits for ever"),
        }
        assert_eq!(began.elapsed().as_secs(), 90);
    }

    #[tokio::test(start_paused = true)]
    async fn a_whole_answer_has_its_time_however_steadily_a_little_of_it_is_taken() {
        let (mut reader, writer) = tokio::io::duplex(1);
        let deadline = Deadline::default();
        let began = Instant::now();
        deadline.set(began + Duration::from_secs(100));
        let mut paced = Paced::new(writer, Duration::from_secs(30), deadline, |_| {});
        let reading = async {
            loop {
                tokio::time::sleep(Duration::from_secs(20)).await;
                reader.read_exact(&mut [0]).await.unwrap();
            }
        };
        tokio::select! {
            written = paced.write_all(&[7; 100]) => assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut),
            () = reading => {}
        }
        assert_eq!(began.elapsed().as_secs(), 100);
    }
}
