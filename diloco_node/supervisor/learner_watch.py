"""A watch over a learner's process that finds it hanging, or crashing again and again.

Pure: the caller has the clock and the process. Seconds are monotonic. Standard library only, for the supervisor.

A learner hangs when its counters in the shared memory have stood still for `HANG_FACTOR` times its longest pause of
late, and for the time that was set. Counters are written at each step, without the daemon, and also stand still when a
thread holds Python's lock or a device is stuck. Before the first step of a life nobody can tell a hang from waiting for
the other regions.

A pause that the loop announces (`Diloco.busy`) is no hang before its own limit, and does not count as a usual one. The
limit begins anew with each step, for a loop may train within it, or never say that it is over. Once the script has had
its part in the run it may do anything: evaluate for hours, write its files. Time in which the supervisor itself stood
still (a frozen container) counts nowhere.

A script that was refused, catches that and goes on would train alone, for days perhaps. It has `REFUSED_S` to end by
itself, then it is ended, and has crashed. After `REFUSALS_MAX` such lives in a row it stays stopped.
"""

from __future__ import annotations

import signal
from collections import deque
from enum import StrEnum
from typing import Any, Final

from diloco_node.shared_memory import BUSY_MAX_S, PlaceMark

HANG_FACTOR: Final = 10
"""Times the longest pause: evaluations and checkpoints are pauses, too."""

PAUSES_KEPT: Final = 256

DOUBLINGS_MAX: Final = 10
"""Each hang doubles the limit: an evaluation that is longer than the limit must not be killed for ever."""

FORGIVEN_S: Final = 3600.0
"""So long without a hang takes one doubling back."""

ABORT_S: Final = 3.0
"""For the stacks of all threads, which SIGABRT makes Python write, before SIGKILL."""

REFUSED_S: Final = 600.0
"""For a script that was refused: it may write files, wait for a checkpoint, end other ranks, load the model anew."""

REFUSALS_MAX: Final = 3
"""In a row: who hides the same refusal three times would train outside of the run for ever, ten minutes each time."""

TRAINED_S: Final = 3600.0
"""A life of more was in the run for a while: its refusal is none of a row."""

STUCK_S: Final = 30.0
"""A process that is still there so long after SIGKILL is held by the kernel: its device, or its disk."""

ASLEEP_S: Final = 10.0
"""Between two looks. After more the supervisor itself stood still, and so did the learner perhaps."""

SLEEPS_KEPT: Final = 64

CRASHES_MAX: Final = 10
CRASHES_WITHIN_S: Final = 600.0
"""With pauses that double up to 30 s, ten crashes take at least a minute and a half."""

FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that no learner ends by itself with: who kills it wants it restarted, as often as that happens."""

HIDES: Final = "its script hides an error"

UNENDED: Final = (
    "it never left the run: was it killed, or had it an error, which a shell or its script hides? A shell needs "
    "`set -eo pipefail`; a script leaves its `with` block without an error, or calls close()"
)
"""Code 0 of a shell, behind a pipe or with further lines, says nothing of the process below it."""


class Action(StrEnum):
    """An order to the supervisor."""

    NOTHING = "nothing"
    ABORT = "abort"
    KILL = "kill"
    SAY = "say"


class LearnerWatch:
    """Decides about the lives of one learner.

    Args:
        hang_s: no step for less than this is never a hang; 0: nothing is. log: where its output is, for the status.

    Attributes:
        old_place: written by the life before this one. lost: steps, by the last end that was no success.
        state: "running", "waiting" for its next start, "stopped" (a crash loop) or "done".
        reason: the last fault, in words; empty if there was none. crashes, hangs: since the supervisor was started.
        exit_code: of the last life that is over, negative for a signal; None before. restarts: lives but the first.
    """

    def __init__(self, hang_s: float, *, log: str = "") -> None:
        self.state = "waiting"
        self.exit_code: int | None = None
        self.restarts = 0
        self._log = log
        # A second life is a restart.
        self._has_lived = False
        self.reason = ""
        self.crashes = 0
        self.hangs = 0
        self._hang_s = hang_s
        # Processes that the kernel had killed for want of memory when this life began.
        self._memory_kills = 0
        # The counters' bytes at the last step, and when that was; None: this life has made none.
        self._mark: bytes | None = None
        self._stepped_s: float | None = None
        self.old_place: PlaceMark | None = None
        self.lost: dict[str, int] | None = None
        # The pause that the loop has announced and not ended.
        self._pause: PlaceMark | None = None
        # The last look: when the next one comes late, the machine slept, not the learner.
        self._looked_s = 0.0
        # The last times in which all stood still: their end, and how long they were.
        self._sleeps: deque[tuple[float, float]] = deque(maxlen=SLEEPS_KEPT)
        # Seconds between the last steps, over all lives.
        self._pauses: deque[float] = deque(maxlen=PAUSES_KEPT)
        # How often the limit is doubled after hangs, and since when; forgiven one by one.
        self._doublings = 0
        self._doubled_s = 0.0
        # The last crashes; as many within CRASHES_WITHIN_S are a loop.
        self._crashed_s: deque[float] = deque(maxlen=CRASHES_MAX)
        # When this life was told to write its stacks and end; None: it was not.
        self._aborted_s: float | None = None
        # Since when this life is known to be refused, and how many lives in a row ended so.
        self._refused_s: float | None = None
        self._refusals = 0
        self._last_action = Action.NOTHING
        # Lives in a row that ended with code 0 and had called attach() no more, as the life before them had.
        self._early_ends = 0

    @property
    def limit_s(self) -> float:
        """No step for so long is a hang."""
        usual_s = max(self._pauses, default=0.0)
        return float(max(self._hang_s, HANG_FACTOR * usual_s) * 2**self._doublings)

    def awake_s(self, since_s: float) -> float:
        """Return the time from then to the last look, without that in which all stood still."""
        asleep_s = sum(min(length_s, end_s - since_s) for end_s, length_s in self._sleeps if end_s > since_s)
        return self._looked_s - since_s - asleep_s

    def started(
        self, mark: bytes | None, *, now_s: float, place: PlaceMark | None = None, memory_kills: int = 0
    ) -> None:
        """A life begins. `mark` is what the counters hold; None or zeros: no learner has written any."""
        self._memory_kills = memory_kills
        self.old_place, self._pause = place, None
        self.state = "running"
        self.restarts, self._has_lived = self.restarts + self._has_lived, True
        self._mark, self._looked_s = mark, now_s
        self._stepped_s = self._aborted_s = self._refused_s = None
        self._last_action = Action.NOTHING

    def look(self, mark: bytes | None, *, now_s: float, place: PlaceMark | None = None) -> Action:
        """Decide what to do now. Call it every second or so, with the counters' bytes, while the process lives."""
        if now_s - self._looked_s > ASLEEP_S:
            self._sleeps.append((now_s, now_s - self._looked_s))
        self._looked_s = now_s
        if self._aborted_s is not None:
            return self._escalate(self.awake_s(self._aborted_s))
        own = place if place != self.old_place else None
        if own is not None and (own.is_over or own.fault):
            return self._look_outside(own, mark, now_s)
        self._refused_s = None
        if self._doublings and now_s - self._doubled_s > FORGIVEN_S:
            self._doublings, self._doubled_s = self._doublings - 1, now_s
        pause = own if own is not None and own.activity else None
        if pause is None and self._pause is not None and self._stepped_s is not None:
            self._stepped_s = now_s  # its end is as good as a step
        self._pause = pause
        # Zeros are an area that the daemon has made anew, not a step.
        has_stepped = mark != self._mark and mark is not None and any(mark)
        if pause is not None:
            if has_stepped:
                self._mark, self._stepped_s = mark, now_s
            since_s = max(pause.since_s, self._stepped_s or 0.0)
            limit_s = self._pause_limit_s(pause)
            if self._hang_s <= 0 or self.awake_s(since_s) <= limit_s:
                return Action.NOTHING
            return self._hang(f"{pause.activity} takes more than its limit of {limit_s:.0f} s", now_s)
        if has_stepped:
            if self._stepped_s is not None:
                self._pauses.append(self.awake_s(self._stepped_s))
            self._mark, self._stepped_s = mark, now_s
        elif self._stepped_s is not None and self._hang_s > 0 and self.awake_s(self._stepped_s) > self.limit_s:
            longest_s = max(self._pauses, default=0.0)
            still = f"no step for {self.awake_s(self._stepped_s):.0f} s, its longest pause before was {longest_s:.1f} s"
            return self._hang(
                f'{still}. Longer ones, such as evaluations, belong into `with diloco.busy("evaluation"):`', now_s
            )
        return Action.NOTHING

    def _pause_limit_s(self, pause: PlaceMark) -> float:
        limit_s = pause.limit_s * 2**self._doublings
        # Where the script has set no limit of its own, the pause takes none of the usual time away.
        return float(max(limit_s, self.limit_s) if pause.limit_s == BUSY_MAX_S else limit_s)

    def _look_outside(self, place: PlaceMark, mark: bytes | None, now_s: float) -> Action:
        """Its script is in no run: it has left, or was refused. It may attach again."""
        if self._had_part(place):
            self._mark, self._stepped_s, self._pause = mark, None, None
            return Action.NOTHING
        self._refused_s = now_s if self._refused_s is None else self._refused_s
        has_pause = bool(place.activity) and self.awake_s(place.since_s) <= place.limit_s
        if has_pause or self.awake_s(self._refused_s) <= REFUSED_S:
            return Action.NOTHING
        return self._abort(f"goes on outside of the run: {HIDES}: {place.fault}", now_s)

    def _had_part(self, place: PlaceMark) -> bool:
        """Whether a process of this life has left; a fault beside the word of the life before is of this one."""
        old_pid = 0 if self.old_place is None else self.old_place.pid
        return place.is_over and (place.pid != old_pid or not place.fault)

    def _hang(self, reason: str, now_s: float) -> Action:
        self.hangs += 1
        self._doublings, self._doubled_s = min(self._doublings + 1, DOUBLINGS_MAX), now_s
        return self._abort(f"hung: {reason}", now_s)

    def _abort(self, reason: str, now_s: float) -> Action:
        self.reason, self._aborted_s, self._last_action = reason, now_s, Action.ABORT
        return Action.ABORT

    def _escalate(self, since_s: float) -> Action:
        """It was told to write its stacks and end, and is still there."""
        if self._last_action is Action.ABORT and since_s >= ABORT_S:
            self._last_action = Action.KILL
            return Action.KILL
        if self._last_action is Action.KILL and since_s >= ABORT_S + STUCK_S:
            self._last_action = Action.SAY
            self.reason += f"; the kernel does not end it {STUCK_S:.0f} s after SIGKILL: is its device stuck?"
            return Action.SAY
        return Action.NOTHING

    def ended(
        self,
        code: int,
        *,
        lived_s: float,
        now_s: float,
        last_line: str = "",
        memory_kills: int = 0,
        place: PlaceMark | None = None,
    ) -> bool:
        """A life is over; may the next one begin? code: as in subprocess. place: where it stood at last."""
        self.exit_code = code
        is_ours, self._aborted_s = self._aborted_s is not None, None
        is_refused = is_ours and self._refused_s is not None
        self._refusals = self._refusals + 1 if is_refused and lived_s < TRAINED_S else 0
        self.state = "waiting"
        if is_ours and not is_refused:
            return True  # the next one gets twice the time, so there is no loop of hangs
        own = place if place != self.old_place else None  # None: this life has not attached
        # A handler of the script's may exit with any code. One that fails after a signal has not come to its end.
        if own is not None and own.is_interrupted and (code == 0 or (code > 0 and own.has_ended)):
            self.reason = "a signal from outside asked it to stop, and the run goes on"
            return True
        # What other processes of a life that had its part were refused for is their affair.
        is_refusal = own is not None and (code == 0 or is_refused) and not self._had_part(own)
        fault = own.fault if own is not None and is_refusal else ""
        is_early = code == 0 and place is not None and own is None
        self._early_ends = self._early_ends + 1 if is_early else 0
        self.reason = f"{_in_words(code)} after {lived_s:.1f} s"
        if fault:
            last_line = f"{HIDES}: {fault}"
        elif code == 0 and own is None:  # a handler of the script's, while it still imported?
            last_line = "it ended before attach()" + ", which the life before it had called" * is_early
        elif code == 0 and own is not None and not own.is_over:
            fault = last_line = UNENDED
        elif code == 0 and own is not None:
            way = "it ended without close() or a `with` block: its last steps are in no merge or checkpoint"
            last_line = "" if own.has_left else way
        if code == 0 and not fault and (not is_early or self._early_ends > 1):  # twice: it has found its own result
            self.state, self.reason = "done", last_line
            return False
        if memory_kills > self._memory_kills:
            self.reason += ": the kernel had no memory left" if code < 0 else ": the kernel killed something for memory"
        if -code in FROM_OUTSIDE and not is_refused:
            return True
        self.reason += f": {last_line}" * bool(last_line)
        return self._may_live_again(now_s)

    def _may_live_again(self, now_s: float) -> bool:
        """Note a crash; `reason` says it."""
        self.crashes += 1
        self._crashed_s.append(now_s)
        within_s = now_s - self._crashed_s[0]
        if len(self._crashed_s) == CRASHES_MAX and within_s <= CRASHES_WITHIN_S:
            times = f"crashed {CRASHES_MAX} times in {max(1, round(within_s / 60))} min"
        elif self._refusals >= REFUSALS_MAX:
            times = f"went on outside of the run {self._refusals} times"
        else:
            return True
        self.state = "stopped"
        self.reason = (
            f"{times}, the last time: {self.reason}. Look at logs/learner.log, then `diloco-node learner start`"
        )
        return False

    def revived(self) -> None:
        """Somebody wants it started again, whatever it did."""
        self._crashed_s.clear()
        self._doublings = self._refusals = 0
        self.state = "waiting"

    def document(self) -> dict[str, Any]:
        """For the status."""
        return {
            "state": self.state,
            "reason": self.reason,
            "crashes": self.crashes,
            "hangs": self.hangs,
            "exit_code": self.exit_code,
            "restarts": self.restarts,
            "log": self._log,
            "lost": self.lost,
        }


def _in_words(code: int) -> str:
    try:
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except ValueError:
        return f"ended by signal {-code}"
