"""The daemon's log: one fact a line, as key=value or JSON, on standard error; the supervisor keeps it in logs/.

Every line has a part: daemon, disk, learner, ledger, rounds or transport. Lines about a peer that repeat themselves are
counted instead (`Repeats`). Lines for people at a terminal are short and go to standard output (`Console`).
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Final, Literal

import structlog

from diloco_node.daemon.repeats import Repeats, numberless
from diloco_node.escaping import escaped

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


def _add_part(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    event.setdefault("part", "daemon")
    return event


def set_up_logs(level: str = "info", form: LogFormat = "logfmt") -> None:
    """Configure structlog for this process. Characters that can't be printed are escaped: names come from outside."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _add_part,
            PeerLines(),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            escape_values,
            _json_line if form == "json" else _LOGFMT,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LOG_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


_LOGFMT: Final = structlog.processors.LogfmtRenderer(key_order=_KEY_ORDER, drop_missing=True, bool_as_flag=False)
_JSON: Final = structlog.processors.JSONRenderer()


def _json_line(logger: Any, name: str, event: structlog.typing.EventDict) -> str | bytes:
    first = {key: event[key] for key in _KEY_ORDER if key in event}
    return _JSON(logger, name, {**first, **event})


class PeerLines:
    """A processor of structlog: lines with a `peer` that say the same as one of a moment ago are held back. The next
    line about that peer counts them: a link that comes and goes costs a line in ten seconds."""

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
