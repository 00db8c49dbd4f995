use std::path::Path;

use alluvium_broker::ListenerConfig;
use clap::{Args, CommandFactory, FromArgMatches};

use super::limits as l;
use super::*;
use crate::listeners::Listeners;

fn flags(arguments: &[&str]) -> ServeOptions {
    let command = ServeOptions::augment_args(clap::Command::new("serve"));
    let matches = command
        .no_binary_name(true)
        .try_get_matches_from(arguments)
        .expect("the arguments are valid");
    ServeOptions::from_arg_matches(&matches).expect("the matches are complete")
}

fn file(text: &str) -> Result<ServeOptions, String> {
    toml::from_str(text).map_err(|error| error.to_string())
}

fn refused(arguments: &[&str]) -> String {
    ServeConfig::resolve(flags(arguments)).unwrap_err().to_string()
}

#[test]
fn without_options_the_documented_defaults_apply() {
    let config = ServeConfig::resolve(ServeOptions::default()).unwrap();
    assert_eq!(config.data_dir, Path::new("./data"));
    assert_eq!(config.wal, Path::new("./data/wal"));
    assert_eq!(config.object_store, ObjectStoreUrl::Directory("./data/objects".into()));
    let plaintext = ListenerConfig::plaintext("127.0.0.1:9092".parse().unwrap());
    assert_eq!(config.security.listeners, [plaintext]);
    assert_eq!(config.admin_listen, Some("127.0.0.1:9644".parse().unwrap()));
    assert_eq!((config.wal_capacity, config.upload_size), (None, None));
    assert_eq!(config.log_cache, Size::gib(1));
    assert_eq!(config.upload_interval, Span(Duration::from_secs(60)));
    assert_eq!((config.durability, config.engine), (Durability::Auto, Engine::Auto));
    assert!(config.auto_create_topics && !config.wal_reserve && !config.force_format);
}

#[test]
fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
    let file = file("node-id = 7\nlog-cache = \"64MiB\"\nadmin-listen = \"none\"").unwrap();
    let config = ServeConfig::resolve(flags(&["--node-id", "9"]).or(file)).unwrap();
    assert_eq!(config.node_id, 9);
    assert_eq!(config.log_cache, Size::mib(64));
    assert_eq!(config.admin_listen, None);
    assert_eq!(config.max_connections, limits::CONNECTIONS);
}

#[test]
fn every_option_is_a_key_of_the_file() {
    let text = r#"
        data-dir = "/srv/alluvium"
        read-only = false
        store = "5e1a43a3-1a1f-4a39-8f5f-0c8e9a2f7b11"
        catalog-poll-interval = "2s"
        listen = "[::1]:19092"
        advertise = "broker.example.org:9092"
        allow-plaintext-network = false
        wal = "/dev/vdb"
        wal-capacity = "4GiB"
        wal-reserve = true
        object-store = "s3://bucket/alluvium"
        s3-endpoint = "http://s3.example.org:9000"
        s3-region = "eu-central-1"
        s3-path-style = true
        s3-allow-http = true
        s3-ca-file = "/etc/ssl/own.pem"
        durability = "device"
        engine = "threads"
        log-cache = 1073741824
        block-cache = "32MiB"
        cold-read-memory = "16MiB"
        disk-cache = "/var/cache/alluvium"
        disk-cache-size = "100GiB"
        disk-cache-memory = "256MiB"
        object-store-rate = "100MiB"
        upload-size = "128MiB"
        upload-interval = "5m"
        compaction-size = 0
        log-compaction-interval = "30s"
        admin-listen = "127.0.0.1:0"
        node-id = 3
        cluster-id = "test"
        auto-create-topics = false
        default-partitions = 6
        max-message-size = "2MiB"
        max-connections = 50
        max-connections-per-ip = 10
        max-connections-per-ip-overrides = "10.0.0.1:20"
        idle-timeout = "5m"
        queued-request-memory = "128MiB"
        rack = "eu-1a"
        transaction-max-timeout = "1h"
        transactional-id-expiration = "24h"
        offsets-retention = "48h"
        offset-metadata-max-size = "8KiB"
        group-initial-rebalance-delay = "3s"
        group-min-session-timeout = "1s"
        group-max-session-timeout = "1h"
        group-consumer-heartbeat-interval = "7s"
        group-consumer-min-heartbeat-interval = "6s"
        group-consumer-max-heartbeat-interval = "16s"
        group-consumer-session-timeout = "50s"
        group-consumer-min-session-timeout = "40s"
        group-consumer-max-session-timeout = "2m"
        group-share-heartbeat-interval = "7s"
        group-share-min-heartbeat-interval = "6s"
        group-share-max-heartbeat-interval = "16s"
        group-share-session-timeout = "50s"
        group-share-min-session-timeout = "40s"
        group-share-max-session-timeout = "2m"
        group-max-size = 10
        offsets-retention-check-interval = "5m"
        log = "debug"
        session-lifetime = "1h"
        oauth-jwks = "https://issuer.example.org/keys"
        oauth-issuer = "https://issuer.example.org"
        oauth-audience = "kafka"
        oauth-scope = "kafka read"
        oauth-principal-claim = "sub"
        oauth-clock-skew = "10s"
        authorization = true
        super-users = "User:admin; User:CN=ops,O=example"
        allow-everyone-if-no-acl-found = true
        [[listener]]
        name = "tls"
        listen = "0.0.0.0:9093"
        advertise = "broker.example.org:9093"
        protocol = "SSL"
        tls-certificate = "server.pem"
        tls-key = "server.key"
        tls-client-auth = "required"
        tls-client-ca = "clients.pem"
        tls-principal-rules = "RULE:^CN=(.*?),.*$/$1/L, DEFAULT"
        [[listener]]
        name = "sasl"
        listen = "127.0.0.1:9094"
        protocol = "SASL_PLAINTEXT"
        sasl-mechanisms = ["PLAIN", "SCRAM-SHA-256", "OAUTHBEARER"]
    "#;
    let config = ServeConfig::resolve(file(text).unwrap()).unwrap();
    assert_eq!(config.wal, Path::new("/dev/vdb"));
    assert!(config.wal_reserve);
    assert_eq!(config.durability, Durability::Device);
    assert_eq!(config.engine, Engine::Threads);
    assert_eq!(config.log_cache, Size::gib(1));
    assert_eq!(config.compaction_size, Size { bytes: 0 });
    let [plaintext, tls, sasl] = &config.security.listeners[..] else { panic!("three listeners") };
    assert_eq!(sasl.sasl.len(), 3);
    let authorization = config.security.authorization.as_ref().unwrap();
    assert_eq!(authorization.super_users, ["User:admin", "User:CN=ops,O=example"]);
    assert_eq!(plaintext.advertised_host.as_deref(), Some("broker.example.org"));
    assert_eq!(tls.protocol(), "SSL");

    // All options except the two that make no sense in a file.
    let options = ServeOptions::augment_args(clap::Command::new("serve"));
    for argument in options.get_arguments().filter_map(clap::Arg::get_long) {
        let begins = [format!("{argument} ="), format!("[[{argument}]]")];
        let in_file = text.lines().any(|line| begins.iter().any(|b| line.trim().starts_with(b)));
        let flag_only = ["config", "force-format"].contains(&argument);
        assert!(in_file != flag_only, "{argument}");
    }
}

#[test]
fn the_documented_file_has_every_key_and_states_the_defaults() {
    let document = include_str!("../../../../docs/configuration.md");
    let block = document.split("```toml\n").nth(1).expect("there is an example");
    let text = block.split("```").next().expect("it ends");
    let stated = ServeConfig::resolve(file(text).unwrap()).unwrap();
    assert_eq!(stated, ServeConfig::resolve(ServeOptions::default()).unwrap());

    // With its commented keys the file is valid too, and no key is missing.
    let uncommented = |line: &str| match line.strip_prefix('#') {
        Some(key) if !key.starts_with(' ') => format!("{key}\n"),
        _ => format!("{line}\n"),
    };
    let whole: String = text.lines().map(uncommented).collect();
    // Some of the keys require it.
    let whole = whole.replace("authorization = false", "authorization = true");
    ServeConfig::resolve(file(&whole).unwrap()).unwrap();
    let keys: toml::Table = whole.parse().unwrap();
    let options = ServeOptions::augment_args(clap::Command::new("serve"));
    for argument in options.get_arguments().filter_map(clap::Arg::get_long) {
        let flag_only = ["config", "force-format"].contains(&argument);
        assert!(keys.contains_key(argument) != flag_only, "{argument}");
    }
}

#[test]
fn a_read_only_server_needs_an_object_store_and_has_nothing_to_write() {
    let bucket = ["--read-only", "--object-store", "s3://bucket/prefix"];
    let config = ServeConfig::resolve(flags(&bucket)).unwrap();
    assert!(!config.auto_create_topics);
    let expected = ReadOnly { store: None, poll_interval: l::CATALOG_POLL };
    assert_eq!(config.read_only, Some(expected));
    assert!(config.to_string().starts_with("read-only=true store=default"), "{config}");
    let id = "5e1a43a3-1a1f-4a39-8f5f-0c8e9a2f7b11";
    let chosen = [&bucket[..], &["--store", id, "--catalog-poll-interval", "5s"]].concat();
    let read_only = ServeConfig::resolve(flags(&chosen)).unwrap().read_only.unwrap();
    let interval = Span(Duration::from_secs(5));
    assert_eq!((read_only.store, read_only.poll_interval), (id.parse().ok(), interval));

    for (arguments, option) in [
        (vec!["--data-dir", "/srv"], "data-dir"),
        (vec!["--wal", "/dev/vdb"], "wal"),
        (vec!["--wal-capacity", "1GiB"], "wal-capacity"),
        (vec!["--wal-reserve"], "wal-reserve"),
        (vec!["--force-format"], "force-format"),
        (vec!["--durability", "device"], "durability"),
        (vec!["--engine", "threads"], "engine"),
        (vec!["--log-cache", "1GiB"], "log-cache"),
        (vec!["--upload-size", "1GiB"], "upload-size"),
        (vec!["--upload-interval", "5m"], "upload-interval"),
        (vec!["--compaction-size", "0"], "compaction-size"),
        (vec!["--log-compaction-interval", "5m"], "log-compaction-interval"),
        (vec!["--auto-create-topics", "true"], "auto-create-topics"),
    ] {
        let message = refused(&[&bucket[..], &arguments[..]].concat());
        let expected = format!("{option} is not an option of a read-only server: ");
        assert!(message.starts_with(&expected), "{message}");
    }
    let without = refused(&["--read-only"]);
    assert!(without.contains("needs object-store"), "{without}");
    let memory = refused(&["--read-only", "--object-store", "memory://"]);
    assert!(memory.contains("memory://"), "{memory}");
}

#[test]
fn an_unknown_key_in_the_file_is_an_error_that_names_it() {
    for key in ["wal_capacity", "force-format", "config", "lissen"] {
        let error = file(&format!("{key} = \"1\"")).unwrap_err();
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn values_out_of_bounds_are_refused_by_name() {
    for (arguments, option) in [
        (["--wal-capacity", "1MiB"], "wal-capacity"),
        (["--log-cache", "1MiB"], "log-cache"),
        (["--block-cache", "1MiB"], "block-cache"),
        (["--cold-read-memory", "1MiB"], "cold-read-memory"),
        (["--disk-cache-size", "1MiB"], "disk-cache-size"),
        (["--disk-cache-size", "17TiB"], "disk-cache-size"),
        (["--disk-cache-memory", "1MiB"], "disk-cache-memory"),
        // A 16,384th of it is more than the default memory.
        (["--disk-cache-size", "3TiB"], "disk-cache-memory"),
        (["--object-store-rate", "1KiB"], "object-store-rate"),
        (["--upload-size", "600MiB"], "upload-size"),
        (["--upload-size", "1KiB"], "upload-size"),
        (["--upload-interval", "1ms"], "upload-interval"),
        (["--upload-interval", "25h"], "upload-interval"),
        (["--compaction-size", "1"], "compaction-size"),
        (["--compaction-size", "63KiB"], "compaction-size"),
        (["--compaction-size", "33GiB"], "compaction-size"),
        (["--catalog-poll-interval", "99ms"], "catalog-poll-interval"),
        (["--catalog-poll-interval", "61m"], "catalog-poll-interval"),
        (["--node-id", "2147483648"], "node-id"),
        (["--default-partitions", "0"], "default-partitions"),
        (["--max-message-size", "9MiB"], "max-message-size"),
        (["--log-compaction-interval", "25h"], "log-compaction-interval"),
        (["--max-connections", "0"], "max-connections"),
        (["--max-connections-per-ip", "0"], "max-connections-per-ip"),
        (["--idle-timeout", "1ms"], "idle-timeout"),
        (["--queued-request-memory", "1MiB"], "queued-request-memory"),
        (["--cluster-id", ""], "cluster-id"),
        (["--rack", ""], "rack"),
        (["--transaction-max-timeout", "25h"], "transaction-max-timeout"),
        (["--transactional-id-expiration", "1m"], "transactional-id-expiration"),
        (["--offsets-retention", "1s"], "offsets-retention"),
        (["--offset-metadata-max-size", "32KiB"], "offset-metadata-max-size"),
        (["--group-initial-rebalance-delay", "6m"], "group-initial-rebalance-delay"),
        (["--group-max-session-timeout", "25h"], "group-max-session-timeout"),
        // The minimum above the configured maximum, and above the default maximum.
        (["--group-max-session-timeout", "5s"], "group-min-session-timeout"),
        (["--group-min-session-timeout", "31m"], "group-min-session-timeout"),
        (["--group-consumer-heartbeat-interval", "1s"], "group-consumer-heartbeat-interval"),
        (
            ["--group-consumer-min-heartbeat-interval", "0ms"],
            "group-consumer-min-heartbeat-interval",
        ),
        (
            ["--group-consumer-max-heartbeat-interval", "4s"],
            "group-consumer-max-heartbeat-interval",
        ),
        (["--group-share-session-timeout", "2m"], "group-share-session-timeout"),
        (["--group-share-max-session-timeout", "25h"], "group-share-max-session-timeout"),
        (["--group-max-size", "0"], "group-max-size"),
        (["--offsets-retention-check-interval", "1ms"], "offsets-retention-check-interval"),
    ] {
        let message = refused(&arguments);
        assert!(message.contains(option) && message.contains(" to "), "{message}");
    }
    let message = refused(&["--wal-capacity", "100000001"]);
    assert!(message.contains("wal-capacity") && message.contains("4KiB"), "{message}");
}

#[test]
fn the_disk_cache_needs_its_own_directory() {
    for taken in ["/srv/alluvium", "/srv/alluvium/", "/srv/alluvium/objects"] {
        let message = refused(&["--data-dir", "/srv/alluvium", "--disk-cache", taken]);
        assert!(message.contains("disk-cache") && message.contains(taken), "{message}");
    }
    for free in ["/srv/alluvium/cache", "/srv"] {
        let options = flags(&["--data-dir", "/srv/alluvium", "--disk-cache", free]);
        let config = ServeConfig::resolve(options).unwrap();
        assert_eq!(config.disk_cache.as_deref(), Some(Path::new(free)));
    }
    assert_eq!(ServeConfig::resolve(ServeOptions::default()).unwrap().disk_cache, None);
}

#[test]
fn a_listener_beyond_loopback_needs_an_explicit_option() {
    for option in ["--listen", "--admin-listen"] {
        for address in ["0.0.0.0:9092", "192.0.2.1:9092", "[::]:9092"] {
            let message = refused(&[option, address, "--advertise", "a:1"]);
            assert!(message.contains("--allow-plaintext-network"), "{message}");
        }
    }
    let allowed = flags(&["--listen", "192.0.2.1:9092", "--allow-plaintext-network"]);
    assert!(ServeConfig::resolve(allowed).is_ok());
    let taken_back = flags(&["--listen", "192.0.2.1:9092", "--allow-plaintext-network=false"]);
    assert!(ServeConfig::resolve(taken_back).is_err());
}

#[test]
fn a_listener_with_mutual_tls_may_listen_beyond_loopback() {
    let tls = "name = 'x', listen = '0.0.0.0:1', advertise = 'a:1', protocol = 'SSL', \
               tls-certificate = 'c', tls-key = 'k'";
    let mutual = format!("{{{tls}, tls-client-auth = 'required', tls-client-ca = 'ca'}}");
    let config = ServeConfig::resolve(flags(&["--listener", &mutual])).unwrap();
    // The plaintext port is open only if it is configured, or if it is the only one.
    assert_eq!(config.security.listeners.len(), 1);
    let both = flags(&["--listener", &format!("[{mutual}]"), "--listen", "127.0.0.1:2"]);
    assert_eq!(ServeConfig::resolve(both).unwrap().security.listeners.len(), 2);
    let message = refused(&["--listener", &format!("{{{tls}}}")]);
    assert!(message.contains("--allow-plaintext-network"), "{message}");
    let optional = format!("{{{tls}, tls-client-auth = 'requested', tls-client-ca = 'ca'}}");
    let message = refused(&["--listener", &optional]);
    assert!(message.contains("--allow-plaintext-network"), "{message}");
    for (options, word) in [
        ("protocol = 'SSL'", "tls-certificate"),
        ("protocol = 'PLAINTEXT', tls-key = 'k'", "TLS"),
        (
            "protocol = 'SSL', tls-certificate = 'c', tls-key = 'k', tls-client-ca = 'ca'",
            "tls-client-auth",
        ),
        (
            "protocol = 'SSL', tls-certificate = 'c', tls-key = 'k', tls-client-auth = 'required'",
            "tls-client-ca",
        ),
        ("protocol = 'SASL_PLAINTEXT', tls-client-auth = 'required'", "TLS"),
        ("protocol = 'PLAINTEXT', tls-principal-rules = 'DEFAULT'", "TLS"),
        (
            "protocol = 'SSL', tls-certificate = 'c', tls-key = 'k', tls-principal-rules = \
             'DEFAULT'",
            "tls-client-auth",
        ),
    ] {
        let message =
            refused(&["--listener", &format!("{{name = 'x', listen = '127.0.0.1:1', {options}}}")]);
        assert!(message.contains(word), "{message}");
    }
    for wrong in
        ["{name = 'x'}", "{nme = 'x'}", "x", "{name = 'x', listen = 'y', protocol = 'SSL'}"]
    {
        assert!(wrong.parse::<Listeners>().is_err(), "{wrong}");
    }
}

#[test]
fn ineffective_or_incomplete_security_options_are_refused() {
    for (arguments, word) in [
        (vec!["--super-users", "admin"], "User:admin"),
        (vec!["--super-users", "User:a,User:b;c"], "User:admin"),
        (vec!["--super-users", "User:a"], "authorization = true"),
        (vec!["--allow-everyone-if-no-acl-found"], "authorization = true"),
        (vec!["--oauth-jwks", "keys.json"], "oauth-audience"),
        (
            vec!["--oauth-jwks", "http://a/k", "--oauth-issuer", "i", "--oauth-audience", "a"],
            "http://",
        ),
        (
            vec!["--oauth-jwks", "HTTPS://a/k", "--oauth-issuer", "i", "--oauth-audience", "a"],
            "lower case",
        ),
        (
            vec![
                "--listener",
                "{name='a', listen='127.0.0.1:1', protocol='SASL_PLAINTEXT', \
                 sasl-mechanisms=['OAUTHBEARER']}",
            ],
            "oauth-jwks",
        ),
        (
            vec![
                "--listener",
                "{name='a', listen='127.0.0.1:1', protocol='PLAINTEXT', sasl-mechanisms=['PLAIN']}",
            ],
            "SASL",
        ),
        (
            vec![
                "--listener",
                "{name='a', listen='127.0.0.1:1', protocol='SASL_PLAINTEXT', \
                 sasl-mechanisms=['GSSAPI']}",
            ],
            "GSSAPI",
        ),
        (
            vec!["--listener", "{name='a', listen='192.0.2.1:1', protocol='SASL_PLAINTEXT'}"],
            "--allow-plaintext-network",
        ),
        (vec!["--session-lifetime", "1ms"], "session-lifetime"),
    ] {
        let message = refused(&arguments);
        assert!(message.contains(word), "{message}");
    }
}

#[test]
fn a_wildcard_listener_needs_an_advertised_address() {
    let message = refused(&["--listen", "0.0.0.0:9092", "--allow-plaintext-network"]);
    assert!(message.contains("--advertise"), "{message}");
}

#[test]
fn the_help_names_each_default_and_its_bounds() {
    let mut command = crate::cli::Cli::command();
    let serve = command.find_subcommand_mut("serve").expect("there is `serve`");
    let help = |long: &str| {
        let argument = serve
            .get_arguments()
            .find(|argument| argument.get_long() == Some(long))
            .unwrap_or_else(|| panic!("there is --{long}"));
        argument.get_help().expect("it has a help text").to_string()
    };
    let named: [(&str, Vec<String>); 28] = [
        ("data-dir", vec![l::DATA_DIR.into()]),
        ("listen", vec![l::LISTEN.into()]),
        ("admin-listen", vec![l::ADMIN_LISTEN.into()]),
        ("log", vec![l::LOG.into()]),
        ("node-id", vec![l::NODE_ID.to_string(), i32::MAX.to_string()]),
        ("wal-capacity", texts(&[l::WAL_CAPACITY, l::WAL_CAPACITY_MIN, l::WAL_CAPACITY_MAX])),
        ("log-cache", texts(&[l::LOG_CACHE, l::LOG_CACHE_MIN, l::LOG_CACHE_MAX])),
        ("block-cache", texts(&[l::BLOCK_CACHE, l::BLOCK_CACHE_MIN, l::READ_MEMORY_MAX])),
        ("cold-read-memory", texts(&[l::COLD_READS, l::COLD_READS_MIN, l::READ_MEMORY_MAX])),
        ("disk-cache-size", texts(&[l::DISK_CACHE, l::DISK_CACHE_MIN, l::DISK_CACHE_MAX])),
        (
            "disk-cache-memory",
            texts(&[l::DISK_CACHE_MEMORY, l::DISK_CACHE_MEMORY_MIN, l::READ_MEMORY_MAX]),
        ),
        ("upload-size", texts(&[l::UPLOAD_SIZE, l::UPLOAD_SIZE_MIN])),
        (
            "upload-interval",
            texts(&[l::UPLOAD_INTERVAL, l::UPLOAD_INTERVAL_MIN, l::UPLOAD_INTERVAL_MAX]),
        ),
        (
            "compaction-size",
            texts(&[l::COMPACTION_SIZE, l::COMPACTION_SIZE_MIN, l::COMPACTION_SIZE_MAX]),
        ),
        (
            "log-compaction-interval",
            texts(&[l::CLEANER_INTERVAL, l::CLEANER_INTERVAL_MIN, l::CLEANER_INTERVAL_MAX]),
        ),
        (
            "catalog-poll-interval",
            texts(&[l::CATALOG_POLL, l::CATALOG_POLL_MIN, l::CATALOG_POLL_MAX]),
        ),
        ("default-partitions", texts(&[l::PARTITIONS])),
        ("max-message-size", texts(&[l::MESSAGE, l::MESSAGE_MIN, l::MESSAGE_MAX])),
        ("max-connections", texts(&[l::CONNECTIONS, l::CONNECTIONS_MAX])),
        ("idle-timeout", texts(&[l::IDLE, l::IDLE_MIN, l::IDLE_MAX])),
        (
            "queued-request-memory",
            texts(&[l::QUEUED_REQUESTS, l::QUEUED_REQUESTS_MIN, l::QUEUED_REQUESTS_MAX]),
        ),
        (
            "transaction-max-timeout",
            texts(&[l::TRANSACTION, l::TRANSACTION_MIN, l::TRANSACTION_MAX]),
        ),
        (
            "transactional-id-expiration",
            texts(&[l::TRANSACTIONAL_ID, l::TRANSACTIONAL_ID_MIN, l::TRANSACTIONAL_ID_MAX]),
        ),
        ("offsets-retention", texts(&[l::OFFSETS, l::OFFSETS_MIN, l::OFFSETS_MAX])),
        ("offset-metadata-max-size", texts(&[l::OFFSET_METADATA, l::OFFSET_METADATA_MAX])),
        ("group-initial-rebalance-delay", texts(&[l::REBALANCE_DELAY, l::REBALANCE_DELAY_MAX])),
        ("group-min-session-timeout", texts(&[l::SESSION_LEAST, l::SESSION_MIN])),
        (
            "group-max-session-timeout",
            texts(&[l::SESSION_GREATEST, l::SESSION_MIN, l::SESSION_MAX]),
        ),
    ];
    for (option, values) in named {
        let help = help(option);
        let default = format!("Default {}", values[0]);
        assert!(help.contains(&default), "--{option} does not say `{default}`: {help}");
        for bound in &values[1..] {
            assert!(help.contains(bound), "--{option} does not name {bound}: {help}");
        }
    }
    for argument in serve.get_arguments() {
        let Some(long) = argument.get_long().filter(|long| *long != "force-format") else {
            continue;
        };
        let help = argument.get_help().expect("it has a help text").to_string();
        assert!(help.contains("Default"), "--{long} states no default: {help}");
    }
}

fn texts<T: fmt::Display>(values: &[T]) -> Vec<String> {
    values.iter().map(ToString::to_string).collect()
}
