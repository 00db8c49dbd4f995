//! The tests of franz-go's package `kgo`, run as its authors run them.

use std::time::Duration;

use super::Compat;
use super::peer::{SCRAM_USER, Setup};
use crate::report::{Case, GoTests};
use crate::setup::{self, Missing};

/// Far above what they take: the tests give up a minute earlier and then print which have not
/// finished.
const LIMIT: Duration = Duration::from_secs(11 * 60);

/// Number of records through each chain of groups. The authors send half a million, on more
/// processors (tests/compat/README.md).
const RECORDS: u32 = 20_000;
const RECORDS_SHORT: u32 = 2_000;

/// A setting of the authors' servers. The test of share groups releases records in several ways,
/// and waits forever for one that reaches Kafka's default of 5.
const DELIVERY_LIMIT: (&str, &str) = ("group.share.delivery.count.limit", "10");

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    let tests = setup::kgo_tests(compat.root)?;
    let setup = Setup { settings: &[DELIVERY_LIMIT], ..Setup::with_partitions(1) };
    compat.with_peer_as("franz-go", &setup, |peer, _| {
        let mut command = peer.client(&tests.program);
        command.current_dir(&tests.package).args([GoTests::VERBOSE, "-test.timeout", "10m"]);
        command.env("KGO_SEEDS", peer.address()).env("KGO_TEST_RF", "1");
        let records = if compat.short { RECORDS_SHORT } else { RECORDS };
        command.env("KGO_TEST_RECORDS", records.to_string()).env("KGO_LOG_LEVEL", "none");
        if let Some(address) = peer.sasl() {
            let (user, password) = SCRAM_USER;
            command.env("KGO_TEST_SCRAM_SEEDS", address.to_string());
            command.env("KGO_TEST_SCRAM", format!("{user}:{password}"));
        }
        GoTests::run(&mut command, LIMIT, "kgo")
    })
}
