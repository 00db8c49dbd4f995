//! What operators learn of the requests of an attached volume.

use parking_lot::Mutex;

/// Why requests of a volume wait or fail at present. Each change is logged, once at its begin and
/// once at its end.
#[derive(Debug, Default)]
pub struct Trouble {
    /// The name of the volume.
    volume: String,
    stuck: Mutex<Option<String>>,
    full: Mutex<Option<String>>,
}

impl Trouble {
    /// The trouble of a volume with this name: none.
    pub fn new(volume: &str) -> Self {
        Self { volume: volume.to_owned(), ..Self::default() }
    }

    /// Why requests are stuck, if some are.
    pub fn stuck(&self) -> Option<String> {
        self.stuck.lock().clone()
    }

    /// Why writes fail for lack of space, if some have lately.
    pub fn full(&self) -> Option<String> {
        self.full.lock().clone()
    }

    pub(super) fn set_stuck(&self, reason: Option<String>) {
        let volume = &self.volume;
        let former = std::mem::replace(&mut *self.stuck.lock(), reason.clone());
        match (former, reason) {
            (None, Some(reason)) => {
                tracing::warn!("requests of volume {volume} are stuck: {reason}");
            }
            (Some(_), None) => tracing::info!("no request of volume {volume} is stuck any more"),
            (None, None) | (Some(_), Some(_)) => {}
        }
    }

    pub(super) fn set_full(&self, reason: Option<String>) {
        let volume = &self.volume;
        let former = std::mem::replace(&mut *self.full.lock(), reason.clone());
        match (former, reason) {
            (None, Some(reason)) => {
                tracing::warn!("writes of volume {volume} fail for lack of space: {reason}");
            }
            (Some(_), None) => {
                tracing::info!("writes of volume {volume} do not fail for lack of space any more");
            }
            (None, None) | (Some(_), Some(_)) => {}
        }
    }

    /// Forgets what an attachment has reported that has ended.
    pub(super) fn clear(&self) {
        *self.stuck.lock() = None;
        *self.full.lock() = None;
    }
}
