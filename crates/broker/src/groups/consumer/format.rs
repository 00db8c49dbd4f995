//! Records and checkpoint of the consumer groups' state. Byte layout and crash argument:
//! `docs/format/group-state.md`.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use uuid::Uuid;

use super::state::{
    Assignment, Change, Current, GroupState, Member, Profile, Progress, Since, partitions,
};
use crate::state_table::{Corrupt, Reader, Table, Writer};

const RECORD_VERSION: u8 = 1;

const KIND_CHANGED: u8 = 1;
const KIND_DELETED: u8 = 2;

const CHANGE_TOPICS: u8 = 1;
const CHANGE_JOINED: u8 = 2;
const CHANGE_REMOVED: u8 = 3;
const CHANGE_RENAMED: u8 = 4;
const CHANGE_TARGET: u8 = 5;
const CHANGE_TARGETED: u8 = 6;
const CHANGE_CURRENT: u8 = 7;

/// Size at which a record ends and another begins. A change is not split: the largest one names
/// each partition of a server once.
const RECORD_BYTES: usize = 64 << 10;

/// Encodes as many changes as fit in one record, and returns their number. `changes` is not empty.
pub(in crate::groups) fn encode_changes(group: &str, changes: &[Change]) -> (Bytes, usize) {
    let mut encoded = Writer::default();
    let mut count = 0;
    for change in changes {
        encode_change(&mut encoded, change);
        count += 1;
        if encoded.size_bytes() >= RECORD_BYTES {
            break;
        }
    }
    let mut out = Writer::record(RECORD_VERSION, KIND_CHANGED, group);
    out.len(count);
    out.raw(&encoded.into_bytes());
    (out.into_record(), count)
}

/// Encodes the record that a group is deleted.
pub(in crate::groups) fn encode_deletion(group: &str) -> Bytes {
    Writer::record(RECORD_VERSION, KIND_DELETED, group).into_record()
}

fn encode_change(out: &mut Writer, change: &Change) {
    match change {
        Change::Topics { group_epoch, hash } => {
            out.u8(CHANGE_TOPICS);
            out.i32(*group_epoch);
            out.u64(*hash);
        }
        Change::Joined { group_epoch, id, profile } => {
            out.u8(CHANGE_JOINED);
            out.i32(*group_epoch);
            out.str(id);
            encode_profile(out, profile);
        }
        Change::Removed { group_epoch, id } => {
            out.u8(CHANGE_REMOVED);
            out.i32(*group_epoch);
            out.str(id);
        }
        Change::Renamed { from, to } => {
            out.u8(CHANGE_RENAMED);
            out.str(from);
            out.str(to);
        }
        Change::Target { id, target } => {
            out.u8(CHANGE_TARGET);
            out.str(id);
            encode_assignment(out, target);
        }
        Change::Targeted { epoch } => {
            out.u8(CHANGE_TARGETED);
            out.i32(*epoch);
        }
        Change::Current { id, current } => {
            out.u8(CHANGE_CURRENT);
            out.str(id);
            encode_current(out, current);
        }
    }
}

fn decode_change(reader: &mut Reader<'_>) -> Result<Change, Corrupt> {
    Ok(match reader.u8()? {
        CHANGE_TOPICS => Change::Topics { group_epoch: reader.i32()?, hash: reader.u64()? },
        CHANGE_JOINED => Change::Joined {
            group_epoch: reader.i32()?,
            id: reader.str()?,
            profile: decode_profile(reader)?,
        },
        CHANGE_REMOVED => Change::Removed { group_epoch: reader.i32()?, id: reader.str()? },
        CHANGE_RENAMED => Change::Renamed { from: reader.str()?, to: reader.str()? },
        CHANGE_TARGET => Change::Target { id: reader.str()?, target: decode_assignment(reader)? },
        CHANGE_TARGETED => Change::Targeted { epoch: reader.i32()? },
        CHANGE_CURRENT => Change::Current { id: reader.str()?, current: decode_current(reader)? },
        kind => return Err(Corrupt::new(format!("unknown kind of change: {kind}"))),
    })
}

fn encode_profile(out: &mut Writer, profile: &Profile) {
    out.opt(profile.instance_id.as_deref());
    out.opt(profile.rack_id.as_deref());
    out.str(&profile.client_id);
    out.str(&profile.client_host);
    out.i32(profile.rebalance_timeout_ms);
    out.list(&profile.topics, |out, topic| out.str(topic));
    out.opt(profile.regex.as_deref());
    out.opt(profile.assignor.as_deref());
}

fn decode_profile(reader: &mut Reader<'_>) -> Result<Profile, Corrupt> {
    Ok(Profile {
        instance_id: reader.opt()?,
        rack_id: reader.opt()?,
        client_id: reader.str()?,
        client_host: reader.str()?,
        rebalance_timeout_ms: reader.i32()?,
        topics: reader.list(Reader::str)?.into_iter().collect(),
        regex: reader.opt()?,
        assignor: reader.opt()?,
    })
}

fn encode_assignment(out: &mut Writer, assignment: &Assignment) {
    out.list(assignment, |out, (topic, partitions)| {
        out.raw(topic.as_bytes());
        out.list(partitions, |out, partition| out.i32(*partition));
    });
}

fn decode_assignment(reader: &mut Reader<'_>) -> Result<Assignment, Corrupt> {
    let topics = reader.list(|reader| {
        let topic = Uuid::from_bytes(reader.array()?);
        let partitions: BTreeSet<i32> = reader.list(Reader::i32)?.into_iter().collect();
        Ok((topic, partitions))
    })?;
    Ok(topics.into_iter().collect())
}

fn encode_current(out: &mut Writer, current: &Current) {
    out.i32(current.epoch);
    out.i32(current.previous_epoch);
    out.u8(match current.progress {
        Progress::Stable => 0,
        Progress::Revoking => 1,
        Progress::Waiting => 2,
    });
    encode_assignment(out, &current.assigned);
    encode_assignment(out, &current.revoking);
}

fn decode_current(reader: &mut Reader<'_>) -> Result<Current, Corrupt> {
    Ok(Current {
        epoch: reader.i32()?,
        previous_epoch: reader.i32()?,
        progress: match reader.u8()? {
            0 => Progress::Stable,
            1 => Progress::Revoking,
            2 => Progress::Waiting,
            other => return Err(Corrupt::new(format!("unknown state of a member: {other}"))),
        },
        assigned: decode_assignment(reader)?,
        revoking: decode_assignment(reader)?,
    })
}

/// All groups, as rebuilt from the records.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupStates(pub(in crate::groups) BTreeMap<String, GroupState>);

impl Table for GroupStates {
    const WHAT: &'static str = "members of consumer groups";
    const AFTER_LOSS: &'static str =
        "existing groups have lost their members, and all members must join again";
    const CHECKPOINT: [u8; 4] = *b"ALGM";
    const QUARANTINE: [u8; 4] = *b"ALGN";
    /// Version 2 has the epoch in which members received their partitions.
    const VERSION: u8 = 2;
    const OLDEST_VERSION: u8 = 1;

    fn apply_encoded(&mut self, record: &[u8]) -> Result<(), Corrupt> {
        let mut reader = Reader::new(record);
        reader.version("record", RECORD_VERSION)?;
        match reader.u8()? {
            KIND_CHANGED => {
                let group = reader.str()?;
                let changes = reader.list(decode_change)?;
                reader.end()?;
                let state = self.0.entry(group).or_default();
                changes.iter().for_each(|change| state.apply(change));
            }
            KIND_DELETED => {
                let group = reader.str()?;
                reader.end()?;
                self.0.remove(&group);
            }
            kind => return Err(Corrupt::unknown_kind(kind)),
        }
        Ok(())
    }

    /// The remaining records of a group may give one partition to two members.
    fn after_loss(&mut self) {
        self.0.clear();
    }

    fn write(&self, out: &mut Writer) {
        out.list(&self.0, |out, (name, group)| {
            out.str(name);
            out.i32(group.epoch);
            out.u64(group.topics_hash);
            out.i32(group.target_epoch);
            out.list(&group.members, |out, (id, member)| {
                out.str(id);
                encode_profile(out, &member.profile);
                encode_current(out, &member.current);
                for partition in partitions(&member.current) {
                    out.i32(group.since(id, partition).unwrap_or(member.current.epoch));
                }
                encode_assignment(out, &member.target);
            });
        });
    }

    fn read(reader: &mut Reader<'_>, version: u8) -> Result<Self, Corrupt> {
        let groups = reader.list(|reader| {
            let name = reader.str()?;
            let mut group = GroupState {
                epoch: reader.i32()?,
                topics_hash: reader.u64()?,
                target_epoch: reader.i32()?,
                ..GroupState::default()
            };
            let members = reader.list(|reader| {
                let id = reader.str()?;
                let profile = decode_profile(reader)?;
                let current = decode_current(reader)?;
                let since = match version {
                    1 => Since::new(),
                    _ => partitions(&current)
                        .map(|partition| Ok((partition, reader.i32()?)))
                        .collect::<Result<_, Corrupt>>()?,
                };
                let target = decode_assignment(reader)?;
                Ok((id, Member { profile, current, target }, since))
            })?;
            for (id, member, since) in members {
                group.put(id.into(), member, &since);
            }
            Ok((name, group))
        })?;
        Ok(Self(groups.into_iter().collect()))
    }
}
