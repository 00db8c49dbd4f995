//! Content of the records of a log: batches of streams, and lists of their ends.

use std::collections::{BTreeMap, HashMap};

use alluvium_stream::{StreamId, StreamOffset, StreamRecord, decode_record};
use alluvium_wal::{LogOffset, Record};
use clap::Args;
use serde::Serialize;
use uuid::Uuid;

use super::entry;
use crate::catalog;
use crate::objects::S3Args;
use crate::output::{self, Failure, Table};
use crate::units::counted;

/// The source of the names of streams.
#[derive(Args, Debug)]
pub(super) struct CatalogArgs {
    /// The object store of the server, file:///absolute/path or s3://bucket/prefix: its catalog has
    /// the topics and partitions of the log's streams. Without it, streams are shown by number.
    #[arg(long, value_name = "URL")]
    catalog: Option<String>,
    /// The store, if the object store has the catalogs of several servers.
    #[arg(long, value_name = "ID", requires = "catalog")]
    store: Option<Uuid>,
    #[command(flatten)]
    s3: S3Args,
}

/// The catalog's data about streams, if it is available.
#[derive(Clone, Default)]
pub(super) struct Streams {
    names: HashMap<StreamId, String>,
    /// The offset up to which each stream is uploaded. `None`: it is unknown which streams exist.
    uploaded: Option<HashMap<StreamId, StreamOffset>>,
}

/// The number of records of each kind in a log, and the offsets missing between them.
#[derive(Serialize)]
pub(super) struct Content {
    #[serde(skip)]
    streams: Streams,
    batches: u64,
    ends_records: u64,
    catalog_records: u64,
    unknown_records: u64,
    /// Log offset of the first unknown record, and why it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_unknown: Option<Unknown>,
    /// Offsets whose batches were lost to damage.
    missing: Vec<Missing>,
    #[serde(skip)]
    next: BTreeMap<StreamId, StreamOffset>,
    /// The greatest end in lists.
    #[serde(skip)]
    listed: BTreeMap<StreamId, StreamOffset>,
    /// Ends in lists, and the offset up to which the offsets before them were used.
    #[serde(skip)]
    bounds: HashMap<(StreamId, StreamOffset), StreamOffset>,
}

#[derive(Serialize)]
struct Unknown {
    offset: u64,
    reason: String,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Missing {
    #[serde(flatten)]
    stream: Named,
    first_offset: u64,
    last_offset: u64,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Named {
    stream: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

/// Content of a record, for `dump`.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum RecordContent {
    Batch {
        #[serde(flatten)]
        stream: Named,
        first_offset: u64,
        last_offset: u64,
        max_timestamp_ms: i64,
    },
    Ends {
        from: u64,
        to: u64,
        part: u32,
        parts: u32,
        streams: Vec<EndOf>,
        /// The version of the last list of changes before it.
        #[serde(skip_serializing_if = "Option::is_none")]
        catalog_version: Option<u64>,
    },
    Catalog {
        version: u64,
        before: u64,
        next_stream: u64,
        changes: u32,
    },
    Unknown {
        reason: String,
    },
}

#[derive(Serialize)]
pub(super) struct EndOf {
    #[serde(flatten)]
    stream: Named,
    next_offset: u64,
    /// Start of the offsets before the next one that a start has skipped, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped_from: Option<u64>,
}

impl CatalogArgs {
    /// Reads the streams from the catalog.
    ///
    /// # Errors
    /// The object store has no catalog, or it cannot be read.
    pub(super) fn streams(&self) -> Result<Streams, Failure> {
        let Some(url) = &self.catalog else { return Ok(Streams::default()) };
        let catalog = catalog::CatalogArgs::new(url.clone(), self.s3.clone(), self.store);
        let state = catalog::blocking(catalog.load())?;
        let names = catalog::stream_names(&state);
        let uploaded = state.streams.iter().map(|(id, row)| (*id, row.uploaded_end)).collect();
        Ok(Streams { names, uploaded: Some(uploaded) })
    }
}

impl Streams {
    fn named(&self, stream: StreamId) -> Named {
        Named { stream: stream.0, name: self.names.get(&stream).cloned() }
    }

    /// The offset up to which the stream is uploaded; `None` if it was deleted.
    fn uploaded_end(&self, stream: StreamId) -> Option<StreamOffset> {
        match &self.uploaded {
            Some(uploaded) => uploaded.get(&stream).copied(),
            None => Some(StreamOffset(0)),
        }
    }

    pub(super) fn content_of(&self, record: &Record) -> RecordContent {
        match decode_record(&record.payload) {
            Ok(StreamRecord::Batch(stream, batch)) => RecordContent::Batch {
                stream: self.named(stream),
                first_offset: batch.base.0,
                last_offset: batch.end().0 - 1,
                max_timestamp_ms: batch.max_timestamp_ms,
            },
            Ok(StreamRecord::Ends(ends)) => {
                let streams = ends.ends.iter().map(|end| EndOf {
                    stream: self.named(end.stream),
                    next_offset: end.next.0,
                    skipped_from: (end.known < end.next).then_some(end.known.0),
                });
                RecordContent::Ends {
                    from: ends.from.0,
                    to: ends.to.0,
                    part: ends.part,
                    parts: ends.parts,
                    streams: streams.collect(),
                    catalog_version: ends.catalog_version,
                }
            }
            Ok(StreamRecord::Catalog(list)) => RecordContent::Catalog {
                version: list.version,
                before: list.before,
                next_stream: list.next_stream.0,
                changes: list.count,
            },
            Err(reason) => RecordContent::Unknown { reason },
        }
    }
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.name {
            Some(name) => f.write_str(name),
            None => write!(f, "stream {}", self.stream),
        }
    }
}

impl std::fmt::Display for RecordContent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Batch { stream, first_offset, last_offset, .. } => {
                write!(f, "batch: offsets {first_offset} to {last_offset} of {stream}")
            }
            Self::Ends { from, to, part, parts, streams, .. } => {
                let count = counted(streams.len() as u64, "stream", "streams");
                write!(f, "ends of {count}, for the log from {from} to {to}")?;
                if *parts > 1 {
                    write!(f, ", part {} of {parts}", part + 1)?;
                }
                for (at, EndOf { stream, next_offset, skipped_from }) in streams.iter().enumerate()
                {
                    let separator = if at == 0 { ":" } else { "," };
                    write!(f, "{separator} {next_offset} of {stream}")?;
                    if let Some(from) = skipped_from {
                        write!(f, " (skipped from {from})")?;
                    }
                }
                Ok(())
            }
            Self::Catalog { version, changes, .. } => {
                let changes = counted(u64::from(*changes), "change", "changes");
                write!(f, "{changes} of the catalog, version {version}")
            }
            Self::Unknown { reason } => write!(f, "unknown: {reason}"),
        }
    }
}

impl Content {
    pub(super) fn new(streams: &Streams) -> Self {
        Self {
            streams: streams.clone(),
            batches: 0,
            ends_records: 0,
            catalog_records: 0,
            unknown_records: 0,
            first_unknown: None,
            missing: Vec::new(),
            next: BTreeMap::new(),
            listed: BTreeMap::new(),
            bounds: HashMap::new(),
        }
    }

    /// Adds a record of the log; records are added in order.
    pub(super) fn add(&mut self, record: &Record) {
        match decode_record(&record.payload) {
            Ok(StreamRecord::Batch(stream, batch)) => {
                self.batches += 1;
                let uploaded = self.streams.uploaded_end(stream);
                // Without the catalog, what was before the first batch is unknown.
                let first = self.streams.uploaded.is_some().then_some(uploaded).flatten();
                let next = self.next.get(&stream).copied().or(first);
                if let Some(next) = next {
                    self.miss(stream, next, batch.base);
                }
                let end = self.next.entry(stream).or_default();
                *end = batch.end().max(*end).max(uploaded.unwrap_or_default());
            }
            Ok(StreamRecord::Catalog(_)) => self.catalog_records += 1,
            Ok(StreamRecord::Ends(ends)) => {
                self.ends_records += 1;
                for end in ends.ends {
                    let listed = self.listed.entry(end.stream).or_default();
                    *listed = end.next.max(*listed);
                    if end.known < end.next {
                        self.bounds.insert((end.stream, end.next), end.known);
                    }
                }
            }
            Err(reason) => {
                self.unknown_records += 1;
                let LogOffset(offset) = record.offset;
                self.first_unknown.get_or_insert(Unknown { offset, reason });
            }
        }
    }

    fn miss(&mut self, stream: StreamId, next: StreamOffset, to: StreamOffset) {
        let to = self.bounds.get(&(stream, to)).copied().unwrap_or(to);
        if next < to {
            self.missing.push(Missing {
                stream: self.streams.named(stream),
                first_offset: next.0,
                last_offset: to.0 - 1,
            });
        }
    }

    /// Called after the last record: finds the offsets that lists mention and that are missing.
    pub(super) fn finish(mut self) -> Self {
        for (stream, listed) in std::mem::take(&mut self.listed) {
            let uploaded = self.streams.uploaded_end(stream);
            let of_catalog = self.streams.uploaded.is_some().then_some(uploaded).flatten();
            let next = self.next.get(&stream).copied().or(of_catalog);
            // Without the catalog, a stream without a batch may have been uploaded.
            if let Some(next) = next.filter(|_| uploaded.is_some()) {
                self.miss(stream, next, listed);
            }
        }
        self.missing.sort_by_key(|missing| (missing.stream.stream, missing.first_offset));
        self
    }

    pub(super) fn print(&self) -> Result<(), Failure> {
        let batches = counted(self.batches, "batch", "batches");
        let streams = counted(self.next.len() as u64, "stream", "streams");
        let lists = counted(self.ends_records, "list", "lists");
        let changes = counted(self.catalog_records, "list", "lists");
        entry(
            "content",
            format!(
                "{batches} of {streams}, {lists} of the ends of streams, {changes} of changes of \
                 the catalog"
            ),
        )?;
        if let Some(Unknown { offset, reason }) = &self.first_unknown {
            let count = counted(self.unknown_records, "record", "records");
            entry("unknown", format!("{count}, the first one at log offset {offset}: {reason}"))?;
        }
        if self.missing.is_empty() {
            return Ok(());
        }
        let mut table = Table::of_text(&["MISSING OFFSETS", "TO", "OF"]);
        for Missing { stream, first_offset, last_offset } in &self.missing {
            let offsets = [first_offset, last_offset].map(u64::to_string);
            table.row(offsets.into_iter().chain([stream.to_string()]).collect());
        }
        output::line(format_args!("\n{table}"))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    /// The header of a stream record of version 2, and its content.
    fn record(kind: u8, count: u32, fields: [u64; 3], content: &[u8], is_list: bool) -> Record {
        let mut header = vec![2, kind, 0, 0];
        header.extend(count.to_le_bytes());
        header.extend(fields.into_iter().flat_map(u64::to_le_bytes));
        header.extend((content.len() as u32).to_le_bytes());
        header.extend(crc32c::crc32c(&header).to_le_bytes());
        let twice = if is_list { header.clone() } else { Vec::new() };
        let payload = Bytes::from([header, twice, content.to_vec()].concat());
        Record { offset: LogOffset(64), end: LogOffset(128), epoch: 1, payload }
    }

    fn batch(stream: u64, base: u64) -> Record {
        record(1, 2, [stream, base, 5], b"batch", false)
    }

    fn list(kind: u8, entries: &[&[u64]]) -> Record {
        let bytes: Vec<u8> = entries.concat().into_iter().flat_map(u64::to_le_bytes).collect();
        record(kind, entries.len() as u32, [0, 64, 1 << 32], &bytes, true)
    }

    fn streams() -> Streams {
        let names = [(StreamId(1), "partition 0 of topic t".to_owned())].into();
        let uploaded = [1, 2, 3].map(|id| (StreamId(id), StreamOffset(4)));
        Streams { names, uploaded: Some(uploaded.into()) }
    }

    fn missing(streams: &Streams, records: &[Record]) -> Vec<(u64, u64, u64)> {
        let mut content = Content::new(streams);
        records.iter().for_each(|record| content.add(record));
        let missing = content.finish().missing.into_iter();
        missing.map(|it| (it.stream.stream, it.first_offset, it.last_offset)).collect()
    }

    #[test]
    fn each_kind_of_record_is_shown() {
        let shown = |record: &Record| streams().content_of(record).to_string();
        assert_eq!(shown(&batch(1, 4)), "batch: offsets 4 to 5 of partition 0 of topic t");
        assert_eq!(shown(&batch(9, 4)), "batch: offsets 4 to 5 of stream 9");
        assert_eq!(
            shown(&list(2, &[&[1, 6], &[9, 7]])),
            "ends of 2 streams, for the log from 0 to 64: 6 of partition 0 of topic t, 7 of \
             stream 9"
        );
        assert_eq!(
            shown(&list(3, &[&[1, 60, 6]])),
            "ends of 1 stream, for the log from 0 to 64: 60 of partition 0 of topic t (skipped \
             from 6)"
        );
        let of_catalog = record(4, 2, [7, 5, 9], b"changes", true);
        assert_eq!(shown(&of_catalog), "2 changes of the catalog, version 7");
        let unknown = record(9, 1, [1, 1, 1], b"", false);
        assert_eq!(shown(&unknown), "unknown: stream record kind 9 is not known");
        let json = serde_json::to_value(streams().content_of(&list(3, &[&[1, 60, 6]]))).unwrap();
        assert_eq!(json["kind"], "ends");
        assert_eq!(json["streams"][0]["name"], "partition 0 of topic t");
        assert_eq!(json["streams"][0]["skipped_from"], 6);
        assert_eq!(json.get("catalog_version"), None);
        let json = serde_json::to_value(streams().content_of(&of_catalog)).unwrap();
        let expected = serde_json::json!({
            "kind": "catalog", "version": 7, "before": 5, "next_stream": 9, "changes": 2,
        });
        assert_eq!(json, expected);
        // The version, and one end.
        let entries: Vec<u8> = [7_u64, 1, 60, 6].into_iter().flat_map(u64::to_le_bytes).collect();
        let versioned = record(5, 1, [0, 64, 1 << 32], &entries, true);
        let json = serde_json::to_value(streams().content_of(&versioned)).unwrap();
        assert_eq!((&json["kind"], &json["catalog_version"]), (&"ends".into(), &7.into()));
    }

    #[test]
    fn missing_offsets_are_found_in_the_middle_and_at_the_end() {
        let log = [batch(1, 4), batch(1, 8), batch(2, 2), list(2, &[&[1, 12], &[2, 4], &[3, 6]])];
        // With the catalog, streams without a batch are found too.
        assert_eq!(missing(&streams(), &log), [(1, 6, 7), (1, 10, 11), (3, 4, 5)]);
        assert_eq!(missing(&Streams::default(), &log), [(1, 6, 7), (1, 10, 11)]);
        let of_deleted = [batch(7, 4), batch(7, 8), list(2, &[&[7, 20]])];
        assert_eq!(missing(&streams(), &of_deleted), [(7, 6, 7)]);
        // Offsets that a start has skipped may never have been used.
        let log = [batch(1, 4), list(3, &[&[1, 100, 7]]), list(2, &[&[1, 100]])];
        assert_eq!(missing(&streams(), &log), [(1, 6, 6)]);
        let log = [batch(1, 4), list(3, &[&[1, 100, 6]]), batch(1, 100)];
        assert_eq!(missing(&streams(), &log), []);
    }
}
