"""Asking a daemon who it is: it answers, and neither its links nor its counters change."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_node.errors import LinkLost, PeerCertificateRefused, ProtocolViolation
from diloco_node.transport.asking import ask_peer
from diloco_node.wire.envelope import LinkRole
from diloco_node.wire.tables import PROTOCOL_VERSION
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
