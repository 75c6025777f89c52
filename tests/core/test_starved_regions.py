"""Few processors for many regions, and budgets that fall: rounds are slow there, and never stop."""

from __future__ import annotations

from collections import deque

import pytest

from diloco_node.core.events import BudgetChanged, Event, TimerFired
from diloco_node.core.types import RateLimits
from diloco_node.lab.sim import setup
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.world import MS, SECOND
from tests.kit.small_world import SEED, Small

pytestmark = pytest.mark.world

SLICE_EVENTS = 8
"""Events that a loop handles before another one has its turn."""


class Processors:
    """They are shared by the loops of all regions, which wait for them in a queue.

    Args:
        event_ns: what one event costs in the mean.
    """

    def __init__(self, count: int, event_ns: int) -> None:
        self.idle, self.event_ns = count, event_ns
        self.queue: deque[SharedHost] = deque()

    def want(self, host: SharedHost) -> None:
        if host not in self.queue and not host.is_running:
            self.queue.append(host)
            self.run()

    def run(self) -> None:
        while self.idle and self.queue:
            host = self.queue.popleft()
            count = min(len(host._events), SLICE_EVENTS)
            took_ns = int(sum(host.world.rng.expovariate(1 / self.event_ns) for _ in range(count)))
            self.idle, host.is_running = self.idle - 1, True
            host.world.after(took_ns, None, self.done, host, count)

    def done(self, host: SharedHost, count: int) -> None:
        self.idle, host.is_running = self.idle + 1, False
        for _ in range(count):
            host._give(host._events.popleft())
        host._arm()
        if host._events:
            self.want(host)
        self.run()


class SharedHost(Host):
    """A region whose loop waits for a processor."""

    processors: Processors
    is_running = False

    def post(self, event: Event) -> None:
        if self._life is None or (isinstance(event, TimerFired) and event in self._events):
            return
        self._events.append(event)
        self.processors.want(self)


@pytest.mark.seeds
@pytest.mark.parametrize(("regions", "event_ms"), [(12, 4), (16, 4)])
def test_regions_that_share_two_slow_processors_merge_and_seldom_elect(
    monkeypatch: pytest.MonkeyPatch, regions: int, event_ms: int
) -> None:
    monkeypatch.setattr(setup, "NAMES", tuple(f"region-{number:02d}" for number in range(regions)))
    monkeypatch.setattr(SharedHost, "processors", Processors(2, event_ms * MS), raising=False)
    small = Small(monkeypatch, regions, host_type=SharedHost, sync_every=16)

    def term() -> int:
        return max(host.core.ledger.term for host in small.hosts.values())

    small.go(30)
    term_before, commits_before = term(), small.sim.checkers.commits
    small.go(60)
    # Where the followers send each heartbeat to a leader that reads none, this was one round, and terms that end early.
    assert small.sim.checkers.commits - commits_before >= 3, f"seed {SEED}"
    assert term() - term_before <= 3, f"seed {SEED}"


def test_rounds_go_on_after_all_budgets_fell_far_below_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ballots were given up, eight times longer at most than before, while their stripes were still on the way."""
    small = Small(monkeypatch, 3, ballot_deadline_min_ns=SECOND)
    small.go(10)
    commits_before, lowered = small.sim.checkers.commits, 60
    assert commits_before > 20
    for link in small.sim.network.links.values():
        link.rate_bytes_per_s = lowered
    for host in small.hosts.values():
        host.post(BudgetChanged(RateLimits(lowered, lowered)))
    small.go(160)
    # Two rounds that began at the old rate, and some at the new one, of 40 s each.
    assert small.sim.checkers.commits - commits_before >= 4, f"seed {SEED}"
