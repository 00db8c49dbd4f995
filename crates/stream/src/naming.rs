//! Names of objects, and of metadata of the stream layer.

use uuid::Uuid;

use crate::types::ObjectId;

/// The key of metadata that a rebuild adds if records of objects are lost. The owner of the streams
/// deletes it when it has dealt with that: see [`crate::Stream::has_declared_loss`].
pub const DECLARED_LOSS: &str = "stream/declared-loss";

/// Parent directory of the objects of all stores; each store has its own directory in it.
pub(crate) const OBJECTS_DIRECTORY: &str = "streams";
/// Parent directory of the catalogs of all stores.
pub(crate) const CATALOGS_DIRECTORY: &str = "catalogs";
/// Parent directory of the objects of [probes](crate::sequence::probe_creates).
pub const PROBES_DIRECTORY: &str = "probes";
/// Parent directory of the objects that name the store of a WAL.
pub(crate) const WALS_DIRECTORY: &str = "wals";

/// The prefix of a store's objects contains its id, so that two stores in one bucket cannot touch
/// each other's objects.
pub(crate) fn object_prefix(store: Uuid) -> String {
    format!("{OBJECTS_DIRECTORY}/{store}")
}

pub(crate) fn object_name(store: Uuid, id: ObjectId, nonce: Uuid) -> String {
    format!("{}/{:016x}-{}", object_prefix(store), id.0, nonce.simple())
}

/// The prefix of a store's catalog.
pub(crate) fn catalog_prefix(store: Uuid) -> String {
    format!("{CATALOGS_DIRECTORY}/{store}")
}

/// Returns the number in an object's name.
pub(crate) fn object_id(name: &str) -> Option<ObjectId> {
    let (number, _) = name.rsplit_once('/')?.1.split_once('-')?;
    u64::from_str_radix(number, 16).ok().map(ObjectId)
}

/// Returns the nonce in an object's name.
pub(crate) fn object_nonce(name: &str) -> Option<Uuid> {
    Uuid::try_parse(name.rsplit_once('-')?.1).ok()
}

/// Returns the nonce in a name, if it is the name of an object: `docs/format/object.md`, 2.
pub(crate) fn nonce_in(name: &str) -> Option<Uuid> {
    let (number, nonce) = name.rsplit('/').next()?.split_once('-')?;
    let hexadecimal = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if number.len() != 16 || nonce.len() != 32 || !hexadecimal(number) || !hexadecimal(nonce) {
        return None;
    }
    Uuid::try_parse(nonce).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_by_number_and_differ_by_nonce() {
        let wal = Uuid::from_u128(1);
        let name = |id, nonce| object_name(wal, ObjectId(id), Uuid::from_u128(nonce));
        assert_eq!(
            name(255, 2),
            "streams/00000000-0000-0000-0000-000000000001/\
             00000000000000ff-00000000000000000000000000000002"
        );
        assert!(name(9, 9) < name(10, 0));
        assert_eq!(object_id(&name(255, 2)), Some(ObjectId(255)));
        assert_eq!((object_id("streams/x"), object_id("streams/x/z-1")), (None, None));
        assert_ne!(name(1, 1), name(1, 2));
    }
}
