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
    /// The parts so far, without a gap, and the number of the next part and of all parts.
    partial: Option<(Checkpoint, u32, u32)>,
}

impl Assembler {
    /// Adds the next record of the log if it is a part. Returns the checkpoint that it completes.
    pub fn push(&mut self, part: CheckpointPart) -> Option<Checkpoint> {
        let CheckpointPart { number, part, parts, groups } = part;
        let continued = self.partial.take().filter(|(checkpoint, next, of)| {
            let last = checkpoint.groups.last().map(|group| group.group);
            (checkpoint.number, *next, *of) == (number, part, parts)
                && groups.first().is_none_or(|first| last < Some(first.group))
        });
        let mut checkpoint = match continued {
            Some((checkpoint, ..)) => checkpoint,
            // The first part of another one; the one before it was cut short by a crash.
            None if part == 0 => Checkpoint { number, groups: Vec::new() },
            None => return None,
        };
        checkpoint.groups.extend(groups);
        if part + 1 == parts {
            return Some(checkpoint);
        }
        self.partial = Some((checkpoint, part + 1, parts));
        None
    }

    /// Another record, or damage, follows: a checkpoint of which parts are missing does not count.
    pub fn interrupt(&mut self) {
        self.partial = None;
    }
}
