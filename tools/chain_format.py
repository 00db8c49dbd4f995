"""The bytes of a chain's objects and snapshots, and the state that they describe.

The part of chain_reader.py that reads no file, written from docs/format/chain.md and docs/format/sequence.md alone.
Section numbers in the comments are those of chain.md; "S" and a number is a section of sequence.md.
"""

import bisect
import ctypes
import struct
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

from sequence_reader import Damaged, Later, Object, Refused
from wal_reader import crc32c

# 3. Objects of the chain
FENCE, DELTA, SNAPSHOT = 1, 2, 3
KINDS = {FENCE: "fence", DELTA: "delta", SNAPSHOT: "snapshot"}
COMPRESSED, ELSEWHERE = 1, 2
BODY = struct.Struct("<16s16s16sQIIIIQQQQQ")
PLACE = struct.Struct("<QI")
CLEAN = 1
# Of a body elsewhere, and of the content of a compressed one.
LARGEST_LONG_BODY = 1 << 30
LARGEST_WINDOW = 1 << 27

# 4. Changes
RECORDED_TAGS = frozenset(range(1, 7))
OWN_TAGS = {DELTA: frozenset(range(32, 38)), FENCE: frozenset([*range(32, 38), *range(64, 68)])}
LARGEST_LABEL = 512
# Of the objects with records.
DATA_FORMATS = (1, 2)
INCARNATIONS = 1000

# 7. Snapshots
LARGEST_SNAPSHOT = (1 << 32) - 1
COUNTS = struct.Struct("<QII")
SECTIONS = 7
SECTION = struct.Struct("<IIQQ")
DIRECTORY_END = BODY.size + COUNTS.size + SECTIONS * SECTION.size
LARGEST_SECTION = 1 << 32

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

assert BODY.size == 112 and DIRECTORY_END == 296


class Libzstd:
    """zstd by the library of the system."""

    def __init__(self):
        self.library = ctypes.CDLL("libzstd.so.1")
        pointer, size = ctypes.c_char_p, ctypes.c_size_t
        for name, result, arguments in (
            ("ZSTD_getFrameContentSize", ctypes.c_ulonglong, (pointer, size)),
            ("ZSTD_findFrameCompressedSize", size, (pointer, size)),
            ("ZSTD_decompress", size, (ctypes.c_void_p, size, pointer, size)),
            ("ZSTD_isError", ctypes.c_uint, (size,)),
        ):
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments

    def content_bytes(self, data):
        """Returns the length that the frame states for its content; None if it states none."""
        size = self.library.ZSTD_getFrameContentSize(data, len(data))
        # The two greatest numbers are "unknown" and "error".
        return size if size < (1 << 64) - 2 else None

    def content(self, data, size):
        """Returns the content of the only frame in `data`; None if that is damaged or not the only one."""
        if self.library.ZSTD_findFrameCompressedSize(data, len(data)) != len(data):
            return None
        content = bytearray(size)
        target = (ctypes.c_char * size).from_buffer(content)
        written = self.library.ZSTD_decompress(target, size, data, len(data))
        return bytes(content) if not self.library.ZSTD_isError(written) and written == size else None


class ZstandardModule:
    """zstd by the Python module `zstandard`."""

    def __init__(self):
        import zstandard

        self.module = zstandard

    def content_bytes(self, data):
        try:
            size = self.module.frame_content_size(data)
        except self.module.ZstdError:
            return None
        return size if size >= 0 else None

    def content(self, data, size):
        stream = self.module.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()
        try:
            content = stream.decompress(data)
        except self.module.ZstdError:
            return None
        return content if len(content) == size and stream.eof and not stream.unused_data else None


def zstd():
    for implementation in (Libzstd, ZstandardModule):
        try:
            return implementation()
        except (OSError, ImportError):
            pass
    raise Refused("it is compressed, and there is neither libzstd.so.1 nor the Python module zstandard")


def window_bytes(frame, content_bytes):
    """Returns the window size of a frame with an intact header (RFC 8878, 3.1.1.1)."""
    descriptor, window = frame[4:6]
    if descriptor & 0x20:
        # A single segment.
        return content_bytes
    base = 1 << 10 + (window >> 3)
    return base + base // 8 * (window & 7)


def decompressed(data, largest):
    """Returns the content of data that is one zstd frame, which states the length of its content."""
    # This excludes skippable frames, and those of old versions of zstd.
    if data[: len(ZSTD_MAGIC)] != ZSTD_MAGIC:
        raise Damaged("zstd: there is no frame")
    implementation = zstd()
    size = implementation.content_bytes(data)
    if size is None:
        raise Damaged("zstd: the frame does not state the length of its content")
    if size > largest:
        raise Damaged(f"zstd: the content has {size} bytes, at most {largest} are allowed")
    window = window_bytes(data, size)
    if window > LARGEST_WINDOW:
        raise Damaged(f"zstd: the window has {window} bytes, at most {LARGEST_WINDOW} are allowed")
    try:
        content = implementation.content(data, size)
    except MemoryError as error:
        raise Refused(f"its content of {size} bytes does not fit into memory") from error
    if content is None:
        raise Damaged("zstd: the frame is damaged, or bytes follow it")
    return content


class Fields:
    """The fields of a body, read in order."""

    def __init__(self, data):
        self.data, self.at = data, 0

    @property
    def left(self):
        return len(self.data) - self.at

    def bytes(self, length):
        if length > self.left:
            raise Damaged(f"body: a field at {self.at} has {length} bytes, {self.left} are left")
        self.at += length
        return self.data[self.at - length : self.at]

    def struct(self, layout):
        return layout.unpack(self.bytes(layout.size))

    def byte(self):
        return self.bytes(1)[0]

    def u32(self):
        return int.from_bytes(self.bytes(4), "little")

    def varint(self, bits=64):
        start, value, shift = self.at, 0, 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if value >> bits:
                raise Damaged(f"body: the number at {start} exceeds {bits} bits")
            if byte < 0x80:
                break
        if byte == 0 and shift > 7:
            raise Damaged(f"body: the number at {start} is not in its shortest form")
        return value

    def signed(self):
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def after(self, before):
        """Returns a number that is stored as its difference to the one before it."""
        start = self.at
        value = before + self.varint()
        if value >> 64:
            raise Damaged(f"body: the number at {start} overflows")
        return value

    def count(self):
        """Returns the number of items that follow; each of them has at least one byte."""
        start, count = self.at, self.varint()
        if count > self.left:
            raise Damaged(f"body: {count} items are to follow at {start}, {self.left} bytes are left")
        return count

    def string(self, largest=None):
        start, length = self.at, self.varint()
        if largest is not None and length > largest:
            raise Damaged(f"body: the string at {start} has {length} bytes, at most {largest} are allowed")
        return self.bytes(length)

    def text(self):
        start, data = self.at, self.string()
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise Damaged(f"body: the key at {start} is not UTF-8") from error

    def optional(self, read):
        """Returns None or what `read` returns, by the byte in front."""
        start, present = self.at, self.byte()
        if present > 1:
            raise Damaged(f"body: neither 0 nor 1 at {start}")
        return read(self) if present else None

    def end(self):
        if self.left:
            raise Damaged(f"body: {self.left} bytes follow the last field")


class Values(NamedTuple):
    """The fields at the beginning of a body (3)."""

    store: bytes
    wal: bytes
    incarnation: bytes
    version: int
    epoch: int
    opening: int
    node: int
    flags: int
    written_at: int
    covers: int
    cut: int
    wal_mark: int
    next_stream: int


def read_values(fields):
    values = Values(*fields.struct(BODY))
    if values.flags & ~CLEAN:
        raise Later(f"body flags {values.flags:#x}")
    return values


class Range(NamedTuple):
    object: int
    start: int
    end: int
    payload_bytes: int
    max_timestamp: int


class Data(NamedTuple):
    """A data object: the fields of tag 32 (4)."""

    number: int
    nonce: bytes
    size: int
    index_position: int
    index_length: int
    index_crc: int
    created_at: int
    generation: int
    payload: int
    format: int


def read_range(fields):
    number, start = fields.varint(), fields.varint()
    end = fields.after(start)
    if end == start:
        raise Damaged(f"body: a range from {start} to {end}")
    return Range(number, start, end, fields.varint(), fields.signed())


def read_data(fields):
    data = Data(
        fields.varint(),
        fields.bytes(16),
        fields.varint(),
        fields.varint(),
        fields.varint(),
        fields.u32(),
        fields.signed(),
        fields.byte(),
        fields.varint(),
        fields.byte(),
    )
    if data.format not in DATA_FORMATS:
        raise Later(f"format version {data.format} of an object")
    return data


def read_starts(fields):
    starts = []
    for _ in range(fields.count()):
        starts.append(ascending(fields, starts[-1] if starts else None))
    if not starts:
        raise Damaged("body: a replacement of no range")
    return set(starts)


def read_gap(fields):
    stream, first, end = fields.varint(), fields.varint(), fields.varint()
    if end <= first:
        raise Damaged(f"body: a gap from {first} to {end}")
    return stream, first, end


def read_hints(fields, more):
    """Returns the hints as pairs (stream, next offset), while `more` returns that there is another one."""
    hints, stream = [], 0
    while more(len(hints)):
        stream = ascending(fields, stream if hints else None)
        hints.append((stream, fields.varint()))
    return hints


def ascending(fields, before):
    """Returns an id that is stored as its difference to the one before it, which is None for the first one."""
    value = fields.after(before or 0)
    if value == before:
        raise Damaged(f"body: {value} is there twice")
    return value


def read_change(fields):
    """Returns a change: its tag, then its fields (4)."""
    tag, number = fields.byte(), fields.varint
    match tag:
        case 1:
            return tag, number(), fields.byte(), fields.string(LARGEST_LABEL)
        case 2 | 6:
            return tag, number(), number()
        case 3:
            return tag, number(), number(), number()
        case 4:
            return tag, fields.text(), fields.string()
        case 5:
            return tag, fields.text()
        case 32:
            return tag, read_data(fields)
        case 33:
            return tag, number(), number(), number(), fields.optional(Fields.string), fields.optional(read_range)
        case 34:
            stream, starts, added = number(), read_starts(fields), fields.optional(read_range)
            if added is None:
                raise Damaged("body: a replacement without a range")
            return tag, stream, starts, added
        case 35 | 36:
            return tag, number()
        case 37 | 66:
            return tag, number(bits=32)
        case 64 | 65:
            return tag, fields.bytes(16)
        case 67:
            return tag, *read_gap(fields)
    raise Later(f"a change with tag {tag}")


def read_changes(fields, allowed):
    changes = [read_change(fields) for _ in range(fields.count())]
    for tag, *_ in changes:
        if tag not in allowed:
            raise Damaged(f"body: a change with tag {tag} in another place")
    return changes


@dataclass
class Item:
    """A fence or delta."""

    header: Object
    values: Values
    recorded: list
    own: list
    hints: list

    @property
    def fence(self):
        return self.header.kind == FENCE

    @property
    def number(self):
        return self.header.number

    @property
    def link(self):
        return self.header.link

    @property
    def term(self):
        return self.header.term


def decode_item(header, body):
    fields = Fields(body)
    values = read_values(fields)
    recorded = [(fields.varint(), read_changes(fields, RECORDED_TAGS)) for _ in range(fields.count())]
    own = read_changes(fields, OWN_TAGS[header.kind])
    count = fields.count()
    hints = read_hints(fields, lambda read: read < count)
    fields.end()
    item = Item(header, values, recorded, own, hints)
    check_itself(item)
    return item


def check_itself(item):
    """Refuses an object that contradicts itself (3)."""
    values = item.values
    if values.version >> 32 != values.opening:
        raise Damaged(f"the upper half of the version is {values.version >> 32}, the opening is {values.opening}")
    if item.fence:
        if values.flags & CLEAN:
            raise Damaged("a clean fence")
        if item.recorded:
            raise Damaged("a fence with recorded lists")
        if values.covers >= values.version:
            raise Damaged(f"a fence that covers {values.covers}, its version is {values.version}")
    elif values.covers != values.version:
        raise Damaged(f"a delta that covers {values.covers}, its version is {values.version}")
    versions = [version for version, _ in item.recorded]
    if any(version <= before for before, version in zip(versions, versions[1:])):
        raise Damaged(f"recorded lists with versions {versions}")
    for version, changes in item.recorded:
        if not changes:
            raise Damaged(f"the recorded list {version} has no change")
        if version >= values.version:
            raise Damaged(f"version {version} is recorded, that of the object is {values.version}")


def not_extending(item, before):
    """Yields why a fence or delta does not extend what is before it, a State or an Item with the number before (3).

    Its number, and the store in its name, are checked when it is read.
    """
    header, values = item.header, item.values
    if header.previous != before.link:
        yield f"previous is {header.previous:016x}, the link of the object before it is {before.link:016x}"
    if header.term < before.term:
        yield f"the term is {header.term}, that of the object before it {before.term}"
    if before.values is None:
        # Number 1.
        return
    if values.version <= before.values.version:
        yield f"the version is {values.version}, that of the object before it {before.values.version}"
    if item.fence:
        if values.opening <= before.values.opening:
            yield f"the opening is {values.opening}, that of the object before it {before.values.opening}"
        return
    if header.term > before.term:
        yield f"the term of a delta is {header.term}, that of the object before it {before.term}"
    for name in ("opening", "incarnation", "wal"):
        if getattr(values, name) != getattr(before.values, name):
            yield f"{name} is not that of the object before it"
    for version, _ in item.recorded:
        if version <= before.values.covers:
            yield f"version {version} is recorded, the object before it covers {before.values.covers}"


@dataclass
class Stream:
    kind: int
    label: bytes
    epoch: int = 0
    start: int = 0
    uploaded_end: int = 0
    checkpoint: bytes = None
    ranges: list = field(default_factory=list)


class State:
    """The catalog after an object of the chain; at first the one before number 1."""

    def __init__(self):
        self.number = self.link = self.term = self.epoch = self.reserved = self.largest_count = 0
        self.values = None
        self.streams, self.objects, self.meta = {}, {}, {}
        self.incarnations, self.hints = [], []
        # The offset after a gap, by its stream and its first offset.
        self.gaps = {}

    def apply(self, item):
        """Applies the fence or delta with the next number (3)."""
        values, before = item.values, self.values
        version_before = before.version if before else 0
        for change in [change for _, changes in item.recorded for change in changes] + item.own:
            if change[0] == 64:
                self.incarnations = (self.incarnations + [(version_before, change[1])])[-INCARNATIONS:]
            else:
                self.change(*change)
        if not item.fence:
            self.epoch = values.epoch
        elif before and values.wal != before.wal:
            self.epoch = 0
        self.number, self.link, self.term = item.header.number, item.header.link, item.header.term
        self.values, self.hints = values, item.hints

    def change(self, tag, *fields):
        """Applies a change; what is gone is passed over (4)."""
        match tag:
            case 1:
                stream, kind, label = fields
                self.streams.setdefault(stream, Stream(kind, label))
            case 4:
                self.meta[fields[0]] = fields[1]
            case 5:
                self.meta.pop(fields[0], None)
            case 32:
                self.objects[fields[0].number] = fields[0]
            case 35:
                self.objects.pop(fields[0], None)
            case 36:
                self.reserved = max(self.reserved, fields[0])
            case 37:
                self.largest_count = max(self.largest_count, fields[0])
            case 65 | 66:
                # The fixed fields decide.
                pass
            case _:
                stream = self.streams.get(fields[0])
                if stream:
                    self.change_stream(stream, tag, *fields)

    def change_stream(self, stream, tag, number, *fields):
        match tag:
            case 2:
                del self.streams[number]
                self.gaps = {gap: end for gap, end in self.gaps.items() if gap[0] != number}
            case 3:
                self.trim(stream, number, fields[1])
            case 6:
                stream.epoch = max(stream.epoch, fields[0])
            case 33:
                end, start, checkpoint, added = fields
                self.trim(stream, number, start)
                stream.uploaded_end = max(stream.uploaded_end, end)
                stream.checkpoint = checkpoint
                if added and added.end > stream.start and (not stream.ranges or added.start >= stream.ranges[-1].end):
                    stream.ranges.append(added)
            case 34:
                starts, added = fields
                kept = [area for area in stream.ranges if area.start not in starts]
                if any(area.start < added.end and added.start < area.end for area in kept):
                    return
                if added.end > stream.start:
                    bisect.insort(kept, added, key=lambda area: area.start)
                stream.ranges = kept
            case 67:
                first, end = fields
                if end > stream.start:
                    self.gaps[number, first] = end

    def trim(self, stream, number, start):
        stream.start = max(stream.start, start)
        stream.ranges = [area for area in stream.ranges if area.end > stream.start]
        self.gaps = {gap: end for gap, end in self.gaps.items() if gap[0] != number or end > stream.start}

    def fields(self):
        """Returns the state as it is printed with --json."""
        return {
            **self.head(self),
            "epoch": self.epoch,
            "reserved": self.reserved,
            "largest_count": self.largest_count,
            "streams": [
                {
                    "id": number,
                    **vars(stream),
                    "label": stream.label.hex(),
                    "checkpoint": None if stream.checkpoint is None else stream.checkpoint.hex(),
                    "ranges": [list(area) for area in stream.ranges],
                }
                for number, stream in sorted(self.streams.items())
            ],
            "objects": [data._asdict() | {"nonce": data.nonce.hex()} for _, data in sorted(self.objects.items())],
            "meta": [[key, value.hex()] for key, value in sorted(self.meta.items())],
            "incarnations": [[version, number.hex()] for version, number in self.incarnations],
            "gaps": [[*gap, end] for gap, end in sorted(self.gaps.items())],
            "hints": [list(hint) for hint in self.hints],
        }

    @staticmethod
    def head(last):
        """Returns the part of the state that is in the header and the fixed fields of its last object."""
        fields = {"number": last.number, "link": last.link, "term": last.term, **last.values._asdict()}
        for name in ("store", "wal", "incarnation"):
            fields[name] = str(uuid.UUID(bytes=fields[name]))
        fields["clean"] = bool(fields.pop("flags") & CLEAN)
        # The epoch of an object is not that of the state (7).
        del fields["epoch"]
        return fields


def differences(found, expected):
    """Yields where two states differ that are in the form of State.fields, for the names that both have."""
    for name in [name for name in found if name in expected]:
        one, other = found[name], expected[name]
        if one == other:
            continue
        if isinstance(one, list):
            at = next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
            one, other = (rows[at] if at < len(rows) else "nothing" for rows in (one, other))
            name = f"{name}, row {at}"
        yield f"{name}: {one} instead of {other}"


@dataclass
class Snapshot:
    header: Object
    values: Values
    state: State

    @property
    def replaces(self):
        """Whether it is that of a migration or a rebuild."""
        return self.header.previous == 0


def section(body, kind, entry, position):
    """Returns the content of a section."""
    found, crc, at, length = entry
    if found != kind:
        raise Damaged(f"section {kind}: its kind is {found}")
    if at != position or at + length > len(body):
        raise Damaged(f"section {kind}: {length} bytes at {at}, {position} is the end of what is before it")
    stored = body[at : at + length]
    if crc != crc32c(stored):
        raise Damaged(f"section {kind}: checksum")
    try:
        return decompressed(stored, LARGEST_SECTION)
    except Damaged as damaged:
        raise Damaged(f"section {kind}: {damaged}") from damaged


def rows(kind, content, read):
    """Yields the rows of a section; their keys, of which `read` gets the last one, ascend. None is no key."""
    fields, last = Fields(content), None
    while fields.left:
        try:
            key, row = read(fields, last)
        except Damaged as damaged:
            raise Damaged(f"section {kind}: {damaged}") from damaged
        if last is not None and key <= last:
            raise Damaged(f"section {kind}: the key {key} follows {last}")
        last = key
        yield row


def read_stream(fields, last):
    number = fields.after(last or 0)
    stream = Stream(
        fields.byte(),
        fields.string(LARGEST_LABEL),
        fields.varint(),
        fields.varint(),
        fields.varint(),
        fields.optional(Fields.string),
    )
    return number, (number, stream)


def read_data_row(fields, _):
    data = read_data(fields)
    return data.number, data


def read_ranges(fields, last):
    number = fields.after(last or 0)
    ranges = [read_range(fields) for _ in range(fields.count())]
    if not ranges:
        raise Damaged(f"stream {number} has no range")
    if any(area.start < before.end for before, area in zip(ranges, ranges[1:])):
        raise Damaged(f"the ranges of stream {number} overlap or are not in the order of offsets")
    return number, (number, ranges)


def read_meta(fields, _):
    # The order of strings is that of their bytes in UTF-8.
    key, value = fields.text(), fields.string()
    return key, (key, value)


def read_incarnation(fields, _):
    return None, (fields.varint(), fields.bytes(16))


def read_gap_row(fields, _):
    stream, first, end = read_gap(fields)
    return (stream, first), ((stream, first), end)


def decode_snapshot(header, body):
    fields = Fields(body)
    values = read_values(fields)
    state = State()
    state.values, state.epoch, state.term, state.number = values, values.epoch, header.term, header.number
    # That of a migration or rebuild replaces the object that the next fence would be linked to.
    state.link = header.previous or header.link
    state.reserved, state.largest_count, count = fields.struct(COUNTS)
    if count != SECTIONS:
        raise Later(f"{count} sections")
    entries = [fields.struct(SECTION) for _ in range(SECTIONS)]
    if fields.u32() != crc32c(body[:DIRECTORY_END]):
        raise Damaged("directory checksum")
    contents, position = [], fields.at
    for kind, entry in enumerate(entries, 1):
        contents.append(section(body, kind, entry, position))
        position += entry[3]
    if position != len(body):
        raise Damaged(f"body: {len(body) - position} bytes follow the last section")

    state.streams = dict(rows(1, contents[0], read_stream))
    state.objects = {data.number: data for data in rows(2, contents[1], read_data_row)}
    for number, ranges in rows(3, contents[2], read_ranges):
        if number not in state.streams:
            raise Damaged(f"section 3: stream {number} is not in section 1")
        state.streams[number].ranges = ranges
    state.meta = dict(rows(4, contents[3], read_meta))
    state.incarnations = list(rows(5, contents[4], read_incarnation))
    state.gaps = dict(rows(6, contents[5], read_gap_row))
    hints = Fields(contents[6])
    try:
        state.hints = read_hints(hints, lambda _: hints.left)
    except Damaged as damaged:
        raise Damaged(f"section 7: {damaged}") from damaged
    return Snapshot(header, values, state)
