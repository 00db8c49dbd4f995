//! The part of a stream in an object.

use std::sync::Arc;

use crate::catalog::{ObjectInfo, ObjectRange};
use crate::types::StreamOffset;

/// A part of the stream in an object.
#[derive(Clone)]
pub(crate) struct Range {
    pub(crate) object: Arc<ObjectInfo>,
    pub(crate) start: StreamOffset,
    pub(crate) end: StreamOffset,
    pub(crate) payload_bytes: u64,
    pub(crate) max_timestamp_ms: i64,
}

impl Range {
    /// Converts a range of the catalog.
    pub(crate) fn of(object: Arc<ObjectInfo>, range: &ObjectRange) -> Self {
        Self {
            object,
            start: range.start,
            end: range.end,
            payload_bytes: range.payload_bytes,
            max_timestamp_ms: range.max_timestamp_ms,
        }
    }

    /// Returns the greatest timestamp of its batches, or its time of creation if none has one.
    pub(crate) fn newest_ms(&self) -> i64 {
        match self.max_timestamp_ms {
            ..0 => self.object.created_at_ms,
            newest_ms => newest_ms,
        }
    }

    /// Whether the range is the only one in its object.
    pub(crate) fn is_own(&self) -> bool {
        self.object.payload_bytes == self.payload_bytes
    }
}
