"""The superblocks and the sectors of a volume server's store.

Written from docs/format/volume-store.md (STORE in the comments) alone; part of volume_reader.py. Numbers in the comments
are sections.
"""

import struct
import uuid
from dataclasses import dataclass

from volume_log import BLOCK, CHUNKS, NUMBERS
from wal_reader import Damaged, Device, Refused, crc32c

# STORE 2. Positions and sizes
SLOT_BLOCKS = 64
SLOT = SLOT_BLOCKS * BLOCK
MIB = 1 << 20
TIB = 1 << 40

# STORE 3. Superblock
SUPERBLOCKS = (0, 32 * 1024)
SUPERBLOCK = struct.Struct("<8sII16s16sQQQQQQIHH256s148sI")
SUPERBLOCK_MAGIC = b"ALLUVSTO"
CLUSTER_ID_BYTES = 249

# STORE 4. Sector
SECTOR = struct.Struct("<4sHBBQIIII64I192sQ20sI")
SECTOR_MAGIC = b"ALVS"
LOST = 1
CHECKED = 508

assert SUPERBLOCK.size == 512 and SECTOR.size == 512


@dataclass
class Superblock:
    copy: int
    store_id: bytes
    wal_id: bytes
    generation: int
    capacity: int
    max_capacity: int
    checkpoint: int
    wal_offset: int
    written_at_ms: int
    server_id: int
    cluster_id: str

    @property
    def identity(self):
        return self.store_id, self.wal_id, self.server_id, self.cluster_id, self.max_capacity

    @property
    def data_start(self):
        return MIB + -(-self.max_capacity // 512 // MIB) * MIB

    @property
    def slots(self):
        return (self.capacity - self.data_start) // (2 * MIB) * 8

    def contradiction(self):
        if self.capacity % MIB or self.max_capacity % MIB or not 4 * MIB <= self.capacity <= self.max_capacity <= 16 * TIB:
            return "capacity"
        if self.slots < 8:
            return "slots"
        if self.generation >= 1 << 63 or self.wal_offset >= 1 << 63 or self.checkpoint >= NUMBERS or not self.server_id:
            return "a number is out of bounds"
        return None

    def described(self):
        return {
            "store_id": str(uuid.UUID(bytes=self.store_id)),
            "wal_id": str(uuid.UUID(bytes=self.wal_id)),
            "generation": self.generation,
            "capacity_bytes": self.capacity,
            "max_capacity_bytes": self.max_capacity,
            "checkpoint": self.checkpoint,
            "wal_offset": self.wal_offset,
            "written_at_ms": self.written_at_ms,
            "server_id": self.server_id,
            "cluster_id": self.cluster_id,
            "slots": self.slots,
        }


def read_superblock(device, copy):
    """Reads a copy: ("valid", Superblock), or ("empty" | "damaged" | "future" | "other", why) (STORE 3)."""
    at = SUPERBLOCKS[copy]
    if device.size < at + BLOCK:
        return "other", "the device ends before it"
    page = device.read(at, BLOCK)
    if not device.readable(at, BLOCK):
        return "damaged", "cannot be read"
    if not any(page):
        return "empty", "all zero"
    (magic, version, flags, store_id, wal_id, generation, capacity, max_capacity, checkpoint, wal_offset, written_at, server_id,
     length, _, cluster_id, _, crc) = SUPERBLOCK.unpack_from(page)
    if magic != SUPERBLOCK_MAGIC:
        return "other", "no superblock of a store"
    if crc != crc32c(page[:CHECKED]):
        return "damaged", "checksum"
    if version != 1 or flags:
        return "future", f"format version {version}, flags {flags:#x}"
    if not 1 <= length <= CLUSTER_ID_BYTES or any(cluster_id[length:]):
        return "damaged", "cluster id"
    try:
        cluster_id = cluster_id[:length].decode()
    except UnicodeDecodeError:
        return "damaged", "cluster id"
    superblock = Superblock(copy, store_id, wal_id, generation, capacity, max_capacity, checkpoint, wal_offset, written_at,
                            server_id, cluster_id)
    contradiction = superblock.contradiction()
    return ("damaged", contradiction) if contradiction else ("valid", superblock)


def newest_superblock(copies):
    """Chooses the copy that counts (STORE 8)."""
    kinds = [kind for kind, _ in copies]
    valid = [what for kind, what in copies if kind == "valid"]
    invalid = ", ".join(f"copy {at}: {kind} ({what})" for at, (kind, what) in enumerate(copies) if kind != "valid")
    if "future" in kinds:
        raise Refused(f"the store was written by a newer version: {invalid}")
    if len(valid) == 2 and (valid[0].identity != valid[1].identity or valid[0].generation == valid[1].generation):
        raise Damaged("the superblock copies contradict each other")
    if valid:
        return max(valid, key=lambda superblock: superblock.generation)
    if "damaged" in kinds:
        raise Damaged(f"both superblock copies are lost: {invalid}")
    if kinds == ["empty", "empty"]:
        raise Refused("the store is not formatted: both superblock copies are zero")
    raise Refused(f"not a store: {invalid}")


@dataclass(slots=True)
class Sector:
    slot: int
    number: int
    group: int
    peer: int
    volume: int
    chunk: int
    slot_number: int
    words: tuple

    @property
    def address(self):
        return self.group, self.peer, self.volume, self.chunk, self.slot_number


class Store:
    """The superblocks and the sectors of a store."""

    def __init__(self, path, damaged, sectors_count):
        self.device = Device(path)
        self.copies = [read_superblock(self.device, copy) for copy in range(len(SUPERBLOCKS))]
        self.superblock = newest_superblock(self.copies)
        if self.superblock.capacity > self.device.size:
            raise Refused(f"the store takes {self.superblock.capacity} bytes, the device has {self.device.size}")
        for copy, (kind, what) in enumerate(self.copies):
            if kind != "valid":
                damaged("store", f"superblock copy {copy} is {kind} ({what})", SUPERBLOCKS[copy])
        self.sectors, self.damaged = [], 0
        count, at_once = self.superblock.slots if sectors_count else 0, MIB // SECTOR.size
        for first in range(0, count, at_once):
            data = self.device.read(MIB + SECTOR.size * first, SECTOR.size * min(at_once, count - first))
            for at in range(0, len(data), BLOCK):
                page = data[at : at + BLOCK]
                if any(page) or self.device.unreadable:
                    for within in range(0, BLOCK, SECTOR.size):
                        self.take(first + (at + within) // SECTOR.size, page[within : within + SECTOR.size], damaged)

    def take(self, slot, data, damaged):
        at = MIB + SECTOR.size * slot
        wrong = None
        if not self.device.readable(at, SECTOR.size):
            wrong = "unreadable"
        elif not any(data):
            return
        else:
            wrong = self.decode(slot, data)
        if wrong:
            self.damaged += 1
            damaged("store", f"the sector of slot {slot}: {wrong}", at)

    def decode(self, slot, data):
        """Reads a sector that is not zero (STORE 4); returns why it is damaged."""
        magic, version, slot_number, flags, group, volume, chunk, layer, number, *rest = SECTOR.unpack(data)
        words, (epochs, peer, _, crc) = tuple(rest[:SLOT_BLOCKS]), rest[SLOT_BLOCKS:]
        if magic != SECTOR_MAGIC:
            return "no magic"
        if crc != crc32c(self.superblock.store_id + struct.pack("<I", slot) + data[:CHECKED]):
            return "checksum"
        if version != 1 or flags & ~LOST:
            raise Refused(f"the sector of slot {slot} was written by a newer version: {version}, flags {flags:#x}")
        if flags:
            return "lost, as a checkpoint has recorded"
        if not (slot_number < SLOT_BLOCKS and group and volume and chunk < CHUNKS and number and peer and any(words)):
            return "a field is out of bounds"
        if layer:
            raise Refused(f"the sector of slot {slot} is of layer {layer}: this program does not know layers")
        self.sectors.append(Sector(slot, number, group, peer, volume, chunk, slot_number, words))
        return None

    def data(self, slot):
        return self.device.read(self.superblock.data_start + SLOT * slot, SLOT)

    def block_offset(self, sector, block):
        return self.superblock.data_start + SLOT * sector.slot + BLOCK * block


def word(data, sector, block):
    """The checksum of a block with its position (STORE 4, "Words")."""
    place = struct.pack("<QIII", sector.group, sector.volume, sector.chunk, sector.slot_number * SLOT_BLOCKS + block)
    value = crc32c(data) ^ crc32c(place)
    return value + 2 if value < 2 else value
