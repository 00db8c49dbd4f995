//! The number of producers and transactions in the state of all partitions, and its limits.
//!
//! Each partition may hold a few regardless of the others. Beyond that, the partitions compete for
//! the limits.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

use super::ProducerStates;

/// The greatest number of producers in all partitions. Each takes 150 to 450 bytes, depending on
/// its number of tracked batches and the load of the tables.
const MAX_PRODUCERS: usize = 500_000;
/// The number of producers below which a partition evicts none because of the total.
const FREE_PRODUCERS: usize = 32;

/// The greatest number of transactions in one partition that are aborted, or open and so may be
/// aborted: 8 MiB at 32 bytes each.
const MAX_PARTITION_TRANSACTIONS: usize = 1 << 18;
/// The greatest number of such transactions in all partitions: 64 MiB.
const MAX_TRANSACTIONS: usize = 1 << 21;
/// The number of transactions below which a partition refuses none because of the total: 4 KiB.
const FREE_TRANSACTIONS: usize = 1 << 7;

/// The totals over all partitions.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) producers: Gauge<i64, AtomicI64>,
    /// Aborted and open transactions.
    pub(crate) transactions: Gauge<i64, AtomicI64>,
    /// Batches refused because they would have begun one more transaction.
    pub(crate) refused: Counter,
}

impl Totals {
    fn excess_producers(&self) -> usize {
        usize::try_from(self.producers.get()).unwrap_or(0).saturating_sub(MAX_PRODUCERS)
    }

    fn are_transactions_full(&self) -> bool {
        usize::try_from(self.transactions.get()).is_ok_and(|count| count >= MAX_TRANSACTIONS)
    }

    /// Raises the totals as if other partitions had reached the limits.
    #[cfg(test)]
    pub(crate) fn fill(&self) {
        self.producers.inc_by(MAX_PRODUCERS as i64);
        self.transactions.inc_by(MAX_TRANSACTIONS as i64);
    }
}

/// The producers of one partition; they count in the totals until this is dropped.
pub(crate) struct Counted {
    states: ProducerStates,
    totals: Arc<Totals>,
    /// This partition's share of the totals.
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
        // A checkpoint is limited for its own partition only. Transactions cannot be dropped, but
        // no further ones begin.
        let excess = this.totals.excess_producers();
        this.states.evict_oldest(excess.min(this.producers.saturating_sub(FREE_PRODUCERS)));
        this.count();
        this
    }

    /// Applies a change and updates the totals. If there are too many producers in all, a new one
    /// evicts the oldest one of this partition.
    pub(crate) fn change<T>(&mut self, change: impl FnOnce(&mut ProducerStates) -> T) -> T {
        let before = self.producers;
        let result = change(&mut self.states);
        self.count();
        let is_new = self.producers > before && self.producers > FREE_PRODUCERS;
        if is_new && self.totals.excess_producers() > 0 {
            self.states.evict_oldest(1);
            self.count();
        }
        result
    }

    /// Whether one more transaction may begin. An open transaction counts like an aborted one, so
    /// that it can always be aborted.
    pub(crate) fn can_track_transaction(&self) -> bool {
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
