//! The source of an install: a replica that sends its blocks, chunk by chunk, while the group goes
//! on. `docs/format/volume-wire.md`, section 11.

use super::clients::Reading;
use super::replica::Replica;
use super::{Output, Shard};
use crate::group::REGION_CHUNKS;
use crate::messages::{PullChunk, PullContent, PullFrame, PullItem, PullRequest};
use crate::op::{BLOCK_BYTES, BlockRange, CHUNK_BLOCKS};
use crate::request::BlockState;
use crate::rules::Rule;
use crate::store::{BlocksRead, ChunkBits, DamagedBlock, Store, has_block};
use crate::types::{CheckpointNumber, ChunkIndex, GroupId, Index, Layer, VolumeId};

/// Items, and chunks, with which a batch is sent, whatever its blocks.
const BATCH_ITEMS: usize = 256;
const BATCH_CHUNKS: usize = 64;

/// A pull of another server.
pub(super) struct Source {
    group: GroupId,
    /// Blocks that have not changed since this checkpoint of this server are left out.
    since: Option<CheckpointNumber>,
    /// The volumes that are left, the first one in progress.
    volumes: Vec<VolumeId>,
    /// The next chunk of the first volume, and the end of the region.
    next: u32,
    end: u32,
    /// The chunk that is being read.
    reading: Option<Part>,
    /// What is sent with the next batch, and the numbers of its blocks and chunks.
    items: Vec<PullItem>,
    blocks: usize,
    chunks: usize,
    /// The stream takes another frame.
    is_ready: bool,
    /// The store is reading.
    is_waiting: bool,
}

/// What is left of a chunk.
struct Part {
    at: PullChunk,
    /// The next block.
    next: u16,
    /// The blocks that are sent.
    sent: Box<ChunkBits>,
}

impl Part {
    /// The next blocks to read, up to one that is sent after `most` others. Also returns how many
    /// of them are sent.
    fn range(&self, most: usize) -> Option<(BlockRange, usize)> {
        let mut sent = 0;
        let taken = (self.next..CHUNK_BLOCKS).take_while(|block| {
            sent += usize::from(has_block(&self.sent, *block));
            sent <= most
        });
        let blocks = taken.count() as u16;
        let range = BlockRange { chunk: self.at.chunk, first: self.next, blocks };
        (blocks > 0 && sent > 0).then_some((range, sent.min(most)))
    }
}

impl Source {
    pub(super) fn group(&self) -> GroupId {
        self.group
    }
}

impl Shard {
    /// Begins to answer a pull.
    pub(super) fn open_source(&mut self, stream: u64, request: &PullRequest, out: &mut Output) {
        let PullRequest { group, target, since, .. } = *request;
        let replica = self.replicas.get(&group);
        let replica = replica
            .filter(|replica| replica.has_blocks() && replica.view.peers.contains_key(&target));
        let Some(replica) = replica else {
            out.frames.push((stream, PullFrame::Failed));
            return;
        };
        let since = match since {
            Index(0) => None,
            _ if self.options.broken.is(Rule::PairBelow) => {
                replica.pairs.at_or_below(Index(u64::MAX))
            }
            since => replica.pairs.at_or_below(since),
        };
        let volumes: Vec<_> = replica.state.volumes().cloned().collect();
        let first = replica.view.first_chunk().0;
        let source = Source {
            group,
            since,
            volumes: volumes.iter().rev().map(|state| state.volume).collect(),
            next: first,
            end: first + REGION_CHUNKS,
            reading: None,
            items: Vec::new(),
            blocks: 0,
            chunks: 0,
            is_ready: false,
            is_waiting: false,
        };
        let frame = PullFrame::Begin {
            at: replica.applied,
            source: replica.peer,
            conf: replica.conf(),
            volumes,
            sends_everything: since.is_none(),
        };
        // The next round then counts from a base of about now.
        self.checkpoint.wanted |= replica.applied.index > replica.base;
        self.sources.insert(stream, source);
        out.frames.push((stream, frame));
    }

    /// The stream takes another frame.
    pub(super) fn continue_source(&mut self, stream: u64, out: &mut Output) {
        if let Some(source) = self.sources.get_mut(&stream) {
            source.is_ready = true;
            self.advance_source(stream, out);
        }
    }

    /// Reads on until there is a batch to send.
    fn advance_source(&mut self, stream: u64, out: &mut Output) {
        let Self { sources, replicas, store, options, .. } = self;
        let Some(source) = sources.get_mut(&stream) else { return };
        if !source.is_ready || source.is_waiting {
            return;
        }
        let group = source.group;
        let Some(replica) = replicas.get(&group).filter(|replica| replica.has_blocks()) else {
            sources.remove(&stream);
            out.frames.push((stream, PullFrame::Failed));
            return;
        };
        let most = usize::from(options.pull_blocks);
        let range = loop {
            if source.items.len() >= BATCH_ITEMS || source.chunks >= BATCH_CHUNKS {
                source.send(stream, replica, out);
                return;
            }
            if source.reading.is_none() && !source.find_chunk(store) {
                // Everything was read.
                source.send(stream, replica, out);
                out.frames.push((stream, PullFrame::End));
                sources.remove(&stream);
                return;
            }
            let part = source.reading.as_ref().expect("found above");
            let Some((range, blocks)) = part.range(most) else {
                source.end_chunk(store);
                continue;
            };
            if source.blocks > 0 && source.blocks + blocks > most {
                source.send(stream, replica, out);
                return;
            }
            break range;
        };
        source.is_waiting = true;
        let id = self.reading(Reading::Source { stream });
        let Self { sources, store, .. } = self;
        let part = sources.get(&stream).and_then(|source| source.reading.as_ref());
        let Part { at, sent, .. } = part.expect("a range of it was found");
        store.read_wanted(id, group, at.volume, at.layer, range, sent);
    }

    /// Takes the blocks of a part of a chunk.
    pub(super) fn source_read(
        &mut self,
        stream: u64,
        result: Result<BlocksRead, DamagedBlock>,
        out: &mut Output,
    ) {
        let Some(source) = self.sources.get_mut(&stream) else { return };
        source.is_waiting = false;
        let group = source.group;
        let replica = self.replicas.get(&group).filter(|replica| replica.has_blocks());
        let (Some(_), Ok(read)) = (replica, result) else {
            // An install has begun here, or a block is damaged: another replica may be the source.
            self.sources.remove(&stream);
            out.frames.push((stream, PullFrame::Failed));
            return;
        };
        source.push(&read);
        self.advance_source(stream, out);
    }
}

impl Source {
    /// Sends what was read. The batch states the newest index after its last block was read.
    fn send(&mut self, stream: u64, replica: &Replica, out: &mut Output) {
        if !self.items.is_empty() {
            self.is_ready = false;
            (self.blocks, self.chunks) = (0, 0);
            let items = std::mem::take(&mut self.items);
            out.frames.push((stream, PullFrame::Batch { newest: replica.newest_block(), items }));
        }
    }

    /// Ends the chunk that was read with the bitmap of its blocks.
    fn end_chunk(&mut self, store: &Store) {
        let Some(Part { at, .. }) = self.reading.take() else { return };
        let bitmap = store.present(self.group, at.volume, at.layer, at.chunk);
        let content = PullContent::Bitmap { bits: Box::new(bitmap), is_last: true };
        self.items.push(PullItem { at, content });
        self.chunks += 1;
    }

    /// Finds the next chunk that has blocks, and states that the ones before it have none. Returns
    /// false if there is none left.
    fn find_chunk(&mut self, store: &Store) -> bool {
        let layer = Layer(0);
        while let Some(volume) = self.volumes.last().copied() {
            let found = store.next_chunk_of(self.group, volume, layer, ChunkIndex(self.next));
            let found = found.filter(|chunk| chunk.0 < self.end);
            let next = found.map_or(self.end, |chunk| chunk.0);
            if next > self.next {
                let at = PullChunk { volume, layer, chunk: ChunkIndex(self.next) };
                let content = PullContent::Absent { chunks: next - self.next };
                self.items.push(PullItem { at, content });
            }
            if let Some(chunk) = found {
                let at = PullChunk { volume, layer, chunk };
                let sent = Box::new(match self.since {
                    Some(since) => store.changed(self.group, volume, layer, chunk, since),
                    None => store.present(self.group, volume, layer, chunk),
                });
                self.reading = Some(Part { at, next: 0, sent });
                self.next = chunk.0 + 1;
                return true;
            }
            self.volumes.pop();
            self.next = self.end - REGION_CHUNKS;
        }
        false
    }

    /// Adds the blocks of a part of a chunk, run by run.
    fn push(&mut self, read: &BlocksRead) {
        let part = self.reading.as_mut().expect("a part of a chunk was read");
        let (at, mut block) = (part.at, part.next);
        part.next += read.states.len() as u16;
        let mut taken = 0;
        for run in read.states.chunk_by(|a, b| a == b) {
            let blocks = run.len();
            let content = match run[0] {
                BlockState::Absent => None,
                BlockState::Zeros => {
                    Some(PullContent::Zeros { first: block, blocks: blocks as u16 })
                }
                BlockState::Data => {
                    let crcs = read.crcs[taken..taken + blocks].to_vec();
                    let bytes = taken * BLOCK_BYTES..(taken + blocks) * BLOCK_BYTES;
                    let data = read.data.slice(bytes);
                    taken += blocks;
                    Some(PullContent::Blocks { first: block, crcs, data })
                }
            };
            self.items.extend(content.map(|content| PullItem { at, content }));
            block += blocks as u16;
        }
        self.blocks += taken;
    }
}
