//! Recovery: the catalog records what is uploaded, the WAL has the rest.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use alluvium_device::SharedDevice;
use alluvium_wal::{HeaderInfo, LogOffset, OpenError, Record, RecoveryReport, Wal};
use bytes::Bytes;
use object_store::ObjectStore;
use parking_lot::Mutex;

use crate::cache::LogCache;
use crate::catalog::ObjectInfo;
use crate::catalog_state::Ids;
use crate::chain::{
    ChainChange, ChainState, ChainStream, ChainWriter, Delta, Hints, PublishError, Recorded,
    decode_recorded,
};
use crate::clock::unix_ms;
use crate::ends::{self, Continuation, Ends, Evidence, LargestCount};
use crate::error::StoreError;
use crate::fold::Fold;
use crate::naming::DECLARED_LOSS;
use crate::object_table::{ObjectTable, Used};
use crate::open::{self, LogHeader, OpenedChain};
use crate::options::Options;
use crate::range::Range;
use crate::record::{self, CatalogRecord, End, StreamRecord};
use crate::repair;
use crate::report::{Gap, GapCause, Recovery};
use crate::retry::Backoff;
use crate::tail::{self, BATCH_OVERHEAD_BYTES, Cached, StreamState, Tail};
use crate::types::{KIND_LOG, ObjectId, StreamId, StreamOffset};

/// Advice to an operator whose catalog and WAL contradict each other.
const OTHER_CATALOG: &str = "Open the WAL with the catalog that it was last in use with";

/// The time in which an attempt to create a delta begins its last request.
const ATTEMPT: Duration = Duration::from_secs(10);

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
    pub(crate) writer: ChainWriter,
    /// The name of the fence.
    pub(crate) fence: String,
    /// The version of the last catalog record in the WAL.
    pub(crate) recorded: u64,
}

/// Recovers a store. After an error the WAL is unchanged, unless only the last step has failed,
/// which publishes the result. Rationale: `docs/format/chain.md`, section 8.
pub(crate) async fn recover(
    device: SharedDevice,
    wal_options: alluvium_wal::Options,
    objects: &Arc<dyn ObjectStore>,
    fold: Arc<dyn Fold>,
    options: &Options,
    progress: Option<alluvium_wal::Progress>,
) -> Result<Recovered, StoreError> {
    let began = Instant::now();
    let header = inspect(device.clone()).await?;
    options.check(header.capacity_bytes)?;
    let log = LogHeader { header, node_id: wal_options.node_id };
    let OpenedChain { writer, reserved_before, is_after_fence } =
        open::open(objects, &log, options).await?;
    let (state, cache) = (writer.state().clone(), LogCache::new(options.cache_bytes));
    let max_record_bytes = wal_options.max_record_bytes;
    let walk = move || walk(device, &wal_options, state, cache, &*fold, progress);
    let Walked { mut replay, wal, report, is_noted, is_covered, largest_count } =
        blocking(walk).await?;
    let then = &writer.state().header;
    let (uploaded, fence_version) = (then.cut, then.version);
    let missing_end = (report.end < uploaded).then_some(report.end..uploaded);
    let lost_lists = replay.lost_lists();
    let has_lost = !(replay.gaps.is_empty()
        && report.damage.is_empty()
        && missing_end.is_none()
        && lost_lists == 0);
    let mut writer = match has_lost {
        true => open::raise_term(writer, &log, options).await?,
        false => writer,
    };
    let fence = writer.last_name();
    let state = writer.state();
    let mut next_stream = replay.next_stream_id;
    if has_lost || is_after_fence {
        // Ids may have been given to streams of which nothing is left.
        next_stream = next_stream.max(reserved_before);
    }
    let cut = match is_noted {
        // What was skipped is in the log, so the next start does not report the missing end again.
        true => uploaded.min(report.end),
        false => uploaded,
    };
    let own = (state.largest_count != largest_count.0)
        .then_some(ChainChange::LargestCount(largest_count.0));
    let (version, opening) = (state.header.version + 1, state.header.opening);
    let reserved = state.reserved;
    let hints = replay.hints(is_noted);
    for (stream, end) in &hints {
        if let Some((_, tail)) = replay.streams.get_mut(stream) {
            tail.note_hint(*end, 0);
        }
    }
    writer.freeze(Delta {
        version,
        recorded: std::mem::take(&mut replay.lists),
        own: own.into_iter().collect(),
        hints,
        cut,
        wal_mark: fence_version,
        next_stream: StreamId(next_stream),
        is_clean: false,
        written_at_ms: unix_ms().cast_unsigned(),
    });
    // Before traffic: a server that was overtaken meanwhile must not acknowledge anything.
    publish(&mut writer, options).await?;

    let ends_from = if is_covered { report.end } else { report.start };
    let has_batches = replay.batches > 0 || !replay.gaps.is_empty();
    let ends = Ends::new(ends_from, !is_covered && has_batches, max_record_bytes, largest_count);
    // The number includes the opening, so a former owner never reaches the numbers of objects that
    // were written after its time.
    let next_object = replay.objects.committed.max(u64::from(opening) << 32);
    replay.objects.committed = next_object;
    let ids = Ids {
        next_stream: next_stream.into(),
        given_streams: next_stream.into(),
        fresh_streams: Mutex::default(),
        reserved_streams: reserved.0.into(),
        next_object: next_object.into(),
    };
    let max_batch_bytes = u64::from(max_record_bytes)
        .saturating_sub(record::HEADER_BYTES as u64)
        .min(options.cache_bytes / 2 - BATCH_OVERHEAD_BYTES);

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
    if replay.meta.contains_key(DECLARED_LOSS) {
        for stream in replay.declared.keys() {
            if let Some((_, tail)) = replay.streams.get_mut(stream) {
                tail.has_declared_loss = true;
            }
        }
    }
    let mut labels = replay.labels;
    let streams = replay.streams.into_iter().map(|(id, (kind, tail))| {
        let label = labels.remove(&id).unwrap_or_default();
        (id, Arc::new(StreamState::new(id, kind, label, tail)))
    });
    let streams: HashMap<_, _> = streams.collect();
    if lost_lists > 0 {
        tracing::error!(
            "{lost_lists} lists of changes of the catalog were in the log and are lost: topics, \
             settings or users may be missing, or may be as they were before"
        );
    }
    for stream in &replay.orphans {
        tracing::error!(
            "stream {stream} has records, and its creation is lost: it is kept without a name"
        );
    }
    let recovery = Recovery {
        wal: report,
        streams: streams.len(),
        batches: replay.batches,
        payload_bytes: replay.payload_bytes,
        skipped_uploaded: replay.skipped_uploaded,
        skipped_deleted: replay.skipped_deleted,
        gaps: replay.gaps,
        missing_end,
        lost_lists,
        declared_gaps: replay.declared.len(),
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
        writer,
        fence,
        recorded: replay.recorded,
    })
}

/// Reads the header of the WAL.
pub(crate) async fn inspect(device: SharedDevice) -> Result<HeaderInfo, StoreError> {
    blocking(move || Ok(Wal::inspect(&device).map_err(open_error)?.header)).await
}

/// What a WAL has lost, as its opening will find it.
#[derive(Clone, Debug)]
pub struct LogLoss {
    /// See [`Recovery::gaps`].
    pub gaps: Vec<Gap>,
    /// See [`Recovery::lost_lists`].
    pub lost_lists: u64,
    /// Streams with records whose creation is lost. They are kept without a name.
    pub orphans: Vec<StreamId>,
    /// Streams with batches that are not in objects.
    pub active: HashSet<StreamId>,
    /// See [`RecoveryReport::damage`].
    pub damage: Vec<alluvium_wal::Damage>,
    /// See [`Recovery::missing_end`].
    pub missing_end: Option<std::ops::Range<LogOffset>>,
}

/// Reads the WAL as an opening with this catalog does, and changes nothing. Blocks.
pub(crate) fn survey(device: &SharedDevice, state: ChainState) -> Result<LogLoss, StoreError> {
    let (cut, kept_count) = (state.header.cut, kept_count(&state));
    let mut replay = Replay::new(state, LogCache::new(u64::MAX))?;
    let mut visit = |record: Record| replay.visit(&record).map_err(Into::into);
    let report = Wal::scan(device, None, &mut visit).map_err(open_error)?;
    // Before ends move to hints and gaps of the catalog, which may be older than what is lost.
    let has_batches = |tail: &Tail| tail.next > tail.uploaded_end;
    let active = replay.streams.iter().filter(|(_, (_, tail))| has_batches(tail));
    let active = active.map(|(id, _)| *id).collect();
    replay.skip_lost(&report, cut, replay.bound(kept_count));
    let lost_lists = replay.lost_lists();
    let missing_end = (report.end < cut).then_some(report.end..cut);
    let (gaps, orphans, damage) = (replay.gaps, replay.orphans, report.damage);
    Ok(LogLoss { gaps, lost_lists, orphans, active, damage, missing_end })
}

/// Runs blocking work.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| StoreError::Failed(error.to_string()))?
}

fn open_error(error: OpenError) -> StoreError {
    StoreError::Open(Arc::new(error))
}

/// Creates the frozen delta; waits while the object store does not answer.
async fn publish(writer: &mut ChainWriter, options: &Options) -> Result<(), StoreError> {
    let mut backoff = Backoff::new(options.retry());
    loop {
        let until = tokio::time::Instant::now() + ATTEMPT;
        let error = match writer.publish(until).await {
            Ok(()) => return Ok(()),
            Err(fenced @ PublishError::Fenced { .. }) => return Err(StoreError::Replaced(fenced)),
            Err(error) => error,
        };
        open::wait_after(&mut backoff, &format!("written: {error}")).await;
    }
}

/// What is in the WAL.
struct Walked {
    replay: Replay,
    wal: Wal,
    report: RecoveryReport,
    /// The ends of streams that damage has hidden are in the log.
    is_noted: bool,
    /// The log ends with a list of ends.
    is_covered: bool,
    largest_count: LargestCount,
}

/// Opens the WAL and reads it. Blocking.
fn walk(
    device: SharedDevice,
    wal_options: &alluvium_wal::Options,
    state: ChainState,
    cache: LogCache,
    fold: &dyn Fold,
    progress: Option<alluvium_wal::Progress>,
) -> Result<Walked, StoreError> {
    let (uploaded, version) = (state.header.cut, state.header.version);
    let old_catalog = |mark, trimmed| StoreError::OldCatalog { version, mark, uploaded, trimmed };
    let kept_count = kept_count(&state);
    let mut replay = Replay::new(state, cache)?;
    let mut visit = |record: Record| replay.visit(&record).map_err(Into::into);
    // The mark is the version of an object that the chain has.
    let wal_options = alluvium_wal::Options { mark: Some(version), ..wal_options.clone() };
    let opened = Wal::open(device, &wal_options, progress, &mut visit);
    let (wal, report) = opened.map_err(|error| match error {
        // Another process has opened the WAL since the header was read.
        OpenError::MarkNotAhead { found, .. } => old_catalog(found, LogOffset(0)),
        error => open_error(error),
    })?;
    // The same if that process sets no mark.
    if uploaded < report.start {
        return Err(old_catalog(version, report.start));
    }
    let is_covered = replay.evidence.covered_to() > replay.last_record;
    replay.skip_lost(&report, uploaded, replay.bound(kept_count));
    replay.repair(fold, report.start).map_err(StoreError::Failed)?;
    // What is skipped must be in the log before a lower bound is recorded, with which the next
    // recovery would skip less.
    let is_noted =
        replay.gaps.is_empty() || replay.note_ends(&wal, &report, wal_options.max_record_bytes)?;
    let largest_count = match is_noted {
        true => kept_count.unwrap_or_default().max(LargestCount::at_least(replay.largest_count)),
        false => kept_count.unwrap_or(LargestCount::UNKNOWN),
    };
    Ok(Walked { replay, wal, report, is_noted, is_covered, largest_count })
}

/// Returns the bound of the number of offsets in a batch, if the catalog has one.
fn kept_count(state: &ChainState) -> Option<LargestCount> {
    (state.largest_count > 0).then_some(LargestCount(state.largest_count))
}

/// Assigns the WAL's records to the streams of the catalog.
struct Replay {
    /// Ids below it were given to streams, as far as the catalog and the log show.
    next_stream_id: u64,
    /// Ids below it were given to streams when the last object of the chain was frozen.
    published_next_stream: u64,
    /// The version up to which each list of changes is in the chain.
    covers: u64,
    /// The version of the last catalog record that was read.
    recorded: u64,
    /// Lists of changes that are not in the chain.
    lists: Vec<Recorded>,
    /// The versions of lists of changes that are lost, as far as they are known.
    lost_lists: BTreeSet<u64>,
    /// The version of the list before the first one that was read, with the end of where it must
    /// have been. It is lost if there is damage; else it was trimmed, and a rebuild has accepted
    /// that the chain does not have it.
    list_before_first: Option<(u64, LogOffset)>,
    /// Streams that lists of changes in the log have deleted.
    deleted: HashSet<StreamId>,
    /// Streams whose creation is lost.
    orphans: Vec<StreamId>,
    /// The ends of the last gaps that fences have declared: a WAL was lost, and may have had
    /// batches up to there.
    declared: HashMap<StreamId, StreamOffset>,
    streams: HashMap<StreamId, (u8, Tail)>,
    /// The labels of streams, perhaps also of deleted ones.
    labels: HashMap<StreamId, Bytes>,
    meta: BTreeMap<String, Vec<u8>>,
    objects: ObjectTable,
    cache: LogCache,
    batches: u64,
    payload_bytes: u64,
    skipped_uploaded: u64,
    skipped_deleted: u64,
    gaps: Vec<Gap>,
    /// Log offset at which the last batch or catalog record begins.
    last_record: LogOffset,
    /// The greatest number of offsets in a batch.
    largest_count: u32,
    evidence: Evidence,
}

impl Replay {
    fn new(state: ChainState, cache: LogCache) -> Result<Self, StoreError> {
        let ChainState {
            header, streams: rows, objects: rows_of_objects, meta, hints, gaps, ..
        } = state;
        let infos: HashMap<ObjectId, Arc<ObjectInfo>> = rows_of_objects
            .into_iter()
            .map(|(id, object)| (id, Arc::new(object.info(header.store))))
            .collect();
        let mut used: HashMap<ObjectId, Used> = HashMap::new();
        let mut streams = HashMap::with_capacity(rows.len());
        let mut labels = HashMap::with_capacity(rows.len());
        for (id, row) in rows {
            let ChainStream { kind, label, epoch, start, uploaded_end, checkpoint, ranges } = row;
            let mut restored = VecDeque::with_capacity(ranges.len());
            for range in ranges {
                let Some(object) = infos.get(&range.object) else {
                    let reason = format!(
                        "stream {id} has a range in object {}, which is not in the catalog",
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
            labels.insert(id, label);
        }
        let mut objects = ObjectTable::default();
        for (id, info) in infos {
            objects.insert(info, used.get(&id).copied().unwrap_or_default());
        }
        let mut evidence = Evidence::default();
        for (stream, end) in hints {
            evidence.add_hint(stream, end);
        }
        Ok(Self {
            next_stream_id: header.next_stream.0,
            published_next_stream: header.next_stream.0,
            covers: header.covers,
            recorded: 0,
            lists: Vec::new(),
            lost_lists: BTreeSet::new(),
            list_before_first: None,
            deleted: HashSet::new(),
            orphans: Vec::new(),
            // In the order of offsets, so the last one of a stream stays.
            declared: gaps.into_iter().map(|((stream, _), end)| (stream, end)).collect(),
            streams,
            labels,
            meta: meta.into_iter().map(|(key, value)| (key, value.to_vec())).collect(),
            objects,
            cache,
            batches: 0,
            payload_bytes: 0,
            skipped_uploaded: 0,
            skipped_deleted: 0,
            gaps: Vec::new(),
            last_record: LogOffset(0),
            largest_count: 0,
            evidence,
        })
    }

    /// Returns the bound of the number of offsets in a batch that is lost. That of the catalog
    /// (`kept`) counts unless a batch in the log exceeds it.
    fn bound(&self, kept: Option<LargestCount>) -> LargestCount {
        let kept = kept.filter(|kept| self.largest_count <= kept.0);
        kept.unwrap_or(LargestCount::UNKNOWN)
    }

    /// Returns the ends of the streams with batches after their uploaded ends. Offsets that are
    /// skipped are left out unless the log has them (`is_noted`): the next opening would take them
    /// for lost ones.
    fn hints(&self, is_noted: bool) -> Hints {
        let mut hints: Hints = self
            .streams
            .iter()
            .filter(|(_, (_, tail))| tail.next > tail.uploaded_end)
            .map(|(id, (_, tail))| (*id, tail.next))
            .collect();
        let skipped = self.gaps.iter().filter(|gap| gap.cause == GapCause::Skipped);
        for Gap { stream, offsets, .. } in skipped.filter(|_| !is_noted) {
            if let Some(end) = hints.get_mut(stream).filter(|end| **end == offsets.end) {
                *end = offsets.start;
            }
        }
        hints
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
        let evidence = std::mem::take(&mut self.evidence);
        let loss = evidence.judge(report, uploaded, self.covers, is_missing);
        self.lost_lists.extend(&loss.lists);
        let is_damaged = |before: LogOffset| {
            report.damaged_ranges.iter().any(|place| place.range.start < before)
        };
        if let Some((version, before)) = self.list_before_first
            && !is_damaged(before)
        {
            self.lost_lists.remove(&version);
        }
        let mut gaps = std::mem::take(&mut self.gaps);
        for (id, (_, tail)) in &mut self.streams {
            let Continuation { known, next } =
                loss.continuation(*id, tail.next, tail.log_end(), largest.0);
            let declared = self.declared.get(id).copied().unwrap_or_default();
            let (known, next) = (known.max(tail.start), next.max(tail.start).max(declared));
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
        let is_noted =
            ends::append(wal, report.start..report.end, &ends, self.recorded, max_record_bytes)?;
        wal.wait_durable(wal.appended()).wait()?;
        Ok(is_noted)
    }

    /// Processes a record. Ends records are kept as evidence, and lists of changes are applied.
    /// Each batch is one of these cases:
    ///
    /// | the record's stream and offsets | meaning |
    /// |---|---|
    /// | unknown, an id that the chain has given out, or deleted in the log | deleted: skipped |
    /// | unknown, another id | its creation is lost: taken, as a stream without a name |
    /// | end <= uploaded end | uploaded: skipped |
    /// | base = next | taken |
    /// | base > next | taken, with a gap before it |
    /// | else | refused: a duplicate or out of order, which no crash can cause |
    fn visit(&mut self, record: &Record) -> Result<(), String> {
        let (id, batch) = match record::decode_record(&record.payload)? {
            StreamRecord::Batch(id, batch) => (id, batch),
            StreamRecord::Ends(ends) => {
                self.expect_list(ends.catalog_version.unwrap_or(0), record.offset);
                self.evidence.add(ends);
                return Ok(());
            }
            StreamRecord::Catalog(list) => {
                self.last_record = record.offset;
                return self.visit_list(list, record.offset);
            }
        };
        if !self.streams.contains_key(&id)
            && id.0 >= self.published_next_stream
            && !self.deleted.contains(&id)
        {
            self.adopt(id);
        }
        self.last_record = record.offset;
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

    /// Creates a stream whose creation is lost, also in the chain: there its creation is added to
    /// the last list of changes, or takes the place of the lost one.
    fn adopt(&mut self, id: StreamId) {
        self.orphans.push(id);
        let create = ChainChange::CreateStream { id, kind: KIND_LOG, label: Bytes::new() };
        self.apply(&create);
        match self.lists.last_mut() {
            Some(list) => list.changes.push(create),
            // The version of the lost list is not less, and those of the lists after it are
            // greater.
            None => {
                self.lists.push(Recorded { version: self.covers + 1, changes: vec![create] });
            }
        }
    }

    /// Returns the number of lists of changes that are lost, at least.
    fn lost_lists(&self) -> u64 {
        (self.lost_lists.len() as u64).max((!self.orphans.is_empty()).into())
    }

    /// Notes the loss of a list of changes, if the one with this version must have been read before
    /// this offset and was not.
    fn expect_list(&mut self, version: u64, before: LogOffset) {
        if version <= self.covers.max(self.recorded) {
            return;
        }
        if self.recorded == 0 {
            self.list_before_first = Some((version, before));
        }
        self.lost_lists.insert(version);
        self.recorded = version;
    }

    /// Applies a list of changes, unless the chain has it.
    fn visit_list(&mut self, list: CatalogRecord, at: LogOffset) -> Result<(), String> {
        let CatalogRecord { version, before, next_stream, count, changes } = list;
        self.expect_list(before, at);
        self.recorded = version;
        self.next_stream_id = self.next_stream_id.max(next_stream.0);
        if version <= self.covers {
            return Ok(());
        }
        let changes = decode_recorded(count, &changes)
            .map_err(|error| format!("the list of changes with version {version}: {error}"))?;
        for change in &changes {
            self.apply(change);
        }
        self.lists.push(Recorded { version, changes });
        Ok(())
    }

    /// Applies a change. One of a stream that does not exist has no effect: its creation is lost.
    fn apply(&mut self, change: &ChainChange) {
        let gone = match change {
            ChainChange::CreateStream { id, kind, label } => {
                self.streams.entry(*id).or_insert((*kind, Tail::default()));
                self.labels.entry(*id).or_insert_with(|| label.clone());
                self.next_stream_id = self.next_stream_id.max(id.0 + 1);
                return;
            }
            ChainChange::DeleteStream { id, .. } => {
                self.deleted.insert(*id);
                self.orphans.retain(|orphan| orphan != id);
                let Some((_, mut tail)) = self.streams.remove(id) else { return };
                self.gaps.retain(|gap| gap.stream != *id);
                for batch in tail.pinned() {
                    self.batches -= 1;
                    self.payload_bytes -= batch.payload.len() as u64;
                    self.skipped_deleted += 1;
                }
                let (released, gone) = tail.delete();
                self.cache.release(released);
                gone
            }
            ChainChange::TrimStream { id, to, .. } => {
                let Some((_, tail)) = self.streams.get_mut(id) else { return };
                let (released, gone) = tail.trim(*to);
                self.cache.release(released);
                gone
            }
            ChainChange::OpenStream { id, epoch } => {
                let Some((_, tail)) = self.streams.get_mut(id) else { return };
                tail.epoch = tail.epoch.max(*epoch);
                return;
            }
            ChainChange::PutMeta { key, value } => {
                self.meta.insert(key.clone(), value.to_vec());
                return;
            }
            ChainChange::DeleteMeta { key } => {
                self.meta.remove(key);
                return;
            }
            _ => unreachable!("no other change is recorded in the log"),
        };
        for range in &gone {
            self.objects.release(range);
        }
    }
}

#[cfg(test)]
mod tests;
