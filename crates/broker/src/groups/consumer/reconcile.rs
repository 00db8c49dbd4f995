//! Reconciliation: how a member moves from its current assignment to its target. It gives up
//! partitions first, then gets the free ones.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use super::state::{Assignment, Current, Progress};

/// Returns the next assignment of a member.
///
/// `owned` is the list of partitions that the member reports, if it reports any. `is_free` says
/// whether no other member has a partition, or may still have it.
pub(super) fn next(
    current: &Current,
    target: &Assignment,
    target_epoch: i32,
    owned: Option<&Assignment>,
    is_free: impl Fn(Uuid, i32) -> bool,
) -> Current {
    let epoch = match current.progress {
        Progress::Stable if current.epoch == target_epoch => return current.clone(),
        Progress::Stable | Progress::Waiting => current.epoch,
        Progress::Revoking if may_own(owned, &current.revoking) => return current.clone(),
        // It has given up the partitions that an epoch between its own and the target's revoked.
        Progress::Revoking => current.epoch + 1,
    };
    let kept = intersect(&current.assigned, target);
    let revoking = subtract(&current.assigned, target);
    if !revoking.is_empty() && may_own(owned, &revoking) {
        return Current {
            epoch,
            previous_epoch: current.epoch,
            progress: Progress::Revoking,
            assigned: kept,
            revoking,
        };
    }
    let mut wanted = subtract(target, &kept);
    let mut is_complete = true;
    for (topic, partitions) in &mut wanted {
        let all = partitions.len();
        partitions.retain(|partition| is_free(*topic, *partition));
        is_complete &= partitions.len() == all;
    }
    let mut assigned = kept;
    for (topic, partitions) in wanted.into_iter().filter(|(_, partitions)| !partitions.is_empty()) {
        assigned.entry(topic).or_default().extend(partitions);
    }
    Current {
        epoch: target_epoch,
        previous_epoch: current.epoch,
        progress: if is_complete { Progress::Stable } else { Progress::Waiting },
        assigned,
        revoking: Assignment::new(),
    }
}

/// Whether a member that reports this may have any of those.
fn may_own(owned: Option<&Assignment>, partitions: &Assignment) -> bool {
    owned.is_none_or(|owned| {
        partitions
            .iter()
            .any(|(topic, some)| owned.get(topic).is_some_and(|owned| !owned.is_disjoint(some)))
    })
}

fn intersect(a: &Assignment, b: &Assignment) -> Assignment {
    by_topic(a, |topic, partitions| match b.get(topic) {
        Some(others) => partitions & others,
        None => BTreeSet::new(),
    })
}

fn subtract(a: &Assignment, b: &Assignment) -> Assignment {
    by_topic(a, |topic, partitions| match b.get(topic) {
        Some(others) => partitions - others,
        None => partitions.clone(),
    })
}

fn by_topic(
    assignment: &Assignment,
    change: impl Fn(&Uuid, &BTreeSet<i32>) -> BTreeSet<i32>,
) -> Assignment {
    let changed = assignment.iter().map(|(topic, partitions)| (*topic, change(topic, partitions)));
    changed.filter(|(_, partitions)| !partitions.is_empty()).collect::<BTreeMap<_, _>>()
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Uuid = Uuid::from_u128(1);

    fn of(partitions: &[i32]) -> Assignment {
        if partitions.is_empty() {
            return Assignment::new();
        }
        Assignment::from([(T, partitions.iter().copied().collect())])
    }

    fn at(epoch: i32, progress: Progress, assigned: &[i32], revoking: &[i32]) -> Current {
        let (assigned, revoking) = (of(assigned), of(revoking));
        Current { epoch, previous_epoch: epoch - 1, progress, assigned, revoking }
    }

    /// Current, target of epoch 5, the partitions that the member reports, the free ones; and the
    /// result: epoch, progress, assigned, revoking.
    #[test]
    fn members_revoke_partitions_before_they_get_new_ones() {
        use Progress::{Revoking, Stable, Waiting};
        type Case<'a> = (
            Current,
            &'a [i32],
            Option<&'a [i32]>,
            &'a [i32],
            (i32, Progress, &'a [i32], &'a [i32]),
        );
        let cases: &[Case<'_>] = &[
            // At its target already.
            (at(5, Stable, &[0], &[]), &[0], None, &[], (5, Stable, &[0], &[])),
            // New: gets what is free, waits for the rest.
            (at(0, Stable, &[], &[]), &[0, 1], Some(&[]), &[0, 1], (5, Stable, &[0, 1], &[])),
            (at(0, Stable, &[], &[]), &[0, 1], Some(&[]), &[1], (5, Waiting, &[1], &[])),
            (at(0, Stable, &[], &[]), &[0, 1], Some(&[]), &[], (5, Waiting, &[], &[])),
            // Waits in its epoch, and gets what has become free.
            (at(5, Waiting, &[1], &[]), &[0, 1], None, &[], (5, Waiting, &[1], &[])),
            (at(5, Waiting, &[1], &[]), &[0, 1], None, &[0], (5, Stable, &[0, 1], &[])),
            // Must give up partitions: keeps its epoch, and gets nothing before.
            (at(4, Stable, &[0, 1], &[]), &[1, 2], None, &[2], (4, Revoking, &[1], &[0])),
            (at(4, Stable, &[0, 1], &[]), &[1, 2], Some(&[0, 1]), &[2], (4, Revoking, &[1], &[0])),
            // Reports in the same heartbeat that it has given them up.
            (at(4, Stable, &[0, 1], &[]), &[1, 2], Some(&[1]), &[2], (5, Stable, &[1, 2], &[])),
            // Has not given them up yet, or does not report.
            (at(3, Revoking, &[1], &[0]), &[1, 2], None, &[2], (3, Revoking, &[1], &[0])),
            (at(3, Revoking, &[1], &[0]), &[1, 2], Some(&[0]), &[2], (3, Revoking, &[1], &[0])),
            // Has given them up: reaches the target, or has to give up more, an epoch later.
            (at(3, Revoking, &[1], &[0]), &[1, 2], Some(&[1]), &[2], (5, Stable, &[1, 2], &[])),
            (at(3, Revoking, &[1], &[0]), &[2], Some(&[1]), &[2], (4, Revoking, &[], &[1])),
        ];
        for (current, target, owned, free, (epoch, progress, assigned, revoking)) in cases {
            let owned = owned.map(of);
            let next = next(current, &of(target), 5, owned.as_ref(), |_, partition| {
                free.contains(&partition)
            });
            let case = format!("{current:?} to {target:?}, owned {owned:?}, free {free:?}");
            assert_eq!((next.epoch, next.progress), (*epoch, *progress), "{case}");
            assert_eq!((next.assigned, next.revoking), (of(assigned), of(revoking)), "{case}");
        }
    }
}
