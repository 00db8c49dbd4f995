//! Constants and headers of the protocol. Integers are big-endian.

use bytes::{Buf, BufMut};

/// Beginning of the server's greeting: `NBDMAGIC`.
pub(crate) const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Rest of the greeting, and beginning of each option: `IHAVEOPT`.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Beginning of a reply to an option.
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Beginning of a request.
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Beginning of a simple reply.
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Beginning of a chunk of a structured reply.
pub(crate) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Greatest payload of a request or reply, and greatest length of a read.
pub(crate) const MAX_PAYLOAD: u32 = 32 << 20;
/// Greatest length of a string.
pub(crate) const MAX_STRING: usize = 4096;
/// Minimum and preferred block sizes, as clients that ask for them get them.
pub(crate) const BLOCK_SIZES: [u32; 2] = [1, 4096];

/// `NBD_FLAG_FIXED_NEWSTYLE` of the server and `NBD_FLAG_C_FIXED_NEWSTYLE` of the client.
pub(crate) const FIXED_NEWSTYLE: u16 = 1 << 0;
/// `NBD_FLAG_NO_ZEROES` and `NBD_FLAG_C_NO_ZEROES`.
pub(crate) const NO_ZEROES: u16 = 1 << 1;

/// Transmission flags, `NBD_FLAG_*`.
pub(crate) mod transmission_flag {
    pub(crate) const HAS_FLAGS: u16 = 1 << 0;
    pub(crate) const READ_ONLY: u16 = 1 << 1;
    pub(crate) const SEND_FLUSH: u16 = 1 << 2;
    pub(crate) const SEND_FUA: u16 = 1 << 3;
    pub(crate) const SEND_TRIM: u16 = 1 << 5;
    pub(crate) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const SEND_DF: u16 = 1 << 7;
    pub(crate) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(crate) const SEND_CACHE: u16 = 1 << 10;
    pub(crate) const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Options, `NBD_OPT_*`.
pub(crate) mod option {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    #[cfg(any(test, fuzzing))]
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const LIST_META_CONTEXT: u32 = 9;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
}

/// Types of replies to options, `NBD_REP_*`. Errors have the highest bit set.
pub(crate) mod option_reply {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    pub(crate) const ERR_UNSUP: u32 = 1 << 31 | 1;
    pub(crate) const ERR_INVALID: u32 = 1 << 31 | 3;
    pub(crate) const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    pub(crate) const ERR_SHUTDOWN: u32 = 1 << 31 | 7;
    pub(crate) const ERR_TOO_BIG: u32 = 1 << 31 | 9;
}

/// Types of information about an export, `NBD_INFO_*`.
pub(crate) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const NAME: u16 = 1;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Flags of requests, `NBD_CMD_FLAG_*`.
pub(crate) mod command_flag {
    pub(crate) const FUA: u16 = 1 << 0;
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    pub(crate) const DF: u16 = 1 << 2;
    pub(crate) const REQ_ONE: u16 = 1 << 3;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
}

/// Types of chunks of a structured reply, `NBD_REPLY_TYPE_*`.
pub(crate) mod chunk {
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const OFFSET_HOLE: u16 = 2;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const ERROR: u16 = 1 << 15 | 1;
    pub(crate) const ERROR_OFFSET: u16 = 1 << 15 | 2;
}

/// `NBD_REPLY_FLAG_DONE`: the last chunk of a reply.
pub(crate) const DONE: u16 = 1 << 0;

/// The only metadata context, and its identifier.
pub(crate) const ALLOCATION_CONTEXT: &str = "base:allocation";
pub(crate) const ALLOCATION_CONTEXT_ID: u32 = 1;
/// `NBD_STATE_HOLE` and `NBD_STATE_ZERO` of that context.
pub(crate) const STATE_HOLE: u32 = 1 << 0;
pub(crate) const STATE_ZERO: u32 = 1 << 1;

/// Errors of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Errno {
    NotPermitted = 1,
    Io = 5,
    Invalid = 22,
    NoSpace = 28,
    Overflow = 75,
    NotSupported = 95,
    Shutdown = 108,
}

/// A type of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// `NBD_CMD_READ`
    Read,
    /// `NBD_CMD_WRITE`
    Write,
    /// `NBD_CMD_DISC`
    Disconnect,
    /// `NBD_CMD_FLUSH`
    Flush,
    /// `NBD_CMD_TRIM`
    Trim,
    /// `NBD_CMD_CACHE`
    Cache,
    /// `NBD_CMD_WRITE_ZEROES`
    WriteZeroes,
    /// `NBD_CMD_BLOCK_STATUS`
    BlockStatus,
}

impl Command {
    /// All commands, by their number in the protocol.
    pub const ALL: [Self; 8] = [
        Self::Read,
        Self::Write,
        Self::Disconnect,
        Self::Flush,
        Self::Trim,
        Self::Cache,
        Self::WriteZeroes,
        Self::BlockStatus,
    ];

    /// The name, as a metric's label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Disconnect => "disconnect",
            Self::Flush => "flush",
            Self::Trim => "trim",
            Self::Cache => "cache",
            Self::WriteZeroes => "write_zeroes",
            Self::BlockStatus => "block_status",
        }
    }
}

/// Size of a request without its payload.
pub(crate) const REQUEST_BYTES: usize = 28;

/// A request, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) flags: u16,
    pub(crate) kind: u16,
    pub(crate) cookie: u64,
    pub(crate) at: u64,
    pub(crate) len: u32,
}

impl Request {
    /// Decodes a request; `None` if it has another magic.
    pub(crate) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let mut bytes = bytes.as_slice();
        (bytes.get_u32() == REQUEST_MAGIC).then(|| Self {
            flags: bytes.get_u16(),
            kind: bytes.get_u16(),
            cookie: bytes.get_u64(),
            at: bytes.get_u64(),
            len: bytes.get_u32(),
        })
    }

    #[cfg(any(test, fuzzing))]
    pub(crate) fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        let mut to = &mut bytes[..];
        to.put_u32(REQUEST_MAGIC);
        to.put_u16(self.flags);
        to.put_u16(self.kind);
        to.put_u64(self.cookie);
        to.put_u64(self.at);
        to.put_u32(self.len);
        bytes
    }

    /// The command; `None` if it is unknown.
    pub(crate) fn command(&self) -> Option<Command> {
        Command::ALL.get(usize::from(self.kind)).copied()
    }
}

/// Appends the header of a chunk of a structured reply.
pub(crate) fn put_chunk(to: &mut impl BufMut, flags: u16, kind: u16, cookie: u64, len: u32) {
    to.put_u32(STRUCTURED_REPLY_MAGIC);
    to.put_u16(flags);
    to.put_u16(kind);
    to.put_u64(cookie);
    to.put_u32(len);
}

/// Appends a simple reply without data. `error` is 0 for success.
pub(crate) fn put_simple(to: &mut impl BufMut, error: u32, cookie: u64) {
    to.put_u32(SIMPLE_REPLY_MAGIC);
    to.put_u32(error);
    to.put_u64(cookie);
}

/// Appends the header of a reply to an option, and its data.
pub(crate) fn put_option_reply(to: &mut impl BufMut, option: u32, kind: u32, data: &[&[u8]]) {
    to.put_u64(OPTION_REPLY_MAGIC);
    to.put_u32(option);
    to.put_u32(kind);
    to.put_u32(data.iter().map(|part| part.len()).sum::<usize>() as u32);
    data.iter().for_each(|part| to.put_slice(part));
}
