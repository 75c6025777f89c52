"""transport/kernel/congestion.py: what daemons send each other, and peers that send nothing or something else."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from diloco_node.transport import streams
from diloco_node.transport.credentials import CHALLENGE_KEY, prove
from diloco_node.transport.kernel import congestion
from diloco_node.transport.kernel.congestion import (
    CongestionControls,
    decode_congestion_controls,
    own_congestion_controls,
)
from diloco_node.wire import envelope as e
from tests.kit.transport_kit import DEADLINE_S, Mesh, address, hello_of
from tests.kit.waiting import eventually

TELLING = CongestionControls("cubic", "bbr")


def test_sockets_with_a_long_round_trip_go_by_another_one() -> None:
    assert TELLING.at(0) == TELLING.at(4_999_999) == "cubic"
    assert TELLING.at(5_000_000) == "bbr"


def test_what_is_sent_comes_back_equal() -> None:
    assert decode_congestion_controls(TELLING.encode()) == TELLING


@pytest.mark.parametrize(
    "text", ["", "cubic", "cubic bbr ", "cubic  bbr", "cubic bbr\n", "c\x1b[2J bbr", "a" * 16 + " b", "é b"]
)
def test_anything_else_is_nothing(text: str) -> None:
    assert decode_congestion_controls(text) is None


def test_ours_are_those_that_the_kernel_gives_and_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = own_congestion_controls()
    assert ours is not None
    assert decode_congestion_controls(ours.encode()) == ours
    usual = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    if usual.exists():
        assert ours.usual == usual.read_text().strip()
    monkeypatch.setattr(congestion, "LONG_RTT_CONGESTION_CONTROL", b"no such")
    assert own_congestion_controls() == CongestionControls(ours.usual, ours.usual)


def test_a_system_that_does_not_tell_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(congestion.socket, "TCP_CONGESTION", 12_345, raising=False)
    assert own_congestion_controls() is None


async def test_both_sides_of_a_link_know_the_others(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_node.transport.certificate_proof.own_congestion_controls", lambda: TELLING)
    a, _, b, _ = await mesh.pair()
    assert a.peer_status()["b"].congestion == TELLING
    assert b.peer_status()["a"].congestion == TELLING


@pytest.mark.parametrize("metadata", [(), ((congestion.METADATA_KEY, "x"),), (("other", "cubic bbr"),)])
async def test_a_dialer_that_does_not_tell_has_its_link_all_the_same(mesh: Mesh, metadata: streams.Metadata) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = {
        lane: await streams.dial(mesh.identity("a"), "b", address(b), lane, timeout_s=DEADLINE_S, metadata=metadata)
        for lane in e.Lane
    }
    for lane, stream in made.items():
        await stream.write(hello_of("a", lane))
        e.decode_hello(await stream.read())
    await at_b.until(lambda: at_b.is_up.get("a"))
    assert b.peer_status()["a"].congestion is None
    for stream in made.values():
        await stream.aclose()


async def test_an_accepting_side_that_does_not_tell_has_its_link_all_the_same(mesh: Mesh) -> None:
    async def serve(lane: e.Lane, context: Any) -> None:
        stream = streams.AcceptedStream(context, peer="a")
        hello = e.decode_hello(await stream.read())
        await stream.send_metadata(prove(identity, "a", stream.peer_metadata(CHALLENGE_KEY)))
        await stream.write(hello_of("b", lane, dial=hello.dial))
        await asyncio.Event().wait()

    identity = mesh.identity("b")
    server, port = streams.make_server(lambda: identity, "127.0.0.1:0", serve, handshake_s=DEADLINE_S)
    await server.start()
    a, at_a = await mesh.start("a", {"b": f"127.0.0.1:{port}"})
    await at_a.until(lambda: at_a.is_up.get("b"))
    assert a.peer_status()["b"].congestion is None
    await a.stop()
    await server.stop(None)


async def test_a_peer_that_comes_back_without_it_is_unknown_again(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_node.transport.certificate_proof.own_congestion_controls", lambda: TELLING)
    a, _, b, _ = await mesh.pair()
    monkeypatch.setattr("diloco_node.transport.certificate_proof.own_congestion_controls", lambda: None)
    a.links["b"].drop("a test")
    await eventually(lambda: b.peer_status()["a"].congestion is None)
    await eventually(lambda: a.peer_status()["b"].congestion is None)
