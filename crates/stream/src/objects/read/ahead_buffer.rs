//! The read-ahead buffer: blocks that were read ahead, until they are requested.
//!
//! They are not in the cache. With many readers each takes long to come back, so a cache policy
//! would already have evicted blocks that were never requested, or would have evicted other blocks
//! that are requested again and again. Their bytes, together with those in flight, are bounded by
//! the code that reads ahead.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Decoded, Key};

/// Blocks that were not requested within this time may be dropped for others.
const KEPT: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(super) struct ReadAheadBuffer {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    by_key: HashMap<Key, (u64, Arc<Decoded>)>,
    /// Oldest first.
    by_age: BTreeMap<u64, (Instant, Key)>,
    next_number: u64,
    bytes: u64,
}

impl Table {
    fn remove(&mut self, key: &Key) -> Option<Arc<Decoded>> {
        let (number, decoded) = self.by_key.remove(key)?;
        self.by_age.remove(&number);
        self.bytes -= u64::from(decoded.len_bytes);
        Some(decoded)
    }
}

impl ReadAheadBuffer {
    pub(super) fn insert(&self, key: Key, decoded: Arc<Decoded>) {
        let mut table = self.table.lock();
        let _instead_of = table.remove(&key);
        let number = table.next_number;
        table.next_number += 1;
        table.bytes += u64::from(decoded.len_bytes);
        table.by_key.insert(key, (number, decoded));
        table.by_age.insert(number, (Instant::now(), key));
    }

    pub(super) fn get(&self, key: &Key) -> Option<Arc<Decoded>> {
        self.table.lock().by_key.get(key).map(|(_, decoded)| decoded.clone())
    }

    pub(super) fn has(&self, key: &Key) -> bool {
        self.table.lock().by_key.contains_key(key)
    }

    pub(super) fn remove(&self, key: &Key) {
        let _removed = self.table.lock().remove(key);
    }

    /// Drops this many bytes of blocks that were not requested in time, as far as there are any.
    pub(super) fn drop_unrequested(&self, wanted_bytes: u64) {
        let now = Instant::now();
        let mut table = self.table.lock();
        let target_bytes = table.bytes.saturating_sub(wanted_bytes);
        while table.bytes > target_bytes
            && let Some((_, (since, key))) = table.by_age.first_key_value()
            && now.duration_since(*since) >= KEPT
        {
            let key = *key;
            let _dropped = table.remove(&key);
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.table.lock().bytes
    }
}
