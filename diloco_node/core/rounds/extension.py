"""A run that is over goes on in the same ledger when its regions are started with wider limits.

The end names the limits that it came at. An extension names others, none of which is below the old one, and is taken
by regions that were started with the same. After it rounds are opened again; parameters, momentum and the account of
tokens stay as the end left them.
"""

from __future__ import annotations

from typing import Final

from diloco_node.core.types import ExtendedBody, FinishedBody, RunSettings

WAY_ON: Final = "to go on with it, raise run.steps or run.tokens in run.toml, and start its regions"
"""Remedy in the answer to an order to a run that is over."""


def lasting_end(end: FinishedBody | None, settings: RunSettings) -> FinishedBody | None:
    """Return the end of the run; None if there is none, or these settings are to continue it."""
    return None if extension(end, settings) is not None else end


def extension(end: FinishedBody | None, settings: RunSettings) -> ExtendedBody | None:
    """Return the entry by which these settings continue a run after its end; None if they do not, or it goes on."""
    body = ExtendedBody(settings.steps_max, settings.tokens_max)
    return body if end is not None and not extension_fault(end, body) else None


def extension_fault(end: FinishedBody | None, body: ExtendedBody) -> str:
    """Return why an entry can't continue a run after its end; empty if it can."""
    if end is None:
        return "an extension of a run that is not over"
    before, after = (end.steps_max, end.tokens_max), (body.steps_max, body.tokens_max)
    # 0 is no limit; one that comes where there was none may already be reached, and then the run ends again.
    is_wider = all(limit in (0, old) or old == 0 or limit > old for old, limit in zip(before, after, strict=True))
    return "" if before != after and is_wider else f"limits (steps, tokens) {after} are no wider than {before}"
