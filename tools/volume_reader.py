#!/usr/bin/env python3
"""Reads the write-ahead log and the store of one Alluvium volume server.

A second implementation of the read side, written from docs/format/volume-log.md (LOG in the comments), volume-store.md
(STORE) and section 6 of volume-wire.md alone: where this program and the server differ, one of the three is wrong. The
records are in volume_log.py, the store's metadata in volume_store.py, and the log itself is read by wal_reader.py. Numbers
in the comments are sections.

It only reads, and takes no claim. The server must not run: it may have been killed, or its power cut.

Exit code: 0 everything is intact, 1 something is damaged or lost, 2 the devices could not be read.
"""

import argparse
import json
import os
import sys
from collections import Counter, defaultdict

from volume_log import ABSENT, BLOCK, CHUNK_BLOCKS, ZEROS, Log, replay
from volume_store import MIB, SLOT_BLOCKS, Sector, Store, word
from wal_reader import Damaged, Refused, run


# The largest volume.
MAX_VOLUME = 64 << 40


def named(what, path, *arguments):
    """Reads a device; an error names it."""
    try:
        return what(path, *arguments)
    except Refused as refused:
        refused.args = (f"{path}: {refused}",)
        raise


class Server:
    """Log and store of one server, and what an opening makes of them."""

    def __init__(self, arguments):
        self.damage = []
        self.log = named(Log, arguments.wal, self.damaged)
        self.replicas = replay(self.log, getattr(arguments, "uncommitted", False), self.damaged)
        # After the loss of all replicas no sector counts, and the superblock may not state the checkpoint yet (STORE 8).
        all_lost = self.log.checkpoint.number > 0 and not self.replicas
        self.store = named(Store, arguments.store, self.damaged, not all_lost)
        self.check_together(all_lost)
        self.counts = Counter()
        # By replica: by (volume, chunk, slot number).
        self.used = defaultdict(dict)
        self.classify()
        if self.store.damaged:
            for replica in self.replicas.values():
                replica.lost = replica.lost or "a sector of the store is damaged"
        for replica in self.replicas.values():
            if replica.lost:
                self.damaged("replica", f"group {replica.group}, peer {replica.peer} is lost: {replica.lost}")

    def damaged(self, where, what, device_at=None):
        self.damage.append({"in": where, "what": what, "device_at": device_at})

    def check_together(self, all_lost):
        """STORE 8, steps 4 and 6."""
        superblock, checkpoint = self.store.superblock, self.log.checkpoint
        if superblock.wal_id != self.log.header.wal_id:
            raise Refused("log and store do not belong together: the store names another log")
        if superblock.checkpoint < checkpoint.number and not all_lost:
            raise Damaged(f"the store is behind the log: its checkpoint is {superblock.checkpoint}, the log's {checkpoint.number}")
        if superblock.checkpoint > checkpoint.number + 1 or superblock.wal_offset > self.log.end.offset:
            raise Damaged(
                f"the log is behind the store: checkpoint {checkpoint.number}, end {self.log.end.offset}; the store has"
                f" {superblock.checkpoint}, {superblock.wal_offset}"
            )

    def classify(self):
        """Decides which slots are used (STORE 8)."""
        checkpoint = self.log.checkpoint
        for sector in self.store.sectors:
            if sector.number > checkpoint.number + 1:
                raise Damaged(
                    f"the log is behind the store: the sector of slot {sector.slot} is of checkpoint {sector.number}, the last"
                    f" one of the log is {checkpoint.number}"
                )
            key = sector.group, sector.peer
            stated, replica = checkpoint.bases.get(key), self.replicas.get(key)
            if stated and sector.volume in stated.volumes:
                used = True
            elif sector.number < checkpoint.number and (stated is None or stated.barrier <= stated.base):
                used = False
            else:
                used = replica is not None and (sector.volume in replica.volumes or replica.barrier > replica.applied)
            if not used or replica is None:
                self.counts["orphan_slots"] += 1
                continue
            slots, address = self.used[key], (sector.volume, sector.chunk, sector.slot_number)
            other = slots.get(address)
            if other is None or (sector.number, -sector.slot) > (other.number, -other.slot):
                slots[address] = sector
            self.counts["duplicate_slots"] += other is not None
        self.counts["used_slots"] = sum(map(len, self.used.values()))

    def verify(self):
        """Compares all words with the data."""
        for key, slots in self.used.items():
            replica = self.replicas[key]
            for sector in sorted(slots.values(), key=lambda sector: sector.slot):
                self.verify_slot(replica, sector)

    def verify_slot(self, replica, sector):
        replayed = replica.overlay.get((sector.volume, sector.chunk), {})
        data = None
        for block, wanted in enumerate(sector.words):
            if wanted <= ZEROS:
                continue
            if sector.slot_number * SLOT_BLOCKS + block in replayed:
                # The store may have the block of before, of after, or parts of both (STORE 9).
                self.counts["replayed_blocks"] += 1
                continue
            data = data or self.store.data(sector.slot)
            if word(data[BLOCK * block :][:BLOCK], sector, block) == wanted:
                self.counts["verified_blocks"] += 1
            elif not replica.exact:
                self.counts["unproved_blocks"] += 1
            else:
                self.damaged_block(sector, block)

    def damaged_block(self, sector, block):
        number = sector.chunk * CHUNK_BLOCKS + sector.slot_number * SLOT_BLOCKS + block
        what = f"block {number} of volume {sector.volume} (group {sector.group}, slot {sector.slot}): checksum"
        self.damaged("store", what, self.store.block_offset(sector, block))

    def blocks(self, volume):
        """Returns the blocks of a volume that are not absent: by number, a function that returns the data."""
        known = [replica for replica in self.replicas.values() if volume in replica.volumes]
        if not known:
            raise Refused(f"no replica of this server knows volume {volume}")
        found = {}
        for replica in known:
            if not replica.exact:
                why = replica.lost or f"it has applied {replica.applied}, below the barrier {replica.barrier} of an install"
                raise Damaged(f"group {replica.group}, peer {replica.peer} serves nothing: {why}")
            if replica.volumes[volume].parent:
                raise Refused(f"volume {volume} is a clone: this program does not read parents")
            for sector in self.used[replica.group, replica.peer].values():
                if sector.volume != volume:
                    continue
                first = sector.chunk * CHUNK_BLOCKS + sector.slot_number * SLOT_BLOCKS
                for block, stored in enumerate(sector.words):
                    if stored > ZEROS:
                        found[first + block] = lambda sector=sector, block=block: self.stored(sector, block)
            for (of, chunk), blocks in replica.overlay.items():
                if of != volume:
                    continue
                for block, data in blocks.items():
                    found.pop(chunk * CHUNK_BLOCKS + block, None)
                    if data > ZEROS:
                        found[chunk * CHUNK_BLOCKS + block] = lambda data=data: self.log.block(data)
        return found

    def stored(self, sector, block):
        data = self.store.device.read(self.store.block_offset(sector, block), BLOCK)
        if word(data, sector, block) != sector.words[block]:
            self.damaged_block(sector, block)
        return data


class Printer:
    def __init__(self, as_json):
        self.as_json = as_json

    def item(self, kind, fields):
        if self.as_json:
            print(json.dumps({kind: fields}))
        else:
            print(f"{kind:<10}  " + "  ".join(f"{name} {self.text(value)}" for name, value in fields.items() if value is not None))

    def text(self, value):
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name}: {self.text(inner)}" for name, inner in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(self.text, value)) + "]"
        return str(value)


def describe(server, printer, whole):
    for copy, (kind, what) in enumerate(server.store.copies):
        fields = what.described() if kind == "valid" else {"detail": what}
        counts = kind == "valid" and what is server.store.superblock
        printer.item("superblock", {"copy": copy, "state": kind, "counts": counts} | fields)
    if whole:
        for offset, record in server.log.records:
            printer.item("record", {"offset": offset, "kind": record.kind} | record.described())
    for key, replica in sorted(server.replicas.items()):
        state = "lost" if replica.lost else "exact" if replica.exact else "installing"
        names = ["group", "peer", "term", "vote", "base", "base_term", "commit", "applied", "last", "last_term", "barrier"]
        names.append("configuration")
        fields = {name: getattr(replica, name) for name in names}
        volumes = {volume: volume_state.described() for volume, volume_state in sorted(replica.volumes.items())}
        fields |= {"state": state, "reason": replica.lost, "used_slots": len(server.used[key]), "volumes": volumes}
        printer.item("replica", fields)
        if whole:
            for sector in sorted(server.used[key].values(), key=lambda sector: sector.slot):
                fields = {name: getattr(sector, name) for name in Sector.__slots__ if name != "words"}
                printer.item("slot", fields | {"blocks": sum(word != ABSENT for word in sector.words)})
    for damage in server.damage:
        printer.item("damage", damage)
    log = server.log
    names = ["used_slots", "orphan_slots", "duplicate_slots", "verified_blocks", "replayed_blocks", "unproved_blocks"]
    printer.item(
        "summary",
        {
            "intact": not server.damage,
            "records": len(log.records),
            "checkpoints": log.checkpoints,
            "last_checkpoint": log.checkpoint.number,
            "trim_offset": log.header.trim,
            "end_offset": log.end.offset,
            "clean_shutdown": log.end.clean,
            "dropped_records": log.end.dropped,
            "slots": server.store.superblock.slots,
        }
        | {name: server.counts[name] for name in names},
    )


def read(server, arguments):
    """Writes the content of a volume, as the replicas of this server would serve it."""
    blocks = server.blocks(arguments.volume)
    if arguments.length is None:
        end = (max(blocks) + 1) * BLOCK if blocks else 0
        if arguments.offset > end:
            raise Refused(f"the last block that has data ends at byte {end}: --offset {arguments.offset} needs a --length")
        arguments.length = end - arguments.offset
    end = arguments.offset + arguments.length
    if end > MAX_VOLUME:
        raise Refused(f"--offset and --length end at byte {end}, and no volume is larger than {MAX_VOLUME}")
    with open(arguments.out, "wb") if arguments.out else sys.stdout.buffer as out:

        def zeros(length):
            if arguments.out:
                out.seek(length, os.SEEK_CUR)
                return
            for at in range(0, length, MIB):
                out.write(bytes(min(MIB, length - at)))

        at = arguments.offset
        for number in sorted(blocks):
            start, until = max(at, BLOCK * number), min(end, BLOCK * (number + 1))
            if start < until:
                zeros(start - at)
                out.write(blocks[number]()[start % BLOCK :][: until - start])
                at = until
        zeros(end - at)
        if arguments.out:
            out.truncate()


def number_of_bytes(text):
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= MAX_VOLUME:
        raise argparse.ArgumentTypeError(f"{text} is not a number of bytes from 0 to {MAX_VOLUME}")
    return number


def parsed():
    parser = argparse.ArgumentParser(
        description="Read the log and the store of a stopped Alluvium volume server, by docs/format/volume-log.md and"
        " volume-store.md. Exit code: 0 everything is intact, 1 something is damaged or lost, 2 it could not be read."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="verify all checksums of log and store, and show replicas and superblocks")
    dump = commands.add_parser("dump", help="the same, with all records and all slots that are used")
    content = commands.add_parser("read", help="write the content of a volume, as the replicas of this server would serve it")
    for command in (check, dump, content):
        command.add_argument("wal", metavar="WAL", help="the block device or file of the write-ahead log")
        command.add_argument("store", metavar="STORE", help="the block device or file of the store")
    for command in (check, dump):
        kinds = '{"superblock":..}, {"replica":..}, {"damage":..}, {"summary":..}, with dump also {"record":..}, {"slot":..}'
        command.add_argument("--json", action="store_true", help=f"one object per line: {kinds}")
    content.add_argument("--volume", type=int, required=True, help="the number of the volume")
    content.add_argument("--offset", type=number_of_bytes, default=0, help="first byte (default 0)")
    content.add_argument("--length", type=number_of_bytes, help="number of bytes (default: to the last block that has data)")
    content.add_argument("--out", metavar="FILE", help="write to this file, with holes (default: standard output)")
    content.add_argument(
        "--uncommitted",
        action="store_true",
        help="also apply the entries above the commit index: of the replica with the greatest last term and index of a group"
        " this contains each write that was answered",
    )
    return parser.parse_args()


def main():
    arguments = parsed()
    try:
        server = Server(arguments)
        if arguments.command == "read":
            read(server, arguments)
            for damage in server.damage:
                print(f"error: {damage['in']}: {damage['what']}", file=sys.stderr)
        else:
            server.verify()
            describe(server, Printer(arguments.json), arguments.command == "dump")
    except Refused as refused:
        sys.stdout.flush()
        print(f"error: {refused}", file=sys.stderr)
        return refused.code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if server.damage else 0


if __name__ == "__main__":
    run(main)
