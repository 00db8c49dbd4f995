//! Recovery: the catalog records what is uploaded, the WAL has the rest.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use alluvium_device::SharedDevice;
use alluvium_wal::{LogOffset, OpenError, Record, RecoveryReport, Wal};
use bytes::Bytes;
use parking_lot::Mutex;
use uuid::Uuid;

use crate::cache::LogCache;
use crate::catalog::{
    Catalog, CatalogError, Change, Incarnation, ObjectInfo, RESTORE, Snapshot, StreamRow,
    own_number,
};
use crate::catalog_state::Ids;
use crate::ends::{self, Continuation, Ends, Evidence, LargestCount};
use crate::error::StoreError;
use crate::fold::Fold;
use crate::object_table::{ObjectTable, Used};
use crate::options::Options;
use crate::range::Range;
use crate::record::{self, End, StreamRecord};
use crate::repair;
use crate::report::{Gap, GapCause, Recovery};
use crate::tail::{self, BATCH_OVERHEAD_BYTES, Cached, StreamState, Tail};
use crate::types::{ObjectId, StreamId, StreamOffset};

/// Advice to an operator whose catalog and WAL contradict each other.
const OTHER_CATALOG: &str = "Open the WAL with the catalog that it was last in use with";

/// Metadata key of the term in the catalog, in decimal; see [`crate::Store::term`].
const TERM_KEY: &str = "stream/term";

/// The parts of a store, ready for traffic.
pub(crate) struct Recovered {
    pub(crate) recovery: Recovery,
    pub(crate) wal: Wal,
    pub(crate) max_batch_bytes: u64,
    pub(crate) streams: HashMap<StreamId, Arc<StreamState>>,
    pub(crate) meta: BTreeMap<String, Vec<u8>>,
    pub(crate) cache: LogCache,
    pub(crate) objects: ObjectTable,
    pub(crate) ids: Ids,
    pub(crate) ends: Ends,
    /// See [`crate::Store::term`].
    pub(crate) term: u32,
    /// The catalog's version after the last commit of the opening.
    pub(crate) version: u64,
    /// The runs that the catalog keeps, with this one as the last.
    pub(crate) incarnations: Vec<Incarnation>,
}

/// Recovers a store. Blocking. After an error the WAL is unchanged, unless only the last step has
/// failed, which records the result in the catalog. A catalog that was not refused is bound to the
/// WAL and has a later version. Rationale: `docs/format/catalog.md`.
pub(crate) fn recover(
    device: SharedDevice,
    wal_options: &alluvium_wal::Options,
    catalog: &dyn Catalog,
    fold: &dyn Fold,
    options: &Options,
    progress: Option<alluvium_wal::Progress>,
) -> Result<Recovered, StoreError> {
    let began = Instant::now();
    let open_error = |error| StoreError::Open(Arc::new(error));
    let snapshot = catalog.load()?;
    let header = Wal::inspect(&device).map_err(open_error)?.header;
    options.check(header.capacity_bytes)?;
    if let Some(bound) = snapshot.wal_id.filter(|bound| *bound != header.wal_id) {
        return Err(StoreError::WrongWal { catalog: bound, wal: header.wal_id });
    }
    let (uploaded, version) = (snapshot.uploaded_log, snapshot.version);
    let old_catalog = |mark, trimmed| StoreError::OldCatalog { version, mark, uploaded, trimmed };
    if version < header.mark || uploaded < header.trim {
        return Err(old_catalog(header.mark, header.trim));
    }
    if header.mark < snapshot.wal_mark {
        return Err(StoreError::OldWal { mark: header.mark, seen: snapshot.wal_mark });
    }
    let max_record_bytes = u64::from(wal_options.max_record_bytes);
    let max_batch_bytes = max_record_bytes
        .saturating_sub(record::HEADER_BYTES as u64)
        .min(options.cache_bytes / 2 - BATCH_OVERHEAD_BYTES);

    let (next_stream, next_object) = (snapshot.next_stream_id, snapshot.next_object_id);
    let bind = snapshot.wal_id.is_none().then_some(Change::BindWal(header.wal_id));
    let mut incarnations = snapshot.incarnations.clone();
    let mut replay = Replay::new(snapshot, LogCache::new(options.cache_bytes))?;
    let mut visit = |record: Record| replay.visit(&record).map_err(Into::into);
    // In this order: the mark is never ahead of the true catalog.
    let id = Uuid::new_v4();
    // Above all versions of a server that was taken over, regardless of how many commits it has
    // made since.
    let epoch = header.epoch.saturating_add(1);
    let begin = Change::BeginIncarnation { id, version: u64::from(epoch) << 32 };
    let begin: Vec<_> = bind.into_iter().chain([begin]).collect();
    let mark = catalog.commit(&begin)?;
    incarnations.push(Incarnation { after_version: version, id });
    let wal_options = alluvium_wal::Options { mark: Some(mark), ..wal_options.clone() };
    let opened = Wal::open(device, &wal_options, progress, &mut visit);
    let (wal, report) = opened.map_err(|error| match error {
        // Another process has opened the WAL since the header was read.
        OpenError::MarkNotAhead { found, .. } => old_catalog(found, header.trim),
        error => open_error(error),
    })?;
    // The same if that process sets no mark.
    if uploaded < report.start {
        return Err(old_catalog(mark, report.start));
    }
    let kept_count = LargestCount::of(&replay.meta);
    let is_covered = replay.evidence.covered_to() > replay.last_batch;
    let bound = kept_count.filter(|kept| replay.largest_count <= kept.0);
    replay.skip_lost(&report, uploaded, bound.unwrap_or(LargestCount::UNKNOWN));
    replay.repair(fold, report.start).map_err(StoreError::Failed)?;
    let mut done = Vec::new();
    // What is skipped must be in the log before a lower bound is recorded, with which the next
    // recovery would skip less.
    let is_noted =
        replay.gaps.is_empty() || replay.note_ends(&wal, &report, wal_options.max_record_bytes)?;
    let mut largest_count = match is_noted {
        true => kept_count.unwrap_or_default().max(LargestCount::at_least(replay.largest_count)),
        false => kept_count.unwrap_or(LargestCount::UNKNOWN),
    };
    if is_noted && kept_count != Some(largest_count) {
        done.push(largest_count.change());
    }
    let missing_end = (report.end < uploaded).then_some(report.end..uploaded);
    let mut term: u32 = own_number(&replay.meta, TERM_KEY).unwrap_or(0);
    let mut noted = vec![Change::WalMarked(mark)];
    if !(replay.gaps.is_empty() && report.damage.is_empty() && missing_end.is_none()) {
        term += 1;
        let (key, value) = (TERM_KEY.to_owned(), term.to_string().into_bytes());
        replay.meta.insert(key.clone(), value.clone());
        noted.push(Change::PutMeta { key, value });
    }
    done.extend(noted.iter().cloned());
    if is_noted && missing_end.is_some() {
        // What was skipped is in the log, so the next start does not report the missing end again.
        done.push(Change::LogUploaded(report.end));
    }
    let version = match catalog.commit(&done) {
        // What is not recorded now is found again by the next start, or is recorded when there is
        // space. The term is needed before anything is appended.
        Err(CatalogError::Full(_)) => {
            largest_count = kept_count.unwrap_or(LargestCount::UNKNOWN);
            catalog.commit(&noted)?
        }
        committed => committed?,
    };
    if let Change::PutMeta { key, value } = largest_count.change() {
        replay.meta.insert(key, value);
    }
    let ends_from = if is_covered { report.end } else { report.start };
    let has_batches = replay.batches > 0 || !replay.gaps.is_empty();
    let ends = Ends::new(
        ends_from,
        !is_covered && has_batches,
        wal_options.max_record_bytes,
        largest_count,
    );
    // The number includes the epoch, so a former owner never reaches the numbers of objects that
    // were written after its time.
    let next_object = next_object.max(u64::from(report.epoch) << 32);
    replay.objects.committed = next_object;
    let ids = Ids {
        next_stream: next_stream.into(),
        fresh_streams: Mutex::default(),
        next_object: next_object.into(),
    };

    for damage in &report.damage {
        tracing::error!("acknowledged data cannot be read back: {damage}");
    }
    if let Some(missing) = &missing_end {
        tracing::error!(
            "the log ends at {}, but was once durable up to {}: its end is damaged, or the device \
             holds an old copy. Everything appended behind that is lost",
            missing.start,
            missing.end
        );
    }
    let streams = replay.streams.into_iter();
    let streams =
        streams.map(|(id, (kind, tail))| (id, Arc::new(StreamState::new(id, kind, tail))));
    let streams: HashMap<_, _> = streams.collect();
    let recovery = Recovery {
        wal: report,
        streams: streams.len(),
        batches: replay.batches,
        payload_bytes: replay.payload_bytes,
        skipped_uploaded: replay.skipped_uploaded,
        skipped_deleted: replay.skipped_deleted,
        gaps: replay.gaps,
        missing_end,
        elapsed: began.elapsed(),
    };
    Ok(Recovered {
        recovery,
        wal,
        max_batch_bytes,
        streams,
        meta: replay.meta,
        cache: replay.cache,
        objects: replay.objects,
        ids,
        ends,
        term,
        version,
        incarnations,
    })
}

/// Assigns the WAL's records to the streams of the catalog.
struct Replay {
    next_stream_id: u64,
    streams: HashMap<StreamId, (u8, Tail)>,
    meta: BTreeMap<String, Vec<u8>>,
    objects: ObjectTable,
    cache: LogCache,
    batches: u64,
    payload_bytes: u64,
    skipped_uploaded: u64,
    skipped_deleted: u64,
    gaps: Vec<Gap>,
    /// Log offset at which the last batch begins.
    last_batch: LogOffset,
    /// The greatest number of offsets in a batch.
    largest_count: u32,
    evidence: Evidence,
}

impl Replay {
    fn new(snapshot: Snapshot, cache: LogCache) -> Result<Self, StoreError> {
        let infos: HashMap<ObjectId, Arc<ObjectInfo>> =
            snapshot.objects.into_iter().map(|(id, info)| (id, Arc::new(info))).collect();
        let mut used: HashMap<ObjectId, Used> = HashMap::new();
        let mut streams = HashMap::with_capacity(snapshot.streams.len());
        for (id, row) in snapshot.streams {
            let StreamRow { kind, epoch, start, uploaded_end, checkpoint, ranges } = row;
            let mut restored = VecDeque::with_capacity(ranges.len());
            for range in ranges {
                let Some(object) = infos.get(&range.object) else {
                    let reason = format!(
                        "stream {id} has a range in object {}, which is not in the catalog: the \
                         catalog is damaged. {RESTORE}",
                        range.object
                    );
                    return Err(StoreError::Failed(reason));
                };
                used.entry(range.object).or_default().add(range.payload_bytes);
                restored.push_back(Range::of(object.clone(), &range));
            }
            let mut tail = Tail::restored(start, uploaded_end, checkpoint, restored);
            tail.epoch = epoch;
            streams.insert(id, (kind, tail));
        }
        let mut objects = ObjectTable::default();
        for (id, info) in infos {
            objects.insert(info, used.get(&id).copied().unwrap_or_default());
        }
        Ok(Self {
            next_stream_id: snapshot.next_stream_id,
            streams,
            meta: snapshot.meta,
            objects,
            cache,
            batches: 0,
            payload_bytes: 0,
            skipped_uploaded: 0,
            skipped_deleted: 0,
            gaps: Vec::new(),
            last_batch: LogOffset(0),
            largest_count: 0,
            evidence: Evidence::default(),
        })
    }

    /// Makes each stream continue behind everything that it can have had; called after the last
    /// record. If a stream was trimmed to a point beyond its last batch in the log, the trimmed
    /// batches were lost before they were folded into the checkpoint; and damage in the log may
    /// have held a stream's end. The offsets in question are not handed out again.
    fn skip_lost(&mut self, report: &RecoveryReport, uploaded: LogOffset, largest: LargestCount) {
        let streams = &self.streams;
        let next_stream_id = self.next_stream_id;
        let is_missing =
            |stream: StreamId, end: StreamOffset, is_certain: bool| match streams.get(&stream) {
                Some((_, tail)) => end > tail.uploaded_end,
                None => is_certain && stream.0 < next_stream_id,
            };
        let loss = std::mem::take(&mut self.evidence).judge(report, uploaded, is_missing);
        let mut gaps = std::mem::take(&mut self.gaps);
        for (id, (_, tail)) in &mut self.streams {
            let Continuation { known, next } =
                loss.continuation(*id, tail.next, tail.log_end(), largest.0);
            let (known, next) = (known.max(tail.start), next.max(tail.start));
            if known > tail.next {
                let offsets = tail.next..known;
                gaps.push(Gap { stream: *id, offsets, cause: GapCause::Lost });
            }
            if next > known {
                self.gaps.push(Gap { stream: *id, offsets: known..next, cause: GapCause::Skipped });
            }
            tail.recovered(next);
        }
        for Gap { stream, offsets, .. } in gaps {
            let parts = loss.parts(stream, offsets).into_iter();
            self.gaps.extend(parts.map(|(offsets, is_bound)| {
                let cause = if is_bound { GapCause::Skipped } else { GapCause::Lost };
                Gap { stream, offsets, cause }
            }));
        }
        self.gaps.sort_by_key(|gap| (gap.stream, gap.offsets.start));
    }

    /// Fills gaps with batches of the owner; called when all gaps are known.
    fn repair(&mut self, fold: &dyn Fold, log_start: LogOffset) -> Result<(), String> {
        let costs = repair::repair(fold, &mut self.streams, &self.meta, &self.gaps, log_start)?;
        for cost_bytes in costs {
            self.cache.restore(cost_bytes);
        }
        Ok(())
    }

    /// Writes the ends of all streams to the log, durably. Returns false if there is no space: then
    /// the next upload records them in the catalog before the log is trimmed, and until then the
    /// damage stays where it is.
    fn note_ends(
        &self,
        wal: &Wal,
        report: &RecoveryReport,
        max_record_bytes: u32,
    ) -> Result<bool, StoreError> {
        // For each stream that ends with skipped offsets, where these begin.
        let mut known: HashMap<StreamId, StreamOffset> = HashMap::new();
        for Gap { stream, offsets, .. } in
            self.gaps.iter().rev().filter(|gap| gap.cause == GapCause::Skipped)
        {
            let ends_at = known.get(stream).copied();
            if offsets.end == ends_at.unwrap_or_else(|| self.streams[stream].1.next) {
                known.insert(*stream, offsets.start);
            }
        }
        let not_uploaded =
            self.streams.iter().filter(|(_, (_, tail))| tail.next > tail.uploaded_end);
        let ends = not_uploaded.map(|(stream, (_, tail))| End {
            stream: *stream,
            next: tail.next,
            known: known.get(stream).copied().unwrap_or(tail.next),
        });
        let ends: Vec<_> = ends.collect();
        let is_noted = ends::append(wal, report.start..report.end, &ends, max_record_bytes)?;
        wal.wait_durable(wal.appended()).wait()?;
        Ok(is_noted)
    }

    fn unknown_stream(&self, id: StreamId) -> String {
        format!(
            "a record of stream {id}, but the catalog has handed out only ids below {}: it is not \
             the catalog of this WAL, or an old copy of it. {OTHER_CATALOG}",
            self.next_stream_id
        )
    }

    /// Processes a record. Ends records are kept as evidence. Each batch is one of these cases:
    ///
    /// | the record's stream and offsets | meaning |
    /// |---|---|
    /// | an id that was never handed out | refused: not this WAL's catalog, or an old copy of it |
    /// | not in the catalog | of a deleted stream: skipped |
    /// | end <= uploaded end | uploaded: skipped |
    /// | base = next | taken |
    /// | base > next | taken, with a gap before it |
    /// | else | refused: a duplicate or out of order, which no crash can cause |
    fn visit(&mut self, record: &Record) -> Result<(), String> {
        let (id, batch) = match record::decode_record(&record.payload)? {
            StreamRecord::Batch(id, batch) => (id, batch),
            StreamRecord::Ends(ends) => {
                let unknown = ends.ends.iter().find(|end| end.stream.0 >= self.next_stream_id);
                if let Some(end) = unknown {
                    return Err(self.unknown_stream(end.stream));
                }
                self.evidence.add(ends);
                return Ok(());
            }
        };
        if id.0 >= self.next_stream_id {
            return Err(self.unknown_stream(id));
        }
        self.last_batch = record.offset;
        self.largest_count = self.largest_count.max(batch.count);
        let Some((_, tail)) = self.streams.get_mut(&id) else {
            self.skipped_deleted += 1;
            return Ok(());
        };
        if batch.end() <= tail.uploaded_end {
            self.skipped_uploaded += 1;
            return Ok(());
        }
        if batch.base < tail.next {
            return Err(format!(
                "stream {id}: batch {}..{} begins before the next offset {}: the catalog is not \
                 from this WAL's last state. {OTHER_CATALOG}",
                batch.base,
                batch.end(),
                tail.next
            ));
        }
        if batch.base > tail.next {
            let offsets = tail.next..batch.base;
            self.gaps.push(Gap { stream: id, offsets, cause: GapCause::Lost });
        }
        self.batches += 1;
        self.payload_bytes += batch.payload.len() as u64;
        self.cache.restore(tail::cost_bytes(batch.payload.len()));
        tail.push(Cached {
            base: batch.base,
            count: batch.count,
            max_timestamp_ms: batch.max_timestamp_ms,
            log_end: record.end,
            // Copied, so that it does not keep the WAL's read buffer alive.
            payload: Bytes::copy_from_slice(&batch.payload),
            crc32c: crc32c::crc32c(&batch.payload),
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use alluvium_wal::LogOffset;

    use super::*;
    use crate::catalog::MemoryCatalog;
    use crate::catalog::conformance;

    /// Stream 0 is uploaded up to 10, stream 1 up to 5, stream 2 was deleted, 3 is the next id.
    fn replay() -> Replay {
        let catalog = MemoryCatalog::default();
        conformance::fill(&catalog);
        Replay::new(catalog.load().unwrap(), LogCache::new(1 << 20)).unwrap()
    }

    fn record(stream: u64, base: u64, count: u32) -> Record {
        let header = record::encode_header(StreamId(stream), StreamOffset(base), count, 0, 4);
        let payload: Bytes = [header.as_slice(), b"1234"].concat().into();
        Record { offset: LogOffset(0), end: LogOffset(1), epoch: 1, payload }
    }

    #[test]
    fn each_record_is_one_case() {
        let mut replay = replay();
        replay.visit(&record(0, 0, 10)).unwrap();
        replay.visit(&record(0, 9, 1)).unwrap();
        replay.visit(&record(2, 0, 1)).unwrap();
        assert_eq!((replay.skipped_uploaded, replay.skipped_deleted, replay.batches), (2, 1, 0));

        replay.visit(&record(0, 10, 2)).unwrap();
        replay.visit(&record(1, 5, 1)).unwrap();
        replay.visit(&record(0, 12, 1)).unwrap();
        assert_eq!(
            (replay.batches, replay.payload_bytes, replay.cache.pinned_bytes()),
            (3, 12, 3 * (4 + BATCH_OVERHEAD_BYTES))
        );
        assert_eq!(replay.gaps, []);

        replay.visit(&record(0, 20, 1)).unwrap();
        let offsets = StreamOffset(13)..StreamOffset(20);
        let gap = Gap { stream: StreamId(0), offsets, cause: GapCause::Lost };
        assert_eq!(replay.gaps, [gap]);

        for (refused, why) in [
            (record(0, 20, 1), "a duplicate"),
            (record(0, 13, 1), "in a gap, out of order"),
            (record(1, 4, 3), "across the uploaded end"),
            (record(3, 0, 1), "an id never handed out"),
        ] {
            assert!(replay.visit(&refused).is_err(), "{why}");
        }
        assert_eq!(replay.batches, 4, "a refused record changes nothing");
    }
}
