//! A piece of a user's request: what one request to a server carries.

use std::time::Duration;

use super::map::RegionIndex;
use super::types::{ReadPart, UserId};
use crate::op::{BLOCK_BYTES, BlockRange, CHUNK_BLOCKS, Change, verify_blocks};
use crate::request::{Answer, BlockState};
use crate::types::{AttachEpoch, END_OF_NUMBERS, Index, Sequence, ServerId};

/// Without an answer after this time, a copy goes to the next replica. It doubles with each copy,
/// up to 16 times.
pub(super) const OP_PATIENCE: Duration = Duration::from_secs(1);
const READ_PATIENCE: Duration = Duration::from_millis(500);

/// A part of a request of the user, or an `Attach`, until it is answered or has failed.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) owner: Option<UserId>,
    pub(super) kind: Kind,
    pub(super) region: RegionIndex,
    pub(super) work: Work,
    /// When it was made.
    pub(super) begun: Duration,
    /// The copies that may still be answered, at most one per server.
    pub(super) copies: Vec<Copy>,
    /// The number of the next copy.
    pub(super) next_attempt: u32,
    /// Errors and closed connections.
    pub(super) failures: u32,
    /// `NotLeader` with a leader, in a row.
    pub(super) hints: u32,
    /// Copies that were sent because no answer had arrived, since the last error.
    pub(super) silences: u32,
    /// Servers that could not serve it since all of them were tried.
    pub(super) tried: Vec<ServerId>,
    /// Servers without a connection whose next one was tried at once, since the last back-off.
    pub(super) passed_over: Vec<ServerId>,
    /// Servers that have lost one of the blocks.
    pub(super) damaged: Vec<ServerId>,
    pub(super) wake: Option<(Duration, Wake)>,
    /// It waits for the answer to an `Attach`.
    pub(super) is_parked: bool,
}

/// What is done.
#[derive(Debug)]
pub(super) enum Work {
    /// The `Attach` of a group.
    Attach,
    /// A change, with its number once it has one.
    Change { range: BlockRange, change: Change, number: Option<Sequence> },
    /// A read, with the token of the moment when it was first sent.
    Read { range: BlockRange, states_only: bool, token: Option<Index> },
}

/// What is counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Attach,
    Write,
    Zero,
    Discard,
    Read,
    Status,
}

impl Kind {
    /// A request of this kind, as messages name it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Attach => "the attachment",
            Self::Write => "a write",
            Self::Zero => "zeroing",
            Self::Discard => "a discard",
            Self::Read => "a read",
            Self::Status => "a status query",
        }
    }
}

/// A copy of the request at a server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    pub(super) server: ServerId,
    pub(super) attempt: u32,
    pub(super) sent: Duration,
}

/// What happens to a piece at its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    /// A copy is sent to another replica, or the first one if there is none.
    Copy,
    /// It is sent to this server.
    Again(ServerId),
    /// It is sent to the server that is to be tried after this one.
    Next(ServerId),
}

/// What an answer means for its piece.
#[derive(Debug)]
pub(super) enum Verdict {
    /// The op is applied at the index, or was before.
    Applied(Index),
    /// The blocks as of at least the index.
    Blocks(Index, ReadPart),
    /// A block does not have its checksum.
    Damaged,
    /// It is no answer to this request.
    Invalid,
}

impl Piece {
    pub(super) fn new(
        owner: Option<UserId>,
        kind: Kind,
        region: RegionIndex,
        work: Work,
        begun: Duration,
    ) -> Self {
        Self {
            owner,
            kind,
            region,
            work,
            begun,
            copies: Vec::new(),
            next_attempt: 0,
            failures: 0,
            hints: 0,
            silences: 0,
            tried: Vec::new(),
            passed_over: Vec::new(),
            damaged: Vec::new(),
            wake: None,
            is_parked: false,
        }
    }

    /// Notes that a server could not serve it.
    pub(super) fn has_tried(&mut self, server: ServerId) {
        if !self.tried.contains(&server) {
            self.tried.push(server);
        }
    }

    pub(super) fn is_read(&self) -> bool {
        matches!(self.work, Work::Read { .. })
    }

    /// How long an answer is awaited before a copy goes to another replica.
    pub(super) fn patience(&self) -> Duration {
        let patience = if self.is_read() { READ_PATIENCE } else { OP_PATIENCE };
        patience * (1 << self.silences.min(4))
    }

    /// Checks an answer.
    pub(super) fn judge(&self, answer: Answer, epoch: AttachEpoch) -> Verdict {
        match (&self.work, answer) {
            (Work::Attach | Work::Change { number: Some(_), .. }, Answer::Op(answer)) => {
                match answer.epoch == epoch && (1..END_OF_NUMBERS).contains(&answer.index.0) {
                    true => Verdict::Applied(answer.index),
                    false => Verdict::Invalid,
                }
            }
            (Work::Read { range, states_only, token: Some(token) }, Answer::Read(answer)) => {
                let with_data = match states_only {
                    true => 0,
                    false => answer.states.iter().filter(|s| **s == BlockState::Data).count(),
                };
                if answer.states.len() != usize::from(range.blocks)
                    || answer.crcs.len() != with_data
                    || answer.data.len() != with_data * BLOCK_BYTES
                    || answer.applied < *token
                    || answer.applied.0 >= END_OF_NUMBERS
                {
                    return Verdict::Invalid;
                }
                if verify_blocks(&answer.data, &answer.crcs).is_err() {
                    return Verdict::Damaged;
                }
                let chunk = u64::from(range.chunk.0) * u64::from(CHUNK_BLOCKS);
                let first = chunk + u64::from(range.first);
                let part = ReadPart { first, states: answer.states, data: answer.data };
                Verdict::Blocks(answer.applied, part)
            }
            _ => Verdict::Invalid,
        }
    }
}
