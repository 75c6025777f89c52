"""Samples of a demo while it runs, for its report: processes that live, tokens merged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from diloco_node.lab.chaos.demo_processes import is_alive, is_stopped
from diloco_node.lab.chaos.story import RegionSample, RunSample
from diloco_node.lab.demo.region_processes import RegionProcess, attached_learner
from diloco_node.unix_sockets import Process, process_of

ANSWER_S: Final = 1.0
"""An answer that is older says nothing of now: four times the period at which a storm asks."""


@dataclass(slots=True)
class CourseRecorder:
    """Takes a sample of all regions whenever it is asked.

    Attributes:
        began_ns: the monotonic time at which all regions trained; samples count from there.
        samples: in the order of their time.
    """

    began_ns: int = 0
    samples: list[RunSample] = field(default_factory=list)
    _learners: dict[str, Process | None] = field(default_factory=dict)

    def begin(self) -> None:
        """The training begins now; samples of before have negative times."""
        now_ns = time.monotonic_ns()
        self.samples = [RunSample(sample.at_ns - now_ns, sample.regions) for sample in self.samples]
        self.began_ns = now_ns

    def now_ns(self) -> int:
        """The training's clock."""
        return time.monotonic_ns() - self.began_ns

    def take(self, regions: Sequence[RegionProcess]) -> None:
        """Note what the regions have just answered; of one that joins, from its first learner on."""
        at_ns, samples = self.now_ns(), {region.name: self._sample(region) for region in regions}
        joiners = {region.name for region in regions if region.config is not None}
        members = {name: sample for name, sample in samples.items() if name in self._learners or name not in joiners}
        self.samples.append(RunSample(at_ns, members))

    def _sample(self, region: RegionProcess) -> RegionSample:
        status, before = region.status, self.samples[-1].regions.get(region.name) if self.samples else None
        learner: dict[str, Any] | None = status.get("learner")
        is_attached = learner is not None and time.monotonic() - region.answered_s < ANSWER_S
        if is_attached:
            pid = attached_learner(status)
            self._learners[region.name] = process_of(pid) if pid is not None else None
        # A daemon that has just started names no learner, although the one that it had may train on.
        process = self._learners.get(region.name)
        if learner is None:
            known_before = before or RegionSample(False, False)
            incarnation, step, attached_step = known_before.incarnation, known_before.step, known_before.attached_step
        else:
            incarnation, step = int(learner["incarnation"]), int(learner["step"])
            attached_step = int(learner["attached_step"])
        return RegionSample(
            has_daemon=is_attached,
            has_learner=process is not None and is_alive(process),
            is_stopped=process is not None and is_stopped(process),
            incarnation=incarnation,
            step=step,
            attached_step=attached_step,
            commit_index=int(status.get("commit_index", 0)),
            rounds=int(status.get("rounds_committed", 0)),
            tokens_merged=int(status.get("tokens_merged", 0)),
        )
