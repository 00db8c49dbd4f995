//! Finds the objects that a command applies to.

use std::path::Path;
use std::sync::Arc;

use alluvium_stream::ObjectError;
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Location;

use crate::objects::{self, Bucket, ObjectStoreUrl, S3Args};
use crate::output::Failure;

/// An object that was named, or found below a named directory or prefix.
pub(super) struct Found {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) location: Location,
    pub(super) size_bytes: u64,
    /// The object's path or URL, as shown in messages.
    pub(super) shown: String,
}

/// Finds the objects at `location`: a file or a directory, as a path or as a file:// URL, or an
/// object or a prefix in a bucket of S3. A directory or a prefix represents everything below it
/// that has the name of an object; a single file is treated as an object, whatever its name.
///
/// # Errors
/// It cannot be read, or there is no object.
pub(super) async fn find(location: &str, s3: &S3Args) -> Result<Vec<Found>, Failure> {
    let found = if location.contains("://") {
        match ObjectStoreUrl::parse(location, s3.settings()).map_err(Failure::Usage)? {
            ObjectStoreUrl::Directory(path) => in_files(&path).await?,
            ObjectStoreUrl::S3(bucket) => in_bucket(bucket).await?,
            ObjectStoreUrl::Memory => return Err(objects::memory_of_a_server()),
        }
    } else {
        in_files(Path::new(location)).await?
    };
    if found.is_empty() {
        return Err(Failure::NotChecked(format!("{location}: no object found")));
    }
    Ok(found)
}

async fn in_files(path: &Path) -> Result<Vec<Found>, Failure> {
    let failed =
        |error: &dyn std::fmt::Display| Failure::NotChecked(format!("{}: {error}", path.display()));
    let metadata = std::fs::metadata(path).map_err(|error| failed(&error))?;
    let path = path.canonicalize().map_err(|error| failed(&error))?;
    // A server's way of opening the store would create the directory and clean it up.
    let open = |directory: &Path| {
        let store = LocalFileSystem::new_with_prefix(directory).map_err(|error| failed(&error))?;
        Ok::<Arc<dyn ObjectStore>, Failure>(Arc::new(store))
    };
    if metadata.is_dir() {
        return list(open(&path)?, None, &format!("{}/", path.display())).await;
    }
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(failed(&"not a file"));
    };
    let location = Location::parse(name.to_string_lossy()).map_err(|error| failed(&error))?;
    let (size_bytes, shown) = (metadata.len(), path.display().to_string());
    Ok(vec![Found { store: open(directory)?, location, size_bytes, shown }])
}

async fn in_bucket(bucket: Bucket) -> Result<Vec<Found>, Failure> {
    let key = bucket.prefix.clone();
    let shown = format!("s3://{}/", bucket.name);
    let store = objects::open(&ObjectStoreUrl::S3(Bucket { prefix: String::new(), ..bucket }))?;
    if key.is_empty() {
        return list(store, None, &shown).await;
    }
    let location =
        Location::parse(&key).map_err(|error| Failure::Usage(format!("{shown}{key}: {error}")))?;
    let size = alluvium_stream::object_size(&*store, &location).await;
    match size.map_err(|error| not_checked(&format!("{shown}{location}"), &error))? {
        Some(size_bytes) => {
            let shown = format!("{shown}{location}");
            Ok(vec![Found { store, location, size_bytes, shown }])
        }
        None => list(store, Some(&location), &shown).await,
    }
}

async fn list(
    store: Arc<dyn ObjectStore>,
    prefix: Option<&Location>,
    shown: &str,
) -> Result<Vec<Found>, Failure> {
    let listing = alluvium_stream::list_objects(&*store, prefix).await;
    let objects = listing.map_err(|error| not_checked(shown, &error))?.into_iter();
    let found = objects.map(|meta| Found {
        store: store.clone(),
        shown: format!("{shown}{}", meta.location),
        location: meta.location,
        size_bytes: meta.size,
    });
    Ok(found.collect())
}

fn not_checked(shown: &str, error: &ObjectError) -> Failure {
    Failure::NotChecked(format!("{shown}: {}", error.reason()))
}
