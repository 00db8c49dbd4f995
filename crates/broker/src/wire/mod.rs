//! Bytes on the wire: what requests may look like, and how responses are framed.

use std::collections::HashSet;
use std::hash::Hash;

mod compact;
pub(crate) mod fetch_response;
pub(crate) mod newer;
pub(crate) mod offsets;
pub(crate) mod response;
pub(crate) mod shape;
pub(crate) mod share;

/// Elements of a request, without those whose key has come before. What is answered with more than
/// it takes to ask for is to be answered once: else a small request could have a response of any
/// size.
pub(crate) fn once<T, K: Hash + Eq>(
    elements: impl IntoIterator<Item = T>,
    key: impl Fn(&T) -> K,
) -> impl Iterator<Item = T> {
    let mut seen = HashSet::new();
    elements.into_iter().filter(move |element| seen.insert(key(element)))
}

/// The keys that come more than once.
pub(crate) fn repeated<K: Hash + Eq + Clone>(keys: impl IntoIterator<Item = K>) -> HashSet<K> {
    let mut seen = HashSet::new();
    keys.into_iter().filter(|key| !seen.insert(key.clone())).collect()
}
