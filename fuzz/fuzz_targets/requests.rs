//! Requests against a real server on a simulated disk: whatever the bytes are, nothing panics, and memory stays bounded.
//!
//! An input is a row of requests: two bytes choose an API and a version, two are the length of the body, which follows. The header is made right, as
//! it would hide all else. The server goes on from one input to the next, so that requests find topics, groups and transactions
//! that others have made, and is a new one after some thousand of them.
#![no_main]

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use alluvium_broker::{Broker, BrokerConfig, BrokerFold, ListenerConfig};
use alluvium_device::sim::{SimDisk, SimOptions, Stepper};
use alluvium_stream::{MemoryCatalog, Options, Store};
use alluvium_wal::{FormatOptions, Wal};
use bytes::{BufMut, Bytes, BytesMut};
use object_store::memory::InMemory;
use prometheus_client::registry::Registry;
use tokio::runtime::Runtime;

const WAL_BYTES: u64 = 16 << 20;
/// Inputs that a server gets.
const INPUTS: u32 = 5_000;
/// Requests that wait for others (a rebalance, records) are given up.
const PATIENCE: Duration = Duration::from_millis(5);

struct World {
    runtime: Runtime,
    broker: Broker,
    _stepper: Stepper,
    inputs: u32,
}

impl World {
    fn new() -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let disk = SimDisk::new(SimOptions { capacity_bytes: WAL_BYTES, ..SimOptions::default() });
        Wal::format(&disk.device(), &FormatOptions::default()).expect("a new log");
        let wal_options = alluvium_wal::Options {
            window_bytes: 4 << 20,
            max_record_bytes: 1 << 20,
            ..alluvium_wal::Options::default()
        };
        let options = Options { cache_bytes: WAL_BYTES, ..Options::for_wal(WAL_BYTES) };
        let mut config = BrokerConfig {
            listeners: vec![ListenerConfig::plaintext("127.0.0.1:0".parse().expect("an address"))],
            max_partitions: 100,
            ..BrokerConfig::default()
        };
        config.groups.max_groups = 100;
        let device = disk.device();
        let (broker, stepper) = runtime.block_on(async {
            let (objects, catalog) = (Arc::<InMemory>::default(), Arc::<MemoryCatalog>::default());
            let fold = Arc::new(BrokerFold);
            let opened = Store::open(device, wal_options, objects, catalog, fold, options, None);
            let store = opened.await.expect("the store opens").store;
            let stepper = Stepper::start(disk.clone());
            let broker = Broker::start(config, store, &mut Registry::default()).await;
            (broker.expect("the server starts"), stepper)
        });
        Self { runtime, broker, _stepper: stepper, inputs: 0 }
    }
}

fn header(key: i16, version: i16) -> BytesMut {
    let mut header = BytesMut::new();
    header.put_i16(key);
    header.put_i16(version);
    header.put_i32(7);
    header.put_i16(4);
    header.put_slice(b"fuzz");
    if Broker::is_flexible(key, version) {
        header.put_u8(0);
    }
    header
}

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

/// A task that panics does not end the process by itself.
fn die_of_panics() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::abort();
    }));
}

libfuzzer_sys::fuzz_target!(init: die_of_panics(), |data: &[u8]| {
    WORLD.with_borrow_mut(|world| {
        if world.as_ref().is_some_and(|world| world.inputs >= INPUTS) {
            *world = None;
        }
        let world = world.get_or_insert_with(World::new);
        world.inputs += 1;
        let apis = Broker::apis();
        let mut rest = data;
        while let Some(([api, version, high, low], more)) = rest.split_first_chunk() {
            let (key, min, max) = apis[usize::from(*api) % apis.len()];
            let version = min + i16::from(*version) % (max - min + 1);
            let len = usize::from(u16::from_be_bytes([*high, *low])).min(more.len());
            let (body, behind) = more.split_at(len);
            rest = behind;
            let mut request = header(key, version);
            request.put_slice(body);
            let request: Bytes = request.freeze();
            world.runtime.block_on(world.broker.handle_bytes(request, PATIENCE));
        }
    });
});
