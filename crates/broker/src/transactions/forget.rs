//! Removal of staged offsets: those of a topic before another one of its name is created, those of
//! a group with the group.

use std::collections::BTreeMap;
use std::sync::Arc;

use kafka_protocol::error::ResponseError;
use tokio::task::yield_now;
use tokio::time::Instant;

use super::record::Event;
use super::transaction::{State, Transaction};
use super::{Slot, Step, Transactions, WAIT_MAX, durable};
use crate::groups::Position;
use crate::server::Server;

/// Number of transactions that are checked before the task yields.
const LOOKED_AT_ONCE: usize = 1_000;

impl Transactions {
    /// Removes the offsets that open transactions have staged for a deleted topic of this name, and
    /// waits for transactions that are being ended. Durable when it returns. Needed before a topic
    /// is created, because staged offsets name topics by name.
    ///
    /// # Errors
    /// CONCURRENT_TRANSACTIONS: a transaction does not end; a store without space, or a failed one.
    pub(crate) async fn forget_offsets(server: &Server, topic: &str) -> Result<(), ResponseError> {
        let slots = server.transactions.with_offsets_of(topic).await;
        let of_topic = |transaction: &Transaction| {
            let groups = transaction.offsets.iter().filter(|(_, of)| of.contains_key(topic));
            let nothing = |(group, _): (&String, _)| Event::Offsets {
                group: group.clone(),
                topics: vec![(topic.to_owned(), Vec::new())],
            };
            groups.map(nothing).collect::<Vec<_>>()
        };
        forget(server, slots, of_topic).await.map(|_| ())
    }

    /// Removes the offsets that open transactions have staged for a group where `is_deleted(topic,
    /// partition)` holds, and waits for transactions that are being ended. Durable when it returns.
    /// Returns whether there were any.
    ///
    /// # Errors
    /// As [`Transactions::forget_offsets`].
    pub(crate) async fn forget_offsets_for(
        server: &Server,
        group: &str,
        is_deleted: impl Fn(&str, i32) -> bool,
    ) -> Result<bool, ResponseError> {
        let this = &server.transactions;
        let ids = this.groups.pending().transactions(group);
        let slots = ids.iter().filter_map(|id| this.get(id)).collect();
        let of_group = |transaction: &Transaction| {
            let mut events = Vec::new();
            for (topic, positions) in transaction.offsets.get(group).into_iter().flatten() {
                let topics = without(topic, positions, |index| is_deleted(topic, index));
                if !topics.is_empty() {
                    events.push(Event::Offsets { group: group.to_owned(), topics });
                }
            }
            events
        };
        forget(server, slots, of_group).await
    }

    /// Returns the transactions with staged offsets for a topic of this name. There may be very
    /// many others, so it yields now and then.
    ///
    /// Takes the lock of each: its holder may have seen the deleted topic and be about to append
    /// offsets.
    async fn with_offsets_of(&self, topic: &str) -> Vec<Arc<Slot>> {
        let mut found = Vec::new();
        let has_some = |slot: &Arc<Slot>| {
            let transaction = slot.transaction.lock();
            transaction.offsets.values().any(|topics| topics.contains_key(topic))
        };
        // One slot at a time: a referenced slot cannot be removed in favour of another id.
        let ids: Vec<Arc<str>> = self.slots.read().keys().cloned().collect();
        for some in ids.chunks(LOOKED_AT_ONCE) {
            found.extend(some.iter().filter_map(|id| self.get(id)).filter(has_some));
            yield_now().await;
        }
        found
    }
}

/// Applies the events that `events` returns for each transaction, durably. Returns whether there
/// were any. Decided transactions are waited for.
async fn forget(
    server: &Server,
    slots: Vec<Arc<Slot>>,
    events: impl Fn(&Transaction) -> Vec<Event>,
) -> Result<bool, ResponseError> {
    let this = &server.transactions;
    let until = Instant::now() + WAIT_MAX;
    let mut is_any = false;
    for slot in slots {
        let step = |_| {
            let mut transaction = slot.transaction.lock();
            let events = events(&transaction);
            is_any |= !events.is_empty();
            if !events.is_empty() && matches!(transaction.state, State::Prepared(_)) {
                return Ok(Step::Wait);
            }
            let mut last = None;
            for event in events {
                last = Some(this.change(&slot, &mut transaction, event)?);
            }
            Ok(Step::Done(last, transaction.identity.current()))
        };
        let (append, _) = Transactions::take_steps(server, &slot, until, step).await?;
        durable(append).await?;
    }
    Ok(is_any)
}

/// Returns the positions of events that keep only the offsets of a topic that are not deleted:
/// first an empty list, then the rest. Nothing if all of them stay.
fn without(
    topic: &str,
    positions: &BTreeMap<i32, Position>,
    is_deleted: impl Fn(i32) -> bool,
) -> Vec<(String, Vec<Position>)> {
    let rest = positions.values().filter(|position| !is_deleted(position.partition));
    let rest: Vec<Position> = rest.cloned().collect();
    if rest.len() == positions.len() {
        return Vec::new();
    }
    let mut topics = vec![(topic.to_owned(), Vec::new())];
    if !rest.is_empty() {
        topics.push((topic.to_owned(), rest));
    }
    topics
}
