//! Times without the coordination service. A server that starts waits for it without end; one that
//! runs goes on with what it knows.

use std::time::Duration;

use alluvium_coordination::Error;
use tokio::time::Instant;

use crate::registry::RegistryError;

/// The pause after a failure of the registry.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// The time between two log lines of an outage.
const REPORT_EVERY: Duration = Duration::from_secs(30);

/// What the log says of an outage.
#[derive(Default)]
pub(super) struct Outage {
    /// When it began, and when it was reported last.
    times: Option<(Instant, Instant)>,
}

impl Outage {
    /// Reports a failure, unless one was reported within the last 30 s.
    pub(super) fn failed(&mut self, effect: &str, error: &RegistryError) {
        let now = Instant::now();
        if !self.is_due(now) {
            return;
        }
        let (began, _) = self.times.expect("it has begun");
        let seconds = (now - began).as_secs();
        tracing::warn!(%error, seconds, "{effect}");
    }

    /// Whether a failure at this time is reported; then it counts as reported.
    fn is_due(&mut self, now: Instant) -> bool {
        match &mut self.times {
            Some((_, reported)) if now - *reported < REPORT_EVERY => false,
            Some((_, reported)) => {
                *reported = now;
                true
            }
            None => {
                self.times = Some((now, now));
                true
            }
        }
    }

    #[cfg(test)]
    pub(super) fn is_over(&self) -> bool {
        self.times.is_none()
    }

    /// The service answers. Ends the outage, if there is one.
    pub(super) fn over(&mut self) {
        if let Some((began, _)) = self.times.take() {
            let seconds = began.elapsed().as_secs();
            tracing::info!(seconds, "the coordination service answers again");
        }
    }
}

/// Repeats an operation of the registry, which may be called again after any outcome, until the
/// coordination service answers.
pub(super) async fn until_answered<T, F>(
    mut operation: impl FnMut() -> F,
) -> Result<T, RegistryError>
where
    F: Future<Output = Result<T, RegistryError>>,
{
    let mut outage = Outage::default();
    loop {
        let ended = operation().await;
        match ended {
            Err(error @ RegistryError::Coordination(Error::Unavailable(_) | Error::Unknown(_))) => {
                outage.failed("the start waits for the coordination service", &error);
            }
            ended => {
                outage.over();
                return ended;
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_reported_at_once_and_then_every_30_seconds() {
        let mut outage = Outage::default();
        let start = Instant::now();
        let due = (0..100).filter(|second| outage.is_due(start + Duration::from_secs(*second)));
        assert_eq!(due.collect::<Vec<_>>(), [0, 30, 60, 90]);
        outage.over();
        assert!(outage.is_due(start), "another outage is reported at once");
    }

    #[tokio::test(start_paused = true)]
    async fn an_operation_is_repeated_while_the_service_is_away_and_not_after_other_errors() {
        let mut answers = vec![
            Err(RegistryError::UnknownVolume("v".into())),
            Err(Error::Unknown("lost".into()).into()),
            Ok(()),
            Err(Error::Unavailable("away".into()).into()),
        ];
        // More than a client waits for an answer.
        answers.extend((0..600).map(|_| Err(Error::Unavailable("away".into()).into())));
        let mut next = || std::future::ready(answers.pop().expect("there is one more"));
        assert_eq!(until_answered(&mut next).await, Ok(()));
        let refused = until_answered(&mut next).await;
        assert_eq!(refused, Err(RegistryError::UnknownVolume("v".into())));
    }
}
