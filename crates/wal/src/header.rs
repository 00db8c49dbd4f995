//! The header slots: their layout, and the table that selects the valid one. `docs/format/wal.md`,
//! sections 3 and 6.

use std::time::{SystemTime, UNIX_EPOCH};

use alluvium_device::{AlignedBuf, Device, DeviceError, SharedBuf};
use uuid::Uuid;

use crate::layout::{
    DATA_START, HEADER_SLOT_AT, HEADER_SLOT_BYTES, LogOffset, MIN_CAPACITY_BYTES, PAGE, Ring,
    is_capacity, page_floor,
};
use crate::report::{HeaderInfo, Inspection, Slot};
use crate::{OpenError, WalError, probe};

pub(crate) const FORMAT_VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"ALLUVWAL";

const MAGIC_AT: usize = 0;
const VERSION_AT: usize = MAGIC_AT + 8;
const FLAGS_AT: usize = VERSION_AT + 4;
const WAL_ID_AT: usize = FLAGS_AT + 4;
const GENERATION_AT: usize = WAL_ID_AT + 16;
const CAPACITY_AT: usize = GENERATION_AT + 8;
const TRIM_AT: usize = CAPACITY_AT + 8;
const WINDOW_AT: usize = TRIM_AT + 8;
const EPOCH_AT: usize = WINDOW_AT + 8;
const NODE_ID_AT: usize = EPOCH_AT + 4;
const EPOCH_START_AT: usize = NODE_ID_AT + 4;
const DURABLE_AT: usize = EPOCH_START_AT + 8;
const WRITTEN_AT: usize = DURABLE_AT + 8;
const SHUTDOWN_AT: usize = WRITTEN_AT + 8;
const ORIGIN_AT: usize = SHUTDOWN_AT + 4;
const MARK_AT: usize = ORIGIN_AT + 8;
const RESERVED_AT: usize = MARK_AT + 8;
const CRC_AT: usize = RESERVED_AT + 8;
const HEADER_BYTES: usize = CRC_AT + 4;
const _: () = assert!(EPOCH_AT == 64 && DURABLE_AT == 80 && SHUTDOWN_AT == 96 && CRC_AT == 124);
// All fields are in the first 512 bytes: where a sector is written whole or not at all, so is the
// header.
const _: () = assert!(HEADER_BYTES <= 512);

/// Upper bound of generations and offsets, 2^63: the sum of one of them and a length never
/// overflows, and the bound is out of reach (292 years at 1 GB/s).
pub(crate) const COUNT_LIMIT: u64 = 1 << 63;

fn u32_at(page: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(page[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(page: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"))
}

impl HeaderInfo {
    /// Encodes the header into a slot's page.
    pub(crate) fn encode(&self, page: &mut [u8]) {
        assert_eq!(page.len() as u64, HEADER_SLOT_BYTES);
        page.fill(0);
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(MAGIC_AT, &MAGIC);
        put(VERSION_AT, &FORMAT_VERSION.to_le_bytes());
        put(WAL_ID_AT, self.wal_id.as_bytes());
        put(GENERATION_AT, &self.generation.to_le_bytes());
        put(CAPACITY_AT, &self.capacity_bytes.to_le_bytes());
        put(TRIM_AT, &self.trim.0.to_le_bytes());
        put(WINDOW_AT, &self.window_bytes.to_le_bytes());
        put(EPOCH_AT, &self.epoch.to_le_bytes());
        put(NODE_ID_AT, &self.node_id.to_le_bytes());
        put(EPOCH_START_AT, &self.epoch_start.0.to_le_bytes());
        put(DURABLE_AT, &self.durable.0.to_le_bytes());
        put(WRITTEN_AT, &self.written_at_ms.to_le_bytes());
        put(SHUTDOWN_AT, &u32::from(self.clean_shutdown).to_le_bytes());
        put(ORIGIN_AT, &self.origin_bytes.to_le_bytes());
        put(MARK_AT, &self.mark.to_le_bytes());
        let crc = crc32c::crc32c(&page[..CRC_AT]);
        page[CRC_AT..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    }

    /// Returns the page of this header, ready to be written.
    pub(crate) fn page(&self, device: &dyn Device) -> SharedBuf {
        let mut page: AlignedBuf = device.alloc(HEADER_SLOT_BYTES as usize);
        self.encode(&mut page);
        page.freeze()
    }

    /// The next header: the next generation, with the current time.
    pub(crate) fn next(&self) -> Self {
        Self { generation: self.generation + 1, written_at_ms: now_ms(), ..self.clone() }
    }

    /// The order of two headers of one WAL. The epoch decides first: an old owner may have
    /// continued to write while the next one opened the log.
    fn age(&self) -> (u32, u64) {
        (self.epoch, self.generation)
    }

    pub(crate) fn ring(&self) -> Ring {
        Ring::new(self.capacity_bytes, self.origin_bytes)
    }

    /// The error if a slot holds a header that the writer of this header has not written.
    pub(crate) fn taken_over(&self, slot: &Slot) -> Option<WalError> {
        match slot {
            Slot::Valid(found) if found.wal_id == self.wal_id && found.age() < self.age() => None,
            Slot::Valid(found) => Some(found.fences()),
            Slot::Future(found) => Some(WalError::Fenced { found: format!("a header of {found}") }),
            // No evidence of another writer: it may be rot.
            Slot::Damaged(_) | Slot::Empty | Slot::Foreign => None,
        }
    }

    /// The error for a writer that finds this header of another writer.
    fn fences(&self) -> WalError {
        WalError::Fenced {
            found: format!(
                "a header of WAL {}, epoch {}, generation {}, node {}",
                self.wal_id, self.epoch, self.generation, self.node_id
            ),
        }
    }

    /// Checks what the writer guarantees for every header; a page that violates it was not written
    /// by this program.
    fn contradiction(&self) -> Option<String> {
        let Self { capacity_bytes, window_bytes, trim, durable, epoch_start, .. } = self;
        if self.generation >= COUNT_LIMIT || durable.0 >= COUNT_LIMIT {
            return Some(format!("generation {}, durable {durable}", self.generation));
        }
        if !is_capacity(*capacity_bytes) {
            return Some(format!("capacity of {capacity_bytes} bytes"));
        }
        let ring_bytes = capacity_bytes - DATA_START;
        if !self.origin_bytes.is_multiple_of(PAGE) || self.origin_bytes >= ring_bytes {
            return Some(format!("origin {} in a ring of {ring_bytes}", self.origin_bytes));
        }
        if !window_bytes.is_multiple_of(PAGE)
            || *window_bytes == 0
            || *window_bytes > ring_bytes / 2
        {
            return Some(format!("window of {window_bytes} bytes in a ring of {ring_bytes}"));
        }
        // One lap on, the page of the trim offset is in use by itself.
        if trim > durable || epoch_start > durable || durable.0 - page_floor(trim.0) > ring_bytes {
            return Some(format!(
                "trim {trim}, epoch start {epoch_start}, durable {durable}, ring {ring_bytes}"
            ));
        }
        None
    }
}

pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Decodes a slot's page.
pub(crate) fn decode(page: &[u8]) -> Slot {
    if page.iter().all(|&byte| byte == 0) {
        return Slot::Empty;
    }
    if page[MAGIC_AT..VERSION_AT] != MAGIC {
        return Slot::Foreign;
    }
    // Magic, version and checksum keep their positions in every version, so rot is not mistaken for
    // a later version.
    let (stated, actual) = (u32_at(page, CRC_AT), crc32c::crc32c(&page[..CRC_AT]));
    if stated != actual {
        return Slot::Damaged(format!("checksum {stated:08x}, should be {actual:08x}"));
    }
    let (version, flags) = (u32_at(page, VERSION_AT), u32_at(page, FLAGS_AT));
    if version != FORMAT_VERSION || flags != 0 {
        return Slot::Future(format!("format version {version}, flags {flags:#x}"));
    }
    let shutdown = u32_at(page, SHUTDOWN_AT);
    let header = HeaderInfo {
        wal_id: Uuid::from_slice(&page[WAL_ID_AT..GENERATION_AT]).expect("sixteen bytes"),
        generation: u64_at(page, GENERATION_AT),
        capacity_bytes: u64_at(page, CAPACITY_AT),
        trim: LogOffset(u64_at(page, TRIM_AT)),
        window_bytes: u64_at(page, WINDOW_AT),
        epoch: u32_at(page, EPOCH_AT),
        node_id: u32_at(page, NODE_ID_AT),
        epoch_start: LogOffset(u64_at(page, EPOCH_START_AT)),
        durable: LogOffset(u64_at(page, DURABLE_AT)),
        written_at_ms: u64_at(page, WRITTEN_AT),
        clean_shutdown: shutdown == 1,
        origin_bytes: u64_at(page, ORIGIN_AT),
        mark: u64_at(page, MARK_AT),
    };
    if shutdown > 1 {
        return Slot::Damaged(format!("shutdown type {shutdown}"));
    }
    match header.contradiction() {
        Some(reason) => Slot::Damaged(format!("fields contradict each other: {reason}")),
        None => Slot::Valid(header),
    }
}

/// Why no slot is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    NotFormatted,
    NotAWal,
    Damaged,
    Conflict(String),
    Future(String),
}

/// The table of section 6, which selects the valid slot.
pub(crate) fn select(slots: &[Slot; 2]) -> Result<usize, Refusal> {
    use Slot::{Damaged, Empty, Foreign, Future, Valid};
    match slots {
        [Future(found), _] | [_, Future(found)] => Err(Refusal::Future(found.clone())),
        [Valid(a), Valid(b)] if a.wal_id != b.wal_id => Err(Refusal::Conflict(format!(
            "slot 0 belongs to WAL {}, slot 1 to WAL {}",
            a.wal_id, b.wal_id
        ))),
        [Valid(a), Valid(b)] if a.age() == b.age() => Err(Refusal::Conflict(format!(
            "both are of epoch {}, generation {}: two writers, or a copied slot",
            a.epoch, a.generation
        ))),
        [Valid(a), Valid(b)] => Ok(usize::from(b.age() > a.age())),
        [Valid(_), Damaged(_) | Empty | Foreign] => Ok(0),
        [Damaged(_) | Empty | Foreign, Valid(_)] => Ok(1),
        [Damaged(_), Damaged(_) | Empty | Foreign] | [Empty | Foreign, Damaged(_)] => {
            Err(Refusal::Damaged)
        }
        [Empty, Empty] => Err(Refusal::NotFormatted),
        [Foreign, Foreign | Empty] | [Empty, Foreign] => Err(Refusal::NotAWal),
    }
}

/// Reads one slot. The caller treats an unreadable slot as a damaged one: the other slot is then
/// safe to use, see section 3.
pub(crate) fn read_slot(device: &dyn Device, slot: usize) -> Result<Slot, DeviceError> {
    device.read(HEADER_SLOT_AT[slot], HEADER_SLOT_BYTES as usize).map(|page| decode(&page))
}

/// Reads both slots and selects the valid one.
pub(crate) fn inspect(device: &dyn Device) -> Result<Inspection, OpenError> {
    let name = || device.geometry().name.clone();
    let device_bytes = device.capacity_bytes();
    if device_bytes < MIN_CAPACITY_BYTES {
        return Err(OpenError::LargerThanDevice {
            device: name(),
            wanted_bytes: MIN_CAPACITY_BYTES,
            device_bytes,
        });
    }
    let (slot_0, slot_1) = (read_slot(device, 0), read_slot(device, 1));
    let slots = match (slot_0, slot_1) {
        (Err(cause), Err(_)) => return Err(cause.into()),
        (slot_0, slot_1) => [slot_0, slot_1].map(|slot| {
            slot.unwrap_or_else(|cause| Slot::Damaged(format!("not readable: {cause}")))
        }),
    };
    let newest = select(&slots).map_err(|refusal| match refusal {
        Refusal::NotFormatted => OpenError::NotFormatted { device: name() },
        Refusal::NotAWal => match probe::looks_like(device) {
            Ok(Some(looks_like)) => OpenError::NotAWal { device: name(), looks_like },
            Ok(None) => OpenError::NotAWal { device: name(), looks_like: "unknown data".into() },
            Err(cause) => cause.into(),
        },
        Refusal::Damaged => OpenError::HeaderDamaged {
            device: name(),
            slot_0: slots[0].to_string(),
            slot_1: slots[1].to_string(),
        },
        Refusal::Conflict(reason) => OpenError::HeaderConflict { device: name(), reason },
        Refusal::Future(found) => {
            OpenError::FutureVersion { device: name(), found, known: FORMAT_VERSION }
        }
    })?;
    let Slot::Valid(header) = slots[newest].clone() else {
        unreachable!("select names a valid slot")
    };
    if header.capacity_bytes > device_bytes {
        return Err(OpenError::LargerThanDevice {
            device: name(),
            wanted_bytes: header.capacity_bytes,
            device_bytes,
        });
    }
    let ring_bytes = header.ring().bytes();
    Ok(Inspection { slots, newest, header, ring_bytes })
}

/// Changes the header of a log that is not open: `first` goes to the slot that is not the `newest`,
/// and its successor to the other. Blocks. Fails if another writer has changed the header since
/// `found` was read there, which may be long ago, or does so meanwhile.
pub(crate) fn change(
    device: &dyn Device,
    found: &HeaderInfo,
    newest: usize,
    first: &HeaderInfo,
) -> Result<HeaderInfo, OpenError> {
    let fenced = |cause| OpenError::Fenced { device: device.geometry().name.clone(), cause };
    let second = first.next();
    let readable = check_slots(device, &found.next()).map_err(fenced)?;
    device.write_durable(HEADER_SLOT_AT[1 - newest], first.page(device))?;
    check_slots(device, &second).map_err(fenced)?;
    device.write_durable(HEADER_SLOT_AT[newest], second.page(device))?;
    // A header write of an old owner that was in flight may have overwritten the first one. If it
    // arrives later, it is the owner's last: its next check finds the second. So both have to be
    // verified: a slot that cannot be read, or shows a torn write, may be what the old owner has
    // just written. A slot that could not be read before either has a defect, which the other slot
    // is there for.
    for (slot, written) in [(1 - newest, first), (newest, &second)] {
        match read_slot(device, slot) {
            Ok(Slot::Valid(found)) if found == *written => {}
            Ok(Slot::Valid(found)) => return Err(fenced(found.fences())),
            Err(cause) if readable[slot] => return Err(cause.into()),
            Err(_) => {}
            Ok(other) => {
                let found = format!("slot {slot}, where a header was just written, is {other}");
                return Err(fenced(WalError::Fenced { found }));
            }
        }
    }
    Ok(second)
}

/// Checks both slots before `header` is written. An unreadable slot is no evidence of another
/// writer; returns which slots are readable.
pub(crate) fn check_slots(device: &dyn Device, header: &HeaderInfo) -> Result<[bool; 2], WalError> {
    let mut readable = [false; 2];
    for (slot, readable) in readable.iter_mut().enumerate() {
        let Ok(found) = read_slot(device, slot) else { continue };
        *readable = true;
        if let Some(cause) = header.taken_over(&found) {
            return Err(cause);
        }
    }
    Ok(readable)
}

/// The epoch of a writer that succeeds `found`; an error if the counters of the header are
/// exhausted.
pub(crate) fn next_epoch(found: &HeaderInfo) -> Result<u32, OpenError> {
    /// More than one run of a writer can use (36 years at 1 GB/s), so that its output stays below
    /// the bound that readers require.
    const RESERVE: u64 = 1 << 60;
    let used_up = |what: &str| {
        OpenError::InvalidOption(format!("the WAL has exhausted its {what}; format it again"))
    };
    if found.generation.max(found.durable.0) >= COUNT_LIMIT - RESERVE {
        return Err(used_up("header generations or offsets"));
    }
    found.epoch.checked_add(1).ok_or_else(|| used_up("2^32 epochs"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn sample(generation: u64) -> HeaderInfo {
        HeaderInfo {
            wal_id: Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef),
            generation,
            capacity_bytes: DATA_START + (1 << 20),
            trim: LogOffset(8192),
            window_bytes: 65536,
            epoch: 3,
            node_id: 7,
            epoch_start: LogOffset(4096),
            durable: LogOffset(12345),
            written_at_ms: 1_700_000_000_000,
            clean_shutdown: true,
            origin_bytes: 8192,
            mark: 0,
        }
    }

    fn page(header: &HeaderInfo) -> Vec<u8> {
        let mut page = vec![0xaa; HEADER_SLOT_BYTES as usize];
        header.encode(&mut page);
        page
    }

    /// The bytes of version 1 are fixed: a device formatted once can always be opened.
    #[test]
    fn version_1_keeps_its_bytes() {
        let page = page(&sample(5));
        assert_eq!(&page[..8], b"ALLUVWAL");
        assert_eq!(page[8..12], [1, 0, 0, 0]);
        assert_eq!(page[16..20], [0x01, 0x23, 0x45, 0x67]);
        assert_eq!(page[32..40], 5u64.to_le_bytes());
        assert_eq!(page[40..48], (65536u64 + (1 << 20)).to_le_bytes());
        assert_eq!(page[48..56], 8192u64.to_le_bytes());
        assert_eq!(page[56..64], 65536u64.to_le_bytes());
        assert_eq!(page[64..72], [3, 0, 0, 0, 7, 0, 0, 0]);
        assert_eq!(page[72..80], 4096u64.to_le_bytes());
        assert_eq!(page[80..88], 12345u64.to_le_bytes());
        assert_eq!(page[88..96], 1_700_000_000_000u64.to_le_bytes());
        assert_eq!(page[96..100], [1, 0, 0, 0]);
        assert_eq!(page[100..108], 8192u64.to_le_bytes());
        assert!(page[108..124].iter().chain(&page[128..]).all(|&byte| byte == 0));
        assert_eq!(u32_at(&page, 124), 0x1b11_3254, "the checksum of these fields");
    }

    /// The mark replaced bytes that were zero: a header without one is unchanged.
    #[test]
    fn the_mark_has_a_fixed_position() {
        let with = page(&HeaderInfo { mark: 0x0102_0304_0506_0708, ..sample(5) });
        assert_eq!(with[108..116], [8, 7, 6, 5, 4, 3, 2, 1]);
        let without = page(&sample(5));
        assert_eq!((&with[..108], &with[116..124]), (&without[..108], &without[116..124]));
    }

    #[test]
    fn newer_versions_and_flags_are_refused_and_distinguished_from_rot() {
        let mut future = page(&sample(1));
        future[8] = 2;
        assert!(
            matches!(decode(&future), Slot::Damaged(_)),
            "the checksum does not cover the change"
        );
        let crc = crc32c::crc32c(&future[..124]);
        future[124..128].copy_from_slice(&crc.to_le_bytes());
        assert!(matches!(decode(&future), Slot::Future(_)));
        let mut flags = page(&sample(1));
        flags[12] = 1;
        let crc = crc32c::crc32c(&flags[..124]);
        flags[124..128].copy_from_slice(&crc.to_le_bytes());
        assert!(matches!(decode(&flags), Slot::Future(_)));
    }

    #[test]
    fn contradicting_fields_are_damage() {
        for broken in [
            HeaderInfo { trim: LogOffset(20_000), ..sample(1) },
            HeaderInfo { epoch_start: LogOffset(20_000), ..sample(1) },
            HeaderInfo { capacity_bytes: 4096, ..sample(1) },
            HeaderInfo { capacity_bytes: DATA_START + (1 << 20) + 1, ..sample(1) },
            HeaderInfo { origin_bytes: 100, ..sample(1) },
            HeaderInfo { origin_bytes: 1 << 20, ..sample(1) },
            HeaderInfo { window_bytes: 0, ..sample(1) },
            HeaderInfo { window_bytes: 1 << 20, ..sample(1) },
            HeaderInfo { durable: LogOffset(8192 + (1 << 20) + 1), ..sample(1) },
        ] {
            assert!(matches!(decode(&page(&broken)), Slot::Damaged(_)), "{broken:?}");
        }
    }

    #[test]
    fn the_slot_table_selects_the_valid_header() {
        let valid = |generation| Slot::Valid(sample(generation));
        let other = Slot::Valid(HeaderInfo { wal_id: Uuid::from_u128(9), ..sample(2) });
        let damaged = || Slot::Damaged("torn".into());
        let future = || Slot::Future("version 2".into());
        assert_eq!(select(&[valid(1), valid(2)]), Ok(1));
        assert_eq!(select(&[valid(3), valid(2)]), Ok(0));
        assert_eq!(select(&[valid(u64::MAX), valid(2)]), Ok(0));
        assert!(matches!(select(&[valid(2), valid(2)]), Err(Refusal::Conflict(_))));
        let late = |generation| Slot::Valid(HeaderInfo { epoch: 2, ..sample(generation) });
        assert_eq!(select(&[valid(1), late(2)]), Ok(0), "an old owner's");
        assert_eq!(select(&[late(1), valid(1)]), Ok(1));
        assert!(matches!(select(&[valid(1), other]), Err(Refusal::Conflict(_))));
        for rest in [damaged(), Slot::Empty, Slot::Foreign] {
            assert_eq!(select(&[valid(1), rest.clone()]), Ok(0));
            assert_eq!(select(&[rest.clone(), valid(1)]), Ok(1));
            assert_eq!(select(&[damaged(), rest.clone()]), Err(Refusal::Damaged));
            assert_eq!(select(&[rest.clone(), damaged()]), Err(Refusal::Damaged));
            assert!(matches!(select(&[future(), rest.clone()]), Err(Refusal::Future(_))));
            assert!(matches!(select(&[rest, future()]), Err(Refusal::Future(_))));
        }
        assert!(matches!(select(&[future(), valid(1)]), Err(Refusal::Future(_))));
        assert_eq!(select(&[Slot::Empty, Slot::Empty]), Err(Refusal::NotFormatted));
        assert_eq!(select(&[Slot::Foreign, Slot::Empty]), Err(Refusal::NotAWal));
        assert_eq!(select(&[Slot::Empty, Slot::Foreign]), Err(Refusal::NotAWal));
        assert_eq!(select(&[Slot::Foreign, Slot::Foreign]), Err(Refusal::NotAWal));
    }

    proptest! {
        #[test]
        fn a_header_decodes_to_its_fields(
            generation in 0..COUNT_LIMIT, epoch: u32, node_id: u32, written_at_ms: u64,
            clean_shutdown: bool, mark: u64,
            pages in 32u64..1_000_000, origin in 0u64..32,
            trim in 0u64..1 << 60, length_permille in 0u64..=1000, start_permille in 0u64..=1000,
        ) {
            let capacity_bytes = DATA_START + pages * PAGE;
            let ring_bytes = capacity_bytes - DATA_START;
            let durable = trim.max(page_floor(trim) + ring_bytes / 1000 * length_permille);
            let header = HeaderInfo {
                generation, epoch, node_id, written_at_ms, clean_shutdown, capacity_bytes, mark,
                wal_id: Uuid::from_u128(u128::from(generation) << 64 | u128::from(written_at_ms)),
                trim: LogOffset(trim), durable: LogOffset(durable),
                epoch_start: LogOffset(durable / 1000 * start_permille),
                window_bytes: (pages / 2) * PAGE,
                origin_bytes: origin * PAGE,
            };
            prop_assert_eq!(decode(&page(&header)), Slot::Valid(header));
        }

        #[test]
        fn no_flipped_bit_passes(bit in 0usize..HEADER_BYTES * 8) {
            let mut page = page(&sample(1));
            page[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(!matches!(decode(&page), Slot::Valid(_)));
        }
    }
}
