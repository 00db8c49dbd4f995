//! A reader that follows a chain while its writer extends it. `docs/format/chain.md`, rule C7.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use uuid::Uuid;

use super::body::Body;
use super::change::ChainChange;
use super::entry::Entry;
use super::objects::Chain;
use super::state::ChainState;
use crate::object_error::ObjectError;
use crate::types::StreamId;

/// Interval at which the snapshots are listed while the next number is absent. A reader that was
/// suspended for a day may find numbers absent that were deleted; it serves an old state for this
/// long at most. One LIST costs as much as twelve GETs.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Objects that one poll reads at most, so that its caller can apply and show them.
const OBJECTS_PER_POLL: usize = 256;

/// What has changed in the state since it was taken the last time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ChainChanges {
    /// What the objects that were read have changed.
    Of(Touched),
    /// It was loaded again, so anything.
    All,
}

/// Rows of the state that changes refer to. They may be as before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Touched {
    pub(crate) streams: BTreeSet<StreamId>,
    pub(crate) meta: BTreeSet<String>,
}

/// A reader that follows a chain.
pub(crate) struct ChainReader {
    chain: Chain,
    state: ChainState,
    /// Incarnation and version when changes were taken the last time.
    taken: Option<(Uuid, u64)>,
    /// What was not taken yet.
    changes: Option<ChainChanges>,
    /// When the end of the chain was last held against the snapshots, by the wall clock: it also
    /// passes while the machine is suspended.
    checked: SystemTime,
    /// Objects were read since.
    is_unchecked: bool,
}

impl ChainReader {
    /// Loads the chain; `None` if it has no object.
    ///
    /// # Errors
    /// As [`Chain::load`].
    pub(crate) async fn load(chain: Chain) -> Result<Option<Self>, ObjectError> {
        let Some(state) = chain.load().await? else { return Ok(None) };
        let changes = Some(ChainChanges::All);
        let checked = SystemTime::now();
        Ok(Some(Self { chain, state, taken: None, changes, checked, is_unchecked: false }))
    }

    /// Returns the state, which is that after the last object that was read.
    pub(crate) fn state(&self) -> &ChainState {
        &self.state
    }

    /// Returns what has changed in the state since the last call, if anything.
    pub(crate) fn take_changes(&mut self) -> Option<ChainChanges> {
        self.taken = Some((self.state.header.incarnation, self.state.header.version));
        self.changes.take()
    }

    /// Whether the state may be shown: the objects that were read last are those of the chain.
    pub(crate) fn is_checked(&self) -> bool {
        !self.is_unchecked
    }

    /// Whether the state is one after that from which changes were taken the last time: the chain
    /// was not replaced by another one.
    pub(crate) fn goes_on(&self) -> bool {
        let Some((incarnation, version)) = self.taken else { return true };
        let mut since = self.state.incarnations.iter().skip_while(|it| it.id != incarnation);
        let is_known = since.next().is_some();
        let ended_at = since.next().map_or(self.state.header.version, |next| next.after_version);
        is_known && ended_at >= version
    }

    /// Declares that the changes that were taken are not applied, or only in part.
    pub(crate) fn not_applied(&mut self) {
        self.changes = Some(ChainChanges::All);
    }

    /// Reads the objects that were created since the last call. If `certainly`, or once a minute,
    /// or if there were any, it is also checked that these are the last ones. Returns whether the
    /// end was reached. A chain that does not go on where the state ends is loaded again.
    ///
    /// # Errors
    /// As [`Chain::load`]. The state is that after an object of the chain, and a later call goes
    /// on.
    pub(crate) async fn poll(&mut self, certainly: bool) -> Result<bool, ObjectError> {
        let mut read = 0;
        let mut lost = None;
        let mut is_end = false;
        while read < OBJECTS_PER_POLL && !is_end {
            match self.chain.read(self.state.head.number + 1).await {
                Ok(Some(entry)) => {
                    read += 1;
                    let touched = touched(&entry);
                    let name = self.chain.sequence.name(entry.number);
                    if let Err(damage) = self.state.apply(entry) {
                        lost = Some(ObjectError::damaged(&name, damage));
                        break;
                    }
                    self.note(touched);
                    self.is_unchecked = true;
                }
                Ok(None) => is_end = true,
                Err(error) if error.is_loss() => {
                    lost = Some(error);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        let now = SystemTime::now();
        let is_recent = now.duration_since(self.checked).is_ok_and(|it| it < CHECK_INTERVAL);
        if lost.is_none() && !self.is_unchecked && !certainly && is_recent {
            return Ok(is_end);
        }
        let last = self.state.head;
        let snapshots = self.chain.snapshots().await?;
        let is_behind = snapshots.first().is_some_and(|newest| newest.number > last.number);
        // Another object with this number: the chain was replaced, for example by a copy.
        let is_other = lost.is_none() && !is_behind && {
            let found = self.chain.sequence.identity(last.number).await?;
            found.is_none_or(|found| found.link != last.link)
        };
        if !is_behind {
            // Also if what follows is damaged: what was read before it is the chain.
            (self.checked, self.is_unchecked) = (now, false);
        }
        if lost.is_some() || is_behind || is_other {
            is_end = self.reload(lost).await?;
        }
        (self.checked, self.is_unchecked) = (now, false);
        Ok(is_end)
    }

    /// Loads the chain again: the object that should follow is `lost`, or the snapshots show
    /// another end.
    async fn reload(&mut self, lost: Option<ObjectError>) -> Result<bool, ObjectError> {
        let state = match self.chain.load().await? {
            Some(state) if state.head != self.state.head => state,
            // Nothing else is there, so what was found is damage.
            Some(_) => return lost.map_or(Ok(true), Err),
            None => return Err(self.chain.missing(self.state.head.number)),
        };
        self.state = state;
        self.changes = Some(ChainChanges::All);
        Ok(true)
    }

    fn note(&mut self, new: Touched) {
        match self.changes.get_or_insert_with(|| ChainChanges::Of(Touched::default())) {
            ChainChanges::All => {}
            ChainChanges::Of(touched) => {
                touched.streams.extend(new.streams);
                touched.meta.extend(new.meta);
            }
        }
    }
}

/// Returns the rows that an object refers to.
fn touched(entry: &Entry) -> Touched {
    let mut touched = Touched::default();
    let Body { recorded, own, .. } = &entry.body;
    for change in recorded.iter().flat_map(|list| &list.changes).chain(own) {
        match change {
            ChainChange::CreateStream { id, .. }
            | ChainChange::DeleteStream { id, .. }
            | ChainChange::TrimStream { id, .. }
            | ChainChange::OpenStream { id, .. } => drop(touched.streams.insert(*id)),
            ChainChange::Uploaded(uploaded) => drop(touched.streams.insert(uploaded.stream)),
            ChainChange::Replaced(replaced) => drop(touched.streams.insert(replaced.stream)),
            ChainChange::PutMeta { key, .. } | ChainChange::DeleteMeta { key } => {
                touched.meta.insert(key.clone());
            }
            ChainChange::AddObject(_)
            | ChainChange::RemoveObject(_)
            | ChainChange::ReserveStreams(_)
            | ChainChange::LargestCount(_)
            | ChainChange::BeginIncarnation(_)
            | ChainChange::BindWal(_)
            | ChainChange::SetTerm(_)
            | ChainChange::Gap { .. } => {}
        }
    }
    touched
}

#[cfg(test)]
mod tests;
