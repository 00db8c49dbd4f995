//! The store of a server: blocks on a device, their words, and the overlay above them.
//!
//! An applied block goes to the overlay and from there to the device, without a flush, once its
//! entry is durably committed. The word of a block (its checksum, or 0 if it is absent) is set when
//! the write is submitted and reaches the device with the next checkpoint. The words of a group are
//! one page of eight sectors, each with a checksum of its own, so that a torn page leaves each
//! sector old or new.

use std::collections::BTreeMap;
use std::sync::Arc;

use alluvium_device::sim::{Mode, SECTOR_BYTES, SimDisk};
use alluvium_device::{DeviceOffset, Request, SharedDevice};
use parking_lot::Mutex;

use super::mutation::Mutation;
use super::op::{Value, id_of, page_of};
use super::{BLOCKS, GROUPS, PAGE};

/// Sectors in a page.
const SECTORS: usize = PAGE / SECTOR_BYTES;

/// Words in a sector.
const WORDS: usize = BLOCKS / SECTORS;

/// Bytes of a store device.
pub(super) const STORE_BYTES: u64 = ((GROUPS + GROUPS * BLOCKS) * PAGE) as u64;

/// A block in the overlay.
struct Piece {
    value: Value,
    version: u64,
    /// The index of the entry; 0 if the block was pulled from another replica.
    index: u64,
    /// Whether a write of this block is in flight, of this version or of an older one.
    in_flight: bool,
}

/// The blocks of one group.
struct Blocks {
    words: [u32; BLOCKS],
    /// Whether a word has changed since the sectors were written.
    dirty: bool,
    overlay: BTreeMap<usize, Piece>,
    /// The newest version that has landed, per block.
    landed: [u64; BLOCKS],
    durable_commit: u64,
}

/// A version of a block that a checkpoint waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    group: usize,
    block: usize,
    version: u64,
}

enum Completion {
    Block { group: usize, block: usize, version: u64 },
    Checkpoint,
}

/// The store of a running server.
pub(super) struct Store {
    server: usize,
    mutation: Mutation,
    disk: SimDisk,
    device: SharedDevice,
    groups: Vec<Blocks>,
    last_version: u64,
    completions: Arc<Mutex<Vec<Completion>>>,
    /// Requests of the checkpoint that have not completed.
    checkpoint_requests: usize,
}

impl Store {
    /// Reads the words from the device, after a flush: what a killed process left in the device's
    /// cache can be read, but is not durable.
    pub(super) fn open(server: usize, disk: &SimDisk, mutation: Mutation) -> Self {
        let device = disk.device();
        device.flush().expect("the disk does not fail");
        let read = |group| {
            let at = DeviceOffset(sectors_at(group));
            let page = device.read(at, PAGE).expect("the disk does not fail");
            Blocks {
                words: words_of(group, &page),
                dirty: false,
                overlay: BTreeMap::new(),
                landed: [0; BLOCKS],
                durable_commit: 0,
            }
        };
        let groups = (0..GROUPS).map(read).collect();
        disk.set_mode(Mode::Queued);
        Self {
            server,
            mutation,
            disk: disk.clone(),
            device,
            groups,
            last_version: 0,
            completions: Arc::default(),
            checkpoint_requests: 0,
        }
    }

    pub(super) fn durable_commit(&self, group: usize) -> u64 {
        self.groups[group].durable_commit
    }

    /// Notes that the log durably states a commit index, and submits what it makes eligible.
    pub(super) fn commit_is_durable(&mut self, group: usize, commit: u64) {
        let blocks = &mut self.groups[group];
        if commit <= blocks.durable_commit {
            return;
        }
        blocks.durable_commit = commit;
        let pieces: Vec<usize> = blocks.overlay.keys().copied().collect();
        for block in pieces {
            self.submit(group, block);
        }
    }

    /// Puts a block into the overlay.
    pub(super) fn put(&mut self, group: usize, block: usize, value: Value, index: u64) {
        self.last_version += 1;
        let version = self.last_version;
        let blocks = &mut self.groups[group];
        let in_flight = blocks.overlay.get(&block).is_some_and(|piece| piece.in_flight);
        blocks.overlay.insert(block, Piece { value, version, index, in_flight });
        if self.mutation == Mutation::WordAtApply {
            blocks.words[block] = word_of(group, block, value);
            blocks.dirty = true;
        }
        self.submit(group, block);
    }

    /// Puts a block that was pulled from another replica into the overlay, unless the device has
    /// it already.
    pub(super) fn put_pulled(&mut self, group: usize, block: usize, value: Value) {
        if !self.device_has(group, block, value) {
            // A block that the source does not have is removed.
            let left = value.is_none() && self.mutation == Mutation::InstallLeavesRest;
            if !left {
                self.put(group, block, value, 0);
            }
        }
    }

    /// Whether the device has this content. The word alone does not prove it: a crash during an
    /// install may have left the new word and the old block, which no entry of the log repairs.
    fn device_has(&self, group: usize, block: usize, value: Value) -> bool {
        let blocks = &self.groups[group];
        let word = word_of(group, block, value);
        if blocks.overlay.contains_key(&block) || blocks.words[block] != word {
            return false;
        }
        value.is_none()
            || self.mutation == Mutation::PulledWordTrusted
            || checksum(group, block, &self.disk.peek(block_at(group, block), PAGE)) == word
    }

    /// Hands a block to the device if its entry is durably committed and no write of the block is
    /// in flight. An absent block needs no write.
    fn submit(&mut self, group: usize, block: usize) {
        let blocks = &mut self.groups[group];
        let Some(piece) = blocks.overlay.get_mut(&block) else { return };
        let is_eligible =
            piece.index <= blocks.durable_commit || self.mutation == Mutation::NoCommitRule;
        if piece.in_flight || !is_eligible {
            return;
        }
        // The word is set at submission, never before.
        blocks.words[block] = word_of(group, block, piece.value);
        blocks.dirty = true;
        let version = piece.version;
        let Some(id) = piece.value else {
            blocks.landed[block] = version;
            blocks.overlay.remove(&block);
            return;
        };
        piece.in_flight = true;
        self.write(
            block_at(group, block),
            &page_of(id),
            Completion::Block { group, block, version },
        );
    }

    /// Takes the completions of the device. Returns false if there is none.
    pub(super) fn take_completions(&mut self) -> bool {
        let completions = std::mem::take(&mut *self.completions.lock());
        for completion in &completions {
            match *completion {
                Completion::Checkpoint => self.checkpoint_requests -= 1,
                Completion::Block { group, block, version } => self.landed(group, block, version),
            }
        }
        !completions.is_empty()
    }

    fn landed(&mut self, group: usize, block: usize, version: u64) {
        let blocks = &mut self.groups[group];
        blocks.landed[block] = version;
        let piece = blocks.overlay.get_mut(&block).expect("a piece in flight is in the overlay");
        piece.in_flight = false;
        if piece.version == version {
            blocks.overlay.remove(&block);
        } else {
            self.submit(group, block);
        }
    }

    // -- For checkpoints

    /// The blocks of a group that must land before a checkpoint with this base: those at or below
    /// it, and those in flight.
    pub(super) fn to_land(&self, group: usize, base: u64) -> impl Iterator<Item = Awaited> {
        let pieces = self.groups[group].overlay.iter();
        pieces
            .filter(move |(_, piece)| piece.index <= base || piece.in_flight)
            .map(move |(block, piece)| Awaited { group, block: *block, version: piece.version })
    }

    /// Whether the block, or a newer version of it, has landed.
    pub(super) fn has_landed(&self, awaited: Awaited) -> bool {
        self.groups[awaited.group].landed[awaited.block] >= awaited.version
    }

    /// Submits writes of all sectors with changed words.
    pub(super) fn write_sectors(&mut self) {
        for group in 0..GROUPS {
            if std::mem::take(&mut self.groups[group].dirty) {
                let page = sectors_of(group, &self.groups[group].words);
                self.checkpoint_requests += 1;
                self.write(sectors_at(group), &page, Completion::Checkpoint);
            }
        }
    }

    /// Submits a flush.
    pub(super) fn flush(&mut self) {
        self.checkpoint_requests += 1;
        self.submit_request(Request::Flush, Completion::Checkpoint);
    }

    /// Whether all requests of the checkpoint have completed.
    pub(super) fn checkpoint_is_idle(&self) -> bool {
        self.checkpoint_requests == 0
    }

    fn write(&self, at: u64, page: &[u8], completion: Completion) {
        let mut buf = self.device.alloc(PAGE);
        buf.copy_from_slice(page);
        let write = Request::Write { at: DeviceOffset(at), buf: buf.freeze(), durable: false };
        self.submit_request(write, completion);
    }

    fn submit_request(&self, request: Request, completion: Completion) {
        let completions = self.completions.clone();
        let done = move |result: Result<_, _>| {
            // The disk fails requests only when the server has ended.
            if result.is_ok() {
                completions.lock().push(completion);
            }
        };
        self.device.submit(request, Box::new(done));
    }

    // -- For readers

    /// Whether everything has landed.
    pub(super) fn is_drained(&self, group: usize) -> bool {
        self.groups[group].overlay.is_empty()
    }

    /// Returns the content of a block. Panics if the device has other bytes than its word states.
    pub(super) fn read(&self, group: usize, block: usize) -> Value {
        let blocks = &self.groups[group];
        if let Some(piece) = blocks.overlay.get(&block) {
            return piece.value;
        }
        let word = blocks.words[block];
        if word == 0 {
            return None;
        }
        let page = self.disk.peek(block_at(group, block), PAGE);
        assert_eq!(
            checksum(group, block, &page),
            word,
            "CORRUPT: block {block} of group {group} at server {} differs from its word",
            self.server
        );
        Some(id_of(&page))
    }
}

fn sectors_at(group: usize) -> u64 {
    (group * PAGE) as u64
}

fn block_at(group: usize, block: usize) -> u64 {
    ((GROUPS + group * BLOCKS + block) * PAGE) as u64
}

fn word_of(group: usize, block: usize, value: Value) -> u32 {
    value.map_or(0, |id| checksum(group, block, &page_of(id)))
}

/// The word of a block that is there: a checksum of its position and content, never 0.
fn checksum(group: usize, block: usize, page: &[u8]) -> u32 {
    let position = [(group as u64).to_le_bytes(), (block as u64).to_le_bytes()].concat();
    crc32c::crc32c_append(crc32c::crc32c(&position), page).max(1)
}

/// The page with the words of a group. A sector has its words, the number of the group, its own
/// number and a checksum.
fn sectors_of(group: usize, words: &[u32; BLOCKS]) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    for (number, sector) in page.as_chunks_mut::<SECTOR_BYTES>().0.iter_mut().enumerate() {
        for (bytes, word) in
            sector.as_chunks_mut::<4>().0.iter_mut().zip(&words[number * WORDS..][..WORDS])
        {
            *bytes = word.to_le_bytes();
        }
        sector[WORDS * 4] = 1;
        sector[WORDS * 4 + 1] = group as u8;
        sector[WORDS * 4 + 2] = number as u8;
        let sum = crc32c::crc32c(&sector[..SECTOR_BYTES - 4]);
        sector[SECTOR_BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
    }
    page
}

/// The words in a page. Sectors of zeros were never written.
fn words_of(group: usize, page: &[u8]) -> [u32; BLOCKS] {
    let mut words = [0; BLOCKS];
    for (number, sector) in page.as_chunks::<SECTOR_BYTES>().0.iter().enumerate() {
        if sector.iter().all(|byte| *byte == 0) {
            continue;
        }
        let sum = crc32c::crc32c(&sector[..SECTOR_BYTES - 4]).to_le_bytes();
        assert_eq!(sum, sector[SECTOR_BYTES - 4..], "sector {number} of group {group} is torn");
        let owner = (usize::from(sector[WORDS * 4 + 1]), usize::from(sector[WORDS * 4 + 2]));
        assert_eq!(owner, (group, number), "a sector in the wrong position");
        for (word, bytes) in
            words[number * WORDS..].iter_mut().zip(&sector.as_chunks::<4>().0[..WORDS])
        {
            *word = u32::from_le_bytes(*bytes);
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use alluvium_device::sim::SimOptions;

    use super::*;

    #[test]
    fn words_survive_their_sectors() {
        let mut words = [0; BLOCKS];
        for (index, word) in words.iter_mut().enumerate() {
            *word = index as u32 * 7;
        }
        assert_eq!(words_of(3, &sectors_of(3, &words)), words);
        assert_eq!(words_of(3, &[0; PAGE]), [0; BLOCKS]);
    }

    #[test]
    fn a_pulled_block_is_written_unless_the_device_has_it() {
        let (group, block, value) = (1, 3, Some(5));
        let disk =
            SimDisk::new(SimOptions { capacity_bytes: STORE_BYTES, ..SimOptions::default() });
        // An interrupted install has left the word and not the block.
        let mut words = [0; BLOCKS];
        words[block] = word_of(group, block, value);
        disk.poke(sectors_at(group), &sectors_of(group, &words));
        let mut store = Store::open(0, &disk, Mutation::Sound);
        store.put_pulled(group, block, value);
        assert!(!store.is_drained(group), "the block is missing");
        assert!(disk.step() && store.take_completions() && store.is_drained(group));
        assert_eq!(store.read(group, block), value);
        store.put_pulled(group, block, value);
        assert!(store.is_drained(group), "the block is there");
    }

    #[test]
    fn a_block_waits_until_its_entry_is_durably_committed() {
        let disk =
            SimDisk::new(SimOptions { capacity_bytes: STORE_BYTES, ..SimOptions::default() });
        let mut store = Store::open(0, &disk, Mutation::Sound);
        store.put(0, 2, Some(8), 4);
        store.commit_is_durable(0, 3);
        assert!(!disk.step(), "nothing is submitted");
        assert_eq!(store.read(0, 2), Some(8), "from the overlay");
        store.commit_is_durable(0, 4);
        // A newer version waits for the write in flight, also a discard.
        store.put(0, 2, None, 4);
        assert_eq!(disk.queued().len(), 1);
        assert!(disk.step() && store.take_completions() && store.is_drained(0));
        assert_eq!(store.read(0, 2), None);
    }

    #[test]
    fn a_word_depends_on_the_position() {
        assert_ne!(word_of(0, 1, Some(5)), word_of(1, 0, Some(5)));
        assert_eq!(word_of(0, 1, None), 0);
    }
}
