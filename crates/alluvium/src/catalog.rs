//! `alluvium catalog`: lists the catalogs in an object store, and exports one as JSON. Other tools
//! read it from here.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use alluvium_stream::chain::{Chain, ChainState, list_stores, list_stores_with_data};
use alluvium_stream::{ObjectError, Options, StreamId};
use clap::{Args, Subcommand};
use object_store::ObjectStore;
use serde::Serialize;
use uuid::Uuid;

use crate::objects::{self, ObjectStoreUrl, S3Args};
use crate::output::{self, Failure, Table};
use crate::units::counted;

/// The error of a tool that finds no catalog.
pub(crate) const NO_CATALOG: &str =
    "there is no catalog. Check the URL, and that the directory is mounted";

#[derive(Debug, Subcommand)]
pub(crate) enum CatalogCommand {
    /// List the catalogs in an object store, one for each server that has used it.
    List(ListArgs),
    /// Write a catalog as JSON: streams, objects, and the metadata of topics, settings and users.
    ///
    /// It is the catalog as of the last change in the object store; the last second or so of a
    /// running server may be missing. The output has password verifiers.
    Export(ExportArgs),
}

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// The object store: file:///absolute/path or s3://bucket/prefix.
    #[arg(long, env = "ALLUVIUM_OBJECT_STORE", value_name = "URL")]
    object_store: String,
    #[command(flatten)]
    s3: S3Args,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    catalog: CatalogArgs,
    /// Write to this file, which must not exist. Default: standard output.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Which catalog a tool reads.
#[derive(Args, Clone, Debug)]
pub(crate) struct CatalogArgs {
    /// The server's object store: file:///absolute/path or s3://bucket/prefix.
    #[arg(long, env = "ALLUVIUM_OBJECT_STORE", value_name = "URL")]
    object_store: String,
    #[command(flatten)]
    s3: S3Args,
    /// The store, if the object store has the catalogs of several servers.
    #[arg(long, value_name = "ID", value_parser = objects::store_id)]
    store: Option<Uuid>,
}

impl CatalogArgs {
    /// Returns the catalog of `store`, or the only one, in an object store.
    pub(crate) fn new(object_store: String, s3: S3Args, store: Option<Uuid>) -> Self {
        Self { object_store, s3, store }
    }

    /// Returns the object store.
    ///
    /// # Errors
    /// It cannot be read from outside a server.
    pub(crate) fn url(&self) -> Result<ObjectStoreUrl, Failure> {
        readable(&self.object_store, &self.s3)
    }

    /// Returns the store that was chosen, or the only one.
    ///
    /// # Errors
    /// There is none, which `none` states, or several and none was chosen.
    pub(crate) async fn chosen(
        &self,
        objects: &dyn ObjectStore,
        none: &str,
    ) -> Result<Uuid, Failure> {
        chosen(&self.url()?, objects, self.store, none).await
    }

    /// Returns the store that was chosen, or else that of a log, or else the only one that has a
    /// catalog or data.
    ///
    /// # Errors
    /// There is none, or several and none was chosen.
    pub(crate) async fn chosen_with_data(
        &self,
        objects: &dyn ObjectStore,
        of_log: Option<Uuid>,
    ) -> Result<Uuid, Failure> {
        if let Some(store) = self.store.or(of_log) {
            return Ok(store);
        }
        let url = self.url()?;
        let stores = list_stores_with_data(objects).await;
        let stores = stores
            .map_err(|error| Failure::Failed(format!("object store {url}: {}", error.reason())))?;
        only(&url, &stores, "there is no catalog and no data")
    }

    /// Reads the catalog.
    ///
    /// # Errors
    /// There is none, or several and none was chosen; it cannot be read, or is damaged.
    pub(crate) async fn load(&self) -> Result<ChainState, Failure> {
        load(&self.url()?, self.store).await
    }
}

/// Returns an object store that a tool can read.
fn readable(text: &str, s3: &S3Args) -> Result<ObjectStoreUrl, Failure> {
    let url = ObjectStoreUrl::parse(text, s3.settings()).map_err(Failure::Usage)?;
    match &url {
        ObjectStoreUrl::Memory => Err(objects::memory_of_a_server()),
        ObjectStoreUrl::Directory(_) | ObjectStoreUrl::S3(_) => Ok(url),
    }
}

/// Returns `store`, or the only one that has a catalog in an object store.
async fn chosen(
    url: &ObjectStoreUrl,
    objects: &dyn ObjectStore,
    store: Option<Uuid>,
    none: &str,
) -> Result<Uuid, Failure> {
    let failed = |reason: String| Failure::Failed(format!("object store {url}: {reason}"));
    if let Some(store) = store {
        return Ok(store);
    }
    let stores = list_stores(objects).await.map_err(|error| failed(error.reason()))?;
    only(url, &stores, none)
}

/// Returns the only one of the stores in an object store.
///
/// # Errors
/// There is none, or there are several, which the error lists.
pub(crate) fn only(url: &ObjectStoreUrl, stores: &[Uuid], none: &str) -> Result<Uuid, Failure> {
    match stores {
        [] => Err(Failure::Failed(format!("object store {url}: {none}"))),
        [only] => Ok(*only),
        _ => Err(Failure::Usage(format!(
            "object store {url}: it is used by several servers. Choose one with --store: {}. \
             `alluvium catalog list` shows more of them",
            output::listed(stores)
        ))),
    }
}

/// Reads the catalog of `store`, or the only one.
async fn load(url: &ObjectStoreUrl, store: Option<Uuid>) -> Result<ChainState, Failure> {
    let failed = |reason: String| Failure::Failed(format!("object store {url}: {reason}"));
    let objects = objects::open_to_read(url)?;
    let id = chosen(url, &*objects, store, NO_CATALOG).await?;
    let chain = Chain::new(objects, id, Options::default().retry());
    match chain.load().await {
        Ok(Some(state)) => Ok(state),
        Ok(None) => Err(failed(format!("there is no catalog of store {id}"))),
        Err(error @ ObjectError::Damaged { .. }) => {
            Err(failed(format!("the catalog of store {id} is damaged: {error}")))
        }
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Returns the names of the streams that topics and the server's own state refer to.
pub(crate) fn stream_names(state: &ChainState) -> HashMap<StreamId, String> {
    let meta = state.meta.iter().map(|(key, value)| (key.as_str(), &value[..]));
    alluvium_broker::stream_names(meta)
}

/// Runs a `catalog` command.
///
/// # Errors
/// Those of the command.
pub(crate) fn run(command: CatalogCommand) -> Result<(), Failure> {
    output::start_logging("warn,alluvium::progress=info")?;
    blocking(async {
        match command {
            CatalogCommand::List(args) => list(&args).await,
            CatalogCommand::Export(args) => export(&args).await,
        }
    })
}

/// Runs a task of a tool.
///
/// # Errors
/// Those of the task, or the system has no threads left.
pub(crate) fn blocking<T>(task: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Failed(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(task)
}

/// A line of `list`.
#[derive(Serialize)]
struct Listed {
    store: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    catalog: Option<Summary>,
    /// Why it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize)]
struct Summary {
    wal: Uuid,
    node: u32,
    version: u64,
    opening: u32,
    term: u32,
    clean: bool,
    written_at_ms: u64,
    streams: usize,
    ranges: usize,
    objects: usize,
    metadata: usize,
}

impl Summary {
    fn of(state: &ChainState) -> Self {
        let ChainState { head, header, streams, objects, meta, .. } = state;
        Self {
            wal: header.wal,
            node: header.node,
            version: header.version,
            opening: header.opening,
            term: head.term,
            clean: header.is_clean,
            written_at_ms: header.written_at_ms,
            streams: streams.len(),
            ranges: streams.values().map(|stream| stream.ranges.len()).sum(),
            objects: objects.len(),
            metadata: meta.len(),
        }
    }

    fn describe(&self) -> String {
        format!(
            "{}, {}, {}, {}",
            counted(self.streams as u64, "stream", "streams"),
            counted(self.ranges as u64, "range", "ranges"),
            counted(self.objects as u64, "object", "objects"),
            counted(self.metadata as u64, "entry of metadata", "entries of metadata"),
        )
    }
}

async fn list(args: &ListArgs) -> Result<(), Failure> {
    let url = readable(&args.object_store, &args.s3)?;
    let objects = objects::open_to_read(&url)?;
    let stores = list_stores(&*objects).await;
    let stores = stores.map_err(|error| Failure::Failed(format!("object store {url}: {error}")))?;
    let mut listed = Vec::with_capacity(stores.len());
    for store in stores {
        let loaded = load(&url, Some(store)).await;
        listed.push(Listed {
            store,
            catalog: loaded.as_ref().ok().map(Summary::of),
            error: loaded.err().map(|failure| failure.message().to_owned()),
        });
    }
    if args.json {
        return output::json(&listed);
    }
    if listed.is_empty() {
        return output::line(format_args!("object store {url}: there is no catalog"));
    }
    let mut table = Table::of_text(&["STORE", "VERSION", "CONTENT"]);
    for Listed { store, catalog, error } in &listed {
        let version = catalog.as_ref().map_or("-".into(), |catalog| catalog.version.to_string());
        let content = catalog.as_ref().map(Summary::describe).or_else(|| error.clone());
        table.row(vec![store.to_string(), version, content.unwrap_or_default()]);
    }
    output::line(format_args!("{table}"))
}

/// Bytes as lower-case hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The JSON of an export.
fn exported(state: &ChainState) -> serde_json::Value {
    let ChainState { head, header, .. } = state;
    let store = header.store;
    let streams: Vec<_> = state
        .streams
        .iter()
        .map(|(id, stream)| {
            let ranges: Vec<_> = stream
                .ranges
                .iter()
                .map(|range| {
                    serde_json::json!({
                        "object": range.object,
                        "start": range.start,
                        "end": range.end,
                        "payload_bytes": range.payload_bytes,
                        "max_timestamp_ms": range.max_timestamp_ms,
                    })
                })
                .collect();
            serde_json::json!({
                "id": id,
                "kind": stream.kind,
                "label": hex(&stream.label),
                "epoch": stream.epoch.0,
                "start": stream.start,
                "uploaded_end": stream.uploaded_end,
                "checkpoint": stream.checkpoint.as_deref().map(hex),
                "ranges": ranges,
            })
        })
        .collect();
    let objects: Vec<_> = state
        .objects
        .values()
        .map(|object| {
            serde_json::json!({
                "number": object.id,
                "name": object.name(store),
                "size_bytes": object.size_bytes,
                "index_position": object.index_position,
                "index_bytes": object.index_bytes,
                "index_crc32c": object.index_crc32c,
                "created_at_ms": object.created_at_ms,
                "generation": object.generation,
                "payload_bytes": object.payload_bytes,
                "format": object.format,
            })
        })
        .collect();
    let meta: Vec<_> = state
        .meta
        .iter()
        .map(|(key, value)| serde_json::json!({ "key": key, "value": hex(value) }))
        .collect();
    let gaps: Vec<_> = state
        .gaps
        .iter()
        .map(|((stream, start), end)| {
            serde_json::json!({ "stream": stream, "start": start, "end": end })
        })
        .collect();
    let hints: Vec<_> = state
        .hints
        .iter()
        .map(|(stream, end)| serde_json::json!({ "stream": stream, "end": end }))
        .collect();
    serde_json::json!({
        "store": store,
        "wal": header.wal,
        "incarnation": header.incarnation,
        "number": head.number,
        "version": header.version,
        "opening": header.opening,
        "term": head.term,
        "node": header.node,
        "clean": header.is_clean,
        "written_at_ms": header.written_at_ms,
        "covers": header.covers,
        "cut": header.cut.0,
        "wal_mark": header.wal_mark,
        "next_stream": header.next_stream,
        "reserved": state.reserved,
        "largest_count": state.largest_count,
        "streams": streams,
        "objects": objects,
        "meta": meta,
        "gaps": gaps,
        "hints": hints,
    })
}

async fn export(args: &ExportArgs) -> Result<(), Failure> {
    let state = args.catalog.load().await?;
    let json = exported(&state);
    let Some(path) = &args.output else {
        let mut out = BufWriter::new(io::stdout().lock());
        let written = serde_json::to_writer_pretty(&mut out, &json).map_err(io::Error::from);
        return match written.and_then(|()| writeln!(out)).and_then(|()| out.flush()) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
            Err(error) => Err(Failure::Failed(format!("standard output: {error}"))),
        };
    };
    let failed = |error: io::Error| Failure::Failed(format!("{}: {error}", path.display()));
    // It contains password verifiers.
    let file = File::options().write(true).create_new(true).mode(0o600).open(path);
    let mut file = BufWriter::new(file.map_err(failed)?);
    let written = serde_json::to_writer_pretty(&mut file, &json).map_err(io::Error::from);
    let written = written.and_then(|()| {
        writeln!(file)?;
        file.flush()?;
        file.get_ref().sync_all()
    });
    match written {
        Ok(()) => {
            output::line(format_args!("{} to {}", Summary::of(&state).describe(), path.display()))
        }
        Err(error) => {
            // The file is not a complete export.
            let _ = std::fs::remove_file(path);
            Err(failed(error))
        }
    }
}
