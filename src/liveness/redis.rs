//! The only door to Redis. Every call has a limit of ours; nothing in Redis is the truth.

use crate::{liveness::RedisConfig, queue, secret::Secret, store::batches::Progress};
use fred::{
    clients::Client,
    interfaces::ClientLike,
    prelude::{Builder, Config, ErrorKind, ReconnectPolicy, ServerConfig},
    types::config::{CredentialProvider, Server, UnresponsiveConfig},
};
use std::{pin::Pin, sync::Arc, time::Duration};
use tokio::sync::OnceCell;

/// The longest any one call may take, whatever the client believes.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum RedisError {
    #[error(
        "is not a Redis URL ({reason}): write redis://host:6379, rediss:// for TLS, redis-cluster:// or redis-sentinel://"
    )]
    Url { reason: String },
    #[error("Redis at {server} cannot be reached: {reason}")]
    Unreachable { server: String, reason: String },
    #[error("Redis at {server} refused the user or password: {reason}")]
    Denied { server: String, reason: String },
    #[error("Redis at {server} asks for a password and there is none")]
    NoPassword { server: String },
    #[error("Redis at {server} did not answer within {} s", CALL_LIMIT.as_secs())]
    Silent { server: String },
    #[error("Redis at {server} refused {operation}: {reason}")]
    Refused { server: String, operation: &'static str, reason: String },
}

impl RedisError {
    /// What a person can do about it.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::Url { .. } => "fix redis.url",
            Self::Unreachable { .. } | Self::Silent { .. } => {
                "start Redis or fix redis.url; or leave redis.url out to do without"
            }
            Self::NoPassword { .. } => {
                "add the password: redis://:password@host, or redis://user:password@host"
            }
            Self::Denied { .. } => "fix the user and password in redis.url (or its url_file)",
            Self::Refused { .. } => "check the rights (ACL) of this Redis user and the server's log",
        }
    }
}

/// A URL as fred understands it.
pub fn parse(url: &Secret) -> Result<Config, RedisError> {
    let scheme = url.expose().split_once("://").map_or("", |(scheme, _)| scheme);
    let plain = scheme.trim_end_matches("-cluster").trim_end_matches("-sentinel");
    if !["redis", "rediss", "valkey", "valkeys"].contains(&plain) {
        let reason = "it must begin with redis://, rediss://, redis-cluster:// or redis-sentinel://";
        return Err(RedisError::Url { reason: reason.into() });
    }
    let mut config = Config::from_url(url.expose())
        .map_err(|error| RedisError::Url { reason: error.details().to_owned() })?;
    if url.file().is_some() {
        config.credential_provider = Some(Arc::new(Credentials(url.clone())));
    }
    Ok(config)
}

/// The user and password of a URL that came from a file, read again for every connection.
#[derive(Debug)]
struct Credentials(Secret);

type Fetched = Result<(Option<String>, Option<String>), fred::error::Error>;

impl Credentials {
    fn fetch_now(&self) -> Fetched {
        let unusable = |reason: String| fred::error::Error::new(ErrorKind::Auth, reason);
        let url = self.0.current().map_err(|error| unusable(format!("the file of redis.url: {error}")))?;
        Config::from_url(url.expose()).map(|config| (config.username, config.password))
    }
}

impl CredentialProvider for Credentials {
    fn fetch<'s, 'o, 'f>(
        &'s self,
        _: Option<&'o Server>,
    ) -> Pin<Box<dyn Future<Output = Fetched> + Send + 'f>>
    where
        's: 'f,
        'o: 'f,
        Self: 'f,
    {
        Box::pin(std::future::ready(self.fetch_now()))
    }
}

/// Host and port without user or password, for people.
pub fn server_name(config: &Config) -> String {
    match &config.server {
        ServerConfig::Centralized { server } => server.to_string(),
        ServerConfig::Clustered { hosts, .. } | ServerConfig::Sentinel { hosts, .. } => {
            hosts.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
        }
        #[expect(unreachable_patterns, reason = "fred adds a variant with its unix-socket feature")]
        _ => "redis".to_owned(),
    }
}

/// One connection tried once, for `musterd doctor`: what is there, or why not.
pub async fn probe(config: &RedisConfig) -> Result<String, RedisError> {
    let has_password = parse(&config.url())?.password.is_some();
    let (server, client) = brief_client(config)?;
    let answer = tokio::time::timeout(CALL_LIMIT * 2, first_words(&client)).await;
    // Best effort: the probe is over whatever the farewell says.
    let _ = tokio::time::timeout(Duration::from_secs(1), client.quit()).await;
    match answer {
        Err(_) => Err(RedisError::Silent { server }),
        Ok(Err(error)) if *error.kind() == ErrorKind::Auth && !has_password => {
            Err(RedisError::NoPassword { server })
        }
        Ok(Err(error)) => Err(classify(server, &error)),
        Ok(Ok(version)) => Ok(format!("{version} at {server}")),
    }
}

/// A client that tries once, with the name of its server.
fn brief_client(config: &RedisConfig) -> Result<(String, Client), RedisError> {
    let parsed = parse(&config.url())?;
    let server = server_name(&parsed);
    let client = Builder::from_config(Config { fail_fast: true, ..parsed })
        .with_connection_config(|connection| {
            connection.connection_timeout = CALL_LIMIT;
            connection.internal_command_timeout = CALL_LIMIT;
            connection.max_command_attempts = 1;
            connection.unresponsive =
                UnresponsiveConfig { max_timeout: Some(CALL_LIMIT), interval: Duration::from_secs(1) };
        })
        .with_performance_config(|performance| performance.default_command_timeout = CALL_LIMIT)
        // One try is enough to tell what is wrong.
        .set_policy(ReconnectPolicy::new_constant(1, 50))
        .build()
        .map_err(|error| RedisError::Url { reason: error.details().to_owned() })?;
    Ok((server, client))
}

async fn first_words(client: &Client) -> Result<String, fred::error::Error> {
    client.init().await?;
    client.ping::<String>(None).await?;
    let info: String = client.info(Some(fred::types::InfoKind::Server)).await?;
    Ok(product(&info))
}

/// Valkey, too, has a `redis_version`: that of the Redis it stands in for.
fn product(info: &str) -> String {
    let said = |key: &str| info.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    match said("valkey_version:") {
        Some(version) => format!("Valkey {version}"),
        None => format!("Redis {}", said("redis_version:").unwrap_or("unknown")),
    }
}

/// The system's errors come as the code that made them; their message is what a person can read.
fn in_words(details: &str) -> String {
    let message = details.split_once("message: \"").and_then(|(_, rest)| rest.split_once('"'));
    message.map_or(details, |(message, _)| message).to_owned()
}

fn classify(server: String, error: &fred::error::Error) -> RedisError {
    let reason = in_words(error.details());
    match error.kind() {
        ErrorKind::Auth => RedisError::Denied { server, reason },
        ErrorKind::IO | ErrorKind::Timeout | ErrorKind::Tls | ErrorKind::Canceled => {
            RedisError::Unreachable { server, reason }
        }
        _ => RedisError::Refused { server, operation: "PING", reason },
    }
}

/// A client for as long as the daemon lives: it never gives up, keeps little, and sends nothing twice.
pub(super) fn client(config: &RedisConfig) -> Result<Client, RedisError> {
    // Without this a server that is away at the start would stay away for ever.
    let parsed = Config { fail_fast: false, ..parse(&config.url())? };
    Builder::from_config(parsed)
        .with_connection_config(|connection| {
            connection.connection_timeout = CALL_LIMIT;
            connection.internal_command_timeout = CALL_LIMIT;
            connection.max_command_attempts = 1;
            connection.max_command_buffer_len = 1_000;
            // A server that stopped answering is left and looked for again.
            connection.unresponsive =
                UnresponsiveConfig { max_timeout: Some(CALL_LIMIT * 2), interval: Duration::from_secs(1) };
        })
        .with_performance_config(|performance| performance.default_command_timeout = CALL_LIMIT)
        .set_policy(ReconnectPolicy::new_exponential(0, 100, 5_000, 2))
        .build()
        .map_err(|error| RedisError::Url { reason: error.details().to_owned() })
}

/// The status of batches at their end, for those who would rather ask Redis. A courtesy: PostgreSQL is the truth.
#[derive(Clone, Debug)]
pub struct StatusCache {
    client: Client,
    prefix: String,
    /// Set when the first connection was there, or was waited for long enough.
    begun: Arc<OnceCell<()>>,
}

/// How long a status stays in the cache.
const STATUS_LIFE_SECONDS: i64 = 24 * 60 * 60;

impl StatusCache {
    /// Writes through a client that another part keeps connected.
    pub fn new(client: Client, prefix: &str) -> Self {
        Self { client, prefix: prefix.to_owned(), begun: Arc::default() }
    }

    /// Writes `PREFIX_{batch:ID}_STATUS`; what goes wrong is said in the log and forgotten.
    pub async fn put(&self, progress: &Progress) {
        use fred::interfaces::KeysInterface;
        // A batch may end before a worker that has just started has reached Redis. Later nothing waits for it.
        self.begun
            .get_or_init(|| async {
                let _ = tokio::time::timeout(CALL_LIMIT, self.client.wait_for_connect()).await;
            })
            .await;
        if !self.client.is_connected() {
            return;
        }
        let key = status_key(&self.prefix, progress.id);
        let Ok(value) = serde_json::to_string(progress) else { return };
        let life = Some(fred::types::Expiration::EX(STATUS_LIFE_SECONDS));
        let write = self.client.set::<(), _, _>(key, value, life, None, false);
        match tokio::time::timeout(CALL_LIMIT, write).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(
                    batch = progress.id,
                    error = error.details(),
                    "the status cache was not written"
                );
            }
            Err(_) => tracing::warn!(batch = progress.id, "the status cache did not answer"),
        }
    }
}

fn status_key(prefix: &str, batch: i64) -> String {
    format!("{prefix}_{{batch:{batch}}}_STATUS")
}

/// A status as the cache has it.
#[derive(Debug)]
pub struct Cached {
    pub progress: Progress,
    /// Time since it was written.
    pub age: Duration,
}

/// What the cache says of a batch, asked once over a connection of its own. `None`: nothing, or nothing that a worker has written.
pub async fn cached_status(config: &RedisConfig, batch: i64) -> Result<Option<Cached>, RedisError> {
    use fred::interfaces::KeysInterface;
    let (server, client) = brief_client(config)?;
    let key = status_key(&config.key_prefix, batch);
    let ask = async {
        client.init().await?;
        let text: Option<String> = client.get(&key).await?;
        let left: i64 = client.ttl(&key).await?;
        Ok::<_, fred::error::Error>((text, left))
    };
    let answer = tokio::time::timeout(CALL_LIMIT * 2, ask).await;
    // Best effort: nothing more is asked.
    let _ = tokio::time::timeout(Duration::from_secs(1), client.quit()).await;
    match answer {
        Err(_) => Err(RedisError::Silent { server }),
        // Another type stands there.
        Ok(Err(error)) if error.details().starts_with("WRONGTYPE") => Ok(None),
        Ok(Err(error)) => Err(classify(server, &error)),
        Ok(Ok((text, left))) => Ok(text.and_then(|text| believe(&text, batch, left))),
    }
}

/// Any client of Redis may have written it.
fn believe(text: &str, batch: i64, left: i64) -> Option<Cached> {
    let progress: Progress = serde_json::from_str(text).ok()?;
    let is_over = progress.state.is_final();
    let names = [&progress.command, &progress.queue];
    let ours = progress.id == batch && is_over && names.iter().all(|name| queue::is_valid_name(name));
    let age = STATUS_LIFE_SECONDS.checked_sub(left).and_then(|age| u64::try_from(age).ok());
    ours.then_some(())?;
    Some(Cached { progress, age: Duration::from_secs(age.filter(|_| left >= 0)?) })
}
