"""The records of a volume server's log, and what a recovery makes of them.

Written from docs/format/volume-log.md (LOG in the comments) and section 6 of volume-wire.md (WIRE) alone; part of
volume_reader.py. Numbers in the comments are sections.
"""

import struct
from collections import defaultdict
from dataclasses import dataclass, field

import wal_reader
from wal_reader import Device, Refused, crc32c

BLOCK = 4096
CHUNK_BLOCKS = 4096
CHUNKS = 1 << 22
NUMBERS = 1 << 32

# LOG 3. Records
PREFIX = struct.Struct("<ccBBI")
ENTRIES = struct.Struct("<QQQQQQQII")
ENTRY = struct.Struct("<QIB3s")
INSTALL = struct.Struct("<QQQQQII")
PROGRESS = struct.Struct("<II512s")
CHECKPOINT = struct.Struct("<QIIII")
GROUP = struct.Struct("<QQQQQQQQQQIBBBBBBHI")
VOLUME = struct.Struct("<IIIIQQHHI")
GONE = struct.Struct("<QQ")
WINDOW = 4096
LARGEST_COUNT = 65536

# The words of blocks without data (STORE 4)
ABSENT, ZEROS = 0, 1

# WIRE 6. Op
OP = struct.Struct("<BBHIIHHQIQI")
ATTACH = struct.Struct("<IIII")
CONFIGURATION = struct.Struct("<BBHI")
CHANGE = struct.Struct("<B7sQ")
WRITE, ZERO, DISCARD, ATTACHMENT, NOOP, CONFIGURE = 1, 2, 3, 4, 5, 9
OPS = {WRITE: "write", ZERO: "zero", DISCARD: "discard", ATTACHMENT: "attach", NOOP: "noop", CONFIGURE: "configuration"}

assert GROUP.size == 96 and VOLUME.size == 40 and OP.size == 40


class Fields:
    """The bytes of a record or op, read from the front. What does not agree with the document is refused."""

    def __init__(self, data, what):
        self.data, self.at, self.what = data, 0, what

    def refuse(self, why):
        raise Refused(f"{self.what}: {why}: a newer version wrote it, or it is not a volume server's")

    def require(self, condition, why):
        if not condition:
            self.refuse(why)

    def take(self, layout):
        return layout.unpack(self.bytes(layout.size))

    def bytes(self, length):
        self.require(self.at + length <= len(self.data), "it is too short")
        self.at += length
        return self.data[self.at - length : self.at]

    def integers(self, letter, count):
        return self.take(struct.Struct(f"<{count}{letter}"))

    def zeros(self, *values):
        self.require(not any(any(v) if isinstance(v, bytes) else v for v in values), "reserved bytes are not zero")

    def end(self):
        self.require(self.at == len(self.data), "it is too long")


@dataclass(slots=True)
class Op:
    kind: int
    volume: int = 0
    chunk: int = 0
    first: int = 0
    blocks: int = 0
    epoch: int = 0
    seq: int = 0
    distance: int = 0
    parent: int = 0
    nonce: int = 0
    # Of a write: the log offset of the first block.
    data: int = 0
    changes: tuple = ()

    def described(self):
        fields = {"kind": OPS[self.kind], "volume": self.volume, "epoch": self.epoch}
        if self.kind in (WRITE, ZERO, DISCARD):
            fields |= {"chunk": self.chunk, "block": self.first, "blocks": self.blocks}
            fields |= {"seq": self.seq, "floor": self.seq - self.distance}
        elif self.kind == ATTACHMENT:
            fields |= {"parent": self.parent, "nonce": self.nonce}
        elif self.kind == CONFIGURE:
            fields = {"kind": OPS[self.kind], "changes": [{"type": kind, "peer": peer} for kind, peer in self.changes]}
        return fields


@dataclass(slots=True)
class Entry:
    term: int
    # None: the entry of a new leader, or raft's own change of a configuration.
    op: Op


@dataclass(slots=True)
class Entries:
    """`E`"""

    kind = "E"
    group: int
    peer: int
    term: int
    vote: int
    commit: int
    first: int
    previous_term: int
    entries: list

    def described(self):
        entries = [
            {"index": index, "term": entry.term, "op": entry.op.described() if entry.op else None}
            for index, entry in enumerate(self.entries, self.first)
        ]
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "entries"}
        return fields | {"count": len(entries), "entries": entries}


@dataclass(slots=True)
class Install:
    """`I`"""

    kind = "I"
    group: int
    peer: int
    barrier: int
    applied: int
    since: int
    volumes: list

    def described(self):
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Part:
    """`C`: one part of a checkpoint"""

    kind = "C"
    number: int
    part: int
    parts: int
    groups: list

    def described(self):
        fields = {"number": self.number, "part": self.part, "parts": self.parts}
        return fields | {"groups": [group.described() for group in self.groups]}


@dataclass(slots=True)
class Gone:
    """`T`"""

    kind = "T"
    group: int
    peer: int

    def described(self):
        return {"group": self.group, "peer": self.peer}


@dataclass(slots=True)
class Volume:
    """The replicated state of a volume in a group."""

    epoch: int = 0
    nonce: int = 0
    floor: int = 0
    parent: int = 0
    # The numbers from `floor` on that were applied.
    numbers: set = field(default_factory=set)

    def described(self):
        return {"epoch": self.epoch, "nonce": self.nonce, "floor": self.floor, "applied_numbers": len(self.numbers)}

    def copied(self):
        return Volume(self.epoch, self.nonce, self.floor, self.parent, set(self.numbers))

    def attach(self, op):
        if op.epoch > self.epoch:
            self.epoch, self.nonce, self.floor, self.parent = op.epoch, op.nonce, 1, op.parent
            self.numbers.clear()

    def takes(self, op):
        """Decides, and records, whether an op has its effect (WIRE 6, "Epoch and window")."""
        if op.epoch != self.epoch:
            return False
        floor = max(self.floor, op.seq - op.distance)
        if floor > self.floor:
            self.numbers = {number for number in self.numbers if number >= floor}
            self.floor = floor
        if op.seq < self.floor or op.seq in self.numbers:
            return False
        self.numbers.add(op.seq)
        return True


@dataclass(slots=True)
class Base:
    """What a checkpoint states of one replica."""

    group: int
    peer: int
    base: int
    base_term: int
    last: int
    last_term: int
    term: int
    vote: int
    commit: int
    barrier: int
    completes: bool
    configuration: dict
    volumes: dict

    def described(self):
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "volumes"}
        return fields | {"volumes": {volume: state.described() for volume, state in self.volumes.items()}}


def decode_op(data, at, what):
    """Reads the op at the log offset `at`; also returns whether each of its blocks has its checksum."""
    fields = Fields(data, what)
    if data[0] == CONFIGURE:
        _, transition, count, reserved = fields.take(CONFIGURATION)
        fields.zeros(reserved)
        fields.require(transition <= 2 and count <= 8, "a change of configuration is out of bounds")
        changes = []
        for _ in range(count):
            kind, reserved, peer = fields.take(CHANGE)
            fields.zeros(reserved)
            fields.require(kind <= 2 and peer, "a change of configuration is out of bounds")
            changes.append((kind, peer))
        fields.end()
        return Op(CONFIGURE, changes=tuple(changes)), True
    kind, flags, blocks, volume, chunk, first, reserved, epoch, layer, seq, distance = fields.take(OP)
    fields.require(kind in OPS, f"an op of kind {kind}")
    fields.zeros(flags, reserved)
    fields.require(layer == 0, f"an op of layer {layer}: this program does not know layers")
    op = Op(kind, volume, chunk, first, blocks, epoch, seq, distance)
    changes_blocks = kind in (WRITE, ZERO, DISCARD)
    most = {WRITE: 256, ZERO: CHUNK_BLOCKS, DISCARD: CHUNK_BLOCKS}.get(kind, 0)
    fields.require(changes_blocks <= blocks <= most and first + blocks <= CHUNK_BLOCKS, "the range of an op is out of bounds")
    fields.require(chunk < CHUNKS and (volume or kind == NOOP and not epoch), "chunk or volume of an op is out of bounds")
    fields.require(
        distance < min(seq, WINDOW) if changes_blocks else seq == distance == 0, "the number of an op is out of bounds"
    )
    good = True
    if kind == WRITE:
        sums = fields.integers("I", blocks)
        op.data = at + fields.at
        for wanted in sums:
            good = crc32c(fields.bytes(BLOCK)) == wanted and good
    elif kind == ATTACHMENT:
        op.parent, _parent_layer, _server, op.nonce = fields.take(ATTACH)
    fields.end()
    return op, good


def decode_entries(fields, at, rotten):
    group, peer, term, vote, commit, first, previous_term, count, reserved = fields.take(ENTRIES)
    fields.zeros(reserved)
    fields.require(count <= LARGEST_COUNT, f"{count} entries")
    heads = [fields.take(ENTRY) for _ in range(count)]
    entries, before = [], 0
    for index, (entry_term, length, kind, reserved) in enumerate(heads, first):
        fields.zeros(reserved)
        fields.require(kind in (0, 2), f"an entry of type {kind}")
        fields.require(before <= entry_term <= term, "the terms of the entries are not in order")
        before, op = entry_term, None
        if length:
            position = at + fields.at
            op, good = decode_op(fields.bytes(length), position, f"{fields.what}, entry {index}")
            fields.require((op.kind == CONFIGURE) == (kind == 2), f"entry {index} is of type {kind}")
            if not good:
                rotten(f"a block of the op of entry {index}, group {group}", position)
        entries.append(Entry(entry_term, op))
    return Entries(group, peer, term, vote, commit, first, previous_term, entries)


def decode_install(fields, flags):
    group, peer, barrier, applied, since, count, reserved = fields.take(INSTALL)
    fields.zeros(reserved)
    fields.require(flags or not since and not count, "an install without progress has some")
    volumes = []
    for _ in range(count):
        volume, reserved, bitmap = fields.take(PROGRESS)
        fields.zeros(reserved)
        volumes.append({"volume": volume, "finished_chunks": int.from_bytes(bitmap, "little").bit_count()})
    return Install(group, peer, barrier, applied, since, volumes)


def decode_volume(fields):
    start = fields.at
    volume, flags, parent, _layer, epoch, floor, dropped, reserved, nonce = fields.take(VOLUME)
    fields.zeros(reserved)
    fields.require(flags & ~3 == 0, f"flags {flags:#x} of volume {volume}")
    state = Volume(epoch, nonce, floor, parent)
    if flags & 1:
        bits = int.from_bytes(fields.bytes(WINDOW // 8), "little")
        while bits:
            bit = bits.bit_length() - 1
            bits ^= 1 << bit
            state.numbers.add(floor + (bit - floor) % WINDOW)
    fields.require(dropped == 0, "dropped layers: this program does not know layers")
    fields.zeros(fields.bytes(-(fields.at - start) % 8))
    return volume, state


def decode_group(fields):
    (group, peer, base, base_term, last, last_term, term, vote, commit, barrier, flags, voters, learners, outgoing, following,
     pairs, reserved, volumes, reserved_too) = fields.take(GROUP)
    fields.zeros(reserved, reserved_too)
    fields.require(flags & ~3 == 0, f"flags {flags:#x} of group {group}")
    counts = {"voters": voters, "learners": learners, "outgoing_voters": outgoing, "next_learners": following}
    configuration = {name: list(fields.integers("Q", count)) for name, count in counts.items()}
    configuration["auto_leave"] = bool(flags & 2)
    fields.integers("Q", 2 * pairs)
    listed = [decode_volume(fields) for _ in range(volumes)]
    fields.require(ascending([volume for volume, _ in listed]), f"the volumes of group {group} are not in order")
    return Base(group, peer, base, base_term, last, last_term, term, vote, commit, barrier, bool(flags & 1), configuration,
                dict(listed))


def ascending(values):
    return all(one < other for one, other in zip(values, values[1:]))


def decode(payload, at, what, rotten):
    """Reads the record whose payload begins at the log offset `at`."""
    fields = Fields(payload, what)
    magic, version, kind, flags, reserved = fields.take(PREFIX)
    fields.require(magic == b"V", "no record of a volume server")
    fields.require(version == b"\1", f"version {version[0]}")
    fields.require(kind in (1, 2, 3, 4) and flags & ~(kind == 2) == 0, f"kind {kind}, flags {flags:#x}")
    fields.zeros(reserved)
    if kind == 1:
        record = decode_entries(fields, at, rotten)
    elif kind == 2:
        record = decode_install(fields, flags)
    elif kind == 3:
        number, part, parts, count, reserved = fields.take(CHECKPOINT)
        fields.zeros(reserved)
        fields.require(0 < number < NUMBERS and part < parts, f"part {part} of {parts} of checkpoint {number}")
        record = Part(number, part, parts, [decode_group(fields) for _ in range(count)])
    else:
        record = Gone(*fields.take(GONE))
    fields.end()
    return record


@dataclass
class Checkpoint:
    """The last complete one: the offset of its first part, that of the end of its last one, and the replicas."""

    number: int = 0
    start: int = 0
    end: int = 0
    bases: dict = field(default_factory=dict)


class Log:
    """The records of a server's log, with what is damaged and the last complete checkpoint."""

    def __init__(self, path, damaged):
        self.device = Device(path)
        slots = [wal_reader.read_slot(self.device, slot) for slot in range(len(wal_reader.SLOTS))]
        self.log = wal_reader.Log(self.device, wal_reader.newest(slots))
        self.header = self.log.header
        for slot, (kind, what) in enumerate(slots):
            if kind != "valid":
                damaged("log", f"header slot {slot} is {kind} ({what})", wal_reader.SLOTS[slot])
        # (offset of the record, record)
        self.records = []
        self.damage = []
        self.checkpoint = Checkpoint()
        self.checkpoints = self.parts = 0
        run = []
        for item in self.log.walk():
            if isinstance(item, wal_reader.End):
                self.end = item
            elif isinstance(item, wal_reader.Damage):
                self.damage.append(item)
                damaged("log", f"{item.start} to {item.end}: {item.reason}", item.device_at)
                run = []
            elif not item.padding:
                start = item.offset + wal_reader.RECORD.size

                def rotten(what, at):
                    damaged("log", what, self.log.device_offset(at))

                payload = self.log.read(start, item.payload_bytes)
                record = decode(payload, start, f"the record at {item.offset}", rotten)
                self.records.append((item.offset, record))
                run = self.joined(run, item, record)

    def joined(self, run, place, record):
        """Collects the parts of a checkpoint, which follow each other without another record (LOG 3)."""
        if record.kind != "C":
            return []
        self.parts += 1
        if not (run and run[-1][1].number == record.number and run[-1][1].parts == record.parts):
            run = []
        if record.part != len(run):
            return []
        run = [*run, (place, record)]
        if len(run) == record.parts:
            bases = [base for _, part in run for base in part.groups]
            if not ascending([base.group for base in bases]):
                raise Refused(f"the groups of checkpoint {record.number} are not in order")
            self.checkpoints += 1
            self.checkpoint = Checkpoint(
                record.number, run[0][0].offset, place.end, {(base.group, base.peer): base for base in bases}
            )
        return run

    def block(self, offset):
        return self.log.read(offset, BLOCK)


class Replica:
    """A replica as recovery finds it (LOG 6), and after it has applied what is committed."""

    def __init__(self, group, peer):
        self.group, self.peer = group, peer
        self.base = self.base_term = self.term = self.vote = self.commit = self.barrier = self.last = 0
        self.entries = {}
        self.configuration = None
        self.volumes = {}
        self.lost = None
        # The index and term after which a record continued, of entries that are not there.
        self.gaps = []
        self.ends, self.void = True, None
        # After `apply`: the index, and by (volume, chunk) and block: the log offset of the data, or ABSENT or ZEROS.
        self.applied = 0
        self.overlay = defaultdict(dict)

    @property
    def last_term(self):
        return self.entries[self.last].term if self.last in self.entries else self.base_term

    @property
    def exact(self):
        return not self.lost and self.barrier <= self.applied

    def take(self, record, base):
        previous = record.first - 1
        # What is missing behind it is replaced.
        self.gaps = [gap for gap in self.gaps if gap[0] < previous]
        there = self.entries.get(previous)
        if there is None or there.term != record.previous_term:
            self.gaps.append((previous, record.previous_term))
            if previous > base:
                self.entries.clear()
        for index in range(record.first, self.last + 1):
            self.entries.pop(index, None)
        for index, entry in enumerate(record.entries, record.first):
            if index > base:
                self.entries[index] = entry
        self.last = max(base, previous + len(record.entries))
        self.term, self.vote, self.commit = record.term, record.vote, max(self.commit, record.commit)

    def cover(self, stated):
        """Takes what the last complete checkpoint states."""
        kept = {index: entry for index, entry in self.entries.items() if stated.base < index <= stated.last}
        last_term = kept[stated.last].term if stated.last in kept else stated.base_term
        self.ends = len(kept) == stated.last - stated.base and last_term == stated.last_term
        if stated.completes or stated.last == stated.base:
            self.gaps.clear()
        self.entries, self.last = kept, max(kept, default=stated.base)
        self.base, self.base_term = stated.base, stated.base_term
        self.term, self.vote, self.commit, self.barrier = stated.term, stated.vote, stated.commit, stated.barrier
        self.configuration = stated.configuration
        self.volumes = {volume: state.copied() for volume, state in stated.volumes.items()}

    def judge(self, checkpoint):
        """Returns why the replica may have forgotten something (LOG 7); None if it has not."""
        if self.void:
            return self.void
        base = self.base, self.base_term
        for gap in self.gaps:
            # Before the checkpoint, records may begin below its base.
            if gap[0] > self.base or gap[0] == self.base and gap != base:
                return f"the entry {gap[0]} is not there with the term {gap[1]}, which a record continues"
        if not self.ends:
            return f"the records do not end as checkpoint {checkpoint.number} states"
        if self.commit > self.last:
            return f"commit {self.commit} is above the last index {self.last}"
        return None

    def begin(self):
        """Infers the volumes with which a group begins that the last checkpoint does not list. The registry has them, and
        they are those of the first ops: a leader refuses older epochs, and a newer one begins with an `Attach`."""
        attached = set()
        for index in sorted(self.entries):
            op = self.entries[index].op
            if op and op.kind == ATTACHMENT:
                attached.add(op.volume)
            elif op and op.kind in (WRITE, ZERO, DISCARD) and op.volume not in attached:
                state = self.volumes.setdefault(op.volume, Volume(op.epoch, floor=1))
                state.epoch = min(state.epoch, op.epoch)

    def apply(self, uncommitted):
        self.applied = self.base
        until = self.last if uncommitted else self.commit
        while self.applied < until and (entry := self.entries.get(self.applied + 1)) is not None:
            self.applied += 1
            if entry.op:
                self.apply_op(entry.op)

    def apply_op(self, op):
        if op.kind == ATTACHMENT:
            self.volumes.setdefault(op.volume, Volume()).attach(op)
        elif op.kind in (WRITE, ZERO, DISCARD):
            state = self.volumes.get(op.volume)
            if state is None or not state.takes(op):
                return
            blocks = self.overlay[op.volume, op.chunk]
            for number in range(op.blocks):
                if op.kind == WRITE:
                    blocks[op.first + number] = op.data + BLOCK * number
                else:
                    hides = op.kind == ZERO or state.parent
                    blocks[op.first + number] = ZEROS if hides else ABSENT


def replay(log, uncommitted, damaged):
    """Returns the replicas of the server by (group, peer), each with what is committed applied."""
    checkpoint, replicas, gone = log.checkpoint, {}, {}
    for offset, record in log.records:
        if record.kind == "C":
            if offset != checkpoint.start or not checkpoint.number:
                continue
            for key in replicas.keys() - checkpoint.bases.keys():
                damaged("log", f"checkpoint {checkpoint.number} does not list group {key[0]}, peer {key[1]}")
            for key, stated in checkpoint.bases.items():
                replicas.setdefault(key, Replica(*key)).cover(stated)
            continue
        key = record.group, record.peer
        if key in gone:
            damaged("log", f"the record at {offset} is behind the end of group {key[0]}, peer {key[1]}")
        elif record.kind == "T":
            gone[key] = offset
            replicas.pop(key, None)
        else:
            replica = replicas.setdefault(key, Replica(*key))
            if record.kind == "I":
                replica.barrier = max(replica.barrier, record.barrier)
                continue
            stated = checkpoint.bases.get(key)
            if stated and offset > checkpoint.start and record.first <= stated.base:
                replica.void = f"the record at {offset} begins below the base {stated.base}"
            if not (stated and stated.completes and offset < checkpoint.start):
                replica.take(record, stated.base if stated else 0)
    for replica in replicas.values():
        if any(damage.start >= checkpoint.start for damage in log.damage):
            replica.lost = "the log is damaged behind the last checkpoint"
        else:
            replica.lost = replica.judge(checkpoint)
        if replica.configuration is None:
            replica.begin()
        replica.apply(uncommitted)
    return replicas
