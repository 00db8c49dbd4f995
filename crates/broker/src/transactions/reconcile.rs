//! The steps of the coordinator at start, before any client is served: it ends transactions that a
//! crash interrupted, and those whose end was lost to damage of the log. Argument:
//! `docs/transactions.md`, "Damage".

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use alluvium_stream::{Append, History, LogOffset};

use super::decisions::{At, Decisions, Known, PartitionKey};
use super::end::{append_marker, resume, with_spans};
use super::record::Event;
use super::transaction::{Doubt, State, Transaction};
use super::{Slot, TransactionsError};
use crate::batch::{Outcome, Repaired};
use crate::partition::{Partition, unix_time_ms};
use crate::server::Server;
use crate::state_stream::Refused;

/// An open transaction of a partition.
struct Open {
    topic: Arc<str>,
    partition: Arc<Partition>,
    key: PartitionKey,
    producer_id: i64,
    epoch: i16,
    first: At,
}

/// Makes the states of coordinator and partitions consistent.
pub(crate) async fn start(server: &Arc<Server>) -> Result<(), TransactionsError> {
    for partition in server.topics.all().iter().flat_map(|topic| &topic.partitions) {
        for (repaired, outcome) in partition.repaired() {
            server.metrics.ended_after_loss(match (repaired, outcome) {
                (Repaired::Decided, Outcome::Commit) => "committed",
                (Repaired::Decided, Outcome::Abort) => "aborted",
                (Repaired::Unknown, _) => "unknown",
            });
        }
    }
    // All state is read before anything is written, because writing may lead to an upload.
    let all_open = all_open(server);
    let doubtful = doubtful(server);
    let mut wanted: HashSet<i64> = all_open.iter().map(|open| open.producer_id).collect();
    wanted.extend(&doubtful);
    let decisions = decisions(server, &wanted)?;
    let last_decided = end_decided(server, &decisions, all_open).await?;
    end_with_losses(server, &decisions, &doubtful).await?;
    resume(server).await?;
    resolve_doubts(server).await?;
    let last = abort_orphans(server).await?.or(last_decided);
    // Until a marker is durable, the transaction's records are not visible.
    match last {
        Some(append) => append.await.map_err(|cause| not_ended(&"several", &cause)),
        None => Ok(()),
    }
}

fn not_ended(id: &dyn ToString, cause: &dyn ToString) -> TransactionsError {
    TransactionsError::NotEnded { id: id.to_string(), cause: cause.to_string() }
}

fn slots(server: &Server) -> Vec<Arc<Slot>> {
    server.transactions.slots.read().values().cloned().collect()
}

fn all_open(server: &Server) -> Vec<Open> {
    let mut all = Vec::new();
    for topic in server.topics.all() {
        for (index, partition) in (0..).zip(&topic.partitions) {
            let open = partition.open_transactions();
            if open.is_empty() {
                continue;
            }
            let History { replay, log_ends } = partition.stream.history();
            let at = |offset| {
                let found = replay.batches.binary_search_by_key(&offset, |batch| batch.base.0);
                At { offset, log: found.map_or(LogOffset(0), |at| log_ends[at]) }
            };
            all.extend(open.into_iter().map(|(producer_id, epoch, first)| Open {
                topic: topic.name.clone(),
                partition: partition.clone(),
                key: (topic.id, index),
                producer_id,
                epoch,
                first: at(first),
            }));
        }
    }
    all
}

/// Returns the producers whose open transactions are in doubt.
fn doubtful(server: &Server) -> HashSet<i64> {
    let slots = slots(server).into_iter();
    let doubtful = slots.filter_map(|slot| {
        let transaction = slot.transaction.lock();
        let is_doubtful = transaction.state == State::Ongoing && transaction.doubt.is_open();
        is_doubtful.then_some(transaction.identity.producer_id)
    });
    doubtful.collect()
}

/// Returns the known decisions on transactions of these producers.
fn decisions(server: &Server, wanted: &HashSet<i64>) -> Result<Decisions, TransactionsError> {
    if wanted.is_empty() {
        return Ok(Decisions::default());
    }
    let Some(stream) = &server.transactions.stream else { return Ok(Decisions::default()) };
    let state = stream.lock().history();
    let mut decisions = Decisions::read(&state, wanted)?;
    if decisions.is_partial() {
        for topic in server.topics.all() {
            for (index, partition) in (0..).zip(&topic.partitions) {
                decisions.prove((topic.id, index), &partition.stream.history());
            }
        }
    }
    Ok(decisions)
}

/// Writes the markers of decided transactions again.
async fn end_decided(
    server: &Server,
    decisions: &Decisions,
    all_open: Vec<Open>,
) -> Result<Option<Append>, TransactionsError> {
    let mut last = None;
    for Open { topic, partition, key, producer_id, first, .. } in all_open {
        let Known::Decided(decision) = decisions.of(producer_id, key, first) else { continue };
        if decision.is_due {
            // [`resume`] writes the markers of this one.
            continue;
        }
        let (outcome, epoch) = (decision.outcome, decision.epoch);
        tracing::warn!(
            topic = &*topic,
            partition = key.1,
            producer_id,
            epoch,
            transactional_id = decisions.transactional_id(producer_id),
            first = first.offset,
            ?outcome,
            "marker of a transaction was lost to damage and is written again with the decided \
             outcome"
        );
        let ended = append_marker(server, &partition, (producer_id, epoch), outcome).await;
        last = ended.map_err(|cause| not_ended(&producer_id, &cause))?.or(last);
        let outcome = if outcome == Outcome::Commit { "committed" } else { "aborted" };
        server.metrics.ended_after_loss(outcome);
    }
    Ok(last)
}

/// Ends the open transactions that have lost records: of the state stream, or of their partitions.
async fn end_with_losses(
    server: &Server,
    decisions: &Decisions,
    doubtful: &HashSet<i64>,
) -> Result<(), TransactionsError> {
    let mut newest: HashMap<i64, i16> = HashMap::new();
    if !doubtful.is_empty() {
        for partition in server.topics.all().iter().flat_map(|topic| &topic.partitions) {
            for (producer_id, epoch) in partition.producer_epochs(doubtful) {
                let newest = newest.entry(producer_id).or_insert(epoch);
                *newest = epoch.max(*newest);
            }
        }
    }
    for slot in slots(server) {
        let event = {
            let transaction = slot.transaction.lock();
            if transaction.state != State::Ongoing {
                continue;
            }
            if transaction.doubt.is_open() {
                let (producer_id, epoch) = transaction.identity.current();
                let is_committed =
                    transaction.doubt == Doubt::Stale && decisions.is_committed(producer_id);
                let newest = newest.get(&producer_id).copied().unwrap_or(epoch);
                end_in_doubt(server, &slot, &transaction, newest, is_committed)
            } else if has_lost(server, &transaction) {
                log_aborted(
                    server,
                    &slot,
                    &transaction,
                    "open transaction is ABORTED: its partitions have lost records to damage, \
                     possibly its own",
                );
                server.metrics.ended_after_loss("interrupted");
                with_spans(server, &transaction, transaction.time_out())
            } else {
                continue;
            }
        };
        // No client is served yet that could change it meanwhile.
        loop {
            let transactions = &server.transactions;
            let changed = transactions.change(&slot, &mut slot.transaction.lock(), event.clone());
            match changed {
                Ok(_) => break,
                Err(Refused::Full) => server.store.wait_for_space().await,
                Err(refused) => return Err(not_ended(&slot.id, &format!("{refused:?}"))),
            }
        }
    }
    Ok(())
}

/// Whether a partition of the transaction has lost records.
fn has_lost(server: &Server, transaction: &Transaction) -> bool {
    transaction.partitions.iter().any(|(topic, index)| {
        let topic = server.topics.stored_by_id(*topic);
        topic.is_some_and(|topic| topic.partition(*index).is_some_and(|p| p.has_lost()))
    })
}

/// Returns the event that ends an open transaction in doubt.
fn end_in_doubt(
    server: &Server,
    slot: &Slot,
    transaction: &Transaction,
    newest: i16,
    is_committed: bool,
) -> Event {
    if !is_committed {
        log_aborted(
            server,
            slot,
            transaction,
            "decision of a transaction was lost to damage and its outcome is unknown: the \
             transaction is ABORTED where it is open",
        );
        server.metrics.ended_after_loss("unknown");
        return with_spans(server, transaction, transaction.resolve(newest, Outcome::Abort));
    }
    let (producer_id, epoch) = transaction.identity.current();
    tracing::warn!(
        transactional_id = &*slot.id,
        producer_id,
        epoch,
        "decision of a transaction was lost to damage; one of its markers proves a commit, so it \
         is committed"
    );
    server.metrics.ended_after_loss("committed");
    // Its records have their markers already. An open transaction in a partition is a later one.
    let event = transaction.resolve(newest, Outcome::Commit);
    let Event::Prepared { outcome, marker, identity, resolves_doubt, .. } = event else {
        return event;
    };
    Event::Prepared { outcome, marker, identity, spans: Some(Vec::new()), resolves_doubt }
}

/// Logs that a transaction is aborted, for each partition in which it is open.
fn log_aborted(server: &Server, slot: &Slot, transaction: &Transaction, why: &str) {
    let (producer_id, epoch) = transaction.identity.current();
    let transactional_id = &*slot.id;
    let mut is_open = false;
    for (topic, partition) in &transaction.partitions {
        let Some(topic) = server.topics.stored_by_id(*topic) else { continue };
        let span = topic.partition(*partition).and_then(|p| p.transaction_span(producer_id));
        let Some(first) = span.map(|span| span.start) else { continue };
        is_open = true;
        let topic = &*topic.name;
        tracing::error!(topic, partition, producer_id, epoch, transactional_id, first, "{why}");
    }
    if !is_open {
        tracing::error!(producer_id, epoch, transactional_id, "{why}");
    }
}

/// Ends the doubt about all transactional ids.
async fn resolve_doubts(server: &Server) -> Result<(), TransactionsError> {
    let slots = slots(server);
    let is_doubtful = |slot: &Arc<Slot>| slot.transaction.lock().doubt.is_open();
    if !slots.iter().any(is_doubtful) {
        return Ok(());
    }
    loop {
        match server.transactions.append("", unix_time_ms(), &Event::Resolved) {
            Ok(_) => break,
            Err(Refused::Full) => server.store.wait_for_space().await,
            Err(refused) => return Err(not_ended(&"several", &format!("{refused:?}"))),
        }
    }
    for slot in slots {
        slot.transaction.lock().resolved();
    }
    Ok(())
}

/// Aborts the open transactions of partitions that the coordinator does not know.
async fn abort_orphans(server: &Server) -> Result<Option<Append>, TransactionsError> {
    let mut last = None;
    let all_open = all_open(server);
    if all_open.is_empty() {
        return Ok(last);
    }
    let slots = slots(server);
    let by_producer = slots.iter().map(|slot| {
        let producer_id = slot.transaction.lock().identity.producer_id;
        (producer_id, slot)
    });
    let by_producer: HashMap<i64, &Arc<Slot>> = by_producer.collect();
    for Open { topic, partition, key, producer_id, epoch, first } in all_open {
        let its_own = by_producer.get(&producer_id);
        let is_known = its_own.is_some_and(|slot| {
            let transaction = slot.transaction.lock();
            transaction.state == State::Ongoing && transaction.partitions.contains(&key)
        });
        if is_known {
            continue;
        }
        tracing::error!(
            topic = &*topic,
            partition = key.1,
            producer_id,
            epoch,
            transactional_id = its_own.map_or("unknown", |slot| &*slot.id),
            first = first.offset,
            "end of a transaction was lost to damage and its outcome is unknown: the transaction \
             is ABORTED"
        );
        let ended = append_marker(server, &partition, (producer_id, epoch), Outcome::Abort).await;
        last = ended.map_err(|cause| not_ended(&producer_id, &cause))?.or(last);
        server.metrics.ended_after_loss("unknown");
    }
    Ok(last)
}
