"""wire/envelope.py: frames of both lanes, and hellos that name what differs."""

import dataclasses
import random

import pytest

from diloco_node.core.messages import Payload, ReductionReported, Refused, RequestVoteReply
from diloco_node.core.types import Ballot
from diloco_node.errors import PeerIncompatible, ProtocolViolation
from diloco_node.wire import envelope as e
from diloco_node.wire.envelope import TRANSFER_CONNECTIONS_MAX
from diloco_node.wire.message_tables import PROTOCOL_VERSION

HELLO = e.Hello(PROTOCOL_VERSION, "run1", "first", "eu", "settings", "manifest", b"i" * 16, e.Lane.CONTROL, 3)
HEADER = Payload(1, 2, b"d" * 32)


def test_a_hello_comes_back_equal() -> None:
    assert e.decode_hello(e.encode_hello(HELLO)) == HELLO


def test_a_matching_hello_is_accepted() -> None:
    e.check_hello(HELLO, dataclasses.replace(HELLO, region="us", dial=9), certificate_region="us")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", "run2"),
        ("founding_digest", "other"),
        ("settings_digest", "other"),
        ("manifest_digest", "other"),
    ],
)
def test_each_field_that_differs_is_named_with_both_values(field: str, value: object) -> None:
    theirs = dataclasses.replace(HELLO, region="us", **{field: value})
    with pytest.raises(PeerIncompatible) as caught:
        e.check_hello(HELLO, theirs, certificate_region="us")
    ours = getattr(HELLO, field)
    assert str(caught.value) == f"{field}: ours {ours!r}, theirs {value!r}"


def test_regions_of_two_versions_are_told_both_and_the_order_of_work() -> None:
    theirs = dataclasses.replace(HELLO, region="us", protocol_version=PROTOCOL_VERSION - 1, run_id="run2")
    with pytest.raises(PeerIncompatible) as caught:
        e.check_hello(HELLO, theirs, certificate_region="us")
    assert str(caught.value) == (
        f"protocol_version: ours {PROTOCOL_VERSION}, theirs {PROTOCOL_VERSION - 1}: regions of two versions do not "
        "link. Stop all regions, install the same version everywhere, and start them"
    )


def test_a_begun_run_says_its_settings_to_a_region_that_has_others() -> None:
    begun = dataclasses.replace(HELLO, region="us", founding_digest="", settings=("rounds.fragments=24",))
    ours = dataclasses.replace(HELLO, settings=("rounds.fragments=24", "rounds.sync_every=16"))
    e.check_hello(ours, begun, certificate_region="us")
    e.check_hello(begun, dataclasses.replace(ours, region="eu"), certificate_region="eu")
    other = dataclasses.replace(ours, settings_digest="other", settings=("rounds.fragments=8", "rounds.sync_every=16"))
    with pytest.raises(PeerIncompatible) as caught:
        e.check_hello(other, begun, certificate_region="us")
    assert str(caught.value) == (
        "rounds.fragments is 8 here, 24 there: these settings of run.toml must be the same in all regions"
    )


def test_settings_that_differ_are_named_with_both_values_instead_of_digests() -> None:
    ours = dataclasses.replace(HELLO, settings=("rounds.sync_every=24", "rounds.fragments=24", 'run.x="a=b"'))
    theirs = dataclasses.replace(
        ours, settings_digest="other", settings=("rounds.sync_every=16", "rounds.fragments=24", "rounds.new=1")
    )
    assert e.decode_hello(e.encode_hello(theirs)) == theirs
    with pytest.raises(PeerIncompatible) as caught:
        e.check_hello(ours, theirs, certificate_region="eu")
    assert str(caught.value) == (
        "rounds.new is unknown here, 1 there; rounds.sync_every is 24 here, 16 there; "
        'run.x is "a=b" here, unknown there: these settings of run.toml must be the same in all regions'
    )


def test_a_liars_settings_are_bounded_and_escaped_and_the_digest_decides() -> None:
    ours = dataclasses.replace(HELLO, settings=("rounds.fragments=24",))
    same = dataclasses.replace(ours, settings_digest="other")
    with pytest.raises(PeerIncompatible, match="settings_digest: ours 'settings', theirs 'other'"):
        e.check_hello(ours, same, certificate_region="eu")
    e.check_hello(ours, dataclasses.replace(ours, settings=("rounds.fragments=16",)), certificate_region="eu")
    lies = tuple(f"\x1b[2J{number}={'z' * 20}" for number in range(64))
    text = e.settings_difference(ours.settings, lies)
    assert text.isprintable()
    assert text.count("there") == e.SETTINGS_NAMED_MAX
    assert "61 more" in text
    for bad in (("x=1",) * 65, ("x" * 129,)):
        with pytest.raises(ValueError, match="settings"):
            e.encode_hello(dataclasses.replace(HELLO, settings=bad))


def test_all_fields_that_differ_are_named() -> None:
    theirs = dataclasses.replace(HELLO, run_id="run2", settings_digest="s2")
    with pytest.raises(PeerIncompatible, match=r"run_id: ours 'run1', theirs 'run2'; settings_digest: ours .*'s2'"):
        e.check_hello(HELLO, theirs, certificate_region="eu")


def test_a_name_that_is_not_the_certificates_is_a_lie_whatever_else_differs() -> None:
    with pytest.raises(ProtocolViolation, match="identity_mismatch"):
        e.check_hello(HELLO, dataclasses.replace(HELLO, run_id="run2"), certificate_region="us")


def test_a_hello_for_the_other_lane_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="lane"):
        e.check_hello(HELLO, dataclasses.replace(HELLO, lane=e.Lane.BULK), certificate_region="eu")


def test_a_hello_for_another_connection_is_refused() -> None:
    third = dataclasses.replace(HELLO, lane=e.Lane.BULK, connection=2)
    assert e.decode_hello(e.encode_hello(third)) == third
    e.check_hello(third, third, certificate_region="eu")
    with pytest.raises(ProtocolViolation, match="connection 1 on connection 2"):
        e.check_hello(third, dataclasses.replace(third, connection=1), certificate_region="eu")


def test_joined_says_nothing_else() -> None:
    e.check_joined(e.JOINED_FRAME)
    for frame in (b"", e.JOINED_FRAME + b"x", e.encode_end(0)):
        with pytest.raises(ProtocolViolation, match="joined"):
            e.check_joined(frame)


def test_a_hello_of_another_protocol_with_other_fields_names_the_version() -> None:
    theirs = PROTOCOL_VERSION + 1
    frame = bytes([e.KIND_HELLO, 0x93, 0x01, theirs]) + b"\xa3new"
    with pytest.raises(PeerIncompatible, match=f"protocol_version: ours {PROTOCOL_VERSION}, theirs {theirs}"):
        e.decode_hello(frame)


@pytest.mark.parametrize(
    "frame",
    [b"", b"\x01", b"\x02\x90", bytes([1, 0x93, 1, PROTOCOL_VERSION]) + b"\xa1x", b"\x01\xdc", b"GET / HTTP/1.1"],
)
def test_what_is_no_hello_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        e.decode_hello(frame)


def test_a_control_frame_comes_back_equal() -> None:
    message = RequestVoteReply(3, True, False, b"")
    assert e.decode_control(e.encode_control(message)) == message


@pytest.mark.parametrize("frame", [b"", b"\x02", b"\x10\x90", b"\x02\x91\x63"])
def test_what_is_no_control_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        e.decode_control(frame)


def test_a_ping_is_one_byte() -> None:
    assert e.PING_FRAME == b"\x03"


@pytest.mark.parametrize("frame", [b"", b"\x03" + bytes(8), b"\x04" + bytes(16), b"\x05"])
def test_pings_with_a_clock_and_echoes_of_version_4_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        e.decode_control(frame)


def test_a_hello_of_version_4_is_refused_for_its_version() -> None:
    frame = bytes.fromhex(
        "019b0104a472756e3100a26575a873657474696e6773a86d616e6966657374c41069696969696969696969696969696969"
        "a7636f6e74726f6c0300"
    )
    with pytest.raises(PeerIncompatible, match=f"protocol_version: ours {PROTOCOL_VERSION}, theirs 4"):
        e.decode_hello(frame)  # it has no role


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (
            e.LinkRole.MEASURING,
            e.LinkRole.TRAINING,
            "is the training daemon of us.*or start `diloco-node measure serve` beside",
        ),
        (e.LinkRole.TRAINING, e.LinkRole.MEASURING, "no training daemon, but `diloco-node measure` of us"),
    ],
)
def test_daemons_and_measuring_ends_refuse_each_other(ours: e.LinkRole, theirs: e.LinkRole, text: str) -> None:
    here = dataclasses.replace(HELLO, role=ours)
    there = dataclasses.replace(HELLO, region="us", role=theirs, settings_digest="another")
    with pytest.raises(PeerIncompatible, match=text):
        e.check_hello(here, there, certificate_region="us")
    other = dataclasses.replace(there, protocol_version=PROTOCOL_VERSION + 1)
    with pytest.raises(PeerIncompatible, match="protocol_version"):
        e.check_hello(here, other, certificate_region="us")


def test_bulk_frames_come_back_equal() -> None:
    assert e.decode_bulk(e.encode_begin(7, HEADER, 1000)) == e.TransferBegin(7, 1000, HEADER)
    assert e.decode_bulk(e.encode_end(7)) == e.TransferEnd(7, ())
    assert e.decode_bulk(e.encode_end(7, [3, 0, 2**32 - 1])) == e.TransferEnd(7, (3, 0, 2**32 - 1))
    assert e.decode_bulk(e.encode_abort(7, "näh")) == e.TransferAbort(7, (), "näh")
    assert e.decode_bulk(e.encode_abort(7, "", [1, 2, 3, 4])) == e.TransferAbort(7, (1, 2, 3, 4), "")
    chunk = e.decode_bulk(e.encode_chunk(7, 2**33, 3, b"abc", is_compressed=False))
    assert chunk == e.TransferChunk(7, 2**33, 3, False, memoryview(b"abc"))
    packed = e.decode_bulk(e.encode_chunk(7, 0, 999, memoryview(b"z"), is_compressed=True))
    assert packed == e.TransferChunk(7, 0, 999, True, memoryview(b"z"))


def test_a_long_reason_is_cut() -> None:
    frame = e.encode_abort(1, "x" * 5000)
    back = e.decode_bulk(frame)
    assert isinstance(back, e.TransferAbort)
    assert len(back.reason) == e.REASON_BYTES_MAX


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        b"\x02abc",
        e.encode_begin(1, HEADER, 10)[:10],
        e.encode_begin(1, HEADER, 10)[:-1],
        e.encode_begin(1, HEADER, e.TRANSFER_BYTES_MAX + 1),
        e.encode_begin(1, HEADER, 10) + b"x",
        e.encode_begin(1, HEADER, 10)[:17] + b"\xc0" * 70_000,
        e.encode_chunk(1, 0, 3, b"abcd", is_compressed=False),
        e.encode_chunk(1, 0, 4, b"abc", is_compressed=False),
        e.encode_chunk(1, 0, 0, b"", is_compressed=False),
        e.encode_chunk(1, 0, e.CHUNK_BYTES_MAX + 1, b"x", is_compressed=True),
        e.encode_chunk(1, 0, 10, b"x" * (10 + e.CHUNK_SLACK_BYTES + 1), is_compressed=True),
        e.encode_chunk(1, 0, 3, b"abc", is_compressed=False)[:15],
        e.encode_chunk(1, 0, 3, b"abc", is_compressed=2),  # type: ignore[arg-type]
        e.encode_end(1) + b"x",
        e.encode_end(1)[:5],
        bytes([e.KIND_ABORT]),
        bytes([e.KIND_ABORT]) + b"x" * (8 + e.REASON_BYTES_MAX + 1),
        e.encode_end(1, [1] * (TRANSFER_CONNECTIONS_MAX + 1)),
        e.encode_end(1, [1, 2])[:-1],
        e.encode_abort(1, "", [1] * (TRANSFER_CONNECTIONS_MAX + 1)),
        e.encode_abort(1, "", [1, 2])[:-1],
        e.encode_abort(1, "x" * e.REASON_BYTES_MAX, [1, 2]) + b"x",
        e.JOINED_FRAME,
    ],
    ids=lambda frame: f"kind {frame[:1].hex()}, {len(frame)} bytes",
)
def test_a_malformed_bulk_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        e.decode_bulk(frame)


def test_the_largest_chunk_is_allowed_and_fits_a_frame() -> None:
    frame = e.encode_chunk(1, 0, e.CHUNK_BYTES_MAX, bytes(e.CHUNK_BYTES_MAX), is_compressed=False)
    assert isinstance(e.decode_bulk(frame), e.TransferChunk)
    assert len(frame) < e.FRAME_BYTES_MAX


FRAMES = (
    (e.decode_hello, e.encode_hello(dataclasses.replace(HELLO, settings=("rounds.sync_every=24",)))),
    (e.decode_control, e.encode_control(RequestVoteReply(3, True, False, b"x" * 16))),
    (e.decode_control, e.encode_control(Refused(1, 77, "gone"))),
    (e.decode_control, e.encode_control(ReductionReported(Ballot(1, 2), 0, (0.5,), ((0.25,),), bytes(32)))),
    (e.decode_bulk, e.encode_begin(7, HEADER, 1000)),
    (e.decode_bulk, e.encode_chunk(7, 2**33, 3, b"abc", is_compressed=False)),
    (e.decode_bulk, e.encode_end(7, [3, 0, 2**32 - 1])),
    (e.decode_bulk, e.encode_abort(7, "gone", [1, 2])),
)
MUTANTS = 100_000


def test_mutated_and_random_frames_never_raise_anything_but_peer_errors() -> None:
    seed = 7
    print("seed", seed)
    rng = random.Random(seed)
    refused = 0
    for number in range(MUTANTS):
        decode, right = FRAMES[number % len(FRAMES)]
        frame = bytearray(right) if number % 5 else bytearray(right[:1] + rng.randbytes(rng.randrange(60)))
        for _ in range(1 + number % 3):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        if number % 7 == 0:
            del frame[rng.randrange(len(frame)) :]
        try:
            decode(bytes(frame))
        except (ProtocolViolation, PeerIncompatible):
            refused += 1
    assert MUTANTS // 2 < refused < MUTANTS
