//! Which records an object contains according to the catalog, by topic and partition.

use std::collections::HashMap;

use alluvium_stream::StreamId;
use alluvium_stream::chain::ChainState;

use crate::catalog;

/// Maximum number of partitions listed for an object.
const LISTED: usize = 10;

/// A catalog, with the names of its streams.
pub(super) struct Contents<'a> {
    state: &'a ChainState,
    names: HashMap<StreamId, String>,
}

impl<'a> Contents<'a> {
    pub(super) fn of(state: &'a ChainState) -> Self {
        Self { state, names: catalog::stream_names(state) }
    }

    /// Describes which offsets of which streams are in the object with this name; `None` if the
    /// catalog has no such object, or nothing in it is in use. A directory or bucket in front of
    /// the name is ignored.
    pub(super) fn describe(&self, object: &str) -> Option<String> {
        let file = |name: &str| name.rsplit('/').next().map(str::to_owned);
        let mut objects = self.state.objects.values();
        let store = self.state.header.store;
        let known = objects.find(|known| file(&known.name(store)) == file(object))?;
        let mut parts = Vec::new();
        for (id, stream) in &self.state.streams {
            let ranges = stream.ranges.iter().filter(|range| range.object == known.id);
            parts.extend(ranges.map(|range| {
                let unnamed = || format!("stream {id}");
                let name = self.names.get(id).cloned().unwrap_or_else(unnamed);
                format!("offsets {} to {} of {name}", range.start, range.end.0.saturating_sub(1))
            }));
        }
        let mut text = parts.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", ");
        if parts.len() > LISTED {
            text = format!("{text}, and those of {} other streams", parts.len() - LISTED);
        }
        (!text.is_empty()).then_some(text)
    }
}
