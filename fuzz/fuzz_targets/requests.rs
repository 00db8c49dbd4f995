//! Requests to a real server on a simulated disk: whatever the bytes are, nothing panics, and
//! memory stays bounded.
//!
//! An input is what one client sends. Its first byte chooses the listener: one without access
//! control, or one where clients log in and ACLs apply. A sequence of requests follows: two bytes
//! for the API key and a version, two for the length of the body, then the body. The header is made
//! valid, and so is the checksum of record batches, since these checks would hide everything behind
//! them. The server keeps running from one input to the next, so that requests find topics, groups
//! and transactions that earlier ones have created, and is replaced after some thousand inputs.
#![no_main]

use std::cell::RefCell;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use alluvium_broker::{
    AuthorizationConfig, Broker, BrokerConfig, BrokerFold, JwksSource, ListenerConfig, Mechanism,
    OauthConfig,
};
use alluvium_device::sim::{SimDisk, SimOptions, Stepper};
use alluvium_stream::{Options, Store};
use alluvium_wal::{FormatOptions, Wal};
use bytes::{BufMut, Bytes, BytesMut};
use object_store::memory::InMemory;
use prometheus_client::registry::Registry;
use tokio::runtime::Runtime;

const WAL_BYTES: u64 = 16 << 20;
/// Inputs per server.
const INPUTS: u32 = 5_000;
/// Requests that wait (for a rebalance, for records) are cancelled after this.
const PATIENCE: Duration = Duration::from_millis(5);
const PRODUCE: i16 = 0;
/// From RFC 8037, A.2.
const KEYS: &str = r#"{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"k",
    "x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}"#;

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
        // Often enough that there are objects to read, and to compact.
        let upload_interval = Duration::from_millis(50);
        let options =
            Options { cache_bytes: WAL_BYTES, upload_interval, ..Options::for_wal(WAL_BYTES) };
        let device = disk.device();
        let (broker, stepper) = runtime.block_on(async {
            let (objects, fold) = (Arc::<InMemory>::default(), Arc::new(BrokerFold));
            let opened = Store::open(device, wal_options, objects, fold, options, None);
            let store = opened.await.expect("the store opens").store;
            let stepper = Stepper::start(disk.clone());
            let broker = Broker::start(config(), store, &mut Registry::default()).await;
            let broker = broker.expect("the server starts");
            broker.users().set_password("alice", "secret").await.expect("a user");
            (broker, stepper)
        });
        Self { runtime, broker, _stepper: stepper, inputs: 0 }
    }
}

fn config() -> BrokerConfig {
    let open = ListenerConfig::plaintext("127.0.0.1:0".parse().expect("an address"));
    let mechanisms = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"];
    let secured = ListenerConfig {
        name: "SASL".into(),
        sasl: mechanisms.map(|name| name.parse::<Mechanism>().expect("a mechanism")).into(),
        ..open.clone()
    };
    let mut config = BrokerConfig {
        listeners: vec![open, secured],
        max_partitions: 100,
        // Often enough to process what the inputs have left.
        retention_check_interval: Duration::from_millis(20),
        log_compaction_check_interval: Duration::from_millis(20),
        ..BrokerConfig::default()
    };
    config.groups.max_groups = 100;
    config.security.session_lifetime = Some(Duration::from_secs(2));
    config.security.oauth = Some(OauthConfig {
        keys: JwksSource::new(|| Box::pin(async { Ok(KEYS.into()) })),
        issuer: "issuer".into(),
        audience: "audience".into(),
        principal_claim: "sub".into(),
        scopes: Vec::new(),
        clock_skew: Duration::from_secs(30),
    });
    config.security.authorization = Some(AuthorizationConfig {
        super_users: vec!["User:ANONYMOUS".into()],
        ..AuthorizationConfig::default()
    });
    config
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

/// Corrects the checksums of everything that may be a record batch.
fn sign_batches(body: &mut [u8]) {
    const LENGTH: usize = 8;
    const MAGIC: usize = 16;
    const CRC: usize = 17;
    const SIGNED: usize = 21;
    const HEADER: usize = 61;
    let mut at = 0;
    while at + HEADER <= body.len() {
        let batch = &mut body[at..];
        let len = u32::from_be_bytes(batch[LENGTH..LENGTH + 4].try_into().expect("four bytes"));
        let end = (len as usize).saturating_add(LENGTH + 4);
        if batch[MAGIC] == 2 && (HEADER..=batch.len()).contains(&end) {
            let crc = crc32c::crc32c(&batch[SIGNED..end]);
            batch[CRC..SIGNED].copy_from_slice(&crc.to_be_bytes());
            at += end;
        } else {
            at += 1;
        }
    }
}

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

/// Ends the process on any panic: a panicking task does not do so by itself.
fn die_of_panics() {
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        default_hook(panic);
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
        let Some((listener, mut rest)) = data.split_first() else { return };
        // From its own address, since addresses that fail to log in are slowed down.
        let ip = Ipv4Addr::from(0x7f00_0000 + world.inputs);
        let client = world.broker.bare_client(usize::from(listener % 2), ip.into());
        while let Some(([api, version, high, low], more)) = rest.split_first_chunk() {
            let known = apis.iter().find(|(key, ..)| *key == i16::from(*api));
            let (key, min, max) = *known.unwrap_or(&apis[usize::from(*api) % apis.len()]);
            let version = match i16::from(*version) {
                served if (min..=max).contains(&served) => served,
                other => min + other % (max - min + 1),
            };
            let len = usize::from(u16::from_be_bytes([*high, *low])).min(more.len());
            let (body, behind) = more.split_at(len);
            rest = behind;
            let mut request = BytesMut::new();
            if !client.sends_bare_message() {
                request = header(key, version);
            }
            let body_at = request.len();
            request.put_slice(body);
            if key == PRODUCE {
                sign_batches(&mut request[body_at..]);
            }
            let request: Bytes = request.freeze();
            if !world.runtime.block_on(client.send(request, PATIENCE)) {
                break;
            }
        }
    });
});
