//! The engines and their settings, explained in `docs/benchmarks/journal.md`.

mod fjall;
mod foyer;
mod journal;
mod leveldb;
mod lmdb;
mod redb;
mod rocksdb;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::engine::{Engine, Result};

pub use journal::remove_hints;

/// An engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Name {
    Journal,
    Rocksdb,
    Leveldb,
    Fjall,
    Redb,
    Lmdb,
    Foyer,
}

pub const ALL: [Name; 7] =
    [Name::Journal, Name::Rocksdb, Name::Leveldb, Name::Fjall, Name::Redb, Name::Lmdb, Name::Foyer];

impl Name {
    pub fn text(self) -> &'static str {
        match self {
            Self::Journal => "journal",
            Self::Rocksdb => "RocksDB",
            Self::Leveldb => "LevelDB",
            Self::Fjall => "fjall",
            Self::Redb => "redb",
            Self::Lmdb => "LMDB",
            Self::Foyer => "foyer",
        }
    }

    pub fn has_transactions(self) -> bool {
        match self {
            Self::Journal => journal::Journal::HAS_TRANSACTIONS,
            Self::Rocksdb => rocksdb::RocksDb::HAS_TRANSACTIONS,
            Self::Leveldb => leveldb::LevelDb::HAS_TRANSACTIONS,
            Self::Fjall => fjall::Fjall::HAS_TRANSACTIONS,
            Self::Redb => redb::Redb::HAS_TRANSACTIONS,
            Self::Lmdb => lmdb::Lmdb::HAS_TRANSACTIONS,
            Self::Foyer => foyer::Foyer::HAS_TRANSACTIONS,
        }
    }
}

/// An operation on an engine of any type.
pub trait Visit {
    fn visit<E: Engine>(self) -> Result<()>;
}

/// Runs it with the engine of this name.
pub fn with(name: Name, visit: impl Visit) -> Result<()> {
    match name {
        Name::Journal => visit.visit::<journal::Journal>(),
        Name::Rocksdb => visit.visit::<rocksdb::RocksDb>(),
        Name::Leveldb => visit.visit::<leveldb::LevelDb>(),
        Name::Fjall => visit.visit::<fjall::Fjall>(),
        Name::Redb => visit.visit::<redb::Redb>(),
        Name::Lmdb => visit.visit::<lmdb::Lmdb>(),
        Name::Foyer => visit.visit::<foyer::Foyer>(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Session, Setup};
    use crate::workload::{Values, key, missing};

    struct Check<'a>(&'a Setup);

    impl Visit for Check<'_> {
        /// Checks that the engine keeps what it is given, also after it is closed and opened again,
        /// and the newest value of each key.
        fn visit<E: Engine>(self) -> Result<()> {
            let mut values = Values::new(7);
            let store = E::open(self.0)?;
            let mut session = store.session()?;
            for number in 0..500 {
                session.put(&key(number), values.draw(number, 1))?;
                session.put(&key(number), values.draw(number, 2))?;
            }
            drop(session);
            check_all::<E>(&store)?;
            store.close()?;
            let store = E::open(self.0)?;
            check_all::<E>(&store)?;
            store.close()
        }
    }

    fn check_all<E: Engine>(store: &E) -> Result<()> {
        let mut session = store.session()?;
        let mut seen = 0;
        for number in 0..500 {
            session
                .get(&key(number), |value| seen += u32::from(Values::matches(value, number, 2)))?;
            session.get(&missing(number), |_| panic!("{number} was never put"))?;
        }
        assert_eq!(seen, 500);
        let keys: Vec<_> = (0..32).map(|n| if n % 2 == 0 { key(n) } else { missing(n) }).collect();
        let mut found = Vec::new();
        session.get_many(&keys, |at, value| {
            assert!(Values::matches(value, at as u64, 2));
            found.push(at);
        })?;
        assert_eq!(found, (0..32).step_by(2).collect::<Vec<_>>());
        if E::SCANS {
            let mut scanned = Vec::new();
            session.scan(|key, value| {
                scanned.push((key.to_vec(), value[..8].to_vec()));
                true
            })?;
            scanned.sort();
            let wanted = (0..500).map(|n| (key(n).to_vec(), n.to_le_bytes().to_vec()));
            assert_eq!(scanned, wanted.collect::<Vec<_>>());
        }
        Ok(())
    }

    #[test]
    fn every_engine_keeps_what_it_is_given() {
        for name in ALL {
            let directory = tempfile::tempdir().unwrap();
            let setup = Setup {
                path: directory.path().to_owned(),
                entries: 500,
                data_bytes: 500 * 116,
                memory_bytes: 64 << 20,
                index_bytes: 500 * 32,
                disk_bytes: 256 << 20,
                batch: 1,
                is_large: false,
            };
            with(name, Check(&setup)).unwrap_or_else(|error| panic!("{}: {error}", name.text()));
        }
    }
}
