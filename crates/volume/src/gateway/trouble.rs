//! What operators learn of the requests of an attached volume.

use parking_lot::Mutex;

/// Why requests of a volume wait or fail at present. Each change is logged, once at its
/// beginning and once at its end.
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
        let texts =
            ["requests of volume {} are stuck", "no request of volume {} is stuck any more"];
        self.set(&self.stuck, reason, texts);
    }

    pub(super) fn set_full(&self, reason: Option<String>) {
        let texts = [
            "writes of volume {} fail for lack of space",
            "writes of volume {} do not fail for lack of space any more",
        ];
        self.set(&self.full, reason, texts);
    }

    /// Replaces a reason, and logs its beginning or end.
    fn set(&self, known: &Mutex<Option<String>>, reason: Option<String>, texts: [&str; 2]) {
        let [begun, over] = texts.map(|text| text.replace("{}", &self.volume));
        let former = std::mem::replace(&mut *known.lock(), reason.clone());
        match (former, reason) {
            (None, Some(reason)) => tracing::warn!("{begun}: {reason}"),
            (Some(_), None) => tracing::info!("{over}"),
            (None, None) | (Some(_), Some(_)) => {}
        }
    }

    /// Forgets what an attachment has reported that has ended.
    pub(super) fn clear(&self) {
        *self.stuck.lock() = None;
        *self.full.lock() = None;
    }
}
