//! Real threads on a real file.

use std::collections::BTreeMap;
use std::sync::Mutex;

use alluvium_device::{Engine, OpenOptions, SharedDevice};
use alluvium_wal::{AppendError, FormatOptions, LogOffset, Options, Wal};

const WRITERS: u64 = 4;
const RECORDS: u64 = 600;

fn open_file(path: &std::path::Path, engine: Engine) -> SharedDevice {
    let options = OpenOptions { create_bytes: Some(4 << 20), engine, ..OpenOptions::default() };
    alluvium_device::open(path, &options).unwrap()
}

/// Writers that append and wait, a trimmer that follows them through several laps; at the end
/// exactly the untrimmed records are there.
#[test]
fn writers_and_a_trimmer_share_a_small_ring() {
    // The limits are too low for the load: quota is saved up, then short, bytes before writes.
    let limits = [(None, None), (Some(20_000), Some(16 << 20))];
    for (engine, (iops, bandwidth_bytes_per_second)) in [Engine::Threads, Engine::Auto]
        .into_iter()
        .flat_map(|engine| limits.map(|limit| (engine, limit)))
    {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("wal");
        let device = open_file(&path, engine);
        Wal::format(&device, &FormatOptions::default()).unwrap();
        let options = Options {
            window_bytes: 256 * 1024,
            block_bytes: 32 * 1024,
            max_record_bytes: 64 * 1024,
            iops,
            bandwidth_bytes_per_second,
            ..Options::default()
        };
        let (wal, _) = Wal::open(device, &options, None, &mut |_| Ok(())).unwrap();
        let written = Mutex::new(BTreeMap::new());
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..WRITERS)
                .map(|writer| {
                    let (wal, written) = (wal.clone(), &written);
                    scope.spawn(move || write(&wal, writer, written))
                })
                .collect();
            let trimmer = scope.spawn(|| {
                let mut trimmed = LogOffset(0);
                // The log is longer than its records, by the padding: this offset will be reached.
                let total: u64 = (0..WRITERS)
                    .flat_map(|writer| (0..RECORDS).map(move |index| 32 + len(writer, index)))
                    .sum();
                while trimmed.0 + (3 << 19) < total {
                    wal.wait_durable(LogOffset(trimmed.0 + (1 << 20))).wait().unwrap();
                    let to = written
                        .lock()
                        .unwrap()
                        .range(trimmed.0..=wal.durable().0)
                        .next_back()
                        .map(|(at, _)| *at);
                    trimmed = LogOffset(to.expect("a record that is not trimmed"));
                    // A record known here may not be durable yet; its start is.
                    wal.trim(..trimmed).wait().unwrap();
                }
            });
            for writer in writers {
                writer.join().unwrap();
            }
            trimmer.join().unwrap();
        });
        let stats = wal.stats();
        assert_eq!((stats.records, stats.window_used_bytes), (WRITERS * RECORDS, 0));
        assert!(stats.appended.0 > 3 * stats.ring_bytes, "{stats:?}");
        drop(wal); // as in a crash
        let device = open_file(&path, engine);
        let mut read = BTreeMap::new();
        let (wal, report) = Wal::open(device, &options, None, &mut |record| {
            read.insert(record.offset.0, record.payload.to_vec());
            Ok(())
        })
        .unwrap();
        let expected = written.into_inner().unwrap().split_off(&report.start.0);
        assert!(read == expected, "{} records read, {} expected", read.len(), expected.len());
        assert!(report.damage.is_empty());
        wal.close().unwrap();
    }
}

fn len(writer: u64, index: u64) -> u64 {
    1 + (writer * 7919 + index * 104_729) % 16_000
}

fn write(wal: &Wal, writer: u64, written: &Mutex<BTreeMap<u64, Vec<u8>>>) {
    let mut outstanding = std::collections::VecDeque::new();
    for index in 0..RECORDS {
        let payload = vec![(writer * 64 + index % 64) as u8; len(writer, index) as usize];
        let append = loop {
            // Created before the append that may be refused: no move is missed.
            let space = wal.wait_space();
            match wal.append(&[&payload]) {
                Ok(append) => break append,
                Err(AppendError::WindowFull { .. } | AppendError::OverCapacity { .. }) => {
                    space.wait();
                }
                Err(cause) => panic!("{cause}"),
            }
        };
        written.lock().unwrap().insert(append.offset().0, payload);
        outstanding.push_back(append);
        if outstanding.len() > 16 {
            let oldest = outstanding.pop_front().expect("there are some");
            let end = oldest.end();
            oldest.wait().unwrap();
            assert!(wal.durable() >= end);
        }
        if index % 5 == 0 {
            drop(outstanding.pop_front()); // not awaited; it is written all the same
        }
    }
    for append in outstanding {
        append.wait().unwrap();
    }
    wal.wait_durable(wal.appended()).wait().unwrap();
}
