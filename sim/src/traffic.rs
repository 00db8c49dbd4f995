//! The actions of an owner of the log: appends, trims, and the handling of their results.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use alluvium_device::sim::Random;
use alluvium_wal::{
    Append, AppendError, Durable, LogOffset, Parts, ResizeError, Resizing, Trim, Wal, WalError,
};
use bytes::Bytes;

use crate::Outcome;
use crate::model::Model;
use crate::ring::{DATA_START, PAGE, Ring};

/// The traffic of one owner.
pub(crate) struct Traffic {
    pub(crate) wal: Wal,
    /// Upper bound of record lengths; most records are small.
    pub(crate) largest: u64,
    appends: VecDeque<Pending>,
    /// Trims and marks: offset and mark of each.
    trims: Vec<(u64, u64, Trim)>,
    /// The requested capacities.
    resizes: Vec<(u64, Resizing)>,
    /// The window in the header when it was last checked.
    window_bytes: u64,
}

/// A record that was not durable when it was last polled.
#[derive(Debug)]
enum Pending {
    Single(Append),
    InBatch(LogOffset, Durable),
}

impl Pending {
    fn end(&self) -> LogOffset {
        match self {
            Self::Single(append) => append.end(),
            Self::InBatch(end, _) => *end,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), WalError>> {
        match self {
            Self::Single(append) => Pin::new(append).poll(cx),
            Self::InBatch(_, durable) => Pin::new(durable).poll(cx),
        }
    }
}

impl Traffic {
    pub(crate) fn new(wal: Wal, largest: u64) -> Self {
        let window_bytes = wal.header().window_bytes;
        Self {
            wal,
            largest,
            appends: VecDeque::new(),
            trims: Vec::new(),
            resizes: Vec::new(),
            window_bytes,
        }
    }

    fn record_len(&self, random: &mut Random) -> usize {
        let to_boundary = PAGE - (self.wal.appended().0 + 32) % PAGE;
        let len = match random.below(10) {
            // Exactly to the page boundary, or just before it, where a padding is empty or spills
            // over.
            0 => to_boundary,
            1 => to_boundary.saturating_sub(random.below(70)).max(1),
            2 => random.below(self.largest) + 1,
            3 => 1,
            _ => 1 + random.below(600),
        };
        len as usize
    }

    fn append_to_log(&self, payload: &[u8], random: &mut Random) -> Result<Append, AppendError> {
        let (head, body) = payload.split_at(random.index(payload.len() + 1));
        match random.below(2) {
            0 => self.wal.append(&[head, body]),
            _ => self.wal.append_shared(&[head], &Bytes::copy_from_slice(body)),
        }
    }

    /// Appends a record, or a batch. Returns false if there was no space for all of it.
    pub(crate) fn append(
        &mut self,
        model: &mut Model,
        random: &mut Random,
        outcome: &mut Outcome,
    ) -> Result<bool, String> {
        if random.chance(0.2) {
            return self.append_batch(model, random, outcome);
        }
        let len = self.record_len(random);
        let payload = model.next_payload(len);
        let (before, appended, durable) =
            (self.wal.stats(), self.wal.appended(), self.wal.durable());
        match self.append_to_log(&payload, random) {
            Ok(append) => {
                outcome.appended += 1;
                let (offset, end) = (append.offset(), append.end());
                outcome.laps += model.ring.lap(end.0) - model.ring.lap(appended.0);
                model.appended(offset, end, len, durable)?;
                self.appends.push_back(Pending::Single(append));
                Ok(true)
            }
            Err(
                AppendError::TooLarge { .. }
                | AppendError::WindowFull { .. }
                | AppendError::OverCapacity { .. },
            ) => {
                outcome.refused += 1;
                // A header write may have begun and, with a fast disk, completed.
                let now = self.wal.stats();
                match (now.appended, now.records, now.used_bytes)
                    == (before.appended, before.records, before.used_bytes)
                {
                    true => Ok(false),
                    false => Err(format!("a refused append changed {before:?} to {now:?}")),
                }
            }
            Err(AppendError::Failed(_)) if self.wal.stats().failed => Ok(false),
            Err(other) => Err(format!("append of {len} bytes: {other}")),
        }
    }

    fn append_batch(
        &mut self,
        model: &mut Model,
        random: &mut Random,
        outcome: &mut Outcome,
    ) -> Result<bool, String> {
        let payloads: Vec<Vec<u8>> = (0..1 + random.below(6))
            .map(|n| model.nth_payload(n, self.record_len(random)))
            .collect();
        let split: Vec<([&[u8]; 1], Bytes)> = payloads
            .iter()
            .map(|payload| payload.split_at(random.index(payload.len() + 1)))
            .map(|(head, body)| ([head], Bytes::copy_from_slice(body)))
            .collect();
        let records: Vec<Parts<'_>> =
            split.iter().map(|(head, body)| Parts { head, body }).collect();
        let (before, mut appended, durable) =
            (self.wal.stats(), self.wal.appended(), self.wal.durable());
        let mut placed = Vec::new();
        let result = self.wal.append_batch(&records, &mut placed);
        for (at, payload) in placed.iter().zip(&payloads) {
            outcome.appended += 1;
            outcome.laps += model.ring.lap(at.end.0) - model.ring.lap(appended.0);
            appended = at.end;
            model.appended(at.offset, at.end, payload.len(), durable)?;
            self.appends.push_back(Pending::InBatch(at.end, self.wal.wait_durable(at.end)));
        }
        match result {
            Ok(()) if placed.len() == payloads.len() => Ok(true),
            Ok(()) => Err(format!("{} of {} records were appended", placed.len(), payloads.len())),
            Err(
                AppendError::TooLarge { .. }
                | AppendError::WindowFull { .. }
                | AppendError::OverCapacity { .. },
            ) => {
                outcome.refused += 1;
                match self.wal.stats().records == before.records + placed.len() as u64 {
                    true => Ok(false),
                    false => Err(format!("{} records of a batch changed {before:?}", placed.len())),
                }
            }
            Err(AppendError::Failed(_)) if self.wal.stats().failed => Ok(false),
            Err(other) => Err(format!("append of a batch: {other}")),
        }
    }

    /// Appends a record although the log has another owner.
    pub(crate) fn append_late(&mut self, model: &mut Model, random: &mut Random) {
        let len = self.record_len(random);
        let payload = model.next_payload(len);
        if let Ok(append) = self.append_to_log(&payload, random) {
            model.appended_late(append.offset(), append.end(), len, self.wal.header().epoch);
            self.appends.push_back(Pending::Single(append));
        }
    }

    /// Trims to any position up to which everything is promised.
    pub(crate) fn trim(&mut self, model: &mut Model, random: &mut Random) {
        if random.chance(0.3) {
            // As for an idle log, at any moment.
            self.wal.persist_durable();
        }
        let promised = model.records.iter().take_while(|(_, entry)| entry.promised);
        let bounds: Vec<u64> = promised.map(|(_, entry)| entry.end).collect();
        if let Some(bound) = (!bounds.is_empty()).then(|| bounds[random.index(bounds.len())])
            && bound > model.trim_asked
        {
            model.trim_asked = bound;
            let trim = match model.next_mark(random, 0.3) {
                Some(mark) => (bound, mark, self.wal.trim_and_mark(..LogOffset(bound), mark)),
                None => (bound, 0, self.wal.trim(..LogOffset(bound))),
            };
            self.trims.push(trim);
        } else if let Some(mark) = model.next_mark(random, 0.3) {
            self.trims.push((0, mark, self.wal.set_mark(mark)));
        }
    }

    /// Requests any capacity for which the device has space.
    pub(crate) fn resize(&mut self, random: &mut Random, device_bytes: u64) {
        let capacity_bytes =
            DATA_START + (32 + random.below((device_bytes - DATA_START) / PAGE - 31)) * PAGE;
        match self.wal.request_resize(capacity_bytes) {
            Ok(resizing) => self.resizes.push((capacity_bytes, resizing)),
            // It may be too small for the window of this owner.
            Err(ResizeError::Refused { .. }) => {}
            Err(ResizeError::Failed(_)) if self.wal.stopped().is_some() => {}
            Err(other) => panic!("{capacity_bytes}: {other}"),
        }
    }

    /// Trims everything durable although the log has another owner.
    pub(crate) fn trim_late(&mut self) {
        let bound = self.wal.durable();
        self.trims.push((bound.0, 0, self.wal.trim(..bound)));
    }

    /// Polls the futures and records their results.
    pub(crate) fn poll_futures(
        &mut self,
        model: &mut Model,
        outcome: &mut Outcome,
    ) -> Result<(), String> {
        let mut cx = Context::from_waker(Waker::noop());
        let durable = self.wal.durable();
        while let Some(first) = self.appends.front_mut() {
            match first.poll(&mut cx) {
                Poll::Pending if first.end() <= durable => {
                    return Err(format!("{first:?} is pending, but {durable} is durable"));
                }
                Poll::Pending => break,
                Poll::Ready(Ok(())) if first.end() > durable => {
                    return Err(format!(
                        "{first:?} was acknowledged, though only {durable} is durable"
                    ));
                }
                Poll::Ready(Ok(())) => {
                    model.acknowledged(first.end());
                    self.appends.pop_front();
                }
                Poll::Ready(Err(_)) if self.wal.stopped().is_some() => break,
                Poll::Ready(Err(cause)) => {
                    return Err(format!("{first:?}: {cause}, but the WAL works"));
                }
            }
        }
        self.trims.retain_mut(|(bound, mark, trim)| match Pin::new(trim).poll(&mut cx) {
            Poll::Pending => true,
            Poll::Ready(result) => {
                if result.is_ok() {
                    model.trimmed = model.trimmed.max(*bound);
                    model.mark = model.mark.max(*mark);
                    outcome.trims += u64::from(*bound > 0);
                    outcome.marks += u64::from(*mark > 0);
                }
                false
            }
        });
        let mut granted = Ok(());
        self.resizes.retain_mut(|(wanted, resizing)| match Pin::new(resizing).poll(&mut cx) {
            Poll::Pending => true,
            Poll::Ready(Ok(header)) => {
                outcome.resized_in_use += 1;
                model.ring = Ring::of(&header);
                if header.capacity_bytes != *wanted {
                    granted = Err(format!("requested {wanted} bytes, got {header:?}"));
                }
                false
            }
            Poll::Ready(Err(ended)) => {
                let failed = matches!(ended, ResizeError::Failed(_));
                outcome.resizes_cut_short += u64::from(failed);
                false
            }
        });
        granted?;
        let window_bytes = self.wal.header().window_bytes;
        outcome.grown += u64::from(window_bytes > self.window_bytes);
        outcome.shrunk += u64::from(window_bytes < self.window_bytes);
        self.window_bytes = window_bytes;
        Ok(())
    }

    /// Checks, after the WAL has stopped, that no future is left pending.
    pub(crate) fn check_stopped(&mut self) -> Result<(), String> {
        let mut cx = Context::from_waker(Waker::noop());
        let durable = self.wal.durable();
        for append in &mut self.appends {
            match append.poll(&mut cx) {
                Poll::Ready(Ok(())) if append.end() <= durable => {}
                Poll::Ready(Err(WalError::Fenced { .. } | WalError::Device(_))) => {}
                other => return Err(format!("{append:?} of a stopped WAL: {other:?}")),
            }
        }
        for (wanted, resizing) in &mut self.resizes {
            if Pin::new(resizing).poll(&mut cx).is_pending() {
                return Err(format!("a resize to {wanted} of a stopped WAL is pending"));
            }
        }
        for (bound, _, trim) in &mut self.trims {
            if Pin::new(trim).poll(&mut cx).is_pending() {
                return Err(format!("a trim to {bound} of a stopped WAL is pending"));
            }
        }
        Ok(())
    }
}
