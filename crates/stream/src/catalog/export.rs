//! Export of a catalog as JSON, and import. Format: `docs/format/catalog.md`, "Exports".

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use alluvium_wal::LogOffset;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{
    Catalog, CatalogError, Change, INCARNATIONS_KEPT, Incarnation, ObjectInfo, ObjectRange,
    RedbCatalog, Snapshot, StreamRow, Uploaded,
};
use crate::object::{FOOTER_BYTES, HEADER_BYTES};
use crate::types::{ObjectId, StreamEpoch, StreamId, StreamOffset};

const FORMAT_VERSION: u32 = 1;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Export {
    format_version: u32,
    content: Content,
    crc32c: u32,
}

/// The checksum covers this structure, serialized without white space. So the order of the fields
/// is part of the format.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Content {
    wal_id: Option<Uuid>,
    next_stream_id: u64,
    next_object_id: u64,
    uploaded_log: u64,
    version: u64,
    wal_mark: u64,
    #[serde(rename = "lives")]
    incarnations: Vec<IncarnationEntry>,
    streams: Vec<StreamEntry>,
    objects: Vec<ObjectInfo>,
    meta: Vec<MetaEntry>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct IncarnationEntry {
    after_version: u64,
    id: Uuid,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct StreamEntry {
    id: u64,
    kind: u8,
    /// Omitted if 0, so that exports from before there were epochs are canonical.
    #[serde(default, skip_serializing_if = "is_zero")]
    epoch: u64,
    start: u64,
    uploaded_end: u64,
    checkpoint: Option<Hex>,
    ranges: Vec<RangeEntry>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RangeEntry {
    object: u64,
    start: u64,
    end: u64,
    payload_bytes: u64,
    max_timestamp_ms: i64,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct MetaEntry {
    key: String,
    value: Hex,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Bytes, written as two lower-case hexadecimal digits each.
#[derive(Clone, Deserialize, Serialize)]
#[serde(try_from = "String", into = "String")]
struct Hex(Vec<u8>);

impl From<Hex> for String {
    fn from(Hex(bytes): Hex) -> Self {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digits = |byte: u8| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]];
        bytes.into_iter().flat_map(digits).map(char::from).collect()
    }
}

impl TryFrom<String> for Hex {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let bytes = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?));
        match bytes.collect::<Option<_>>() {
            Some(bytes) if rest.is_empty() => Ok(Self(bytes)),
            _ => Err("not an even number of hexadecimal digits"),
        }
    }
}

impl Content {
    fn of(snapshot: &Snapshot) -> Self {
        let Snapshot {
            wal_id,
            next_stream_id,
            next_object_id,
            uploaded_log,
            version,
            wal_mark,
            incarnations,
            streams,
            objects,
            meta,
        } = snapshot;
        let range = |range: &ObjectRange| RangeEntry {
            object: range.object.0,
            start: range.start.0,
            end: range.end.0,
            payload_bytes: range.payload_bytes,
            max_timestamp_ms: range.max_timestamp_ms,
        };
        let stream = |(id, row): (&StreamId, &StreamRow)| StreamEntry {
            id: id.0,
            kind: row.kind,
            epoch: row.epoch.0,
            start: row.start.0,
            uploaded_end: row.uploaded_end.0,
            checkpoint: row.checkpoint.as_ref().map(|bytes| Hex(bytes.to_vec())),
            ranges: row.ranges.iter().map(range).collect(),
        };
        let entry = |(key, value): (&String, &Vec<u8>)| MetaEntry {
            key: key.clone(),
            value: Hex(value.clone()),
        };
        let incarnation = |incarnation: &Incarnation| IncarnationEntry {
            after_version: incarnation.after_version,
            id: incarnation.id,
        };
        Self {
            wal_id: *wal_id,
            next_stream_id: *next_stream_id,
            next_object_id: *next_object_id,
            uploaded_log: uploaded_log.0,
            version: *version,
            wal_mark: *wal_mark,
            incarnations: incarnations.iter().map(incarnation).collect(),
            streams: streams.iter().map(stream).collect(),
            objects: objects.values().cloned().collect(),
            meta: meta.iter().map(entry).collect(),
        }
    }

    fn into_snapshot(self) -> Snapshot {
        let range = |entry: RangeEntry| ObjectRange {
            object: ObjectId(entry.object),
            start: StreamOffset(entry.start),
            end: StreamOffset(entry.end),
            payload_bytes: entry.payload_bytes,
            max_timestamp_ms: entry.max_timestamp_ms,
        };
        let stream = |entry: StreamEntry| {
            let row = StreamRow {
                kind: entry.kind,
                epoch: StreamEpoch(entry.epoch),
                start: StreamOffset(entry.start),
                uploaded_end: StreamOffset(entry.uploaded_end),
                checkpoint: entry.checkpoint.map(|Hex(bytes)| Bytes::from(bytes)),
                ranges: entry.ranges.into_iter().map(range).collect(),
            };
            (StreamId(entry.id), row)
        };
        let incarnation = |entry: IncarnationEntry| Incarnation {
            after_version: entry.after_version,
            id: entry.id,
        };
        Snapshot {
            wal_id: self.wal_id,
            next_stream_id: self.next_stream_id,
            next_object_id: self.next_object_id,
            uploaded_log: LogOffset(self.uploaded_log),
            version: self.version,
            wal_mark: self.wal_mark,
            incarnations: self.incarnations.into_iter().map(incarnation).collect(),
            streams: self.streams.into_iter().map(stream).collect(),
            objects: self.objects.into_iter().map(|object| (object.id, object)).collect(),
            meta: self.meta.into_iter().map(|MetaEntry { key, value }| (key, value.0)).collect(),
        }
    }
}

/// A writer that computes the CRC32C of what is written through it.
struct Summed<W> {
    to: W,
    crc32c: u32,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.crc32c = crc32c::crc32c_append(self.crc32c, &bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Writes the contents of a catalog as JSON and returns the checksum in it.
///
/// # Errors
/// An error of the writer.
pub fn export(snapshot: &Snapshot, to: &mut dyn Write) -> io::Result<u32> {
    write!(to, "{{\"format_version\":{FORMAT_VERSION},\"content\":")?;
    let mut content = Summed { to: &mut *to, crc32c: 0 };
    serde_json::to_writer(&mut content, &Content::of(snapshot))?;
    let crc32c = content.crc32c;
    writeln!(to, ",\"crc32c\":{crc32c}}}")?;
    to.flush()?;
    Ok(crc32c)
}

/// Reads what [`export`] wrote, and checks that it is complete and valid contents of a catalog.
///
/// # Errors
/// The input is not an export, was changed, has another version, or breaks a rule of catalogs; or
/// an error of the reader.
pub fn read_export(from: &mut dyn Read) -> Result<Snapshot, CatalogError> {
    let Export { format_version, content, crc32c } = serde_json::from_reader(from)
        .map_err(|error| CatalogError::Failed(format!("not an export of a catalog: {error}")))?;
    if format_version != FORMAT_VERSION {
        return Err(CatalogError::Failed(format!(
            "the export has format version {format_version}, only {FORMAT_VERSION} is supported"
        )));
    }
    let snapshot = content.into_snapshot();
    // Computed over what was understood, which duplicate or reordered entries do not survive
    // unchanged.
    let mut canonical = Summed { to: io::sink(), crc32c: 0 };
    serde_json::to_writer(&mut canonical, &Content::of(&snapshot))
        .map_err(|error| CatalogError::Failed(error.to_string()))?;
    if canonical.crc32c != crc32c {
        return Err(CatalogError::Failed(format!(
            "the export does not match its checksum: it states {crc32c}, its contents have {}",
            canonical.crc32c
        )));
    }
    check(&snapshot)
        .map_err(|why| CatalogError::Refused(format!("the export is invalid: {why}")))?;
    Ok(snapshot)
}

/// Checks the rules of `docs/format/catalog.md` that are visible in a catalog at rest.
fn check(snapshot: &Snapshot) -> Result<(), String> {
    for (id, StreamRow { start, uploaded_end, ranges, .. }) in &snapshot.streams {
        if id.0 >= snapshot.next_stream_id {
            return Err(format!("stream {id}, but the next one is {}", snapshot.next_stream_id));
        }
        let mut before = StreamOffset(0);
        for range in ranges {
            let wrong = |what: &str| {
                Err(format!("range {}..{} of stream {id} {what}", range.start, range.end))
            };
            if range.start >= range.end {
                return wrong("is empty");
            }
            if range.start < before {
                return wrong("does not follow the previous one");
            }
            if range.end <= *start {
                return wrong("ends before the stream's start");
            }
            if range.end > *uploaded_end {
                return wrong("ends behind the uploaded end");
            }
            if !snapshot.objects.contains_key(&range.object) {
                return wrong("is in an object that does not exist");
            }
            before = range.end;
        }
    }
    if !snapshot.incarnations.is_sorted_by_key(|incarnation| incarnation.after_version)
        || snapshot
            .incarnations
            .last()
            .is_some_and(|incarnation| incarnation.after_version >= snapshot.version)
    {
        return Err("a run that begins after a later one or after the catalog's version".into());
    }
    if snapshot.incarnations.len() > INCARNATIONS_KEPT
        || snapshot.incarnations.iter().any(|incarnation| incarnation.id.is_nil())
    {
        return Err("more runs than a catalog keeps, or one without an id".into());
    }
    for (id, ObjectInfo { size_bytes, index_position, index_bytes, .. }) in &snapshot.objects {
        let end = index_position.checked_add(*index_bytes);
        if end.and_then(|end| end.checked_add(FOOTER_BYTES as u64)) != Some(*size_bytes)
            || *index_position < HEADER_BYTES as u64
        {
            return Err(format!("the parts of object {id} do not add up to its size"));
        }
    }
    match snapshot.objects.last_key_value() {
        Some((id, _)) if id.0 >= snapshot.next_object_id => {
            Err(format!("object {id}, but the next one is {}", snapshot.next_object_id))
        }
        _ => Ok(()),
    }
}

/// Puts `snapshot` into an empty catalog. After an error the catalog may hold a part of it and must
/// not be used. A catalog from before there were versions gets version 1.
///
/// # Errors
/// The catalog is not empty, refuses or fails; or it does not hold `snapshot` afterwards.
pub fn import(catalog: &dyn Catalog, snapshot: &Snapshot) -> Result<(), CatalogError> {
    if catalog.load()? != Snapshot::default() {
        return Err(CatalogError::Refused("the catalog is not empty".into()));
    }
    catalog.commit(&changes(snapshot))?;
    let expected = Snapshot { version: snapshot.version.max(1), ..snapshot.clone() };
    if catalog.load()? != expected {
        return Err(CatalogError::Failed("the catalog does not hold what was written".into()));
    }
    Ok(())
}

/// Returns the changes that turn an empty catalog into `snapshot`.
fn changes(snapshot: &Snapshot) -> Vec<Change> {
    let Snapshot {
        wal_id,
        next_stream_id,
        next_object_id,
        uploaded_log,
        version,
        wal_mark,
        incarnations,
        streams,
        objects,
        meta,
    } = snapshot;
    let mut changes = vec![
        Change::NextStreamId(StreamId(*next_stream_id)),
        Change::LogUploaded(*uploaded_log),
        Change::WalMarked(*wal_mark),
    ];
    changes.extend(wal_id.map(Change::BindWal));
    // A run begins after the version that was raised before it, and raises the version to that
    // before the next run.
    let raised = |after: u64| after.saturating_add(1);
    let first = incarnations.first().map_or(*version, |first| raised(first.after_version));
    changes.push(Change::BeginIncarnation { id: Uuid::nil(), version: first });
    let next = incarnations
        .iter()
        .skip(1)
        .map(|incarnation| raised(incarnation.after_version))
        .chain([*version]);
    let begin = |(incarnation, version): (&Incarnation, u64)| Change::BeginIncarnation {
        id: incarnation.id,
        version,
    };
    changes.extend(incarnations.iter().zip(next).map(begin));
    let put = |(key, value): (&String, &Vec<u8>)| Change::PutMeta {
        key: key.clone(),
        value: value.clone(),
    };
    changes.extend(meta.iter().map(put));
    // The next object's number follows from the greatest number so far, whose object may have been
    // removed.
    if let Some(last) = next_object_id.checked_sub(1).map(ObjectId)
        && !objects.contains_key(&last)
    {
        changes.extend([Change::AddObject(nothing(last)), Change::RemoveObject(last)]);
    }
    changes.extend(objects.values().cloned().map(Change::AddObject));
    for (id, row) in streams {
        let uploaded = |end: StreamOffset, range: Option<ObjectRange>, checkpoint| {
            Change::Uploaded(Uploaded {
                stream: *id,
                uploaded_end: end,
                start: row.start,
                checkpoint,
                range,
            })
        };
        changes.push(Change::CreateStream { id: *id, kind: row.kind });
        changes.push(Change::OpenStream { id: *id, epoch: row.epoch });
        let ranges = row.ranges.iter().cloned();
        changes.extend(ranges.map(|range| uploaded(range.end, Some(range), None)));
        changes.push(uploaded(row.uploaded_end, None, row.checkpoint.clone()));
    }
    changes
}

fn nothing(id: ObjectId) -> ObjectInfo {
    ObjectInfo {
        id,
        name: String::new(),
        size_bytes: 0,
        index_position: 0,
        index_bytes: 0,
        index_crc32c: 0,
        created_at_ms: 0,
        generation: 0,
        payload_bytes: 0,
    }
}

/// Creates an embedded catalog at `path` that holds `snapshot`: completely, or not at all. The
/// caller ensures that no other process creates one there at the same time. Blocking.
///
/// # Errors
/// A catalog exists at `path`, or it cannot be created.
pub fn import_file(path: &Path, snapshot: &Snapshot) -> Result<(), CatalogError> {
    let failed = |what: &str, error: io::Error| {
        CatalogError::Failed(format!("{}: {what}: {error}", path.display()))
    };
    let exists =
        path.try_exists().map_err(|error| failed("cannot check whether it exists", error))?;
    if exists {
        return Err(CatalogError::Refused(format!("{}: a catalog exists already", path.display())));
    }
    // In the same directory, so that it can be renamed. One left there by a crash is useless.
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".import");
    let unfinished = PathBuf::from(unfinished);
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(failed("cannot remove the remains of an earlier import", error));
        }
        _ => {}
    }
    let catalog = RedbCatalog::open(&unfinished)?;
    import(&catalog, snapshot)?;
    // Closed before it gets its name, so that it does not need repair when it is opened.
    drop(catalog);
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(&unfinished)
        .and_then(|file| file.sync_all())
        .and_then(|()| std::fs::rename(&unfinished, path))
        .and_then(|()| File::open(directory.unwrap_or(Path::new(".")))?.sync_all())
        .map_err(|error| failed("cannot rename the new catalog", error))
}

#[cfg(test)]
mod tests {
    use super::super::{MemoryCatalog, conformance};
    use super::*;

    /// A catalog with something of everything, in which the last object was removed.
    fn filled() -> Snapshot {
        let catalog = MemoryCatalog::default();
        conformance::fill(&catalog);
        let range = |object, start, end| ObjectRange {
            object: ObjectId(object),
            start: StreamOffset(start),
            end: StreamOffset(end),
            payload_bytes: u64::MAX,
            max_timestamp_ms: -1,
        };
        let uploaded = |end: u64, range| {
            Change::Uploaded(Uploaded {
                stream: StreamId(0),
                uploaded_end: StreamOffset(end),
                start: StreamOffset(3),
                checkpoint: None,
                range,
            })
        };
        let last = ObjectId(u64::MAX >> 1);
        catalog
            .commit(&[
                uploaded(30, Some(range(1, 12, 30))),
                uploaded(40, None),
                Change::TrimStream { id: StreamId(1), epoch: StreamEpoch(3), to: StreamOffset(9) },
                Change::OpenStream { id: StreamId(1), epoch: StreamEpoch(u64::MAX) },
                Change::PutMeta { key: "quote \" and \u{e9}".into(), value: vec![0, 0xff] },
                Change::AddObject(nothing(last)),
                Change::RemoveObject(last),
                Change::WalMarked(3),
            ])
            .unwrap();
        for incarnation in 1..3 {
            let version = incarnation << 32;
            catalog
                .commit(&[Change::BeginIncarnation { id: Uuid::from_u128(7), version }])
                .unwrap();
            catalog.commit(&[]).unwrap();
        }
        catalog.load().unwrap()
    }

    fn exported(snapshot: &Snapshot) -> Vec<u8> {
        let mut text = Vec::new();
        export(snapshot, &mut text).unwrap();
        text
    }

    fn read(mut text: &[u8]) -> Result<Snapshot, String> {
        read_export(&mut text).map_err(|error| error.to_string())
    }

    #[test]
    fn an_export_is_imported_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        for (name, snapshot) in [("empty", Snapshot::default()), ("filled", filled())] {
            let found = read(&exported(&snapshot)).unwrap();
            assert_eq!(found, snapshot);
            let path = directory.path().join(name);
            import_file(&path, &found).unwrap();
            let snapshot = Snapshot { version: snapshot.version.max(1), ..snapshot };
            assert_eq!(RedbCatalog::open(&path).unwrap().load().unwrap(), snapshot);
            let memory = MemoryCatalog::default();
            import(&memory, &found).unwrap();
            assert_eq!(memory.load().unwrap(), snapshot);
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "and nothing else");
    }

    /// The oldest run that is kept did not begin with the catalog.
    #[test]
    fn all_runs_that_a_catalog_keeps_are_imported() {
        let catalog = MemoryCatalog::default();
        for incarnation in 0..INCARNATIONS_KEPT as u64 + 2 {
            let change = Change::BeginIncarnation {
                id: Uuid::from_u128(incarnation.into()),
                version: incarnation << 32,
            };
            catalog.commit(&[change]).unwrap();
        }
        let snapshot = catalog.load().unwrap();
        assert_eq!(snapshot.incarnations.len(), INCARNATIONS_KEPT);
        let imported = MemoryCatalog::default();
        import(&imported, &snapshot).unwrap();
        assert_eq!(imported.load().unwrap(), snapshot);
    }

    /// A catalog of before there were runs, or one with a great version: the import does not count
    /// up to it.
    #[test]
    fn a_great_version_costs_an_import_nothing() {
        let version = u64::MAX - 1;
        let first = Incarnation { after_version: version - 7, id: Uuid::from_u128(1) };
        for incarnations in [vec![], vec![first], vec![Incarnation { after_version: 0, ..first }]] {
            let snapshot = Snapshot { version, incarnations, ..Snapshot::default() };
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("catalog");
            import_file(&path, &read(&exported(&snapshot)).unwrap()).unwrap();
            assert_eq!(RedbCatalog::open(&path).unwrap().load().unwrap(), snapshot);
            let memory = MemoryCatalog::default();
            import(&memory, &snapshot).unwrap();
            assert_eq!(memory.load().unwrap(), snapshot);
        }
    }

    /// An export of before there were epochs has none, and is complete.
    #[test]
    fn an_export_without_epochs_is_one_of_epoch_0() {
        let mut snapshot = filled();
        let text = String::from_utf8(exported(&snapshot)).unwrap();
        assert_eq!(
            text.matches("\"epoch\":").count(),
            1,
            "only for stream 1, since stream 0 has epoch 0"
        );
        for row in snapshot.streams.values_mut() {
            row.epoch = StreamEpoch(0);
        }
        let text = exported(&snapshot);
        assert!(!text.windows(5).any(|word| word == b"epoch"));
        assert_eq!(read(&text), Ok(snapshot));
    }

    /// White space and the form of an escaped character do not matter.
    #[test]
    fn every_flipped_bit_is_refused_or_has_no_effect() {
        let snapshot = filled();
        let text = exported(&snapshot);
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut flipped = text.clone();
                flipped[at] ^= 1 << bit;
                if let Ok(found) = read(&flipped) {
                    assert_eq!(found, snapshot, "bit {bit} of byte {at}");
                }
            }
            assert!(at + 1 == text.len() || read(&text[..at]).is_err(), "cut at {at}");
        }
        let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let pretty = serde_json::to_vec_pretty(&value);
        assert_eq!(read(&pretty.unwrap()), Ok(snapshot), "the order of the keys does not matter");
    }

    #[test]
    fn an_export_with_impossible_contents_is_refused() {
        type Break = fn(&mut Snapshot);
        let id = StreamId(0);
        let cases: [(&str, Break); 13] = [
            ("stream 1, but the next one is 1", |s| s.next_stream_id = 1),
            ("but the next one is 1", |s| s.next_object_id = 1),
            ("is empty", |s| ranges(s)[0].end = StreamOffset(0)),
            ("does not follow", |s| ranges(s).swap(0, 1)),
            ("does not follow", |s| ranges(s)[1].start = StreamOffset(9)),
            ("before the stream's start", |s| row(s).start = StreamOffset(10)),
            ("behind the uploaded end", |s| row(s).uploaded_end = StreamOffset(29)),
            ("a run", |s| s.version = 7),
            ("does not exist", |s| drop(s.objects.remove(&ObjectId(1)))),
            ("do not add up to its size", |s| object(s).index_bytes = 1 << 40),
            ("do not add up to its size", |s| object(s).index_position = u64::MAX),
            ("without an id", |s| s.incarnations[1].id = Uuid::nil()),
            ("more runs", |s| s.incarnations = vec![s.incarnations[0]; INCARNATIONS_KEPT + 1]),
        ];
        fn row(snapshot: &mut Snapshot) -> &mut StreamRow {
            snapshot.streams.get_mut(&StreamId(0)).unwrap()
        }
        fn object(snapshot: &mut Snapshot) -> &mut ObjectInfo {
            snapshot.objects.get_mut(&ObjectId(1)).unwrap()
        }
        fn ranges(snapshot: &mut Snapshot) -> &mut Vec<ObjectRange> {
            &mut row(snapshot).ranges
        }
        assert_eq!(filled().streams[&id].ranges.len(), 2);
        for (reason, change) in cases {
            let mut snapshot = filled();
            change(&mut snapshot);
            let error = read(&exported(&snapshot)).unwrap_err();
            assert!(error.contains(reason), "{reason}: {error}");
        }
        let other = exported(&filled()).to_vec();
        let other = String::from_utf8(other).unwrap().replacen("version\":1", "version\":2", 1);
        assert!(read(other.as_bytes()).unwrap_err().contains("format version 2"));
        // Of two entries with the same key only one would be left.
        let twice = String::from_utf8(exported(&Snapshot::default())).unwrap();
        let entry = r#"{"key":"k","value":""}"#;
        let twice = twice.replace(r#""meta":[]"#, &format!(r#""meta":[{entry},{entry}]"#));
        let canonical = twice.split_once("\"content\":").unwrap().1.rsplit_once(",\"crc32c\"");
        let crc = crc32c::crc32c(canonical.unwrap().0.as_bytes());
        let twice = format!("{}:{crc}}}", twice.rsplit_once(':').unwrap().0);
        assert!(read(twice.as_bytes()).unwrap_err().contains("checksum"), "{twice}");
    }

    #[test]
    fn an_import_replaces_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("catalog");
        std::fs::write(directory.path().join("catalog.import"), "of a crash").unwrap();
        import_file(&path, &filled()).unwrap();
        let error = import_file(&path, &Snapshot::default()).unwrap_err().to_string();
        assert!(error.contains("a catalog exists already"), "{error}");
        let catalog = RedbCatalog::open(&path).unwrap();
        assert!(import(&catalog, &Snapshot::default()).is_err());
        assert_eq!(catalog.load().unwrap(), filled());
    }
}
