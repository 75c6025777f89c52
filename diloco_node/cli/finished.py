"""A run that is finished, as its state folder tells it: also when no daemon is there to answer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from diloco_node.escaping import escaped, escaped_document


def finished_status(folder: Path) -> dict[str, Any] | None:
    """The region's last status document, with the end of the run; None: its run is not finished here."""
    from diloco_node.daemon.run_record import REPORT_NAME, is_complete, read_run_record

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


def since_and_model(folder: Path) -> str:
    """Say since when a run is finished here, and where the model is; to be added to the reason."""
    from diloco_node.daemon.run_record import REPORT_NAME
    from diloco_node.state_names import FINAL_NAME

    model = folder.resolve() / FINAL_NAME
    for path in (model, folder / REPORT_NAME):
        try:
            since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(path.stat().st_mtime))
        except OSError:
            continue
        return f"; since {since}, the model {'is' if path == model else 'was'} {model}"
    return ""
