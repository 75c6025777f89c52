"""Faults of phase one of a simulated run, and how they are healed for phase two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from diloco_node.lab.chaos.fault_plan import draw_gap, draw_one
from diloco_node.lab.sim.checkers import Checkers
from diloco_node.lab.sim.gray_faults import GrayFaults
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.raft_faults import FIGURE_8_DEATHS, RaftFaults
from diloco_node.lab.sim.site_faults import SITES, SiteFaults
from diloco_node.lab.sim.troubles import TROUBLES, Troubles
from diloco_node.lab.sim.world import MS, SECOND, FakeNetwork, Life, World

SLOW_FACTOR = 60
"""A slow disk takes this many times as long."""

SLOW_STEP_FACTOR = 5000
"""A slow outer step takes this many times as long, as if memory were too small."""

LASTS_MEAN_NS = 2 * SECOND
"""How long a fault lasts, on average, where `LASTS_NS` has nothing else."""

LASTS_NS = {
    kind: (low_s * SECOND, high_s * SECOND)
    for low_s, high_s, *kinds in (
        (1, 12, "loop starved"),
        (2, 5, "votes lost"),
        (2, 8, "leader isolated", "minority isolated"),
        (2, 12, "bulk cut one way", "bulk cut", "bulk crawls", "large transfers lost", "corrupt transfers"),
        (2, 12, "donors busy", "receipts wrong"),
        (4, 20, "learner crashes again"),
        (5, 20, "slow outer steps", "bucket away", "bucket slow", "stale reads", "lost writes"),
        (10, 40, "region away"),
    )
    for kind in kinds
}
"""Between these, evenly."""

STALL_NS_MAX = 4 * SECOND
"""A loop that stands still for longer counts as dead for everybody."""

SWARM = "swarm"
"""A schedule of a few kinds of any other one, each as often as the seed draws."""

SWARM_CHANCE = 0.3
"""Part of the kinds that a swarm has."""

SCHEDULES: dict[str, dict[str, int]] = {
    "usual": {
        "daemon killed": 5,
        "leader killed": 3,
        "clean stop": 2,
        "learner killed": 3,
        "learner crashes again": 2,
        "loop starved": 3,
        "power cut": 3,
        "partition": 4,
        "one-way cut": 4,
        "flaky links": 3,
        "slow links": 2,
        "slow disk": 2,
    },
    "elections": {
        "leader dies after its append": 4,
        "figure 8": 3,
        "leader dies after its commit": 4,
        "leader isolated": 3,
        "minority isolated": 3,
        "votes lost": 3,
        "majority restarted": 2,
        "learner killed": 2,
        "loop starved": 3,
        "slow disk": 1,
    },
    "gray": {
        "bulk cut one way": 4,
        "bulk cut": 3,
        "bulk crawls": 2,
        "large transfers lost": 3,
        "corrupt transfers": 3,
        "daemon killed": 2,
        "leader killed": 2,
        "learner killed": 1,
        "loop starved": 1,
        "one-way cut": 1,
    },
    "away": {"region away": 4, "leader killed": 2, "learner killed": 2, "flaky links": 1, "slow disk": 1},
    SITES: {
        "region away": 4,
        "disk lost": 3,
        "leader killed": 2,
        "daemon killed": 2,
        "learner killed": 1,
        "partition": 3,
        "one-way cut": 2,
        "leader dies after its append": 2,
        "leader dies after its commit": 2,
        "flaky links": 1,
        "slow disk": 1,
        "bucket away": 3,
        "bucket slow": 2,
        "stale reads": 2,
        "lost writes": 3,
        "bucket emptied": 1,
    },
    SWARM: {"donors busy": 1, "receipts wrong": 1, "slow outer steps": 1},
}
"""Odds of each fault, by schedule."""

OF_FAST_EFFECTS = frozenset({"donors busy", "slow outer steps"})
"""Kinds that the daemon's own effects know nothing of."""

ODDS = {"usual": 5, "elections": 3, "gray": 2, "away": 1}
"""How often a seed draws each schedule."""


@dataclass(frozen=True, slots=True, eq=False)
class _Trouble:
    """Links of one region (of all if it is empty) that lose, double and delay."""

    region: str
    loss: float
    duplicate: float
    slower: int


class Chaos:
    """Injects faults at random; each ends by itself after some virtual time, or when `heal` is called.

    The gaps between them are counted in events, so that a run with many regions sees as many faults as a small one.

    Attributes:
        schedule: which kinds of faults, by name (`SCHEDULES`). injected: how many of each kind.
        is_over: no further faults; set by `heal`.
    """

    def __init__(
        self,
        world: World,
        network: FakeNetwork,
        hosts: Mapping[str, Host],
        checkers: Checkers,
        *,
        schedule: str,
        mean_gap_events: int,
    ) -> None:
        self.schedule = schedule
        self.injected: Counter[str] = Counter()
        self.is_over = False
        self._world = world
        self._network = network
        self._hosts = hosts
        self._mean_gap_events = mean_gap_events
        # The next fault begins at this number of events; drawn after each fault.
        self._next_at_event = 0
        self._names = sorted(hosts)
        # By number, how each fault that goes on is ended; empty after `heal`.
        self._undo: dict[int, Callable[[], None]] = {}
        # Links as the seed drew them: what they go back to.
        self._usual = {pair: replace(link) for pair, link in network.links.items()}
        # Of links, as long as they go on; of several on a link the worst counts.
        self._troubles: list[_Trouble] = []
        # Of the newest fault; no number is used twice.
        self._number = 0
        self._raft = RaftFaults(world, network, hosts)
        gray = GrayFaults(world, network, checkers, hosts)
        troubles = Troubles.of(world, hosts)
        # Weights, by kind, of the next fault; fixed for the whole run.
        self._odds = SCHEDULES[schedule] | (TROUBLES.get(schedule, {}) if troubles else {})
        if schedule == SWARM:
            of_disks = TROUBLES.values() if troubles else ()
            self._odds = _draw_swarm(world.rng, *(odds for name, odds in SCHEDULES.items() if name != SITES), *of_disks)
            if troubles:
                self._odds = {kind: odds for kind, odds in self._odds.items() if kind not in OF_FAST_EFFECTS}
        # Each kind begins a fault and returns what heals it; None: it found nothing to strike.
        self._kinds: dict[str, Callable[[], Callable[[], None] | None]] = {
            "daemon killed": self._kill_daemon,
            "leader killed": self._kill_leader,
            "clean stop": self._stop_daemon,
            "learner killed": self._kill_learner,
            "learner crashes again": self._crash_learner,
            "loop starved": self._starve,
            "power cut": self._cut_power,
            "partition": self._partition,
            "one-way cut": self._one_way,
            "flaky links": partial(self._change_links, loss=0.25, duplicate=0.3, slower=1),
            "slow links": partial(self._change_links, loss=0.0, duplicate=0.0, slower=8),
            "slow disk": partial(self._slow_down, "disk_factor", SLOW_FACTOR),
            "donors busy": self._refuse_all,
            "slow outer steps": partial(self._slow_down, "step_factor", SLOW_STEP_FACTOR),
            "region away": self._cut_power,
            "leader dies after its append": self._raft.kill_after_append,
            "figure 8": partial(self._raft.kill_after_append, FIGURE_8_DEATHS),
            "leader dies after its commit": self._raft.kill_after_commit,
            "leader isolated": self._raft.isolate_leader,
            "minority isolated": self._raft.isolate_minority,
            "majority restarted": self._raft.restart_majority,
            "votes lost": self._lose_votes,
            "bulk cut one way": gray.cut_one_way,
            "bulk cut": gray.cut_both_ways,
            "bulk crawls": gray.crawl,
            "large transfers lost": gray.lose_large,
            "corrupt transfers": gray.corrupt,
            "receipts wrong": gray.deny_receipts,
            **troubles,
            **SiteFaults(world, checkers, hosts).kinds,
        }
        self._draw_next()

    @property
    def total(self) -> int:
        """Faults injected so far."""
        return sum(self.injected.values())

    def heal(self, excusing: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Undo everything and start what is down; each step runs within `excusing()`, so that the rest follows."""
        self.is_over = self._raft.is_over = True
        for number in sorted(self._undo):
            with excusing():
                self._undo.pop(number)()
        for name in self._names:
            with excusing():
                self._hosts[name].start()
        for usual in self._usual.values():
            usual.loss = 0.0
        self._set_links()

    def poll(self) -> None:
        """Inject a fault if it is time for one."""
        self._raft.poll()
        if not self.is_over and self._world.events >= self._next_at_event:
            self._draw_next()
            self._inject()

    def _draw_next(self) -> None:
        self._next_at_event = self._world.events + 1 + int(draw_gap(self._world.rng, self._mean_gap_events))

    def _inject(self) -> None:
        kind = draw_one(self._world.rng, self._odds)
        undo = self._kinds[kind]()
        if undo is not None:
            self.injected[kind] += 1
            self._world.note("world", f"fault: {kind}", kind.encode())
            self._number += 1
            self._undo[self._number] = undo
            lasts_ns = int(draw_gap(self._world.rng, LASTS_MEAN_NS)) + 50 * MS
            if kind in LASTS_NS:
                lasts_ns = self._world.draw_ns(*LASTS_NS[kind])
            self._world.after(lasts_ns, None, self._end, self._number)

    def _end(self, number: int) -> None:
        undo = self._undo.pop(number, None)
        if undo is not None:
            self._world.note("world", "a fault ends", b"end")
            undo()

    def _pick(self) -> Host:
        return self._hosts[self._world.rng.choice(self._names)]

    def _kill_daemon(self) -> Callable[[], None] | None:
        host = self._pick()
        if host.core is None:
            return None
        host.kill_daemon()
        return host.start_daemon

    def _stop_daemon(self) -> Callable[[], None] | None:
        host = self._pick()
        if host.core is None:
            return None
        host.stop_daemon()

        def start() -> None:
            host.kill_daemon()
            host.start_daemon()

        return start

    def _kill_leader(self) -> Callable[[], None] | None:
        for name in self._names:
            host = self._hosts[name]
            if host.is_leading:
                host.kill_daemon()
                return host.start_daemon
        return None

    def _kill_learner(self) -> Callable[[], None] | None:
        host = self._pick()
        if host.learner is None:
            return None
        host.kill_learner()
        return host.start_learner

    def _crash_learner(self) -> Callable[[], None] | None:
        """A learner that dies again soon after each start, until it ends."""
        host, ends = self._pick(), Life()

        def crash() -> None:
            host.kill_learner()
            self._world.after(self._world.draw_ns(100 * MS, SECOND), ends, start)

        def start() -> None:
            host.start_learner()
            self._world.after(self._world.draw_ns(500 * MS, 4 * SECOND), ends, crash)

        def end() -> None:
            ends.is_over = True
            host.start_learner()

        crash()
        return end

    def _starve(self) -> Callable[[], None] | None:
        """A loop that gets no time again and again: what happens to it, its timers too, is handled late."""
        host, ends = self._pick(), Life()

        def stall() -> None:
            stall_ns = self._world.draw_ns(20 * MS, self._world.rng.choice((200 * MS, STALL_NS_MAX)))
            host.stall(stall_ns)
            self._world.after(stall_ns + self._world.draw_ns(0, 500 * MS), ends, stall)

        stall()
        return partial(setattr, ends, "is_over", True)

    def _cut_power(self) -> Callable[[], None] | None:
        host = self._pick()
        if host.core is None:
            return None
        host.kill_daemon(is_power_cut=True)
        host.kill_learner(is_power_cut=True)
        return host.start

    def _partition(self) -> Callable[[], None] | None:
        """Two groups that do not hear each other; each may be the larger one."""
        names = self._world.rng.sample(self._names, len(self._names))
        split = self._world.rng.randint(1, len(names) - 1) if len(names) > 1 else 0
        pairs = [(a, b) for a in names[:split] for b in names[split:]]
        return self._cut([*pairs, *((b, a) for a, b in pairs)])

    def _one_way(self) -> Callable[[], None] | None:
        """Let some others not hear a region, though it hears them; or the other way round."""
        region = self._pick().name
        peers = [name for name in self._names if name != region]
        if not peers:
            return None
        sources = self._world.rng.sample(peers, self._world.rng.randint(1, len(peers)))
        if self._world.rng.random() < 0.5:
            return self._cut([(region, source) for source in sources])
        return self._cut([(source, region) for source in sources])

    def _cut(self, pairs: list[tuple[str, str]]) -> Callable[[], None] | None:
        return self._network.cut_all(pairs) if pairs else None

    def _lose_votes(self) -> Callable[[], None] | None:
        """The leader dies, and half of what the others say about it is lost."""
        start_daemon = self._kill_leader()
        if start_daemon is None:
            return None
        restore = self._change_links(loss=0.5, duplicate=0.1, slower=1, region="")

        def end() -> None:
            restore()
            start_daemon()

        return end

    def _change_links(
        self, *, loss: float, duplicate: float, slower: int, region: str | None = None
    ) -> Callable[[], None]:
        """All links of one region lose, double and delay, until it ends; of two such faults the worst counts."""
        trouble = _Trouble(self._pick().name if region is None else region, loss, duplicate, slower)
        self._troubles.append(trouble)
        self._set_links()

        def restore() -> None:
            self._troubles.remove(trouble)
            self._set_links()

        return restore

    def _set_links(self) -> None:
        for pair, link in self._network.links.items():
            usual = self._usual[pair]
            here = [trouble for trouble in self._troubles if trouble.region in ("", *pair)]
            slower = max((trouble.slower for trouble in here), default=1)
            link.loss = max([usual.loss, *(trouble.loss for trouble in here)])
            link.duplicate = max([usual.duplicate, *(trouble.duplicate for trouble in here)])
            link.delay_ns = slower * usual.delay_ns
            link.jitter_ns = slower * usual.jitter_ns + (50 * MS if here else 0)

    def _refuse_all(self) -> Callable[[], None]:
        """No region sends what another one has missed."""

        def set_busy(is_busy: bool) -> None:
            for host in self._hosts.values():
                host.fetches.is_busy = is_busy

        set_busy(True)
        return partial(set_busy, False)

    def _slow_down(self, name: str, factor: int) -> Callable[[], None] | None:
        host = self._pick()
        if getattr(host, name) != 1:
            return None
        setattr(host, name, factor)
        return partial(setattr, host, name, 1)


def _draw_swarm(rng: Random, *schedules: Mapping[str, int]) -> dict[str, int]:
    kinds = sorted({kind for odds in schedules for kind in odds})
    return {kind: rng.choice((1, 2, 6)) for kind in kinds if rng.random() < SWARM_CHANCE} or dict.fromkeys(kinds, 1)
