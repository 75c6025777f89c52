"""The commands that a region's supervisor starts, and how long it waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SCRIPT_CODE: Final = 8
"""The run is finished, but the script failed after it."""

FINAL_CODES: Final = frozenset({2, 4, 6, 7, SCRIPT_CODE})
"""Exit codes that another start would only repeat, or hide; RestartPreventExitStatus of deploy's unit."""

LEAVE_S_MAX: Final = 1800.0
"""For a learner to leave a finished run, where no step for any time is a hang."""

LEARNER_SHARE: Final = 0.8
"""Share of `stop_s` in which the learner saves, and has its last steps merged. In the rest the daemon hands over."""


@dataclass(frozen=True, slots=True)
class SupervisorSpec:
    """The processes to run, and the waits between their lives.

    learner_command: None: the region is a witness, or its learner is started by someone else. env: added to the
    children's environment. backoff_min_s, backoff_max_s: before the first and the later restarts; anew after a life of
    `healthy_s`. stop_s: from SIGTERM to SIGKILL, for all of them: the learner has LEARNER_SHARE of it, the daemon the
    rest. daemon_first_s: for which a start of the learner waits, at most, until the daemon is up. finish_s: what a
    learner that has not attached has to end by itself, once the daemon has finished the run. hang_s: see
    `learner_watch`. is_echoing: what people read also goes to the supervisor's own standard error; so does, with
    `is_verbose`, the daemon's log.
    """

    region: str
    state_dir: Path
    daemon_command: list[str]
    learner_command: list[str] | None
    env: Mapping[str, str] = field(default_factory=dict)
    backoff_min_s: float = 0.2
    backoff_max_s: float = 30.0
    healthy_s: float = 30.0
    stop_s: float = 25.0
    daemon_first_s: float = 2.0
    finish_s: float = 30.0
    hang_s: float = 300.0
    is_echoing: bool = True
    is_verbose: bool = False
    log_format: str = "logfmt"
    preload: tuple[str, ...] = ()
