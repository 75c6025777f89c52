"""The file `learner.json`, by which the supervisor tells its daemon of the learner's process; not durable."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from diloco_node.atomic_file import replace_file

PROCESS_FILE: Final = "learner.json"
BYTES_MAX: Final = 16_384
REASON_CHARS_MAX: Final = 1000
STATES: Final = frozenset({"running", "waiting", "stopped", "done"})


def write_process(state_dir: Path, document: Mapping[str, Any] | None) -> None:
    """Leave the newest word; None: the supervisor runs no learner. A disk that refuses must not stop it: then the old
    one stays."""
    with contextlib.suppress(OSError):
        if document is None:
            (state_dir / PROCESS_FILE).unlink(missing_ok=True)
            return
        replace_file(state_dir / PROCESS_FILE, json.dumps(document).encode(), is_durable=False)


def read_process(state_dir: Path) -> dict[str, Any]:
    """The newest word; empty where there is none, or none that makes sense."""
    try:
        with (state_dir / PROCESS_FILE).open("rb") as file:
            process_document = json.loads(file.read(BYTES_MAX))
        document = {
            "state": str(process_document["state"]),
            "reason": str(process_document["reason"])[:REASON_CHARS_MAX],
            "crashes": int(process_document["crashes"]),
            "hangs": int(process_document["hangs"]),
            "exit_code": None if process_document.get("exit_code") is None else int(process_document["exit_code"]),
            "restarts": int(process_document.get("restarts", 0)),
            "log": str(process_document.get("log", ""))[:REASON_CHARS_MAX],
            "lost": {
                str(kind)[:REASON_CHARS_MAX]: int(steps) for kind, steps in (process_document.get("lost") or {}).items()
            }
            or None,
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
    return document if document["state"] in STATES else {}
