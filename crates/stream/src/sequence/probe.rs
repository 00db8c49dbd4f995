//! Whether an object store can have sequences. `docs/format/sequence.md`, section 6.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use object_store::ObjectStore;
use tokio::time::Instant;
use uuid::Uuid;

use super::{Attempt, Created, Sealed, Sequence};
use crate::object_error::ObjectError;

/// Number of rounds. Servers that have the fault show it in most of them.
const ROUNDS: u64 = 16;
/// Rounds that may be repeated, because a request was not answered or the result is not certain.
const REPEATED: u64 = 8;
/// Delay between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// Why an object store cannot have sequences.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ProbeError {
    /// It gives a number to two writers, or hides or keeps what it should not.
    #[error("{0}")]
    Unsuitable(String),
    /// It could not be asked.
    #[error(transparent)]
    Object(#[from] ObjectError),
}

/// The result of a round.
enum Round {
    Passed,
    /// A create was not answered, so it may still take effect; or something was found after the
    /// deletion that such a create explains.
    Uncertain(ProbeError),
}

/// Tests whether an object store creates objects atomically. It writes some objects below `prefix`,
/// under random names, and deletes them. `progress` gets the number of rounds done, and of all.
///
/// # Errors
/// It does not, or it refuses a request, or does not answer until `until`.
pub async fn probe_creates(
    store: &Arc<dyn ObjectStore>,
    prefix: &str,
    until: Instant,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ProbeError> {
    let sequence = Sequence::new(store.clone(), prefix.to_owned(), (PAUSE, PAUSE));
    // Two probes at the same time do not meet. Names of earlier ones are not used again, since an
    // object store may answer with what it remembers of them.
    let first = (Uuid::new_v4().as_u64_pair().1 >> 2) + 1;
    let mut numbers = first..first + ROUNDS + REPEATED;
    let result = rounds(&sequence, &mut numbers, until, progress).await;
    let has_left = result.is_err() || numbers.start > first + ROUNDS;
    for number in (first..numbers.start).filter(|_| has_left) {
        // Of a round that did not pass.
        if let Err(error) = sequence.delete([number]).await {
            let name = sequence.name(number);
            tracing::warn!("object {name} of the probe may be left: {error}");
        }
    }
    result
}

async fn rounds(
    sequence: &Sequence,
    numbers: &mut Range<u64>,
    until: Instant,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ProbeError> {
    let mut passed = 0;
    let mut uncertain = None;
    while passed < ROUNDS {
        let Some(number) = numbers.next() else { break };
        match round(sequence, number, until).await? {
            Round::Passed => {
                passed += 1;
                progress(passed, ROUNDS);
            }
            Round::Uncertain(error) if Instant::now() >= until => return Err(error),
            Round::Uncertain(error) => uncertain = Some(error),
        }
    }
    match uncertain.filter(|_| passed < ROUNDS) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Creates an object. The inner error is that of a create without an answer.
async fn create(
    sequence: &Sequence,
    object: &Sealed,
    until: Instant,
) -> Result<Result<Created, ObjectError>, ProbeError> {
    loop {
        match sequence.try_create(object).await {
            Ok(Attempt::Created(created)) => return Ok(Ok(created)),
            Ok(Attempt::Conflict(_)) if Instant::now() + PAUSE < until => {
                tokio::time::sleep(PAUSE).await;
            }
            Ok(Attempt::Conflict(error)) => return Ok(Err(error)),
            Err(error) if error.is_temporary() => return Ok(Err(error)),
            Err(error) if error.is_unsupported() => {
                return Err(ProbeError::Unsuitable(error.to_string()));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sends a request until it is answered, or `until` has passed.
async fn answered<T>(
    until: Instant,
    request: impl AsyncFn() -> Result<T, ObjectError>,
) -> Result<T, ObjectError> {
    loop {
        match request().await {
            Err(error) if error.is_temporary() && Instant::now() + PAUSE < until => {
                tokio::time::sleep(PAUSE).await;
            }
            answer => return answer,
        }
    }
}

async fn round(sequence: &Sequence, number: u64, until: Instant) -> Result<Round, ProbeError> {
    let name = sequence.name(number);
    let unsuitable = |what: &str| ProbeError::Unsuitable(format!("{what} ({name})"));
    let get = || answered(until, || sequence.get(number));
    let delete = || answered(until, || sequence.delete([number]));
    if get().await?.is_some() {
        return Err(unsuitable("an object that was never created is found"));
    }
    let new = || Sealed {
        kind: 0,
        flags: 0,
        term: 0,
        number,
        nonce: Uuid::new_v4(),
        previous: 0,
        body: Bytes::from(Uuid::new_v4().to_string()),
    };
    let objects = [new(), new()];
    let [first, second] = &objects;
    let both = tokio::join!(create(sequence, first, until), create(sequence, second, until));
    let (one, other) = match (both.0?, both.1?) {
        (Ok(one), Ok(other)) => (one, other),
        (Err(error), _) | (_, Err(error)) => return Ok(Round::Uncertain(error.into())),
    };
    let winner = match (one, other) {
        (Created::Won, Created::Taken(found)) if found == *first => first,
        (Created::Taken(found), Created::Won) if found == *second => second,
        (Created::Won, Created::Won) => {
            return Err(unsuitable("two creates of one object have succeeded"));
        }
        (Created::Taken(_), Created::Taken(_)) => {
            return Err(unsuitable("both of two creates have failed"));
        }
        _ => return Err(unsuitable("a create that has failed finds an unknown object")),
    };
    if get().await?.as_ref() != Some(winner) {
        return Err(unsuitable("an object that was created is not found, or is another one"));
    }
    let listed = answered(until, || sequence.listed(number)).await?;
    if !listed.contains(&number) {
        return Err(unsuitable("an object that was created is not listed"));
    }
    delete().await?;
    if get().await?.is_some() {
        return Ok(Round::Uncertain(unsuitable("an object that was deleted is found")));
    }
    match create(sequence, &new(), until).await? {
        Ok(Created::Won) => {}
        Ok(Created::Taken(_)) => {
            let what = "the name of a deleted object cannot be created again";
            return Ok(Round::Uncertain(unsuitable(what)));
        }
        Err(error) => return Ok(Round::Uncertain(error.into())),
    }
    delete().await?;
    Ok(Round::Passed)
}
