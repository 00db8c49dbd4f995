//! The conformance suite on a modelled disk, and tests of the wrapper. Due times are tested in
//! `schedule`.

use std::sync::mpsc;

use super::*;
use crate::conformance::{self, Subject};
use crate::sim::{Faults, SimDisk, SimOptions};
use crate::{Engine, open};

const CAPACITY: u64 = 4 << 20;

/// Fast enough for a suite, slow enough that requests wait for it.
const BRISK: DiskModel = DiskModel {
    iops: 100_000,
    bandwidth_bytes_per_second: 4 << 30,
    latency: Duration::from_micros(100),
    piece_bytes_per_second: 4 << 30,
    burst: Duration::ZERO,
};

fn modelled(inner: SharedDevice) -> SharedDevice {
    Arc::new(ModelledDisk::over(inner, &BRISK).unwrap())
}

/// A disk with the content of `device`, whose writes and flushes all fail.
fn broken(device: &SharedDevice) -> SharedDevice {
    let content = device.read(DeviceOffset(0), CAPACITY as usize).unwrap();
    let faults = Faults { write_error: 1.0, flush_error: 1.0, ..Faults::default() };
    modelled(SimDisk::from_image(&content, SimOptions { faults, ..SimOptions::default() }).device())
}

#[test]
fn a_modelled_file_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("wal");
    let options = OpenOptions {
        engine: Engine::Threads,
        create_bytes: Some(CAPACITY),
        ..OpenOptions::default()
    };
    conformance::run(&Subject {
        open: &|| Ok(modelled(open(&path, &options)?)),
        broken: &|| broken(&open(&path, &options).unwrap()),
        read_only: None,
        drive: &|| {},
    });
}

#[test]
fn modelled_memory_conforms() {
    let memory: SharedDevice = Arc::new(Memory::new(CAPACITY).unwrap());
    conformance::run(&Subject {
        open: &|| Ok(modelled(memory.clone())),
        broken: &|| broken(&memory),
        read_only: None,
        drive: &|| {},
    });
}

#[test]
fn usage_counts_pieces_and_no_flush() {
    let disk = Arc::new(ModelledDisk::in_memory(CAPACITY, &BRISK).unwrap());
    let device: SharedDevice = disk.clone();
    device.write_durable(DeviceOffset(0), device.alloc(300 * 1024).freeze()).unwrap();
    drop(device.read(DeviceOffset(0), 4096).unwrap());
    device.flush().unwrap();
    let Usage { pieces, bytes, in_flight } = disk.usage();
    assert_eq!((pieces, bytes), (3, 304 * 1024));
    assert!(in_flight >= 3 * BRISK.latency);
}

/// The order of completion is that of the model, not of submission: a short request overtakes a
/// long one.
#[test]
fn the_earliest_is_due_first() {
    let disk = ModelledDisk::in_memory(CAPACITY, &BRISK).unwrap();
    disk.shared.state.lock().outstanding = 4;
    let mut heap = BinaryHeap::new();
    for at in [(7, 0), (3, 1), (9, 2), (3, 3)] {
        let shared = disk.shared.clone();
        let ticket = Ticket { shared, operation: "read", at: 0, len_bytes: 0 };
        heap.push(Reverse(Due { at, ticket, result: Ok(None), done: Box::new(|_| ()) }));
    }
    let order: Vec<_> = std::iter::from_fn(|| heap.pop()).map(|Reverse(due)| due.at).collect();
    assert_eq!(order, [(3, 1), (3, 3), (7, 0), (9, 2)]);
}

#[test]
fn a_panicking_completion_latches_and_the_thread_lives_on() {
    let device: SharedDevice = Arc::new(ModelledDisk::in_memory(CAPACITY, &BRISK).unwrap());
    let write = || {
        let buf = device.alloc(4096).freeze();
        Request::Write { at: DeviceOffset(4096), buf, durable: true }
    };
    device.submit(write(), Box::new(|_| panic!("on purpose")));
    // Submitted before the panic takes effect, or after it: in neither case is it acknowledged.
    let (tx, rx) = mpsc::channel();
    device.submit(write(), Box::new(move |result| tx.send(result).unwrap()));
    let error = rx.recv().unwrap().unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    assert_eq!((error.operation, error.at, error.len_bytes), ("write", 4096, 4096));
    assert!(Arc::ptr_eq(&device.flush().unwrap_err().source, &error.source));
    assert!(device.failure().is_some());
    device.read(DeviceOffset(0), PAGE_BYTES).unwrap();
}
