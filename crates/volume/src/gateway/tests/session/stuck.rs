//! What a session reports of requests that do not progress.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

impl Harness {
    /// Fails what was sent: server 1 knows no leader, the others are not connected. Then advances
    /// to the next thing that is due.
    fn lose_majority(&mut self, until: Duration) {
        while self.now < until {
            for (id, server, _) in std::mem::take(&mut self.sent) {
                match server {
                    ServerId(1) => self.error(id, ErrorCode::NotLeader),
                    _ => self.outcome(id, Err(Closed)),
                }
            }
            let due = self.session.wakes_at().expect("a retry is due").min(until);
            self.advance(due.saturating_sub(self.now));
        }
    }
}

#[track_caller]
fn has(report: Option<&Option<String>>, parts: &[&str]) {
    let report = report.and_then(Option::as_ref).expect("something is reported");
    for part in parts {
        assert!(report.contains(part), "`{part}` is missing in: {report}");
    }
}

#[test]
fn a_request_that_waits_for_5_s_is_reported_with_what_is_missing_until_it_is_answered() {
    let mut test = Harness::new();
    let user = test.write(1);
    test.lose_majority(millis(4999));
    assert_eq!(test.stuck, []);
    test.lose_majority(millis(5000));
    has(
        test.stuck.last(),
        &[
            "a write in region 0 (group 5)",
            "server 1 knows no leader",
            "server 2 is not connected",
            "server 3 is not connected",
            "waited for 5 s",
        ],
    );
    test.lose_majority(millis(8000));
    has(test.stuck.last(), &["waited for 8 s"]);
    assert_eq!(test.stuck.len(), 4, "one a second");
    // The servers are back.
    while !test.is_done(user) {
        match test.sent.pop() {
            Some((id, _, _)) => test.applied(id),
            None => test.advance(millis(50)),
        }
    }
    test.advance(SECOND);
    assert_eq!(test.stuck.last(), Some(&None));
    assert_eq!(test.session.wakes_at(), None, "nothing is observed while nothing waits");
}

#[test]
fn requests_of_a_deep_queue_that_progresses_are_not_stuck() {
    let mut test = Harness::new();
    for block in 0..WINDOW_NUMBERS + 20 {
        test.write(block);
    }
    test.read(0);
    let mut copies = Vec::new();
    for second in 0..20 {
        test.advance(SECOND);
        copies.append(&mut test.sent);
        let of_op = |(_, _, request): &(_, _, Request)| matches!(request, Request::Op { .. });
        let op = copies.iter().position(of_op).expect("an op is on its way");
        let (id, ..) = copies.remove(op);
        copies.retain(|(other, ..)| other.piece != id.piece);
        test.applied(id);
        if second < 4 {
            assert_eq!(test.stuck, []);
        }
    }
    // The changes progress, and the read does not.
    has(test.stuck.last(), &["a read in region 0"]);
    assert!(test.stuck.iter().flatten().all(|report| report.starts_with("a read")));
    let read = copies.iter().find(|(.., request)| matches!(request, Request::Read(_))).unwrap().0;
    test.outcome(read, Ok(Ok(blocks(test.index, &[1; BLOCK_BYTES]))));
    test.advance(SECOND);
    assert_eq!(test.stuck.last(), Some(&None));
    test.advance(4 * SECOND);
    has(test.stuck.last(), &["a write in region 0"]);
}

#[test]
fn a_write_that_times_out_without_a_number_says_so() {
    let mut test = Harness::with(Some(2 * SECOND), 2 * REGION_BLOCKS * BLOCK);
    test.advance(SECOND);
    for block in 0..WINDOW_NUMBERS {
        test.write(block);
    }
    // It has waited for memory for a second.
    let data = Bytes::from(vec![1; BLOCK_BYTES]);
    let last = UserRequest::Write { offset: WINDOW_NUMBERS * BLOCK, data };
    let last = test.session.submit_begun(test.now, Duration::ZERO, last);
    test.advance(SECOND);
    let [(id, Err(Failure::TimedOut(wait)))] = &test.completed[..] else {
        panic!("{:?}", test.completed);
    };
    assert_eq!(*id, last);
    for part in ["waits for a number", "server 2 has not answered"] {
        assert!(wait.contains(part), "{wait}");
    }
}

#[test]
fn a_server_that_is_silent_and_one_that_has_no_replica_any_more_are_reported() {
    let mut test = Harness::new();
    test.known(0, Ok(view(&[2, 3])));
    test.read(1);
    for _ in 0..50 {
        test.advance(millis(100));
    }
    has(test.stuck.last(), &["a read", "server 2 has not answered", "1 of 3 replicas are lost"]);
}

#[test]
fn a_region_without_a_group_is_reported_with_the_reason_of_the_registry() {
    let mut test = Harness::with(Some(7 * SECOND), 2 * REGION_BLOCKS * BLOCK);
    let user = test.write(REGION_BLOCKS);
    test.advance(5 * SECOND);
    has(test.stuck.last(), &["region 1", "no group yet", "does not answer"]);
    test.known(1, Err(GroupError::Unavailable("a group needs 3 servers".into())));
    test.advance(SECOND);
    has(test.stuck.last(), &["region 1", "a group needs 3 servers"]);
    test.advance(SECOND);
    let Some((id, Err(Failure::TimedOut(text)))) = test.completed.last() else {
        panic!("{:?}", test.completed);
    };
    assert_eq!(*id, user);
    assert!(text.contains("a group needs 3 servers"), "{text}");
}

#[test]
fn requests_that_time_out_are_reported_until_none_has_for_10_s() {
    let mut test = Harness::with(Some(2 * SECOND), 2 * REGION_BLOCKS * BLOCK);
    for begin in [0, 2, 4] {
        test.write(begin);
        test.lose_majority((begin + 2) as u32 * SECOND);
    }
    assert_eq!(test.completed.len(), 3);
    assert_eq!(test.stuck.len(), 1, "{:?}", test.stuck);
    has(test.stuck.last(), &["region 0", "server 2 is not connected", "timed out"]);
    for _ in 0..9 {
        test.advance(SECOND);
    }
    assert_eq!(test.stuck.len(), 1);
    test.advance(SECOND);
    assert_eq!(test.stuck.last(), Some(&None));
    assert_eq!(test.session.wakes_at(), None);
}

#[test]
fn writes_without_space_are_reported_once_until_none_has_failed_for_10_s() {
    let mut test = Harness::new();
    for block in 0..30 {
        test.write(block);
        let (id, _, _) = test.take_op();
        test.error(id, ErrorCode::NoSpace);
        test.advance(millis(300));
    }
    assert_eq!(test.full, [Some("test".to_owned())]);
    for _ in 0..9 {
        test.advance(SECOND);
    }
    assert_eq!(test.full.len(), 1);
    test.advance(SECOND);
    assert_eq!(test.full, [Some("test".to_owned()), None]);
    assert_eq!(test.session.wakes_at(), None);
}

/// A session of the same volume that no server has answered yet.
fn attaching(io_timeout: Option<Duration>) -> Session {
    let attachment = Harness::new().session.attachment().clone();
    let config = SessionConfig { io_timeout, ..SessionConfig::default() };
    Session::new(attachment, config, Arc::default())
}

#[test]
fn an_attachment_that_waits_is_reported() {
    let mut session = attaching(None);
    session.advance(5 * SECOND);
    let outputs: Vec<_> = std::iter::from_fn(|| session.next_output()).collect();
    let reports = outputs.iter().filter_map(|output| match output {
        Output::Stuck(report) => Some(report),
        _ => None,
    });
    has(reports.last(), &["the attachment in region 0 (group 5)", "server 2 has not answered"]);
}

#[test]
fn an_attachment_fails_after_the_io_timeout() {
    let mut session = attaching(Some(3 * SECOND));
    session.advance(millis(2999));
    let ended = |output: &Output| matches!(output, Output::Ended(_));
    assert!(!std::iter::from_fn(|| session.next_output()).any(|output| ended(&output)));
    session.advance(3 * SECOND);
    let outputs: Vec<_> = std::iter::from_fn(|| session.next_output()).collect();
    let [Output::Ended(Failure::TimedOut(text))] = &outputs[..] else { panic!("{outputs:?}") };
    assert!(text.contains("the attachment in region 0 (group 5): server"), "{text}");
    assert_eq!(session.sizes(), [0; 6]);
    assert_eq!(session.wakes_at(), None);
}
