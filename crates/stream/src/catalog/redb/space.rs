//! What a catalog commits on a full disk: which changes get the last of the space. See
//! docs/format/catalog.md, "A full disk".

use std::os::unix::fs::MetadataExt as _;

use redb::ReadableDatabase as _;

use super::disk::Reserve;
use super::{CatalogError, Change, Failure, META, RedbCatalog, unless_damaged};
use crate::catalog::OWN_META_PREFIX;

/// A disk with less free space than this counts as full: a change may take as much.
const FULL_BYTES: u64 = 1 << 20;

/// A value may grow by this much without asking for space: a counter gets another digit.
const PUT_MORE_BYTES: usize = 64;

/// How much of the reserve a change may take when the disk is full.
#[derive(Clone, Copy)]
pub(super) enum Claim {
    /// None: it adds rows, or makes one longer, and drops none.
    None,
    /// Most of it: uploads and object compactions let the WAL be trimmed, and must not take what
    /// deletions need.
    Part,
    /// All of it: it frees space, or belongs to a start.
    All,
}

impl RedbCatalog {
    /// Commits changes, from the reserve if the disk is full and the changes may use it.
    pub(super) fn commit_in_space(&self, changes: &[Change]) -> Result<u64, CatalogError> {
        let Some(reserve) = &self.reserve else { return self.try_commit(changes) };
        let kept_bytes = match self.claim(changes)? {
            Claim::None => reserve.bytes(),
            Claim::Part => reserve.bytes() / 4,
            Claim::All => 0,
        };
        if kept_bytes == reserve.bytes()
            && let Err(error) = reserve.fill()
            && self.slack_bytes()? < reserve.bytes()
        {
            return Err(self.full(no_reserve(reserve, &error)));
        }
        let committed = match self.try_commit(changes) {
            Err(CatalogError::Full(why)) => match reserve.release(kept_bytes) {
                Ok(true) => self.try_commit(changes),
                Ok(false) => Err(CatalogError::Full(why)),
                Err(error) => Err(self.full(format!("{why}; the reserve cannot be used: {error}"))),
            },
            committed => committed,
        };
        // The change may have freed what is missing in the reserve.
        let filled = reserve.fill();
        *self.shortage.lock() = match (&committed, filled) {
            (Err(error @ CatalogError::Full(_)), _) => Some(error.to_string()),
            (_, Err(error)) => Some(self.full(no_reserve(reserve, &error)).to_string()),
            (_, Ok(())) => self.is_disk_full().then(|| self.full("its disk is full").to_string()),
        };
        committed
    }

    /// Whether the file system reports a full disk; it may not know about a quota.
    fn is_disk_full(&self) -> bool {
        let found = rustix::fs::statvfs(&self.path);
        found.is_ok_and(|found| found.f_bavail.saturating_mul(found.f_frsize) < FULL_BYTES)
    }

    /// Returns how much of the reserve the changes may take.
    pub(super) fn claim(&self, changes: &[Change]) -> Result<Claim, CatalogError> {
        let mut claim = Claim::All;
        for change in changes {
            match change {
                Change::CreateStream { .. } | Change::NextStreamId(_) => claim = Claim::None,
                // A few short values, without which larger batches could not be appended.
                Change::PutMeta { key, .. } if key.starts_with(OWN_META_PREFIX) => {}
                Change::PutMeta { key, value } => {
                    let read = || -> Result<usize, Failure> {
                        let database = self.database().map_err(Failure::Refused)?;
                        let found = database.begin_read()?.open_table(META)?.get(key.as_str())?;
                        Ok(found.map_or(0, |found| found.value().len()))
                    };
                    let present = unless_damaged(&self.path, || {
                        read().map_err(|failure| self.named(failure))
                    });
                    let present = present?;
                    if present == 0 || value.len() > present + PUT_MORE_BYTES {
                        claim = Claim::None;
                    }
                }
                Change::WalMarked(_) => {}
                // All changes in a list with one of these must succeed.
                Change::AddObject(_)
                | Change::Uploaded(_)
                | Change::LogUploaded(_)
                | Change::Replaced(_) => return Ok(Claim::Part),
                _ => return Ok(Claim::All),
            }
        }
        Ok(claim)
    }

    /// Returns the space in the file that no page uses: it serves as a reserve, too.
    fn slack_bytes(&self) -> Result<u64, CatalogError> {
        let transaction = self.begin()?;
        let stats = transaction.stats().map_err(|e| self.error(e))?;
        transaction.abort().map_err(|e| self.error(e))?;
        let found = std::fs::metadata(&self.path);
        let found =
            found.map_err(|e| CatalogError::Failed(format!("{}: {e}", self.path.display())))?;
        let used_bytes = stats.allocated_pages() * stats.page_size() as u64;
        Ok((found.blocks() * 512).saturating_sub(used_bytes))
    }

    pub(super) fn full(&self, what: impl std::fmt::Display) -> CatalogError {
        CatalogError::Full(format!("{}: {what}", self.path.display()))
    }
}

pub(super) fn no_reserve(reserve: &Reserve, error: &std::io::Error) -> String {
    format!(
        "no space for the reserve of {} MiB for deletions: {error}. Free space on that disk",
        reserve.bytes() >> 20
    )
}
