"""`[budget]` of run.toml, and how it becomes the plan of one region."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, PlainValidator

from diloco_node.config.budget_plan import WINDOWS_MAX, BudgetPlan, TimeWindow
from diloco_node.config.field_types import Section, setting
from diloco_node.config.units import Rate, parse_rate
from diloco_node.core.types import RateLimits

RATE_BYTES_PER_S_MIN: Final = 12_500
"""100 kbit/s. Below it a single packet is a large part of what a second allows, and the ceiling would be none."""

UNLIMITED: Final = "none"

_TIME: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


def parse_ceiling(value: object) -> Rate:
    """A rate that can be kept as a ceiling. Raises ValueError: with a text that completes "SETTING is VALUE: ..."."""
    rate = parse_rate(value)
    if rate.bytes_per_s < RATE_BYTES_PER_S_MIN:
        raise ValueError(f"it is less than {Rate(RATE_BYTES_PER_S_MIN)}, the least that can be kept")
    return rate


def parse_ceiling_or_none(text: str) -> int | None:
    """For commands: bytes/s of a rate, None for "none". Raises ValueError as `parse_ceiling`."""
    if text == UNLIMITED:
        return None
    try:
        return parse_ceiling(text).bytes_per_s
    except ValueError as error:
        raise ValueError(f'{error}; "{UNLIMITED}" is no limit') from None


def parse_minute(value: object) -> object:
    """`"22:30"` as the minute of the day. Raises ValueError: it is none."""
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError('it must be a time of day, such as "22:30"')
    return int(match[1]) * 60 + int(match[2])


Ceiling = Annotated[Rate, PlainValidator(parse_ceiling)]
Minute = Annotated[int, BeforeValidator(parse_minute)]


def ceiling(description: str, touch_when: str) -> Any:
    """Describe a setting that is a ceiling; none: no limit. See `setting`."""
    return setting(None, description, touch_when, changes="running", examples=["2Gbit/s"])


class LimitsSection(Section):
    """`[budget.per_peer.NAME]`, and all that has ceilings in both directions; none: no limit."""

    egress: Ceiling | None = ceiling("ceiling of the traffic to that region", "one link is narrow or dear")
    ingress: Ceiling | None = ceiling("ceiling of the traffic from it", "one link is narrow or dear")

    def rates(self) -> RateLimits:
        """In bytes per second."""
        return RateLimits(
            self.egress.bytes_per_s if self.egress is not None else None,
            self.ingress.bytes_per_s if self.ingress is not None else None,
        )


class WindowSection(LimitsSection):
    """`[[budget.schedule]]`: other ceilings between two times of day, by this machine's clock."""

    egress: Ceiling | None = ceiling("instead of `budget.egress`; none: as ever", "the line is free at night")
    ingress: Ceiling | None = ceiling("instead of `budget.ingress`; none: as ever", "the line is free at night")
    start: Minute = setting(
        ..., "time of day by this machine's clock, as `22:00`", "with a schedule", changes="running", examples=["22:00"]
    )
    end: Minute = setting(
        ..., "the same; before `start`: on the next day", "with a schedule", changes="running", examples=["06:00"]
    )

    def window(self) -> TimeWindow:
        """For the plan. Raises ValueError when it is empty."""
        return TimeWindow(self.start, self.end, self.rates())


class BudgetSection(LimitsSection):
    """`[budget]`: ceilings of each region, wire bytes of all its links together. Its own ones go first."""

    egress: Ceiling | None = ceiling(
        "ceiling of what each region sends, all links together; none: no limit", "the line is shared or paid"
    )
    ingress: Ceiling | None = ceiling("the same of what it receives", "the line is shared or paid")
    per_peer: dict[str, LimitsSection] = Field(default={}, examples=[{}])
    # The first window that holds decides.
    schedule: Annotated[tuple[WindowSection, ...], Field(max_length=WINDOWS_MAX, examples=[()])] = ()

    def plan(self, region: str, region_limits: RateLimits) -> BudgetPlan:
        """Plan of one region; `region_limits` are its own ceilings, which go before those of all."""
        rates = self.rates()
        return BudgetPlan(
            RateLimits(
                rates.egress if region_limits.egress is None else region_limits.egress,
                rates.ingress if region_limits.ingress is None else region_limits.ingress,
            ),
            tuple((name, limits.rates()) for name, limits in sorted(self.per_peer.items()) if name != region),
            tuple(section.window() for section in self.schedule),
        )

    def rows(self) -> Iterator[tuple[str, object]]:
        """(key below `budget`, value) of everything that is set; always the two ceilings."""
        yield "egress", self.egress
        yield "ingress", self.ingress
        for name, limits in sorted(self.per_peer.items()):
            yield f"per_peer.{name}.egress", limits.egress
            yield f"per_peer.{name}.ingress", limits.ingress
        for section in self.schedule:
            times = "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (section.start, section.end))
            yield "schedule", f"{times} egress {section.egress or 'as ever'} ingress {section.ingress or 'as ever'}"
