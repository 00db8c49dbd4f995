//! Format and opening of a store. `docs/format/volume-store.md`, sections 3 and 8.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc;

use alluvium_device::{AlignedBuf, DeviceError, Geometry, Request, SharedDevice};
use alluvium_wal::{DeviceOffset, looks_like};

use super::block_store::{Expected, KnownReplica, Store, StoreOptions, Unclaimed, key_of};
use super::checkpoint::encode;
use super::error::StoreError;
use super::io::{Io, Wake};
use super::layout::{
    Layout, META_START, PAGE_SECTORS, SECTOR_BYTES, SUPERBLOCK_AT, SUPERBLOCK_BYTES,
};
use super::sector::{Address, Sector, SectorState};
use super::slots::{PAGE_OF_SECTORS_BYTES, Slots};
use super::superblock::{Chosen, CopyState, Current, Owner, Superblock, choose};
use crate::rules::Rule;
use crate::types::{CheckpointNumber, GroupId, PeerId, SlotIndex, replicas_of};

/// Bytes of a request while sectors are read or zeroed.
const STEP_BYTES: u64 = 1 << 20;
/// Such requests in flight.
const STEPS: usize = 8;

impl Store {
    /// Formats a device as the store of a server that can grow to `max_capacity_bytes`, by default
    /// four times the device. The caller has checked that the device may be overwritten
    /// ([`Store::identify`]). Blocks. A crash leaves what was there before, nothing, or the new
    /// store; the data area is not written.
    ///
    /// # Errors
    /// The device is too small, or fails.
    pub fn format(
        device: &SharedDevice,
        owner: Owner,
        max_capacity_bytes: Option<u64>,
        now_ms: u64,
    ) -> Result<(), StoreError> {
        let layout = Layout::for_device(device.capacity_bytes(), max_capacity_bytes)?;
        let counts = choose(&read_copies(device)).map_or(SUPERBLOCK_AT[0], |old| old.current.at());
        let other = SUPERBLOCK_AT.into_iter().find(|at| *at != counts);
        for at in [other.expect("there are two positions"), counts] {
            device.write_durable(at, AlignedBuf::zeroed(SUPERBLOCK_BYTES).freeze())?;
        }
        let sectors_bytes = u64::from(layout.slots()) * SECTOR_BYTES as u64;
        zero(device, META_START.0 + sectors_bytes)?;
        device.flush()?;
        let first = Current::format(owner, layout, now_ms);
        write_copy(device, &first)?;
        write_copy(device, &first.repeated(now_ms))
    }

    /// Reads the superblock that counts. Blocks.
    ///
    /// # Errors
    /// The device is empty ([`StoreError::NotFormatted`]), is no store that this version can read,
    /// or fails.
    pub fn identify(device: &SharedDevice) -> Result<Superblock, StoreError> {
        Ok(find(device)?.current.superblock().clone())
    }

    /// Opens the store of a server whose log was scanned. Blocks, and reads all sectors: `progress`
    /// is called with the slots that were read and their number. `wake` is called on threads of the
    /// device when something can be taken.
    ///
    /// The replicas are added as the log is walked; each gets the blocks that the store has of it.
    ///
    /// # Errors
    /// Store and log are not as a crash leaves them, or the device fails. Nothing was written.
    pub fn open(
        device: SharedDevice,
        expected: &Expected,
        options: StoreOptions,
        now_ms: u64,
        wake: Wake,
        progress: &mut dyn FnMut(u32, u32),
    ) -> Result<Self, StoreError> {
        let chosen = find_owned(&device, &expected.owner)?;
        let superblock = chosen.current.superblock();
        // A crash may have interrupted what follows the loss of all replicas.
        let is_restart = expected.has_no_replica && superblock.checkpoint < expected.checkpoint;
        if !is_restart {
            superblock.check_log(expected.checkpoint, expected.log_end)?;
        }
        Opening { expected, options, now_ms, is_restart }.open(device, &chosen, wake, progress)
    }

    /// Opens the store of a server whose replicas are all lost, as section 8 defines it: nothing in
    /// it counts. The log has the record of checkpoint `expected.checkpoint`, which lists no
    /// replica, below `expected.log_end`; its number is the greatest of that of the last complete
    /// checkpoint, of that in the superblock ([`Store::identify`]), and of 1. All slots that are
    /// not free become so with the next checkpoint; new replicas are created after that. Blocks.
    ///
    /// # Errors
    /// The store belongs to another server, is of a newer version, or the device fails.
    ///
    /// # Panics
    /// If a replica is expected, or the number is too low.
    pub fn reset(
        device: SharedDevice,
        expected: &Expected,
        options: StoreOptions,
        now_ms: u64,
        wake: Wake,
        progress: &mut dyn FnMut(u32, u32),
    ) -> Result<Self, StoreError> {
        assert!(expected.has_no_replica && expected.replicas.is_empty(), "all replicas are lost");
        let chosen = find_owned(&device, &expected.owner)?;
        let opening = Opening { expected, options, now_ms, is_restart: true };
        opening.open(device, &chosen, wake, progress)
    }
}

/// Flushes the device, and chooses the superblock that counts.
fn find(device: &SharedDevice) -> Result<Chosen, StoreError> {
    let Geometry { read_only, .. } = device.geometry();
    if !read_only {
        device.flush()?;
    }
    match choose(&read_copies(device)) {
        Err(StoreError::NotFormatted | StoreError::NotAStore { .. }) => {
            Err(match looks_like(&**device)? {
                Some(looks_like) => StoreError::NotAStore { looks_like },
                None => StoreError::NotFormatted,
            })
        }
        chosen => chosen,
    }
}

/// Chooses the superblock that counts, and refuses the store of another server.
fn find_owned(device: &SharedDevice, owner: &Owner) -> Result<Chosen, StoreError> {
    let chosen = find(device)?;
    let superblock = chosen.current.superblock();
    superblock.check_device(device.capacity_bytes())?;
    superblock.check_owner(owner)?;
    Ok(chosen)
}

fn read_copies(device: &SharedDevice) -> [CopyState; 2] {
    SUPERBLOCK_AT.map(|at| {
        let end = at.0 + SUPERBLOCK_BYTES as u64;
        if end > device.capacity_bytes() {
            return CopyState::Zero;
        }
        let read = || device.read(at, SUPERBLOCK_BYTES);
        match read().or_else(|_| read()) {
            Ok(page) => CopyState::decode(page[..].try_into().expect("a page was read")),
            Err(_) => CopyState::Unreadable,
        }
    })
}

fn write_copy(device: &SharedDevice, copy: &Current) -> Result<(), StoreError> {
    let mut page = device.alloc(SUPERBLOCK_BYTES);
    encode(copy, &mut page);
    Ok(device.write_durable(copy.at(), page.freeze())?)
}

/// Writes zeros from the start of the device to `end`.
fn zero(device: &SharedDevice, end: u64) -> Result<(), StoreError> {
    let zeros = AlignedBuf::zeroed(STEP_BYTES as usize).freeze();
    let (done, completed) = mpsc::channel();
    let mut in_flight = 0;
    let mut at = 0;
    while at < end || in_flight > 0 {
        if at < end && in_flight < STEPS {
            let len_bytes = STEP_BYTES.min(end - at);
            let buf = zeros.slice(0..len_bytes as usize);
            let done = done.clone();
            let request = Request::Write { at: DeviceOffset(at), buf, durable: false };
            device.submit(request, Box::new(move |result| drop(done.send(result.map(drop)))));
            at += len_bytes;
            in_flight += 1;
        } else {
            completed.recv().expect("a device completes every request")?;
            in_flight -= 1;
        }
    }
    Ok(())
}

/// Calls `visit` with the pages of the sectors, in order; `None` for one that cannot be read at a
/// second try.
fn read_pages(
    device: &SharedDevice,
    layout: &Layout,
    progress: &mut dyn FnMut(u32, u32),
    mut visit: impl FnMut(u32, Option<&[u8]>) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    type Read = Result<Option<AlignedBuf>, DeviceError>;
    let pages = layout.slots() / PAGE_SECTORS;
    let end = META_START.0 + u64::from(pages) * PAGE_OF_SECTORS_BYTES as u64;
    let mut in_flight: VecDeque<(u64, u64, mpsc::Receiver<Read>)> = VecDeque::new();
    let mut at = META_START.0;
    let mut page = 0;
    while at < end || !in_flight.is_empty() {
        if at < end && in_flight.len() < STEPS {
            let len_bytes = STEP_BYTES.min(end - at);
            let (done, completed) = mpsc::sync_channel(1);
            let buf = device.alloc(len_bytes as usize);
            let request = Request::Read { at: DeviceOffset(at), buf };
            device.submit(request, Box::new(move |result| drop(done.send(result))));
            in_flight.push_back((at, len_bytes, completed));
            at += len_bytes;
            continue;
        }
        let (start, len_bytes, completed) = in_flight.pop_front().expect("checked above");
        let read = completed.recv().expect("a device completes every request");
        let buf = read.ok().flatten();
        for from in (0..len_bytes).step_by(PAGE_OF_SECTORS_BYTES) {
            let bytes = from as usize..from as usize + PAGE_OF_SECTORS_BYTES;
            match &buf {
                Some(buf) => visit(page, Some(&buf[bytes]))?,
                None => {
                    let again = device.read(DeviceOffset(start + from), PAGE_OF_SECTORS_BYTES);
                    visit(page, again.ok().as_deref())?;
                }
            }
            page += 1;
        }
        progress(page * PAGE_SECTORS, layout.slots());
    }
    Ok(())
}

/// What an opening has found.
struct Found {
    slots: Slots,
    /// The used slots of each replica.
    used: BTreeMap<(GroupId, PeerId), Unclaimed>,
}

impl Found {
    /// Notes a used slot. Of two with one address the greatest number counts, and of equal ones the
    /// least slot; the other one is freed.
    fn add(&mut self, slot: SlotIndex, sector: Sector, peer: PeerId, is_undecided: bool) {
        let (address, checkpoint) = (sector.address, sector.checkpoint);
        self.slots.found(slot, sector, is_undecided);
        let replica = self.used.entry((address.group, peer)).or_default();
        let chunk = replica.chunks.entry(key_of(&address)).or_default();
        let number = usize::from(address.number.0);
        if let Some(other) = chunk.get(number) {
            let used = self.slots.used(other).expect("it was found");
            if used.sector.checkpoint >= checkpoint {
                self.slots.free_loser(slot);
                return;
            }
            self.slots.free_loser(other);
        }
        chunk.set(number, slot);
        if is_undecided {
            replica.undecided.push(slot);
        }
    }
}

/// An opening, and how it judges the sectors.
struct Opening<'a> {
    expected: &'a Expected,
    options: StoreOptions,
    now_ms: u64,
    /// No sector counts.
    is_restart: bool,
}

/// What a sector counts as.
enum Verdict {
    Free,
    Used {
        is_undecided: bool,
    },
    Lost,
    /// Freed, with the sector as it is.
    Freed,
    /// Freed, and to be written as zeros.
    Zeroed,
}

impl Opening<'_> {
    /// Reads the sectors, writes the copies of the superblock that are out of date, and returns the
    /// store.
    fn open(
        &self,
        device: SharedDevice,
        chosen: &Chosen,
        wake: Wake,
        progress: &mut dyn FnMut(u32, u32),
    ) -> Result<Store, StoreError> {
        let Self { expected, options, now_ms, is_restart } = *self;
        let Found { slots, used } = self.read(&device, chosen.current.superblock(), progress)?;
        let mut current = chosen.current.clone();
        let copies = match is_restart {
            true => {
                let first = current.restarted(expected.checkpoint, expected.log_end, now_ms);
                let second = first.repeated(now_ms);
                vec![first, second]
            }
            false => Vec::from_iter(chosen.repair(expected.checkpoint, now_ms)),
        };
        for copy in copies {
            write_copy(&device, &copy)?;
            current = copy;
        }
        let mut store = Store::new(Io::new(device, wake), options, current, slots);
        store.progress.complete = expected.checkpoint;
        store.unclaimed = used;
        Ok(store)
    }

    fn read(
        &self,
        device: &SharedDevice,
        superblock: &Superblock,
        progress: &mut dyn FnMut(u32, u32),
    ) -> Result<Found, StoreError> {
        let (layout, store_id) = (superblock.layout, superblock.store_id);
        let covering = CheckpointNumber(self.expected.checkpoint.0 + 1);
        let frees_at_once = self.options.broken.is(Rule::FreedSlotWaits);
        let slots = Slots::new(layout, store_id, covering, frees_at_once);
        let mut found = Found { slots, used: BTreeMap::new() };
        read_pages(device, &layout, progress, |page, bytes| {
            let sectors = bytes.map(|bytes| bytes.as_chunks::<SECTOR_BYTES>().0);
            for sector in 0..PAGE_SECTORS {
                let slot = SlotIndex(page * PAGE_SECTORS + sector);
                let state = match sectors {
                    Some(sectors) => SectorState::decode(store_id, slot, &sectors[sector as usize]),
                    None => SectorState::Damaged,
                };
                let verdict = self.judge(slot, &state)?;
                let sector = match state {
                    SectorState::Valid(sector) => Some(sector),
                    _ => None,
                };
                match (verdict, sector) {
                    (Verdict::Free, _) => {}
                    (Verdict::Lost, _) => found.slots.found_lost(slot),
                    (Verdict::Used { is_undecided }, Some(sector)) => {
                        let peer = match self.options.broken.is(Rule::FormerReplica) {
                            true => PeerId(0),
                            false => sector.address.peer,
                        };
                        found.add(slot, sector, peer, is_undecided);
                    }
                    (Verdict::Freed, Some(sector)) => found.slots.found_freed(slot, Some(sector)),
                    (Verdict::Zeroed | Verdict::Freed | Verdict::Used { .. }, _) => {
                        found.slots.found_freed(slot, None);
                    }
                }
            }
            Ok(())
        })?;
        Ok(found)
    }

    fn judge(&self, slot: SlotIndex, state: &SectorState) -> Result<Verdict, StoreError> {
        let log = self.expected.checkpoint;
        let is_valid_number = |sector: &Sector| sector.checkpoint.0 <= log.0 + 1;
        let nothing_counts = self.is_restart || self.expected.has_no_replica;
        if !nothing_counts || !matches!(state, SectorState::Valid(_) | SectorState::Lost(_)) {
            state.check(slot, log)?;
        }
        let verdict = match state {
            SectorState::Free => Verdict::Free,
            SectorState::Future { .. } => unreachable!("refused by the check"),
            SectorState::Damaged | SectorState::Lost(_) if nothing_counts => Verdict::Zeroed,
            SectorState::Damaged | SectorState::Lost(_) => {
                match self.options.broken.is(Rule::DamagedSector) {
                    true => Verdict::Free,
                    false => Verdict::Lost,
                }
            }
            SectorState::Valid(sector) if nothing_counts => match sector {
                sector if !is_valid_number(sector) => Verdict::Zeroed,
                sector if !self.is_restart && sector.checkpoint < log => Verdict::Free,
                _ => Verdict::Freed,
            },
            SectorState::Valid(sector) => self.judge_valid(sector),
        };
        Ok(verdict)
    }

    fn judge_valid(&self, sector: &Sector) -> Verdict {
        let Address { group, peer, volume, .. } = sector.address;
        let is_old = sector.checkpoint < self.expected.checkpoint;
        match self.known(group, peer) {
            Some(known) if known.volumes.contains(&volume) => Verdict::Used { is_undecided: false },
            None if is_old => Verdict::Free,
            Some(known) if is_old && known.barrier <= known.base => Verdict::Free,
            _ => Verdict::Used { is_undecided: true },
        }
    }

    fn known(&self, group: GroupId, peer: PeerId) -> Option<&KnownReplica> {
        if self.options.broken.is(Rule::FormerReplica) {
            let mut of_group = self.expected.replicas.range(replicas_of(group));
            return of_group.next().map(|(_, known)| known);
        }
        self.expected.replicas.get(&(group, peer))
    }
}
