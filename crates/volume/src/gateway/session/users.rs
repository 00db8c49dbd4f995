//! Requests of the user: their lock, the blocks that are merged, pieces, and completion.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use super::{Phase, Session, Timer};
use crate::gateway::group::Region;
use crate::gateway::map::{BLOCK, RegionIndex, first_part};
use crate::gateway::piece::{Kind, Piece, Work};
use crate::gateway::types::{Done, Failure, Output, ReadPart, UserId, UserRequest};
use crate::op::{BLOCK_BYTES, CHUNK_BLOCKS, Change, MAX_WRITE_BLOCKS};
use crate::request::MAX_READ_BLOCKS;
use crate::rules::Rule;

/// Greatest number of pieces of a request at a time.
const MAX_PIECES: usize = 64;

/// A status query covers at most this many chunks in regions that have a group.
const MAX_STATUS_CHUNKS: u32 = 64;

/// A request of the user until it is reported, or longer: until no late copy of a failed op can
/// take effect.
#[derive(Debug)]
pub(super) struct User {
    pub(super) kind: Kind,
    request: UserRequest,
    /// End of the bytes that it covers.
    end: u64,
    /// The blocks that it has locked, or waits for.
    lock: Option<Range<u64>>,
    /// Failed ops whose numbers the floor has not passed.
    held: u32,
    /// Its pieces on their way.
    pieces: Vec<u64>,
    /// Blocks to be read, the next ones last.
    reads: Vec<Range<u64>>,
    /// When all is read, the changes are made from what was read.
    is_merged: bool,
    /// Changes to be sent.
    segments: VecDeque<Segment>,
    parts: Vec<ReadPart>,
    failure: Option<Failure>,
    pub(super) is_reported: bool,
    deadline: Option<Duration>,
}

/// A change of successive blocks.
#[derive(Debug)]
struct Segment {
    blocks: Range<u64>,
    change: Change,
}

impl Segment {
    /// A write of whole blocks, with their checksums.
    fn write(first: u64, data: Bytes) -> Self {
        let blocks = first..first + data.len() as u64 / BLOCK;
        Self { blocks, change: Change::write(data) }
    }

    /// Takes the change of the first `blocks` blocks.
    fn take(&mut self, blocks: u16) -> Change {
        self.blocks.start += u64::from(blocks);
        match &mut self.change {
            Change::Zero => Change::Zero,
            Change::Discard => Change::Discard,
            Change::Write { data, crcs } => {
                let rest = crcs.split_off(blocks.into());
                let data = data.split_to(usize::from(blocks) * BLOCK_BYTES);
                Change::Write { crcs: std::mem::replace(crcs, rest), data }
            }
        }
    }
}

impl Session {
    /// Submits a request and returns its number. It completes with [`Output::Complete`].
    ///
    /// # Panics
    /// The attachment has not reached all groups ([`Output::Attached`]).
    pub fn submit(&mut self, now: Duration, request: UserRequest) -> UserId {
        self.submit_begun(now, now, request)
    }

    /// As [`Session::submit`], for a request that has waited since `begun`: the I/O timeout counts
    /// from then.
    ///
    /// # Panics
    /// As [`Session::submit`].
    pub fn submit_begun(&mut self, now: Duration, begun: Duration, request: UserRequest) -> UserId {
        self.set_time(now);
        self.last_user += 1;
        let id = UserId(self.last_user);
        let kind = match &request {
            UserRequest::Write { .. } => Kind::Write,
            UserRequest::Zero { .. } => Kind::Zero,
            UserRequest::Discard { .. } => Kind::Discard,
            UserRequest::Read { .. } => Kind::Read,
            UserRequest::Status { .. } | UserRequest::Flush => Kind::Status,
        };
        let (offset, len) = request.span();
        let (end, size_bytes) = (offset.saturating_add(len), self.attachment.size_bytes);
        // A flush has nothing to do, because each write is durable when it completes.
        let is_counted = !matches!(request, UserRequest::Flush);
        if is_counted {
            self.count(kind).requests.add(1);
            self.count(kind).bytes.add(len);
        }
        let refusal = match &self.phase {
            Phase::Attaching(_) => panic!("a request before the attachment is complete"),
            Phase::Ended(failure) => Some(failure.clone()),
            Phase::Serving if end > size_bytes => Some(Failure::OutOfBounds { end, size_bytes }),
            Phase::Serving => None,
        };
        if let Some(failure) = refusal {
            if is_counted {
                self.count(kind).failures.add(1);
            }
            self.outputs.push_back(Output::Complete { id, result: Err(failure) });
            return id;
        }
        let mut user = User {
            kind,
            request,
            end,
            lock: None,
            held: 0,
            pieces: Vec::new(),
            reads: Vec::new(),
            is_merged: false,
            segments: VecDeque::new(),
            parts: Vec::new(),
            failure: None,
            is_reported: false,
            deadline: self.io_timeout.map(|timeout| begun + timeout),
        };
        if len > 0 {
            self.plan(&mut user, offset, end);
        }
        let is_held = match &user.lock {
            Some(range) if !self.breaks(Rule::RangeLock) => self.locks.acquire(id.0, range),
            _ => true,
        };
        if let Some(at) = user.deadline {
            self.wakes.insert((at, Timer::User(id)));
        }
        self.users.insert(id, user);
        match is_held {
            true => self.runnable.push_back(id),
            false => self.counters.lock_waits.add(1),
        }
        self.run_users();
        id
    }

    /// Decides which blocks are locked, read and changed.
    fn plan(&self, user: &mut User, offset: u64, end: u64) {
        let blocks = offset / BLOCK..end.div_ceil(BLOCK);
        match &mut user.request {
            UserRequest::Read { .. } => user.reads.push(blocks),
            UserRequest::Status { .. } => {
                let blocks = self.status_blocks(&blocks);
                user.end = end.min(blocks.end * BLOCK);
                user.reads.push(blocks);
            }
            UserRequest::Flush => {}
            UserRequest::Discard { .. } => {
                let whole = offset.div_ceil(BLOCK)..end / BLOCK;
                if !whole.is_empty() {
                    let segment = Segment { blocks: whole.clone(), change: Change::Discard };
                    user.segments.push_back(segment);
                    user.lock = Some(whole);
                }
            }
            UserRequest::Write { .. } | UserRequest::Zero { .. }
                if !offset.is_multiple_of(BLOCK) || !end.is_multiple_of(BLOCK) =>
            {
                self.counters.merges.add(1);
                let last = blocks.end - 1;
                if !end.is_multiple_of(BLOCK) {
                    user.reads.push(last..blocks.end);
                }
                if !offset.is_multiple_of(BLOCK) && (user.reads.is_empty() || blocks.start < last) {
                    user.reads.push(blocks.start..blocks.start + 1);
                }
                user.is_merged = true;
                user.lock = Some(blocks);
            }
            UserRequest::Write { data, .. } => {
                user.segments.push_back(Segment::write(blocks.start, std::mem::take(data)));
                user.lock = Some(blocks);
            }
            UserRequest::Zero { .. } => {
                let segment = Segment { blocks: blocks.clone(), change: Change::Zero };
                user.segments.push_back(segment);
                user.lock = Some(blocks);
            }
        }
    }

    /// The part of the blocks that one status query covers. Regions without a group cost nothing.
    fn status_blocks(&self, blocks: &Range<u64>) -> Range<u64> {
        let mut at = blocks.start;
        let mut chunks = MAX_STATUS_CHUNKS;
        while at < blocks.end && chunks > 0 {
            let region = RegionIndex::of_block(at);
            match self.regions.get(&region).is_some_and(Region::has_group) {
                false => at = region.end(),
                true => {
                    at += u64::from(first_part(at, u64::MAX, CHUNK_BLOCKS).blocks);
                    chunks -= 1;
                }
            }
        }
        blocks.start..at.min(blocks.end)
    }

    /// Lets requests whose lock is held or whose pieces were answered go on.
    pub(super) fn run_users(&mut self) {
        while let Some(id) = self.runnable.pop_front() {
            while self.run_user(id) {}
        }
    }

    /// Makes the next piece of a request or reports its result. Returns whether there is more.
    fn run_user(&mut self, id: UserId) -> bool {
        let Some(user) = self.users.get_mut(&id).filter(|user| !user.is_reported) else {
            return false;
        };
        if user.failure.is_some() {
            return self.report_if_idle(id);
        }
        if user.pieces.len() >= MAX_PIECES {
            return false;
        }
        let kind = user.kind;
        if let Some(blocks) = user.reads.last_mut() {
            let states_only = kind == Kind::Status;
            let most = if states_only { CHUNK_BLOCKS } else { MAX_READ_BLOCKS };
            let region = RegionIndex::of_block(blocks.start);
            let range = first_part(blocks.start, blocks.end, most);
            let exists = self.regions.get(&region).is_some_and(Region::has_group);
            blocks.start = match exists {
                true => blocks.start + u64::from(range.blocks),
                false => region.end().min(blocks.end),
            };
            if blocks.is_empty() {
                user.reads.pop();
            }
            if exists {
                self.add_piece(id, kind, region, Work::Read { range, states_only, token: None });
            }
            return true;
        }
        if user.is_merged {
            if !user.pieces.is_empty() {
                return false;
            }
            user.is_merged = false;
            user.merge();
            return true;
        }
        let Some(segment) = user.segments.front_mut() else {
            return self.report_if_idle(id);
        };
        let first = segment.blocks.start;
        let region = RegionIndex::of_block(first);
        if matches!(segment.change, Change::Discard)
            && !self.regions.get(&region).is_some_and(Region::has_group)
        {
            segment.blocks.start = region.end().min(segment.blocks.end);
            if segment.blocks.is_empty() {
                user.segments.pop_front();
            }
            return true;
        }
        let most = match &segment.change {
            Change::Write { .. } => MAX_WRITE_BLOCKS,
            Change::Zero | Change::Discard => CHUNK_BLOCKS,
        };
        let range = first_part(first, segment.blocks.end, most);
        let change = segment.take(range.blocks);
        if segment.blocks.is_empty() {
            user.segments.pop_front();
        }
        self.add_piece(id, kind, region, Work::Change { range, change, number: None });
        true
    }

    fn add_piece(&mut self, user: UserId, kind: Kind, region: RegionIndex, work: Work) {
        self.last_piece += 1;
        let id = self.last_piece;
        self.pieces.insert(id, Piece::new(Some(user), kind, region, work, self.now));
        self.observe_later();
        if let Some(user) = self.users.get_mut(&user) {
            user.pieces.push(id);
        }
        self.start(id);
    }

    /// Takes the outcome of a piece that succeeded.
    pub(super) fn piece_done(&mut self, owner: Option<UserId>, piece: u64, part: Option<ReadPart>) {
        let Some(id) = owner else { return };
        let Some(user) = self.users.get_mut(&id) else { return };
        user.pieces.retain(|other| *other != piece);
        user.parts.extend(part);
        self.runnable.push_back(id);
    }

    /// Records that a piece failed. The others are awaited, and no more are made.
    pub(super) fn fail_user(&mut self, id: UserId, piece: u64, failure: Failure) {
        let Some(user) = self.users.get_mut(&id) else { return };
        user.pieces.retain(|other| *other != piece);
        user.failure.get_or_insert(failure);
        self.runnable.push_back(id);
    }

    /// Reports a request that has taken longer than the I/O timeout.
    pub(super) fn time_out(&mut self, id: UserId) {
        let Some(user) = self.users.get(&id) else { return };
        let wait = match user.pieces.first() {
            Some(piece) => self.wait_of(*piece),
            None => self.oldest_wait(),
        };
        self.timed_out(&wait);
        let Some(user) = self.users.get_mut(&id) else { return };
        user.deadline = None;
        user.failure = Some(Failure::TimedOut(wait));
        for piece in std::mem::take(&mut user.pieces) {
            if let Some(piece) = self.take_piece(piece) {
                self.piece_failed(id, &piece);
            }
        }
        self.report_if_idle(id);
    }

    /// Reports the result of a request without pieces. Returns false.
    fn report_if_idle(&mut self, id: UserId) -> bool {
        let Some(user) = self.users.get_mut(&id).filter(|user| user.pieces.is_empty()) else {
            return false;
        };
        user.is_reported = true;
        user.segments.clear();
        if let Some(at) = user.deadline.take() {
            self.wakes.remove(&(at, Timer::User(id)));
        }
        let result = match user.failure.take() {
            None => Ok(user.done()),
            Some(failure) => Err(failure),
        };
        // What it holds for longer is its range, not memory.
        user.request = UserRequest::Flush;
        user.parts.clear();
        let kind = user.kind;
        if result.is_err() {
            self.count(kind).failures.add(1);
        }
        self.outputs.push_back(Output::Complete { id, result });
        self.unlock_if_settled(id);
        false
    }

    /// Keeps the range of a request locked until the floor has passed one of its failed ops.
    pub(super) fn hold_range(&mut self, id: UserId) {
        if let Some(user) = self.users.get_mut(&id) {
            user.held += 1;
        }
    }

    /// Takes back one [`Session::hold_range`].
    pub(super) fn free_range(&mut self, id: UserId) {
        if let Some(user) = self.users.get_mut(&id) {
            user.held -= 1;
            self.unlock_if_settled(id);
        }
    }

    /// Removes a request that is reported and has no op that could still take effect.
    fn unlock_if_settled(&mut self, id: UserId) {
        if !self.users.get(&id).is_some_and(|user| user.is_reported && user.held == 0) {
            return;
        }
        let user = self.users.remove(&id).expect("found above");
        if let Some(range) = user.lock.filter(|_| !self.breaks(Rule::RangeLock)) {
            let mut granted = Vec::new();
            self.locks.release(id.0, &range, &mut granted);
            self.runnable.extend(granted.into_iter().map(UserId));
        }
    }
}

impl User {
    /// Makes the changes of a request that changes a block in part.
    fn merge(&mut self) {
        let (offset, len) = self.request.span();
        let parts = std::mem::take(&mut self.parts);
        let blocks = offset / BLOCK..(offset + len).div_ceil(BLOCK);
        let old = |block: u64| ReadPart::bytes_of(&parts, block * BLOCK, BLOCK);
        if let UserRequest::Write { data, .. } = &self.request {
            let mut merged = BytesMut::zeroed(((blocks.end - blocks.start) * BLOCK) as usize);
            let tail = merged.len() - BLOCK_BYTES;
            merged[..BLOCK_BYTES].copy_from_slice(&old(blocks.start));
            merged[tail..].copy_from_slice(&old(blocks.end - 1));
            let start = (offset - blocks.start * BLOCK) as usize;
            merged[start..start + data.len()].copy_from_slice(data);
            self.segments.push_back(Segment::write(blocks.start, merged.freeze()));
            return;
        }
        let whole = offset.div_ceil(BLOCK)..(offset + len) / BLOCK;
        let edge = |block: u64| {
            let mut merged = BytesMut::from(&old(block)[..]);
            let from = offset.saturating_sub(block * BLOCK).min(BLOCK) as usize;
            let to = (offset + len - block * BLOCK).min(BLOCK) as usize;
            merged[from..to].fill(0);
            Segment::write(block, merged.freeze())
        };
        if blocks.start < whole.start {
            self.segments.push_back(edge(blocks.start));
        }
        if !whole.is_empty() {
            self.segments.push_back(Segment { blocks: whole.clone(), change: Change::Zero });
        }
        // In one block, head and tail are the same edge.
        if whole.end < blocks.end && blocks.end > whole.start {
            self.segments.push_back(edge(blocks.end - 1));
        }
    }

    fn done(&mut self) -> Done {
        match self.request {
            UserRequest::Read { offset, len } => {
                Done::Read(ReadPart::bytes_of(&self.parts, offset, len))
            }
            UserRequest::Status { offset, .. } => {
                Done::Status(ReadPart::extents_of(&mut self.parts, offset, self.end))
            }
            _ => Done::Changed,
        }
    }
}
