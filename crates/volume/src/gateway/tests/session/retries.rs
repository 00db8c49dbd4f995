//! Servers that cannot be reached, or do not serve: which one is tried next, and when.

use std::collections::BTreeMap;

use alluvium_device::sim::Random;

use super::*;

#[test]
fn a_server_without_connection_costs_no_back_off_in_the_search_for_a_leader() {
    let mut test = Harness::new();
    test.write(1);
    let (id, old_leader, _) = test.take_op();
    test.outcome(id, Err(Closed));
    let mut asked = Vec::new();
    for _ in 0..20 {
        let (id, server, _) = test.take_op();
        match server == old_leader {
            true => test.outcome(id, Err(Closed)),
            false => {
                asked.push(server);
                test.outcome(id, Ok(Err(RequestError::new(ErrorCode::NotLeader, GROUP, ""))));
            }
        }
        if server == old_leader {
            assert_eq!(test.sent.len(), 1, "the next replica is asked at once");
        } else if test.sent.is_empty() {
            test.advance(test.session.wakes_at().unwrap() - test.now);
        }
    }
    assert!(asked.len() >= 13, "{asked:?}");
    assert!(asked.windows(2).all(|two| two[0] != two[1]), "{asked:?}");
}

/// Whatever the servers answer at once, a piece waits after a few attempts: otherwise it would be
/// sent to them as fast as they answer.
#[test]
fn no_answers_make_a_piece_be_sent_without_a_pause() {
    let mut most = 0;
    for seed in 0..20_000 {
        let mut random = Random::new(seed);
        let mut test = Harness::new();
        // Each server answers in one way, as long as time stands still.
        let ways: Vec<u64> = (0..3).map(|_| random.below(9)).collect();
        match random.below(2) {
            0 => test.write(1),
            _ => test.read(1),
        };
        for _ in 0..4 {
            let mut sends = 0;
            while let Some((id, server, _)) = test.sent.pop() {
                sends += 1;
                assert!(sends <= 12, "seed {seed}: {ways:?}");
                let not_leader = RequestError::new(ErrorCode::NotLeader, GROUP, "");
                match ways[server.0 as usize - 1] {
                    0 | 1 => test.outcome(id, Err(Closed)),
                    way @ 2..=4 => {
                        let leader = Some(ServerId(way as u32 - 1));
                        test.outcome(id, Ok(Err(RequestError { leader, ..not_leader })));
                    }
                    5 => test.outcome(id, Ok(Err(not_leader))),
                    6 => test.error(id, ErrorCode::NotReady),
                    7 => test.error(id, ErrorCode::Damaged),
                    // It is silent.
                    _ => {}
                }
            }
            most = most.max(sends);
            let Some(at) = test.session.wakes_at() else { break };
            test.advance(at - test.now);
        }
    }
    assert!(most >= 4, "{most}");
}

/// The healthy leader is not reached, and a follower names it: the third replica is asked, too.
#[test]
fn a_leader_without_connection_that_a_follower_names_is_tried_with_back_off() {
    let mut test = Harness::new();
    test.write(1);
    let mut asked = BTreeMap::<ServerId, u32>::new();
    let mut advances = 0;
    while advances < 10 {
        let (id, server, _) = test.take_op();
        *asked.entry(server).or_default() += 1;
        assert!(asked.values().sum::<u32>() <= 60, "{asked:?}");
        match server {
            OWN => test.outcome(id, Err(Closed)),
            _ => test.hint(id, OWN.0),
        }
        if test.sent.is_empty() {
            test.advance(test.session.wakes_at().unwrap() - test.now);
            advances += 1;
        }
    }
    assert_eq!(asked.len(), 3, "{asked:?}");
}
