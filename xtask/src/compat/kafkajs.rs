//! KafkaJS, through our own program: its package on npm has no tests.

use super::Compat;
use crate::report::Case;
use crate::setup::{self, Missing};
use crate::tap::tap;

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    let program = setup::kafkajs(compat.root)?;
    compat.with_peer("kafkajs", 1, |peer, _| tap("suite.js", peer.client("node").arg(&program)))
}
