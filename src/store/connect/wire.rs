//! The stream between driver and server: plain or TLS, and with a transaction pooler at the other end translated.
//!
//! The driver connects, with all its hosts and limits, and lets its TLS connector make the stream. So that is what this
//! is: for a pooler it is asked always, negotiates TLS itself, and hands back a stream that translates.

use super::unnamed::Unnamed;
use bytes::{Buf, BytesMut};
use futures::future::BoxFuture;
use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio_postgres::{
    Socket,
    config::{SslMode, SslNegotiation},
    tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream},
};
use tokio_postgres_rustls::MakeRustlsConnect;

type Rustls = <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream;
type RustlsConnector = <MakeRustlsConnect as MakeTlsConnect<Socket>>::TlsConnect;
type Refusal = Box<dyn std::error::Error + Send + Sync>;

/// The request for TLS: eight bytes, with this number for a version of the protocol.
const TLS_PLEASE: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];
/// Beyond this the driver waits until the server has taken some.
const FULL: usize = 64 * 1024;
/// Read at a time.
const CHUNK: usize = 16 * 1024;

/// What the connection string asked for, when the driver must not ask itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) mode: SslMode,
    pub(super) negotiation: SslNegotiation,
}

/// Makes the streams of one target.
#[derive(Clone)]
pub(super) struct MakeWire {
    pub(super) tls: MakeRustlsConnect,
    /// `None`: the driver negotiates, and nothing is translated.
    pub(super) translated: Option<Asked>,
    pub(super) ending: Ending,
}

/// How a stream that is translated ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Ending {
    /// When we say so.
    #[default]
    AtOnce,
    /// When the other side closes. A pooler drops the request of somebody who has gone before it was passed on.
    WhenHeard,
}

/// Makes one stream.
pub(super) struct WireConnect {
    tls: RustlsConnector,
    translated: Option<Asked>,
    ending: Ending,
}

impl std::fmt::Debug for WireConnect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WireConnect").finish_non_exhaustive()
    }
}

impl MakeTlsConnect<Socket> for MakeWire {
    type Stream = Wire;
    type TlsConnect = WireConnect;
    type Error = Refusal;

    fn make_tls_connect(&mut self, domain: &str) -> Result<WireConnect, Refusal> {
        let tls = MakeTlsConnect::<Socket>::make_tls_connect(&mut self.tls, domain)?;
        Ok(WireConnect { tls, translated: self.translated, ending: self.ending })
    }
}

impl TlsConnect<Socket> for WireConnect {
    type Stream = Wire;
    type Error = Refusal;
    type Future = BoxFuture<'static, Result<Wire, Refusal>>;

    fn connect(self, socket: Socket) -> Self::Future {
        Box::pin(async move {
            let Some(asked) = self.translated else {
                let medium = Medium::Tls(Box::new(self.tls.connect(socket).await?));
                return Ok(Wire::over(medium, None, self.ending));
            };
            let medium = negotiate(socket, self.tls, asked).await?;
            Ok(Wire::over(medium, Some(Box::default()), self.ending))
        })
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the server does not support TLS")]
struct NoTlsThere;

async fn negotiate(mut socket: Socket, tls: RustlsConnector, asked: Asked) -> Result<Medium, Refusal> {
    if asked.mode == SslMode::Disable {
        return Ok(Medium::Plain(socket));
    }
    if asked.negotiation == SslNegotiation::Postgres {
        socket.write_all(&TLS_PLEASE).await?;
        let mut answer = [0];
        socket.read_exact(&mut answer).await?;
        match (answer, asked.mode) {
            ([b'S'], _) => {}
            (_, SslMode::Require) => return Err(NoTlsThere.into()),
            _ => return Ok(Medium::Plain(socket)),
        }
    }
    Ok(Medium::Tls(Box::new(tls.connect(socket).await?)))
}

enum Medium {
    Plain(Socket),
    Tls(Box<Rustls>),
}

/// The stream.
pub struct Wire {
    medium: Medium,
    translation: Option<Box<Unnamed>>,
    ending: Ending,
    outgoing: BytesMut,
    received: BytesMut,
    incoming: BytesMut,
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("translated", &self.translation.is_some()).finish_non_exhaustive()
    }
}

impl Wire {
    fn over(medium: Medium, translation: Option<Box<Unnamed>>, ending: Ending) -> Self {
        let (outgoing, received, incoming) = Default::default();
        Self { medium, translation, ending, outgoing, received, incoming }
    }

    /// Reads until the other side has closed; whatever it says.
    fn hear_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.medium.pin().poll_flush(cx))?;
        loop {
            self.received.clear();
            self.received.reserve(CHUNK);
            match ready!(tokio_util::io::poll_read_buf(self.medium.pin(), cx, &mut self.received)) {
                Ok(0) | Err(_) => return Poll::Ready(Ok(())),
                Ok(_) => {}
            }
        }
    }

    /// Gives the server what it has not got yet, down to `left` bytes.
    fn drain(&mut self, cx: &mut Context<'_>, left: usize) -> Poll<io::Result<()>> {
        while self.outgoing.len() > left {
            let taken = ready!(self.medium.pin().poll_write(cx, &self.outgoing))?;
            if taken == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.outgoing.advance(taken);
        }
        Poll::Ready(Ok(()))
    }
}

impl Medium {
    fn pin(&mut self) -> Pin<&mut dyn Stream> {
        match self {
            Self::Plain(socket) => Pin::new(socket),
            Self::Tls(stream) => Pin::new(stream.as_mut()),
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

impl TlsStream for Wire {
    fn channel_binding(&self) -> ChannelBinding {
        match &self.medium {
            Medium::Plain(_) => ChannelBinding::none(),
            Medium::Tls(stream) => stream.channel_binding(),
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let Some(translation) = &mut this.translation else { return this.medium.pin().poll_read(cx, buf) };
        // All that came may be what the driver does not see: then there is nothing yet, which is not the end.
        while this.incoming.is_empty() {
            this.received.clear();
            this.received.reserve(CHUNK);
            match ready!(tokio_util::io::poll_read_buf(this.medium.pin(), cx, &mut this.received))? {
                0 => return Poll::Ready(Ok(())),
                _ => translation.incoming(&this.received, &mut this.incoming),
            }
        }
        let some = this.incoming.len().min(buf.remaining());
        buf.put_slice(&this.incoming[..some]);
        this.incoming.advance(some);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.translation.is_none() {
            return this.medium.pin().poll_write(cx, buf);
        }
        ready!(this.drain(cx, FULL))?;
        if let Some(translation) = &mut this.translation {
            translation.outgoing(buf, &mut this.outgoing);
        }
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.drain(cx, 0))?;
        this.medium.pin().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.drain(cx, 0))?;
        if this.ending == Ending::WhenHeard {
            ready!(this.hear_out(cx))?;
        }
        this.medium.pin().poll_shutdown(cx)
    }
}
