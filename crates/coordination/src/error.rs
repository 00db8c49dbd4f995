//! Errors of a coordination service.

use serde::{Deserialize, Serialize};

use crate::{LeaseId, Revision};

/// What a coordination service answers instead of a result.
///
/// The protocol sends the variants by their number, so a new one goes to the end
/// (`docs/format/coordination-wire.md`).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Error {
    /// The history that a list or watch needs is gone. The caller lists the current revision.
    #[error("the history after revision {asked} is gone, the oldest kept is {oldest}; list again")]
    Compacted {
        /// The revision asked for.
        asked: Revision,
        /// The oldest revision that can be listed and watched from.
        oldest: Revision,
    },
    /// The revision asked for does not exist yet. Revisions only grow, so the service has lost
    /// some, as after a restored backup. The caller lists the current revision.
    #[error(
        "revision {asked} is above the current {current}: the coordination service was set back"
    )]
    Ahead {
        /// The revision asked for.
        asked: Revision,
        /// The current one.
        current: Revision,
    },
    /// The lease has ended or never existed. A transaction that names it has changed nothing.
    #[error("lease {0} has ended")]
    LeaseNotFound(LeaseId),
    /// The request is outside of a bound. It has changed nothing.
    #[error("{0}")]
    Invalid(String),
    /// The service is at a bound of its memory. The request has changed nothing. Deleting is still
    /// possible.
    #[error("the coordination service is full: {0}")]
    Full(String),
    /// The service cannot be reached. The request has changed nothing.
    #[error("the coordination service cannot be reached: {0}")]
    Unavailable(String),
    /// The service's storage has failed or is damaged, and must be opened again. Whether the change
    /// that met the failure was applied is unknown.
    #[error("the storage of the coordination service has failed: {0}")]
    Failed(String),
    /// The request was sent and there is no answer. Whether the change was applied, or still will
    /// be, is unknown. [`crate::retry::commit`] finds out for a guarded transaction.
    #[error("the outcome of a change at the coordination service is unknown: {0}")]
    Unknown(String),
    /// The service is not the one that this client used before, or was set back: numbers that it
    /// gives out may have been given out already. The client does not use it.
    #[error("the coordination service was replaced: {0}")]
    Replaced(String),
}

impl Error {
    /// Returns whether the change that was asked for may have been applied.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown(_) | Self::Failed(_))
    }
}
