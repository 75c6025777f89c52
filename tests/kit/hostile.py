"""What a peer that means harm writes: documents that are no message, and texts where a name or a reason stands."""

from __future__ import annotations

import struct

import msgpack


def packed(*fields: object) -> bytes:
    """An array as an honest sender packs it."""
    return bytes(msgpack.packb(list(fields)))


DEEP: list[object] = []
for _ in range(200):
    DEEP = [DEEP]

DOCUMENTS: dict[str, bytes] = {
    "nothing": b"",
    "a byte that msgpack never uses": b"\xc1",
    "an array cut short": b"\x92\x02",
    "a text cut short": b"\x93\x02\x01\xa9ab",
    "bytes cut short": b"\x93\x02\x01\xc4\x09ab",
    "a number cut short": b"\x93\x02\xcf\x00\x00",
    "something behind the message": packed(2, 1, "x") + b"\x00",
    "a second message behind it": packed(2, 1, "x") * 2,
    "no array but a number": b"\x07",
    "no array but nil": b"\xc0",
    "no array but a text": b"\xa1x",
    "no array but bytes": b"\xc4\x01x",
    "no array but a float": b"\xcb" + struct.pack(">d", 1.0),
    "an empty array": b"\x90",
    "an empty map": b"\x80",
    "a map for a message": b"\x81\xa3tag\x02",
    "a map with a key twice": b"\x82\x01\x01\x01\x02",
    "a map for a field": packed(2, {}, "x"),
    "a map with whole numbers as keys": packed(2, {1: 2}, "x"),
    "a map with a key twice for a field": b"\x93\x02\x82\xa1a\x01\xa1a\x02\xa1x",
    "an ext type": packed(2, msgpack.ExtType(5, b"abc"), "x"),
    "an ext type of 16 bytes": b"\x93\x02\xd8\x01" + bytes(16) + b"\xa1x",
    "an ext type for a message": b"\xc7\x02\x05ab",
    "a time": packed(2, msgpack.Timestamp(1), "x"),
    "text that is no UTF-8": b"\x93\x02\x01\xa2\xff\xfe",
    "half of a surrogate pair": b"\x93\x02\x01\xa3\xed\xa0\x80",
    "NUL in overlong UTF-8": b"\x93\x02\x01\xa2\xc0\x80",
    "a tag that is a text": packed("2", 1, "x"),
    "a tag that is true": packed(True, 1, "x"),
    "a tag that is a float": packed(2.0, 1, "x"),
    "a tag that is an array": packed([2], 1, "x"),
    "a tag that is nil": packed(None, 1, "x"),
    "a tag that is bytes": packed(b"\x02", 1, "x"),
    "a tag that nobody has": packed(9999, 1),
    "a negative tag": packed(-1, 1),
    "a tag of 2^64 - 1": packed(2**64 - 1, 1),
    "a field of NaN": packed(2, float("nan"), "x"),
    "a field of infinity": packed(2, float("inf"), "x"),
    "a field of 2^64 - 1": packed(2, 2**64 - 1, "x"),
    "too many fields": packed(2, *range(60)),
    "too few fields": packed(2),
    "an array that claims 2^32 - 1": b"\xdd\xff\xff\xff\xff",
    "a text that claims 2^32 - 1": b"\xdb\xff\xff\xff\xffx",
    "bytes that claim 2^32 - 1": b"\xc6\xff\xff\xff\xffx",
    "a map that claims 2^32 - 1": b"\xdf\xff\xff\xff\xff",
    "an ext type that claims 2^32 - 1": b"\xc9\xff\xff\xff\xff\x01",
    "arrays that claim 65,535 in each other": b"\xdc\xff\xff" * 7 + b"\xc0" * 60_000,
    "200 arrays in each other": packed(2, DEEP, "x"),
    "100,000 arrays in each other": b"\x91" * 100_000,
    "100,000 maps in each other": b"\x81\x01" * 100_000,
    "a text of 3 MiB": packed(2, 1, "x" * (3 * 2**20)),
    "70,000 numbers": packed(3, [0.0] * 70_000),
}
"""No schema of ours takes any of these; tag 2 has a number and a text in that of tests/wire/test_message_schema.py."""

TEXTS = (
    "../../etc/passwd",
    "..",
    ".",
    "/etc/shadow",
    "a/b",
    "a\\b",
    "C:\\windows",
    "file:///etc/passwd",
    "~root",
    "$HOME",
    "%2e%2e%2f",
    "a\0b",
    "\0",
    "a\nb",
    "a\r\nSet-Cookie: x=1",
    "\tb",
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x1b[31mred\x1b[0m",
    "\x9b31m",
    "\x7f",
    "\x08\x08\x08ok",
    "admin\u202egnp",
    "a\u2066b",
    "a\u200bb",
    "a\u2028level=error",
    "\ufeffus-east",
    "us-ea\u0455t",
    "é",
    "東京",
    "us_east",
    "us.east",
    "US-EAST",
    "us east",
    " us-east",
    "us-east\n",
    "",
    "a" * 64,
    "x" * 4096,
    "<script>alert(1)</script>",
    "'; DROP TABLE regions; --",
    '"}\n# HELP diloco_x y\ndiloco_x 1',
    "{0.__class__}",
    "%s%s%n",
    "$(reboot)",
    "`reboot`",
)
"""Paths, control characters, other alphabets, and what a shell, a page, a log or a metric would obey."""
