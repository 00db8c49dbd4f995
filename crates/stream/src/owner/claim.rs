//! Claims of the objects.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use alluvium_wal::WalError;
use object_store::{ObjectStoreExt, PutPayload};

use super::{Claim, MAX_BYTES, Standing, encode};
use crate::naming::{OWNER_OBJECT, object_prefix};
use crate::object_error::{ObjectError, found};
use crate::objects::{Request, object_size, probe_objects, within};
use crate::request_class::RequestClass;
use crate::shared::Shared;

/// Claims the objects. `Ok(Ok(true))`: this store owns the objects and still owns the WAL, and the
/// owner object records this and catalog version `needed`. `Ok(Ok(false))`, which is logged and
/// counted: it does not own them. The outer error is that of a WAL that has stopped.
pub(crate) async fn claim(
    shared: &Arc<Shared>,
    needed: u64,
) -> Result<Result<bool, ObjectError>, WalError> {
    let claimed = claim_objects(shared, needed).await;
    // Last, as close as possible to the use of the result.
    check_wal(shared, claimed).await
}

/// Claims the objects before there is anything to do, so that a copy of this server is detected
/// early. The WAL is checked only if another server owns the objects: it may have taken over the
/// WAL too, and then this store stops.
pub(crate) async fn announce(shared: &Arc<Shared>) -> Result<Result<bool, ObjectError>, WalError> {
    match claim_objects(shared, 0).await {
        Ok(false) => check_wal(shared, Ok(false)).await,
        claimed => Ok(claimed),
    }
}

async fn check_wal(
    shared: &Arc<Shared>,
    claimed: Result<bool, ObjectError>,
) -> Result<Result<bool, ObjectError>, WalError> {
    let wal = shared.wal.clone();
    let checking = shared.owner.begin_check().await;
    let checked = tokio::task::spawn_blocking(move || {
        let checked = wal.verify_owner();
        drop(wal);
        drop(checking);
        checked
    });
    match checked.await {
        Ok(Ok(())) => Ok(claimed),
        Ok(Err(error)) if shared.wal.stopped().is_some() => Err(error),
        Ok(Err(error)) => {
            tracing::warn!("cannot check whether the WAL was taken over: {error}");
            Ok(claimed.map(|_| false))
        }
        Err(_) => Ok(Ok(false)), // the runtime ends
    }
}

async fn claim_objects(shared: &Shared, needed: u64) -> Result<bool, ObjectError> {
    let owner = &shared.owner;
    let mut last = owner.claiming.lock().await;
    let name = format!("{}/{OWNER_OBJECT}", object_prefix(shared.wal_id));
    let mut found = read(shared, &name).await?;
    let is_as_left = found.is_some() && found == *last;
    if !is_as_left && owner.judge(found.as_ref(), needed) != Standing::OwnedByOther {
        check_is_same(shared, &name).await?;
    }
    if owner.judge(found.as_ref(), needed) == Standing::Free {
        write(shared, &name, &owner.claim(shared.catalog.version())).await?;
        // Another server may have written at the same time: the last writer is the owner.
        found = read(shared, &name).await?;
    }
    if owner.judge(found.as_ref(), needed) == Standing::Owner {
        *last = found;
        return Ok(true);
    }
    shared.numbers.owner_conflicts.fetch_add(1, Ordering::Relaxed);
    let Some(Claim { epoch, incarnation: theirs, node_id, version, .. }) = found else {
        tracing::warn!("owner object {name} is missing after a successful PUT");
        return Ok(false);
    };
    tracing::warn!(
        "no object is deleted and the WAL is not trimmed: {name} is that of another server (node \
         {node_id}, incarnation {theirs}, epoch {epoch} of the WAL, version {version} of the \
         catalog); this is node {}, incarnation {}, epoch {}. Either that server has taken over \
         the WAL, or one of the two runs from a copy. If the other one is gone for good, delete \
         that object",
        owner.node_id,
        owner.incarnation(),
        owner.epoch,
    );
    Ok(false)
}

async fn read(shared: &Shared, name: &str) -> Result<Option<Claim>, ObjectError> {
    let claim = within(Request::Get, name, async {
        let got = shared.objects.store(RequestClass::CleanUp).get(&name.into()).await?;
        if got.meta.size > MAX_BYTES {
            return Err(unreadable(&format!("it has {} bytes", got.meta.size)));
        }
        serde_json::from_slice(&got.bytes().await?).map_err(|error| unreadable(&error.to_string()))
    });
    found(claim.await)
}

/// Checks that this is the same object store as before. Called if this run has not claimed the
/// objects yet, or if the owner object is gone or replaced by an older one: it was deleted, or this
/// is another object store than the one with the objects in the catalog, or the file system is not
/// mounted and something was written to the mount point. Such a store has none of the objects in
/// the catalog.
async fn check_is_same(shared: &Shared, name: &str) -> Result<(), ObjectError> {
    let newest = || shared.object_table.lock().newest();
    let Some(object) = newest() else { return Ok(()) };
    let store = shared.objects.store(RequestClass::CleanUp);
    let is_known = |name: &str| shared.object_table.lock().is_live_name(name);
    if object_size(store, &object.name.as_str().into()).await?.is_some()
        || probe_objects(store, Some(shared.wal_id), &is_known).await?
        || newest().is_none()
    {
        return Ok(());
    }
    let reason = format!(
        "none of the objects in the catalog exists, for example {}: this is another object store \
         than before, or it is not mounted. If they are lost for good, create any object with \
         that name",
        object.name
    );
    Err(ObjectError::failed(name, reason))
}

fn unreadable(what: &str) -> object_store::Error {
    let source = format!("not an owner object: {what}").into();
    object_store::Error::Generic { store: "object store", source }
}

async fn write(shared: &Shared, name: &str, claim: &Claim) -> Result<(), ObjectError> {
    let bytes = encode(claim);
    let path = name.into();
    let put = shared.objects.store(RequestClass::CleanUp).put(&path, PutPayload::from(bytes));
    within(Request::Put, name, put).await.map(drop)
}
