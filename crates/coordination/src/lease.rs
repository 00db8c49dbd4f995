//! A lease that a task renews.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout_at};

use crate::{Coordination, Error, LeaseId, Result};

/// A lease that a task renews three times in its time to live. A drop ends the task, so that the
/// lease ends by the service's clock; [`KeptLease::revoke`] ends it at once.
pub struct KeptLease {
    service: Arc<dyn Coordination>,
    id: LeaseId,
    is_held: watch::Receiver<bool>,
    task: AbortHandle,
}

impl std::fmt::Debug for KeptLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeptLease").field("id", &self.id).finish_non_exhaustive()
    }
}

impl KeptLease {
    /// Grants a lease and renews it from now on. Runs in a runtime of tokio.
    ///
    /// # Errors
    /// Those of [`Coordination::grant`].
    pub async fn grant(service: Arc<dyn Coordination>, ttl: Duration) -> Result<Self> {
        let granted_at = Instant::now();
        let lease = service.grant(ttl).await?;
        let (held, is_held) = watch::channel(true);
        let renewal = renew(service.clone(), lease.id, lease.ttl, granted_at);
        let task = tokio::spawn(async move {
            renewal.await;
            held.send_replace(false);
        });
        Ok(Self { service, id: lease.id, is_held, task: task.abort_handle() })
    }

    /// Returns the number of the lease.
    #[must_use]
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// Waits until the lease may have ended: the service has ended it, or no renewal was answered
    /// for its time to live. It is never renewed again then. The service may end it later, but not
    /// earlier, unless it was revoked.
    pub async fn lost(&self) {
        let mut is_held = self.is_held.clone();
        // The sender is dropped only with the task, which the drop of `self` aborts.
        let _ = is_held.wait_for(|held| !held).await;
    }

    /// Returns whether the lease is held, as [`KeptLease::lost`] defines it.
    #[must_use]
    pub fn is_held(&self) -> bool {
        *self.is_held.borrow()
    }

    /// Ends the lease with its keys.
    ///
    /// # Errors
    /// Those of [`Coordination::revoke`]; the lease is not renewed any more then.
    pub async fn revoke(self) -> Result<()> {
        self.task.abort();
        self.service.revoke(self.id).await
    }
}

impl Drop for KeptLease {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Renews the lease until it may have ended.
async fn renew(service: Arc<dyn Coordination>, id: LeaseId, ttl: Duration, granted_at: Instant) {
    // The time to live counts from the sending of the last renewal that was answered, which is
    // before the service has received it.
    let mut renewed_at = granted_at;
    let mut wait = ttl / 3;
    while Instant::now() + wait < renewed_at + ttl {
        sleep(wait).await;
        let sent_at = Instant::now();
        match timeout_at(renewed_at + ttl, service.keep_alive(id)).await {
            Ok(Ok(())) => {
                renewed_at = sent_at;
                wait = ttl / 3;
            }
            Ok(Err(error @ (Error::LeaseNotFound(_) | Error::Replaced(_)))) => {
                tracing::debug!(lease = %id, %error, "lease lost");
                return;
            }
            Ok(Err(error)) => {
                tracing::debug!(lease = %id, %error, "lease not renewed, retrying");
                wait = ttl / 20;
            }
            Err(_) => break,
        }
    }
    tracing::debug!(lease = %id, ?ttl, "lease not renewed for its time to live");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Clock, Hosted as _, Limits, MemoryCoordination};

    const TTL: Duration = Duration::from_secs(3);

    /// The clock of tokio, which tests let run without waiting.
    struct Paused(Instant);

    impl Clock for Paused {
        fn now(&self) -> Duration {
            self.0.elapsed()
        }
    }

    fn service() -> Arc<MemoryCoordination> {
        Arc::new(MemoryCoordination::new(Limits::default(), Arc::new(Paused(Instant::now()))))
    }

    #[tokio::test(start_paused = true)]
    async fn a_kept_lease_is_renewed_until_it_is_dropped() {
        let service = service();
        let lease = KeptLease::grant(service.clone(), TTL).await.unwrap();
        let id = lease.id();
        for _ in 0..20 {
            sleep(TTL / 2).await;
            service.expire().await.unwrap();
            assert!(lease.is_held());
        }
        drop(lease);
        sleep(TTL).await;
        assert_eq!(service.keep_alive(id).await, Err(Error::LeaseNotFound(id)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_revoked_lease_is_reported_as_lost() {
        let service = service();
        let lease = KeptLease::grant(service.clone(), TTL).await.unwrap();
        service.revoke(lease.id()).await.unwrap();
        lease.lost().await;
        assert!(!lease.is_held());
        let lease = KeptLease::grant(service.clone(), TTL).await.unwrap();
        let id = lease.id();
        lease.revoke().await.unwrap();
        assert_eq!(service.keep_alive(id).await, Err(Error::LeaseNotFound(id)));
    }

    /// A service that cannot be reached after the grant.
    struct Away(Arc<MemoryCoordination>);

    #[async_trait::async_trait]
    impl Coordination for Away {
        async fn identity(&self) -> Result<crate::Identity> {
            self.0.identity().await
        }
        async fn get(&self, _: &str) -> Result<Option<crate::Entry>> {
            std::future::pending().await
        }
        async fn list(&self, _: &crate::ListRequest) -> Result<crate::Page> {
            std::future::pending().await
        }
        async fn commit(
            &self,
            _: &crate::Transaction,
        ) -> Result<std::result::Result<crate::Revision, crate::Conflict>> {
            std::future::pending().await
        }
        fn watch(
            &self,
            _: &str,
            _: crate::Revision,
        ) -> futures::stream::BoxStream<'static, Result<crate::Changes>> {
            Box::pin(futures::stream::pending())
        }
        async fn grant(&self, ttl: Duration) -> Result<crate::Lease> {
            self.0.grant(ttl).await
        }
        async fn keep_alive(&self, _: LeaseId) -> Result<()> {
            std::future::pending().await
        }
        async fn revoke(&self, _: LeaseId) -> Result<()> {
            std::future::pending().await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_cannot_be_renewed_is_lost_before_the_service_ends_it() {
        let service = service();
        let lease = KeptLease::grant(Arc::new(Away(service.clone())), TTL).await.unwrap();
        let before = Instant::now();
        lease.lost().await;
        assert_eq!(before.elapsed(), TTL);
        service.keep_alive(lease.id()).await.expect_err("its time is over at the same moment");
    }
}
