//! The source of an install: a replica that sends its blocks, chunk by chunk, while the group goes
//! on. `docs/format/volume-wire.md`, section 11.

use super::clients::Reading;
use super::{Output, Shard};
use crate::group::REGION_CHUNKS;
use crate::messages::{PullChunk, PullContent, PullFrame, PullItem, PullRequest};
use crate::op::{BLOCK_BYTES, BlockRange, CHUNK_BLOCKS};
use crate::request::{BlockState, MAX_READ_BLOCKS};
use crate::store::{BlocksRead, DamagedBlock};
use crate::types::{ChunkIndex, GroupId, Layer, VolumeId};

/// A pull of another server.
pub(super) struct Source {
    group: GroupId,
    /// The volumes that are left, the first one in progress.
    volumes: Vec<VolumeId>,
    /// The next chunk of the first volume, and the end of the region.
    next: u32,
    end: u32,
    /// The chunk that is being read, and its next block.
    reading: Option<(PullChunk, u16)>,
    /// What is sent with the next batch.
    items: Vec<PullItem>,
    /// The stream takes another frame.
    is_ready: bool,
    /// The store is reading.
    is_waiting: bool,
}

impl Source {
    pub(super) fn group(&self) -> GroupId {
        self.group
    }
}

impl Shard {
    /// Begins to answer a pull.
    pub(super) fn open_source(&mut self, stream: u64, request: &PullRequest, out: &mut Output) {
        let PullRequest { group, target } = *request;
        let replica = self.replicas.get(&group);
        let replica = replica
            .filter(|replica| replica.has_blocks() && replica.view.peers.contains_key(&target));
        let Some(replica) = replica else {
            out.frames.push((stream, PullFrame::Failed));
            return;
        };
        let volumes: Vec<_> = replica.state.volumes().cloned().collect();
        let first = replica.view.first_chunk().0;
        let source = Source {
            group,
            volumes: volumes.iter().rev().map(|state| state.volume).collect(),
            next: first,
            end: first + REGION_CHUNKS,
            reading: None,
            items: Vec::new(),
            is_ready: false,
            is_waiting: false,
        };
        let frame = PullFrame::Begin {
            at: replica.applied,
            source: replica.peer,
            conf: replica.conf(),
            volumes,
        };
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
        let Self { sources, replicas, store, .. } = self;
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
        if source.reading.is_none() && !source.find_chunk(store) {
            // Everything was read.
            let items = std::mem::take(&mut source.items);
            if !items.is_empty() {
                let newest = replica.newest_block();
                out.frames.push((stream, PullFrame::Batch { newest, items }));
            }
            out.frames.push((stream, PullFrame::End));
            sources.remove(&stream);
            return;
        }
        let (at, first) = source.reading.expect("found above");
        source.is_waiting = true;
        let blocks = MAX_READ_BLOCKS.min(CHUNK_BLOCKS - first);
        let range = BlockRange { chunk: at.chunk, first, blocks };
        let id = self.reading(Reading::Source { stream });
        self.store.read(id, group, at.volume, at.layer, range, false);
    }

    /// Sends the blocks of a part of a chunk.
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
        let (Some(replica), Ok(read)) = (replica, result) else {
            // An install has begun here, or a block is damaged: another replica may be the source.
            self.sources.remove(&stream);
            out.frames.push((stream, PullFrame::Failed));
            return;
        };
        let (at, first) = source.reading.expect("a part of a chunk was read");
        let blocks = read.states.len() as u16;
        source.push(at, first, &read);
        source.reading = Some((at, first + blocks));
        if first + blocks == CHUNK_BLOCKS {
            source.reading = None;
            let bitmap = self.store.present(group, at.volume, at.layer, at.chunk);
            let content = PullContent::Bitmap { bits: Box::new(bitmap), is_last: true };
            source.items.push(PullItem { at, content });
        }
        if source.items.is_empty() {
            self.advance_source(stream, out);
            return;
        }
        source.is_ready = false;
        let items = std::mem::take(&mut source.items);
        out.frames.push((stream, PullFrame::Batch { newest: replica.newest_block(), items }));
    }
}

impl Source {
    /// Finds the next chunk that has blocks, and states that the ones before it have none. Returns
    /// false if there is none left.
    fn find_chunk(&mut self, store: &crate::store::Store) -> bool {
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
                self.reading = Some((PullChunk { volume, layer, chunk }, 0));
                self.next = chunk.0 + 1;
                return true;
            }
            self.volumes.pop();
            self.next = self.end - REGION_CHUNKS;
        }
        false
    }

    /// Adds the blocks of a part of a chunk, run by run.
    fn push(&mut self, at: PullChunk, first: u16, read: &BlocksRead) {
        let mut taken = 0;
        let runs = read.states.chunk_by(|a, b| a == b);
        let mut block = first;
        for run in runs {
            let blocks = run.len();
            match run[0] {
                BlockState::Absent => {}
                BlockState::Zeros => {
                    let blocks = blocks as u16;
                    let content = PullContent::Zeros { first: block, blocks };
                    self.items.push(PullItem { at, content });
                }
                BlockState::Data => {
                    let crcs = read.crcs[taken..taken + blocks].to_vec();
                    let bytes = taken * BLOCK_BYTES..(taken + blocks) * BLOCK_BYTES;
                    let data = read.data.slice(bytes);
                    let content = PullContent::Blocks { first: block, crcs, data };
                    self.items.push(PullItem { at, content });
                    taken += blocks;
                }
            }
            block += blocks as u16;
        }
    }
}
