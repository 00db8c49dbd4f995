//! What the coordinator does at the start, before anybody is served: it ends what a crash has interrupted, and what damage of the log has left without its end.
//! Argument: `docs/transactions.md`, "Damage".

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use alluvium_stream::Append;
use uuid::Uuid;

use super::decisions::{Decisions, Known, Marker, commits, markers};
use super::end::{append_marker, resume, with_spans};
use super::record::Event;
use super::transaction::{Doubt, State, Transaction};
use super::{Slot, TransactionsError};
use crate::batch::{Mended, Outcome};
use crate::partition::Partition;
use crate::server::Server;
use crate::state_stream::Refused;

/// An open transaction of a partition.
struct Open {
    topic: Arc<str>,
    partition: Arc<Partition>,
    place: (Uuid, i32),
    producer_id: i64,
    epoch: i16,
    first: u64,
}

/// Bring coordinator and partitions to one opinion.
pub(crate) async fn start(server: &Arc<Server>) -> Result<(), TransactionsError> {
    for partition in server.topics.all().iter().flat_map(|topic| &topic.partitions) {
        for (mended, outcome) in partition.mended() {
            server.metrics.ended_after_loss(match (mended, outcome) {
                (Mended::Decided, Outcome::Commit) => "committed",
                (Mended::Decided, Outcome::Abort) => "aborted",
                (Mended::Unknown, _) => "unknown",
            });
        }
    }
    let last_decided = end_decided(server).await?;
    settle(server, |transaction| transaction.state == State::Ongoing).await?;
    resume(server).await?;
    settle(server, |transaction| transaction.doubt != Doubt::None).await?;
    resume(server).await?;
    let last = abort_orphans(server).await?.or(last_decided);
    // Until a marker is durable, the transaction's records are not shown.
    match last {
        Some(append) => append.await.map_err(|cause| not_ended(&"several", &cause)),
        None => Ok(()),
    }
}

fn not_ended(id: &dyn ToString, cause: &dyn ToString) -> TransactionsError {
    TransactionsError::NotEnded { id: id.to_string(), cause: cause.to_string() }
}

fn all_open(server: &Server) -> Vec<Open> {
    let mut all = Vec::new();
    for topic in server.topics.all() {
        for (index, partition) in (0..).zip(&topic.partitions) {
            let open = partition.open_transactions().into_iter();
            all.extend(open.map(|(producer_id, epoch, first)| Open {
                topic: topic.name.clone(),
                partition: partition.clone(),
                place: (topic.id, index),
                producer_id,
                epoch,
                first,
            }));
        }
    }
    all
}

/// Write the markers again of transactions of which the state stream says how they have ended.
async fn end_decided(server: &Server) -> Result<Option<Append>, TransactionsError> {
    let mut last = None;
    let all_open = all_open(server);
    if all_open.is_empty() {
        return Ok(last);
    }
    let wanted: HashSet<i64> = all_open.iter().map(|open| open.producer_id).collect();
    let replay = server.transactions.stream.lock().replay();
    let mut decisions = Decisions::read(&replay, &wanted)?;
    if decisions.is_partial() {
        for partition in server.topics.all().iter().flat_map(|topic| &topic.partitions) {
            decisions.commits.extend(commits(&partition.stream.replay(), &wanted));
        }
    }
    // These have not come to their end, which the rest of the start sees to.
    let prepared = decisions.table.0.values().filter(|transaction| {
        matches!(transaction.state, State::Prepared(_)) && wanted.contains(&transaction.marker.0)
    });
    let prepared: HashMap<_, _> = prepared
        .flat_map(|transaction| {
            let spans = transaction.spans.iter().flatten();
            spans.map(|span| ((transaction.marker.0, span.partition), span.records.clone()))
        })
        .collect();
    for open in all_open {
        let Open { topic, partition, place, producer_id, epoch, first } = &open;
        let known = decisions.of(*producer_id, *epoch, *place, *first);
        let Known::Decided { outcome, epoch, .. } = known else { continue };
        if prepared.get(&(*producer_id, *place)).is_some_and(|own| own.contains(first)) {
            continue;
        }
        tracing::warn!(
            topic = &**topic,
            partition = place.1,
            producer_id,
            epoch,
            transactional_id = decisions.transactional_id(*producer_id).unwrap_or("unknown"),
            first,
            ?outcome,
            "the marker of a transaction was lost to damage and is written again, as was decided"
        );
        let ended = append_marker(server, partition, (*producer_id, epoch), outcome).await;
        last = ended.map_err(|cause| not_ended(&producer_id, &cause))?.or(last);
        let outcome = if outcome == Outcome::Commit { "committed" } else { "aborted" };
        server.metrics.ended_after_loss(outcome);
    }
    Ok(last)
}

/// Put an end to the doubt about transactions of which records were lost, of those that are `chosen`: of the state stream, or of their partitions.
async fn settle(
    server: &Server,
    chosen: impl Fn(&Transaction) -> bool,
) -> Result<(), TransactionsError> {
    let transactions = &server.transactions;
    let is_chosen = |slot: &Arc<Slot>| {
        let transaction = slot.transaction.lock();
        let has_lost = |(topic, index): &(Uuid, i32)| {
            let topic = server.topics.stored_by_id(*topic);
            topic.is_some_and(|topic| topic.partition(*index).is_some_and(|p| p.has_lost()))
        };
        let is_doubtful = transaction.doubt != Doubt::None
            || transaction.state == State::Ongoing && transaction.partitions.iter().any(has_lost);
        chosen(&transaction) && is_doubtful
    };
    let slots: Vec<_> = transactions.slots.read().values().cloned().collect();
    let slots: Vec<_> = slots.into_iter().filter(is_chosen).collect();
    let seen = Seen::of(server, &slots);
    for slot in slots {
        let event = settled(server, &slot, &slot.transaction.lock(), &seen);
        // Nobody else is there yet who would change it meanwhile.
        loop {
            let changed = transactions.change(&slot, &mut slot.transaction.lock(), event.clone());
            match changed {
                Ok(_) => break,
                Err(Refused::NoRoom) => server.store.room().await,
                Err(refused) => return Err(not_ended(&slot.id, &format!("{refused:?}"))),
            }
        }
    }
    Ok(())
}

/// What partitions know of transactions that are in doubt.
#[derive(Default)]
struct Seen {
    /// The newest epoch of each producer.
    epochs: HashMap<i64, i16>,
    /// By partition.
    markers: HashMap<(Uuid, i32), Vec<Marker>>,
}

impl Seen {
    fn of(server: &Server, slots: &[Arc<Slot>]) -> Self {
        let (mut producers, mut places) = (HashSet::new(), HashSet::new());
        for slot in slots {
            let transaction = slot.transaction.lock();
            if transaction.doubt != Doubt::None {
                producers.insert(transaction.identity.producer_id);
                places.extend(transaction.partitions.iter().copied());
            }
        }
        let mut seen = Self::default();
        if producers.is_empty() {
            return seen;
        }
        for topic in server.topics.all() {
            for (index, partition) in (0..).zip(&topic.partitions) {
                let active = partition.active_producers();
                for producer in active.iter().filter(|it| producers.contains(&it.id)) {
                    let newest = seen.epochs.entry(producer.id).or_insert(producer.epoch);
                    *newest = producer.epoch.max(*newest);
                }
                let place = (topic.id, index);
                if places.contains(&place) {
                    let markers = markers(&partition.stream.replay(), &producers);
                    seen.markers.insert(place, markers);
                }
            }
        }
        seen
    }

    /// How a transaction has ended by a marker in one of its partitions that is certainly its own: it was
    /// written after the transaction began, and raises the epoch of the records before it, or nothing is
    /// lost before it.
    fn outcome(&self, transaction: &Transaction) -> Option<Outcome> {
        let (producer_id, epoch) = transaction.identity.current();
        let is_its_own = |marker: &&Marker| {
            let is_raised =
                marker.written_in == Some(epoch) && epoch.checked_add(1) == Some(marker.epoch);
            marker.producer_id == producer_id
                && marker.at_ms > transaction.started_at_ms
                && (is_raised || marker.epoch == epoch && marker.is_before_losses)
        };
        let markers = transaction.partitions.iter().filter_map(|place| self.markers.get(place));
        let first = markers.flatten().filter(is_its_own).min_by_key(|marker| marker.at_ms);
        first.map(|marker| marker.outcome)
    }
}

/// The event by which a transaction is beyond doubt.
fn settled(server: &Server, slot: &Slot, transaction: &Transaction, seen: &Seen) -> Event {
    let (producer_id, epoch) = transaction.identity.current();
    let is_open = transaction.state == State::Ongoing;
    if transaction.doubt == Doubt::None {
        tracing::error!(
            transactional_id = &*slot.id,
            producer_id,
            epoch,
            "an open transaction is ABORTED: partitions that it has written to have lost records to damage, which may be its own"
        );
        server.metrics.ended_after_loss("interrupted");
        return with_spans(server, transaction, transaction.time_out());
    }
    let newest = seen.epochs.get(&producer_id).copied();
    let evidence = match transaction.doubt {
        Doubt::Stale if is_open => seen.outcome(transaction),
        _ => None,
    };
    let outcome = evidence.unwrap_or(Outcome::Abort);
    if is_open {
        let label = match evidence {
            Some(Outcome::Commit) => "committed",
            Some(Outcome::Abort) => "aborted",
            None => "unknown",
        };
        tracing::error!(
            transactional_id = &*slot.id,
            producer_id,
            epoch,
            ?outcome,
            is_known = evidence.is_some(),
            "records of the state of an open transaction were lost to damage; it is ended as a marker says, or ABORTED"
        );
        server.metrics.ended_after_loss(label);
    }
    let event = transaction.settle(newest.unwrap_or(epoch), outcome);
    with_spans(server, transaction, event)
}

/// Abort the open transactions of partitions that the coordinator knows nothing of.
async fn abort_orphans(server: &Server) -> Result<Option<Append>, TransactionsError> {
    let mut last = None;
    let all_open = all_open(server);
    if all_open.is_empty() {
        return Ok(last);
    }
    let slots: Vec<_> = server.transactions.slots.read().values().cloned().collect();
    let by_producer = slots.iter().map(|slot| {
        let producer_id = slot.transaction.lock().identity.producer_id;
        (producer_id, slot)
    });
    let by_producer: HashMap<i64, &Arc<Slot>> = by_producer.collect();
    for Open { topic, partition, place, producer_id, epoch, first } in all_open {
        let its_own = by_producer.get(&producer_id);
        let is_known = its_own.is_some_and(|slot| {
            let transaction = slot.transaction.lock();
            transaction.state == State::Ongoing && transaction.partitions.contains(&place)
        });
        if is_known {
            continue;
        }
        tracing::error!(
            topic = &*topic,
            partition = place.1,
            producer_id,
            epoch,
            transactional_id = its_own.map_or("unknown", |slot| &*slot.id),
            first,
            "the end of a transaction was lost to damage, and it is not known how it was decided: it is ABORTED"
        );
        let ended = append_marker(server, &partition, (producer_id, epoch), Outcome::Abort).await;
        last = ended.map_err(|cause| not_ended(&producer_id, &cause))?.or(last);
        server.metrics.ended_after_loss("unknown");
    }
    Ok(last)
}
