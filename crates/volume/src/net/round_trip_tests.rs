//! Round trips: every frame is read as it was written, and a changed bit is found.

use bytes::Bytes;
use proptest::collection::vec;
use proptest::prelude::*;
use raft::eraftpb::{Entry, EntryType, Message, MessageType};

use super::frame::Side::{Acceptor, Dialer};
use super::tests::*;
use super::*;
use crate::log::FinishedChunks;
use crate::messages::{PullChunk, PullContent, PullItem};
use crate::op::{Attach, BlockOp, BlockRange, Change, Configuration, Transition, block_crcs};
use crate::raft::conf_to_raft;
use crate::request::*;
use crate::state::VolumeState;
use crate::types::*;
use crate::{BLOCK_BYTES, Op, Window};

fn id() -> impl Strategy<Value = u64> {
    prop_oneof![1..5_u64, 1..=u64::MAX]
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..5_u64, 0..1_u64 << 62]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (1..4_u16, any::<u8>(), 1..9_u64).prop_map(|(blocks, seed, n)| write(blocks, seed, n)),
        (1..4_u16, 1..9_u64).prop_map(|(blocks, n)| {
            let Op::Blocks(op) = write(blocks, 0, n) else { unreachable!() };
            Op::Blocks(BlockOp { change: Change::Zero, ..op })
        }),
        (1..9_u32, any::<u32>()).prop_map(|(volume, nonce)| Op::Attach(Attach {
            volume: VolumeId(volume),
            epoch: AttachEpoch(4),
            parent: None,
            gateway: None,
            nonce,
        })),
        Just(Op::Noop { attachment: None }),
    ]
}

fn entry() -> impl Strategy<Value = Entry> {
    let configuration = Configuration { transition: Transition::Auto, changes: Vec::new() };
    let leave = Op::Configuration(configuration);
    let mut auto_leave = Entry::default();
    auto_leave.set_entry_type(EntryType::EntryConfChangeV2);
    prop_oneof![
        4 => op().prop_map(|op| entry_of(&op)),
        1 => Just(entry_of(&leave)),
        1 => Just(Entry::default()),
        1 => Just(auto_leave),
    ]
}

/// An append whose terms do not decrease.
fn append() -> impl Strategy<Value = Message> {
    let entries = vec((entry(), 0..3_u64), 0..6);
    (id(), id(), 0..9_u64, 0..3_u64, number(), entries).prop_map(
        |(from, to, index, more, commit, entries)| {
            let mut term = u64::from(index > 0);
            let mut message = message_of(MessageType::MsgAppend, from, to, 1);
            (message.index, message.log_term, message.commit) = (index, term, commit);
            for (n, (mut entry, raise)) in entries.into_iter().enumerate() {
                term = (term + raise).max(1);
                (entry.index, entry.term) = (index + 1 + n as u64, term);
                message.entries.push(entry);
            }
            message.term = (term + more).max(1);
            message
        },
    )
}

fn small_message() -> impl Strategy<Value = Message> {
    use MessageType::*;
    let kind = prop::sample::select(vec![
        MsgAppendResponse,
        MsgRequestVote,
        MsgRequestPreVote,
        MsgRequestVoteResponse,
        MsgRequestPreVoteResponse,
        MsgTimeoutNow,
        MsgSnapshot,
        MsgHeartbeat,
        MsgHeartbeatResponse,
    ]);
    let numbers = (number(), number(), number(), number());
    (kind, (id(), id(), 1..1_u64 << 62), numbers, any::<bool>(), conf()).prop_map(
        |(kind, (from, to, term), (index, log_term, commit, extra), flag, conf)| {
            let mut message = message_of(kind, from, to, term);
            match kind {
                MsgAppendResponse => {
                    (message.index, message.commit, message.reject) = (index, commit, flag);
                    if flag {
                        (message.log_term, message.reject_hint) = (log_term, extra);
                    }
                }
                MsgRequestVote | MsgRequestPreVote => {
                    (message.index, message.log_term) = (index, log_term);
                    (message.commit, message.commit_term) = (commit, extra);
                    if flag {
                        message.context = Bytes::from_static(b"CampaignTransfer");
                    }
                }
                MsgRequestVoteResponse | MsgRequestPreVoteResponse => {
                    (message.commit, message.commit_term) = (commit, extra);
                    message.reject = flag;
                }
                MsgSnapshot => {
                    let metadata = message.mut_snapshot().mut_metadata();
                    (metadata.index, metadata.term) = (index.max(1), log_term.clamp(1, term));
                    metadata.set_conf_state(conf_to_raft(&conf));
                }
                MsgTimeoutNow => {}
                _ => message.commit = commit,
            }
            message
        },
    )
}

fn group_message() -> impl Strategy<Value = GroupMessage> {
    (id(), prop_oneof![append(), small_message()])
        .prop_map(|(group, message)| GroupMessage { group: GroupId(group), message })
}

/// A valid configuration: voters 1 to n, of which the outgoing ones go on, and others.
fn conf() -> impl Strategy<Value = ConfState> {
    (1..5_u64, 0..4_u64, 0..4_u64, 0..3_u64, any::<bool>()).prop_map(
        |(voters, learners, outgoing, next, auto_leave)| {
            let peers =
                |from: u64, count: u64| (from..from + count).map(PeerId).collect::<Vec<_>>();
            let next_learners = peers(200, next);
            let outgoing_voters = [peers(1, outgoing), next_learners.clone()].concat();
            ConfState {
                voters: peers(1, voters),
                learners: peers(100, learners),
                auto_leave: auto_leave && !outgoing_voters.is_empty(),
                outgoing_voters,
                next_learners,
            }
        },
    )
}

fn sorted_by_queue(messages: &[GroupMessage]) -> Vec<GroupMessage> {
    let mut messages = messages.to_vec();
    messages.sort_by_key(|message| match message.message.get_msg_type() {
        MessageType::MsgHeartbeat => 0,
        MessageType::MsgHeartbeatResponse => 1,
        MessageType::MsgAppend => 3,
        _ => 2,
    });
    messages
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn raft_messages_are_read_as_they_were_written(messages in vec(group_message(), 1..8)) {
        let received: Vec<_> = send(&messages).into_iter().flat_map(|m| m.messages).collect();
        prop_assert_eq!(received, sorted_by_queue(&messages));
    }

    /// A receiver that drops entries skips them without their data.
    #[test]
    fn messages_without_entries_survive_when_entries_are_dropped(
        messages in vec(group_message(), 1..8),
    ) {
        let mut queue = PeerQueue::default();
        for message in &messages {
            queue.push(message.clone()).unwrap();
        }
        let (mut kept, mut dropped) = (Vec::new(), 0);
        while let Some(frame) = queue.next(SenderState::default()) {
            let mut frame = receive(frame, ConnectionRole::Peer, Acceptor).unwrap();
            frame.data = Bytes::new();
            match PeerFrame::decode(&frame, Entries::Drop).unwrap() {
                PeerFrame::Messages(messages) => {
                    kept.extend(messages.messages);
                    dropped += messages.dropped;
                }
                other => panic!("{other:?}"),
            }
        }
        let (without, with): (Vec<_>, Vec<_>) = sorted_by_queue(&messages)
            .into_iter()
            .partition(|message| message.message.entries.is_empty());
        prop_assert_eq!(kept, without);
        prop_assert_eq!(dropped, with.len());
    }

    /// The checksums find every changed bit, and no header is accepted on another connection.
    #[test]
    fn a_changed_bit_is_found(
        message in append(),
        bit: prop::sample::Index,
        other_connection: [u8; 8],
    ) {
        let bytes = bytes_of(frame_of(GroupMessage { group: GroupId(1), message }));
        let decode = |bytes: &Bytes, connection| {
            let (frame, _) = Received::parse(bytes, connection, ConnectionRole::Peer, Acceptor)?;
            PeerFrame::decode(&frame, Entries::Keep)
        };
        prop_assert!(decode(&bytes, CONNECTION).is_ok());
        if other_connection != CONNECTION.0 {
            let refused = decode(&bytes, ConnectionId(other_connection));
            prop_assert_eq!(refused, Err(WireError::HeaderChecksum));
        }
        let mut changed = bytes.to_vec();
        let bit = bit.index(8 * bytes.len());
        changed[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(decode(&changed.into(), CONNECTION).is_err(), "bit {}", bit);
    }

    #[test]
    fn requests_are_read_as_they_were_written(request in request(), request_id: u64) {
        let frame = encode_request(request_id, &request);
        let frame = receive(frame, ConnectionRole::Client, Acceptor).unwrap();
        prop_assert_eq!(frame.header.request_id, request_id);
        prop_assert_eq!(decode_request(&frame), Ok(request));
    }

    #[test]
    fn answers_are_read_as_they_were_written((request, answer) in answer(), request_id: u64) {
        let frame = encode_answer(answer_type(&request), request_id, &answer);
        // The server has reserved the greatest length of the answer.
        let overhead = frame.wire_bytes();
        prop_assert!(overhead <= request_cost(0, &request), "{} bytes", overhead);
        let frame = receive(frame, ConnectionRole::Client, Dialer).unwrap();
        let decoded = decode_answer(&frame, Expected::of(&request));
        prop_assert_eq!(decoded, Ok(answer));
        let read = Expected::Read { blocks: 77, states_only: false };
        for other in [Expected::Op, Expected::Status, read] {
            let is_refused = decode_answer(&frame, other).is_err();
            prop_assert!(is_refused || frame.header.is_error || other == Expected::of(&request));
        }
    }

    #[test]
    fn pull_frames_are_read_as_they_were_written(frame in pull_frame()) {
        let received = receive(frame.encode(), ConnectionRole::Pull, Dialer).unwrap();
        prop_assert_eq!(PullFrame::decode(&received), Ok(frame));
    }

    #[test]
    fn frames_about_pulls_are_read_as_they_were_written(
        ids in (id(), id(), id(), 1..1_u64 << 62),
        (index, term) in (1..1_u64 << 62, 1..1_u64 << 62),
        conf in conf(),
        gone in vec((id(), id(), id()), 1..6),
        finished in vec(vec(any::<u8>(), 512), 0..4),
        after in prop::option::of((1..u32::MAX, 0..crate::MAX_CHUNKS)),
    ) {
        let (group, from) = (GroupId(ids.0), PeerId(ids.1));
        let parties = PullParties { group, from, to: PeerId(ids.2), term: Term(ids.3) };
        let since = Position { index: Index(index), term: Term(term) };
        let offer = PullOffer { parties, applied: Index(index) };
        prop_assert_eq!(receive_peer(offer.encode()), Ok(PeerFrame::PullOffer(offer)));
        let pin = PullPin { parties, since };
        prop_assert_eq!(receive_peer(pin.encode()), Ok(PeerFrame::PullPin(pin)));
        let pulled = Pulled { parties, since, conf };
        prop_assert_eq!(receive_peer(pulled.encode()), Ok(PeerFrame::Pulled(pulled)));
        let gone: Vec<_> = gone
            .into_iter()
            .map(|(group, peer, to)| Gone {
                group: GroupId(group),
                peer: PeerId(peer),
                to: PeerId(to),
            })
            .collect();
        let frames: Vec<_> = encode_gone(&gone).map(receive_peer).collect();
        prop_assert_eq!(frames, [Ok(PeerFrame::Gone(gone))]);
        let finished = finished.into_iter().zip(1..).map(|(bits, n)| FinishedChunks {
            volume: VolumeId(n),
            chunks: Box::new(bits.try_into().unwrap()),
        });
        let pull = Pull {
            group,
            peer: from,
            since: Index(index),
            finished_since: Index(term),
            after: after.map(|(volume, chunk)| (VolumeId(volume), ChunkIndex(chunk))),
            finished: finished.collect(),
        };
        let frame = receive(pull.encode(), ConnectionRole::Pull, Acceptor).unwrap();
        prop_assert_eq!(Pull::decode(&frame), Ok(pull));
    }
}

fn request() -> impl Strategy<Value = Request> {
    let read = (id(), number(), number(), 0..4000_u16, 1..90_u16, any::<bool>());
    prop_oneof![
        (id(), op()).prop_map(|(group, op)| Request::Op { group: GroupId(group), op }),
        read.prop_map(|(group, epoch, token, first, blocks, states_only)| {
            Request::Read(ReadRequest {
                group: GroupId(group),
                epoch: AttachEpoch(epoch),
                token: Index(token),
                volume: VolumeId(8),
                layer: Layer(2),
                range: BlockRange { chunk: ChunkIndex(1 << 21), first, blocks },
                states_only,
            })
        }),
        (prop::option::of(id()), number()).prop_map(|(group, after)| Request::Status {
            group: group.map(GroupId),
            after: GroupId(after),
        }),
    ]
}

fn error() -> impl Strategy<Value = RequestError> {
    let code = prop::sample::select(ErrorCode::ALL);
    (code, any::<u32>(), any::<u64>(), any::<u64>(), prop::option::of(1..u32::MAX), ".{0,90}")
        .prop_map(|(code, retry_after_ms, group, value, leader, text)| RequestError {
            code,
            retry_after_ms,
            group: GroupId(group),
            value,
            leader: leader.map(ServerId),
            text,
        })
}

/// A request with an answer to it.
fn answer() -> impl Strategy<Value = (Request, Result<Answer, RequestError>)> {
    let kinds = (vec(0..3_u8, 90), any::<u8>(), number(), number(), error());
    (request(), kinds, 0..4_u8, vec((1..9_u64, 0..4_u8, 0..6_u8), 0..5)).prop_map(
        |(request, (states, seed, index, epoch, error), dice, rows)| {
            let answer = match &request {
                _ if dice == 0 => return (request, Err(error)),
                Request::Op { .. } => Answer::Op(OpAnswer {
                    index: Index(index),
                    epoch: AttachEpoch(epoch),
                    is_duplicate: dice == 1,
                }),
                Request::Read(read) => Answer::Read(read_answer(read, &states, seed)),
                Request::Status { .. } => Answer::Status(status(index, rows)),
            };
            (request, Ok(answer))
        },
    )
}

fn status(index: u64, rows: Vec<(u64, u8, u8)>) -> StatusAnswer {
    use ReplicaState::*;
    let mut group = 0;
    let replicas = rows.into_iter().map(|(more, role, state)| {
        group += more;
        ReplicaStatus {
            group: GroupId(group),
            peer: PeerId(more),
            leader: PeerId(group % 3),
            leader_server: (state > 2).then_some(ServerId(7)),
            role: [Role::Follower, Role::Candidate, Role::Leader, Role::Learner][usize::from(role)],
            state: [Exact, Replaying, Installing, Lost, Stopped, Creating][usize::from(state)],
            term: Term(1),
            last: Index(index),
            commit: Index(3),
            applied: Index(4),
            durable_commit: Index(5),
            base: Index(6),
            barrier: Index(7),
        }
    });
    StatusAnswer {
        replicas: replicas.collect(),
        server: ServerId(1),
        mark: index,
        slots: 100,
        free_slots: 50,
        ring_bytes: 1 << 40,
        ring_used_bytes: 4096,
        checkpoint: CheckpointNumber(77),
        has_more: index.is_multiple_of(2),
    }
}

fn pull_item() -> impl Strategy<Value = PullItem> {
    let content = prop_oneof![
        (0..4000_u16, vec(any::<u8>(), 1..4)).prop_map(|(first, seeds)| {
            let data: Vec<u8> = seeds.iter().flat_map(|seed| [*seed; BLOCK_BYTES]).collect();
            let crcs = block_crcs(&data);
            PullContent::Blocks { first, crcs, data: data.into() }
        }),
        (0..2000_u16, 1..2000_u16).prop_map(|(first, blocks)| PullContent::Zeros { first, blocks }),
        (vec(any::<u8>(), 512), any::<bool>()).prop_map(|(bits, is_last)| {
            PullContent::Bitmap { bits: Box::new(bits.try_into().unwrap()), is_last }
        }),
        (1..100_u32).prop_map(|chunks| PullContent::Absent { chunks }),
    ];
    (1..4_u32, 0..3_u32, 0..50_u32, content).prop_map(|(volume, layer, chunk, content)| {
        let (volume, layer, chunk) = (VolumeId(volume), Layer(layer), ChunkIndex(chunk));
        PullItem { at: PullChunk { volume, layer, chunk }, content }
    })
}

fn pull_frame() -> impl Strategy<Value = PullFrame> {
    let begin = (1..1_u64 << 62, id(), any::<u32>(), any::<bool>(), conf());
    let volume = (1..5_u32, any::<u32>(), 0..1_u64 << 62, any::<bool>(), vec(1..9_u32, 0..4));
    let volume = (volume, prop::option::of((1..1_u64 << 62, any::<u8>())));
    prop_oneof![
        begin.prop_map(|(index, peer, state_frames, sends_everything, conf)| {
            let applied = Position { index: Index(index), term: Term(index) };
            let peer = PeerId(peer);
            PullFrame::Begin(PullBegin { applied, peer, state_frames, sends_everything, conf })
        }),
        vec(volume, 1..4).prop_map(|volumes| {
            let mut id = 0;
            let volumes =
                volumes.into_iter().map(|((more, nonce, epoch, flag, layers), window)| {
                    id += more;
                    let mut layer = 0;
                    let layers = layers.into_iter().map(|more| {
                        layer += more;
                        Layer(layer)
                    });
                    let dropped_layers = layers.collect();
                    let window = window
                        .map(|(floor, bits)| Window::new(Sequence(floor), Box::new([bits; 512])));
                    let parent = flag.then_some(Parent { volume: VolumeId(9), layer: Layer(2) });
                    let (volume, epoch) = (VolumeId(id), AttachEpoch(epoch));
                    let state =
                        VolumeState { volume, parent, epoch, nonce, window, dropped_layers };
                    PulledVolume { state, is_deleted: flag }
                });
            PullFrame::State(volumes.collect())
        }),
        (number(), vec(pull_item(), 0..5)).prop_map(|(applied, mut items)| {
            items.sort_by_key(|item| (item.at.volume, item.at.chunk));
            PullFrame::Batch(PullBatch { applied: Index(applied), items })
        }),
        (number(), any::<u64>()).prop_map(|(applied, bytes)| {
            PullFrame::End(Ok(PullEnd { applied: Index(applied), bytes, chunks: bytes / 3 }))
        }),
        error().prop_map(|error| PullFrame::End(Err(error))),
    ]
}
