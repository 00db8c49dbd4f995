//! Frames: the header with its checksums and bounds, and the buffers of a frame. A frame's meta is
//! small and encoded; its data are blocks that are never copied.
//! `docs/format/volume-wire.md`, sections 3 and 4.

use bytes::Bytes;

use super::error::WireError;
use crate::fields::{Put, Reader};
use crate::op::BLOCK_BYTES;

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 32;
/// Greatest length of a frame's meta.
pub const MAX_META_BYTES: usize = 512 << 10;
/// Greatest length of a frame's data.
pub const MAX_DATA_BYTES: usize = 1 << 20;

const FLAG_ERROR: u16 = 1;

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum ConnectionRole {
    /// Raft messages of the dialer.
    Peer = 1,
    /// Requests of a gateway or a tool.
    Client = 2,
    /// One pull.
    Pull = 3,
}

impl ConnectionRole {
    /// The role with this number.
    pub fn from_number(number: u16) -> Option<Self> {
        [Self::Peer, Self::Client, Self::Pull].into_iter().find(|role| *role as u16 == number)
    }
}

/// The end of a connection that receives a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The end that has opened the connection.
    Dialer,
    /// The end that has accepted it.
    Acceptor,
}

/// The random number of a connection. It is part of each header's checksum, so that a frame of
/// another connection is not accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionId(pub [u8; 8]);

/// Defines the frame types, whose numbers are never reused.
macro_rules! frame_types {
    ($($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        /// The type of a frame.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum FrameType {
            $($(#[$doc])* $name = $number,)*
        }

        impl FrameType {
            /// All types.
            pub const ALL: &[Self] = &[$(Self::$name),*];
        }
    };
}

frame_types! {
    /// The end of a connection, with its reason.
    Close = 0x0001,
    /// A question whether the other end is there.
    Ping = 0x0002,
    /// The answer to a `Ping`.
    Pong = 0x8002,
    /// Raft messages that are no heartbeats.
    Raft = 0x0010,
    /// Heartbeats of leaders.
    Heartbeats = 0x0011,
    /// Responses to heartbeats.
    HeartbeatResponses = 0x0012,
    /// Peers that are gone.
    Gone = 0x0013,
    /// A leader offers a pull.
    PullOffer = 0x0014,
    /// A target states what its leader is to keep in memory.
    PullPin = 0x0015,
    /// A target has pulled everything.
    Pulled = 0x0016,
    /// A request to propose an op.
    Op = 0x0020,
    /// The answer to an `Op`.
    OpAnswer = 0x8020,
    /// A request to read blocks.
    Read = 0x0021,
    /// The answer to a `Read`.
    ReadAnswer = 0x8021,
    /// A request for the state of a server.
    Status = 0x0022,
    /// The answer to a `Status`.
    StatusAnswer = 0x8022,
    /// A request for the blocks of a replica.
    Pull = 0x0030,
    /// The beginning of the stream of a pull.
    PullBegin = 0x8030,
    /// Volumes, as of the beginning.
    PullState = 0x8031,
    /// Blocks.
    PullBatch = 0x8032,
    /// The end of the stream of a pull.
    PullEnd = 0x8033,
}

impl FrameType {
    /// The type with this number.
    pub fn from_number(number: u16) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| *kind as u16 == number)
    }

    /// Whether `side` of a connection with this role may receive the type.
    pub fn is_received_by(self, role: ConnectionRole, side: Side) -> bool {
        use FrameType::{
            Close, Gone, HeartbeatResponses, Heartbeats, Op, OpAnswer, Ping, Pong, Pull, PullBatch,
            PullBegin, PullEnd, PullOffer, PullPin, PullState, Pulled, Raft, Read, ReadAnswer,
            Status, StatusAnswer,
        };
        match (self, side) {
            (Close, _) | (Ping, Side::Acceptor) | (Pong, Side::Dialer) => true,
            (Ping, Side::Dialer) | (Pong, Side::Acceptor) => false,
            (
                Raft | Heartbeats | HeartbeatResponses | Gone | PullOffer | PullPin | Pulled,
                side,
            ) => (role, side) == (ConnectionRole::Peer, Side::Acceptor),
            (Op | Read | Status, side) => (role, side) == (ConnectionRole::Client, Side::Acceptor),
            (OpAnswer | ReadAnswer | StatusAnswer, side) => {
                (role, side) == (ConnectionRole::Client, Side::Dialer)
            }
            (Pull, side) => (role, side) == (ConnectionRole::Pull, Side::Acceptor),
            (PullBegin | PullState | PullBatch | PullEnd, side) => {
                (role, side) == (ConnectionRole::Pull, Side::Dialer)
            }
        }
    }

    fn has_meta(self) -> bool {
        !matches!(self, Self::Ping | Self::Pong)
    }

    fn has_data(self) -> bool {
        matches!(self, Self::Raft | Self::Op | Self::ReadAnswer | Self::PullBatch)
    }

    /// Whether a frame of this type may have an error as its meta.
    fn may_be_error(self) -> bool {
        matches!(
            self,
            Self::Close | Self::OpAnswer | Self::ReadAnswer | Self::StatusAnswer | Self::PullEnd
        )
    }

    /// Whether frames of this type have a request id.
    fn has_request_id(self) -> bool {
        matches!(
            self,
            Self::Ping
                | Self::Pong
                | Self::Op
                | Self::OpAnswer
                | Self::Read
                | Self::ReadAnswer
                | Self::Status
                | Self::StatusAnswer
        )
    }
}

/// A frame to send.
#[derive(Clone, Debug)]
pub struct Frame {
    kind: FrameType,
    is_error: bool,
    request_id: u64,
    /// Space for the header, then the meta without padding.
    bytes: Vec<u8>,
    data: Vec<Bytes>,
    data_bytes: usize,
}

impl Frame {
    pub(crate) fn new(kind: FrameType, request_id: u64) -> Self {
        let bytes = vec![0; HEADER_BYTES];
        Self { kind, is_error: false, request_id, bytes, data: Vec::new(), data_bytes: 0 }
    }

    /// A frame whose meta is an error, which the caller appends.
    pub(crate) fn error(kind: FrameType, request_id: u64) -> Self {
        Self { is_error: true, ..Self::new(kind, request_id) }
    }

    /// The question whether the other end is there.
    pub fn ping(request_id: u64) -> Self {
        Self::new(FrameType::Ping, request_id)
    }

    /// The answer to a `Ping`.
    pub fn pong(request_id: u64) -> Self {
        Self::new(FrameType::Pong, request_id)
    }

    /// Makes it the frame of another request.
    #[must_use]
    pub(crate) fn with_request_id(self, request_id: u64) -> Self {
        Self { request_id, ..self }
    }

    /// The buffer to which the fields of the meta are appended.
    pub(crate) fn meta(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// The length of the meta so far, without padding.
    pub(crate) fn meta_bytes(&self) -> usize {
        self.bytes.len() - HEADER_BYTES
    }

    /// Appends blocks to the data.
    pub(crate) fn push_data(&mut self, blocks: Bytes) {
        self.data_bytes += blocks.len();
        if !blocks.is_empty() {
            self.data.push(blocks);
        }
    }

    /// The length of the data so far.
    pub(crate) fn data_bytes(&self) -> usize {
        self.data_bytes
    }

    /// The type.
    pub fn kind(&self) -> FrameType {
        self.kind
    }

    /// The request id.
    pub fn request_id(&self) -> u64 {
        self.request_id
    }

    /// The length of the frame as sent.
    pub fn wire_bytes(&self) -> usize {
        self.bytes.len().next_multiple_of(8) + self.data_bytes
    }

    /// Encodes the frame as a list of buffers, of which the first has header and meta.
    pub fn encode(mut self, connection: ConnectionId) -> Vec<Bytes> {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        let meta_bytes = self.bytes.len() - HEADER_BYTES;
        // A receiver would close the connection.
        assert!(meta_bytes <= MAX_META_BYTES, "the meta of a frame is small");
        assert!(self.data_bytes <= MAX_DATA_BYTES, "the data of a frame are bounded");
        assert!(self.data_bytes.is_multiple_of(BLOCK_BYTES), "the data of a frame are blocks");
        let meta_crc =
            if meta_bytes == 0 { 0 } else { crc32c::crc32c(&self.bytes[HEADER_BYTES..]) };
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.put_u16(self.kind as u16);
        header.put_u16(if self.is_error { FLAG_ERROR } else { 0 });
        header.put_u32(meta_bytes as u32);
        header.put_u32(self.data_bytes as u32);
        header.put_zeros(4);
        header.put_u64(self.request_id);
        header.put_u32(meta_crc);
        header.put_u32(header_crc(connection, &header));
        self.bytes[..HEADER_BYTES].copy_from_slice(&header);
        let mut buffers = Vec::with_capacity(1 + self.data.len());
        buffers.push(self.bytes.into());
        buffers.extend(self.data);
        buffers
    }
}

fn header_crc(connection: ConnectionId, header: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&connection.0), header)
}

/// A header that has been verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The type.
    pub kind: FrameType,
    /// Whether the meta is an error.
    pub is_error: bool,
    /// Length of the meta.
    pub meta_bytes: usize,
    /// Length of the data.
    pub data_bytes: usize,
    /// The request id.
    pub request_id: u64,
    meta_crc: u32,
}

impl Header {
    /// Verifies and parses the header of a frame that `side` of a connection receives.
    ///
    /// # Errors
    /// The checksum is wrong, or a field is out of the bounds of the type. Nothing else can be read
    /// from the connection.
    pub fn decode(
        bytes: &[u8; HEADER_BYTES],
        connection: ConnectionId,
        role: ConnectionRole,
        side: Side,
    ) -> Result<Self, WireError> {
        let (fields, crc) = bytes.split_at(HEADER_BYTES - 4);
        if header_crc(connection, fields).to_le_bytes() != crc {
            return Err(WireError::HeaderChecksum);
        }
        Self::decode_fields(fields, role, side)
    }

    /// Parses what precedes the checksum.
    pub(crate) fn decode_fields(
        fields: &[u8],
        role: ConnectionRole,
        side: Side,
    ) -> Result<Self, WireError> {
        let fields = &Bytes::copy_from_slice(fields);
        let reader = &mut Reader::new(fields);
        let number = reader.u16()?;
        let kind = FrameType::from_number(number).ok_or(WireError::Type(number))?;
        if !kind.is_received_by(role, side) {
            return Err(WireError::Type(number));
        }
        let flags = reader.u16()?;
        let is_error = flags == FLAG_ERROR;
        let (meta, data) = (reader.u32()?, reader.u32()?);
        reader.zeros::<4>()?;
        let (request_id, meta_crc) = (reader.u64()?, reader.u32()?);
        reader.end()?;
        let is_flag_valid =
            if is_error { kind.may_be_error() } else { flags == 0 && kind != FrameType::Close };
        if !is_flag_valid {
            return Err(WireError::field("flags of a frame", flags));
        }
        let (meta_bytes, data_bytes) = (meta as usize, data as usize);
        if meta_bytes > MAX_META_BYTES
            || !meta_bytes.is_multiple_of(8)
            || (meta_bytes == 0) == kind.has_meta()
        {
            return Err(WireError::field("meta length", meta));
        }
        if data_bytes > MAX_DATA_BYTES
            || !data_bytes.is_multiple_of(BLOCK_BYTES)
            || (data_bytes > 0 && (is_error || !kind.has_data()))
        {
            return Err(WireError::field("data length", data));
        }
        if request_id != 0 && !kind.has_request_id() {
            return Err(WireError::field("request id", request_id));
        }
        if meta_bytes == 0 && meta_crc != 0 {
            return Err(WireError::field("meta checksum", meta_crc));
        }
        Ok(Self { kind, is_error, meta_bytes, data_bytes, request_id, meta_crc })
    }

    /// Length of the frame as received.
    pub fn wire_bytes(&self) -> usize {
        HEADER_BYTES + self.meta_bytes + self.data_bytes
    }

    /// The frame of this header. The data are empty if they were read and not kept.
    ///
    /// # Errors
    /// The meta does not have its checksum. The blocks are verified with the fields that have their
    /// checksums.
    pub fn with_body(self, meta: Bytes, data: Bytes) -> Result<Received, WireError> {
        assert_eq!(meta.len(), self.meta_bytes, "the whole meta was read");
        match meta.is_empty() || crc32c::crc32c(&meta) == self.meta_crc {
            true => Ok(Received { header: self, meta, data }),
            false => Err(WireError::MetaChecksum),
        }
    }
}

/// A frame that was received, with verified header and meta.
#[derive(Clone, Debug)]
pub struct Received {
    /// The header.
    pub header: Header,
    pub(crate) meta: Bytes,
    pub(crate) data: Bytes,
}

impl Received {
    /// Parses the first frame of `bytes`, and returns what follows it.
    #[cfg(test)]
    pub(crate) fn parse(
        bytes: &Bytes,
        connection: ConnectionId,
        role: ConnectionRole,
        side: Side,
    ) -> Result<(Self, Bytes), WireError> {
        let short = crate::FieldError::Length { len: bytes.len() };
        let header = bytes.first_chunk().ok_or(short)?;
        let header = Header::decode(header, connection, role, side)?;
        if bytes.len() < header.wire_bytes() {
            return Err(short.into());
        }
        let data_at = HEADER_BYTES + header.meta_bytes;
        let end = header.wire_bytes();
        let (meta, data) = (bytes.slice(HEADER_BYTES..data_at), bytes.slice(data_at..end));
        Ok((header.with_body(meta, data)?, bytes.slice(end..)))
    }
}

/// The data of a frame, taken from the front.
pub(crate) struct Blocks(pub(crate) Bytes);

impl Blocks {
    /// The next `count` blocks.
    pub(crate) fn take(&mut self, count: u16) -> Result<Bytes, WireError> {
        let bytes = usize::from(count) * BLOCK_BYTES;
        match bytes <= self.0.len() {
            true => Ok(self.0.split_to(bytes)),
            false => Err(WireError::field("blocks", count)),
        }
    }

    /// Refuses blocks that no field accounts for.
    pub(crate) fn end(&self) -> Result<(), WireError> {
        match self.0.len() / BLOCK_BYTES {
            0 => Ok(()),
            rest => Err(WireError::field("blocks that are not accounted for", rest as u64)),
        }
    }
}
