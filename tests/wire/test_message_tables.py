"""wire/message_tables.py: every message has its tag for ever, and yesterday's bytes decode today."""

import dataclasses
import typing

import msgpack
import pytest

from diloco_node.core import messages as m
from diloco_node.core import types as t
from diloco_node.core.ledger.entries import canonical_codec
from diloco_node.core.member_kind import Membership, MembershipBody
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.shapes import OutOfBounds
from diloco_node.core.types import RateLimits
from diloco_node.errors import ProtocolViolation
from diloco_node.wire import link_messages as k
from diloco_node.wire import measure_messages as g
from diloco_node.wire.field_bounds import BOUNDS
from diloco_node.wire.message_schema import Schema
from diloco_node.wire.message_tables import (
    BULK_HEADERS,
    BULK_LANES,
    CONTROL,
    ENTRY_BODIES,
    HEADERS,
    MESSAGES,
    PROTOCOL_VERSION,
    BudgetLane,
    ControlMessage,
    TransferHeader,
)

ENTRIES = Schema[t.Entry]({1: t.Entry}, bounds=BOUNDS, inner=ENTRY_BODIES)
BALLOT = t.Ballot(3, 4)
CONTRIBUTION = t.Contribution("us-east", 1, 2, 5, 9, 10, 26, 4096, (0.5, 2.0))
STRIPE = t.Stripe("eu", 0, 7)
ROUND = t.RoundBody(2, 6, BALLOT, (t.Member(CONTRIBUTION, 0.25),), 0.75, (0.5, 1.0), (STRIPE,), b"p" * 32)
STATUS = t.LearnerStatus(1, 30, 7680, 500_000_000, (t.FragmentPosition(5, 10, 10, 2560),))


def entry(body: t.EntryBody) -> t.Entry:
    return t.Entry(1, 2, b"q" * 32, body, b"h" * 32)


BODIES: list[t.EntryBody] = [
    t.GenesisBody("run1", "md", "sd", ("eu", "us-east"), (b"f" * 32,), (b"d" * 16, b"e" * 16)),
    t.LeaderBody("eu"),
    ROUND,
    t.DiscardedBody("us-east", 1, 2, 10, 26, 4096, "died"),
    t.FinishedBody((5, 6), "tokens", 400, 9_000),
    t.DiskNamedBody("eu", b"d" * 16),
    t.SnapshotBody(2, 8, b"d" * 32),
    t.SummaryBody(1024, b"d" * 32),
    t.ExtendedBody(800, 0),
    t.RevokedBody("eu", b"c" * 32),
    MembershipBody("ap", "contributor", "ap.example:4317", b"s" * 71),
    SettingsBody.of(t.RunSettings()),
]

CONTROL_EXAMPLES: list[ControlMessage] = [
    m.RequestVote(2, True, 10, 1, b"d" * 16, True),
    m.RequestVoteReply(2, False, True, b"d" * 16),
    m.AppendEntries(2, 5, 9, b"q" * 32, tuple(entry(body) for body in BODIES), 8),
    m.AppendEntriesReply(2, 5, True, 9, b"h" * 32, b"d" * 16),
    m.Heartbeat(7, 6, 1000, ("eu",), STATUS, 9, (t.FragmentDigest(2, 6, b"d" * 32),), RateLimits(12_500, None)),
    m.BallotOpened(BALLOT, 2, 6, ("eu", "us-east"), (STRIPE,)),
    m.Contributed(BALLOT, CONTRIBUTION),
    m.Declined(BALLOT, "busy"),
    m.StripesReceived(BALLOT, (m.Receipt("us-east", 1, 4),)),
    m.MergeDecided(BALLOT, 2, 6, (CONTRIBUTION,), ((0.5, 0.25),)),
    m.ReductionReported(BALLOT, 0, (1.5,), ((0.5,), (0.25,)), b"d" * 32),
    m.PayloadDurable(BALLOT, b"d" * 32),
    m.PayloadRequested(2, 6, b"d" * 32),
    m.StateRequested(2, 6, b"d" * 32),
    m.Refused(2, 6, "gone"),
    m.TimeoutNow(2, "eu"),
    m.FinishRequested("enough", False),
    m.DiscardReported((BODIES[3],)),  # type: ignore[arg-type]
    k.IngressGranted(12_500_000),
    k.IngressDemand(1 << 62),
    g.EchoRequest(7),
    g.EchoReply(7, 1000, -1),
    g.MeasurementRequested(1 << 61, True, 1_000_000_000, 5_000_000_000, 1 << 32),
    g.MeasurementReady(3),
    g.MeasurementDeclined(3, "busy"),
    g.MeasurementReceived(3, 10, 9, 8, 11, 4_000_000_000, 500, 1000),
    g.MeasurementStopped(3),
    g.MeasurementSent(3, 500, 1000, 900, -1, -1),
    g.LinkTestRequested(3, "eu", 1, 0, 2, 3),
    g.LinkMeasured(3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10),
    m.BaseSent(2, 5, 1024, 1, b"q" * 32, b"s" * 4097),
    m.MergedReceived(BALLOT, (b"d" * 32, b"")),
    m.AuditDrawn(BALLOT, b"d" * 32, (b"n" * 32,)),
    m.ContributionProjected(BALLOT, (0.5, -1.25)),
    m.RosterShown(3, (Membership("ap", "former", b"", 9, "ap.example:4317", 1),), b"s" * 71),
]

HEADER_EXAMPLES: list[TransferHeader] = [
    m.ContributionStripe(BALLOT, 0, 6, CONTRIBUTION, 0, 7),
    m.MergedStripe(BALLOT, 0, 2, 6, b"d" * 32, 0, 7),
    m.Payload(2, 6, b"d" * 32),
    m.State(2, 6, b"d" * 32),
    g.Probe(3),
]


@pytest.mark.parametrize(
    ("union", "table"), [(ControlMessage, MESSAGES), (TransferHeader, BULK_HEADERS), (t.EntryBody, ENTRY_BODIES)]
)
def test_every_member_of_a_union_has_a_tag(union: object, table: dict[int, type]) -> None:
    assert set(typing.get_args(union)) == set(table.values())


def test_every_transfer_has_a_lane_of_the_budget() -> None:
    assert BULK_LANES.keys() == set(BULK_HEADERS.values())


def test_rounds_go_before_recovery_and_measurements_go_last() -> None:
    lanes: dict[str, set[type]] = {}
    for header, lane in BULK_LANES.items():
        lanes.setdefault(lane.name, set()).add(header)
    assert lanes == {
        "ROUNDS": {m.ContributionStripe, m.MergedStripe},
        "RECOVERY": {m.Payload, m.State},
        "MEASUREMENT": {g.Probe},
    }
    assert [lane.name for lane in sorted(BudgetLane)] == ["CONTROL", "ROUNDS", "RECOVERY", "MEASUREMENT"]


def test_the_examples_cover_every_message() -> None:
    assert [type(message) for message in CONTROL_EXAMPLES] == list(MESSAGES.values())
    assert [type(header) for header in HEADER_EXAMPLES] == list(BULK_HEADERS.values())
    assert [type(body) for body in BODIES] == list(ENTRY_BODIES.values())


@pytest.mark.parametrize("message", CONTROL_EXAMPLES, ids=lambda message: type(message).__name__)
def test_control_messages_come_back_equal(message: ControlMessage) -> None:
    assert CONTROL.decode(CONTROL.encode(message)) == message


@pytest.mark.parametrize("header", HEADER_EXAMPLES, ids=lambda header: type(header).__name__)
def test_headers_come_back_equal(header: TransferHeader) -> None:
    assert HEADERS.decode(HEADERS.encode(header)) == header


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_entries_come_back_equal(body: t.EntryBody) -> None:
    assert ENTRIES.decode(ENTRIES.encode(entry(body))) == entry(body)


def test_rows_that_nobody_counts_take_no_byte_and_have_one_encoding() -> None:
    """On the wire and in the ledger alike."""
    message = m.Contributed(BALLOT, CONTRIBUTION)
    plain = msgpack.unpackb(CONTROL.encode(message))
    assert len(plain[2]) == len(dataclasses.fields(t.Contribution)) - 1
    with pytest.raises(ProtocolViolation, match="its last field is empty"):
        CONTROL.decode(msgpack.packb([*plain[:2], [*plain[2], []]]))
    counted = dataclasses.replace(CONTRIBUTION, rows=(1, 7, 40, 8))
    assert CONTROL.decode(CONTROL.encode(m.Contributed(BALLOT, counted))).contribution == counted
    write, read = canonical_codec(t.Contribution)
    assert read(write(CONTRIBUTION)) == CONTRIBUTION
    assert read(write(counted)) == counted
    assert len(write(CONTRIBUTION)) == len(plain[2])
    with pytest.raises(OutOfBounds, match="its last field is empty"):
        read([*write(CONTRIBUTION), []])


def test_frozen_bytes_decode() -> None:
    """A change here is a change of the protocol: raise PROTOCOL_VERSION, and keep what can be kept of the old bytes."""
    assert PROTOCOL_VERSION == 13
    frozen: dict[str, ControlMessage] = {
        "970102c30a01c41064646464646464646464646464646464c3": m.RequestVote(2, True, 10, 1, b"d" * 16, True),
        "950202c2c3c41064646464646464646464646464646464": m.RequestVoteReply(2, False, True, b"d" * 16),
        "97040205c309c420" + "68" * 32 + "c410" + "64" * 16: m.AppendEntriesReply(2, 5, True, 9, b"h" * 32, b"d" * 16),
        "941607cd03e8ff": g.EchoReply(7, 1000, -1),
        "9617cf2000000000000000c3ce3b9aca00cf000000012a05f200cf0000000100000000": CONTROL_EXAMPLES[22],
    }
    for text, message in frozen.items():
        assert CONTROL.encode(message).hex() == text
        assert CONTROL.decode(bytes.fromhex(text)) == message


def test_requests_to_measure_of_versions_4_and_8_are_refused() -> None:
    for old in (
        "9a17cf2000000000000000c3c2ce3b9aca00cf000000012a05f200cf000000010000000000c2c0",
        "9817cf2000000000000000c3c2ce3b9aca00cf000000012a05f200cf000000010000000008",
    ):
        with pytest.raises(ProtocolViolation):
            CONTROL.decode(bytes.fromhex(old))
    with pytest.raises(ProtocolViolation):
        HEADERS.decode(bytes.fromhex("930503c3"))  # a probe that says itself whether zstd pays
