//! The end of transactions: the steps after a decision, timeouts, and the expiry of transactional
//! ids.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use alluvium_stream::{Append, AppendError};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, sleep_until};

use super::record::Event;
use super::transaction::{Span, State, Transaction};
use super::{Slot, TransactionsError};
use crate::batch::Outcome;
use crate::partition::{Partition, unix_time_ms};
use crate::server::Server;
use crate::state_stream::Refused;

/// Interval of the search for ids that were not used for `transactional.id.expiration.ms`.
const SWEEP_INTERVAL: Duration = Duration::from_secs(3600);
/// Number of ids that are removed before the task yields.
const FORGOTTEN_AT_ONCE: usize = 1_000;

/// Number of markers of a transaction that are appended, or of timed-out transactions that are
/// aborted, before the task yields.
const MARKERS_AT_ONCE: usize = 256;

/// Delay after a failure other than a lack of space.
const RETRY: Duration = Duration::from_secs(1);

/// Writes what follows a decision, in its own task; the decision is appended.
pub(super) fn start(server: &Arc<Server>, slot: &Arc<Slot>) {
    let (server, slot) = (server.clone(), slot.clone());
    tokio::spawn(async move {
        if let Err(cause) = complete(&server, &slot, false).await {
            tracing::error!(
                id = &*slot.id,
                cause,
                "transaction cannot be completed before a restart"
            );
        }
    });
}

/// Ends the transactions that a crash has interrupted, before any client is served.
pub(super) async fn resume(server: &Arc<Server>) -> Result<(), TransactionsError> {
    let slots: Vec<_> = server.transactions.slots.read().values().cloned().collect();
    for slot in slots {
        if !matches!(slot.transaction.lock().state, State::Prepared(_)) {
            continue;
        }
        tracing::info!(id = &*slot.id, "completing a transaction that was interrupted");
        let ended = complete(server, &slot, true).await;
        ended.map_err(|cause| TransactionsError::NotEnded { id: slot.id.to_string(), cause })?;
    }
    Ok(())
}

/// Estimated size of a span in a decision.
const SPAN_BYTES: u64 = 40;

/// Adds the spans of the transaction's records to a decision, so that damage of the log does not
/// make them ambiguous. Left out if there are too many partitions for one record.
pub(super) fn with_spans(server: &Server, transaction: &Transaction, event: Event) -> Event {
    let Event::Prepared { outcome, marker, identity, resolves_doubt, .. } = event else {
        return event;
    };
    let spans = transaction.partitions.iter().filter_map(|(topic, index)| {
        let topic_now = server.topics.stored_by_id(*topic)?;
        let partition = topic_now.partition(*index)?;
        let records = partition.transaction_span(transaction.identity.producer_id)?;
        Some(Span { partition: (*topic, *index), records })
    });
    let spans: Vec<_> = spans.collect();
    let fit = spans.len() as u64 * SPAN_BYTES <= server.store.max_batch_bytes() / 2;
    Event::Prepared { outcome, marker, identity, spans: fit.then_some(spans), resolves_doubt }
}

/// Appends markers, offsets and `Completed`, and waits until they are durable. With `resumed` some
/// of the markers may exist already. An error is a failed store.
async fn complete(server: &Arc<Server>, slot: &Slot, resumed: bool) -> Result<(), String> {
    let transactions = &server.transactions;
    let Some(Ending { outcome, marker, partitions, offsets, spans }) =
        Ending::of(&slot.transaction.lock())
    else {
        return Ok(());
    };
    let spans = spans.filter(|_| resumed).map(|spans| {
        let spans = spans.into_iter().map(|Span { partition, records }| (partition, records));
        spans.collect::<HashMap<_, _>>()
    });
    // If the log has lost something, the open transaction may be a later one.
    let is_its_own = |key, first| {
        spans.as_ref().is_none_or(|all| all.get(&key).is_some_and(|of| of.contains(&first)))
    };
    let (producer_id, epoch) = marker;
    for (n, key) in partitions.into_iter().enumerate() {
        if n > 0 && n % MARKERS_AT_ONCE == 0 {
            yield_now().await;
        }
        let (topic, index) = key;
        let Some(topic) = server.topics.stored_by_id(topic) else { continue };
        let Some(partition) = topic.partition(index) else { continue };
        // Each partition gets the marker of each transaction that it is part of, so that a marker
        // proves its transaction if decisions are lost. A repeated marker does no harm.
        if resumed && partition.producer_epoch(producer_id).is_some_and(|known| known > epoch) {
            continue;
        }
        let open = partition.transaction_span(producer_id).filter(|_| resumed);
        if open.is_some_and(|records| !is_its_own(key, records.start)) {
            continue;
        }
        let _append = append_marker(server, partition, (producer_id, epoch), outcome).await?;
    }
    if outcome == Outcome::Commit {
        for (group, mut topics) in offsets {
            if resumed && transactions.has_lost {
                // They may be committed already, and later ones since.
                for (topic, positions) in &mut topics {
                    positions.retain(|partition, position| {
                        let now = server.groups.committed_offset(&group, topic, *partition);
                        now.is_none_or(|now| now < position.offset)
                    });
                }
            }
            let exists = |topic: &str, partition| {
                let topic = server.topics.stored_by_name(topic);
                topic.is_some_and(|topic| topic.partition(partition).is_some())
            };
            server.groups.commit_of_transaction(&group, topics, exists).await?;
        }
    }
    let at_ms = unix_time_ms();
    let append: Append = loop {
        match transactions.append(&slot.id, at_ms, &Event::Completed) {
            Ok(append) => break append,
            Err(Refused::Full) => transactions.store.wait_for_space().await,
            Err(refused) => return Err(format!("{refused:?}")),
        }
    };
    // Everything appended above is before it in the log.
    append.await.map_err(|error| error.to_string())?;
    let mut transaction = slot.transaction.lock();
    transactions.apply(slot, &mut transaction, at_ms, Event::Completed);
    drop(transaction);
    server.metrics.transaction(outcome);
    slot.ended.notify_waiters();
    Ok(())
}

/// The work for a transaction whose end is decided.
struct Ending {
    outcome: Outcome,
    marker: (i64, i16),
    partitions: Vec<(uuid::Uuid, i32)>,
    offsets: Vec<(String, super::transaction::Offsets)>,
    spans: Option<Vec<Span>>,
}

impl Ending {
    fn of(transaction: &Transaction) -> Option<Self> {
        let State::Prepared(outcome) = transaction.state else { return None };
        Some(Self {
            outcome,
            marker: transaction.marker,
            partitions: transaction.partitions.iter().copied().collect(),
            offsets: transaction.offsets.clone().into_iter().collect(),
            spans: transaction.spans.clone(),
        })
    }
}

/// Appends a marker as soon as there is space. Returns `None` for a partition that was deleted
/// meanwhile, which needs no marker.
pub(super) async fn append_marker(
    server: &Server,
    partition: &Partition,
    (producer_id, epoch): (i64, i16),
    outcome: Outcome,
) -> Result<Option<Append>, String> {
    loop {
        match partition.append_marker(producer_id, epoch, outcome) {
            Ok(append) => return Ok(Some(append)),
            Err(AppendError::Deleted) => return Ok(None),
            Err(AppendError::Full) => server.store.wait_for_space().await,
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Aborts timed-out transactions and removes expired ids, until the server stops.
pub(crate) async fn run(server: Arc<Server>) {
    let mut next_sweep = Instant::now() + SWEEP_INTERVAL;
    loop {
        let transactions = &server.transactions;
        let sooner = transactions.sooner.notified();
        let first_ms = transactions.deadlines.lock().first().map(|(at_ms, _)| *at_ms);
        let wait_ms = first_ms.map(|at_ms| at_ms.saturating_sub(unix_time_ms()).max(0));
        let due = wait_ms
            .map_or(next_sweep, |ms| Instant::now() + Duration::from_millis(ms.unsigned_abs()));
        tokio::select! {
            () = server.stopping() => return,
            () = sooner => {}
            () = sleep_until(due.min(next_sweep)) => {}
        }
        if !abort_late(&server).await {
            sleep(RETRY).await;
        }
        if Instant::now() >= next_sweep {
            forget_unused(&server).await;
            next_sweep = Instant::now() + SWEEP_INTERVAL;
        }
    }
}

/// Aborts timed-out transactions. Returns whether all were aborted.
async fn abort_late(server: &Arc<Server>) -> bool {
    let transactions = &server.transactions;
    let now_ms = unix_time_ms();
    let due = |(at_ms, _): &&(i64, Arc<str>)| *at_ms <= now_ms;
    let late: Vec<_> =
        transactions.deadlines.lock().iter().take_while(due).map(|(_, id)| id.clone()).collect();
    for (n, slot) in late.iter().filter_map(|id| transactions.get(id)).enumerate() {
        if n > 0 && n % MARKERS_AT_ONCE == 0 {
            yield_now().await;
        }
        let mut transaction = slot.transaction.lock();
        if transaction.deadline_ms().is_none_or(|at_ms| at_ms > now_ms) {
            continue;
        }
        let event = with_spans(server, &transaction, transaction.time_out());
        match transactions.change(&slot, &mut transaction, event) {
            Ok(_) => {
                tracing::info!(id = &*slot.id, "transaction timed out and is aborted");
                start(server, &slot);
            }
            Err(refused) => {
                tracing::warn!(
                    id = &*slot.id,
                    ?refused,
                    "timed-out transaction could not be aborted"
                );
                return false;
            }
        }
    }
    true
}

/// Removes expired ids. A removal that cannot be written now is tried again in the next sweep.
pub(crate) async fn forget_unused(server: &Server) {
    let transactions = &server.transactions;
    let expiration = server.config.transactional_id_expiration;
    let expiration_ms = i64::try_from(expiration.as_millis()).unwrap_or(i64::MAX);
    let before_ms = unix_time_ms().saturating_sub(expiration_ms);
    loop {
        let there_are_more = {
            let mut slots = transactions.slots.write();
            let forget = || transactions.forget_oldest(&mut slots, before_ms);
            std::iter::repeat_with(forget).take(FORGOTTEN_AT_ONCE).all(|f| matches!(f, Ok(true)))
        };
        if !there_are_more {
            return;
        }
        yield_now().await;
    }
}
