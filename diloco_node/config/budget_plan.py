"""The budget by time of day. Pure: the time is an argument, the shell asks the clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from diloco_node.core.types import NO_LIMITS, Direction, RateLimits

MINUTES_PER_DAY: Final = 24 * 60
WINDOWS_MAX: Final = 96


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Other ceilings between two minutes of the day (0 to 1439, the end not included), also through midnight. A limit
    of None leaves what holds all day."""

    start_minute: int
    end_minute: int
    limits: RateLimits

    def __post_init__(self) -> None:
        for minute in (self.start_minute, self.end_minute):
            if not 0 <= minute < MINUTES_PER_DAY:
                raise ValueError(f"minute {minute} of the day; 0 to {MINUTES_PER_DAY - 1} are allowed")
        if self.start_minute == self.end_minute:
            raise ValueError("a window that ends when it starts is empty")

    def contains(self, minute_of_day: int) -> bool:
        """Whether a minute of the day lies in it."""
        if self.start_minute < self.end_minute:
            return self.start_minute <= minute_of_day < self.end_minute
        return minute_of_day >= self.start_minute or minute_of_day < self.end_minute


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """The budget of one region: of all peers together, and of single ones, sorted by name.

    schedule: other limits of all peers together by time of day; the first window that holds decides.
    """

    limits: RateLimits = NO_LIMITS
    peers: tuple[tuple[str, RateLimits], ...] = ()
    schedule: tuple[TimeWindow, ...] = ()

    def limits_at(self, minute_of_day: int) -> RateLimits:
        """Ceilings of all peers together at a minute of the day."""
        in_force = next((window.limits for window in self.schedule if window.contains(minute_of_day)), RateLimits())
        return RateLimits(
            self.limits.egress if in_force.egress is None else in_force.egress,
            self.limits.ingress if in_force.ingress is None else in_force.ingress,
        )

    def least(self) -> RateLimits:
        """The smallest ceilings of all peers together that hold at some time of the day."""
        times = {0} | {minute for window in self.schedule for minute in (window.start_minute, window.end_minute)}
        in_force = [self.limits_at(minute) for minute in times]
        egress = [limits.egress for limits in in_force if limits.egress is not None]
        ingress = [limits.ingress for limits in in_force if limits.ingress is not None]
        return RateLimits(min(egress, default=None), min(ingress, default=None))

    def peer_limits(self, peer: str) -> RateLimits:
        """Ceilings of one peer by itself."""
        return dict(self.peers).get(peer, RateLimits())

    def with_rate(self, direction: Direction, rate_bytes_per_s: int | None, *, peer: str = "") -> BudgetPlan:
        """The plan after an operator has set a rate: for one peer, or for all, and then at any time of the day."""
        if peer:
            peers = dict(self.peers) | {peer: self.peer_limits(peer).with_rate(direction, rate_bytes_per_s)}
            return replace(self, peers=tuple(sorted(peers.items())))
        return replace(
            self,
            limits=self.limits.with_rate(direction, rate_bytes_per_s),
            schedule=tuple(
                replace(window, limits=window.limits.with_rate(direction, None)) for window in self.schedule
            ),
        )

    def __str__(self) -> str:
        """In one line, as far as anything is limited."""
        rows = [("", self.limits), *((f"{peer} ", limits) for peer, limits in self.peers)]
        words = [f"{name}{word}" for name, limits in rows for word in str(limits).split(", ") if word]
        return ", ".join(words + ["by time of day"] * bool(self.schedule)) or "no limit"

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> BudgetPlan:
        """Read the output of `to_plain`. Raises TypeError, ValueError or KeyError for anything else."""
        return cls(
            RateLimits(**plain["limits"]),
            tuple((name, RateLimits(**limits)) for name, limits in plain["peers"]),
            tuple(
                TimeWindow(window["start_minute"], window["end_minute"], RateLimits(**window["limits"]))
                for window in plain["schedule"]
            ),
        )
