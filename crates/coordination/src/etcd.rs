//! etcd as the coordination service: `docs/decisions/0031-etcd.md`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{
    Change, Changes, Conflict, Coordination, Entry, Error, Guard, Identity, Lease, LeaseId,
    ListRequest, MAX_PAGE_BYTES, MAX_TRANSACTION_ITEMS, Page, Result, Revision, Transaction,
    check_key, granted_ttl,
};

mod link;
mod rpc;
#[cfg(test)]
mod tests;
mod watch;

use link::{Failure, Link, Refusal};
use rpc::{
    COMPARE_CREATED, COMPARE_MODIFIED, Compare, DeleteRange, Do, Done, Grant, KeepAlive, KeyValue,
    Operation, Put, Range, Revoke, Target, TimeToLive, Txn, TxnAnswer,
};

/// How etcd is reached.
#[derive(Clone)]
pub struct EtcdOptions {
    /// The cluster whose keys are used.
    pub cluster: String,
    /// The members' addresses: `HOST:PORT`. One of them is asked at a time; when it does not
    /// answer, the next one is.
    pub endpoints: Vec<String>,
    /// Certificates; without them, connections are not encrypted.
    pub tls: Option<EtcdTls>,
    /// A user of etcd and the password. Without one, etcd must have no users, or know the user by
    /// the certificate.
    pub user: Option<(String, String)>,
    /// The time within which an operation ends, with a result or an error. It includes reconnects.
    pub deadline: Duration,
    /// The time for an attempt to connect to a member.
    pub connect_timeout: Duration,
}

impl EtcdOptions {
    /// Returns the default options: no encryption, no user.
    pub fn new(cluster: impl Into<String>, endpoints: Vec<String>) -> Self {
        Self {
            cluster: cluster.into(),
            endpoints,
            tls: None,
            user: None,
            deadline: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
        }
    }
}

impl fmt::Debug for EtcdOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdOptions")
            .field("cluster", &self.cluster)
            .field("endpoints", &self.endpoints)
            .finish_non_exhaustive()
    }
}

/// Certificates, as PEM.
#[derive(Clone)]
pub struct EtcdTls {
    /// The certificates of the authorities that sign etcd's.
    pub ca: Vec<u8>,
    /// This client's certificate, and its key.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl fmt::Debug for EtcdTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdTls").finish_non_exhaustive()
    }
}

/// A client of etcd, 3.4 or later.
///
/// It connects with the first operation. Reads and renewals of leases are sent again to the next
/// member until their deadline, and then end with [`Error::Unavailable`]. A change is sent once: if
/// its connection ends before the answer, it ends with [`Error::Unknown`]. Watches have no
/// deadline, and continue on the next connection after the last revision that they have received.
///
/// If etcd has another [`Identity`] than before, or a lower revision than this client has seen,
/// every operation and watch ends with [`Error::Replaced`] from then on. The identity is a key of
/// the cluster, `/alluvium/<cluster>/identity`, which [`Coordination::identity`] creates. A client
/// that knows it reads it on each new connection and compares it in each transaction (but for one
/// with 128 guards), so one that runs on while a restore is recorded changes nothing any more.
///
/// etcd has no bound on the number of leases and keys. When its quota of bytes is used up, changes
/// end with [`Error::Unknown`], since it also says so of changes that it has made.
pub struct Etcd {
    link: Arc<Link>,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd").field("options", self.link.options()).finish_non_exhaustive()
    }
}

/// The value of the identity's key, as JSON.
#[derive(Serialize, Deserialize)]
struct StoredIdentity {
    store: Uuid,
    restores: u32,
}

/// Decodes the identity, and returns it with the revision that wrote it.
fn identity_of(found: &KeyValue) -> Result<(Identity, Revision)> {
    let stored: StoredIdentity = serde_json::from_slice(&found.value).map_err(|error| {
        Error::Failed(format!("key {} is not an identity: {error}", key_text(&found.key)))
    })?;
    let identity = Identity { store: stored.store, restores: stored.restores };
    Ok((identity, revision(found.mod_revision)?))
}

impl Etcd {
    /// Returns a client.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is no address, or an address or certificate is malformed.
    pub fn new(options: EtcdOptions) -> Result<Self> {
        Ok(Self { link: Arc::new(Link::new(options)?) })
    }

    /// Records that etcd was restored from a backup, and returns the new identity.
    ///
    /// The operator calls this once after each restore, before anything uses it again, because a
    /// backup lacks the numbers that were given out after it. Revisions have to continue above
    /// those of the backup: `etcdutl snapshot restore --bump-revision 1000000000
    /// --mark-compacted`.
    ///
    /// # Errors
    /// Those of [`Coordination::identity`]; [`Error::Unknown`].
    pub async fn restored(&self) -> Result<Identity> {
        let old = self.identity().await?;
        let restores = old.restores.checked_add(1);
        let restores = restores.ok_or_else(|| Error::Failed("its numbers are used up".into()))?;
        let (_, written) = self.link.identity().expect("it was read above");
        let new = Identity { store: Uuid::new_v4(), restores };
        let key = key_text(&self.link.identity_key());
        let put = self.identity_put(new, &Guard::Modified(key, written));
        match self.link.change(put).await {
            Ok((answer, revision)) if answer.succeeded => {
                self.link.set_identity(new, revision);
                Ok(new)
            }
            Ok(_) => Err(Error::Replaced("another process has recorded a restore".to_owned())),
            Err(failure) => Err(error(failure)),
        }
    }

    fn identity_put(&self, identity: Identity, guard: &Guard) -> Txn {
        let Identity { store, restores } = identity;
        let value = serde_json::to_vec(&StoredIdentity { store, restores });
        let value = value.expect("it has no map").into();
        let put = Put { key: self.link.identity_key(), value, lease: 0 };
        Txn {
            compare: vec![compare(guard)],
            success: vec![Do::Put(put).into()],
            failure: Vec::new(),
        }
    }

    async fn read_identity(&self) -> Result<Option<Identity>> {
        let question = Range { key: self.link.identity_key(), ..Range::default() };
        let (answer, _) = self.link.ask(question).await.map_err(error)?;
        answer.kvs.first().map(|found| self.link.check_identity(found)).transpose()
    }

    /// The error of a list at a revision that etcd does not have.
    async fn not_there(&self, refusal: Refusal, asked: Revision) -> Error {
        match refusal {
            Refusal::Compacted => {
                let oldest = watch::oldest(&self.link).await.unwrap_or(asked.next());
                Error::Compacted { asked, oldest }
            }
            Refusal::Future => match self.link.revision().await {
                Ok(current) => Error::Ahead { asked, current },
                Err(failure) => error(failure),
            },
            refusal => error(Failure::Refused(refusal)),
        }
    }

    /// The lease of a transaction that does not exist.
    async fn ended_lease(&self, mut leases: Vec<LeaseId>) -> Error {
        leases.sort();
        leases.dedup();
        if let [lease] = leases[..] {
            return Error::LeaseNotFound(lease);
        }
        for lease in leases {
            let id = match lease_number(lease) {
                Ok(id) => id,
                Err(error) => return error,
            };
            match self.link.ask(TimeToLive { id }).await {
                // One in its last second has 0.
                Ok((answer, _)) if answer.ttl >= 0 => {}
                Ok(_) | Err(Failure::Refused(Refusal::LeaseNotFound)) => {
                    return Error::LeaseNotFound(lease);
                }
                Err(failure) => return error(failure),
            }
        }
        Error::Unavailable("a member of etcd does not know a lease that another knows".to_owned())
    }

    /// The guard that did not hold, from the keys as etcd compared them.
    fn conflict(
        &self,
        guards: &[Guard],
        answer: TxnAnswer,
        at: Revision,
        with_identity: bool,
    ) -> Result<Conflict> {
        let mut found = answer.responses.into_iter().map(|response| match response.answer {
            Some(Done::Range(range)) => range.kvs.into_iter().next(),
            None => None,
        });
        if with_identity {
            match found.next().flatten() {
                Some(found) => drop(self.link.check_identity(&found)?),
                None => {
                    let gone = Error::Replaced("the identity of etcd is gone".to_owned());
                    return Err(self.link.end(gone));
                }
            }
        }
        for (guard, kv) in guards.iter().zip(found) {
            let found = kv.map(entry).transpose()?;
            if !guard.holds(found.as_ref()) {
                return Ok(Conflict { key: guard.key().to_owned(), found, revision: at });
            }
        }
        Err(Error::Unavailable("etcd has refused a transaction whose guards hold".to_owned()))
    }
}

#[async_trait]
impl Coordination for Etcd {
    async fn identity(&self) -> Result<Identity> {
        if let Some(identity) = self.read_identity().await? {
            return Ok(identity);
        }
        let new = Identity { store: Uuid::new_v4(), restores: 0 };
        let key = key_text(&self.link.identity_key());
        // Whatever the outcome, a read shows the one that counts.
        match self.link.change(self.identity_put(new, &Guard::Absent(key))).await {
            Ok(_) | Err(Failure::Error(Error::Unknown(_))) => {}
            Err(failure) => return Err(error(failure)),
        }
        let created = self.read_identity().await?;
        created.ok_or_else(|| Error::Unavailable("etcd has no identity yet".to_owned()))
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>> {
        check_key(key)?;
        let question = Range { key: bytes_of(key), ..Range::default() };
        let (answer, _) = self.link.ask(question).await.map_err(error)?;
        answer.kvs.into_iter().next().map(entry).transpose()
    }

    async fn list(&self, request: &ListRequest) -> Result<Page> {
        request.check()?;
        let start = match &request.after {
            // The key that follows.
            Some(after) if *after >= request.prefix => Bytes::from(format!("{after}\0")),
            _ => start_of_prefix(&request.prefix),
        };
        let mut question = Range {
            key: start,
            range_end: end_of_prefix(&request.prefix),
            limit: i64::try_from(request.limit).expect("bounded by the check"),
            revision: match request.at {
                Some(Revision(at)) => i64::try_from(at.max(1)).unwrap_or(i64::MAX),
                None => 0,
            },
            keys_only: request.keys_only,
            count_only: false,
        };
        let (answer, current) = loop {
            match (self.link.ask(question.clone()).await, request.at) {
                (Ok(answer), _) => break answer,
                (Err(Failure::Refused(Refusal::TooLarge)), _) if question.limit > 1 => {
                    question.limit = (question.limit / 4).max(1);
                }
                (Err(Failure::Refused(refusal)), Some(asked)) => {
                    return Err(self.not_there(refusal, asked).await);
                }
                (Err(failure), _) => return Err(error(failure)),
            }
        };
        let mut page = Page {
            entries: Vec::with_capacity(answer.kvs.len()),
            revision: request.at.unwrap_or(current),
            more: answer.more,
        };
        let mut bytes = 0;
        for kv in answer.kvs {
            if bytes >= MAX_PAGE_BYTES {
                page.more = true;
                break;
            }
            bytes += kv.key.len() + kv.value.len();
            page.entries.push(entry(kv)?);
        }
        Ok(page)
    }

    async fn commit(
        &self,
        transaction: &Transaction,
    ) -> Result<std::result::Result<Revision, Conflict>> {
        transaction.check()?;
        let guards = &transaction.guards;
        if guards.is_empty() && transaction.changes.is_empty() {
            // One member would answer this by itself.
            return self.link.revision().await.map(Ok).map_err(error);
        }
        let mut leases = Vec::new();
        let mut success = Vec::with_capacity(transaction.changes.len());
        for change in &transaction.changes {
            success.push(Operation::from(match change {
                Change::Put { key, value, lease } => {
                    leases.extend(*lease);
                    let lease = lease.map_or(Ok(0), lease_number)?;
                    Do::Put(Put { key: bytes_of(key), value: value.clone(), lease })
                }
                Change::Delete(key) => Do::Delete(DeleteRange { key: bytes_of(key) }),
            }));
        }
        let mut compare: Vec<_> = guards.iter().map(compare).collect();
        let read = |key| Operation::from(Do::Range(Range { key, ..Range::default() }));
        let mut failure: Vec<_> = guards.iter().map(|guard| read(bytes_of(guard.key()))).collect();
        // A transaction with the maximum number of guards cannot have this comparison.
        let identity = self.link.identity().filter(|_| guards.len() < MAX_TRANSACTION_ITEMS);
        if let Some((_, written)) = identity {
            let key = self.link.identity_key();
            compare.insert(0, self::compare(&Guard::Modified(key_text(&key), written)));
            failure.insert(0, read(key));
        }
        let (answer, at) = match self.link.change(Txn { compare, success, failure }).await {
            Ok(answer) => answer,
            Err(Failure::Refused(Refusal::LeaseNotFound)) => {
                return Err(self.ended_lease(leases).await);
            }
            Err(failure) => return Err(error(failure)),
        };
        match answer.succeeded {
            true => Ok(Ok(at)),
            false => self.conflict(guards, answer, at, identity.is_some()).map(Err),
        }
    }

    fn watch(&self, prefix: &str, after: Revision) -> BoxStream<'static, Result<Changes>> {
        watch::watch(self.link.clone(), prefix, after)
    }

    async fn grant(&self, ttl: Duration) -> Result<Lease> {
        let ttl = granted_ttl(ttl)?;
        let seconds = ttl.as_nanos().div_ceil(1_000_000_000);
        let ttl = i64::try_from(seconds).expect("bounded by the check");
        let (answer, _) = self.link.change(Grant { ttl }).await.map_err(error)?;
        if !answer.error.is_empty() {
            return Err(Error::Unknown(format!("etcd: {}", answer.error)));
        }
        let malformed = |_| Error::Unknown("etcd has answered a negative number".to_owned());
        Ok(Lease {
            id: LeaseId(answer.id.try_into().map_err(malformed)?),
            ttl: Duration::from_secs(answer.ttl.try_into().map_err(malformed)?),
        })
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<()> {
        let id = lease_number(lease)?;
        match self.link.ask(KeepAlive { id }).await {
            Ok((answer, _)) if answer.ttl > 0 => Ok(()),
            Ok(_) | Err(Failure::Refused(Refusal::LeaseNotFound)) => {
                Err(Error::LeaseNotFound(lease))
            }
            Err(failure) => Err(error(failure)),
        }
    }

    async fn revoke(&self, lease: LeaseId) -> Result<()> {
        let id = lease_number(lease)?;
        match self.link.change(Revoke { id }).await {
            Ok(_) => Ok(()),
            Err(Failure::Refused(Refusal::LeaseNotFound)) => Err(Error::LeaseNotFound(lease)),
            Err(failure) => Err(error(failure)),
        }
    }
}

/// etcd's comparison of a guard.
fn compare(guard: &Guard) -> Compare {
    // etcd compares a key that does not exist as one with revision 0. No key has the greatest
    // number, so such a guard never holds.
    let existing = |revision: Revision| match i64::try_from(revision.0) {
        Ok(0) | Err(_) => i64::MAX,
        Ok(revision) => revision,
    };
    let (target, value) = match guard {
        Guard::Absent(_) => (COMPARE_CREATED, Target::Created(0)),
        Guard::Modified(_, revision) => (COMPARE_MODIFIED, Target::Modified(existing(*revision))),
        Guard::Created(_, revision) => (COMPARE_CREATED, Target::Created(existing(*revision))),
    };
    Compare { target, key: bytes_of(guard.key()), value: Some(value) }
}

/// The error for the caller.
fn error(failure: Failure) -> Error {
    let unexpected = |what| Error::Unavailable(format!("etcd has refused a request: {what}"));
    match failure {
        Failure::Error(error) | Failure::Refused(Refusal::Other(error)) => error,
        Failure::Refused(Refusal::Compacted) => unexpected("the revision is gone"),
        Failure::Refused(Refusal::Future) => unexpected("the revision does not exist yet"),
        Failure::Refused(Refusal::LeaseNotFound) => unexpected("the lease has ended"),
        Failure::Refused(Refusal::TooLarge) => unexpected("a value is too large"),
    }
}

/// etcd's number of a lease; its leases have positive numbers of 63 bits.
fn lease_number(lease: LeaseId) -> Result<i64> {
    i64::try_from(lease.0).ok().filter(|id| *id > 0).ok_or(Error::LeaseNotFound(lease))
}

fn revision(number: i64) -> Result<Revision> {
    let malformed = |_| Error::Failed("etcd has answered a negative revision".to_owned());
    number.try_into().map(Revision).map_err(malformed)
}

fn entry(kv: KeyValue) -> Result<Entry> {
    Ok(Entry {
        key: key_text(&kv.key),
        created: revision(kv.create_revision)?,
        modified: revision(kv.mod_revision)?,
        lease: u64::try_from(kv.lease).ok().filter(|id| *id > 0).map(LeaseId),
        value: kv.value,
    })
}

fn bytes_of(key: &str) -> Bytes {
    Bytes::copy_from_slice(key.as_bytes())
}

/// A key as text. Keys of the cluster are; others that a list of all keys meets may not be.
fn key_text(key: &[u8]) -> String {
    String::from_utf8_lossy(key).into_owned()
}

/// The least key with a prefix; etcd's least key is one zero.
fn start_of_prefix(prefix: &str) -> Bytes {
    match prefix.is_empty() {
        true => Bytes::from_static(b"\0"),
        false => bytes_of(prefix),
    }
}

/// The key at which the keys with a prefix end; one zero for all keys.
fn end_of_prefix(prefix: &str) -> Bytes {
    let mut end = prefix.as_bytes().to_vec();
    match end.last_mut() {
        // No byte of UTF-8 is 255.
        Some(last) => *last += 1,
        None => end.push(0),
    }
    end.into()
}
