//! Connections to PostgreSQL: one string says where, and every failure says what to do about it.

mod error;
mod params;
mod parse_error;
mod session;
mod target;
#[cfg(test)]
mod tests;
mod tls;
mod unnamed;
mod verifier;
mod watched;
mod wire;

#[cfg(feature = "fuzzing")]
pub(crate) use unnamed::fuzzing::both_ways as fuzz_wire;

use std::num::NonZeroU32;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use deadpool_postgres::{
    ClientWrapper, Connect, Hook, HookError, Manager, ManagerConfig, Metrics, Pool, PoolError,
    RecyclingMethod, Runtime, TimeoutType,
};
use futures::future::BoxFuture;
use tokio::task::JoinHandle;
use tokio_postgres::config::{Host, SslMode as DriverMode, SslNegotiation};
use tokio_postgres::{Client, SimpleQueryMessage, Socket};
use tracing::debug;

use crate::renewed::Renewed;
pub use error::{Cause, ConnectError};
pub use parse_error::ParseError;
pub use session::{Plans, SessionSettings, milliseconds};
pub use target::Target;
pub use tls::{SslMode, TlsError};
pub use watched::{Ending, Watched, WatchedObject, WatchedPool};
use wire::{Asked, MakeWire, Purpose};

/// How long a pool may take to hand out, make or check a connection.
const POOL_TIMEOUT: Duration = Duration::from_secs(5);

/// The half of a connection that moves the bytes; LISTEN reads its messages.
pub type Connection = tokio_postgres::Connection<Socket, wire::Wire>;

impl Target {
    /// Opens a connection; the caller drives its second half. An `application_name` of the string wins.
    pub async fn connect(&self, application_name: &str) -> Result<(Client, Connection), ConnectError> {
        let (driver, tls) = self.driver(application_name)?;
        // The driver's own timeout ends with the TCP handshake; a server that then says nothing needs this one.
        match tokio::time::timeout(self.patience(), driver.connect(tls)).await {
            Ok(connected) => connected.map_err(|source| ConnectError::failed(self, source)),
            Err(_) => Err(ConnectError::timeout(self)),
        }
    }

    /// Opens a connection that drives itself: for commands that ask a few things and go.
    pub async fn open(&self, application_name: &str) -> Result<OneShot, ConnectError> {
        let (client, connection) = self.connect(application_name).await?;
        let drive = async move {
            if let Err(error) = connection.await {
                debug!(error = &error as &dyn std::error::Error, "connection to PostgreSQL ended");
            }
        };
        #[expect(clippy::disallowed_methods, reason = "ends with its client, and close() waits for it")]
        let driver = tokio::spawn(drive);
        Ok(OneShot { client, driver })
    }

    /// The same, with sessions pinned from their first moment: for connections of our own that no pooler sees. What the
    /// string itself asks for in `options` is kept.
    pub fn pinned(mut self) -> Self {
        self.pinned = true;
        if self.driver.get_options().is_none() {
            self.driver.options(
                "-c search_path=pg_catalog,pg_temp -c default_transaction_isolation=read\\ committed \
                 -c default_transaction_read_only=off -c timezone=UTC",
            );
        }
        self
    }

    /// The same, through a pooler in transaction mode: prepared statements go without their names. Costs the server the
    /// parsing of every statement, and works with no pooler too. Unix sockets stay as they are.
    pub fn unnamed(mut self) -> Self {
        self.unnamed = self.driver.get_hosts().iter().all(|host| matches!(host, Host::Tcp(_)));
        self
    }

    pub fn is_unnamed(&self) -> bool {
        self.unnamed
    }

    /// Asks the server to stop what the connection of this token is doing.
    pub async fn cancel(&self, token: &tokio_postgres::CancelToken) -> Result<(), ConnectError> {
        let (_, mut wire) = self.driver("")?;
        if let Some(translated) = &mut wire.translated {
            translated.purpose = Purpose::Cancel;
        }
        let asked = token.cancel_query(wire).await;
        asked.map_err(|source| ConnectError::failed(self, source))
    }

    /// What makes and checks the connections of a pool.
    pub fn manager(&self, application_name: &str) -> Result<Manager, ConnectError> {
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let (looked, made, name) = (self.clone(), self.clone(), application_name.to_owned());
        let dialer = Renewed::new(self.hosts(), move || looked.stamps(), move || made.driver(&name))?;
        let driver = dialer.get().0.clone();
        Ok(Manager::from_connect(driver, Dialer(dialer), recycling))
    }

    /// A pool of at most `size` connections, each pinned to `session` when it is made. Connects only when one is asked for.
    ///
    /// `session` is `None` behind a transaction pooler.
    pub fn pool(
        &self,
        size: NonZeroU32,
        application_name: &str,
        session: Option<SessionSettings>,
    ) -> Result<Pool, ConnectError> {
        let size = usize::try_from(size.get()).unwrap_or(usize::MAX);
        let mut builder = Pool::builder(self.manager(application_name)?)
            .max_size(size)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(POOL_TIMEOUT))
            .create_timeout(Some(POOL_TIMEOUT))
            .recycle_timeout(Some(POOL_TIMEOUT))
            .pre_recycle(Hook::async_fn(|client, metrics| Box::pin(refuse_read_only(client, metrics))));
        if let Some(session) = session {
            builder = builder.post_create(Hook::async_fn(move |client, _| {
                Box::pin(async move { session.apply(client).await.map_err(HookError::Backend) })
            }));
        }
        builder.build().map_err(|source| ConnectError::Pool { source })
    }

    /// What a pool of this target failed of, in the words of `connect`.
    pub fn explain(&self, error: PoolError) -> ConnectError {
        match error {
            PoolError::Backend(source) | PoolError::PostCreateHook(HookError::Backend(source)) => {
                ConnectError::failed(self, source)
            }
            PoolError::Timeout(TimeoutType::Wait) => ConnectError::exhausted(self),
            PoolError::Timeout(_) => ConnectError::timeout(self),
            source => ConnectError::PoolClosed { source },
        }
    }

    /// What connects: the driver's own settings, and what makes its streams.
    fn driver(&self, application_name: &str) -> Result<(tokio_postgres::Config, MakeWire), TlsError> {
        let Self { mut driver, tls, unnamed, .. } = self.renewed();
        if driver.get_application_name().is_none() {
            driver.application_name(application_name);
        }
        let mut wire = MakeWire { tls: tls.connector()?, translated: None };
        if unnamed {
            let (mode, negotiation) = (driver.get_ssl_mode(), driver.get_ssl_negotiation());
            wire.translated = Some(Asked { mode, negotiation, purpose: Purpose::Session });
            // The driver then leaves everything from the first byte on to the connector.
            driver.ssl_mode(DriverMode::Require).ssl_negotiation(SslNegotiation::Direct);
        }
        Ok((driver, wire))
    }

    /// Each host has its time, and the handshake of the one that answers has as much again.
    fn patience(&self) -> Duration {
        let each = self.driver.get_connect_timeout().copied().unwrap_or(POOL_TIMEOUT);
        let hosts = u32::try_from(self.driver.get_hosts().len()).unwrap_or(u32::MAX);
        each.saturating_mul(hosts.saturating_add(1))
    }
}

/// A pooled session is asked whether it can write when it comes back after so many uses, or after so long.
const USES: usize = 16;
const IDLE: Duration = Duration::from_secs(30);

/// Behind one address there may be another server now, on which nothing can be written: such a session is not handed out again.
async fn refuse_read_only(client: &mut ClientWrapper, metrics: &Metrics) -> Result<(), HookError> {
    if !metrics.recycle_count.is_multiple_of(USES) && metrics.last_used() < IDLE {
        return Ok(());
    }
    let answer = client.simple_query("SHOW transaction_read_only").await.map_err(HookError::Backend)?;
    let is_read_only = answer.iter().any(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0) == Some("on"),
        _ => false,
    });
    if is_read_only { Err(HookError::message("the session is read-only")) } else { Ok(()) }
}

/// Makes the connections of a pool, each with the password and the certificates of its time.
struct Dialer(Renewed<(tokio_postgres::Config, MakeWire)>);

impl Connect for Dialer {
    fn connect(
        &self,
        _: &tokio_postgres::Config,
    ) -> BoxFuture<'_, Result<(Client, JoinHandle<()>), tokio_postgres::Error>> {
        let now = self.0.get();
        let (driver, tls) = (now.0.clone(), now.1.clone());
        Box::pin(async move {
            let (client, connection) = driver.connect(tls).await?;
            let drive = async move {
                if let Err(error) = connection.await {
                    debug!(error = &error as &dyn std::error::Error, "connection to PostgreSQL ended");
                }
            };
            #[expect(clippy::disallowed_methods, reason = "ends with its client, which the pool keeps")]
            let driving = tokio::spawn(drive);
            Ok((client, driving))
        })
    }
}

/// A client whose connection is driven in the background for as long as it lives.
#[derive(Debug)]
pub struct OneShot {
    client: Client,
    driver: JoinHandle<()>,
}

impl OneShot {
    /// Says goodbye to the server and waits until it is said.
    pub async fn close(self) {
        drop(self.client);
        if let Err(error) = self.driver.await {
            debug!(error = &error as &dyn std::error::Error, "the connection's driver did not end by itself");
        }
    }
}

impl Deref for OneShot {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl DerefMut for OneShot {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}
