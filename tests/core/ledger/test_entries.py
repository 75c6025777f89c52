"""The canonical encoding of entries and the hash chain: every change is found, every other spelling is refused."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.core.bounds import FLOAT32_MAX, FRAGMENTS, INCARNATION_MAX, STEP_MAX, VERSION_MAX
from diloco_node.core.ledger.entries import (
    ENTRY_BYTES_MAX,
    ZERO_HASH,
    decode_chain,
    decode_entry,
    encode_entry,
    seal,
    verify_chain,
)
from diloco_node.core.member_kind import MemberKind, MembershipBody
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.shapes import REGION_PATTERN
from diloco_node.core.types import (
    Ballot,
    Contribution,
    DiscardedBody,
    DiskNamedBody,
    Entry,
    EntryBody,
    ExtendedBody,
    FinishedBody,
    GenesisBody,
    LeaderBody,
    Member,
    RevokedBody,
    RoundBody,
    RunSettings,
    SnapshotBody,
    Stripe,
    SummaryBody,
)
from diloco_node.errors import ProtocolViolation

CONTRIBUTION = Contribution("us-east", 3, 7, 11, 42, 100, 124, 24 * 499, (0.5, 1.25e-7))
BODIES: list[EntryBody] = [
    GenesisBody("run-1", "ab" * 32, "cd" * 32, ("eu", "us-east"), (b"\x01" * 32, b"\x02" * 32), (b"\x03" * 16,)),
    LeaderBody("eu"),
    RoundBody(
        7, 12, Ballot(3, 9), (Member(CONTRIBUTION, 0.1),), 0.75, (0.5, 0.125), (Stripe("eu", 0, 9),), b"\x07" * 32
    ),
    DiscardedBody("eu", 2, 7, 24, 30, 2994, "killed"),
    FinishedBody((12, 13), "tokens", 400, 9_000),
    DiskNamedBody("eu", b"\x09" * 16),
    SnapshotBody(7, 16, b"\x08" * 32),
    SummaryBody(1024, b"\x09" * 32),
    ExtendedBody(800, 0),
    RevokedBody("eu", b"\x0a" * 32),
    MembershipBody("ap", "contributor", "ap.example:4317", b"s" * 71),
    SettingsBody.of(RunSettings(weight_share_max=0.5)),
]

GOLDEN_LEADER = "e337c776a6c55e97fb1bc3c5135ef251889c1497a393d2cadfd52278a7332fe4"
GOLDEN_CHAIN = "2b074f11d728765ad9594c232f9d974a1c9ef406f561da327d89aae7e1354856"

fragments = st.integers(0, FRAGMENTS - 1)
versions = st.integers(1, VERSION_MAX)
ints = st.integers(0, INCARNATION_MAX)
steps = st.integers(0, STEP_MAX // 2)
floats = st.floats(0.0, allow_nan=False, allow_infinity=False)
weights = st.floats(0.0, FLOAT32_MAX)
texts = st.text(max_size=20)
names = st.from_regex(REGION_PATTERN, fullmatch=True)
contributions = st.builds(
    lambda step_from, length, *rest: Contribution(*rest[:5], step_from, step_from + length, *rest[5:]),
    steps,
    steps,
    names,
    ints,
    fragments,
    st.integers(-1, VERSION_MAX),
    ints,
    ints,
    st.lists(floats, max_size=5).map(tuple),
)
members = st.builds(Member, contributions, weights)
stripes = st.builds(
    lambda name, start, length: Stripe(name, start, start + length), names, st.integers(0, 2**31), st.integers(1, 2**31)
)
bodies: st.SearchStrategy[EntryBody] = st.one_of(
    st.builds(LeaderBody, names),
    st.builds(DiskNamedBody, names, st.binary(min_size=16, max_size=16) | st.just(b"")),
    st.builds(FinishedBody, st.lists(versions, max_size=5).map(tuple), texts, steps, steps),
    st.builds(ExtendedBody, steps, steps),
    st.builds(RevokedBody, names, st.binary(min_size=32, max_size=32)),
    st.builds(MembershipBody, names, st.sampled_from(MemberKind).map(str), texts, st.binary(max_size=144)),
    st.builds(
        lambda sync_every, lr: SettingsBody.of(RunSettings(sync_every=sync_every, outer_lr=lr)),
        st.integers(1, 100_000),
        st.floats(1e-300, 10.0),
    ),
    st.builds(SnapshotBody, st.integers(0, 1023), versions, st.binary(min_size=32, max_size=32)),
    st.builds(SummaryBody, st.integers(1, 2**48), st.binary(min_size=32, max_size=32)),
    st.builds(
        lambda step_from, length, *rest: DiscardedBody(*rest[:3], step_from, step_from + length, *rest[3:]),
        steps,
        steps,
        names,
        ints,
        fragments,
        ints,
        texts,
    ),
    st.builds(
        GenesisBody,
        texts,
        texts,
        texts,
        st.lists(names, max_size=4, unique=True).map(tuple),
        st.lists(st.binary(min_size=32, max_size=32), max_size=4).map(tuple),
    ),
    st.builds(
        RoundBody,
        fragments,
        versions,
        st.builds(Ballot, ints, ints),
        st.lists(members, max_size=4).map(tuple),
        st.floats(0.0, 1.0),
        st.lists(weights, max_size=5).map(tuple),
        st.lists(stripes, max_size=4).map(tuple),
        st.binary(min_size=32, max_size=32),
    ),
)


def chain(*of: EntryBody) -> list[Entry]:
    entries: list[Entry] = []
    for body in of:
        entries.append(seal(len(entries) + 1, 1, entries[-1].hash if entries else ZERO_HASH, body))
    return entries


@given(body=bodies, index=st.integers(1, 2**40), term=st.integers(1, 2**40))
@settings(deadline=None)
def test_what_is_decoded_is_what_was_encoded(body: EntryBody, index: int, term: int) -> None:
    entry = seal(index, term, b"\x05" * 32, body)
    decoded = decode_entry(encode_entry(entry))
    assert decoded == entry
    assert encode_entry(decoded) == encode_entry(entry)


def test_kinds_name_the_bodies() -> None:
    kinds = [msgpack.unpackb(encode_entry(entry))[3] for entry in chain(*BODIES)]
    assert kinds == [
        *("genesis", "leader", "round", "discarded", "finished", "disk-named"),
        *("snapshot", "summary", "extended", "revoked", "membership", "settings"),
    ]


def test_golden_hash_of_an_entry() -> None:
    # Changes only with the format of the ledger: old ledgers could not be read any more.
    assert seal(1, 1, ZERO_HASH, LeaderBody("eu")).hash.hex() == GOLDEN_LEADER
    assert chain(*BODIES)[-1].hash.hex() == GOLDEN_CHAIN


def test_hashes_do_not_depend_on_the_process() -> None:
    program = (
        "from diloco_node.core.ledger.entries import seal; from diloco_node.core.types import FinishedBody;"
        "print(seal(1, 1, bytes(32), FinishedBody((1, 2), 'x')).hash.hex())"
    )
    result = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert result == {seal(1, 1, bytes(32), FinishedBody((1, 2), "x")).hash.hex() + "\n"}


def test_equal_bodies_have_equal_hashes_whatever_number_type_they_use() -> None:
    body = BODIES[2]
    assert isinstance(body, RoundBody)
    assert replace(body, share=1) == replace(body, share=1.0)
    assert seal(1, 1, ZERO_HASH, replace(body, share=1)) == seal(1, 1, ZERO_HASH, replace(body, share=1.0))


def test_every_field_is_in_the_hash() -> None:
    records = {seal(1, 1, ZERO_HASH, body).hash for body in BODIES}
    records |= {seal(2, 1, ZERO_HASH, BODIES[0]).hash, seal(1, 2, ZERO_HASH, BODIES[0]).hash}
    records.add(seal(1, 1, b"\1" * 32, BODIES[0]).hash)
    body = BODIES[2]
    assert isinstance(body, RoundBody)
    member = body.members[0]
    changes: list[dict[str, Any]] = [
        {"fragment": 8},
        {"version": 13},
        {"ballot": Ballot(3, 10)},
        {"ballot": Ballot(4, 9)},
        {"members": ()},
        {"members": (replace(member, weight=0.2),)},
        {"share": 0.5},
        {"factors": (0.5, 0.25)},
        {"stripes": (Stripe("eu", 0, 8),)},
        {"payload_digest": b"\x08" * 32},
    ]
    numbers: list[dict[str, Any]] = [
        {"incarnation": 4},
        {"base_version": 10},
        {"snapshot": 43},
        {"step_from": 99},
        {"step_to": 125},
        {"tokens": 1},
        {"squared_norms": (0.5, 1.26e-7)},
        {"learner": "us-west"},
    ]
    changes += [{"members": (replace(member, contribution=replace(CONTRIBUTION, **change)),)} for change in numbers]
    records |= {seal(1, 1, ZERO_HASH, replace(body, **change)).hash for change in changes}
    assert len(records) == len(BODIES) + 3 + len(changes)


@pytest.mark.parametrize(
    "body",
    [
        DiscardedBody("a", 1, 0, 0, 2**63, 7, "x"),
        DiscardedBody("a", True, 0, 0, 1, 7, "x"),
        DiscardedBody("a", 1.0, 0, 0, 1, 7, "x"),  # type: ignore[arg-type]
        DiscardedBody(b"a", 1, 0, 0, 1, 7, "x"),  # type: ignore[arg-type]
        DiscardedBody("a" * 5000, 1, 0, 0, 1, 7, "x"),
        replace(BODIES[2], share=float("nan")),  # type: ignore[type-var]
        replace(BODIES[2], share=np.float32(0.1)),  # type: ignore[type-var] # here it stays, and others read a float
        DiscardedBody("a", np.int64(1), 0, 0, 1, 7, "x"),  # type: ignore[arg-type]
        replace(BODIES[2], factors=(float("inf"),)),  # type: ignore[type-var]
        replace(BODIES[2], ballot=(1, 2)),  # type: ignore[type-var]
        GenesisBody("r", "", "", (), (b"x" * ENTRY_BYTES_MAX,)),
        "no body",
    ],
)
def test_what_is_no_entry_is_not_sealed(body: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        seal(1, 1, ZERO_HASH, body)


# ---- the chain -------------------------------------------------------------------------------------------------------


def test_a_chain_is_accepted_whole_and_in_parts() -> None:
    entries = chain(*BODIES)
    verify_chain(entries)
    verify_chain([])
    for first in range(1, len(entries)):
        verify_chain(entries[first:], previous_index=first, previous_hash=entries[first - 1].hash)


@pytest.mark.parametrize("at", range(5))
def test_every_change_to_a_chain_is_found_and_its_index_named(at: int) -> None:
    entries = chain(*BODIES)
    changes = [
        replace(entries[at], term=2),
        replace(entries[at], index=at + 2),
        replace(entries[at], body=LeaderBody("mallory")),
        replace(entries[at], previous=b"\1" * 32),
        replace(entries[at], hash=b"\1" * 32),
        seal(at + 1, 1, entries[at].previous, LeaderBody("mallory")),
    ]
    for number, change in enumerate(changes):
        is_last_resealed = number == 5 and at == len(entries) - 1
        if is_last_resealed:
            continue  # a chain by itself can't know that its last entry is another one
        with pytest.raises(ProtocolViolation, match=f"entry ({at + 1}|{at + 2}) "):
            verify_chain([*entries[:at], change, *entries[at + 1 :]])


def test_a_missing_entry_is_found() -> None:
    entries = chain(*BODIES)
    for at in range(len(entries) - 1):
        with pytest.raises(ProtocolViolation, match=f"entry {at + 1} "):
            verify_chain([*entries[:at], *entries[at + 1 :]])
    with pytest.raises(ProtocolViolation, match="entry 2 "):
        verify_chain(entries, previous_index=1, previous_hash=ZERO_HASH)


def test_terms_never_fall_and_begin_at_one() -> None:
    first = seal(1, 2, ZERO_HASH, LeaderBody("a"))
    with pytest.raises(ProtocolViolation, match=r"entry 2 .* term 1"):
        verify_chain([first, seal(2, 1, first.hash, LeaderBody("b"))])
    with pytest.raises(ProtocolViolation, match="term 0"):
        verify_chain([seal(1, 0, ZERO_HASH, LeaderBody("a"))])


# ---- strict decoding -------------------------------------------------------------------------------------------------


def test_every_bit_flip_is_refused_or_breaks_the_hash() -> None:
    for entry in chain(*BODIES):
        data = encode_entry(entry)
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(ProtocolViolation):
                verify_chain(
                    [decode_entry(bytes(flipped))], previous_index=entry.index - 1, previous_hash=entry.previous
                )


def test_entries_that_are_read_are_a_chain_with_the_hashes_that_are_right() -> None:
    entries = chain(*BODIES)
    texts = [encode_entry(entry) for entry in entries]
    assert decode_chain(texts[2:], previous_index=2, previous_hash=entries[1].hash) == tuple(entries[2:])
    assert decode_chain([], previous_index=2, previous_hash=entries[1].hash) == ()
    other_hash = [*texts[:3], encode_entry(replace(entries[3], hash=bytes(32)))]
    for wrong, fault in ((other_hash, "entry 4 .* its hash"), (texts[:2] + texts[3:], "entry 3 .* is missing")):
        with pytest.raises(ProtocolViolation, match=fault):
            decode_chain(wrong, previous_index=0, previous_hash=ZERO_HASH)


def test_every_prefix_and_every_longer_text_is_refused() -> None:
    data = encode_entry(chain(*BODIES)[2])
    for length in range(len(data)):
        with pytest.raises(ProtocolViolation):
            decode_entry(data[:length])
    with pytest.raises(ProtocolViolation):
        decode_entry(data + b"\0")


def spelled(**changes: Any) -> bytes:
    plain = {"index": 1, "term": 1, "previous": ZERO_HASH, "kind": "leader", "body": ["a"], "hash": bytes(32)}
    packed: bytes = msgpack.packb(list((plain | changes).values()))
    return packed


@pytest.mark.parametrize(
    "data",
    [
        spelled(kind="unknown"),
        spelled(kind=["leader"]),
        spelled(body=["a", "b"]),
        spelled(body=[]),
        spelled(body=[b"a"]),
        spelled(body={"leader": "a"}),
        spelled(body="a"),
        spelled(index=1.0),
        spelled(index=True),
        spelled(term=2**64 - 1),
        spelled(previous=b""),
        spelled(hash=bytes(31)),
        spelled(kind="finished", body=[[1.0], "x", 0, 0]),
        spelled(kind="finished", body=[[[]], "x", 0, 0]),
        spelled(kind="discarded", body=["a", 1, 0, 0, 1, 7, "x" * 5000]),
        spelled().replace(b"\x01\x01", b"\xcc\x01\x01", 1),  # the same integer, longer
        spelled().replace(b"\xa1a", b"\xd9\x01a", 1),  # the same string, longer
        msgpack.packb({"index": 1}),
        msgpack.packb([1, 2, 3]),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        bytes(ENTRY_BYTES_MAX + 1),
    ],
)
def test_other_spellings_and_bombs_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_entry(data)


def test_the_plain_spelling_is_accepted() -> None:
    assert decode_entry(spelled()).body == LeaderBody("a")
