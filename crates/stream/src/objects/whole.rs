//! Reads an object without its catalog, piece by piece: for tools.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt};

use super::directory::Directory;
use super::{Request, within};
use crate::naming::{CATALOGS_DIRECTORY, nonce_in};
use crate::object::{self, Block, Contents, Damage, FOOTER_BYTES, Footer, HEADER_BYTES};
use crate::object_error::{ObjectError, found};

/// One GET fetches neighbouring blocks up to this size.
const SPAN_BYTES: u64 = 4 << 20;

/// An object in an object store whose header, footer, directory and index were read and verified
/// against each other.
pub struct StoredObject {
    store: Arc<dyn ObjectStore>,
    location: Path,
    /// What it states of itself and of its streams.
    pub directory: Directory,
    /// Its blocks in order.
    pub blocks: Vec<Block>,
}

impl fmt::Debug for StoredObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredObject").field("location", &self.location).finish_non_exhaustive()
    }
}

impl StoredObject {
    /// Reads header, footer, directory and index of the object at `location`. If its name states a
    /// nonce, it must be the object's.
    ///
    /// # Errors
    /// It cannot be read, or one of these parts is damaged.
    pub async fn open(store: Arc<dyn ObjectStore>, location: &Path) -> Result<Self, ObjectError> {
        let name = location.as_ref();
        let damaged = |damage| ObjectError::damaged(name, damage);
        let size_bytes = within(Request::Get, name, store.head(location)).await?.size;
        object::check_length(size_bytes).map_err(damaged)?;
        let header = get(&*store, location, 0..HEADER_BYTES as u64).await?;
        let header = object::decode_header(&header).map_err(|error| error.of(name))?;
        let (_, nonce) = header;
        if nonce_in(name).is_some_and(|stated| stated != nonce) {
            let reason = format!("this is another object, with the nonce {}", nonce.simple());
            return Err(damaged(Damage { position: 16, reason }));
        }
        let footer_at = size_bytes - FOOTER_BYTES as u64;
        let footer = get(&*store, location, footer_at..size_bytes).await?;
        let footer = Footer::decode(footer_at, &footer).map_err(|error| error.of(name))?;
        footer.check_header(header).map_err(damaged)?;
        let contents = get(&*store, location, footer.directory().start..footer_at).await?;
        let Contents { origin, rows, blocks } =
            footer.decode_contents(&contents).map_err(damaged)?;
        let directory = Directory::of(&footer, origin, rows);
        Ok(Self { store, location: location.clone(), directory, blocks })
    }

    /// Reads all blocks and checks every entry, in at most 4 MiB of memory, or that of a larger
    /// block. `progress` gets the number of bytes of the object read so far. Returns all damage;
    /// intact blocks around it are read, too.
    ///
    /// # Errors
    /// It cannot be read.
    pub async fn verify(&self, progress: &dyn Fn(u64)) -> Result<Vec<Damage>, ObjectError> {
        let mut damage = Vec::new();
        let mut rest = self.blocks.as_slice();
        while let Some(first) = rest.first() {
            let from = first.position;
            let fits = |block: &Block| block.position_end() - from <= SPAN_BYTES;
            let (span, behind) = rest.split_at(rest.partition_point(fits).max(1));
            let to = span.last().expect("at least one").position_end();
            let bytes = get(&*self.store, &self.location, from..to).await?;
            for block in span {
                let at = |position: u64| {
                    usize::try_from(position - from).expect("below the length of the bytes")
                };
                let bytes = bytes.slice(at(block.position)..at(block.position_end()));
                damage.extend(object::decode_block(block, &bytes).err());
            }
            progress(to);
            rest = behind;
        }
        Ok(damage)
    }
}

/// Reads exactly these bytes.
async fn get(
    store: &dyn ObjectStore,
    location: &Path,
    range: Range<u64>,
) -> Result<Bytes, ObjectError> {
    if range.is_empty() {
        return Ok(Bytes::new());
    }
    let name = location.as_ref();
    let bytes = within(Request::Get, name, store.get_range(location, range.clone())).await?;
    if bytes.len() as u64 != range.end - range.start {
        let reason =
            format!("{} bytes were returned for {}..{}", bytes.len(), range.start, range.end);
        return Err(ObjectError::failed(name, reason));
    }
    Ok(bytes)
}

/// Lists what lies under `prefix`, or anywhere, in no particular order.
pub(crate) async fn list_all(
    store: &dyn ObjectStore,
    prefix: Option<&Path>,
) -> Result<Vec<ObjectMeta>, ObjectError> {
    let name = prefix.map_or("", |prefix| prefix.as_ref());
    let mut listing = store.list(prefix);
    let mut found = Vec::new();
    while let Some(object) = within(Request::List, name, listing.try_next()).await? {
        found.push(object);
    }
    Ok(found)
}

/// Lists what lies under `prefix`, or anywhere, and has the name of an object; sorted by name. The
/// parts of catalogs, whose names are similar, are left out.
///
/// # Errors
/// It cannot be listed.
pub async fn list_objects(
    store: &dyn ObjectStore,
    prefix: Option<&Path>,
) -> Result<Vec<ObjectMeta>, ObjectError> {
    let mut objects = list_all(store, prefix).await?;
    // catalogs/<store>/<kind>/<name>, perhaps below a prefix.
    let is_of_catalog = |path: &Path| {
        path.parts().rev().nth(3).is_some_and(|top| top.as_ref() == CATALOGS_DIRECTORY)
    };
    objects.retain(|object| {
        nonce_in(object.location.as_ref()).is_some() && !is_of_catalog(&object.location)
    });
    objects.sort_by(|a, b| a.location.cmp(&b.location));
    Ok(objects)
}

/// Reads an object in one piece; `None` if there is none.
pub(crate) async fn read_whole(
    store: &dyn ObjectStore,
    name: &str,
) -> Result<Option<Bytes>, ObjectError> {
    let path = name.into();
    found(within(Request::Get, name, async { store.get(&path).await?.bytes().await }).await)
}

/// Returns the length of an object, if there is one at `location`, whatever its name.
///
/// # Errors
/// The object store does not respond or refuses.
pub async fn object_size(
    store: &dyn ObjectStore,
    location: &Path,
) -> Result<Option<u64>, ObjectError> {
    let head = within(Request::Get, location.as_ref(), store.head(location)).await;
    Ok(found(head)?.map(|meta| meta.size))
}

/// Deletes an object; a missing one counts as deleted.
pub(crate) async fn delete_object(store: &dyn ObjectStore, name: &str) -> Result<(), ObjectError> {
    found(within(Request::Delete, name, store.delete(&name.into())).await).map(drop)
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;
    use uuid::Uuid;

    use super::*;
    use crate::object::{Encoder, ORIGIN, version_1};
    use crate::types::{Batch, KIND_LOG, StreamId, StreamOffset};

    const NOWHERE: [u64; 0] = [];
    const NAME: &str = "a/0000000000000001-000000000000000000000000000000ff";

    fn object(batches: u64, payload_bytes: usize) -> Vec<u8> {
        let (mut encoder, header) = Encoder::new(Uuid::from_u128(0xff));
        let mut object = header.to_vec();
        for base in 0..batches {
            let payload = vec![base as u8; payload_bytes].into();
            let batch = Batch { base: StreamOffset(base), count: 1, max_timestamp_ms: 5, payload };
            encoder.begin(StreamId(base / 4), KIND_LOG, &"a label".into());
            object.extend(encoder.push(&batch, None).into_iter().flatten().flatten());
        }
        let (last, tail, _) = encoder.finish(&ORIGIN);
        object.extend(last.into_iter().flatten().flatten());
        object.extend(tail);
        object
    }

    /// Returns every position that is reported as damaged.
    async fn damage(name: &str, bytes: Vec<u8>) -> Vec<u64> {
        let store = Arc::new(InMemory::new());
        let location = Path::from(name);
        store.put(&location, bytes.into()).await.unwrap();
        let found = match StoredObject::open(store, &location).await {
            Ok(object) => object.verify(&|_| {}).await,
            Err(error) => Err(error),
        };
        match found {
            Ok(found) => found.iter().map(|damage| damage.position).collect(),
            Err(ObjectError::Damaged { source, .. }) => vec![source.position],
            Err(error) => panic!("{error}"),
        }
    }

    /// Like the test in `object.rs`, which has all bytes in memory.
    #[tokio::test]
    async fn every_flipped_byte_and_every_truncation_is_detected() {
        let of_version_2 = object(6, 3);
        let of_version_1 = version_1(&of_version_2.clone().into()).to_vec();
        for bytes in [of_version_2, of_version_1] {
            assert_eq!(damage(NAME, bytes.clone()).await, NOWHERE);
            for at in 0..bytes.len() {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1;
                assert_ne!(damage(NAME, flipped).await, NOWHERE, "byte {at}");
                assert_ne!(damage(NAME, bytes[..at].to_vec()).await, NOWHERE, "cut at {at}");
            }
            let another = NAME.replace("ff", "fe");
            let found = damage(&another, bytes.clone()).await;
            assert_eq!(found, [16], "the name states another nonce");
            assert_eq!(damage("any-name", bytes).await, NOWHERE);
        }
    }

    #[tokio::test]
    async fn all_damaged_blocks_of_a_large_object_are_found() {
        let mut bytes = object(40, 700_000);
        let store = Arc::new(InMemory::new());
        store.put(&Path::from(NAME), bytes.clone().into()).await.unwrap();
        let whole = StoredObject::open(store, &Path::from(NAME)).await.unwrap();
        assert_eq!(whole.blocks.len(), 40);
        let progress = std::sync::Mutex::new(Vec::new());
        assert!(whole.verify(&|to| progress.lock().unwrap().push(to)).await.unwrap().is_empty());
        let progress = progress.into_inner().unwrap();
        let mut read = 0;
        for to in &progress {
            assert!(to - read <= SPAN_BYTES + HEADER_BYTES as u64, "{progress:?}");
            read = *to;
        }
        assert_eq!(read, whole.blocks[39].position_end(), "to the end of the data");

        let damaged = [0, 7, 39].map(|number| whole.blocks[number].position);
        for position in damaged {
            bytes[usize::try_from(position).unwrap() + 1000] ^= 1;
        }
        assert_eq!(damage(NAME, bytes).await, damaged);
    }
}
