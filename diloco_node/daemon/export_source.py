"""The merged model in a region's folder: the final one, each fragment's newest state on disk, or an earlier version.

Reading only, so a daemon may run on it. In mid-run the fragments are of different versions, as in the run itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from diloco_node.core.ledger.summary import RunSummary
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.recovery.past_versions import PastVersion
from diloco_node.core.types import Entry, RoundBody
from diloco_node.daemon.checkpoint_copies import copies_at
from diloco_node.daemon.manifest_file import MANIFEST_NAME, load_manifest
from diloco_node.daemon.parameters import join_fragments
from diloco_node.daemon.run_files import TRIES, final_model, read_ledger, region_folders
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.state_replay import read_past
from diloco_node.errors import ConfigError, StorageError
from diloco_node.learner.builtin.shape import ModelSettings
from diloco_node.numeric import F32
from diloco_node.state_names import FINAL_NAME, NODE_NAME, TRAINER_NAME
from diloco_node.storage.durable import DamagedFile
from diloco_node.storage.store import RegionStore


@dataclass(frozen=True, slots=True)
class MergedModel:
    """The merged model of a run, as one region holds it.

    Attributes:
        trainer: `[model]` of its trainer, as far as it is known.
        tensors: by name, float32, shaped; trainable ones only, tied ones once.
        versions: per fragment; empty: the run is over, and the ledger can't be read.
        tokens: merged up to these versions, the mean over the fragments; None: the ledger does not say.
        is_final: the run is over, and this is its end.
        past: the version that was asked for by number or step; None: none was.
    """

    trainer: Mapping[str, Any]
    run_id: str
    region: str
    manifest: Manifest
    tensors: dict[str, F32]
    versions: tuple[int, ...]
    tokens: int | None
    is_final: bool
    past: PastVersion | None = None


def read_merged(folder: Path) -> MergedModel:
    """Read a region's folder. Raises ConfigError, StorageError: a file is missing, damaged, or none of ours."""
    manifest = load_manifest(folder)
    if manifest is None:
        raise StorageError(f"{folder} has no {MANIFEST_NAME}: the region never learnt its model")
    spec = NodeSpec.load(folder / NODE_NAME)
    is_final, versions = final_model(folder, len(manifest.fragments))
    if is_final:
        tensors = _final(folder, manifest)
    else:
        states = [_newest(folder, fragment.index) for fragment in manifest.fragments]
        versions = tuple(version for version, _ in states)
        tensors = _assemble(manifest, [theta for _, theta in states])
    ledger = read_ledger(folder, len(manifest.fragments))
    tokens = _tokens(*ledger, versions) if ledger and versions else None
    return MergedModel(trainer_model(folder), spec.run_id, spec.region, manifest, tensors, versions, tokens, is_final)


def read_merged_past(place: str | Path, *, version: int | None, step: int | None) -> MergedModel:
    """Read the model as it was at a version of the run, or at the newest one up to a step.

    Args:
        place: copies; or as for `region_folders`: the first region that has all it needs is taken.

    Raises ConfigError, StorageError: as `state_replay.read_past`, or as `CheckpointCopies`.
    """
    if (copies := copies_at(place)) is not None:
        copy = copies.find(version=version, step=step)
        past = PastVersion(copy.version, copy.versions, copy.step, copy.tokens)
        tensors = join_fragments(copy.manifest, copies.read(copy)[0])
        origin = (copy.model, copy.run_id, copy.region, copy.manifest)
    else:
        files, past, parameters = read_past(region_folders(Path(place)), version=version, step=step)
        tensors = parameters.full_tensors()
        origin = (trainer_model(files.folder), files.spec.run_id, files.spec.region, files.manifest)
    return MergedModel(*origin, tensors, past.versions, past.tokens, False, past)


def trainer_model(folder: Path) -> dict[str, Any]:
    """`[model]` of a region's trainer, as far as `export` needs it; empty: it is not known. Raises ConfigError."""
    path = folder / TRAINER_NAME
    model = read_object(path).get("model", {}) if path.is_file() else {}
    return {name: model[name] for name in ("hf", *ModelSettings.__dataclass_fields__) if name in model}


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError: it can't be read, or is something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is no JSON object")
    return document


def _newest(folder: Path, fragment: int) -> tuple[int, F32]:
    """Version and parameters of the newest whole state."""
    store = RegionStore(folder, is_read_only=True)
    for _ in range(TRIES):
        for version in reversed(store.state_versions(fragment)):
            try:
                return version, store.read_state(fragment, version)[0]
            except DamagedFile:
                continue
    raise StorageError(
        f"{folder} has no whole state of fragment {fragment}: take another region's folder, or wait for its first one"
    )


def _final(folder: Path, manifest: Manifest) -> dict[str, F32]:
    path = folder / FINAL_NAME
    try:
        tensors: dict[str, F32] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} can't be read ({error}): take another region's folder") from error
    shapes = {spec.name: ("float32", spec.shape) for spec in manifest.tensors}
    if {name: (str(values.dtype), values.shape) for name, values in tensors.items()} != shapes:
        raise StorageError(f"{path} does not hold the tensors of {MANIFEST_NAME}: one is of another run")
    return tensors


def _assemble(manifest: Manifest, thetas: Sequence[F32]) -> dict[str, F32]:
    for fragment, theta in zip(manifest.fragments, thetas, strict=True):
        if len(theta) != fragment.size:
            raise StorageError(f"fragment {fragment.index} has {len(theta)} values on disk, expected {fragment.size}")
    return join_fragments(manifest, thetas)


def _tokens(summary: RunSummary | None, entries: Sequence[Entry], versions: Sequence[int]) -> int | None:
    """Tokens in these versions, the mean over the fragments, rounded down; None: they are older than the sum."""
    if summary is not None and any(
        now < sum_version for now, sum_version in zip(versions, summary.versions, strict=True)
    ):
        return None
    total = 0 if summary is None else sum(summary.merged)
    for entry in entries:
        body = entry.body
        if isinstance(body, RoundBody) and body.version <= versions[body.fragment]:
            total += sum(member.contribution.tokens for member in body.members)
    return total // len(versions)
