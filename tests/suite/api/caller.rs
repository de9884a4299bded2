//! A client that sends exactly what the test says, also what no decent client would.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::suite::support::daemon::Daemon;
use crate::suite::support::wait::{eventually, within};

/// On a machine that has other things to do.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const NDJSON: (&str, &str) = ("content-type", "application/x-ndjson");
pub(crate) const JSON: (&str, &str) = ("content-type", "application/json");

#[derive(Clone, Debug)]
pub(crate) struct Caller {
    port: u16,
    token: Option<String>,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: String,
}

impl Answer {
    #[track_caller]
    pub(crate) fn json(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.headers["content-type"], "application/json", "{self:?}");
        serde_json::from_str(&self.body).unwrap()
    }

    /// A problem document of this status and code.
    #[track_caller]
    pub(crate) fn problem(&self, status: u16, code: &str) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.headers["content-type"], "application/problem+json", "{self:?}");
        let problem: Value = serde_json::from_str(&self.body).unwrap();
        assert_eq!((&problem["status"], &problem["code"]), (&status.into(), &code.into()), "{problem}");
        assert!(problem["type"] == "about:blank" && problem["title"].is_string(), "{problem}");
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.len() > 10), "{problem}");
        problem
    }
}

impl Caller {
    pub(crate) fn of(daemon: &Daemon) -> Self {
        Self { port: daemon.config().http_port(), token: None }
    }

    pub(crate) fn with_token(&self, token: &str) -> Self {
        Self { token: Some(token.into()), ..self.clone() }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], b"").await
    }

    pub(crate) async fn post(&self, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.send("POST", path, headers, body.as_bytes()).await
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Answer {
        // On a machine that stands still for seconds a connection to the database is not made in time. A client that is
        // told so comes back.
        eventually(PATIENCE, "the database can be reached", async || {
            let mut stream = self.begin(method, path, headers, Some(body.len())).await;
            // A server that refuses may stop reading; its answer is what counts.
            let _ = stream.write_all(body).await;
            let answer = finish(stream).await;
            (!answer.body.contains("\"code\":\"unavailable\"")).then_some(answer)
        })
        .await
    }

    /// Sees to it that the API has its connections to the database, for tests whose requests cannot be repeated.
    pub(crate) async fn warm_up(&self) {
        self.get("/v1/queues").await;
        self.post("/v1/batches/4711/append", &[NDJSON], "1").await;
    }

    /// Sends the head of a request and leaves the rest to the test.
    pub(crate) async fn begin(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        length: Option<usize>,
    ) -> TcpStream {
        let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            head.push_str(&format!("host: 127.0.0.1:{}\r\n", self.port));
        }
        match length {
            Some(length) => head.push_str(&format!("content-length: {length}\r\n")),
            None => head.push_str("transfer-encoding: chunked\r\n"),
        }
        if let Some(token) = &self.token {
            head.push_str(&format!("authorization: Bearer {token}\r\n"));
        }
        headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        stream.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
        stream
    }
}

/// One piece of a chunked body.
pub(crate) async fn chunk(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(format!("{:x}\r\n", bytes.len()).as_bytes()).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream.write_all(b"\r\n").await.unwrap();
}

/// Reads the answer to its end.
pub(crate) async fn finish(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    // A reset after the answer is as good as its end.
    let _ = within(PATIENCE, stream.read_to_end(&mut bytes)).await;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("not an answer: {text:?}"));
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers: HashMap<String, String> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let body = match headers.get("transfer-encoding") {
        Some(_) => unchunked(body),
        None => body.to_owned(),
    };
    Answer { status, headers, body }
}

fn unchunked(mut text: &str) -> String {
    let mut body = String::new();
    while let Some((size, rest)) = text.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            break;
        }
        body.push_str(&rest[..size]);
        text = &rest[size + 2..];
    }
    body
}
