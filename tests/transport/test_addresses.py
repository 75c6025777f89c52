"""transport/addresses.py: an address that leads nowhere costs a quarter of a second, whichever comes first."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from diloco_node.errors import LinkLost
from diloco_node.transport import addresses
from diloco_node.transport.addresses import ADDRESSES_MAX, first_success, resolve
from diloco_node.transport.streams import dial
from diloco_node.wire.envelope import Lane
from tests.kit.transport_kit import DEADLINE_S, Mesh, address

LINK_S = 10.0
"""A kernel would go on trying a dead address for two minutes, and gRPC for twenty seconds."""


def rows(*ips: str, port: int = 7400) -> list[Any]:
    """As getaddrinfo gives them."""
    return [(0, 0, 0, "", (ip, port, 0, 0) if ":" in ip else (ip, port)) for ip in ips]


def name_leads_to(monkeypatch: pytest.MonkeyPatch, *ips: str) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        if not ips:
            raise socket.gaierror(-2, "Name or service not known")
        return rows(*ips, port=port)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


async def test_families_take_turns_from_the_resolvers_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    name_leads_to(monkeypatch, "2001:db8::1", "2001:db8::2", "192.0.2.1", "192.0.2.1")
    order = [str(endpoint) for endpoint in await resolve("peer.example:7400")]
    assert order == ["[2001:db8::1]:7400", "192.0.2.1:7400", "[2001:db8::2]:7400"]


async def test_a_name_with_many_addresses_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    name_leads_to(monkeypatch, *(f"192.0.2.{number}" for number in range(200)))
    assert len(await resolve("peer.example:7400")) == ADDRESSES_MAX


@pytest.mark.parametrize("text", ["[::1]:7400", "127.0.0.1:7400"])
async def test_an_address_is_itself_and_needs_no_resolver(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name_leads_to(monkeypatch)
    assert [str(endpoint) for endpoint in await resolve(text)] == [text]


async def test_a_name_that_is_unknown_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    name_leads_to(monkeypatch)
    with pytest.raises(LinkLost, match="the name can't be resolved"):
        await resolve("peer.example:7400")


async def test_a_resolver_that_hangs_is_not_taken_for_a_peer_that_does(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def getaddrinfo(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(addresses, "RESOLVE_S", 0.02)
    with pytest.raises(LinkLost, match="this machine's resolver does not answer"):
        await dial(mesh.identity("a"), "b", "peer.example:7400", Lane.CONTROL, timeout_s=0.01)


async def never() -> str:
    await asyncio.Event().wait()
    raise AssertionError


async def refused() -> str:
    raise LinkLost("refused")


async def answers() -> str:
    return "link"


async def discard(result: str) -> None:
    raise AssertionError(result)


def named(*attempts: Callable[[], Awaitable[str]]) -> dict[str, Callable[[], Awaitable[str]]]:
    return {str(number): attempt for number, attempt in enumerate(attempts)}


async def test_one_that_hangs_or_fails_does_not_hold_up_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "ATTEMPT_S", 0.01)
    for attempts in ([never, answers], [refused, never, answers], [answers, never], [never, never, refused, answers]):
        assert await first_success(named(*attempts), discard=discard) == "link"


async def test_all_reasons_are_told() -> None:
    async def expired() -> str:
        raise LinkLost("the certificate has expired")

    with pytest.raises(LinkLost, match=r"^0: refused; 1: the certificate has expired$"):
        await first_success(named(refused, expired), discard=discard)
    with pytest.raises(LinkLost, match=r"^refused$"):
        await first_success(named(refused), discard=discard)


async def test_a_fault_of_ours_is_no_peers_error() -> None:
    async def broken() -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await first_success(named(broken, answers), discard=discard)


async def test_what_a_slower_attempt_brought_is_discarded() -> None:
    at_once, discarded = asyncio.Event(), []

    async def link(name: str) -> str:
        await at_once.wait()
        return name

    async def note(name: str) -> None:
        discarded.append(name)

    async def second() -> str:
        at_once.set()
        return await link("second")

    winner = await first_success(named(lambda: link("first"), second), discard=note)
    assert sorted([winner, *discarded]) == ["first", "second"]


@pytest.mark.parametrize("dead_first", [True, False])
async def test_a_link_comes_up_though_another_address_of_the_name_is_dead(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, *, dead_first: bool
) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    port = int(address(b).rpartition(":")[2])
    with socket.socket() as silent:  # takes connections and says nothing
        silent.bind(("127.0.0.2", port))
        silent.listen()
        ips = ["127.0.0.2", "127.0.0.1"] if dead_first else ["127.0.0.1", "127.0.0.2"]
        name_leads_to(monkeypatch, *ips)
        _, at_a = await mesh.start("a", {"b": f"peer.example:{port}"})
        await at_a.until(lambda: at_a.is_up.get("b"))
        await at_b.until(lambda: at_b.is_up.get("a"))


async def test_a_link_comes_up_in_seconds_though_the_names_ipv6_address_swallows_everything(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    port = int(address(b).rpartition(":")[2])
    with contextlib.ExitStack() as sockets:
        deaf, *callers = (sockets.enter_context(socket.socket(socket.AF_INET6)) for _ in range(5))
        try:
            deaf.bind(("::1", port))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        deaf.listen(0)
        for caller in callers:  # nobody accepts them: the next ones are dropped, as by a firewall
            caller.setblocking(False)
            caller.connect_ex(("::1", port))
        with pytest.raises(TimeoutError):
            socket.create_connection(("::1", port), timeout=0.5)
        name_leads_to(monkeypatch, "::1", "127.0.0.1")
        async with asyncio.timeout(LINK_S):
            _, at_a = await mesh.start("a", {"b": f"peer.example:{port}"})
            await at_a.until(lambda: at_a.is_up.get("b"))
            await at_b.until(lambda: at_b.is_up.get("a"))


async def test_a_name_that_leads_elsewhere_later_is_followed(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    name_leads_to(monkeypatch, "127.0.0.3")  # nobody listens there
    b, _ = await mesh.start("b", {"a": None})
    a, at_a = await mesh.start("a", {"b": f"peer.example:{b.port}"})
    async with asyncio.timeout(DEADLINE_S):
        while not a.peer_status()["b"].error:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    name_leads_to(monkeypatch, "127.0.0.1")
    await at_a.until(lambda: at_a.is_up.get("b"))
    a.meter.sample()
    assert a.meter.tcp("b") is not None, "bytes to the new address are counted as the peer's"
