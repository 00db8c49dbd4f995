#!/usr/bin/env python3
"""Reads the chain of a store, the catalog in the object store, in a local directory.

A second implementation of the read side, written from docs/format/chain.md and docs/format/sequence.md alone: where
this program and Alluvium differ, one of the three is wrong. Section numbers in the comments are those of chain.md;
"S" and a number is a section of sequence.md.

It only reads. Objects that are deleted meanwhile can be reported as missing.

Every object and snapshot that is there is checked on its own, and every snapshot is compared with the objects (C5).
Damage below the newest snapshot that counts is reported, and the state is loaded nevertheless.

Exit code: 0 the chain is intact, 1 there is damage, 2 it cannot be loaded: an object is of a later version, or unreadable.
"""

import argparse
import copy
import json
import os
import re
import sys
import uuid

import chain_format as form
from chain_format import COMPRESSED, ELSEWHERE, FENCE, KINDS, SNAPSHOT, State
from sequence_reader import HEADER, LARGEST_BODY, Damaged, Later, Refused, Sequence, decode_header, stored_body
from wal_reader import crc32c, run

# 2. Names. Other ones are ignored.
STORE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
NUMBER_AND_NONCE = re.compile(r"([0-9a-f]{16})-([0-9a-f]{32})")


class DamagedAt(Damaged):
    """An object that another one refers to is damaged; the message is the reason."""

    def __init__(self, name, reason):
        super().__init__(reason)
        self.name = name


class Chain:
    """What was read of a store's chain, and what is wrong with it."""

    def __init__(self, directory, store):
        self.directory, self.store = directory, store
        self.headers, self.items, self.snapshots = {}, {}, {}
        self.named, self.counting = {}, []
        self.numbers, self.state = [], None
        self.damage, self.laters, self.later = [], [], None

    @property
    def last(self):
        return self.numbers[-1] if self.numbers else None

    @property
    def base(self):
        """The snapshot that the state is loaded from; None if no snapshot counts."""
        return self.counting[-1] if self.counting else None

    @property
    def base_number(self):
        return self.base.header.number if self.base else 0

    def name(self, kind, *parts):
        return "/".join(["catalogs", self.store, kind, *parts])

    def object_name(self, number):
        return self.name("chain", f"{number:016x}")

    def snapshot_name(self, key):
        return self.name("snapshots", f"{key[0]:016x}-{key[1]}")

    def bytes_of(self, name, largest):
        """Returns the object's bytes, at most one more than `largest`, or None if it is absent."""
        try:
            with open(os.path.join(self.directory, name), "rb") as file:
                return file.read(min(largest, os.fstat(file.fileno()).st_size) + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refused(f"{name}: {error.strerror}") from error

    def listed_snapshots(self):
        """Returns the number and the nonce of each snapshot."""
        try:
            with os.scandir(os.path.join(self.directory, self.name("snapshots"))) as entries:
                names = [NUMBER_AND_NONCE.fullmatch(entry.name) for entry in entries if entry.is_file()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Refused(f"{self.name('snapshots')}: {error.strerror}") from error
        return sorted((int(name[1], 16), name[2]) for name in names if name)

    def listed_objects(self):
        directory = os.path.join(self.directory, self.name("chain"))
        return Sequence(directory, 1).numbers() if os.path.isdir(directory) else []

    def read(self):
        # A snapshot is written after the object of its number. So the chain is listed after the snapshots, and has the
        # object of each of them.
        keys = self.listed_snapshots()
        for number in self.listed_objects():
            self.read_object(number)
        for key in keys:
            self.read_snapshot(key)
        self.decide_counting()
        # Below the newest snapshot that counts, an object of a later version does not matter (3).
        self.later = next((text for number, text in sorted(self.laters) if number > self.base_number), None)
        if not self.later:
            self.find_above_end()
            self.find_missing()
        self.compare()
        self.load()

    def read_object(self, number):
        """Reads an object."""
        name = self.object_name(number)
        data = self.bytes_of(name, HEADER.size + LARGEST_BODY)
        if data is None:
            return
        try:
            header = self.headers[number] = decode_header(data, number)
            body = stored_body(header, data, LARGEST_BODY)
            if header.kind not in KINDS:
                raise Later(f"kind {header.kind}")
            if header.kind == SNAPSHOT or number == 1 and header.kind != FENCE:
                raise Damaged(f"kind: a {KINDS[header.kind]}")
            if header.flags & ~(COMPRESSED | ELSEWHERE):
                raise Later(f"flags {header.flags:#x}")
            item = form.decode_item(header, self.body(header, body))
            self.check_store(item)
            self.items[number] = item
        except DamagedAt as damaged:
            self.damage.append((damaged.name, str(damaged)))
        except Damaged as damaged:
            self.damage.append((name, str(damaged)))
        except Later as later:
            self.add_later(number, name, later)
        except Refused as refused:
            raise Refused(f"{name}: {refused}") from refused
        self.numbers.append(number)

    def body(self, header, body):
        """Returns the body of a fence or delta, not compressed."""
        if header.flags & ELSEWHERE:
            if len(body) != form.PLACE.size:
                raise Damaged("length: the place of a body elsewhere has 12 bytes")
            length, crc = form.PLACE.unpack(body)
            name = self.name("bodies", f"{header.number:016x}-{header.nonce}")
            body = self.bytes_of(name, form.LARGEST_LONG_BODY)
            if body is None:
                raise DamagedAt(name, "missing")
            if length > form.LARGEST_LONG_BODY or len(body) != length:
                raise DamagedAt(name, f"length: {self.object_name(header.number)} says that it has {length} bytes")
            if crc != crc32c(body):
                raise DamagedAt(name, "checksum")
        return form.decompressed(body, form.LARGEST_LONG_BODY) if header.flags & COMPRESSED else body

    def read_snapshot(self, key):
        name = self.snapshot_name(key)
        data = self.bytes_of(name, HEADER.size + form.LARGEST_SNAPSHOT)
        if data is None:
            return
        self.snapshots[key] = None
        try:
            header = decode_header(data, key[0])
            body = stored_body(header, data, form.LARGEST_SNAPSHOT)
            if header.kind not in KINDS:
                raise Later(f"kind {header.kind}")
            if header.kind != SNAPSHOT:
                raise Damaged(f"kind: a {KINDS[header.kind]}")
            if header.flags:
                raise Later(f"flags {header.flags:#x}")
            if header.nonce != key[1]:
                raise Damaged(f"nonce: the header says {header.nonce}")
            snapshot = form.decode_snapshot(header, body)
            self.check_store(snapshot)
            self.snapshots[key] = snapshot
        except Damaged as damaged:
            self.damage.append((name, str(damaged)))
        except Later as later:
            self.add_later(key[0], name, later)
        except Refused as refused:
            raise Refused(f"{name}: {refused}") from refused

    def check_store(self, item):
        store = str(uuid.UUID(bytes=item.values.store))
        if store != self.store:
            raise Damaged(f"store: the body says {store}")

    def add_later(self, number, name, later):
        self.laters.append((number, f"{name} was written by a later version: {later}"))

    def decide_counting(self):
        """Finds the snapshots that count (7), in ascending order."""
        for snapshot in filter(None, self.snapshots.values()):
            number, previous = snapshot.header.number, snapshot.header.previous
            header, fence = self.headers.get(number), self.headers.get(number + 1)
            if snapshot.replaces and fence and fence.kind == FENCE and fence.previous == snapshot.header.link:
                self.named[number + 1] = snapshot
                self.counting.append(snapshot)
            elif not snapshot.replaces and header and header.link == previous:
                self.counting.append(snapshot)
        # The fence with the next number extends that of a rebuild, and no other one with its number.
        self.counting.sort(key=lambda snapshot: (snapshot.header.number, snapshot.replaces))

    def find_above_end(self):
        """Finds snapshots above the end of the chain: objects are lost there (C7)."""
        last = self.last or 0
        for key in self.snapshots:
            if key[0] > last:
                self.damage.append((self.snapshot_name(key), f"above the end of the chain, which is {last}"))

    def find_missing(self):
        """Finds holes above the newest snapshot that counts; below it objects were deleted (7)."""
        before = self.base_number
        for number in self.numbers:
            if number > before + 1:
                self.damage.append((self.object_name(before + 1), f"missing; the next object is {number}"))
            before = max(before, number)

    def compare(self):
        """Compares each snapshot that counts with the objects, from number 1 or from the snapshot before it (C5)."""
        state = State()
        for number in self.numbers:
            if number > self.base_number:
                break
            if number in self.named:
                state = copy.deepcopy(self.named[number].state)
            item = self.items.get(number)
            if state and item and state.number == number - 1 and not any(form.not_extending(item, state)):
                state.apply(item)
            else:
                # Below the newest snapshot that counts this is no damage.
                state = None
            for snapshot in self.counting:
                if snapshot.header.number != number or snapshot.replaces:
                    continue
                expected = state.fields() if state else State.head(item) if item else {}
                name = self.snapshot_name((number, snapshot.header.nonce))
                for difference in form.differences(snapshot.state.fields(), expected):
                    self.damage.append((name, f"not the state after the object of its number: {difference}"))
                state = state or copy.deepcopy(snapshot.state)

    def load(self):
        """Loads the newest snapshot that counts, and the objects after it (8, step 3), whose links are checked (3)."""
        state = copy.deepcopy(self.base.state) if self.base else State()
        for number in self.numbers:
            if number <= self.base_number:
                continue
            item = self.items.get(number)
            before = state if state and state.number == number - 1 else self.items.get(number - 1)
            wrong = list(form.not_extending(item, before)) if item and before else []
            self.damage.extend((self.object_name(number), reason) for reason in wrong)
            if item and state and before is state and not wrong:
                state.apply(item)
            else:
                state = None
        if self.numbers and not self.later:
            self.state = state

    def fields(self):
        """Returns what is printed with --json."""
        counting = {(snapshot.header.number, snapshot.header.nonce) for snapshot in self.counting}
        return {
            "last": self.last,
            "objects": [
                {
                    "number": number,
                    "kind": KINDS[item.header.kind],
                    "nonce": item.header.nonce,
                    "previous": item.header.previous,
                    "term": item.header.term,
                    "flags": item.header.flags,
                    "version": item.values.version,
                    "opening": item.values.opening,
                    "recorded": len(item.recorded),
                    "own": len(item.own),
                }
                for number, item in self.items.items()
            ],
            "snapshots": [{"number": key[0], "nonce": key[1], "counts": key in counting} for key in self.snapshots],
            "damage": [{"name": name, "reason": reason} for name, reason in self.damage],
            "state": self.state.fields() if self.state else None,
        }


def print_text(fields):
    row = "{:>12}  {:5}  {:>5}  {:>10}  {:>10}  {:>20}  {:>8}  {:>8}  {:32}  {:16}"
    print(row.format("NUMBER", "KIND", "FLAGS", "TERM", "OPENING", "VERSION", "LISTS", "CHANGES", "NONCE", "PREVIOUS"))
    for item in fields["objects"]:
        names = ("number", "kind", "flags", "term", "opening", "version", "recorded", "own", "nonce")
        print(row.format(*(item[name] for name in names), f"{item['previous']:016x}"))
    for snapshot in fields["snapshots"]:
        counts = "" if snapshot["counts"] else ", does not count"
        print(f"snapshot {snapshot['number']}, nonce {snapshot['nonce']}{counts}")
    for damage in fields["damage"]:
        print(f"damaged: {damage['name']}: {damage['reason']}")
    print("there are no objects" if fields["last"] is None else f"the last number is {fields['last']}")
    if fields["state"] is None:
        print("the state cannot be loaded")
        return
    print("state:")
    for name, value in fields["state"].items():
        print(f"{name:>16}  {len(value) if isinstance(value, list) else value}")


def find_store(directory):
    """Returns the id of the only store in the directory."""
    try:
        with os.scandir(os.path.join(directory, "catalogs")) as entries:
            stores = sorted(entry.name for entry in entries if STORE.fullmatch(entry.name) and entry.is_dir())
    except FileNotFoundError:
        stores = []
    except OSError as error:
        raise Refused(error.strerror) from error
    if not stores:
        raise Refused("there is no store")
    if len(stores) > 1:
        raise Refused(f"there are {len(stores)} stores, choose one with --store: {', '.join(stores)}")
    return stores[0]


def main():
    parser = argparse.ArgumentParser(description="Read the chain of a store, by docs/format/chain.md.")
    parser.add_argument("directory", help="the directory that is the object store")
    parser.add_argument("--store", metavar="UUID", type=uuid.UUID, help="the id of the store (the only one)")
    keys = '{"last": number or null, "objects": [..], "snapshots": [..], "damage": [..], "state": {..} or null}'
    parser.add_argument("--json", action="store_true", help=keys)
    arguments = parser.parse_args()
    try:
        store = str(arguments.store) if arguments.store else find_store(arguments.directory)
        if not os.path.isdir(os.path.join(arguments.directory, "catalogs", store)):
            raise Refused(f"there is no store {store}")
        chain = Chain(arguments.directory, store)
        chain.read()
    except Refused as refused:
        print(f"error: {arguments.directory}: {refused}", file=sys.stderr)
        return 2
    fields = chain.fields()
    if arguments.json:
        print(json.dumps(fields))
    else:
        print_text(fields)
    sys.stdout.flush()
    if chain.later:
        print(f"error: {arguments.directory}: {chain.later}", file=sys.stderr)
        return 2
    return 1 if chain.damage else 0


if __name__ == "__main__":
    run(main)
