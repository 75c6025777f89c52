"""The links of a transport, as its peers come and go.

A peer that was removed from the run keeps its link: it is let in to be told so, and its budget and counters may still
be asked for by what was under way. It is shown no more. When it is added again, the link goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Final

from diloco_node.errors import LinkLost, PeerError
from diloco_node.ticks import to_tick_s
from diloco_node.transport.addresses import resolve
from diloco_node.transport.link import PeerLink
from diloco_node.transport.peer_session import LinkEnvironment
from diloco_node.transport.quarantine import Quarantine

CERTIFICATES_POLL_S: Final = 1.0
"""Between two looks at whether a link's certificate has ended: by the wall clock, which may be set."""

Spawn = Callable[[Coroutine[Any, Any, object], str], None]


class PeerLinks:
    """All methods are called on the event loop. quarantine: counts strikes. seed: of the jitter between dials.

    Attributes:
        addresses: where each peer listens, None where that is not known; former peers too.
        links: by peer, from `start` on. former: peers that were removed from the run.
    """

    def __init__(
        self, addresses: Mapping[str, str | None], env: LinkEnvironment, quarantine: Quarantine, *, seed: int
    ) -> None:
        self.addresses = dict(sorted(addresses.items()))
        self.links: dict[str, PeerLink] = {}
        self.former: frozenset[str] = frozenset()
        self._env = env
        self._quarantine = quarantine
        self._seed = seed
        self._spawn: Spawn | None = None
        self._messages_per_s = env.messages_per_s

    def start(self, spawn: Spawn) -> None:
        """Begin to dial."""
        self._spawn = spawn
        for peer, address in self.addresses.items():
            self._begin(peer, address, spawn)
        spawn(self._watch_certificates(), "certificates")

    def follow(
        self, addresses: Mapping[str, str | None], former: Collection[str], *, messages_per_s: int | None = None
    ) -> None:
        """Have links with these peers from now on; with the former ones, which have addresses, too, until they had time
        to hear so. messages_per_s: None: as before."""
        for peer, address in sorted(addresses.items()):
            is_new = peer not in self.addresses
            moved_from, self.addresses[peer] = self.addresses.get(peer), address
            if is_new:
                self._env.pacer.add_peer(peer)
                self._quarantine.add_peer(peer)
            if self._spawn is not None and (is_new or moved_from != address):
                self._begin(peer, address, self._spawn)
        self.former = frozenset(former) | (self.addresses.keys() - addresses.keys())
        self._messages_per_s = messages_per_s or self._messages_per_s
        for peer, link in self.links.items():
            link.is_former = peer in self.former
            link.intake.allow(self._messages_per_s, now_ns=time.monotonic_ns())

    def _begin(self, peer: str, address: str | None, spawn: Spawn) -> None:
        """Dial a new peer, or an old one at another address; a link that is up there goes on."""
        link = self.links.get(peer)
        had_address = link is not None and link.address is not None
        if link is None:
            link = self.links[peer] = PeerLink(peer, address, self._env, seed=self._seed * 1000 + len(self.links))
        link.address, link.is_former = address, peer in self.former
        if address is not None:
            spawn(self._assign(peer, address), f"address of {peer}")
        if address is not None and not had_address:
            spawn(link.run_dialer(), f"dialer {peer}")

    async def _assign(self, peer: str, address: str) -> None:
        with contextlib.suppress(LinkLost):  # what can't be resolved can't be dialed, which says so
            for endpoint in await resolve(address):
                self._env.meter.assign(peer, (endpoint.ip, endpoint.port))

    async def renew(self) -> dict[str, PeerError]:
        """Make each link again with the newest identity, one after the other. Returns by peer why that failed: such a
        link goes on until its certificate is not good any more."""
        failures: dict[str, PeerError] = {}
        for link in self.links.values():
            link.check_certificates(is_renewed=True)
        for peer, link in list(self.links.items()):
            if (error := await link.remake()) is not None:
                failures[peer] = error
        return failures

    async def _watch_certificates(self) -> None:
        while True:
            await asyncio.sleep(to_tick_s(CERTIFICATES_POLL_S))
            for peer, link in self.links.items():
                link.check_certificates()
                if link.is_outdated and self._spawn is not None:  # a dial may hang: the other links are looked at
                    self._spawn(link.remake(), f"remake {peer}")

    async def stop(self) -> None:
        """Close all links. Their dialers were cancelled."""
        self._spawn = None
        for link in list(self.links.values()):
            await link.stop()
