//! Producer IDs: each is assigned once, and never again, even after a crash.

use std::ops::Range;

use alluvium_stream::{Change, Store};
use tokio::sync::Mutex;

use crate::errors::ApiError;

/// The catalog key of the first ID that no block contains, as a decimal number.
pub(crate) const META_KEY: &str = "producer-ids/next";

/// The catalog key of the store's term in which the last block was reserved, as a decimal number.
const TERM_KEY: &str = "producer-ids/term";

/// The number of IDs that are passed over in a new term: the catalog may have lost the last blocks
/// that were reserved.
pub(crate) const SKIPPED: i64 = 1_000_000_000;

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
            let term = i64::from(self.store.term());
            let (mut first, last_term) = (self.number(META_KEY)?, self.number(TERM_KEY)?);
            // Each term that was passed over may have reserved blocks.
            let terms = term.saturating_sub(last_term).max(0);
            first = first.saturating_add(SKIPPED.saturating_mul(terms));
            let end = first
                .checked_add(BLOCK)
                .ok_or_else(|| ApiError::Internal("all producer IDs have been assigned".into()))?;
            let put = |key: &str, number: i64| Change::PutMeta {
                key: key.into(),
                value: number.to_string().into_bytes(),
            };
            self.store.commit(vec![put(META_KEY, end), put(TERM_KEY, term)]).await?;
            *reserved = first..end;
        }
        let id = reserved.next();
        id.ok_or_else(|| ApiError::Internal("a block of producer IDs is empty".into()))
    }

    /// Returns the number under a key of the catalog; 0 if there is none.
    fn number(&self, key: &str) -> Result<i64, ApiError> {
        self.store.meta_value(key).map_or(Ok(0), |value| {
            parse(&value)
                .ok_or_else(|| ApiError::Internal(format!("catalog entry {key} is not a number")))
        })
    }
}

fn parse(value: &[u8]) -> Option<i64> {
    std::str::from_utf8(value).ok()?.parse().ok().filter(|id| *id >= 0)
}
