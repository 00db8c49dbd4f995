//! Transactions whose outcome is unknown, as a function over the trait.

use futures::StreamExt as _;

use crate::{Change, Conflict, Coordination, Error, Guard, Result, Revision, Transaction};

/// How often [`commit`] sends a transaction.
pub const MAX_ATTEMPTS: usize = 10;

/// Commits a transaction, and finds out what happened if the outcome is unknown.
///
/// After [`Error::Unknown`] the transaction is sent again. It cannot be applied twice, because a
/// guard compares a key that it puts. If the second copy meets a conflict, the history shows
/// whether the first one was applied: it is searched for a put of that key with the same value.
/// **So nothing else may put that value**: it has a random number of this call or of this process.
///
/// At least one guard must be [`Guard::Modified`] on a key that the transaction changes, or a copy
/// that arrives late could be applied after the key was deleted; only a key that is never deleted
/// may have [`Guard::Absent`] instead.
///
/// # Errors
/// [`Error::Invalid`], if no put is guarded. [`Error::Unknown`], if the history is gone, or after
/// [`MAX_ATTEMPTS`]. All others of [`Coordination::commit`], which mean what they mean there.
pub async fn commit(
    service: &dyn Coordination,
    transaction: &Transaction,
) -> Result<std::result::Result<Revision, Conflict>> {
    let mark = mark(transaction)?;
    let mut unknown = None;
    for _ in 0..MAX_ATTEMPTS {
        let conflict = match service.commit(transaction).await {
            Ok(Ok(revision)) => return Ok(Ok(revision)),
            Ok(Err(conflict)) => conflict,
            Err(error @ Error::Unknown(_)) => {
                unknown = Some(error);
                continue;
            }
            Err(Error::Unavailable(_)) if unknown.is_some() => continue,
            // It was not applied now. If an earlier copy might have been, only this is certain.
            Err(error) => return Err(unknown.unwrap_or(error)),
        };
        if unknown.is_none() {
            return Ok(Err(conflict));
        }
        match applied(service, &mark).await {
            Ok(Some(revision)) => return Ok(Ok(revision)),
            Ok(None) => return Ok(Err(conflict)),
            Err(Error::Unavailable(_) | Error::Unknown(_)) => {}
            Err(error) => return Err(Error::Unknown(error.to_string())),
        }
    }
    Err(unknown.expect("every attempt but those after an unknown outcome returns"))
}

/// What shows that a transaction was applied: the put of a guarded key. Only the first change of
/// the key after the guarded revision can be it.
struct Mark<'a> {
    key: &'a str,
    value: &'a [u8],
    /// The guarded revision of the key; `None` if the key was absent.
    was: Option<Revision>,
}

fn mark(transaction: &Transaction) -> Result<Mark<'_>> {
    let guarded = |key: &str| {
        transaction.guards.iter().find_map(|guard| match guard {
            Guard::Absent(guarded) if guarded == key => Some(None),
            Guard::Modified(guarded, revision) if guarded == key => Some(Some(*revision)),
            _ => None,
        })
    };
    let put = transaction.changes.iter().find_map(|change| match change {
        Change::Put { key, value, .. } => guarded(key).map(|was| Mark { key, value, was }),
        Change::Delete(_) => None,
    });
    put.ok_or(Error::Invalid("no guard compares a key that the transaction puts".to_owned()))
}

/// Searches the history for the put of the mark.
async fn applied(service: &dyn Coordination, mark: &Mark<'_>) -> Result<Option<Revision>> {
    let entry = service.get(mark.key).await?;
    let after = match (&entry, mark.was) {
        (Some(entry), _) if entry.value == mark.value => return Ok(Some(entry.modified)),
        // Nothing has put it.
        (Some(entry), Some(was)) if entry.modified == was => return Ok(None),
        (None, None) => return Ok(None),
        (_, Some(was)) => was,
        // The key is never deleted, so its creation is its first put.
        (Some(entry), None) => Revision(entry.created.0 - 1),
    };
    let mut watch = service.watch(mark.key, after);
    loop {
        let changes = watch.next().await.ok_or(Error::Unavailable("no watch".to_owned()))??;
        if let Some(event) = changes.events.iter().find(|event| event.key == mark.key) {
            let is_mark = event.entry.as_ref().is_some_and(|entry| entry.value == mark.value);
            return Ok(is_mark.then_some(changes.revision));
        }
    }
}

#[cfg(test)]
mod tests;
