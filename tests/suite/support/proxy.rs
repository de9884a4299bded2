//! A TCP proxy that breaks things: between the daemon and a server it stands for a bad network.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// What is wrong with the network just now. It applies to connections that are open, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Every piece, in both directions, takes this long.
    Latency(Duration),
    /// Nothing goes through, nobody is told; what was sent arrives when the fault ends.
    Blackhole,
    /// As `Blackhole`, but for the server's answers only: it does what it is asked and nobody learns of it.
    HoldReplies,
    /// A connection is reset after this many bytes of the server's answers, counted from the setting of the fault.
    CutRepliesAfter(usize),
    /// New connections are reset at once; open ones are left alone.
    RefuseNew,
    /// A connection is reset in place of the answer to a COMMIT: the server has committed and the client never hears of it.
    CutCommits,
    /// The server's side of a connection is closed at its next piece, as if the server had nothing more to say; what the client sends
    /// still arrives.
    HalfClose,
}

/// How PostgreSQL says that a transaction was committed: the tag of its CommandComplete.
const COMMITTED: &[u8] = b"COMMIT\0";

fn has(bytes: &[u8], words: &[u8]) -> bool {
    bytes.windows(words.len()).any(|part| part == words)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Toward {
    Server,
    Client,
}

/// A proxy in front of one server; ends with all its connections when dropped.
#[derive(Debug)]
pub(crate) struct FaultProxy {
    address: SocketAddr,
    upstream: watch::Sender<SocketAddr>,
    fault: watch::Sender<Fault>,
    resets: watch::Sender<u64>,
    frozen: watch::Sender<&'static str>,
    listener: JoinHandle<()>,
}

impl FaultProxy {
    pub(crate) async fn start(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (fault, resets) = (watch::Sender::new(Fault::None), watch::Sender::new(0));
        let upstream = watch::Sender::new(upstream);
        let frozen = watch::Sender::new("");
        let accept = accept(listener, upstream.subscribe(), fault.clone(), resets.clone(), frozen.clone());
        #[expect(clippy::disallowed_methods, reason = "the handle is kept, and aborted on drop")]
        let listener = tokio::spawn(accept);
        Self { address, upstream, fault, resets, frozen, listener }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// `url` with this proxy in place of its host and port.
    pub(crate) fn rewrite(&self, url: &str) -> String {
        let mut url = url::Url::parse(url).unwrap();
        url.set_host(Some("127.0.0.1")).unwrap();
        url.set_port(Some(self.address.port())).unwrap();
        url.into()
    }

    /// The server is elsewhere now; new connections go there.
    pub(crate) fn point_at(&self, upstream: SocketAddr) {
        self.upstream.send_replace(upstream);
    }

    pub(crate) fn set(&self, fault: Fault) {
        self.fault.send_replace(fault);
    }

    /// Lets nothing through any more on open connections that began with these words, neither bytes nor their end; new ones are not
    /// concerned.
    pub(crate) fn freeze(&self, words: &'static str) {
        self.frozen.send_replace(words);
    }

    /// Resets every open connection.
    pub(crate) fn reset_all(&self) {
        self.resets.send_modify(|count| *count += 1);
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

async fn accept(
    listener: TcpListener,
    upstream: watch::Receiver<SocketAddr>,
    fault: watch::Sender<Fault>,
    resets: watch::Sender<u64>,
    frozen: watch::Sender<&'static str>,
) {
    // Dropped with this future, and the connections with it.
    let mut connections = JoinSet::new();
    loop {
        let (client, _) = listener.accept().await.unwrap();
        while connections.try_join_next().is_some() {}
        if *fault.borrow() == Fault::RefuseNew {
            reset(client);
            continue;
        }
        let upstream = *upstream.borrow();
        connections.spawn(serve(client, upstream, fault.subscribe(), resets.subscribe(), frozen.subscribe()));
    }
}

/// Closes with RST instead of the orderly FIN.
fn reset(stream: TcpStream) {
    // The peer may be gone already.
    let _ = stream.set_zero_linger();
}

async fn serve(
    client: TcpStream,
    upstream: SocketAddr,
    fault: watch::Receiver<Fault>,
    mut resets: watch::Receiver<u64>,
    mut frozen: watch::Receiver<&'static str>,
) {
    let Ok(server) = TcpStream::connect(upstream).await else { return reset(client) };
    // Small pieces must not wait for each other here: latency is the fault's business.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let (mut up, mut down) =
        (Pump::new(from_client, to_server, fault.clone()), Pump::new(from_server, to_client, fault));
    let begun = Arc::clone(&up.begun);
    let freeze = async {
        while frozen.changed().await.is_ok() {
            let words = *frozen.borrow_and_update();
            let begun = begun.lock().unwrap();
            if has(&begun, words.as_bytes()) {
                return;
            }
        }
        std::future::pending().await
    };
    let broken = tokio::select! {
        biased;
        () = freeze => resets.changed().await.is_ok(),
        ended = up.run(Toward::Server) => ended.is_err(),
        ended = down.run(Toward::Client) => ended.is_err(),
        _ = resets.changed() => true,
    };
    if broken {
        for (read, write) in [(up.from, down.to), (down.from, up.to)] {
            reset(read.reunite(write).unwrap());
        }
    }
}

/// One direction of a connection.
struct Pump {
    from: OwnedReadHalf,
    to: OwnedWriteHalf,
    fault: watch::Receiver<Fault>,
    /// Bytes let through under the present fault.
    passed: usize,
    /// The first bytes of the connection.
    begun: Arc<Mutex<Vec<u8>>>,
}

impl Pump {
    fn new(from: OwnedReadHalf, to: OwnedWriteHalf, fault: watch::Receiver<Fault>) -> Self {
        Self { from, to, fault, passed: 0, begun: Arc::default() }
    }

    /// Until one side closes, which is `Ok`, or the connection breaks.
    async fn run(&mut self, toward: Toward) -> std::io::Result<()> {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let size = self.from.read(&mut buffer).await?;
            if size == 0 {
                return Ok(());
            }
            {
                let mut begun = self.begun.lock().unwrap();
                let room = 1024_usize.saturating_sub(begun.len());
                begun.extend_from_slice(&buffer[..size.min(room)]);
            }
            if toward == Toward::Client && *self.fault.borrow() == Fault::HalfClose {
                self.to.shutdown().await?;
                return self.swallow().await;
            }
            if toward == Toward::Client
                && *self.fault.borrow() == Fault::CutCommits
                && has(&buffer[..size], COMMITTED)
            {
                return Err(std::io::ErrorKind::ConnectionReset.into());
            }
            let allowed = self.wait_through(toward, size).await?;
            self.to.write_all(&buffer[..allowed]).await?;
            self.passed += allowed;
            if allowed < size {
                return Err(std::io::ErrorKind::ConnectionReset.into());
            }
        }
    }

    /// Takes what comes and passes nothing on, until the connection breaks.
    async fn swallow(&mut self) -> std::io::Result<()> {
        let mut buffer = [0; 4096];
        while self.from.read(&mut buffer).await? > 0 {}
        Ok(())
    }

    /// Waits as the fault wants; how much of a piece of `size` bytes gets through before the connection is cut.
    async fn wait_through(&mut self, toward: Toward, size: usize) -> std::io::Result<usize> {
        loop {
            if self.fault.has_changed().is_ok_and(|changed| changed) {
                self.passed = 0;
            }
            let fault = *self.fault.borrow_and_update();
            let held = match (fault, toward) {
                (Fault::Blackhole, _) | (Fault::HoldReplies, Toward::Client) => true,
                (Fault::CutRepliesAfter(bytes), Toward::Client) => {
                    return Ok(size.min(bytes.saturating_sub(self.passed)));
                }
                (Fault::Latency(time), _) => {
                    tokio::time::sleep(time).await;
                    false
                }
                _ => false,
            };
            if !held {
                return Ok(size);
            }
            self.fault.changed().await.map_err(|_| std::io::ErrorKind::ConnectionReset)?;
            self.passed = 0;
        }
    }
}
