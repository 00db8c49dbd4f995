//! The superblock: its bytes, which of two copies counts, and which one is written next.
//! `docs/format/volume-store.md`, sections 3 and 8.

use std::fmt;

use alluvium_wal::{DeviceOffset, LogOffset};
use uuid::Uuid;

use super::error::{Ahead, CopyDamage, StoreError};
use super::layout::{Layout, SUPERBLOCK_AT, SUPERBLOCK_BYTES};
use super::{field, is_zero, put, u32_at, u64_at};
use crate::fields::FieldError;
use crate::types::{CheckpointNumber, ServerId};

const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"ALLUVSTO";
/// Greatest length of a cluster id in bytes.
const MAX_CLUSTER_BYTES: usize = 249;

const VERSION_AT: usize = 8;
const FLAGS_AT: usize = VERSION_AT + 4;
const STORE_ID_AT: usize = FLAGS_AT + 4;
const WAL_ID_AT: usize = STORE_ID_AT + 16;
const GENERATION_AT: usize = WAL_ID_AT + 16;
const CAPACITY_AT: usize = GENERATION_AT + 8;
const MAX_CAPACITY_AT: usize = CAPACITY_AT + 8;
const CHECKPOINT_AT: usize = MAX_CAPACITY_AT + 8;
const WAL_OFFSET_AT: usize = CHECKPOINT_AT + 8;
const WRITTEN_AT: usize = WAL_OFFSET_AT + 8;
const SERVER_AT: usize = WRITTEN_AT + 8;
const CLUSTER_BYTES_AT: usize = SERVER_AT + 4;
const CLUSTER_AT: usize = CLUSTER_BYTES_AT + 4;
const RESERVED_AT: usize = CLUSTER_AT + 256;
const CRC_AT: usize = 508;
const _: () = assert!(CHECKPOINT_AT == 72 && CLUSTER_AT == 104 && RESERVED_AT == 360);

/// Generations and log offsets are below it: the sum with one or with a length never overflows.
const COUNT_LIMIT: u64 = 1 << 63;

/// What a superblock copy states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Identity of the store, fixed when it was formatted.
    pub store_id: Uuid,
    /// Identity of the log that belongs to the store.
    pub wal_id: Uuid,
    /// The number of this copy: each one that is written has the next number.
    pub generation: u64,
    /// Capacity and maximum capacity, and what follows from them.
    pub layout: Layout,
    /// The checkpoint that has written the copy; 0 in a new store.
    pub checkpoint: CheckpointNumber,
    /// An offset up to which the log was durable when the copy was written.
    pub wal_offset: LogOffset,
    /// Unix time in milliseconds, for information only.
    pub written_at_ms: u64,
    /// The server that the store belongs to.
    pub server: ServerId,
    /// The cluster of the server, 1 to 249 bytes.
    pub cluster: String,
}

impl Superblock {
    /// Encodes the copy with the zeros at its end.
    ///
    /// # Panics
    /// If a field is out of its bounds.
    pub fn encode(&self, page: &mut [u8; SUPERBLOCK_BYTES]) {
        assert!(self.generation < COUNT_LIMIT, "generation {}", self.generation);
        assert!(self.wal_offset.0 < COUNT_LIMIT, "log offset {}", self.wal_offset);
        assert!(self.checkpoint.0 < 1 << 32, "checkpoint {}", self.checkpoint);
        assert!(self.server.0 > 0, "a store belongs to a server");
        let cluster = self.cluster.as_bytes();
        assert!((1..=MAX_CLUSTER_BYTES).contains(&cluster.len()), "cluster {}", self.cluster);
        page.fill(0);
        put(page, 0, &MAGIC);
        put(page, VERSION_AT, &VERSION.to_le_bytes());
        put(page, STORE_ID_AT, self.store_id.as_bytes());
        put(page, WAL_ID_AT, self.wal_id.as_bytes());
        put(page, GENERATION_AT, &self.generation.to_le_bytes());
        put(page, CAPACITY_AT, &self.layout.capacity_bytes().to_le_bytes());
        put(page, MAX_CAPACITY_AT, &self.layout.max_capacity_bytes().to_le_bytes());
        put(page, CHECKPOINT_AT, &self.checkpoint.0.to_le_bytes());
        put(page, WAL_OFFSET_AT, &self.wal_offset.0.to_le_bytes());
        put(page, WRITTEN_AT, &self.written_at_ms.to_le_bytes());
        put(page, SERVER_AT, &self.server.0.to_le_bytes());
        put(page, CLUSTER_BYTES_AT, &(cluster.len() as u16).to_le_bytes());
        put(page, CLUSTER_AT, cluster);
        let crc = crc32c::crc32c(&page[..CRC_AT]);
        put(page, CRC_AT, &crc.to_le_bytes());
    }

    /// Reads the fields of a copy whose magic, checksum, version and flags are right.
    fn read(page: &[u8; SUPERBLOCK_BYTES]) -> Result<Self, CopyDamage> {
        let bounded = |name, at, limit| match u64_at(page, at) {
            value if value < limit => Ok(value),
            value => Err(FieldError::Field { field: name, value }),
        };
        let server = u32_at(page, SERVER_AT);
        if server == 0 {
            return Err(FieldError::Field { field: "server id", value: 0 }.into());
        }
        Ok(Self {
            store_id: Uuid::from_bytes(field(page, STORE_ID_AT)),
            wal_id: Uuid::from_bytes(field(page, WAL_ID_AT)),
            generation: bounded("generation", GENERATION_AT, COUNT_LIMIT)?,
            layout: Layout::new(u64_at(page, CAPACITY_AT), u64_at(page, MAX_CAPACITY_AT))?,
            checkpoint: CheckpointNumber(bounded("checkpoint number", CHECKPOINT_AT, 1 << 32)?),
            wal_offset: LogOffset(bounded("log offset", WAL_OFFSET_AT, COUNT_LIMIT)?),
            written_at_ms: u64_at(page, WRITTEN_AT),
            server: ServerId(server),
            cluster: read_cluster(page)?,
        })
    }

    /// Refuses a store that is larger than its device.
    pub fn check_device(&self, device_bytes: u64) -> Result<(), StoreError> {
        let capacity_bytes = self.layout.capacity_bytes();
        match capacity_bytes <= device_bytes {
            true => Ok(()),
            false => Err(StoreError::LargerThanDevice { capacity_bytes, device_bytes }),
        }
    }

    /// Refuses the store of another log or server.
    pub fn check_owner(&self, owner: &Owner) -> Result<(), StoreError> {
        let differs = |field, found: &dyn fmt::Display, expected: &dyn fmt::Display| {
            let (found, expected) = (found.to_string(), expected.to_string());
            Err(StoreError::ForeignStore { field, found, expected })
        };
        if self.wal_id != owner.wal_id {
            return differs("log id", &self.wal_id, &owner.wal_id);
        }
        if self.cluster != owner.cluster {
            return differs("cluster id", &self.cluster, &owner.cluster);
        }
        if self.server != owner.server {
            return differs("server id", &self.server, &owner.server);
        }
        if self.store_id != owner.store_id {
            return differs("store id", &self.store_id, &owner.store_id);
        }
        Ok(())
    }

    /// Refuses a store and a log that are not as one crash leaves them. `log` is the number of the
    /// last complete checkpoint in the log, 0 if there is none, and `end` the log's end.
    ///
    /// A number of `log` + 1 is that of a checkpoint that a crash has interrupted.
    pub fn check_log(&self, log: CheckpointNumber, end: LogOffset) -> Result<(), StoreError> {
        let store = self.checkpoint;
        if store < log {
            return Err(StoreError::StoreBehindLog { store, log });
        }
        if store.0 - log.0 > 1 {
            return Err(StoreError::LogBehindStore(Ahead::Superblock { store, log }));
        }
        if self.wal_offset > end {
            let durable = self.wal_offset;
            return Err(StoreError::LogBehindStore(Ahead::Offset { durable, end }));
        }
        Ok(())
    }
}

fn read_cluster(page: &[u8; SUPERBLOCK_BYTES]) -> Result<String, CopyDamage> {
    let len = usize::from(u16::from_le_bytes(field(page, CLUSTER_BYTES_AT)));
    if !(1..=MAX_CLUSTER_BYTES).contains(&len) {
        let value = len as u64;
        return Err(FieldError::Field { field: "length of the cluster id", value }.into());
    }
    let (text, padding) = page[CLUSTER_AT..RESERVED_AT].split_at(len);
    match str::from_utf8(text) {
        Ok(text) if is_zero(padding) => Ok(text.to_owned()),
        _ => Err(CopyDamage::Cluster),
    }
}

/// What a store belongs to, as the log and the server's registration state it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Identity of the log, from its header.
    pub wal_id: Uuid,
    /// Identity of the store.
    pub store_id: Uuid,
    /// The server.
    pub server: ServerId,
    /// Its cluster.
    pub cluster: String,
}

/// What is at the position of a superblock copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyState {
    /// A copy that may count.
    Valid(Superblock),
    /// A copy of another version or with an unknown flag. Nothing else is known of it.
    Future {
        /// The version.
        version: u32,
        /// The flags.
        flags: u32,
    },
    /// The magic of a copy, and something else is wrong.
    Damaged(CopyDamage),
    /// The device could not read it.
    Unreadable,
    /// The whole page is zero.
    Zero,
    /// Neither zeros nor the magic of a copy.
    Other,
}

impl CopyState {
    /// Decodes the page of a copy. Reserved bytes are ignored.
    pub fn decode(page: &[u8; SUPERBLOCK_BYTES]) -> Self {
        if page[..VERSION_AT] != MAGIC {
            return if is_zero(page) { Self::Zero } else { Self::Other };
        }
        if crc32c::crc32c(&page[..CRC_AT]) != u32_at(page, CRC_AT) {
            return Self::Damaged(CopyDamage::Checksum);
        }
        let (version, flags) = (u32_at(page, VERSION_AT), u32_at(page, FLAGS_AT));
        if (version, flags) != (VERSION, 0) {
            return Self::Future { version, flags };
        }
        match Superblock::read(page) {
            Ok(superblock) => Self::Valid(superblock),
            Err(damage) => Self::Damaged(damage),
        }
    }

    fn valid(&self) -> Option<&Superblock> {
        match self {
            Self::Valid(superblock) => Some(superblock),
            _ => None,
        }
    }
}

impl fmt::Display for CopyState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Valid(superblock) => write!(f, "a copy of generation {}", superblock.generation),
            Self::Future { version, .. } => write!(f, "a copy of version {version}"),
            Self::Damaged(damage) => write!(f, "a damaged copy: {damage}"),
            Self::Unreadable => f.write_str("an unreadable page"),
            Self::Zero => f.write_str("zeros"),
            Self::Other => f.write_str("other data"),
        }
    }
}

/// The superblock that counts, and which copy has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Current {
    superblock: Superblock,
    position: usize,
}

impl Current {
    /// The first copy of a new store. [`Current::repeated`] is the second one.
    ///
    /// # Panics
    /// When it is encoded, if the owner's cluster id or server id is out of its bounds.
    pub fn format(owner: Owner, layout: Layout, written_at_ms: u64) -> Self {
        let Owner { wal_id, store_id, server, cluster } = owner;
        let superblock = Superblock {
            store_id,
            wal_id,
            generation: 1,
            layout,
            checkpoint: CheckpointNumber(0),
            wal_offset: LogOffset(0),
            written_at_ms,
            server,
            cluster,
        };
        Self { superblock, position: 0 }
    }

    /// What the copy states.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Where the copy is, or is to be written.
    pub fn at(&self) -> DeviceOffset {
        SUPERBLOCK_AT[self.position]
    }

    /// The next copy, with the same fields, at the other position. It counts when it is durable.
    #[must_use]
    pub fn repeated(&self, written_at_ms: u64) -> Self {
        let generation = self.superblock.generation + 1;
        let superblock = Superblock { generation, written_at_ms, ..self.superblock.clone() };
        Self { superblock, position: 1 - self.position }
    }

    /// The next copy, written by a checkpoint. `wal_offset` is durable in the log.
    ///
    /// # Panics
    /// If number or offset go back.
    #[must_use]
    pub fn checkpointed(
        &self,
        number: CheckpointNumber,
        wal_offset: LogOffset,
        written_at_ms: u64,
    ) -> Self {
        let Superblock { checkpoint, wal_offset: durable, .. } = self.superblock;
        assert!(number >= checkpoint, "checkpoint {number} after {checkpoint}");
        assert!(wal_offset >= durable, "log durable up to {wal_offset} after {durable}");
        let mut next = self.repeated(written_at_ms);
        (next.superblock.checkpoint, next.superblock.wal_offset) = (number, wal_offset);
        next
    }

    /// The next copy of a store whose replicas are all lost, with number and log offset of the
    /// checkpoint that lists none. The log may be one that ends before the former offset.
    ///
    /// # Panics
    /// If the number goes back.
    #[must_use]
    pub fn restarted(
        &self,
        number: CheckpointNumber,
        wal_offset: LogOffset,
        written_at_ms: u64,
    ) -> Self {
        let before = self.superblock.checkpoint;
        assert!(number >= before, "checkpoint {number} after {before}");
        let mut next = self.repeated(written_at_ms);
        (next.superblock.checkpoint, next.superblock.wal_offset) = (number, wal_offset);
        next
    }

    /// The next copy, with the layout of the store after growth.
    ///
    /// # Panics
    /// If the layout is not that of a larger store with this maximum capacity.
    #[must_use]
    pub fn grown(&self, layout: Layout, written_at_ms: u64) -> Self {
        let before = &self.superblock.layout;
        assert_eq!(layout.max_capacity_bytes(), before.max_capacity_bytes(), "it is fixed");
        assert!(layout.capacity_bytes() >= before.capacity_bytes(), "a store does not shrink");
        let mut next = self.repeated(written_at_ms);
        next.superblock.layout = layout;
        next
    }
}

/// The copy that counts, and what is known of the other one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The copy that counts.
    pub current: Current,
    /// Checkpoint and layout of the other copy, if it is valid.
    other: Option<(CheckpointNumber, Layout)>,
}

impl Chosen {
    /// The copy that an opening writes durably before anything else, if the other copy could not
    /// replace the one that counts: it is not valid, has a number below that of the last complete
    /// checkpoint in the log, or another capacity.
    pub fn repair(&self, log: CheckpointNumber, written_at_ms: u64) -> Option<Current> {
        match self.other {
            Some((checkpoint, layout))
                if checkpoint >= log && layout == self.current.superblock.layout =>
            {
                None
            }
            _ => Some(self.current.repeated(written_at_ms)),
        }
    }
}

/// Chooses the copy that counts.
///
/// # Errors
/// None counts, or the two are not of one store.
pub fn choose(copies: &[CopyState; 2]) -> Result<Chosen, StoreError> {
    for copy in copies {
        if let CopyState::Future { version, flags } = *copy {
            return Err(StoreError::FutureVersion { found: "superblock", version, flags });
        }
    }
    let chosen = |position: usize, other: Option<&Superblock>| Chosen {
        current: Current {
            superblock: copies[position].valid().expect("a valid copy counts").clone(),
            position,
        },
        other: other.map(|other| (other.checkpoint, other.layout)),
    };
    match [&copies[0], &copies[1]].map(CopyState::valid) {
        [Some(first), Some(second)] => {
            if let Some(field) = conflict(first, second) {
                return Err(StoreError::SuperblockConflict { field });
            }
            let position = usize::from(second.generation > first.generation);
            Ok(chosen(position, copies[1 - position].valid()))
        }
        [Some(_), None] => Ok(chosen(0, None)),
        [None, Some(_)] => Ok(chosen(1, None)),
        [None, None] => Err(no_copy(copies)),
    }
}

/// The field in which two copies are not of one store.
fn conflict(a: &Superblock, b: &Superblock) -> Option<&'static str> {
    let conflicts = [
        ("store id", a.store_id != b.store_id),
        ("log id", a.wal_id != b.wal_id),
        ("server id", a.server != b.server),
        ("cluster id", a.cluster != b.cluster),
        ("maximum capacity", a.layout.max_capacity_bytes() != b.layout.max_capacity_bytes()),
        ("generation", a.generation == b.generation),
    ];
    conflicts.into_iter().find(|(_, differs)| *differs).map(|(field, _)| field)
}

/// The error if no copy is valid and none is from the future.
fn no_copy(copies: &[CopyState; 2]) -> StoreError {
    let is_damage = |copy| matches!(copy, &CopyState::Damaged(_) | &CopyState::Unreadable);
    if copies.iter().any(is_damage) {
        return StoreError::SuperblockDamaged {
            copies: [&copies[0], &copies[1]].map(ToString::to_string),
        };
    }
    match copies {
        [CopyState::Zero, CopyState::Zero] => StoreError::NotFormatted,
        _ => StoreError::NotAStore { looks_like: "unknown data".into() },
    }
}
