"""Regions that come, go and come back while a simulated run is under faults, as its operator orders it.

Orders go to the region that leads, as far as the operator can see, signed by the run's authority. The leader refuses
what can't be; a leader that is cut off takes orders that are never committed. A region that joins is started, or never
comes. A removed one is ended once it knows. Once in a run the majority may be lost for good: one region goes on alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from diloco_node.core.ledger.election import TERMS_AHEAD
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.types import DISK_ID_BYTES, RevokedBody
from diloco_node.daemon.lone_region import last_roster, removals
from diloco_node.lab.chaos.fault_plan import draw_one
from diloco_node.lab.sim.checkers import Checkers
from diloco_node.lab.sim.host import RUN_ID, Host
from diloco_node.lab.sim.planting import signature_of, signed
from diloco_node.lab.sim.setup import rate_to_follow
from diloco_node.lab.sim.world import MS, SECOND, World

LOOK_NS: Final = 250 * MS
"""So often the operator looks."""

PAUSES_NS: Final = (0, SECOND, 2 * SECOND, 4 * SECOND)
"""Between two orders; where there is none, the first is not committed yet."""

VOTERS_MIN: Final = 2
"""No voter is removed where no more are left."""

NEVER_COMES: Final = 0.15
"""Part of the regions that are added and never started."""

ODDS: Final = {
    "region added": 6,
    "vote given": 6,
    "region removed": 3,
    "vote taken": 1,
    "certificate revoked": 1,
    "one goes on alone": 1,
    "removed one returns": 1,
}


class MemberChanges:
    """The operator of one run.

    Args:
        honest: regions of which everything is demanded: kept to the members that are there and no liars.

    Attributes:
        ordered: how often, by kind. is_over: no further orders.
    """

    def __init__(self, world: World, hosts: Mapping[str, Host], honest: dict[str, Host], checkers: Checkers) -> None:
        self.ordered: Counter[str] = Counter()
        self.is_over = False
        self._world, self._hosts, self._honest, self._checkers = world, hosts, honest, checkers
        # The next order is given then.
        self._next_ns = 0
        # Regions whose list of the members is from before another one went on alone: no two of them may meet.
        self._lost: set[str] = set()
        self._has_gone_alone = False
        # Each returns whether it found something to do.
        self._kinds: dict[str, Callable[[], bool]] = {
            "region added": self._add,
            "vote given": lambda: self._change(self._members("contributor"), "voter"),
            "region removed": self._remove,
            "vote taken": lambda: self._change(self._spare_voters(), "contributor"),
            "certificate revoked": self._revoke,
            "one goes on alone": self._go_alone,
            "removed one returns": self._return,
        }
        world.after(LOOK_NS, None, self._look)

    def _look(self) -> None:
        self._world.after(LOOK_NS, None, self._look)
        for name, host in self._hosts.items():
            is_member = name in self._checkers.members.kinds
            if host.core is not None and host.core.farewell.reason:
                self._world.note(name, "leaves the run", b"leaves")
                host.leave()
                if is_member:  # added again before it had read so
                    self._world.after(SECOND, None, self._start, name)
            if is_member and not host.is_absent and name not in self._checkers.liars:
                self._honest[name] = host
            else:
                self._honest.pop(name, None)
        while not self.is_over and self._world.now_ns >= self._next_ns and self._checkers.oracle.has_begun:
            kind = draw_one(self._world.rng, ODDS)
            if self._kinds[kind]():
                self.ordered[kind] += 1
                self._world.note("world", f"order: {kind}", kind.encode())
            self._next_ns = self._world.now_ns + self._world.rng.choice(PAUSES_NS)

    def _leader(self) -> Host | None:
        """The region that leads, as far as it knows itself; of several any."""
        leaders = [host for host in self._hosts.values() if host.is_leading]
        return self._world.rng.choice(leaders) if leaders else None

    def _members(self, kind: str) -> list[str]:
        return sorted(name for name, own_kind in self._checkers.members.kinds.items() if own_kind == kind)

    def _spare_voters(self) -> list[str]:
        voters = self._members("voter")
        return voters if len(voters) > VOTERS_MIN else []

    def _order(self, body: MembershipBody | RevokedBody) -> bool:
        leader = self._leader()
        if leader is None:
            return False
        if isinstance(body, MembershipBody):
            body = signed(leader.core.ledger.disks.roster, body)
        leader.post(EntryOrdered(body, is_cut_off=False, is_forced=self._world.rng.random() < 0.5))
        return True

    def _change(self, names: list[str], kind: str) -> bool:
        return bool(names) and self._order(MembershipBody(self._world.rng.choice(names), kind))

    def _remove(self) -> bool:
        return self._change(self._members("contributor") + self._spare_voters(), "former")

    def _revoke(self) -> bool:
        return self._order(RevokedBody(self._world.rng.choice(sorted(self._hosts)), self._world.rng.randbytes(32)))

    def _add(self) -> bool:
        kinds = self._checkers.members.kinds
        names = [name for name, host in sorted(self._hosts.items()) if name not in kinds and host.core is None]
        if not names:
            return False
        name = self._world.rng.choice(names)
        if name in self._lost:
            self._lost.remove(name)
            self._empty(self._hosts[name])
        if not self._order(MembershipBody(name, "contributor")):
            return False
        if self._world.rng.random() >= NEVER_COMES:
            self._world.after(self._world.draw_ns(0, 3 * SECOND), None, self._start, name)
        return True

    def _start(self, name: str) -> None:
        if name not in self._lost:
            self._hosts[name].is_absent = False
            self._hosts[name].start()

    def _empty(self, host: Host) -> None:
        """Begin with an empty folder; what its learners trained is still known."""
        disk, disk_id = host.disk, self._world.rng.randbytes(DISK_ID_BYTES)
        host.disk = type(disk)(id=disk_id, lost=disk, counters=dict(disk.counters))
        host.has_final = False

    def _return(self) -> bool:
        """A region that was removed while it was away starts with the folder that it had."""
        former = sorted(self._checkers.members.former)
        is_another_there = any(self._hosts[name].core is not None for name in self._lost)
        names = [
            name for name in former if self._hosts[name].is_absent and not (name in self._lost and is_another_there)
        ]
        if not names:
            return False
        host = self._hosts[self._world.rng.choice(names)]
        host.is_absent = False
        host.start()
        return True

    def _go_alone(self) -> bool:
        """All but one region are lost for good: it removes them by what the authority signs."""
        host = self._hosts[self._world.rng.choice(self._members("voter"))]
        members = self._checkers.members.kinds
        is_named = host.core is not None and host.core.ledger.is_own_disk_sound
        if self._has_gone_alone or len(members) < 2 or not is_named or self._checkers.is_end_due:
            return False
        host.kill_daemon()
        if not self._checkers.is_whole(host.disk):
            host.start_daemon()
            return False
        recovery = host.disk.recovered(len(host.setup.layouts))
        roster = last_roster(recovery)
        if roster.disks.get(host.name) != host.disk.id or host.name not in roster.voters:
            host.start_daemon()
            return False
        entries = removals(recovery, host.name, lambda roster: signature_of(roster.statement(RUN_ID)))
        for name, other in self._hosts.items():
            if other is not host:
                self._lost |= {name} if other.disk.entries or other.disk.base.index else set()
                other.leave(is_power_cut=True)
        self._has_gone_alone = True
        for link in host.network.links.values():
            link.rate_bytes_per_s = max(link.rate_bytes_per_s, rate_to_follow(host.setup))
        disk = host.disk
        disk.term, disk.voted_for = recovery.term + TERMS_AHEAD, host.name
        disk.votes[disk.term] = disk.voted_for
        disk.entries.extend(entries)
        self._world.after(self._world.draw_ns(0, 2 * SECOND), None, host.start_daemon)
        return True
