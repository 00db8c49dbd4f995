//! A local directory as an object store.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;

use super::OBJECTS_DIRECTORY;

/// Longer than the writing of any object takes.
const UNFINISHED_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// A local directory as an object store, created if it is not there. Its writes are on stable storage when they
/// complete; `LocalFileSystem` does not do that by default, and the WAL is trimmed on the strength of it.
///
/// `LocalFileSystem` writes to a file next to the object, and never lists such files. What a process that was killed has left of
/// them is removed here when it is a day old.
pub fn local_objects(directory: &Path) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    create_durably(directory).map_err(|error| object_store::Error::Generic {
        store: "LocalFileSystem",
        source: format!("can not create {}: {error}", directory.display()).into(),
    })?;
    if let Err(error) = remove_unfinished(directory) {
        tracing::warn!("can not remove unfinished files under {}: {error}", directory.display());
    }
    Ok(Arc::new(LocalFileSystem::new_with_prefix(directory)?.with_fsync(true)))
}

/// Create the directory and its parents, each on stable storage.
fn create_durably(directory: &Path) -> io::Result<()> {
    match std::fs::create_dir(directory) {
        Ok(()) => {}
        // Who has created it may have been killed before the sync.
        Err(_) if directory.is_dir() => {}
        Err(error) => {
            let parent = directory.parent().filter(|parent| !parent.exists());
            create_durably(parent.ok_or(error)?)?;
            std::fs::create_dir(directory)?;
        }
    }
    let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

fn remove_unfinished(directory: &Path) -> io::Result<()> {
    let all = directory.join(OBJECTS_DIRECTORY);
    if !all.exists() {
        return Ok(());
    }
    for store in std::fs::read_dir(all)? {
        let store = store?;
        if !store.file_type()?.is_dir() {
            continue;
        }
        for file in std::fs::read_dir(store.path())? {
            let file = file?;
            let name = file.file_name();
            let number = name.to_str().and_then(|name| Some(name.rsplit_once('#')?.1));
            let is_unfinished = number.is_some_and(|number| number.parse::<u64>().is_ok());
            let age = file.metadata()?.modified()?.elapsed().unwrap_or_default();
            if is_unfinished && age > UNFINISHED_AGE {
                std::fs::remove_file(file.path())?;
                tracing::info!("removed {}, which was never finished", file.path().display());
            }
        }
    }
    Ok(())
}
