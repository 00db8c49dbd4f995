#!/usr/bin/env python3
"""Reads an Alluvium write-ahead log.

A second implementation of the read side, written from docs/format/wal.md alone: where this program and
`alluvium wal dump` differ, one of the three is wrong. Section numbers in the comments are those of the document.

It only reads, takes no claim and does not prevent writes: with a running server it reads a log that changes meanwhile.

Exit code: 0 the log is intact, 1 it is damaged, 2 it could not be read.
"""

import argparse
import json
import os
import stat
import struct
import sys
import uuid
from dataclasses import dataclass

# 1. Positions, 2. Device layout
PAGE = 4096
DATA_START = 64 * 1024
SLOTS = (0, 32 * 1024)

SMALLEST_RING = 128 * 1024

# 3. Header slot
SLOT_MAGIC = b"ALLUVWAL"
SLOT = struct.Struct("<8sII16sQQQQIIQQQIQQ8sI")
SLOT_CHECKED = 124
VERSION = 1
CLEAN = 1

# 4. Record
RECORD = struct.Struct("<4sIQIIII")
RECORD_CHECKED = 28
DATA, PADDING = b"ALRD", b"ALRP"
MAGIC_PREFIX = b"ALR"
LARGEST_PAYLOAD = 512 * 1024 * 1024

CHUNK = 1024 * 1024

assert SLOT.size == SLOT_CHECKED + 4
assert RECORD.size == RECORD_CHECKED + 4


class Refused(Exception):
    """The log cannot be read; the message is the reason."""

    code = 2


class Damaged(Refused):
    """There is a log, but no header to read it with."""

    code = 1


def crc32c_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC32C = crc32c_table()

# Multiples of the polynomial that have few terms, as exponents: x^5685 is congruent to x^1362 + x^426 + 1. Multiplying all
# exponents by a power of two gives a multiple again. Long data are reduced by these with shifts of one large integer, which
# is about 40 times as fast as the table.
SPARSE = ((5685, 1362, 426, 0), (290, 136, 113, 107, 32, 0))
LARGEST_SCALE = 16
SHORT = 128


def crc32c(data, crc=0):
    """Returns the checksum of `data`; with the `crc` of the preceding bytes, that of both."""
    table, crc = CRC32C, crc ^ 0xFFFFFFFF
    for start in range(0, len(data), CHUNK):
        chunk = data[start : start + CHUNK]
        if len(chunk) > SHORT:
            chunk, crc = reduced(chunk, crc), 0
        for byte in chunk:
            crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def reduced(data, crc):
    """Returns short data that have the checksum register of `data` after it began as `crc`, if it begins as 0."""
    # The first bit has the highest power of x: it is the lowest one of the integer.
    bits, value = 8 * len(data), int.from_bytes(data, "little") ^ crc
    for degree, *terms in SPARSE:
        for scale in range(LARGEST_SCALE, -1, -1):
            scaled = degree << scale
            # As many bits as can be replaced at once: none of the replacements is one of them.
            most = scaled - (terms[0] << scale)
            while bits - scaled >= 8:
                count = min(most, bits - scaled) & -8
                low = value & ((1 << count) - 1)
                value >>= count
                for term in terms:
                    value ^= low << (scaled - (term << scale) - count)
                bits -= count
    return value.to_bytes(bits // 8, "little")


assert crc32c(b"123456789") == 0xE3069283 and crc32c(bytes(4096)) == 0x98F94189


def page_floor(x):
    return x - x % PAGE


class Device:
    """A file or block device, read at any byte. Unreadable bytes are zero, and their pages are recorded."""

    def __init__(self, path):
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            mode = os.fstat(self.fd).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
                raise Refused("neither a file nor a block device")
            self.size = os.lseek(self.fd, 0, os.SEEK_END)
        except OSError as error:
            raise Refused(error.strerror) from error
        self.unreadable = set()

    def read(self, at, length):
        try:
            data = os.pread(self.fd, length, at)
            if len(data) == length:
                return data
        except OSError:
            pass
        if at // PAGE == (at + length - 1) // PAGE:
            self.unreadable.add(at // PAGE)
            return bytes(length)
        middle = page_floor(at + length // 2)
        if middle <= at:
            middle = page_floor(at) + PAGE
        return self.read(at, middle - at) + self.read(middle, at + length - middle)

    def readable(self, at, length):
        """Returns whether all of a range was readable when it was read."""
        return not self.unreadable or self.unreadable.isdisjoint(range(at // PAGE, (at + length - 1) // PAGE + 1))


@dataclass
class Header:
    slot: int
    wal_id: bytes
    generation: int
    capacity: int
    trim: int
    window: int
    epoch: int
    node: int
    epoch_start: int
    durable: int
    written_at_ms: int
    shutdown: int
    origin: int
    mark: int

    @property
    def order(self):
        """The valid header with the greatest one counts (3)."""
        return self.epoch, self.generation

    @property
    def ring(self):
        return self.capacity - DATA_START

    @property
    def bound(self):
        """The offset at which the ring is full: the page of the trim offset, one lap later (5)."""
        return page_floor(self.trim) + self.ring

    def contradiction(self):
        """Returns what is invalid in the fields, by the table of section 3; None if nothing."""
        if self.capacity % PAGE or self.ring < SMALLEST_RING:
            return "capacity"
        if self.window % PAGE or not 0 < self.window <= self.ring // 2:
            return "window"
        if self.origin % PAGE or self.origin >= self.ring:
            return "ring origin"
        if self.generation >= 1 << 63:
            return "generation"
        if self.shutdown not in (0, CLEAN):
            return "shutdown"
        if not self.trim <= self.durable or not self.durable < 1 << 63 or self.durable > self.bound:
            return "durable offset"
        if self.epoch_start > self.durable:
            return "epoch start"
        return None


def read_slot(device, slot):
    """Reads a header slot: ("valid", Header), or ("empty" | "damaged" | "future" | "other", why)."""
    at = SLOTS[slot]
    if device.size < at + PAGE:
        return "other", "the device ends before it"
    page = device.read(at, PAGE)
    if not device.readable(at, PAGE):
        return "damaged", "cannot be read"
    if not any(page):
        return "empty", "all zero"
    (magic, version, flags, wal_id, generation, capacity, trim, window, epoch, node, epoch_start, durable, written_at, shutdown, origin,
     mark, _reserved, crc) = SLOT.unpack_from(page)
    if magic != SLOT_MAGIC:
        return "other", "no header of a write-ahead log"
    if crc != crc32c(page[:SLOT_CHECKED]):
        return "damaged", "checksum"
    if version != VERSION or flags:
        return "future", f"format version {version}, flags {flags:#x}"
    header = Header(slot, wal_id, generation, capacity, trim, window, epoch, node, epoch_start, durable, written_at, shutdown, origin,
                    mark)
    contradiction = header.contradiction()
    return ("damaged", contradiction) if contradiction else ("valid", header)


def newest(slots):
    """Chooses the valid header (6, "Headers")."""
    kinds = [kind for kind, _ in slots]
    valid = [what for kind, what in slots if kind == "valid"]
    invalid = ", ".join(f"slot {at}: {kind} ({what})" for at, (kind, what) in enumerate(slots) if kind != "valid")
    if "future" in kinds:
        raise Refused(f"written by a newer version: {invalid}")
    if len(valid) == 2:
        if valid[0].order == valid[1].order:
            raise Damaged("both headers have the same generation: two writers, or a copied slot")
        if valid[0].wal_id != valid[1].wal_id:
            raise Damaged("the headers are of two different logs")
    if valid:
        return max(valid, key=lambda header: header.order)
    if kinds == ["empty", "empty"]:
        raise Refused("not formatted: both header slots are zero")
    if "damaged" in kinds:
        raise Damaged(f"both headers are lost: {invalid}")
    raise Refused(f"not a write-ahead log: {invalid}")


@dataclass
class Place:
    """The record at a logical offset, or the reason why there is none. `end` is set if its header is valid."""

    offset: int
    end: int = None
    epoch: int = None
    proof: int = None
    payload_crc: int = None
    padding: bool = False
    wrong: str = None

    @property
    def payload_bytes(self):
        return self.end - self.offset - RECORD.size


@dataclass
class Damage:
    """A range of the log that was durable and cannot be read back."""

    start: int
    end: int
    device_at: int
    reason: str


@dataclass
class End:
    """The end of the log, whether it was closed there, and the number of intact records behind it."""

    offset: int
    clean: bool
    dropped: int


class Log:
    def __init__(self, device, header):
        if header.capacity > device.size:
            raise Refused(f"the log takes {header.capacity} bytes, the device has {device.size}")
        self.device = device
        self.header = header

    def device_offset(self, x):
        return DATA_START + (x + self.header.origin) % self.header.ring

    def pieces(self, x, length):
        """Returns the parts of the device that hold a logical range: one, or two at the ring's end."""
        while length:
            at = self.device_offset(x)
            part = min(length, self.header.capacity - at)
            yield at, part
            x, length = x + part, length - part

    def read(self, x, length):
        return b"".join(self.device.read(at, part) for at, part in self.pieces(x, length))

    def readable(self, x, length):
        return all(self.device.readable(at, part) for at, part in self.pieces(x, length))

    def allowed(self, x, epoch, before):
        """The rule of epochs (6). `before` is the epoch of the record before it."""
        if x >= self.header.epoch_start:
            return epoch == self.header.epoch
        return before <= epoch < self.header.epoch

    def header_at(self, x, before):
        """Reads the record header at `x`, without its payload."""
        if x + RECORD.size > self.header.bound:
            return Place(x, wrong="the ring's end")
        data = self.read(x, RECORD.size)
        magic, length, offset, epoch, lag, payload_crc, header_crc = RECORD.unpack(data)
        if not self.readable(x, RECORD.size):
            return Place(x, wrong="unreadable")
        if magic not in (DATA, PADDING):
            return Place(x, wrong="no record header")
        if header_crc != crc32c(self.header.wal_id + data[:RECORD_CHECKED]):
            return Place(x, wrong="header checksum")
        if offset != x or lag > x:
            return Place(x, wrong="offset")
        end = x + RECORD.size + length
        if magic == PADDING:
            if end != page_floor(x + RECORD.size + PAGE - 1):
                return Place(x, wrong="length")
        elif not 1 <= length <= LARGEST_PAYLOAD:
            return Place(x, wrong="length")
        if end > self.header.bound:
            return Place(x, wrong="length")
        if not self.allowed(x, epoch, before):
            return Place(x, wrong="epoch")
        return Place(x, end, epoch, x - lag, payload_crc, magic == PADDING)

    def place(self, x, before):
        """Reads the complete record at `x`."""
        place = self.header_at(x, before)
        if place.wrong or place.padding:
            return place
        crc = 0
        at = x + RECORD.size
        while at < place.end:
            data = self.read(at, min(CHUNK, place.end - at))
            crc = crc32c(data, crc)
            at += len(data)
        if not self.readable(x, place.end - x):
            place.wrong = "unreadable"
        elif crc != place.payload_crc:
            place.wrong = "payload checksum"
        return place

    def first_header(self, start, stop, before):
        """Returns the offset of the first record header in `start..stop`, at any byte; None if there is none."""
        stop = min(stop, self.header.bound)
        for base in range(start, stop, CHUNK):
            until = min(base + CHUNK, stop)
            # The magic may continue in the next chunk.
            data = self.read(base, min(until + len(MAGIC_PREFIX), self.header.bound) - base)
            at = data.find(MAGIC_PREFIX)
            while 0 <= at < until - base:
                if not self.header_at(base + at, before).wrong:
                    return base + at
                at = data.find(MAGIC_PREFIX, at + 1)
        return None

    def look_beyond(self, hole, before):
        """Searches behind an invalid position: the greatest proof, the intact records, and the end of the search (6)."""
        proof, records = 0, 0
        stop = hole.offset + self.header.window
        at = hole.end or hole.offset + 1
        while (found := self.first_header(at, stop, before)) is not None:
            place = self.place(found, before)
            records += not place.wrong and not place.padding
            proof = max(proof, place.proof)
            at, before = place.end, place.epoch
            stop = hole.offset + 2 * self.header.window
        return proof, records, max(at, min(stop, self.header.bound))

    def readable_throughout(self, start, stop):
        """Reads the range and returns whether all of it was readable."""
        return all(
            self.read(at, min(CHUNK, stop - at)) and self.readable(at, min(CHUNK, stop - at)) for at in range(start, stop, CHUNK)
        )

    def walk(self):
        """Yields the log from its trim offset (6): each record, padding and damage, and the end."""
        header = self.header
        x, before, known, damage, dropped = header.trim, 0, header.durable, None, 0
        while not (header.shutdown == CLEAN and x == header.durable):
            place = self.place(x, before)
            if not place.wrong:
                if damage:
                    yield damage
                    damage = None
                yield place
                x, before, known = place.end, place.epoch, max(known, place.proof)
                continue
            if x >= known:
                proof, behind, looked_to = self.look_beyond(place, before)
                known = max(known, proof)
                if x >= known:
                    dropped = behind
                    if not self.readable_throughout(x, looked_to):
                        raise Refused(f"it cannot be read at {x}, where the log may end")
                    break
            damage = damage or Damage(x, x, self.device_offset(x), place.wrong)
            x = min(place.end, known) if place.end else self.first_header(x + 1, known, before) or known
            damage.end = x
        if not self.readable_throughout(page_floor(x), x):
            raise Refused(f"it cannot be read right before {x}, where the log ends")
        if damage:
            yield damage
        yield End(x, header.shutdown == CLEAN, dropped)


class Printer:
    def __init__(self, as_json):
        self.as_json = as_json

    def header(self, slots, header):
        fields = {
            "wal_id": str(uuid.UUID(bytes=header.wal_id)),
            "generation": header.generation,
            "capacity_bytes": header.capacity,
            "trim_offset": header.trim,
            "durable_offset": header.durable,
            "window_bytes": header.window,
            "epoch": header.epoch,
            "epoch_start_offset": header.epoch_start,
            "node_id": header.node,
            "written_at_ms": header.written_at_ms,
            "clean_shutdown": header.shutdown == CLEAN,
            "ring_origin_bytes": header.origin,
            "mark": header.mark,
        }
        if self.as_json:
            print(json.dumps({"header": fields}))
            return
        for slot, (kind, what) in enumerate(slots):
            print(f"slot {slot}: {kind}" + (f", generation {what.generation}" if kind == "valid" else f" ({what})"))
        for name, value in fields.items():
            print(f"{name:>20}  {value}")
        print(f"{'OFFSET':>20}  {'END':>20}  {'EPOCH':>10}  {'PAYLOAD B':>10}  CRC")

    def item(self, item):
        if isinstance(item, Damage):
            kind = "damage"
            fields = {"start_offset": item.start, "end_offset": item.end, "device_at": item.device_at, "reason": item.reason}
            text = f"{item.start:>20}  {item.end:>20}  damaged: {item.reason}, at byte {item.device_at} of the device"
        elif isinstance(item, End):
            kind = "end"
            fields = {"end_offset": item.offset, "clean_shutdown": item.clean, "dropped_records": item.dropped}
            text = f"the log ends at {item.offset}" + ("" if item.clean else " (not closed)")
            if item.dropped:
                text += f"; intact records behind it, never acknowledged: {item.dropped}"
        elif item.padding:
            return
        else:
            kind, size = "record", item.payload_bytes
            fields = {"offset": item.offset, "end_offset": item.end, "epoch": item.epoch, "payload_bytes": size, "crc_ok": True}
            text = f"{item.offset:>20}  {item.end:>20}  {item.epoch:>10}  {size:>10}  ok"
        print(json.dumps({kind: fields}) if self.as_json else text)


def run(main):
    """Exits with the code that `main` returns; with 0 if the reader of the output closes it."""
    try:
        sys.exit(main())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def main():
    parser = argparse.ArgumentParser(description="Read an Alluvium write-ahead log, by docs/format/wal.md.")
    parser.add_argument("target", help="the block device or file")
    parser.add_argument("--json", action="store_true", help='one object per line: {"header":..}, {"record":..}, {"damage":..}, {"end":..}')
    arguments = parser.parse_args()
    printer = Printer(arguments.json)
    damaged = False
    try:
        device = Device(arguments.target)
        slots = [read_slot(device, slot) for slot in range(len(SLOTS))]
        log = Log(device, newest(slots))
        printer.header(slots, log.header)
        damaged = any(kind != "valid" for kind, _ in slots)
        for item in log.walk():
            damaged = damaged or isinstance(item, Damage)
            printer.item(item)
    except Refused as refused:
        sys.stdout.flush()
        print(f"error: {arguments.target}: {refused}", file=sys.stderr)
        return refused.code
    return 1 if damaged else 0


if __name__ == "__main__":
    run(main)
