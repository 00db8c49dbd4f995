//! Deletion of what a chain does not need any more. `docs/format/chain.md`, section 7.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use uuid::Uuid;

use super::body::ObjectKind;
use super::objects::{Chain, SnapshotName, numbered};
use crate::object_error::ObjectError;
use crate::objects::delete_object;
use crate::sequence::{Identity, link};

/// How much older than the newest object of the chain something is when it is deleted.
pub const DELETION_AGE: Duration = Duration::from_secs(24 * 3600);

/// Deletes what is needless, and remembers between two calls what stays.
pub struct CleanUp {
    chain: Chain,
    /// Snapshots that count and are intact: number and nonce.
    verified: BTreeSet<(u64, Uuid)>,
    /// Objects below the snapshots that stay.
    kept: BTreeSet<u64>,
}

impl CleanUp {
    /// Returns the clean-up of a chain.
    pub fn new(chain: Chain) -> Self {
        Self { chain, verified: BTreeSet::new(), kept: BTreeSet::new() }
    }

    /// Deletes what is below the second-newest snapshot, if that is at least `age` older than the
    /// newest object of the chain, and is itself that old: fences and deltas, older snapshots, and
    /// bodies without an object. Fences and the objects right below them stay. Returns how many
    /// objects were deleted.
    ///
    /// # Errors
    /// An object cannot be listed, read or deleted. Nothing depends on it.
    pub async fn run(&mut self, age: Duration) -> Result<usize, ObjectError> {
        let objects = self.chain.sequence.listed_with_times().await?;
        let Some((last, newest)) = objects.last_key_value() else { return Ok(0) };
        let Some(before) = newest.checked_sub(age) else { return Ok(0) };
        let is_old = |written: SystemTime| written <= before;
        let mut deleted = self.delete_bodies(*last, is_old).await?;
        let snapshots = self.chain.snapshots().await?;
        let Some(second) = self.second_newest(&snapshots).await? else { return Ok(deleted) };
        // A reader that has begun without it has finished by now.
        if !is_old(snapshots[second].written) {
            return Ok(deleted);
        }
        let below = objects.range(..snapshots[second].number);
        for (number, written) in below {
            if self.kept.contains(number) || !is_old(*written) {
                continue;
            }
            // A replaced writer has one of the two in flight.
            if self.may_be_fence(*number).await? || self.may_be_fence(number + 1).await? {
                self.kept.insert(*number);
                continue;
            }
            self.chain.sequence.delete([*number]).await?;
            deleted += 1;
        }
        // That of a rebuild has the number of the object that it takes the place of, which may have
        // an ordinary snapshot, too.
        let number = snapshots[second].number;
        let older = snapshots[second + 1..].iter().filter(|older| older.number < number);
        for snapshot in older.filter(|older| is_old(older.written)) {
            self.chain.delete_snapshot(snapshot).await?;
            deleted += 1;
        }
        Ok(deleted)
    }

    /// Deletes old bodies whose objects do not exist, or are others. `last` is the number of the
    /// newest object: the body of a later one may be in use soon.
    async fn delete_bodies(
        &self,
        last: u64,
        is_old: impl Fn(SystemTime) -> bool,
    ) -> Result<usize, ObjectError> {
        let chain = &self.chain;
        let prefix = chain.bodies_prefix();
        let mut deleted = 0;
        for body in chain.list(&prefix).await? {
            let Some((number, nonce)) = numbered(&prefix, body.location.as_ref()) else { continue };
            if number > last || !is_old(body.last_modified.into()) {
                continue;
            }
            let is_used = |found: Identity| found.link == link(nonce);
            if intact(chain.sequence.identity(number).await)?
                .is_none_or(|it| it.is_some_and(is_used))
            {
                continue;
            }
            delete_object(&*chain.store, body.location.as_ref()).await?;
            deleted += 1;
        }
        Ok(deleted)
    }

    /// Whether an object is a fence, or is damaged, so that it may be one.
    async fn may_be_fence(&self, number: u64) -> Result<bool, ObjectError> {
        let is_fence = |found: Identity| ObjectKind::of(found.kind) == Some(ObjectKind::Fence);
        let found = intact(self.chain.sequence.identity(number).await)?;
        Ok(found.is_none_or(|found| found.is_some_and(is_fence)))
    }

    /// Returns the position of the second-newest snapshot that counts and is intact.
    async fn second_newest(
        &mut self,
        newest_first: &[SnapshotName],
    ) -> Result<Option<usize>, ObjectError> {
        let mut intact_count = 0;
        for (at, snapshot) in newest_first.iter().enumerate() {
            let key = (snapshot.number, snapshot.nonce);
            if !self.verified.contains(&key) {
                match intact(self.chain.read_snapshot(snapshot).await)?.flatten() {
                    Some(_) => drop(self.verified.insert(key)),
                    None => continue,
                }
            }
            intact_count += 1;
            if intact_count == 2 {
                self.verified.retain(|verified| *verified >= key);
                return Ok(Some(at));
            }
        }
        Ok(None)
    }
}

/// Returns `None` for what is damaged or missing.
fn intact<T>(read: Result<T, ObjectError>) -> Result<Option<T>, ObjectError> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if error.is_loss() => Ok(None),
        Err(error) => Err(error),
    }
}
