"""Theta_0 and momentum from an earlier version of another run: `run.init = "FOLDER@N"`, or that of a copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diloco_node.core.merge.fragments import Manifest
from diloco_node.daemon.checkpoint_copies import copies_at
from diloco_node.daemon.parameters import join_fragments, split_tensors
from diloco_node.daemon.run_files import region_folders
from diloco_node.daemon.run_record import past_of
from diloco_node.daemon.state_replay import read_past
from diloco_node.errors import ConfigError, StorageError
from diloco_node.numeric import F32


def read_past_init(init: str | Path, manifest: Manifest) -> tuple[list[F32], list[F32]] | None:
    """Parameters and momentum, per fragment shape (n,), float32, that `run.init` names; None: it names no version.

    manifest: of the run that begins. The earlier one may have other fragments, but has the same tensors.

    Raises ConfigError: the version can't be had, is of another model, or is not finite.
    """
    past = past_of(init)
    if past is None:
        return None
    try:
        earlier, *values = _read_past(*past)
    except (ConfigError, StorageError) as error:
        raise ConfigError(f"run.init: {error}") from error
    _check_tensors(init, earlier, manifest)
    vectors = []
    for kind, values_of_kind in zip(("tensor", "momentum of tensor"), values, strict=True):
        tensors = join_fragments(earlier, values_of_kind)
        for name, tensor in tensors.items():
            if not np.isfinite(np.dot(tensor.ravel(), tensor.ravel())):
                raise ConfigError(f"run.init: {init}: {kind} {name} holds NaN, infinite or huge values")
        vectors.append(split_tensors(manifest, tensors))
    theta, momentum = vectors
    return theta, momentum


def _read_past(place: str | Path, version: int) -> tuple[Manifest, Sequence[F32], Sequence[F32]]:
    """Manifest, parameters and momentum per fragment, from copies or from regions' folders."""
    copies = copies_at(place)
    if copies is not None:
        checkpoint = copies.find(version=version)
        return checkpoint.manifest, *copies.read(checkpoint)
    files, _, parameters = read_past(region_folders(Path(place)), version=version)
    return files.manifest, parameters.theta, parameters.momentum


def _check_tensors(init: str | Path, earlier: Manifest, manifest: Manifest) -> None:
    """Compare names and shapes; merge rules and fragments may differ. Raises ConfigError with the first difference."""
    there, here = ({spec.name: spec.shape for spec in side.tensors} for side in (earlier, manifest))
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            shapes = [str(list(side[name])) if name in side else "not there" for side in (there, here)]
            raise ConfigError(f"run.init: {init}: tensor {name} is {shapes[0]}, in this run's model {shapes[1]}")
