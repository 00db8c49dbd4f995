//! `alluvium rebuild --topic`: copies one topic of a store into a running server.

use std::collections::BTreeMap;
use std::ops::Range;

use alluvium_broker::StoredTopic;
use alluvium_stream::{Options, Store};
use serde::Serialize;
use uuid::Uuid;

use super::RebuildArgs;
use crate::catalog;
use crate::import::target::{NotBegun, Target};
use crate::kafka::Access;
use crate::output::{self, Failure, Table};
use crate::progress::Meter;
use crate::units::counted;

/// Bytes that are read at a time.
const READ_BYTES: usize = 4 << 20;
/// Settings under which nothing is deleted. The records of an old copy may be older than the limits
/// of the topic.
const RETENTION: [&str; 2] = ["retention.bytes", "retention.ms"];

/// What was restored.
#[derive(Serialize)]
struct Report<'a> {
    store: Uuid,
    topic: &'a str,
    /// What the setting `alluvium.import` of the copy is until it is complete.
    source: String,
    /// The name of the copy.
    name: &'a str,
    /// Whether nothing was written.
    dry_run: bool,
    /// Settings that the copy does not have, with their values.
    retention: BTreeMap<String, String>,
    partitions: Vec<PartitionView>,
}

#[derive(Serialize)]
struct PartitionView {
    partition: usize,
    /// The first offset, and the one after the last.
    start: u64,
    end: u64,
    /// The end with the records of transactions that are open. What is between the two is not
    /// copied.
    uploaded_end: u64,
    /// Where this run has begun.
    from: u64,
    /// Records that were copied by this run.
    records: u64,
}

/// Restores the topic with this name.
///
/// # Errors
/// There is no such topic; the catalog or a record cannot be read; the server refuses.
pub(super) fn run(args: &RebuildArgs, topic: &str) -> Result<(), Failure> {
    let name = args.name.as_deref().unwrap_or(topic);
    catalog::blocking(restore(args, topic, name))
}

async fn restore(args: &RebuildArgs, topic: &str, name: &str) -> Result<(), Failure> {
    let url = args.catalog.url()?;
    let failed = |reason: String| Failure::Failed(format!("object store {url}: {reason}"));
    let objects = crate::objects::open_to_read(&url)?;
    let id = args.catalog.chosen(&*objects, catalog::NO_CATALOG).await?;
    let opened = Store::follow(objects, id, Options::default()).await;
    let store = opened.map_err(|error| failed(error.to_string()))?;
    let stored = StoredTopic::open(&store, topic).map_err(failed)?;
    let stored = stored.ok_or_else(|| {
        let names = StoredTopic::names(&store);
        let has = if names.is_empty() { "none".into() } else { output::listed(&names) };
        failed(format!("store {id} has no topic {topic}. It has {has}"))
    })?;
    let mut configs = stored.configs.clone();
    let retention: BTreeMap<_, _> =
        RETENTION.iter().filter_map(|key| configs.remove_entry(*key)).collect();
    configs.extend(RETENTION.map(|key| (key.to_owned(), "-1".to_owned())));
    let mut partitions: Vec<PartitionView> = (0..stored.partitions())
        .map(|partition| {
            let Range { start, end } = stored.offsets(partition);
            let uploaded_end = stored.end(partition);
            PartitionView { partition, start, end, uploaded_end, from: 0, records: 0 }
        })
        .collect();
    let source = format!("store {id}, topic {}", stored.id);
    let mut is_new = false;
    if !args.dry_run {
        let access = Access::of(args.command_config.as_deref()).map_err(Failure::Usage)?;
        let count = stored.partitions();
        let mut target = Target::connect(&args.bootstrap, &access)?;
        let begun = target.begin(name, &source, count, configs).map_err(|cause| match cause {
            NotBegun::Exists { reason, .. } => Failure::Failed(format!(
                "{reason}: choose another name with --as, or delete it first"
            )),
            other => other.into(),
        })?;
        is_new = begun.is_new;
        for (view, next) in partitions.iter_mut().zip(begun.next) {
            view.from = next;
        }
        let copied = copy(&stored, topic, &mut target, name, &mut partitions).await;
        copied.map_err(|reason| {
            Failure::Failed(format!(
                "{reason}. Topic {name} at {} is incomplete, and takes no records of producers: \
                 repeat the command to go on, when no other import into it runs, or delete the \
                 topic",
                args.bootstrap
            ))
        })?;
    }
    let closed = store.close().await;
    closed.map_err(|error| Failure::Failed(error.to_string()))?;
    let report =
        Report { store: id, topic, source, name, dry_run: args.dry_run, retention, partitions };
    match args.json {
        true => output::json(&report)?,
        false => report.print(args, is_new)?,
    }
    match report.partitions.iter().any(PartitionView::is_cut) && !args.dry_run {
        true => Err(Failure::Lost("records after open transactions are not copied".into())),
        false => Ok(()),
    }
}

impl PartitionView {
    /// Whether there are records after the ones that are copied.
    fn is_cut(&self) -> bool {
        self.end < self.uploaded_end
    }
}

/// Copies all partitions, and ends the import.
async fn copy(
    stored: &StoredTopic,
    topic: &str,
    target: &mut Target,
    name: &str,
    partitions: &mut [PartitionView],
) -> Result<(), String> {
    let mut appender = target.appender().map_err(|failure| failure.message().to_owned())?;
    let meter = Meter::new(format!("restoring topic {topic}"));
    let progress = meter.callback();
    let total = (0..stored.partitions()).map(|index| stored.size_bytes(index)).sum();
    let mut done = 0;
    for view in &mut *partitions {
        let index = view.partition;
        if view.from > view.end {
            let PartitionView { from, end, .. } = view;
            return Err(format!(
                "partition {index} ends at {from}, after {end}: its import was begun with other \
                 data"
            ));
        }
        let mut next = view.from;
        while next < view.end {
            let part = stored.read(index, next, view.end, READ_BYTES).await;
            let part = part.map_err(|error| format!("partition {index} of {topic}: {error}"))?;
            for batch in part.batches {
                done += batch.len() as u64;
                appender.append(name, index, batch)?;
            }
            view.records += part.records;
            next = part.next;
            progress(done.min(total), total);
        }
    }
    let starts: Vec<u64> = partitions.iter().map(|view| view.start).collect();
    appender.wait()?;
    target.finish(name, &starts, Vec::new())
}

impl Report<'_> {
    fn print(&self, args: &RebuildArgs, is_new: bool) -> Result<(), Failure> {
        let mut table = Table::of_numbers(&["PARTITION", "START", "END", "RECORDS COPIED"]);
        for view in &self.partitions {
            let copied = if self.dry_run { "-".into() } else { view.records.to_string() };
            table.row(vec![
                view.partition.to_string(),
                view.start.to_string(),
                view.end.to_string(),
                copied,
            ]);
        }
        output::line(format_args!("{table}\n"))?;
        for view in self.partitions.iter().filter(|view| view.is_cut()) {
            output::line(format_args!(
                "partition {}: a transaction is open at offset {}, so the offsets from there up to \
                 {} are not copied",
                view.partition, view.end, view.uploaded_end
            ))?;
        }
        let Self { topic, name, store, .. } = self;
        if self.dry_run {
            return output::line(format_args!(
                "store {store} has these committed offsets of topic {topic}; nothing was written"
            ));
        }
        let records: u64 = self.partitions.iter().map(|view| view.records).sum();
        let records = counted(records, "record", "records");
        let went_on = if is_new { "" } else { ", after an earlier run" };
        output::line(format_args!(
            "topic {topic} of store {store} is topic {name} at {}: {records} copied{went_on}",
            args.bootstrap
        ))?;
        let was: Vec<_> =
            self.retention.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let was = if was.is_empty() { "those of its server".into() } else { was.join(", ") };
        output::line(format_args!(
            "its retention.ms and retention.bytes are -1, so that nothing is deleted until you set \
             them; the original ones were: {was}"
        ))
    }
}
