//! Metadata that the servers of a cluster share: keys with revisions, guarded transactions,
//! watches and leases. Decision: `docs/decisions/0021-coordination.md`.
//!
//! # Modules
//!
//! - `numbers.rs`, `types.rs`, `limits.rs`, `error.rs`: revisions; entries, transactions,
//!   pages; bounds; errors
//! - `keys.rs`: the names of all keys, of volumes and of brokers
//! - `election.rs`, `retry.rs`, `lease.rs`: elections and lists of all pages, transactions whose
//!   outcome is unknown, and renewals of leases, over the trait
//! - `state.rs`, `history.rs`: the deterministic state that `memory.rs` and `redb.rs` share
//! - `shared.rs`: that state with a lock, and its watches
//! - `memory.rs`: in memory, for tests and simulations
//! - `redb.rs`: in a file (`docs/format/coordination.md`)
//! - `host.rs`, `remote.rs`, `wire.rs`: a service on a TCP port, its client, and their protocol
//!   (`docs/format/coordination-wire.md`)
//! - `etcd.rs`: etcd (`docs/decisions/0031-etcd.md`)
//! - `clock.rs`: the clock as an argument
//! - `conformance.rs`, `faulty.rs`: the tests that every implementation passes; faults by seed
//! - `fuzz.rs`: the check of the fuzz target `coordination_wire`
#![forbid(unsafe_code)]

use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;

mod clock;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod election;
mod error;
mod etcd;
#[cfg(any(test, feature = "conformance"))]
pub mod faulty;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod history;
mod host;
pub mod keys;
mod lease;
mod limits;
mod memory;
mod numbers;
mod redb;
mod remote;
pub mod retry;
mod shared;
mod state;
mod types;
mod wire;

pub use clock::{Clock, ManualClock, SystemClock};
pub use error::Error;
pub use etcd::{Etcd, EtcdOptions, EtcdTls};
pub use host::{Host, HostOptions, Hosted};
pub use lease::KeptLease;
pub use limits::Limits;
pub use memory::MemoryCoordination;
pub use numbers::{Identity, LeaseId, Revision};
pub use redb::RedbCoordination;
pub use remote::{Remote, RemoteOptions};
pub use types::{
    Change, Changes, Conflict, Entry, Event, Guard, Lease, ListRequest, MAX_KEY_BYTES, MAX_LEASES,
    MAX_PAGE_BYTES, MAX_PAGE_ENTRIES, MAX_TRANSACTION_BYTES, MAX_TRANSACTION_ITEMS, MAX_TTL,
    MAX_VALUE_BYTES, MIN_TTL, Page, Transaction, check_key, check_prefix, granted_ttl,
};

/// The result of a coordination service.
pub type Result<T> = std::result::Result<T, Error>;

/// A map of keys to values with one history, shared by the servers of a cluster.
///
/// All operations are linearizable: a read sees every change that was acknowledged before it began,
/// and what it sees is durable. Revisions grow by one with each transaction or end of a lease that
/// changes a key, also over restarts. Keys are ordered by their bytes.
///
/// A dropped future leaves a change either applied or not. The same holds after [`Error::Unknown`]
/// and [`Error::Failed`]; after every other error nothing has changed. A transaction whose outcome
/// is unknown may be sent again if a guard compares a key that it changes: the first application
/// makes the second one a conflict. The conflict alone does not show whose change was applied; the
/// value has to. [`retry::commit`] does this.
#[async_trait]
pub trait Coordination: Send + Sync {
    /// Returns the identity of the service's history. It stays the same while the service exists,
    /// unless the service is restored from a backup.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Failed`], [`Error::Replaced`], as all operations.
    async fn identity(&self) -> Result<Identity>;

    /// Returns a key's entry, or `None` if it does not exist.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Unavailable`], [`Error::Failed`].
    async fn get(&self, key: &str) -> Result<Option<Entry>>;

    /// Returns a page of the keys with a prefix, all of one revision.
    ///
    /// The first page is of the current revision. The following ones
    /// ([`ListRequest::following`]) are of the same, whatever has changed since. A watch of the
    /// prefix after this revision continues the list without loss or repetition.
    ///
    /// # Errors
    /// [`Error::Compacted`], if the revision asked for is no longer kept; [`Error::Ahead`];
    /// [`Error::Invalid`], [`Error::Unavailable`], [`Error::Failed`].
    async fn list(&self, request: &ListRequest) -> Result<Page>;

    /// Applies all changes of a transaction if all its guards hold, or else none of them.
    ///
    /// Returns the revision from which on the changes are visible; it is durable. If nothing
    /// changes (only deletions of absent keys), that is the current revision. Guards are compared
    /// before leases are looked up. No other change comes between the comparison and the changes.
    ///
    /// # Errors
    /// The inner error is the guard that does not hold. The outer ones are
    /// [`Error::LeaseNotFound`], [`Error::Invalid`] and [`Error::Full`], and
    /// [`Error::Unknown`] and [`Error::Failed`], with an unknown outcome.
    async fn commit(
        &self,
        transaction: &Transaction,
    ) -> Result<std::result::Result<Revision, Conflict>>;

    /// Watches the keys with a prefix: returns all changes of revisions above `after`.
    ///
    /// Each revision that changes such a key comes once, whole, in order. Nothing is queued for a
    /// watch: it reads the history, at the pace at which the stream is polled. If the history that
    /// it needs next is gone, it yields [`Error::Compacted`]; if `after` is above the current
    /// revision, [`Error::Ahead`]. The stream ends after an error and at no other time.
    fn watch(&self, prefix: &str, after: Revision) -> BoxStream<'static, Result<Changes>>;

    /// Grants a lease of at least `ttl`, raised to [`MIN_TTL`].
    ///
    /// The lease ends when it was not renewed for its time to live, by the clock of the service,
    /// not earlier; how much later depends on the service. Its keys end with it, in one revision.
    ///
    /// # Errors
    /// [`Error::Invalid`] above [`MAX_TTL`]; [`Error::Full`] with [`MAX_LEASES`];
    /// [`Error::Unknown`], [`Error::Failed`]: the lease may exist, without keys, until it ends.
    async fn grant(&self, ttl: Duration) -> Result<Lease>;

    /// Renews a lease for its time to live, from the time at which the service receives this.
    ///
    /// # Errors
    /// [`Error::LeaseNotFound`], if its time is over: it cannot be revived.
    /// [`Error::Unavailable`], [`Error::Failed`].
    async fn keep_alive(&self, lease: LeaseId) -> Result<()>;

    /// Ends a lease at once, with its keys.
    ///
    /// # Errors
    /// [`Error::LeaseNotFound`], [`Error::Unavailable`], [`Error::Unknown`], [`Error::Failed`].
    async fn revoke(&self, lease: LeaseId) -> Result<()>;
}
