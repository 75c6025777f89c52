"""transport/peer_links.py: peers come while a transport runs, move, and go."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_node.core.messages import RequestVoteReply
from diloco_node.errors import LinkLost
from diloco_node.transport.authority import add_regions
from diloco_node.transport.link_status import LinkState
from diloco_node.transport.transport import STRANGERS_MAX
from diloco_node.wire.envelope import Lane
from diloco_node.wire.run_shown import RunShown
from tests.kit.transport_kit import FAST, address, connect_as, meshed
from tests.kit.waiting import eventually


async def test_a_peer_that_comes_is_linked_counted_and_shares_the_budget(tmp_path: Path) -> None:
    async with meshed(tmp_path) as mesh:
        a, at_a, b, _ = await mesh.pair()
        c, at_c = await mesh.start("c", {"a": None})
        a.follow({**a.addresses, "c": address(c)}, messages_per_s=900)
        await at_a.until(lambda: at_a.is_up.get("c"))
        assert sorted(a.budget_status()["peers"]) == sorted(a.peer_status()) == ["b", "c"]
        assert a.send("c", RequestVoteReply(1, True, False, b""))
        await at_c.until(lambda: at_c.messages)
        assert at_a.is_up["b"], "the other link stays"
        a.follow(a.addresses, {"c"})
        assert (sorted(a.budget_status()["peers"]), sorted(a.addresses)) == (["b"], ["b"])
        a.follow({"b": address(b), "c": address(c)})
        assert sorted(a.budget_status()["peers"]) == ["b", "c"], "it was added again"


async def test_a_peer_that_was_removed_before_the_start_gets_no_lasting_link(tmp_path: Path) -> None:
    async with meshed(tmp_path) as mesh:
        a, _ = await mesh.start("a", {"b": None}, former={"b"})
        assert a.links["b"].is_former
        a.follow({"b": None})
        assert not a.links["b"].is_former


async def test_two_that_have_each_removed_the_other_meet_now_and_then(tmp_path: Path) -> None:
    """Of two runs with one name nobody would ever hear otherwise."""
    times = replace(FAST, farewell_s=0.2, former_s=0.2)
    async with meshed(tmp_path) as mesh:
        b, at_b = await mesh.start("b", {"a": None}, former={"a"}, times=times)
        _, at_a = await mesh.start("a", {"b": address(b)}, former={"b"}, times=times)
        for _ in range(2):
            await at_a.until(lambda: at_a.is_up.get("b"))
            await at_b.until(lambda: at_b.is_up.get("a"))
            await at_a.until(lambda: not at_a.is_up["b"])


async def test_who_is_no_member_takes_few_of_the_turns_to_say_hello(tmp_path: Path) -> None:
    async with meshed(tmp_path) as mesh:
        add_regions(mesh.folder / "run", ["d"])
        b, at_b = await mesh.start("b", {"a": None}, show_run=lambda: RunShown((), (), "b", 0))
        calls = [await connect_as(mesh, mesh.identity("d"), b, Lane.CONTROL) for _ in range(STRANGERS_MAX)]
        await eventually(lambda: b._handshakes == STRANGERS_MAX)
        late = await connect_as(mesh, mesh.identity("d"), b, Lane.CONTROL)
        with pytest.raises(LinkLost, match=f"{STRANGERS_MAX} calls wait for a hello already"):
            await late.read()
        await mesh.start("a", {"b": address(b)})
        await at_b.until(lambda: at_b.is_up.get("a"))
        for call in (*calls, late):
            await call.aclose()


async def test_a_peer_that_was_not_dialed_is_when_its_address_is_known(tmp_path: Path) -> None:
    async with meshed(tmp_path) as mesh:
        b, _ = await mesh.start("b", {"a": None})
        a, at_a = await mesh.start("a", {"b": None})
        a.follow({"b": "127.0.0.1:1"})
        a.follow({"b": address(b)})
        await at_a.until(lambda: at_a.is_up.get("b"))
        assert a.peer_status()["b"].address == address(b)


async def test_a_link_that_stops_waits_for_no_session_that_has_not_begun(tmp_path: Path) -> None:
    """The peer's link is up already at that moment."""
    async with meshed(tmp_path) as mesh:
        b, at_b = await mesh.start("b", {"a": None})
        link, spawn, ends = b.links["a"], b.links["a"]._spawn, []

        def stop_and_spawn(session: Coroutine[Any, Any, Any]) -> None:
            ends.append(asyncio.create_task(link.stop()))
            spawn(session)

        link._spawn = stop_and_spawn  # type: ignore[method-assign]
        await mesh.start("a", {"b": address(b)})
        await eventually(lambda: ends and ends[0].done())
        assert at_b.changes == []
        assert b.peer_status()["a"].state is LinkState.STOPPED
