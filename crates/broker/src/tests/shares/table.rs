//! Share partitions without requests: bounds, locks, and topics that are deleted meanwhile.

use super::*;
use crate::groups::share::{Ack, AckKind, Found, Return, ShareRules, Wanted};

fn all_of(from: u64, to: u64) -> Found {
    Found { from: StreamOffset(from), to: StreamOffset(to), is_for_members: true }
}

/// Acquires what a read from the beginning has found of a share partition; returns the number of
/// records.
fn acquire(server: &TestServer, of: (Uuid, i32), found: &[Found], max_in_flight: u64) -> u64 {
    let shares = server.server().groups.shares();
    let rules = ShareRules { max_in_flight, ..server.server().configs.share_rules("g") };
    let wanted =
        Wanted { max_records: 9_999, is_exact: false, batch_records: 9_999, max_in_flight };
    let slot = shares.get("g", of).unwrap();
    let read = (StreamOffset(0), found);
    let acquired = shares.acquire(&slot, &rules, read, &"m".into(), wanted);
    acquired.iter().map(|acquired| acquired.to.0 - acquired.from.0).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn unacknowledged_records_of_some_groups_do_not_block_others() {
    let (server, topic) = earliest().await;
    let _member = Member::new(&server, "a", topic).await;
    let starts: Vec<_> = (0..300).map(|partition| (partition, StreamOffset(0))).collect();
    server.server().groups.begin_shares("g", topic, &starts, || true).unwrap();
    for partition in 0..250 {
        assert_eq!(acquire(&server, (topic, partition), &[all_of(0, 4_000)], 4_000), 4_000);
    }
    for partition in 250..300 {
        assert_eq!(acquire(&server, (topic, partition), &[all_of(0, 4_000)], 4_000), 100);
    }
    server.server().groups.shares().release("g", "m", Return::Lost);
    let again = acquire(&server, (topic, 0), &[all_of(0, 4_000)], 4_000);
    assert_eq!(again, 4_000, "released records are delivered regardless of the limit");
}

/// A request that sets offsets or fetches may have found the topic a moment before its deletion. A
/// share partition created then would stay until a restart, and keep the group.
#[tokio::test(flavor = "multi_thread")]
async fn no_share_partition_is_created_for_a_topic_deleted_meanwhile() {
    let (server, topic) = earliest().await;
    let mut member = Member::new(&server, "a", topic).await;
    let delete = DeleteTopicsRequest::default().with_topic_names(vec![TopicName(text("t"))]);
    assert_eq!(member.client.call(1, &delete).await.responses[0].error_code, 0);
    let groups = &server.server().groups;
    let exists = || server.server().topics.by_id(topic).is_ok();
    let starts = [(0, StreamOffset(0))];
    let begun = groups.begin_shares("g", topic, &starts, exists);
    assert_eq!(begun.unwrap_err().code(), UNKNOWN_TOPIC_OR_PARTITION);
    let altered = groups.alter_shares("new", topic, &starts, exists).await;
    assert_eq!(altered.unwrap_err().error.code(), UNKNOWN_TOPIC_OR_PARTITION);
    for group in ["g", "new"] {
        assert!(groups.shares().describe(group).is_empty());
    }
}

/// Offsets without records are not persisted.
#[tokio::test(flavor = "multi_thread")]
async fn compacted_records_do_not_count_after_a_restart() {
    let (mut server, topic) = earliest().await;
    let other = server.topic("u", 1, &[]).await;
    let _member = Member::new(&server, "a", topic).await;
    for topic in [topic, other] {
        let starts = [(0, StreamOffset(0))];
        server.server().groups.begin_shares("g", topic, &starts, || true).unwrap();
    }
    let found = [all_of(0, 1), all_of(2_000_000, 2_000_001)];
    assert_eq!(acquire(&server, (topic, 0), &found, 4_000), 2);
    let shares = server.server().groups.shares();
    let slot = shares.get("g", (topic, 0)).unwrap();
    let (rules, start) = (server.server().configs.share_rules("g"), StreamOffset(0));
    let last = StreamOffset(2_000_000);
    let ack = Ack { from: last, to: StreamOffset(last.0 + 1), kind: AckKind::Accept };
    let (written, _) = shares.acknowledge(&slot, &rules, start, "m", &[ack]).unwrap();
    written.unwrap().await.unwrap();
    server.crash().await;
    assert_eq!(acquire(&server, (other, 0), &[all_of(0, 2_000)], 2_000), 2_000);
}

/// A group's locks last at least 15 s, so the server is asked directly for a short one.
#[tokio::test(flavor = "multi_thread")]
async fn locks_expire() {
    let (server, topic) = earliest().await;
    produce(&server, 2).await;
    let mut a = Member::new(&server, "a", topic).await;
    assert_eq!(a.got().await, [(0, 1, 1)]);
    assert_eq!(a.acknowledge(&[(0, 1, &[RELEASE])], false).await, [0, 0]);
    let shares = server.server().groups.shares();
    let slot = shares.get("g", (topic, 0)).unwrap();
    let rules = server.server().configs.share_rules("g");
    let wanted = Wanted { max_records: 9, is_exact: false, batch_records: 9, max_in_flight: 9 };
    let found = [Found { from: StreamOffset(0), to: StreamOffset(2), is_for_members: true }];
    let rules = ShareRules { lock_duration: Duration::from_millis(1), ..rules };
    let from = StreamOffset(0);
    let acquired = shares.acquire(&slot, &rules, (from, &found), &"b".into(), wanted);
    assert_eq!(acquired.len(), 1);
    let request = a.fetch_of(&[0], &[], 60_000);
    let answer = tokio::time::timeout(HANG, a.send(&request)).await.unwrap();
    assert_eq!(answer, ([0; 3], vec![(0, 1, 3)]));
}
