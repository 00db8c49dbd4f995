//! Opens the store of a read-only server: that of another server, in its object store.

use alluvium_stream::chain::list_stores;
use alluvium_stream::{Following, Store, StoreError};
use object_store::ObjectStore;
use uuid::Uuid;

use crate::admin::Health;
use crate::catalog;
use crate::config::{ReadOnly, ServeConfig, limits};
use crate::objects;
use crate::output::{self, Failure};
use crate::storage::{stream_options, wait_unless_permanent};

/// Opens the store that the configuration chooses. Waits while the object store does not answer.
///
/// # Errors
/// There is no such store, or several and none was chosen; its catalog is damaged or of a later
/// version; the object store refuses requests.
pub(super) async fn open(
    config: &ServeConfig,
    read_only: &ReadOnly,
    health: &Health,
) -> Result<Store, Failure> {
    let url = &config.object_store;
    let failed = |reason: String| Failure::Failed(format!("object store {url}: {reason}"));
    let objects = objects::open_to_read(url)?;
    health.begin("opening the catalog");
    let id = match read_only.store {
        Some(id) => id,
        None => only_store(config, &*objects).await?,
    };
    let options = alluvium_stream::Options {
        poll_interval: read_only.poll_interval.0,
        ..stream_options(config, limits::WAL_CAPACITY)?
    };
    let opened = Store::follow(objects.clone(), id, options).await;
    let store = match opened {
        Ok(store) => store,
        Err(error @ StoreError::NoStore { .. }) => {
            let others = list_stores(&*objects).await.unwrap_or_default();
            let others = match others.is_empty() {
                true => String::new(),
                false => format!(". It has those of {}", output::listed(&others)),
            };
            return Err(failed(format!("{error}{others}")));
        }
        Err(StoreError::Object(error)) if error.is_loss() => {
            return Err(failed(format!(
                "{error}. Restore that object from a copy of the object store"
            )));
        }
        Err(error) => return Err(failed(error.to_string())),
    };
    let found = store.following().expect("it is followed");
    tracing::info!(
        "read-only: store {id}, object {} of its catalog, written {} s ago, {} streams",
        found.number,
        found.age.as_secs(),
        store.stream_ids().len()
    );
    Ok(store)
}

/// Returns the only store that has a catalog in the object store.
async fn only_store(config: &ServeConfig, objects: &dyn ObjectStore) -> Result<Uuid, Failure> {
    let url = &config.object_store;
    let stores = loop {
        match list_stores(objects).await {
            Ok(stores) => break stores,
            Err(error) => wait_unless_permanent(config, &error).await?,
        }
    };
    let none = "there is no catalog. A read-only server needs the object store that another server \
                has used";
    catalog::only(url, &stores, none)
}

/// Describes what a read-only server has of the catalog.
pub(super) fn describe(of: &Following) -> String {
    let Following { number, version, age, current, .. } = of;
    format!(
        "read-only: object {number} of the catalog (version {version}), written {} s ago; read to \
         its end {} s ago",
        age.as_secs(),
        current.as_secs()
    )
}
