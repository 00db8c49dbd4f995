//! Reads of blocks: from the overlay, else as their words state, else from the device, where each
//! block is verified against its word.
//!
//! A block that was written again while it was read may not match the word that counted before. It
//! is then read again; otherwise a mismatch is damage.

use std::collections::BTreeMap;
use std::ops::Range;

use alluvium_device::{AlignedBuf, DeviceOffset};
use bytes::Bytes;

use super::block_store::{Store, blocks_of, chunk_key};
use super::layout::SLOT_BLOCKS;
use super::overlay::{ChunkKey, Content};
use super::pending::{BlocksRead, DamagedBlock, DeviceRun, Read, ReadId, RunPurpose};
use super::pull::{ChunkBits, has_block};
use super::sector::Word;
use crate::op::{BLOCK_BYTES, BlockRange};
use crate::request::{BlockState, MAX_READ_BLOCKS};
use crate::types::{GroupId, Layer, VolumeId};

impl Store {
    /// Reads blocks of one chunk. The result is that of [`Store::take_reads`], at once if the
    /// device is not needed. The caller bounds the reads in progress.
    pub fn read(
        &mut self,
        id: ReadId,
        group: GroupId,
        volume: VolumeId,
        layer: Layer,
        range: BlockRange,
        states_only: bool,
    ) {
        let number =
            self.begin_read(id, chunk_key(group, volume, layer, range), range, states_only);
        self.collect(number, blocks_of(range));
        self.finish(number);
    }

    /// Reads those blocks of a range whose bits are set, as [`Store::read`] does. The others count
    /// as absent.
    pub fn read_wanted(
        &mut self,
        id: ReadId,
        group: GroupId,
        volume: VolumeId,
        layer: Layer,
        range: BlockRange,
        wanted: &ChunkBits,
    ) {
        let number = self.begin_read(id, chunk_key(group, volume, layer, range), range, false);
        let Range { start: mut next, end } = blocks_of(range);
        while let Some(first) = (next..end).find(|block| has_block(wanted, *block)) {
            next = (first..end).find(|block| !has_block(wanted, *block)).unwrap_or(end);
            self.collect(number, first..next);
        }
        self.finish(number);
    }

    fn begin_read(
        &mut self,
        id: ReadId,
        key: ChunkKey,
        range: BlockRange,
        states_only: bool,
    ) -> u64 {
        let read = Read {
            id,
            key,
            first: range.first,
            states: vec![BlockState::Absent; range.blocks.into()],
            is_states_only: states_only,
            data: BTreeMap::new(),
            runs: 0,
            damaged: None,
        };
        let number = self.reads.next_number();
        self.reads.reads.insert(number, read);
        number
    }

    /// Takes the reads that have completed.
    pub fn take_reads(&mut self, out: &mut Vec<(ReadId, Result<BlocksRead, DamagedBlock>)>) {
        out.append(&mut self.reads.done);
    }

    /// Adds blocks to a read, and submits what the device has of them.
    fn collect(&mut self, number: u64, blocks: Range<u16>) {
        let read = self.reads.reads.get_mut(&number).expect("the read is in progress");
        let key = read.key;
        let mut next = blocks.start;
        let mut in_store = Vec::new();
        for (found, content) in self.overlay.read(key, blocks.clone()) {
            if next < found.start {
                in_store.push(next..found.start);
            }
            next = found.end;
            let state = match content {
                Content::Data(data, crcs) => {
                    if !read.is_states_only {
                        read.data.insert(found.start, (data, crcs));
                    }
                    BlockState::Data
                }
                Content::Zeros => BlockState::Zeros,
                Content::Absent => BlockState::Absent,
            };
            let at = usize::from(found.start - read.first)..usize::from(found.end - read.first);
            read.states[at].fill(state);
        }
        if next < blocks.end {
            in_store.push(next..blocks.end);
        }
        for blocks in in_store {
            self.collect_stored(number, &blocks);
        }
    }

    fn collect_stored(&mut self, number: u64, blocks: &Range<u16>) {
        let Read { key, first, is_states_only, .. } = self.reads.reads[&number];
        let mut states = Vec::with_capacity(blocks.len());
        let mut runs: Vec<(u16, DeviceOffset, Vec<Word>)> = Vec::new();
        for (block, word, at) in self.stored(key, blocks) {
            states.push(match word {
                Word::ABSENT => BlockState::Absent,
                Word::ZEROS => BlockState::Zeros,
                _ => BlockState::Data,
            });
            let Some(at) = at.filter(|_| !is_states_only) else { continue };
            match runs.last_mut() {
                Some((first, start, words))
                    if usize::from(block - *first) == words.len()
                        && at.0 == start.0 + (words.len() * BLOCK_BYTES) as u64
                        && words.len() < usize::from(MAX_READ_BLOCKS) =>
                {
                    words.push(word);
                }
                _ => runs.push((block, at, vec![word])),
            }
        }
        let read = self.reads.reads.get_mut(&number).expect("the read is in progress");
        let at = usize::from(blocks.start - first);
        read.states[at..at + states.len()].copy_from_slice(&states);
        read.runs += runs.len();
        for (first, at, words) in runs {
            self.read_run(key, first, at, words, RunPurpose::Read(number));
        }
    }

    /// Submits a read of neighbouring blocks.
    pub(super) fn read_run(
        &mut self,
        key: ChunkKey,
        first: u16,
        at: DeviceOffset,
        words: Vec<Word>,
        purpose: RunPurpose,
    ) {
        let number = self.reads.next_number();
        let len_bytes = words.len() * BLOCK_BYTES;
        let stamp = self.slots.stamp();
        self.reads.runs.insert(number, DeviceRun { key, first, words, stamp, purpose });
        self.io.read(at, len_bytes, number);
    }

    /// A device read has completed; `None` if it has failed.
    pub(super) fn read_completed(&mut self, number: u64, buf: Option<AlignedBuf>) {
        let run = self.reads.runs.remove(&number).expect("a read completes once");
        match run.purpose {
            RunPurpose::Read(number) => {
                self.verify(number, &run, buf);
                self.finish(number);
            }
            RunPurpose::Pull(number) => self.compare(number, &run, buf.as_deref()),
        }
    }

    fn verify(&mut self, number: u64, run: &DeviceRun, buf: Option<AlignedBuf>) {
        let key = run.key;
        let data = buf.map(|buf| buf.freeze().into_bytes());
        let mut crcs = Vec::with_capacity(run.words.len());
        let mut good_from = 0;
        for (at, word) in run.words.iter().enumerate() {
            let block = run.first + at as u16;
            let crc = data.as_ref().and_then(|data| {
                let crc = crc32c::crc32c(&data[at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES]);
                (key.word_of_data(block, crc) == *word).then_some(crc)
            });
            if let Some(crc) = crc {
                crcs.push(crc);
                continue;
            }
            self.keep(number, run, data.as_ref(), good_from, &mut crcs);
            good_from = at + 1;
            if self.has_changed(run, block) {
                self.collect(number, block..block + 1);
            } else {
                let ChunkKey { group, volume, chunk, layer } = key;
                let damaged = DamagedBlock { group, volume, layer, chunk, block };
                self.reads.reads.get_mut(&number).expect("it is read").damaged = Some(damaged);
            }
        }
        self.keep(number, run, data.as_ref(), good_from, &mut crcs);
        self.reads.reads.get_mut(&number).expect("it is read").runs -= 1;
    }

    /// Keeps verified blocks of a device read, from its block `from` on.
    fn keep(
        &mut self,
        number: u64,
        run: &DeviceRun,
        data: Option<&Bytes>,
        from: usize,
        crcs: &mut Vec<u32>,
    ) {
        if let Some(data) = data.filter(|_| !crcs.is_empty()) {
            let data = data.slice(from * BLOCK_BYTES..(from + crcs.len()) * BLOCK_BYTES);
            let read = self.reads.reads.get_mut(&number).expect("it is read");
            read.data.insert(run.first + from as u16, (data, std::mem::take(crcs)));
        }
    }

    /// Whether the word of a block may have been set since its read was submitted.
    fn has_changed(&self, run: &DeviceRun, block: u16) -> bool {
        if self.overlay.has(run.key, &(block..block + 1)) {
            return true;
        }
        let slot = self.slot(run.key, usize::from(block) / SLOT_BLOCKS);
        let used = slot.and_then(|slot| self.slots.used(slot));
        // Another slot may have been reserved since, of which no word is set yet.
        used.is_none_or(|used| used.stamp == 0 || used.stamp > run.stamp)
    }

    /// Completes a read if nothing of it is in progress.
    fn finish(&mut self, number: u64) {
        if self.reads.reads[&number].runs > 0 {
            return;
        }
        let read = self.reads.reads.remove(&number).expect("found above");
        let result = match read.damaged {
            Some(damaged) => Err(damaged),
            None => {
                let (crcs, data) = join(read.data);
                Ok(BlocksRead { states: read.states, crcs, data })
            }
        };
        self.reads.done.push((read.id, result));
    }
}

/// Joins the pieces of a read, without a copy if there is only one.
fn join(mut pieces: BTreeMap<u16, (Bytes, Vec<u32>)>) -> (Vec<u32>, Bytes) {
    if pieces.len() <= 1 {
        let (data, crcs) = pieces.pop_first().map(|(_, piece)| piece).unwrap_or_default();
        return (crcs, data);
    }
    let mut joined = Vec::with_capacity(pieces.values().map(|(data, _)| data.len()).sum());
    let mut all = Vec::new();
    for (data, crcs) in pieces.into_values() {
        joined.extend_from_slice(&data);
        all.extend(crcs);
    }
    (all, joined.into())
}
