"""Packets as a tun device with IFF_VNET_HDR hands them over: up to 64 KiB that stand for many packets on the wire.

A packet is a virtio header (10 bytes) and an IP packet. When the header says TCP segmentation, the IP packet is what
the kernel would cut into packets of `gso_size` payload bytes each, with the same headers. Here it stays whole, but it
is counted, delayed and lost as the packets that it stands for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

VNET: Final = struct.Struct("=BBHHHH")
"""struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset; in the host's byte order."""

VNET_BYTES: Final = VNET.size
PACKET_BYTES_MAX: Final = 65_535 + VNET_BYTES

GSO_NONE: Final = 0
GSO_TCPV4: Final = 1
GSO_ECN: Final = 0x80
"""A flag in gso_type beside the kind."""

_IP_MIN_BYTES: Final = 20
_PROTOCOL_TCP: Final = 6
_FLAGS_LAST_ONLY: Final = 0x09
"""FIN and PSH: of the last packet only."""

_FLAG_FIRST_ONLY: Final = 0x80
"""CWR: of the first packet only."""


def destination(packet: bytes) -> bytes | None:
    """The IPv4 address (4 bytes) a packet goes to; None for anything else than IPv4."""
    if len(packet) < VNET_BYTES + _IP_MIN_BYTES or packet[VNET_BYTES] >> 4 != 4:
        return None
    return packet[VNET_BYTES + 16 : VNET_BYTES + 20]


def wire_size(packet: bytes) -> tuple[int, int]:
    """(bytes on the wire with the headers of each packet, number of packets)."""
    size = len(packet) - VNET_BYTES
    if packet[1] & ~GSO_ECN != GSO_TCPV4:
        return size, 1
    header = header_bytes(packet)
    segment = packet[4] | packet[5] << 8
    if segment == 0:
        return size, 1
    count = -(-(size - header) // segment)
    return size + (count - 1) * header, count


def header_bytes(packet: bytes) -> int:
    """IP and TCP header together. hdr_len of the virtio header is a hint only (it is what lay in one piece)."""
    ip_bytes = (packet[VNET_BYTES] & 0x0F) * 4
    return ip_bytes + (packet[VNET_BYTES + ip_bytes + 12] >> 4) * 4


def without(packet: bytes, numbers: Sequence[int]) -> list[bytes]:
    """Cut a segmented TCP packet down to what is left when some of its packets are lost.

    packet: as `wire_size` counts it. numbers: numbers of lost packets, from 0, rising; not empty.

    Returns: packets, one per run of survivors, in order; each with its own length, sequence number and checksums.
    """
    _, count = wire_size(packet)
    runs, start = [], 0
    for number in (*numbers, count):
        if number > start:
            runs.append((start, number))
        start = number + 1
    return [_slice(packet, first, end, count) for first, end in runs]


def _slice(packet: bytes, first: int, end: int, count: int) -> bytes:
    """The packets first .. end - 1 of a segmented packet of `count`."""
    flags, gso_type, hdr_len, segment, csum_start, csum_offset = VNET.unpack_from(packet)
    header = header_bytes(packet)
    body_at = VNET_BYTES + header
    body = packet[body_at + first * segment : body_at + end * segment]
    head = bytearray(packet[VNET_BYTES:body_at])
    ip_bytes = (head[0] & 0x0F) * 4
    if end - first == 1:
        gso_type = GSO_NONE
        segment_left = 0
    else:
        segment_left = segment
    struct.pack_into("!H", head, 2, header + len(body))
    (identification,) = struct.unpack_from("!H", head, 4)
    struct.pack_into("!H", head, 4, (identification + first) & 0xFFFF)
    struct.pack_into("!H", head, 10, 0)
    struct.pack_into("!H", head, 10, ~_ones_sum(head[:ip_bytes]) & 0xFFFF)
    (sequence,) = struct.unpack_from("!I", head, ip_bytes + 4)
    struct.pack_into("!I", head, ip_bytes + 4, (sequence + first * segment) & 0xFFFF_FFFF)
    if end != count:
        head[ip_bytes + 13] &= ~_FLAGS_LAST_ONLY & 0xFF
    if first != 0:
        head[ip_bytes + 13] &= ~_FLAG_FIRST_ONLY & 0xFF
    # The rest of the checksum is left to the receiving kernel (VIRTIO_NET_HDR_F_NEEDS_CSUM, which segmentation
    # implies): the field holds the sum of the pseudo-header, which contains the length.
    tcp_bytes = header - ip_bytes + len(body)
    pseudo = bytes(head[12:20]) + struct.pack("!HH", _PROTOCOL_TCP, tcp_bytes)
    struct.pack_into("!H", head, ip_bytes + 16, _ones_sum(pseudo))
    return VNET.pack(flags, gso_type, min(hdr_len, header), segment_left, csum_start, csum_offset) + bytes(head) + body


def _ones_sum(data: bytes | bytearray) -> int:
    """Sum of 16-bit words in ones' complement; an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
