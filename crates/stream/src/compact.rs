//! Compaction: ranges that lie in many objects are brought together in few. What, how, and why nothing is lost: `docs/compaction.md`.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use crate::bandwidth::Class;
use crate::catalog::{ObjectInfo, ObjectRange};
use crate::commit::Replacement;
use crate::object::{Block, Encoder};
use crate::objects::{Cause, ObjectError, Scan, Writer, index};
use crate::owner;
use crate::store::{Shared, StoreError};
use crate::tail::{Choice, Range, StreamState};
use crate::types::{Batch, ObjectId, StreamId, StreamOffset};
use crate::upload::{OWN_OBJECT_BYTES, backoff, extend, object_id, object_name, unix_ms};

/// So many pieces become one.
const FAN_IN: usize = 8;
/// Longest rest after a span.
const REST_MAX: Duration = Duration::from_secs(1);
/// Longest wait after a failure.
const RETRY_MAX: Duration = Duration::from_secs(10 * 60);

/// What the compaction task is told, and remembers.
#[derive(Default)]
pub(crate) struct Compaction {
    /// There may be something to do.
    pub(crate) wanted: Notify,
    /// Streams that have got a range since they were looked at.
    pub(crate) grown: Mutex<BTreeSet<StreamId>>,
}

impl Compaction {
    /// These streams have got a range.
    pub(crate) fn grown(&self, streams: Vec<StreamId>) {
        self.grown.lock().extend(streams);
        self.wanted.notify_one();
    }
}

/// What becomes one range.
struct Run {
    stream: Arc<StreamState>,
    /// Neighbours, in order.
    ranges: Vec<Range>,
    /// Whether it gets an object of its own.
    own: bool,
}

impl Run {
    fn payload_bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.payload_bytes).sum()
    }
}

/// The compaction task.
pub(crate) async fn run(shared: Arc<Shared>) {
    let mut left_out = HashSet::new();
    let mut failures = 0;
    loop {
        match next(&shared, &mut left_out).await {
            Ok(true) => failures = 0,
            Ok(false) => {
                failures = 0;
                shared.compaction.wanted.notified().await;
            }
            // The store has halted, or a defect was refused: what there is serves on as it is.
            Err(Failure::Store(error)) => return tracing::error!("compaction ends: {error}"),
            // Told, and counted.
            Err(Failure::NotOwner) => tokio::time::sleep(RETRY_MAX).await,
            Err(Failure::Object(error)) => {
                shared.numbers.compaction_failures.fetch_add(1, Ordering::Relaxed);
                if let ObjectError::Damaged { name, .. } = &error
                    && let Some(id) = object_id(name)
                {
                    tracing::error!("compaction leaves it as it is: {error}");
                    left_out.insert(id);
                    continue;
                }
                let wait = backoff(shared.options.retry_initial, RETRY_MAX, failures);
                failures = failures.saturating_add(1);
                tracing::warn!("can not compact, next try in {wait:?}: {error}");
                tokio::time::sleep(wait).await;
            }
        }
    }
}

enum Failure {
    Object(ObjectError),
    /// The objects are another server's.
    NotOwner,
    Store(StoreError),
}

impl From<ObjectError> for Failure {
    fn from(error: ObjectError) -> Self {
        Self::Object(error)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// One compaction; false if there is nothing to do.
async fn next(shared: &Arc<Shared>, left_out: &mut HashSet<ObjectId>) -> Result<bool, Failure> {
    let most_bytes = shared.options.compaction_bytes;
    // Also where compaction is to make smaller objects than uploads do.
    let least_bytes = OWN_OBJECT_BYTES.min(most_bytes / 8);
    let choice = Choice { fan_in: FAN_IN, least_bytes, most_bytes };
    if let Some(run) = own_run(shared, choice, left_out) {
        let stream = run.stream.id;
        let done = compact(shared, vec![run], &HashMap::new(), choice).await;
        // Whatever came of it, there may be more.
        shared.compaction.grown.lock().insert(stream);
        return done.map(|()| true);
    }
    let objects = shared.object_table.lock().compactable(FAN_IN, left_out);
    let Some(objects) = objects else { return Ok(false) };
    let mut indexes = HashMap::new();
    for object in &objects {
        let blocks = index(shared.objects.store(Cause::Compaction), object).await?;
        indexes.insert(object.id, blocks);
    }
    let runs = runs_in(shared, &indexes, choice);
    compact(shared, runs, &indexes, choice).await?;
    Ok(true)
}

/// Neighbouring ranges of one of the streams that have grown.
fn own_run(shared: &Shared, choice: Choice, left_out: &HashSet<ObjectId>) -> Option<Run> {
    while let Some(id) = shared.compaction.grown.lock().pop_first() {
        let Some(stream) = shared.streams.read().get(&id).cloned() else { continue };
        let ranges = stream.tail.lock().compactable(choice);
        if let Some(ranges) = ranges
            && !ranges.iter().any(|range| left_out.contains(&range.object.id))
        {
            return Some(Run { stream, ranges, own: true });
        }
    }
    None
}

/// All ranges in these objects, neighbours together, by stream and offset.
fn runs_in(shared: &Shared, indexes: &HashMap<ObjectId, Vec<Block>>, choice: Choice) -> Vec<Run> {
    let mut starts: BTreeMap<StreamId, BTreeSet<StreamOffset>> = BTreeMap::new();
    for blocks in indexes.values() {
        for of_a_stream in blocks.chunk_by(|one, next| one.stream == next.stream) {
            let first = &of_a_stream[0];
            starts.entry(first.stream).or_default().insert(first.start);
        }
    }
    let mut runs: Vec<Run> = Vec::new();
    for (id, starts) in starts {
        let Some(stream) = shared.streams.read().get(&id).cloned() else { continue };
        let tail = stream.tail.lock();
        let mut neighbours: Vec<Vec<Range>> = Vec::new();
        let mut behind = None;
        for start in starts {
            // A range begins where its first block does; what does not was trimmed, or lies elsewhere by now.
            let Some(range) =
                tail.range_at(start).filter(|range| indexes.contains_key(&range.object.id))
            else {
                continue;
            };
            match neighbours.last_mut().filter(|_| behind == Some(start)) {
                Some(run) => run.push(range.clone()),
                None => neighbours.push(vec![range.clone()]),
            }
            behind = tail.range_after(start).map(|next| next.start);
        }
        drop(tail);
        for (number, ranges) in neighbours.into_iter().enumerate() {
            let mut run = Run { stream: stream.clone(), ranges, own: false };
            // The shared object takes one range of a stream.
            run.own = number > 0 || run.payload_bytes() >= choice.least_bytes;
            runs.push(run);
        }
    }
    runs
}

/// Read what `runs` are made of, write it anew, and commit that. `indexes` of the objects that are known already.
async fn compact(
    shared: &Arc<Shared>,
    runs: Vec<Run>,
    indexes: &HashMap<ObjectId, Vec<Block>>,
    choice: Choice,
) -> Result<(), Failure> {
    let mut written = Written::default();
    let rewritten = rewrite(shared, runs, indexes, choice, &mut written).await;
    let failure = match rewritten {
        // To another owner of the objects, one that does not know these, they would be orphans.
        Ok(()) => match owner::claim(shared, 0).await.map_err(StoreError::Wal)? {
            Ok(true) => {
                return Ok(shared.commit_compaction(written.objects, written.replacements).await?);
            }
            Ok(false) => Failure::NotOwner,
            Err(error) => error.into(),
        },
        Err(error) => error.into(),
    };
    for object in written.objects {
        give_up(shared, &object.name, shared.objects.delete(&object.name).await);
    }
    Err(failure)
}

/// What is to be committed.
#[derive(Default)]
struct Written {
    objects: Vec<Arc<ObjectInfo>>,
    replacements: Vec<Replacement>,
}

/// What was written is of no use.
fn give_up(shared: &Shared, name: &str, removed: Result<(), ObjectError>) {
    if let Err(left) = removed {
        tracing::debug!("could not clean up after a failed compaction: {left}");
    }
    shared.object_table.lock().uploading.remove(name);
}

async fn rewrite(
    shared: &Shared,
    runs: Vec<Run>,
    indexes: &HashMap<ObjectId, Vec<Block>>,
    choice: Choice,
    written: &mut Written,
) -> Result<(), ObjectError> {
    let ranges = runs.iter().flat_map(|run| &run.ranges);
    let generation = ranges.map(|range| range.object.generation).max();
    let generation = generation.map_or(0, |greatest| greatest.saturating_add(1));
    let mut sources = Sources::open(shared, &runs, indexes).await?;
    let together = Target::new(shared, generation);
    let mut output = Output::new(shared, &together);
    let mut result = Ok(());
    for run in runs {
        result = match run.own {
            true => run.write_alone(shared, &mut sources, generation, choice, written).await,
            false => run.write_into(&mut output, &mut sources, written).await,
        };
        if result.is_err() {
            break;
        }
    }
    if result.is_ok() && output.payload_bytes > 0 {
        result = output.finish().await.map(|object| written.objects.push(object));
    }
    if result.is_err() || output.payload_bytes == 0 {
        give_up(shared, &together.name, output.writer.abort().await);
    }
    result
}

impl Run {
    /// Objects of its own, none larger than the bound.
    async fn write_alone(
        self,
        shared: &Shared,
        sources: &mut Sources<'_>,
        generation: u8,
        choice: Choice,
        written: &mut Written,
    ) -> Result<(), ObjectError> {
        let Self { stream, mut ranges, .. } = self;
        while !ranges.is_empty() {
            let (mut bytes, mut count) = (ranges[0].payload_bytes, 1);
            while count < ranges.len() && bytes + ranges[count].payload_bytes <= choice.most_bytes {
                bytes += ranges[count].payload_bytes;
                count += 1;
            }
            let rest = ranges.split_off(count);
            let piece = Self { stream: stream.clone(), ranges, own: true };
            ranges = rest;
            let target = Target::new(shared, generation);
            let mut output = Output::new(shared, &target);
            let mut result = piece.write_into(&mut output, sources, written).await;
            if result.is_ok() && output.payload_bytes > 0 {
                result = output.finish().await.map(|object| written.objects.push(object));
            }
            if result.is_err() || output.payload_bytes == 0 {
                give_up(shared, &target.name, output.writer.abort().await);
            }
            result?;
        }
        Ok(())
    }

    /// One range in `output`, or none if the stream was trimmed past it.
    async fn write_into(
        self,
        output: &mut Output<'_>,
        sources: &mut Sources<'_>,
        written: &mut Written,
    ) -> Result<(), ObjectError> {
        let start = self.stream.tail.lock().start;
        let mut new: Option<ObjectRange> = None;
        for range in &self.ranges {
            while let Some(batches) = sources.next(range, self.stream.id).await? {
                for batch in batches.iter().filter(|batch| batch.end() > start) {
                    output.push(self.stream.id, batch).await?;
                    extend(&mut new, output.target.id, batch);
                }
            }
        }
        if let Some(new) = new {
            let old = self.ranges.iter().map(|range| range.start).collect();
            written.replacements.push(Replacement { stream: self.stream, old, new });
        }
        Ok(())
    }
}

/// The objects that are read. Runs come by stream and offset, and so do an object's blocks.
struct Sources<'a> {
    scans: HashMap<ObjectId, Scan<'a>>,
}

impl<'a> Sources<'a> {
    async fn open(
        shared: &'a Shared,
        runs: &[Run],
        indexes: &HashMap<ObjectId, Vec<Block>>,
    ) -> Result<Self, ObjectError> {
        let (store, bandwidth) =
            (shared.objects.store(Cause::Compaction), shared.objects.bandwidth());
        let mut wanted: HashMap<ObjectId, (Arc<ObjectInfo>, HashMap<StreamId, StreamOffset>)> =
            HashMap::new();
        for run in runs {
            for range in &run.ranges {
                let object =
                    wanted.entry(range.object.id).or_insert((range.object.clone(), HashMap::new()));
                object.1.insert(run.stream.id, range.end);
            }
        }
        let mut scans = HashMap::with_capacity(wanted.len());
        for (id, (object, streams)) in wanted {
            let is_wanted = |block: &&Block| streams.contains_key(&block.stream);
            let blocks: VecDeque<Block> = match indexes.get(&id) {
                Some(blocks) => blocks.iter().filter(is_wanted).cloned().collect(),
                None => index(store, &object).await?.iter().filter(is_wanted).cloned().collect(),
            };
            scans.insert(id, Scan::new(store, bandwidth, object, blocks));
        }
        Ok(Self { scans })
    }

    /// The next block of `range`; `None` behind its last.
    async fn next(
        &mut self,
        range: &Range,
        stream: StreamId,
    ) -> Result<Option<Vec<Batch>>, ObjectError> {
        let scan = self.scans.get_mut(&range.object.id).expect("opened for all ranges");
        if scan.peek().is_none_or(|block| block.stream != stream) {
            return Ok(None);
        }
        let began = scan.is_dry().then(Instant::now);
        let batches = scan.next().await?;
        if let Some(began) = began {
            // At most half of the time: the others have the rest.
            tokio::time::sleep(began.elapsed().min(REST_MAX)).await;
        } else {
            tokio::task::yield_now().await;
        }
        Ok(batches)
    }
}

/// An object that is to be written; known to the janitor.
struct Target {
    id: ObjectId,
    nonce: Uuid,
    name: String,
    generation: u8,
}

impl Target {
    fn new(shared: &Shared, generation: u8) -> Self {
        let (id, nonce) = (shared.new_object_id(), Uuid::new_v4());
        let name = object_name(shared.wal_id, id, nonce);
        shared.object_table.lock().uploading.insert(name.clone());
        Self { id, nonce, name, generation }
    }
}

/// An object that is being written; nothing is until there is something in it.
struct Output<'a> {
    target: &'a Target,
    header: Option<Bytes>,
    encoder: Option<Encoder>,
    writer: Writer<'a>,
    payload_bytes: u64,
}

impl<'a> Output<'a> {
    fn new(shared: &'a Shared, target: &'a Target) -> Self {
        let (encoder, header) = Encoder::new(target.nonce);
        let (store, bandwidth) =
            (shared.objects.store(Cause::Compaction), shared.objects.bandwidth());
        let writer = Writer::new(store, &target.name, bandwidth, Class::Compaction);
        Self { target, header: Some(header), encoder: Some(encoder), writer, payload_bytes: 0 }
    }

    async fn push(&mut self, stream: StreamId, batch: &Batch) -> Result<(), ObjectError> {
        if let Some(header) = self.header.take() {
            self.writer.write(header).await?;
        }
        self.payload_bytes += batch.payload.len() as u64;
        let encoder = self.encoder.as_mut().expect("it is not finished");
        match encoder.push(stream, batch) {
            Some(block) => self.writer.write(block).await,
            None => Ok(()),
        }
    }

    async fn finish(&mut self) -> Result<Arc<ObjectInfo>, ObjectError> {
        let encoder = self.encoder.take().expect("it is finished once");
        let (last, tail, summary) = encoder.finish();
        if let Some(last) = last {
            self.writer.write(last).await?;
        }
        self.writer.write(tail).await?;
        self.writer.finish().await?;
        let Target { id, name, generation, .. } = self.target;
        Ok(Arc::new(ObjectInfo {
            id: *id,
            name: name.clone(),
            size_bytes: summary.size_bytes,
            index_position: summary.index_position,
            index_bytes: summary.index_bytes,
            index_crc32c: summary.index_crc32c,
            created_at_ms: unix_ms(),
            generation: *generation,
            payload_bytes: self.payload_bytes,
        }))
    }
}
