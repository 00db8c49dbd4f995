//! Reads the directory of an object without the catalog.

use std::ops::Range;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore};
use uuid::Uuid;

use super::get::read_again;
use super::{Request, within};
use crate::naming::nonce_in;
use crate::object::{
    self, Damage, DecodeError, DirectoryRow, FOOTER_BYTES, Footer, Origin, VERSION_1,
};
use crate::object_error::ObjectError;

/// Bytes that the first request fetches of the end of an object. Directory and index of 500 streams
/// fit into them.
const TAIL_BYTES: u64 = 64 << 10;

/// What an object states of itself and of its streams, and what the catalog would state of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directory {
    /// Its format version.
    pub format: u32,
    /// Its length.
    pub size_bytes: u64,
    /// A random number that is also in its name.
    pub nonce: Uuid,
    /// Position of its index, since format version 2 of the top of the index.
    pub index_position: u64,
    /// Length of its index, since format version 2 of the top.
    pub index_bytes: u64,
    /// CRC32C of its index, since format version 2 of the top.
    pub index_crc32c: u32,
    /// Who wrote it; `None` in format version 1.
    pub origin: Option<Origin>,
    /// Its streams, in the order of their ids.
    pub rows: Vec<DirectoryRow>,
}

impl Directory {
    /// Returns the payload of all of its batches, in bytes.
    pub fn payload_bytes(&self) -> u64 {
        self.rows.iter().map(|row| row.payload_bytes).sum()
    }

    pub(super) fn of(footer: &Footer, origin: Option<Origin>, rows: Vec<DirectoryRow>) -> Self {
        Self {
            format: footer.index.format,
            size_bytes: footer.position() + FOOTER_BYTES as u64,
            nonce: footer.nonce,
            index_position: footer.index.position,
            index_bytes: footer.index.len_bytes,
            index_crc32c: footer.index.crc32c,
            origin,
            rows,
        }
    }
}

/// Reads the directory of an object, and neither its data nor the catalog. One request fetches the
/// end of the object, and a second one the directory if that begins before. Of an object of format
/// version 1, which has no directory, the rows follow from the index, and have no labels.
///
/// Footer and directory are verified against their checksums. The index of an object of format
/// version 2 is not read: [`super::StoredObject`] compares them.
///
/// # Errors
/// It cannot be read, or is damaged, also in a second read; or its name states another nonce.
pub async fn read_directory(store: &dyn ObjectStore, name: &str) -> Result<Directory, ObjectError> {
    match try_read(store, name).await? {
        Ok(directory) => Ok(directory),
        Err(damage) => read_again(name, &damage, try_read(store, name).await?),
    }
}

async fn try_read(
    store: &dyn ObjectStore,
    name: &str,
) -> Result<Result<Directory, Damage>, ObjectError> {
    let (tail, size_bytes) = get(store, name, GetRange::Suffix(TAIL_BYTES)).await?;
    let footer = match decode_footer(name, &tail, size_bytes) {
        Ok(footer) => footer,
        Err(DecodeError::Damaged(damage)) => return Ok(Err(damage)),
        Err(error) => return Err(error.of(name)),
    };
    let wanted = match footer.index.format {
        VERSION_1 => footer.directory().end..footer.position(),
        _ => footer.directory(),
    };
    let Range { start, end } = wanted;
    let tail_at = size_bytes - tail.len() as u64;
    let bytes = match usize::try_from(start.saturating_sub(tail_at)) {
        Ok(at) if start >= tail_at => {
            let len_bytes = usize::try_from(end - start).expect("a part of the tail");
            tail.slice(at..at + len_bytes)
        }
        _ => {
            let (bytes, _) = get(store, name, GetRange::Bounded(start..end)).await?;
            if bytes.len() as u64 != end - start {
                let reason = format!("{} bytes were returned for {start}..{end}", bytes.len());
                return Err(ObjectError::failed(name, reason));
            }
            bytes
        }
    };
    Ok(decode(&footer, &bytes))
}

/// Reads what an object holds from its index alone: its directory is damaged. The rows have no
/// labels.
///
/// # Errors
/// It cannot be read, or footer or index are damaged.
pub(crate) async fn read_index(
    store: &dyn ObjectStore,
    name: &str,
) -> Result<Directory, ObjectError> {
    let damaged = |damage| ObjectError::damaged(name, damage);
    let (tail, size_bytes) = get(store, name, GetRange::Suffix(TAIL_BYTES)).await?;
    let footer = decode_footer(name, &tail, size_bytes).map_err(|error| error.of(name))?;
    let range = footer.index.whole().map_err(damaged)?;
    let (bytes, _) = get(store, name, GetRange::Bounded(range)).await?;
    let (blocks, _) = footer.index.decode(&bytes, None).map_err(damaged)?;
    Ok(Directory::of(&footer, None, object::rows_of(&blocks)))
}

/// Decodes the footer from the last bytes of an object.
fn decode_footer(name: &str, tail: &[u8], size_bytes: u64) -> Result<Footer, DecodeError> {
    object::check_length(size_bytes)?;
    let Some(at) = tail.len().checked_sub(FOOTER_BYTES) else {
        return Err(Damage::of_all(format!("{} bytes were read of its end", tail.len())).into());
    };
    let footer_at = size_bytes - FOOTER_BYTES as u64;
    let footer = Footer::decode(footer_at, &tail[at..])?;
    if nonce_in(name).is_some_and(|stated| stated != footer.nonce) {
        let reason = format!("this is another object, with the nonce {}", footer.nonce.simple());
        return Err(Damage { position: footer_at, reason }.into());
    }
    Ok(footer)
}

fn decode(footer: &Footer, bytes: &Bytes) -> Result<Directory, Damage> {
    let (origin, rows) = match footer.index.format {
        VERSION_1 => {
            let data_end = footer.directory().end;
            (None, object::rows_of(&footer.index.decode(bytes, Some(data_end))?.0))
        }
        _ => {
            let (origin, rows) = footer.decode_directory(bytes)?;
            (Some(origin), rows)
        }
    };
    Ok(Directory::of(footer, origin, rows))
}

/// Returns a range of an object's bytes, which ends where the object does, and the object's length.
async fn get(
    store: &dyn ObjectStore,
    name: &str,
    range: GetRange,
) -> Result<(Bytes, u64), ObjectError> {
    match try_get(store, name, range.clone()).await {
        // A connection that died unnoticed is the most likely reason, and the retry uses a new one.
        Err(error) if error.is_temporary() => try_get(store, name, range).await,
        answer => answer,
    }
}

async fn try_get(
    store: &dyn ObjectStore,
    name: &str,
    range: GetRange,
) -> Result<(Bytes, u64), ObjectError> {
    let path = Path::from(name);
    let request = async {
        let options = GetOptions { range: Some(range), ..GetOptions::default() };
        let answer = store.get_opts(&path, options).await?;
        let (size_bytes, range) = (answer.meta.size, answer.range.clone());
        Ok((answer.bytes().await?, range, size_bytes))
    };
    let (bytes, range, size_bytes) = within(Request::Get, name, request).await?;
    match bytes.len() as u64 == range.end - range.start {
        true => Ok((bytes, size_bytes)),
        false => {
            let reason = format!("{} bytes were returned for {range:?}", bytes.len());
            Err(ObjectError::failed(name, reason))
        }
    }
}

#[cfg(test)]
mod tests;
