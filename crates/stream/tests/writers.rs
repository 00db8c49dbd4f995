//! A stream has one writer: a later one fences earlier ones, also after a restart.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alluvium_device::sim::Faults;
use alluvium_stream::{
    AppendError, Batch, Change, KIND_LOG, KIND_STATE, StoreError, StreamEpoch, StreamId,
    StreamOffset, StreamWriter,
};
use common::*;
use futures::FutureExt;
use parking_lot::Mutex;
use tokio::task::JoinSet;

const WAL_BYTES: u64 = 1 << 20;

async fn open(server: &Server, id: StreamId, epoch: u64) -> Result<StreamWriter, StoreError> {
    server.store.open_stream(id, StreamEpoch(epoch)).await
}

/// Appends this number of batches of one offset each, and waits until they are acknowledged.
async fn write(server: &Server, writer: &StreamWriter, count: u64) -> Vec<Batch> {
    let mut batches = Vec::new();
    for _ in 0..count {
        batches.push(batch(writer.id(), writer.next_offset().0, 1, 100));
        append(&server.store, writer, batches.last().unwrap()).await.await.unwrap();
    }
    batches
}

/// Checks that both epochs are named.
fn assert_fenced<T>(refused: Result<T, StoreError>, epoch: u64, newest: u64) {
    let refused = refused.err().expect("it is older");
    let text = refused.to_string();
    assert!(text.contains(&epoch.to_string()) && text.contains(&newest.to_string()), "{text}");
    let StoreError::Fenced { epoch: older, newest: newer, .. } = refused else {
        panic!("{refused}");
    };
    assert_eq!((older.0, newer.0), (epoch, newest));
}

fn assert_appends_nothing(writer: &StreamWriter, newest: u64) {
    let next = batch(writer.id(), writer.next_offset().0, 1, 100);
    match writer.append(new_batch(&next)) {
        Err(AppendError::Fenced { epoch, newest: found }) => {
            assert_eq!((epoch, found), (writer.epoch(), StreamEpoch(newest)));
        }
        other => panic!("not refused as an older writer: {:?}", other.err()),
    }
}

#[tokio::test]
async fn a_newer_writer_fences_the_older_one() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    for kind in [KIND_LOG, KIND_STATE] {
        let oldest = server.create(kind).await;
        let id = oldest.id();
        assert_eq!(oldest.epoch(), StreamEpoch(0), "a stream begins with it");
        let mut batches = write(&server, &oldest, 3).await;
        let [older, closing] = [(); 2].map(|()| open(&server, id, 7));
        let (older, closing) = (older.await.unwrap(), closing.await.unwrap());
        batches.extend(write(&server, &older, 3).await);
        let newer = open(&server, id, 20).await.unwrap();
        assert_eq!((newer.next_offset(), newer.newest_epoch()), (StreamOffset(6), newer.epoch()));

        let appended = || server.store.stats().wal.appended;
        let before = appended();
        assert_appends_nothing(&oldest, 20);
        assert_appends_nothing(&older, 20);
        assert_fenced(older.trim(StreamOffset(2)).await, 7, 20);
        assert_fenced(older.trim(StreamOffset(0)).await, 7, 20); // though there is nothing to do
        let trim = Change::TrimStream { id, epoch: older.epoch(), to: StreamOffset(2) };
        assert_fenced(server.store.commit(vec![trim]).await, 7, 20);
        assert_fenced(closing.close().await, 7, 20);
        assert_fenced(oldest.delete().await, 0, 20);
        for epoch in [0, 7, 19] {
            assert_fenced(open(&server, id, epoch).await, epoch, 20);
        }
        let unheard = Change::DeleteStream { id, epoch: StreamEpoch(21) };
        let refused = server.store.commit(vec![unheard]).await.unwrap_err();
        assert!(matches!(refused, StoreError::InvalidChange(_)), "{refused}");
        assert_eq!(appended(), before, "a refusal records nothing");
        assert_eq!(read_from(&older, 0, 1 << 20).await, batches, "reads need no epoch");

        batches.extend(write(&server, &newer, 3).await);
        newer.trim(StreamOffset(8)).await.unwrap();
        assert_eq!(read_from(&older, 8, 1 << 20).await, batches[8..]);
        newer.delete().await.unwrap();
        assert!(server.store.stream(id).is_none());
        let refused = open(&server, id, 30).await.err().expect("it is gone");
        assert!(matches!(refused, StoreError::InvalidChange(_)), "{refused}");
        let refused = older.append(new_batch(&batches[0])).err();
        assert!(matches!(refused, Some(AppendError::Deleted)), "{refused:?}");
    }
    server.close().await;
}

#[tokio::test]
async fn opening_with_the_same_epoch_records_nothing() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let id = server.create_log().await.id();
    let appended = || server.store.stats().wal.appended;
    let before = appended();
    let [zero, again] = [open(&server, id, 0).await.unwrap(), open(&server, id, 0).await.unwrap()];
    assert_eq!(appended(), before);
    write(&server, &zero, 1).await;
    write(&server, &again, 1).await;
    write(&server, &zero, 1).await;
    let before = appended();
    let three = open(&server, id, 3).await.unwrap();
    assert!(appended() > before, "a newer one is recorded");
    let before = appended();
    assert_fenced(again.close().await, 0, 3);
    drop(open(&server, id, 3).await.unwrap());
    three.close().await.unwrap();
    let after_close = open(&server, id, 3).await.unwrap();
    assert_eq!(appended(), before);
    write(&server, &after_close, 1).await;
    drop(after_close);
    server.crash(&mut world);

    let server = world.start().await;
    let before = server.store.stats().wal.appended;
    let writer = open(&server, id, 3).await.unwrap();
    assert_eq!(server.store.stats().wal.appended, before);
    write(&server, &writer, 1).await;
    drop(writer);
    assert_fenced(open(&server, id, 2).await, 2, 3);
    server.close().await;
}

/// An accepted batch may be acknowledged at any time, so opening waits for it. The older writer
/// appends until the opening is durable, although the log has its record already.
#[tokio::test]
async fn appends_in_flight_are_durable_before_the_new_writer_begins() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let older = server.create_log().await;
    let id = older.id();
    server.stepper.hold(true);
    let batches: Vec<_> = (0..4).map(|base| batch(id, base, 1, 10_000)).collect();
    let mut pending = Vec::new();
    for batch in &batches[..3] {
        pending.push(append(&server.store, &older, batch).await);
    }
    let mut again = Box::pin(open(&server, id, 0));
    assert!((&mut again).now_or_never().is_none(), "the same epoch waits, too");
    let before = server.store.stats().wal.appended;
    let mut opening = Box::pin(open(&server, id, 1));
    assert!((&mut opening).now_or_never().is_none());
    eventually("it is recorded", || server.store.stats().wal.appended > before).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!((&mut opening).now_or_never().is_none(), "nothing is durable yet");
    assert_eq!(older.newest_epoch(), StreamEpoch(0));
    pending.push(append(&server.store, &older, &batches[3]).await);
    assert_eq!((older.next_offset(), older.durable_end()), (StreamOffset(4), StreamOffset(0)));

    server.stepper.hold(false);
    let newer = tokio::time::timeout(HANG, opening).await.expect("it hangs").unwrap();
    assert_eq!((newer.next_offset(), newer.durable_end()), (StreamOffset(4), StreamOffset(4)));
    assert_appends_nothing(&older, 1);
    for done in pending {
        done.await.expect("it was accepted before");
    }
    let refused = again.await.err();
    assert!(matches!(refused, None | Some(StoreError::Fenced { .. })), "{refused:?}");
    assert_eq!(read_from(&newer, 0, 1 << 20).await, batches);
    drop((newer, older));
    server.power_cut(&mut world);
    let server = world.start().await;
    let newer = open(&server, id, 1).await.unwrap();
    assert_eq!(read_from(&newer, 0, 1 << 20).await, batches);
    drop(newer);
    server.close().await;
}

#[tokio::test]
async fn closing_waits_until_all_is_durable() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let writer = server.create_log().await;
    let stream = writer.clone();
    server.stepper.hold(true);
    let done = append(&server.store, &writer, &batch(stream.id(), 0, 1, 100)).await;
    let mut closing = Box::pin(writer.close());
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!((&mut closing).now_or_never().is_none());
    server.stepper.hold(false);
    tokio::time::timeout(HANG, closing).await.expect("it hangs").unwrap();
    assert_eq!(stream.durable_end(), StreamOffset(1));
    assert!(done.now_or_never().is_some_and(|done| done.is_ok()));
    server.close().await;
}

/// There will be no space for a long time, in the log or in its cache; the writer still learns that
/// it is fenced.
#[tokio::test]
async fn a_writer_that_waits_for_space_learns_that_it_is_fenced() {
    for cache_bytes in [4 * WAL_BYTES, 128 << 10] {
        let mut world = World::new(WAL_BYTES, 1);
        (world.options.cache_bytes, world.options.upload_bytes) = (cache_bytes, 16 << 10);
        let server = world.start().await;
        let older = Arc::new(server.create_log().await);
        let id = older.id();
        server.objects.down.store(true, Ordering::SeqCst);
        let next = || new_batch(&batch(id, older.next_offset().0, 1, 5000));
        while let Ok(done) = older.append(next()) {
            done.await.unwrap();
        }
        let refused = older.append(next()).err();
        assert!(matches!(refused, Some(AppendError::Full)), "{refused:?}");
        let waiting = tokio::spawn({
            let (store, older) = (server.store.clone(), older.clone());
            async move {
                loop {
                    let next = new_batch(&batch(id, older.next_offset().0, 1, 5000));
                    match older.append(next) {
                        Err(AppendError::Full) => store.wait_for_space().await,
                        other => return other.map(drop),
                    }
                }
            }
        });
        let newer = open(&server, id, 1).await.unwrap();
        let outcome = tokio::time::timeout(HANG, waiting).await.expect("it waits forever").unwrap();
        assert!(matches!(outcome, Err(AppendError::Fenced { .. })), "{:?}", outcome.err());
        let refused = newer.append(next()).err();
        assert!(
            matches!(refused, Some(AppendError::Full)),
            "the new one has no space: {refused:?}"
        );
        server.objects.down.store(false, Ordering::SeqCst);
        write(&server, &newer, 1).await;
        drop((newer, older));
        server.close().await;
    }
}

/// The ways in which a run may end prematurely.
const ENDS: [fn(Server, &mut World); 2] = [Server::crash, Server::power_cut];

#[tokio::test]
async fn a_crash_right_after_the_opening_keeps_the_epoch() {
    for end in ENDS {
        let mut world = World::new(WAL_BYTES, 1);
        let server = world.start().await;
        let id = server.create_log().await.id();
        drop(open(&server, id, u64::MAX).await.unwrap());
        end(server, &mut world);
        for _ in 0..2 {
            let server = world.start().await;
            assert_eq!(server.store.stream(id).unwrap().newest_epoch(), StreamEpoch(u64::MAX));
            for older in [0, 1, u64::MAX - 1] {
                assert_fenced(open(&server, id, older).await, older, u64::MAX);
            }
            write(&server, &open(&server, id, u64::MAX).await.unwrap(), 1).await;
            // Uploads write the stream's row, too.
            server.store.flush().await.unwrap();
            end(server, &mut world);
        }
    }
}

#[tokio::test]
async fn a_crash_before_or_after_the_opening_is_durable_leaves_one_writer() {
    for end in ENDS {
        for newest in [4, 5] {
            let mut world = World::new(WAL_BYTES, 1);
            let server = world.start().await;
            let id = server.create_log().await.id();
            let older = open(&server, id, 4).await.unwrap();
            let batches = write(&server, &older, 3).await;
            server.stepper.hold(true);
            let mut opening = Box::pin(open(&server, id, 5));
            assert!((&mut opening).now_or_never().is_none());
            eventually("its record is in flight", || !world.disk.queued().is_empty()).await;
            if newest == 5 {
                world.disk.run_until_idle();
            }
            drop((opening, older));
            end(server, &mut world);

            let server = world.start().await;
            assert_eq!(server.store.stream(id).unwrap().newest_epoch(), StreamEpoch(newest));
            assert_fenced(open(&server, id, newest - 1).await, newest - 1, newest);
            let mut expected = batches;
            let writer = open(&server, id, newest).await.unwrap();
            expected.extend(write(&server, &writer, 1).await);
            assert_eq!(read_from(&writer, 0, 1 << 20).await, expected);
            drop(writer);
            server.close().await;
        }
    }
}

/// What the older writer had in flight, and the record of the opening, are lost: neither was
/// acknowledged.
#[tokio::test]
async fn a_log_failure_during_the_opening_fails_it() {
    let mut world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let older = server.create_log().await;
    let id = older.id();
    let batches = write(&server, &older, 2).await;
    server.stepper.hold(true);
    let lost = append(&server.store, &older, &batch(id, 2, 1, 100)).await;
    let before = server.store.stats().wal.appended;
    let mut opening = Box::pin(open(&server, id, 1));
    assert!((&mut opening).now_or_never().is_none());
    eventually("it is recorded", || server.store.stats().wal.appended > before).await;
    world.disk.set_faults(Faults { write_error: 1.0, ..Default::default() });
    server.stepper.hold(false);
    let failed = tokio::time::timeout(HANG, opening).await.expect("it hangs").err();
    assert!(matches!(failed, Some(StoreError::Wal(_))), "{failed:?}");
    lost.await.unwrap_err();
    let refused = older.append(new_batch(&batch(id, 3, 1, 100))).err();
    assert!(matches!(refused, Some(AppendError::Failed(_))), "{refused:?}");
    drop(older);
    server.power_cut(&mut world);
    world.disk.set_faults(Faults::default());
    let server = world.start().await;
    let newer = open(&server, id, 1).await.unwrap();
    assert_fenced(open(&server, id, 0).await, 0, 1);
    assert_eq!(read_from(&newer, 0, 1 << 20).await, batches);
    drop(newer);
    server.close().await;
}

#[tokio::test]
async fn a_dropped_opening_completes() {
    let world = World::new(WAL_BYTES, 1);
    let server = world.start().await;
    let older = server.create_log().await;
    let mut opening = Box::pin(open(&server, older.id(), 1));
    assert!((&mut opening).now_or_never().is_none());
    drop(opening);
    eventually("it is opened", || older.newest_epoch() == StreamEpoch(1)).await;
    assert_appends_nothing(&older, 1);
    drop(older);
    server.close().await;
}

/// Many writers open a stream at once, in any order; each writes until it is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn batches_are_in_the_order_of_their_writers() {
    const WRITERS: u64 = 12;
    for round in 0..20u64 {
        let mut world = World::new(WAL_BYTES, round);
        let server = world.start().await;
        let id = server.create_log().await.id();
        let accepted = Arc::new(Mutex::new(Vec::new()));
        let mut writers = JoinSet::new();
        for i in 0..WRITERS {
            let (store, accepted) = (server.store.clone(), accepted.clone());
            let epoch = (i * 7 + round) % WRITERS;
            writers.spawn(async move {
                let writer = match store.open_stream(id, StreamEpoch(epoch)).await {
                    Ok(writer) => writer,
                    Err(StoreError::Fenced { .. }) => return,
                    Err(error) => panic!("{error}"),
                };
                // The last one is never refused.
                for written in 0.. {
                    if epoch == WRITERS - 1 && written == 20 {
                        return;
                    }
                    let base = writer.next_offset();
                    match writer.append(new_batch(&batch(id, base.0, 1, 200))) {
                        Ok(done) => {
                            done.await.unwrap();
                            accepted.lock().push((base.0, epoch));
                        }
                        Err(AppendError::Fenced { .. }) => return,
                        Err(AppendError::Full) => store.wait_for_space().await,
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        tokio::time::timeout(HANG, writers.join_all()).await.expect("a writer is stuck");
        let mut accepted = accepted.lock().clone();
        accepted.sort_unstable();
        assert!(accepted.is_sorted_by_key(|(_, epoch)| *epoch), "{accepted:?}");
        assert!(accepted.iter().map(|(base, _)| *base).eq(0..accepted.len() as u64));
        server.crash(&mut world);
        let server = world.start().await;
        let last = open(&server, id, WRITERS - 1).await.unwrap();
        assert_eq!(read_from(&last, 0, 1 << 20).await.len(), accepted.len());
        drop(last);
        server.close().await;
    }
}
