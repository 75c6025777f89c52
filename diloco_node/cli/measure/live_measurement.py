"""`measure` by way of a running daemon: find the one of our region, ask it over its admin socket, show how it goes on.

A daemon measures over the links that it has, inside its measurement lane and its budget (`measure.measurement`).
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from diloco_node.cli.admin_client import ask_in, error_kind, order_answer, post
from diloco_node.errors import ConfigError, PeerError, PeersUnreachable

if TYPE_CHECKING:
    from diloco_node.measure.measurement import OnPartial

LINE_BYTES_MAX: Final = 16 * 2**20
SILENT_S: Final = 20.0
"""A daemon that measures says something twice a second."""


def find_daemon(config: Path | None, region: str | None) -> Path | None:
    """The state folder of the running daemon that is meant: of the region named, else the only one here; None: none
    answers.

    Raises ConfigError: several run here and none was named; or run.toml is wrong, or does not have the region.
    """
    from diloco_node.cli.options import load

    run_config = load(config)
    if region is not None:
        run_config.check_region(region)
    names = [region] if region is not None else list(run_config.regions)
    folders = [run_config.state_dir(name).resolve() for name in names]
    daemons = [folder for folder in folders if "error" not in ask_in(folder)]
    if len(daemons) > 1:
        running = ", ".join(folder.name for folder in daemons)
        raise ConfigError(
            f"{len(daemons)} regions run on this machine ({running}): say from which one to measure, with --region NAME"
        )
    return daemons[0] if daemons else None


def measure(
    daemon: Path, document: dict[str, Any], on_progress: Callable[[str], None], on_partial: OnPartial
) -> dict[str, Any]:
    """Ask a daemon to measure, and wait for what comes of it.

    Args:
        daemon: its state folder, which has the region's name. document: see `measure.measurement.parse_request`.
        on_progress: called with the current test. on_partial: called with the results so far.

    Raises ConfigError: it refuses the request. PeersUnreachable: there is no link, or the daemon went away.
    DilocoError: the measurement failed.
    """
    try:
        with post(daemon, "measure", document, timeout_s=SILENT_S) as answer:
            if answer.status != http.client.OK:
                order_answer(daemon, answer)  # which it is not: this raises the reason
            return follow(answer, on_progress, on_partial)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PeersUnreachable(
            f"the daemon of {daemon.name} in {daemon} went away in the middle of a measurement ({error}); "
            "see its logs/daemon.log"
        ) from None


def follow(
    answer: http.client.HTTPResponse, on_progress: Callable[[str], None], on_partial: OnPartial
) -> dict[str, Any]:
    """Read lines until the last one."""
    while line := answer.readline(LINE_BYTES_MAX):
        event = json.loads(line)
        if "document" in event:
            return dict(event["document"])
        if "error" in event:
            raise error_kind(event.get("exit_code"), PeerError)(str(event["error"]))
        if "so_far" in event:
            on_partial(dict(event["so_far"]))
        else:
            on_progress(str(event.get("now", "")))
    raise ConnectionError("it said nothing at the end")
