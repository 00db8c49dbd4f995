//! A catalog in memory, for tests; also the simplest statement of what the changes mean.

use parking_lot::Mutex;

use super::{
    Catalog, CatalogError, Change, INCARNATIONS_KEPT, Incarnation, Snapshot, StreamRow, Uploaded,
    refusal,
};

/// A catalog that holds everything in memory. A "restart" in a test opens another store on the same
/// value.
#[derive(Debug, Default)]
pub struct MemoryCatalog {
    state: Mutex<Snapshot>,
}

/// Creates a catalog with the contents of another one: a restored copy.
impl From<Snapshot> for MemoryCatalog {
    fn from(snapshot: Snapshot) -> Self {
        Self { state: Mutex::new(snapshot) }
    }
}

impl Catalog for MemoryCatalog {
    fn load(&self) -> Result<Snapshot, CatalogError> {
        Ok(self.state.lock().clone())
    }

    fn commit(&self, changes: &[Change]) -> Result<u64, CatalogError> {
        let mut state = self.state.lock();
        let mut next = state.clone();
        for change in changes {
            apply(&mut next, change)?;
        }
        next.version += 1;
        *state = next;
        Ok(state.version)
    }
}

fn apply(state: &mut Snapshot, change: &Change) -> Result<(), CatalogError> {
    match change {
        Change::CreateStream { id, kind } => {
            if id.0 >= state.next_stream_id {
                return Err(refusal::id_not_handed_out(*id, state.next_stream_id));
            }
            if state.streams.contains_key(id) {
                return Err(refusal::exists(*id));
            }
            state.streams.insert(*id, StreamRow { kind: *kind, ..StreamRow::default() });
        }
        Change::DeleteStream { id, epoch } => {
            let stream = state.streams.remove(id).ok_or_else(|| refusal::no_stream(*id))?;
            refusal::of_epoch(*id, *epoch, stream.epoch)?;
        }
        Change::TrimStream { id, epoch, to } => {
            let stream = state.streams.get_mut(id).ok_or_else(|| refusal::no_stream(*id))?;
            refusal::of_epoch(*id, *epoch, stream.epoch)?;
            stream.start = stream.start.max(*to);
            stream.ranges.retain(|range| range.end > *to);
        }
        Change::PutMeta { key, value } => drop(state.meta.insert(key.clone(), value.clone())),
        Change::DeleteMeta(key) => drop(state.meta.remove(key)),
        Change::BindWal(id) => state.wal_id = Some(*id),
        Change::NextStreamId(id) => {
            if id.0 < state.next_stream_id {
                return Err(refusal::back("the next stream id", state.next_stream_id, id.0));
            }
            state.next_stream_id = id.0;
        }
        Change::OpenStream { id, epoch } => {
            let stream = state.streams.get_mut(id).ok_or_else(|| refusal::no_stream(*id))?;
            if *epoch < stream.epoch {
                return Err(refusal::back("a stream's epoch", stream.epoch.0, epoch.0));
            }
            stream.epoch = *epoch;
        }
        Change::AddObject(object) => {
            if state.objects.contains_key(&object.id) {
                return Err(refusal::object_exists(object.id));
            }
            state.next_object_id = state.next_object_id.max(object.id.0 + 1);
            state.objects.insert(object.id, object.clone());
        }
        Change::Uploaded(Uploaded { stream: id, uploaded_end, start, checkpoint, range }) => {
            let stream = state.streams.get_mut(id).ok_or_else(|| refusal::no_stream(*id))?;
            if *uploaded_end < stream.uploaded_end {
                return Err(refusal::back(
                    "the uploaded end",
                    stream.uploaded_end.0,
                    uploaded_end.0,
                ));
            }
            stream.uploaded_end = *uploaded_end;
            stream.start = stream.start.max(*start);
            stream.checkpoint.clone_from(checkpoint);
            if let Some(range) = range.as_ref().filter(|range| range.end > stream.start) {
                if !state.objects.contains_key(&range.object) {
                    return Err(refusal::no_object(range.object));
                }
                if let Some(last) = stream.ranges.last().filter(|last| last.end > range.start) {
                    return Err(refusal::not_after(*id, range, last.end));
                }
                stream.ranges.push(range.clone());
            }
        }
        Change::LogUploaded(to) => state.uploaded_log = *to,
        Change::BeginIncarnation { id, version } => {
            if !id.is_nil() {
                state.incarnations.push(Incarnation { after_version: state.version, id: *id });
            }
            // The commit raises it by one.
            state.version = state.version.max(version.saturating_sub(1));
            let too_many = state.incarnations.len().saturating_sub(INCARNATIONS_KEPT);
            state.incarnations.drain(..too_many);
        }
        Change::WalMarked(mark) => state.wal_mark = state.wal_mark.max(*mark),
        Change::Replaced(replaced) => {
            let id = replaced.stream;
            let stream = state.streams.get_mut(&id).ok_or_else(|| refusal::no_stream(id))?;
            if !state.objects.contains_key(&replaced.new.object) {
                return Err(refusal::no_object(replaced.new.object));
            }
            let first = replaced.old.first();
            let first = stream.ranges.partition_point(|range| Some(&range.start) < first);
            let before = first.checked_sub(1).map(|before| &stream.ranges[before]);
            refusal::of_replaced(replaced, before, &stream.ranges[first..])?;
            let gone = first..first + replaced.old.len();
            stream.ranges.splice(gone, [replaced.new.clone()]);
        }
        Change::RemoveObject(id) => drop(state.objects.remove(id)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conforms() {
        super::super::conformance::run(&|| Box::new(MemoryCatalog::default()));
    }
}
