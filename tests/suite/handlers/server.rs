//! An HTTP server that does as it is told, good or bad: every request goes to a closure, which says what happens.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// What the server does with a request.
#[derive(Debug)]
pub(crate) enum Act {
    Reply(u16, String),
    ReplyWith(u16, Vec<(&'static str, String)>, String),
    /// Promises more bytes than it sends, then closes.
    Half(String),
    /// Closes without a word.
    Reset,
    /// A body of so many bytes, without saying so before.
    Endless(usize),
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) headers: HashMap<String, String>,
    pub(crate) text: String,
    pub(crate) body: Value,
}

impl Request {
    pub(crate) fn lines(&self) -> Vec<i64> {
        self.body["rows"].as_array().unwrap().iter().map(|row| row["line"].as_i64().unwrap()).collect()
    }

    /// The reply that says `outcome` of every row.
    pub(crate) fn all(&self, outcome: &str) -> Act {
        let rows: Vec<Value> = self
            .lines()
            .iter()
            .map(|line| serde_json::json!({ "line": line, "outcome": outcome, "result": { "line": line } }))
            .collect();
        Act::Reply(200, serde_json::json!({ "rows": rows }).to_string())
    }
}

type Behave = dyn Fn(Request) -> BoxFuture<'static, Act> + Send + Sync;

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) port: u16,
    seen: Arc<Mutex<Vec<Request>>>,
    pub(crate) busiest: Arc<AtomicUsize>,
    accepting: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start<F: Future<Output = Act> + Send + 'static>(
        behave: impl Fn(Request) -> F + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let behave: Arc<Behave> = Arc::new(move |request| Box::pin(behave(request)));
        let (seen, busiest) = (Arc::<Mutex<Vec<Request>>>::default(), Arc::<AtomicUsize>::default());
        let (all, most, now) = (Arc::clone(&seen), Arc::clone(&busiest), Arc::<AtomicUsize>::default());
        #[expect(clippy::disallowed_methods, reason = "the handle is kept, and aborted with the server")]
        let accepting = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(
                    stream,
                    Arc::clone(&behave),
                    Arc::clone(&all),
                    Arc::clone(&most),
                    Arc::clone(&now),
                ));
            }
        });
        Self { port, seen, busiest, accepting }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/work", self.port)
    }

    pub(crate) fn seen(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }

    /// `[handlers.work]` of kind http, with more keys after it.
    pub(crate) fn config(&self, more: &str) -> String {
        format!("[handlers.work]\nkind = \"http\"\nurl = {:?}\ntimeout = \"30s\"\n{more}", self.url())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn serve(
    stream: TcpStream,
    behave: Arc<Behave>,
    all: Arc<Mutex<Vec<Request>>>,
    most: Arc<AtomicUsize>,
    now: Arc<AtomicUsize>,
) {
    let mut stream = BufReader::new(stream);
    while let Some(request) = read(&mut stream).await {
        all.lock().unwrap().push(request.clone());
        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        let act = behave(request).await;
        now.fetch_sub(1, Ordering::SeqCst);
        if !perform(&mut stream, act).await {
            return;
        }
    }
}

async fn read(stream: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut headers = HashMap::new();
    let mut first = String::new();
    stream.read_line(&mut first).await.ok().filter(|read| *read > 0)?;
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await.ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let mut body = vec![0; headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0)];
    stream.read_exact(&mut body).await.ok()?;
    let text = String::from_utf8(body).unwrap();
    Some(Request { headers, body: serde_json::from_str(&text).unwrap_or(Value::Null), text })
}

/// Whether the connection stays.
async fn perform(stream: &mut BufReader<TcpStream>, act: Act) -> bool {
    let head = |status: u16, headers: &[(&str, String)], length: usize| {
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        format!("HTTP/1.1 {status} X\r\n{headers}content-length: {length}\r\n\r\n")
    };
    let text = match act {
        Act::Reset => {
            // Closing without lingering sends RST.
            stream.get_ref().set_zero_linger().unwrap();
            return false;
        }
        Act::Reply(status, body) => head(status, &[], body.len()) + &body,
        Act::ReplyWith(status, headers, body) => head(status, &headers, body.len()) + &body,
        Act::Half(body) => {
            let text = head(200, &[], body.len() + 100) + &body;
            let _ = stream.write_all(text.as_bytes()).await;
            return false;
        }
        Act::Endless(bytes) => {
            let head = "HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n";
            let chunk = format!("{:x}\r\n{}\r\n", 1 << 16, "x".repeat(1 << 16));
            let _ = stream.write_all(head.as_bytes()).await;
            for _ in 0..bytes >> 16 {
                if stream.write_all(chunk.as_bytes()).await.is_err() {
                    break;
                }
            }
            return false;
        }
    };
    stream.write_all(text.as_bytes()).await.is_ok() && stream.flush().await.is_ok()
}
