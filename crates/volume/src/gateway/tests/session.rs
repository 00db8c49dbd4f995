//! Sessions, one behaviour at a time.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;

use crate::gateway::map::BLOCK;
use crate::gateway::{
    Attachment, Closed, Counters, Done, Extent, Failure, GroupError, GroupReplicas, Output,
    REGION_BLOCKS, RegionIndex, SendId, Session, SessionConfig, UserId, UserRequest,
};
use crate::op::{BLOCK_BYTES, BlockOp, Change, Op, block_crcs};
use crate::request::{
    Answer, BlockState, ErrorCode, OpAnswer, ReadAnswer, ReadRequest, Request, RequestError,
};
use crate::types::{AttachEpoch, GroupId, Index, Layer, ServerId, VolumeId};
use crate::window::WINDOW_NUMBERS;

mod retries;
mod stuck;

const GROUP: GroupId = GroupId(5);
const EPOCH: AttachEpoch = AttachEpoch(3);
const OWN: ServerId = ServerId(2);

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A session of a volume of two regions, of which the first one has a group on the servers 1 to 3.
struct Harness {
    session: Session,
    counters: Arc<Counters>,
    now: Duration,
    index: u64,
    sent: Vec<(SendId, ServerId, Request)>,
    completed: Vec<(UserId, Result<Done, Failure>)>,
    registry: Vec<&'static str>,
    stuck: Vec<Option<String>>,
    full: Vec<Option<String>>,
    ended: Option<Failure>,
}

impl Harness {
    fn new() -> Self {
        Self::with(None, 2 * REGION_BLOCKS * BLOCK)
    }

    fn with(io_timeout: Option<Duration>, size_bytes: u64) -> Self {
        let attachment = Attachment {
            volume: VolumeId(9),
            parent: None,
            layer: Layer(0),
            size_bytes,
            epoch: EPOCH,
            nonce: 1,
            gateway: Some(OWN),
            groups: vec![(RegionIndex(0), view(&[1, 2, 3]))],
        };
        let counters = Arc::new(Counters::default());
        let config = SessionConfig { io_timeout, ..SessionConfig::default() };
        let session = Session::new(attachment, config, counters.clone());
        let mut harness = Self {
            session,
            counters,
            now: Duration::ZERO,
            index: 0,
            sent: Vec::new(),
            completed: Vec::new(),
            registry: Vec::new(),
            stuck: Vec::new(),
            full: Vec::new(),
            ended: None,
        };
        harness.drain();
        let (id, server, _) = harness.take_sent();
        assert_eq!(server, OWN, "the leader follows the attachment");
        harness.applied(id);
        harness
    }

    fn drain(&mut self) {
        while let Some(output) = self.session.next_output() {
            match output {
                Output::Send { id, server, request } => self.sent.push((id, server, request)),
                Output::Complete { id, result } => self.completed.push((id, result)),
                Output::CreateGroup { .. } => self.registry.push("create"),
                Output::ReadGroup { .. } => self.registry.push("read"),
                Output::Attached => {}
                Output::Stuck(reason) => self.stuck.push(reason),
                Output::Full(reason) => self.full.push(reason),
                Output::Ended(failure) => self.ended = Some(failure),
            }
        }
    }

    fn submit(&mut self, request: UserRequest) -> UserId {
        let id = self.session.submit(self.now, request);
        self.drain();
        id
    }

    fn write(&mut self, block: u64) -> UserId {
        let data = Bytes::from(vec![block as u8 | 1; BLOCK_BYTES]);
        self.submit(UserRequest::Write { offset: block * BLOCK, data })
    }

    fn read(&mut self, block: u64) -> UserId {
        self.submit(UserRequest::Read { offset: block * BLOCK, len: BLOCK })
    }

    /// The only request that was sent since the last call.
    #[track_caller]
    fn take_sent(&mut self) -> (SendId, ServerId, Request) {
        assert_eq!(self.sent.len(), 1, "{:?}", self.sent);
        self.sent.remove(0)
    }

    #[track_caller]
    fn take_op(&mut self) -> (SendId, ServerId, BlockOp) {
        match self.take_sent() {
            (id, server, Request::Op { op: Op::Blocks(op), .. }) => (id, server, op),
            other => panic!("no change of blocks: {other:?}"),
        }
    }

    #[track_caller]
    fn take_read(&mut self) -> (SendId, ServerId, ReadRequest) {
        match self.take_sent() {
            (id, server, Request::Read(read)) => (id, server, read),
            other => panic!("no read: {other:?}"),
        }
    }

    fn outcome(&mut self, id: SendId, outcome: Result<Result<Answer, RequestError>, Closed>) {
        self.session.answer(self.now, id, outcome);
        self.drain();
    }

    fn applied(&mut self, id: SendId) {
        self.index += 1;
        let answer = OpAnswer { index: Index(self.index), epoch: EPOCH, is_duplicate: false };
        self.outcome(id, Ok(Ok(Answer::Op(answer))));
    }

    fn error(&mut self, id: SendId, code: ErrorCode) {
        self.outcome(id, Ok(Err(RequestError::new(code, GROUP, "test"))));
    }

    fn hint(&mut self, id: SendId, leader: u32) {
        let error = RequestError::new(ErrorCode::NotLeader, GROUP, "");
        self.outcome(id, Ok(Err(RequestError { leader: Some(ServerId(leader)), ..error })));
    }

    fn advance(&mut self, by: Duration) {
        self.now += by;
        self.session.advance(self.now);
        self.drain();
    }

    fn known(&mut self, region: u16, view: Result<GroupReplicas, GroupError>) {
        self.session.group_known(self.now, RegionIndex(region), view);
        self.drain();
    }

    fn is_done(&self, user: UserId) -> bool {
        self.completed.iter().any(|(id, _)| *id == user)
    }
}

fn view(servers: &[u32]) -> GroupReplicas {
    GroupReplicas { group: GROUP, replicas: servers.iter().copied().map(ServerId).collect() }
}

fn blocks(applied: u64, data: &[u8]) -> Answer {
    let crcs = block_crcs(data);
    Answer::Read(ReadAnswer {
        applied: Index(applied),
        states: vec![BlockState::Data; crcs.len()],
        crcs,
        data: Bytes::copy_from_slice(data),
    })
}

fn only_states(states: Vec<BlockState>) -> Answer {
    let (crcs, data) = (Vec::new(), Bytes::new());
    Answer::Read(ReadAnswer { applied: Index(1), states, crcs, data })
}

#[test]
fn a_session_serves_when_all_groups_have_answered_the_attach() {
    let groups = vec![(RegionIndex(0), view(&[1])), (RegionIndex(1), view(&[2]))];
    let attachment =
        Attachment { gateway: None, groups, ..Harness::new().session.attachment().clone() };
    let mut session = Session::new(attachment, SessionConfig::default(), Arc::default());
    let mut sent = Vec::new();
    while let Some(output) = session.next_output() {
        let Output::Send { id, .. } = output else { panic!("attached without an answer") };
        sent.push(id);
    }
    let answer = OpAnswer { index: Index(1), epoch: EPOCH, is_duplicate: false };
    session.answer(Duration::ZERO, sent[1], Ok(Ok(Answer::Op(answer))));
    assert!(session.next_output().is_none());
    session.answer(Duration::ZERO, sent[0], Ok(Ok(Answer::Op(answer))));
    assert!(matches!(session.next_output(), Some(Output::Attached)));
}

#[test]
fn requests_are_cut_at_256_blocks_and_at_chunks() {
    let mut test = Harness::new();
    let data = Bytes::from(vec![1; 600 * BLOCK_BYTES]);
    let user = test.submit(UserRequest::Write { offset: (4096 - 300) * BLOCK, data });
    let mut ranges = Vec::new();
    for (id, _, request) in std::mem::take(&mut test.sent) {
        let Request::Op { op: Op::Blocks(op), .. } = request else { panic!("no change") };
        let Change::Write { data, crcs } = &op.change else { panic!("no write") };
        assert_eq!((data.len(), crcs.len()), (crcs.len() * BLOCK_BYTES, op.range.blocks.into()));
        ranges.push((op.range.chunk.0, op.range.first, op.range.blocks));
        test.applied(id);
    }
    assert_eq!(ranges, [(0, 3796, 256), (0, 4052, 44), (1, 0, 256), (1, 256, 44)]);
    assert_eq!(test.completed, [(user, Ok(Done::Changed))]);
}

#[test]
fn a_request_sends_a_bounded_number_of_pieces_at_a_time() {
    let mut test = Harness::new();
    let user = test.submit(UserRequest::Zero { offset: 0, len: REGION_BLOCKS * BLOCK });
    let mut count = 0;
    while !test.sent.is_empty() {
        assert!(test.sent.len() <= 64);
        let (id, _, _) = test.sent.remove(0);
        test.applied(id);
        count += 1;
    }
    assert_eq!(count, 4096, "a chunk each");
    assert!(test.is_done(user));
}

#[test]
fn a_region_without_group_reads_as_zeros_without_a_request() {
    let mut test = Harness::new();
    let user = test.submit(UserRequest::Read { offset: REGION_BLOCKS * BLOCK + 5, len: 10 });
    assert_eq!(test.completed, [(user, Ok(Done::Read(Bytes::from(vec![0; 10]))))]);
    let offset = REGION_BLOCKS * BLOCK;
    let user = test.submit(UserRequest::Discard { offset, len: offset });
    assert_eq!(test.completed[1], (user, Ok(Done::Changed)));
    assert!(test.sent.is_empty() && test.registry.is_empty());
}

#[test]
fn the_first_write_of_a_region_creates_its_group() {
    let mut test = Harness::new();
    test.write(REGION_BLOCKS);
    test.write(REGION_BLOCKS + 1);
    assert_eq!((test.sent.len(), &test.registry[..]), (0, &["create"][..]));
    test.known(1, Err(GroupError::Unavailable("away".into())));
    assert_eq!(test.registry, ["create"]);
    test.advance(millis(13));
    assert_eq!(test.registry, ["create", "create"]);
    test.known(1, Ok(view(&[3])));
    assert_eq!(test.sent.len(), 2);
    assert!(test.sent.iter().all(|(_, server, _)| *server == ServerId(3)));
}

#[test]
fn an_overlapping_write_is_sent_when_the_earlier_one_is_answered() {
    let mut test = Harness::new();
    test.write(4);
    let (id, _, _) = test.take_op();
    test.submit(UserRequest::Discard { offset: 0, len: 8 * BLOCK });
    test.write(7);
    assert!(test.sent.is_empty(), "the write waits for the discard");
    assert_eq!(test.counters.lock_waits.get(), 2);
    test.applied(id);
    let (id, _, op) = test.take_op();
    assert_eq!((op.change, op.number.0, op.floor_distance), (Change::Discard, 2, 0));
    test.applied(id);
    assert_eq!(test.take_op().2.range.first, 7);
}

#[test]
fn a_failed_op_keeps_its_range_until_the_floor_has_passed_its_number() {
    let mut test = Harness::new();
    test.write(1);
    let (first, _, _) = test.take_op();
    let failed = test.write(2);
    let (second, _, _) = test.take_op();
    test.error(second, ErrorCode::NoSpace);
    assert_eq!(test.completed, [(failed, Err(Failure::NoSpace("test".into())))]);
    test.write(2);
    assert!(test.sent.is_empty(), "a late copy of the failed op could still take effect");
    test.applied(first);
    let (_, _, op) = test.take_op();
    assert_eq!((op.number.0, op.floor().0), (3, 3));
}

#[test]
fn a_stuck_op_bounds_the_numbers_and_what_waits_is_sent_in_order() {
    let mut test = Harness::new();
    test.write(0);
    let (stuck, _, _) = test.take_op();
    for block in 1..WINDOW_NUMBERS {
        test.write(block);
        let (id, _, op) = test.take_op();
        assert_eq!(u64::from(op.floor_distance), block);
        test.applied(id);
    }
    let waiting = [test.write(5000), test.write(5001)];
    assert!(test.sent.is_empty());
    let [users, pieces, locks, _, numbers, queued] = test.session.sizes();
    assert_eq!((users, pieces, locks, numbers, queued), (3, 3, 3, 4096, 2));
    test.applied(stuck);
    let numbers: Vec<u64> = std::mem::take(&mut test.sent)
        .into_iter()
        .map(|(id, _, request)| {
            let Request::Op { op: Op::Blocks(op), .. } = request else { panic!("no change") };
            assert_eq!(op.floor().0, 4097);
            test.applied(id);
            op.number.0
        })
        .collect();
    assert_eq!(numbers, [4097, 4098]);
    assert!(waiting.into_iter().all(|user| test.is_done(user)));
    assert_eq!(test.session.sizes(), [0; 6]);
}

#[test]
fn a_leader_that_is_named_is_asked_at_once_and_twice_at_most() {
    let mut test = Harness::new();
    test.write(1);
    let (id, server, op) = test.take_op();
    assert_eq!(server, OWN);
    test.hint(id, 3);
    let (id, server, again) = test.take_op();
    assert_eq!((server, again.number), (ServerId(3), op.number));
    test.hint(id, 1);
    let (id, server, _) = test.take_op();
    assert_eq!(server, ServerId(1));
    test.hint(id, 3);
    let (id, server, _) = test.take_op();
    assert_eq!(server, OWN, "the next replica, since two hints did not help");
    test.applied(id);
    test.write(9);
    assert_eq!(test.take_op().1, OWN, "the server that answered is the presumed leader");
}

#[test]
fn the_server_that_answers_is_the_presumed_leader() {
    let mut test = Harness::new();
    test.write(1);
    let (id, _, _) = test.take_op();
    test.outcome(id, Err(Closed));
    let (id, server, _) = test.take_op();
    assert_eq!(server, ServerId(3), "the next replica, at once");
    test.applied(id);
    test.write(2);
    assert_eq!(test.take_op().1, ServerId(3));
}

#[test]
fn an_answer_of_another_epoch_or_below_the_token_does_not_count() {
    let mut test = Harness::new();
    let users = [test.write(1), test.read(2)];
    let (op, read) = (test.sent[0].0, test.sent[1].0);
    test.sent.clear();
    let answer = OpAnswer { index: Index(9), epoch: AttachEpoch(4), is_duplicate: false };
    test.outcome(op, Ok(Ok(Answer::Op(answer))));
    test.outcome(read, Ok(Ok(blocks(0, &[7; BLOCK_BYTES]))));
    assert!(users.into_iter().all(|user| !test.is_done(user)));
    let servers: Vec<_> = test.sent.iter().map(|(_, server, _)| *server).collect();
    assert_eq!(servers, [ServerId(3); 2], "the next replica");
}

#[test]
fn a_request_that_waits_for_an_attach_is_not_sent_by_errors_of_its_copies() {
    let mut test = Harness::new();
    test.write(1);
    let (first, _, _) = test.take_op();
    test.advance(millis(1000));
    let (second, _, _) = test.take_op();
    test.error(second, ErrorCode::NotAttached);
    let (attach, _, _) = test.take_sent();
    test.outcome(first, Err(Closed));
    test.advance(millis(100));
    assert!(test.sent.is_empty());
    test.applied(attach);
    test.take_op();
}

#[test]
fn closed_connections_are_retried_with_growing_delays_and_one_number() {
    let mut test = Harness::new();
    test.write(1);
    for at in 0..12 {
        // A back-off comes when all replicas were tried.
        let mut tried = Vec::new();
        while !test.sent.is_empty() {
            let (id, server, op) = test.take_op();
            assert_eq!(op.number.0, 1);
            tried.push(server.0);
            test.outcome(id, Err(Closed));
        }
        tried.sort_unstable();
        assert_eq!(tried, [1, 2, 3]);
        let delay = test.session.wakes_at().unwrap() - test.now;
        let exact = (10 << at).min(250);
        let millis = delay.as_millis();
        assert!((exact * 3 / 4..=exact * 5 / 4).contains(&millis), "{millis} after {at}");
        test.advance(delay);
    }
}

#[test]
fn without_an_answer_a_copy_goes_to_the_next_replica() {
    for (is_write, patience) in [(true, 1000), (false, 500)] {
        let mut test = Harness::new();
        let user = if is_write { test.write(1) } else { test.read(1) };
        let (first, _, _) = test.take_sent();
        test.advance(millis(patience - 1));
        assert!(test.sent.is_empty());
        test.advance(millis(1));
        let (_, server, _) = test.take_sent();
        assert_eq!(server, ServerId(3));
        test.advance(millis(2 * patience));
        assert_eq!(test.take_sent().1, ServerId(1));
        // The first answer counts, also of the first copy.
        match is_write {
            true => test.applied(first),
            false => test.outcome(first, Ok(Ok(blocks(1, &[7; BLOCK_BYTES])))),
        }
        assert!(test.is_done(user));
        assert_eq!(test.session.sizes(), [0; 6]);
    }
}

/// With a deep queue and a slow follower, each write waits for many others.
#[test]
fn a_leader_that_applies_ops_gets_no_second_copy_and_the_others_none() {
    let mut test = Harness::new();
    let (users, sent): (Vec<_>, Vec<_>) =
        (0..20).map(|block| (test.write(block), test.take_op())).unzip();
    for (id, server, _) in &sent[..19] {
        assert_eq!(*server, OWN);
        test.advance(millis(900));
        assert!(test.sent.is_empty());
        test.applied(*id);
    }
    // It has stopped.
    test.advance(millis(1000));
    let (copy, server, _) = test.take_op();
    assert_ne!(server, OWN);
    test.hint(copy, OWN.0);
    test.advance(millis(500));
    assert_ne!(test.take_op().1, OWN, "it was heard of 1.5 s ago");
    test.applied(sent[19].0);
    assert!(users.into_iter().all(|user| test.is_done(user)));
    assert_eq!(test.session.sizes(), [0; 6]);
}

#[test]
fn a_slow_leader_gets_no_copy_when_another_replica_names_it() {
    let mut test = Harness::new();
    test.write(1);
    let (first, _, _) = test.take_op();
    test.advance(millis(1000));
    let (copy, server, _) = test.take_op();
    assert_eq!(server, ServerId(3));
    test.hint(copy, OWN.0);
    for _ in 0..3 {
        assert!(test.sent.is_empty());
        test.advance(millis(499));
        assert!(test.sent.is_empty());
        test.advance(millis(1));
        let (copy, server, _) = test.take_op();
        assert_eq!(server, ServerId(3), "the leader is not asked to, and the others are");
        test.hint(copy, OWN.0);
    }
    test.applied(first);
    assert_eq!(test.session.sizes(), [0; 6]);
}

#[test]
fn a_read_does_not_wait_for_a_write_of_its_blocks() {
    let mut test = Harness::new();
    test.write(1);
    test.take_op();
    test.read(1);
    test.take_read();
}

#[test]
fn a_busy_server_is_asked_again_after_the_time_that_it_names() {
    let mut test = Harness::new();
    test.write(1);
    let (id, _, _) = test.take_op();
    let error = RequestError::new(ErrorCode::Busy, GROUP, "");
    test.outcome(id, Ok(Err(RequestError { retry_after_ms: 200, ..error })));
    let delay = test.session.wakes_at().unwrap() - test.now;
    assert!((200..=250).contains(&delay.as_millis()), "{delay:?}");
    test.advance(delay);
    assert_eq!(test.take_op().1, OWN);
}

#[test]
fn a_read_goes_to_the_own_server_and_to_the_leader_when_that_is_behind() {
    let mut test = Harness::new();
    test.write(1);
    let (id, _, _) = test.take_op();
    test.hint(id, 3);
    let (id, _, _) = test.take_op();
    test.applied(id);
    test.read(1);
    let (id, server, read) = test.take_read();
    assert_eq!((server, read.token, read.epoch), (OWN, Index(2), EPOCH));
    test.error(id, ErrorCode::Behind);
    let (id, server, read) = test.take_read();
    assert_eq!((server, read.token), (ServerId(3), Index(2)));
    test.outcome(id, Ok(Ok(blocks(8, &[7; BLOCK_BYTES]))));
    test.read(1);
    assert_eq!(test.take_read().2.token, Index(8), "a read raises the token");
}

#[test]
fn a_block_that_all_replicas_have_lost_fails_the_read() {
    let mut test = Harness::new();
    let user = test.read(1);
    for _ in 0..2 {
        let (id, _, _) = test.take_read();
        test.error(id, ErrorCode::Damaged);
    }
    // A wrong checksum of an answer counts like the error.
    let (id, _, _) = test.take_read();
    let Answer::Read(mut answer) = blocks(1, &[7; BLOCK_BYTES]) else { unreachable!() };
    answer.crcs[0] ^= 1;
    test.outcome(id, Ok(Ok(Answer::Read(answer))));
    assert_eq!(test.completed, [(user, Err(Failure::Damaged))]);
    assert_eq!(test.counters.bad_answers.get(), 1);
}

#[test]
fn a_group_that_lacks_the_attachment_gets_it_again_before_its_requests() {
    let mut test = Harness::new();
    test.write(1);
    let (first, _, _) = test.take_op();
    test.read(2);
    let (second, _, _) = test.take_read();
    test.error(first, ErrorCode::NotAttached);
    let (attach, _, request) = test.take_sent();
    assert!(matches!(request, Request::Op { op: Op::Attach(_), .. }));
    test.error(second, ErrorCode::NotAttached);
    test.write(3);
    assert!(test.sent.is_empty(), "one attach is enough, and new requests wait for it");
    test.applied(attach);
    assert_eq!(test.sent.len(), 3);
    let numbers: Vec<_> = test
        .sent
        .iter()
        .filter_map(|(_, _, request)| match request {
            Request::Op { op: Op::Blocks(op), .. } => Some(op.number.0),
            _ => None,
        })
        .collect();
    assert_eq!(numbers, [1, 2]);
}

#[test]
fn an_unknown_group_is_read_from_the_registry_once() {
    let mut test = Harness::new();
    test.write(1);
    test.write(2);
    for (id, _, _) in std::mem::take(&mut test.sent) {
        test.error(id, ErrorCode::UnknownGroup);
    }
    assert_eq!(test.registry, ["read"]);
    test.sent.clear();
    test.known(0, Ok(view(&[7, 8, 9])));
    test.write(3);
    assert_eq!(test.take_op().1, ServerId(7));
}

#[test]
fn fencing_ends_all_requests_and_refuses_new_ones() {
    let mut test = Harness::new();
    let users = [test.write(1), test.write(1), test.read(4), test.write(REGION_BLOCKS)];
    let (id, _, _) = test.sent[0].clone();
    test.error(id, ErrorCode::Fenced);
    assert_eq!(test.ended, Some(Failure::Fenced));
    assert_eq!(test.completed, users.map(|user| (user, Err(Failure::Fenced))));
    assert_eq!(test.session.sizes(), [0; 6]);
    let user = test.submit(UserRequest::Flush);
    assert_eq!(test.completed.last(), Some(&(user, Err(Failure::Fenced))));
    assert_eq!(test.counters.status.failures.get(), 0, "a flush is not a query");
}

#[test]
fn a_timeout_reports_a_request_wherever_it_waits() {
    let mut test = Harness::with(Some(millis(3000)), 2 * REGION_BLOCKS * BLOCK);
    let sent = test.write(1);
    let locked = test.write(1);
    let absent = test.write(REGION_BLOCKS);
    let read = test.read(1);
    test.advance(millis(1500));
    let later = test.write(1);
    test.advance(millis(1500));
    let failures: Vec<_> = test.completed.iter().map(|(user, _)| *user).collect();
    assert_eq!(failures, [sent, locked, absent, read]);
    let is_timeout = |(_, result): &(_, _)| matches!(result, Err(Failure::TimedOut(_)));
    assert!(test.completed.iter().all(is_timeout), "{:?}", test.completed);
    // The numbers below are completed, so the range of the failed write is free again.
    let (_, _, request) = test.sent.pop().unwrap();
    let Request::Op { op: Op::Blocks(op), .. } = request else { panic!("no change") };
    assert_eq!((op.number.0, op.floor().0), (2, 2));
    assert!(!test.is_done(later));
}

#[test]
fn a_request_that_times_out_while_it_waits_for_a_number_is_not_sent() {
    let mut test = Harness::with(Some(millis(900)), 2 * REGION_BLOCKS * BLOCK);
    test.write(0);
    let (first, _, _) = test.take_op();
    test.advance(millis(10));
    let late = test.write(0);
    test.advance(millis(10));
    for block in 1..=WINDOW_NUMBERS {
        test.write(block);
    }
    let (second, _, _) = test.sent[0];
    test.applied(first);
    assert_eq!(test.sent.len() as u64, WINDOW_NUMBERS, "the late one is behind all of them");
    test.advance(millis(890));
    assert!(matches!(&test.completed.last(), Some((id, Err(Failure::TimedOut(_)))) if *id == late));
    let before = test.sent.len();
    test.applied(second);
    assert_eq!(test.sent.len(), before);
}

#[test]
fn requests_that_time_out_leave_nothing_behind() {
    let mut test = Harness::with(Some(millis(100)), 2 * REGION_BLOCKS * BLOCK);
    for round in 0..50 {
        for block in 0..100 {
            test.write(block * 2 + round % 2);
            test.write(REGION_BLOCKS + block);
            test.submit(UserRequest::Write { offset: block * 777, data: vec![1; 99].into() });
        }
        test.advance(millis(101));
        assert_eq!(test.session.sizes(), [0; 6], "round {round}");
    }
}

#[test]
fn status_returns_extents_and_skips_regions_without_group() {
    let mut test = Harness::new();
    let len = 10 * BLOCK;
    let user = test.submit(UserRequest::Status { offset: BLOCK + 100, len });
    let (id, _, read) = test.take_read();
    assert!(read.states_only);
    assert_eq!((read.range.first, read.range.blocks), (1, 11));
    use BlockState::{Absent, Data, Zeros};
    let states = [vec![Data; 3], vec![Zeros; 2], vec![Absent; 6]].concat();
    test.outcome(id, Ok(Ok(only_states(states))));
    let extent = |len, state| Extent { len, state };
    let expected = vec![
        extent(3 * BLOCK - 100, Data),
        extent(2 * BLOCK, Zeros),
        extent(5 * BLOCK + 100, Absent),
    ];
    assert_eq!(test.completed, [(user, Ok(Done::Status(expected)))]);
    let len = REGION_BLOCKS * BLOCK;
    let user = test.submit(UserRequest::Status { offset: len, len });
    assert_eq!(test.completed[1], (user, Ok(Done::Status(vec![extent(len, Absent)]))));
}

#[test]
fn a_status_query_of_a_large_range_ends_early() {
    let mut test = Harness::new();
    let user = test.submit(UserRequest::Status { offset: 0, len: 2 * REGION_BLOCKS * BLOCK });
    assert_eq!(test.sent.len(), 64);
    for (id, _, _) in std::mem::take(&mut test.sent) {
        let states = vec![BlockState::Absent; 4096];
        test.outcome(id, Ok(Ok(only_states(states))));
    }
    let extent = Extent { len: 64 * 4096 * BLOCK, state: BlockState::Absent };
    assert_eq!(test.completed, [(user, Ok(Done::Status(vec![extent])))]);
}

#[test]
fn a_request_beyond_the_end_is_refused() {
    let mut test = Harness::with(None, 10 * BLOCK);
    for (offset, len) in [(9 * BLOCK, BLOCK + 1), (u64::MAX, 2)] {
        test.submit(UserRequest::Read { offset, len });
        let (_, result) = test.completed.pop().unwrap();
        assert!(matches!(result, Err(Failure::OutOfBounds { .. })), "{result:?}");
    }
    assert!(test.sent.is_empty());
}

/// Any outcome of any sending.
fn outcome() -> impl Strategy<Value = Result<Result<Answer, RequestError>, Closed>> {
    let state =
        prop_oneof![Just(BlockState::Absent), Just(BlockState::Zeros), Just(BlockState::Data)];
    let index = prop_oneof![0..5_u64, any::<u64>()].prop_map(Index);
    let op = (index.clone(), prop_oneof![Just(EPOCH), any::<u64>().prop_map(AttachEpoch)])
        .prop_map(|(index, epoch)| {
            Answer::Op(OpAnswer { index, epoch, is_duplicate: index.0 % 2 == 0 })
        });
    let states = prop::collection::vec(state, 0..4);
    let read = (index, states, prop::collection::vec(any::<u32>(), 0..4), 0..3_usize, 0..3_u8)
        .prop_map(|(applied, states, mut crcs, blocks, fit)| {
            // Only blocks of ones have their checksums.
            let mut data = vec![2; blocks * BLOCK_BYTES];
            let count = states.iter().filter(|state| **state == BlockState::Data).count();
            if fit > 0 {
                data = vec![2; count * BLOCK_BYTES];
                crcs.resize(count, 0);
            }
            if fit > 1 {
                data.fill(1);
                crcs = vec![crc32c::crc32c(&[1; BLOCK_BYTES]); count];
            }
            Answer::Read(ReadAnswer { applied, states, crcs, data: data.into() })
        });
    let error = (0..ErrorCode::ALL.len(), any::<u32>(), any::<u64>(), 0..5_u32).prop_map(
        |(code, retry_after_ms, value, leader)| RequestError {
            retry_after_ms,
            value,
            leader: (leader > 0).then_some(ServerId(leader)),
            ..RequestError::new(ErrorCode::ALL[code], GROUP, "")
        },
    );
    prop_oneof![
        3 => op.prop_map(|answer| Ok(Ok(answer))),
        3 => read.prop_map(|answer| Ok(Ok(answer))),
        3 => error.prop_map(|error| Ok(Err(error))),
        1 => Just(Err(Closed)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Answers are arbitrary, in any order, and may belong to other requests. A read that succeeds
    /// has returned what a valid answer had, and nothing is kept in the end.
    #[test]
    fn arbitrary_answers_neither_end_the_process_nor_pass_as_valid(
        steps in prop::collection::vec(
            (0..5_u8, 0..3_u64, any::<prop::sample::Index>(), outcome()), 1..120,
        ),
    ) {
        let mut test = Harness::new();
        let mut ids = Vec::new();
        for (kind, block, at, outcome) in steps {
            match kind {
                0 => { test.write(block); }
                1 => { test.read(block); }
                2 => {
                    let data = vec![3; 50].into();
                    test.submit(UserRequest::Write { offset: block * BLOCK + 9, data });
                }
                3 => test.advance(millis(at.index(2000) as u64)),
                _ => {}
            }
            ids.extend(test.sent.drain(..).map(|(id, _, _)| id));
            if !ids.is_empty() {
                test.outcome(ids[at.index(ids.len())], outcome);
            }
            for (_, result) in &test.completed {
                if let Ok(Done::Read(data)) = result {
                    let is_valid = data.len() == BLOCK_BYTES
                        && (data.iter().all(|byte| *byte == 0) || data.iter().all(|b| *b == 1));
                    prop_assert!(is_valid);
                }
            }
        }
        test.session.end(Failure::Detached);
        prop_assert_eq!(test.session.sizes(), [0; 6]);
    }
}
