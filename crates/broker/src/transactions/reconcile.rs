//! What the coordinator does at the start, before anybody is served: it ends what a crash has interrupted, and what damage of the log has left without its end.
//! Argument: `docs/transactions.md`, "Damage".

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use alluvium_stream::{Append, Replay};
use uuid::Uuid;

use super::decisions::{Decisions, Known};
use super::end::{append_marker, resume, with_spans};
use super::record::Event;
use super::transaction::{Doubt, State, Transaction};
use super::{Slot, TransactionsError};
use crate::batch::{self, BatchHeader, Mended, Outcome};
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
    let decisions = Decisions::read(&replay, &wanted)?;
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
    let slots: Vec<_> = transactions.slots.read().values().cloned().collect();
    for slot in slots {
        let is_chosen = |transaction: &Transaction| {
            let has_lost = |(topic, index): &(Uuid, i32)| {
                let topic = server.topics.stored_by_id(*topic);
                topic.is_some_and(|topic| topic.partition(*index).is_some_and(|p| p.has_lost()))
            };
            let is_doubtful = transaction.doubt != Doubt::None
                || transaction.state == State::Ongoing
                    && transaction.partitions.iter().any(has_lost);
            chosen(transaction) && is_doubtful
        };
        let event = {
            let transaction = slot.transaction.lock();
            if !is_chosen(&transaction) {
                continue;
            }
            settled(server, &slot, &transaction)
        };
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

/// The event by which a transaction is beyond doubt.
fn settled(server: &Server, slot: &Slot, transaction: &Transaction) -> Event {
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
    let partitions = server.topics.all();
    let partitions = partitions.iter().flat_map(|topic| &topic.partitions);
    let newest = partitions.filter_map(|partition| partition.producer_epoch(producer_id)).max();
    let evidence = match transaction.doubt {
        Doubt::Stale if is_open => evidence(server, transaction),
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

/// How a transaction has ended by a marker that one of its partitions has: it was written after the transaction began, and the producer has begun no other one since that is
/// known of.
fn evidence(server: &Server, transaction: &Transaction) -> Option<Outcome> {
    let (producer_id, epoch) = transaction.identity.current();
    let marker = |(topic, index): &(Uuid, i32)| {
        let topic = server.topics.stored_by_id(*topic)?;
        let Replay { batches, .. } = topic.partition(*index)?.stream.replay();
        batches.iter().find_map(|batch| {
            let header = BatchHeader::parse(&batch.payload).filter(BatchHeader::is_control)?;
            let is_its_own = header.producer_id == producer_id
                && header.producer_epoch >= epoch
                && header.max_timestamp_ms > transaction.started_at_ms;
            let outcome = batch::outcome(&batch.payload)?;
            is_its_own.then_some((header.max_timestamp_ms, outcome))
        })
    };
    let first = transaction.partitions.iter().filter_map(marker).min_by_key(|(at_ms, _)| *at_ms);
    first.map(|(_, outcome)| outcome)
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
