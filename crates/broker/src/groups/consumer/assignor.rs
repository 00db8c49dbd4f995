//! The server's assignors, as pure functions.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use uuid::Uuid;

use super::state::Assignment;

/// Bound on the passes in which `uniform` balances load between sets of topics with different
/// subscribers. Two or three are enough except for long chains of members that each share one topic
/// with the next; those are balanced further by the next assignment.
const MAX_PASSES: usize = 64;

/// An assignor that members can vote for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::groups) enum Assignor {
    /// As even as possible, with as few moves as possible.
    Uniform,
    /// A contiguous range of each topic for each member, so that topics with the same subscribers
    /// are assigned alike.
    Range,
}

impl Assignor {
    /// All assignors. The first is the default, as in Kafka's `group.consumer.assignors`.
    pub(in crate::groups) const ALL: [Self; 2] = [Self::Uniform, Self::Range];

    pub(in crate::groups) fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Range => "range",
        }
    }

    pub(in crate::groups) fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|assignor| assignor.name() == name)
    }

    /// Assigns all partitions of the topics that have subscribers. Returns one assignment for each
    /// of `members`, in their order.
    pub(in crate::groups) fn assign(
        self,
        topics: &[(Uuid, u32)],
        members: &[Subscriber<'_>],
    ) -> Vec<Assignment> {
        let mut subscribers: Vec<Vec<usize>> = vec![Vec::new(); topics.len()];
        for (member, subscriber) in members.iter().enumerate() {
            for topic in subscriber.topics {
                subscribers[*topic].push(member);
            }
        }
        match self {
            Self::Uniform => uniform(topics, members, subscribers),
            Self::Range => range(topics, members, &subscribers),
        }
    }
}

/// A member, as an assignor sees it.
pub(in crate::groups) struct Subscriber<'a> {
    pub(in crate::groups) id: &'a str,
    pub(in crate::groups) instance_id: Option<&'a str>,
    /// Indexes of topics, each once.
    pub(in crate::groups) topics: &'a [usize],
    /// Its target assignment so far.
    pub(in crate::groups) previous: &'a Assignment,
}

fn range(
    topics: &[(Uuid, u32)],
    members: &[Subscriber<'_>],
    subscribers: &[Vec<usize>],
) -> Vec<Assignment> {
    let mut assignments = vec![Assignment::new(); members.len()];
    for ((topic, count), subscribers) in topics.iter().zip(subscribers) {
        let mut subscribers = subscribers.clone();
        // Static members first, ordered by instance id, which is stable over restarts, so that they
        // get the same ranges again.
        subscribers.sort_by_key(|member| {
            let Subscriber { id, instance_id, .. } = &members[*member];
            (instance_id.is_none(), *instance_id, *id)
        });
        let Some(each) = (*count as usize).checked_div(subscribers.len()) else { continue };
        let one_more = *count as usize % subscribers.len();
        let mut partitions = 0..i32::try_from(*count).unwrap_or(i32::MAX);
        for (rank, member) in subscribers.into_iter().enumerate() {
            let share = each + usize::from(rank < one_more);
            let share: BTreeSet<i32> = partitions.by_ref().take(share).collect();
            if !share.is_empty() {
                assignments[member].insert(*topic, share);
            }
        }
    }
    assignments
}

/// Topics with the same subscribers.
struct Class {
    topics: Vec<usize>,
    subscribers: Vec<usize>,
}

/// Every member keeps the partitions that it has and may have; free partitions go to the members
/// with the fewest; then partitions move from members with more to members with fewer, as long as
/// that makes the two more equal.
fn uniform(
    topics: &[(Uuid, u32)],
    members: &[Subscriber<'_>],
    subscribers: Vec<Vec<usize>>,
) -> Vec<Assignment> {
    let mut owners: Vec<Vec<Option<usize>>> =
        topics.iter().map(|(_, count)| vec![None; *count as usize]).collect();
    let mut loads = vec![0_usize; members.len()];
    for (member, subscriber) in members.iter().enumerate() {
        for topic in subscriber.topics {
            for partition in subscriber.previous.get(&topics[*topic].0).into_iter().flatten() {
                let index = usize::try_from(*partition).ok();
                if let Some(owner) = index.and_then(|index| owners[*topic].get_mut(index))
                    && owner.is_none()
                {
                    *owner = Some(member);
                    loads[member] += 1;
                }
            }
        }
    }
    let mut classes: BTreeMap<(usize, Vec<usize>), Vec<usize>> = BTreeMap::new();
    for (topic, subscribers) in subscribers.into_iter().enumerate() {
        if !subscribers.is_empty() {
            classes.entry((subscribers.len(), subscribers)).or_default().push(topic);
        }
    }
    // Classes with the fewest subscribers first: the others leave more choice.
    let classes: Vec<Class> = classes
        .into_iter()
        .map(|((_, subscribers), topics)| Class { topics, subscribers })
        .collect();
    for class in &classes {
        fill(class, &mut owners, &mut loads);
    }
    for _ in 0..MAX_PASSES {
        let moves = classes.iter().map(|class| even_out(class, &mut owners, &mut loads));
        if moves.sum::<usize>() == 0 {
            break;
        }
    }
    let mut assignments = vec![Assignment::new(); members.len()];
    for ((topic, _), owners) in topics.iter().zip(owners) {
        for (partition, owner) in (0..).zip(owners) {
            if let Some(owner) = owner {
                assignments[owner].entry(*topic).or_default().insert(partition);
            }
        }
    }
    assignments
}

/// Gives free partitions to the members with the fewest.
fn fill(class: &Class, owners: &mut [Vec<Option<usize>>], loads: &mut [usize]) {
    let mut least: BinaryHeap<_> =
        class.subscribers.iter().map(|member| Reverse((loads[*member], *member))).collect();
    for topic in &class.topics {
        for owner in owners[*topic].iter_mut().filter(|owner| owner.is_none()) {
            let Some(mut first) = least.peek_mut() else { return };
            let Reverse((load, member)) = &mut *first;
            *owner = Some(*member);
            *load += 1;
            loads[*member] = *load;
        }
    }
}

/// Moves partitions of these topics while that makes loads more equal, and returns the number of
/// moves. Each move lowers the sum of the squares of all loads, so this ends.
fn even_out(class: &Class, owners: &mut [Vec<Option<usize>>], loads: &mut [usize]) -> usize {
    let all = || class.subscribers.iter().map(|member| loads[*member]);
    if all().max() <= all().min().map(|least| least + 1) {
        return 0;
    }
    let mut owned: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
    for topic in &class.topics {
        for (partition, owner) in owners[*topic].iter().enumerate() {
            if let Some(owner) = owner {
                owned.entry(*owner).or_default().push((*topic, partition));
            }
        }
    }
    let mut takers: BTreeSet<(usize, usize)> =
        class.subscribers.iter().map(|member| (loads[*member], *member)).collect();
    // Members that have partitions of this class.
    let mut givers: BTreeSet<(usize, usize)> =
        owned.keys().map(|member| (loads[*member], *member)).collect();
    let mut moves = 0;
    while let (Some(least), Some(most)) = (takers.first().copied(), givers.last().copied())
        && most.0 > least.0 + 1
    {
        let (taker, giver) = (least.1, most.1);
        let Some((topic, partition)) = owned.get_mut(&giver).and_then(Vec::pop) else { break };
        owners[topic][partition] = Some(taker);
        owned.entry(taker).or_default().push((topic, partition));
        for member in [taker, giver] {
            takers.remove(&(loads[member], member));
            givers.remove(&(loads[member], member));
        }
        loads[taker] += 1;
        loads[giver] -= 1;
        for member in [taker, giver] {
            takers.insert((loads[member], member));
            if owned.get(&member).is_some_and(|owned| !owned.is_empty()) {
                givers.insert((loads[member], member));
            }
        }
        moves += 1;
    }
    moves
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn topic(index: usize) -> Uuid {
        Uuid::from_u128(index as u128 + 1)
    }

    /// Topics are given by their partition counts, members by their subscriptions; members are
    /// named by their index.
    fn assign(
        assignor: Assignor,
        counts: &[u32],
        members: &[Vec<usize>],
        previous: &[Assignment],
    ) -> Vec<Assignment> {
        let topics: Vec<(Uuid, u32)> =
            counts.iter().enumerate().map(|(i, count)| (topic(i), *count)).collect();
        let ids: Vec<String> = (0..members.len()).map(|i| format!("{i:04}")).collect();
        let none = Assignment::new();
        let subscribers: Vec<Subscriber<'_>> = members
            .iter()
            .enumerate()
            .map(|(i, topics)| Subscriber {
                id: &ids[i],
                instance_id: None,
                topics,
                previous: previous.get(i).unwrap_or(&none),
            })
            .collect();
        assignor.assign(&topics, &subscribers)
    }

    fn load(assignment: &Assignment) -> usize {
        assignment.values().map(BTreeSet::len).sum()
    }

    fn moved(before: &[Assignment], after: &[Assignment]) -> usize {
        let kept = |(before, after): (&Assignment, &Assignment)| -> usize {
            before
                .iter()
                .map(|(topic, partitions)| {
                    after.get(topic).map_or(0, |now| now.intersection(partitions).count())
                })
                .sum()
        };
        let all: usize = before.iter().map(load).sum();
        all - before.iter().zip(after).map(kept).sum::<usize>()
    }

    #[test]
    fn ranges_are_contiguous_and_equal_for_topics_with_the_same_subscribers() {
        let got = assign(Assignor::Range, &[5, 5, 1], &[vec![0, 1, 2], vec![0, 1, 2]], &[]);
        for t in 0..2 {
            assert_eq!(got[0][&topic(t)], BTreeSet::from([0, 1, 2]));
            assert_eq!(got[1][&topic(t)], BTreeSet::from([3, 4]));
        }
        assert_eq!(got[0][&topic(2)], BTreeSet::from([0]));
        assert_eq!(got[1].get(&topic(2)), None);
    }

    #[test]
    fn ranges_are_ordered_by_instance_id_first() {
        let topics = [(topic(0), 3)];
        let none = Assignment::new();
        let member =
            |id, instance_id| Subscriber { id, instance_id, topics: &[0], previous: &none };
        let members = [member("a", None), member("b", Some("2")), member("c", Some("1"))];
        let got = Assignor::Range.assign(&topics, &members);
        let first = |i: usize| got[i][&topic(0)].first().copied();
        assert_eq!((first(0), first(1), first(2)), (Some(2), Some(1), Some(0)));
    }

    #[test]
    fn uniform_moves_as_few_partitions_as_possible() {
        let members = vec![vec![0, 1]; 3];
        let before = assign(Assignor::Uniform, &[6, 6], &members, &[]);
        assert_eq!(before.iter().map(load).collect::<Vec<_>>(), [4, 4, 4]);
        assert_eq!(assign(Assignor::Uniform, &[6, 6], &members, &before), before);
        // A fourth member gets 3, one of each.
        let after = assign(Assignor::Uniform, &[6, 6], &vec![vec![0, 1]; 4], &before);
        assert_eq!(after.iter().map(load).collect::<Vec<_>>(), [3, 3, 3, 3]);
        assert_eq!(moved(&before, &after), 3);
        // One leaves: the others keep everything.
        let after = assign(Assignor::Uniform, &[6, 6], &members[..2], &before[..2]);
        assert_eq!(moved(&before[..2], &after), 0);
        assert_eq!(after.iter().map(load).collect::<Vec<_>>(), [6, 6]);
    }

    #[test]
    fn uniform_balances_over_topics_with_different_subscribers() {
        // The first member has only topic 0, which all have; the others share topic 1 with 9
        // partitions.
        let got = assign(Assignor::Uniform, &[3, 9], &[vec![0], vec![0, 1], vec![0, 1]], &[]);
        assert_eq!(got.iter().map(load).collect::<Vec<_>>(), [3, 5, 4]);
    }

    #[test]
    fn large_groups_can_be_assigned() {
        let members: Vec<Vec<usize>> = (0..1000).map(|_| (0..100).collect()).collect();
        let got = assign(Assignor::Uniform, &[100; 100], &members, &[]);
        assert!(got.iter().all(|assignment| load(assignment) == 10));
    }

    fn subscriptions() -> impl Strategy<Value = (Vec<u32>, Vec<Vec<usize>>, Vec<Vec<usize>>)> {
        prop::collection::vec(0_u32..8, 1..5).prop_flat_map(|counts| {
            let topics = counts.len();
            let subset = prop::collection::btree_set(0..topics, 0..=topics)
                .prop_map(|set| set.into_iter().collect::<Vec<_>>());
            let members = || prop::collection::vec(subset.clone(), 0..7);
            (Just(counts), members(), members())
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn every_partition_with_a_subscriber_has_one_owner_and_loads_are_even(
            (counts, first, second) in subscriptions(),
        ) {
            for assignor in Assignor::ALL {
                let before = assign(assignor, &counts, &first, &[]);
                let after = assign(assignor, &counts, &second, &before);
                for (members, got) in [(&first, &before), (&second, &after)] {
                    for (t, count) in counts.iter().enumerate() {
                        let wanted = members.iter().any(|topics| topics.contains(&t));
                        for partition in 0..i32::try_from(*count).unwrap() {
                            let owners: Vec<usize> = (0..members.len())
                                .filter(|m| {
                                    let of_topic = got[*m].get(&topic(t));
                                    of_topic.is_some_and(|p| p.contains(&partition))
                                })
                                .collect();
                            prop_assert_eq!(owners.len(), usize::from(wanted));
                            prop_assert!(owners.iter().all(|m| members[*m].contains(&t)));
                        }
                    }
                    prop_assert!(got.iter().flat_map(Assignment::values).all(|p| !p.is_empty()));
                    if assignor == Assignor::Uniform {
                        // No single move makes it more even.
                        for (giver, assignment) in got.iter().enumerate() {
                            for taker in 0..members.len() {
                                let shared = (0..counts.len()).any(|t| {
                                    assignment.contains_key(&topic(t))
                                        && members[taker].contains(&t)
                                });
                                prop_assert!(
                                    !shared || load(&got[giver]) <= load(&got[taker]) + 1,
                                    "{:?} {:?}", members, got
                                );
                            }
                        }
                    }
                }
                if assignor == Assignor::Uniform {
                    // A repeated assignment changes nothing.
                    prop_assert_eq!(assign(assignor, &counts, &second, &after), after);
                }
            }
        }
    }
}
