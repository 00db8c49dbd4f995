//! Bounds on the bytes in flight.
//!
//! Each connection has a small reserve of its own, in which any request can progress: requests with
//! more data are executed in pieces. What exceeds the reserve comes from a pool that all
//! connections share, up to a limit for each. A client that holds its part of the pool without
//! making progress slows others down to their reserves, but cannot stop them.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::counters::{Counters, add, subtract};

/// Data of a request that is executed at once.
pub(crate) const PIECE_BYTES: u32 = 1 << 20;
/// What a request is charged beyond its data: its bookkeeping, headers of replies.
pub(crate) const REQUEST_CHARGE: u32 = 4 << 10;
/// A connection's own memory.
pub(crate) const RESERVE_BYTES: u32 = PIECE_BYTES + REQUEST_CHARGE;

/// A connection's part of the server's memory.
pub(crate) struct Budget {
    reserve: Arc<Semaphore>,
    /// What is left of the connection's limit beyond its reserve.
    limit: Arc<Semaphore>,
    pool: Arc<Semaphore>,
    counters: Arc<Counters>,
}

impl Budget {
    pub(crate) fn new(limit_bytes: u32, pool: Arc<Semaphore>, counters: Arc<Counters>) -> Self {
        Self {
            reserve: Arc::new(Semaphore::new(RESERVE_BYTES as usize)),
            limit: Arc::new(Semaphore::new(limit_bytes as usize)),
            pool,
            counters,
        }
    }

    /// Waits for memory for a request with `data_bytes` of data. A connection has one caller at a
    /// time.
    pub(crate) async fn acquire(&self, data_bytes: u32) -> Reservation {
        let bytes = REQUEST_CHARGE + data_bytes;
        let parts = if bytes > RESERVE_BYTES {
            self.acquire_shared(bytes).await
        } else {
            // Waits for whichever has space first. The reserve is preferred.
            tokio::select! {
                biased;
                reserve = acquire(&self.reserve, bytes) => [Some(reserve), None],
                shared = self.acquire_shared(bytes) => shared,
            }
        };
        add(&self.counters.bytes_in_flight, bytes.into());
        Reservation { parts, bytes, counters: Arc::clone(&self.counters) }
    }

    async fn acquire_shared(&self, bytes: u32) -> [Option<OwnedSemaphorePermit>; 2] {
        // First the connection's own limit, so that it holds nothing of the pool while it waits.
        let limit = acquire(&self.limit, bytes).await;
        [Some(limit), Some(acquire(&self.pool, bytes).await)]
    }
}

async fn acquire(semaphore: &Arc<Semaphore>, bytes: u32) -> OwnedSemaphorePermit {
    let acquired = Arc::clone(semaphore).acquire_many_owned(bytes).await;
    acquired.expect("semaphores of budgets are never closed")
}

/// Memory that is held for a request.
pub(crate) struct Reservation {
    parts: [Option<OwnedSemaphorePermit>; 2],
    bytes: u32,
    counters: Arc<Counters>,
}

impl Reservation {
    /// Releases what exceeds the charge for `data_bytes` of data.
    pub(crate) fn shrink(&mut self, data_bytes: u32) {
        let excess = self.bytes.saturating_sub(REQUEST_CHARGE + data_bytes);
        for part in self.parts.iter_mut().flatten() {
            drop(part.split(excess as usize));
        }
        self.bytes -= excess;
        subtract(&self.counters.bytes_in_flight, excess.into());
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        subtract(&self.counters.bytes_in_flight, self.bytes.into());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use futures::FutureExt;

    use super::*;

    fn in_flight(counters: &Counters) -> u64 {
        counters.bytes_in_flight.load(Ordering::Relaxed)
    }

    #[test]
    fn a_connection_has_its_reserve_although_the_pool_is_used_up() {
        let (pool, counters) = (Arc::new(Semaphore::new(10 << 20)), Arc::default());
        let greedy = Budget::new(64 << 20, Arc::clone(&pool), Arc::clone(&counters));
        let other = Budget::new(64 << 20, Arc::clone(&pool), Arc::clone(&counters));
        let mut held = Vec::new();
        while let Some(reservation) = greedy.acquire(PIECE_BYTES).now_or_never() {
            held.push(reservation);
        }
        // The reserve and nine times 1 MiB with the charge for a request.
        assert_eq!(held.len(), 10);
        let own = other.acquire(PIECE_BYTES).now_or_never().expect("the reserve is free");
        assert!(other.acquire(PIECE_BYTES).now_or_never().is_none());
        assert_eq!(in_flight(&counters), 11 * u64::from(RESERVE_BYTES));
        drop(own);
        let _own = other.acquire(PIECE_BYTES).now_or_never().expect("the reserve is free again");
        held.pop();
        other.acquire(PIECE_BYTES).now_or_never().expect("the pool has space");
    }

    #[test]
    fn a_connection_is_limited_although_the_pool_has_space() {
        let (pool, counters) = (Arc::new(Semaphore::new(1 << 30)), Arc::default());
        let budget = Budget::new(2 * RESERVE_BYTES, pool, Arc::clone(&counters));
        let held: Vec<_> =
            (0..3).map(|_| budget.acquire(PIECE_BYTES).now_or_never().unwrap()).collect();
        assert!(budget.acquire(0).now_or_never().is_none());
        drop(held);
        assert_eq!(in_flight(&counters), 0);
    }

    #[test]
    fn a_reservation_returns_what_it_no_longer_needs() {
        let (pool, counters) = (Arc::new(Semaphore::new(40 << 20)), Arc::default());
        let budget = Budget::new(40 << 20, Arc::clone(&pool), Arc::clone(&counters));
        let mut large = budget.acquire(32 << 20).now_or_never().unwrap();
        assert!(budget.acquire_shared(32 << 20).now_or_never().is_none());
        large.shrink(1000);
        assert_eq!(in_flight(&counters), u64::from(REQUEST_CHARGE) + 1000);
        large.shrink(1 << 30);
        assert_eq!(in_flight(&counters), u64::from(REQUEST_CHARGE) + 1000);
        drop(budget.acquire_shared(32 << 20).now_or_never().expect("the rest was returned"));
        drop(large);
        assert_eq!((in_flight(&counters), pool.available_permits()), (0, 40 << 20));
    }
}
