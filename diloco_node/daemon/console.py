"""The short lines on a region's terminal: joined, the pace now and then, alarms, where the model is."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from diloco_node.core.types import RunSettings
from diloco_node.daemon.repeats import numberless
from diloco_node.escaping import escaped
from diloco_node.state_names import FINAL_NAME

log = structlog.get_logger()

LINE_CHARS_MAX: Final = 200
LINES_POLL_S: Final = 2.0
"""Between two looks at whether there is a line to show."""

PACE_S: Final = 60.0
"""Between two lines that say how far the run is."""

WAIT_TOLD_S: Final = 10.0
"""A reason for not training is told when it has lasted so long."""


def console_line(region: str, text: str) -> None:
    """Show one line, cut to LINE_CHARS_MAX and escaped, with the time in UTC before it."""
    short = text if len(text) <= LINE_CHARS_MAX else f"{text[: LINE_CHARS_MAX - 4]} ..."
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    sys.stdout.write(f"{stamp} {region}: {escaped(short)}\n")
    sys.stdout.flush()


class ConsoleHandler(logging.Handler):
    """Shows warnings of modules that log as libraries do, and know no region: to people, and in the daemon's log."""

    def __init__(self, region: str) -> None:
        super().__init__(logging.WARNING)
        self._region = region

    def emit(self, record: logging.LogRecord) -> None:
        """Part of logging's interface."""
        console_line(self._region, record.getMessage())
        log.warning(record.getMessage(), region=self._region)


class Console:
    """Decides which lines are shown. Times are seconds on one monotonic clock."""

    def __init__(self, run_id: str, state_dir: Path, settings: RunSettings, *, now_s: float) -> None:
        self._run_id = run_id
        self._state_dir = state_dir
        self._settings = settings
        self._is_joined = False
        self._is_over = False
        self._waits_for = ""
        self._waits_since_s = now_s
        self._pace_s = now_s
        self._rounds = 0

    def look(self, status: Mapping[str, Any], not_ready: str, *, now_s: float) -> list[str]:
        """The lines that are due. status: the document. not_ready: why the region does not train; empty if it does."""
        if self._is_over:
            return []
        if status["state"] == "finished":
            self._is_over = (self._state_dir / FINAL_NAME).exists()
            if not self._is_over:
                return []
            rounds = status["rounds_committed"]
            return [f"run {self._run_id} is finished, {rounds} rounds; the model is in {self._state_dir / FINAL_NAME}"]
        if not_ready:
            return self._waiting(not_ready, now_s)
        lines = []
        if not self._is_joined or self._waits_for.startswith("told:"):
            lines.append(self._join_line(status))
            self._is_joined, self._pace_s, self._rounds = True, now_s, status["rounds_committed"]
        self._waits_for = ""
        if now_s - self._pace_s >= PACE_S:
            lines.append(self._pace(status, now_s))
        return lines

    def _waiting(self, reason: str, now_s: float) -> list[str]:
        cause = numberless(reason)
        if self._waits_for.removeprefix("told:") != cause:
            self._waits_for, self._waits_since_s = cause, now_s
        if self._waits_for.startswith("told:") or now_s - self._waits_since_s < WAIT_TOLD_S:
            return []
        self._waits_for = f"told:{cause}"
        return [f"does not merge yet: {reason}" if not self._is_joined else f"merges no more: {reason}"]

    def _join_line(self, status: Mapping[str, Any]) -> str:
        leader = status["leader"]
        place = "leads" if leader == status["region"] else f"follows {leader}"
        verb = "is back in" if self._is_joined else "joined"
        return f"{verb} run {self._run_id}: {len(status['peers']) + 1} regions, {place}; trains"

    def _pace(self, status: Mapping[str, Any], now_s: float) -> str:
        minutes = (now_s - self._pace_s) / 60
        learner, rounds = status["learner"] or {}, status["rounds_committed"]
        rate = learner.get("current_tokens_per_second") or learner.get("tokens_per_second")
        limit = f" of {self._settings.steps_max:,}" if self._settings.steps_max else ""
        facts = [
            f"run at step {status['run']['step']:,}{limit}",
            f"learner at {status.get('inner_steps', 0):,}",
            f"loss {learner['loss']:.4g}" if learner.get("loss") is not None else "",
            f"{rate:,.0f} tokens/s" if rate is not None else "",
            f"{rounds:,} rounds, {(rounds - self._rounds) / minutes:.1f} a minute",
        ]
        self._pace_s, self._rounds = now_s, rounds
        return ", ".join(fact for fact in facts if fact)
