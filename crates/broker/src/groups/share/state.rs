//! One share partition: which records of a partition a share group has in flight, decided purely.
//!
//! ```text
//!            start (Kafka's SPSO)                               end (SPEO)
//!   settled    | acquired | available | settled | acquired ...   |   never looked at
//!   -----------+----------+-----------+---------+----------------+-----------------> offsets
//! ```
//!
//! [`Run`]s cover everything from start to end without holes. Nothing here reads a clock, locks,
//! waits or writes; what is to be remembered over a restart comes back as [`Change`]s. What is
//! written when, and why a crash may come at any time: `docs/format/share-state.md`.

use std::sync::Arc;
use std::time::Instant;

use alluvium_stream::StreamOffset;

/// What has become of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// To be handed out.
    Available,
    /// A member has it, until then.
    Acquired { member: Arc<str>, until: Instant },
    /// A member has done with it.
    Acknowledged,
    /// Nobody gets it any more: a member rejected it, or it was handed out as often as it may be.
    Archived,
    /// There is no record for a member: a marker, a record of an aborted transaction, or a
    /// compacted one. Found out again after a restart.
    Nothing,
}

impl Delivery {
    fn is_settled(&self) -> bool {
        matches!(self, Self::Acknowledged | Self::Archived | Self::Nothing)
    }

    /// A restart knows no locks.
    fn stored(&self) -> Option<Stored> {
        match self {
            Self::Available | Self::Acquired { .. } => Some(Stored::Available),
            Self::Acknowledged => Some(Stored::Acknowledged),
            Self::Archived => Some(Stored::Archived),
            Self::Nothing => None,
        }
    }
}

/// What is remembered over a restart of what has become of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    Available,
    Acknowledged,
    Archived,
}

/// What the records from `from` up to, without, `to` are from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) from: StreamOffset,
    pub(crate) to: StreamOffset,
    pub(crate) state: Stored,
    /// How often they were handed out.
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

/// What a read has found: the offsets of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) from: StreamOffset,
    pub(crate) to: StreamOffset,
    /// Its records are for members.
    pub(crate) is_for_members: bool,
}

/// How much a member may acquire.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) max_records: u64,
    /// Not one record more, also where a batch has more.
    pub(crate) is_exact: bool,
    /// About how many records are told of together.
    pub(crate) batch_records: u64,
    /// Bound on the records in flight.
    pub(crate) max_in_flight: u64,
}

/// Records that a member has acquired, all handed out as often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Acquired {
    pub(crate) from: StreamOffset,
    pub(crate) to: StreamOffset,
    pub(crate) deliveries: u16,
}

/// What a member says of a record, with its number in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AckKind {
    /// There was no record.
    Gap = 0,
    Accept = 1,
    Release = 2,
    Reject = 3,
    /// It needs more time.
    Renew = 4,
}

impl AckKind {
    pub(crate) fn from_number(number: i8) -> Option<Self> {
        [Self::Gap, Self::Accept, Self::Release, Self::Reject, Self::Renew]
            .into_iter()
            .find(|kind| *kind as i8 == number)
    }
}

/// What a member says of the records from `from` up to, without, `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ack {
    pub(crate) from: StreamOffset,
    pub(crate) to: StreamOffset,
    pub(crate) kind: AckKind,
}

/// The member does not have all records that it speaks of; nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotAcquired;

/// Why records go back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Return {
    /// They were not sent: that was no delivery.
    Unused,
    /// The member is gone, or has ended its session, without a word: perhaps because of one of
    /// them.
    Lost,
}

/// One share partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SharePartition {
    start: StreamOffset,
    runs: Vec<Run>,
}

impl SharePartition {
    /// As it is remembered: what the changes do not speak of is available, and was never handed
    /// out.
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

    /// What is before it is done with.
    pub(crate) fn start(&self) -> StreamOffset {
        self.start
    }

    /// What is behind it was never looked at.
    pub(crate) fn end(&self) -> StreamOffset {
        self.runs.last().map_or(self.start, |run| run.to)
    }

    /// Records between start and end.
    pub(crate) fn in_flight(&self) -> u64 {
        let records = self.runs.iter().filter(|run| run.delivery != Delivery::Nothing);
        records.map(Run::records).sum()
    }

    /// Offsets between start and end that nobody has to look at any more.
    pub(crate) fn settled(&self) -> u64 {
        self.runs.iter().filter(|run| run.delivery.is_settled()).map(Run::records).sum()
    }

    /// All that a restart is to know besides the start.
    pub(crate) fn remembered(&self) -> Vec<Change> {
        let changes = self.runs.iter().filter_map(|run| {
            let state = run.delivery.stored()?;
            let Run { from, to, .. } = *run;
            let is_acquired = matches!(run.delivery, Delivery::Acquired { .. });
            // Nobody has said yet what came of the last one.
            let deliveries = run.deliveries - u16::from(is_acquired);
            let is_default = state == Stored::Available && deliveries == 0;
            (!is_default).then_some(Change { from, to, state, deliveries })
        });
        changes.collect()
    }

    /// From where to read for a member. `None`: as much is in flight as may be.
    pub(crate) fn next_read(&self, max_in_flight: u64) -> Option<StreamOffset> {
        let available = self.runs.iter().find(|run| run.delivery == Delivery::Available);
        match available {
            Some(run) => Some(run.from),
            None => (self.in_flight() < max_in_flight).then(|| self.end()),
        }
    }

    /// When the first lock is over.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let deadlines = self.runs.iter().filter_map(|run| match &run.delivery {
            Delivery::Acquired { until, .. } => Some(*until),
            _ => None,
        });
        deadlines.min()
    }

    /// The partition's records below `log_start` are gone. Whether that is news.
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

    /// A member acquires what is available of the batches that a read from `read_from` on has
    /// found. What lies between them does not exist.
    pub(crate) fn acquire(
        &mut self,
        read_from: StreamOffset,
        found: &[Found],
        member: &Arc<str>,
        until: Instant,
        wanted: Wanted,
    ) -> Vec<Acquired> {
        let mut acquired = Vec::new();
        // Since the read began everything may have become another: then the next read finds it.
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
            self.settle(at, batch.from);
            at = at.max(batch.from);
            if !batch.is_for_members {
                self.settle(at, batch.to);
                at = batch.to;
                continue;
            }
            if left == 0 {
                break;
            }
            // A batch that was begun is taken as a whole, unless that is not wanted.
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
                    // The rest stays; one run at most, since nothing may be taken after it.
                    let to = StreamOffset(run.from.0 + records);
                    cut = Some(Run { from: to, ..run.clone() });
                    run.to = to;
                }
                run.delivery = lock.clone();
                run.deliveries = run.deliveries.saturating_add(1);
                may_take -= records;
                left = left.saturating_sub(records);
                let taken = Acquired { from: run.from, to: run.to, deliveries: run.deliveries };
                tell(&mut acquired, taken, batch.from, wanted.batch_records);
            }
            if let Some(rest) = cut {
                let place = self.runs.partition_point(|run| run.from < rest.from);
                self.runs.insert(place, rest);
            }
            let room = wanted.max_in_flight.saturating_sub(self.in_flight());
            let records = (batch.to.0 - new_from.0).min(room).min(may_take);
            // Else there would be a hole before it.
            if records > 0 && new_from == self.end() {
                let (from, to) = (new_from, StreamOffset(new_from.0 + records));
                self.runs.push(Run { from, to, delivery: lock.clone(), deliveries: 1 });
                left = left.saturating_sub(records);
                let taken = Acquired { from, to, deliveries: 1 };
                tell(&mut acquired, taken, batch.from, wanted.batch_records);
            }
            if self.end() < batch.to {
                break;
            }
            at = batch.to;
        }
        self.tidy();
        acquired
    }

    /// A member says what has become of records, which must be those that it has. What is before
    /// the start is of no interest any more.
    ///
    /// # Returns
    /// What is to be remembered, before anybody is told.
    ///
    /// # Errors
    /// [`NotAcquired`], and the partition is in no state to be used: the caller has a copy.
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
                changes.push(give_up(run, state));
            }
        }
        self.tidy();
        Ok(changes)
    }

    /// Some members have nothing any more.
    ///
    /// # Returns
    /// What is to be remembered; nobody has to wait for it.
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

    /// Time has passed: take back what was locked for too long.
    ///
    /// # Returns
    /// What is to be remembered; nobody has to wait for it.
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
            changes.push(give_up(run, state));
        }
        self.tidy();
        changes
    }

    /// There is nothing for members between the two.
    fn settle(&mut self, from: StreamOffset, to: StreamOffset) {
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

    /// Let no run reach over this offset.
    fn split(&mut self, at: StreamOffset) {
        let place = self.runs.partition_point(|run| run.to <= at);
        let Some(run) = self.runs.get_mut(place).filter(|run| run.from < at) else { return };
        let rest = Run { from: at, ..run.clone() };
        run.to = at;
        self.runs.insert(place + 1, rest);
    }

    /// Move the start over what is settled, and make one run of equal ones.
    fn tidy(&mut self) {
        let settled = self.runs.iter().take_while(|run| run.delivery.is_settled()).count();
        if let Some(run) = self.runs.drain(..settled).next_back() {
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

/// What a record is that nobody has any more, and that was not done with.
fn returned(deliveries: u16, max_deliveries: u16) -> Stored {
    if deliveries < max_deliveries { Stored::Available } else { Stored::Archived }
}

fn give_up(run: &mut Run, state: Stored) -> Change {
    run.delivery = match state {
        Stored::Available => Delivery::Available,
        Stored::Acknowledged => Delivery::Acknowledged,
        Stored::Archived => Delivery::Archived,
    };
    Change { from: run.from, to: run.to, state, deliveries: run.deliveries }
}

/// Tell of what was acquired together with what came before it, as long as that makes no more than
/// about `batch_records`, or it is of one batch.
fn tell(acquired: &mut Vec<Acquired>, next: Acquired, batch: StreamOffset, batch_records: u64) {
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
