//! The states of work and of workers: one word each, the same in the database, in answers and on the screen.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{error::Error, fmt, str::FromStr};
use tokio_postgres::types::{FromSql, Type};

macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[$own:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$own])* $variant,)+
        }

        impl $name {
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok(Self::$variant),)+
                    _ => Err(format!("{text:?} is none of {}", [$($word),+].join(", "))),
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }

        /// Read from `text`: the statements cast.
        impl<'a> FromSql<'a> for $name {
            fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
                Ok(std::str::from_utf8(raw)?.parse()?)
            }

            fn accepts(ty: &Type) -> bool {
                matches!(*ty, Type::TEXT)
            }
        }
    };
}

words! {
    /// `musterd.state`, of tasks, batches and rows.
    State {
        Held = "held",
        /// Not due yet, or waiting for a retry.
        Scheduled = "scheduled",
        Queued = "queued",
        Running = "running",
        /// A parent whose handler has returned and whose children have not all ended.
        Waiting = "waiting",
        Succeeded = "succeeded",
        Failed = "failed",
        Aborted = "aborted",
    }
}

words! {
    /// What `musterd.workers` says of a worker.
    WorkerState {
        Alive = "alive",
        /// It finishes what it holds and claims nothing.
        Draining = "draining",
        Stopped = "stopped",
        Dead = "dead",
    }
}

impl State {
    /// Nothing happens to it any more, unless an operator lets it run again.
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Aborted)
    }
}

impl WorkerState {
    pub const fn is_alive(self) -> bool {
        matches!(self, Self::Alive | Self::Draining)
    }
}
