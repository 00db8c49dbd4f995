//! The newest revisions with what they changed, bounded by entries and bytes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::limits::OVERHEAD_BYTES;
use crate::{Entry, Error, Limits, Result, Revision};

/// What one revision did to one key. The previous entry allows older revisions to be listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Changed {
    pub(crate) key: String,
    pub(crate) previous: Option<Entry>,
    pub(crate) entry: Option<Entry>,
}

/// One revision.
#[derive(Clone, Debug)]
pub(crate) struct Recorded {
    pub(crate) revision: Revision,
    pub(crate) changed: Arc<[Changed]>,
}

impl Recorded {
    fn bytes(&self) -> usize {
        let entry = |entry: &Option<Entry>| entry.as_ref().map_or(0, |entry| entry.value.len());
        self.changed
            .iter()
            .map(|one| one.key.len() + entry(&one.previous) + entry(&one.entry) + OVERHEAD_BYTES)
            .sum()
    }
}

/// The revisions from `oldest` (exclusive) to the current one, without a gap.
#[derive(Debug)]
pub(crate) struct History {
    revisions: VecDeque<Recorded>,
    bytes: usize,
    /// The oldest revision that can be listed and watched from.
    oldest: Revision,
}

impl History {
    pub(crate) fn new(oldest: Revision) -> Self {
        Self { revisions: VecDeque::new(), bytes: 0, oldest }
    }

    pub(crate) fn oldest(&self) -> Revision {
        self.oldest
    }

    pub(crate) fn current(&self) -> Revision {
        self.revisions.back().map_or(self.oldest, |newest| newest.revision)
    }

    pub(crate) fn push(&mut self, recorded: Recorded) {
        assert_eq!(recorded.revision, self.current().next(), "revisions have no gap");
        self.bytes += recorded.bytes();
        self.revisions.push_back(recorded);
    }

    /// Drops the oldest revisions beyond the bounds, but never the newest one. Returns the oldest
    /// revision that can be listed now.
    pub(crate) fn compact(&mut self, limits: &Limits) -> Revision {
        while self.revisions.len() > 1
            && (self.revisions.len() > limits.history_revisions
                || self.bytes > limits.history_bytes)
        {
            let dropped = self.revisions.pop_front().expect("more than one");
            self.bytes -= dropped.bytes();
            self.oldest = dropped.revision;
        }
        self.oldest
    }

    pub(crate) fn check(&self, asked: Revision) -> Result<()> {
        if asked < self.oldest {
            return Err(Error::Compacted { asked, oldest: self.oldest });
        }
        let current = self.current();
        if asked > current {
            return Err(Error::Ahead { asked, current });
        }
        Ok(())
    }

    /// Returns the revisions above `after`.
    pub(crate) fn after(&self, after: Revision) -> Result<impl Iterator<Item = &Recorded>> {
        self.check(after)?;
        let skip = usize::try_from(after.0 - self.oldest.0).expect("within the history");
        Ok(self.revisions.range(skip..))
    }

    /// Returns what was different at revision `at`: each key that has changed since, as it was.
    pub(crate) fn undo(&self, at: Revision) -> Result<BTreeMap<&str, Option<&Entry>>> {
        let mut was = BTreeMap::new();
        for recorded in self.after(at)? {
            for one in recorded.changed.iter() {
                was.entry(one.key.as_str()).or_insert(one.previous.as_ref());
            }
        }
        Ok(was)
    }
}
