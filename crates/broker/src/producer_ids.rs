//! Producer IDs: each is assigned once, and never again, even after a crash.

use std::ops::Range;

use alluvium_stream::{Change, Store};
use tokio::sync::Mutex;

use crate::errors::ApiError;

/// The catalog key of the first ID that no block contains, as a decimal number.
const META_KEY: &str = "producer-ids/next";

/// The number of IDs that one commit of the catalog reserves. A restart loses the rest of a block.
const BLOCK: i64 = 1_000;

/// Assigns producer IDs.
pub(crate) struct ProducerIds {
    store: Store,
    /// IDs that are reserved and not assigned yet.
    reserved: Mutex<Range<i64>>,
}

impl ProducerIds {
    pub(crate) fn new(store: Store) -> Self {
        Self { store, reserved: Mutex::new(0..0) }
    }

    /// Allocates a new ID. It is reserved durably before it is returned.
    ///
    /// # Errors
    /// Failed storage, or metadata that is not a number.
    pub(crate) async fn allocate(&self) -> Result<i64, ApiError> {
        let mut reserved = self.reserved.lock().await;
        if reserved.is_empty() {
            let first = match self.store.meta_value(META_KEY) {
                None => 0,
                Some(value) => parse(&value).ok_or_else(|| {
                    ApiError::Internal(format!("catalog entry {META_KEY} is not a number"))
                })?,
            };
            let end = first + BLOCK;
            self.store
                .commit(vec![Change::PutMeta {
                    key: META_KEY.into(),
                    value: end.to_string().into_bytes(),
                }])
                .await?;
            *reserved = first..end;
        }
        let id = reserved.next();
        id.ok_or_else(|| ApiError::Internal("a block of producer IDs is empty".into()))
    }
}

fn parse(value: &[u8]) -> Option<i64> {
    std::str::from_utf8(value).ok()?.parse().ok().filter(|id| *id >= 0)
}
