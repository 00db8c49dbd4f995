//! The file: tables, opening, and the storing of steps.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use redb::{
    Builder, Database, ReadTransaction, ReadableDatabase as _, ReadableTable as _, Table,
    TableDefinition, TableError, TableHandle as _, WriteTransaction,
};

use uuid::Uuid;

use super::rows::{
    Kind, Meta, decode_entry, decode_lease, decode_meta, decode_revision, encode_entry,
    encode_lease, encode_meta, encode_revision, seal, stored_checksum, unseal,
};
use crate::history::History;
use crate::state::{Position, State, Step};
use crate::{Error, Identity, LeaseId, Limits, Result, Revision};

const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
const ENTRIES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("entries");
const LEASES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("leases");
const REVISIONS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("revisions");
const META_ROW: &str = "state";

/// All rows are read once, so a small page cache suffices.
const PAGE_CACHE_BYTES: usize = 8 << 20;

/// What a restore adds to the revision and to the next lease, so that numbers which the backup
/// lacks are not used again.
const SKIPPED_BY_RESTORE: u64 = 1 << 40;

pub(super) struct Store {
    database: Database,
    meta: Meta,
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(PAGE_CACHE_BYTES);
    builder
}

fn failed(error: impl Into<redb::Error>) -> Error {
    Error::Failed(error.into().to_string())
}

fn text(error: impl Into<redb::Error>) -> String {
    error.into().to_string()
}

impl Store {
    /// Opens or creates the file, and returns the state that it holds.
    pub(super) fn open(path: &Path, limits: Limits, now: Duration) -> Result<(Self, State)> {
        let name =
            |what: &dyn std::fmt::Display| Error::Failed(format!("{}: {what}", path.display()));
        // It may hold password verifiers: other users of the machine must not be able to read it.
        match File::options().write(true).create_new(true).mode(0o600).open(path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(name(&error));
            }
            _ => {}
        }
        let database = builder().create(path).map_err(|error| name(&error))?;
        // A new file is durable only when its directory is synced.
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))
            .and_then(|directory| directory.sync_all())
            .map_err(|error| name(&format!("cannot sync its directory: {error}")))?;
        Self::load_or_create(database, limits, now).map_err(|error| name(&error))
    }

    /// Opens or creates the service in a storage that is not a file.
    #[cfg(test)]
    pub(super) fn open_backend(
        backend: impl redb::StorageBackend,
        limits: Limits,
        now: Duration,
    ) -> Result<(Self, State)> {
        let database = builder().create_with_backend(backend).map_err(failed)?;
        Self::load_or_create(database, limits, now).map_err(Error::Failed)
    }

    fn load_or_create(
        database: Database,
        limits: Limits,
        now: Duration,
    ) -> std::result::Result<(Self, State), String> {
        let identity = Identity { store: Uuid::new_v4(), restores: 0 };
        let meta = Meta { identity, revision: 0, oldest: 0, next_lease: 0, sum: 0 };
        let mut store = Self { database, meta };
        let loaded = store.load(limits.clone(), now)?;
        let is_stored = loaded.is_some() && store.meta.identity != identity;
        let state = loaded.unwrap_or_else(|| State::new(limits));
        if !is_stored {
            let written = store.write(&Step::default(), &state.position());
            written.map_err(|error| error.to_string())?;
        }
        Ok((store, state))
    }

    pub(super) fn identity(&self) -> Identity {
        self.meta.identity
    }

    fn load(
        &mut self,
        limits: Limits,
        now: Duration,
    ) -> std::result::Result<Option<State>, String> {
        let read = self.database.begin_read().map_err(text)?;
        let meta = match read.open_table(META) {
            Err(TableError::TableDoesNotExist(_)) => return Ok(None),
            table => table.map_err(text)?,
        };
        let row = meta.get(META_ROW).map_err(text)?;
        let row = row.ok_or("it has no metadata row")?;
        let body = unseal(Kind::Meta, META_ROW.as_bytes(), row.value())?;
        self.meta = decode_meta(body, self.meta.identity)?;
        let mut sum = 0;
        let mut entries = Vec::new();
        read_all(&read, ENTRIES, Kind::Entry, &mut sum, |key, body| {
            entries.push(decode_entry(key, body)?);
            Ok(())
        })?;
        let mut leases = Vec::new();
        read_all(&read, LEASES, Kind::Lease, &mut sum, |id, body| {
            leases.push(decode_lease(*id, body)?);
            Ok(())
        })?;
        let mut history = History::new(Revision(self.meta.oldest));
        read_all(&read, REVISIONS, Kind::Revision, &mut sum, |revision, body| {
            if *revision != history.current().next().0 {
                return Err(format!("it follows revision {}", history.current()));
            }
            history.push(decode_revision(*revision, body)?);
            Ok(())
        })?;
        if sum != self.meta.sum || history.current() != Revision(self.meta.revision) {
            return Err("rows are missing or of another revision".to_owned());
        }
        let next_lease = LeaseId(self.meta.next_lease);
        State::restore(limits, entries, &leases, next_lease, history, now).map(Some)
    }

    /// Stores a step that was planned at `state`, durably and as a whole, and drops the history
    /// that was dropped there before.
    pub(super) fn write(&mut self, step: &Step, state: &Position) -> Result<()> {
        let next_lease = step.granted.map_or(state.next_lease.0, |lease| lease.id.0 + 1);
        let mut meta = Meta {
            identity: self.meta.identity,
            revision: step.recorded.as_ref().map_or(state.revision, |new| new.revision).0,
            oldest: state.oldest.0,
            next_lease,
            sum: self.meta.sum,
        };
        let write = self.database.begin_write().map_err(failed)?;
        let sum = &mut meta.sum;
        let mut entries = Rows::open(&write, ENTRIES, Kind::Entry, sum)?;
        for one in step.recorded.iter().flat_map(|recorded| recorded.changed.iter()) {
            entries.set(one.key.as_str(), one.entry.as_ref().map(encode_entry))?;
        }
        drop(entries);
        let mut leases = Rows::open(&write, LEASES, Kind::Lease, sum)?;
        if let Some(lease) = &step.granted {
            leases.set(lease.id.0, Some(encode_lease(lease)))?;
        }
        if let Some(lease) = step.ended {
            leases.set(lease.0, None)?;
        }
        drop(leases);
        let mut revisions = Rows::open(&write, REVISIONS, Kind::Revision, sum)?;
        if let Some(new) = &step.recorded {
            revisions.set(new.revision.0, Some(encode_revision(&new.changed)))?;
        }
        for revision in self.meta.oldest + 1..=meta.oldest {
            revisions.set(revision, None)?;
        }
        drop(revisions);
        self.finish(write, meta)
    }

    /// Gives the history another identity, which begins above all numbers that were given out since
    /// the backup that the file comes from.
    pub(super) fn restore(&mut self) -> Result<Identity> {
        let full = || Error::Failed("its numbers are used up".to_owned());
        let skip = |number: u64| number.checked_add(SKIPPED_BY_RESTORE).ok_or_else(full);
        let mut meta = self.meta;
        let restores = meta.identity.restores.checked_add(1).ok_or_else(full)?;
        meta.identity = Identity { store: Uuid::new_v4(), restores };
        meta.revision = skip(meta.revision)?;
        meta.oldest = meta.revision;
        meta.next_lease = skip(meta.next_lease)?;
        let write = self.database.begin_write().map_err(failed)?;
        let mut revisions = Rows::open(&write, REVISIONS, Kind::Revision, &mut meta.sum)?;
        for revision in self.meta.oldest + 1..=self.meta.revision {
            revisions.set(revision, None)?;
        }
        drop(revisions);
        self.finish(write, meta)?;
        Ok(meta.identity)
    }

    fn finish(&mut self, write: WriteTransaction, meta: Meta) -> Result<()> {
        {
            let mut table = write.open_table(META).map_err(failed)?;
            let row = seal(Kind::Meta, META_ROW.as_bytes(), &encode_meta(&meta));
            table.insert(META_ROW, row.as_slice()).map_err(failed)?;
        }
        write.commit().map_err(failed)?;
        self.meta = meta;
        Ok(())
    }
}

/// Passes each row of a table to `take`, in the order of the keys, and adds their checksums to
/// `sum`.
fn read_all<K: redb::Key + 'static>(
    read: &ReadTransaction,
    definition: TableDefinition<'_, K, &'static [u8]>,
    kind: Kind,
    sum: &mut u64,
    mut take: impl FnMut(&K::SelfType<'_>, &[u8]) -> std::result::Result<(), String>,
) -> std::result::Result<(), String> {
    let table = read.open_table(definition).map_err(text)?;
    for row in table.iter().map_err(text)? {
        let (key, row) = row.map_err(text)?;
        let key = key.value();
        unseal(kind, K::as_bytes(&key).as_ref(), row.value())
            .and_then(|body| take(&key, body))
            .map_err(|error| format!("table {}, row {key:?}: {error}", definition.name()))?;
        *sum = sum.wrapping_add(stored_checksum(row.value()));
    }
    Ok(())
}

/// A table with the sum of the checksums of its rows.
struct Rows<'a, K: redb::Key + 'static> {
    table: Table<'a, K, &'static [u8]>,
    kind: Kind,
    sum: &'a mut u64,
}

impl<'a, K: redb::Key + 'static> Rows<'a, K> {
    fn open(
        write: &'a WriteTransaction,
        definition: TableDefinition<'_, K, &'static [u8]>,
        kind: Kind,
        sum: &'a mut u64,
    ) -> Result<Self> {
        Ok(Self { table: write.open_table(definition).map_err(failed)?, kind, sum })
    }

    /// Puts the row with this body, or removes the row.
    fn set(&mut self, key: K::SelfType<'_>, body: Option<Vec<u8>>) -> Result<()> {
        let row = body.map(|body| seal(self.kind, K::as_bytes(&key).as_ref(), &body));
        let previous = match &row {
            Some(row) => self.table.insert(key, row.as_slice()),
            None => self.table.remove(key),
        };
        let previous = previous.map_err(failed)?.map_or(0, |row| stored_checksum(row.value()));
        let new = row.as_deref().map_or(0, stored_checksum);
        *self.sum = self.sum.wrapping_sub(previous).wrapping_add(new);
        Ok(())
    }
}
