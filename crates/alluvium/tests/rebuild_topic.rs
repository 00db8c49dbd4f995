//! `alluvium rebuild --topic`: one topic of an object store is copied into a running server, with
//! the built binary.

mod support;

use rustix::process::Signal;
use support::parts::{Parts, copy};
use support::produce::{consume, produce};
use support::{Server, contains, ok, ok_json, refused, text, until};

/// Kafka's code of a request that a policy does not allow.
const POLICY_VIOLATION: i16 = 44;

/// Returns start and end of each partition of a topic.
fn offsets(server: &Server, topic: &str) -> Vec<(i64, i64)> {
    let described = ok_json(&["topic", "describe", topic, "--bootstrap", &server.kafka, "--json"]);
    let partitions = described[0]["partitions"].as_array().unwrap().iter();
    let number = |value: &serde_json::Value| value.as_i64().unwrap();
    partitions.map(|it| (number(&it["log_start_offset"]), number(&it["high_watermark"]))).collect()
}

#[test]
fn a_topic_of_a_copied_object_store_comes_back_in_a_running_server() {
    let parts = Parts::new();
    let soon = ["--upload-interval", "100ms"];
    let server = Server::start_command(parts.command("data", "wal", "objects", &soon));
    let at = ["--bootstrap", &server.kafka];
    let create = ["topic", "create", "a", "--partitions", "2", "--config", "retention.ms=1000000"];
    ok(&[&create[..], &at].concat());
    ok(&[&["topic", "create", "other"][..], &at].concat());
    for value in [&b"one"[..], b"two", b"three"] {
        assert_eq!(produce(&server.kafka, "a", value).unwrap(), 0);
    }
    until("everything is uploaded", || {
        server.get("/metrics").1.contains("alluvium_log_cache_pinned_bytes 0\n")
            && server.get("/metrics").1.contains("alluvium_objects 1\n")
    });
    copy(&parts.path("objects"), &parts.path("copy"));
    ok(&[&["topic", "delete", "a"][..], &at].concat());

    let url = parts.url("copy");
    let source = ["rebuild", "--object-store", &url, "--topic", "a"];
    let missing = ["rebuild", "--object-store", &url, "--topic", "none"];
    let refusal = refused(1, &[&missing[..], &at].concat());
    contains(&refusal, &["has no topic none. It has a, other"]);
    let refusal = refused(1, &[&source[..], &["--as", "other"], &at].concat());
    contains(&refusal, &["topic other exists already", "--as"]);
    refused(2, &[&source[..], &["--from-objects"]].concat());
    for internal in ["__consumer_offsets", "__transaction_state"] {
        let refusal = refused(2, &[&source[..], &["--as", internal], &at].concat());
        contains(&refusal, &["is internal"]);
    }
    let topics = ok(&[&["topic", "list"][..], &at].concat());
    assert!(!topics.contains("__"), "{topics}");
    let refusal = refused(2, &[&source[..], &["--store", "one"]].concat());
    contains(&refusal, &["must be the ID of a store, a UUID"]);
    refused(2, &["rebuild", "--object-store", &url, "--dry-run", "--as", "b"]);

    let dry = ok_json(&[&source[..], &["--dry-run", "--json"], &at].concat());
    assert_eq!(dry["partitions"][0]["end"], 3);
    assert_eq!(dry["retention"]["retention.ms"], "1000000");
    contains(&refused(1, &[&["topic", "describe", "a"][..], &at].concat()), &["does not exist"]);

    let printed = ok(&[&source[..], &at].concat());
    contains(&printed, &["is topic a at", "3 records copied", "retention.ms=1000000"]);
    assert_eq!(consume(&server.kafka, "a"), ["one", "two", "three"]);
    assert_eq!(offsets(&server, "a"), [(0, 3), (0, 0)]);
    let described = ok(&[&["topic", "describe", "a"][..], &at].concat());
    contains(&described, &["retention.ms=-1", "alluvium.import=\n"]);
    assert_eq!(produce(&server.kafka, "a", b"four").unwrap(), 0);

    // Also under another name, and again after an interruption, here before the first record.
    let import = format!("alluvium.import={}", dry["source"].as_str().unwrap());
    let create = ["topic", "create", "b", "--partitions", "2", "--config", &import];
    ok(&[&create[..], &at].concat());
    assert_eq!(produce(&server.kafka, "b", b"too early").unwrap(), POLICY_VIOLATION);
    let again = ok_json(&[&source[..], &["--as", "b", "--json"], &at].concat());
    assert_eq!((&again["name"], &again["partitions"][0]["records"]), (&"b".into(), &3.into()));
    assert_eq!(consume(&server.kafka, "b"), ["one", "two", "three"]);
    let refusal = refused(1, &[&source[..], &["--as", "b"], &at].concat());
    contains(&refusal, &["exists already"]);
    let wrong = ["topic", "create", "c", "--partitions", "1", "--config", &import];
    ok(&[&wrong[..], &at].concat());
    let refusal = refused(1, &[&source[..], &["--as", "c"], &at].concat());
    contains(&refusal, &["1 partitions instead of 2"]);
    let other = ["topic", "create", "d", "--partitions", "2", "--config", "alluvium.import=other"];
    ok(&[&other[..], &at].concat());
    let refusal = refused(1, &[&source[..], &["--as", "d"], &at].concat());
    contains(&refusal, &["topic d exists already", "is being imported from other"]);

    // The server itself can be the source, and what was restored stays.
    server.stop(Signal::KILL);
    let server = Server::start_command(parts.command("data", "wal", "objects", &soon));
    assert_eq!(consume(&server.kafka, "a"), ["one", "two", "three", "four"]);
    assert_eq!(consume(&server.kafka, "b"), ["one", "two", "three"]);
    let refusal = refused(1, &[&source[..], &["--bootstrap", "127.0.0.1:1"]].concat());
    contains(&refusal, &["127.0.0.1:1", "cannot connect"]);
    assert!(parts.path("copy").exists(), "{}", text(&parts.path("copy")));
}
