//! A fresh database for every test, copied from one that was migrated once.

use std::sync::{LazyLock, Mutex, mpsc};

use tokio::sync::OnceCell;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, NoTls};

use super::{audit, mutants, run, services};

const TEMPLATE: &str = "musterd_template";

/// A migrated database that no other test sees; dropped with this value.
#[derive(Debug)]
pub(crate) struct TestDb {
    name: String,
    url: String,
    connections: Mutex<Vec<JoinHandle<()>>>,
}

impl TestDb {
    /// A copy of the migrated template.
    pub(crate) async fn new() -> Self {
        static MIGRATED: OnceCell<()> = OnceCell::const_new();
        MIGRATED.get_or_init(make_template).await;
        Self::create(&format!("TEMPLATE {TEMPLATE}")).await
    }

    /// A database with nothing in it, for tests of the migration itself.
    pub(crate) async fn empty() -> Self {
        Self::create("TEMPLATE template0").await
    }

    async fn create(how: &str) -> Self {
        let name = run::unique("test");
        let (admin, connection) = connect(services::postgres().url()).await;
        admin.batch_execute(&format!("CREATE DATABASE \"{name}\" {how}")).await.unwrap();
        connection.abort();
        let url = url_of(&name);
        Self { name, url, connections: Mutex::default() }
    }

    /// How to connect, as the owner.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Makes a user of its own with the rights of `role` and nothing else; how to connect as it.
    pub(crate) async fn login(&self, role: &str) -> Login {
        let name = run::unique("user");
        let make = format!("CREATE ROLE \"{name}\" LOGIN PASSWORD 'secret' IN ROLE {role}");
        self.client().await.batch_execute(&make).await.unwrap();
        let mut url = url::Url::parse(&self.url).unwrap();
        url.set_username(&name).unwrap();
        url.set_password(Some("secret")).unwrap();
        Login { name, url: url.into() }
    }

    /// A new connection; it lives as long as the client and this database do.
    pub(crate) async fn client(&self) -> Client {
        let (client, connection) = connect(&self.url).await;
        self.connections.lock().unwrap().push(connection);
        client
    }
}

/// A user of the server; it stays until the end of the run.
#[derive(Debug)]
pub(crate) struct Login {
    pub(crate) name: String,
    pub(crate) url: String,
}

impl Drop for TestDb {
    fn drop(&mut self) {
        for connection in self.connections.lock().unwrap().drain(..) {
            connection.abort();
        }
        drop_later(std::mem::take(&mut self.name));
    }
}

/// Connects, with the task that serves the connection.
pub(crate) async fn connect(url: &str) -> (Client, JoinHandle<()>) {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    #[expect(clippy::disallowed_methods, reason = "the handle is kept beside the client")]
    let connection = tokio::spawn(async move {
        // The test may end the connection, or the server itself; the client's next call says so.
        let _ = connection.await;
    });
    (client, connection)
}

fn url_of(database: &str) -> String {
    let (server, _) = services::postgres().url().rsplit_once('/').unwrap();
    format!("{server}/{database}")
}

async fn make_template() {
    let (admin, connection) = connect(services::postgres().url()).await;
    // An earlier try may have been cut off by its test's deadline.
    let fresh = format!("DROP DATABASE IF EXISTS {TEMPLATE} WITH (FORCE)");
    admin.batch_execute(&fresh).await.unwrap();
    admin.batch_execute(&format!("CREATE DATABASE {TEMPLATE}")).await.unwrap();
    migrate(&url_of(TEMPLATE)).await;
    connection.abort();
}

/// Brings a database to the schema of this source tree, with the guard that every test has.
async fn migrate(url: &str) {
    let (mut client, connection) = connect(url).await;
    musterd::store::migrate::migrate(&mut client).await.unwrap();
    audit::guard(&client).await;
    mutants::apply(&client).await;
    // Gone before anybody copies the database, which needs it to itself.
    drop(client);
    connection.await.unwrap();
}

/// Drops a database from a thread of its own: the test's runtime may be gone by now.
fn drop_later(name: String) {
    static DROPPER: LazyLock<mpsc::Sender<String>> = LazyLock::new(|| {
        let (sender, names) = mpsc::channel::<String>();
        std::thread::Builder::new().name("dropper".into()).spawn(move || drop_databases(names)).unwrap();
        sender
    });
    // Without the thread the database stays until the end of the run.
    let _ = DROPPER.send(name);
}

fn drop_databases(names: mpsc::Receiver<String>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for name in names {
        runtime.block_on(async {
            if let Ok((admin, connection)) = tokio_postgres::connect(services::postgres().url(), NoTls).await
            {
                let drop = format!("DROP DATABASE IF EXISTS \"{name}\" WITH (FORCE)");
                // A server that is ending takes its databases along.
                tokio::select! { _ = admin.batch_execute(&drop) => {}, _ = connection => {} }
            }
        });
    }
}
