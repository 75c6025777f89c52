"""Says when this region can't keep its schedule within its budget, and what would help: one line, logged once.

It takes both: the plan, made from what is measured now, does not fit, and merges really come later than every H steps.
By itself the plan is too strict (zstd makes fewer bytes than it counts), and late merges may have another cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from statistics import median_low
from typing import Any, Final

from diloco_node.core.events import Note
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.types import RunSettings
from diloco_node.core.view import RegionView
from diloco_node.planning.advice import budget_warning
from diloco_node.planning.merge_pace import MergePace
from diloco_node.planning.plan import OVERHEAD
from diloco_node.planning.sizes import fragment_sizes

LOOK_S: Final = 2.0
"""Between two looks."""

PPM: Final = 1_000_000


class BudgetWatch:
    """Call `look` every LOOK_S, never twice at once.

    Args:
        manifest, settings: of the run.
    """

    def __init__(self, manifest: Manifest, settings: RunSettings) -> None:
        self._sizes = fragment_sizes(manifest)
        self._settings = settings
        self._pace = MergePace(len(manifest.fragments), settings.sync_every)
        self._noted: tuple[int | None, int | None] | None = None  # the budget that the last line was about
        self.text = ""
        """The line as of the last look; empty when the schedule is kept."""

    def look(self, view: RegionView, budget: Mapping[str, Any]) -> Note | None:
        """Compare what is needed with what there is. In a thread: the search for what would fit takes a while.

        Args:
            view: of the core now. budget: as `Pacer.status` has it.

        Returns:
            The line to log, when it begins, when the budget that it is about changes, and when it ends.
        """
        if view.learner is None or view.is_ending or view.finished:
            return None  # nothing is due; what was said last stays in the status, and in the report
        self._pace.reported(view.learner.step, view.rounds_committed)
        return self._said(self._warning(view, budget) if self._pace.is_late else "", budget)

    def _warning(self, view: RegionView, budget: Mapping[str, Any]) -> str:
        alive = [peer for peer in view.peers if peer.is_alive]
        learners = [view.learner, *(peer.learner for peer in alive)]
        times = [learner.step_time_ns for learner in learners if learner is not None and learner.step_time_ns > 0]
        warning = budget_warning(
            fragments=self._sizes,
            settings=self._settings,
            regions=(view.region, *(peer.region for peer in alive)),
            step_time_ns=median_low(times) if times else 0,
            rtt_ns=max((peer.rtt_ns for peer in alive), default=0),
            egress_bytes_per_s=budget["egress_bytes_per_s"],
            ingress_bytes_per_s=budget["ingress_bytes_per_s"],
            overhead=_overhead(budget),
        )
        measured = self._pace.steps_per_cycle
        return f"{warning}; measured: every {float(measured):.1f} steps" if warning and measured else warning

    def _said(self, text: str, budget: Mapping[str, Any]) -> Note | None:
        self.text = text
        about = (budget["egress_bytes_per_s"], budget["ingress_bytes_per_s"]) if text else None
        if about == self._noted:
            return None  # its figures change with every look; they are in the status
        self._noted = about
        return Note("budget", text or "the schedule is kept again")


def _overhead(budget: Mapping[str, Any]) -> Fraction:
    """As learnt from the kernel's counters, the mean over the peers; a part of the payload."""
    found = [peer["overhead"] for peer in budget["peers"].values()]
    return Fraction(round((sum(found) / len(found) - 1) * PPM), PPM) if found else OVERHEAD
