//! Tests of the whole server: over TCP, on a real store.

mod admitting;
mod authorized;
mod compacted;
mod compatibility;
mod configs;
mod consumer_groups;
mod deleting;
mod describing;
mod every_api;
pub(crate) mod examples;
mod fetching;
mod harness;
mod hostile;
mod late;
mod log_compaction;
mod losses;
mod producing;
mod quotas;
mod remembered;
mod restarting;
mod retention;
mod secured;
mod seeds;
mod shares;
mod topic_ids;
mod transactions;
mod unstable;
