//! The names of all keys, so that those of volumes and of brokers do not collide.
//!
//! All keys of a cluster begin with `/alluvium/<cluster id>/`. Numbers are 16 hexadecimal digits,
//! so that lists are in their order.
//!
//! | key of volumes | value |
//! |---|---|
//! | `server/<id>` | address, ids of store and WAL, mark of the WAL, incarnation, features |
//! | `volume/<id>` | name, size, family, state, regions and their groups |
//! | `name/<name>` | the id of the volume with this name |
//! | `group/<id>` | family, region, founders, first epochs, peers |
//! | `attach/<volume>` | epoch, nonce, owner, address, since; stays when the owner is gone |
//! | `lease/attach/<volume>`, leased | epoch and nonce; there while the owner renews it |
//! | `next/<kind>` | the first number of a kind that was not given out |
//! | `lease/control/<lease>`, leased | candidates for control (`election.rs`) |
//!
//! `identity` is the identity of the history, if the service is etcd (`etcd.rs`).
//!
//! The values are in `docs/format/volume-registry.md`.
//!
//! [`BROKERS`] lists the first parts of brokers' keys; their functions come with the cluster.

use crate::{Error, Result};

/// The first parts of the keys of volumes.
pub const VOLUMES: &[&str] = &["attach", "group", "lease", "name", "next", "server", "volume"];

/// The first parts of the keys of brokers.
pub const BROKERS: &[&str] = &[
    "acls",
    "brokers",
    "cluster",
    "configs",
    "decoy",
    "deleted",
    "election",
    "moves",
    "producer-ids",
    "quotas",
    "registered",
    "requests",
    "scram",
    "slots",
    "snapshot",
    "store-set",
    "stores",
    "topic-names",
    "topics",
];

/// Longest name of a cluster or a volume, in bytes.
pub const MAX_NAME_BYTES: usize = 128;

/// A kind of numbers that are given out once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberKind {
    /// Servers of volumes.
    Server,
    /// Volumes and their layers.
    Volume,
    /// Groups.
    Group,
    /// Replicas of groups.
    Peer,
}

/// The keys of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    root: String,
}

impl Keys {
    /// Returns the keys of the cluster with this id.
    ///
    /// # Errors
    /// [`Error::Invalid`], as [`check_name`].
    pub fn new(cluster: &str) -> Result<Self> {
        check_name(cluster)?;
        Ok(Self { root: format!("/alluvium/{cluster}/") })
    }

    /// Returns the prefix of all keys of the cluster.
    #[must_use]
    pub fn root(&self) -> &str {
        &self.root
    }

    /// Returns the prefix of the keys with this first part, as `server`.
    #[must_use]
    pub fn prefix(&self, part: &str) -> String {
        format!("{}{part}/", self.root)
    }

    fn numbered(&self, part: &str, number: u64) -> String {
        format!("{}{part}/{number:016x}", self.root)
    }

    /// Returns the key of a server of volumes.
    #[must_use]
    pub fn server(&self, id: u64) -> String {
        self.numbered("server", id)
    }

    /// Returns the key of a volume.
    #[must_use]
    pub fn volume(&self, id: u64) -> String {
        self.numbered("volume", id)
    }

    /// Returns the key of a volume's name.
    ///
    /// # Errors
    /// [`Error::Invalid`], as [`check_name`].
    pub fn name(&self, name: &str) -> Result<String> {
        check_name(name)?;
        Ok(format!("{}name/{name}", self.root))
    }

    /// Returns the key of a group.
    #[must_use]
    pub fn group(&self, id: u64) -> String {
        self.numbered("group", id)
    }

    /// Returns the key of a volume's attachment.
    #[must_use]
    pub fn attach(&self, volume: u64) -> String {
        self.numbered("attach", volume)
    }

    /// Returns the leased key that shows that the owner of a volume's attachment is there.
    #[must_use]
    pub fn attach_lease(&self, volume: u64) -> String {
        self.numbered("lease/attach", volume)
    }

    /// Returns the key of the next number of a kind.
    #[must_use]
    pub fn next(&self, kind: NumberKind) -> String {
        let kind = match kind {
            NumberKind::Server => "server",
            NumberKind::Volume => "volume",
            NumberKind::Group => "group",
            NumberKind::Peer => "peer",
        };
        format!("{}next/{kind}", self.root)
    }

    /// Returns the prefix of the election of the server that controls placement and repair.
    #[must_use]
    pub fn control(&self) -> String {
        format!("{}lease/control/", self.root)
    }
}

/// Checks a name that is part of a key: letters, digits, `.`, `_` and `-` of ASCII.
///
/// # Errors
/// [`Error::Invalid`], if it has another character, is empty or longer than [`MAX_NAME_BYTES`].
pub fn check_name(name: &str) -> Result<()> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(allowed) {
        return Err(Error::Invalid(format!(
            "{name:?} is not a name: 1 to {MAX_NAME_BYTES} letters, digits, '.', '_' and '-'"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_volumes_and_brokers_have_different_first_parts() {
        assert!(VOLUMES.iter().all(|part| !BROKERS.contains(part)));
        let keys = Keys::new("c-1").unwrap();
        let all = [
            keys.server(1),
            keys.volume(1),
            keys.name("v").unwrap(),
            keys.group(1),
            keys.attach(1),
            keys.attach_lease(1),
            keys.next(NumberKind::Peer),
            keys.control(),
        ];
        for key in &all {
            let part = key.strip_prefix(keys.root()).unwrap().split('/').next().unwrap();
            assert!(VOLUMES.contains(&part), "{key}");
        }
        assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), all.len());
    }

    #[test]
    fn keys_are_in_the_order_of_their_numbers() {
        let keys = Keys::new("c").unwrap();
        assert_eq!(keys.volume(26), "/alluvium/c/volume/000000000000001a");
        assert!(keys.volume(9) < keys.volume(10) && keys.volume(255) < keys.volume(256));
    }

    #[test]
    fn a_name_cannot_leave_its_part_of_the_keys() {
        for name in ["", "a/b", "a b", "ä", "a\n", &"a".repeat(MAX_NAME_BYTES + 1)] {
            assert!(matches!(check_name(name), Err(Error::Invalid(_))), "{name:?}");
        }
        check_name(&"a".repeat(MAX_NAME_BYTES)).unwrap();
    }
}
