//! Raft messages as bytes, and the checks that need no state of a replica.
//! `docs/format/volume-wire.md`, section 9.

use bytes::Bytes;
use raft::eraftpb::{self, EntryType, Message, MessageType};

use super::error::WireError;
use super::frame::{Blocks, Frame, FrameType, MAX_DATA_BYTES, MAX_META_BYTES, Received};
use crate::fields::{FieldError, Put, Reader};
use crate::op::{BLOCK_BYTES, MAX_WRITE_BLOCKS, Op, OpError};
use crate::raft::{conf_from_raft, conf_to_raft};
use crate::types::{ConfState, END_OF_NUMBERS, GroupId, PeerId};

/// Greatest number of entries of an append in a frame.
pub const MAX_APPEND_ENTRIES: usize = 4096;
/// Greatest number of ids of a configuration.
pub const MAX_CONFIGURATION_IDS: usize = 64;

const MESSAGE_BYTES: usize = 80;
const ENTRY_BYTES: usize = 16;
const HEARTBEAT_BYTES: usize = 40;
/// The longest head of an op: that of a write.
const MAX_OP_HEAD_BYTES: usize = 40 + 4 * MAX_WRITE_BLOCKS as usize;

const FLAG_STALLED: u32 = 1;
const FLAG_DROPS_ENTRIES: u32 = 2;

const FLAG_REJECT: u8 = 1;
const FLAG_TRANSFER: u8 = 2;

/// The context with which raft marks a vote that a transfer of leadership has started.
const CAMPAIGN_TRANSFER: &[u8] = b"CampaignTransfer";

/// A raft message and its group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupMessage {
    /// The group.
    pub group: GroupId,
    /// The message.
    pub message: Message,
}

/// What each frame of messages states about its sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderState {
    /// Free slots of its store.
    pub free_slots: u32,
    /// One of its devices has completed nothing for ten ticks: it leads no group.
    pub is_stalled: bool,
    /// It drops appends with entries.
    pub drops_entries: bool,
}

/// An append that was dropped because the kind of an op is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownOp {
    /// The group.
    pub group: GroupId,
    /// The sender.
    pub from: PeerId,
    /// The kind.
    pub kind: u8,
}

/// A frame of raft messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Messages {
    /// About the sender.
    pub sender: SenderState,
    /// The messages, in the order in which they were sent.
    pub messages: Vec<GroupMessage>,
    /// Appends that are not among them because of an unknown op.
    pub unknown_ops: Vec<UnknownOp>,
    /// Appends that are not among them because the receiver drops entries.
    pub dropped: usize,
}

/// Why a raft message cannot be sent. It is dropped, and indicates a defect of its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnsendableMessage {
    /// Messages of this type are local.
    #[error("raft message type {0} is not sent to peers")]
    Type(i32),
    /// A field has no bytes in the protocol.
    #[error("the {0} of a raft message cannot be sent")]
    Field(&'static str),
}

/// What a receiver does with entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entries {
    /// They are decoded and verified.
    Keep,
    /// Appends with entries are dropped. The frame's data may be missing.
    Drop,
}

/// The type of the frame that carries a message.
///
/// # Errors
/// The message is local, or has something that the protocol does not carry.
pub fn check_sendable(message: &GroupMessage) -> Result<FrameType, UnsendableMessage> {
    let GroupMessage { group, message } = message;
    let field = |is_valid: bool, field| match is_valid {
        true => Ok(()),
        false => Err(UnsendableMessage::Field(field)),
    };
    let kind = message.get_msg_type();
    let frame = match kind {
        MessageType::MsgHeartbeat => FrameType::Heartbeats,
        MessageType::MsgHeartbeatResponse => FrameType::HeartbeatResponses,
        _ if Used::by(kind).is_some() => FrameType::Raft,
        _ => return Err(UnsendableMessage::Type(kind as i32)),
    };
    field(group.0 != 0 && message.from != 0 && message.to != 0, "group or peer")?;
    field((1..END_OF_NUMBERS).contains(&message.term), "term")?;
    let is_transfer = message.context == CAMPAIGN_TRANSFER;
    let used = Used::by(kind).unwrap_or_default();
    field(message.context.is_empty() || (is_transfer && used.transfer), "context")?;
    field(message.request_snapshot == 0, "requested snapshot")?;
    field(message.priority == 0 && message.deprecated_priority == 0, "priority")?;
    let numbers = [message.log_term, message.index, message.commit];
    let numbers = numbers.into_iter().chain([message.commit_term, message.reject_hint]);
    field(numbers.max() < Some(END_OF_NUMBERS), "position")?;
    match kind {
        MessageType::MsgAppend => {
            for entry in &message.entries {
                let blocks = entry.context.len();
                let is_valid = entry.get_entry_type() != EntryType::EntryConfChange
                    && entry.data.len() <= MAX_OP_HEAD_BYTES
                    && blocks.is_multiple_of(BLOCK_BYTES)
                    && blocks <= MAX_DATA_BYTES;
                field(is_valid, "entry")?;
            }
            field(message.index + (message.entries.len() as u64) < END_OF_NUMBERS, "index")?;
        }
        MessageType::MsgSnapshot => {
            let snapshot = message.get_snapshot();
            let metadata = snapshot.get_metadata();
            field(snapshot.data.is_empty(), "snapshot data")?;
            let is_valid = (1..END_OF_NUMBERS).contains(&metadata.index)
                && (1..=message.term).contains(&metadata.term);
            field(is_valid, "snapshot position")?;
            let conf = conf_from_raft(metadata.get_conf_state());
            field(check_configuration(&conf).is_ok(), "configuration")?;
        }
        _ => {}
    }
    Ok(frame)
}

/// The bytes that a message takes in frames.
pub(crate) fn message_bytes(message: &Message) -> usize {
    let entry = |entry: &eraftpb::Entry| entry_bytes(entry) + entry.context.len();
    MESSAGE_BYTES + message.entries.iter().map(entry).sum::<usize>()
}

/// The bytes of an entry in the meta.
fn entry_bytes(entry: &eraftpb::Entry) -> usize {
    ENTRY_BYTES + entry.data.len().next_multiple_of(8)
}

/// A frame of raft messages that is being filled.
pub(crate) struct MessagesFrame {
    frame: Frame,
    /// The number of messages.
    count: u32,
}

impl MessagesFrame {
    pub(crate) fn new(kind: FrameType, sender: SenderState) -> Self {
        let mut frame = Frame::new(kind, 0);
        let meta = frame.meta();
        meta.put_u32(sender.free_slots);
        let stalled = if sender.is_stalled { FLAG_STALLED } else { 0 };
        meta.put_u32(stalled | if sender.drops_entries { FLAG_DROPS_ENTRIES } else { 0 });
        meta.put_zeros(8);
        if kind != FrameType::Raft {
            // The count of heartbeats.
            meta.put_zeros(8);
        }
        Self { frame, count: 0 }
    }

    /// Whether it has no messages.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The finished frame.
    pub(crate) fn finish(mut self) -> Frame {
        if self.frame.kind() != FrameType::Raft {
            let at = self.frame.meta().len() - self.count as usize * HEARTBEAT_BYTES - 8;
            self.frame.meta()[at..at + 4].copy_from_slice(&self.count.to_le_bytes());
        }
        self.frame
    }

    fn free_meta(&self) -> usize {
        MAX_META_BYTES - self.frame.meta_bytes()
    }

    /// Appends a message that [`check_sendable`] has accepted for this type of frame, an append
    /// from its entry `from` on. Returns the number of the entry with which the rest of an append
    /// begins, which is that of all entries if none is left; `None` if not even a part fits.
    pub(crate) fn push(&mut self, message: &GroupMessage, from: usize) -> Option<usize> {
        let GroupMessage { group, message } = message;
        match self.frame.kind() {
            FrameType::Raft => self.push_raft(*group, message, from),
            _ => self.push_heartbeat(*group, message),
        }
    }

    fn push_heartbeat(&mut self, group: GroupId, message: &Message) -> Option<usize> {
        if self.free_meta() < HEARTBEAT_BYTES {
            return None;
        }
        self.count += 1;
        let meta = self.frame.meta();
        meta.put_u64(group.0);
        for field in [message.from, message.to, message.term, message.commit] {
            meta.put_u64(field);
        }
        Some(0)
    }

    /// The end of the entries from `from` on that fit.
    fn fitting(&self, entries: &[eraftpb::Entry], from: usize) -> usize {
        let mut meta = self.free_meta() - MESSAGE_BYTES;
        let mut data = MAX_DATA_BYTES - self.frame.data_bytes();
        let mut end = from;
        while let Some(entry) = entries.get(end)
            && end - from < MAX_APPEND_ENTRIES
            && entry_bytes(entry) <= meta
            && entry.context.len() <= data
        {
            meta -= entry_bytes(entry);
            data -= entry.context.len();
            end += 1;
        }
        end
    }

    fn push_raft(&mut self, group: GroupId, message: &Message, from: usize) -> Option<usize> {
        let conf = match message.get_msg_type() {
            MessageType::MsgSnapshot => {
                conf_from_raft(message.get_snapshot().get_metadata().get_conf_state())
            }
            _ => ConfState::default(),
        };
        if self.free_meta() < MESSAGE_BYTES + configuration_bytes(&conf) {
            return None;
        }
        let entries: &[eraftpb::Entry] = match message.get_msg_type() {
            MessageType::MsgAppend => &message.entries,
            _ => &[],
        };
        let end = self.fitting(entries, from);
        if end == from && from < entries.len() {
            return None;
        }
        self.count += 1;
        let used = Used::by(message.get_msg_type()).expect("the message is sendable");
        let snapshot = message.get_snapshot().get_metadata();
        let (index, log_term) = match (message.get_msg_type(), from) {
            (MessageType::MsgSnapshot, _) => (snapshot.index, snapshot.term),
            (_, 0) => (message.index, message.log_term),
            (_, from) => (message.index + from as u64, entries[from - 1].term),
        };
        let is_rejected = used.reject && message.reject;
        let has_log_term = used.log_term && (is_rejected || !used.log_term_of_rejection_only);
        let extra = match used.extra {
            Extra::None => 0,
            Extra::CommitTerm => message.commit_term,
            Extra::RejectHint if is_rejected => message.reject_hint,
            Extra::RejectHint => 0,
        };
        let is_transfer = used.transfer && !message.context.is_empty();
        let meta = self.frame.meta();
        meta.push(message.get_msg_type() as u8);
        meta.push(
            if is_rejected { FLAG_REJECT } else { 0 } | if is_transfer { FLAG_TRANSFER } else { 0 },
        );
        meta.put_zeros(2);
        meta.put_u32((end - from) as u32);
        for field in [group.0, message.from, message.to, message.term] {
            meta.put_u64(field);
        }
        meta.put_u64(if has_log_term { log_term } else { 0 });
        meta.put_u64(if used.index { index } else { 0 });
        meta.put_u64(if used.commit { message.commit } else { 0 });
        meta.put_u64(extra);
        let body_at = meta.len() + 8;
        meta.put_zeros(8);
        if message.get_msg_type() == MessageType::MsgSnapshot {
            put_configuration(&conf, meta);
        }
        for entry in &entries[from..end] {
            put_entry(entry, meta);
        }
        let body = (meta.len() - body_at) as u32;
        meta[body_at - 8..body_at - 4].copy_from_slice(&body.to_le_bytes());
        for entry in &entries[from..end] {
            self.frame.push_data(entry.context.clone());
        }
        Some(end)
    }
}

fn put_entry(entry: &eraftpb::Entry, out: &mut Vec<u8>) {
    out.put_u64(entry.term);
    out.put_u32(entry.data.len() as u32);
    out.put_u16((entry.context.len() / BLOCK_BYTES) as u16);
    out.extend([entry.get_entry_type() as u8, 0]);
    out.extend(&entry.data);
    out.put_zeros(entry.data.len().next_multiple_of(8) - entry.data.len());
}

/// What the field `extra` is.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Extra {
    #[default]
    None,
    RejectHint,
    CommitTerm,
}

/// The fields that a type of message uses beside its term.
#[derive(Clone, Copy, Default)]
struct Used {
    reject: bool,
    transfer: bool,
    log_term: bool,
    log_term_of_rejection_only: bool,
    index: bool,
    commit: bool,
    extra: Extra,
}

impl Used {
    /// `None` for what a `Raft` frame does not carry.
    fn by(kind: MessageType) -> Option<Self> {
        let none = Self::default();
        match kind {
            MessageType::MsgAppend => {
                Some(Self { log_term: true, index: true, commit: true, ..none })
            }
            MessageType::MsgAppendResponse => Some(Self {
                reject: true,
                log_term: true,
                log_term_of_rejection_only: true,
                index: true,
                commit: true,
                extra: Extra::RejectHint,
                ..none
            }),
            MessageType::MsgRequestVote | MessageType::MsgRequestPreVote => Some(Self {
                transfer: true,
                log_term: true,
                index: true,
                commit: true,
                extra: Extra::CommitTerm,
                ..none
            }),
            MessageType::MsgRequestVoteResponse | MessageType::MsgRequestPreVoteResponse => {
                Some(Self { reject: true, commit: true, extra: Extra::CommitTerm, ..none })
            }
            MessageType::MsgSnapshot => Some(Self { log_term: true, index: true, ..none }),
            MessageType::MsgTimeoutNow => Some(none),
            _ => None,
        }
    }
}

/// Decodes a frame of raft messages, and makes the checks before `step` that need no state of a
/// replica.
///
/// # Errors
/// A field is out of bounds, an op is not valid, or a block does not have its checksum.
pub fn decode_messages(frame: &Received, entries: Entries) -> Result<Messages, WireError> {
    let reader = &mut Reader::new(&frame.meta);
    let free_slots = reader.u32()?;
    let flags = reader.u32()?;
    if flags & !(FLAG_STALLED | FLAG_DROPS_ENTRIES) != 0 {
        return Err(WireError::field("flags of a sender", flags));
    }
    reader.zeros::<8>()?;
    let sender = SenderState {
        free_slots,
        is_stalled: flags & FLAG_STALLED != 0,
        drops_entries: flags & FLAG_DROPS_ENTRIES != 0,
    };
    let mut out = Messages { sender, ..Messages::default() };
    match frame.header.kind {
        FrameType::Raft => {
            let mut blocks = Blocks(frame.data.clone());
            while reader.rest() > 0 {
                read_message(reader, &mut blocks, entries, &mut out)?;
            }
            if entries == Entries::Keep {
                blocks.end()?;
            }
        }
        kind => {
            let count = reader.u32()? as usize;
            reader.zeros::<4>()?;
            reader.check_count(count, HEARTBEAT_BYTES)?;
            out.messages.reserve_exact(count);
            for _ in 0..count {
                out.messages.push(read_heartbeat(reader, kind)?);
            }
            reader.end()?;
        }
    }
    Ok(out)
}

fn read_heartbeat(reader: &mut Reader<'_>, kind: FrameType) -> Result<GroupMessage, WireError> {
    let (group, mut message) = (reader.u64()?, Message::default());
    message.set_msg_type(match kind {
        FrameType::Heartbeats => MessageType::MsgHeartbeat,
        _ => MessageType::MsgHeartbeatResponse,
    });
    (message.from, message.to) = (reader.u64()?, reader.u64()?);
    (message.term, message.commit) = (reader.u64()?, reader.u64()?);
    check_common(group, &message)?;
    Ok(GroupMessage { group: GroupId(group), message })
}

/// Checks the fields that all messages have.
fn check_common(group: u64, message: &Message) -> Result<(), WireError> {
    if group == 0 || message.from == 0 || message.to == 0 {
        return Err(WireError::field("group or peer of a message", 0_u64));
    }
    // Raft treats term 0 as local, and does not compare it.
    if !(1..END_OF_NUMBERS).contains(&message.term) {
        return Err(WireError::field("term of a message", message.term));
    }
    let numbers =
        [message.log_term, message.index, message.commit, message.commit_term, message.reject_hint];
    match numbers.into_iter().find(|number| *number >= END_OF_NUMBERS) {
        Some(number) => Err(WireError::field("position in a message", number)),
        None => Ok(()),
    }
}

fn read_message(
    reader: &mut Reader<'_>,
    blocks: &mut Blocks,
    entries: Entries,
    out: &mut Messages,
) -> Result<(), WireError> {
    let (number, flags) = (reader.u8()?, reader.u8()?);
    let kind = [
        MessageType::MsgAppend,
        MessageType::MsgAppendResponse,
        MessageType::MsgRequestVote,
        MessageType::MsgRequestVoteResponse,
        MessageType::MsgRequestPreVote,
        MessageType::MsgRequestPreVoteResponse,
        MessageType::MsgSnapshot,
        MessageType::MsgTimeoutNow,
    ]
    .into_iter()
    .find(|kind| *kind as u8 == number)
    .ok_or(WireError::MessageType(number))?;
    let used = Used::by(kind).ok_or(WireError::MessageType(number))?;
    reader.zeros::<2>()?;
    let count = reader.u32()? as usize;
    let group = reader.u64()?;
    let mut message = Message::default();
    message.set_msg_type(kind);
    (message.from, message.to) = (reader.u64()?, reader.u64()?);
    message.term = reader.u64()?;
    (message.log_term, message.index) = (reader.u64()?, reader.u64()?);
    message.commit = reader.u64()?;
    let extra = reader.u64()?;
    let body_bytes = reader.u32()? as usize;
    reader.zeros::<4>()?;
    if flags & !(FLAG_REJECT | FLAG_TRANSFER) != 0 {
        return Err(WireError::field("flags of a message", flags));
    }
    message.reject = flags & FLAG_REJECT != 0;
    let is_transfer = flags & FLAG_TRANSFER != 0;
    if is_transfer {
        message.context = Bytes::from_static(CAMPAIGN_TRANSFER);
    }
    let has_extra = match used.extra {
        Extra::None => false,
        Extra::RejectHint => message.reject,
        Extra::CommitTerm => true,
    };
    let is_unused_zero = (used.reject || !message.reject)
        && (used.transfer || !is_transfer)
        && ((used.log_term && (message.reject || !used.log_term_of_rejection_only))
            || message.log_term == 0)
        && (used.index || message.index == 0)
        && (used.commit || message.commit == 0)
        && (has_extra || extra == 0)
        && (kind == MessageType::MsgAppend || count == 0);
    if !is_unused_zero {
        return Err(WireError::field("unused field of a message of type", number));
    }
    match used.extra {
        Extra::RejectHint => message.reject_hint = extra,
        _ => message.commit_term = extra,
    }
    check_common(group, &message)?;
    let has_body = matches!(kind, MessageType::MsgAppend | MessageType::MsgSnapshot);
    if (body_bytes > 0 && !has_body) || !body_bytes.is_multiple_of(8) {
        return Err(WireError::field("body of a message", body_bytes as u64));
    }
    let body = reader.bytes(body_bytes)?;
    let (group, from) = (GroupId(group), PeerId(message.from));
    match kind {
        MessageType::MsgAppend if count > 0 && entries == Entries::Drop => {
            out.dropped += 1;
            return Ok(());
        }
        MessageType::MsgAppend => {
            if let Some(kind) = read_entries(&mut message, count, &body, blocks)? {
                out.unknown_ops.push(UnknownOp { group, from, kind });
                return Ok(());
            }
        }
        MessageType::MsgSnapshot => read_snapshot(&mut message, &body)?,
        _ => {}
    }
    out.messages.push(GroupMessage { group, message });
    Ok(())
}

fn read_snapshot(message: &mut Message, body: &Bytes) -> Result<(), WireError> {
    let reader = &mut Reader::new(body);
    let conf = read_configuration(reader)?;
    reader.end()?;
    let (index, term) = (message.index, message.log_term);
    if index == 0 || term == 0 || term > message.term {
        return Err(WireError::field("position of a snapshot", index));
    }
    (message.index, message.log_term) = (0, 0);
    let metadata = message.mut_snapshot().mut_metadata();
    (metadata.index, metadata.term) = (index, term);
    metadata.set_conf_state(conf_to_raft(&conf));
    Ok(())
}

/// Reads the entries of an append. Returns the kind of an op that is unknown.
fn read_entries(
    message: &mut Message,
    count: usize,
    body: &Bytes,
    blocks: &mut Blocks,
) -> Result<Option<u8>, WireError> {
    // Raft treats term 0 beyond the end of its log as a match.
    if (message.log_term == 0) != (message.index == 0) {
        return Err(WireError::field("log term of an append", message.log_term));
    }
    let last = message.index + count as u64;
    if count > MAX_APPEND_ENTRIES || last >= END_OF_NUMBERS {
        return Err(WireError::field("entries of an append", count as u64));
    }
    let reader = &mut Reader::new(body);
    reader.check_count(count, ENTRY_BYTES)?;
    let mut entries = Vec::with_capacity(count);
    let (mut term, mut unknown) = (message.log_term, None);
    for index in message.index + 1..=last {
        let entry = read_entry(reader, blocks, index)?;
        if entry.term < term || entry.term == 0 {
            return Err(WireError::field("term of an entry", entry.term));
        }
        term = entry.term;
        match check_entry(&entry) {
            Err(WireError::Op(OpError::Kind(kind))) => unknown = Some(kind),
            checked => checked?,
        }
        entries.push(entry);
    }
    reader.end()?;
    if term > message.term {
        return Err(WireError::field("term of an entry", term));
    }
    message.entries = entries.into();
    Ok(unknown)
}

fn read_entry(
    reader: &mut Reader<'_>,
    blocks: &mut Blocks,
    index: u64,
) -> Result<eraftpb::Entry, WireError> {
    let mut entry = eraftpb::Entry { index, ..eraftpb::Entry::default() };
    entry.term = reader.u64()?;
    let op_bytes = reader.u32()? as usize;
    let count = reader.u16()?;
    entry.set_entry_type(match reader.u8()? {
        0 => EntryType::EntryNormal,
        2 => EntryType::EntryConfChangeV2,
        other => return Err(WireError::field("type of an entry", other)),
    });
    reader.zeros::<1>()?;
    entry.data = reader.bytes(op_bytes)?;
    reader.padding()?;
    entry.context = blocks.take(count)?;
    Ok(entry)
}

/// Verifies the op of an entry.
fn check_entry(entry: &eraftpb::Entry) -> Result<(), WireError> {
    let is_change = entry.get_entry_type() == EntryType::EntryConfChangeV2;
    if entry.data.is_empty() {
        return match entry.context.is_empty() {
            true => Ok(()),
            false => Err(FieldError::Length { len: entry.context.len() }.into()),
        };
    }
    let op = Op::decode_parts(&entry.data, &entry.context)?;
    if matches!(op, Op::Configuration(_)) != is_change {
        return Err(WireError::field("type of an entry", entry.get_entry_type() as u64));
    }
    Ok(op.verify()?)
}

fn lists(conf: &ConfState) -> [&Vec<PeerId>; 4] {
    [&conf.voters, &conf.learners, &conf.outgoing_voters, &conf.next_learners]
}

/// The bytes of a configuration.
pub(crate) fn configuration_bytes(conf: &ConfState) -> usize {
    16 + 8 * lists(conf).into_iter().map(Vec::len).sum::<usize>()
}

/// Appends a configuration that [`check_configuration`] accepts.
pub(crate) fn put_configuration(conf: &ConfState, out: &mut Vec<u8>) {
    assert_eq!(check_configuration(conf), Ok(()), "a configuration is valid");
    for list in lists(conf) {
        out.put_u16(list.len() as u16);
    }
    out.push(conf.auto_leave.into());
    out.put_zeros(7);
    for peer in lists(conf).into_iter().flatten() {
        out.put_u64(peer.0);
    }
}

/// Reads a configuration with which raft can work.
pub(crate) fn read_configuration(reader: &mut Reader<'_>) -> Result<ConfState, WireError> {
    let counts = [reader.u16()?, reader.u16()?, reader.u16()?, reader.u16()?].map(usize::from);
    let auto_leave = match reader.u8()? {
        flag @ (0 | 1) => flag == 1,
        other => return Err(WireError::field("auto-leave", other)),
    };
    reader.zeros::<7>()?;
    let total: usize = counts.iter().sum();
    if total > MAX_CONFIGURATION_IDS {
        return Err(WireError::field("ids of a configuration", total as u64));
    }
    let mut read = |count| (0..count).map(|_| Ok(PeerId(reader.u64()?))).collect();
    let [voters, learners, outgoing, next] =
        counts.map(|count| -> Result<Vec<_>, FieldError> { read(count) });
    let conf = ConfState {
        voters: voters?,
        learners: learners?,
        outgoing_voters: outgoing?,
        next_learners: next?,
        auto_leave,
    };
    check_configuration(&conf)?;
    Ok(conf)
}

/// Refuses a configuration on which raft ends the process.
fn check_configuration(conf: &ConfState) -> Result<(), WireError> {
    let ConfState { voters, learners, outgoing_voters, next_learners, auto_leave } = conf;
    let is_distinct = |list: &Vec<PeerId>| {
        list.iter().enumerate().all(|(n, peer)| peer.0 != 0 && !list[..n].contains(peer))
    };
    let is_valid = lists(conf).into_iter().map(Vec::len).sum::<usize>() <= MAX_CONFIGURATION_IDS
        && lists(conf).into_iter().all(is_distinct)
        && !voters.is_empty()
        && learners.iter().all(|peer| !voters.contains(peer) && !outgoing_voters.contains(peer))
        && next_learners
            .iter()
            .all(|peer| outgoing_voters.contains(peer) && !voters.contains(peer))
        && (!auto_leave || !outgoing_voters.is_empty());
    match is_valid {
        true => Ok(()),
        false => Err(WireError::field("configuration with voters", voters.len() as u64)),
    }
}
