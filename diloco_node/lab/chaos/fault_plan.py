"""The fault plan: what goes wrong, where, when, and for how long. Pure: all of it follows from a seed.

The simulator draws its faults with `draw_gap` and `draw_one`, on its own clock and of its own kinds
(`lab.sim.fault_storm.SCHEDULES`). A storm over real processes is a `FaultPlan`, drawn by `storm` or read from a script.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from diloco_node.errors import ConfigError
from diloco_node.numeric import NS_PER_S

KINDS: Final = ("kill", "stop", "notice", "pause", "partition", "slow", "disk")
"""SIGKILL; SIGTERM; the same, and SIGKILL to what is left after the time, as a spot machine is taken away; SIGSTOP and
SIGCONT; links cut; a quarter of its time to run; a disk that refuses."""

LASTING: Final = frozenset({"notice", "pause", "partition", "slow", "disk"})
"""They are over after a time; the others are over at once."""

DAEMON_ONLY: Final = frozenset({"partition", "disk"})
"""Links and the ledger's disk are the daemon's."""

ORDERS: Final = ("join", "leave", "wipe", "promote", "demote")
"""A script gives them as well: a new region joins as a contributor; a region leaves the run in order; it is killed, and
its folder emptied; it gets a vote, and loses it."""

REGION: Final = "region"
PARTS: Final = ("daemon", "learner", "supervisor")
VICTIMS: Final = (*PARTS, REGION)

LASTS_S_DEFAULT: Final = 5.0
LASTS_S_MAX: Final = 3600.0
AT_S_MAX: Final = 86_400.0 * 30
FAULTS_MAX: Final = 100_000
"""A storm of a day has at most one a second."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class FaultTarget:
    """Target of a fault: a region's daemon, learner or supervisor, or all three (`part` is REGION)."""

    region: str
    part: str = REGION

    def __str__(self) -> str:
        return self.region if self.part == REGION else f"{self.region}.{self.part}"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault, or an order, at its time.

    Attributes:
        at_ns: from the beginning of the training. kind: one of KINDS or ORDERS.
        lasts_ns: how long; 0 for a kind that is over at once.
    """

    at_ns: int
    kind: str
    target: FaultTarget
    lasts_ns: int = 0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults in the order of their times."""

    faults: tuple[PlannedFault, ...]

    @property
    def joiners(self) -> tuple[str, ...]:
        """The regions that join, in their order."""
        return tuple(fault.target.region for fault in self.faults if fault.kind == "join")

    def members(self, founders: Sequence[str], at_ns: int) -> list[str]:
        """The regions that have joined and have not left by this time, sorted."""
        names = set(founders)
        for fault in self.faults:
            if fault.at_ns <= at_ns and fault.kind == "join":
                names.add(fault.target.region)
            elif fault.at_ns <= at_ns and fault.kind == "leave":
                names.discard(fault.target.region)
        return sorted(names)

    def until(self, end_ns: int) -> FaultPlan:
        """Return the faults that begin before `end_ns`, cut there."""
        return FaultPlan(
            tuple(
                PlannedFault(fault.at_ns, fault.kind, fault.target, min(fault.lasts_ns, end_ns - fault.at_ns))
                for fault in self.faults
                if fault.at_ns < end_ns
            )
        )


def draw_gap(rng: random.Random, mean: float) -> float:
    """The gap to the next fault, in the unit of `mean`: exponential, for faults come independently of each other."""
    return rng.expovariate(1.0) * mean


def draw_one(rng: random.Random, odds: Mapping[T, int]) -> T:
    """Draw an item as often as its odds say. Iterates in the mapping's order."""
    return rng.choices(list(odds), list(odds.values()))[0]


def storm(
    regions: Sequence[str],
    *,
    seed: int,
    mtbf_ns: int,
    end_ns: int,
    victims: Sequence[str] = VICTIMS,
    notice_ns: int = 0,
    script: FaultPlan | None = None,
) -> FaultPlan:
    """SIGKILLs at random: of each one region and one of `victims` are drawn, all alike.

    With `notice_ns` whole machines are taken away instead, each with so much notice.

    Args:
        regions: at least one; their order does not matter. seed: everything random follows from it.
        mtbf_ns: mean time between two kills, over all regions. end_ns: there is none from here on.
        victims: of VICTIMS; their order does not matter.
        script: by which regions join and leave: none is struck before or after.

    Raises ConfigError: there would be more than FAULTS_MAX, or there is no victim of that name.
    """
    for name in victims:
        if name not in VICTIMS:
            raise ConfigError(f"there is no victim {name!r}: name some of {', '.join(VICTIMS)}")
    if not victims or not regions or mtbf_ns <= 0:
        raise ConfigError("a storm needs regions, victims, and a mean time between failures above zero")
    if end_ns / mtbf_ns > FAULTS_MAX / 2:
        raise ConfigError(f"a storm has at most {FAULTS_MAX // 2:,} faults: take a longer mean time between them")
    rng = random.Random(f"storm {seed}")
    odds = {victim: 1 for victim in VICTIMS if victim in victims}
    kind = "notice" if notice_ns else "kill"
    faults: list[PlannedFault] = []
    at_ns = int(draw_gap(rng, mtbf_ns))
    while at_ns < end_ns and len(faults) < FAULTS_MAX:
        names = sorted(regions) if script is None else script.members(regions, at_ns)
        target = FaultTarget(rng.choice(names), REGION if notice_ns else draw_one(rng, odds))
        faults.append(PlannedFault(at_ns, kind, target, notice_ns))
        at_ns += int(draw_gap(rng, mtbf_ns))
    return FaultPlan(tuple(faults))


def parse_target(text: str, regions: Sequence[str]) -> FaultTarget:
    """`us-east`, or `us-east.daemon`. Raises ConfigError: there is no such region, or it has no such part."""
    if text in regions:
        return FaultTarget(text)
    region, _, process = text.rpartition(".")
    if region not in regions:
        raise ConfigError(f"there is no region {text!r}; there are {', '.join(sorted(regions))}")
    if process not in PARTS:
        raise ConfigError(
            f"{region} has no {process!r}: name the region, or {', '.join(f'{region}.{process}' for process in PARTS)}"
        )
    return FaultTarget(region, process)


def check_fault(fault: PlannedFault) -> None:
    """Refuse what can't be carried out.

    Raises ConfigError: an unknown kind, a time out of range, or a kind that this part can't have.
    """
    if fault.kind not in (*KINDS, *ORDERS):
        raise ConfigError(f"there is no fault {fault.kind!r}; there are {', '.join(KINDS)}")
    if not 0 <= fault.at_ns <= AT_S_MAX * NS_PER_S:
        raise ConfigError(f"a fault at {fault.at_ns / NS_PER_S} s: it must lie between 0 and {AT_S_MAX:.0f} s")
    if fault.kind in LASTING and not 0 < fault.lasts_ns <= LASTS_S_MAX * NS_PER_S:
        raise ConfigError(
            f"{fault.kind} for {fault.lasts_ns / NS_PER_S} s: it must last more than 0 and at most {LASTS_S_MAX:.0f} s"
        )
    if fault.kind not in LASTING and fault.lasts_ns:
        raise ConfigError(f"{fault.kind} is over at once: leave its time away")
    if fault.kind in ("notice", *ORDERS) and fault.target.part != REGION:
        raise ConfigError(f"{fault.kind} is given to a whole region: name {fault.target.region}")
    if fault.kind in DAEMON_ONLY and fault.target.part not in (REGION, "daemon"):
        raise ConfigError(f"{fault.kind} strikes a daemon: name {fault.target.region} or {fault.target.region}.daemon")
