"""Gray failures: a region whose control lives while its bulk transfers fail. Nobody is told that anything is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from diloco_node.core.messages import MergedStripe, Payload
from diloco_node.lab.sim.cheats import CHEATS
from diloco_node.lab.sim.checkers import Checkers
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.world import FakeNetwork, World
from diloco_node.wire.envelope import TransferBegin, decode_bulk

Undo = Callable[[], None]

CRAWL_BYTES_PER_S = 100
"""A link on which nothing of any size arrives in time."""

BLACK_HOLE_BYTES = 300
"""Larger transfers are lost on their way; payloads of the simulator have one to three thousand bytes."""

OTHER_BYTES = ("other bytes than its digest",)
"""Words of a fake about a transfer that was corrupted on its way."""


class GrayFaults:
    """Begins a fault of the bulk lane of one region and returns what ends it."""

    def __init__(self, world: World, network: FakeNetwork, checkers: Checkers, hosts: Mapping[str, Host]) -> None:
        self._world = world
        self._network = network
        self._checkers = checkers
        self._hosts = hosts
        self._names = sorted(hosts)

    def cut_one_way(self) -> Undo | None:
        """Nothing of bulk reaches, or leaves, the region."""
        name, is_source = self._pick(), self._world.rng.random() < 0.5
        return self._cut([pair for pair in self._network.links if pair[0 if is_source else 1] == name])

    def cut_both_ways(self) -> Undo | None:
        """Nothing of bulk reaches or leaves the region."""
        name = self._pick()
        return self._cut([pair for pair in self._network.links if name in pair])

    def crawl(self) -> Undo | None:
        """Bulk from and to the region goes at a few bytes a second."""
        name = self._pick()
        links = [link for pair, link in self._network.links.items() if name in pair]
        usual = [link.rate_bytes_per_s for link in links]
        if any(rate <= CRAWL_BYTES_PER_S for rate in usual):
            return None
        for link in links:
            link.rate_bytes_per_s = CRAWL_BYTES_PER_S

        def restore() -> None:
            for link, rate in zip(links, usual, strict=True):
                # What has begun at the old pace is given up with it.
                link.rate_bytes_per_s, link.free_at_ns = rate, min(link.free_at_ns, self._world.now_ns)

        return restore

    def lose_large(self) -> Undo | None:
        """Large transfers from the region are lost, small ones arrive."""
        name = self._pick()
        links = [link for pair, link in self._network.links.items() if pair[0] == name]
        if any(link.bulk_bytes_max for link in links):
            return None
        for link in links:
            link.bulk_bytes_max = BLACK_HOLE_BYTES

        def restore() -> None:
            for link in links:
                link.bulk_bytes_max = 0

        return restore

    def corrupt(self) -> Undo | None:
        """Merged stripes and payloads of the region arrive with a wrong byte; their digests show it."""
        name = self._pick()
        if name in self._network.bulk_spoilers:
            return None
        self._checkers.tolerated.update(OTHER_BYTES)
        self._network.bulk_spoilers[name] = self._corrupt
        return partial(self._network.bulk_spoilers.__delitem__, name)

    def deny_receipts(self) -> Undo | None:
        """Memory of the region is bad: each merged stripe has other bytes there, it says. Two could be a majority."""
        name = self._pick()
        if self._network.frame_spoilers:
            return None
        CHEATS["receipts"].begin(self._hosts[name])
        return partial(self._network.frame_spoilers.__delitem__, name)

    def _corrupt(self, _: str, header: bytes, body: bytes) -> tuple[bytes, bytes]:
        begin = decode_bulk(header)
        if not body or not isinstance(begin, TransferBegin) or not isinstance(begin.header, MergedStripe | Payload):
            return header, body
        at = self._world.rng.randrange(len(body))
        return header, body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1 :]

    def _pick(self) -> str:
        return self._world.rng.choice(self._names)

    def _cut(self, pairs: list[tuple[str, str]]) -> Undo | None:
        links = [self._network.links[pair] for pair in pairs]
        for link in links:
            link.bulk_cuts += 1

        def mend() -> None:
            for link in links:
                link.bulk_cuts -= 1

        return mend if links else None
