//! `alluvium object inspect`.

use alluvium_broker::Label;
use alluvium_stream::StoredObject;
use alluvium_stream::object::{Block, DirectoryRow, Origin};
use bytes::Bytes;
use clap::Args;
use serde::Serialize;
use uuid::Uuid;

use super::find::find;
use super::{failure, timestamp};
use crate::objects::S3Args;
use crate::output::{self, Failure, Table};
use crate::units::{about, counted};

#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    /// The object: a file, or a URL (file:///absolute/path, s3://bucket/key).
    #[arg(value_name = "FILE|URL")]
    object: String,
    #[command(flatten)]
    s3: S3Args,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Inspected {
    object: String,
    size_bytes: u64,
    format_version: u32,
    nonce: String,
    index_position: u64,
    index_bytes: u64,
    index_crc32c: u32,
    /// Absent in format version 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    written_by: Option<WrittenBy>,
    blocks: Vec<BlockView>,
    streams: Vec<Total>,
}

/// Who wrote an object, by its directory.
#[derive(Serialize)]
struct WrittenBy {
    store: Uuid,
    incarnation: Uuid,
    opening: u32,
    term: u32,
    generation: u32,
    created_at_ms: i64,
    cut: u64,
}

#[derive(Serialize)]
struct BlockView {
    stream: u64,
    start_offset: u64,
    end_offset: u64,
    position: u64,
    length_bytes: u32,
    entries: u32,
    max_timestamp_ms: i64,
    crc32c: u32,
}

/// Content of an object that belongs to one stream.
#[derive(Serialize)]
struct Total {
    stream: u64,
    kind: u8,
    /// What the stream is, if its label says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// The ID of the topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    topic_id: Option<Uuid>,
    start_offset: u64,
    end_offset: u64,
    blocks: u64,
    entries: u64,
    length_bytes: u64,
    payload_bytes: u64,
    max_timestamp_ms: i64,
}

/// Shows the content of an object.
///
/// # Errors
/// It cannot be read, or its header, index or footer is damaged.
pub(super) async fn run(args: &InspectArgs) -> Result<(), Failure> {
    let found = find(&args.object, &args.s3).await?;
    let [found] = found.as_slice() else {
        return Err(Failure::Usage(format!(
            "{} contains {}: name one of them; `alluvium object verify` accepts all",
            args.object,
            counted(found.len() as u64, "object", "objects")
        )));
    };
    let object = StoredObject::open(found.store.clone(), &found.location).await;
    let object = object.map_err(|error| failure(&found.shown, &error))?;
    let inspected = Inspected::of(&found.shown, &object);
    if args.json { output::json(&inspected) } else { inspected.print() }
}

impl Inspected {
    fn of(shown: &str, object: &StoredObject) -> Self {
        let directory = &object.directory;
        let mut blocks = object.blocks.chunk_by(|a, b| a.stream == b.stream);
        // There is one row for each stream in the index.
        let streams = directory.rows.iter().map(|row| Total::of(row, blocks.next()));
        Self {
            object: shown.into(),
            size_bytes: directory.size_bytes,
            format_version: directory.format,
            nonce: directory.nonce.simple().to_string(),
            index_position: directory.index_position,
            index_bytes: directory.index_bytes,
            index_crc32c: directory.index_crc32c,
            written_by: directory.origin.as_ref().map(WrittenBy::of),
            streams: streams.collect(),
            blocks: object.blocks.iter().map(BlockView::of).collect(),
        }
    }

    fn print(&self) -> Result<(), Failure> {
        let entry = |name: &str, text: String| output::line(format_args!("{name:<12}{text}"));
        entry("object", self.object.clone())?;
        entry("size", format!("{} B ({})", self.size_bytes, about(self.size_bytes)))?;
        entry("version", self.format_version.to_string())?;
        entry("nonce", self.nonce.clone())?;
        if let Some(by) = &self.written_by {
            entry("store", by.store.to_string())?;
            let WrittenBy { incarnation, opening, term, .. } = by;
            entry("writer", format!("incarnation {incarnation}, opening {opening}, term {term}"))?;
            entry("created at", timestamp(by.created_at_ms))?;
            let from = match by.generation {
                0 => format!("an upload of the log below offset {}", by.cut),
                generation => format!("a compaction, generation {generation}"),
            };
            entry("written by", from)?;
        }
        let index = (self.index_position, self.index_bytes, self.index_crc32c);
        entry("index", format!("{} B at {}, CRC32C {:08x}", index.1, index.0, index.2))?;
        let entries: u64 = self.streams.iter().map(|total| total.entries).sum();
        let payload: u64 = self.streams.iter().map(|total| total.payload_bytes).sum();
        entry(
            "content",
            format!(
                "{} of {}, {} of payload, in {}",
                counted(entries, "batch", "batches"),
                counted(self.streams.len() as u64, "stream", "streams"),
                about(payload),
                counted(self.blocks.len() as u64, "block", "blocks")
            ),
        )?;
        if self.blocks.is_empty() {
            return Ok(());
        }
        output::line(format_args!("\n{}\n\n{}", self.block_table(), self.stream_table()))
    }

    fn block_table(&self) -> Table {
        let mut table = Table::of_numbers(&[
            "BLOCK OF STREAM",
            "OFFSETS",
            "POSITION",
            "LENGTH",
            "ENTRIES",
            "GREATEST TIMESTAMP",
        ]);
        for block in &self.blocks {
            table.row(vec![
                block.stream.to_string(),
                format!("{}..{}", block.start_offset, block.end_offset),
                block.position.to_string(),
                block.length_bytes.to_string(),
                block.entries.to_string(),
                timestamp(block.max_timestamp_ms),
            ]);
        }
        table
    }

    fn stream_table(&self) -> Table {
        let mut table = Table::of_numbers(&[
            "STREAM",
            "PARTITION OR STATE",
            "OFFSETS",
            "BLOCKS",
            "LENGTH",
            "PAYLOAD",
            "ENTRIES",
            "GREATEST TIMESTAMP",
        ]);
        for total in &self.streams {
            table.row(vec![
                total.stream.to_string(),
                total.name.clone().unwrap_or_else(|| "-".into()),
                format!("{}..{}", total.start_offset, total.end_offset),
                total.blocks.to_string(),
                total.length_bytes.to_string(),
                total.payload_bytes.to_string(),
                total.entries.to_string(),
                timestamp(total.max_timestamp_ms),
            ]);
        }
        table
    }
}

impl BlockView {
    fn of(block: &Block) -> Self {
        Self {
            stream: block.stream.0,
            start_offset: block.start.0,
            end_offset: block.end.0,
            position: block.position,
            length_bytes: block.len_bytes,
            entries: block.entries,
            max_timestamp_ms: block.max_timestamp_ms,
            crc32c: block.crc32c,
        }
    }
}

impl WrittenBy {
    fn of(origin: &Origin) -> Self {
        let Origin { store, incarnation, opening, term, generation, created_at_ms, cut } = *origin;
        Self { store, incarnation, opening, term, generation, created_at_ms, cut: cut.0 }
    }
}

impl Total {
    /// Joins the row of a stream and its blocks.
    fn of(row: &DirectoryRow, blocks: Option<&[Block]>) -> Self {
        let label = row.label.as_ref().and_then(described);
        let (name, topic_id) = label.map_or((None, None), |(name, id)| (Some(name), id));
        let blocks = blocks.unwrap_or_default();
        Self {
            stream: row.stream.0,
            kind: row.kind,
            name,
            topic_id,
            start_offset: row.start.0,
            end_offset: row.end.0,
            blocks: row.blocks,
            entries: blocks.iter().map(|block| u64::from(block.entries)).sum(),
            length_bytes: blocks.iter().map(|block| u64::from(block.len_bytes)).sum(),
            payload_bytes: row.payload_bytes,
            max_timestamp_ms: row.max_timestamp_ms,
        }
    }
}

/// Returns what a label describes: topic-partition and the ID of the topic, or the key of a state.
fn described(label: &Bytes) -> Option<(String, Option<Uuid>)> {
    Some(match Label::decode(label)? {
        Label::Partition { topic, id, partition } => (format!("{topic}-{partition}"), Some(id)),
        Label::State { state } => (state.into_owned(), None),
    })
}
