"""The run that a state folder belongs to, and whether it is over: read from the ledger before anything follows."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from diloco_node.config.urls import is_url
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.summary import roster_at, summary_of
from diloco_node.core.recovery.replay_plan import find_end, find_genesis
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import Entry, FinishedBody, GenesisBody, LedgerBase
from diloco_node.daemon.manifest_file import MANIFEST_NAME, load_manifest
from diloco_node.errors import ConfigError, DilocoError, StorageError, SupersededError
from diloco_node.state_names import FINAL_NAME, LEDGER_NAME
from diloco_node.storage.ledger_reader import LedgerReader

REPORT_NAME: Final = "report.json"
"""The region's last status document, in its folder."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The run that a ledger is of. roster: its members by the entries here.

    end: None: it did not end, as far as this region knows, or it was extended. settings: those at the last entry here.
    """

    genesis: GenesisBody
    roster: Roster
    end: FinishedBody | None
    settings: SettingsBody | None = None

    @property
    def finished(self) -> str | None:
        """Why it ended."""
        return None if self.end is None else self.end.reason

    def check(self, state_dir: Path, *, run_id: str, founders: Iterable[str]) -> None:
        """Refuse a folder of a run with another name or other regions, naming both. Raises ConfigError. founders: by
        run.toml, which may leave out who was removed or added."""
        genesis = self.genesis
        if genesis.run_id != run_id:
            raise ConfigError(
                f"{state_dir} holds run {genesis.run_id}, but run.id is {run_id}: a new run begins in a new folder. "
                f"Set run.state_dir (--state-dir) to another one, or run.id back to {genesis.run_id} "
                "to go on with that run"
            )
        here, roster = tuple(sorted(founders)), self.roster
        added = {name for name, line in roster.memberships.items() if name not in genesis.regions}
        lacking = {name for name in genesis.regions if name in roster.disks and not roster.memberships[name].address}
        if not set(here) <= {*genesis.regions, *added} or not lacking <= set(here):
            raise ConfigError(
                f"run {run_id} in {state_dir} began with the regions {', '.join(genesis.regions)}, run.toml has "
                f"{', '.join(here)}: a run keeps those that it began with there. `diloco-node members add` adds others "
                f"while it runs. For others begin a new run; run.init takes the old one's {FINAL_NAME}"
            )

    def check_model(self, state_dir: Path, digest: str, *, is_listed: bool) -> None:
        """Refuse a model that is not the run's. is_listed: by the learner, not manifest.json. Raises ConfigError."""
        if digest == self.genesis.manifest_digest:
            return
        path = state_dir / MANIFEST_NAME
        cause, remedy = f"{path} lists the tensors of", "remove it, and the learner lists its tensors"
        if is_listed:
            cause, remedy = f"{path} is gone, and the learner lists the tensors of", "start the run's own script"
        raise ConfigError(
            f"{cause} another model ({digest[:16]}) than run {self.genesis.run_id} trains "
            f"({self.genesis.manifest_digest[:16]}): {remedy}, or copy {MANIFEST_NAME} from another region's folder"
        )


def run_record(base: LedgerBase, entries: Sequence[Entry], fragments: int) -> RunRecord | None:
    """The record in a ledger; None before genesis. Raises ProtocolViolation: its sum can't be read. fragments: P."""
    summary = summary_of(base, fragments=fragments)
    genesis = find_genesis(summary, entries)
    if genesis is None:
        return None
    bodies = (*genesis.settings, *(summary.settings if summary else ()), *(entry.body for entry in entries))
    settings = [body for body in bodies if isinstance(body, SettingsBody)]
    return RunRecord(
        genesis, roster_at(summary, entries), find_end(summary, entries), settings[-1] if settings else None
    )


def read_run_record(state_dir: Path) -> RunRecord | None:
    """The record in a ledger; None: none, or a damaged one. Raises SupersededError: another version's."""
    reader = LedgerReader(state_dir)
    try:
        reader.read()  # first: nothing of another version's folder is judged, nor set aside
        manifest = load_manifest(state_dir)
        if manifest is None:
            return None
        return run_record(reader.base, reader.entries, len(manifest.fragments))
    except SupersededError:
        raise
    except DilocoError:
        return None


def past_of(init: str | Path) -> tuple[str | Path, int] | None:
    """The folder or URL, and the version that `run.init` names; None: it is no `FOLDER@N` and no `URL@N`. Raises
    ConfigError: a URL or a state folder without a version."""
    if is_url(init):
        url, _, number = str(init).rpartition("@")
        if url and number.isascii() and number.isdigit():
            return url, int(number)
        raise ConfigError(
            f"run.init: {init}: a URL is that of copies, and the version comes after it, as in {init}@120"
        )
    init = Path(init)
    # A file that this user may not read is there; its reader says so.
    if os.path.lexists(init) or not os.access(init.parent, os.X_OK):
        if os.path.lexists(init / LEDGER_NAME):
            raise ConfigError(
                f"run.init: {init} is a region's state folder: add a version, as in {init}@120, or give the "
                f"{FINAL_NAME} in it"
            )
        return None
    name, _, number = init.name.rpartition("@")
    folder = init.with_name(name) if name else init
    if name and number.isascii() and number.isdigit():
        return folder, int(number)
    if name and folder.is_dir():
        raise ConfigError(f"run.init: {init}: the number of a version comes after the @, as in {folder}@120")
    return None


def is_complete(state_dir: Path, record: RunRecord | None) -> bool:
    """Whether this region has finished the run: it knows the end, and the final model is on its disk, or was moved."""
    if record is None or record.finished is None:
        return False
    return (state_dir / FINAL_NAME).exists() or has_final_report(state_dir)


def set_final_aside(state_dir: Path) -> None:
    """Rename what the last end of a run that goes on has left, or remove it. Raises StorageError."""
    paths = (state_dir / f"final-{number}.safetensors" for number in count(1))
    final = state_dir / FINAL_NAME
    try:
        if final.exists():
            # Without a sync: the next final model is put in its place with one, and a folder keeps its order.
            final.rename(next(path for path in paths if not path.exists()))
        (state_dir / REPORT_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"what the last end has left in {state_dir} can't be set aside: {error}") from error


def has_final_report(state_dir: Path) -> bool:
    """Whether report.json is that of the finished run, and the final model was on disk then."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        return json.loads((state_dir / REPORT_NAME).read_bytes()).get("end", {}).get("is_written") is True
    return False


def since_and_model(state_dir: Path) -> str:
    """Say since when a run is finished here, and where the model is; to be added to the reason."""
    model = state_dir.resolve() / FINAL_NAME
    paths = [model, *([state_dir / REPORT_NAME] if has_final_report(state_dir) else [])]
    for path in paths:
        with contextlib.suppress(OSError):
            since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(path.stat().st_mtime))
            return f"; since {since}, the model {'is' if path == model else 'was'} {model}"
    return ""
