//! Offsets that transactions would commit are forgotten: those of a topic before another one of its
//! name is created, those of a group with the group.

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

/// Transactions that are looked at without a break.
const LOOKED_AT_ONCE: usize = 1_000;

impl Transactions {
    /// Forget what open transactions have to commit for a topic of this name, which there is not
    /// any more, and wait for those that are being ended. Durable when it returns. Needed before a
    /// topic is created: what is to be committed is kept by the topics' names.
    ///
    /// # Errors
    /// CONCURRENT_TRANSACTIONS: one does not come to its end; a store without room, or a failed
    /// one.
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

    /// Forget what open transactions have to commit for a group, as far as `is_deleted(topic,
    /// partition)`, and wait for those that are being ended. Durable when it returns; whether there
    /// was anything.
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

    /// The transactions that have offsets to commit for a topic of this name. There may be very
    /// many others, so those who wait for a thread get on meanwhile.
    ///
    /// Each one's lock is taken: who has it may have seen the topic that is gone, and is about to
    /// put its offsets in line.
    async fn with_offsets_of(&self, topic: &str) -> Vec<Arc<Slot>> {
        let mut found = Vec::new();
        let has_some = |slot: &Arc<Slot>| {
            let transaction = slot.transaction.lock();
            transaction.offsets.values().any(|topics| topics.contains_key(topic))
        };
        // One place at a time: one that is held cannot make room for another id.
        let ids: Vec<Arc<str>> = self.slots.read().keys().cloned().collect();
        for some in ids.chunks(LOOKED_AT_ONCE) {
            found.extend(some.iter().filter_map(|id| self.get(id)).filter(has_some));
            yield_now().await;
        }
        found
    }
}

/// Let in each transaction happen what `events` says of it, durably; whether there was anything.
/// What is decided takes its course, and is waited for.
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

/// What an event has to say of a topic so that only the offsets stay that are not deleted: first
/// that there are none, then which there are. Nothing if all of them stay.
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
