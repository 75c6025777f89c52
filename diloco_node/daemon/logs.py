"""The daemon's log: one fact a line, as key=value or JSON, on standard error; the supervisor keeps it in logs/.

Every line has a part (`LOG_PARTS`), and each part a level of its own, which can be changed while the daemon runs. Lines
about a peer that repeat themselves are counted instead (`Repeats`). Lines for people at a terminal are short and go to
standard output (`Console`).
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Final, Literal

import structlog

from diloco_node.daemon.repeats import Repeats, numberless
from diloco_node.errors import ConfigError
from diloco_node.escaping import escaped

LOG_PARTS: Final = ("daemon", "disk", "learner", "ledger", "rounds", "transport")
ALL_PARTS: Final = "all"
LOG_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

LogFormat = Literal["logfmt", "json"]

_PART_OF_KIND: Final = {
    "budget": "transport",
    "disk": "disk",
    "fetch": "disk",
    "leader": "ledger",
    "learner": "learner",
    "ledger": "ledger",
    "peer": "transport",
    "snapshot": "ledger",
    "start": "daemon",
    "stranger": "transport",
    "summary": "ledger",
}
_KEY_ORDER: Final = ("timestamp", "level", "event", "region", "peer", "fragment", "version")

PEERS_MAX: Final = 1024
"""Peers whose log lines are counted; a run has fewer."""

PEER_CAUSES_MAX: Final = 10
"""Different reasons for one event that are told of one peer within a window."""


def part_of(kind: str) -> str:
    """The part that a note of this kind belongs to."""
    return _PART_OF_KIND.get(kind, "rounds")


class PartLevels:
    """The log level of each part; a processor of structlog. The part of a line without one is `daemon`.

    Args:
        level: of all parts; a key of LOG_LEVELS.
    """

    def __init__(self, level: str = "info") -> None:
        self._levels: dict[str, str] = {}
        self.change(ALL_PARTS, level)

    def change(self, log_part: str, level: str) -> None:
        """Log lines of this part, or of all, from this level on.

        Raises:
            ConfigError: there is no such part or level.
        """
        if log_part != ALL_PARTS and log_part not in LOG_PARTS:
            raise ConfigError(f"the log has no part {log_part!r}: name one of {', '.join((ALL_PARTS, *LOG_PARTS))}")
        if level not in LOG_LEVELS:
            raise ConfigError(f"there is no level {level!r}: name one of {', '.join(LOG_LEVELS)}")
        self._levels |= dict.fromkeys(LOG_PARTS if log_part == ALL_PARTS else (log_part,), level)

    def shown(self) -> dict[str, str]:
        """The level of each part."""
        return dict(self._levels)

    def __call__(self, _: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """Part of structlog's interface; `level` is in the line already."""
        if LOG_LEVELS.get(event["level"], logging.ERROR) < LOG_LEVELS[self._levels[event.setdefault("part", "daemon")]]:
            raise structlog.DropEvent
        return event


def set_up_logs(level: str = "info", form: LogFormat = "logfmt") -> PartLevels:
    """Configure structlog for this process. Characters that can't be printed are escaped: names come from outside.

    Returns:
        The levels, to be changed while the process runs.
    """
    levels = PartLevels(level)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            levels,
            PeerLines(),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            escape_values,
            _json_line if form == "json" else _LOGFMT,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    return levels


_LOGFMT: Final = structlog.processors.LogfmtRenderer(key_order=_KEY_ORDER, drop_missing=True, bool_as_flag=False)
_JSON: Final = structlog.processors.JSONRenderer()


def _json_line(logger: Any, name: str, event: structlog.typing.EventDict) -> str | bytes:
    first = {key: event[key] for key in _KEY_ORDER if key in event}
    return _JSON(logger, name, {**first, **event})


class PeerLines:
    """A processor of structlog: lines with a `peer` that say the same as one of a moment ago are held back.

    The next line about that peer says how many of each event there were. A link that comes and goes, or a peer that is
    refused again and again, costs a line in ten seconds.
    """

    def __init__(self) -> None:
        self._repeats: dict[str, Repeats] = {}

    def __call__(self, _: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        """Part of structlog's interface."""
        peer = event.get("peer")
        if peer is None:
            return event
        repeats = self._repeats.get(peer)
        if repeats is None:
            # Names of peers are those of certificates of the run; a fault of ours must not grow this without bound.
            if len(self._repeats) >= PEERS_MAX:
                self._repeats.clear()
            repeats = self._repeats[peer] = Repeats(time.monotonic_ns, causes_max=PEER_CAUSES_MAX)
        count = repeats.end_window()
        if not repeats.is_new(event["event"], numberless(str(event.get("reason", event.get("error", ""))))):
            raise structlog.DropEvent
        if count:
            event["held_back"] = ",".join(f"{kind}:{count}" for kind, count in count)
        return event


def escape_values(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A processor of structlog: texts as they may be shown."""
    plain = (bool, int, float, type(None))
    return {key: value if isinstance(value, plain) else escaped(str(value)) for key, value in event.items()}
