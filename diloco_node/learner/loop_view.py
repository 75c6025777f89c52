"""The run as a training loop reads it: where it is, which data are this region's, and whether it is over."""

from __future__ import annotations

import logging

from diloco_node.learner.region_shards import HERE

log = logging.getLogger("diloco_node.learner")


class LoopView:
    """The part of a loop's place in the run that it looks at.

    Equal on all ranks from each boundary to the next. Set when the run is joined, and as long as the process trains
    alone.

    Attributes:
        region: name of this region, "" when alone. region_index: its place among `regions` regions.
        region_names: all of them, in the order of their places; also those that have left.
        global_step: where the run is, in steps of its median learner. Never goes back. A learner that is slower than
            the median sees it grow by more than one a step, a faster one by one or none.
        progress: part of the way to the run's end, 0 to 1; None when alone, or where nothing says where that is.
        should_stop: leave the loop now: the run is finished, this process was asked to stop (SIGTERM), or this learner
            has failed. Once True it stays so, with its first reason.
        stop_reason: why, in words. is_interrupted: this process was asked to stop, the run goes on: leave soon.
        steps, tokens: made by this process, over all ranks.
    """

    def __init__(self) -> None:
        self.region = ""
        self.region_index = 0
        self.region_names: tuple[str, ...] = ()
        self.global_step = 0
        self.progress: float | None = None
        self.should_stop = self.is_interrupted = False
        self.stop_reason = ""
        # Of this process; `LearnerFragments` has those of the incarnation.
        self.steps = self.tokens = 0

    @property
    def regions(self) -> int:
        """How many regions the run has; 1 when alone."""
        return max(1, len(self.region_names))

    @property
    def shards(self) -> tuple[int, ...]:
        """Virtual shards of the data that this region may train, ascending; another tuple once they change."""
        return HERE.own

    def _stop_if(self, is_wanted: bool, reason: str, level: int = logging.INFO) -> None:
        if is_wanted and not self.should_stop:
            self.should_stop, self.stop_reason = True, reason
            log.log(level, "stopping: %s", reason)
