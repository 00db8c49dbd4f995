//! Object compaction: ranges that are spread over many objects are merged into few. What it does,
//! how, and why nothing is lost: `docs/compaction.md`.

mod rewrite;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use crate::catalog::{ObjectInfo, ObjectRange};
use crate::error::StoreError;
use crate::faults::Reason;
use crate::naming::object_id;
use crate::object::Block;
use crate::object_error::ObjectError;
use crate::objects::{Scan, index};
use crate::output::{Attempt, Output, Source, give_up};
use crate::publish::{Publication, Replacement};
use crate::range::Range;
use crate::request_class::RequestClass;
use crate::retry::Backoff;
use crate::shared::Shared;
use crate::tail::{Changed, Choice, Compactable, StreamState};
use crate::types::{Batch, ObjectId, StreamId, StreamOffset};
use crate::upload::OWN_OBJECT_BYTES;

pub use rewrite::{Rewrite, Rewritten, StoredPart};

/// Number of pieces that are merged into one.
const FAN_IN: usize = 8;
/// Ranges of a stream that are scanned while its tail is locked; the same number as for a search by
/// time.
pub(crate) const RANGES_AT_A_TIME: usize = 1024;
/// Number of blocks whose positions are kept, 56 bytes each: 7 MiB.
const BLOCKS_KEPT: usize = 128 << 10;
/// Longest pause after a span.
const REST_MAX: Duration = Duration::from_secs(1);
/// Time for which an object that cannot be read is left out; doubles with each further failure.
const LEFT_OUT: Duration = Duration::from_secs(1);
/// Upper bound of that time.
const LEFT_OUT_MAX: Duration = Duration::from_secs(10 * 60);
/// Longest wait after a failure.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Ranges that become one, or a few if that would be too large for one object.
struct Run {
    stream: Arc<StreamState>,
    /// Neighbours, in order.
    ranges: Vec<Range>,
    destination: Destination,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Destination {
    /// In objects of its own.
    Alone,
    /// Together with others. An object has at most one range of a stream, so a second run of the
    /// same stream goes to a second object.
    Together(usize),
}

impl Run {
    fn payload_bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.payload_bytes).sum()
    }

    /// Returns the offset after the last range.
    fn end(&self) -> StreamOffset {
        self.ranges[self.ranges.len() - 1].end
    }
}

/// Objects that could not be read.
#[derive(Default)]
struct LeftOut(HashMap<ObjectId, Left>);

/// How long an object is left out.
#[derive(Clone, Copy)]
enum Left {
    /// It is damaged; the reason `objects_damaged` names it.
    Damaged,
    /// Until this time, after this number of failures in a row.
    Until(Instant, u32),
    /// To be tried again, after this number of failures in a row.
    Over(u32),
}

impl LeftOut {
    fn contains(&self, id: ObjectId) -> bool {
        matches!(self.0.get(&id), Some(Left::Damaged | Left::Until(..)))
    }

    fn damaged(&mut self, id: ObjectId) {
        self.0.insert(id, Left::Damaged);
    }

    fn unreadable(&mut self, id: ObjectId) {
        let failures = match self.0.get(&id) {
            Some(Left::Until(_, failures) | Left::Over(failures)) => *failures,
            Some(Left::Damaged) | None => 0,
        };
        let wait = LEFT_OUT.saturating_mul(1 << failures.min(20)).min(LEFT_OUT_MAX);
        self.0.insert(id, Left::Until(Instant::now() + wait, failures.saturating_add(1)));
    }

    /// Returns when the next object is to be tried again.
    fn next(&self) -> Option<Instant> {
        let ends = self.0.values().filter_map(|left| match left {
            Left::Until(until, _) => Some(*until),
            Left::Damaged | Left::Over(_) => None,
        });
        ends.min()
    }

    /// Whether any object is left out for a reason that no other fault shows.
    fn is_failing(&self) -> bool {
        self.0.values().any(|left| !matches!(left, Left::Damaged))
    }

    /// Drops objects that are no longer in use; returns true if others are to be tried again.
    fn expire(&mut self, is_live: impl Fn(ObjectId) -> bool) -> bool {
        self.0.retain(|id, _| is_live(*id));
        let (now, mut is_over) = (Instant::now(), false);
        for left in self.0.values_mut() {
            if let Left::Until(until, failures) = *left
                && until <= now
            {
                *left = Left::Over(failures);
                is_over = true;
            }
        }
        is_over
    }
}

/// Indexes read for one stream, kept for the next one with a part of the same objects, until there
/// is nothing more to do.
#[derive(Default)]
struct Indexes {
    by_object: HashMap<ObjectId, Arc<[Block]>>,
    /// Number of blocks in all of them; at most [`BLOCKS_KEPT`].
    blocks: usize,
}

impl Indexes {
    async fn get(
        &mut self,
        shared: &Shared,
        object: &ObjectInfo,
    ) -> Result<Arc<[Block]>, ObjectError> {
        if let Some(known) = self.by_object.get(&object.id) {
            return Ok(known.clone());
        }
        let read: Arc<[Block]> =
            index(shared.objects.handle(RequestClass::Compaction), object).await?.into();
        if self.blocks + read.len() > BLOCKS_KEPT {
            *self = Self::default();
        }
        if read.len() <= BLOCKS_KEPT {
            self.blocks += read.len();
            self.by_object.insert(object.id, read.clone());
        }
        Ok(read)
    }
}

/// Runs the compaction task.
pub(crate) async fn run(shared: Arc<Shared>) {
    let mut left_out = LeftOut::default();
    let mut indexes = Indexes::default();
    let mut backoff = Backoff::new((shared.options.retry_initial, RETRY_MAX));
    loop {
        if left_out.expire(|id| shared.object_table.lock().is_live(id)) {
            // It is not recorded which streams have a range there.
            shared.compaction.changed(all_streams(&shared));
        }
        let exclusive = shared.compaction.exclusive.lock().await;
        let done = next(&shared, &left_out, &mut indexes).await;
        drop(exclusive);
        let failure = match done {
            Ok(done) => {
                backoff.succeeded();
                if !left_out.is_failing() {
                    shared.faults.report(Reason::ObjectCompactionFailing, None);
                }
                if !done {
                    indexes = Indexes::default();
                    let expired = async {
                        match left_out.next() {
                            Some(next) => tokio::time::sleep_until(next).await,
                            None => std::future::pending().await,
                        }
                    };
                    tokio::select! {
                        () = shared.compaction.wanted.notified() => {}
                        () = expired => {}
                    }
                }
                continue;
            }
            Err(failure) => failure,
        };
        shared.numbers.compaction_failures.fetch_add(1, Ordering::Relaxed);
        let error = match failure {
            // The store has halted, or its WAL has stopped: the objects stay as they are and are
            // still read.
            Failure::Store(error) => {
                return tracing::error!("object compaction has stopped: {error}");
            }
            Failure::Object(error) => {
                let error = shared.classified(error).await;
                let (ObjectError::Damaged { name, .. } | ObjectError::Store { name, .. }) = &error;
                let source = object_id(name).filter(|id| shared.object_table.lock().is_live(*id));
                if let Some(id) = source {
                    match error {
                        ObjectError::Damaged { .. } => left_out.damaged(id),
                        ObjectError::Store { .. } => left_out.unreadable(id),
                    }
                }
                StoreError::from(error)
            }
        };
        let (wait, failures) = (backoff.failed(), backoff.failures());
        let is_shown = matches!(&error, StoreError::Object(ObjectError::Damaged { .. }));
        if !is_shown {
            let detail = format!(
                "small objects are not merged into larger ones, which makes cold reads slower and \
                 keeps space in use; failures in a row: {failures}; the last error: {error}"
            );
            shared.faults.report(Reason::ObjectCompactionFailing, Some(detail));
        }
        tracing::warn!("cannot compact objects, next attempt in {wait:?}: {error}");
        tokio::time::sleep(wait).await;
    }
}

enum Failure {
    Object(ObjectError),
    /// The store cannot continue.
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

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Object(error) => error.into(),
            Failure::Store(error) => error,
        }
    }
}

/// Performs one compaction; returns false if there is nothing to do.
async fn next(
    shared: &Arc<Shared>,
    left_out: &LeftOut,
    indexes: &mut Indexes,
) -> Result<bool, Failure> {
    let most_bytes = shared.options.compaction_bytes;
    // Also if compaction is configured to make smaller objects than uploads do.
    let large_bytes = OWN_OBJECT_BYTES.min(most_bytes / 8);
    let choice = Choice { fan_in: FAN_IN, large_bytes, most_bytes, at_a_time: RANGES_AT_A_TIME };
    if let Some((run, changed)) = own_run(shared, choice, left_out).await {
        let (stream, generation) = (run.stream.id, run.ranges[0].object.generation);
        let done = compact(shared, vec![run], indexes, generation.saturating_add(1)).await;
        // Whatever the result, there may be more.
        shared.compaction.changed([(stream, changed)]);
        return done.map(|()| true);
    }
    let found = shared.object_table.lock().compactable(FAN_IN, |id| left_out.contains(id));
    let Some((objects, generation)) = found else { return Ok(false) };
    let mut of_objects = HashMap::new();
    for object in &objects {
        of_objects.insert(object.id, indexes.get(shared, object).await?);
    }
    let is_for_waste = objects.len() == 1;
    let runs = runs_in(shared, &of_objects, choice.large_bytes, is_for_waste);
    drop(of_objects);
    if !runs.is_empty() {
        compact(shared, runs, indexes, generation).await?;
    }
    if !is_for_waste {
        // What they still have is enclosed.
        let mut table = shared.object_table.lock();
        objects.iter().for_each(|object| table.settle(object.id));
    }
    Ok(true)
}

/// Returns all of all streams as changed.
pub(crate) fn all_streams(shared: &Shared) -> Vec<(StreamId, Changed)> {
    shared.streams.read().keys().map(|id| (*id, Changed::ALL)).collect()
}

/// Returns neighbouring ranges of one of the changed streams, and what is left to scan of it.
async fn own_run(shared: &Shared, choice: Choice, left_out: &LeftOut) -> Option<(Run, Changed)> {
    loop {
        let (id, mut changed) = shared.compaction.changed.lock().pop_first()?;
        let Some(stream) = shared.streams.read().get(&id).cloned() else { continue };
        loop {
            let scanned =
                stream.tail.lock().compactable(changed, choice, |id| left_out.contains(id));
            match scanned {
                Compactable::Found(ranges) => {
                    return Some((
                        Run { stream, ranges, destination: Destination::Alone },
                        changed,
                    ));
                }
                Compactable::Further(rest) => changed = rest,
                Compactable::Nothing => break,
            }
            tokio::task::yield_now().await;
        }
    }
}

/// Returns the ranges in these objects, with neighbours together, by stream and offset: all of
/// them, or all that are not enclosed.
fn runs_in(
    shared: &Shared,
    indexes: &HashMap<ObjectId, Arc<[Block]>>,
    large_bytes: u64,
    with_enclosed: bool,
) -> Vec<Run> {
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
        let mut end = None;
        for start in starts {
            // A range begins where its first block does; one that does not was trimmed, or has
            // moved to another object.
            let range = tail.range_at(start);
            let Some(range) = range.filter(|range| indexes.contains_key(&range.object.id)) else {
                continue;
            };
            match neighbours.last_mut().filter(|_| end == Some(start)) {
                Some(run) => run.push(range.clone()),
                None => neighbours.push(vec![range.clone()]),
            }
            end = Some(range.end);
        }
        let is_enclosed =
            |ranges: &[Range]| matches!(ranges, [range] if tail.is_enclosed(range, large_bytes));
        neighbours.retain(|ranges| with_enclosed || !is_enclosed(ranges));
        drop(tail);
        let mut together = 0..;
        for ranges in neighbours {
            let mut run = Run { stream: stream.clone(), ranges, destination: Destination::Alone };
            if run.payload_bytes() < large_bytes {
                run.destination = Destination::Together(together.next().expect("endless"));
            }
            runs.push(run);
        }
    }
    runs
}

/// Creates an object of about this much payload.
fn output<'a>(shared: &'a Shared, attempt: &'a Attempt, source: Source, bytes: u64) -> Output<'a> {
    Output::new(shared.objects.handle(RequestClass::Compaction), attempt, source, bytes)
}

/// Objects to be committed.
#[derive(Default)]
struct Written {
    objects: Vec<Arc<ObjectInfo>>,
    replacements: Vec<Replacement>,
    payload_bytes: u64,
}

impl Written {
    /// Ends an object after `result`: finishes it, or abandons it if it is empty or something has
    /// failed.
    async fn end_output(
        &mut self,
        shared: &Shared,
        mut output: Output<'_>,
        mut result: Result<(), Failure>,
        replacements: Vec<Replacement>,
    ) -> Result<(), Failure> {
        if result.is_ok() && !replacements.is_empty() {
            match output.finish().await {
                Ok(object) => {
                    self.payload_bytes += object.payload_bytes;
                    self.objects.push(Arc::new(object));
                    self.replacements.extend(replacements);
                    return Ok(());
                }
                Err(error) => result = Err(error.into()),
            }
        }
        output.give_up(shared).await;
        result
    }

    async fn commit(&mut self, shared: &Arc<Shared>) -> Result<(), Failure> {
        let Self { objects, replacements, .. } = std::mem::take(self);
        if objects.is_empty() {
            return Ok(());
        }
        let publication = Publication::Compaction { objects: objects.clone(), replacements };
        match shared.publish(publication).await {
            Ok(()) => Ok(()),
            Err(StoreError::ObjectsMissing) => {
                remove(shared, &objects).await;
                let reason = "it has disappeared after it was written".into();
                Err(ObjectError::failed(&objects[0].name, reason).into())
            }
            Err(error) => {
                leave_to_next_start(shared, &objects);
                Err(error.into())
            }
        }
    }
}

/// Removes objects that will not be committed.
async fn remove(shared: &Shared, objects: &[Arc<ObjectInfo>]) {
    for object in objects {
        give_up(shared, &object.name, shared.objects.delete(&object.name).await);
    }
}

/// Leaves objects that may have been committed to the next start.
fn leave_to_next_start(shared: &Shared, objects: &[Arc<ObjectInfo>]) {
    let mut table = shared.object_table.lock();
    for object in objects {
        table.uploading.remove(&object.name);
    }
}

/// Reads the sources of `runs`, rewrites them and commits the result, in steps of about
/// [`crate::Options::compaction_bytes`], so that completed steps remain when a later one fails.
async fn compact(
    shared: &Arc<Shared>,
    runs: Vec<Run>,
    indexes: &mut Indexes,
    generation: u8,
) -> Result<(), Failure> {
    let mut written = Written::default();
    let result = rewrite(shared, runs, indexes, generation, &mut written).await;
    match result {
        Ok(()) => written.commit(shared).await,
        Err(failure) => {
            remove(shared, &written.objects).await;
            Err(failure)
        }
    }
}

async fn rewrite(
    shared: &Arc<Shared>,
    runs: Vec<Run>,
    indexes: &mut Indexes,
    generation: u8,
    written: &mut Written,
) -> Result<(), Failure> {
    let most_bytes = shared.options.compaction_bytes;
    let ranges = || runs.iter().flat_map(|run| &run.ranges);
    // The age of records without a timestamp, and the order of the data.
    let created_at_ms = ranges().map(|range| range.object.created_at_ms).max().unwrap_or(0);
    let source = Source::Objects { generation, created_at_ms };
    let mut bytes = Vec::new();
    for run in &runs {
        if let Destination::Together(number) = run.destination {
            bytes.resize(bytes.len().max(number + 1), 0);
            bytes[number] += run.payload_bytes();
        }
    }
    let mut sources = Sources::open(shared, &runs, indexes).await?;
    let attempt = || Attempt::new(shared, shared.catalog.new_object_id());
    let together: Vec<Attempt> = bytes.iter().map(|_| attempt()).collect();
    let mut outputs: Vec<_> = together
        .iter()
        .zip(bytes)
        .map(|(attempt, bytes)| (output(shared, attempt, source, bytes), Vec::new()))
        .collect();
    let mut result = Ok(());
    for mut run in runs {
        result = match run.destination {
            Destination::Together(number) => {
                let (output, replacements) = &mut outputs[number];
                run.write_into(output, &mut sources, replacements).await.map_err(Failure::from)
            }
            Destination::Alone => {
                let mut result = Ok(());
                while result.is_ok() && !run.ranges.is_empty() {
                    let piece = run.split_off(most_bytes);
                    result = piece.write_alone(shared, &mut sources, source, written).await;
                    if result.is_ok() && written.payload_bytes >= most_bytes {
                        result = written.commit(shared).await;
                    }
                }
                result
            }
        };
        if result.is_err() {
            break;
        }
    }
    for (output, replacements) in outputs {
        result = written.end_output(shared, output, result, replacements).await;
    }
    result
}

impl Run {
    /// Removes and returns the first ranges, as many as fit into an object of this much payload but
    /// at least one.
    fn split_off(&mut self, most_bytes: u64) -> Self {
        let (mut bytes, mut count) = (self.ranges[0].payload_bytes, 1);
        while count < self.ranges.len() && bytes + self.ranges[count].payload_bytes <= most_bytes {
            bytes += self.ranges[count].payload_bytes;
            count += 1;
        }
        let ranges = self.ranges.drain(..count).collect();
        Self { stream: self.stream.clone(), ranges, destination: self.destination }
    }

    /// Writes the run to its own object.
    async fn write_alone(
        self,
        shared: &Shared,
        sources: &mut Sources<'_>,
        source: Source,
        written: &mut Written,
    ) -> Result<(), Failure> {
        let attempt = Attempt::new(shared, shared.catalog.new_object_id());
        let mut output = output(shared, &attempt, source, self.payload_bytes());
        let mut replacements = Vec::new();
        let result = self.write_into(&mut output, sources, &mut replacements).await;
        written.end_output(shared, output, result.map_err(Failure::from), replacements).await
    }

    /// Writes the run as one range to `output`; nothing if the stream was trimmed past it.
    async fn write_into(
        self,
        output: &mut Output<'_>,
        sources: &mut Sources<'_>,
        replacements: &mut Vec<Replacement>,
    ) -> Result<(), ObjectError> {
        let start = self.stream.tail.lock().start;
        let mut new: Option<ObjectRange> = None;
        for range in &self.ranges {
            while let Some(batches) = sources.next(range, self.stream.id).await? {
                // The batches are slices of one block, which a part that waits to be written may
                // keep alive. That is no waste: the whole block goes there.
                for batch in batches.iter().filter(|batch| batch.end() > start) {
                    if let Some(block) = output.push(&self.stream, batch, None, &mut new) {
                        output.write(block).await?;
                    }
                }
            }
        }
        if let Some(new) = new {
            replacements.push(Replacement { stream: self.stream, old: self.ranges, new });
        }
        Ok(())
    }
}

/// The objects that are being read. Runs come by stream and offset, and so do an object's blocks.
struct Sources<'a> {
    scans: HashMap<ObjectId, Scan<'a>>,
    /// The end of the last pause.
    working_since: Instant,
}

impl<'a> Sources<'a> {
    /// Opens the sources of a single run, without sharing indexes.
    async fn of(shared: &'a Shared, run: &Run) -> Result<Self, ObjectError> {
        Self::open(shared, std::slice::from_ref(run), &mut Indexes::default()).await
    }

    async fn open(
        shared: &'a Shared,
        runs: &[Run],
        indexes: &mut Indexes,
    ) -> Result<Self, ObjectError> {
        let handle = shared.objects.handle(RequestClass::Compaction);
        let mut wanted: HashMap<ObjectId, (Arc<ObjectInfo>, HashSet<StreamId>)> = HashMap::new();
        for run in runs {
            for range in &run.ranges {
                let unknown = || (range.object.clone(), HashSet::new());
                wanted.entry(range.object.id).or_insert_with(unknown).1.insert(run.stream.id);
            }
        }
        let mut scans = HashMap::with_capacity(wanted.len());
        for (id, (object, streams)) in wanted {
            let blocks = indexes.get(shared, &object).await?;
            let wanted = blocks.iter().filter(|block| streams.contains(&block.stream));
            scans.insert(id, Scan::new(handle, object, wanted.cloned().collect()));
        }
        Ok(Self { scans, working_since: Instant::now() })
    }

    /// Returns the next block of `range`; `None` behind its last one.
    async fn next(
        &mut self,
        range: &Range,
        stream: StreamId,
    ) -> Result<Option<Vec<Batch>>, ObjectError> {
        let scan = self.scans.get_mut(&range.object.id).expect("opened for all ranges");
        if scan.peek().is_none_or(|block| block.stream != stream) {
            return Ok(None);
        }
        if scan.is_exhausted() {
            // At most half of the time: other tasks have the rest.
            tokio::time::sleep(self.working_since.elapsed().min(REST_MAX)).await;
            self.working_since = Instant::now();
        } else {
            tokio::task::yield_now().await;
        }
        scan.next().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_unreadable_object_is_retried_with_growing_delays_and_a_damaged_one_is_not() {
        let (unreadable, damaged, gone) = (ObjectId(1), ObjectId(2), ObjectId(3));
        let mut left_out = LeftOut::default();
        left_out.damaged(damaged);
        let is_live = |id| id != gone;
        let seconds = |count| Duration::from_secs(count);
        for wait in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600].map(seconds) {
            left_out.unreadable(unreadable);
            assert_eq!(left_out.next(), Some(Instant::now() + wait));
            tokio::time::advance(wait - Duration::from_millis(1)).await;
            assert!(!left_out.expire(is_live) && left_out.contains(unreadable));
            tokio::time::advance(Duration::from_millis(1)).await;
            assert!(left_out.expire(is_live) && !left_out.contains(unreadable));
            assert!(!left_out.expire(is_live) && left_out.next().is_none());
        }
        assert!(left_out.contains(damaged));
        left_out.unreadable(gone);
        tokio::time::advance(LEFT_OUT).await;
        assert!(!left_out.expire(is_live), "objects that are no longer in use are dropped");
        assert_eq!(left_out.0.len(), 2);
    }
}
