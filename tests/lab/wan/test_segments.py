"""Large segments: counted as the packets they stand for, and cut where some of those are lost."""

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.lab.wan.segments import (
    GSO_NONE,
    GSO_TCPV4,
    VNET,
    VNET_BYTES,
    destination,
    header_bytes,
    wire_size,
    without,
)

NEEDS_CHECKSUM = 1


def checksum(data: bytes) -> int:
    if len(data) % 2:
        data += b"\0"
    total = sum(int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def segment(body: bytes, *, size: int, sequence: int = 1000, flags: int = 0x18, options: bytes = bytes(12)) -> bytes:
    """A TCP segment as the kernel hands it over."""
    tcp_bytes = 20 + len(options)
    total = 20 + tcp_bytes + len(body)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, total, 0xFFFE, 0x4000, 64, 6, 0, b"\x0a\x4d\0\x01", b"\x0a\x4d\0\x02")
    ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
    tcp = struct.pack("!HHIIBBHHH", 5000, 6000, sequence, 7, tcp_bytes // 4 << 4, flags, 512, 0, 0) + options
    kind = GSO_TCPV4 if size else GSO_NONE
    return VNET.pack(NEEDS_CHECKSUM, kind, 20 + tcp_bytes, size, 20, 16) + ip + tcp + body


def unfold(packet: bytes) -> list[tuple[int, bytes, int]]:
    """What the wire would carry: (sequence, body, flags) per packet, by the rules of segmentation; headers checked."""
    flags, kind, hdr_len, size, csum_start, csum_offset = VNET.unpack_from(packet)
    ip = packet[VNET_BYTES : VNET_BYTES + 20]
    assert checksum(ip) == 0
    assert int.from_bytes(ip[2:4], "big") == len(packet) - VNET_BYTES
    assert flags == NEEDS_CHECKSUM
    assert (csum_start, csum_offset) == (20, 16)
    header = header_bytes(packet)
    assert hdr_len == header
    tcp = packet[VNET_BYTES + 20 : VNET_BYTES + header]
    body = packet[VNET_BYTES + header :]
    pseudo = ip[12:20] + struct.pack("!HH", 6, len(tcp) + len(body))
    # The kernel completes the field: the sum over the segment with the pseudo-header's sum in it must come out right.
    assert int.from_bytes(tcp[16:18], "big") == ~checksum(pseudo) & 0xFFFF
    (sequence,) = struct.unpack_from("!I", tcp, 4)
    if kind == GSO_NONE:
        assert size == 0
        return [(sequence, body, tcp[13])]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    last = len(pieces) - 1
    return [
        (
            (sequence + number * size) % 2**32,
            piece,
            tcp[13] & ~(0 if number == last else 0x09) & ~(0x80 if number else 0),
        )
        for number, piece in enumerate(pieces)
    ]


def test_a_segment_counts_the_headers_of_every_packet_it_stands_for() -> None:
    packet = segment(bytes(1448 * 3 + 1), size=1448)
    assert wire_size(packet) == (1448 * 3 + 1 + 4 * 52, 4)
    assert wire_size(segment(bytes(100), size=0)) == (152, 1)
    assert wire_size(segment(bytes(1448), size=1448)) == (1500, 1)


def test_the_destination_is_read_and_anything_but_ipv4_has_none() -> None:
    assert destination(segment(b"x", size=0)) == b"\x0a\x4d\0\x02"
    assert destination(bytes(VNET_BYTES) + b"\x60" + bytes(60)) is None
    assert destination(bytes(VNET_BYTES + 19)) is None
    assert destination(b"") is None


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(2, 20),
    sequence=st.sampled_from([0, 1000, 2**32 - 2000]),
    flags=st.sampled_from([0x10, 0x18, 0x19, 0x98]),
    data=st.data(),
)
def test_what_survives_is_exactly_the_packets_that_were_not_lost(
    seed: int, count: int, sequence: int, flags: int, data: st.DataObject
) -> None:
    size = 97
    body = random.Random(seed).randbytes(size * (count - 1) + 1 + seed % size)
    packet = segment(body, size=size, sequence=sequence, flags=flags)
    lost = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    whole = [(number, part, bits) for number, part, bits in _by_hand(body, size, sequence, flags)]
    wanted = [part for number, part in enumerate(whole) if number not in lost]
    assert [part for rest in without(packet, lost) for part in unfold(rest)] == wanted


def _by_hand(body: bytes, size: int, sequence: int, flags: int) -> list[tuple[int, bytes, int]]:
    found = []
    for number, at in enumerate(range(0, len(body), size)):
        bits = flags
        if at + size < len(body):
            bits &= ~0x09
        if number:
            bits &= ~0x80
        found.append(((sequence + at) % 2**32, body[at : at + size], bits))
    return found


def test_identifications_go_on_and_wrap() -> None:
    packet = segment(bytes(500), size=100)
    rests = without(packet, [1])
    assert [int.from_bytes(rest[VNET_BYTES + 4 : VNET_BYTES + 6], "big") for rest in rests] == [0xFFFE, 0x0000]


@pytest.mark.parametrize("lost", [[0], [4], [0, 1, 2, 3], [2], [0, 2, 4]])
def test_runs_of_survivors_stay_whole(lost: list[int]) -> None:
    rests = without(segment(bytes(500), size=100), lost)
    runs = "".join("x" if number in lost else "." for number in range(5)).replace("x", " ").split()
    assert [wire_size(rest)[1] for rest in rests] == [len(run) for run in runs]
    # One packet needs no segmentation any more, and the kernel is not asked for any.
    assert [rest[1] for rest in rests] == [GSO_NONE if len(run) == 1 else GSO_TCPV4 for run in runs]


def test_nothing_is_left_when_all_is_lost() -> None:
    assert without(segment(bytes(200), size=100), [0, 1]) == []
