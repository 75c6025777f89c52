"""transport/reassembly.py: any interleaving of connections gives the same bytes, and nothing else passes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.errors import ProtocolViolation
from diloco_node.transport import reassembly
from diloco_node.transport.reassembly import Reassembly
from diloco_node.wire.envelope import TRANSFER_CONNECTIONS_MAX

Chunk = tuple[int, int, int]


@st.composite
def spread_transfers(draw: st.DrawFn) -> tuple[int, list[list[Chunk]], list[int]]:
    """A transfer cut into chunks (connection, offset, size) by connection, and in which order connections deliver."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=0, max_size=30))
    lanes: list[list[Chunk]] = [[] for _ in range(TRANSFER_CONNECTIONS_MAX)]
    offset = 0
    for size in sizes:
        connection = draw(st.integers(0, TRANSFER_CONNECTIONS_MAX - 1))
        lanes[connection].append((connection, offset, size))
        offset += size
    order = draw(st.permutations([chunk[0] for lane in lanes for chunk in lane]))
    return offset, lanes, list(order)


@settings(max_examples=300)
@given(spread_transfers(), st.data())
def test_any_interleaving_of_connections_gives_the_same_bytes(
    made: tuple[int, list[list[Chunk]], list[int]], data: st.DataObject
) -> None:
    size, lanes, order = made
    counts = [len(lane) for lane in lanes]
    # The end goes over the first connection, so it comes after that one's last chunk, and any time before the others'.
    last_first = max((place for place, connection in enumerate(order) if connection == 0), default=-1)
    end_at = data.draw(st.integers(last_first + 1, len(order)))
    body = bytes(index % 251 + 1 for index in range(size))
    got = bytearray(size)
    parts = Reassembly(size)
    queues = [iter(lane) for lane in lanes]
    for place, connection in enumerate([*order, -1]):
        if place == end_at:
            parts.end(counts)
        if connection < 0:
            break
        assert not parts.is_over
        _, offset, length = next(queues[connection])
        parts.take(connection, offset, length)
        got[offset : offset + length] = body[offset : offset + length]
    assert parts.is_over
    assert parts.is_whole
    assert bytes(got) == body
    assert parts.starts == ([0] if size else [])
    assert parts.stops == ([size] if size else [])


@settings(max_examples=300)
@given(spread_transfers(), st.data())
def test_a_chunk_less_is_never_whole_and_one_twice_is_refused(
    made: tuple[int, list[list[Chunk]], list[int]], data: st.DataObject
) -> None:
    size, lanes, order = made
    if not order:
        return
    chunks: list[Chunk] = []
    queues = [iter(lane) for lane in lanes]
    for connection in order:
        chunks.append(next(queues[connection]))
    missing = data.draw(st.integers(0, len(chunks) - 1))
    parts = Reassembly(size)
    for index, chunk in enumerate(chunks):
        if index != missing:
            parts.take(*chunk)
    again = data.draw(st.sampled_from([chunk for index, chunk in enumerate(chunks) if index != missing] or [None]))
    if again is not None:
        with pytest.raises(ProtocolViolation):
            parts.take(data.draw(st.integers(0, TRANSFER_CONNECTIONS_MAX - 1)), *again[1:])
    counts = [len(lane) for lane in lanes]
    counts[chunks[missing][0]] -= 1
    parts.end(counts)
    assert parts.is_over
    assert not parts.is_whole


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, TRANSFER_CONNECTIONS_MAX - 1), st.integers(0, 40), st.integers(1, 9))))
def test_whatever_comes_each_byte_is_taken_once_at_most(chunks: list[Chunk]) -> None:
    parts, seen = Reassembly(40), set[int]()
    for connection, offset, size in chunks:
        span = set(range(offset, offset + size))
        before = parts.arrived_bytes
        try:
            parts.take(connection, offset, size)
        except ProtocolViolation:
            assert parts.arrived_bytes == before
            continue
        assert not span & seen
        assert max(span) < 40
        seen |= span
    assert parts.arrived_bytes == len(seen)
    assert parts.is_whole == (len(seen) == 40)
    starts = [byte for byte in sorted(seen) if byte - 1 not in seen]
    assert parts.starts == starts


def test_offsets_of_one_connection_grow() -> None:
    parts = Reassembly(100)
    parts.take(1, 50, 10)
    with pytest.raises(ProtocolViolation, match="at offset 20 of connection 1 after 60"):
        parts.take(1, 20, 10)
    parts.take(2, 20, 10)


def test_a_chunk_that_is_not_the_transfers_is_refused() -> None:
    parts = Reassembly(100)
    with pytest.raises(ProtocolViolation, match="up to byte 101 in a transfer of 100"):
        parts.take(0, 99, 2)


def test_the_end_must_be_true_of_its_own_connection_at_once() -> None:
    parts = Reassembly(100)
    parts.take(0, 0, 50)
    with pytest.raises(ProtocolViolation, match="2/0/0/0/0/0/0/0 announced, 1/0/0/0/0/0/0/0 came"):
        parts.end([2])
    parts = Reassembly(100)
    parts.take(0, 0, 50)
    parts.end([1, 2])
    assert not parts.is_over
    parts.take(1, 50, 25)
    assert not parts.is_over
    parts.take(1, 75, 25)
    assert parts.is_over
    assert parts.is_whole


def test_more_chunks_than_were_announced_are_refused_whenever_they_come() -> None:
    parts = Reassembly(100)
    parts.take(1, 0, 10)
    parts.take(1, 10, 10)
    with pytest.raises(ProtocolViolation, match="announced"):
        parts.end([0, 1])
    parts = Reassembly(100)
    parts.take(1, 0, 10)
    parts.end([0, 1])
    assert parts.is_over
    with pytest.raises(ProtocolViolation, match="more than the 1 chunks"):
        parts.take(1, 10, 10)
    with pytest.raises(ProtocolViolation, match="more than the 0 chunks"):
        parts.take(2, 10, 10)


def test_an_empty_transfer_is_whole_when_its_end_came() -> None:
    parts = Reassembly(0)
    assert not parts.is_over
    parts.end([])
    assert parts.is_over
    assert parts.is_whole


def test_gaps_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassembly, "ISLANDS_MAX", 3)
    parts = Reassembly(100)
    for offset in (10, 20, 30):
        parts.take(0, offset, 1)
    with pytest.raises(ProtocolViolation, match="more than 3 pieces"):
        parts.take(0, 40, 1)
    parts.take(1, 11, 9)  # fills the gap between two
    parts.take(0, 40, 1)
