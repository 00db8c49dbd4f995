use std::sync::Arc;

use object_store::ObjectStoreExt;
use object_store::memory::InMemory;

use super::super::objects::tests::{RETRY, STORE, built, object, snapshot};
use super::*;

/// Puts objects of one chain into another object store.
async fn copy(from: &InMemory, to: &InMemory, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        let bytes = from.get(&object(number)).await.unwrap().bytes().await.unwrap();
        to.put(&object(number), bytes.into()).await.unwrap();
    }
}

fn chain(store: &Arc<InMemory>) -> Chain {
    Chain::new(store.clone(), STORE, RETRY)
}

/// A reader of the first ten objects of a chain of 60; and the states after each.
async fn reader() -> (Arc<InMemory>, Arc<InMemory>, ChainReader, Vec<ChainState>) {
    let (store, states) = built(6, 60).await;
    let (part, _) = built(7, 1).await;
    copy(&store, &part, 1..=10).await;
    let mut reader = ChainReader::load(chain(&part)).await.unwrap().unwrap();
    assert_eq!(*reader.state(), states[9]);
    assert_eq!(reader.take_changes(), Some(ChainChanges::All));
    (store, part, reader, states)
}

#[tokio::test]
async fn a_reader_follows_the_chain_also_past_deleted_objects() {
    let (store, part, mut reader, states) = reader().await;
    assert!(reader.poll(false).await.unwrap());
    assert_eq!(reader.take_changes(), None);
    copy(&store, &part, 11..=20).await;
    assert!(reader.poll(false).await.unwrap());
    assert_eq!(*reader.state(), states[19]);
    let ChainChanges::Of(touched) = reader.take_changes().unwrap() else { panic!("it is loaded") };
    // Whatever differs is among the rows that were touched.
    let (then, now) = (&states[9], &states[19]);
    for id in then.streams.keys().chain(now.streams.keys()) {
        let differs = then.streams.get(id) != now.streams.get(id);
        assert!(!differs || touched.streams.contains(id), "stream {id}");
    }
    for key in then.meta.keys().chain(now.meta.keys()) {
        assert!(then.meta.get(key) == now.meta.get(key) || touched.meta.contains(key), "{key}");
    }
    // Meanwhile the objects after it were deleted.
    copy(&store, &part, 50..=60).await;
    snapshot(&part, &states[54]).await;
    // Within a minute after the last check the absent number may count as the end.
    assert!(reader.poll(false).await.unwrap());
    assert_eq!(*reader.state(), states[19]);
    assert!(reader.poll(true).await.unwrap());
    assert_eq!(*reader.state(), states[59]);
    assert_eq!(reader.take_changes(), Some(ChainChanges::All));
}

#[tokio::test]
async fn a_reader_that_was_suspended_checks_the_end_by_itself() {
    let (store, part, mut reader, states) = reader().await;
    copy(&store, &part, 50..=60).await;
    snapshot(&part, &states[54]).await;
    reader.checked -= CHECK_INTERVAL;
    assert!(reader.poll(false).await.unwrap());
    assert_eq!(*reader.state(), states[59]);
}

/// An opening that begins again may leave a fence at the number of a deleted object, which extends
/// the state of a reader that was suspended.
#[tokio::test]
async fn what_follows_is_not_taken_before_the_end_is_checked() {
    let (store, part, mut reader, states) = reader().await;
    copy(&store, &part, 11..=11).await;
    copy(&store, &part, 50..=60).await;
    snapshot(&part, &states[54]).await;
    assert!(reader.poll(false).await.unwrap());
    assert_eq!(*reader.state(), states[59]);
    assert_eq!(reader.take_changes(), Some(ChainChanges::All));
}

#[tokio::test]
async fn damage_leaves_the_state_and_passes() {
    let (store, part, mut reader, states) = reader().await;
    copy(&store, &part, 11..=13).await;
    let whole = part.get(&object(12)).await.unwrap().bytes().await.unwrap();
    part.put(&object(12), whole.slice(..whole.len() - 1).into()).await.unwrap();
    for _ in 0..2 {
        let error = reader.poll(false).await.unwrap_err();
        assert!(error.is_loss() && error.to_string().contains("000000000000000c"), "{error}");
        assert_eq!(*reader.state(), states[10], "what precedes it");
    }
    part.put(&object(12), whole.into()).await.unwrap();
    assert!(reader.poll(false).await.unwrap());
    assert_eq!(*reader.state(), states[12]);
}

/// Its last object is that of another chain, or is missing without a later snapshot.
#[tokio::test]
async fn another_chain_in_its_place_is_noticed() {
    let (_, part, mut reader, states) = reader().await;
    part.delete(&object(10)).await.unwrap();
    assert!(reader.poll(false).await.unwrap(), "it is not read again");
    assert!(reader.poll(true).await.unwrap());
    assert_eq!(*reader.state(), states[8], "the chain is shorter");
    let (other, others) = built(8, 12).await;
    copy(&other, &part, 1..=12).await;
    assert!(reader.poll(true).await.unwrap());
    assert_eq!(*reader.state(), others[11]);
    for number in 1..=12 {
        part.delete(&object(number)).await.unwrap();
    }
    let error = reader.poll(true).await.unwrap_err();
    assert!(error.is_loss(), "{error}");
    assert_eq!(*reader.state(), others[11]);
}
