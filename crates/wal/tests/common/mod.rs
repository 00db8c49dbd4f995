//! Common helpers of the tests: a simulated disk with a WAL on it.
#![allow(dead_code, unreachable_pub)] // each test file uses a part of it

use alluvium_device::SharedDevice;
use alluvium_device::sim::{SimDisk, SimOptions};
use alluvium_wal::{FormatOptions, OpenError, Options, Record, RecoveryReport, Wal};

pub const DATA_START: u64 = 64 * 1024;
pub const HEADER: u64 = 32;
pub const PAGE: u64 = 4096;

pub fn disk(ring_bytes: u64) -> SimDisk {
    SimDisk::new(SimOptions { capacity_bytes: DATA_START + ring_bytes, ..SimOptions::default() })
}

pub fn format(disk: &SimDisk) {
    Wal::format(&disk.device(), &FormatOptions { force: true, ..FormatOptions::default() })
        .unwrap();
}

pub fn options() -> Options {
    Options {
        window_bytes: 64 * 1024,
        block_bytes: 16 * 1024,
        max_record_bytes: 16 * 1024,
        ..Options::default()
    }
}

pub fn try_open(
    device: SharedDevice,
    options: &Options,
) -> Result<(Wal, RecoveryReport, Vec<Record>), OpenError> {
    let mut records = Vec::new();
    let (wal, report) = Wal::open(device, options, None, &mut |record| {
        records.push(record);
        Ok(())
    })?;
    Ok((wal, report, records))
}

pub fn open(disk: &SimDisk) -> (Wal, RecoveryReport, Vec<Record>) {
    try_open(disk.device(), &options()).unwrap()
}

pub fn scan(disk: &SimDisk) -> (RecoveryReport, Vec<Record>) {
    let mut records = Vec::new();
    let report = Wal::scan(&disk.device(), None, &mut |record| {
        records.push(record);
        Ok(())
    });
    (report.unwrap(), records)
}

/// First bytes of the payloads, which identify the records of a test.
pub fn names(records: &[Record]) -> Vec<u8> {
    records.iter().map(|record| record.payload[0]).collect()
}

/// Device position of a logical offset of the first lap.
pub fn device_at(offset: u64) -> u64 {
    DATA_START + offset
}

pub fn flip(disk: &SimDisk, at: u64, bit: u8) {
    let byte = disk.peek(at, 1)[0];
    disk.poke(at, &[byte ^ (1 << bit)]);
}
