//! What the user of a volume has seen, checked against the logs of the groups.
//!
//! The unit is a **cell** of 1 KiB, which a request fills with its own number. So it is known which
//! request each part of a block comes from.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use super::model::{Committed, Place, contents};
use crate::gateway::types::{Done, Failure, UserId, UserRequest};
use crate::op::{BLOCK_BYTES, CHUNK_BLOCKS, Op};
use crate::state::Applied;

pub(super) const CELL_BYTES: usize = 1024;
const CELLS: usize = BLOCK_BYTES / CELL_BYTES;

/// A request of a session of the run.
pub(super) type User = (usize, UserId);

/// What has happened.
#[derive(Default)]
pub(super) struct History {
    event: u64,
    users: BTreeMap<User, Record>,
    blocks: BTreeMap<Place, Block>,
    /// The pieces that have had their effect.
    effects: BTreeSet<(usize, u64)>,
    /// Cells that a change of a block in part does not name keep their content. With failed
    /// requests this does not hold: one may take effect between the read and the write of another.
    pub(super) checks_merges: bool,
}

struct Record {
    request: UserRequest,
    submitted: u64,
    reported: Option<u64>,
    /// The index of its effect on each block.
    effects: BTreeMap<Place, u64>,
    /// Blocks that it has sent ops for.
    sent: BTreeSet<Place>,
    /// Of a read, for each cell: what was known when it was submitted.
    known: Vec<u64>,
}

/// A block and its contents.
#[derive(Default)]
struct Block {
    /// Contents of the cells from each index on.
    versions: Vec<(u64, [u64; CELLS])>,
    /// The index of the last effect on each cell that an answer has shown.
    known: [u64; CELLS],
    /// When the latest request with an effect was submitted.
    last_submitted: u64,
    /// The request with an op on its way.
    in_flight: Option<User>,
}

fn place(byte: u64) -> (Place, usize) {
    let block = byte / BLOCK_BYTES as u64;
    let (chunk, at) = (block / u64::from(CHUNK_BLOCKS), block % u64::from(CHUNK_BLOCKS));
    ((chunk as u32, at as u16), byte as usize % BLOCK_BYTES / CELL_BYTES)
}

/// The number that fills a cell.
fn number(cell: &[u8]) -> u64 {
    let first = cell.first_chunk().copied().map(u64::from_le_bytes).unwrap_or_default();
    let is_uniform = cell.chunks(8).all(|word| word == first.to_le_bytes());
    if is_uniform { first } else { u64::MAX }
}

fn cells(content: &[u8]) -> [u64; CELLS] {
    let mut cells = content.chunks(CELL_BYTES).map(number);
    std::array::from_fn(|_| cells.next().unwrap_or_default())
}

impl History {
    pub(super) fn submitted(&mut self, user: User, request: UserRequest) {
        self.event += 1;
        let (offset, len) = request.span();
        let known = match &request {
            UserRequest::Read { .. } => (offset..offset + len)
                .step_by(CELL_BYTES)
                .map(|byte| {
                    let (place, cell) = place(byte);
                    self.blocks.get(&place).map_or(0, |block| block.known[cell])
                })
                .collect(),
            _ => Vec::new(),
        };
        let record = Record {
            request,
            submitted: self.event,
            reported: None,
            effects: BTreeMap::new(),
            sent: BTreeSet::new(),
            known,
        };
        self.users.insert(user, record);
    }

    /// An op is sent. No other request may have one on its way to the same blocks.
    pub(super) fn sent(&mut self, user: User, op: &Op) -> Result<(), String> {
        let Op::Blocks(op) = op else { return Ok(()) };
        for (place, _) in contents(op) {
            let block = self.blocks.entry(place).or_default();
            match block.in_flight.replace(user) {
                Some(other) if other != user => {
                    return Err(format!("{user:?} and {other:?} are in flight at {place:?}"));
                }
                _ => {}
            }
            let record = self.users.get_mut(&user).ok_or("an op of an unknown request")?;
            record.sent.insert(place);
        }
        Ok(())
    }

    /// An entry of a log is committed.
    pub(super) fn committed(
        &mut self,
        entry: &Committed,
        owner: Option<User>,
    ) -> Result<(), String> {
        let (Op::Blocks(op), Applied::Effect) = (&entry.op, entry.applied) else { return Ok(()) };
        let user = owner.ok_or("an op without a request")?;
        let piece = entry.origin.map(|(session, send)| (session, send.piece));
        if let Some(piece) = piece
            && !self.effects.insert(piece)
        {
            return Err(format!("an op of {user:?} has its effect twice"));
        }
        let record = self.users.get_mut(&user).ok_or("an op of an unknown request")?;
        let (offset, len) = record.request.span();
        for (at, content) in contents(op) {
            let block = self.blocks.entry(at).or_default();
            if record.reported.is_some_and(|reported| reported < block.last_submitted) {
                return Err(format!("a late copy of {user:?} takes effect at {at:?}"));
            }
            block.last_submitted = block.last_submitted.max(record.submitted);
            let cells = content.flatten().map_or([0; CELLS], |content| cells(&content));
            let former = block.versions.last().map_or([0; CELLS], |(_, cells)| *cells);
            let first_byte =
                (u64::from(at.0) * u64::from(CHUNK_BLOCKS) + u64::from(at.1)) * BLOCK_BYTES as u64;
            for cell in 0..CELLS {
                let byte = first_byte + (cell * CELL_BYTES) as u64;
                let is_named = (offset..offset + len).contains(&byte);
                if self.checks_merges && !is_named && cells[cell] != former[cell] {
                    return Err(format!("{user:?} changes cell {cell} of {at:?}, which it lacks"));
                }
            }
            block.versions.push((entry.index.0, cells));
            record.effects.insert(at, entry.index.0);
        }
        Ok(())
    }

    /// A request is reported as completed.
    pub(super) fn reported(
        &mut self,
        user: User,
        result: &Result<Done, Failure>,
        has_group: impl Fn(Place) -> bool,
    ) -> Result<(), String> {
        self.event += 1;
        let record = self.users.get_mut(&user).ok_or("an unknown request is reported")?;
        if record.reported.replace(self.event).is_some() {
            return Err(format!("{user:?} is reported twice"));
        }
        for place in std::mem::take(&mut record.sent) {
            self.blocks.entry(place).or_default().in_flight.take_if(|other| *other == user);
        }
        let Ok(done) = result else { return Ok(()) };
        let (offset, len) = record.request.span();
        let bytes = (offset..offset + len).step_by(CELL_BYTES);
        if let UserRequest::Read { .. } = record.request {
            let Done::Read(data) = done else { return Err("a read without data".into()) };
            if data.len() as u64 != len {
                return Err(format!("{user:?} has read {} bytes of {len}", data.len()));
            }
            let known = record.known.clone();
            for ((byte, cell), known) in bytes.zip(data.chunks(CELL_BYTES)).zip(known) {
                self.read(user, byte, number(cell), known)?;
            }
            return Ok(());
        }
        let is_discard = matches!(record.request, UserRequest::Discard { .. });
        for byte in bytes {
            let (at, cell) = place(byte);
            let Some(index) = record.effects.get(&at) else {
                // Nothing was there, or the block is discarded in part.
                if is_discard && (!has_group(at) || self.blocks.get(&at).is_none_or(Block::is_new))
                {
                    continue;
                }
                if is_discard && !is_whole(at, offset, len) {
                    continue;
                }
                return Err(format!("{user:?} is answered without effect at {at:?}"));
            };
            let block = self.blocks.entry(at).or_default();
            block.known[cell] = block.known[cell].max(*index);
        }
        Ok(())
    }

    /// A read has shown a cell. It must have had that content at the index that was known when the
    /// read was submitted, or at a later one.
    fn read(&mut self, user: User, byte: u64, value: u64, known: u64) -> Result<(), String> {
        let (at, cell) = place(byte);
        let block = self.blocks.entry(at).or_default();
        let first = std::iter::once((0, 0));
        let versions: Vec<(u64, u64)> = first
            .chain(block.versions.iter().map(|(index, cells)| (*index, cells[cell])))
            .collect();
        let ends = versions[1..].iter().map(|(index, _)| *index).chain([u64::MAX]);
        let shown = versions.iter().zip(ends).find(|((_, v), end)| *v == value && *end > known);
        let Some(((index, _), _)) = shown else {
            return Err(format!("{user:?} has read {value:#x} at {at:?}, stale after {known}"));
        };
        block.known[cell] = block.known[cell].max(*index);
        Ok(())
    }

    /// A session has ended without reporting its requests.
    pub(super) fn abandoned(&mut self, session: usize) {
        self.event += 1;
        for (_, record) in self.users.range_mut((session, UserId(0))..(session + 1, UserId(0))) {
            record.reported.get_or_insert(self.event);
            for place in std::mem::take(&mut record.sent) {
                self.blocks.entry(place).or_default().in_flight = None;
            }
        }
    }

    pub(super) fn unreported(&self) -> usize {
        self.users.values().filter(|record| record.reported.is_none()).count()
    }
}

impl Block {
    fn is_new(&self) -> bool {
        self.versions.is_empty()
    }
}

/// Whether a range of bytes covers a whole block.
fn is_whole(at: Place, offset: u64, len: u64) -> bool {
    let block = u64::from(at.0) * u64::from(CHUNK_BLOCKS) + u64::from(at.1);
    let first = block * BLOCK_BYTES as u64;
    offset <= first && first + BLOCK_BYTES as u64 <= offset + len
}

/// The bytes of cells that all have one number.
pub(super) fn payload(number: u64, len: usize) -> Bytes {
    number.to_le_bytes().repeat(len / 8).into()
}
