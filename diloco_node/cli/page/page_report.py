"""The page as one file, of a run that goes on or of what a finished one has left."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Final

from diloco_node.cli.admin_client import ask, target_in
from diloco_node.cli.page.merged import SNAPSHOT_PATH
from diloco_node.cli.places import folders_with
from diloco_node.daemon.admin.page_files import page_with
from diloco_node.daemon.run_history import RunHistory
from diloco_node.daemon.run_record import REPORT_NAME
from diloco_node.errors import ConfigError, StorageError
from diloco_node.escaping import escaped_document
from diloco_node.health.health_summary import joint_health
from diloco_node.state_names import NODE_NAME

PAGE_NAME: Final = "report.html"
DOCUMENT_BYTES_MAX: Final = 16 * 2**20


def write_page(folder: Path, path: Path) -> Path:
    """Write the page. Raises ConfigError: the folder holds no region. StorageError: the file can't be written."""
    snapshot = run_snapshot(folder)
    try:
        path.write_text(page_with(snapshot), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"can't write {path} ({error.strerror}); name another place with --out") from error
    return path


def run_snapshot(folder: Path) -> dict[str, Any]:
    """Collect what all regions of a folder show: as they answer, else as their files have it. Raises ConfigError."""
    regions: list[dict[str, Any]] = []
    runs: dict[Any, Path] = {}
    for place in folders_with(NODE_NAME, folder):
        node = _read_object(place / NODE_NAME)
        if (region := _region(place, node)) is not None:
            regions.append(region)
            runs.setdefault(node.get("run_id"), place)
    if len(runs) > 1:
        names = ", ".join(f"{run} in {place}" for run, place in runs.items())
        raise ConfigError(f"a page shows one run, and these are {len(runs)} ({names}): give the folder of one")
    if not regions:
        raise ConfigError(
            f"{folder} holds no region ({NODE_NAME}): give the state folder of a run or of a region, such as a demo's "
            "folder"
        )
    summary = _read_object(folder / REPORT_NAME)
    # A region's own report.json is its status, and no summary.
    tokens = summary.get("tokens") if "regions" in summary else None
    health = joint_health([region["status"] for region in regions])
    return {"regions": regions, "health": health, "summary": {"tokens": tokens}}


def _region(folder: Path, node: dict[str, Any]) -> dict[str, Any] | None:
    """Collect a region's snapshot; without a last status, what else it has left. None if it has not even a name.

    node: what its NODE_NAME says.
    """
    answer: dict[str, Any] = {}
    with contextlib.suppress(ConfigError, OSError, ValueError, RecursionError):  # it has ended
        answer = ask(target_in(folder), SNAPSHOT_PATH)
        if isinstance(answer.get("status"), dict):
            if answer["status"].get("region") == node.get("region"):
                return answer
            # On a disk that machines share, or behind a port that another region has now.
            answer = {"error": "another region answers at its admin port on this machine"}
    # Who has a port has not ended in order: then the last report is of an earlier start.
    status = {} if answer else _read_object(folder / REPORT_NAME)
    if "region" not in status:
        error = answer.get("error", f"it did not end in order: there is no whole {REPORT_NAME}")
        status = {"region": node.get("region"), "error": error}
    if not isinstance(status["region"], str):
        return None
    settings = node.get("settings_shown") or []
    return {"status": status, "history": RunHistory(folder).document(), "settings": settings}


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a region's folder, all texts fit to be shown; an empty one if there is none."""
    try:
        if path.stat().st_size > DOCUMENT_BYTES_MAX:
            return {}
        document = escaped_document(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
