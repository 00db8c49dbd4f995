//! The disks that a server exports, by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use tokio::sync::watch;

use crate::disk::Disk;
use crate::protocol::MAX_STRING;

/// The disks that a server exports, by name. They may be added and removed while it runs.
#[derive(Default)]
pub struct Exports(RwLock<Table>);

#[derive(Default)]
struct Table {
    exports: BTreeMap<String, Arc<Export>>,
    default: Option<String>,
}

/// A disk under its name.
pub(crate) struct Export {
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) disk: Arc<dyn Disk>,
    /// Set when the export is removed.
    stop: watch::Sender<bool>,
    connections: watch::Sender<usize>,
}

/// A connection's use of an export, for as long as it exists.
pub(crate) struct InUse(pub(crate) Arc<Export>);

/// Why an export cannot be added.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// The name or the description is not usable.
    #[error(
        "export name or description {0:?}: at most 4,096 bytes without NUL; a name is not empty"
    )]
    Text(String),
    /// The name is in use.
    #[error("export `{0}` exists already")]
    Exists(String),
    /// No client supports the size.
    #[error("export `{0}`: {1} bytes are more than clients support, which is 2^63 - 1")]
    Size(String, u64),
}

impl Exports {
    /// Adds a disk. The description is for people; it may be empty.
    pub fn add(
        &self,
        name: &str,
        description: &str,
        disk: Arc<dyn Disk>,
    ) -> Result<(), ExportError> {
        for (text, is_valid) in [(name, !name.is_empty()), (description, true)] {
            if !is_valid || text.len() > MAX_STRING || text.contains('\0') {
                return Err(ExportError::Text(text.chars().take(64).collect()));
            }
        }
        let size = disk.size_bytes();
        if i64::try_from(size).is_err() {
            return Err(ExportError::Size(name.to_owned(), size));
        }
        let mut table = self.0.write();
        if table.exports.contains_key(name) {
            return Err(ExportError::Exists(name.to_owned()));
        }
        let export = Export {
            name: name.to_owned(),
            description: description.to_owned(),
            disk,
            stop: watch::Sender::new(false),
            connections: watch::Sender::new(0),
        };
        table.exports.insert(name.to_owned(), Arc::new(export));
        Ok(())
    }

    /// Sets the export that clients get for the empty name. It need not exist yet.
    pub fn set_default(&self, name: Option<&str>) {
        self.0.write().default = name.map(str::to_owned);
    }

    /// Removes an export and waits until its connections have ended: they complete what is in
    /// flight, within the grace period, and answer new requests with ESHUTDOWN. Returns whether the
    /// export existed.
    ///
    /// If the returned future is dropped, the export is removed nevertheless.
    pub fn remove(&self, name: &str) -> impl Future<Output = bool> + Send + use<> {
        let removed = self.0.write().exports.remove(name);
        if let Some(export) = &removed {
            export.stop.send_replace(true);
        }
        async move {
            let Some(export) = removed else { return false };
            let mut connections = export.connections.subscribe();
            // The sender is in `export`, so it cannot be closed.
            let _ = connections.wait_for(|connections| *connections == 0).await;
            true
        }
    }

    /// Names and descriptions, by name.
    pub fn list(&self) -> Vec<(String, String)> {
        let table = self.0.read();
        let row = |export: &Arc<Export>| (export.name.clone(), export.description.clone());
        table.exports.values().map(row).collect()
    }

    /// The export of a name, which is that of the default if empty.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<Export>> {
        self.0.read().find(name).cloned()
    }

    /// The export of a name, for a connection. A removal waits for it.
    pub(crate) fn enter(&self, name: &str) -> Option<InUse> {
        // The lock covers the count, so that a removal either precedes or sees it.
        let table = self.0.read();
        let export = table.find(name)?;
        export.connections.send_modify(|connections| *connections += 1);
        Some(InUse(Arc::clone(export)))
    }
}

impl Table {
    fn find(&self, name: &str) -> Option<&Arc<Export>> {
        match name {
            "" => self.exports.get(self.default.as_ref()?),
            name => self.exports.get(name),
        }
    }
}

impl InUse {
    /// Becomes true when the export is removed.
    pub(crate) fn stop(&self) -> watch::Receiver<bool> {
        self.0.stop.subscribe()
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.connections.send_modify(|connections| *connections -= 1);
    }
}
