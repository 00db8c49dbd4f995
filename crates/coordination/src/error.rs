//! Errors of a coordination service.

use crate::{LeaseId, Revision};

/// What a coordination service answers instead of a result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
    #[error("revision {asked} is above the current {current}: the metadata was set back")]
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
    #[error("the metadata is full: {0}")]
    Full(String),
    /// There is no answer. Whether a change was applied is unknown.
    #[error("the metadata cannot be reached, the outcome of a change is unknown: {0}")]
    Unavailable(String),
    /// The service's storage has failed or is damaged, and must be opened again. Whether the change
    /// that met the failure was applied is unknown.
    #[error("the metadata's storage has failed: {0}")]
    Failed(String),
}
