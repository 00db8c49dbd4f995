//! Exclusive claims on targets.

use std::os::fd::OwnedFd;

use rustix::fs::FlockOperation;

/// An exclusive claim on a target: as long as it exists, no other opener can write to the target.
///
/// It is a descriptor of its own that carries no requests: io_uring holds the file of a request for
/// a moment after the request has completed, and with it any lock on that open file. This
/// descriptor's lock is released exactly when it is dropped.
#[derive(Debug)]
pub(crate) struct Claim(pub(crate) OwnedFd);

impl Claim {
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.0
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Closing alone would leave a file locked while a child process that was just forked still
        // has its copy of the descriptor. On a block device there is no lock, and unlocking is
        // harmless.
        if let Err(errno) = rustix::fs::flock(&self.0, FlockOperation::Unlock) {
            tracing::warn!("unlocking a target failed: {errno}");
        }
    }
}
