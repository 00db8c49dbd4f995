//! One group on its own: tables of single steps, and random histories of a group against its
//! invariants.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::groups::topics_view::TopicAccess;
use crate::state_table::{Table, decode, encode};

mod classic;
mod lives;

const SESSION: Duration = Duration::from_secs(45);
const REBALANCE: i32 = 60_000;

fn rules() -> ConsumerRules {
    ConsumerRules { session_timeout: SESSION, max_members: 4 }
}

fn topic_id(name: &str) -> Uuid {
    let mut bytes = [0; 16];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    Uuid::from_bytes(bytes)
}

fn view(version: u64, topics: &[(&str, u32)]) -> TopicsView {
    let topics = topics.iter().map(|(name, count)| (Arc::from(*name), topic_id(name), *count));
    TopicsView::new(version, topics)
}

fn group(now: Instant) -> ConsumerGroup {
    ConsumerGroup::new(GroupState::default(), rules(), now)
}

fn join(id: &str, topics: &[&str]) -> Beat {
    Beat {
        member_id: id.into(),
        rebalance_timeout_ms: Some(REBALANCE),
        topics: Some(topics.iter().map(|topic| (*topic).to_owned()).collect()),
        owned: Some(Assignment::new()),
        ..Beat::default()
    }
}

fn go_on(id: &str, epoch: i32) -> Beat {
    Beat { member_id: id.into(), epoch, ..Beat::default() }
}

fn owns(beat: Beat, owned: &Assignment) -> Beat {
    Beat { owned: Some(owned.clone()), ..beat }
}

fn parts(topic: &str, partitions: &[i32]) -> Assignment {
    Assignment::from([(topic_id(topic), partitions.iter().copied().collect())])
}

fn error(answer: Result<Answer, Fault>) -> ResponseError {
    answer.expect_err("an error").error
}

#[test]
fn the_first_member_gets_all_partitions_and_yields_half_to_the_second() {
    let now = Instant::now();
    let (mut group, topics) = (group(now), view(1, &[("t", 4)]));
    let mut beat = |beat: &Beat| group.heartbeat(now, rules(), &topics, beat).expect("accepted");

    let a = beat(&join("a", &["t"]));
    assert_eq!((a.epoch, a.assignment), (1, Some(parts("t", &[0, 1, 2, 3]))));
    // Nothing new: no assignment in the answer.
    assert_eq!(beat(&go_on("a", 1)).assignment, None);

    let b = beat(&join("b", &["t"]));
    assert_eq!((b.epoch, b.assignment), (2, Some(Assignment::new())), "nothing is free yet");
    let a = beat(&go_on("a", 1));
    let kept = a.assignment.expect("it has to give up partitions");
    assert_eq!((a.epoch, kept.values().map(BTreeSet::len).sum::<usize>()), (1, 2));
    // Until it reports the revocation it stays in its epoch, and the other gets nothing.
    assert_eq!(beat(&go_on("a", 1)), Answer { member_id: "a".into(), epoch: 1, assignment: None });
    assert_eq!(beat(&owns(go_on("a", 1), &parts("t", &[0, 1, 2, 3]))).epoch, 1);
    assert_eq!(beat(&go_on("b", 2)).assignment, None);
    let a = beat(&owns(go_on("a", 1), &kept));
    assert_eq!((a.epoch, a.assignment), (2, None));
    let b = beat(&go_on("b", 2)).assignment.expect("the released partitions");
    assert_eq!(b.values().map(BTreeSet::len).sum::<usize>(), 2);
    assert!(b[&topic_id("t")].is_disjoint(&kept[&topic_id("t")]));
    assert_eq!(group.phase(), Phase::Stable);
}

#[test]
fn the_phase_follows_the_rebalance() {
    let now = Instant::now();
    let (mut group, topics) = (group(now), view(1, &[("t", 4)]));
    assert_eq!(group.phase(), Phase::Empty);
    group.heartbeat(now, rules(), &topics, &join("a", &["t"])).unwrap();
    assert_eq!(group.phase(), Phase::Stable);
    group.heartbeat(now, rules(), &topics, &join("b", &["t"])).unwrap();
    assert_eq!(group.phase(), Phase::Reconciling);
    group.leave(now, "b", None, false).unwrap();
    assert_eq!(
        (group.phase(), group.state.epoch, group.state.target_epoch),
        (Phase::Assigning, 3, 2)
    );
    group.leave(now, "a", None, false).unwrap();
    assert_eq!(group.phase(), Phase::Empty);
    assert_eq!(group.vacant_since(), Some(now));
    assert_eq!(group.size_bytes(), 0);
}

#[test]
fn members_with_a_wrong_epoch_are_fenced() {
    let now = Instant::now();
    let (mut group, topics) = (group(now), view(1, &[("t", 4)]));
    let mut beat = |beat: &Beat| group.heartbeat(now, rules(), &topics, beat);
    beat(&join("a", &["t"])).unwrap();
    assert_eq!(error(beat(&go_on("b", 1))), ResponseError::UnknownMemberId);
    assert_eq!(error(beat(&go_on("a", 2))), ResponseError::FencedMemberEpoch);
    beat(&join("b", &["t"])).unwrap();
    let kept = beat(&go_on("a", 1)).unwrap().assignment.unwrap();
    beat(&owns(go_on("a", 1), &kept)).unwrap();
    // The response with epoch 2 was lost: the previous epoch is accepted, with partitions that the
    // member may have.
    let again = beat(&owns(go_on("a", 1), &kept)).unwrap();
    assert_eq!((again.epoch, again.assignment), (2, Some(kept.clone())));
    assert_eq!(error(beat(&go_on("a", 1))), ResponseError::FencedMemberEpoch);
    let all = parts("t", &[0, 1, 2, 3]);
    assert_eq!(error(beat(&owns(go_on("a", 1), &all))), ResponseError::FencedMemberEpoch);
    // Fenced, it joins again without partitions, under its id.
    let anew = beat(&join("a", &["t"])).unwrap();
    assert_eq!((anew.epoch, anew.assignment), (2, Some(kept)));
    assert_eq!(group.check_epoch("a", 1), Err(ResponseError::StaleMemberEpoch));
    assert_eq!(group.check_epoch("a", 2), Ok(()));
    assert_eq!(group.check_epoch("c", 2), Err(ResponseError::UnknownMemberId));
}

#[test]
fn a_full_group_refuses_new_members() {
    let now = Instant::now();
    let (mut group, topics) = (group(now), view(1, &[("t", 4)]));
    for id in ["a", "b", "c", "d"] {
        group.heartbeat(now, rules(), &topics, &join(id, &["t"])).unwrap();
    }
    let refused = group.heartbeat(now, rules(), &topics, &join("e", &["t"]));
    assert_eq!(error(refused), ResponseError::GroupMaxSizeReached);
    group
        .heartbeat(now, rules(), &topics, &join("d", &["t"]))
        .expect("an existing member may rejoin");
}

#[test]
fn a_static_member_keeps_its_partitions_while_it_is_away() {
    let now = Instant::now();
    let (mut group, topics) = (group(now), view(1, &[("t", 4)]));
    let named = |beat: Beat| Beat { instance_id: Some("i".into()), ..beat };
    group.heartbeat(now, rules(), &topics, &named(join("a", &["t"]))).unwrap();
    group.heartbeat(now, rules(), &topics, &join("b", &["t"])).unwrap();
    let kept = group.heartbeat(now, rules(), &topics, &go_on("a", 1)).unwrap().assignment.unwrap();
    group.heartbeat(now, rules(), &topics, &owns(go_on("a", 1), &kept)).unwrap();
    group.heartbeat(now, rules(), &topics, &go_on("b", 2)).unwrap();

    // Another member with its instance id is refused while it is there.
    let taken = group.heartbeat(now, rules(), &topics, &named(join("a2", &["t"])));
    assert_eq!(error(taken), ResponseError::UnreleasedInstanceId);
    let fenced = group.heartbeat(now, rules(), &topics, &named(go_on("b", 2)));
    assert_eq!(error(fenced), ResponseError::FencedInstanceId);
    let leave =
        |group: &mut ConsumerGroup, id, instance| group.leave(now, id, Some(instance), true);
    assert_eq!(leave(&mut group, "b", "i").unwrap_err().error, ResponseError::FencedInstanceId);
    assert_eq!(leave(&mut group, "a", "j").unwrap_err().error, ResponseError::UnknownMemberId);

    leave(&mut group, "a", "i").unwrap();
    assert_eq!(group.state.members["a"].current.epoch, LEFT_FOR_A_WHILE);
    let epoch = group.state.epoch;
    assert_eq!(group.heartbeat(now, rules(), &topics, &go_on("b", 2)).unwrap().assignment, None);
    // It comes back under another id, and no other member is affected.
    let back = group.heartbeat(now, rules(), &topics, &named(join("a2", &["t"]))).unwrap();
    assert_eq!((back.epoch, back.assignment), (2, Some(kept)));
    assert_eq!(group.state.epoch, epoch);
    assert_eq!(group.phase(), Phase::Stable);
    // If it does not come back in time, it is removed.
    leave(&mut group, "a2", "i").unwrap();
    let later = now + SESSION;
    group.heartbeat(later, rules(), &topics, &go_on("b", 2)).unwrap();
    group.written(group.unwritten().len());
    assert_eq!(group.tick(later).len(), 1);
    assert!(!group.state.members.contains_key("a2"));
}

#[test]
fn silent_members_and_those_that_revoke_nothing_are_removed() {
    let now = Instant::now();
    let (mut group, topics) = (group(now), view(1, &[("t", 4)]));
    group.heartbeat(now, rules(), &topics, &join("a", &["t"])).unwrap();
    group.heartbeat(now, rules(), &topics, &join("b", &["t"])).unwrap();
    group.heartbeat(now, rules(), &topics, &go_on("a", 1)).unwrap();
    group.written(group.unwritten().len());
    assert_eq!(group.deadline(), Some(now + SESSION));
    // Both continue, but the first keeps everything.
    let mut at = now;
    for _ in 0..2 {
        at += Duration::from_secs(20);
        group.heartbeat(at, rules(), &topics, &go_on("a", 1)).unwrap();
        group.heartbeat(at, rules(), &topics, &go_on("b", 2)).unwrap();
    }
    group.written(group.unwritten().len());
    let revoked_at = now + Duration::from_secs(60);
    assert_eq!(group.deadline(), Some(revoked_at));
    assert!(group.tick(revoked_at - Duration::from_millis(1)).is_empty());
    assert_eq!(group.tick(revoked_at)[0].0.as_ref(), "a");
    let b = group.heartbeat(revoked_at, rules(), &topics, &go_on("b", 2)).unwrap();
    assert_eq!((b.epoch, b.assignment), (3, Some(parts("t", &[0, 1, 2, 3]))));
    group.written(group.unwritten().len());
    assert_eq!(group.tick(revoked_at + SESSION)[0].0.as_ref(), "b");
    assert!(group.is_empty());
}

#[test]
fn created_grown_and_deleted_topics_make_a_new_epoch() {
    let now = Instant::now();
    let mut group = group(now);
    let mut beat = |topics: &TopicsView, beat: &Beat| {
        let answer = group.heartbeat(now, rules(), topics, beat).unwrap();
        (answer.epoch, answer.assignment)
    };
    let none = view(1, &[("other", 1)]);
    assert_eq!(beat(&none, &join("a", &["t"])), (1, Some(Assignment::new())));
    let created = view(2, &[("other", 1), ("t", 1)]);
    assert_eq!(beat(&created, &go_on("a", 1)), (2, Some(parts("t", &[0]))));
    let grown = view(3, &[("other", 1), ("t", 2)]);
    assert_eq!(beat(&grown, &go_on("a", 2)), (3, Some(parts("t", &[0, 1]))));
    // A topic without subscribers is ignored.
    assert_eq!(beat(&view(4, &[("t", 2)]), &go_on("a", 3)), (3, None));
    // Partitions of a deleted topic are revoked like all others.
    let gone = view(5, &[]);
    assert_eq!(beat(&gone, &go_on("a", 3)), (3, Some(Assignment::new())));
    assert_eq!(beat(&gone, &owns(go_on("a", 3), &Assignment::new())), (4, None));
}

#[test]
fn regular_expressions_match_whole_names_and_follow_the_topics() {
    let now = Instant::now();
    let mut group = group(now);
    let matching = |regex: &str| Beat { regex: Some(regex.into()), ..join("a", &["x"]) };
    let topics = view(1, &[("ta", 1), ("tab", 1), ("x", 1)]);
    for bad in ["(", "a)(b", "(?<", &"a".repeat(crate::pattern::MAX_BYTES + 1), "(a{1000}){1000}"] {
        let refused = check_regex(bad).expect_err(bad);
        assert_eq!(refused.error, ResponseError::InvalidRegularExpression, "{bad}");
    }
    let names = |assignment: Option<Assignment>| -> Vec<Uuid> {
        assignment.expect("an assignment").into_keys().collect()
    };
    let first = group.heartbeat(now, rules(), &topics, &matching("ta|t.b")).unwrap();
    assert_eq!(names(first.assignment), ["ta", "tab", "x"].map(topic_id));
    let topics = view(2, &[("ta", 1), ("tab", 1), ("tbb", 1), ("tbbb", 1), ("x", 1)]);
    let second = group.heartbeat(now, rules(), &topics, &go_on("a", 1)).unwrap();
    assert_eq!(second.epoch, 2, "gains alone need no revocation");
    assert_eq!(names(second.assignment).len(), 4);
    // An empty one removes it.
    let x = parts("x", &[0]);
    let without = Beat { regex: Some(String::new()), ..owns(go_on("a", 2), &x) };
    let third = group.heartbeat(now, rules(), &topics, &without).unwrap();
    assert_eq!((third.epoch, third.assignment), (3, Some(x)));
    assert_eq!(group.matches.size_bytes(), 0);
}

#[test]
fn the_regular_expressions_of_a_group_are_bounded_in_number() {
    let now = Instant::now();
    let (mut group, topics) = (group(now), view(1, &[]));
    let rules = ConsumerRules { max_members: 100, ..rules() };
    let with = |i: usize, regex: usize| Beat {
        regex: Some(format!("t{regex}")),
        ..join(&format!("m{i}"), &[])
    };
    for i in 0..MAX_REGEXES {
        group.heartbeat(now, rules, &topics, &with(i, i)).unwrap();
    }
    let more = group.heartbeat(now, rules, &topics, &with(99, 99));
    assert_eq!(error(more), ResponseError::InvalidRegularExpression);
    group.heartbeat(now, rules, &topics, &with(99, 0)).expect("one that is there");
}

#[test]
fn the_assignor_with_most_votes_assigns() {
    let now = Instant::now();
    let (mut group, topics) = (group(now), view(1, &[("t", 1), ("u", 1)]));
    let with =
        |id, assignor: &str| Beat { assignor: Some(assignor.into()), ..join(id, &["t", "u"]) };
    assert_eq!(group.assignor(), Assignor::Uniform);
    group.heartbeat(now, rules(), &topics, &with("a", "range")).unwrap();
    assert_eq!(group.assignor(), Assignor::Range);
    group.heartbeat(now, rules(), &topics, &with("b", "range")).unwrap();
    // The first member has the only partition of both topics.
    assert_eq!(group.state.members["a"].target.len(), 2);
    group.heartbeat(now, rules(), &topics, &with("c", "uniform")).unwrap();
    assert_eq!(group.assignor(), Assignor::Range);
}

#[test]
fn a_restart_makes_no_epoch() {
    let now = Instant::now();
    let (mut group, topics) = (group(now), view(7, &[("t", 4), ("u", 1)]));
    group.heartbeat(now, rules(), &topics, &join("a", &["t"])).unwrap();
    group.heartbeat(now, rules(), &topics, &join("b", &["u"])).unwrap();
    group.leave(now, "b", None, false).unwrap();
    let epoch = group.heartbeat(now, rules(), &topics, &go_on("a", 1)).unwrap().epoch;
    let mut restarted = ConsumerGroup::new(group.state.clone(), rules(), now);
    let topics = view(1, &[("t", 4), ("u", 1)]);
    let answer = restarted.heartbeat(now, rules(), &topics, &go_on("a", epoch)).unwrap();
    assert_eq!((answer.epoch, answer.assignment), (epoch, None));
    assert!(restarted.unwritten().is_empty());
}

#[test]
fn records_of_version_1_are_readable_and_damaged_checkpoints_are_detected() {
    let profile = Profile {
        instance_id: Some("i".into()),
        client_id: "c".into(),
        client_host: "/h".into(),
        rebalance_timeout_ms: 5,
        topics: BTreeSet::from(["t".to_owned()]),
        regex: Some("r".into()),
        ..Profile::default()
    };
    let current =
        Current { epoch: 2, previous_epoch: 1, progress: Progress::Waiting, ..Current::default() };
    let changes = [
        Change::Joined { group_epoch: 1, id: "m".into(), profile },
        Change::Topics { group_epoch: 2, hash: 9 },
        Change::Target {
            id: "m".into(),
            target: Assignment::from([(Uuid::from_u128(7), BTreeSet::from([3]))]),
        },
        Change::Targeted { epoch: 2 },
        Change::Current { id: "m".into(), current },
        Change::Renamed { from: "m".into(), to: "n".into() },
        Change::Removed { group_epoch: 3, id: "x".into() },
    ];
    let (record, count) = encode_changes("g", &changes);
    assert_eq!(count, changes.len());
    let hex: String = record.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        hex,
        "010101006707000000\
         02010000000100\
         6d01010069000100\
         6302002f680500000001000000010074010100720001020000000900000000000000\
         0501006d01000000000000000000000000000000000000070100000003000000\
         0602000000\
         0701006d020000000100000002000000000000000004\
         01006d01006e0303000000010078"
    );
    let mut states = GroupStates::default();
    states.apply_encoded(&record).unwrap();
    assert_eq!(decode::<GroupStates>(&encode(&states)).unwrap(), states);
    let checkpoint = encode(&states);
    assert_eq!(checkpoint[..5], *b"ALGM\x02");
    for at in 0..checkpoint.len() {
        let mut bad = checkpoint.clone();
        bad[at] ^= 1;
        decode::<GroupStates>(&bad).expect_err("damage is detected");
        decode::<GroupStates>(&checkpoint[..at]).expect_err("truncation is detected");
    }
    states.apply_encoded(&encode_deletion("g")).unwrap();
    assert_eq!(states, GroupStates::default());
}

/// Written before the epoch of each partition was recorded.
#[test]
fn members_of_a_version_1_checkpoint_own_their_partitions_since_their_current_epoch() {
    let current = |epoch, kept: &[i32], revoking: &[i32]| Change::Current {
        id: "m".into(),
        current: Current {
            epoch,
            assigned: parts("t", kept),
            revoking: parts("u", revoking),
            ..Current::default()
        },
    };
    let joined = Change::Joined { group_epoch: 1, id: "m".into(), profile: Profile::default() };
    let changes = [joined, current(1, &[0, 1], &[5]), current(4, &[1, 2], &[5])];
    let mut states = GroupStates::default();
    states.apply_encoded(&encode_changes("g", &changes).0).unwrap();
    let since = |states: &GroupStates| {
        let group = &states.0["g"];
        let at = [("t", 0), ("t", 1), ("t", 2), ("u", 5)];
        at.map(|(topic, partition)| group.since("m", (topic_id(topic), partition)))
    };
    assert_eq!(since(&states), [None, Some(1), Some(4), Some(1)]);
    let newest = encode(&states);
    assert_eq!(decode::<GroupStates>(&newest).unwrap(), states);

    // Three epochs before a target without topics, and the checksum.
    let (mut oldest, end) = (newest.clone(), newest.len() - 8);
    oldest.truncate(newest.len() - 4);
    oldest.drain(end - 12..end);
    oldest[4] = 1;
    oldest.extend(crc32c::crc32c(&oldest).to_le_bytes());
    let opened = decode::<GroupStates>(&oldest).unwrap();
    assert_eq!(since(&opened), [None, Some(4), Some(4), Some(4)]);
    oldest.truncate(oldest.len() - 4);
    oldest[4] = 3;
    oldest.extend(crc32c::crc32c(&oldest).to_le_bytes());
    decode::<GroupStates>(&oldest).expect_err("written by a newer program");
}

/// Offsets that a member commits before it learns of a new epoch count, as no other member has had
/// the partition since (KIP-1251).
#[test]
fn a_commit_with_an_older_epoch_is_valid_for_partitions_owned_since_then() {
    let now = Instant::now();
    let (mut group, topics) = (group(now), view(1, &[("t", 4)]));
    let stale = Err(ResponseError::StaleMemberEpoch);
    let of = |group: &ConsumerGroup, id: &str, epoch, partitions: &[i32]| {
        let partitions = partitions.iter().map(|partition| Some((topic_id("t"), *partition)));
        group.check_commit(id, epoch, partitions)
    };
    group.heartbeat(now, rules(), &topics, &join("a", &["t"])).unwrap();
    group.heartbeat(now, rules(), &topics, &join("b", &["t"])).unwrap();
    let kept = group.heartbeat(now, rules(), &topics, &go_on("a", 1)).unwrap().assignment.unwrap();
    // It has not given up the rest.
    assert_eq!(of(&group, "a", 1, &[0, 1, 2, 3]), Ok(()));
    group.heartbeat(now, rules(), &topics, &owns(go_on("a", 1), &kept)).unwrap();
    group.heartbeat(now, rules(), &topics, &go_on("b", 2)).unwrap();
    let kept: Vec<i32> = kept[&topic_id("t")].iter().copied().collect();
    let given: Vec<i32> = (0..4).filter(|partition| !kept.contains(partition)).collect();
    assert_eq!(of(&group, "a", 1, &kept), Ok(()));
    assert_eq!(of(&group, "a", 1, &[]), Ok(()));
    assert_eq!(of(&group, "a", 1, &[kept[0], given[0]]), stale);
    assert_eq!(of(&group, "a", 2, &given), Ok(()), "as in Kafka");
    for epoch in [-2, -1, 0, 3] {
        assert_eq!(of(&group, "a", epoch, &kept), stale, "{epoch}");
    }
    assert_eq!(of(&group, "b", 2, &given), Ok(()));
    assert_eq!(of(&group, "b", 1, &given), stale);
    assert_eq!(of(&group, "c", 1, &kept), Err(ResponseError::UnknownMemberId));
    let absent = [Some((topic_id("t"), kept[0])), None].into_iter();
    assert_eq!(group.check_commit("a", 1, absent), stale);

    // A partition that comes back is owned from then on.
    group.leave(now, "b", None, false).unwrap();
    group.heartbeat(now, rules(), &topics, &go_on("a", 2)).unwrap();
    let group = ConsumerGroup::new(group.state.clone(), rules(), now);
    assert_eq!(group.state.members["a"].current.epoch, 3);
    for epoch in [1, 2] {
        assert_eq!(of(&group, "a", epoch, &kept), Ok(()));
        assert_eq!(of(&group, "a", epoch, &given), stale);
    }
    assert_eq!(of(&group, "a", 3, &given), Ok(()));
}

/// Sees topics without `secret` in their names, until it sees all.
struct Clerk {
    viewer: &'static str,
    sees_all: Arc<AtomicBool>,
}

impl TopicAccess for Clerk {
    fn viewer(&self) -> &str {
        self.viewer
    }

    fn version(&self) -> u64 {
        self.sees_all.load(Ordering::Relaxed).into()
    }

    fn is_visible(&self, topic: &str) -> bool {
        self.viewer == "boss" || self.sees_all.load(Ordering::Relaxed) || !topic.contains("secret")
    }
}

#[test]
fn a_regular_expression_matches_topics_that_the_member_may_describe() {
    let now = Instant::now();
    let topics = view(1, &[("open", 2), ("secret", 2)]);
    let sees_all = Arc::new(AtomicBool::new(false));
    let by = |viewer, beat: Beat| {
        let see = Clerk { viewer, sees_all: sees_all.clone() };
        Beat { visibility: TopicVisibility(Some(Arc::new(see))), regex: Some(".*".into()), ..beat }
    };
    let mut group = group(now);
    let mut beat = |beat: &Beat| group.heartbeat(now, rules(), &topics, beat).expect("accepted");
    let clerk = beat(&by("clerk", join("clerk", &[])));
    assert_eq!(clerk.assignment, Some(parts("open", &[0, 1])));
    let boss = beat(&by("boss", join("boss", &[])));
    assert_eq!(boss.assignment, Some(parts("secret", &[0, 1])));
    // The heartbeat of one does not change what the other sees.
    let open = parts("open", &[0, 1]);
    let clerk = beat(&by("clerk", owns(go_on("clerk", clerk.epoch), &open)));
    assert_eq!(clerk.epoch, boss.epoch);
    // Both see both now: nothing has to move, but it is another epoch.
    sees_all.store(true, Ordering::Relaxed);
    let clerk = beat(&by("clerk", owns(go_on("clerk", clerk.epoch), &open)));
    assert_eq!(clerk.epoch, boss.epoch + 1);
    // And back: the latest member's visibility does not apply to all.
    sees_all.store(false, Ordering::Relaxed);
    let boss = beat(&by("boss", owns(go_on("boss", boss.epoch), &parts("secret", &[0, 1]))));
    assert_eq!(boss.epoch, clerk.epoch + 1);
    let names = |id: &str| group.matches.names(id, ".*").map(<[_]>::len);
    assert_eq!((names("clerk"), names("boss")), (Some(1), Some(2)));
    // The same after a restart, for members that have sent a heartbeat.
    let mut again = ConsumerGroup::new(group.state().clone(), rules(), now);
    let beat = by("boss", owns(go_on("boss", boss.epoch), &parts("secret", &[0, 1])));
    let answer = again.heartbeat(now, rules(), &topics, &beat).expect("accepted");
    assert_eq!(answer.epoch, boss.epoch);
}
