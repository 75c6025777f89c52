"""Asking a daemon who it is: it answers, and neither its links nor its counters change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.errors import LinkLost, PeerCertificateRefused, ProtocolViolation
from diloco_node.transport import asking
from diloco_node.transport.asking import TRIES, ask_peer
from diloco_node.wire.envelope import Hello, Lane, LinkRole, encode_hello
from diloco_node.wire.message_tables import PROTOCOL_VERSION
from tests.kit.transport_kit import DEADLINE_S, address, meshed


async def test_a_linked_daemon_says_who_it_is_and_keeps_its_link(tmp_path: Path) -> None:
    async with meshed(tmp_path) as mesh:
        a, at_a, b, at_b = await mesh.pair()
        answer = await ask_peer(mesh.identity("a"), "b", address(b), timeout_s=DEADLINE_S)
        hello = answer.hello
        assert (hello.region, hello.role, hello.settings_digest) == ("b", LinkRole.TRAINING, "settings")
        assert hello.protocol_version == PROTOCOL_VERSION
        assert answer.clock_ahead_s is not None
        assert abs(answer.clock_ahead_s) <= answer.rtt_s  # one clock: it can't be further off than the way is long
        assert b.rejections == a.rejections == {}
        assert (at_a.changes, at_b.changes) == ([("b", True)], [("a", True)])


async def test_who_measures_answers_without_a_clock(tmp_path: Path) -> None:
    async with meshed(tmp_path) as mesh:
        b, _ = await mesh.start("b", {"a": None}, role=LinkRole.MEASURING, settings_digest="", manifest_digest="")
        answer = await ask_peer(mesh.identity("a"), "b", address(b), timeout_s=DEADLINE_S)
        assert (answer.hello.role, answer.clock_ahead_s) == (LinkRole.MEASURING, None)


async def test_a_certificate_that_is_not_taken_is_an_error_of_its_own(tmp_path: Path) -> None:
    async with meshed(tmp_path) as mesh:
        b, _ = await mesh.start("b", {"a": None})
        with pytest.raises(PeerCertificateRefused, match="another run's authority"):
            await ask_peer(mesh.identity("a", "stranger"), "b", address(b), timeout_s=DEADLINE_S)
        with pytest.raises(PeerCertificateRefused, match="another region or run"):
            await ask_peer(mesh.identity("a"), "c", address(b), timeout_s=DEADLINE_S)


async def test_nobody_there(tmp_path: Path) -> None:
    async with meshed(tmp_path) as mesh:
        with pytest.raises(LinkLost, match="connection refused"):
            await ask_peer(mesh.identity("a"), "b", "127.0.0.1:1", timeout_s=DEADLINE_S)


async def test_who_shuts_us_out_says_why_each_time(tmp_path: Path) -> None:
    """It refuses before it has read our hello: whichever comes first, its words are heard."""
    async with meshed(tmp_path) as mesh:
        b, _ = await mesh.start("b", {"a": None})
        for _ in range(3):
            b.reject("a", ProtocolViolation("planted"))
        for _ in range(20):
            with pytest.raises(LinkLost, match="in quarantine"):
                await ask_peer(mesh.identity("a"), "b", address(b), timeout_s=DEADLINE_S)


class Answering:
    """What is dialled in place of a peer: each call meets the next of `errors`, then there is an answer.

    Its answer takes 4 s of a clock that starts at 100 s.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, errors: Sequence[str] = (), clock: str = "") -> None:
        self.errors, self.clock = list(errors), clock
        self.dialled = self.closed = 0
        self.now_s = 100
        times = SimpleNamespace(monotonic=lambda: self.now_s, time_ns=lambda: self.now_s * 10**9)
        monkeypatch.setattr(asking, "time", times)
        monkeypatch.setattr(asking, "dial", self.dial)

    async def dial(self, *_: Any, **__: Any) -> Answering:
        self.dialled += 1
        return self

    async def write(self, _: bytes) -> None:
        if self.errors:
            raise LinkLost(self.errors.pop(0))

    async def read(self) -> bytes:
        self.now_s += 4
        return encode_hello(Hello(PROTOCOL_VERSION, "try", "", "b", "", "", bytes(16), Lane.CONTROL, 0))

    async def peer_metadata(self, _: str) -> str:
        return self.clock

    async def aclose(self) -> None:
        self.closed += 1


WORDS_LOST = "b: Internal error from Core"


@pytest.mark.parametrize(
    ("errors", "dialled", "error"),
    [
        ([], 1, ""),
        ([WORDS_LOST] * (TRIES - 1), TRIES, ""),
        ([WORDS_LOST] * (TRIES + 1), TRIES, "Internal error"),
        ([WORDS_LOST, "in quarantine"], 2, "in quarantine"),
    ],
)
async def test_only_lost_words_are_asked_for_again_and_each_dial_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[str], dialled: int, error: str
) -> None:
    async with meshed(tmp_path) as mesh:
        peer = Answering(monkeypatch, errors=errors)
        try:
            await ask_peer(mesh.identity("a"), "b", "b:1", timeout_s=DEADLINE_S)
            said = ""
        except LinkLost as lost:
            said = str(lost)
    assert error in said
    assert bool(said) is bool(error)
    assert (peer.dialled, peer.closed) == (dialled, dialled)


@pytest.mark.parametrize(
    ("clock", "ahead_s"),
    # It reads 104 s here when the answer comes, and the peer's was read half a round trip of 4 s before.
    [
        ("102000000000", 0.0),
        ("109500000000", 7.5),
        ("9" * 21, None),
        ("9" * 5000, None),
        ("-1", None),
        ("\u0663", None),
    ],
)
async def test_a_clock_is_compared_with_ours_in_the_middle_of_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: str, ahead_s: float | None
) -> None:
    async with meshed(tmp_path) as mesh:
        Answering(monkeypatch, clock=clock)
        answer = await ask_peer(mesh.identity("a"), "b", "b:1", timeout_s=DEADLINE_S)
    assert (answer.rtt_s, answer.clock_ahead_s) == (4, ahead_s)
