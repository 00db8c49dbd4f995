//! The ACLs of the catalog, and the super users; the format is in `docs/format/broker-metadata.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use alluvium_stream::{Change, Store, StoreError};
use parking_lot::RwLock;

use super::AuthorizationConfig;
use super::acl::{Acl, CLUSTER_NAME, Filter, Operation, Requester, ResourceType, Table};

const KEY_PREFIX: &str = "acl/";

/// The greatest number of ACLs; each takes about 500 bytes.
const MAX_ACLS: usize = 100_000;

/// The greatest number of filters in one deletion.
const MAX_FILTERS: usize = 10_000;

/// A resource by its name.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Resource<'a> {
    Topic(&'a str),
    Group(&'a str),
    Cluster,
    TransactionalId(&'a str),
}

impl Resource<'_> {
    pub(crate) fn kind(&self) -> ResourceType {
        match self {
            Self::Topic(_) => ResourceType::Topic,
            Self::Group(_) => ResourceType::Group,
            Self::Cluster => ResourceType::Cluster,
            Self::TransactionalId(_) => ResourceType::TransactionalId,
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Topic(name) | Self::Group(name) | Self::TransactionalId(name) => name,
            Self::Cluster => CLUSTER_NAME,
        }
    }
}

/// Why ACLs could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum AclError {
    /// The limit on ACLs is reached.
    #[error("the limit of {MAX_ACLS} ACLs is reached")]
    TooMany,
    /// A deletion has too many filters, or they match too many ACLs together; an ACL that several
    /// filters match counts for each.
    #[error(
        "a deletion can have at most {MAX_FILTERS} filters, which match at most {MAX_ACLS} ACLs \
         together"
    )]
    TooLarge,
    /// A stored ACL cannot be read.
    #[error("catalog entry {0} cannot be read")]
    Damaged(String),
    /// The store failed.
    #[error("{0}")]
    Store(#[from] StoreError),
}

/// Reads what the catalog has: ACLs and their keys.
fn stored(store: &Store) -> Result<BTreeMap<Acl, Vec<String>>, AclError> {
    let mut keys = BTreeMap::<Acl, Vec<String>>::new();
    for (key, value) in store.meta(KEY_PREFIX) {
        let acl = serde_json::from_slice(&value).map_err(|_| AclError::Damaged(key.clone()))?;
        keys.entry(acl).or_default().push(key);
    }
    Ok(keys)
}

/// Decides which operations clients may do.
pub(crate) struct Authorizer {
    config: AuthorizationConfig,
    store: Store,
    table: RwLock<Arc<Table>>,
    /// Incremented with each change of the ACLs.
    version: AtomicU64,
    /// The ACLs and their catalog keys; locked while they are changed.
    keys: tokio::sync::Mutex<BTreeMap<Acl, Vec<String>>>,
}

impl Authorizer {
    /// Loads the ACLs.
    pub(crate) fn open(store: Store, config: AuthorizationConfig) -> Result<Self, AclError> {
        let keys = stored(&store)?;
        let table = Table::new(keys.keys().cloned().collect());
        let (table, keys) = (RwLock::new(Arc::new(table)), tokio::sync::Mutex::new(keys));
        Ok(Self { config, store, table, version: AtomicU64::new(1), keys })
    }

    /// Takes over what the catalog has now, from a store that another server writes.
    ///
    /// # Errors
    /// A stored ACL cannot be read; nothing has changed.
    pub(crate) async fn follow(&self) -> Result<(), AclError> {
        let mut keys = self.keys.lock().await;
        let stored = stored(&self.store)?;
        if *keys != stored {
            *keys = stored;
            self.publish(&keys);
        }
        Ok(())
    }

    pub(crate) fn allows(
        &self,
        requester: &Requester<'_>,
        operation: Operation,
        resource: Resource<'_>,
    ) -> bool {
        let without = self.config.allow_everyone_if_no_acl_found;
        self.is_super(requester)
            || self.table().allows(requester, operation, resource.kind(), resource.name(), without)
    }

    /// Whether the client may do this with any resource of the type.
    pub(crate) fn allows_some(
        &self,
        requester: &Requester<'_>,
        operation: Operation,
        kind: ResourceType,
    ) -> bool {
        self.is_super(requester)
            // As Kafka, which checks a name that has no ACL.
            || self.config.allow_everyone_if_no_acl_found
                && self.table().allows(requester, operation, kind, "hardcode", true)
            || self.table().allows_some(requester, operation, kind)
    }

    fn is_super(&self, requester: &Requester<'_>) -> bool {
        self.config.super_users.iter().any(|user| user == requester.principal)
    }

    /// The version of the ACLs; it changes whenever they do.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// See [`Table::names_hosts`].
    pub(crate) fn names_hosts(&self) -> bool {
        self.table().names_hosts()
    }

    fn table(&self) -> Arc<Table> {
        self.table.read().clone()
    }

    /// The ACLs that a filter matches.
    pub(crate) fn find(&self, filter: &Filter) -> Vec<Acl> {
        self.table().all().iter().filter(|acl| filter.matches(acl)).cloned().collect()
    }

    /// Adds ACLs; existing ones stay.
    pub(crate) async fn add(&self, acls: BTreeSet<Acl>) -> Result<(), AclError> {
        let mut keys = self.keys.lock().await;
        let new: Vec<_> = acls.into_iter().filter(|acl| !keys.contains_key(acl)).collect();
        if keys.len() + new.len() > MAX_ACLS {
            return Err(AclError::TooMany);
        }
        let named = |acl: Acl| (format!("{KEY_PREFIX}{}", uuid::Uuid::new_v4().simple()), acl);
        let new: Vec<_> = new.into_iter().map(named).collect();
        let stored = new.iter().map(|(key, acl)| Change::PutMeta {
            key: key.clone(),
            value: serde_json::to_vec(acl).expect("a struct of texts and numbers"),
        });
        self.store.commit(stored.collect()).await?;
        for (key, acl) in new {
            keys.insert(acl, vec![key]);
        }
        self.publish(&keys);
        Ok(())
    }

    /// Deletes the ACLs that the filters match.
    ///
    /// # Returns
    /// The deleted ACLs for each filter. An ACL that two filters match is listed for both.
    ///
    /// # Errors
    /// [`AclError::TooLarge`]; nothing is deleted.
    pub(crate) async fn delete(&self, filters: &[Filter]) -> Result<Vec<Vec<Acl>>, AclError> {
        if filters.len() > MAX_FILTERS {
            return Err(AclError::TooLarge);
        }
        let mut keys = self.keys.lock().await;
        let mut taken: Vec<Vec<Acl>> = Vec::new();
        let mut left = MAX_ACLS;
        for filter in filters {
            let of_filter = keys.keys().filter(|acl| filter.matches(acl));
            let of_filter: Vec<Acl> = of_filter.take(left + 1).cloned().collect();
            left = left.checked_sub(of_filter.len()).ok_or(AclError::TooLarge)?;
            taken.push(of_filter);
            // Each filter scans all ACLs.
            tokio::task::yield_now().await;
        }
        let deleted: BTreeSet<&Acl> = taken.iter().flatten().collect();
        let stored = deleted.iter().flat_map(|acl| keys[*acl].iter().cloned());
        self.store.commit(stored.map(Change::DeleteMeta).collect()).await?;
        for acl in deleted {
            keys.remove(acl);
        }
        self.publish(&keys);
        Ok(taken)
    }

    fn publish(&self, keys: &BTreeMap<Acl, Vec<String>>) {
        *self.table.write() = Arc::new(Table::new(keys.keys().cloned().collect()));
        self.version.fetch_add(1, Ordering::Release);
    }
}
