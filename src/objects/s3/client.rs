//! One request to S3: rust-s3 names and signs it, our own HTTP client sends it, a refusal becomes an [`ObjectError`].
//!
//! rust-s3's client knows neither a private authority nor a limit on silence (its timeout covers a whole download),
//! and it may repeat a request; so only its commands and its signatures are used.

use std::error::Error;
use std::fmt;
use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use reqwest::{Certificate, Method, Response, redirect};
use s3::command::{Command, HttpMethod};
use s3::creds::Credentials;
use s3::error::S3Error;
use s3::request::Request as _;
use s3::request::tokio_backend::ReqwestRequest;
use s3::{Bucket, Region};

use super::refusal::Refusal;
use crate::objects::config::S3Config;
use crate::objects::error::{ObjectError, Op};

/// A server that does not take a connection in this time will not take it later either.
const CONNECT: Duration = Duration::from_secs(10);

/// What is read into memory: an answer (a manifest is the largest), and the reason of a refusal.
const LARGEST_ANSWER: usize = 64 << 20;
const LARGEST_REFUSAL: usize = 64 << 10;

/// Putting the parts of an upload together may take the server this many times as long as any other answer.
const ASSEMBLY: u32 = 10;

pub(super) struct Client {
    bucket: Box<Bucket>,
    http: Limited,
    assembly: Limited,
    endpoint: String,
}

/// A client and how long it bears silence: a limit that cannot be set for one request.
struct Limited {
    http: reqwest::Client,
    silence: Duration,
}

impl Client {
    pub(super) fn new(config: &S3Config, credentials: Credentials) -> Result<Self, ObjectError> {
        let region = region(config);
        let endpoint = format!("{}://{}", region.scheme(), region.host());
        let mut bucket = Bucket::new(&config.bucket, region, credentials)
            .map_err(|error| ObjectError::config("outputs.s3", error))?;
        if config.path_style() {
            bucket.set_path_style();
        }
        let http = Limited::new(config, config.timeout)?;
        let assembly = Limited::new(config, config.timeout * ASSEMBLY)?;
        Ok(Self { bucket, http, assembly, endpoint })
    }

    pub(super) fn location(&self, path: &str) -> String {
        format!("s3://{}/{path}", self.bucket.name)
    }

    /// Sends a command and returns its answer once it has begun; a refusal is an error.
    pub(super) async fn send(
        &self,
        op: Op,
        path: &str,
        command: Command<'_>,
        body: Bytes,
    ) -> Result<Response, ObjectError> {
        let at = self.location(path);
        let client = match &command {
            Command::CompleteMultipartUpload { .. } => &self.assembly,
            _ => &self.http,
        };
        let request = self.sign(path, command, body).await.map_err(|error| ObjectError::Io {
            op,
            at: at.clone(),
            source: io::Error::other(error),
        })?;
        let executed = client.http.execute(request).await;
        let response = executed.map_err(|error| self.broken(op, &at, &error, client.silence))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status().as_u16();
        let body = self.whole(op, &at, response, LARGEST_REFUSAL, client.silence).await?;
        Err(self.refused(op, path, status, Refusal::read(&body)))
    }

    /// Sends a command and returns the whole of its answer.
    pub(super) async fn call(
        &self,
        op: Op,
        path: &str,
        command: Command<'_>,
        body: Bytes,
    ) -> Result<Bytes, ObjectError> {
        let response = self.send(op, path, command, body).await?;
        self.whole(op, &self.location(path), response, LARGEST_ANSWER, self.http.silence).await
    }

    /// The body of an answer. One of more than `most` bytes is none of S3's: what follows is not read.
    async fn whole(
        &self,
        op: Op,
        at: &str,
        mut response: Response,
        most: usize,
        silence: Duration,
    ) -> Result<Bytes, ObjectError> {
        let mut body = BytesMut::new();
        while let Some(piece) =
            response.chunk().await.map_err(|error| self.broken(op, at, &error, silence))?
        {
            if body.len() + piece.len() > most {
                let source = io::Error::other(format!("the answer has more than {most} bytes"));
                return Err(ObjectError::Io { op, at: at.to_owned(), source });
            }
            body.extend_from_slice(&piece);
        }
        Ok(body.freeze())
    }

    async fn sign(&self, path: &str, command: Command<'_>, body: Bytes) -> Result<reqwest::Request, S3Error> {
        let method = match command.http_verb() {
            HttpMethod::Get => Method::GET,
            HttpMethod::Head => Method::HEAD,
            HttpMethod::Put => Method::PUT,
            HttpMethod::Post => Method::POST,
            HttpMethod::Delete => Method::DELETE,
        };
        let signed = ReqwestRequest::new(&self.bucket, path, command).await?;
        let mut request = reqwest::Request::new(method, signed.url()?);
        *request.headers_mut() = signed.headers().await?;
        *request.body_mut() = Some(body.into());
        Ok(request)
    }

    /// The error of a server that answered.
    pub(super) fn refused(&self, op: Op, path: &str, status: u16, refusal: Refusal) -> ObjectError {
        refusal.into_error(op, self.location(path), status, &self.bucket.name, &self.endpoint)
    }

    /// The error of a server that did not answer, or not to the end.
    fn broken(&self, op: Op, at: &str, error: &reqwest::Error, silence: Duration) -> ObjectError {
        let (at, endpoint) = (at.to_owned(), self.endpoint.clone());
        if let Some(cause) = bad_certificate(error) {
            return ObjectError::Untrusted { op, at, endpoint, cause };
        }
        // A connection that is not accepted is distinguished from an answer that does not come.
        if error.is_timeout() && !error.is_connect() {
            return ObjectError::Timeout { op, at, after: silence };
        }
        ObjectError::Unreachable { op, at, endpoint, cause: root_cause(error) }
    }
}

impl fmt::Debug for Client {
    /// Without the bucket's value, which holds the credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bucket, endpoint, .. } = self;
        let mut shown = f.debug_struct("Client");
        shown.field("endpoint", endpoint).field("bucket", &bucket.name).field("silence", &self.http.silence);
        shown.finish_non_exhaustive()
    }
}

/// The region to sign for and the address to send to.
fn region(config: &S3Config) -> Region {
    let (name, endpoint) =
        (config.region.trim().to_owned(), config.endpoint.trim_end_matches('/').to_owned());
    if !endpoint.is_empty() {
        return Region::Custom { region: name, endpoint };
    }
    match name.parse() {
        Ok(Region::Custom { .. }) | Err(_) => {
            // Younger than rust-s3's list: all but the Chinese ones follow this form.
            let endpoint = format!("https://s3.{name}.amazonaws.com");
            Region::Custom { region: name, endpoint }
        }
        Ok(known) => known,
    }
}

impl Limited {
    fn new(config: &S3Config, silence: Duration) -> Result<Self, ObjectError> {
        http_client(config, silence).map(|http| Self { http, silence })
    }
}

fn http_client(config: &S3Config, silence: Duration) -> Result<reqwest::Client, ObjectError> {
    let mut builder = reqwest::Client::builder()
        .connect_timeout(CONNECT.min(config.timeout))
        // Runs from the request to the first byte of its answer and starts again with each piece read: it bounds a
        // part's upload and a download's silence, not the length of a download.
        .read_timeout(silence)
        // A redirect would go to another host with a signature made for this one; it means a wrong region.
        .redirect(redirect::Policy::none());
    for authority in authorities(config)? {
        builder = builder.add_root_certificate(authority);
    }
    builder.build().map_err(|error| ObjectError::config("outputs.s3", root_cause(&error)))
}

fn authorities(config: &S3Config) -> Result<Vec<Certificate>, ObjectError> {
    let key = "outputs.s3.ca_file";
    let path = config.ca_file.display();
    if config.ca_file.as_os_str().is_empty() {
        return Ok(Vec::new());
    }
    let pem = std::fs::read(&config.ca_file)
        .map_err(|error| ObjectError::config(key, format!("{path} cannot be read: {error}")))?;
    match Certificate::from_pem_bundle(&pem) {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(ObjectError::config(key, format!("{path} holds no certificate in PEM form"))),
    }
}

fn chain(error: &reqwest::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(Some(error as &(dyn Error + 'static)), |&error| error.source())
}

/// The innermost error: the outer ones say only that a request failed.
fn root_cause(error: &reqwest::Error) -> String {
    chain(error).last().map_or_else(String::new, ToString::to_string)
}

/// Why the server's certificate was refused, if that is what went wrong.
fn bad_certificate(error: &reqwest::Error) -> Option<String> {
    let tls = chain(error).filter_map(|error| error.downcast_ref::<io::Error>()).find_map(tls_error);
    match tls? {
        rustls::Error::InvalidCertificate(why) => Some(why.to_string()),
        _ => None,
    }
}

/// The TLS error that an I/O error wraps. Its `source` would skip it: that is what lies below what it wraps.
fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    let wrapped = error.get_ref()?;
    wrapped.downcast_ref().or_else(|| wrapped.downcast_ref().and_then(tls_error))
}
