//! The persisted state of a classic group: the members and assignments of its last complete
//! generation. Byte layout and crash argument: `docs/format/classic-group-state.md`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kafka_protocol::protocol::StrBytes;

use super::{Group, Migrant, Rules, State};
use crate::state_table::{Corrupt, Reader, Table, Writer};

const VERSION: u8 = 1;

const KIND_PERSISTED: u8 = 1;
const KIND_REMOVED: u8 = 2;

/// The persisted state: a complete generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::groups) struct PersistedGroup {
    generation: i32,
    protocol_type: StrBytes,
    protocol: StrBytes,
    leader: StrBytes,
    members: Vec<Migrant>,
}

impl<J, S> Group<J, S> {
    /// The state to persist; `None` without members or before the members have their assignments.
    pub(in crate::groups) fn persisted(&self) -> Option<PersistedGroup> {
        (self.state == State::Stable).then(|| PersistedGroup {
            generation: self.generation,
            protocol_type: self.protocol_type.clone().unwrap_or_default(),
            protocol: self.protocol.clone().unwrap_or_default(),
            leader: self.leader.clone().unwrap_or_default(),
            members: self.migrants(),
        })
    }

    /// Restores the group from its persisted state. Every member has a whole session timeout to
    /// send a request.
    pub(in crate::groups) fn from_persisted(
        rules: Rules,
        now: Instant,
        persisted: PersistedGroup,
    ) -> Self {
        let PersistedGroup { generation, protocol_type, protocol, leader, members } = persisted;
        let mut group = Self::stable(rules, now, generation, protocol_type, members);
        group.protocol = Some(protocol);
        group.leader = Some(leader);
        for member in group.members.values_mut() {
            member.was_active = false;
        }
        group
    }
}

impl PersistedGroup {
    /// Encodes the record that sets the persisted state of a group.
    pub(in crate::groups) fn encode(&self, group: &str) -> Bytes {
        let mut out = Writer::record(VERSION, KIND_PERSISTED, group);
        self.write(&mut out);
        out.into_record()
    }

    /// The length of [`Self::encode`]'s record, without building it: a group may be as large as the
    /// memory for all groups.
    pub(in crate::groups) fn record_bytes(&self, group: &str) -> usize {
        let text_bytes = |text: &str| size_of::<u16>() + text.len();
        let blob_bytes = |blob: &Bytes| size_of::<u32>() + blob.len();
        let protocol_bytes =
            |(name, metadata): &(StrBytes, Bytes)| text_bytes(name) + blob_bytes(metadata);
        let member_bytes = |member: &Migrant| {
            let instance_bytes = member.instance_id.as_ref().map_or(0, |id| text_bytes(id));
            let texts = [&member.member_id, &member.client_id, &member.client_host];
            let protocols_bytes: usize = member.protocols.iter().map(protocol_bytes).sum();
            size_of::<u8>()
                + instance_bytes
                + texts.iter().map(|text| text_bytes(text)).sum::<usize>()
                + 2 * size_of::<i32>()
                + size_of::<u32>()
                + protocols_bytes
                + blob_bytes(&member.assignment)
        };
        let texts = [&self.protocol_type, &self.protocol, &self.leader];
        2 * size_of::<u8>()
            + text_bytes(group)
            + size_of::<i32>()
            + texts.iter().map(|text| text_bytes(text)).sum::<usize>()
            + size_of::<u32>()
            + self.members.iter().map(member_bytes).sum::<usize>()
    }

    fn write(&self, out: &mut Writer) {
        out.i32(self.generation);
        out.str(&self.protocol_type);
        out.str(&self.protocol);
        out.str(&self.leader);
        out.list(&self.members, |out, member| {
            out.str(&member.member_id);
            out.opt(member.instance_id.as_deref());
            out.str(&member.client_id);
            out.str(&member.client_host);
            out.i32(millis(member.session_timeout));
            out.i32(millis(member.rebalance_timeout));
            out.list(&member.protocols, |out, (name, metadata)| {
                out.str(name);
                out.bytes(metadata);
            });
            out.bytes(&member.assignment);
        });
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, Corrupt> {
        Ok(Self {
            generation: reader.i32()?,
            protocol_type: text(reader)?,
            protocol: text(reader)?,
            leader: text(reader)?,
            members: reader.list(read_member)?,
        })
    }
}

/// Encodes the record that removes the persisted state of a group.
pub(in crate::groups) fn encode_removal(group: &str) -> Bytes {
    Writer::record(VERSION, KIND_REMOVED, group).into_record()
}

/// The protocol's unit and type for timeouts.
fn millis(timeout: Duration) -> i32 {
    i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX)
}

fn read_member(reader: &mut Reader<'_>) -> Result<Migrant, Corrupt> {
    Ok(Migrant {
        member_id: text(reader)?,
        instance_id: reader.opt()?.map(StrBytes::from_string),
        client_id: text(reader)?,
        client_host: text(reader)?,
        session_timeout: timeout(reader)?,
        rebalance_timeout: timeout(reader)?,
        protocols: reader.list(|reader| Ok((text(reader)?, bytes(reader)?)))?,
        assignment: bytes(reader)?,
    })
}

fn text(reader: &mut Reader<'_>) -> Result<StrBytes, Corrupt> {
    Ok(StrBytes::from_string(reader.str()?))
}

fn timeout(reader: &mut Reader<'_>) -> Result<Duration, Corrupt> {
    let millis = reader.i32()?;
    let millis = u64::try_from(millis);
    millis.map(Duration::from_millis).map_err(|_| Corrupt::new("negative timeout"))
}

fn bytes(reader: &mut Reader<'_>) -> Result<Bytes, Corrupt> {
    Ok(Bytes::copy_from_slice(reader.bytes()?))
}

/// The persisted states of all classic groups, by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PersistedGroups(pub(in crate::groups) BTreeMap<String, PersistedGroup>);

impl Table for PersistedGroups {
    const WHAT: &'static str = "members of classic groups";
    const AFTER_LOSS: &'static str =
        "existing groups have lost their members, and all members must join again";
    const CHECKPOINT: [u8; 4] = *b"ALGC";
    const QUARANTINE: [u8; 4] = *b"ALGD";
    const VERSION: u8 = VERSION;

    fn apply_encoded(&mut self, record: &[u8]) -> Result<(), Corrupt> {
        let mut reader = Reader::new(record);
        reader.version("record", VERSION)?;
        match reader.u8()? {
            KIND_PERSISTED => {
                let group = reader.str()?;
                let persisted = PersistedGroup::read(&mut reader)?;
                reader.end()?;
                self.0.insert(group, persisted);
            }
            KIND_REMOVED => {
                let group = reader.str()?;
                reader.end()?;
                self.0.remove(&group);
            }
            kind => return Err(Corrupt::unknown_kind(kind)),
        }
        Ok(())
    }

    /// What remains may be a generation that has ended.
    fn after_loss(&mut self) {
        self.0.clear();
    }

    fn write(&self, out: &mut Writer) {
        out.list(&self.0, |out, (name, persisted)| {
            out.str(name);
            persisted.write(out);
        });
    }

    fn read(reader: &mut Reader<'_>, _version: u8) -> Result<Self, Corrupt> {
        let groups = reader.list(|reader| Ok((reader.str()?, PersistedGroup::read(reader)?)))?;
        Ok(Self(groups.into_iter().collect()))
    }
}
