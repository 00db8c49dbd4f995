//! What a rebuild has found, for people and as JSON.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, UNIX_EPOCH};

use alluvium_broker::{Restored, producer_of_marker};
use alluvium_stream::{FromObjects, GapCause, LogLoss, LostEnd, ObjectError, Rebuild, StreamId};
use serde::Serialize;
use uuid::Uuid;

use crate::catalog;
use crate::output::{self, Failure, Table};
use crate::units::counted;

/// What is lost, and whether the store was rebuilt.
#[derive(Serialize)]
pub(super) struct Report {
    store: Uuid,
    /// The log that the store is bound to; nil if the catalog does not show it.
    lost_wal: Uuid,
    /// The new one; `None` if nothing is changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    wal: Option<Uuid>,
    /// Nothing is lost.
    pub(super) clean: bool,
    /// When the last change of the catalog was written, in milliseconds since the Unix epoch. What
    /// was changed after it may be lost, and is not known; without the log also what was appended.
    written_at_ms: u64,
    streams: usize,
    objects: usize,
    /// Ends that are lost with the log. Empty if the log is there.
    lost: Vec<LostView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from_objects: Option<FromObjectsView>,
}

/// The end of a partition, or of the server's own state, that is lost.
#[derive(Serialize)]
struct LostView {
    stream: u64,
    name: String,
    /// The first offset that is lost.
    from: u64,
    /// The offsets from `from` up to it were durable and are lost. Later ones may be lost, too.
    known_end: u64,
    /// The offset of the next record.
    resume: u64,
}

/// What a rebuild from objects has found.
#[derive(Serialize)]
struct FromObjectsView {
    /// Parts of the catalog that are damaged or missing.
    catalog: Vec<DamageView>,
    /// The catalog is older than the log, or there is none, or the log is lost.
    catalog_may_be_old: bool,
    /// Objects with records that do not exist.
    missing_objects: Vec<String>,
    /// Objects with damage.
    damaged_objects: Vec<DamageView>,
    /// Records that were uploaded, and are in no object.
    lost_records: Vec<RangeView>,
    /// Transactions that are aborted, because their end may be among the lost records.
    aborted_transactions: Vec<TransactionView>,
    /// Damage of the log.
    damaged_log: Vec<String>,
    /// Records that the log has lost.
    lost_log_records: Vec<RangeView>,
    /// Offsets that partitions skip, of which no record is known to be lost.
    skipped: Vec<RangeView>,
    /// Lists of changes of the catalog that were in the log and are lost, at least.
    lost_lists: u64,
    /// Topics whose entry in the catalog was made from objects.
    restored_topics: Vec<TopicView>,
    /// Streams that are kept without a name, with what they were.
    unnamed: Vec<StreamView>,
}

#[derive(Serialize)]
struct DamageView {
    /// The name of the first object.
    name: String,
    /// The number of neighbours for which the same holds.
    objects: u64,
    reason: String,
}

#[derive(Serialize)]
struct RangeView {
    stream: u64,
    name: String,
    from: u64,
    /// The offset after the last one.
    to: u64,
}

#[derive(Serialize)]
struct TransactionView {
    stream: u64,
    name: String,
    producer_id: i64,
    /// Its first offset.
    from: u64,
    /// The first lost offset.
    to: u64,
}

#[derive(Serialize)]
struct TopicView {
    name: String,
    partitions: usize,
    /// Its settings are lost: it keeps all records until its retention is set.
    settings_lost: bool,
}

#[derive(Serialize)]
struct StreamView {
    stream: u64,
    name: String,
}

/// Formats milliseconds since the Unix epoch as in RFC 3339, in UTC.
fn time(ms: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(ms)).to_string()
}

type Names = HashMap<StreamId, String>;

fn name(names: &Names, stream: StreamId) -> String {
    names.get(&stream).cloned().unwrap_or_else(|| format!("stream {stream}"))
}

impl Report {
    /// Returns the report of a rebuild; `restored` is what labels have shown of the catalog.
    pub(super) fn of(rebuild: &Rebuild, restored: &Restored) -> Self {
        let state = rebuild.state();
        let names = catalog::stream_names(state);
        let view = |lost: &LostEnd| LostView {
            stream: lost.stream.0,
            name: name(&names, lost.stream),
            from: lost.from.0,
            known_end: lost.known_end.0,
            resume: lost.resume.0,
        };
        let from_objects =
            rebuild.found().map(|found| FromObjectsView::of(rebuild, found, restored, &names));
        Self {
            store: state.header.store,
            lost_wal: state.header.wal,
            wal: None,
            clean: rebuild.is_clean(),
            written_at_ms: state.header.written_at_ms,
            streams: state.streams.len(),
            objects: state.objects.len(),
            lost: rebuild.lost_ends().iter().map(view).collect(),
            from_objects,
        }
    }

    pub(super) fn store(&self) -> Uuid {
        self.store
    }

    /// The log that the catalog names.
    pub(super) fn lost_wal(&self) -> Uuid {
        self.lost_wal
    }

    pub(super) fn set_wal(&mut self, wal: Uuid) {
        self.wal = Some(wal);
    }

    pub(super) fn show(&self, json: bool) -> Result<(), Failure> {
        if json { output::json(self) } else { self.print() }
    }

    fn print(&self) -> Result<(), Failure> {
        let written_at = time(self.written_at_ms);
        output::line(format_args!(
            "store {}: {} and {} are in the object store, as of {written_at}",
            self.store,
            counted(self.streams as u64, "stream", "streams"),
            counted(self.objects as u64, "object", "objects"),
        ))?;
        if self.clean {
            return output::line(format_args!(
                "the last server has stopped after everything was uploaded: nothing is lost, if \
                 this is not an older copy of the object store"
            ));
        }
        if let Some(found) = &self.from_objects {
            if self.streams == 0 && self.objects == 0 {
                output::line(
                    "this object store has nothing of the store: everything that was uploaded is \
                     lost. Check the URL, and that the directory is mounted",
                )?;
            }
            found.print(&written_at)?;
        }
        if self.lost.is_empty() {
            return Ok(());
        }
        let mut table = Table::of_text(&["LOST FROM OFFSET", "AT LEAST", "CONTINUES AT", "OF"]);
        let mut known = 0u64;
        for lost in &self.lost {
            let records = lost.known_end - lost.from;
            known += u64::from(records > 0);
            table.row(vec![
                lost.from.to_string(),
                match records {
                    0 => "not known".into(),
                    records => counted(records, "offset", "offsets"),
                },
                lost.resume.to_string(),
                lost.name.clone(),
            ]);
        }
        output::line(format_args!("\n{table}\n"))?;
        output::line(format_args!(
            "{} with records that are known to be lost. Records that were appended later than \
             {written_at} are lost in all of {}, and so are changes of topics, \
             settings and users since then",
            counted(known, "stream", "streams"),
            counted(self.lost.len() as u64, "stream", "streams"),
        ))
    }
}

/// Returns the damage of a log, as texts.
fn damage_of_log(log: &LogLoss) -> Vec<String> {
    let missing_end = log.missing_end.iter().map(|missing| {
        format!("it ends at {}, and was once durable up to {}", missing.start, missing.end)
    });
    log.damage.iter().map(ToString::to_string).chain(missing_end).collect()
}

impl FromObjectsView {
    fn of(rebuild: &Rebuild, found: &FromObjects, restored: &Restored, names: &Names) -> Self {
        let range = |stream: StreamId, from: u64, to: u64| RangeView {
            stream: stream.0,
            name: name(names, stream),
            from,
            to,
        };
        let of_entries = found.lost_entries.iter().map(|lost| DamageView {
            name: lost.name.clone(),
            objects: lost.numbers.end() - lost.numbers.start() + 1,
            reason: lost.reason.clone(),
        });
        let of_error = |error: &ObjectError| DamageView {
            name: error.object().into(),
            objects: 1,
            reason: error.reason(),
        };
        let log = rebuild.log_loss();
        let gaps = log.map_or(&[][..], |log| &log.gaps).iter();
        let lost_in_log = gaps.clone().filter(|gap| gap.cause == GapCause::Lost);
        let of_log =
            |gap: &alluvium_stream::Gap| range(gap.stream, gap.offsets.start.0, gap.offsets.end.0);
        let skipped = rebuild.skipped().into_iter();
        let skipped_by_log = gaps.filter(|gap| gap.cause == GapCause::Skipped);
        let aborted = found.filled.iter().filter_map(|(stream, filler)| {
            let hidden = filler.invalidated.as_ref()?;
            Some(TransactionView {
                stream: stream.0,
                name: name(names, *stream),
                producer_id: producer_of_marker(&filler.batch)?,
                from: hidden.start.0,
                to: hidden.end.0,
            })
        });
        let topics = restored.topics.iter().map(|topic| TopicView {
            name: topic.name.clone(),
            partitions: topic.partitions,
            settings_lost: topic.is_new,
        });
        let orphans = log.map_or(&[][..], |log| &log.orphans);
        let is_listed = |stream: &StreamId| {
            orphans.contains(stream) || restored.unnamed.iter().any(|it| it.stream == *stream)
        };
        let kept = rebuild.state().streams.keys();
        let of_lost = found.lost.iter().map(|(stream, _)| stream);
        let of_gaps = log.map_or(&[][..], |log| &log.gaps).iter().map(|gap| &gap.stream);
        let streams: BTreeSet<_> = kept.chain(of_lost).chain(of_gaps).collect();
        let unlisted = streams.into_iter().filter(|id| !names.contains_key(id) && !is_listed(id));
        let nameless = unlisted.map(|stream| StreamView {
            stream: stream.0,
            name: "not known: the change of the catalog with its name is lost".into(),
        });
        let unnamed = restored.unnamed.iter().map(|unnamed| StreamView {
            stream: unnamed.stream.0,
            name: format!("partition {} of topic {}", unnamed.partition, unnamed.topic),
        });
        let unknown = orphans.iter().map(|stream| StreamView {
            stream: stream.0,
            name: "not known: its creation is lost, and nothing of it is uploaded".into(),
        });
        Self {
            catalog: of_entries.chain(found.damaged_snapshots.iter().map(of_error)).collect(),
            catalog_may_be_old: found.is_old,
            missing_objects: found.missing.clone(),
            damaged_objects: found.damaged.iter().map(of_error).collect(),
            lost_records: found
                .lost
                .iter()
                .map(|(stream, offsets)| range(*stream, offsets.start.0, offsets.end.0))
                .collect(),
            aborted_transactions: aborted.collect(),
            damaged_log: log.map(damage_of_log).unwrap_or_default(),
            lost_log_records: lost_in_log.map(of_log).collect(),
            skipped: skipped
                .map(|(stream, offsets)| range(stream, offsets.start.0, offsets.end.0))
                .chain(skipped_by_log.map(of_log))
                .collect(),
            lost_lists: log.map_or(0, |log| log.lost_lists),
            restored_topics: topics.collect(),
            unnamed: unnamed.chain(nameless).chain(unknown).collect(),
        }
    }

    fn print(&self, written_at: &str) -> Result<(), Failure> {
        for DamageView { name, objects, reason } in &self.catalog {
            match objects {
                1 => output::line(format_args!("catalog: {name}: {reason}"))?,
                _ => output::line(format_args!(
                    "catalog: {name} and the {} after it: {reason}",
                    counted(objects - 1, "object", "objects")
                ))?,
            }
        }
        for place in &self.damaged_log {
            output::line(format_args!("write-ahead log: {place}"))?;
        }
        if self.catalog.is_empty() && self.catalog_may_be_old {
            output::line(format_args!(
                "the catalog is missing, may lack its newest part, or there is no log to compare \
                 it with"
            ))?;
        }
        for name in &self.missing_objects {
            output::line(format_args!("object {name} does not exist"))?;
        }
        for damage in &self.damaged_objects {
            output::line(format_args!("object {}: {}", damage.name, damage.reason))?;
        }
        for topic in &self.restored_topics {
            let partitions = counted(topic.partitions as u64, "partition", "partitions");
            let settings = match topic.settings_lost {
                true => "; its settings are lost, and it keeps all records until they are set",
                false => "",
            };
            output::line(format_args!("topic {}: {partitions} found{settings}", topic.name))?;
        }
        for unnamed in &self.unnamed {
            output::line(format_args!(
                "stream {} is kept without a name ({})",
                unnamed.stream, unnamed.name
            ))?;
        }
        let lost: Vec<_> = self.lost_records.iter().chain(&self.lost_log_records).collect();
        if !lost.is_empty() {
            let mut table = Table::of_text(&["FIRST LOST OFFSET", "LAST", "OF"]);
            for range in &lost {
                let last = range.to - 1;
                table.row(vec![range.from.to_string(), last.to_string(), range.name.clone()]);
            }
            output::line(format_args!("\n{table}\n"))?;
        }
        for TransactionView { name, producer_id, from, to, .. } in &self.aborted_transactions {
            output::line(format_args!(
                "{name}: the transaction of producer {producer_id} is aborted from offset {from} \
                 up to {to}: its end may be lost"
            ))?;
        }
        if self.lost_lists > 0 {
            let lists = counted(self.lost_lists, "list", "lists");
            output::line(format_args!(
                "{lists} of changes of topics, settings or users are lost with a part of the log"
            ))?;
        }
        for range in &self.skipped {
            output::line(format_args!(
                "{} continues at offset {}: offsets from {} on may have been in use",
                range.name, range.to, range.from
            ))?;
        }
        output::line(format_args!(
            "{} of offsets are known to be lost; changes of topics, settings, users and committed \
             offsets may be lost, too: those of the damaged part of the catalog, and those after \
             {written_at} that the log does not have",
            counted(lost.len() as u64, "range", "ranges"),
        ))
    }
}
