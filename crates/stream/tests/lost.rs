//! Damage to the WAL at the end of streams: no offset is handed out twice, and losses are reported.
//! Lost changes of the catalog are reported, too.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_device::sim::{Random, SimDisk};
use alluvium_stream::{
    AppendError, Batch, Change, Fold, Gap, GapCause, KIND_LOG, StoreError, StreamId, StreamOffset,
    StreamRecord, decode_record,
};
use alluvium_wal::Wal;
use common::*;
use parking_lot::Mutex;

const WAL_BYTES: u64 = 1 << 20;
const DATA_START: u64 = 64 << 10;
const WAL_HEADER_BYTES: u64 = 32;
const STREAM_HEADER_BYTES: u64 = 40;
/// Payload of the tests' batches.
const PAYLOAD_BYTES: usize = 300;

/// The part of a record that is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Payload,
    StreamHeader,
    WalHeader,
    Everything,
}

impl Part {
    const ALL: [Self; 4] = [Self::Payload, Self::StreamHeader, Self::WalHeader, Self::Everything];

    /// Damages a part of the record `range` of the log, which lies in the first lap.
    fn damage(self, disk: &SimDisk, range: &std::ops::Range<u64>) {
        let start = DATA_START + range.start;
        let flip = |at: u64| disk.poke(at, &[disk.peek(at, 1)[0] ^ 0x10]);
        match self {
            Self::Payload => {
                let at = WAL_HEADER_BYTES + STREAM_HEADER_BYTES + 100;
                flip(start + at.min(range.end - range.start - 1));
            }
            Self::StreamHeader => flip(start + WAL_HEADER_BYTES + 4),
            Self::WalHeader => flip(start + 9),
            Self::Everything => {
                disk.poke(start, &vec![0; usize::try_from(range.end - range.start).unwrap()]);
            }
        }
    }
}

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Batch(StreamId, u64),
    Ends,
    /// Changes of the catalog.
    List,
}

/// A record with its range in the log.
type Found = (std::ops::Range<u64>, What);

/// Returns the intact records.
fn intact(disk: &SimDisk) -> (Vec<Found>, alluvium_wal::RecoveryReport) {
    let mut found = Vec::new();
    let report = Wal::scan(&disk.device(), None, &mut |record| {
        let what = match decode_record(&record.payload)? {
            StreamRecord::Batch(id, batch) => What::Batch(id, batch.base.0),
            StreamRecord::Ends(_) => What::Ends,
            StreamRecord::Catalog(_) => What::List,
        };
        found.push((record.offset.0..record.end.0, what));
        Ok(())
    });
    (found, report.unwrap())
}

fn records(disk: &SimDisk) -> Vec<Found> {
    let (found, report) = intact(disk);
    assert_eq!(report.damage, []);
    found
}

fn batch_at(disk: &SimDisk, stream: StreamId, base: u64) -> std::ops::Range<u64> {
    let mut all = records(disk).into_iter();
    all.find(|(_, what)| *what == What::Batch(stream, base)).expect("the batch is in the log").0
}

fn gap(stream: StreamId, lost: std::ops::Range<u64>) -> Gap {
    let offsets = StreamOffset(lost.start)..StreamOffset(lost.end);
    Gap { stream, offsets, cause: GapCause::Lost }
}

fn skipped(stream: StreamId, offsets: std::ops::Range<u64>) -> Gap {
    Gap { cause: GapCause::Skipped, ..gap(stream, offsets) }
}

fn world(ends_interval: Duration) -> World {
    let mut world = World::new(WAL_BYTES, 1);
    world.options.ends_interval = ends_interval;
    world
}

const HOUR: Duration = Duration::from_secs(3600);
const SOON: Duration = Duration::from_millis(5);

/// Appends batches of two offsets each to the streams in turn; the last one is for the last stream.
async fn fill(server: &Server, streams: &[StreamId], bases: std::ops::Range<u64>) {
    for base in bases {
        for id in streams {
            let stream = server.open(*id).await;
            let next = batch(*id, base * 2, 2, PAYLOAD_BYTES);
            append(&server.store, &stream, &next).await.await.unwrap();
        }
    }
}

async fn create(server: &Server, count: usize) -> Vec<StreamId> {
    let mut ids = Vec::new();
    for _ in 0..count {
        ids.push(server.create_log().await.id());
    }
    ids
}

fn ends_of(server: &Server, streams: &[StreamId]) -> Vec<(u64, u64)> {
    let ends = streams.iter().map(|id| {
        let stream = server.store.stream(*id).unwrap();
        (stream.next_offset().0, stream.durable_end().0)
    });
    ends.collect()
}

/// Returns the bases of the batches that a reader gets.
async fn bases(server: &Server, id: StreamId) -> Vec<u64> {
    let stream = server.store.stream(id).unwrap();
    let (mut next, mut bases) = (stream.start_offset(), Vec::new());
    loop {
        let batches = stream.fetch(next, 1000).await.unwrap().batches;
        let Some(last) = batches.last() else { return bases };
        next = last.end();
        bases.extend(batches.iter().map(|batch| batch.base.0));
    }
}

/// The server is closed, or idle and then killed; each record of the log is damaged in turn, in
/// each way. Exactly its offsets are lost, and they stay lost whatever happens then. A lost list of
/// changes is reported unless it was published, and the batches of its stream stay.
#[tokio::test]
async fn an_offset_is_never_handed_out_twice() {
    for is_closed in [true, false] {
        let mut world = world(if is_closed { HOUR } else { SOON });
        let server = world.try_start(Arc::new(())).await.unwrap();
        let streams = create(&server, 2).await;
        fill(&server, &streams, 0..3).await;
        if is_closed {
            server.close().await;
            world.disk = world.disk.process_crash();
        } else {
            let header = || server.store.wal_header();
            let appended = || server.store.stats().wal.appended;
            eventually("the header has the end", || header().durable == appended()).await;
            server.crash(&mut world);
        }
        let image = world.disk.image();
        let objects = contents(&world.objects).await;
        let all = records(&world.disk);
        for what in [What::Ends, What::List] {
            assert!(all.iter().any(|(_, found)| *found == what), "{what:?}");
        }
        for (at, (range, what)) in all.into_iter().enumerate() {
            // Each part of those at the ends of streams, one part of the others.
            let is_end = !matches!(what, What::Batch(_, base) if base < 4);
            let parts = Part::ALL.into_iter().enumerate();
            for (_, part) in parts.filter(|(number, _)| is_end || at % 4 == *number) {
                let case = format!("{part:?} of {what:?} at {range:?}, closed: {is_closed}");
                world.disk = SimDisk::from_image(&image, world.disk_options());
                world.objects = Arc::new(in_memory(&objects).await);
                part.damage(&world.disk, &range);
                let server = world.try_start(Arc::new(())).await.unwrap();
                assert_eq!(server.recovery.wal.damage.len(), 1, "{case}");
                let is_last_ends = what == What::Ends && part == Part::Everything;
                if let What::Batch(id, base) = what {
                    assert_eq!(server.recovery.gaps, [gap(id, base..base + 2)], "{case}");
                } else if !is_last_ends {
                    assert_eq!(server.recovery.gaps, [], "{case}");
                }
                let lost_lists = u64::from(what == What::List && !is_closed);
                assert_eq!(server.recovery.lost_lists, lost_lists, "{case}");
                assert_eq!(server.store.stats().lost.lists, lost_lists, "{case}");
                let next: Vec<u64> = ends_of(&server, &streams).iter().map(|end| end.0).collect();
                if is_last_ends {
                    assert!(next.iter().all(|next| *next >= 6), "{case}");
                } else {
                    assert_eq!(ends_of(&server, &streams), [(6, 6), (6, 6)], "{case}");
                }
                continues(server, &mut world, &streams, &next, &case).await;
            }
        }
    }
}

/// Checks that streams continue at `next`, also after a crash and when the damage is trimmed.
async fn continues(
    server: Server,
    world: &mut World,
    streams: &[StreamId],
    next: &[u64],
    case: &str,
) {
    let gaps = server.recovery.gaps.clone();
    // A consumer that waits at the end.
    let stream = server.store.stream(streams[0]).unwrap();
    let fetched = stream.fetch(StreamOffset(next[0]), 1000).await.unwrap();
    assert_eq!((fetched.batches.len(), fetched.durable_end.0), (0, next[0]), "{case}");
    server.crash(world);

    let server = world.try_start(Arc::new(())).await.unwrap();
    let expected: Vec<_> = next.iter().map(|next| (*next, *next)).collect();
    assert_eq!(ends_of(&server, streams), expected, "after a crash: {case}");
    assert_eq!(
        server.recovery.gaps, gaps,
        "it is still known what is lost and what was skipped: {case}"
    );
    let read = bases(&server, streams[1]).await;
    server.store.flush().await.unwrap();
    assert_eq!(ends_of(&server, streams), expected, "after an upload: {case}");
    assert_eq!(bases(&server, streams[1]).await, read, "{case}");
    server.close().await;
    world.disk = world.disk.process_crash();

    let server = world.try_start(Arc::new(())).await.unwrap();
    assert_eq!((server.recovery.wal.damage.len(), server.recovery.gaps.len()), (0, 0), "{case}");
    assert_eq!(ends_of(&server, streams), expected, "after the damage was trimmed: {case}");
    for (id, next) in streams.iter().zip(next) {
        let stream = server.open(*id).await;
        let more = batch(*id, *next, 1, 10);
        append(&server.store, &stream, &more).await.await.unwrap();
        // A reader in the middle of the gap gets what is behind it.
        let before = StreamOffset(next - 1);
        let fetched = stream.fetch(before, 1000).await.unwrap();
        assert_eq!(fetched.batches.last(), Some(&more), "{case}");
    }
    server.crash(world);
}

/// Records appended since the last ends record are damaged. If a header is left, exactly its
/// offsets are lost; otherwise each stream that may be affected skips more than it can have had,
/// and the others skip nothing.
#[tokio::test]
async fn uncovered_damage_skips_a_bounded_number_of_offsets() {
    for part in Part::ALL {
        let mut world = world(HOUR);
        let server = world.try_start(Arc::new(())).await.unwrap();
        let streams = create(&server, 3).await;
        fill(&server, &streams[..2], 0..3).await;
        fill(&server, &streams[2..], 0..1).await;
        server.crash(&mut world);
        let range = batch_at(&world.disk, streams[1], 4);
        part.damage(&world.disk, &range);
        let server = world.try_start(Arc::new(())).await.unwrap();
        let case = format!("{part:?}");
        assert_eq!(server.store.term(), 1, "{case}");
        let next: Vec<u64> = ends_of(&server, &streams).iter().map(|end| end.0).collect();
        assert_eq!(next[2], 2, "a batch behind the damage: {case}");
        match part {
            Part::Payload | Part::WalHeader => {
                assert_eq!(server.recovery.gaps, [gap(streams[1], 4..6)], "{case}");
                assert_eq!(next[..2], [6, 6], "{case}");
            }
            Part::StreamHeader | Part::Everything => {
                let records = (range.end - range.start).div_ceil(64);
                let most = records * (16 << 10);
                let gaps = [skipped(streams[0], 6..6 + most), skipped(streams[1], 4..4 + most)];
                assert_eq!(server.recovery.gaps, gaps, "{case}");
                let lost = server.store.stats().lost;
                assert_eq!((lost.gaps, lost.offsets), (0, 0));
                assert_eq!((lost.skipped_gaps, lost.skipped_offsets), (2, 2 * most));
                let detail = server.store.degraded().pop().unwrap().detail;
                let named = format!("skipped: offsets 6 to {} of stream", 5 + most);
                assert!(detail.contains(&named), "{detail}");
            }
        }
        continues(server, &mut world, &streams, &next, &case).await;
    }
}

/// Each opening that may have lost records raises the term, and others keep it.
#[tokio::test]
async fn the_term_counts_the_openings_that_may_have_lost_records() {
    let mut world = world(HOUR);
    let server = world.try_start(Arc::new(())).await.unwrap();
    assert_eq!(server.store.term(), 0);
    let streams = create(&server, 1).await;
    fill(&server, &streams, 0..3).await;
    server.crash(&mut world);
    let server = world.try_start(Arc::new(())).await.unwrap();
    assert_eq!(server.store.term(), 0, "nothing is lost");
    server.crash(&mut world);
    let range = batch_at(&world.disk, streams[0], 2);
    Part::Payload.damage(&world.disk, &range);
    for term in 1..3 {
        let server = world.try_start(Arc::new(())).await.unwrap();
        assert_eq!(server.store.term(), term, "the damage is still in the log");
        if term == 2 {
            server.store.begin_uploads();
            server.store.flush().await.unwrap();
        }
        server.crash(&mut world);
    }
    let server = world.try_start(Arc::new(())).await.unwrap();
    assert_eq!(server.store.term(), 2, "the damage was trimmed");
}

/// Also if the damaged part was uploaded: it is not known what else it held.
#[tokio::test]
async fn damage_of_what_was_uploaded_raises_the_term() {
    let mut world = world(HOUR);
    let server = world.try_start(Arc::new(())).await.unwrap();
    let streams = create(&server, 1).await;
    fill(&server, &streams, 0..3).await;
    abandon(server.fail_an_upload(CatalogMode::LosesAnswers).await).await;
    server.crash(&mut world);
    let range = batch_at(&world.disk, streams[0], 2);
    Part::Payload.damage(&world.disk, &range);
    let server = world.try_start(Arc::new(())).await.unwrap();
    assert_eq!((server.recovery.gaps.len(), server.recovery.wal.damage.len()), (0, 1));
    assert_eq!(server.store.term(), 1);
}

/// The bound holds for batches of any size: a larger one is appended when the catalog records it.
#[tokio::test]
async fn a_batch_larger_than_all_before_is_appended_once_the_catalog_records_its_size() {
    let mut world = world(HOUR);
    let server = world.try_start(Arc::new(())).await.unwrap();
    let stream = server.create_log().await;
    let large = batch(stream.id(), 0, 100_000, 10);
    assert!(matches!(stream.append(new_batch(&large)), Err(AppendError::Full)));
    append(&server.store, &stream, &large).await.await.unwrap();
    assert_eq!(world.catalog().await.largest_count, 131_072);
    // Recorded from now on.
    let large = batch(stream.id(), 100_000, 131_072, 10);
    stream.append(new_batch(&large)).unwrap().await.unwrap();
    let (id, end) = (stream.id(), large.end().0);
    drop(stream);
    server.crash(&mut world);
    let range = batch_at(&world.disk, id, 100_000);
    // Otherwise this would be the end of the log.
    let server = world.try_start(Arc::new(())).await.unwrap();
    server.crash(&mut world);
    Part::Everything.damage(&world.disk, &range);
    let server = world.try_start(Arc::new(())).await.unwrap();
    assert!(ends_of(&server, &[id])[0].0 >= end);
    server.crash(&mut world);
}

/// A trim may go into lost offsets at the end, with nothing behind them.
#[tokio::test]
async fn a_stream_can_be_trimmed_into_a_gap_at_its_end() {
    let mut world = world(HOUR);
    let server = world.try_start(Arc::new(())).await.unwrap();
    let streams = create(&server, 1).await;
    fill(&server, &streams, 0..3).await;
    server.close().await;
    world.disk = world.disk.process_crash();
    Part::Payload.damage(&world.disk, &batch_at(&world.disk, streams[0], 4));
    let server = world.try_start(Arc::new(())).await.unwrap();
    let stream = server.open(streams[0]).await;
    assert!(stream.trim(StreamOffset(7)).await.is_err());
    stream.trim(StreamOffset(5)).await.unwrap();
    assert_eq!((stream.start_offset().0, stream.next_offset().0), (5, 6));
    assert!(bases(&server, streams[0]).await.is_empty());
    server.store.flush().await.unwrap();
    assert_eq!(server.store.stats().objects, 0, "there was nothing to write");
    drop(stream);
    server.crash(&mut world);
    let server = world.try_start(Arc::new(())).await.unwrap();
    assert_eq!(ends_of(&server, &streams), [(6, 6)]);
    server.close().await;
}

/// The arguments of calls of a fold: the offsets, and the number of batches in them.
#[derive(Default)]
struct Asked(Mutex<Vec<(std::ops::Range<u64>, usize)>>);

impl Fold for Asked {
    fn fold(
        &self,
        _: StreamId,
        _: u8,
        offsets: std::ops::Range<StreamOffset>,
        _: StreamOffset,
        _: Option<&[u8]>,
        batches: &[Batch],
    ) -> Option<Vec<u8>> {
        self.0.lock().push((offsets.start.0..offsets.end.0, batches.len()));
        None
    }
}

/// An upload folds lost offsets at the end into the checkpoint, but not before the owner has
/// handled them.
#[tokio::test]
async fn a_gap_at_the_end_is_folded_once_its_owner_has_handled_it() {
    let mut world = world(HOUR);
    let server = world.try_start(Arc::new(())).await.unwrap();
    let streams = create(&server, 1).await;
    fill(&server, &streams, 0..3).await;
    server.close().await;
    world.disk = world.disk.process_crash();
    Part::Payload.damage(&world.disk, &batch_at(&world.disk, streams[0], 4));

    world.options.upload_interval = Duration::from_millis(1);
    let asked = Arc::new(Asked::default());
    let server = world.try_start(asked.clone()).await.unwrap();
    tokio::time::sleep(20 * world.options.upload_interval).await;
    assert_eq!((server.store.stats().uploads, &*asked.0.lock()), (0, &vec![]));
    let replay = server.store.stream(streams[0]).unwrap().replay();
    assert_eq!(replay.gaps(), [StreamOffset(4)..StreamOffset(6)]);
    server.store.begin_uploads();
    eventually("it is uploaded", || server.store.stats().uploads > 0).await;
    assert_eq!(*asked.0.lock(), [(0..4, 2), (4..6, 0)]);
    server.crash(&mut world);
    let server = world.try_start(asked).await.unwrap();
    let replay = server.store.stream(streams[0]).unwrap().replay();
    assert_eq!((replay.checkpoint_end, replay.gaps()), (StreamOffset(6), vec![]));
    server.close().await;
}

/// A list for many streams is split into several records.
#[tokio::test]
async fn ends_of_many_streams_are_split() {
    let mut world = world(HOUR);
    world.wal_options.max_record_bytes = 1000; // 38 streams
    let server = world.try_start(Arc::new(())).await.unwrap();
    let ids = server.store.new_stream_ids(150).await.unwrap();
    let create = |id: &StreamId| creation(*id, KIND_LOG);
    server.store.commit(ids.iter().map(create).collect()).await.unwrap();
    fill(&server, &ids, 0..1).await;
    server.close().await;
    world.disk = world.disk.process_crash();
    let all = records(&world.disk);
    assert_eq!(all.iter().filter(|(_, what)| *what == What::Ends).count(), 4);
    let last = batch_at(&world.disk, ids[149], 0);
    Part::Everything.damage(&world.disk, &last);
    let server = world.try_start(Arc::new(())).await.unwrap();
    assert_eq!(server.recovery.gaps, [gap(ids[149], 0..2)]);
    server.close().await;
}

/// The ends are not written again while nothing is appended.
#[tokio::test]
async fn an_idle_log_does_not_change() {
    let world = world(SOON);
    let server = world.try_start(Arc::new(())).await.unwrap();
    let streams = create(&server, 2).await;
    fill(&server, &streams, 0..3).await;
    let wal = || server.store.stats().wal;
    let header = || server.store.wal_header();
    eventually("the header has the end", || header().durable == wal().appended).await;
    let before = (wal().appended, wal().header_writes);
    tokio::time::sleep(20 * SOON).await;
    assert_eq!((wal().appended, wal().header_writes), before);
    server.close().await;
}

/// A log may be full for a long time, in which nothing is appended.
#[tokio::test]
async fn the_header_has_the_end_of_a_full_log() {
    let mut world = world(SOON);
    let server = world.start().await;
    let stream = server.create_log().await;
    server.objects.down.store(true, Ordering::SeqCst);
    let mut next = 0;
    for len_bytes in [10_000, 500, 1] {
        loop {
            match stream.append(new_batch(&batch(stream.id(), next, 1, len_bytes))) {
                Ok(append) => append.await.unwrap(),
                Err(AppendError::Full) => break,
                Err(error) => panic!("{error}"),
            }
            next += 1;
        }
    }
    // In the end there is no space for a list of ends either: changes use the rest.
    let key = |len_bytes: usize| "x".repeat(len_bytes);
    for len_bytes in [10_000, 500, 1] {
        loop {
            match server.store.commit(vec![Change::DeleteMeta(key(len_bytes))]).await {
                Ok(()) => {}
                Err(StoreError::LogFull) => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
    let header = || server.store.wal_header();
    let appended = || server.store.stats().wal.appended;
    eventually("the header has the end", || header().durable == appended()).await;
    drop(stream);
    server.crash(&mut world);
}

/// A stream as its clients know it.
#[derive(Default)]
struct Known {
    /// The offset below which its offsets were acknowledged, or were lost and skipped.
    end: u64,
    batches: Vec<Batch>,
}

/// Runs one seed: runs of the server that end in any way, with damage to any records in between.
async fn damaged_runs(seed: u64) -> Damage {
    let mut random = Random::new(seed);
    let mut world = world([HOUR, Duration::from_millis(1)][random.below(2) as usize]);
    world.options.catalog_interval = [HOUR, Duration::from_millis(1)][random.below(2) as usize];
    let mut known: BTreeMap<StreamId, Known> = BTreeMap::new();
    let mut used: BTreeSet<StreamId> = BTreeSet::new();
    let mut keys: BTreeSet<String> = BTreeSet::new();
    let mut damage_found = Damage::default();
    for _ in 0..2 + random.below(4) {
        let (in_log, _) = intact(&world.disk);
        let server = world.try_start(Arc::new(())).await.unwrap();
        damage_found.offsets += server.store.stats().lost.offsets;
        damage_found.lists += server.recovery.lost_lists;
        // If the last list is damaged beyond recognition, it is not known that there was one.
        let may_have_lost =
            server.recovery.lost_lists > 0 || !server.recovery.wal.damage.is_empty();
        // A stream without batches is lost with the list that creates it.
        known.retain(|id, _| {
            let is_there = server.store.stream(*id).is_some();
            let is_in_log =
                in_log.iter().any(|(_, it)| matches!(it, What::Batch(of, _) if of == id));
            assert!(
                is_there || may_have_lost && !is_in_log,
                "seed {seed}: {id} is gone, {}",
                server.recovery
            );
            is_there
        });
        let found: BTreeSet<_> = server.store.meta("").into_iter().map(|(key, _)| key).collect();
        assert!(found.is_subset(&keys), "seed {seed}");
        assert!(may_have_lost || found == keys, "seed {seed}: {found:?} of {keys:?}");
        keys = found;
        for (id, known) in &mut known {
            let stream = server.store.stream(*id).unwrap();
            let (next, durable) = (stream.next_offset().0, stream.durable_end().0);
            assert!(
                next >= known.end,
                "seed {seed}: {id} continues at {next}, it was at {}",
                known.end
            );
            assert_eq!(next, durable, "seed {seed}");
            let gaps: Vec<_> =
                server.recovery.gaps.iter().filter(|gap| gap.stream == *id).collect();
            let is_lost = |batch: &Batch| {
                gaps.iter()
                    .any(|gap| gap.offsets.start <= batch.base && batch.end() <= gap.offsets.end)
            };
            known.batches.retain(|batch| !is_lost(batch));
            let read = read_all(&server, *id).await;
            let acknowledged = known.batches.iter().filter(|batch| batch.end().0 <= known.end);
            assert!(
                acknowledged.eq(read.iter().filter(|batch| batch.end().0 <= known.end)),
                "seed {seed}: {id}"
            );
            // Any batch that was not acknowledged may be there.
            assert!(read.iter().all(|batch| known.batches.contains(batch)), "seed {seed}: {id}");
            (known.batches, known.end) = (read, next);
        }
        while known.len() < 4 {
            let id = server.create_log().await.id();
            assert!(used.insert(id), "seed {seed}: {id} is used again");
            known.insert(id, Known::default());
        }
        let mut pending = Vec::new();
        for _ in 0..random.below(40) {
            let at = random.below(known.len() as u64) as usize;
            let (id, known) = known.iter_mut().nth(at).unwrap();
            let stream = server.open(*id).await;
            let count = 1 + random.below(5) as u32;
            let next = batch(*id, stream.next_offset().0, count, 1 + random.below(3000) as usize);
            let append = append(&server.store, &stream, &next).await;
            known.batches.push(next.clone());
            if random.below(4) > 0 {
                append.await.unwrap();
                known.end = next.end().0;
            } else {
                pending.push(append);
            }
            match random.below(20) {
                0 => server.store.flush().await.unwrap(),
                1 => tokio::time::sleep(Duration::from_millis(random.below(5))).await,
                2..4 => {
                    let key = keys.len().to_string() + &random.next_u64().to_string();
                    keys.insert(key.clone());
                    let put = Change::PutMeta { key, value: vec![1] };
                    server.store.commit(vec![put]).await.unwrap();
                }
                _ => {}
            }
        }
        match random.below(3) {
            0 => {
                server.close().await;
                known.values_mut().for_each(|known| {
                    known.end =
                        known.batches.last().map_or(known.end, |last| last.end().0).max(known.end);
                });
                world.disk = world.disk.process_crash();
            }
            1 => server.power_cut(&mut world),
            _ => server.crash(&mut world),
        }
        drop(pending);
        damage_found.logs += u64::from(damage(&mut world, &mut random));
    }
    damage_found
}

/// What was damaged, and what was lost by that.
#[derive(Debug, Default)]
struct Damage {
    logs: u64,
    offsets: u64,
    lists: u64,
}

/// Damages a few records, unless that would look like a torn write, which cannot be recognized.
fn damage(world: &mut World, random: &mut Random) -> bool {
    let mut places = Vec::new();
    let scan = |disk: &SimDisk, places: &mut Vec<std::ops::Range<u64>>| {
        let report = Wal::scan(&disk.device(), None, &mut |record| {
            places.push(record.offset.0..record.end.0);
            Ok(())
        });
        report.unwrap()
    };
    let end = scan(&world.disk, &mut places).end;
    // In the first lap only.
    places.retain(|range| range.end < WAL_BYTES - DATA_START);
    if places.is_empty() {
        return false;
    }
    let image = world.disk.image();
    let behind = [6, 40][random.below(2) as usize];
    let first = places.len() - 1 - random.below(places.len().min(behind) as u64) as usize;
    for range in places.iter().skip(first).take(1 + random.below(3) as usize) {
        Part::ALL[random.below(4) as usize].damage_anywhere(&world.disk, range, random);
    }
    if scan(&world.disk, &mut Vec::new()).end != end {
        world.disk = SimDisk::from_image(&image, world.disk_options());
        return false;
    }
    true
}

impl Part {
    /// Damages a record like [`Part::damage`], but of any length.
    fn damage_anywhere(self, disk: &SimDisk, range: &std::ops::Range<u64>, random: &mut Random) {
        let payload = range.start + WAL_HEADER_BYTES + STREAM_HEADER_BYTES;
        if self != Self::Payload || payload >= range.end {
            return self.damage(disk, range);
        }
        let at = DATA_START + payload + random.below(range.end - payload);
        disk.poke(at, &[disk.peek(at, 1)[0] ^ (1 << random.below(8))]);
    }
}

/// After any damage no acknowledged offset and no id of a stream is handed out again, what is read
/// was appended, and what is missing is reported. `cargo xtask model` runs more seeds.
#[test]
fn no_seed_hands_out_an_offset_twice() {
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |value| value.parse().expect(name))
    };
    let (start, seeds) = (number("ALLUVIUM_MODEL_START", 0), number("ALLUVIUM_MODEL_SEEDS", 60));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut all = Damage::default();
    for seed in start..start + seeds {
        let outcome = std::panic::catch_unwind(|| runtime.block_on(damaged_runs(seed)));
        let Ok(Damage { logs, offsets, lists }) = outcome else {
            panic!("seed {seed}: ALLUVIUM_MODEL_START={seed} ALLUVIUM_MODEL_SEEDS=1");
        };
        all.logs += logs;
        all.offsets += offsets;
        all.lists += lists;
    }
    println!("{all:?}");
    let Damage { logs, offsets, lists } = all;
    assert!(seeds < 10 || logs > seeds && offsets > seeds && lists > seeds / 10, "{all:?}");
}
