"""A run that is finished, as its state folder tells it: also when no daemon is there to answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diloco_node.errors import ConfigError, PeersUnreachable
from diloco_node.escaping import escaped, escaped_document


def finished_status(folder: Path) -> dict[str, Any] | None:
    """The region's last status document, with the end of the run; None: its run is not finished here."""
    from diloco_node.daemon.run_record import REPORT_NAME, is_complete, read_run_record, since_and_model

    record = read_run_record(folder)
    if record is None or not is_complete(folder, record):
        return None
    try:
        report = json.loads((folder / REPORT_NAME).read_bytes())
        document = dict(escaped_document(report)) if report["state"] == "finished" else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        document = {}
    document |= {"region": folder.resolve().name, "run_id": escaped(record.genesis.run_id), "state": "finished"}
    return document | {"reason": f"finished: {escaped(record.finished or '')}{since_and_model(folder)}"}


def no_daemon(folder: Path, cause: str) -> ConfigError | PeersUnreachable:
    """The error for an order to a region that no daemon answers for: its run is finished, or the daemon is down."""
    from diloco_node.core.rounds.extension import WAY_ON

    name = folder.resolve().name
    if (document := finished_status(folder)) is not None:
        return ConfigError(f"{name} takes no orders: its run is over ({document['reason']}): {WAY_ON}")
    return PeersUnreachable(
        f"the daemon of {name} does not run, or does not answer: {cause}. `diloco-node start --region {name}` starts "
        f"it; {folder}/logs/daemon.log says why it ended"
    )
