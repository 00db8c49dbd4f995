//! The servers of a new group.

use std::collections::BTreeMap;

use super::REPLICAS;
use crate::ServerId;

/// Returns the servers of a new group: those with the fewest replicas, or `None` if there are too
/// few. `loads` has the number of replicas of each server. The seed decides between equal loads,
/// and the order of the servers.
#[must_use]
pub fn place(loads: &BTreeMap<ServerId, u64>, seed: u64) -> Option<[ServerId; REPLICAS]> {
    let mut servers: Vec<_> =
        loads.iter().map(|(server, load)| (*load, mix(seed, *server), *server)).collect();
    servers.sort_unstable();
    let mut servers: Vec<_> =
        servers.get(..REPLICAS)?.iter().map(|(_, order, server)| (*order, *server)).collect();
    // The first founder is likely to lead first.
    servers.sort_unstable();
    Some([servers[0].1, servers[1].1, servers[2].1])
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
fn mix(seed: u64, server: ServerId) -> u64 {
    let mut mixed = seed ^ u64::from(server.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn loads(loads: &[u64]) -> BTreeMap<ServerId, u64> {
        (1..).map(ServerId).zip(loads.iter().copied()).collect()
    }

    #[test]
    fn three_servers_get_every_group_and_each_is_first_at_times() {
        assert_eq!(place(&loads(&[0, 0]), 1), None);
        let first: BTreeSet<_> = (0..50)
            .map(|seed| {
                let placed = place(&loads(&[9, 0, 4]), seed).unwrap();
                assert_eq!(BTreeSet::from(placed).len(), 3);
                assert_eq!(place(&loads(&[9, 0, 4]), seed), Some(placed), "seed {seed}");
                placed[0]
            })
            .collect();
        assert_eq!(first.len(), 3);
    }

    #[test]
    fn the_least_loaded_servers_get_a_group() {
        for seed in 0..50 {
            let placed = BTreeSet::from(place(&loads(&[5, 1, 7, 2, 3]), seed).unwrap());
            assert_eq!(placed, [2, 4, 5].map(ServerId).into());
        }
        let mut all = loads(&[0; 7]);
        for seed in 0..700 {
            for server in place(&all, seed).unwrap() {
                *all.get_mut(&server).unwrap() += 1;
            }
        }
        assert!(all.values().all(|load| *load == 300), "{all:?}");
    }
}
