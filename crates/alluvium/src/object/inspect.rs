//! `alluvium object inspect`.

use alluvium_stream::object::{Block, ENTRY_BYTES, VERSION};
use alluvium_stream::{StoredObject, StreamId};
use clap::Args;
use serde::Serialize;

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
    blocks: Vec<BlockView>,
    streams: Vec<Total>,
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
        let of_one_stream = object.blocks.chunk_by(|a, b| a.stream == b.stream);
        Self {
            object: shown.into(),
            size_bytes: object.size_bytes,
            format_version: VERSION,
            nonce: object.nonce.simple().to_string(),
            index_position: object.index_position,
            index_bytes: object.index_bytes,
            index_crc32c: object.index_crc32c,
            blocks: object.blocks.iter().map(BlockView::of).collect(),
            streams: of_one_stream.filter_map(Total::of).collect(),
        }
    }

    fn print(&self) -> Result<(), Failure> {
        let entry = |name: &str, text: String| output::line(format_args!("{name:<12}{text}"));
        entry("object", self.object.clone())?;
        entry("size", format!("{} B ({})", self.size_bytes, about(self.size_bytes)))?;
        entry("version", self.format_version.to_string())?;
        entry("nonce", self.nonce.clone())?;
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

impl Total {
    /// Sums up the blocks of one stream.
    fn of(blocks: &[Block]) -> Option<Self> {
        let (first, last) = (blocks.first()?, blocks.last()?);
        let StreamId(stream) = first.stream;
        let entries = blocks.iter().map(|block| u64::from(block.entries)).sum();
        let length_bytes: u64 = blocks.iter().map(|block| u64::from(block.len_bytes)).sum();
        Some(Self {
            stream,
            start_offset: first.start.0,
            end_offset: last.end.0,
            blocks: blocks.len() as u64,
            entries,
            length_bytes,
            // The index is not trusted: it may state more entries than fit.
            payload_bytes: length_bytes.saturating_sub(entries * ENTRY_BYTES as u64),
            max_timestamp_ms: blocks.iter().map(|block| block.max_timestamp_ms).max()?,
        })
    }
}
