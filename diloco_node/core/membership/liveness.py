"""Liveness from heartbeats: who is alive, who hears whom, how far away everybody is, what the learners report."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from diloco_node.core.cadence import CEILING, Cadence
from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.membership.absence import Absence
from diloco_node.core.messages import Heartbeat
from diloco_node.core.types import NO_LIMITS, FolderLife, FragmentDigest, LearnerStatus, RateLimits

SILENT_HEARTBEATS: Final = 5
"""A region from which nothing came for this many heartbeats counts as gone."""

OTHERS_AT_ONCE: Final = 4
"""For each so many others, heartbeats to all are one in one more: else their number would grow with the square of the
regions."""

SPREAD_MAX: Final = 5
"""All of many regions get one heartbeat in so many."""

STRIDE_MIN: Final = 2
"""All of few regions get one heartbeat in two. The leader gets those between where they tell more than its learner's
steps: the ledger's messages, which go between it and each region as often, say who lives."""

UNREAD_MAX: Final = 16
"""A region that has more heartbeats to read is behind, and gets only those that go to all: so the leader of many
regions on a starved machine catches up. Twelve are usual at most: a region reads and answers one in five."""

SILENT_STRIDES: Final = 3
"""Heartbeats to all, where there are many regions: none is gone before two of them in a row were lost."""

SENT_KEPT: Final = 256
"""Sequence numbers whose time of sending is remembered, for the round-trip time."""

OLD_SEQUENCES_MAX: Final = 3
"""So many heartbeats with old numbers in a row are not stragglers: the peer's process is a new one."""

RTT_NS_MAX: Final = 2_000_000_000
"""No way is longer; a peer that answers an old heartbeat, or lies about its delay, would make ballots wait for it."""

_RTT_SHIFT: Final = 3


@dataclass(slots=True)
class _Peer:
    """Knowledge of one region.

    Attributes:
        cadence: of its heartbeats; nothing was heard since the link was down.
        sequence: the highest received. echo: of ours, the highest that it had received then.
        linked_at: of ours, the last one when its link last changed: those before are none that it leaves unread.
        old_in_a_row: heartbeats since with lower numbers.
        rtt_ns: moving average; 0 while unknown.
        stepped_at_ns: when the learner's step was first seen; None without a learner.
        news: in the last heartbeat to it; see `Liveness._news`.
    """

    cadence: Cadence
    sequence: int = 0
    echo: int = 0
    linked_at: int = 0
    sequence_at_ns: int = 0
    old_in_a_row: int = 0
    rtt_ns: int = 0
    hears: tuple[str, ...] = ()
    learner: LearnerStatus | None = None
    stepped_at_ns: int | None = None
    applied_index: int = 0
    budget: RateLimits = NO_LIMITS
    is_leaving: bool = False
    news: tuple[object, ...] = ()


class Liveness:
    """Sends heartbeats and reads those of the others.

    A region is alive while its heartbeats, or its messages of the ledger, arrive. Two regions reach each other when
    each hears the other. The own learner's status is here too, so that there is one place for all of them.

    Attributes:
        spread: by how many the others are more than OTHERS_AT_ONCE, as a factor. stride: every so many heartbeats go to
        all regions, the others to the leader.
        is_leaving: this region is about to stop.
        folder: this region's, as the next heartbeat tells it.
        absence: since when each of the others is away.
        patience: factor on how long the others may be silent: terms came to nothing (`LedgerState.patience`).
    """

    def __init__(self, *, region: str, regions: tuple[str, ...], heartbeat_ns: int, effects: EffectBuffer) -> None:
        self._region = region
        self.is_leaving = False
        self.folder: FolderLife | None = None
        self.absence = Absence(region)
        self.patience = 1
        self.spread, self.stride = 1, STRIDE_MIN
        # Regular heartbeats since the last one to all, below `stride`; the first one goes to all.
        self._turn = -1
        # The median of how long the others may be silent, from the last heartbeat on.
        self._usual_limit_ns = 0
        # Between two regular heartbeats, where this process is in time.
        self._heartbeat_ns = heartbeat_ns
        # The floor of how long a region may be silent; it grows with `spread`.
        self.silent_ns = SILENT_HEARTBEATS * heartbeat_ns
        # Of this region only learner and budget are of use, as the next heartbeat reports them.
        self._own = _Peer(Cadence(self.silent_ns))
        # All regions, this one too, sorted; the others among them.
        self._regions: tuple[str, ...] = ()
        self._peers: dict[str, _Peer] = {}
        self.follow(regions)
        # How late this region's own heartbeats were; nothing is heard with it.
        self._lag = Cadence(self.silent_ns)
        # Heartbeats leave through it.
        self._effects = effects
        # Number of the last heartbeat.
        self.sequence = 0
        # By number: when a heartbeat left.
        self._sent_at_ns: dict[int, int] = {}

    def follow(self, regions: Iterable[str]) -> None:
        """These are the regions from now on: forget who has gone, and wait for who has come."""
        self._regions = tuple(sorted({*regions, self._region}))
        self.spread = min(SPREAD_MAX, -(-(len(self._regions) - 1) // OTHERS_AT_ONCE) or 1)
        self.stride = max(STRIDE_MIN, self.spread)
        silent_ns = max(SILENT_HEARTBEATS, SILENT_STRIDES * self.spread) * self._heartbeat_ns
        peers = {name: self._peer(name) for name in self._regions if name != self._region}
        for peer in peers.values() if silent_ns != self.silent_ns else ():
            # Heartbeats are rarer or more frequent now: what was learnt of their gaps is of no use.
            heard_at_ns, peer.cadence = peer.cadence.heard_at_ns, Cadence(silent_ns)
            peer.cadence.heard_at_ns = heard_at_ns
        self._peers, self.silent_ns = peers, silent_ns

    def _peer(self, region: str) -> _Peer:
        """Knowledge of a region; of one that is no member, there is none."""
        return self._own if region == self._region else self._peers.get(region) or _Peer(Cadence(self.silent_ns))

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """A lost link is silence at once; a new one may lead to a new process, which counts from one again."""
        state = self._peers.get(peer)
        if state is None:
            return
        state.sequence, state.linked_at = 0, self.sequence
        if not is_up:
            state.cadence.heard_at_ns = None

    def excuse(self, late_ns: int, *, now_ns: int) -> None:
        """This process stood still for so long: heartbeats of the others wait to be read."""
        for peer in self._peers.values():
            peer.cadence.excuse(late_ns, now_ns)

    def pause_ns(self, late_ns: int) -> int:
        """Choose the time to the next regular heartbeat, by how late this one is: a process that is late says less."""
        self._lag.observe(late_ns)
        return self._heartbeat_ns + min(late_ns, self._heartbeat_ns)

    @property
    def late_ns(self) -> int:
        """How late heartbeats were of late, at worst: this process waited for a processor, or was suspended."""
        return self._lag.longest_ns

    def hear(self, peer: str, *, now_ns: int) -> None:
        """A message of the ledger came: a region whose heartbeats arrive on this link lives on by it."""
        state = self._peers.get(peer)
        if state is not None and state.cadence.heard_at_ns is not None:
            state.cadence.hear(now_ns)

    def heartbeat_arrived(self, peer: str, beat: Heartbeat, *, now_ns: int) -> bool:
        """Read a heartbeat. Returns whether it is news (not an overtaken one)."""
        state = self._peers.get(peer)
        if state is None:
            return False
        state.cadence.hear(now_ns)
        if beat.sequence <= state.sequence:
            state.old_in_a_row += 1
            if state.old_in_a_row < OLD_SEQUENCES_MAX:
                return False
        state.old_in_a_row = 0
        # A number that was not sent yet is one of this daemon's life before.
        echo = beat.echo if beat.echo <= self.sequence else 0
        state.sequence, state.echo, state.sequence_at_ns = beat.sequence, echo, now_ns
        state.hears = tuple(name for name in self._regions if name in beat.hears)
        state.applied_index, state.budget = beat.applied_index, beat.budget
        state.is_leaving = beat.leaving or (beat.learner is not None and beat.learner.leaving)
        self._measure_rtt(state, beat, now_ns)
        _set_learner(state, beat.learner, now_ns)
        return True

    def own_learner(self, status: LearnerStatus | None, *, now_ns: int) -> None:
        """This region's learner reported, came or went."""
        _set_learner(self._own, status, now_ns)

    def own_budget(self, limits: RateLimits) -> None:
        """Set the limits of this region's traffic from now on; the next heartbeat reports them."""
        self._own.budget = limits

    def next_receiver(self, leader: str, applied_index: int, *, is_last: bool, now_ns: int) -> str | None:
        """Take turns: choose who gets the next regular heartbeat; None is everybody, "" is nobody.

        is_last: this region is about to go, and all should know how far it came.
        """
        self._turn = (self._turn + 1) % self.stride
        if not self._turn or is_last:
            return None
        return leader if self._peer(leader).news != self._news(applied_index, self.alive(now_ns=now_ns)) else ""

    def _news(self, applied_index: int, hears: tuple[str, ...]) -> tuple[object, ...]:
        """Return what the leader should know with the next heartbeat: all but echoes, digests, steps, folder."""
        own = self._own.learner
        learner = None if own is None else (own.incarnation, own.positions, own.finished, own.leaving)
        return (hears, learner, applied_index, self._own.budget, self.is_leaving)

    def beat(
        self, *, applied_index: int, digests: tuple[FragmentDigest, ...], now_ns: int, only_to: str | None = None
    ) -> None:
        """Send a heartbeat to everybody, to one region when there is news that can't wait for the next one, or (only_to
        is "") to nobody."""
        limits_ns = sorted(peer.cadence.limit_ns for peer in self._peers.values())
        # Where most are late, this machine or theirs is starved: nobody is gone for being as late as they are.
        self._usual_limit_ns = limits_ns[len(limits_ns) // 2] if limits_ns else 0
        if only_to == "":
            return
        self.sequence += 1
        if only_to is None:
            self.absence.watch(self, now_ns=now_ns)
        self._sent_at_ns[self.sequence] = now_ns
        self._sent_at_ns.pop(self.sequence - SENT_KEPT, None)
        hears = self.alive(now_ns=now_ns)
        news = self._news(applied_index, hears)
        for name, peer in self._peers.items():
            is_behind = self.sequence - max(peer.echo, peer.linked_at) > UNREAD_MAX
            if only_to is None or (only_to == name and not is_behind):
                peer.news = news
                delay_ns = now_ns - peer.sequence_at_ns if peer.sequence else 0
                beat = Heartbeat(
                    self.sequence,
                    peer.sequence,
                    delay_ns,
                    hears,
                    self._own.learner,
                    applied_index,
                    digests,
                    self._own.budget,
                    self.is_leaving,
                    self.folder,
                )
                self._effects.send(name, beat)

    def echo(self, region: str) -> int:
        """The last of this region's heartbeats that another region had when it sent its last one."""
        return self._peer(region).echo

    @property
    def others(self) -> tuple[str, ...]:
        """All other regions, sorted."""
        return tuple(self._peers)

    def is_alive(self, region: str, *, now_ns: int) -> bool:
        """A heartbeat came within the last few intervals, or as late as it usually does; this region always is."""
        if region == self._region:
            return True
        state = self._peers.get(region)
        if state is None or state.cadence.heard_at_ns is None:
            return False
        limit_ns = min(self.patience * max(state.cadence.limit_ns, self._usual_limit_ns), CEILING * self.silent_ns)
        return now_ns - state.cadence.heard_at_ns < limit_ns

    def alive(self, *, now_ns: int) -> tuple[str, ...]:
        """The other regions that are alive, sorted."""
        return tuple(name for name in self._peers if self.is_alive(name, now_ns=now_ns))

    def hears(self, listener: str, speaker: str, *, now_ns: int) -> bool:
        """Whether another region reports heartbeats of `speaker`; False if it is not alive."""
        return self.is_alive(listener, now_ns=now_ns) and speaker in self._peer(listener).hears

    def reaches(self, region: str, *, now_ns: int) -> bool:
        """Whether a region and this one hear each other."""
        return region == self._region or self.hears(region, self._region, now_ns=now_ns)

    def central_regions(self, regions: Collection[str]) -> list[str]:
        """Regions of these that hear all others and are heard by all, in sets: pairs are many. This one is central."""
        names = frozenset(regions)
        hearing = {name: names if name == self._region else {name, *self._peer(name).hears} for name in regions}
        common = names.intersection(*hearing.values())
        return [name for name in regions if name in common and names <= hearing[name]]

    def learner(self, region: str) -> LearnerStatus | None:
        """The last status of the region's learner; None if there is no learner."""
        return self._peer(region).learner

    def stepped_at_ns(self, region: str) -> int | None:
        """When the region's learner was last seen to have made a step (or to have attached); None if there is none."""
        return self._peer(region).stepped_at_ns

    def budget(self, region: str) -> RateLimits:
        """The ceilings that a region reported last; none before it did."""
        return self._peer(region).budget

    def applied_index(self, region: str) -> int:
        """The last ledger entry that another region reports as applied."""
        return self._peer(region).applied_index

    def has_left(self, region: str) -> bool:
        """Whether another region, or its learner, has told that it is about to stop, and has not come back since."""
        return self._peer(region).is_leaving

    def rtt_ns(self, region: str) -> int:
        """Round-trip time; 0 if unknown, and to itself."""
        return self._peer(region).rtt_ns

    def hears_claimed(self, region: str) -> tuple[str, ...]:
        """Return the regions that another region reports to hear, by its last heartbeat."""
        return self._peer(region).hears

    def _measure_rtt(self, state: _Peer, beat: Heartbeat, now_ns: int) -> None:
        sent_at_ns = self._sent_at_ns.get(beat.echo)
        if sent_at_ns is None:
            return
        sample_ns = now_ns - sent_at_ns - beat.echo_delay_ns
        if sample_ns < 0 or beat.echo_delay_ns < 0:
            return
        sample_ns = min(sample_ns, RTT_NS_MAX)
        state.rtt_ns = sample_ns if state.rtt_ns == 0 else state.rtt_ns + ((sample_ns - state.rtt_ns) >> _RTT_SHIFT)


def _set_learner(state: _Peer, status: LearnerStatus | None, now_ns: int) -> None:
    before, state.learner = state.learner, status
    if status is None:
        state.stepped_at_ns = None
    elif before is None or (before.incarnation, before.step) != (status.incarnation, status.step):
        state.stepped_at_ns = now_ns
