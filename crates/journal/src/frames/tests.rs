//! Records of all lengths around the borders of frames, and files damaged anywhere.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use alluvium_device::sim::Random;

use super::*;
use crate::files::Directory;
use crate::files::sim::SimDirectory;
use crate::hash::KeyHash;
use crate::journal::CacheId;
use crate::position::Granule;
use crate::record::{Content, NewRecord};

const SALT: Salt = Salt(0x5a17);
const NUMBER: JournalNumber = JournalNumber(5);
const NAME: &str = "compressed";
const JOURNAL_BYTES: usize = 8 << 20;
const CODECS: [Compression; 3] = [Compression::Lz4, Compression::Zstd, Compression::Snappy];

/// A plain journal, and the positions of its records.
struct Plain {
    bytes: Vec<u8>,
    records: Vec<(Position, Range<usize>)>,
}

impl Plain {
    /// Creates many records that end or begin a few bytes from the border of a frame, short ones in
    /// between, and some that span several frames.
    fn around_borders(random: &mut Random, frame_bytes: usize, total_bytes: usize) -> Self {
        let mut plain = Self { bytes: vec![0; FIRST_RECORD], records: Vec::new() };
        while plain.bytes.len() < total_bytes {
            let to_border = frame_bytes - (plain.bytes.len() - FIRST_RECORD) % frame_bytes;
            let record_bytes = match random.below(10) {
                0..4 => (to_border + random.index(48)).saturating_sub(24),
                4 => to_border + random.index(3) * frame_bytes,
                5 => random.index(7 * frame_bytes),
                _ => random.index(500),
            };
            plain.push(random, record_bytes.saturating_sub(24));
        }
        plain
    }

    /// Appends a record with a key of 8 bytes. Some values are compressible; none contains zeroes,
    /// which mark damage.
    fn push(&mut self, random: &mut Random, value_bytes: usize) {
        let key = self.records.len().to_le_bytes();
        let mask = if random.chance(0.3) { 0xff } else { 0x03 };
        let value: Vec<u8> = (0..value_bytes).map(|_| random.next_u64() as u8 & mask | 1).collect();
        let content = Content::Value { value: &value, expires_at: None };
        let record = NewRecord { key: &key, content };
        let at = self.bytes.len();
        self.bytes.resize(at + record.len_bytes(), 0);
        let first = Granule::at(at);
        record.write(&mut self.bytes[at..], SALT, NUMBER, first);
        let range = at..self.bytes.len();
        self.bytes.resize(range.end.next_multiple_of(8), 0);
        let hash = KeyHash { high: 0, fingerprint: 0 };
        self.records.push((Position::new(NUMBER, first, range.len(), false, hash), range));
    }
}

struct Scene {
    directory: SimDirectory,
    file: Arc<dyn File>,
    blocks: Arc<Blocks>,
    frames: Frames,
}

impl Scene {
    fn of(plain: &Plain, frame_bytes: usize, compression: Compression, block_bytes: usize) -> Self {
        let directory = SimDirectory::default();
        let file = directory.create(NAME, PAGE_BYTES as u64).unwrap();
        let mut encoder = Encoder::new(compression).unwrap().unwrap();
        let mut writer = Writer::new(&*file, SALT, frame_bytes, &mut encoder).unwrap();
        for frame in plain.bytes[FIRST_RECORD..].chunks(frame_bytes) {
            writer.push(frame).unwrap();
        }
        let header = JournalHeader {
            cache: CacheId([1; 16]),
            number: NUMBER,
            salt: SALT,
            is_compressed: true,
        };
        let len = writer.finish(&header, plain.bytes.len()).unwrap();
        assert_eq!(file.len_bytes().unwrap(), len);
        let mut page = AlignedBuf::zeroed(PAGE_BYTES);
        file.read_at(0, &mut page).unwrap();
        assert_eq!(JournalHeader::parse(&page), Some(header));
        let blocks = Arc::new(Blocks::new(block_bytes));
        let frames = Frames::open(&*file, NUMBER, SALT, JOURNAL_BYTES, &blocks).unwrap().unwrap();
        Self { directory, file, blocks, frames }
    }

    fn source(&self) -> Source<'_> {
        Source::file(&*self.file, Path::new(NAME))
    }

    fn load(&self, position: Position) -> Option<Loaded> {
        self.frames.load(self.source(), position).unwrap()
    }

    fn open_again(&self, salt: Salt) -> Option<Frames> {
        Frames::open(&*self.file, NUMBER, salt, JOURNAL_BYTES, &self.blocks).unwrap()
    }
}

#[test]
fn records_around_frame_borders_are_found() {
    for seed in 0..12 {
        let mut random = Random::new(seed);
        let frame_bytes = [PAGE_BYTES, 16 << 10, 64 << 10, 256 << 10][seed as usize % 4];
        let plain = Plain::around_borders(&mut random, frame_bytes, 2 << 20);
        let compression = CODECS[seed as usize % 3];
        let block_bytes = [0, 300 << 10, 16 << 20][seed as usize / 4];
        let scene = Scene::of(&plain, frame_bytes, compression, block_bytes);
        assert_eq!(scene.frames.end(), plain.bytes.len());
        assert_eq!(scene.frames.compression(), compression);
        for round in 0..2 {
            for (position, range) in &plain.records {
                let loaded = scene.load(*position);
                let loaded = loaded.unwrap_or_else(|| panic!("seed {seed}: {range:?}"));
                assert!(
                    loaded.bytes() == &plain.bytes[range.clone()],
                    "seed {seed}, {round}: {range:?}"
                );
                // Nothing is returned for a position that belongs to another journal or is wrong.
                let hash = KeyHash { high: 0, fingerprint: 0 };
                let wrong = Granule(position.first().0 + 1);
                let wrong = Position::new(NUMBER, wrong, range.len(), false, hash);
                assert!(scene.load(wrong).is_none(), "seed {seed}: {range:?}");
            }
        }
        let mut memory = vec![0xee; JOURNAL_BYTES];
        scene.frames.read_whole(scene.source(), &mut memory).unwrap();
        assert!(memory[..plain.bytes.len()] == plain.bytes[..], "seed {seed}");
    }
}

#[test]
fn only_records_of_a_damaged_frame_are_lost() {
    let mut random = Random::new(7);
    let frame_bytes = 16 << 10;
    let plain = Plain::around_borders(&mut random, frame_bytes, 1 << 20);
    let scene = Scene::of(&plain, frame_bytes, Compression::Lz4, 0);
    for frame in [0, 1, 17, scene.frames.frames.len() - 1] {
        let stored = scene.frames.stored(frame).unwrap();
        let at = stored.start + random.index(stored.len());
        scene.directory.corrupt(NAME, at);
        let lost = scene.frames.plain(frame);
        for (position, range) in &plain.records {
            let is_hit = range.start < lost.end && lost.start < range.end;
            let loaded = scene.load(*position);
            assert_eq!(loaded.is_none(), is_hit, "frame {frame}: {range:?}");
        }
        let mut memory = vec![0xee; JOURNAL_BYTES];
        scene.frames.read_whole(scene.source(), &mut memory).unwrap();
        let mut expected = plain.bytes.clone();
        expected[lost].fill(0);
        assert!(memory[..expected.len()] == expected[..], "frame {frame}");
        scene.directory.corrupt(NAME, at);
    }
}

#[test]
fn a_damaged_frame_table_is_not_used() {
    let plain = Plain::around_borders(&mut Random::new(8), 16 << 10, 1 << 20);
    let scene = Scene::of(&plain, 16 << 10, Compression::Zstd, 0);
    let len = scene.file.len_bytes().unwrap() as usize;
    let table_end = scene.frames.stored_end + scene.frames.frames.len() * ENTRY_BYTES;
    for at in (scene.frames.stored_end..table_end).chain(len - FIELDS_BYTES..len) {
        scene.directory.corrupt(NAME, at);
        assert!(scene.open_again(SALT).is_none(), "byte {at}");
        scene.directory.corrupt(NAME, at);
    }
    assert!(scene.open_again(SALT).is_some());
    assert!(scene.open_again(Salt(!SALT.0)).is_none());
    // Without its last page, or without a part of it.
    for cut in [len - 1, len - PAGE_BYTES, 0] {
        scene.file.truncate(cut as u64).unwrap();
        assert!(scene.open_again(SALT).is_none(), "{cut} bytes");
    }
    let lost = Frames::lost(NUMBER, SALT, plain.bytes.len(), &scene.blocks);
    for (position, _) in &plain.records {
        assert!(lost.load(scene.source(), *position).unwrap().is_none());
        assert!(lost.pages(*position).is_none());
    }
}

/// The checksums are right, but a journal cannot be loaded or iterated up to such an end.
#[test]
fn an_end_that_is_not_on_a_granule_is_not_used() {
    let plain = Plain::around_borders(&mut Random::new(8), 16 << 10, 1 << 20);
    let scene = Scene::of(&plain, 16 << 10, Compression::Lz4, 0);
    let header =
        JournalHeader { cache: CacheId([1; 16]), number: NUMBER, salt: SALT, is_compressed: true };
    for end in [plain.bytes.len(), plain.bytes.len() - 1, plain.bytes.len() - 4] {
        let mut encoder = Encoder::new(Compression::Lz4).unwrap().unwrap();
        let mut writer = Writer::new(&*scene.file, SALT, 16 << 10, &mut encoder).unwrap();
        for frame in plain.bytes[FIRST_RECORD..end].chunks(16 << 10) {
            writer.push(frame).unwrap();
        }
        let len = writer.finish(&header, end).unwrap();
        scene.file.truncate(len).unwrap();
        assert_eq!(scene.open_again(SALT).is_some(), end.is_multiple_of(8), "{end}");
    }
}

#[test]
fn the_block_cache_is_bounded_and_held_values_stay() {
    const MAX: usize = 512 << 10;
    let mut random = Random::new(9);
    let mut plain = Plain { bytes: vec![0; FIRST_RECORD], records: Vec::new() };
    while plain.bytes.len() < 4 << 20 {
        plain.push(&mut random, 1000);
    }
    let scene = Scene::of(&plain, 16 << 10, Compression::Lz4, MAX);
    let reads = AtomicU64::new(0);
    let mut held = Vec::new();
    for (position, _) in &plain.records {
        let source = scene.source().with(&[], &reads);
        held.push(scene.frames.load(source, *position).unwrap().unwrap());
        assert!(scene.blocks.bytes() <= MAX + 1024, "{}", scene.blocks.bytes());
    }
    // Each frame is read once, however many records of it are read, since neighbours are read in
    // sequence here.
    let frames = scene.frames.frames.len() as u64;
    let count = reads.load(Ordering::Relaxed);
    assert!((frames..2 * frames).contains(&count), "{count} reads of {frames} frames");
    for (loaded, (_, range)) in held.iter().zip(&plain.records) {
        assert!(loaded.bytes() == &plain.bytes[range.clone()]);
    }
}
