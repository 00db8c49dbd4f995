//! INFO: uses the names of Redis where clients and tools expect them, with this server's actual
//! values.

use std::fmt::Write as _;

use super::command::{Call, Outcome, Result};
use super::session::REDIS_VERSION;
use crate::admin::resident_bytes;

const SECONDS_OF_A_DAY: u64 = 24 * 60 * 60;
/// No limit: keys are evicted when the disk space is used up, and the index takes what they need.
pub(super) const MAXMEMORY: &str = "0";

/// Answers with the requested sections, all by default; an unknown one is empty.
pub(super) fn info(call: &mut Call<'_>) -> Result {
    if !call.may_block() {
        return Ok(Outcome::WouldBlock);
    }
    let wanted: Vec<_> = call.args[1..].iter().map(|arg| arg.to_ascii_lowercase()).collect();
    let is_wanted = |part: &str| {
        let all = [&b"all"[..], b"default", b"everything"];
        wanted.is_empty()
            || wanted.iter().any(|name| *name == part.as_bytes() || all.contains(&&name[..]))
    };
    let server = call.server;
    let stats = server.cache.stats();
    // An empty database is not listed. The number of keys with a time to live is not known.
    let keyspace =
        (stats.entries > 0).then(|| ("db0", format!("keys={},expires=0,avg_ttl=0", stats.entries)));
    let uptime = server.started.elapsed().as_secs();
    let buffer_bytes = server.buffers.used_bytes();
    let used_bytes = stats.memory_bytes + stats.index_bytes + stats.table_bytes + buffer_bytes;
    let (hits, misses) = server.counters.reads();
    let parts: [(&str, &[(&str, String)]); 8] = [
        (
            "Server",
            &[
                ("redis_version", REDIS_VERSION.into()),
                ("redis_mode", "standalone".into()),
                ("alluvium_version", env!("CARGO_PKG_VERSION").into()),
                ("arch_bits", usize::BITS.to_string()),
                ("process_id", std::process::id().to_string()),
                ("uptime_in_seconds", uptime.to_string()),
                ("uptime_in_days", (uptime / SECONDS_OF_A_DAY).to_string()),
            ],
        ),
        (
            "Clients",
            &[
                ("connected_clients", server.counters.connections().to_string()),
                ("maxclients", server.max_connections.to_string()),
                ("blocked_clients", "0".into()),
            ],
        ),
        (
            "Memory",
            &[
                ("used_memory", used_bytes.to_string()),
                ("used_memory_rss", resident_bytes().unwrap_or(0).to_string()),
                ("maxmemory", MAXMEMORY.into()),
                ("maxmemory_policy", server.eviction_policy().into()),
                ("journal_memory", stats.memory_bytes.to_string()),
                ("max_journal_memory", server.memory_bytes.to_string()),
                ("index_memory", stats.index_bytes.to_string()),
                ("buffer_memory", buffer_bytes.to_string()),
            ],
        ),
        (
            "Persistence",
            &[
                ("loading", "0".into()),
                ("rdb_bgsave_in_progress", "0".into()),
                ("aof_enabled", "0".into()),
                ("aof_rewrite_in_progress", "0".into()),
                ("journals", stats.journals.to_string()),
                ("journals_in_memory", stats.journals_in_memory.to_string()),
                ("disk_bytes", stats.disk_bytes.to_string()),
                ("max_disk_bytes", server.max_disk_bytes.to_string()),
                ("live_bytes", stats.live_bytes.to_string()),
                ("damaged_bytes", stats.damaged_bytes.to_string()),
                ("set_aside_files", stats.set_aside.files.to_string()),
                ("set_aside_bytes", stats.set_aside.bytes.to_string()),
                ("failed", i32::from(server.cache.failure().is_some()).to_string()),
                ("upkeep_failed", i32::from(stats.upkeep_failed).to_string()),
            ],
        ),
        (
            "Stats",
            &[
                ("total_connections_received", server.counters.connected().to_string()),
                ("total_commands_processed", server.counters.commands().to_string()),
                ("rejected_connections", server.counters.refused().to_string()),
                ("keyspace_hits", hits.to_string()),
                ("keyspace_misses", misses.to_string()),
                ("evicted_keys", stats.evicted.to_string()),
                ("kept_keys", stats.kept.to_string()),
                ("compacted_journals", stats.compacted.to_string()),
                ("stalls", stats.stalls.to_string()),
            ],
        ),
        (
            "Replication",
            &[
                ("role", "master".into()),
                ("connected_slaves", "0".into()),
                ("master_repl_offset", "0".into()),
            ],
        ),
        ("Cluster", &[("cluster_enabled", "0".into())]),
        ("Keyspace", keyspace.as_slice()),
    ];
    let mut text = String::new();
    for (part, fields) in parts.iter().filter(|(part, _)| is_wanted(&part.to_ascii_lowercase())) {
        let gap = if text.is_empty() { "" } else { "\r\n" };
        write!(text, "{gap}# {part}\r\n").expect("a string can be written to");
        for (name, value) in *fields {
            write!(text, "{name}:{value}\r\n").expect("a string can be written to");
        }
    }
    call.answers().verbatim(&text);
    Ok(Outcome::Answered)
}
