//! One simulation: successive runs of a WAL's owner on the same disk.

use std::sync::Arc;

use alluvium_device::sim::{Faults, Mode, Random, SimDisk, SimOptions};
use alluvium_device::{Device, Durability, SharedDevice};
use alluvium_wal::{FormatOptions, OpenError, Options, Record, RecoveryReport, Wal};
use parking_lot::Mutex;

use crate::model::{Model, Seen};
use crate::old_owner::OldOwner;
use crate::plug::{End, Hits, Mutation, Plug, WriteFaults};
use crate::ring::{DATA_START, PAGE, SLOT_AT};
use crate::traffic::Traffic;
use crate::{Outcome, Plan, Profile};

/// The state of a simulation.
pub(crate) struct Simulation {
    pub(crate) plan: Plan,
    pub(crate) random: Random,
    pub(crate) disk: SimDisk,
    /// The disk's faults while nothing special is injected.
    pub(crate) usual: Faults,
    pub(crate) model: Model,
    pub(crate) hits: Arc<Mutex<Hits>>,
    pub(crate) outcome: Outcome,
}

/// The result of an attempt to open the log.
enum Opened {
    Traffic(Wal, Arc<Plug>),
    /// The opening was interrupted and has to be repeated. Contains the records handed out, if the
    /// interruption came after the walk was complete.
    Interrupted(Option<Vec<Record>>),
    /// Faults have destroyed the log; the simulation ends here.
    Destroyed(String),
}

impl Simulation {
    pub(crate) fn new(plan: Plan) -> Result<Self, String> {
        let mut random = Random::new(plan.seed ^ 0x5eed_0fa1_1f07);
        let ring_pages = match random.below(4) {
            0 => 100 + random.below(150),
            _ => 32 + random.below(80),
        };
        let usual = Faults {
            survives_power_cut: [0.1, 0.5, 0.9][random.index(3)],
            torn_by_power_cut: [0.2, 0.5, 0.9][random.index(3)],
            short_transfer: if random.chance(0.3) { 0.2 } else { 0.0 },
            ..Faults::default()
        };
        let disk = SimDisk::new(SimOptions {
            capacity_bytes: DATA_START + (ring_pages + random.below(80)) * PAGE,
            seed: random.next_u64(),
            volatile_cache: plan.mutation != Mutation::Sound || random.chance(0.8),
            durability: match plan.mutation {
                Mutation::TrustedCache => Durability::Device,
                _ => Durability::Auto,
            },
            reservations: true,
            faults: usual,
        });
        let format = FormatOptions {
            capacity_bytes: Some(DATA_START + ring_pages * PAGE),
            window_bytes: Some(8 * PAGE),
            ..FormatOptions::default()
        };
        let header =
            Wal::format(&disk.device(), &format).map_err(|cause| format!("format: {cause}"))?;
        let model = Model::new(plan.seed, &header);
        let (hits, outcome) = (Arc::default(), Outcome::default());
        let run = Self { plan, random, disk, usual, model, hits, outcome };
        run.trace(|| format!("{header:?}"));
        Ok(run)
    }

    pub(crate) fn trace(&self, what: impl FnOnce() -> String) {
        if self.plan.verbose {
            eprintln!("{}", what());
        }
    }

    pub(crate) fn run(mut self) -> Result<Outcome, String> {
        let runs = 2 + self.random.below(5);
        let mut old_owner = None;
        for run in 0..=runs {
            self.trace(|| format!("-- run {run} of {runs}"));
            let Some((wal, plug)) = self.open(run == runs, &mut old_owner)? else { break };
            if run == runs {
                break;
            }
            old_owner = self.run_owner(wal, &plug, old_owner)?;
            if old_owner.is_none() {
                self.damage_at_rest();
                if self.random.chance(0.25) {
                    self.resize()?;
                }
            }
        }
        self.old_owner_ends(old_owner);
        self.count_faults();
        Ok(self.outcome)
    }

    // -- The disk

    /// Continues with the disk's successor.
    pub(crate) fn replace_disk(&mut self, successor: SimDisk) {
        self.count_faults();
        self.disk = successor;
        self.disk.set_faults(self.usual);
    }

    fn count_faults(&mut self) {
        let counters = self.disk.counters();
        self.outcome.rotten += counters.rotten_bits;
        self.outcome.no_space += counters.no_space;
        self.outcome.io_errors +=
            counters.read_errors + counters.write_errors + counters.flush_errors;
    }

    /// Requests that this disk has failed so far.
    pub(crate) fn failures(&self) -> u64 {
        let counters = self.disk.counters();
        counters.read_errors + counters.write_errors + counters.flush_errors + counters.no_space
    }

    /// With `probability`, if the profile allows it, makes requests fail for a while.
    pub(crate) fn inject_failures(&mut self, probability: f64) {
        // An unreadable header does not count, and the other one may be an old owner's.
        let allowed = self.plan.profile == Profile::Faults && !self.hits.lock().late_header;
        if allowed && self.random.chance(probability) {
            let faults = match self.random.below(5) {
                0 => Faults { write_error: 0.03, ..self.usual },
                1 => Faults { no_space: 0.03, ..self.usual },
                2 => Faults { flush_error: 0.3, ..self.usual },
                _ => Faults { read_error: 0.05, ..self.usual },
            };
            self.disk.set_faults(faults);
        }
    }

    pub(crate) fn end(&mut self) -> End {
        if self.random.chance(0.7) {
            self.outcome.power_cuts += 1;
            End::PowerCut
        } else {
            self.outcome.process_crashes += 1;
            End::ProcessCrash
        }
    }

    /// Damages bytes at rest.
    fn damage_at_rest(&mut self) {
        if self.plan.profile != Profile::Faults {
            return;
        }
        for _ in 0..self.random.below(4) {
            let at = match self.random.below(12) {
                slot @ 0..2 => SLOT_AT[slot as usize] + self.random.below(128),
                _ => DATA_START + self.random.below(self.model.ring.bytes),
            };
            // Either header alone is enough, unless an old owner has written the other one.
            if at < DATA_START && self.hits.lock().late_header {
                continue;
            }
            self.trace(|| format!("rot at {at}"));
            self.disk.rot(at..at + 1, 1);
            self.hits.lock().add(at..at + 1);
        }
    }

    /// A path to the disk, which loses or misdirects writes if the profile allows it.
    pub(crate) fn plug(&mut self) -> Arc<Plug> {
        let mut rarely =
            |probability| match self.plan.profile == Profile::Faults && self.random.chance(0.3) {
                true => probability,
                false => 0.0,
            };
        let faults = WriteFaults { lost: rarely(0.01), misdirected: rarely(0.01) };
        let random = Random::new(self.random.next_u64());
        Plug::new(self.disk.clone(), self.plan.mutation, faults, self.hits.clone(), random)
    }

    // -- Opening

    /// Recovers, through interruptions. Returns `None` if faults have destroyed the headers.
    fn open(
        &mut self,
        last: bool,
        old_owner: &mut Option<OldOwner>,
    ) -> Result<Option<(Wal, Arc<Plug>)>, String> {
        let mut before: Option<Vec<Record>> = None;
        loop {
            let interrupt = !last && self.random.chance(0.25);
            match self.try_open(interrupt, before.as_deref(), old_owner)? {
                Opened::Traffic(wal, plug) => return Ok(Some((wal, plug))),
                Opened::Destroyed(why) => {
                    self.trace(|| format!("ended by faults: {why}"));
                    return Ok(None);
                }
                Opened::Interrupted(records) => {
                    let again = before.is_some() && records.is_some();
                    self.outcome.interrupted_again += u64::from(again);
                    before = records;
                }
            }
        }
    }

    /// `before` are the records handed out by an interrupted recovery, if nothing has been written
    /// since.
    fn try_open(
        &mut self,
        interrupt: bool,
        before: Option<&[Record]>,
        old_owner: &mut Option<OldOwner>,
    ) -> Result<Opened, String> {
        let plug = self.plug();
        if interrupt {
            plug.set_fuse(Some((self.random.below(2), self.end())));
        }
        plug.set_old_owner(old_owner.as_ref().map(|old_owner| old_owner.plug.clone()));
        let device: SharedDevice = plug.clone();
        let (errors, counters) = (self.failures(), self.disk.counters());
        let found = match Wal::inspect(&self.disk.device()) {
            Ok(found) => found,
            Err(cause) => return self.not_opened(&cause, errors, old_owner),
        };
        self.model.resized(&found.header, &mut self.hits.lock());
        self.model.check_headers(&found, &self.hits.lock())?;
        self.inject_failures(0.15);
        let mut options = self.options();
        self.model.mark_asked = self.model.mark_asked.max(found.header.mark);
        options.mark = self.model.next_mark(&mut self.random, 0.5);
        let mut records = Vec::new();
        let opened = Wal::open(device, &options, None, &mut |record| {
            records.push(record);
            Ok(())
        });
        self.disk.set_faults(self.usual);
        let read_errors = self.disk.counters().read_errors > counters.read_errors;
        let hits = if read_errors { hits_everywhere() } else { self.hits.lock().clone() };
        match opened {
            Ok((wal, report)) => {
                plug.set_fuse(None);
                self.trace(|| format!("{report}"));
                let seen = Seen { records: &records, report: &report, header: &found.header };
                self.model.recovered(&seen, &hits)?;
                self.model.opened(&wal, options.mark)?;
                if let Some(before) = before
                    && self.plan.profile == Profile::PowerCut
                    && before != records
                {
                    return Err(
                        "two recoveries of the same log differ without a write in between".into()
                    );
                }
                self.check_report(&wal, &records, &report)?;
                if old_owner.is_none() {
                    // Both headers are new.
                    self.hits.lock().late_header = false;
                }
                Ok(Opened::Traffic(wal, plug))
            }
            Err(cause) => {
                // The fuse counts writes, and recovery writes nothing before its walk is complete.
                let complete = plug.successor().is_some()
                    || matches!(&cause, OpenError::Device(cause) if cause.operation == "write");
                if complete {
                    self.model.interrupted(&records, &found.header, &hits)?;
                }
                match plug.successor() {
                    Some(successor) => {
                        self.trace(|| {
                            format!("interrupted after {} records: {cause}", records.len())
                        });
                        self.outcome.interrupted += 1;
                        self.old_owner_ends(old_owner.take());
                        self.replace_disk(successor);
                        Ok(Opened::Interrupted(Some(records)))
                    }
                    None => self.not_opened(&cause, errors, old_owner),
                }
            }
        }
    }

    /// Handles a failed opening. `errors` is the number of requests that the disk had failed
    /// before.
    fn not_opened(
        &mut self,
        cause: &OpenError,
        errors: u64,
        old_owner: &mut Option<OldOwner>,
    ) -> Result<Opened, String> {
        self.trace(|| format!("not opened: {cause}"));
        if self.plan.profile == Profile::PowerCut {
            return Err(format!("cannot be opened: {cause}"));
        }
        let failed = self.failures() > errors || self.disk.failure().is_some();
        match cause {
            // If one header could not be read, the other one may state another capacity.
            OpenError::Device(_)
            | OpenError::EndUnreadable { .. }
            | OpenError::Fenced { .. }
            | OpenError::InvalidOption(_)
                if failed =>
            {
                // The next attempt finds everything.
                self.old_owner_ends(old_owner.take());
                self.replace_disk(self.disk.process_crash());
                Ok(Opened::Interrupted(None))
            }
            OpenError::Fenced { .. }
                if old_owner.as_ref().is_some_and(|old_owner| !old_owner.fenced) =>
            {
                self.outcome.openings_refused += 1;
                Ok(Opened::Interrupted(None))
            }
            _ if self.hits.lock().any_in(&(0..DATA_START)) => {
                Ok(Opened::Destroyed(cause.to_string()))
            }
            _ => Err(format!("cannot be opened: {cause}")),
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
        let most = self.model.ring.bytes / PAGE / 2;
        let more = match self.random.below(2) {
            0 => self.random.below(most - 8 + 1).min(24),
            _ => self.random.below(most - 8 + 1),
        };
        let window_bytes = (8 + more) * PAGE;
        // Where records may be large, the window starts large.
        let largest = match self.random.below(2) {
            0 => window_bytes / 2 - 2 * PAGE,
            _ => (window_bytes / 2 - 2 * PAGE).min(40_000),
        };
        Options {
            node_id: self.random.below(5) as u32,
            window_bytes,
            block_bytes: ((1 + self.random.below(4)) * PAGE) as u32,
            max_record_bytes: (1 + self.random.below(largest)) as u32,
            io_depth: 1 + self.random.index(6),
            iops: None,
            bandwidth_bytes_per_second: None,
            reserve: false,
            mark: None,
        }
    }

    // -- Traffic

    /// Runs the traffic of one owner. Returns the owner if it does not end.
    fn run_owner(
        &mut self,
        wal: Wal,
        plug: &Arc<Plug>,
        mut old_owner: Option<OldOwner>,
    ) -> Result<Option<OldOwner>, String> {
        self.disk.set_mode(Mode::Queued);
        if self.random.chance(0.5) {
            plug.set_fuse(Some((self.random.below(60), self.end())));
        }
        self.inject_failures(0.15);
        let (append, step, trim) =
            (self.random.below(8), 1 + self.random.below(6), 1 + self.random.below(3));
        // Sometimes records of many blocks.
        let bound = if self.random.below(4) == 0 { 40_000 } else { 9000 };
        let mut traffic = Traffic::new(wal, 1 + self.random.below(bound));
        // Sometimes more than the window takes.
        let burst = if self.random.below(3) == 0 { 0.05 } else { 0.0 };
        let resize = if self.random.below(3) == 0 { 0.04 } else { 0.0 };
        for _ in 0..20 + self.random.below(250) {
            let Self { model, random, outcome, .. } = self;
            if random.chance(resize) {
                traffic.resize(random, self.disk.capacity_bytes());
            }
            let dice = random.below(2 + append + step + trim);
            if dice < append + 2 {
                traffic.append(model, random, outcome)?;
            } else if dice < append + 2 + step {
                self.disk.step();
            } else {
                traffic.trim(model, random);
            }
            if random.chance(burst) {
                let most = random.below(100);
                let mut appended = 0;
                while appended < most && traffic.append(model, random, outcome)? {
                    appended += 1;
                }
            }
            if let Some(old) = &mut old_owner
                && self.random.chance(0.3)
            {
                self.old_owner_acts(old)?;
            }
            if let Some(old) = old_owner.take_if(|_| self.random.chance(0.02)) {
                self.old_owner_closes(old)?;
            }
            traffic.poll_futures(&mut self.model, &mut self.outcome)?;
            if let Some(successor) = plug.successor() {
                self.old_owner_ends(old_owner);
                self.died(&traffic, successor);
                return Ok(None);
            }
        }
        if let Some(old) = old_owner {
            self.old_owner_closes(old)?;
        }
        match self.random.below(10) {
            0..2 => {
                let Traffic { wal, .. } = traffic;
                self.close(wal, plug)?;
                return Ok(None);
            }
            2..4 => {
                plug.set_fuse(None);
                return self.take_over(traffic, plug.clone()).map(Some);
            }
            _ => {}
        }
        // A failure at the end may be followed by a write, at which the power must not be cut
        // again.
        plug.set_fuse(None);
        let end = self.end();
        let successor = end.of(&self.disk);
        self.died(&traffic, successor);
        Ok(None)
    }

    /// Continues after a power cut or crash during traffic.
    fn died(&mut self, traffic: &Traffic, successor: SimDisk) {
        self.trace(|| {
            let stats = traffic.wal.stats();
            format!(
                "interrupted: trimmed {}, durable {}, appended {}",
                stats.trimmed, stats.durable, stats.appended
            )
        });
        self.replace_disk(successor);
    }

    fn close(&mut self, wal: Wal, plug: &Arc<Plug>) -> Result<(), String> {
        // The cut may still happen, for instance at the clean header.
        self.disk.set_mode(Mode::Immediate);
        let (end, trim_asked) = (wal.appended(), self.model.trim_asked);
        let failed = wal.stats().failed;
        match (wal.close(), plug.successor()) {
            (Ok(()), successor) => {
                self.trace(|| format!("closed at {end}"));
                self.outcome.closes += 1;
                self.model.acknowledged(end);
                self.model.trimmed = trim_asked;
                self.model.mark = self.model.mark_asked;
                // Whatever happens after a close, nothing may be lost.
                let end = self.end();
                let successor = successor.unwrap_or_else(|| end.of(&self.disk));
                self.replace_disk(successor);
                Ok(())
            }
            (Err(_), Some(successor)) => {
                self.replace_disk(successor);
                Ok(())
            }
            (Err(_), None) if self.plan.profile == Profile::Faults || failed => {
                let end = self.end();
                self.replace_disk(end.of(&self.disk));
                Ok(())
            }
            (Err(cause), None) => Err(format!("close: {cause}")),
        }
    }
}

/// Faults anywhere: reads failed at unknown positions.
fn hits_everywhere() -> Hits {
    let mut hits = Hits::default();
    hits.add(0..u64::MAX);
    hits
}
