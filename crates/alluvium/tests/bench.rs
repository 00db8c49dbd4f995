//! `alluvium bench`: the built binary against a server.

mod support;

use std::fs;

use support::{Server, contains, ok, ok_json, refused};

const MIB: u64 = 1 << 20;

/// Starts a server with the topic `load`.
fn server_with_topic(partitions: &str) -> (tempfile::TempDir, Server) {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--wal-capacity", "64MiB"]);
    let words = ["topic", "create", "load", "--partitions", partitions, "--bootstrap"];
    ok(&[&words[..], &[server.kafka.as_str()]].concat());
    (data, server)
}

/// Reads the samples that were written: due time, latency, bytes.
fn samples(path: &std::path::Path) -> Vec<[u64; 3]> {
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("due_unix_us,latency_us,bytes"));
    let number = |number: &str| number.parse::<u64>().unwrap();
    let sample = |line: &str| {
        let numbers: Vec<u64> = line.split(',').map(number).collect();
        numbers.try_into().unwrap()
    };
    lines.map(sample).collect()
}

#[test]
fn produced_records_are_consumed_and_counted() {
    let (data, server) = server_with_topic("3");
    let at = ["--bootstrap", server.kafka.as_str()];
    let bench = |arguments: &[&str]| ok_json(&[&["bench"], arguments, &at, &["--json"]].concat());

    let produced = data.path().join("produced.csv");
    let path = produced.to_str().unwrap();
    let all = ["--total", "3MiB", "--batch-size", "16KiB", "--record-size", "1000B"];
    let done = bench(&[&["produce", "load", "--samples", path], &all[..]].concat());
    // Batches of 16 records of 1,000 bytes, all complete.
    let batches = (3 * MIB).div_ceil(16_000);
    assert_eq!((&done["requests"], &done["bytes"]), (&batches.into(), &(batches * 16_000).into()));
    let samples = samples(&produced);
    assert_eq!(samples.len() as u64, batches);
    assert!(
        samples.iter().all(|[due, latency, bytes]| *due > 0 && *latency > 0 && *bytes == 16_000)
    );

    let done = bench(&["consume", "load"]);
    let bytes = done["bytes"].as_u64().unwrap();
    assert!(
        bytes > batches * 16_000 && bytes < batches * 18_000,
        "including batch headers: {bytes}"
    );
    let one = bench(&["consume", "load", "--connections", "1", "--fetch-size", "1B"]);
    assert_eq!(one["bytes"], bytes, "one reader of all partitions, a batch at a time");

    // The topic is read repeatedly until the time is over.
    let again = bench(&["consume", "load", "--duration", "2s"]);
    assert!(again["bytes"].as_u64().unwrap() > bytes);

    let described = ok_json(&[&["topic", "describe", "load", "--json"], &at[..]].concat());
    let ends = described[0]["partitions"].as_array().unwrap().iter();
    let records: u64 = ends.map(|partition| partition["high_watermark"].as_u64().unwrap()).sum();
    assert_eq!(records, batches * 16);
}

#[test]
fn a_rate_offers_exactly_its_batches() {
    let (_data, server) = server_with_topic("2");
    let at = ["--bootstrap", server.kafka.as_str()];
    let pace = ["--rate", "1MiB", "--duration", "1s", "--batch-size", "64KiB"];
    let done = ok_json(&[&["bench", "produce", "load", "--json"], &pace[..], &at].concat());
    assert_eq!(done["bytes"], MIB, "regardless of their latency");
    let table = ok(&[&["bench", "produce", "load"], &pace[..], &at].concat());
    contains(&table, &["TOPIC", "RATE", "P99.9", "load", "1.0 MiB", "16"]);
}

#[test]
fn a_run_ends_at_its_end_although_the_next_batch_is_due_later() {
    let (_data, server) = server_with_topic("2");
    let at = ["--bootstrap", server.kafka.as_str()];
    // The second batch is due after a day.
    let pace = ["--rate", "1B", "--duration", "1s", "--batch-size", "64KiB"];
    let done = ok_json(&[&["bench", "produce", "load", "--json"], &pace[..], &at].concat());
    assert_eq!(done["requests"], 1);
    // The first response is enough for a day.
    let pace = ["--rate", "1B", "--duration", "1s"];
    let done = ok_json(&[&["bench", "consume", "load", "--json"], &pace[..], &at].concat());
    assert_eq!(done["requests"], 1);
}

#[test]
fn impossible_measurements_are_refused() {
    let (_data, server) = server_with_topic("1");
    let at = ["--bootstrap", server.kafka.as_str()];
    let refused = |code, arguments: &[&str]| refused(code, &[&["bench"], arguments, &at].concat());
    contains(&refused(1, &["produce", "other"]), &["topic other", "does not exist"]);
    contains(&refused(1, &["consume", "other"]), &["topic other", "does not exist"]);
    contains(&refused(2, &["produce", "load", "--rate", "0"]), &["--rate is 0"]);
    contains(&refused(2, &["produce", "load", "--record-size", "0"]), &["--batch-size"]);
    contains(&refused(2, &["produce", "load", "--batch-size", "1B"]), &["hold a record"]);
    contains(&refused(2, &["consume", "load", "--fetch-size", "0"]), &["--fetch-size"]);
    contains(&refused(2, &["consume", "load", "--follow"]), &["--duration"]);
    let nowhere = ["produce", "load", "--total", "1TiB", "--samples", "/nonexistent/samples"];
    contains(&refused(1, &nowhere), &["/nonexistent/samples"]);
    let large = refused(1, &["produce", "load", "--batch-size", "8MiB", "--total", "8MiB"]);
    contains(&large, &["topic load", "partition 0", "MessageTooLarge"]);
    // An empty topic counts as read.
    let empty = ok_json(&[&["bench", "consume", "load", "--json"], &at[..]].concat());
    assert_eq!(empty["bytes"], 0);
}
