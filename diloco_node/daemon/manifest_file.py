"""The model's tensors as the learner listed them, kept so that a restarted daemon need not wait for its learner."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from diloco_node.core.merge.fragments import Manifest, TensorSpec, build_manifest
from diloco_node.core.types import MergeRule
from diloco_node.errors import DilocoError
from diloco_node.storage.disk_id import set_aside
from diloco_node.storage.durable import DamagedFile, disk_error, replace_file

MANIFEST_NAME: Final = "manifest.json"


def save_manifest(state_dir: Path, manifest: Manifest) -> None:
    """Write tensors, number of fragments and digest; durable when this returns. Raises StorageError."""
    replace_file(state_dir / MANIFEST_NAME, [(json.dumps(as_document(manifest), indent=1) + "\n").encode()])


def as_document(manifest: Manifest) -> dict[str, Any]:
    """Tensors, number of fragments and digest."""
    return {
        "digest": manifest.digest,
        "fragments": len(manifest.fragments),
        "tensors": [[spec.name, list(spec.shape), spec.merge.value] for spec in manifest.tensors],
    }


def manifest_of(document: Mapping[str, Any]) -> Manifest:
    """The manifest of `as_document`. Raises DilocoError and what Python raises for a document that is none."""
    tensors = [TensorSpec(name, tuple(shape), MergeRule(merge)) for name, shape, merge in document["tensors"]]
    manifest = build_manifest(tensors, document["fragments"])
    if manifest.digest != document["digest"]:
        raise ValueError(f"it names digest {str(document['digest'])[:16]}, its tensors give {manifest.digest[:16]}")
    return manifest


def load_manifest(state_dir: Path) -> Manifest | None:
    """The manifest of `save_manifest`, laid out again; None on a fresh folder. Raises DamagedFile: it is not what was
    written. StorageError: the disk refuses."""
    path = state_dir / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error("read", path, error) from error
    try:
        return manifest_of(json.loads(data))
    except (DilocoError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged ({error!r}); the learner lists its tensors again") from error


def recover_manifest(state_dir: Path) -> tuple[Manifest | None, str]:
    """As `load_manifest`, but a damaged file is set aside and counts as missing; with what was wrong, or ""."""
    try:
        return load_manifest(state_dir), ""
    except DamagedFile as error:
        path = state_dir / MANIFEST_NAME
        try:
            return None, f"{error}. The damaged one is set aside as {set_aside(path)}"
        except OSError as refusal:
            raise disk_error("set aside", path, refusal) from refusal


def describe_difference(ours: Manifest, tensors: Sequence[TensorSpec]) -> str:
    """The first tensor on each side that the other has not, or has in another shape, in words; "" if none differs."""
    run, here = ({spec.name: spec for spec in specs} for specs in (ours.tensors, tensors))
    words = [f"tensor {min(names)} is not in the run's model" for names in [here.keys() - run.keys()] if names]
    words += [f"tensor {min(names)} of the run's model is missing" for names in [run.keys() - here.keys()] if names]
    for name in () if words else sorted(here):
        if (new := here[name]) != (old := run[name]):
            return f"tensor {name} is {new.shape} ({new.merge}), the run's is {old.shape} ({old.merge})"
    return ", ".join(words)
