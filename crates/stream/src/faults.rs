//! Faults that do not stop the server, and the reports of those that are present.

use std::collections::BTreeMap;

use parking_lot::Mutex;

/// A kind of fault that does not stop the server. Its label is part of the interface: `/healthz`
/// and the metric `alluvium_degraded` carry it, and docs/metrics.md explains each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Parts of the WAL that were durable could not be read by recovery.
    LogDamaged,
    /// Recovery found offsets missing: acknowledged records are lost, or may be.
    OffsetsLost,
    /// Objects cannot be written.
    UploadsFailing,
    /// Objects in use are damaged: acknowledged records are lost.
    ObjectsDamaged,
    /// Objects in use are missing from the object store.
    ObjectsMissing,
    /// Objects cannot be read now; their records are not known to be lost.
    ColdReadsFailing,
    /// Changes of the catalog cannot be written to the object store.
    CatalogBehind,
    /// Partitions cannot be compacted by key.
    LogCompactionFailing,
    /// Small objects cannot be merged into larger ones.
    ObjectCompactionFailing,
    /// Objects without references cannot be deleted.
    ObjectDeletionFailing,
    /// The catalog of a store that another server writes cannot be read.
    CatalogNotFollowed,
}

impl Reason {
    /// All reasons, in the order in which they are listed.
    pub const ALL: [Self; 11] = [
        Self::LogDamaged,
        Self::OffsetsLost,
        Self::UploadsFailing,
        Self::ObjectsDamaged,
        Self::ObjectsMissing,
        Self::ColdReadsFailing,
        Self::CatalogBehind,
        Self::LogCompactionFailing,
        Self::ObjectCompactionFailing,
        Self::ObjectDeletionFailing,
        Self::CatalogNotFollowed,
    ];

    /// Returns the name of the reason in `/healthz` and in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::LogDamaged => "log_damaged",
            Self::OffsetsLost => "offsets_lost",
            Self::UploadsFailing => "uploads_failing",
            Self::ObjectsDamaged => "objects_damaged",
            Self::ObjectsMissing => "objects_missing",
            Self::ColdReadsFailing => "cold_reads_failing",
            Self::CatalogBehind => "catalog_behind",
            Self::LogCompactionFailing => "log_compaction_failing",
            Self::ObjectCompactionFailing => "object_compaction_failing",
            Self::ObjectDeletionFailing => "object_deletion_failing",
            Self::CatalogNotFollowed => "catalog_not_followed",
        }
    }
}

/// A fault that is present now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Degraded {
    /// The kind of fault.
    pub reason: Reason,
    /// Details for an operator, in one line.
    pub detail: String,
}

/// Faults reported by the code that detects them. A fault that the store's numbers already show is
/// derived from those instead; see [`crate::health`].
#[derive(Default)]
pub(crate) struct Faults(Mutex<BTreeMap<Reason, String>>);

impl Faults {
    /// Reports the fault with this detail or, with `None`, its end.
    pub(crate) fn report(&self, reason: Reason, detail: Option<String>) {
        let mut faults = self.0.lock();
        match detail {
            Some(detail) => drop(faults.insert(reason, detail)),
            None => drop(faults.remove(&reason)),
        }
    }

    /// Returns the details of the reported faults.
    pub(crate) fn reported(&self) -> BTreeMap<Reason, String> {
        self.0.lock().clone()
    }
}
