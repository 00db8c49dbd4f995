//! What the data objects show of a catalog that is damaged or lost. `docs/format/chain.md`,
//! section 10.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use bytes::Bytes;
use futures::StreamExt;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore};
use uuid::Uuid;

use super::checkpoints::{self, Folded, Unfolded};
use super::fill;
use super::offsets::Offsets;
use super::source::{RebuildStep, Source};
use crate::catalog::ObjectRange;
use crate::chain::{ChainObject, ChainState, ChainStream, LostEntries, Salvaged};
use crate::damage::Damage;
use crate::fold::Filler;
use crate::naming::{object_id, object_nonce, object_prefix};
use crate::object::{DirectoryRow, Origin};
use crate::object_error::ObjectError;
use crate::objects::{Directory, list_objects, read_directory, read_index};
use crate::types::{KIND_LOG, ObjectId, StreamId, StreamOffset};

/// Directories of objects that are read at the same time.
const READS: usize = 32;

/// What a rebuild from objects has found.
#[derive(Debug, Default)]
pub struct FromObjects {
    /// Fences and deltas that are damaged or missing.
    pub lost_entries: Vec<LostEntries>,
    /// Snapshots that are damaged.
    pub damaged_snapshots: Vec<ObjectError>,
    /// The chain is older than the WAL, or there is none.
    pub is_old: bool,
    /// Streams whose creation is lost, and which objects have.
    pub restored: Vec<StreamId>,
    /// Objects that have records according to the catalog, and do not exist.
    pub missing: Vec<String>,
    /// Damage of objects that were read: of directories, indices and blocks.
    pub damaged: Vec<ObjectError>,
    /// Offsets whose records were uploaded, and which no object has.
    pub lost: Vec<(StreamId, Range<StreamOffset>)>,
    /// Batches for lost offsets.
    pub filled: Vec<(StreamId, Filler)>,
    /// The greatest number of an object, whether it exists and can be read or not.
    pub last_object: Option<ObjectId>,
    /// The greatest term in which an object without a range in the catalog was written.
    pub last_term: u32,
}

impl FromObjects {
    /// Whether the catalog has everything that was uploaded.
    pub(super) fn is_complete(&self) -> bool {
        self.lost_entries.is_empty() && !self.is_old
    }

    /// Whether all of it is in objects, too.
    pub(super) fn is_whole(&self) -> bool {
        self.is_complete() && self.missing.is_empty()
    }

    /// Returns the number of fences and deltas that are lost.
    pub(super) fn lost_numbers(&self) -> u64 {
        let lost = self.lost_entries.iter().map(|lost| &lost.numbers);
        lost.map(|numbers| numbers.end() - numbers.start() + 1).sum()
    }
}

/// A stream's part of an object of which the catalog has no range.
struct Row {
    kind: u8,
    label: Option<Bytes>,
    range: ObjectRange,
}

/// What an object holds.
struct Described {
    object: ChainObject,
    rows: Vec<(StreamId, Row)>,
    /// The term in which it was written; 0 if it does not state one.
    term: u32,
    /// See [`Origin::is_of_rebuild`].
    is_of_rebuild: bool,
    /// Its directory is damaged, so labels are missing.
    damage: Option<ObjectError>,
}

impl Described {
    /// Returns the number of offsets of all streams.
    fn offsets(&self) -> u64 {
        self.rows.iter().map(|(_, row)| row.range.end.0 - row.range.start.0).sum()
    }
}

/// What is in the object store.
struct Listed {
    /// Objects of which the catalog has no range.
    candidates: HashMap<ObjectId, ChainObject>,
    /// Their contents by stream, in the order of objects.
    rows: BTreeMap<StreamId, Vec<Row>>,
}

/// Adds what the data objects show to what is left of a catalog. If nothing is missing in it, it
/// stays as it is.
pub(super) async fn restore(
    source: &Source<'_>,
    salvaged: Salvaged,
    is_old: bool,
) -> Result<(ChainState, FromObjects), ObjectError> {
    let Salvaged { mut state, intact, lost, damaged_snapshots, deleted } = salvaged;
    let mut found =
        FromObjects { lost_entries: lost, damaged_snapshots, is_old, ..FromObjects::default() };
    let Listed { candidates, mut rows } = list(source, &mut state, &mut found).await?;
    if found.is_whole() {
        return Ok((state, found));
    }
    for (id, rows) in &rows {
        // An older stream that does not exist was deleted.
        let may_be_new = *id >= intact.header.next_stream && !deleted.contains(id);
        if may_be_new && !found.is_complete() {
            let start = rows.iter().map(|row| row.range.start).min().unwrap_or_default();
            let new = || ChainStream { start, uploaded_end: start, ..ChainStream::default() };
            state.streams.entry(*id).or_insert_with(new);
        }
    }
    let ids: Vec<StreamId> = state.streams.keys().copied().collect();
    let mut unfolded = Vec::new();
    for id in ids {
        let rows = rows.remove(&id).unwrap_or_default();
        // Lost with an earlier WAL.
        let gaps = Offsets::of(state.gaps_of(id));
        let stream = state.streams.get_mut(&id).expect("one of the ids");
        let before = intact.streams.get(&id);
        if before.is_none() && stream.label.is_empty() && stream.kind == KIND_LOG {
            if is_nothing(stream) && rows.is_empty() {
                state.streams.remove(&id);
                state.hints.remove(&id);
                continue;
            }
            describe_stream(stream, &rows, intact.header.opening == 0);
            found.restored.push(id);
        }
        let expected = expected(stream, before, &gaps);
        stream.ranges.retain(|range| state.objects.contains_key(&range.object));
        choose(stream, rows, &gaps);
        for ObjectRange { object, .. } in &stream.ranges {
            if let Some(candidate) = candidates.get(object) {
                state.objects.entry(*object).or_insert_with(|| candidate.clone());
            }
        }
        let end = stream.ranges.last().map_or(stream.uploaded_end, |range| range.end);
        let new = stream.uploaded_end.max(stream.start)..end;
        let all = expected.into_iter().chain([new]);
        let holes = Offsets::of(all).without(&covered(stream)).without(&gaps);
        let lost = holes.clone().into_ranges();
        let fillers = fill::known(&**source.fold, stream, &lost);
        found.filled.extend(fillers.into_iter().map(|filler| (id, filler)));
        found.lost.extend(lost.into_iter().map(|offsets| (id, offsets)));
        if end > stream.uploaded_end {
            unfolded.push(Unfolded { id, offsets: stream.uploaded_end..end, holes });
        }
    }
    let Folded { lost, damaged, filled } = checkpoints::fold(source, &mut state, unfolded).await?;
    found.lost.extend(lost);
    found.damaged.extend(damaged);
    found.filled.extend(filled);
    Ok((state, found))
}

/// Whether nothing is known of a stream whose creation is lost.
fn is_nothing(stream: &ChainStream) -> bool {
    stream.ranges.is_empty() && (stream.start, stream.uploaded_end) == Default::default()
}

/// Adds what objects show of a stream whose creation is lost. Without a chain nothing shows what
/// was trimmed (`start_is_lost`).
fn describe_stream(stream: &mut ChainStream, rows: &[Row], start_is_lost: bool) {
    if let Some(row) = rows.iter().rev().find(|row| row.label.is_some()) {
        stream.kind = row.kind;
        stream.label = row.label.clone().unwrap_or_default();
    }
    if start_is_lost && stream.start == StreamOffset(0) {
        let known = rows.iter().map(|row| row.range.start);
        let known = known.chain(stream.ranges.iter().map(|range| range.start));
        stream.start = known.min().unwrap_or_default();
    }
}

/// Compares the catalog with the objects that exist: removes those that are missing from it, and
/// reads what the others hold.
async fn list(
    source: &Source<'_>,
    state: &mut ChainState,
    found: &mut FromObjects,
) -> Result<Listed, ObjectError> {
    let store = state.header.store;
    let prefix = Path::from(object_prefix(store));
    found.last_object = state.objects.last_key_value().map(|(id, _)| *id);
    let (mut needed, mut of_unnamed) = (BTreeSet::new(), BTreeSet::new());
    for stream in state.streams.values() {
        needed.extend(stream.ranges.iter().map(|range| range.object));
        if stream.label.is_empty() {
            of_unnamed.extend(stream.ranges.iter().map(|range| range.object));
        }
    }
    let mut unknown = Vec::new();
    let mut existing = BTreeSet::new();
    for meta in list_objects(&**source.objects, Some(&prefix)).await? {
        let name = meta.location.as_ref();
        let (Some(id), Some(nonce)) = (object_id(name), object_nonce(name)) else { continue };
        found.last_object = found.last_object.max(Some(id));
        match state.objects.get(&id) {
            Some(known) if (known.nonce, known.size_bytes) == (nonce, meta.size) => {
                existing.insert(id);
                if !needed.contains(&id) || of_unnamed.contains(&id) {
                    // Its range may be lost, or the creation of its stream.
                    unknown.push((id, meta));
                }
            }
            // A number has one object, and names of abandoned attempts.
            Some(known) if known.nonce != nonce => {}
            _ => unknown.push((id, meta)),
        }
    }
    for (id, object) in &state.objects {
        if !existing.contains(id) && needed.contains(id) {
            found.missing.push(object.name(store));
        }
    }
    state.objects.retain(|id, _| existing.contains(id));
    let mut listed = Listed { candidates: HashMap::new(), rows: BTreeMap::new() };
    if found.is_whole() {
        return Ok(listed);
    }
    // Of the objects with one number, attempts of one upload, one is used: that with most, the
    // newest of several.
    unknown.sort_by_key(|(id, meta)| (*id, meta.last_modified));
    let total = unknown.iter().map(|(_, meta)| meta.size).sum();
    let mut done = 0;
    let read = unknown.into_iter().map(|(id, meta)| async move {
        let described = source.read(|| describe(&**source.objects, store, id, &meta)).await;
        (meta.size, described)
    });
    let mut read = futures::stream::iter(read).buffered(READS);
    let mut described: BTreeMap<ObjectId, Described> = BTreeMap::new();
    while let Some((size_bytes, object)) = read.next().await {
        done += size_bytes;
        (source.progress)(RebuildStep::Directories, done, total);
        match object {
            // What the catalog does not have of these is derived again.
            Ok(object) if object.is_of_rebuild => {}
            Ok(mut object) => {
                found.damaged.extend(object.damage.take());
                let other = described.get(&object.object.id);
                if other.is_none_or(|other| other.offsets() <= object.offsets()) {
                    described.insert(object.object.id, object);
                }
            }
            Err(error) if error.is_loss() => found.damaged.push(error),
            Err(error) => return Err(error),
        }
    }
    for (id, Described { object, rows, term, .. }) in described {
        for (stream, row) in rows {
            listed.rows.entry(stream).or_default().push(row);
        }
        found.last_term = found.last_term.max(term);
        listed.candidates.insert(id, object);
    }
    Ok(listed)
}

/// Returns the offsets that a stream is known to have had in objects. `before` is the stream before
/// the first object of the chain that is lost: holes that it had are not missed.
fn expected(
    stream: &ChainStream,
    before: Option<&ChainStream>,
    gaps: &Offsets,
) -> Vec<Range<StreamOffset>> {
    let mut expected = Offsets::of([stream.start..stream.uploaded_end]);
    if let Some(before) = before {
        let whole = Offsets::of([before.start..before.uploaded_end]);
        expected = expected.without(&whole.without(&covered(before)));
    }
    let known = covered(stream).into_ranges();
    expected.without(gaps).into_ranges().into_iter().chain(known).collect()
}

fn covered(stream: &ChainStream) -> Offsets {
    let ranges = stream.ranges.iter().map(|range| range.start..range.end);
    Offsets::of(ranges.map(|range| range.start.max(stream.start)..range.end))
}

/// Adds ranges of candidates where the stream has none. Of ranges that overlap the one with the
/// greatest number stays: the output of a compaction has a greater number than its sources and
/// takes their place as a whole.
fn choose(stream: &mut ChainStream, rows: Vec<Row>, gaps: &Offsets) {
    let readable = Offsets::of([stream.start..StreamOffset(u64::MAX)]);
    let uncovered = readable.without(&covered(stream)).without(gaps);
    let wanted = rows.into_iter().map(|row| row.range);
    let wanted = wanted.filter(|range| uncovered.meets(&(range.start..range.end)));
    let mut ranges: Vec<ObjectRange> = stream.ranges.drain(..).chain(wanted).collect();
    ranges.sort_by_key(|range| Reverse(range.object));
    let mut chosen: BTreeMap<StreamOffset, ObjectRange> = BTreeMap::new();
    for range in ranges {
        let before = chosen.range(..range.end).next_back();
        if before.is_none_or(|(_, before)| before.end <= range.start) {
            chosen.insert(range.start, range);
        }
    }
    stream.ranges = chosen.into_values().collect();
}

/// Reads what an object holds: its directory, or if that is damaged its index.
async fn describe(
    objects: &dyn ObjectStore,
    store: Uuid,
    id: ObjectId,
    meta: &ObjectMeta,
) -> Result<Described, ObjectError> {
    let name = meta.location.as_ref();
    let (directory, damage) = match read_directory(objects, name).await {
        Ok(directory) => (directory, None),
        Err(error) if error.is_loss() => match read_index(objects, name).await {
            Ok(directory) => (directory, Some(error)),
            Err(other) if other.is_loss() => return Err(error),
            Err(other) => return Err(other),
        },
        Err(error) => return Err(error),
    };
    let payload_bytes = directory.payload_bytes();
    let Directory { format, size_bytes, nonce, origin, rows, .. } = directory;
    if let Some(origin) = origin.as_ref().filter(|origin| origin.store != store) {
        let reason = format!("it belongs to store {}", origin.store);
        return Err(ObjectError::damaged(name, Damage::of_all(reason)));
    }
    let object = ChainObject {
        id,
        nonce,
        size_bytes,
        index_position: directory.index_position,
        index_bytes: directory.index_bytes,
        index_crc32c: directory.index_crc32c,
        created_at_ms: match &origin {
            Some(origin) => origin.created_at_ms,
            None => meta.last_modified.timestamp_millis(),
        },
        generation: origin
            .as_ref()
            .map_or(0, |origin| u8::try_from(origin.generation).unwrap_or(u8::MAX)),
        payload_bytes,
        format: u8::try_from(format).expect("a version that can be read"),
    };
    let row = |row: DirectoryRow| {
        let DirectoryRow { stream, kind, label, start, end, payload_bytes, .. } = row;
        let max_timestamp_ms = row.max_timestamp_ms;
        let range = ObjectRange { object: id, start, end, payload_bytes, max_timestamp_ms };
        (stream, Row { kind, label, range })
    };
    let is_of_rebuild = origin.as_ref().is_some_and(Origin::is_of_rebuild);
    let term = origin.map_or(0, |origin| origin.term);
    let rows = rows.into_iter().map(row).collect();
    Ok(Described { object, rows, term, is_of_rebuild, damage })
}
