//! Writes that depend on the present value.

use std::time::Duration;

use crate::cache::Value;
use crate::disk_budget::WriteClass;
use crate::error::Result;
use crate::position::Position;
use crate::record::Record;
use crate::shared::Shared;

/// The condition of a [`crate::Cache::swap`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum When {
    /// No condition.
    #[default]
    Always,
    /// The key is absent.
    IfAbsent,
    /// The key is present.
    IfPresent,
}

/// The time to live of the value of a [`crate::Cache::swap`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ttl {
    /// Until it is replaced or removed.
    #[default]
    None,
    /// The expiry of the previous value.
    Keep,
    /// This long from the time of the call.
    After(Duration),
}

/// The result of a [`crate::Cache::swap`].
#[derive(Clone, Debug)]
pub struct Swapped {
    /// The previous value, also if nothing was written.
    pub old: Option<Value>,
    /// Whether the new value was written.
    pub is_written: bool,
}

impl Shared {
    pub(crate) fn swap(&self, key: &[u8], value: &[u8], when: When, ttl: Ttl) -> Result<Swapped> {
        // Before anything is read.
        self.new_value(key, value, None)?;
        let hash = self.hasher.hash(key);
        // Counted from the call, however long it waits for the disk.
        let expires_at = match ttl {
            Ttl::After(time) => Some(self.clock.expiry(time)),
            Ttl::None | Ttl::Keep => None,
        };
        let (old, appended) = self.retry_append(WriteClass::Put, || {
            let (mut writer, old) = self.lock_and_read(hash, |named| {
                named.map_or(Ok(None), |position| self.value_at(key, position))
            })?;
            // It may have expired since it was read.
            let old = old
                .filter(|(_, expires_at)| expires_at.is_none_or(|at| at > self.clock.now_millis()));
            let is_wanted = match when {
                When::Always => true,
                When::IfAbsent => old.is_none(),
                When::IfPresent => old.is_some(),
            };
            let expires_at = match ttl {
                Ttl::Keep => old.as_ref().and_then(|(_, expires_at)| *expires_at),
                Ttl::None | Ttl::After(_) => expires_at,
            };
            let record = self.new_value(key, value, expires_at)?;
            let appended = match is_wanted {
                true => Some(self.append_and_index(&mut writer, hash, &record, WriteClass::Put)?),
                false => None,
            };
            Ok((old.map(|(old, _)| old), appended))
        })?;
        match appended {
            Some(appended) => self.finish_append(appended)?,
            None => self.finish_refused()?,
        }
        Ok(Swapped { old, is_written: appended.is_some() })
    }

    /// Returns the value at `position` and its expiry, if it belongs to the key and has not
    /// expired. The result is valid only if the index still names the same position afterwards.
    fn value_at(&self, key: &[u8], position: Position) -> Result<Option<(Value, Option<u64>)>> {
        let Some(journal) = self.journals.of(position) else { return Ok(None) };
        let loaded = self.load_uncached(&journal, position, &[])?;
        let record = Record::trusted(loaded.bytes()).expect("loaded as a record");
        if record.key() != key || record.has_expired(&self.clock) {
            return Ok(None);
        }
        let (range, expires_at) = (record.value_range(), record.expires_at());
        Ok(Some((Value(loaded.slice(range)), expires_at)))
    }
}
