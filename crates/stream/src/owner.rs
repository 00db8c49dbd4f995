//! Ownership of the objects: which server may delete objects and trim the WAL after uploads. See
//! `docs/format/catalog.md`, "Who owns the objects".
//!
//! The WAL's headers show a server that another one has taken over the WAL, and the mark in them
//! identifies each catalog that is too old to open it. They cannot reveal a copy of the device: of
//! a machine that was cloned, or of a backup that was restored. All copies use the same object
//! store, so the owner is recorded there as well.

pub(crate) mod claim;

use std::sync::Arc;

use alluvium_wal::{HeaderInfo, Wal};
use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

use crate::catalog::Incarnation;
use crate::clock::unix_ms;

/// The length of an owner object, padded with spaces. It does not change when the object is
/// overwritten in place on a full disk, where a crash may separate a change of the length from that
/// of the text.
const PADDED_BYTES: usize = 256;

/// More than any owner object takes.
const MAX_BYTES: u64 = 4096;

/// The ownership state of this run of the store, and the earlier runs.
pub(crate) struct Owner {
    epoch: u32,
    node_id: u32,
    /// In order; the last one is this run.
    incarnations: Vec<Incarnation>,
    /// Held during a claim, so that no claim undoes a later one. Contains the object's content when
    /// this run last owned the objects.
    claiming: tokio::sync::Mutex<Option<Claim>>,
    /// Held during a check of the WAL, which continues if its caller is dropped.
    checking: Arc<tokio::sync::Mutex<()>>,
}

impl Owner {
    pub(crate) fn new(wal: &Wal, incarnations: Vec<Incarnation>) -> Self {
        let HeaderInfo { epoch, node_id, .. } = wal.header();
        Self {
            epoch,
            node_id,
            incarnations,
            claiming: tokio::sync::Mutex::default(),
            checking: Arc::default(),
        }
    }

    pub(crate) async fn begin_check(&self) -> OwnedMutexGuard<()> {
        self.checking.clone().lock_owned().await
    }

    /// Waits for a check of the WAL that has already begun, if there is one. It keeps the WAL's
    /// device open.
    pub(crate) async fn wait_for_check(&self) {
        drop(self.checking.lock().await);
    }

    fn incarnation(&self) -> Uuid {
        self.incarnations.last().expect("the current run is in the list").id
    }

    fn claim(&self, version: u64) -> Claim {
        Claim {
            epoch: self.epoch,
            incarnation: self.incarnation(),
            node_id: self.node_id,
            version,
            written_at_ms: unix_ms().cast_unsigned(),
        }
    }

    /// Whether the claim was made by an earlier run that the catalog records, before the next run
    /// began.
    fn is_past(&self, claim: &Claim) -> bool {
        let mut incarnations =
            self.incarnations.iter().skip_while(|incarnation| incarnation.id != claim.incarnation);
        incarnations.nth(1).is_some_and(|next| claim.version <= next.after_version)
    }

    /// Returns what the object means for this run, which needs the object to record catalog version
    /// `needed`.
    fn judge(&self, found: Option<&Claim>, needed: u64) -> Standing {
        match found {
            None => Standing::Free,
            Some(claim) if claim.incarnation == self.incarnation() && claim.version >= needed => {
                Standing::Owner
            }
            Some(claim) if claim.incarnation == self.incarnation() || self.is_past(claim) => {
                Standing::Free
            }
            Some(_) => Standing::OwnedByOther,
        }
    }
}

/// The content of the owner object.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Claim {
    epoch: u32,
    #[serde(rename = "life")]
    incarnation: Uuid,
    node_id: u32,
    /// The version of the catalog.
    version: u64,
    /// For people only; decides nothing.
    written_at_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The object is from this run.
    Owner,
    /// There is none, or one from an earlier run: it may be overwritten.
    Free,
    OwnedByOther,
}

fn encode(claim: &Claim) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(claim).expect("numbers and an id");
    bytes.resize(bytes.len().max(PADDED_BYTES), b' ');
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise a crash could leave a part of the text when it is overwritten in place.
    #[test]
    fn the_length_of_an_owner_object_does_not_change() {
        let claim = |epoch, node_id, version, written_at_ms| Claim {
            epoch,
            incarnation: Uuid::from_u128(1),
            node_id,
            version,
            written_at_ms,
        };
        for claim in [claim(0, 0, 0, 0), claim(u32::MAX, u32::MAX, u64::MAX, u64::MAX)] {
            let bytes = encode(&claim);
            assert_eq!(bytes.len(), PADDED_BYTES);
            assert_eq!(serde_json::from_slice::<Claim>(&bytes).unwrap(), claim);
        }
    }

    #[test]
    fn claims_of_other_runs_are_judged_by_version() {
        let incarnations = [(1, 10), (2, 19), (3, 49)];
        let incarnations = incarnations
            .map(|(id, after_version)| Incarnation { after_version, id: Uuid::from_u128(id) });
        let me = Owner {
            epoch: 5,
            node_id: 0,
            incarnations: incarnations.to_vec(),
            claiming: tokio::sync::Mutex::default(),
            checking: Arc::default(),
        };
        let of = |incarnation, version| {
            Some(Claim { incarnation: Uuid::from_u128(incarnation), ..me.claim(version) })
        };
        for (found, standing, why) in [
            (None, Standing::Free, "no claim"),
            (of(3, 60), Standing::Owner, "of this run"),
            (of(3, 61), Standing::Owner, "of this run, with a later version"),
            (of(3, 59), Standing::Free, "of this run, with an earlier version"),
            (of(2, 49), Standing::Free, "of the previous run"),
            (of(2, 50), Standing::OwnedByOther, "of the previous run, which has continued"),
            (of(1, 19), Standing::Free, "of an earlier run"),
            (of(1, 20), Standing::OwnedByOther, "of an earlier run, which has continued"),
            (of(4, 1), Standing::OwnedByOther, "of an unknown run"),
        ] {
            let found: Option<Claim> = found;
            assert_eq!(me.judge(found.as_ref(), 60), standing, "{why}");
        }
    }
}
