//! Elections, and lists of all pages, as functions over the trait.
//!
//! Each candidate puts a key of its own under a prefix, bound to its lease. The candidate whose key
//! is the oldest leads until its key is gone. A leader that acts by transactions adds
//! [`Candidacy::guard`] to each, so that one that was replaced changes nothing, whatever its clock
//! or its view says.

use bytes::Bytes;
use futures::StreamExt as _;

use crate::{
    Change, Coordination, Entry, Error, Guard, LeaseId, ListRequest, Result, Revision, Transaction,
};

/// A candidate's key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidacy {
    /// The prefix of the election's keys, with a slash at its end.
    pub prefix: String,
    /// The candidate's key: the prefix and its lease.
    pub key: String,
    /// The revision that created the key.
    pub created: Revision,
}

impl Candidacy {
    /// Returns the guard that holds while the candidate's key exists. While it does, no candidate
    /// that came later leads.
    #[must_use]
    pub fn guard(&self) -> Guard {
        Guard::Created(self.key.clone(), self.created)
    }
}

/// Lists all keys with a prefix, page by page, at one revision.
///
/// # Errors
/// Those of [`Coordination::list`]; after [`Error::Compacted`] it may be called again.
pub async fn list_all(service: &dyn Coordination, prefix: &str) -> Result<(Vec<Entry>, Revision)> {
    let mut request = ListRequest::new(prefix);
    let mut entries = Vec::new();
    loop {
        let mut page = service.list(&request).await?;
        let following = request.following(&page);
        entries.append(&mut page.entries);
        match following {
            Some(following) => request = following,
            None => return Ok((entries, page.revision)),
        }
    }
}

/// Enters an election with a lease, or returns the candidacy that the lease has there already.
///
/// # Errors
/// Those of [`Coordination::commit`]. It may be called again after each.
pub async fn enter(
    service: &dyn Coordination,
    prefix: &str,
    lease: LeaseId,
    value: Bytes,
) -> Result<Candidacy> {
    let key = format!("{prefix}{lease}");
    let put = Transaction {
        guards: vec![Guard::Absent(key.clone())],
        changes: vec![Change::put_leased(key.clone(), value, lease)],
    };
    let created = match service.commit(&put).await? {
        Ok(revision) => revision,
        // Nothing else uses this lease, so an earlier call has put the key.
        Err(conflict) => conflict.found.ok_or(Error::LeaseNotFound(lease))?.created,
    };
    Ok(Candidacy { prefix: prefix.to_owned(), key, created })
}

/// Returns the key of the candidate that leads, with the revision at which it does.
///
/// # Errors
/// Those of [`Coordination::list`].
pub async fn leader(service: &dyn Coordination, prefix: &str) -> Result<(Option<Entry>, Revision)> {
    let (entries, revision) = list_all(service, prefix).await?;
    Ok((entries.into_iter().min_by_key(|entry| entry.created), revision))
}

/// Waits until the candidate leads. Returns whether it does: `false` if its key is gone, and it has
/// to enter again.
///
/// # Errors
/// Those of [`Coordination::list`] and [`Coordination::watch`]. It may be called again after each.
pub async fn lead(service: &dyn Coordination, candidacy: &Candidacy) -> Result<bool> {
    loop {
        let (entries, revision) = list_all(service, &candidacy.prefix).await?;
        let own = |entry: &&Entry| entry.key == candidacy.key;
        if entries.iter().find(own).is_none_or(|entry| entry.created != candidacy.created) {
            return Ok(false);
        }
        if entries.iter().all(|entry| entry.created >= candidacy.created) {
            return Ok(true);
        }
        match service.watch(&candidacy.prefix, revision).next().await {
            Some(Ok(_) | Err(Error::Compacted { .. })) => {}
            Some(Err(error)) => return Err(error),
            None => return Err(Error::Unavailable("the watch has ended".to_owned())),
        }
    }
}
