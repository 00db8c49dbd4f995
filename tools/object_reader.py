#!/usr/bin/env python3
"""Reads an object with records, in a local file.

A second implementation of the read side, written from docs/format/object.md alone: where this program and Alluvium
differ, one of the three is wrong. Section numbers in the comments are those of the document.

It only reads. It verifies the object as a whole (3) and does not need the catalog.

Exit code: 0 the object is intact, 1 there is damage, 2 it cannot be read, or is of a later version.
"""

import argparse
import json
import os
import re
import struct
import sys
import uuid
from typing import NamedTuple

from chain_format import LARGEST_LABEL, Fields, ascending, decompressed
from sequence_reader import Damaged, Later, Refused
from wal_reader import crc32c, run

# 1. Layout
HEADER = struct.Struct("<8sII16s")
HEADER_MAGIC = b"ALLUVOBJ"
ENTRY = struct.Struct("<QIIq")
ORIGIN = struct.Struct("<16s16sIIIIqQ")
LARGEST_DIRECTORY = 1 << 30
INDEX_ENTRY = struct.Struct("<QQQQIIqII")
PAGE_ENTRIES = 73
TOP = struct.Struct("<II")
TOP_ENTRY = struct.Struct("<QQII")
FOOTER = struct.Struct("<QQII16sIII8sI")
FOOTER_MAGIC = b"ALLUVEND"

# 7. Format version 1
VERSION, OLD_VERSION = 2, 1
KIND_LOG = 0

# 2. Names
NAME = re.compile(r"[0-9a-f]{16}-([0-9a-f]{32})")

assert HEADER.size == 32 and ENTRY.size == 24 and ORIGIN.size == 64
assert INDEX_ENTRY.size == 56 and TOP_ENTRY.size == 24 and FOOTER.size == 64


class DamagedAt(Damaged):
    """There is damage at a position; the message is the reason."""

    def __init__(self, position, reason):
        super().__init__(reason)
        self.position = position


class Block(NamedTuple):
    """An entry of the index."""

    stream: int
    start: int
    end: int
    position: int
    length: int
    entries: int
    max_timestamp: int
    crc: int

    @property
    def position_end(self):
        return self.position + self.length


class Row(NamedTuple):
    """A row of the directory."""

    stream: int
    kind: int
    label: bytes
    start: int
    end: int
    payload: int
    max_timestamp: int
    blocks: int


class Footer(NamedTuple):
    index_position: int
    index_length: int
    index_crc: int
    version: int
    nonce: bytes
    directory_length: int
    blocks: int
    directory_crc: int

    @property
    def directory_end(self):
        return self.index_position - INDEX_ENTRY.size * self.blocks

    @property
    def data_end(self):
        return self.directory_end - self.directory_length


def check_version(version):
    if version not in (OLD_VERSION, VERSION):
        raise Later(f"format version {version}")


def decode_header(data):
    """Returns the version and the nonce."""
    magic, version, crc, nonce = HEADER.unpack_from(data)
    if magic != HEADER_MAGIC:
        raise DamagedAt(0, "magic")
    if crc != crc32c(data[:12] + data[16 : HEADER.size]):
        raise DamagedAt(0, "header checksum")
    check_version(version)
    return version, nonce


def decode_footer(data):
    at = len(data) - FOOTER.size
    *fields, magic, crc = FOOTER.unpack_from(data, at)
    if crc != crc32c(data[at:-4]):
        raise DamagedAt(at, "footer checksum")
    if magic != FOOTER_MAGIC:
        raise DamagedAt(at, "footer magic")
    footer = Footer(*fields)
    check_version(footer.version)
    if footer.version == OLD_VERSION and (footer.directory_length or footer.blocks or footer.directory_crc):
        raise DamagedAt(at, "reserved bytes of the footer")
    if footer.index_position + footer.index_length != at or footer.data_end < HEADER.size:
        raise DamagedAt(at, "the parts do not end at the footer")
    return footer


def decode_entries(data, position, before):
    """Yields the blocks of entries, which follow a block or None."""
    for at in range(0, len(data), INDEX_ENTRY.size):
        *fields, reserved = INDEX_ENTRY.unpack_from(data, at)
        block = Block(*fields)
        where = position + at
        if reserved or not block.entries or block.start >= block.end:
            raise DamagedAt(where, f"an impossible entry of the index: {block}")
        if before and (block.stream, block.start) < (before.stream, before.end):
            raise DamagedAt(where, "the entries of the index are not in order")
        if block.position != (before.position_end if before else HEADER.size):
            raise DamagedAt(where, "the blocks do not follow one another")
        yield block
        before = block


def decode_old_index(data, footer):
    """Returns the blocks of version 1 (7)."""
    position = footer.index_position
    index = data[position : position + footer.index_length]
    if crc32c(index) != footer.index_crc:
        raise DamagedAt(position, "index checksum")
    if len(index) % INDEX_ENTRY.size:
        raise DamagedAt(position, f"an index of {len(index)} bytes")
    return list(decode_entries(index, position, None))


def decode_index(data, footer):
    """Returns the blocks of version 2."""
    top_at, length = footer.index_position, footer.index_length
    top = data[top_at : top_at + length]
    if crc32c(top) != footer.index_crc:
        raise DamagedAt(top_at, "checksum of the top")
    if length < TOP.size or (length - TOP.size) % TOP_ENTRY.size:
        raise DamagedAt(top_at, f"a top of {length} bytes")
    count, reserved = TOP.unpack_from(top)
    pages = (length - TOP.size) // TOP_ENTRY.size
    if reserved or count != footer.blocks or -(-count // PAGE_ENTRIES) != pages:
        raise DamagedAt(top_at, f"a top with {pages} pages of {count} blocks")
    blocks, position, keys = [], footer.directory_end, []
    for number in range(pages):
        stream, start, crc, reserved = TOP_ENTRY.unpack_from(top, TOP.size + number * TOP_ENTRY.size)
        if reserved or keys and (stream, start) <= keys[-1]:
            raise DamagedAt(top_at, f"entry {number} of the top")
        keys.append((stream, start))
        page = data[position : min(position + PAGE_ENTRIES * INDEX_ENTRY.size, top_at)]
        if crc32c(page) != crc:
            raise DamagedAt(position, f"checksum of page {number}")
        before = blocks[-1] if blocks else None
        blocks.extend(decode_entries(page, position, before))
        if blocks[number * PAGE_ENTRIES][:2] != keys[-1]:
            raise DamagedAt(position, f"page {number} does not begin as the top states")
        position += len(page)
    return blocks


def decode_row(fields, before):
    stream, kind = ascending(fields, before), fields.byte()
    label, start = fields.string(LARGEST_LABEL), fields.varint()
    end = fields.after(start)
    if end == start:
        raise Damaged(f"an empty row of stream {stream}")
    return Row(stream, kind, label, start, end, fields.varint(), fields.signed(), fields.varint())


def decode_directory(data, footer):
    """Returns who wrote the object, and the rows."""
    stored = data[footer.data_end : footer.directory_end]
    if crc32c(stored) != footer.directory_crc:
        raise DamagedAt(footer.data_end, "directory checksum")
    try:
        fields = Fields(decompressed(stored, LARGEST_DIRECTORY))
        store, incarnation, opening, term, generation, count, created_at, cut = fields.struct(ORIGIN)
        rows = []
        for _ in range(count):
            rows.append(decode_row(fields, rows[-1].stream if rows else None))
        fields.end()
    except Damaged as damaged:
        raise DamagedAt(footer.data_end, f"directory: {damaged}") from damaged
    origin = {
        "store": str(uuid.UUID(bytes=store)),
        "incarnation": str(uuid.UUID(bytes=incarnation)),
        "opening": opening,
        "term": term,
        "generation": generation,
        "created_at": created_at,
        "cut": cut,
    }
    return origin, rows


def rows_of(blocks):
    """Returns the rows that follow from the index, without labels."""
    streams = {}
    for block in blocks:
        streams.setdefault(block.stream, []).append(block)
    return [
        Row(
            stream,
            KIND_LOG,
            None,
            part[0].start,
            part[-1].end,
            sum(block.length - ENTRY.size * block.entries for block in part),
            max(block.max_timestamp for block in part),
            len(part),
        )
        for stream, part in streams.items()
    ]


def compare(rows, blocks, position):
    """Checks that the directory has one row per stream of the index, with the sums of the stream's blocks."""
    expected = rows_of(blocks)
    if [row._replace(kind=KIND_LOG, label=None) for row in rows] != expected:
        raise DamagedAt(position, "the directory does not match the index")


def decode_block(block, data):
    """Returns the entries of a block as (base, count, greatest timestamp, CRC of the payload)."""
    if crc32c(data) != block.crc:
        raise DamagedAt(block.position, "block checksum")
    entries, at, last = [], 0, 0
    while at < len(data):
        if at + ENTRY.size > len(data):
            raise DamagedAt(block.position + at, "an entry is cut off")
        base, count, length, max_timestamp = ENTRY.unpack_from(data, at)
        payload = data[at + ENTRY.size : at + ENTRY.size + length]
        if not count or base < last or len(payload) != length or base + count >> 64:
            raise DamagedAt(block.position + at, "an impossible entry")
        entries.append((base, count, max_timestamp, crc32c(payload)))
        at, last = at + ENTRY.size + length, base + count
    found = (entries[0][0], last, len(entries), max(entry[2] for entry in entries)) if entries else ()
    if found != (block.start, block.end, block.entries, block.max_timestamp):
        raise DamagedAt(block.position, "the entries do not match the index")
    return entries


class StoredObject:
    """What was read of an object, and what is wrong with it."""

    def __init__(self, path):
        self.path = path
        self.footer, self.origin, self.rows, self.blocks, self.damage = None, None, [], [], []
        # The entries of each block; None of a damaged one.
        self.entries = []

    def read(self):
        try:
            with open(self.path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise Refused(error.strerror) from error
        try:
            self.decode(data)
        except DamagedAt as damaged:
            self.damage.append((damaged.position, str(damaged)))

    def decode(self, data):
        if len(data) < HEADER.size + FOOTER.size:
            raise DamagedAt(0, f"length: {len(data)} bytes are too short for an object")
        version, nonce = decode_header(data)
        named = NAME.fullmatch(os.path.basename(self.path))
        if named and bytes.fromhex(named[1]) != nonce:
            raise DamagedAt(16, f"nonce: the header says {nonce.hex()}")
        footer = decode_footer(data)
        if (footer.version, footer.nonce) != (version, nonce):
            raise DamagedAt(len(data) - FOOTER.size, "the footer is that of another object")
        blocks = (decode_old_index if version == OLD_VERSION else decode_index)(data, footer)
        end = blocks[-1].position_end if blocks else HEADER.size
        if end != footer.data_end:
            raise DamagedAt(footer.index_position, f"the blocks end at {end}, not at {footer.data_end}")
        if version == OLD_VERSION:
            rows = rows_of(blocks)
        else:
            self.origin, rows = decode_directory(data, footer)
            compare(rows, blocks, footer.data_end)
        self.footer, self.blocks, self.rows = footer, blocks, rows
        for block in blocks:
            try:
                self.entries.append(decode_block(block, data[block.position : block.position_end]))
            except DamagedAt as damaged:
                self.damage.append((damaged.position, str(damaged)))
                self.entries.append(None)

    def fields(self):
        """Returns what is printed with --json."""
        return {
            "version": self.footer.version if self.footer else None,
            "nonce": self.footer.nonce.hex() if self.footer else None,
            "origin": self.origin,
            "rows": [{**row._asdict(), "label": None if row.label is None else row.label.hex()} for row in self.rows],
            "blocks": [
                {**block._asdict(), "batches": entries and [list(entry) for entry in entries]}
                for block, entries in zip(self.blocks, self.entries)
            ],
            "damage": [{"position": position, "what": what} for position, what in self.damage],
        }


def print_text(item):
    if item.footer:
        print(f"version {item.footer.version}, nonce {item.footer.nonce.hex()}, {len(item.blocks)} blocks")
    for name, value in (item.origin or {}).items():
        print(f"{name:>12}  {value}")
    row = "{:>20}  {:>4}  {:>20}  {:>20}  {:>12}  {:>14}  {:>7}  {}"
    if item.rows:
        print(row.format("STREAM", "KIND", "START", "END", "PAYLOAD B", "TIMESTAMP", "BLOCKS", "LABEL"))
    for line in item.rows:
        label = "-" if line.label is None else line.label.decode(errors="backslashreplace")
        print(row.format(*line[:2], *line[3:], label))
    for position, what in item.damage:
        print(f"damaged: at byte {position}: {what}")


def main():
    parser = argparse.ArgumentParser(description="Read an object with records, by docs/format/object.md.")
    parser.add_argument("file", help="the object")
    keys = '{"version": .., "nonce": .., "origin": {..} or null, "rows": [..], "blocks": [..], "damage": [..]}'
    parser.add_argument("--json", action="store_true", help=keys)
    arguments = parser.parse_args()
    item = StoredObject(arguments.file)
    try:
        item.read()
    except Later as later:
        print(f"error: {arguments.file} was written by a later version: {later}", file=sys.stderr)
        return 2
    except Refused as refused:
        print(f"error: {arguments.file}: {refused}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(item.fields()))
    else:
        print_text(item)
    return 1 if item.damage else 0


if __name__ == "__main__":
    run(main)
