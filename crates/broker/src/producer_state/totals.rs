//! What all partitions together remember of producers and their transactions: counted, and bounded.
//!
//! Each partition may remember a little whatever the others do; beyond that, who fills the bounds
//! in some partitions is in the way of others.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

use super::ProducerStates;

/// Producers of all partitions. Each takes 150 to 450 bytes, depending on how many of its batches
/// are remembered and how full the tables are.
const MAX_PRODUCERS: usize = 500_000;
/// A partition forgets none of so many for the sake of others.
const FREE_PRODUCERS: usize = 32;

/// Transactions of one partition that are aborted, or open and so may yet be: 8 MiB at 32 bytes
/// each.
const MAX_PARTITION_TRANSACTIONS: usize = 1 << 18;
/// The same of all partitions: 64 MiB.
const MAX_TRANSACTIONS: usize = 1 << 21;
/// A partition with fewer refuses none for the sake of others: 4 KiB.
const FREE_TRANSACTIONS: usize = 1 << 7;

/// Numbers over all partitions.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) producers: Gauge<i64, AtomicI64>,
    /// Aborted and open ones.
    pub(crate) transactions: Gauge<i64, AtomicI64>,
    /// Batches that would have begun one more.
    pub(crate) refused: Counter,
}

impl Totals {
    fn excess_producers(&self) -> usize {
        usize::try_from(self.producers.get()).unwrap_or(0).saturating_sub(MAX_PRODUCERS)
    }

    fn are_transactions_full(&self) -> bool {
        usize::try_from(self.transactions.get()).is_ok_and(|count| count >= MAX_TRANSACTIONS)
    }

    /// As if other partitions had all that there may be.
    #[cfg(test)]
    pub(crate) fn fill(&self) {
        self.producers.inc_by(MAX_PRODUCERS as i64);
        self.transactions.inc_by(MAX_TRANSACTIONS as i64);
    }
}

/// The producers of one partition, which count in the totals as long as they are there.
pub(crate) struct Counted {
    states: ProducerStates,
    totals: Arc<Totals>,
    /// What of them is in the totals.
    producers: usize,
    transactions: usize,
}

impl Deref for Counted {
    type Target = ProducerStates;

    fn deref(&self) -> &ProducerStates {
        &self.states
    }
}

impl Counted {
    pub(crate) fn new(states: ProducerStates, totals: Arc<Totals>) -> Self {
        let mut this = Self { states, totals, producers: 0, transactions: 0 };
        this.count();
        // A checkpoint knows only its own partition. Of transactions nothing can be forgotten; no
        // more begin.
        let excess = this.totals.excess_producers();
        this.states.forget_oldest(excess.min(this.producers.saturating_sub(FREE_PRODUCERS)));
        this.count();
        this
    }

    /// The one way to change them. A new producer takes the place of the oldest one here if there
    /// are too many in all.
    pub(crate) fn change<T>(&mut self, change: impl FnOnce(&mut ProducerStates) -> T) -> T {
        let before = self.producers;
        let result = change(&mut self.states);
        self.count();
        let is_new = self.producers > before && self.producers > FREE_PRODUCERS;
        if is_new && self.totals.excess_producers() > 0 {
            self.states.forget_oldest(1);
            self.count();
        }
        result
    }

    /// Whether one more transaction may begin. One that is open counts as one that is aborted, so
    /// that it can always end so.
    pub(crate) fn has_room_for_transaction(&self) -> bool {
        match self.states.transactions() {
            ..FREE_TRANSACTIONS => true,
            MAX_PARTITION_TRANSACTIONS.. => false,
            _ => !self.totals.are_transactions_full(),
        }
    }

    fn count(&mut self) {
        let (producers, transactions) = (self.states.producers.len(), self.states.transactions());
        if (producers, transactions) == (self.producers, self.transactions) {
            return;
        }
        self.totals.producers.inc_by(difference(producers, self.producers));
        self.totals.transactions.inc_by(difference(transactions, self.transactions));
        (self.producers, self.transactions) = (producers, transactions);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.states = ProducerStates::default();
        self.count();
    }
}

fn difference(to: usize, from: usize) -> i64 {
    to as i64 - from as i64
}
