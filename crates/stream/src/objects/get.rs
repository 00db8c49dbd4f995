//! One ranged GET.

use std::io;
use std::os::unix::fs::FileExt;

use bytes::Bytes;
use futures::TryStreamExt;
use futures::stream::BoxStream;
use object_store::{GetOptions, GetRange, GetResult, GetResultPayload, ObjectStore};

use super::{ObjectError, Request, within};
use crate::object::Damage;

/// So much of a file is read at once: the kernel asks the disk for all of it, and what the log writes meanwhile stands behind it.
const READ_BYTES: usize = 256 << 10;

/// Neighbouring pieces of an object from `from` on, of these lengths; short ones where the object ends. Each is in memory of its own, and
/// once: a piece that is kept must keep nothing else, and a bound on bytes should be one on memory.
pub(super) async fn get(
    store: &dyn ObjectStore,
    name: &str,
    from: u64,
    lens: Vec<usize>,
) -> Result<Vec<Bytes>, ObjectError> {
    match try_get(store, name, from, lens.clone()).await {
        // A connection that has died unnoticed is the likeliest reason, and the next one a new one.
        Err(error) if error.may_pass() => try_get(store, name, from, lens).await,
        answer => answer,
    }
}

/// What did not match its checksum was read once more, before it counts as damaged, which keeps readers out, and compaction until the next start: it may have been damaged on
/// its way, and plain HTTP knows no better checksum than TCP's. What has come of that.
pub(super) fn read_again<T>(
    name: &str,
    damage: &Damage,
    again: Result<T, Damage>,
) -> Result<T, ObjectError> {
    if again.is_ok() {
        tracing::warn!("object {name} came {damage}; read once more, it is whole");
    }
    again.map_err(|damage| ObjectError::damaged(name, damage))
}

async fn try_get(
    store: &dyn ObjectStore,
    name: &str,
    from: u64,
    lens: Vec<usize>,
) -> Result<Vec<Bytes>, ObjectError> {
    let len_bytes: u64 = lens.iter().map(|len| *len as u64).sum();
    let range = Some(GetRange::Bounded(from..from + len_bytes));
    let request = async {
        let options = GetOptions { range, ..GetOptions::default() };
        let GetResult { payload, .. } = store.get_opts(&name.into(), options).await?;
        match payload {
            GetResultPayload::Stream(chunks) => fill(chunks, lens).await,
            GetResultPayload::File(file, _) => {
                let read = move || read_pieces(&file, from, lens);
                let read = tokio::task::spawn_blocking(read).await;
                read.map_err(io::Error::other).and_then(|read| read).map_err(|error| {
                    object_store::Error::Generic { store: "local file", source: error.into() }
                })
            }
        }
    };
    within(Request::Get, name, request).await
}

/// Distribute a stream over the pieces.
async fn fill(
    mut chunks: BoxStream<'static, object_store::Result<Bytes>>,
    lens: Vec<usize>,
) -> object_store::Result<Vec<Bytes>> {
    let mut chunk = Bytes::new();
    let mut pieces = Vec::with_capacity(lens.len());
    for len in lens {
        let mut piece = Vec::with_capacity(len);
        while piece.len() < len {
            if chunk.is_empty() {
                match chunks.try_next().await? {
                    Some(next) => chunk = next,
                    None => break,
                }
            }
            let taken = chunk.split_to(chunk.len().min(len - piece.len()));
            piece.extend_from_slice(&taken);
        }
        pieces.push(Bytes::from(piece));
    }
    Ok(pieces)
}

fn read_pieces(file: &std::fs::File, from: u64, lens: Vec<usize>) -> io::Result<Vec<Bytes>> {
    let mut at = from;
    let mut pieces = Vec::with_capacity(lens.len());
    for len in lens {
        let mut piece = vec![0; len];
        let mut read = 0;
        while read < len {
            let end = len.min(read + READ_BYTES);
            match file.read_at(&mut piece[read..end], at + read as u64) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        piece.truncate(read);
        pieces.push(Bytes::from(piece));
        at += len as u64;
    }
    Ok(pieces)
}
