//! Why bytes of a connection are refused.

use crate::fields::FieldError;
use crate::op::OpError;
use crate::request::ErrorCode;

/// Why a frame is refused. The connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The header does not have its checksum, or is of another connection.
    #[error("the header of a frame does not have its checksum")]
    HeaderChecksum,
    /// The meta does not have its checksum.
    #[error("the meta of a frame does not have its checksum")]
    MetaChecksum,
    /// The type is unknown, or is not sent in this direction of such a connection.
    #[error("frame type {0:#06x} is not accepted here")]
    Type(u16),
    /// A raft message of a type that does not come from the network.
    #[error("raft message type {0} is not accepted from a peer")]
    MessageType(u8),
    /// A field that a decoder of this version does not accept.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// An op is not valid, or one of its blocks does not have its checksum.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A block does not have its checksum.
    #[error("block {block} of a frame does not have its checksum")]
    Block {
        /// Number of the block in the frame's data.
        block: usize,
    },
}

impl WireError {
    pub(crate) fn field(field: &'static str, value: impl Into<u64>) -> Self {
        FieldError::Field { field, value: value.into() }.into()
    }

    /// The code that the other end is sent.
    pub fn code(self) -> ErrorCode {
        match self {
            Self::Block { .. } | Self::Op(OpError::Checksum { .. }) => ErrorCode::BadChecksum,
            _ => ErrorCode::BadFrame,
        }
    }
}
