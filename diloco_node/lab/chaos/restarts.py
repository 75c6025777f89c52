"""Whether a region's supervisor that has ended is started again: nearly as systemd does with deploy's unit. Pure.

Two things differ, so that a storm can kill and stop as often as it likes:

- systemd counts every start against its limit; here only failures count, which are exit codes above 0.
- That unit has Restart=on-failure: exit code 0 and SIGTERM are final. Here they are once the region has finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from diloco_node.numeric import NS_PER_S
from diloco_node.supervisor.supervisor_spec import FINAL_CODES

RESTART_NS: Final = NS_PER_S // 10
FAILURES_MAX: Final = 5
FAILURES_WITHIN_NS: Final = 10 * NS_PER_S
"""RestartSec, StartLimitBurst and StartLimitIntervalSec of the unit, which are systemd's own defaults."""


@dataclass(slots=True)
class RestartPolicy:
    """One region's."""

    _failed_ns: list[int] = field(default_factory=list)

    def why_not(self, code: int, *, has_finished: bool, now_ns: int) -> str | None:
        """None: it is to be started again. Else why not; empty when it has ended as it should.

        Args:
            code: as in subprocess: negative for a signal. has_finished: it has left the final model. A daemon
                that was only told to stop ends with 0 too.
        """
        if code == 0 and has_finished:
            return ""
        if code in FINAL_CODES:
            return f"it ended with {code}, which another start would only repeat"
        if code > 0:
            self._failed_ns = [one for one in self._failed_ns if now_ns - one < FAILURES_WITHIN_NS] + [now_ns]
            if len(self._failed_ns) >= FAILURES_MAX:
                within_s = FAILURES_WITHIN_NS // NS_PER_S
                return f"it failed {FAILURES_MAX} times within {within_s} s, the last time with {code}"
        return None
