//! The file: tables, opening, and the storing of steps.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use redb::{
    Builder, Database, ReadableDatabase as _, ReadableTable as _, Table, TableDefinition,
    TableError, WriteTransaction,
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
        let mut sum = 0_u64;
        let mut entries = Vec::new();
        let table = read.open_table(ENTRIES).map_err(text)?;
        for row in table.iter().map_err(text)? {
            let (key, row) = row.map_err(text)?;
            let key = key.value();
            let found = unseal(Kind::Entry, key.as_bytes(), row.value())
                .and_then(|body| decode_entry(key, body));
            entries.push(found.map_err(|error| format!("key {key}: {error}"))?);
            sum = sum.wrapping_add(stored_checksum(row.value()));
        }
        let mut leases = Vec::new();
        let table = read.open_table(LEASES).map_err(text)?;
        for row in table.iter().map_err(text)? {
            let (id, row) = row.map_err(text)?;
            let id = id.value();
            let found = unseal(Kind::Lease, &id.to_le_bytes(), row.value())
                .and_then(|body| decode_lease(id, body));
            leases.push(found.map_err(|error| format!("lease {id}: {error}"))?);
            sum = sum.wrapping_add(stored_checksum(row.value()));
        }
        let mut history = History::new(Revision(self.meta.oldest));
        let table = read.open_table(REVISIONS).map_err(text)?;
        for row in table.iter().map_err(text)? {
            let (revision, row) = row.map_err(text)?;
            let revision = revision.value();
            if revision != history.current().next().0 {
                return Err(format!("revision {revision} follows {}", history.current()));
            }
            let found = unseal(Kind::Revision, &revision.to_le_bytes(), row.value())
                .and_then(|body| decode_revision(revision, body));
            history.push(found.map_err(|error| format!("revision {revision}: {error}"))?);
            sum = sum.wrapping_add(stored_checksum(row.value()));
        }
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
        {
            let mut entries = Rows(write.open_table(ENTRIES).map_err(failed)?, &mut meta.sum);
            for one in step.recorded.iter().flat_map(|recorded| recorded.changed.iter()) {
                let row = one
                    .entry
                    .as_ref()
                    .map(|entry| seal(Kind::Entry, one.key.as_bytes(), &encode_entry(entry)));
                entries.set(one.key.as_str(), row.as_deref())?;
            }
        }
        {
            let mut leases = Rows(write.open_table(LEASES).map_err(failed)?, &mut meta.sum);
            if let Some(lease) = &step.granted {
                let row = seal(Kind::Lease, &lease.id.0.to_le_bytes(), &encode_lease(lease));
                leases.set(lease.id.0, Some(&row))?;
            }
            if let Some(lease) = step.ended {
                leases.set(lease.0, None)?;
            }
        }
        {
            let table = write.open_table(REVISIONS).map_err(failed)?;
            let mut revisions = Rows(table, &mut meta.sum);
            if let Some(new) = &step.recorded {
                let key = new.revision.0.to_le_bytes();
                let row = seal(Kind::Revision, &key, &encode_revision(&new.changed));
                revisions.set(new.revision.0, Some(&row))?;
            }
            for revision in self.meta.oldest + 1..=meta.oldest {
                revisions.set(revision, None)?;
            }
        }
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
        {
            let table = write.open_table(REVISIONS).map_err(failed)?;
            let mut revisions = Rows(table, &mut meta.sum);
            for revision in self.meta.oldest + 1..=self.meta.revision {
                revisions.set(revision, None)?;
            }
        }
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

/// A table with the sum of the checksums of its rows.
struct Rows<'a, K: redb::Key + 'static>(Table<'a, K, &'static [u8]>, &'a mut u64);

impl<K: redb::Key + 'static> Rows<'_, K> {
    fn set<'k>(&mut self, key: K::SelfType<'k>, row: Option<&[u8]>) -> Result<()> {
        let previous = match row {
            Some(row) => self.0.insert(key, row),
            None => self.0.remove(key),
        };
        let previous = previous.map_err(failed)?.map_or(0, |row| stored_checksum(row.value()));
        let new = row.map_or(0, stored_checksum);
        *self.1 = self.1.wrapping_sub(previous).wrapping_add(new);
        Ok(())
    }
}
