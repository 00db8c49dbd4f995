//! What is left of a chain of which objects are damaged or missing. `docs/format/chain.md`,
//! section 10.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use futures::StreamExt;

use super::change::ChainChange;
use super::entry::Entry;
use super::objects::{Chain, READS, SnapshotName};
use super::state::{ChainState, Head};
use crate::object_error::ObjectError;
use crate::sequence::Identity;
use crate::types::StreamId;

/// What is left of a chain.
#[derive(Debug)]
pub struct Salvaged {
    /// The state after everything that can be read. The number of its head is the greatest one of
    /// the chain.
    pub state: ChainState,
    /// The state before the first object that is lost; `state` if none is.
    pub intact: ChainState,
    /// The fences and deltas that are lost, in order.
    pub lost: Vec<LostEntries>,
    /// Snapshots that are damaged. An older one took their place, if there is one.
    pub damaged_snapshots: Vec<ObjectError>,
    /// Streams that were deleted, as far as it can be read.
    pub deleted: HashSet<StreamId>,
}

/// Objects of the chain that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostEntries {
    /// Their numbers.
    pub numbers: RangeInclusive<u64>,
    /// The name of the first one.
    pub name: String,
    /// Why.
    pub reason: String,
}

impl Chain {
    /// Reads what is left of the chain: the newest snapshot that can be read, and all objects after
    /// it that can be read.
    ///
    /// # Errors
    /// The object store does not answer, or an object is of a later version.
    pub async fn salvage(&self) -> Result<Salvaged, ObjectError> {
        let snapshots = self.snapshots().await?;
        let listed: HashSet<u64> = self.sequence.listed(1).await?.into_iter().collect();
        let newest = snapshots.first().map_or(0, |snapshot| snapshot.number);
        let last = listed.iter().copied().max().unwrap_or(0).max(newest);
        let (base, damaged_snapshots) = self.newest_readable(&snapshots, &listed).await?;
        let mut state = base.unwrap_or_else(|| ChainState::none(self.id));
        let mut left =
            Left { chain: self, intact: None, lost: Vec::new(), deleted: HashSet::new() };
        let mut objects = futures::stream::iter(state.head.number + 1..=last)
            .map(|number| {
                let is_listed = listed.contains(&number);
                async move {
                    let object = match is_listed {
                        true => self.sequence.get(number).await,
                        false => Ok(None),
                    };
                    (number, object)
                }
            })
            .buffered(READS);
        while let Some((number, object)) = objects.next().await {
            let decoded = match object {
                Ok(Some(object)) => self.decode(object).await,
                Ok(None) => Err(self.missing(number)),
                Err(error) => Err(error),
            };
            match decoded {
                Ok(entry) => left.apply(&mut state, entry),
                Err(error) if error.is_loss() => left.lose(&state, number, why(&error)),
                Err(error) => return Err(error),
            }
        }
        drop(objects);
        let Left { intact, lost, deleted, .. } = left;
        state.head = Head { number: last, ..state.head };
        let intact = intact.unwrap_or_else(|| state.clone());
        Ok(Salvaged { state, intact, lost, damaged_snapshots, deleted })
    }

    /// Returns the state of the newest snapshot that can be read, unless what can be read of its
    /// neighbours in the chain contradicts it.
    async fn newest_readable(
        &self,
        newest_first: &[SnapshotName],
        listed: &HashSet<u64>,
    ) -> Result<(Option<ChainState>, Vec<ObjectError>), ObjectError> {
        let mut found: Option<ChainState> = None;
        let mut damaged = Vec::new();
        for name in newest_first {
            match &found {
                Some(state) if state.head.is_snapshot || state.head.number > name.number => break,
                _ => {}
            }
            let state = match self.decode_snapshot(name).await {
                Ok(snapshot) => snapshot.state,
                Err(error) if error.is_loss() => {
                    damaged.push(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Head { number, link, is_snapshot, .. } = state.head;
            let next = self.readable_identity(number + 1).await?;
            let own = match is_snapshot {
                true => None,
                false => self.readable_identity(number).await?,
            };
            let is_contradicted = own.is_some_and(|own| own.link != link)
                || next.is_some_and(|next| next.previous != link);
            // That of a rebuild that has ended before its fence: no object follows.
            let is_unfinished = is_snapshot && listed.iter().all(|other| *other <= number);
            if !is_contradicted && !is_unfinished && (found.is_none() || is_snapshot) {
                found = Some(state);
            }
        }
        Ok((found, damaged))
    }

    /// Returns what the header of an object states, if it can be read.
    async fn readable_identity(&self, number: u64) -> Result<Option<Identity>, ObjectError> {
        match self.sequence.identity(number).await {
            Err(error) if error.is_loss() => Ok(None),
            read => read,
        }
    }
}

/// Returns what is wrong with an object, and where, unless it is all of it.
fn why(error: &ObjectError) -> String {
    match error {
        ObjectError::Damaged { source, .. } if source.position == 0 => source.reason.clone(),
        error => error.reason(),
    }
}

/// What is found while a chain is salvaged.
struct Left<'a> {
    chain: &'a Chain,
    intact: Option<ChainState>,
    lost: Vec<LostEntries>,
    deleted: HashSet<StreamId>,
}

impl Left<'_> {
    fn lose(&mut self, state: &ChainState, number: u64, reason: String) {
        self.intact.get_or_insert_with(|| state.clone());
        match self.lost.last_mut() {
            Some(last) if last.reason == reason && *last.numbers.end() + 1 == number => {
                last.numbers = *last.numbers.start()..=number;
            }
            _ => {
                let name = self.chain.sequence.name(number);
                self.lost.push(LostEntries { numbers: number..=number, name, reason });
            }
        }
    }

    fn apply(&mut self, state: &mut ChainState, entry: Entry) {
        if let Err(damage) = state.check_later(&entry) {
            return self.lose(state, entry.number, damage.reason);
        }
        if self.intact.is_none()
            && let Err(damage) = state.check(&entry)
        {
            // Something before it is lost, although every number is there.
            self.lose(state, entry.number, damage.reason);
        }
        self.create_streams(state, &entry);
        state.apply_checked(entry);
    }

    /// Creates the streams whose creation is lost and which this object changes. Notes the
    /// streams that it deletes.
    fn create_streams(&mut self, state: &mut ChainState, entry: &Entry) {
        let given = self.intact.as_ref().map(|intact| intact.header.next_stream);
        let mut created = HashSet::new();
        let recorded = entry.body.recorded.iter().flat_map(|list| &list.changes);
        for change in recorded.chain(&entry.body.own) {
            let id = match change {
                ChainChange::CreateStream { id, .. } => {
                    created.insert(*id);
                    continue;
                }
                ChainChange::DeleteStream { id, .. } => {
                    self.deleted.insert(*id);
                    continue;
                }
                ChainChange::TrimStream { id, .. } => *id,
                ChainChange::Uploaded(uploaded) if uploaded.range.is_some() => uploaded.stream,
                ChainChange::Replaced(replaced) => replaced.stream,
                _ => continue,
            };
            // An older stream that does not exist was deleted before.
            let may_be_new = given.is_some_and(|given| id >= given);
            if may_be_new && !self.deleted.contains(&id) && !created.contains(&id) {
                state.streams.entry(id).or_default();
            }
        }
    }
}
