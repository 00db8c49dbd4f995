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
        match applied(service, &mark, conflict.revision).await {
            Ok(Some(revision)) => return Ok(Ok(revision)),
            Ok(None) => return Ok(Err(conflict)),
            Err(Error::Unavailable(_) | Error::Unknown(_)) => {}
            Err(error) => return Err(Error::Unknown(error.to_string())),
        }
    }
    Err(unknown.expect("every attempt but those after an unknown outcome returns"))
}

/// What shows that a transaction was applied.
struct Mark<'a> {
    key: &'a str,
    value: &'a [u8],
    /// The transaction can only have been applied after this revision.
    after: Revision,
}

fn mark(transaction: &Transaction) -> Result<Mark<'_>> {
    let excludes = |key: &str| {
        transaction.guards.iter().any(|guard| match guard {
            Guard::Absent(guarded) | Guard::Modified(guarded, _) => guarded == key,
            Guard::Created(..) => false,
        })
    };
    let put = transaction.changes.iter().find_map(|change| match change {
        Change::Put { key, value, .. } if excludes(key) => Some((key, value)),
        _ => None,
    });
    let Some((key, value)) = put else {
        return Err(Error::Invalid("no guard compares a key that the transaction puts".to_owned()));
    };
    let revisions = transaction.guards.iter().map(|guard| match guard {
        Guard::Absent(_) => Revision(0),
        Guard::Modified(_, revision) | Guard::Created(_, revision) => *revision,
    });
    Ok(Mark { key, value, after: revisions.max().unwrap_or_default() })
}

/// Searches the history up to `last` for the put of the mark.
async fn applied(
    service: &dyn Coordination,
    mark: &Mark<'_>,
    last: Revision,
) -> Result<Option<Revision>> {
    if let Some(entry) = service.get(mark.key).await?.filter(|entry| entry.value == mark.value) {
        return Ok(Some(entry.modified));
    }
    let mut revision = mark.after;
    // All keys: then each revision has an event, and the search ends.
    let mut watch = service.watch("", revision);
    while revision < last {
        let changes = watch.next().await.ok_or(Error::Unavailable("no watch".to_owned()))??;
        revision = changes.revision;
        let is_mark = changes.events.iter().any(|event| {
            event.key == mark.key
                && event.entry.as_ref().is_some_and(|entry| entry.value == mark.value)
        });
        if is_mark {
            return Ok(Some(revision));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
