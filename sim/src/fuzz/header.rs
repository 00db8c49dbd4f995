//! Arbitrary bytes in the header slots.

use std::sync::Arc;

use alluvium_device::sim::{SimDisk, SimOptions};
use alluvium_wal::{HeaderInfo, OpenError, Options, Wal};

use super::Input;
use super::meter::Meter;
use super::reference::{Choice, Header, Slot, choose, seal_header, slot};
use crate::ring::{MIN_CAPACITY, PAGE, SLOT_AT};

/// The smallest options with which a WAL can be opened.
pub(super) fn options() -> Options {
    Options {
        window_bytes: 32 * 1024,
        block_bytes: 8 * 1024,
        max_record_bytes: 8 * 1024,
        ..Options::default()
    }
}

/// The content of a slot, and whether it can be read.
struct Page {
    bytes: Vec<u8>,
    readable: bool,
}

/// Numbers at which arithmetic overflows, and arbitrary others.
fn number(input: &mut Input<'_>) -> u64 {
    let shift = input.u8() % 65;
    let base = if shift == 64 { 0 } else { 1_u64 << shift };
    match input.u8() % 4 {
        0 => input.u64(),
        1 => base.wrapping_add(u64::from(input.u16())),
        2 => base.wrapping_sub(u64::from(input.u16())),
        _ => base.wrapping_add_signed(PAGE as i64 * i64::from(input.u8() as i8)),
    }
}

fn page(input: &mut Input<'_>, device_bytes: u64, other: Option<&Page>) -> Page {
    let mut page = vec![0; PAGE as usize];
    let kind = input.u8() % 8;
    match kind {
        0 => {}
        1 => {
            let bytes = input.u8() as usize;
            let bytes = input.bytes(bytes);
            page[..bytes.len()].copy_from_slice(bytes);
        }
        2 if other.is_some() => page.clone_from(&other.expect("just looked").bytes),
        _ => {
            let mut header = Header {
                id: [7; 16],
                generation: u64::from(input.u8()),
                capacity: device_bytes,
                trim: PAGE,
                window: 32 * 1024,
                epoch: u32::from(input.u8()),
                node: 3,
                epoch_start: PAGE,
                durable: 2 * PAGE,
                written_at: 0,
                clean: input.once_in(2),
                origin: 0,
                mark: 0,
            };
            // Change both offsets together, or they contradict each other at once.
            if input.once_in(2) {
                header.trim = number(input);
                header.durable = header.trim.saturating_add(input.u32().into());
            }
            page = header.encode();
        }
    }
    while input.once_in(3) {
        let fields: [(usize, usize); 15] = [
            (0, 8),
            (8, 4),
            (12, 4),
            (16, 8),
            (32, 8),
            (40, 8),
            (48, 8),
            (56, 8),
            (64, 4),
            (68, 4),
            (72, 8),
            (80, 8),
            (96, 4),
            (100, 8),
            (108, 8),
        ];
        let (at, len) = fields[input.u8() as usize % fields.len()];
        page[at..at + len].copy_from_slice(&number(input).to_le_bytes()[..len]);
    }
    if input.u8() % 8 != 1 && kind != 0 {
        seal_header(&mut page);
    }
    if input.once_in(16) {
        let at = input.u16() as usize % page.len();
        page[at] ^= 1 << (input.u8() % 8);
    }
    Page { bytes: page, readable: !input.once_in(16) }
}

/// Puts arbitrary bytes into both header slots. Inspecting and opening must decide by the table of
/// section 6 and need no buffer larger than the device, and a log that can be opened must work.
pub fn headers(data: &[u8]) -> Result<(), String> {
    let input = &mut Input(data);
    // Mostly large enough for a WAL, sometimes less; sometimes more than the header will state.
    let device_bytes = MIN_CAPACITY - 4 * PAGE + input.below(64) * PAGE;
    let capacity = device_bytes.saturating_sub(input.below(4) * PAGE);
    let first = page(input, capacity, None);
    let second = page(input, capacity, Some(&first));
    let pages = [first, second];

    let disk = SimDisk::new(SimOptions { capacity_bytes: device_bytes, ..SimOptions::default() });
    let mut unreadable = Vec::new();
    for (page, at) in pages.iter().zip(SLOT_AT) {
        disk.poke(at, &page.bytes);
        if !page.readable {
            unreadable.push(at);
        }
    }
    let meter = Meter::new(&disk, &unreadable);
    let device = meter.device();
    let slots = [0, 1].map(|index: usize| match pages[index].readable {
        true => slot(&pages[index].bytes),
        false => Slot::Damaged,
    });
    let expected = expect(&slots, device_bytes, unreadable.len() == 2);
    let inspected = Wal::inspect(&device);
    let found = match &inspected {
        Ok(inspection) => Ok(inspection.newest),
        Err(cause) => Err(complaint(cause)),
    };
    if found != expected {
        return Err(format!("{slots:?}: {expected:?} expected, inspect returns {inspected:?}"));
    }
    let scanned = Wal::scan(&device, None, &mut |_| Err("there is no record".into()));
    let (inspection, report) = match (inspected, scanned) {
        (Ok(inspection), Ok(report)) => (inspection, report),
        (Err(inspected), Err(scanned)) if inspected.to_string() == scanned.to_string() => {
            return Ok(());
        }
        (inspected, scanned) => return Err(format!("{inspected:?}, but scan returns {scanned:?}")),
    };
    let Slot::Valid(header) = slots[inspection.newest] else {
        return Err(format!("slot {} counts: {slots:?}", inspection.newest));
    };
    let mut kinds = inspection.slots.iter().zip(&slots);
    if !kinds.all(|(found, expected)| same(found, expected)) || fields(&inspection.header) != header
    {
        return Err(format!("{inspection:?} is {slots:?}"));
    }
    // The ring is empty: all that the header calls durable is damage.
    let ranges: Vec<_> =
        report.damage.iter().map(|damage| damage.range.start.0..damage.range.end.0).collect();
    let lost = header.trim..header.durable;
    let expected = if lost.is_empty() { Vec::new() } else { vec![lost] };
    if ranges != expected || report.end.0 != header.durable {
        return Err(format!("{header:?}: {report:?}"));
    }
    use_at_limits(&disk, &meter, &header)
}

/// Which slot is valid, or why none is.
fn expect(slots: &[Slot; 2], device_bytes: u64, unreadable: bool) -> Result<usize, &'static str> {
    if device_bytes < MIN_CAPACITY {
        return Err("larger than the device");
    }
    if unreadable {
        return Err("device");
    }
    match choose(slots) {
        Choice::Slot(index) => match slots[index] {
            Slot::Valid(header) if header.capacity > device_bytes => Err("larger than the device"),
            _ => Ok(index),
        },
        Choice::NotFormatted => Err("not formatted"),
        Choice::NotAWal => Err("not a WAL"),
        Choice::Damaged => Err("damaged"),
        Choice::Conflict => Err("conflict"),
        Choice::Future => Err("future"),
    }
}

fn complaint(cause: &OpenError) -> &'static str {
    match cause {
        OpenError::Device(_) => "device",
        OpenError::NotFormatted { .. } => "not formatted",
        OpenError::NotAWal { .. } => "not a WAL",
        OpenError::HeaderDamaged { .. } => "damaged",
        OpenError::HeaderConflict { .. } => "conflict",
        OpenError::FutureVersion { .. } => "future",
        OpenError::LargerThanDevice { .. } => "larger than the device",
        OpenError::InvalidOption(_) => "invalid option",
        _ => "something else",
    }
}

fn same(found: &alluvium_wal::Slot, expected: &Slot) -> bool {
    use alluvium_wal::Slot as Found;
    match (found, expected) {
        (Found::Valid(info), Slot::Valid(header)) => fields(info) == *header,
        (Found::Empty, Slot::Empty)
        | (Found::Future(_), Slot::Future)
        | (Found::Damaged(_), Slot::Damaged)
        | (Found::Foreign, Slot::Other) => true,
        _ => false,
    }
}

fn fields(info: &HeaderInfo) -> Header {
    Header {
        id: *info.wal_id.as_bytes(),
        generation: info.generation,
        capacity: info.capacity_bytes,
        trim: info.trim.0,
        window: info.window_bytes,
        epoch: info.epoch,
        node: info.node_id,
        epoch_start: info.epoch_start.0,
        durable: info.durable.0,
        written_at: info.written_at_ms,
        clean: info.clean_shutdown,
        origin: info.origin_bytes,
        mark: info.mark,
    }
}

/// Section 3: counters stay below 2^63. A writer needs a reserve for itself.
fn is_exhausted(header: &Header) -> bool {
    let near = (1 << 63) - (1 << 60);
    header.epoch == u32::MAX || header.generation >= near || header.durable >= near
}

/// Opens the log whatever its numbers are, appends, and finds the records again after a power cut.
fn use_at_limits(disk: &SimDisk, meter: &Arc<Meter>, before: &Header) -> Result<(), String> {
    let opened = Wal::open(meter.device(), &options(), None, &mut |_| Ok(()));
    let (wal, report) = match opened {
        Ok(_) if is_exhausted(before) => return Err(format!("{before:?} was opened")),
        Ok(opened) => opened,
        Err(OpenError::InvalidOption(_)) if is_exhausted(before) => return Ok(()),
        Err(cause) => return Err(format!("{before:?} cannot be opened: {cause}")),
    };
    let after = fields(&wal.header());
    let expected = Header {
        generation: before.generation + 2,
        window: after.window,
        epoch: before.epoch + 1,
        node: 0,
        epoch_start: before.durable,
        written_at: after.written_at,
        clean: false,
        ..*before
    };
    let keeps_to = after.window <= options().window_bytes;
    if after != expected || !keeps_to || report.end.0 != before.durable {
        return Err(format!("{before:?} became {after:?}"));
    }
    let append = |payload: &[u8]| {
        let appended = wal.append(&[payload]).map_err(|cause| format!("{after:?}: {cause}"))?;
        let offset = appended.offset();
        appended.wait().map_err(|cause| cause.to_string())?;
        Ok::<_, String>(offset)
    };
    // Everything is lost, so everything can be trimmed; then there is space.
    wal.trim(..wal.durable()).wait().map_err(|cause| cause.to_string())?;
    let kept = append(&[1; 5000])?;
    append(&[2])?;
    let last = fields(&wal.header());
    drop(wal);
    let disk = disk.power_cut();
    let mut records = Vec::new();
    let opened = Wal::open(disk.device(), &options(), None, &mut |record| {
        records.push((record.offset, record.payload));
        Ok(())
    });
    let (wal, report) = match opened {
        Ok(opened) => opened,
        Err(OpenError::InvalidOption(_)) if is_exhausted(&last) => return Ok(()),
        Err(cause) => return Err(format!("{after:?}, two records later: {cause}")),
    };
    let lens: Vec<usize> = records.iter().map(|(_, payload)| payload.len()).collect();
    if records.first().map(|(offset, _)| *offset) != Some(kept)
        || lens != [5000, 1]
        || !report.damage.is_empty()
    {
        return Err(format!("{after:?}, two records later: {lens:?}, {report:?}"));
    }
    wal.close().map_err(|cause| cause.to_string())
}
