"""Faults of two sites and a bucket: a site that is lost with its disk, and what a bucket does wrong.

Each keeps to what is promised: of the two disks and the bucket, one is lost at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from diloco_node.core.member_kind import MemberKind, MembershipBody
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.lab.sim.checkers import Checkers
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.planting import signed
from diloco_node.lab.sim.witness_bucket import WITNESS, FakeBucket
from diloco_node.lab.sim.world import SECOND, World

Undo = Callable[[], None]

SITES = "sites"
"""The schedule of two regions and a witness."""

SLOW_FACTOR = 12
STALE_CHANCE = 0.5
LOST_CHANCE = 0.4


def add_witness(world: World, hosts: Mapping[str, Host], checkers: Checkers) -> None:
    """Make the bucket, and give the operator's order that adds the witness each second until it is in the ledger."""
    checkers.bucket = FakeBucket(world, checkers.violate)
    for host in hosts.values():
        host.bucket = checkers.bucket

    def order() -> None:
        if any(isinstance(entry.body, MembershipBody) for entry in checkers.history):
            return
        world.after(SECOND, None, order)
        host = next((host for host in hosts.values() if host.core and host.core.ledger.is_settled), None)
        if host is not None:
            body = MembershipBody(WITNESS, MemberKind.WITNESS.value, "s3://sites/run")
            body = signed(host.core.ledger.disks.roster, body)
            host.post(EntryOrdered(body, is_cut_off=False))

    world.after(SECOND, None, order)


class SiteFaults:
    """Begins a fault and returns what ends it; None: it could not begin."""

    def __init__(self, world: World, checkers: Checkers, hosts: Mapping[str, Host]) -> None:
        self._world, self._checkers = world, checkers
        self._hosts = {name: hosts[name] for name in sorted(hosts)}
        bucket = checkers.bucket
        self.kinds: dict[str, Callable[[], Undo | None]] = {}
        if bucket is not None:
            self.kinds = {
                "bucket away": partial(self._set, "is_away", True),
                "bucket slow": partial(self._set, "slower", SLOW_FACTOR),
                "stale reads": partial(self._set, "stale_chance", STALE_CHANCE),
                "lost writes": partial(self._set, "lost_chance", LOST_CHANCE),
                "bucket emptied": self.empty,
                "disk lost": self.lose_disk,
            }

    def _set(self, field: str, value: object) -> Undo | None:
        bucket = self._checkers.bucket
        usual = getattr(bucket, field)
        if usual == value:
            return None
        setattr(bucket, field, value)
        return partial(setattr, bucket, field, usual)

    def empty(self) -> Undo | None:
        """All objects are gone, if both disks hold what is committed."""
        bucket = self._checkers.bucket
        if bucket is None or bucket.record is None or not all(map(self._is_whole, self._hosts.values())):
            return None
        bucket.empty()
        return lambda: None

    def lose_disk(self) -> Undo | None:
        """Lose a folder, if what is committed is on the other disk, or there with what is in the bucket."""
        host = self._hosts[self._world.rng.choice(list(self._hosts))]
        hosts = [peer for peer in self._hosts.values() if peer is not host]
        if not all(self._is_whole(peer) or self._is_whole_with_bucket(peer) for peer in hosts):
            return None
        host.lose_disk()
        return host.start

    def _is_whole(self, host: Host) -> bool:
        """Whether its disk holds everything that is committed, its folder counts, and so does the bucket."""
        history = self._checkers.history
        return bool(history) and self._counts(host) and self._checkers.keeps(host.disk, history[-1])

    def _is_whole_with_bucket(self, host: Host) -> bool:
        bucket, history = self._checkers.bucket, self._checkers.history
        record = bucket.record if bucket is not None else None
        if record is None or not self._counts(host) or not 0 < record.base.index <= len(history):
            return False
        first, last = history[record.base.index - 1], history[-1]
        return record.hash_at(last.index) == last.hash and self._checkers.keeps(host.disk, first)

    def _counts(self, host: Host) -> bool:
        """By the newest log there is, in which no change is open."""
        cores = [peer.core for peer in self._hosts.values() if peer.core is not None]
        if not cores or len(self._checkers.history) == 0:
            return False
        ledger = max((core.ledger for core in cores), key=lambda ledger: ledger.last_index)
        disks, record = ledger.disks, self._checkers.bucket.record if self._checkers.bucket is not None else None
        return (
            disks.last_change_index <= len(self._checkers.history)
            and disks.counts(host.name, host.disk.id)
            and record is not None
            and disks.counts(WITNESS, record.disk)
        )
