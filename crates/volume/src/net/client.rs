//! Requests of clients and their answers as bytes, and the cost of a request.
//! `docs/format/volume-wire.md`, sections 7 and 8.

use bytes::Bytes;

use super::error::WireError;
use super::error_frame::{decode_error, error_frame};
use super::frame::{Blocks, Frame, FrameType, Header, Received};
use crate::fields::{Put, Reader};
use crate::op::{BlockRange, CHUNK_BLOCKS, MAX_CHUNKS, Op, OpError, verify_blocks};
use crate::request::{
    Answer, BlockState, ErrorCode, MAX_READ_BLOCKS, MAX_STATUS_ROWS, OpAnswer, ReadAnswer,
    ReadRequest, ReplicaState, ReplicaStatus, Request, RequestError, Role, StatusAnswer,
};
use crate::types::{
    AttachEpoch, CheckpointNumber, ChunkIndex, END_OF_NUMBERS, GroupId, Index, Layer, PeerId,
    ServerId, Term, VolumeId,
};

const STATUS_ROW_BYTES: usize = 88;
/// Flag of a read without checksums and data.
const FLAG_STATES_ONLY: u32 = 1;
/// Flag of the answer to an op that had taken effect before.
const FLAG_DUPLICATE: u32 = 1;
/// Flag of the answer to `Status`: more groups follow.
const FLAG_MORE: u32 = 1;

/// What each answer costs at least.
pub(super) const MIN_ANSWER_COST: usize = 1 << 10;
/// The cost of a block with its state and its checksum.
const BLOCK_COST: usize = 4104;
/// The cost of the largest answer.
pub(super) const MAX_ANSWER_COST: usize = MIN_ANSWER_COST + BLOCK_COST * MAX_READ_BLOCKS as usize;

/// The greatest number of bytes that a request has besides its frame: those of its answer.
pub(super) fn answer_cost(request: &Request) -> usize {
    match request {
        Request::Op { .. } => MIN_ANSWER_COST,
        Request::Read(ReadRequest { range, states_only, .. }) => {
            let each = if *states_only { 1 } else { BLOCK_COST };
            MIN_ANSWER_COST + each * usize::from(range.blocks)
        }
        Request::Status { .. } => 512 << 10,
    }
}

/// The cost of a request, of whose frame `frame_bytes` is the length. The costs of the unanswered
/// requests of a connection do not exceed its window.
pub fn request_cost(frame_bytes: usize, request: &Request) -> usize {
    frame_bytes + answer_cost(request)
}

/// Why a request is refused without being handed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It violates the protocol: the connection is closed.
    Connection(WireError),
    /// It is answered with an error.
    Request(RequestError),
}

impl<E: Into<WireError>> From<E> for Refused {
    fn from(error: E) -> Self {
        Self::Connection(error.into())
    }
}

/// Builds the frame of a request.
pub fn encode_request(request_id: u64, request: &Request) -> Frame {
    let mut frame;
    match request {
        Request::Op { group, op } => {
            frame = Frame::new(FrameType::Op, request_id);
            frame.meta().put_u64(group.0);
            frame.meta().extend(op.encode_head());
            frame.push_data(op.blocks());
        }
        Request::Read(read) => {
            frame = Frame::new(FrameType::Read, request_id);
            let meta = frame.meta();
            for field in [read.group.0, read.epoch.0, read.token.0] {
                meta.put_u64(field);
            }
            for field in [read.volume.0, read.layer.0, read.range.chunk.0] {
                meta.put_u32(field);
            }
            meta.put_u16(read.range.first);
            meta.put_u16(read.range.blocks);
            meta.put_u32(if read.states_only { FLAG_STATES_ONLY } else { 0 });
            meta.put_zeros(4);
        }
        Request::Status { group, after } => {
            frame = Frame::new(FrameType::Status, request_id);
            frame.meta().put_u64(group.map_or(0, |group| group.0));
            frame.meta().put_u64(after.0);
        }
    }
    frame
}

/// Decodes a request, with the checksums of its blocks.
///
/// # Errors
/// See [`Refused`].
pub fn decode_request(frame: &Received) -> Result<Request, Refused> {
    let reader = &mut Reader::new(&frame.meta);
    match frame.header.kind {
        FrameType::Op => decode_op(reader, &frame.data),
        FrameType::Read => Ok(Request::Read(read_read(reader)?)),
        FrameType::Status => {
            let (group, after) = (GroupId(reader.u64()?), GroupId(reader.u64()?));
            reader.end()?;
            Ok(Request::Status { group: (group.0 != 0).then_some(group), after })
        }
        other => Err(WireError::Type(other as u16).into()),
    }
}

fn decode_op(reader: &mut Reader<'_>, blocks: &Bytes) -> Result<Request, Refused> {
    let group = GroupId(reader.u64()?);
    if group.0 == 0 {
        return Err(WireError::field("group of an op", 0_u64).into());
    }
    let refuse = |code, error: OpError| {
        Err(Refused::Request(RequestError::new(code, group, error.to_string())))
    };
    let rest = reader.bytes(reader.rest())?;
    let reader = &mut Reader::new(&rest);
    let head_bytes = match Op::head_bytes(&rest) {
        Err(error @ OpError::Kind(_)) => return refuse(ErrorCode::Unsupported, error),
        head_bytes => head_bytes.map_err(WireError::from)?,
    };
    let head = reader.bytes(head_bytes)?;
    reader.end_padded()?;
    let op = Op::decode_parts(&head, blocks).map_err(WireError::from)?;
    match (&op, op.verify()) {
        (Op::Configuration(_), _) => {
            let text = "a client does not propose a configuration";
            let error = RequestError::new(ErrorCode::BadRequest, group, text);
            Err(Refused::Request(error))
        }
        (_, Ok(())) => Ok(Request::Op { group, op }),
        (_, Err(error)) => refuse(ErrorCode::BadChecksum, error),
    }
}

fn read_read(reader: &mut Reader<'_>) -> Result<ReadRequest, WireError> {
    let group = GroupId(reader.u64()?);
    let (epoch, token) = (AttachEpoch(reader.u64()?), Index(reader.u64()?));
    let (volume, layer) = (VolumeId(reader.u32()?), Layer(reader.u32()?));
    let chunk = ChunkIndex(reader.u32()?);
    let (first, blocks) = (reader.u16()?, reader.u16()?);
    let flags = reader.u32()?;
    reader.zeros::<4>()?;
    reader.end()?;
    if flags & !FLAG_STATES_ONLY != 0 {
        return Err(WireError::field("flags of a read", flags));
    }
    let states_only = flags & FLAG_STATES_ONLY != 0;
    let most = if states_only { CHUNK_BLOCKS } else { MAX_READ_BLOCKS };
    let is_valid = (1..=most).contains(&blocks)
        && u32::from(first) + u32::from(blocks) <= CHUNK_BLOCKS.into()
        && chunk.0 < MAX_CHUNKS
        && volume.0 != 0
        && group.0 != 0;
    if !is_valid {
        return Err(WireError::field("blocks of a read", blocks));
    }
    if epoch.0 >= END_OF_NUMBERS || token.0 >= END_OF_NUMBERS {
        return Err(WireError::field("token of a read", token.0));
    }
    let range = BlockRange { chunk, first, blocks };
    Ok(ReadRequest { group, epoch, token, volume, layer, range, states_only })
}

/// The type of the answer to a request.
pub fn answer_type(request: &Request) -> FrameType {
    match request {
        Request::Op { .. } => FrameType::OpAnswer,
        Request::Read(_) => FrameType::ReadAnswer,
        Request::Status { .. } => FrameType::StatusAnswer,
    }
}

/// Builds the frame of an answer of this type.
///
/// # Panics
/// The answer is of another type.
pub fn encode_answer(
    kind: FrameType,
    request_id: u64,
    answer: &Result<Answer, RequestError>,
) -> Frame {
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => return error_frame(kind, request_id, error),
    };
    let mut frame = Frame::new(kind, request_id);
    match answer {
        Answer::Op(answer) => {
            assert_eq!(kind, FrameType::OpAnswer, "an op is answered as one");
            frame.meta().put_u64(answer.index.0);
            frame.meta().put_u64(answer.epoch.0);
            frame.meta().put_u32(if answer.is_duplicate { FLAG_DUPLICATE } else { 0 });
            frame.meta().put_zeros(4);
        }
        Answer::Read(answer) => {
            assert_eq!(kind, FrameType::ReadAnswer, "a read is answered as one");
            put_read_answer(answer, frame.meta());
            frame.push_data(answer.data.clone());
        }
        Answer::Status(answer) => {
            assert_eq!(kind, FrameType::StatusAnswer, "a status request is answered as one");
            put_status(answer, frame.meta());
        }
    }
    frame
}

fn put_read_answer(answer: &ReadAnswer, meta: &mut Vec<u8>) {
    meta.put_u64(answer.applied.0);
    meta.put_u16(answer.states.len() as u16);
    meta.put_u16(answer.crcs.len() as u16);
    meta.put_zeros(4);
    meta.extend(answer.states.iter().map(|state| match state {
        BlockState::Absent => 0_u8,
        BlockState::Zeros => 1,
        BlockState::Data => 2,
    }));
    meta.put_zeros(answer.states.len().next_multiple_of(4) - answer.states.len());
    for crc in &answer.crcs {
        meta.put_u32(*crc);
    }
}

fn put_status(answer: &StatusAnswer, meta: &mut Vec<u8>) {
    assert!(answer.replicas.len() <= MAX_STATUS_ROWS, "a status has a bounded number of rows");
    meta.put_u32(answer.server.0);
    meta.put_u32(answer.replicas.len() as u32);
    meta.put_u64(answer.mark);
    meta.put_u32(answer.slots);
    meta.put_u32(answer.free_slots);
    meta.put_u64(answer.ring_bytes);
    meta.put_u64(answer.ring_used_bytes);
    meta.put_u64(answer.checkpoint.0);
    meta.put_u32(if answer.has_more { FLAG_MORE } else { 0 });
    meta.put_zeros(4);
    for row in &answer.replicas {
        for field in [row.group.0, row.peer.0, row.leader.0] {
            meta.put_u64(field);
        }
        meta.put_u32(row.leader_server.map_or(0, |server| server.0));
        meta.extend([row.role as u8, row.state as u8]);
        meta.put_zeros(2);
        meta.put_u64(row.term.0);
        for index in [row.last, row.commit, row.applied, row.durable_commit, row.base, row.barrier]
        {
            meta.put_u64(index.0);
        }
    }
}

/// What the answer to a request must agree with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// The answer to an op.
    Op,
    /// The answer to a read.
    Read {
        /// Number of blocks.
        blocks: u16,
        /// Without checksums and data.
        states_only: bool,
    },
    /// The answer to a request for the state.
    Status,
}

impl Expected {
    /// The answer that `request` expects.
    pub fn of(request: &Request) -> Self {
        match request {
            Request::Op { .. } => Self::Op,
            Request::Read(ReadRequest { range, states_only, .. }) => {
                Self::Read { blocks: range.blocks, states_only: *states_only }
            }
            Request::Status { .. } => Self::Status,
        }
    }

    /// Whether an answer with this header is for the request. It is checked before the body is
    /// read.
    pub fn is_answered_by(self, header: &Header) -> bool {
        header.kind
            == match self {
                Self::Op => FrameType::OpAnswer,
                Self::Read { .. } => FrameType::ReadAnswer,
                Self::Status => FrameType::StatusAnswer,
            }
    }
}

/// Decodes the answer to a request. A block that does not have its checksum makes it the error
/// `Damaged`.
///
/// # Errors
/// The answer violates the protocol, or is not one to the request.
pub fn decode_answer(
    frame: &Received,
    expected: Expected,
) -> Result<Result<Answer, RequestError>, WireError> {
    if !expected.is_answered_by(&frame.header) {
        return Err(WireError::Type(frame.header.kind as u16));
    }
    if frame.header.is_error {
        return decode_error(frame).map(Err);
    }
    let reader = &mut Reader::new(&frame.meta);
    match expected {
        Expected::Op => {
            let (index, epoch) = (Index(reader.u64()?), AttachEpoch(reader.u64()?));
            let flags = reader.u32()?;
            reader.zeros::<4>()?;
            reader.end()?;
            if flags & !FLAG_DUPLICATE != 0 || index.0.max(epoch.0) >= END_OF_NUMBERS {
                return Err(WireError::field("flags of an answer", flags));
            }
            let is_duplicate = flags & FLAG_DUPLICATE != 0;
            Ok(Ok(Answer::Op(OpAnswer { index, epoch, is_duplicate })))
        }
        Expected::Read { blocks, states_only } => {
            let answer = read_read_answer(reader, &frame.data, blocks, states_only)?;
            Ok(match verify_blocks(&answer.data, &answer.crcs) {
                Ok(()) => Ok(Answer::Read(answer)),
                Err(block) => {
                    let text = format!("data block {block} of the answer lacks its checksum");
                    Err(RequestError::new(ErrorCode::Damaged, GroupId(0), text))
                }
            })
        }
        Expected::Status => Ok(Ok(Answer::Status(read_status(reader)?))),
    }
}

fn read_read_answer(
    reader: &mut Reader<'_>,
    data: &Bytes,
    expected_blocks: u16,
    states_only: bool,
) -> Result<ReadAnswer, WireError> {
    let applied = Index(reader.u64()?);
    let (blocks, data_blocks) = (reader.u16()?, reader.u16()?);
    reader.zeros::<4>()?;
    if blocks != expected_blocks || applied.0 >= END_OF_NUMBERS {
        return Err(WireError::field("blocks of an answer", blocks));
    }
    let states = reader.bytes(blocks.into())?;
    let states = states.iter().map(|state| match state {
        0 => Ok(BlockState::Absent),
        1 => Ok(BlockState::Zeros),
        2 => Ok(BlockState::Data),
        other => Err(WireError::field("state of a block", *other)),
    });
    let states: Vec<_> = states.collect::<Result<_, _>>()?;
    if reader.bytes(states.len().next_multiple_of(4) - states.len())?.iter().any(|b| *b != 0) {
        return Err(WireError::field("padding of an answer", blocks));
    }
    let with_data = states.iter().filter(|state| **state == BlockState::Data).count();
    if usize::from(data_blocks) != if states_only { 0 } else { with_data } {
        return Err(WireError::field("data blocks of an answer", data_blocks));
    }
    reader.check_count(data_blocks.into(), 4)?;
    let crcs = (0..data_blocks).map(|_| reader.u32()).collect::<Result<_, _>>()?;
    reader.end_padded()?;
    let mut rest = Blocks(data.clone());
    let data = rest.take(data_blocks)?;
    rest.end()?;
    Ok(ReadAnswer { applied, states, crcs, data })
}

fn read_status(reader: &mut Reader<'_>) -> Result<StatusAnswer, WireError> {
    let (server, rows) = (ServerId(reader.u32()?), reader.u32()? as usize);
    let mark = reader.u64()?;
    let (slots, free_slots) = (reader.u32()?, reader.u32()?);
    let (ring_bytes, ring_used_bytes) = (reader.u64()?, reader.u64()?);
    let (checkpoint, flags) = (CheckpointNumber(reader.u64()?), reader.u32()?);
    reader.zeros::<4>()?;
    if flags & !FLAG_MORE != 0 || rows > MAX_STATUS_ROWS {
        return Err(WireError::field("rows of a status", rows as u64));
    }
    reader.check_count(rows, STATUS_ROW_BYTES)?;
    let replicas: Vec<_> =
        (0..rows).map(|_| read_status_row(reader)).collect::<Result<_, WireError>>()?;
    reader.end()?;
    if !replicas.is_sorted_by(|a, b| a.group < b.group) {
        return Err(WireError::field("order of a status with rows", rows as u64));
    }
    let has_more = flags & FLAG_MORE != 0;
    Ok(StatusAnswer {
        server,
        mark,
        slots,
        free_slots,
        ring_bytes,
        ring_used_bytes,
        checkpoint,
        has_more,
        replicas,
    })
}

const ROLES: [Role; 4] = [Role::Follower, Role::Candidate, Role::Leader, Role::Learner];
const STATES: [ReplicaState; 6] = [
    ReplicaState::Exact,
    ReplicaState::Replaying,
    ReplicaState::Installing,
    ReplicaState::Lost,
    ReplicaState::Stopped,
    ReplicaState::Creating,
];

fn read_status_row(reader: &mut Reader<'_>) -> Result<ReplicaStatus, WireError> {
    let (group, peer, leader) = (reader.u64()?, reader.u64()?, reader.u64()?);
    let leader_server = reader.u32()?;
    let (role, state) = (reader.u8()?, reader.u8()?);
    reader.zeros::<2>()?;
    let valid = ROLES.get(usize::from(role)).zip(STATES.get(usize::from(state)));
    let (role, state) = valid.ok_or_else(|| WireError::field("state of a replica", state))?;
    if group == 0 || peer == 0 {
        return Err(WireError::field("group or peer of a status", group));
    }
    Ok(ReplicaStatus {
        group: GroupId(group),
        peer: PeerId(peer),
        leader: PeerId(leader),
        leader_server: (leader_server != 0).then_some(ServerId(leader_server)),
        role: *role,
        state: *state,
        term: Term(reader.u64()?),
        last: Index(reader.u64()?),
        commit: Index(reader.u64()?),
        applied: Index(reader.u64()?),
        durable_commit: Index(reader.u64()?),
        base: Index(reader.u64()?),
        barrier: Index(reader.u64()?),
    })
}
