"""The region's bandwidth budget while it runs: changed by an operator or run.toml, and watched.

`BudgetWatch` says when this region can't keep its schedule within the budget, and what would help: one line, logged
once. It takes both: the plan, made from what is measured now, does not fit, and merges really come later than every H
steps. By itself the plan is too strict (zstd makes fewer bytes than it counts), and late merges may have another cause:
where the daemon waits for a processor and leaves part of the budget unused, that is it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from pathlib import Path
from statistics import median_low
from typing import Any, Final

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.events import Note
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.types import Direction, RunSettings
from diloco_node.core.view import RegionView
from diloco_node.errors import ConfigError
from diloco_node.planning.advice import budget_warning
from diloco_node.planning.merge_pace import MergePace
from diloco_node.planning.plan import OVERHEAD, fragment_sizes

_KEYS = frozenset({"egress", "ingress", "peer"})

BUDGET_POLL_S: Final = 2.0
"""Between two looks at whether the schedule fits the budget."""

PPM: Final = 1_000_000

LATE_PART: Final = 10
"""Timers that are late by a tenth of a cycle of H steps make its merges late: `MergePace` allows for as much."""

SHARE_USED_HIGH: Final = 0.9
"""A budget that binds is used up to 95 % while something waits to be sent."""


def changed_plan(plan: BudgetPlan, document: Mapping[str, Any], peers: Collection[str]) -> BudgetPlan:
    """The plan after what an operator asked for. Raises ConfigError: what is wrong with it.

    document: "egress" and "ingress" as text ("2Gbit/s", or "none" for no limit), at least one of them; "peer": only
    that peer's. peers: names that there are.
    """
    from diloco_node.config.budget_settings import (
        parse_ceiling_or_none,  # brings pydantic, which the daemon else does without
    )

    unknown = sorted(document.keys() - _KEYS)
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no part of a budget; there are {', '.join(sorted(_KEYS))}")
    peer = document.get("peer")
    if peer is not None and (not isinstance(peer, str) or peer not in peers):
        raise ConfigError(f"peer {peer!r} is none of this region's: {', '.join(sorted(peers))}")
    rates = {direction: document[direction] for direction in Direction if document.get(direction) is not None}
    if not rates:
        raise ConfigError('nothing to set: give egress or ingress, such as "2Gbit/s", or "none"')
    for direction, text in rates.items():
        if not isinstance(text, str):
            raise ConfigError(f'{direction} is {text!r}: write a rate with its unit, such as "2Gbit/s", or "none"')
        try:
            rate = parse_ceiling_or_none(text)
        except ValueError as error:
            raise ConfigError(f"{direction} is {text!r}: {error}") from None
        plan = plan.with_rate(direction, rate, peer=peer or "")
    return plan


def plan_of_file(path: Path, region: str) -> tuple[BudgetPlan, str]:
    """The budget of run.toml and the environment for a region now, and what set it. Raises ConfigError."""
    from diloco_node.config.resolve import load_config
    from diloco_node.config.sources import ENV_PREFIX

    config = load_config(path)
    config.check_region(region)
    # As they were when the region was started: who edits the file must be told that they win.
    variables = sorted(
        {
            origin
            for key, origin in config.origins.items()
            if origin.startswith(ENV_PREFIX) and (key[:1] == ("budget",) or key[:2] == ("regions", region))
        }
    )
    precedence = f", which {', '.join(variables)} in this region's environment beats" if variables else ""
    return config.budget_plan(region), f"{path}{precedence}"


class BudgetWatch:
    """Call `look` every BUDGET_POLL_S, never twice at once."""

    def __init__(self, manifest: Manifest, settings: RunSettings) -> None:
        self._sizes = fragment_sizes(manifest)
        self._settings = settings
        self._pace = MergePace(len(manifest.fragments), settings.sync_every)
        self._noted: tuple[int | None, int | None] | None = None  # the budget that the last line was about
        self.text = ""
        """The line as of the last look; empty when the schedule is kept."""

        self.is_starved = False
        """Whether merges are late because the daemon waited for a processor, as of the last look."""

    def follow(self, settings: RunSettings) -> None:
        """Go by other settings of the run, and measure the pace anew."""
        self._settings = settings
        self._pace = MergePace(len(self._sizes), settings.sync_every)

    def pace(self) -> dict[str, Any]:
        """How often fragments are merged, for the status; `steps` is None before it is known."""
        steps = self._pace.steps_per_cycle
        return {
            "steps": None if steps is None else float(steps),
            "sync_every": self._settings.sync_every,
            "is_late": self._pace.is_late,
            "is_starved": self.is_starved,
        }

    def look(self, view: RegionView, budget: Mapping[str, Any], *, late_ns: int = 0) -> Note | None:
        """Compare what is needed with what there is; the line to log, when that begins, ends, or has another budget.

        In a thread: the search for what would fit takes a while. budget: of `Pacer.status`. late_ns: how late timers
        are.
        """
        if view.learner is None or view.is_ending or view.finished:
            return None  # nothing is due; what was said last stays in the status, and in the report
        self._pace.report(view.learner.step, view.rounds_committed)
        cycle_ns = self._settings.sync_every * view.learner.step_time_ns
        self.is_starved = (
            self._pace.is_late
            and late_ns * LATE_PART > cycle_ns > 0
            and (budget.get("share_used") or 0.0) < SHARE_USED_HIGH
        )
        self.text = self._warning(view, budget) if self._pace.is_late and not self.is_starved else ""
        about = (budget["egress_bytes_per_s"], budget["ingress_bytes_per_s"]) if self.text else None
        if about == self._noted:
            return None  # its figures change with every look; they are in the status
        self._noted = about
        return Note("budget", self.text or "the schedule is kept again")

    def _warning(self, view: RegionView, budget: Mapping[str, Any]) -> str:
        alive = [peer for peer in view.peers if peer.is_alive]
        learners = [view.learner, *(peer.learner for peer in alive)]
        # As learnt from the kernel's counters, the mean over the peers; a part of the payload.
        overheads = [peer["overhead"] for peer in budget["peers"].values()]
        overhead = Fraction(round((sum(overheads) / len(overheads) - 1) * PPM), PPM) if overheads else OVERHEAD
        times = [learner.step_time_ns for learner in learners if learner is not None and learner.step_time_ns > 0]
        warning = budget_warning(
            fragments=self._sizes,
            settings=self._settings,
            regions=(view.region, *(peer.region for peer in alive)),
            step_time_ns=median_low(times) if times else 0,
            rtt_ns=max((peer.rtt_ns for peer in alive), default=0),
            egress_bytes_per_s=budget["egress_bytes_per_s"],
            ingress_bytes_per_s=budget["ingress_bytes_per_s"],
            overhead=overhead,
        )
        pace_steps = self._pace.steps_per_cycle
        return f"{warning}; measured: every {float(pace_steps):.1f} steps" if warning and pace_steps else warning
