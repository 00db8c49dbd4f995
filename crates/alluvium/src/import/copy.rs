//! One pass of copying: a thread for each broker of the source copies what that broker leads, up to
//! the last stable offset.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use alluvium_broker::{Exported, RecordDigest};

use super::reader::{Fetched, Isolation, Position, Reader, STALLED};
use super::source::Source;
use super::target::{Appender, Target};
use crate::output::Failure;
use crate::topic::EARLIEST;

/// Partitions that one request reads at most.
const MOST_PARTITIONS: usize = 500;
/// Bytes that a pass copies from each broker. They are read back from the memory of the target, and
/// an interrupted import has at most so much to compare.
const PASS_BYTES: usize = 512 << 20;

/// A partition in a pass.
pub(super) struct Copied {
    pub(super) position: Position,
    /// The leader of the partition.
    pub(super) leader: i32,
    /// Where this pass has begun.
    pub(super) from: u64,
    /// The first offset of the source.
    pub(super) start: u64,
    /// The last stable offset of the source when the pass began.
    pub(super) end: u64,
    /// Up to where earlier passes have compared it.
    pub(super) verified: u64,
    /// The leader epoch of the last batch that was read, if it is known.
    pub(super) epoch: Option<i32>,
    /// The records from `from` to the position.
    pub(super) digest: RecordDigest,
}

impl Copied {
    /// Whether the source had more when the pass began.
    pub(super) fn is_behind(&self) -> bool {
        self.offsets_behind() > 0
    }

    /// Returns the number of offsets that the source had more.
    pub(super) fn offsets_behind(&self) -> u64 {
        self.end.saturating_sub(self.position.next)
    }
}

/// Shared by the threads of a pass.
pub(super) struct Pass<'a> {
    pub(super) stop: &'a AtomicBool,
    /// Offsets that are copied.
    pub(super) done: AtomicU64,
    /// These, and the offsets that the partitions were behind when the pass began.
    pub(super) total: u64,
    /// Called with what is done, and the total.
    pub(super) progress: alluvium_device::Progress,
}

/// Copies the partitions until each has reached its end, or the pass has copied enough, or a
/// partition fails.
///
/// # Errors
/// A connection failed, a partition has moved, the target refuses a batch. What is copied is in the
/// positions, but may not have been acknowledged.
pub(super) fn run(
    source: &Source,
    target: &Target,
    partitions: &mut [Copied],
    pass: &Pass<'_>,
) -> Result<(), Failure> {
    let mut of_leaders: BTreeMap<i32, Vec<&mut Copied>> = BTreeMap::new();
    for partition in partitions {
        of_leaders.entry(partition.leader).or_default().push(partition);
    }
    let failed = AtomicBool::new(false);
    thread::scope(|scope| {
        let (failed, threads) = (&failed, of_leaders.into_iter());
        let threads: Vec<_> = threads
            .map(|(leader, partitions)| {
                scope.spawn(move || {
                    let copied = copy(source, target, leader, partitions, pass, failed);
                    if copied.is_err() {
                        failed.store(true, Ordering::Relaxed);
                    }
                    copied
                })
            })
            .collect();
        let ended = threads.into_iter().map(|thread| match thread.join() {
            Ok(copied) => copied,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        // All of them have ended before the first error is returned.
        ended.collect::<Vec<_>>().into_iter().collect()
    })
}

/// Copies the partitions of one broker.
fn copy(
    source: &Source,
    target: &Target,
    leader: i32,
    mut partitions: Vec<&mut Copied>,
    pass: &Pass<'_>,
    failed: &AtomicBool,
) -> Result<(), Failure> {
    let mut reader = source.broker(leader)?;
    let mut appender = target.appender()?;
    let (mut bytes, mut progress) = (0, Instant::now());
    loop {
        partitions.retain(|it| it.is_behind());
        let stops = pass.stop.load(Ordering::Relaxed) || failed.load(Ordering::Relaxed);
        if partitions.is_empty() || stops || bytes >= PASS_BYTES {
            return appender.wait().map_err(Failure::Failed);
        }
        let count = partitions.len().min(MOST_PARTITIONS);
        let wanted: Vec<_> = partitions[..count].iter().map(|it| it.position.clone()).collect();
        for (number, fetched) in reader.fetch(&wanted)? {
            let taken = take(partitions[number], fetched, &mut reader, &mut appender, pass)?;
            if let Some(of_part) = taken {
                bytes += of_part;
                progress = Instant::now();
            }
        }
        // If there are more than one request can name, the next one begins with the others.
        partitions.rotate_left(count);
        if progress.elapsed() > STALLED {
            let Position { topic, partition, next } = &partitions[0].position;
            return Err(Failure::Failed(format!(
                "topic {topic}, partition {partition}: the source has sent nothing from offset \
                 {next} on for {} s",
                STALLED.as_secs()
            )));
        }
    }
}

/// The failure of a partition that has lost offsets that were copied.
pub(super) fn lost_records(topic: &str, partition: usize, end: u64, copied: u64) -> Failure {
    Failure::Lost(format!(
        "topic {topic}, partition {partition}: the source has lost records: of what was copied up \
         to offset {copied}, it has the offsets before {end}. Delete the topic at the target, and \
         repeat the command"
    ))
}

/// Sends what was read of a partition to the target. Returns the number of bytes, or `None` if
/// there was nothing.
fn take(
    partition: &mut Copied,
    fetched: Fetched,
    reader: &mut Reader,
    appender: &mut Appender,
    pass: &Pass<'_>,
) -> Result<Option<usize>, Failure> {
    let Position { topic, partition: index, next } = partition.position.clone();
    let of =
        |reason: String| Failure::Failed(format!("topic {topic}, partition {index}: {reason}"));
    let part = match fetched {
        Fetched::Part(part) => part,
        Fetched::Moved(reason) => return Err(of(reason)),
        Fetched::OutOfRange => {
            // Retention has deleted what follows.
            let position = std::slice::from_ref(&partition.position);
            partition.start = reader.offsets(position, EARLIEST, Isolation::Committed)?[0];
            if partition.start <= next {
                return Err(of(format!("the source does not have offset {next}")));
            }
            partition.end = partition.end.max(partition.start);
            let mut part = Exported::from(next);
            part.cover(partition.start);
            part
        }
    };
    let mut bytes = 0;
    for batch in part.batches {
        bytes += batch.len();
        partition.digest.add(&batch).map_err(|error| of(error.to_string()))?;
        appender.append(&topic, index, batch).map_err(Failure::Failed)?;
    }
    let done = pass.done.fetch_add(part.next - next, Ordering::Relaxed) + part.next - next;
    (pass.progress)(done, pass.total.max(done));
    partition.position.next = part.next;
    partition.epoch = part.leader_epoch.or(partition.epoch);
    Ok((part.next > next).then_some(bytes))
}
