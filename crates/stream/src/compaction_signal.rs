//! How changes of streams request object compaction.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::options::Options;
use crate::tail::Changed;
use crate::types::StreamId;

/// What changes of streams record for the compaction task.
pub(crate) struct CompactionSignal {
    /// False: there is no task, and nothing is recorded for it.
    is_on: bool,
    /// There may be something to do.
    pub(crate) wanted: Notify,
    /// Held from the scan of ranges until they are replaced.
    pub(crate) exclusive: tokio::sync::Mutex<()>,
    /// Streams that have got new ranges since their last scan, and where.
    pub(crate) changed: Mutex<BTreeMap<StreamId, Changed>>,
}

impl CompactionSignal {
    pub(crate) fn new(options: &Options) -> Self {
        Self {
            is_on: options.compaction_bytes > 0,
            wanted: Notify::new(),
            exclusive: tokio::sync::Mutex::default(),
            changed: Mutex::default(),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Records that these streams have got new ranges.
    pub(crate) fn changed(&self, streams: impl IntoIterator<Item = (StreamId, Changed)>) {
        if !self.is_on {
            return;
        }
        let mut all = self.changed.lock();
        for (stream, changed) in streams {
            let known = all.entry(stream).or_insert(changed);
            *known = known.and(changed);
        }
        drop(all);
        self.wanted.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_recorded_for_a_disabled_task() {
        for (compaction_bytes, remembered) in [(0, 0), (64 << 10, 2)] {
            let options = Options { compaction_bytes, ..Options::default() };
            let signal = CompactionSignal::new(&options);
            signal.changed([1, 2, 2].map(|id| (StreamId(id), Changed::ALL)));
            assert_eq!(signal.changed.lock().len(), remembered);
        }
    }
}
