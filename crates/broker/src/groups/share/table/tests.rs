use super::*;
use crate::groups::tests::lost::after;
use crate::state_table::{decode, encode};

fn change(from: u64, to: u64, state: Stored, deliveries: u16) -> Change {
    Change { from: StreamOffset(from), to: StreamOffset(to), state, deliveries }
}

fn table() -> ShareStates {
    let topic = Uuid::from_u128(7);
    let mut table = ShareStates::default();
    let begun = |start| Remembered { start: StreamOffset(start), changes: vec![] };
    let partitions = [((topic, 0), begun(5)), ((topic, 1), begun(0))];
    table.apply_encoded(&set("g", &partitions)).unwrap();
    table.apply_encoded(&set("other", &[((Uuid::from_u128(8), 0), begun(3))])).unwrap();
    let changes = [change(6, 9, Stored::Acknowledged, 1), change(9, 12, Stored::Available, 2)];
    table.apply_encoded(&changed("g", (topic, 0), StreamOffset(5), &changes)).unwrap();
    table
}

#[test]
fn later_changes_win_and_those_below_the_start_are_dropped() {
    let topic = Uuid::from_u128(7);
    let mut table = table();
    let archived = [change(8, 11, Stored::Archived, 3)];
    table.apply_encoded(&changed("g", (topic, 0), StreamOffset(7), &archived)).unwrap();
    assert_eq!(
        table.0["g"][&(topic, 0)],
        Remembered {
            start: StreamOffset(7),
            changes: vec![
                change(7, 8, Stored::Acknowledged, 1),
                change(8, 11, Stored::Archived, 3),
                change(11, 12, Stored::Available, 2),
            ],
        }
    );
    // Changes of share partitions that do not exist are ignored.
    table.apply_encoded(&changed("g", (topic, 9), StreamOffset(7), &archived)).unwrap();
    table.apply_encoded(&changed("none", (topic, 0), StreamOffset(7), &archived)).unwrap();
    assert_eq!((table.0.len(), table.0["g"].len()), (2, 2));
    table.apply_encoded(&topic_forgotten("g", topic)).unwrap();
    table.apply_encoded(&group_deleted("other")).unwrap();
    assert_eq!(table, ShareStates::default());
}

#[test]
fn checkpoints_are_restored_and_damage_is_detected() {
    let table = table();
    let bytes = encode(&table);
    assert_eq!(decode::<ShareStates>(&bytes).unwrap(), table);
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        assert!(decode::<ShareStates>(&damaged).is_err(), "byte {at}");
    }
    let record = changed(
        "g",
        (Uuid::from_u128(7), 0),
        StreamOffset(5),
        &[change(6, 9, Stored::Archived, 1)],
    );
    for len in 0..record.len() {
        assert!(ShareStates::default().apply_encoded(&record[..len]).is_err(), "{len} bytes");
    }
    let empty =
        changed("g", (Uuid::nil(), 0), StreamOffset(5), &[change(6, 6, Stored::Archived, 1)]);
    assert!(ShareStates::default().apply_encoded(&empty).is_err());
    assert!(ShareStates::default().apply_encoded(&[1, 9, 0, 0]).is_err(), "an unknown kind");
}

/// A lost record may only cause records to be delivered again: an unacknowledged record is never
/// skipped.
#[test]
fn a_lost_record_of_a_share_group_only_causes_repeated_deliveries() {
    let partition = (Uuid::from_u128(7), 0);
    let begun = |start| {
        set("g", &[(partition, Remembered { start: StreamOffset(start), changes: vec![] })])
    };
    let acknowledged = |start, from, to| {
        let change = change(from, to, Stored::Acknowledged, 1);
        changed("g", partition, StreamOffset(start), &[change])
    };
    let remembered = |records: &[(u64, Bytes)], end| {
        let table: ShareStates = after(records, end);
        table.0.get("g").map(|partitions| {
            let Remembered { start, changes } = &partitions[&partition];
            let changes = changes.iter().map(|change| {
                assert_eq!(change.state, Stored::Acknowledged);
                (change.from.0, change.to.0)
            });
            (start.0, changes.collect::<Vec<_>>())
        })
    };

    // Acknowledgements are lost: those of 2 and 3, or of 0 and 1 with the move of the start.
    let records = [(0, begun(0)), (1, acknowledged(0, 2, 4)), (2, acknowledged(0, 6, 8))];
    assert_eq!(remembered(&records, 3), Some((0, vec![(2, 4), (6, 8)])));
    let records = [(0, begun(0)), (2, acknowledged(0, 6, 8))];
    assert_eq!(remembered(&records, 3), Some((0, vec![(6, 8)])));
    assert_eq!(remembered(&[(0, begun(0))], 2), Some((0, vec![])));
    // The next record has the start, which moves only over finished records.
    let records = [(0, begun(0)), (2, acknowledged(2, 6, 8))];
    assert_eq!(remembered(&records, 3), Some((2, vec![(6, 8)])));

    // The record by which an administrator has set the group back to 3 is lost.
    let before = [(0, begun(10)), (1, acknowledged(10, 12, 14))];
    assert_eq!(remembered(&before, 3), Some((10, vec![(12, 14)])));
    let records = [before.as_slice(), &[(3, acknowledged(3, 5, 6))]].concat();
    assert_eq!(remembered(&records, 4), Some((3, vec![(5, 6)])));
    // Forward to 20.
    let records = [before.as_slice(), &[(3, acknowledged(20, 25, 26))]].concat();
    assert_eq!(remembered(&records, 4), Some((20, vec![(25, 26)])));

    // The first record of the group is lost: it begins at the offset in its settings.
    assert_eq!(remembered(&[(1, acknowledged(0, 6, 8))], 2), None);
    // The deletion of a group is lost; another one of its name begins.
    let records = [before.as_slice(), &[(3, begun(4))]].concat();
    assert_eq!(remembered(&records, 4), Some((4, vec![])));
}

/// The bytes of format version 1.
#[test]
fn records_have_the_documented_format() {
    let record = changed(
        "g",
        (Uuid::from_u128(7), 2),
        StreamOffset(5),
        &[change(6, 9, Stored::Archived, 3)],
    );
    let mut expected = vec![1, 1, 1, 0, b'g'];
    expected.extend([0; 15]);
    expected.extend([7, 2, 0, 0, 0]);
    expected.extend([5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    expected.extend([6, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 2, 3, 0]);
    assert_eq!(record, expected);
}
