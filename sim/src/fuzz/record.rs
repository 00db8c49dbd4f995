//! Arbitrary bytes in the ring, with valid records among them.

use alluvium_device::SharedDevice;
use alluvium_device::sim::{SimDisk, SimOptions};
use alluvium_wal::{AppendError, OpenError, Options, RecoveryReport, VisitError, Wal};

use super::Input;
use super::header::options;
use super::meter::Meter;
use super::reference::{Header, Log, Record, Walked, crc32c};
use crate::ring::{DATA_START, HEADER, PAGE, SLOT_AT};

/// A device image under construction.
struct Image {
    header: Header,
    bytes: Vec<u8>,
    unreadable: Vec<u64>,
    /// Number of pieces that may hold a record header.
    records: u64,
    /// Whether a record has an epoch that no header has announced, which no writer leaves behind.
    from_the_future: bool,
}

impl Image {
    /// A valid header, and a ring filled from the input.
    fn new(input: &mut Input<'_>) -> Self {
        // Sometimes more than one read takes.
        let pages = 32 + input.below(32) + if input.once_in(16) { 256 } else { 0 };
        let ring = pages * PAGE;
        let trim = input.below(3) * ring + input.below(ring);
        let mut header = Header {
            id: [7; 16],
            generation: 1,
            capacity: DATA_START + ring,
            trim,
            window: PAGE * (1 + input.below(pages / 2)),
            epoch: 1 + u32::from(input.u8() % 4),
            node: 0,
            epoch_start: 0,
            durable: trim,
            written_at: 0,
            clean: input.once_in(4),
            origin: if input.once_in(4) { input.below(pages) * PAGE } else { 0 },
            mark: 0,
        };
        if input.once_in(2) {
            header.durable = trim + input.below(header.limit() - trim + 1);
        }
        header.epoch_start = match input.u8() % 4 {
            0 => 0,
            1 => trim,
            2 => header.durable,
            _ => trim + input.below(header.durable - trim + 1),
        };
        let mut bytes = vec![input.u8(); header.capacity as usize];
        for (index, at) in SLOT_AT.into_iter().enumerate() {
            let header = Header { generation: 1 + index as u64, ..header };
            bytes[at as usize..][..PAGE as usize].copy_from_slice(&header.encode());
        }
        let mut image =
            Self { header, bytes, unreadable: Vec::new(), records: 0, from_the_future: false };
        let mut x = trim;
        while !input.is_empty() {
            x = image.piece(x, input);
        }
        image
    }

    fn at(&self, x: u64) -> usize {
        self.header.at(x) as usize
    }

    fn put(&mut self, x: u64, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let at = self.at(x + (bytes.len() - rest.len()) as u64);
            let part = rest.len().min(self.bytes.len() - at);
            self.bytes[at..at + part].copy_from_slice(&rest[..part]);
            rest = &rest[part..];
        }
    }

    /// Puts a piece at `x`. Returns the position of the next one.
    fn piece(&mut self, x: u64, input: &mut Input<'_>) -> u64 {
        let next = match input.u8() % 8 {
            0..=3 => self.record(x, input),
            4 => {
                let len = input.u8() as usize;
                let bytes = input.bytes(len);
                self.put(x, bytes);
                x + bytes.len() as u64
            }
            5 => x + input.below(3 * PAGE),
            6 => self.header.trim + input.below(self.header.ring()),
            _ => {
                let before = x.saturating_sub(input.below(2 * PAGE));
                let page = self.at(before) / PAGE as usize * PAGE as usize;
                let at = self.at(before);
                match input.u8() % 3 {
                    0 => self.bytes[at] ^= 1 << (input.u8() % 8),
                    1 => self.bytes[page..page + PAGE as usize].fill(0),
                    _ => self.unreadable.push(page as u64),
                }
                x
            }
        };
        if next < self.header.limit() { next } else { self.header.trim }
    }

    /// Puts a record that may be wrong in one or several ways.
    fn record(&mut self, x: u64, input: &mut Input<'_>) -> u64 {
        let space = self.header.limit().saturating_sub(x + HEADER);
        let padding = input.once_in(4);
        let boundary = (x + HEADER).next_multiple_of(PAGE) - (x + HEADER);
        let len = match (padding, input.u8() % 4) {
            (true, 3) | (false, 0) => input.below(3 * PAGE),
            (true, 2) => boundary + PAGE,
            (true, _) => boundary,
            (false, 1) => input.below(self.header.ring()),
            (false, _) => input.u8().into(),
        };
        let len = len.min(space);
        let mut payload = vec![input.u8(); len as usize];
        if !padding {
            let bytes = input.u8() as usize % 64;
            let bytes = input.bytes(bytes.min(payload.len()));
            payload[..bytes.len()].copy_from_slice(bytes);
        }
        let lag = match input.u8() % 4 {
            0 => 0,
            1 => (x - self.header.trim) as u32,
            2 => input.u16().into(),
            _ => input.u32() % (2 * self.header.ring() as u32),
        };
        let mut next = x + HEADER + len;
        let epoch = match input.u8() % 8 {
            0 => u32::from(input.u8() % 6),
            1 => self.header.epoch - 1,
            2..=3 => {
                // An old record, over which others were written.
                next = x + HEADER + input.below(len + 1);
                self.header.epoch.saturating_sub(2)
            }
            _ if x < self.header.epoch_start => self.header.epoch - 1,
            _ => self.header.epoch,
        };
        let payload_crc = if padding { 0 } else { crc32c(&[&payload]) };
        let mut record = Record { padding, len: len as u32, offset: x, epoch, lag, payload_crc };
        let mut id = self.header.id;
        match input.u8() % 16 {
            1 => record.payload_crc ^= 1,
            2 => record.offset = x.wrapping_sub(self.header.ring()),
            3 => record.offset = x + 1 + u64::from(input.u8()),
            4 => record.len = input.u32(),
            5 => id[3] ^= 1,
            6 => payload.truncate(payload.len() / 2),
            _ => {}
        }
        let mut head = record.encode(&id);
        if input.once_in(16) {
            head[input.u8() as usize % HEADER as usize] ^= 1 << (input.u8() % 8);
        }
        self.put(x, &head);
        self.put(x + HEADER, &payload);
        self.records += 1;
        self.from_the_future |= epoch > self.header.epoch;
        next
    }

    fn disk(&self) -> SimDisk {
        SimDisk::from_image(&self.bytes, SimOptions::default())
    }
}

/// The result of a walk by the WAL.
fn found(
    walk: impl FnOnce(
        &mut dyn FnMut(alluvium_wal::Record) -> Result<(), VisitError>,
    ) -> Result<RecoveryReport, OpenError>,
) -> Result<Option<Walked>, String> {
    let mut records = Vec::new();
    let mut ends = Vec::new();
    let walked = walk(&mut |record| {
        ends.push(record.end.0 - record.offset.0 - HEADER);
        records.push((record.offset.0, record.payload.to_vec()));
        Ok(())
    });
    let report = match walked {
        Ok(report) => report,
        Err(OpenError::EndUnreadable { .. }) => return Ok(None),
        Err(cause) => return Err(cause.to_string()),
    };
    let lens: Vec<u64> = records.iter().map(|(_, payload)| payload.len() as u64).collect();
    let counted = (report.records, report.payload_bytes) == (lens.len() as u64, lens.iter().sum());
    if ends != lens || !counted {
        return Err(format!(
            "{} records of {lens:?} and {ends:?} bytes: {report:?}",
            records.len()
        ));
    }
    let ranges = report.damage.iter().map(|damage| damage.range.start.0..damage.range.end.0);
    let damage = ranges.collect();
    Ok(Some(Walked { records, damage, end: report.end.0, dropped: report.dropped_records }))
}

pub(super) fn scan(device: &SharedDevice) -> Result<Option<Walked>, String> {
    found(|visit| Wal::scan(device, None, visit))
}

pub(super) fn open(
    device: SharedDevice,
    options: &Options,
) -> Result<(Option<Wal>, Option<Walked>), String> {
    let mut wal = None;
    let walked = found(|visit| {
        let (opened, report) = Wal::open(device, options, None, visit)?;
        wal = Some(opened);
        Ok(report)
    })?;
    Ok((wal, walked))
}

/// Puts arbitrary bytes into the ring behind a valid header. A walk must end, agree with the
/// reference, and give the same result when repeated; records handed out without damage must stay
/// when the log continues.
pub fn records(data: &[u8]) -> Result<(), String> {
    let image = Image::new(&mut Input(data));
    check(&image, &image.disk())
}

/// Compares the WAL's findings on `disk` with those of the reference in `image`.
fn check(image: &Image, disk: &SimDisk) -> Result<(), String> {
    let meter = Meter::new(disk, &image.unreadable);
    let expected = Log::new(image.header, &image.bytes, &image.unreadable).walk();
    let scanned = scan(&meter.device())?;
    if scanned != expected {
        return Err(differ(&image.header, &expected, &scanned));
    }
    // The search beyond a hole reads two windows, and each hole needs a record behind it as its
    // proof.
    let bound = (2 + image.records) * 8 * image.header.ring();
    if meter.read_bytes() > bound {
        return Err(format!("{} bytes were read, the bound is {bound}", meter.read_bytes()));
    }
    if scan(&meter.device())? != scanned {
        return Err("the second scan differs from the first".into());
    }
    let (wal, opened) = open(meter.device(), &options())?;
    if opened != scanned {
        return Err(differ(&image.header, &scanned, &opened));
    }
    // With damage, or with an unreadable page that may hide an end that was clean before, less may
    // be found than before, and it is reported.
    let sound = image.unreadable.is_empty() && !image.from_the_future;
    let undamaged = opened.filter(|walked| sound && walked.damage.is_empty());
    let Some(mut before) = undamaged else { return Ok(()) };
    drop(wal);
    let (wal, again) = open(meter.device(), &options())?;
    before.dropped = again.as_ref().map_or(0, |again| again.dropped);
    if again.as_ref() != Some(&before) {
        return Err(format!("opened again: {}", differ(&image.header, &Some(before), &again)));
    }
    let wal = wal.ok_or("the second opening returned no log")?;
    match wal.append(&[&[9; 1000]]) {
        Ok(append) => {
            before.records.push((append.offset().0, vec![9; 1000]));
            append.wait().map_err(|cause| cause.to_string())?;
        }
        Err(AppendError::OverCapacity { .. }) => {}
        Err(cause) => return Err(cause.to_string()),
    }
    drop(wal);
    let after = scan(&meter.device())?.ok_or("the end cannot be read after an append")?;
    if after.records != before.records || !after.damage.is_empty() {
        return Err(format!(
            "after another record: {}",
            differ(&image.header, &Some(before), &Some(after))
        ));
    }
    Ok(())
}

/// Both results in brief.
pub(super) fn differ(header: &Header, expected: &Option<Walked>, found: &Option<Walked>) -> String {
    let brief = |walked: &Option<Walked>| match walked {
        None => "the end cannot be read".to_owned(),
        Some(Walked { records, damage, end, dropped }) => {
            let starts: Vec<_> = records.iter().map(|(at, payload)| (*at, payload.len())).collect();
            format!("records {starts:?}, damage {damage:?}, end {end}, dropped {dropped}")
        }
    };
    format!("{header:?}: expected {}; found {}", brief(expected), brief(found))
}

#[cfg(test)]
mod tests {
    use alluvium_device::sim::Random;

    use super::*;

    /// Negative control: a bit that differs between the WAL's and the reference's input is found
    /// wherever it matters.
    #[test]
    fn a_flipped_bit_in_a_record_is_found() {
        let mut random = Random::new(1);
        let mut flipped = 0;
        while flipped < 100 {
            let data: Vec<u8> = (0..300).map(|_| random.next_u64() as u8).collect();
            let image = Image::new(&mut Input(&data));
            let walked = Log::new(image.header, &image.bytes, &image.unreadable).walk();
            let Some(Walked { records, .. }) = walked else { continue };
            for (offset, payload) in records {
                let x = offset + random.below(HEADER + payload.len() as u64);
                let at = image.at(x) as u64;
                let disk = image.disk();
                disk.poke(at, &[disk.peek(at, 1)[0] ^ 1 << random.below(8)]);
                assert!(check(&image, &disk).is_err(), "byte {x} of the record at {offset}");
                flipped += 1;
            }
        }
    }
}
