//! Operations on several keys.

use super::{Cache, Reach, Read, Value};
use crate::error::Result;
use crate::fetch::{Batch, MOST_READS};
use crate::hash::KeyHash;

/// The number of keys whose cache misses overlap.
const OVERLAP: usize = 32;

/// A key whose record has to be read from the disk or decompressed.
struct Cold {
    /// The index of the key in the caller's list.
    at: usize,
    hash: KeyHash,
}

impl Cache {
    /// Returns the values of several keys, in their order. Faster than one call per key: the
    /// processor's cache misses overlap, and so do reads of the disk as far as the kernel permits
    /// io_uring. Each key is looked up at a moment of its own and has its own result, so one that
    /// cannot be read does not affect the others. (`into_iter().collect::<Result<Vec<_>, _>>()`
    /// combines the results.)
    ///
    /// Reads the disk: up to 32 concurrent reads of at most 1 MiB together, which is the memory
    /// that this takes in addition to the values. A record that needs more than 256 KiB of reads is
    /// read by itself.
    ///
    /// # Errors
    /// For each key as [`Self::get`].
    pub fn get_many<K: AsRef<[u8]>>(&self, keys: &[K]) -> Vec<Result<Option<Value>>> {
        let shared = &*self.shared;
        let mut values = Vec::with_capacity(keys.len());
        let mut cold = Vec::new();
        for chunk in keys.chunks(OVERLAP) {
            let mut hashes = [KeyHash { high: 0, fingerprint: 0 }; OVERLAP];
            let mut positions = [None; OVERLAP];
            for (hash, key) in hashes.iter_mut().zip(chunk) {
                *hash = shared.hasher.hash(key.as_ref());
                shared.index.prefetch(*hash);
            }
            for (position, hash) in positions.iter_mut().zip(&hashes[..chunk.len()]) {
                *position = shared.index.find(*hash);
                if let Some(position) = position {
                    shared.prefetch_record(*position);
                }
            }
            for ((hash, position), key) in hashes.into_iter().zip(positions).zip(chunk) {
                let read = self.read(key.as_ref(), hash, position, Reach::Memory);
                if matches!(read, Ok(Read::OnDisk)) {
                    cold.push(Cold { at: values.len(), hash });
                }
                values.push(value_of(read));
            }
            // Keys that do not fit into a batch are read by the next ones.
            while cold.len() >= MOST_READS {
                self.read_batch(keys, &mut cold, &mut values);
            }
        }
        while !cold.is_empty() {
            self.read_batch(keys, &mut cold, &mut values);
        }
        values
    }

    /// Removes several keys and returns how many of them were present. Each is removed at a moment
    /// of its own, as by [`Self::delete`]. The records that have to be read (those with a time to
    /// live that are not in memory) are read concurrently, as in [`Self::get_many`]. With
    /// [`crate::Durability::Always`] all removals wait for stable storage together.
    ///
    /// # Errors
    /// As [`Self::delete`], for any of the keys: those before it are removed, with `Always` perhaps
    /// not yet on stable storage.
    pub fn delete_many<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<usize> {
        let shared = &*self.shared;
        let mut count = 0;
        let mut left = keys;
        while !left.is_empty() {
            let mut batch = Batch::default();
            let fits = |key: &&K| {
                let key: &[u8] = key.as_ref();
                let named = shared.index.find(shared.hasher.hash(key));
                // The index knows that a record without a time to live is present.
                let Some(position) = named.filter(|position| position.expires()) else {
                    return true;
                };
                let Some(journal) = shared.journals.of(position) else { return true };
                shared.peek(&journal, position).is_some() || batch.add(&journal, position)
            };
            let (now, later) = left.split_at(left.iter().take_while(fits).count());
            let fetched = batch.read(&*shared.directory);
            for key in now {
                let (was_there, appended) = shared.delete_with(key.as_ref(), &fetched)?;
                count += usize::from(was_there);
                if let Some(appended) = appended {
                    shared.wake_flusher(appended);
                }
            }
            left = later;
        }
        // Also needed for keys that were absent.
        shared.finish_refused()?;
        Ok(count)
    }

    /// Reads the first keys of `cold` from the disk, as many as fit into a batch, and removes them
    /// from `cold`.
    fn read_batch<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        cold: &mut Vec<Cold>,
        values: &mut [Result<Option<Value>>],
    ) {
        let shared = &*self.shared;
        let mut batch = Batch::default();
        let fits = |it: &&Cold| {
            // A record that has gone, or has been loaded into memory meanwhile, needs no read.
            let Some(position) = shared.index.find(it.hash) else { return true };
            shared.journals.of(position).is_none_or(|journal| batch.add(&journal, position))
        };
        let count = cold.iter().take_while(fits).count();
        let fetched = batch.read(&*shared.directory);
        for Cold { at, hash } in cold.drain(..count) {
            let named = shared.index.find(hash);
            values[at] = value_of(self.read(keys[at].as_ref(), hash, named, Reach::Disk(&fetched)));
        }
    }
}

fn value_of(read: Result<Read>) -> Result<Option<Value>> {
    Ok(read?.found().map(|found| found.value))
}
