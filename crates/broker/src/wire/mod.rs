//! The wire format: the shapes of requests, and the framing of responses.

use std::collections::HashSet;
use std::hash::Hash;

mod compact;
pub(crate) mod fetch_response;
pub(crate) mod newer;
pub(crate) mod offsets;
pub(crate) mod response;
pub(crate) mod shape;
pub(crate) mod share;

/// Removes elements with a key that occurred before. An element whose response is larger than the
/// element itself is answered once: else a small request could have a response of any size.
pub(crate) fn once<T, K: Hash + Eq>(
    elements: impl IntoIterator<Item = T>,
    key: impl Fn(&T) -> K,
) -> impl Iterator<Item = T> {
    let mut seen = HashSet::new();
    elements.into_iter().filter(move |element| seen.insert(key(element)))
}

/// The keys that occur more than once.
pub(crate) fn repeated<K: Hash + Eq + Clone>(keys: impl IntoIterator<Item = K>) -> HashSet<K> {
    let mut seen = HashSet::new();
    keys.into_iter().filter(|key| !seen.insert(key.clone())).collect()
}
