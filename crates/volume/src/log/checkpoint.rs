//! A checkpoint and its parts. A checkpoint of many groups takes several records; it counts only if
//! all of them are there, one after the other. `docs/format/volume-log.md`, section 3.

use super::group::GroupCheckpoint;
use super::record::{CHECKPOINT_BYTES, CheckpointPart};
use crate::types::CheckpointNumber;

/// A checkpoint of all groups of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its number.
    pub number: CheckpointNumber,
    /// The groups, in ascending order.
    pub groups: Vec<GroupCheckpoint>,
}

impl Checkpoint {
    /// Divides it into parts whose records are at most `max_bytes` long, or have one group. The
    /// records must be appended one after the other, with no other record in between.
    pub fn into_parts(self, max_bytes: usize) -> Vec<CheckpointPart> {
        let mut parts: Vec<Vec<GroupCheckpoint>> = vec![Vec::new()];
        let mut bytes = CHECKPOINT_BYTES;
        for group in self.groups {
            let more = group.encoded_bytes();
            let part = parts.last_mut().expect("begins with one");
            if bytes + more > max_bytes && !part.is_empty() {
                parts.push(vec![group]);
                bytes = CHECKPOINT_BYTES + more;
            } else {
                part.push(group);
                bytes += more;
            }
        }
        let count = u32::try_from(parts.len()).expect("a server has few groups");
        let number = self.number;
        (0..)
            .zip(parts)
            .map(|(part, groups)| CheckpointPart { number, part, parts: count, groups })
            .collect()
    }
}

/// Puts checkpoints together from the records of a log, in order.
#[derive(Debug, Default)]
pub struct Assembler {
    /// The parts so far, without a gap.
    partial: Option<(Checkpoint, u32)>,
}

impl Assembler {
    /// Adds the next record of the log if it is a part. Returns the checkpoint that it completes.
    pub fn push(&mut self, part: CheckpointPart) -> Option<Checkpoint> {
        let CheckpointPart { number, part, parts, groups } = part;
        let (mut checkpoint, expected) = match self.partial.take() {
            Some((checkpoint, next)) if checkpoint.number == number && next == part => {
                (checkpoint, next)
            }
            // The first part of another one; the one before it was cut short by a crash.
            _ => (Checkpoint { number, groups: Vec::new() }, 0),
        };
        if part != expected {
            return None;
        }
        checkpoint.groups.extend(groups);
        if part + 1 == parts {
            return Some(checkpoint);
        }
        self.partial = Some((checkpoint, part + 1));
        None
    }

    /// Another record, or damage, follows: a checkpoint of which parts are missing does not count.
    pub fn interrupt(&mut self) {
        self.partial = None;
    }
}
