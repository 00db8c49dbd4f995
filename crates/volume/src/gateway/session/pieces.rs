//! Requests to servers: sending, answers, errors, retries and copies.
//! `docs/format/volume-wire.md`, sections 5 and 10.

use std::time::Duration;

use super::{Phase, Session, Timer, back_off};
use crate::gateway::group::{Group, Refusal, Region};
use crate::gateway::map::RegionIndex;
use crate::gateway::piece::{Copy, Kind, OP_PATIENCE, Piece, Verdict, Wake, Work};
use crate::gateway::types::{Closed, Failure, Output, ReadPart, SendId, UserId};
use crate::op::{Attach, BlockOp, Op};
use crate::request::{Answer, ErrorCode, ReadRequest, Request, RequestError};
use crate::rules::Rule;
use crate::types::{Index, ServerId};

/// `NotLeader` with a leader is followed at once this many times in a row.
const MAX_HINTS: u32 = 2;

/// Time after which the other replicas are asked again when one has named a leader that does not
/// answer: they may have another leader by then.
const SILENT_LEADER: Duration = Duration::from_millis(500);

/// Bounds of the delay after `Busy`.
const BUSY_DELAY: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(5));

/// The delay before a group without replicas is used again.
const NO_REPLICA_DELAY: Duration = Duration::from_secs(1);

/// Why a server has not served a request, if it has not.
fn refusal(outcome: &Result<Result<Verdict, RequestError>, Closed>) -> Option<Refusal> {
    match outcome {
        Ok(Ok(Verdict::Applied(_) | Verdict::Blocks(..))) => None,
        Ok(Ok(Verdict::Damaged | Verdict::Invalid)) => Some(Refusal::BadAnswer),
        Ok(Err(error)) => Some(Refusal::Error(error.clone())),
        Err(Closed) => Some(Refusal::NotConnected),
    }
}

impl Session {
    /// Sends a new piece, or queues it for what it needs: the group, its `Attach`, a number.
    pub(super) fn start(&mut self, id: u64) {
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        let region = piece.region;
        let group = match self.regions.get_mut(&region) {
            Some(Region::Group(group)) => group,
            Some(Region::Creating { waiting, .. }) => return waiting.push(id),
            None => {
                let waiting = vec![id];
                let creating = Region::Creating { waiting, failures: 0, error: None, wake: None };
                self.regions.insert(region, creating);
                return self.request_group(region);
            }
        };
        match &mut piece.work {
            Work::Attach => {}
            _ if group.attach.is_some() => {
                piece.is_parked = true;
                return group.parked.push(id);
            }
            Work::Change { number: None, .. } => {
                group.waiting.push_back(id);
                return self.give_numbers(region);
            }
            Work::Change { .. } | Work::Read { .. } => {}
        }
        self.send_first(id);
    }

    /// Gives numbers to the pieces that wait for them, in order, and sends these pieces.
    fn give_numbers(&mut self, region: RegionIndex) {
        while let Some(group) = self.group(region)
            && let Some(&id) = group.waiting.front()
            && let Some(given) = group.numbers.allocate()
        {
            group.waiting.pop_front();
            let piece = self.pieces.get_mut(&id).expect("a removed piece does not wait");
            let Work::Change { number, .. } = &mut piece.work else {
                unreachable!("only changes wait for numbers")
            };
            *number = Some(given);
            self.send_first(id);
        }
    }

    /// Sends a piece to the server that should serve it.
    fn send_first(&mut self, id: u64) {
        let (own, now) = (self.attachment.gateway, self.now);
        let Some(piece) = self.pieces.get(&id) else { return };
        let (is_read, region) = (piece.is_read(), piece.region);
        let Some(group) = self.group(region) else { return };
        let target = match is_read {
            true => group.read_target(own, now),
            false => group.op_target(own),
        };
        match target {
            Some(server) => self.send(id, server),
            None => self.wait_for_replicas(id, Wake::Copy),
        }
    }

    fn send(&mut self, id: u64, server: ServerId) {
        let broken = self.broken;
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        let Some(Region::Group(group)) = self.regions.get_mut(&piece.region) else { return };
        let attachment = &self.attachment;
        let (volume, epoch, layer) = (attachment.volume, attachment.epoch, attachment.layer);
        let op = match &mut piece.work {
            Work::Attach => Op::Attach(Attach {
                volume,
                epoch,
                parent: attachment.parent,
                gateway: attachment.gateway,
                nonce: attachment.nonce,
            }),
            Work::Change { range, change, number } => {
                let current = number.as_mut().expect("a change is sent with a number");
                if broken.is(Rule::NumberOfRetry)
                    && piece.next_attempt > 0
                    && let Some(other) = group.numbers.allocate()
                {
                    group.numbers.complete(*current);
                    *current = other;
                }
                let floor = match broken.is(Rule::GatewayFloor) {
                    true => *current,
                    false => group.numbers.floor(),
                };
                Op::Blocks(BlockOp {
                    volume,
                    epoch,
                    layer,
                    number: *current,
                    floor_distance: (current.0 - floor.0) as u32,
                    range: *range,
                    change: change.clone(),
                })
            }
            Work::Read { range, states_only, token } => {
                let token = match broken.is(Rule::Token) {
                    true => *token.insert(Index(0)),
                    false => *token.get_or_insert(group.token),
                };
                let (group, range, states_only) = (group.view.group, *range, *states_only);
                let read = ReadRequest { group, epoch, token, volume, layer, range, states_only };
                return self.send_request(id, server, Request::Read(read));
            }
        };
        let group = group.view.group;
        self.send_request(id, server, Request::Op { group, op });
    }

    fn send_request(&mut self, id: u64, server: ServerId, request: Request) {
        let piece = self.pieces.get_mut(&id).expect("it is sent");
        let attempt = piece.next_attempt;
        piece.next_attempt += 1;
        piece.copies.retain(|copy| copy.server != server);
        piece.copies.push(Copy { server, attempt, sent: self.now });
        let at = self.now + piece.patience();
        let kind = piece.kind;
        self.count(kind).sends.add(1);
        self.set_wake(id, at, Wake::Copy);
        let id = SendId { piece: id, attempt };
        self.outputs.push_back(Output::Send { id, server, request });
    }

    /// Sets the one time at which something happens to a piece.
    pub(super) fn set_wake(&mut self, id: u64, at: Duration, wake: Wake) {
        self.clear_wake(id);
        if let Some(piece) = self.pieces.get_mut(&id) {
            piece.wake = Some((at, wake));
            self.wakes.insert((at, Timer::Piece(id)));
        }
    }

    fn clear_wake(&mut self, id: u64) {
        if let Some((at, _)) = self.pieces.get_mut(&id).and_then(|piece| piece.wake.take()) {
            self.wakes.remove(&(at, Timer::Piece(id)));
        }
    }

    /// Sends a piece whose time has come.
    pub(super) fn piece_due(&mut self, id: u64) {
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        let kind = piece.kind;
        match piece.wake.take() {
            Some((_, Wake::Again(server))) => {
                self.count(kind).retries.add(1);
                self.send(id, server);
            }
            Some((_, Wake::Next(after))) => self.send_next(id, after),
            Some((_, Wake::Copy)) => self.send_copy(id),
            None => {}
        }
    }

    fn send_copy(&mut self, id: u64) {
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        let Some(last) = piece.copies.last().copied() else { return self.send_first(id) };
        let Some(Region::Group(group)) = self.regions.get(&piece.region) else { return };
        if !piece.is_read() {
            // The others would only name the leader, and each copy carries all blocks.
            let applied = piece.copies.iter().filter_map(|copy| group.applied_at(copy.server));
            let until = applied.max().map(|at| at + OP_PATIENCE).filter(|until| *until > self.now);
            if let Some(until) = until {
                return self.set_wake(id, until, Wake::Copy);
            }
        }
        piece.silences += 1;
        let mut asked = piece.copies.iter().map(|copy| copy.server).collect();
        match group.next_target(last.server, &mut asked, &piece.damaged) {
            Some(server) => {
                let kind = piece.kind;
                self.count(kind).copies.add(1);
                self.send(id, server);
            }
            None => self.wait_for_replicas(id, Wake::Copy),
        }
    }

    fn send_next(&mut self, id: u64, after: ServerId) {
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        let Some(Region::Group(group)) = self.regions.get(&piece.region) else { return };
        // A server that has a copy and is silent would only be silent again.
        let is_silent = |copy: &&Copy| !group.is_lost(copy, self.now);
        let silent = piece.copies.iter().filter(is_silent).map(|copy| copy.server);
        let avoided: Vec<ServerId> = silent.chain(piece.damaged.iter().copied()).collect();
        let next = group.next_target(after, &mut piece.tried, &avoided);
        match next.or_else(|| group.next_target(after, &mut piece.tried, &piece.damaged)) {
            Some(server) => {
                let kind = piece.kind;
                self.count(kind).retries.add(1);
                self.send(id, server);
            }
            None => self.wait_for_replicas(id, Wake::Next(after)),
        }
    }

    /// The registry names no replica that could serve the piece.
    fn wait_for_replicas(&mut self, id: u64, wake: Wake) {
        if let Some(piece) = self.pieces.get(&id) {
            let region = piece.region;
            self.read_group(region);
            self.set_wake(id, self.now + NO_REPLICA_DELAY, wake);
        }
    }

    fn read_group(&mut self, region: RegionIndex) {
        if let Some(group) = self.group(region).filter(|group| !group.is_read) {
            group.is_read = true;
            let group = group.view.group;
            self.outputs.push_back(Output::ReadGroup { region, group });
        }
    }

    /// Takes the outcome of a sending. A success counts from any copy, an error only from the
    /// latest one at its server, since it says nothing about the others.
    pub(super) fn take_outcome(
        &mut self,
        id: SendId,
        outcome: Result<Result<Answer, RequestError>, Closed>,
    ) {
        let SendId { piece: id, attempt } = id;
        let epoch = self.attachment.epoch;
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        let at = piece.copies.iter().position(|copy| copy.attempt == attempt);
        let server = at.map(|at| piece.copies[at].server);
        let outcome = outcome.map(|outcome| outcome.map(|answer| piece.judge(answer, epoch)));
        let region = piece.region;
        if let Some((server, group)) = server.zip(self.group(region)) {
            group.note(server, refusal(&outcome));
        }
        match outcome {
            Ok(Ok(Verdict::Applied(index))) => return self.applied(id, server, index),
            Ok(Ok(Verdict::Blocks(index, part))) => return self.blocks_read(id, index, part),
            Ok(Ok(Verdict::Damaged | Verdict::Invalid)) => self.counters.bad_answers.add(1),
            Ok(Err(_)) | Err(Closed) => {}
        }
        let Some((at, server)) = at.zip(server) else { return };
        if let Some(piece) = self.pieces.get_mut(&id) {
            piece.copies.remove(at);
            if piece.is_parked {
                return;
            }
        }
        match outcome {
            Ok(Ok(Verdict::Damaged)) => self.damaged(id, server),
            Ok(Ok(_)) => self.try_next(id, server),
            Ok(Err(error)) => self.refused(id, server, error),
            Err(Closed) => self.not_connected(id, server),
        }
    }

    fn applied(&mut self, id: u64, server: Option<ServerId>, index: Index) {
        let Some(piece) = self.take_piece(id) else { return };
        self.progressed(&piece);
        let (region, now) = (piece.region, self.now);
        let Some(group) = self.group(region) else { return };
        group.token = group.token.max(index);
        if let Some(server) = server {
            group.has_applied(server, now);
        }
        match piece.work {
            Work::Change { number: Some(number), .. } => {
                group.numbers.complete(number);
                self.floor_raised(region);
                self.piece_done(piece.owner, id, None);
            }
            Work::Attach => self.attached(region),
            Work::Change { .. } | Work::Read { .. } => unreachable!("judged before"),
        }
    }

    fn attached(&mut self, region: RegionIndex) {
        let Some(group) = self.group(region) else { return };
        group.attach = None;
        for id in std::mem::take(&mut group.parked) {
            if let Some(piece) = self.pieces.get_mut(&id) {
                piece.is_parked = false;
                self.start(id);
            }
        }
        if let Phase::Attaching(groups) = &mut self.phase {
            *groups -= 1;
            if *groups == 0 {
                self.serve();
            }
        }
    }

    fn blocks_read(&mut self, id: u64, applied: Index, part: ReadPart) {
        let raises = !self.breaks(Rule::TokenOfReads);
        let Some(piece) = self.take_piece(id) else { return };
        self.progressed(&piece);
        if let Some(group) = self.group(piece.region).filter(|_| raises) {
            group.token = group.token.max(applied);
        }
        self.piece_done(piece.owner, id, Some(part));
    }

    /// Decides by the code of an error. `docs/format/volume-wire.md`, section 5.
    fn refused(&mut self, id: u64, server: ServerId, error: RequestError) {
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        match error.code {
            ErrorCode::Fenced => self.end(Failure::Fenced),
            ErrorCode::Dropped => self.end(Failure::Dropped),
            ErrorCode::NoSpace => {
                self.no_space(&error.text);
                self.fail(id, Failure::NoSpace(error.text));
            }
            ErrorCode::BadRequest | ErrorCode::Unsupported => {
                self.fail(id, Failure::Refused { code: error.code, text: error.text });
            }
            ErrorCode::BadChecksum => match &piece.work {
                Work::Change { change, .. } if change.verify().is_err() => {
                    self.fail(id, Failure::Corrupted);
                }
                _ => {
                    piece.failures += 1;
                    let at = self.now + back_off(piece.failures, &mut self.random);
                    self.set_wake(id, at, Wake::Again(server));
                }
            },
            ErrorCode::Busy => {
                let requested = Duration::from_millis(error.retry_after_ms.into());
                let delay = requested.clamp(BUSY_DELAY.0, BUSY_DELAY.1);
                let part = self.random.below(251) as f64 / 1000.0;
                self.set_wake(id, self.now + delay.mul_f64(1.0 + part), Wake::Again(server));
            }
            ErrorCode::NotAttached if piece.kind != Kind::Attach => self.park(id),
            ErrorCode::NotLeader => self.not_leader(id, server, error.leader),
            ErrorCode::Behind => self.try_next(id, server),
            ErrorCode::Damaged => self.damaged(id, server),
            ErrorCode::UnknownGroup => {
                let region = piece.region;
                self.read_group(region);
                self.not_serving(id, server);
            }
            _ => self.not_serving(id, server),
        }
    }

    /// Waits for the answer to an `Attach`.
    fn park(&mut self, id: u64) {
        self.clear_wake(id);
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        let (region, was_parked) = (piece.region, piece.is_parked);
        piece.is_parked = true;
        piece.failures += 1;
        let former_failures = piece.failures - 1;
        if let Some(group) = self.group(region).filter(|_| !was_parked) {
            group.parked.push(id);
        }
        self.attach(region, (former_failures > 0).then_some(former_failures));
    }

    fn not_leader(&mut self, id: u64, server: ServerId, hint: Option<ServerId>) {
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        let Some(Region::Group(group)) = self.regions.get_mut(&piece.region) else { return };
        group.not_leader(server);
        let Some(hint) = hint.filter(|hint| *hint != server) else {
            return self.try_next(id, server);
        };
        if !group.view.replicas.contains(&hint) {
            let region = piece.region;
            self.read_group(region);
            return self.try_next(id, server);
        }
        let is_asked = |copy: &Copy| copy.server == hint && !group.is_lost(copy, self.now);
        if piece.copies.iter().any(is_asked) {
            // The leader is slow, and another copy would not make it faster.
            group.leader.get_or_insert(hint);
            return self.set_wake(id, self.now + SILENT_LEADER, Wake::Copy);
        }
        piece.hints += 1;
        if piece.hints > MAX_HINTS {
            return self.try_next(id, server);
        }
        group.leader.get_or_insert(hint);
        piece.has_tried(server);
        let kind = piece.kind;
        self.count(kind).retries.add(1);
        self.send(id, hint);
    }

    fn damaged(&mut self, id: u64, server: ServerId) {
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        if !piece.damaged.contains(&server) {
            piece.damaged.push(server);
        }
        let Some(Region::Group(group)) = self.regions.get(&piece.region) else { return };
        match group.view.replicas.iter().all(|server| piece.damaged.contains(server)) {
            true => self.fail(id, Failure::Damaged),
            false => self.send_next(id, server),
        }
    }

    /// The server serves nothing at present.
    fn not_serving(&mut self, id: u64, server: ServerId) {
        self.avoid(id, server);
        self.try_next(id, server);
    }

    /// There is no connection to the server. The next replica is tried at once, but a second time
    /// only after a back-off. After the death of a leader, a third of the attempts to find its
    /// successor are at the dead server, and each would cost a back-off.
    fn not_connected(&mut self, id: u64, server: ServerId) {
        self.avoid(id, server);
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        let Some(Region::Group(group)) = self.regions.get(&piece.region) else { return };
        let is_tried = |other: &ServerId| *other == server || piece.tried.contains(other);
        let all_are_tried = group.view.replicas.iter().all(is_tried);
        if piece.failures == 0 || all_are_tried || piece.passed_over.contains(&server) {
            return self.try_next(id, server);
        }
        piece.passed_over.push(server);
        piece.has_tried(server);
        self.send_next(id, server);
    }

    fn avoid(&mut self, id: u64, server: ServerId) {
        let (own, now) = (self.attachment.gateway, self.now);
        let Some(piece) = self.pieces.get(&id) else { return };
        let region = piece.region;
        if let Some(group) = self.group(region) {
            group.not_serving(server, own, now);
        }
    }

    /// Tries another replica: at once after the first failure, then with back-off.
    fn try_next(&mut self, id: u64, server: ServerId) {
        let Some(piece) = self.pieces.get_mut(&id) else { return };
        (piece.hints, piece.silences) = (0, 0);
        piece.failures += 1;
        piece.has_tried(server);
        match piece.failures {
            1 => self.send_next(id, server),
            failures => {
                piece.passed_over.clear();
                let at = self.now + back_off(failures - 1, &mut self.random);
                self.set_wake(id, at, Wake::Next(server));
            }
        }
    }

    /// Ends a piece with an error that is reported to the user.
    fn fail(&mut self, id: u64, failure: Failure) {
        let Some(piece) = self.take_piece(id) else { return };
        self.progressed(&piece);
        let Some(user) = piece.owner else { return self.end(failure) };
        self.piece_failed(user, &piece);
        self.fail_user(user, id, failure);
    }

    /// Completes the number of a piece whose error is being reported. Copies of it may still take
    /// effect until the floor has passed the number.
    pub(super) fn piece_failed(&mut self, user: UserId, piece: &Piece) {
        let keeps_range = !self.breaks(Rule::FailedRange);
        let Work::Change { number: Some(number), .. } = piece.work else { return };
        let Some(group) = self.group(piece.region) else { return };
        if keeps_range {
            group.numbers.fail(number, user);
            self.hold_range(user);
        } else {
            group.numbers.complete(number);
        }
        self.floor_raised(piece.region);
    }

    /// Frees the ranges of failed ops that the floor has passed, and gives the numbers that have
    /// become available.
    fn floor_raised(&mut self, region: RegionIndex) {
        while let Some(user) = self.group(region).and_then(|group| group.numbers.next_passed()) {
            self.free_range(user);
        }
        self.give_numbers(region);
    }

    /// Removes a piece, also from the queues in which it waits.
    pub(super) fn take_piece(&mut self, id: u64) -> Option<Piece> {
        self.clear_wake(id);
        let piece = self.pieces.remove(&id)?;
        let waits = piece.copies.is_empty() || piece.is_parked;
        match self.regions.get_mut(&piece.region) {
            Some(Region::Group(group)) if waits => {
                let Group { waiting, parked, .. } = &mut **group;
                waiting.retain(|waiting| *waiting != id);
                parked.retain(|parked| *parked != id);
            }
            Some(Region::Creating { waiting, .. }) => waiting.retain(|waiting| *waiting != id),
            _ => {}
        }
        Some(piece)
    }
}
