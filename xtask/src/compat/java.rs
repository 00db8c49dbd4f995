//! kafka-clients: the calls of Apache Kafka 4 that the everyday suite does not make.

use super::Compat;
use crate::report::Case;
use crate::setup::{self, Missing};
use crate::tap::tap;

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    let class_path = setup::java(compat.root)?;
    compat.with_peer("kafka-clients", 1, |peer, _| {
        let mut java = peer.client("java");
        java.args(["-Xmx256m", "-cp", &class_path, "alluvium.clients.Compat"]);
        tap("alluvium.clients.Compat", &mut java)
    })
}
