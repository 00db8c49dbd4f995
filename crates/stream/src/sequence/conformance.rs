//! What an object store must do for sequences, as tests that panic. Run [`all`] against a new kind
//! of object store.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use object_store::ObjectStore;
use tokio::time::Instant;
use uuid::Uuid;

use super::{Created, Sealed, Sequence, probe_creates};

/// Number of races.
const RACES: u64 = 50;
/// Writers in each race.
const WRITERS: usize = 16;

/// Delays between attempts.
const RETRY: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// Returns an object with a random nonce.
pub fn sealed(number: u64, previous: u64, body: impl Into<Bytes>) -> Sealed {
    let nonce = Uuid::new_v4();
    Sealed { kind: 1, flags: 0, term: 7, number, nonce, previous, body: body.into() }
}

/// Runs all tests below `prefix`, which must be new.
///
/// # Panics
/// If the object store does not conform.
pub async fn all(store: Arc<dyn ObjectStore>, prefix: &str) {
    probe_creates(&store, prefix, deadline(), &mut |_, _| {}).await.unwrap();
    one_writer_wins_each_number(&store, prefix).await;
    an_object_that_was_created_is_seen_at_once(&store, prefix).await;
    a_hole_is_damage(&store, prefix).await;
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn sequence(store: &Arc<dyn ObjectStore>, prefix: &str, name: &str) -> Sequence {
    Sequence::new(store.clone(), format!("{prefix}/{name}"), RETRY)
}

async fn one_writer_wins_each_number(store: &Arc<dyn ObjectStore>, prefix: &str) {
    let sequence = sequence(store, prefix, "races");
    let mut previous = 0;
    for number in 1..=RACES {
        let objects: Vec<_> =
            (0..WRITERS).map(|writer| sealed(number, previous, format!("{writer}"))).collect();
        let creates = objects.iter().map(|object| sequence.create(object, deadline()));
        let created: Vec<_> = join_all(creates).await.into_iter().map(Result::unwrap).collect();
        let won: Vec<_> = created.iter().filter(|created| **created == Created::Won).collect();
        assert_eq!(won.len(), 1, "number {number} has {} winners", won.len());
        let winner = sequence.get(number).await.unwrap().expect("it was created");
        for (object, created) in objects.iter().zip(created) {
            match created {
                Created::Won => assert_eq!(*object, winner),
                Created::Taken(found) => assert_eq!(found, winner),
            }
        }
        previous = winner.link();
    }
    assert_eq!(sequence.last(1).await.unwrap(), Some(RACES));
    sequence.delete(1..=RACES).await.unwrap();
    assert_eq!(sequence.last(1).await.unwrap(), None);
}

async fn an_object_that_was_created_is_seen_at_once(store: &Arc<dyn ObjectStore>, prefix: &str) {
    let sequence = sequence(store, prefix, "seen");
    for number in 1..=20 {
        assert!(!sequence.exists(number).await.unwrap());
        assert_eq!(sequence.get(number).await.unwrap(), None);
        // Bodies of all sizes, the greatest one included.
        let body = vec![number as u8; 3_usize.pow(number as u32 - 1).min(super::MAX_BODY_BYTES)];
        let object = sealed(number, 0, body);
        assert_eq!(sequence.create(&object, deadline()).await.unwrap(), Created::Won);
        // A create that is repeated, as after an answer that was lost.
        assert_eq!(sequence.create(&object, deadline()).await.unwrap(), Created::Won);
        assert!(sequence.exists(number).await.unwrap());
        assert_eq!(sequence.get(number).await.unwrap(), Some(object));
        assert_eq!(sequence.last(1).await.unwrap(), Some(number));
        assert_eq!(sequence.last(number).await.unwrap(), Some(number));
        assert_eq!(sequence.last(number + 1).await.unwrap(), None);
    }
    sequence.delete(1..=20).await.unwrap();
    sequence.delete([1]).await.unwrap();
}

async fn a_hole_is_damage(store: &Arc<dyn ObjectStore>, prefix: &str) {
    let sequence = sequence(store, prefix, "hole");
    for number in 1..=5 {
        sequence.create(&sealed(number, 0, "x"), deadline()).await.unwrap();
    }
    sequence.delete([1, 2]).await.unwrap();
    assert_eq!(sequence.last(1).await.unwrap(), Some(5), "old numbers may be deleted");
    sequence.delete([4]).await.unwrap();
    let error = sequence.last(1).await.unwrap_err();
    assert!(error.is_loss() && error.to_string().contains(&sequence.name(4)), "{error}");
    assert_eq!(sequence.last(5).await.unwrap(), Some(5));
    sequence.delete([3, 5]).await.unwrap();
}
