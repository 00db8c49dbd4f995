//! Persisted state and restarts of one group.

use super::*;

#[test]
fn members_continue_in_their_generation_after_a_restart() {
    let mut bench = Bench::new();
    let ids = bench.stable_static(2);
    let dynamic = bench.join(with_protocols(old_join("c"), &["range", "sticky"]));
    for (instance, id) in [("i1", &ids[0]), ("i2", &ids[1])] {
        bench.join(static_join(instance, id));
    }
    let joined = bench.generation_of(dynamic).clone();
    let (leader, third) = (joined.leader.clone(), joined.member_id.clone());
    let plan = [(third.as_str(), "p3"), (ids[0].as_str(), "p1"), (ids[1].as_str(), "p2")];
    bench.sync(&leader, joined.generation, &plan);
    let before = bench.group.describe();
    assert_eq!(before.state, State::Stable);

    bench.pass(SESSION / 2);
    bench.restart();
    let after = bench.group.describe();
    assert_eq!(format!("{before:?}"), format!("{after:?}"));
    for id in [&ids[0], &ids[1], &third.as_str().to_owned()] {
        assert_eq!(bench.heartbeat(id, joined.generation), Ok(()));
        assert_eq!(bench.commit(id, joined.generation), Ok(()));
        assert_eq!(
            bench.heartbeat(id, joined.generation + 1),
            Err(ResponseError::IllegalGeneration)
        );
    }
    // A client that has lost a response repeats the request.
    let again = bench.sync(&third, joined.generation, &[]);
    assert_eq!(bench.assignment_of(again), b"p3");
    let again = bench.join(with_protocols(join("c", &third), &["range", "sticky"]));
    assert_eq!(bench.generation_of(again).generation, joined.generation);
    // A static member has restarted too.
    let back = bench.join(static_join("i2", ""));
    assert_eq!(bench.generation_of(back).generation, joined.generation);
    let synced = bench.sync(&format!("m{back}"), joined.generation, &[]);
    assert_eq!(bench.assignment_of(synced), b"p2");
    assert_eq!(bench.group.state(), State::Stable);
    // Its new id is persisted.
    bench.restart();
    assert_eq!(bench.heartbeat(&format!("m{back}"), joined.generation), Ok(()));
    assert_eq!(bench.heartbeat(&ids[1], joined.generation), Err(ResponseError::UnknownMemberId));

    // A member that does not return has a whole session, and no more.
    bench.pass(SESSION * 9 / 10);
    assert_eq!(bench.dropped, [] as [StrBytes; 0]);
    assert_eq!(bench.heartbeat(&third, joined.generation), Ok(()));
    bench.pass(SESSION * 2 / 10);
    assert_eq!(bench.dropped.len(), 2);
    assert_eq!(bench.heartbeat(&third, joined.generation), Err(ResponseError::RebalanceInProgress));
}

/// FENCED_INSTANCE_ID would end its client, although no other member has its instance id.
#[test]
fn a_static_member_whose_new_id_was_not_persisted_joins_again() {
    let mut bench = Bench::new();
    let ids = bench.stable_static(2);
    let generation = bench.group.generation();
    // Another one joins, and the second one is restarted meanwhile.
    bench.join(old_join("c"));
    let back = bench.join(static_join("i2", ""));
    bench.join(static_join("i1", &ids[0]));
    let new_id = bench.generation_of(back).member_id.clone();
    assert_eq!(bench.group.state(), State::Completing);
    assert_ne!(new_id.as_str(), ids[1]);
    bench.restart();

    let second = s("i2");
    let heartbeat = |bench: &mut Bench, id: &StrBytes| {
        bench.group.heartbeat(bench.now, id, Some(&second), generation + 1)
    };
    assert_eq!(heartbeat(&mut bench, &new_id), Err(ResponseError::UnknownMemberId));
    assert_eq!(bench.leave(&new_id, Some("i2")), Err(ResponseError::UnknownMemberId));
    let again = bench.join(static_join("i2", &new_id));
    assert_eq!(bench.refusal_of(again), ResponseError::UnknownMemberId);
    let again = bench.join(static_join("i2", ""));
    assert_eq!(bench.generation_of(again).generation, generation);
    // From now on it is known which member has the instance id.
    for former in [&new_id, &s(&ids[1])] {
        assert_eq!(heartbeat(&mut bench, former), Err(ResponseError::FencedInstanceId));
    }
}

#[test]
fn only_complete_generations_are_persisted_and_empty_groups_are_removed() {
    let mut bench = Bench::new();
    let ids = bench.stable_static(2);
    let generation = bench.group.generation();
    let new = bench.join(old_join("c"));
    for (instance, id) in [("i1", &ids[0]), ("i2", &ids[1])] {
        bench.join(static_join(instance, id));
    }
    assert_eq!(bench.generation_of(new).generation, generation + 1);
    bench.restart();
    assert_eq!(bench.heartbeat(&ids[0], generation), Ok(()));
    assert_eq!(
        bench.heartbeat(&ids[1], generation + 1),
        Err(ResponseError::IllegalGeneration),
        "it knows a generation in which it has no assignment"
    );
    assert_eq!(
        bench.heartbeat(&format!("m{new}"), generation),
        Err(ResponseError::UnknownMemberId)
    );

    assert_eq!(bench.leave("", Some("i1")), Ok(()));
    bench.restart();
    assert_eq!(bench.group.member_count(), 2, "as in Kafka, until its session ends");
    assert_eq!(bench.leave("", Some("i1")), Ok(()));
    assert_eq!(bench.leave("", Some("i2")), Ok(()));
    assert_eq!(bench.group.state(), State::Empty);
    bench.restart();
    assert_eq!((bench.group.state(), bench.group.member_count()), (State::Empty, 0));
}

/// The log has no space.
#[test]
fn a_group_does_not_change_while_its_state_cannot_be_written() {
    let mut bench = Bench::new();
    let first = bench.join(static_join("i1", ""));
    let id = bench.generation_of(first).member_id.clone();
    let sync = SyncEvent {
        member_id: id.clone(),
        instance_id: None,
        generation: 1,
        protocol_type: None,
        protocol: None,
        assignments: vec![(id.clone(), Bytes::from_static(b"p"))],
    };
    bench.group.sync(bench.now, sync, 1000);
    assert!(bench.group.is_unwritten());
    assert_eq!(bench.group.stable_members(), None);
    bench.group.not_written(bench.now);
    assert_eq!(bench.group.deadline(), Some(bench.now + RETRY_WRITE));
    // Its session is over, but no member is removed before the earlier decision is appended.
    bench.now += SESSION * 2;
    bench.group.tick(bench.now);
    assert_eq!(bench.group.member_count(), 1);
    assert_eq!(bench.heartbeat(&id, 1), Ok(()));
    bench.collect();
    assert_eq!(bench.group.stable_members().map(|members| members.len()), Some(1));
    bench.pass(SESSION);
    assert_eq!(bench.dropped, [id]);
}

#[test]
fn invalid_records_are_refused() {
    let mut bench = Bench::new();
    bench.stable_static(2);
    let record = bench.persisted.unwrap().encode("g");
    let mut groups = PersistedGroups::default();
    for len in 0..record.len() {
        groups.apply_encoded(&record[..len]).unwrap_err();
    }
    groups.apply_encoded(&[&record[..], &[0]].concat()).unwrap_err();
    assert_eq!(groups, PersistedGroups::default());
    groups.apply_encoded(&record).unwrap();
    groups.apply_encoded(&encode_removal("other")).unwrap();
    assert_eq!(groups.0.len(), 1);
    groups.apply_encoded(&encode_removal("g")).unwrap();
    assert_eq!(groups, PersistedGroups::default());
}

/// A group as the first version wrote it, which must always be readable.
#[test]
fn the_format_is_as_documented() {
    let mut bench = Bench::new();
    let first = bench.join(static_join("i", ""));
    bench.sync("m1", bench.generation_of(first).generation, &[("m1", "p0")]);
    let record = bench.persisted.unwrap().encode("g");
    let mut expected = b"\x01\x01\x01\0g\x01\0\0\0\x08\0consumer\x05\0range\x02\0m1".to_vec();
    expected.extend_from_slice(b"\x01\0\0\0\x02\0m1\x01\x01\0i\x01\0i\x0a\0/127.0.0.1");
    expected.extend_from_slice(&10_000_i32.to_le_bytes());
    expected.extend_from_slice(&60_000_i32.to_le_bytes());
    expected.extend_from_slice(b"\x01\0\0\0\x05\0range\x01\0\0\0i\x02\0\0\0p0");
    assert_eq!(record, expected);
    assert_eq!(encode_removal("g"), b"\x01\x02\x01\0g"[..]);
}
