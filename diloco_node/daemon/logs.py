"""Log lines: one fact per line, key=value, to standard error; the supervisor keeps them in logs/."""

from __future__ import annotations

import logging
import sys

import structlog


def set_up_logs(level: str = "info") -> None:
    """Configure structlog for this process. Control characters in values are escaped (names come from outside)."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(
                key_order=["timestamp", "level", "event", "region", "peer", "fragment", "version"],
                drop_missing=True,
                bool_as_flag=False,
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
