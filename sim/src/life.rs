//! One simulation: lives of a WAL, one after the other on the same disk.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use alluvium_device::sim::{Faults, Mode, Random, SimDisk, SimOptions};
use alluvium_device::{Durability, SharedDevice};
use alluvium_wal::{
    Append, AppendError, FormatOptions, LogOffset, OpenError, Options, Record, RecoveryReport,
    Trim, Wal,
};
use bytes::Bytes;
use parking_lot::Mutex;

use crate::model::{Model, Seen};
use crate::plug::{DATA_START, End, Hits, Mutation, Plug, WriteFaults};
use crate::{Outcome, Plan, Profile};

const PAGE: u64 = 4096;

/// See the module.
pub(crate) struct Run {
    plan: Plan,
    random: Random,
    disk: SimDisk,
    /// How the disk fares while nothing special is injected.
    usual: Faults,
    ring_bytes: u64,
    model: Model,
    hits: Arc<Mutex<Hits>>,
    outcome: Outcome,
}

/// How an attempt to open ended.
enum Opened {
    Traffic(Wal, Arc<Plug>),
    /// The plug was pulled on the way. The records that were handed out before, and whether the walk was complete.
    Interrupted(Vec<Record>, bool),
    /// Faults left nothing to open; the simulation ends here.
    Beyond(String),
}

impl Run {
    pub(crate) fn new(plan: Plan) -> Self {
        let mut random = Random::new(plan.seed ^ 0x5eed_0fa1_1f07);
        let ring_bytes = (32 + random.below(80)) * PAGE;
        let usual = Faults {
            survives_power_cut: [0.1, 0.5, 0.9][random.index(3)],
            torn_by_power_cut: [0.2, 0.5, 0.9][random.index(3)],
            short_transfer: if random.chance(0.3) { 0.2 } else { 0.0 },
            ..Faults::default()
        };
        let disk = SimDisk::new(SimOptions {
            capacity_bytes: DATA_START + ring_bytes,
            seed: random.next_u64(),
            volatile_cache: plan.mutation != Mutation::Sound || random.chance(0.8),
            durability: match plan.mutation {
                Mutation::TrustedCache => Durability::Device,
                _ => Durability::Auto,
            },
            faults: usual,
        });
        let model = Model::new(plan.seed, ring_bytes);
        Self {
            plan,
            random,
            disk,
            usual,
            ring_bytes,
            model,
            hits: Arc::default(),
            outcome: Outcome::default(),
        }
    }

    fn say(&self, what: impl FnOnce() -> String) {
        if self.plan.verbose {
            eprintln!("{}", what());
        }
    }

    pub(crate) fn run(mut self) -> Result<Outcome, String> {
        let device: SharedDevice = self.disk.device();
        let format = FormatOptions { window_bytes: Some(8 * PAGE), ..FormatOptions::default() };
        let header = Wal::format(&device, &format).map_err(|cause| format!("format: {cause}"))?;
        self.say(|| format!("ring of {} bytes, {header:?}", self.ring_bytes));
        let lives = 2 + self.random.below(5);
        for life in 0..=lives {
            self.say(|| format!("-- life {life} of {lives}"));
            let Some((wal, plug)) = self.open(life == lives)? else { return Ok(self.outcome) };
            if life == lives {
                break;
            }
            self.live(wal, &plug)?;
            self.disk.set_faults(self.usual);
            self.decay();
        }
        Ok(self.outcome)
    }

    // -- Opening

    /// Recover, through interruptions. `None` where faults have destroyed the headers.
    fn open(&mut self, last: bool) -> Result<Option<(Wal, Arc<Plug>)>, String> {
        let mut before: Option<Vec<Record>> = None;
        loop {
            let interrupt = !last && self.random.chance(0.25);
            let records = match self.try_open(interrupt, before.as_deref())? {
                Opened::Traffic(wal, plug) => return Ok(Some((wal, plug))),
                Opened::Beyond(why) => {
                    self.say(|| format!("gives up: {why}"));
                    return Ok(None);
                }
                Opened::Interrupted(records, complete) => complete.then_some(records),
            };
            before = records;
        }
    }

    /// `before` is what an interrupted recovery handed out, if its walk was complete: nobody has written since.
    fn try_open(&mut self, interrupt: bool, before: Option<&[Record]>) -> Result<Opened, String> {
        let faults = match self.plan.profile {
            Profile::PowerCut => WriteFaults::default(),
            Profile::Faults => {
                WriteFaults { lost: self.rarely(0.01), misdirected: self.rarely(0.01) }
            }
        };
        let random = Random::new(self.random.next_u64());
        let plug =
            Plug::new(self.disk.clone(), self.plan.mutation, faults, self.hits.clone(), random);
        if interrupt {
            plug.set_fuse(Some((self.random.below(2), self.end())));
        }
        let device: SharedDevice = plug.clone();
        let window_bytes = Wal::inspect(&device).map(|inspection| inspection.header.window_bytes);
        if self.plan.profile == Profile::Faults && self.random.chance(0.1) {
            self.disk.set_faults(Faults { read_error: 0.05, ..self.usual });
        }
        let options = self.options();
        let mut records = Vec::new();
        let opened = Wal::open(device.clone(), &options, None, &mut |record| {
            records.push(record);
            Ok(())
        });
        self.disk.set_faults(self.usual);
        match opened {
            Ok((wal, report)) => {
                plug.set_fuse(None);
                self.say(|| format!("{report}"));
                let read_errors = self.disk.counters().read_errors > 0;
                let hits = if read_errors { everything() } else { self.hits.lock().clone() };
                let window_bytes = window_bytes.map_err(|cause| format!("inspect: {cause}"))?;
                let seen = Seen { records: &records, report: &report, window_bytes };
                self.model.recovered(&seen, &hits)?;
                if let Some(before) = before
                    && self.plan.profile == Profile::PowerCut
                    && before != records
                {
                    return Err(
                        "two recoveries of the same log differ, and nobody wrote in between".into(),
                    );
                }
                self.check_report(&wal, &records, &report)?;
                Ok(Opened::Traffic(wal, plug))
            }
            Err(cause) => match plug.successor() {
                Some(successor) => {
                    self.say(|| format!("interrupted after {} records: {cause}", records.len()));
                    self.outcome.interrupted += 1;
                    let hits = self.hits.lock().clone();
                    self.model.interrupted(&records, &hits)?;
                    self.disk = successor;
                    self.disk.set_faults(self.usual);
                    // The fuse counts writes, and recovery writes nothing before its walk is complete.
                    Ok(Opened::Interrupted(records, true))
                }
                None => self.not_opened(&cause),
            },
        }
    }

    fn not_opened(&mut self, cause: &OpenError) -> Result<Opened, String> {
        if self.plan.profile == Profile::PowerCut {
            return Err(format!("can not be opened: {cause}"));
        }
        match cause {
            // The newest header may be unreadable when the log is chosen, and readable when it is looked at again.
            OpenError::Device(_) | OpenError::EndUnreadable { .. } | OpenError::Fenced { .. }
                if self.disk.counters().read_errors > 0 =>
            {
                // Reads failed for a while, and nothing was written: the next attempt finds everything.
                self.disk = End::ProcessCrash.of(&self.disk);
                Ok(Opened::Interrupted(Vec::new(), false))
            }
            _ if self.hits.lock().any_in(&(0..DATA_START)) => Ok(Opened::Beyond(cause.to_string())),
            _ => Err(format!("can not be opened: {cause}")),
        }
    }

    fn check_report(
        &mut self,
        wal: &Wal,
        records: &[Record],
        report: &RecoveryReport,
    ) -> Result<(), String> {
        let payload_bytes: u64 = records.iter().map(|record| record.payload.len() as u64).sum();
        if (report.records, report.payload_bytes) != (records.len() as u64, payload_bytes) {
            return Err(format!(
                "the report counts {} records of {payload_bytes} bytes: {report:?}",
                records.len()
            ));
        }
        if wal.durable() != report.end || wal.appended() != report.end {
            return Err(format!("opened at {}, recovered to {}", wal.durable(), report.end));
        }
        self.outcome.recoveries += 1;
        self.outcome.recovered += report.records;
        self.outcome.dropped += report.dropped_records;
        self.outcome.damaged += report.damage.len() as u64;
        Ok(())
    }

    fn options(&mut self) -> Options {
        let window_pages = 8 + self.random.below(self.ring_bytes / PAGE / 2 - 8 + 1).min(24);
        let window_bytes = window_pages * PAGE;
        Options {
            node_id: self.random.below(5) as u32,
            window_bytes,
            block_bytes: ((1 + self.random.below(4)) * PAGE) as u32,
            max_record_bytes: (1 + self.random.below(window_bytes / 2 - 2 * PAGE)) as u32,
            io_depth: 1 + self.random.index(6),
            iops: None,
            bandwidth_bytes_per_second: None,
        }
    }

    // -- Living

    fn live(&mut self, wal: Wal, plug: &Arc<Plug>) -> Result<(), String> {
        self.disk.set_mode(Mode::Queued);
        if self.random.chance(0.5) {
            plug.set_fuse(Some((self.random.below(60), self.end())));
        }
        if self.plan.profile == Profile::Faults && self.random.chance(0.1) {
            self.disk.set_faults(Faults { write_error: 0.03, ..self.usual });
        }
        let mut life = Life { wal: &wal, appends: VecDeque::new(), trims: Vec::new() };
        let (append, step, trim) =
            (self.random.below(8), 1 + self.random.below(6), 1 + self.random.below(3));
        // Sometimes records of many blocks.
        let bound = if self.random.below(4) == 0 { 40_000 } else { 9000 };
        let largest = 1 + self.random.below(bound) as usize;
        for _ in 0..20 + self.random.below(250) {
            let dice = self.random.below(2 + append + step + trim);
            if dice < append + 2 {
                self.append(&mut life, largest)?;
            } else if dice < append + 2 + step {
                self.disk.step();
            } else {
                self.trim(&mut life);
            }
            if let Some(successor) = plug.successor() {
                return self.died(life, successor);
            }
            self.settle(&mut life)?;
        }
        if self.random.chance(0.2) {
            drop(life);
            return self.close(wal, plug);
        }
        // What fails at the end may be followed by a write, into which the plug must not be pulled again.
        plug.set_fuse(None);
        let end = self.end();
        let successor = end.of(&self.disk);
        self.died(life, successor)
    }

    fn append(&mut self, life: &mut Life<'_>, largest: usize) -> Result<(), String> {
        let appended = life.wal.appended().0;
        let to_boundary = PAGE - (appended + 32) % PAGE;
        let len = match self.random.below(10) {
            // Exactly to the page boundary, or close before it: the places where a padding is empty or spills over.
            0 => to_boundary,
            1 => to_boundary.saturating_sub(self.random.below(70)).max(1),
            2 => self.random.below(largest as u64) + 1,
            3 => 1,
            _ => 1 + self.random.below(600),
        } as usize;
        let payload = self.model.next_payload(len);
        let cut = self.random.index(len + 1);
        let before = life.wal.stats();
        let durable = life.wal.durable();
        let (head, body) = payload.split_at(cut);
        let appended_record = match self.random.below(2) {
            0 => life.wal.append(&[head, body]),
            _ => life.wal.append_shared(&[head], &Bytes::copy_from_slice(body)),
        };
        match appended_record {
            Ok(append) => {
                self.outcome.appended += 1;
                let (offset, end) = (append.offset(), append.end());
                self.outcome.laps += end.0 / self.ring_bytes - appended / self.ring_bytes;
                self.model.appended(offset, end, len, durable)?;
                life.appends.push_back(append);
                Ok(())
            }
            Err(
                AppendError::TooLarge { .. }
                | AppendError::WindowFull { .. }
                | AppendError::OverCapacity { .. },
            ) => {
                self.outcome.refused += 1;
                match life.wal.stats() == before {
                    true => Ok(()),
                    false => Err(format!(
                        "a refused append changed {before:?} to {:?}",
                        life.wal.stats()
                    )),
                }
            }
            Err(AppendError::Failed(_)) if life.wal.stats().failed => Ok(()),
            Err(other) => Err(format!("append of {len} bytes: {other}")),
        }
    }

    fn trim(&mut self, life: &mut Life<'_>) {
        let promised = self.model.records.iter().take_while(|(_, entry)| entry.promised);
        let bounds: Vec<u64> = promised.map(|(_, entry)| entry.end).collect();
        if let Some(bound) = (!bounds.is_empty()).then(|| bounds[self.random.index(bounds.len())])
            && bound > self.model.trim_asked
        {
            self.model.trim_asked = bound;
            life.trims.push((bound, life.wal.trim(..LogOffset(bound))));
        }
    }

    /// Take in what the futures say.
    fn settle(&mut self, life: &mut Life<'_>) -> Result<(), String> {
        let mut cx = Context::from_waker(Waker::noop());
        let durable = life.wal.durable();
        while let Some(first) = life.appends.front_mut() {
            match Pin::new(&mut *first).poll(&mut cx) {
                Poll::Pending if first.end() <= durable => {
                    return Err(format!("{first:?} waits, though all before {durable} is durable"));
                }
                Poll::Pending => break,
                Poll::Ready(Ok(())) if first.end() > durable => {
                    return Err(format!(
                        "{first:?} was acknowledged, though only {durable} is durable"
                    ));
                }
                Poll::Ready(Ok(())) => {
                    self.model.acknowledged(first.end());
                    life.appends.pop_front();
                }
                Poll::Ready(Err(_)) if life.wal.stopped().is_some() => break,
                Poll::Ready(Err(cause)) => {
                    return Err(format!("{first:?}: {cause}, but the WAL works"));
                }
            }
        }
        let trimmed = &mut self.model.trimmed;
        let trims = &mut self.outcome.trims;
        life.trims.retain_mut(|(bound, trim)| match Pin::new(trim).poll(&mut cx) {
            Poll::Pending => true,
            Poll::Ready(result) => {
                if result.is_ok() {
                    *trimmed = (*trimmed).max(*bound);
                    *trims += 1;
                }
                false
            }
        });
        Ok(())
    }

    /// The plug is pulled.
    fn died(&mut self, mut life: Life<'_>, successor: SimDisk) -> Result<(), String> {
        self.settle(&mut life)?;
        self.say(|| {
            let stats = life.wal.stats();
            format!(
                "died: trimmed {}, durable {}, appended {}",
                stats.trimmed, stats.durable, stats.appended
            )
        });
        self.disk = successor;
        Ok(())
    }

    fn close(&mut self, wal: Wal, plug: &Arc<Plug>) -> Result<(), String> {
        // The fuse may still burn down, in the clean header for instance.
        self.disk.set_mode(Mode::Immediate);
        let (end, trim_asked) = (wal.appended(), self.model.trim_asked);
        let failed = wal.stats().failed;
        match (wal.close(), plug.successor()) {
            (Ok(()), successor) => {
                self.say(|| format!("closed at {end}"));
                self.outcome.closes += 1;
                self.model.acknowledged(end);
                self.model.trimmed = trim_asked;
                // Whatever comes after a close, nothing may be lost.
                let end = self.end();
                self.disk = successor.unwrap_or_else(|| end.of(&self.disk));
                Ok(())
            }
            (Err(_), Some(successor)) => {
                self.disk = successor;
                Ok(())
            }
            (Err(_), None) if self.plan.profile == Profile::Faults || failed => {
                let end = self.end();
                self.disk = end.of(&self.disk);
                Ok(())
            }
            (Err(cause), None) => Err(format!("close: {cause}")),
        }
    }

    fn end(&mut self) -> End {
        if self.random.chance(0.7) {
            self.outcome.power_cuts += 1;
            End::PowerCut
        } else {
            self.outcome.process_crashes += 1;
            End::ProcessCrash
        }
    }

    /// What happens to bytes at rest.
    fn decay(&mut self) {
        if self.plan.profile != Profile::Faults {
            return;
        }
        for _ in 0..self.random.below(4) {
            let capacity = DATA_START + self.ring_bytes;
            let at = match self.random.below(12) {
                0 => self.random.below(128),
                1 => 32 * 1024 + self.random.below(128),
                _ => DATA_START + self.random.below(capacity - DATA_START),
            };
            self.say(|| format!("rot at {at}"));
            self.disk.rot(at..at + 1, 1);
            self.hits.lock().add(at..at + 1);
        }
    }

    /// Mostly zero.
    fn rarely(&mut self, probability: f64) -> f64 {
        if self.random.chance(0.3) { probability } else { 0.0 }
    }
}

/// Faults anywhere: reads failed, and nobody knows where.
fn everything() -> Hits {
    let mut hits = Hits::default();
    hits.add(0..u64::MAX);
    hits
}

/// The traffic of one life.
struct Life<'a> {
    wal: &'a Wal,
    appends: VecDeque<Append>,
    trims: Vec<(u64, Trim)>,
}
