"""Facts for the status that need a clock or a look at the machine: how far the run is, the last rounds, disk, dates."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from diloco_node.core import events as ev
from diloco_node.core.merge.outliers import newest_opposition
from diloco_node.core.region import RegionCore
from diloco_node.daemon.admin.members_document import MemberDates
from diloco_node.daemon.learner.proxy import LearnerFacts, LearnerProxy
from diloco_node.daemon.round_log import RoundLog
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.standings import Standings
from diloco_node.health.phase_times import PhaseTimes
from diloco_node.health.rate import SlidingRate
from diloco_node.numeric import NS_PER_S

ETA_WINDOW_S: Final = 600.0
"""The time that is left is worked out from the progress of the last minutes."""

SETTLE_S: Final = 10.0
"""Right after a start the run seems to leap: the other regions are heard one by one, with steps that no round has."""


def wall_clock_s() -> float:
    """Seconds since 1970, for people's eyes: nothing is decided by it."""
    return time.time()  # noqa: TID251 - see above


class RunFacts:
    """Made with the node; give `observe` to its pump. Every few seconds call `mark`, and `look` in a thread.

    certificate: of `Credentials.document`. refusals: of the disk, now. rounds: the last ones. dates: of the members'
    kinds.
    """

    def __init__(
        self,
        core: RegionCore,
        spec: NodeSpec,
        *,
        certificate: Callable[[], dict[str, Any]],
        cosines: Mapping[str, Sequence[float]],
        refusals: Callable[[], str],
        now_ns: Callable[[], int],
    ) -> None:
        self._core = core
        self._spec = spec
        self._certificate = certificate
        self._refusals = refusals
        self._now_ns = now_ns
        self._part = SlidingRate(ETA_WINDOW_S)
        self._begun_ns = now_ns()
        self._marked = -1.0
        self._disk: dict[str, Any] = {}
        self._pressure: float | None = None
        self._phases = PhaseTimes()
        self._rounds_in_flight_max = 0
        self._standings = Standings(cosines)
        self.dates = MemberDates(core.ledger.disks.roster)
        self.rounds = RoundLog(
            core,
            region=spec.region,
            now_ns=now_ns,
            unix_s=wall_clock_s,
            on_committed=lambda row: self._phases.add(row["phases"]),
        )

    def observe(self, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        """Look at the core after each event, before the effects are performed."""
        self.rounds.observe(event, effects)
        self.dates.follow(self._core.ledger.disks.roster, self._core.ledger.last_index, wall_clock_s)
        for effect in effects:
            if isinstance(effect, ev.ApplyVersion):
                self._standings.observe(effect.body)
        self._rounds_in_flight_max = max(self._rounds_in_flight_max, len(self._core.leader.rounds))

    def look(self) -> None:
        """At the disk, and at the processors."""
        self._disk = disk_space(self._spec.state_dir)
        self._pressure = cpu_pressure()

    def mark(self) -> None:
        """Remember how far the run is now."""
        now_ns = self._now_ns()
        progress = self._core.leader.progress.position(now_ns=now_ns).part
        if now_ns < self._begun_ns + int(SETTLE_S * NS_PER_S):
            return
        if progress is not None and progress > self._marked:  # what stands still has no time that is left
            self._marked = progress
            self._part.add(progress, now_ns=now_ns)

    def document(self, learner: LearnerProxy) -> dict[str, Any]:
        """The fields of the status document that come from here."""
        disks = self._core.ledger.disks
        return {
            "up_seconds": (self._now_ns() - self._begun_ns) / NS_PER_S,
            "run": self._run(),
            "voters": [name for name in disks.roster.voters if disks.disk_of(name)] if disks.has_view else None,
            "steps_of": {name: self._core.leader.progress.steps_of(name) for name in disks.roster.names},
            "token_account": self._account(learner),
            "standings": self._standings.document(newest_opposition(self._core.history.recent)),
            "tokens_ratio_max": self._core.history.settings.tokens_ratio_max,
            "phase_seconds": self._phases.document(),
            "rounds_in_flight_max": self._rounds_in_flight_max,
            "commit_age_seconds": self.rounds.commit_age_s(),
            "usual_commit_seconds": self.rounds.usual_commit_s(),
            "state_dir": str(self._spec.state_dir.resolve()),
            "disk": {**self._disk, "refused": self._refusals()},
            "machine": {"late_seconds": self._core.liveness.late_ns / NS_PER_S, "cpu_pressure_percent": self._pressure},
            "certificate": self._certificate(),
            "learner_warning": self._warning(learner.facts),
            "base_difference": learner.facts.base_difference,
        }

    def _run(self) -> dict[str, Any]:
        settings, history, now_ns = self._spec.settings, self._core.history, self._now_ns()
        position = self._core.leader.progress.position(now_ns=now_ns)
        rate = self._part.per_second(now_ns=now_ns)
        eta_s = None
        if history.finished is not None:
            eta_s = 0.0
        elif position.part is not None and rate:
            eta_s = (1.0 - position.part) / rate
        return {
            "id": self._spec.run_id,
            "step": position.steps,
            "total_steps": settings.steps_max or None,
            "tokens": history.account.merged_tokens(len(history.versions)),
            "tokens_total": settings.tokens_max or None,
            "eta_seconds": eta_s,
        }

    def _account(self, learner: LearnerProxy) -> dict[str, int]:
        """Tokens of this region's learner, and of the run as the ledger has them; means over the fragments."""
        account, fragments = self._core.history.account, len(self._core.history.versions)
        run_merged, run_discarded = (sum(tokens) // fragments for tokens in account.totals(fragments))
        ledger_tokens = account.covered_tokens(self._spec.region, fragments)
        return {
            "trained": learner.tokens_total,
            "carried": max(0, learner.tokens_total - ledger_tokens),
            "run_merged": run_merged,
            "run_discarded": run_discarded,
        }

    def _warning(self, facts: LearnerFacts) -> dict[str, Any] | None:
        if not facts.last_warning_ns:
            return None
        age_s = (self._now_ns() - facts.last_warning_ns) / NS_PER_S
        return {"text": facts.last_warning, "age_seconds": age_s, "is_failure": facts.has_failed}


def disk_space(folder: Path) -> dict[str, Any]:
    """Free and total bytes where a folder lies; empty if it can't be asked."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {}
    return {"free_bytes": usage.free, "total_bytes": usage.total}


def cpu_pressure(path: Path = Path("/proc/pressure/cpu")) -> float | None:
    """For how many percent of the last ten seconds some process waited for a processor; None: the kernel has no PSI."""
    try:
        line = re.match(r"some avg10=(\d+\.\d+) ", path.read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return float(line[1]) if line else None
