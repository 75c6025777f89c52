"""The model's tensors as the learner listed them, kept so that a restarted daemon need not wait for its learner."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from diloco_node.core.merge.fragments import Manifest, TensorSpec, build_manifest
from diloco_node.core.types import MergeRule
from diloco_node.errors import StorageError
from diloco_node.storage.durable import replace_file

MANIFEST_NAME: Final = "manifest.json"


def save_manifest(state_dir: Path, manifest: Manifest) -> None:
    """Write tensors, number of fragments and digest; durable when this returns. Raises StorageError."""
    document = {
        "digest": manifest.digest,
        "fragments": len(manifest.fragments),
        "tensors": [[spec.name, list(spec.shape), spec.merge.value] for spec in manifest.tensors],
    }
    replace_file(state_dir / MANIFEST_NAME, [(json.dumps(document, indent=1) + "\n").encode()])


def load_manifest(state_dir: Path) -> Manifest | None:
    """What `save_manifest` wrote, laid out again; None on a fresh folder.

    Raises:
        StorageError: the file is damaged, or lays out to another digest than it names.
    """
    path = state_dir / MANIFEST_NAME
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text())
        tensors = [TensorSpec(name, tuple(shape), MergeRule(merge)) for name, shape, merge in document["tensors"]]
        manifest = build_manifest(tensors, document["fragments"])
        expected = document["digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} can't be read ({error!r}); remove it, the learner lists its tensors again"
        ) from error
    if manifest.digest != expected:
        raise StorageError(
            f"{path} names digest {expected[:16]}, its tensors give {manifest.digest[:16]}; remove it, the learner "
            "lists its tensors again"
        )
    return manifest


def describe_difference(ours: Manifest, tensors: Sequence[TensorSpec]) -> str:
    """The first tensor in which a learner's model differs from the run's, in words; "" if none does."""
    known = {spec.name: spec for spec in ours.tensors}
    for spec in sorted(tensors, key=lambda spec: spec.name):
        mine = known.pop(spec.name, None)
        if mine is None:
            return f"tensor {spec.name} is not in the run's model"
        if mine != spec:
            return f"tensor {spec.name} is {spec.shape} ({spec.merge}), the run's is {mine.shape} ({mine.merge})"
    if known:
        return f"tensor {min(known)} of the run's model is missing"
    return ""
