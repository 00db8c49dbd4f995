//! Keys, revisions, transactions and their bounds. The protocol sends these types as they are, so
//! their fields and variants keep their order (`docs/format/coordination-wire.md`).

use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Error, LeaseId, Revision};

/// Greatest length of a key or prefix. A key has at least one byte and no control character.
pub const MAX_KEY_BYTES: usize = 1024;
/// Greatest length of a value.
pub const MAX_VALUE_BYTES: usize = 1 << 20;
/// Most guards of a transaction, and most changes. etcd has the same limits by default.
pub const MAX_TRANSACTION_ITEMS: usize = 128;
/// Most bytes of a transaction: the keys of its guards, and the keys and values of its changes.
/// etcd takes 1.5 MiB for a request, with its framing.
pub const MAX_TRANSACTION_BYTES: usize = 1280 << 10;
/// Most entries of a page of a list.
pub const MAX_PAGE_ENTRIES: usize = 1000;
/// Bytes of keys and values at which a page ends. A page has at least one entry if there is one,
/// so it is below this plus the size of one entry.
pub const MAX_PAGE_BYTES: usize = 2 << 20;
/// Shortest time to live of a lease. A shorter one is raised to this.
pub const MIN_TTL: Duration = Duration::from_secs(1);
/// Longest time to live of a lease.
pub const MAX_TTL: Duration = Duration::from_secs(3600);
/// Most leases at a time.
pub const MAX_LEASES: usize = 10_000;

/// A granted lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Its number.
    pub id: LeaseId,
    /// The time that the lease lives after it was granted or last renewed: at least what was asked.
    pub ttl: Duration,
}

/// A key with its value, at one revision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value; empty in a list of keys only.
    pub value: Bytes,
    /// The revision that created the key. A key that is deleted and put again is created again.
    pub created: Revision,
    /// The revision of its last put.
    pub modified: Revision,
    /// The lease with which the key ends.
    pub lease: Option<LeaseId>,
}

/// A condition of a transaction on one key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Guard {
    /// The key does not exist.
    Absent(String),
    /// The key exists, and this revision was the last to put it.
    Modified(String, Revision),
    /// The key exists since this revision, with any value. It guards an election key, whose holder
    /// may change its value.
    Created(String, Revision),
}

impl Guard {
    /// Returns the guard that holds as long as `modified` is the revision of the key's last put, or
    /// as long as the key does not exist.
    #[must_use]
    pub fn unchanged(key: &str, modified: Option<Revision>) -> Self {
        match modified {
            Some(revision) => Self::Modified(key.to_owned(), revision),
            None => Self::Absent(key.to_owned()),
        }
    }

    /// Returns the key that is compared.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::Absent(key) | Self::Modified(key, _) | Self::Created(key, _) => key,
        }
    }

    /// Returns whether the guard holds for a key that is as `entry` shows it.
    #[must_use]
    pub fn holds(&self, entry: Option<&Entry>) -> bool {
        match self {
            Self::Absent(_) => entry.is_none(),
            Self::Modified(_, revision) => entry.is_some_and(|found| found.modified == *revision),
            Self::Created(_, revision) => entry.is_some_and(|found| found.created == *revision),
        }
    }
}

/// A change of one key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// Sets the value, and the lease with which the key ends: a put without one keeps the key.
    Put {
        /// The key.
        key: String,
        /// Its value.
        value: Bytes,
        /// A lease that exists.
        lease: Option<LeaseId>,
    },
    /// Deletes the key. An absent key is no error, and no change.
    Delete(String),
}

impl Change {
    /// Returns the change that puts a key without a lease.
    #[must_use]
    pub fn put(key: impl Into<String>, value: impl Into<Bytes>) -> Self {
        Self::Put { key: key.into(), value: value.into(), lease: None }
    }

    /// Returns the change that puts a key which ends with the lease.
    #[must_use]
    pub fn put_leased(key: impl Into<String>, value: impl Into<Bytes>, lease: LeaseId) -> Self {
        Self::Put { key: key.into(), value: value.into(), lease: Some(lease) }
    }

    /// Returns the key that is changed.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete(key) => key,
        }
    }
}

/// Changes that are applied together if all guards hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transaction {
    /// Conditions; several may be on one key.
    pub guards: Vec<Guard>,
    /// Changes, each of another key.
    pub changes: Vec<Change>,
}

impl Transaction {
    /// Checks the bounds and that no key is changed twice. Every implementation calls this first.
    ///
    /// # Errors
    /// [`Error::Invalid`], with the bound.
    pub fn check(&self) -> Result<(), Error> {
        if self.guards.len().max(self.changes.len()) > MAX_TRANSACTION_ITEMS {
            return Err(Error::Invalid(format!(
                "a transaction has {} guards and {} changes, and at most {MAX_TRANSACTION_ITEMS} \
                 of each are allowed",
                self.guards.len(),
                self.changes.len()
            )));
        }
        let mut bytes = 0;
        for guard in &self.guards {
            check_key(guard.key())?;
            bytes += guard.key().len();
        }
        let mut keys = std::collections::BTreeSet::new();
        for change in &self.changes {
            check_key(change.key())?;
            bytes += change.key().len();
            if let Change::Put { key, value, .. } = change {
                if value.len() > MAX_VALUE_BYTES {
                    return Err(Error::Invalid(format!(
                        "the value of key {key} has {} bytes, and at most {MAX_VALUE_BYTES} are \
                         allowed",
                        value.len()
                    )));
                }
                bytes += value.len();
            }
            if !keys.insert(change.key()) {
                let key = change.key();
                return Err(Error::Invalid(format!("a transaction changes key {key} twice")));
            }
        }
        if bytes > MAX_TRANSACTION_BYTES {
            return Err(Error::Invalid(format!(
                "a transaction has {bytes} bytes, and at most {MAX_TRANSACTION_BYTES} are allowed"
            )));
        }
        Ok(())
    }
}

/// The guard of a transaction that did not hold. The transaction has changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conflict {
    /// The key of the first guard that did not hold.
    pub key: String,
    /// The key as it was found.
    pub found: Option<Entry>,
    /// The revision at which the guards were compared.
    pub revision: Revision,
}

/// What a page of a list has to contain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListRequest {
    /// The beginning of the keys; empty for all keys.
    pub prefix: String,
    /// The key after which the page begins; it need not exist.
    pub after: Option<String>,
    /// The revision to list; `None` for the current one.
    pub at: Option<Revision>,
    /// The most entries, from 1 to [`MAX_PAGE_ENTRIES`].
    pub limit: usize,
    /// Whether values are left out.
    pub keys_only: bool,
}

impl ListRequest {
    /// Returns the request for the first page of the keys with a prefix, at the current revision.
    pub fn new(prefix: impl Into<String>) -> Self {
        Self {
            prefix: prefix.into(),
            after: None,
            at: None,
            limit: MAX_PAGE_ENTRIES,
            keys_only: false,
        }
    }

    /// Returns the request for the page after `page`, at the same revision, or `None` if `page` is
    /// the last one.
    #[must_use]
    pub fn following(&self, page: &Page) -> Option<Self> {
        let last = page.entries.last().filter(|_| page.more)?;
        Some(Self { after: Some(last.key.clone()), at: Some(page.revision), ..self.clone() })
    }

    /// Checks the bounds. Every implementation calls this first.
    ///
    /// # Errors
    /// [`Error::Invalid`], with the bound.
    pub fn check(&self) -> Result<(), Error> {
        check_prefix(&self.prefix)?;
        if !(1..=MAX_PAGE_ENTRIES).contains(&self.limit) {
            return Err(Error::Invalid(format!(
                "a page of {} entries was asked for, and 1 to {MAX_PAGE_ENTRIES} are allowed",
                self.limit
            )));
        }
        Ok(())
    }
}

/// A page of a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page {
    /// Entries by key, in the order of the keys' bytes.
    pub entries: Vec<Entry>,
    /// The revision that the entries are of.
    pub revision: Revision,
    /// Whether keys follow. [`ListRequest::following`] asks for them.
    pub more: bool,
}

/// A change of a key as a watch reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// The key.
    pub key: String,
    /// What the key is now; `None` if it was deleted, or ended with its lease.
    pub entry: Option<Entry>,
}

/// All changes that one revision made to the keys of a watch. A revision is never split.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// The revision.
    pub revision: Revision,
    /// Its changes, at least one, each of another key.
    pub events: Vec<Event>,
}

/// Checks the bounds of a key.
///
/// # Errors
/// [`Error::Invalid`], if it is empty, too long, or has a control character.
pub fn check_key(key: &str) -> Result<(), Error> {
    if key.is_empty() {
        return Err(Error::Invalid("a key is empty".to_owned()));
    }
    check_prefix(key)
}

/// Checks the bounds of a prefix, which may be empty.
///
/// # Errors
/// [`Error::Invalid`], if it is too long or has a control character.
pub fn check_prefix(prefix: &str) -> Result<(), Error> {
    if prefix.len() > MAX_KEY_BYTES {
        let bytes = prefix.len();
        return Err(Error::Invalid(format!(
            "a key has {bytes} bytes, and at most {MAX_KEY_BYTES} are allowed"
        )));
    }
    if prefix.chars().any(char::is_control) {
        return Err(Error::Invalid(format!("key {prefix:?} has a control character")));
    }
    Ok(())
}

/// Returns the time to live that a lease gets: whole milliseconds, at least [`MIN_TTL`].
///
/// # Errors
/// [`Error::Invalid`], above [`MAX_TTL`].
pub fn granted_ttl(ttl: Duration) -> Result<Duration, Error> {
    if ttl > MAX_TTL {
        return Err(Error::Invalid(format!(
            "a lease of {ttl:?} was asked for, and at most {MAX_TTL:?} is allowed"
        )));
    }
    let ms = ttl.as_nanos().div_ceil(1_000_000);
    Ok(Duration::from_millis(u64::try_from(ms).expect("bounded above")).max(MIN_TTL))
}
