//! A log that is written, crashes, is damaged, is resized, and continues.

use alluvium_device::Durability;
use alluvium_device::sim::{Faults, Mode, SimDisk, SimOptions};
use alluvium_wal::{
    AppendError, FormatOptions, LogOffset, OpenError, Options, Parts, ResizeError, Wal,
};
use bytes::Bytes;

use super::Input;
use super::ledger::Ledger;
use super::meter::Meter;
use super::record::{differ, open, scan};
use super::reference::{Choice, Header, Log, Slot, Walked, choose, slot};
use crate::ring::{DATA_START, PAGE, SLOT_AT};

/// Number of disk images from which old pages are taken.
const SNAPSHOTS: usize = 4;
/// Pages of the ring for which the device has space.
const MAX_PAGES: u64 = 80;

/// [`recovery_on`] on a disk that is flushed.
pub fn recovery(data: &[u8]) -> Result<(), String> {
    recovery_on(data, Durability::Auto)
}

/// Writes a log on a simulated disk, ends that with a power cut, a crash or a close, damages bytes
/// at rest (flipped bits, zeroed, misdirected and old pages and sectors), resizes it in use or
/// offline, recovers it, and continues. Every promised record must be there or be reported as
/// damage, within the limits stated in the format; records handed out by one recovery must be
/// handed out by the next; and every walk must find what the reference finds.
///
/// With [`Durability::Device`] the disk's cache is trusted, which loses records: a negative
/// control.
pub fn recovery_on(data: &[u8], durability: Durability) -> Result<(), String> {
    let Err(what) = History::new(Input(data), durability)?.run() else { return Ok(()) };
    // Run again, to record how it happened.
    let mut history = History::new(Input(data), durability)?;
    history.story = Some(Vec::new());
    let again = history.run();
    let story = history.story.unwrap_or_default().join("\n");
    Err(format!("{what}, or, replayed, {again:?}, after:\n{story}"))
}

struct History<'a> {
    input: Input<'a>,
    /// The events, one line each, if they are recorded.
    story: Option<Vec<String>>,
    disk: SimDisk,
    ledger: Ledger,
    /// Which header slots were damaged since both were written.
    slots_hit: [bool; 2],
    /// End of the walk of an opening or a resize that has been interrupted since.
    cut_off: Option<u64>,
    /// The disk at the end of earlier runs.
    snapshots: Vec<Vec<u8>>,
}

impl<'a> History<'a> {
    fn new(mut input: Input<'a>, durability: Durability) -> Result<Self, String> {
        let chances = [0.0, 0.5, 0.9, 1.0];
        let faults = Faults {
            survives_power_cut: chances[input.below(4) as usize],
            torn_by_power_cut: chances[input.below(4) as usize],
            ..Faults::default()
        };
        let disk = SimDisk::new(SimOptions {
            capacity_bytes: DATA_START + MAX_PAGES * PAGE,
            seed: input.u8().into(),
            volatile_cache: !input.once_in(4),
            durability,
            reservations: true,
            faults,
        });
        let format = FormatOptions {
            capacity_bytes: Some(DATA_START + (32 + input.below(MAX_PAGES - 32 + 1)) * PAGE),
            window_bytes: Some(8 * PAGE),
            force: true, // skips the check of the content
            ..FormatOptions::default()
        };
        let header = Wal::format(&disk.device(), &format).map_err(|cause| cause.to_string())?;
        let ledger = Ledger::new(*header.wal_id.as_bytes());
        let (slots_hit, snapshots) = ([false; 2], Vec::new());
        Ok(Self { input, story: None, disk, ledger, slots_hit, cut_off: None, snapshots })
    }

    fn trace(&mut self, what: impl FnOnce() -> String) {
        if let Some(story) = &mut self.story {
            story.push(what());
        }
    }

    fn run(&mut self) -> Result<(), String> {
        loop {
            if self.headers_are_lost() {
                // The opening need only return.
                drop(Wal::open(self.disk.device(), &self.options(), None, &mut |_| Ok(())));
                return Ok(());
            }
            let last = self.input.is_empty();
            if !last && self.input.once_in(4) {
                self.resize()?;
                continue;
            }
            let Some((wal, meter)) = self.open(!last)? else { continue };
            if last {
                return Ok(());
            }
            self.run_owner(wal, &meter)?;
            self.snapshots.push(self.disk.image());
            if self.snapshots.len() > SNAPSHOTS {
                self.snapshots.remove(0);
            }
            while self.input.once_in(2) {
                self.damage();
            }
        }
    }

    /// A capacity that a log can have on the device.
    fn capacity(&mut self) -> u64 {
        DATA_START + (32 + self.input.below(MAX_PAGES - 32 + 1)) * PAGE
    }

    fn ring_pages(&self) -> u64 {
        Wal::inspect(&self.disk.device()).map_or(32, |found| found.ring_bytes / PAGE)
    }

    fn options(&mut self) -> Options {
        let window_bytes = (8 + self.input.below(self.ring_pages() / 2 - 8 + 1)) * PAGE;
        Options {
            window_bytes,
            block_bytes: ((1 + self.input.below(4)) * PAGE) as u32,
            max_record_bytes: (window_bytes / 2 - 2 * PAGE) as u32,
            io_depth: 1 + self.input.below(6) as usize,
            ..Options::default()
        }
    }

    /// Whether damage to the headers excuses everything: both slots are hit, or one is a copy of
    /// the other, which is refused.
    fn headers_are_lost(&self) -> bool {
        let inspected = Wal::inspect(&self.disk.device());
        let conflict = matches!(inspected, Err(OpenError::HeaderConflict { .. }));
        let hit = self.slots_hit;
        if conflict { hit.contains(&true) } else { hit == [true; 2] }
    }

    // -- Recovery

    fn slots(&self) -> [Slot; 2] {
        SLOT_AT.map(|at| slot(&self.disk.peek(at, PAGE as usize)))
    }

    /// The newest header.
    fn header(&self) -> Result<Header, String> {
        let slots = self.slots();
        match choose(&slots) {
            Choice::Slot(index) if let Slot::Valid(header) = slots[index] => Ok(header),
            choice => Err(format!("{choice:?}: {slots:?}")),
        }
    }

    fn log(&self, header: Header) -> Log {
        Log::new(header, &self.disk.image(), &[])
    }

    /// Walks the log without changing it, and checks the result.
    fn scan(&mut self) -> Result<(Log, Walked), String> {
        let log = self.log(self.header()?);
        let expected = log.walk();
        let found = scan(&self.disk.device())?;
        self.trace(|| match &found {
            None => "the end cannot be read".into(),
            Some(Walked { records, damage, end, .. }) => {
                let (Header { epoch, trim, .. }, count) = (log.header, records.len());
                format!("epoch {epoch}: {count} records in {trim}..{end}, damage {damage:?}")
            }
        });
        let Some(walked) = expected.filter(|expected| Some(expected) == found.as_ref()) else {
            return Err(differ(&log.header, &log.walk(), &found));
        };
        self.ledger.check(&log, &walked)?;
        // The ledger now has its records: they are there unless an old one covers them, as the
        // limits state.
        match self.cut_off.take() {
            Some(end) if end != walked.end => {
                Err(format!("the log ended at {end}, and now at {}", walked.end))
            }
            _ => Ok((log, walked)),
        }
    }

    /// A device whose power may be cut at one of the next `writes` writes.
    fn meter(&mut self, may_end: bool, writes: u64) -> std::sync::Arc<Meter> {
        let meter = Meter::new(&self.disk, &[]);
        if may_end && self.input.once_in(4) {
            meter.set_fuse(self.input.below(writes), self.power_cut());
        }
        meter
    }

    /// Recovers. Returns `None` if it was interrupted by a cut.
    fn open(&mut self, may_end: bool) -> Result<Option<(Wal, std::sync::Arc<Meter>)>, String> {
        let options = self.options();
        let (log, walked) = self.scan()?;
        let meter = self.meter(may_end, 2);
        match open(meter.device(), &options) {
            Ok((Some(wal), found)) => {
                if found.as_ref() != Some(&walked) {
                    return Err(differ(&log.header, &Some(walked), &found));
                }
                meter.clear_fuse();
                self.ledger.continue_from(&log, &walked);
                self.slots_hit = [false; 2];
                Ok(Some((wal, meter)))
            }
            Err(cause) => {
                self.trace(|| format!("opening: {cause}"));
                let successor = meter.successor();
                self.disk = successor.ok_or_else(|| format!("cannot be opened: {cause}"))?;
                // The walk was complete: the cut happens at a write, and nothing is written before
                // the walk ends.
                self.ledger.promise(&walked);
                self.cut_off = Some(walked.end);
                Ok(None)
            }
            Ok((None, _)) => Err("the end cannot be read".into()),
        }
    }

    fn resize(&mut self) -> Result<(), String> {
        let (log, walked) = self.scan()?;
        let capacity = self.capacity();
        let meter = self.meter(true, 6);
        let resized = Wal::resize(&meter.device(), capacity, None);
        self.trace(|| format!("resize to {capacity}: {resized:?}"));
        match (resized, meter.successor()) {
            (Ok(_), successor) => {
                self.ledger.continue_from(&log, &walked);
                self.slots_hit = [false; 2];
                self.disk = successor.unwrap_or(self.disk.clone());
            }
            (Err(_), Some(successor)) => {
                self.disk = successor;
                self.ledger.promise(&walked);
                self.cut_off = Some(walked.end);
            }
            (Err(OpenError::ResizeBlocked { .. }), None) => {}
            (Err(cause), None) => return Err(format!("resize to {capacity}: {cause}")),
        }
        Ok(())
    }

    // -- Traffic

    fn run_owner(&mut self, wal: Wal, meter: &Meter) -> Result<(), String> {
        self.disk.set_mode(Mode::Queued);
        if self.input.once_in(3) {
            meter.set_fuse(self.input.below(24), self.power_cut());
        }
        let epoch = wal.header().epoch;
        let mut close = false;
        while !self.input.is_empty() && !close && meter.successor().is_none() {
            match self.input.u8() % 16 {
                0..=5 => self.append(&wal, epoch)?,
                6 => self.append_batch(&wal, epoch)?,
                7..=10 => {
                    let queued = self.disk.queued().len() as u64;
                    if queued > 0 {
                        self.disk.step_at(self.input.below(queued) as usize);
                    }
                }
                11 => self.disk.run_until_idle(),
                12 => self.trim(&wal),
                13 if self.input.once_in(4) => self.request_resize(&wal)?,
                13 => self.trim(&wal),
                14 => break,
                _ => close = true,
            }
            self.promise_durable(&wal);
        }
        self.promise_durable(&wal);
        self.trace(|| format!("ends: {:?}", wal.stats()));
        if close && meter.successor().is_none() {
            self.disk.set_mode(Mode::Immediate);
            let end = wal.appended().0;
            match wal.close() {
                Ok(()) => self.ledger.close(end),
                Err(cause) if meter.successor().is_none() => return Err(format!("close: {cause}")),
                Err(_) => {}
            }
        }
        meter.clear_fuse();
        let power_cut = self.power_cut();
        self.disk = match meter.successor() {
            Some(successor) => successor,
            None if power_cut => self.disk.power_cut(),
            None => self.disk.process_crash(),
        };
        Ok(())
    }

    fn record_len(&mut self, wal: &Wal) -> u64 {
        let to_boundary = PAGE - (wal.appended().0 + 32) % PAGE;
        match self.input.u8() % 8 {
            0 => to_boundary,
            1 => to_boundary.saturating_sub(self.input.below(70)).max(1),
            2 => 1 + self.input.below(60_000),
            3 => 1 + self.input.below(6000),
            _ => 1 + self.input.below(600),
        }
    }

    fn append(&mut self, wal: &Wal, epoch: u32) -> Result<(), String> {
        let len = self.record_len(wal);
        let payload = self.ledger.payload(len as usize);
        let durable = wal.durable();
        let (head, body) = payload.split_at(payload.len().min(self.input.u8() as usize));
        match wal.append_shared(&[head], &Bytes::copy_from_slice(body)) {
            Ok(append) => {
                self.trace(|| format!("{append:?}, durable {durable}"));
                let range = append.offset().0..append.end().0;
                self.ledger.append(range, epoch, durable.0, &payload);
                Ok(())
            }
            Err(
                AppendError::TooLarge { .. }
                | AppendError::WindowFull { .. }
                | AppendError::OverCapacity { .. },
            ) => Ok(()),
            Err(cause) => Err(format!("append of {len} bytes: {cause}")),
        }
    }

    fn append_batch(&mut self, wal: &Wal, epoch: u32) -> Result<(), String> {
        let payloads: Vec<Vec<u8>> = (0..1 + self.input.below(5))
            .map(|_| {
                let len = self.record_len(wal);
                self.ledger.payload(len as usize)
            })
            .collect();
        let durable = wal.durable();
        let none = Bytes::new();
        let heads: Vec<[&[u8]; 1]> = payloads.iter().map(|payload| [&payload[..]]).collect();
        let records: Vec<Parts<'_>> =
            heads.iter().map(|head| Parts { head, body: &none }).collect();
        let mut placed = Vec::new();
        let result = wal.append_batch(&records, &mut placed);
        self.trace(|| format!("batch of {}: {placed:?}, durable {durable}", payloads.len()));
        for (at, payload) in placed.iter().zip(&payloads) {
            self.ledger.append(at.offset.0..at.end.0, epoch, durable.0, payload);
        }
        match result {
            Ok(()) if placed.len() == payloads.len() => Ok(()),
            Err(
                AppendError::TooLarge { .. }
                | AppendError::WindowFull { .. }
                | AppendError::OverCapacity { .. },
            ) => Ok(()),
            other => {
                Err(format!("batch of {}, {} appended: {other:?}", payloads.len(), placed.len()))
            }
        }
    }

    fn trim(&mut self, wal: &Wal) {
        let bounds = self.ledger.bounds();
        if bounds.is_empty() {
            return;
        }
        let to = bounds[self.input.below(bounds.len() as u64) as usize];
        if self.ledger.request_trim(to) {
            self.trace(|| format!("trim to {to}"));
            drop(wal.trim(..LogOffset(to)));
        }
    }

    fn request_resize(&mut self, wal: &Wal) -> Result<(), String> {
        let capacity = self.capacity();
        let requested = wal.request_resize(capacity);
        self.trace(|| format!("request for {capacity}: {requested:?}"));
        match requested {
            Ok(_) | Err(ResizeError::Refused { .. }) => Ok(()),
            Err(cause) => Err(format!("request for {capacity}: {cause}")),
        }
    }

    /// Records the log's acknowledgements as promises.
    fn promise_durable(&mut self, wal: &Wal) {
        self.ledger.acknowledge(wal.durable().0);
        self.ledger.trim(wal.stats().trimmed.0);
    }

    /// Whether the next end is a power cut, or only that of the process.
    fn power_cut(&mut self) -> bool {
        !self.input.once_in(4)
    }

    // -- Damage

    /// Changes bytes at rest.
    fn damage(&mut self) {
        let page = self.some_page();
        let sectors = match self.input.u8() % 4 {
            0 => self.input.u8(),
            1 => 1 << (self.input.u8() % 8),
            _ => 0xff,
        };
        let before = self.disk.peek(page, PAGE as usize);
        let mut after = before.clone();
        match self.input.u8() % 8 {
            0..=2 => {
                let bound = if page < DATA_START { 128 } else { PAGE };
                after[self.input.below(bound) as usize] ^= 1 << (self.input.u8() % 8);
            }
            3 => after.fill(0),
            4 => {
                let other = self.some_page();
                after = self.disk.peek(other, PAGE as usize);
            }
            5 => {
                let at = self.input.below(PAGE) as usize;
                let len = self.input.u8() as usize;
                let bytes = self.input.bytes(len.min(PAGE as usize - at));
                after[at..at + bytes.len()].copy_from_slice(bytes);
            }
            _ if self.snapshots.is_empty() => {}
            _ => {
                let snapshot = self.input.below(self.snapshots.len() as u64) as usize;
                after.copy_from_slice(&self.snapshots[snapshot][page as usize..][..PAGE as usize]);
            }
        }
        // Either slot may be lost next, and the other one become valid.
        let headers = self.slots().into_iter().filter_map(|slot| match slot {
            Slot::Valid(header) => Some(header),
            _ => None,
        });
        let logs: Vec<Log> = headers.map(|header| self.log(header)).collect();
        for sector in (0..8).filter(|sector| sectors >> sector & 1 == 1) {
            let range = sector * 512..(sector + 1) * 512;
            if before[range.clone()] == after[range.clone()] {
                continue;
            }
            let at = page + range.start as u64;
            self.trace(|| format!("damage at {at}"));
            self.disk.poke(at, &after[range]);
            for (slot, hit) in SLOT_AT.iter().zip(&mut self.slots_hit) {
                *hit |= *slot == page;
            }
        }
        for log in logs {
            self.ledger.damage(&log, &self.log(log.header));
        }
    }

    /// A page of a header slot or of the ring, often one close to the log's start or end.
    fn some_page(&mut self) -> u64 {
        let extent = self.ledger.extent();
        let x = match self.input.u8() % 8 {
            0 => return SLOT_AT[self.input.below(2) as usize],
            1..=3 => extent.end.saturating_sub(self.input.below(6 * PAGE)),
            4 => extent.end + self.input.below(6 * PAGE),
            5 => extent.start + self.input.below(6 * PAGE),
            _ => self.input.below(MAX_PAGES * PAGE),
        };
        let at = self.header().map_or(DATA_START, |header| header.at(x));
        at - at % PAGE
    }
}
