//! The options of a read-only server.

use uuid::Uuid;

use super::limits as l;
use super::options::ServeOptions;
use super::{ConfigError, within};
use crate::objects::ObjectStoreUrl;
use crate::units::Span;

/// What a read-only server follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReadOnly {
    /// `None`: the only store in the object store.
    pub(crate) store: Option<Uuid>,
    pub(crate) poll_interval: Span,
}

impl ReadOnly {
    /// Returns the options of a read-only server, if it is one.
    ///
    /// # Errors
    /// An option of a server that writes; no object store; a value out of bounds.
    pub(super) fn resolve(options: &ServeOptions) -> Result<Option<Self>, ConfigError> {
        let poll_interval = options.catalog_poll_interval.unwrap_or(l::CATALOG_POLL);
        within("catalog-poll-interval", poll_interval, l::CATALOG_POLL_MIN, l::CATALOG_POLL_MAX)?;
        if !options.read_only.unwrap_or(false) {
            return Ok(None);
        }
        let of_writer = [
            ("data-dir", options.data_dir.is_some(), "it keeps nothing in files"),
            ("wal", options.wal.is_some(), "it has no write-ahead log"),
            ("wal-capacity", options.wal_capacity.is_some(), "it has no write-ahead log"),
            ("wal-reserve", options.wal_reserve.is_some(), "it has no write-ahead log"),
            ("force-format", options.force_format, "it has no write-ahead log"),
            ("durability", options.durability.is_some(), "it has no write-ahead log"),
            ("engine", options.engine.is_some(), "it has no write-ahead log"),
            ("log-cache", options.log_cache.is_some(), "it has no write-ahead log"),
            ("upload-size", options.upload_size.is_some(), "it uploads nothing"),
            ("upload-interval", options.upload_interval.is_some(), "it uploads nothing"),
            ("compaction-size", options.compaction_size.is_some(), "it compacts nothing"),
            (
                "log-compaction-interval",
                options.log_compaction_interval.is_some(),
                "it compacts nothing",
            ),
            (
                "auto-create-topics",
                options.auto_create_topics == Some(true),
                "it creates no topics",
            ),
        ];
        if let Some((option, _, why)) = of_writer.iter().find(|(_, is_given, _)| *is_given) {
            return Err(ConfigError(format!(
                "{option} is not an option of a read-only server: {why}"
            )));
        }
        if options.object_store.is_none() {
            return Err(ConfigError(
                "a read-only server needs object-store: the object store of another server".into(),
            ));
        }
        Ok(Some(Self { store: options.store, poll_interval }))
    }

    /// Checks that the object store can have another server.
    ///
    /// # Errors
    /// It is the memory of one.
    pub(super) fn check(object_store: &ObjectStoreUrl) -> Result<(), ConfigError> {
        match object_store {
            ObjectStoreUrl::Memory => Err(ConfigError(
                "memory:// is memory of one server, which a read-only server cannot read".into(),
            )),
            ObjectStoreUrl::Directory(_) | ObjectStoreUrl::S3(_) => Ok(()),
        }
    }
}
