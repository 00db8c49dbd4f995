//! One share partition as a pure state machine: the delivery state of a partition's records for a
//! share group.
//!
//! ```text
//!            start (Kafka's SPSO)                               end (SPEO)
//!   finished   | acquired | available | finished | acquired ...  |   not read yet
//!   -----------+----------+-----------+----------+---------------+-----------------> offsets
//! ```
//!
//! [`Run`]s cover everything from start to end without holes. Nothing here reads a clock, locks,
//! waits or writes; changes to persist are returned as [`Change`]s. What is written when, and why a
//! crash may come at any time: `docs/format/share-state.md`.

use std::sync::Arc;
use std::time::Instant;

use alluvium_stream::StreamOffset;

/// The delivery state of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// Can be delivered.
    Available,
    /// Delivered to a member and locked until the given time.
    Acquired { member: Arc<str>, until: Instant },
    /// Accepted by a member.
    Acknowledged,
    /// Not delivered any more: a member rejected it, or it reached the delivery limit.
    Archived,
    /// Not a record for members: a marker, a record of an aborted transaction, or a compacted one.
    /// Determined again after a restart.
    Nothing,
}

impl Delivery {
    fn is_finished(&self) -> bool {
        matches!(self, Self::Acknowledged | Self::Archived | Self::Nothing)
    }

    /// Locks do not survive a restart.
    fn stored(&self) -> Option<Stored> {
        match self {
            Self::Available | Self::Acquired { .. } => Some(Stored::Available),
            Self::Acknowledged => Some(Stored::Acknowledged),
            Self::Archived => Some(Stored::Archived),
            Self::Nothing => None,
        }
    }
}

/// The persisted form of a delivery state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    Available,
    Acknowledged,
    Archived,
}

/// The new state of the records from `from` to `to` (exclusive).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) from: StreamOffset,
    pub(crate) to: StreamOffset,
    pub(crate) state: Stored,
    /// Their delivery count.
    pub(crate) deliveries: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    from: StreamOffset,
    to: StreamOffset,
    delivery: Delivery,
    deliveries: u16,
}

impl Run {
    fn records(&self) -> u64 {
        self.to.0 - self.from.0
    }
}

/// The offsets of a batch that a read has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) from: StreamOffset,
    pub(crate) to: StreamOffset,
    /// Whether its records are for members.
    pub(crate) is_for_members: bool,
}

/// Limits for what a member acquires.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) max_records: u64,
    /// Whether `max_records` is strict, even in the middle of a batch.
    pub(crate) is_exact: bool,
    /// About how many records are reported together.
    pub(crate) batch_records: u64,
    /// Bound on the records in flight.
    pub(crate) max_in_flight: u64,
}

/// Records that a member has acquired, with the same delivery count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Acquired {
    pub(crate) from: StreamOffset,
    pub(crate) to: StreamOffset,
    pub(crate) deliveries: u16,
}

/// The type of an acknowledgement, with its number in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AckKind {
    /// There was no record.
    Gap = 0,
    Accept = 1,
    Release = 2,
    Reject = 3,
    /// Extends the lock.
    Renew = 4,
}

impl AckKind {
    pub(crate) fn from_number(number: i8) -> Option<Self> {
        [Self::Gap, Self::Accept, Self::Release, Self::Reject, Self::Renew]
            .into_iter()
            .find(|kind| *kind as i8 == number)
    }
}

/// An acknowledgement of the records from `from` to `to` (exclusive).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ack {
    pub(crate) from: StreamOffset,
    pub(crate) to: StreamOffset,
    pub(crate) kind: AckKind,
}

/// The member does not hold all records that it acknowledges; nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotAcquired;

/// Why records are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Return {
    /// They were not sent, which does not count as a delivery.
    Unused,
    /// The member has gone, or has ended its session, without an acknowledgement; one of the
    /// records may have caused it.
    Lost,
}

/// One share partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SharePartition {
    start: StreamOffset,
    runs: Vec<Run>,
}

impl SharePartition {
    /// Restores the persisted state: records without a change are available, and were never
    /// delivered.
    pub(crate) fn new(start: StreamOffset, changes: impl IntoIterator<Item = Change>) -> Self {
        let mut new = Self { start, runs: Vec::new() };
        for Change { from, to, state, deliveries } in changes {
            new.extend_to(from, Delivery::Available);
            let delivery = match state {
                Stored::Available => Delivery::Available,
                Stored::Acknowledged => Delivery::Acknowledged,
                Stored::Archived => Delivery::Archived,
            };
            let from = new.end();
            if from < to {
                new.runs.push(Run { from, to, delivery, deliveries });
            }
        }
        new.tidy();
        new
    }

    /// All records below it are finished.
    pub(crate) fn start(&self) -> StreamOffset {
        self.start
    }

    /// No record from here on has been read.
    pub(crate) fn end(&self) -> StreamOffset {
        self.runs.last().map_or(self.start, |run| run.to)
    }

    /// Number of records between start and end.
    pub(crate) fn in_flight(&self) -> u64 {
        let records = self.runs.iter().filter(|run| run.delivery != Delivery::Nothing);
        records.map(Run::records).sum()
    }

    /// Number of offsets between start and end that need no delivery any more.
    pub(crate) fn finished(&self) -> u64 {
        self.runs.iter().filter(|run| run.delivery.is_finished()).map(Run::records).sum()
    }

    /// The state to persist, besides the start.
    pub(crate) fn remembered(&self) -> Vec<Change> {
        let changes = self.runs.iter().filter_map(|run| {
            let state = run.delivery.stored()?;
            let Run { from, to, .. } = *run;
            let is_acquired = matches!(run.delivery, Delivery::Acquired { .. });
            // The outcome of the current delivery is not known yet.
            let deliveries = run.deliveries - u16::from(is_acquired);
            let is_default = state == Stored::Available && deliveries == 0;
            (!is_default).then_some(Change { from, to, state, deliveries })
        });
        changes.collect()
    }

    /// Returns the offset at which to read for a member. `None` if the bound on records in flight
    /// is reached.
    pub(crate) fn next_read(&self, max_in_flight: u64) -> Option<StreamOffset> {
        let available = self.runs.iter().find(|run| run.delivery == Delivery::Available);
        match available {
            Some(run) => Some(run.from),
            None => (self.in_flight() < max_in_flight).then(|| self.end()),
        }
    }

    /// When the first lock expires.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let deadlines = self.runs.iter().filter_map(|run| match &run.delivery {
            Delivery::Acquired { until, .. } => Some(*until),
            _ => None,
        });
        deadlines.min()
    }

    /// Drops the records below `log_start`, which the partition does not have any more. Returns
    /// whether there were any.
    pub(crate) fn cut(&mut self, log_start: StreamOffset) -> bool {
        if log_start <= self.start {
            return false;
        }
        self.split(log_start);
        self.runs.retain(|run| run.from >= log_start);
        self.start = log_start;
        self.tidy();
        true
    }

    /// Acquires for a member the available records of the batches that a read at `read_from` has
    /// found. Offsets between the batches do not exist.
    pub(crate) fn acquire(
        &mut self,
        read_from: StreamOffset,
        found: &[Found],
        member: &Arc<str>,
        until: Instant,
        wanted: Wanted,
    ) -> Vec<Acquired> {
        let mut acquired = Vec::new();
        // The state may have changed since the read began: then the next read finds it.
        if read_from > self.end() {
            return acquired;
        }
        let lock = Delivery::Acquired { member: Arc::clone(member), until };
        let mut at = read_from.max(self.start);
        let mut left = wanted.max_records;
        for batch in found.iter().filter(|batch| batch.from < batch.to) {
            if batch.to <= at {
                continue;
            }
            self.mark_nothing(at, batch.from);
            at = at.max(batch.from);
            if !batch.is_for_members {
                self.mark_nothing(at, batch.to);
                at = batch.to;
                continue;
            }
            if left == 0 {
                break;
            }
            // A batch is acquired as a whole, unless the limit is strict.
            let mut may_take = if wanted.is_exact { left } else { u64::MAX };
            let new_from = self.end().clamp(at, batch.to);
            self.split(at);
            self.split(new_from);
            let mut cut = None;
            for run in self.runs.iter_mut().filter(|run| run.from >= at && run.to <= new_from) {
                if run.delivery != Delivery::Available || may_take == 0 {
                    continue;
                }
                let records = run.records().min(may_take);
                if records < run.records() {
                    // The rest stays available; it is one run at most, since nothing may be taken
                    // after it.
                    let to = StreamOffset(run.from.0 + records);
                    cut = Some(Run { from: to, ..run.clone() });
                    run.to = to;
                }
                run.delivery = lock.clone();
                run.deliveries = run.deliveries.saturating_add(1);
                may_take -= records;
                left = left.saturating_sub(records);
                let taken = Acquired { from: run.from, to: run.to, deliveries: run.deliveries };
                report_acquired(&mut acquired, taken, batch.from, wanted.batch_records);
            }
            if let Some(rest) = cut {
                let index = self.runs.partition_point(|run| run.from < rest.from);
                self.runs.insert(index, rest);
            }
            let space = wanted.max_in_flight.saturating_sub(self.in_flight());
            let records = (batch.to.0 - new_from.0).min(space).min(may_take);
            // Otherwise there would be a hole before it.
            if records > 0 && new_from == self.end() {
                let (from, to) = (new_from, StreamOffset(new_from.0 + records));
                self.runs.push(Run { from, to, delivery: lock.clone(), deliveries: 1 });
                left = left.saturating_sub(records);
                let taken = Acquired { from, to, deliveries: 1 };
                report_acquired(&mut acquired, taken, batch.from, wanted.batch_records);
            }
            if self.end() < batch.to {
                break;
            }
            at = batch.to;
        }
        self.tidy();
        acquired
    }

    /// Applies acknowledgements of records, which the member must hold. Those below the start are
    /// ignored.
    ///
    /// # Returns
    /// The changes to persist before the request is answered.
    ///
    /// # Errors
    /// [`NotAcquired`], and the partition is in an inconsistent state: the caller has a copy.
    pub(crate) fn acknowledge(
        &mut self,
        member: &str,
        acks: &[Ack],
        renewed_until: Instant,
        max_deliveries: u16,
    ) -> Result<Vec<Change>, NotAcquired> {
        let mut changes = Vec::new();
        for ack in acks {
            let from = ack.from.max(self.start);
            if from >= ack.to {
                continue;
            }
            if ack.to > self.end() {
                return Err(NotAcquired);
            }
            self.split(from);
            self.split(ack.to);
            for run in self.runs.iter_mut().filter(|run| run.from >= from && run.to <= ack.to) {
                let Delivery::Acquired { member: holder, until } = &mut run.delivery else {
                    return Err(NotAcquired);
                };
                if **holder != *member {
                    return Err(NotAcquired);
                }
                let state = match ack.kind {
                    AckKind::Renew => {
                        *until = renewed_until;
                        continue;
                    }
                    AckKind::Accept => Stored::Acknowledged,
                    AckKind::Gap | AckKind::Reject => Stored::Archived,
                    AckKind::Release => returned(run.deliveries, max_deliveries),
                };
                changes.push(end_delivery(run, state));
            }
        }
        self.tidy();
        Ok(changes)
    }

    /// Releases all records of some members.
    ///
    /// # Returns
    /// The changes to persist; no request has to wait for them.
    pub(crate) fn release(
        &mut self,
        is_of_them: impl Fn(&str) -> bool,
        why: Return,
        max_deliveries: u16,
    ) -> Vec<Change> {
        self.take_back(max_deliveries, |run| match &run.delivery {
            Delivery::Acquired { member, .. } if is_of_them(member) => Some(why),
            _ => None,
        })
    }

    /// Releases records whose locks have expired.
    ///
    /// # Returns
    /// The changes to persist; no request has to wait for them.
    pub(crate) fn expire(&mut self, now: Instant, max_deliveries: u16) -> Vec<Change> {
        self.take_back(max_deliveries, |run| match &run.delivery {
            Delivery::Acquired { until, .. } if *until <= now => Some(Return::Lost),
            _ => None,
        })
    }

    fn take_back(
        &mut self,
        max_deliveries: u16,
        why: impl Fn(&Run) -> Option<Return>,
    ) -> Vec<Change> {
        let mut changes = Vec::new();
        for run in &mut self.runs {
            let state = match why(run) {
                None => continue,
                Some(Return::Unused) => {
                    run.deliveries -= 1;
                    Stored::Available
                }
                Some(Return::Lost) => returned(run.deliveries, max_deliveries),
            };
            changes.push(end_delivery(run, state));
        }
        self.tidy();
        changes
    }

    /// Marks a range without records for members.
    fn mark_nothing(&mut self, from: StreamOffset, to: StreamOffset) {
        if from >= to {
            return;
        }
        let known = to.min(self.end());
        self.split(from);
        self.split(known);
        for run in self.runs.iter_mut().filter(|run| run.from >= from && run.to <= known) {
            if run.delivery == Delivery::Available {
                run.delivery = Delivery::Nothing;
            }
        }
        self.extend_to(to, Delivery::Nothing);
    }

    fn extend_to(&mut self, to: StreamOffset, delivery: Delivery) {
        let from = self.end();
        if from < to {
            self.runs.push(Run { from, to, delivery, deliveries: 0 });
        }
    }

    /// Splits the run that spans this offset.
    fn split(&mut self, at: StreamOffset) {
        let index = self.runs.partition_point(|run| run.to <= at);
        let Some(run) = self.runs.get_mut(index).filter(|run| run.from < at) else { return };
        let rest = Run { from: at, ..run.clone() };
        run.to = at;
        self.runs.insert(index + 1, rest);
    }

    /// Moves the start over finished runs, and merges equal neighbours.
    fn tidy(&mut self) {
        let finished = self.runs.iter().take_while(|run| run.delivery.is_finished()).count();
        if let Some(run) = self.runs.drain(..finished).next_back() {
            self.start = run.to;
        }
        self.runs.dedup_by(|next, run| {
            let is_equal = next.delivery == run.delivery && next.deliveries == run.deliveries;
            if is_equal {
                run.to = next.to;
            }
            is_equal
        });
    }
}

/// The state of a record that is released without an acknowledgement.
fn returned(deliveries: u16, max_deliveries: u16) -> Stored {
    if deliveries < max_deliveries { Stored::Available } else { Stored::Archived }
}

fn end_delivery(run: &mut Run, state: Stored) -> Change {
    run.delivery = match state {
        Stored::Available => Delivery::Available,
        Stored::Acknowledged => Delivery::Acknowledged,
        Stored::Archived => Delivery::Archived,
    };
    Change { from: run.from, to: run.to, state, deliveries: run.deliveries }
}

/// Appends an acquired range to the report, merged with the previous one if that yields no more
/// than about `batch_records`, or is within one batch.
fn report_acquired(
    acquired: &mut Vec<Acquired>,
    next: Acquired,
    batch: StreamOffset,
    batch_records: u64,
) {
    if let Some(last) = acquired.last_mut()
        && last.to == next.from
        && last.deliveries == next.deliveries
        && (next.from > batch || next.to.0 - last.from.0 <= batch_records)
    {
        last.to = next.to;
    } else {
        acquired.push(next);
    }
}

#[cfg(test)]
mod tests;
