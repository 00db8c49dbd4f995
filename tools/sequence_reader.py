#!/usr/bin/env python3
"""Reads a sequence of numbered objects in a local directory.

A second implementation of the read side, written from docs/format/sequence.md alone: where this program and Alluvium
differ, one of the three is wrong. Section numbers in the comments are those of the document.

It only reads. Objects may be created meanwhile; numbers that are deleted meanwhile can be reported as missing.

Exit code: 0 the objects are intact, 1 there is damage, 2 the sequence could not be read.
"""

import argparse
import json
import os
import re
import struct
import sys
from dataclasses import dataclass

from wal_reader import crc32c, run

# 2. Names. Other ones are ignored: those of unfinished files have a "#".
NAME = re.compile(r"[0-9a-f]{16}")
NUMBERS = range(1, 1 << 63)

# 3. Layout
HEADER = struct.Struct("<8sIIHHIIIQ16sQ")
MAGIC = b"ALLUVSEQ"
VERSION = 1
LARGEST_BODY = 4 * 1024 * 1024

assert HEADER.size == 64


class Refused(Exception):
    """The sequence cannot be read; the message is the reason."""


class Later(Refused):
    """An object was written by a later version; the message says what of it is not known."""


class Damaged(Exception):
    """An object is damaged; the message is the reason."""


@dataclass
class Object:
    number: int
    kind: int
    flags: int
    term: int
    nonce: str
    previous: int
    body_bytes: int

    @property
    def link(self):
        return int.from_bytes(bytes.fromhex(self.nonce)[:8], "little")


def decode_header(data, named):
    """Returns the header of the object that has these bytes and this number in its name (3)."""
    if len(data) < HEADER.size:
        raise Damaged("length: shorter than a header")
    magic, version, header_crc, kind, flags, length, _, term, number, nonce, previous = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise Damaged("magic")
    if header_crc != crc32c(data[:12] + data[16 : HEADER.size]):
        raise Damaged("header checksum")
    if version != VERSION:
        raise Later(f"format version {version}")
    if number != named:
        raise Damaged(f"number: the header says {number}")
    return Object(number, kind, flags, term, nonce.hex(), previous, length)


def stored_body(header, data, largest):
    """Returns the body as it is stored, of the object that has these bytes and this header (3)."""
    body = data[HEADER.size :]
    if header.body_bytes > largest or header.body_bytes != len(body):
        raise Damaged(f"length: the header says that the body has {header.body_bytes} bytes")
    if int.from_bytes(data[24:28], "little") != crc32c(body):
        raise Damaged("body checksum")
    return body


def decode(data, named):
    """Returns the header of the object, after a check of its body too (3)."""
    header = decode_header(data, named)
    stored_body(header, data, LARGEST_BODY)
    return header


class Sequence:
    def __init__(self, directory, start):
        self.directory, self.start = directory, start
        self.objects, self.damage, self.last = [], [], None

    def path(self, number):
        return os.path.join(self.directory, f"{number:016x}")

    def listed(self):
        try:
            with os.scandir(self.directory) as entries:
                numbers = [int(entry.name, 16) for entry in entries if NAME.fullmatch(entry.name) and entry.is_file()]
        except OSError as error:
            raise Refused(error.strerror) from error
        return sorted(number for number in numbers if number >= self.start and number in NUMBERS)

    def numbers(self):
        """Returns the numbers of the objects, up to the end of the sequence (5)."""
        end = max(self.listed(), default=self.start - 1)
        while os.path.isfile(self.path(end + 1)):
            end += 1
        # The first listing can show an object and not the one before it, if both were created meanwhile. Here all up to
        # the end were created before the second one begins (S2), so what it does not show is missing.
        return [number for number in self.listed() if number <= end]

    def read(self, number):
        """Returns the object, or None if it is absent."""
        try:
            with open(self.path(number), "rb") as file:
                data = file.read(HEADER.size + LARGEST_BODY + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refused(f"object {number}: {error.strerror}") from error
        try:
            return decode(data, number)
        except Later as later:
            raise Refused(f"object {number} was written by a later version: {later}") from later

    def before_start(self):
        """Returns the object before the first one, only for its link: what is wrong with it is not reported."""
        try:
            return self.read(self.start - 1) if self.start - 1 in NUMBERS else None
        except (Refused, Damaged):
            return None

    def verify(self):
        before = self.before_start()
        for number in self.numbers():
            try:
                read, wrong = self.read(number), None
            except Damaged as damaged:
                read, wrong = None, str(damaged)
            if not read and not wrong:
                continue
            if self.last is not None and number != self.last + 1:
                self.damage.append((self.last + 1, f"missing; the next object is {number}"))
            if wrong:
                self.damage.append((number, wrong))
            else:
                self.objects.append(read)
                if before and before.number == number - 1 and read.previous != before.link:
                    what = f"previous is {read.previous}, the link of the object before it is {before.link}"
                    self.damage.append((number, what))
            before, self.last = read, number


def print_json(sequence):
    objects = [vars(item) for item in sequence.objects]
    damage = [{"number": number, "what": what} for number, what in sequence.damage]
    print(json.dumps({"objects": objects, "damage": damage, "last": sequence.last}))


def print_text(sequence):
    row = "{:>19}  {:>5}  {:>6}  {:>10}  {:32}  {:>20}  {:>7}"
    print(row.format("NUMBER", "KIND", "FLAGS", "TERM", "NONCE", "PREVIOUS", "BODY B"))
    for item in sequence.objects:
        flags = f"{item.flags:#06x}"
        print(row.format(item.number, item.kind, flags, item.term, item.nonce, item.previous, item.body_bytes))
    for number, what in sequence.damage:
        print(f"damaged: {number}: {what}")
    print("there are no objects" if sequence.last is None else f"the last number is {sequence.last}")


def main():
    parser = argparse.ArgumentParser(description="Read a sequence of numbered objects, by docs/format/sequence.md.")
    parser.add_argument("directory", help="the directory that corresponds to the prefix of the sequence")
    parser.add_argument("--from", dest="start", metavar="NUMBER", type=int, default=1, help="the first one (1)")
    parser.add_argument("--json", action="store_true", help='{"objects": [..], "damage": [..], "last": number or null}')
    arguments = parser.parse_args()
    if arguments.start not in NUMBERS:
        parser.error("argument --from: numbers begin at 1 and stay below 2^63")
    sequence = Sequence(arguments.directory, arguments.start)
    try:
        sequence.verify()
    except Refused as refused:
        print(f"error: {arguments.directory}: {refused}", file=sys.stderr)
        return 2
    (print_json if arguments.json else print_text)(sequence)
    return 1 if sequence.damage else 0


if __name__ == "__main__":
    run(main)
