"""All addresses of a peer's name, tried as RFC 8305 has it: one after the other, each given a moment's start.

A name may have addresses that lead nowhere: IPv6 where a network has none, or a machine that is gone. A single attempt
that gRPC makes over all of them spends the whole deadline on the first such address. Names are resolved for each dial
anew, so a region that has moved is found again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, TypeVar

from diloco_node.config.urls import host_and_port
from diloco_node.errors import LinkLost

ATTEMPT_S: Final = 0.25
"""Start of an attempt before the next address is tried beside it, as RFC 8305 recommends."""

RESOLVE_S: Final = 15.0
"""To resolve a name: glibc gives up a DNS server that does not answer after 10 s, and asks the next one after 5 s."""

ADDRESSES_MAX: Final = 8
"""Most addresses of a name that are tried, those of both families in turn."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An IP address and port of a peer."""

    ip: str
    port: int

    @property
    def target(self) -> str:
        """As gRPC takes it, without resolving anything."""
        return f"ipv6:[{self.ip}]:{self.port}" if ":" in self.ip else f"ipv4:{self.ip}:{self.port}"

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


async def resolve(address: str) -> list[Endpoint]:
    """The endpoints behind `host:port` in the order to try them, one or more. Raises LinkLost: it can't be resolved."""
    try:
        host, port = host_and_port(address)
        with contextlib.suppress(ValueError):  # no IP address: a thread resolves it, and few may hang at once
            return [Endpoint(str(ipaddress.ip_address(host)), port)]
        async with asyncio.timeout(RESOLVE_S):
            rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        silence = f"this machine's resolver does not answer in {RESOLVE_S:.0f} s: look at its DNS servers"
        raise LinkLost(f"the name can't be resolved ({silence})") from None
    except (OSError, ValueError) as error:
        raise LinkLost(f"the name can't be resolved ({error})") from None
    endpoints = list(dict.fromkeys(Endpoint(str(where[0]), int(where[1])) for *_, where in rows))
    is_first_ipv6 = ":" in endpoints[0].ip
    families = [
        [endpoint for endpoint in endpoints if (":" in endpoint.ip) is flag]
        for flag in (is_first_ipv6, not is_first_ipv6)
    ]
    in_turn = [endpoint for pair in zip_longest(*families) for endpoint in pair if endpoint is not None]
    return in_turn[:ADDRESSES_MAX]


async def first_success(
    attempts: Mapping[str, Callable[[], Awaitable[T]]], *, discard: Callable[[T], Awaitable[None]]
) -> T:
    """The result of the attempt that succeeds first. The next one begins after ATTEMPT_S, or when one has failed.

    attempts: by name, the most hopeful first. discard: undoes a slower one. Raises LinkLost: none succeeded, and why.
    """
    waiting, running = list(attempts.items()), dict[asyncio.Future[T], str]()
    reasons: dict[str, str] = {}
    try:
        while waiting or running:
            if waiting:
                name, attempt = waiting.pop(0)
                running[asyncio.ensure_future(attempt())] = name
            limit_s = ATTEMPT_S if waiting else None
            done, _ = await asyncio.wait(running, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is not None and not isinstance(error, LinkLost):
                    raise error
                name = running.pop(task)
                if error is None:
                    return task.result()
                reasons[name] = str(error)
    finally:
        for task in running:
            task.cancel()
        for result in await asyncio.gather(*running, return_exceptions=True):
            if not isinstance(result, BaseException):
                await discard(result)
    raise LinkLost("; ".join(f"{name}: {text}" if len(reasons) > 1 else text for name, text in reasons.items()))
