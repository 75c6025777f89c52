"""Schedules biased towards the classic faults of Raft: what only the worst moment shows.

Each begins at a moment that a uniform schedule seldom hits: right after a leader has appended, right after it has
counted a commit that nobody else knows of, while votes are asked for. See figure 8 of the paper (Ongaro and Ousterhout,
2014) for a leader that dies again and again with a tail that few have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from diloco_node.lab.sim import core_parts as view
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.world import MS, SECOND, FakeNetwork, World

Undo = Callable[[], None]

TRAP_NS = 10 * SECOND
"""A moment that does not come within this time is not waited for any longer."""

FIGURE_8_DEATHS = 4
"""Leaders that die one after the other, each right after it has appended."""


class RaftFaults:
    """Begins one fault at a time; `poll` is called before every step of the world.

    Attributes:
        is_over: nothing new is begun; what is down stays for the caller to start.
    """

    def __init__(self, world: World, network: FakeNetwork, hosts: Mapping[str, Host]) -> None:
        self.is_over = False
        self._world = world
        self._network = network
        self._hosts = hosts
        self._names = sorted(hosts)
        self._trap: Callable[[], bool] | None = None
        self._trap_until_ns = 0

    def poll(self) -> None:
        """Spring the trap if its moment has come."""
        if self._trap is None or self.is_over:
            return
        if self._world.now_ns > self._trap_until_ns or self._trap():
            self._trap = None

    def kill_after_append(self, deaths: int = 1) -> Undo | None:
        """Kill a leader while its last entry is on few disks; it comes back soon. `deaths` of them in a row."""

        def is_sprung() -> bool:
            leader = view.newest_leader(self._hosts.values())
            if leader is None or leader.core.ledger.last_index <= leader.core.ledger.cluster_commit_index:
                return False
            self._kill(leader)
            self._trap = None
            if deaths > 1:
                self.kill_after_append(deaths - 1)
            return self._trap is None

        return self._set_trap(is_sprung)

    def kill_after_commit(self) -> Undo | None:
        """Kill a leader that alone knows of a commit."""

        def is_sprung() -> bool:
            leader = view.newest_leader(self._hosts.values())
            if leader is None:
                return False
            peers = [host.core for name, host in self._hosts.items() if name != leader.name and host.core is not None]
            index = leader.core.ledger.cluster_commit_index
            if not peers or index <= max(core.ledger.cluster_commit_index for core in peers):
                return False
            self._kill(leader)
            return True

        return self._set_trap(is_sprung)

    def _set_trap(self, is_sprung: Callable[[], bool]) -> Undo | None:
        if self._trap is not None:
            return None
        self._trap, self._trap_until_ns = is_sprung, self._world.now_ns + TRAP_NS
        return lambda: None  # it ends by itself

    def isolate_leader(self) -> Undo | None:
        """A leader that nobody hears and that hears nobody comes back later, with whatever it has appended."""
        leader = view.newest_leader(self._hosts.values())
        return None if leader is None else self._isolate([leader.name])

    def isolate_minority(self) -> Undo | None:
        """The same with as many followers as do not make a majority."""
        leader = view.newest_leader(self._hosts.values())
        if leader is None:
            return None
        peers = [name for name in self._names if name != leader.name]
        friends = self._world.rng.sample(peers, max(0, (len(self._names) - 1) // 2 - 1))
        return self._isolate([leader.name, *friends])

    def restart_majority(self) -> Undo | None:
        """Restart a majority, one right after the other."""
        names = self._world.rng.sample(self._names, len(self._names) // 2 + 1)
        at_ns = 0
        for name in names:
            self._world.after(at_ns, None, self._bounce, self._hosts[name])
            at_ns += self._world.draw_ns(100 * MS, 600 * MS)
        return lambda: None  # it ends by itself

    def _bounce(self, host: Host) -> None:
        if host.core is not None and not self.is_over:
            self._kill(host)

    def _kill(self, host: Host) -> None:
        self._world.note("world", f"fault: {host.name} dies at the worst moment", b"raft fault")
        host.kill_daemon(is_power_cut=self._world.rng.random() < 0.3)
        self._world.after(self._world.draw_ns(50 * MS, 2 * SECOND), None, host.start_daemon)

    def _isolate(self, names: list[str]) -> Undo | None:
        peers = [name for name in self._names if name not in names]
        pairs = [(source, target) for source in names for target in peers]
        pairs += [(target, source) for source, target in pairs]
        return self._network.cut_all(pairs) if pairs else None
