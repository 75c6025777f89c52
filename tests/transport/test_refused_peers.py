"""Whom transport/transport.py refuses, and what a broken peer costs: real gRPC with TLS on loopback."""

import asyncio
import contextlib
import dataclasses
from typing import Any

import pytest

from diloco_node.core.merge.fragments import TensorSpec
from diloco_node.core.messages import Message, Payload, RequestVoteReply
from diloco_node.errors import LinkLost, ProtocolViolation
from diloco_node.transport import streams
from diloco_node.transport.authority import init_run
from diloco_node.transport.quarantine import STRIKES
from diloco_node.wire import envelope as e
from diloco_node.wire.tensor_listing import pack_tensors
from tests.kit.transport_kit import (
    DEADLINE_S,
    FAST,
    RUN,
    Mesh,
    address,
    connect_as,
    end_of,
    hello_of,
    read_on,
    rogue,
    status_of,
)
from tests.kit.waiting import eventually

# ---- who may talk ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"founding_digest": "other"}, "founding_digest: ours 'other', theirs 'first'"),
        ({"settings_digest": "other"}, "settings_digest: ours 'other', theirs 'settings'"),
        (
            {"settings_digest": "other", "settings": ("rounds.sync_every=16",)},
            "rounds.sync_every is 16 here, 24 there: these settings of run.toml must be the same in all regions",
        ),
        ({"manifest_digest": "other"}, "manifest_digest: ours 'other', theirs 'manifest'"),
    ],
)
async def test_a_mismatch_is_named_field_by_field_on_both_sides(
    mesh: Mesh, changes: dict[str, Any], error: str
) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    a, at_a = await mesh.start("a", {"b": address(b)}, **changes)
    assert error in await status_of(a, "b", error)
    await eventually(lambda: b.rejections["a", "incompatible"])
    what = error.split(":", maxsplit=1)[0].split(" is ", maxsplit=1)[0]
    assert what in await status_of(b, "a", what), "it can't dial, and says so all the same"
    assert a.rejections["b", "incompatible"] >= 1
    assert at_a.changes == at_b.changes == []


async def test_regions_whose_models_differ_name_the_tensors_on_both_sides(mesh: Mesh) -> None:
    there, here = (pack_tensors([TensorSpec(name, (3, 4))]) for name in ("up.weight", "up.base.weight"))
    b, _ = await mesh.start("b", {"a": None}, model=there)
    a, at_a = await mesh.start("a", {"b": address(b)}, manifest_digest="other", model=here)
    text = "the models differ: tensor up.base.weight is only here, tensor up.weight is only there"
    assert text in await status_of(a, "b", text)
    await eventually(lambda: b.other_models)
    assert b.other_models == {
        "a": "the models differ: tensor up.weight is only here, tensor up.base.weight is only there"
    }
    assert a.other_models == {"b": text}
    assert at_a.changes == []


async def test_a_run_with_another_id_is_refused_by_name(mesh: Mesh) -> None:
    init_run(mesh.folder / "run2", "run2", ["a", "b"])
    b, _ = await mesh.start("b", {"a": None}, run_id="run2", identity=mesh.identity("b", "run2"))
    a, at_a = await mesh.start("a", {"b": address(b)})
    assert "authority" in await status_of(a, "b", "127.0.0.1")
    assert at_a.changes == []


async def test_another_run_under_the_same_authority_is_refused_by_its_name(mesh: Mesh) -> None:
    b, _ = await mesh.start("b", {"a": None})
    stranger = dataclasses.replace(mesh.identity("a"), run_id="run2")
    with pytest.raises(LinkLost, match="belongs to another region or run"):
        await connect_as(mesh, stranger, b, e.Lane.CONTROL)
    control = await connect_as(mesh, mesh.identity("a"), b, e.Lane.CONTROL)
    await control.write(hello_of("a", e.Lane.CONTROL, run_id="run2"))
    assert e.decode_hello(await control.read()).run_id == RUN
    with pytest.raises(LinkLost, match=r"run_id: ours 'run1', theirs 'run2'"):
        await control.read()
    await control.aclose()


async def test_a_certificate_of_another_authority_is_explained_on_the_dialing_side(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    stranger = mesh.identity("a", "stranger")
    a, _ = await mesh.start("a", {"b": address(b)}, identity=stranger)
    text = await status_of(a, "b", "don't trust")
    assert f"b at {address(b)}" in text
    trusts_us = dataclasses.replace(stranger, ca_pem=mesh.identity("a").ca_pem)
    c, _ = await mesh.start("a", {"b": address(b)}, identity=trusts_us)
    assert "does not trust our certificate" in await status_of(c, "b", "trust")
    assert at_b.changes == []
    assert b.rejections == {}


async def test_a_peer_without_a_certificate_never_reaches_a_handler(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    _, writer = await asyncio.open_connection("127.0.0.1", b.port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    writer.write(bytes(9))
    await writer.drain()
    reader, plain = await asyncio.open_connection("127.0.0.1", b.port)
    plain.write(b"GET / HTTP/1.1\r\n\r\n")
    assert await asyncio.wait_for(end_of(reader), DEADLINE_S) is not None
    for made in (writer, plain):
        made.close()
    assert at_b.changes == []
    assert b.rejections == {}


async def test_the_wrong_region_at_an_address_is_not_talked_to(mesh: Mesh) -> None:
    c, _ = await mesh.start("c", {"a": None})
    a, at_a = await mesh.start("a", {"b": address(c)})
    assert "belongs to another region or run" in await status_of(a, "b", "region")
    assert at_a.changes == []


async def test_a_name_in_the_hello_that_is_not_the_certificates_is_a_strike(mesh: Mesh) -> None:
    """The third one shuts out who has the certificate, and not whom it names."""
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    for strike in range(1, STRIKES + 1):
        assert b.quarantine_reason("c") == ""
        stream = await connect_as(mesh, mesh.identity("c"), b, e.Lane.CONTROL)
        await stream.write(hello_of("a", e.Lane.CONTROL))
        with pytest.raises(LinkLost, match="identity_mismatch"):
            await stream.read()
        assert b.rejections == {("c", "identity_mismatch"): strike}
        await stream.aclose()
    assert "identity_mismatch" in b.quarantine_reason("c")
    assert b.quarantine_reason("a") == ""
    assert at_b.changes == []


async def test_a_member_of_the_run_that_is_no_peer_is_refused(mesh: Mesh) -> None:
    b, _ = await mesh.start("b", {"a": None})
    stream = await connect_as(mesh, mesh.identity("c"), b, e.Lane.CONTROL)
    with pytest.raises(LinkLost, match="not a region of run"):
        await stream.read()
    assert b.rejections == {("c", "incompatible"): 1}
    await stream.aclose()


async def test_a_stream_without_a_hello_is_ended(mesh: Mesh) -> None:
    b, _ = await mesh.start("b", {"a": None}, times=dataclasses.replace(FAST, hello_s=0.2))
    stream = await connect_as(mesh, mesh.identity("a"), b, e.Lane.CONTROL)
    with pytest.raises(LinkLost, match="no hello within"):
        await asyncio.wait_for(stream.read(), DEADLINE_S)
    await stream.aclose()


async def test_a_single_lane_is_ended_when_the_other_does_not_come(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None}, times=dataclasses.replace(FAST, hello_s=0.2))
    while True:
        stream = await connect_as(mesh, mesh.identity("a"), b, e.Lane.BULK)
        with contextlib.suppress(LinkLost):  # here the machine stood still, and even the first hello came too late
            await stream.write(hello_of("a", e.Lane.BULK))
            e.decode_hello(await stream.read())
            break
        await stream.aclose()
    with pytest.raises(LinkLost):
        await asyncio.wait_for(stream.read(), DEADLINE_S)
    assert at_b.changes == []
    await stream.aclose()


async def test_a_method_that_is_not_ours_is_refused_by_grpc(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    b, _ = await mesh.start("b", {"a": None})
    monkeypatch.setattr(streams, "METHOD_PREFIX", "/other.Service/")
    stream = await connect_as(mesh, mesh.identity("a"), b, e.Lane.CONTROL)
    with pytest.raises(LinkLost, match=r"(?i)method not found|unimplemented"):
        await stream.read()
    await stream.aclose()


# ---- broken peers ----------------------------------------------------------------------------------------------------

BEGIN = e.encode_begin(0, Payload(1, 2, bytes(32)), 100)
ZSTD_BOMB = bytes.fromhex("28b52ffde4ffffffffffff0000000000")


@pytest.mark.parametrize(
    ("lane", "frames", "reason"),
    [
        (e.Lane.CONTROL, [b"garbage"], "protocol"),
        (e.Lane.CONTROL, [b""], "protocol"),
        (e.Lane.CONTROL, [b"\x02\x91\x63"], "protocol"),
        (e.Lane.CONTROL, [hello_of("a", e.Lane.CONTROL)], "protocol"),
        (e.Lane.BULK, [b"garbage"], "protocol"),
        (e.Lane.BULK, [e.encode_chunk(0, 0, 3, b"abc", is_compressed=False)], "protocol"),
        (e.Lane.BULK, [e.encode_end(0)], "protocol"),
        (e.Lane.BULK, [e.encode_abort(3, "")], "protocol"),
        (e.Lane.BULK, [BEGIN, BEGIN], "protocol"),
        (e.Lane.BULK, [BEGIN, e.encode_begin(1, Payload(1, 2, bytes(32)), 100)], "protocol"),
        (e.Lane.BULK, [e.encode_begin(1, Payload(1, 2, bytes(32)), 0), e.encode_end(1), BEGIN], "protocol"),
        (e.Lane.BULK, [BEGIN, e.encode_end(0)], "protocol"),
        (
            e.Lane.BULK,
            [BEGIN, e.encode_chunk(0, 1, 99, b"x" * 99, is_compressed=False), e.encode_end(0, [1])],
            "protocol",
        ),
        (e.Lane.BULK, [BEGIN, e.encode_chunk(0, 0, 100, b"x" * 100, is_compressed=False), e.encode_end(0)], "protocol"),
        (e.Lane.BULK, [BEGIN, *[e.encode_chunk(0, 0, 3, b"abc", is_compressed=False)] * 2], "protocol"),
        (e.Lane.BULK, [BEGIN, e.encode_chunk(1, 0, 3, b"abc", is_compressed=False)], "protocol"),
        (e.Lane.BULK, [BEGIN, e.encode_chunk(0, 0, 101, b"x" * 101, is_compressed=False)], "protocol"),
        (e.Lane.BULK, [BEGIN, e.encode_chunk(0, 0, 100, b"not zstd", is_compressed=True)], "corrupt"),
        (e.Lane.BULK, [BEGIN, e.encode_chunk(0, 0, 100, ZSTD_BOMB, is_compressed=True)], "corrupt"),
        (
            e.Lane.BULK,
            [
                e.encode_begin(0, Payload(1, 2, bytes(32)), 2**20),
                e.encode_chunk(0, 0, 2**20, b"not zstd", is_compressed=True),
                e.encode_end(0, [1]),
            ],
            "corrupt",
        ),
        (e.Lane.BULK, [BEGIN, e.encode_chunk(0, 0, 100, b"x" * 100, is_compressed=False), BEGIN], "protocol"),
    ],
)
async def test_a_broken_peer_costs_its_link_and_is_counted(
    mesh: Mesh, lane: e.Lane, frames: list[bytes], reason: str
) -> None:
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    _, at_c = await mesh.start("c", {"b": address(b)})
    await at_c.until(lambda: at_c.is_up.get("b"))
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    with contextlib.suppress(LinkLost):  # the first frame may cost the link before the last one is written
        for frame in frames:
            await made[lane].write(frame)
    await at_b.until(lambda: not at_b.is_up["a"])
    assert b.rejections == {("a", reason): 1}
    assert all(not whole for _, _, body, whole in at_b.closed if body)
    assert len(at_b.closed) == len(at_b.opened)
    assert at_b.is_up["c"], "the others are not touched"
    for stream in made.values():
        await stream.aclose()


async def test_the_peer_gets_the_reason_why_it_was_dropped(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    await made[e.Lane.CONTROL].write(b"\x02\x91\x63")
    with pytest.raises(LinkLost, match="unknown message tag 99"):
        await read_on(made[e.Lane.CONTROL])
    for stream in made.values():
        await stream.aclose()


async def test_a_handler_may_refuse_a_message_as_a_violation(mesh: Mesh) -> None:
    a, _, b, at_b = await mesh.pair()

    def refuse(peer: str, message: Message) -> None:
        raise ProtocolViolation(f"{peer}: {type(message).__name__} makes no sense")

    at_b.control_arrived = refuse  # type: ignore[method-assign]
    a.send("b", RequestVoteReply(1, True, True, b""))
    await at_b.until(lambda: ("a", False) in at_b.changes)
    assert b.rejections == {("a", "protocol"): 1}


async def test_a_fault_of_ours_is_reported_and_the_link_comes_back(mesh: Mesh) -> None:
    a, at_a, _, at_b = await mesh.pair()
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))

    def break_down(peer: str, message: Message) -> None:
        raise ZeroDivisionError("a bug")

    original, at_b.control_arrived = at_b.control_arrived, break_down  # type: ignore[method-assign]
    a.send("b", RequestVoteReply(1, True, True, b""))
    await at_b.until(lambda: ("a", False) in at_b.changes)
    at_b.control_arrived = original  # type: ignore[method-assign]
    await at_a.until(lambda: len(at_a.changes) == 3)
    assert [type(context["exception"]) for context in seen] == [ZeroDivisionError]
    asyncio.get_running_loop().set_exception_handler(None)


async def test_an_oversized_frame_costs_the_link(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    with contextlib.suppress(LinkLost):
        await made[e.Lane.CONTROL].write(bytes(e.FRAME_BYTES_MAX + 1))
    with pytest.raises(LinkLost):
        await read_on(made[e.Lane.CONTROL])
    for stream in made.values():
        await stream.aclose()
    await at_b.until(lambda: not at_b.is_up["a"])
