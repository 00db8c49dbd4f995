//! Tests of a server that is opened on simulated disks.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use alluvium_coordination::keys::Keys;
use alluvium_coordination::{Coordination, Limits, ManualClock, MemoryCoordination};
use alluvium_device::sim::{SimDisk, SimOptions};
use alluvium_wal::Options;
use uuid::Uuid;

use super::{Apply, NetLimits, RECORD_BYTES, ServeOptions, Server};
use crate::registry::{AttachRequest, Registry};

const MIB: u64 = 1 << 20;

/// Registers servers with these numbers, and creates a volume with groups on all that are
/// registered.
pub(super) async fn create_groups(
    service: &dyn Coordination,
    keys: &Keys,
    servers: RangeInclusive<u128>,
    groups: u16,
    seed: u64,
) {
    let registry = Registry::new(service, keys);
    for n in servers {
        let disks = [n, n + 10].map(Uuid::from_u128);
        registry.register_server("127.0.0.1:1", disks, Uuid::nil()).await.unwrap();
    }
    let volume = registry.create_volume("v", 1 << 40).await.unwrap();
    let request = AttachRequest {
        owner: Uuid::nil(),
        server: None,
        address: String::new(),
        now_ms: 0,
        lease: service.grant(Duration::from_secs(5)).await.unwrap().id,
        take: false,
    };
    let epoch = registry.attach(volume, &request).await.unwrap().epoch;
    for region in 0..groups {
        registry.create_group(volume, region, epoch, seed).await.unwrap();
    }
}

/// Opens a server whose log has a ring of this length.
async fn open(ring_bytes: u64) -> Server {
    let clock = Arc::new(ManualClock::default());
    let service = MemoryCoordination::new(Limits::default(), clock);
    let disk = |capacity_bytes| {
        SimDisk::new(SimOptions { capacity_bytes, ..SimOptions::default() }).device()
    };
    let options = ServeOptions {
        cluster: "cluster".to_owned(),
        log: disk(ring_bytes + (64 << 10)),
        log_options: Options {
            window_bytes: 50 << 20,
            max_record_bytes: RECORD_BYTES,
            ..Options::default()
        },
        store: disk(40 * MIB),
        apply: Apply::Deferred,
        entry_cache_bytes: 8 << 20,
        overlay_bytes: 8 << 20,
        install_bytes_per_s: 0,
        limits: NetLimits::default(),
        advertised: "127.0.0.1:1".to_owned(),
    };
    let keys = Arc::new(Keys::new("cluster").unwrap());
    Server::open(options, Arc::new(service), keys, |_| Arc::new(|_, _| {})).await.unwrap()
}

/// What a client may send at once is what a leader takes: more would only be answered `Busy`.
#[tokio::test]
async fn a_window_is_not_larger_than_what_a_leader_takes() {
    for (ring_mib, window_mib) in [(104, 4), (160, 5), (256, 8), (320, 8)] {
        let server = open(ring_mib * MIB).await;
        let window_bytes = server.driver.local.window_bytes;
        assert_eq!(u64::from(window_bytes), window_mib * MIB, "ring of {ring_mib} MiB");
    }
}
