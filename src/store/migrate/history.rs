//! What was applied, side by side with what the binary knows.

use std::collections::BTreeMap;

use jiff::Timestamp;
use refinery::Migration;
use serde::Serialize;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Row};

use super::MigrateError;

/// Where refinery writes what it did.
pub(super) const TABLE: &str = "musterd.schema_history";

/// One migration, as the binary and the database see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MigrationStatus {
    pub version: i32,
    pub name: String,
    pub applied_on: Option<Timestamp>,
    pub state: MigrationState,
}

/// How binary and database agree about a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MigrationState {
    /// In both, the same.
    Applied,
    /// In the binary alone: `migrate` applies it.
    Pending,
    /// In the database alone: a newer musterd applied it.
    Unknown,
    /// In both, with different contents.
    Changed,
}

impl MigrationState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Pending => "pending",
            Self::Unknown => "unknown",
            Self::Changed => "changed",
        }
    }
}

/// All migrations taken together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Current { version: i32 },
    Missing { binary: i32 },
    Behind { database: i32, binary: i32 },
    Newer { database: i32, binary: i32 },
    Changed { version: i32, name: String },
}

/// A line of the history table.
pub(super) struct Entry {
    version: i32,
    name: String,
    applied_on: Timestamp,
    checksum: u64,
}

/// Reads the history, if there is one, and compares.
pub(super) async fn read(client: &Client, known: &[Migration]) -> Result<Vec<MigrationStatus>, MigrateError> {
    let failed = |source| MigrateError::History { source };
    let exists = client
        .query_typed(
            "SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname = 'musterd' AND c.relname = 'schema_history'",
            &[],
        )
        .await
        .map_err(failed)?;
    let entries = match exists.is_empty() {
        true => Vec::new(),
        false => client
            .query_typed(
                "SELECT version, name, applied_on, checksum FROM musterd.schema_history ORDER BY version",
                &[],
            )
            .await
            .map_err(failed)?,
    };
    let entries = entries.iter().map(Entry::read).collect::<Result<Vec<_>, _>>()?;
    Ok(compare(known, entries))
}

/// The oldest binary that the schema serves; nothing when it does not say, which is from before it could.
pub(super) async fn oldest(client: &Client) -> Result<Option<i32>, MigrateError> {
    let rows = client.query_typed("SELECT oldest FROM musterd.schema_compat", &[]).await;
    match rows {
        Ok(rows) => Ok(rows.first().map(|row| row.get(0))),
        Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => Ok(None),
        Err(source) => Err(MigrateError::History { source }),
    }
}

impl Entry {
    /// refinery keeps time and checksum as text.
    fn read(row: &Row) -> Result<Self, MigrateError> {
        let version: i32 = row.get(0);
        let garbled = || MigrateError::Garbled { version };
        let text = |column| row.get::<_, Option<&str>>(column).ok_or_else(garbled);
        Ok(Self {
            version,
            name: text(1)?.to_string(),
            applied_on: text(2)?.parse().map_err(|_| garbled())?,
            checksum: text(3)?.parse().map_err(|_| garbled())?,
        })
    }
}

pub(super) fn compare(known: &[Migration], applied: Vec<Entry>) -> Vec<MigrationStatus> {
    let mut all: BTreeMap<i32, MigrationStatus> = known
        .iter()
        .map(|migration| {
            let (version, name) = (migration.version(), migration.name().to_string());
            let state = MigrationState::Pending;
            (version, MigrationStatus { version, name, applied_on: None, state })
        })
        .collect();
    for Entry { version, name, applied_on, checksum } in applied {
        let state = match known.iter().find(|migration| migration.version() == version) {
            None => MigrationState::Unknown,
            Some(same) if same.checksum() == checksum && same.name() == name => MigrationState::Applied,
            Some(_) => MigrationState::Changed,
        };
        all.insert(version, MigrationStatus { version, name, applied_on: Some(applied_on), state });
    }
    all.into_values().collect()
}

pub(super) fn judge(all: &[MigrationStatus]) -> Verdict {
    let is = |state| move |status: &&MigrationStatus| status.state == state;
    let database = all.iter().filter(|status| status.applied_on.is_some()).map(|status| status.version).max();
    let known = all.iter().filter(|status| status.state != MigrationState::Unknown);
    let binary = known.map(|status| status.version).max().unwrap_or(0);
    let Some(database) = database else { return Verdict::Missing { binary } };
    // Newer first: a newer musterd may have good reasons for what looks changed from here.
    if all.iter().any(|status| is(MigrationState::Unknown)(&status)) {
        return Verdict::Newer { database, binary };
    }
    if let Some(changed) = all.iter().find(is(MigrationState::Changed)) {
        return Verdict::Changed { version: changed.version, name: changed.name.clone() };
    }
    match all.iter().any(|status| is(MigrationState::Pending)(&status)) {
        true => Verdict::Behind { database, binary },
        false => Verdict::Current { version: database },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(versions: &[i32]) -> Vec<Migration> {
        let file = |version| Migration::unapplied(&format!("V{version}__step"), "SELECT 1").unwrap();
        versions.iter().map(file).collect()
    }

    fn entry(version: i32) -> Entry {
        let checksum = known(&[version])[0].checksum();
        Entry { version, name: "step".to_string(), applied_on: Timestamp::UNIX_EPOCH, checksum }
    }

    fn verdict(binary: &[i32], database: Vec<Entry>) -> Verdict {
        judge(&compare(&known(binary), database))
    }

    #[test]
    fn every_pair_of_binary_and_database_has_its_verdict() {
        assert_eq!(verdict(&[1, 2], vec![]), Verdict::Missing { binary: 2 });
        assert_eq!(verdict(&[1, 2], vec![entry(1)]), Verdict::Behind { database: 1, binary: 2 });
        assert_eq!(verdict(&[1, 2], vec![entry(1), entry(2)]), Verdict::Current { version: 2 });
        let newer = vec![entry(1), entry(2), entry(7)];
        assert_eq!(verdict(&[1, 2], newer), Verdict::Newer { database: 7, binary: 2 });
    }

    #[test]
    fn other_contents_or_another_name_is_a_change() {
        for changed in [Entry { checksum: 1, ..entry(1) }, Entry { name: "other".to_string(), ..entry(1) }] {
            let name = changed.name.clone();
            assert_eq!(verdict(&[1, 2], vec![changed]), Verdict::Changed { version: 1, name });
        }
    }

    #[test]
    fn versions_are_listed_in_order_whichever_side_knows_them() {
        let all = compare(&known(&[10, 2, 1]), vec![entry(1), entry(11)]);
        let seen: Vec<_> = all.iter().map(|status| (status.version, status.state)).collect();
        use MigrationState::{Applied, Pending, Unknown};
        assert_eq!(seen, [(1, Applied), (2, Pending), (10, Pending), (11, Unknown)]);
    }
}
