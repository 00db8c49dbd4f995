//! Comparison of committed records of the source with those of the target.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use alluvium_broker::{Exported, RecordDigest, record_digests};

use super::reader::{Fetched, Isolation, Position, Reader, STALLED};
use crate::output::Failure;
use crate::topic::EARLIEST;

/// Reads a range of a partition, and returns the digest of its committed records.
///
/// # Errors
/// It cannot be read.
pub(super) fn digest(
    reader: &mut Reader,
    topic: &str,
    partition: usize,
    range: Range<u64>,
) -> Result<RecordDigest, Failure> {
    let mut digest = RecordDigest::default();
    let mut side = Side::new(reader, topic, partition, range);
    while let Some(part) = side.read()? {
        for batch in &part.batches {
            digest.add_until(batch, side.end).map_err(|error| side.error(&error.to_string()))?;
        }
    }
    match side.deleted_to {
        0 => Ok(digest),
        _ => Err(side.error("records were deleted meanwhile")),
    }
}

/// What a comparison has found.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(super) struct Compared {
    /// Records that are equal.
    pub(super) equal: u64,
    /// Records that the target does not have.
    pub(super) missing: u64,
    /// Records that the source does not have.
    pub(super) additional: u64,
    /// Records that differ in timestamp, key, value or headers.
    pub(super) different: u64,
    /// The first offset that counts as a difference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) first: Option<u64>,
}

/// Compares the records of a range. What one side deletes meanwhile is left out.
///
/// # Errors
/// One of them cannot be read.
pub(super) fn compare(
    source: &mut Reader,
    target: &mut Reader,
    topic: &str,
    partition: usize,
    range: Range<u64>,
) -> Result<Compared, Failure> {
    let mut of_source = Records::new(Side::new(source, topic, partition, range.clone()));
    let mut of_target = Records::new(Side::new(target, topic, partition, range));
    let mut found = Compared::default();
    loop {
        let (one, other) = (of_source.peek()?, of_target.peek()?);
        let (offset, order) = match (one, other) {
            (None, None) => return Ok(found),
            (Some((offset, _)), None) => (offset, Ordering::Less),
            (None, Some((offset, _))) => (offset, Ordering::Greater),
            (Some((one, _)), Some((other, _))) => (one.min(other), one.cmp(&other)),
        };
        let is_deleted = offset < of_source.side.deleted_to.max(of_target.side.deleted_to);
        let count = match order {
            Ordering::Less => &mut found.missing,
            Ordering::Greater => &mut found.additional,
            Ordering::Equal if one == other => &mut found.equal,
            Ordering::Equal => &mut found.different,
        };
        if !is_deleted || order == Ordering::Equal {
            *count += 1;
            if found.first.is_none() && one != other {
                found.first = Some(offset);
            }
        }
        if order != Ordering::Greater {
            of_source.queue.pop_front();
        }
        if order != Ordering::Less {
            of_target.queue.pop_front();
        }
    }
}

/// A range of a partition at one server.
struct Side<'a> {
    reader: &'a mut Reader,
    position: Position,
    end: u64,
    /// The first offset that was not deleted meanwhile; 0 if nothing was.
    deleted_to: u64,
}

impl<'a> Side<'a> {
    fn new(reader: &'a mut Reader, topic: &str, partition: usize, range: Range<u64>) -> Self {
        let position = Position { topic: topic.to_owned(), partition, next: range.start };
        Self { reader, position, end: range.end, deleted_to: 0 }
    }

    /// Reads the next part of the range; `None` at its end.
    fn read(&mut self) -> Result<Option<Exported>, Failure> {
        let since = Instant::now();
        while self.position.next < self.end {
            let part = match self.reader.fetch(std::slice::from_ref(&self.position))?.pop() {
                Some((_, Fetched::Part(part))) => part,
                Some((_, Fetched::OutOfRange)) => {
                    let position = std::slice::from_ref(&self.position);
                    let starts = self.reader.offsets(position, EARLIEST, Isolation::Committed)?;
                    if starts[0] <= self.position.next {
                        return Err(self.error(&format!("no offset {}", self.position.next)));
                    }
                    (self.deleted_to, self.position.next) = (starts[0], starts[0]);
                    continue;
                }
                Some((_, Fetched::Moved(reason))) => return Err(self.error(&reason)),
                None => return Err(self.error("the server does not answer for it")),
            };
            if part.next > self.position.next {
                self.position.next = part.next;
                return Ok(Some(part));
            }
            if since.elapsed() > STALLED {
                return Err(self.error(&format!("nothing from offset {} on", self.position.next)));
            }
        }
        Ok(None)
    }

    fn error(&self, reason: &str) -> Failure {
        let Position { topic, partition, .. } = &self.position;
        Failure::Failed(format!("topic {topic}, partition {partition}: {reason}"))
    }
}

/// The records of a range, with their digests.
struct Records<'a> {
    side: Side<'a>,
    queue: VecDeque<(u64, [u8; 32])>,
}

impl<'a> Records<'a> {
    fn new(side: Side<'a>) -> Self {
        Self { side, queue: VecDeque::new() }
    }

    fn peek(&mut self) -> Result<Option<(u64, [u8; 32])>, Failure> {
        while self.queue.is_empty() {
            let Some(part) = self.side.read()? else { return Ok(None) };
            for batch in &part.batches {
                let digests =
                    record_digests(batch).map_err(|error| self.side.error(&error.to_string()))?;
                let end = self.side.end;
                self.queue.extend(digests.into_iter().filter(|(offset, _)| *offset < end));
            }
        }
        Ok(self.queue.front().copied())
    }
}
