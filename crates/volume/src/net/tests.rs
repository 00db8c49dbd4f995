//! Frames and messages: what is written is read, and everything else is refused.

use bytes::{Bytes, BytesMut};
use raft::eraftpb::{Entry, EntryType, Message, MessageType};

use super::frame::Side::{Acceptor, Dialer};
use super::*;
use crate::op::{BlockOp, BlockRange, Change, Configuration, Transition, block_crcs};
use crate::raft::conf_to_raft;
use crate::request::*;
use crate::types::*;
use crate::{BLOCK_BYTES, Op};

pub(super) const CONNECTION: ConnectionId = ConnectionId([1, 2, 3, 4, 5, 6, 7, 8]);

pub(super) fn bytes_of(frame: Frame) -> Bytes {
    let mut bytes = BytesMut::new();
    for buffer in frame.encode(CONNECTION) {
        bytes.extend_from_slice(&buffer);
    }
    bytes.freeze()
}

pub(super) fn receive(
    frame: Frame,
    role: ConnectionRole,
    side: Side,
) -> Result<Received, WireError> {
    let (frame, rest) = Received::parse(&bytes_of(frame), CONNECTION, role, side)?;
    assert!(rest.is_empty());
    Ok(frame)
}

pub(super) fn receive_peer(frame: Frame) -> Result<PeerFrame, WireError> {
    PeerFrame::decode(&receive(frame, ConnectionRole::Peer, Acceptor)?, Entries::Keep)
}

/// The first frame of a queue with one message.
pub(super) fn frame_of(message: GroupMessage) -> Frame {
    let mut queue = PeerQueue::default();
    assert_eq!(queue.push(message), Ok(Pushed::Queued));
    queue.next(SenderState::default()).unwrap()
}

/// Sends messages through a queue and receives its frames.
pub(super) fn send(messages: &[GroupMessage]) -> Vec<Messages> {
    let mut queue = PeerQueue::default();
    for message in messages {
        assert_eq!(queue.push(message.clone()), Ok(Pushed::Queued));
    }
    let sender = SenderState { free_slots: 9, is_stalled: true, drops_entries: false };
    let frames =
        std::iter::from_fn(|| queue.next(sender)).map(|frame| match receive_peer(frame).unwrap() {
            PeerFrame::Messages(messages) => messages,
            other => panic!("{other:?}"),
        });
    frames.inspect(|messages| assert_eq!(messages.sender, sender)).collect()
}

pub(super) fn write(blocks: u16, seed: u8, number: u64) -> Op {
    let data: Vec<u8> = (0..usize::from(blocks) * BLOCK_BYTES)
        .map(|n| (n / 7) as u8 ^ (n / BLOCK_BYTES) as u8 ^ seed)
        .collect();
    Op::Blocks(BlockOp {
        volume: VolumeId(3),
        epoch: AttachEpoch(1),
        layer: Layer(0),
        number: Sequence(number),
        floor_distance: 0,
        range: BlockRange { chunk: ChunkIndex(5), first: 7, blocks },
        change: Change::write(data.into()),
    })
}

pub(super) fn entry_of(op: &Op) -> Entry {
    let entry_type = match op {
        Op::Configuration(_) => EntryType::EntryConfChangeV2,
        _ => EntryType::EntryNormal,
    };
    let (data, context) = (op.encode_head().into(), op.blocks());
    Entry { entry_type, data, context, ..Entry::default() }
}

/// An entry with a write.
pub(super) fn write_entry(index: u64, term: u64, blocks: u16) -> Entry {
    Entry { index, term, ..entry_of(&write(blocks, index as u8, index)) }
}

pub(super) fn message_of(msg_type: MessageType, from: u64, to: u64, term: u64) -> Message {
    Message { msg_type, from, to, term, ..Message::default() }
}

pub(super) fn read_request(blocks: u16) -> Request {
    Request::Read(ReadRequest {
        group: GroupId(1),
        epoch: AttachEpoch(1),
        token: Index(0),
        volume: VolumeId(1),
        layer: Layer(0),
        range: BlockRange { chunk: ChunkIndex(0), first: 0, blocks },
        states_only: false,
    })
}

pub(super) fn read_answer(read: &ReadRequest, states: &[u8], seed: u8) -> ReadAnswer {
    let states = states[..read.range.blocks.into()].iter().map(|state| match state {
        0 => BlockState::Absent,
        1 => BlockState::Zeros,
        _ => BlockState::Data,
    });
    let states: Vec<_> = states.collect();
    let with_data = states.iter().filter(|state| **state == BlockState::Data).count();
    let data = match read.states_only {
        true => Vec::new(),
        false => vec![seed; with_data * BLOCK_BYTES],
    };
    let crcs = block_crcs(&data);
    ReadAnswer { applied: read.token, states, crcs, data: data.into() }
}

/// The answer to a read of blocks that all have data.
pub(super) fn read_answer_of(request: &Request, seed: u8) -> Answer {
    let Request::Read(read) = request else { panic!("{request:?}") };
    Answer::Read(read_answer(read, &[2; 256], seed))
}

/// The example of the document.
#[test]
fn a_ping_has_the_bytes_of_the_document() {
    let expected = "02000000000000000000000000000000070000000000000000000000e7c399a1";
    let hex: String = bytes_of(Frame::ping(7)).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, expected);
}

fn append_of(entries: Vec<Entry>) -> GroupMessage {
    let mut message = message_of(MessageType::MsgAppend, 1, 2, 9);
    (message.index, message.log_term) = (10, 4);
    message.entries = entries.into();
    GroupMessage { group: GroupId(1), message }
}

#[test]
fn an_append_that_does_not_fit_is_split_at_its_entries() {
    let entries = (0..5).map(|n| write_entry(11 + n, 5 + n / 2, 100));
    let append = append_of(entries.collect());
    let frames = send(std::slice::from_ref(&append));
    let parts: Vec<_> = frames.iter().flat_map(|frame| &frame.messages).collect();
    let heads: Vec<_> = parts
        .iter()
        .map(|part| (part.message.index, part.message.log_term, part.message.entries.len()))
        .collect();
    assert_eq!(heads, [(10, 4, 2), (12, 5, 2), (14, 6, 1)]);
    let entries: Vec<_> = parts.iter().flat_map(|part| part.message.entries.iter()).collect();
    assert!(entries.into_iter().eq(append.message.entries.iter()));
    // Blocks are not copied on the way out.
    let buffers = frame_of(append.clone()).encode(CONNECTION);
    assert_eq!(buffers[1].as_ptr(), append.message.entries[0].context.as_ptr());
}

/// The largest write, and so the largest entry, fits a frame.
#[test]
fn the_largest_entry_fits_a_frame() {
    let frames = send(&[append_of(vec![write_entry(11, 9, 256)])]);
    assert_eq!(frames[0].messages[0].message.entries.len(), 1);
}

/// Decodes a frame with one message whose bytes were changed by `change`, with good checksums.
fn with_changed_meta(
    message: &GroupMessage,
    change: impl Fn(&mut Vec<u8>),
) -> Result<Messages, WireError> {
    let frame = receive(frame_of(message.clone()), ConnectionRole::Peer, Acceptor).unwrap();
    let mut meta = frame.meta.to_vec();
    change(&mut meta);
    decode_messages(&Received { meta: meta.into(), ..frame }, Entries::Keep)
}

/// Section 9 lists the types that no frame may have: local ones, and those that raft trusts too
/// much.
#[test]
fn types_that_are_not_in_the_table_are_refused() {
    let message = message_of(MessageType::MsgTimeoutNow, 1, 2, 3);
    let message = GroupMessage { group: GroupId(1), message };
    for number in 0..=u8::MAX {
        let decoded = with_changed_meta(&message, |meta| meta[16] = number);
        let is_accepted = matches!(number, 3..=6 | 14 | 17 | 18);
        assert_eq!(decoded.is_ok(), is_accepted, "type {number}: {decoded:?}");
        if ![3, 4, 5, 6, 7, 14, 17, 18].contains(&number) {
            assert_eq!(decoded, Err(WireError::MessageType(number)));
        }
    }
    for kind in [
        MessageType::MsgHup,
        MessageType::MsgBeat,
        MessageType::MsgPropose,
        MessageType::MsgUnreachable,
        MessageType::MsgSnapStatus,
        MessageType::MsgCheckQuorum,
        MessageType::MsgTransferLeader,
        MessageType::MsgReadIndex,
        MessageType::MsgReadIndexResp,
    ] {
        let message = GroupMessage { group: GroupId(1), message: message_of(kind, 1, 2, 3) };
        let refused = PeerQueue::default().push(message);
        assert_eq!(refused, Err(UnsendableMessage::Type(kind as i32)));
    }
}

#[test]
fn appends_on_which_raft_would_fail_are_refused() {
    let append = append_of(vec![write_entry(11, 5, 1), write_entry(12, 6, 1)]);
    let change = |at: usize, value: u64| {
        with_changed_meta(&append, move |meta| {
            meta[16 + at..16 + at + 8].copy_from_slice(&value.to_le_bytes());
        })
    };
    let (group, from, to, term, log_term, index, commit) = (8, 16, 24, 32, 40, 48, 56);
    assert!(change(commit, 3).is_ok());
    for (at, value) in [
        (group, 0),
        (from, 0),
        (to, 0),
        (term, 0),
        (term, 1 << 62),
        // Below the terms of the entries.
        (term, 5),
        // Log term 0 at an index, and a log term at index 0.
        (log_term, 0),
        (index, 0),
        // Above the term of the first entry.
        (log_term, 6),
        (index, (1 << 62) - 2),
        (commit, 1 << 62),
        // The term of the first entry: 0, and above the second one's.
        (80, 0),
        (80, 7),
    ] {
        let refused = change(at, value);
        assert!(matches!(refused, Err(WireError::Field(_))), "{at} {value}: {refused:?}");
    }
}

/// Data that no field accounts for, in each frame that has data.
#[test]
fn a_block_too_many_is_refused() {
    let with_block = |frame: Frame, role, side| {
        let frame = receive(frame, role, side).unwrap();
        let data = [&frame.data[..], &[0; BLOCK_BYTES]].concat().into();
        Received { data, ..frame }
    };
    let append = frame_of(append_of(vec![write_entry(11, 5, 1)]));
    let raft = with_block(append, ConnectionRole::Peer, Acceptor);
    assert!(decode_messages(&raft, Entries::Keep).is_err());
    let request = Request::Op { group: GroupId(1), op: write(1, 1, 1) };
    let op = with_block(encode_request(1, &request), ConnectionRole::Client, Acceptor);
    assert!(matches!(decode_request(&op), Err(Refused::Connection(_))));
    let answer = encode_answer(FrameType::ReadAnswer, 1, &Ok(read_answer_of(&read_request(1), 7)));
    let answer = with_block(answer, ConnectionRole::Client, Dialer);
    let expected = Expected::Read { blocks: 1, states_only: false };
    assert!(decode_answer(&answer, expected).is_err());
    let batch = PullFrame::Batch(PullBatch { applied: Index(1), items: Vec::new() });
    let batch = with_block(batch.encode(), ConnectionRole::Pull, Dialer);
    assert!(PullFrame::decode(&batch).is_err());
}

#[test]
fn an_append_with_an_unknown_op_is_dropped_and_the_others_stay() {
    let append = append_of(vec![write_entry(11, 5, 2)]);
    // The kind of the op is the first byte behind the heads of frame, message and entry.
    let decoded = with_changed_meta(&append, |meta| meta[16 + 80 + 16] = 200).unwrap();
    assert_eq!(decoded.messages, []);
    let unknown = UnknownOp { group: GroupId(1), from: PeerId(1), kind: 200 };
    assert_eq!(decoded.unknown_ops, [unknown]);
    // A configuration is an entry of type 2 and of no other, and type 1 is not sent.
    for kind in [1, 2, 3] {
        let refused = with_changed_meta(&append, |meta| meta[16 + 80 + 14] = kind);
        assert!(refused.is_err(), "{kind}");
    }
}

/// Raft ends the process on each of them.
#[test]
fn configurations_that_raft_does_not_accept_are_refused() {
    let peers = |ids: &[u64]| ids.iter().copied().map(PeerId).collect::<Vec<_>>();
    let message = |conf: ConfState| {
        let mut message = message_of(MessageType::MsgSnapshot, 1, 2, 3);
        let metadata = message.mut_snapshot().mut_metadata();
        (metadata.index, metadata.term) = (5, 2);
        metadata.set_conf_state(conf_to_raft(&conf));
        GroupMessage { group: GroupId(1), message }
    };
    let valid = ConfState {
        voters: peers(&[1, 2]),
        learners: peers(&[3]),
        outgoing_voters: peers(&[1, 4]),
        next_learners: peers(&[4]),
        auto_leave: true,
    };
    assert!(check_sendable(&message(valid.clone())).is_ok());
    for conf in [
        ConfState { voters: Vec::new(), ..valid.clone() },
        ConfState { voters: peers(&[1, 1]), ..valid.clone() },
        ConfState { voters: peers(&[0]), ..valid.clone() },
        ConfState { learners: peers(&[2]), ..valid.clone() },
        ConfState { learners: peers(&[4]), ..valid.clone() },
        ConfState { next_learners: peers(&[5]), ..valid.clone() },
        ConfState { next_learners: peers(&[1]), ..valid.clone() },
        ConfState { outgoing_voters: Vec::new(), next_learners: Vec::new(), ..valid.clone() },
        ConfState { voters: (1..65).map(PeerId).collect(), ..valid.clone() },
    ] {
        let refused = check_sendable(&message(conf.clone()));
        assert_eq!(refused, Err(UnsendableMessage::Field("configuration")), "{conf:?}");
        // The same bytes on the way in.
        let decoded = with_changed_meta(&message(valid.clone()), |meta| {
            meta.truncate(16 + 80);
            let lists = [&conf.voters, &conf.learners, &conf.outgoing_voters, &conf.next_learners];
            for list in lists {
                meta.extend((list.len() as u16).to_le_bytes());
            }
            meta.extend([conf.auto_leave.into(), 0, 0, 0, 0, 0, 0, 0]);
            meta.extend(lists.into_iter().flatten().flat_map(|peer| peer.0.to_le_bytes()));
            let body = (meta.len() - 96) as u32;
            meta[16 + 72..16 + 76].copy_from_slice(&body.to_le_bytes());
        });
        assert!(matches!(decoded, Err(WireError::Field(_))), "{conf:?}: {decoded:?}");
    }
}

#[test]
fn requests_that_a_client_may_not_send_are_answered_or_close_the_connection() {
    let op = |meta: &dyn Fn(&mut Vec<u8>), op: &Op| {
        let request = Request::Op { group: GroupId(3), op: op.clone() };
        let frame = receive(encode_request(1, &request), ConnectionRole::Client, Acceptor).unwrap();
        let mut bytes = frame.meta.to_vec();
        meta(&mut bytes);
        decode_request(&Received { meta: bytes.into(), ..frame })
    };
    let code = |refused: Result<Request, Refused>| match refused {
        Err(Refused::Request(error)) => Some(error.code),
        Err(Refused::Connection(_)) => None,
        Ok(request) => panic!("{request:?}"),
    };
    let write = write(3, 1, 1);
    let configuration = Configuration { transition: Transition::Auto, changes: Vec::new() };
    let configuration = Op::Configuration(configuration);
    assert_eq!(code(op(&|_| {}, &configuration)), Some(ErrorCode::BadRequest));
    assert_eq!(code(op(&|meta| meta[8] = 6, &write)), Some(ErrorCode::Unsupported));
    assert_eq!(code(op(&|meta| meta[48] ^= 1, &write)), Some(ErrorCode::BadChecksum));
    // Blocks, the group, and the padding behind three checksums.
    assert_eq!(code(op(&|meta| meta[10] = 2, &write)), None);
    assert_eq!(code(op(&|meta| meta[0] = 0, &write)), None);
    assert_eq!(code(op(&|meta| *meta.last_mut().unwrap() = 1, &write)), None);
}

#[test]
fn a_damaged_block_of_an_answer_is_an_error_of_the_request() {
    let request = read_request(2);
    let answer = Ok(read_answer_of(&request, 5));
    let frame = encode_answer(answer_type(&request), 1, &answer);
    let mut frame = receive(frame, ConnectionRole::Client, Dialer).unwrap();
    let mut data = frame.data.to_vec();
    data[BLOCK_BYTES] ^= 1;
    frame.data = data.into();
    let decoded = decode_answer(&frame, Expected::of(&request)).unwrap();
    assert_eq!(decoded.unwrap_err().code, ErrorCode::Damaged);
}

/// Each type in its direction of its role, and nowhere else.
#[test]
fn headers_out_of_bounds_are_refused() {
    let decode = |kind: u16, flags: u16, meta: u32, data: u32, request_id: u64, role, side| {
        let mut fields = Vec::new();
        fields.extend(kind.to_le_bytes());
        fields.extend(flags.to_le_bytes());
        fields.extend(meta.to_le_bytes());
        fields.extend(data.to_le_bytes());
        fields.extend([0; 4]);
        fields.extend(request_id.to_le_bytes());
        fields.extend([0; 4]);
        Header::decode_fields(&fields, role, side)
    };
    let roles = [ConnectionRole::Peer, ConnectionRole::Client, ConnectionRole::Pull];
    let mut accepted = 0;
    for kind in 0..=u16::MAX {
        for (role, side) in roles.iter().flat_map(|role| [(*role, Dialer), (*role, Acceptor)]) {
            let meta = if matches!(kind, 2 | 0x8002) { 0 } else { 64 };
            accepted +=
                u32::from(decode(kind, u16::from(kind == 1), meta, 0, 0, role, side).is_ok());
        }
    }
    // 6 for `Close`, 3 for `Ping` and for `Pong`, and once each of the other 18 types.
    assert_eq!(accepted, 6 + 3 + 3 + 18);
    let op = |flags, meta, data| {
        decode(0x20, flags, meta, data, 1, ConnectionRole::Client, Acceptor).is_ok()
    };
    assert!(op(0, 64, 1 << 20) && op(0, 512 << 10, 0));
    assert!(!op(1, 64, 0) && !op(2, 64, 0) && !op(0, 60, 0) && !op(0, 0, 0));
    assert!(!op(0, (512 << 10) + 8, 0) && !op(0, 64, 100) && !op(0, 64, (1 << 20) + 4096));
    // An error has no data, `Close` is always one, and raft messages have no request id.
    let answer =
        |flags, data| decode(0x8021, flags, 64, data, 1, ConnectionRole::Client, Dialer).is_ok();
    assert!(answer(1, 0) && answer(0, 4096) && !answer(1, 4096));
    assert!(decode(1, 0, 64, 0, 0, ConnectionRole::Client, Dialer).is_err());
    assert!(decode(0x10, 0, 64, 0, 1, ConnectionRole::Peer, Acceptor).is_err());
}

#[test]
fn the_text_of_an_error_is_cut_at_a_character() {
    let text = format!("a{}", "ü".repeat(400));
    let error = RequestError::new(ErrorCode::Busy, GroupId(1), text.clone());
    let frame = receive(close_frame(&error), ConnectionRole::Peer, Dialer).unwrap();
    let decoded = decode_error(&frame).unwrap();
    assert_eq!(decoded.text, text[..511]);
}
