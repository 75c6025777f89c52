"""Copies of checkpoints, in a bucket or a folder: whole models with their momentum, each at one version of a run.

::

    v00000120/f000.bin          fragment 0: parameters, then momentum, float32, little-endian
    v00000120/checkpoint.json   the rest, written last: without it a copy is not whole

Equal versions are equal bytes, so regions may copy the same version at the same time. A fragment's digest is that by
which the regions compare theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from diloco_node.codec.digest import fragment_digest
from diloco_node.config.urls import is_url
from diloco_node.core.merge.fragments import Manifest
from diloco_node.daemon.manifest_file import as_document, manifest_of
from diloco_node.errors import ConfigError, DilocoError
from diloco_node.escaping import escaped
from diloco_node.numeric import F32
from diloco_node.storage.durable import DamagedFile
from diloco_node.storage.object_store import open_objects

CHECKPOINT_NAME: Final = "checkpoint.json"
FORMAT: Final = 1
DOCUMENT_BYTES_MAX: Final = 64 << 20
"""Limit of a checkpoint.json: some 200,000 tensors."""

SIDE_BY_SIDE: Final = 4
"""Fragments on their way at once; a large one is in several parts besides."""

_KEY: Final = re.compile(r"v(\d{8,18})/(.+)")


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """All that a copy says of itself.

    Attributes:
        run: hash of the run's genesis, hexadecimal: two runs of one name differ in it.
        region: that wrote it. written_at: UTC, ISO 8601. version, versions, step, tokens: as in `PastVersion`.
        digests: per fragment, hexadecimal. model: `[model]` of the run's trainer; for `export`.
    """

    run_id: str
    run: str
    region: str
    written_at: str
    version: int
    versions: tuple[int, ...]
    step: int
    tokens: int
    digests: tuple[str, ...]
    model: Mapping[str, Any]
    manifest: Manifest

    @property
    def content_bytes(self) -> int:
        """Parameters and momentum of all fragments."""
        return 8 * self.manifest.size


@dataclass(frozen=True, slots=True)
class CopyState:
    """A version under a URL. checkpoint: None: it can't be read. lack: why it is not whole; empty if it is."""

    version: int
    checkpoint: CheckpointCopy | None
    lack: str


class CheckpointCopies:
    """The copies at a place: a URL, or a folder. Raises ConfigError: the URL is of no store that is known."""

    def __init__(self, place: str | Path) -> None:
        self._objects = open_objects(place)
        self.place = self._objects.place

    def states(self) -> list[CopyState]:
        """Each version that something is there of, in order. Raises StorageError: the store refuses."""
        sizes: dict[int, dict[str, int]] = {}
        for key, size in self._objects.sizes().items():
            if (match := _KEY.fullmatch(key)) is not None and key == _key(int(match[1]), match[2]):
                sizes.setdefault(int(match[1]), {})[match[2]] = size
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            return list(pool.map(lambda version: self._state(version, sizes[version]), sorted(sizes)))

    def _state(self, version: int, sizes: Mapping[str, int]) -> CopyState:
        if CHECKPOINT_NAME not in sizes:
            return CopyState(version, None, f"{CHECKPOINT_NAME}, which is written last: the copy was cut off")
        try:
            checkpoint = self._document(version)
        except DamagedFile as error:
            return CopyState(version, None, f"a whole {CHECKPOINT_NAME} ({error})")
        lacks = [
            name
            for fragment in checkpoint.manifest.fragments
            if sizes.get(name := _name(fragment.index)) != 8 * fragment.size
        ]
        return CopyState(version, checkpoint, f"{lacks[0]} as it was written" if lacks else "")

    def _document(self, version: int) -> CheckpointCopy:
        """Read a checkpoint.json. Raises ConfigError: it is of a newer format. DamagedFile: it is none."""
        key = _key(version, CHECKPOINT_NAME)
        data = self._objects.read(key, DOCUMENT_BYTES_MAX).tobytes()
        number = FORMAT
        try:
            document = json.loads(data)
            number = document.pop("format")
            checkpoint = _checkpoint(document, version) if number == FORMAT else None
        except (DilocoError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise DamagedFile(f"{self.place}/{key} is damaged ({error!r}): copy that version again") from error
        if checkpoint is None:
            raise ConfigError(
                f"{self.place}/{key} has format {escaped(str(number)[:20])}, and this diloco-node reads {FORMAT}: "
                "install a newer one"
            )
        return checkpoint

    def find(self, *, version: int | None = None, step: int | None = None) -> CheckpointCopy:
        """Find the copy of a version, the newest one up to a step, or the newest of all. Raises ConfigError: what is
        there instead."""
        states = self.states()
        whole = {state.version: state.checkpoint for state in states if state.checkpoint and not state.lack}
        matches = [
            number
            for number, checkpoint in whole.items()
            if (version is None or number == version) and (step is None or checkpoint.step <= step)
        ]
        if matches:
            return whole[max(matches)]
        lack = next((state.lack for state in states if state.version == version), "")
        wish = "a copy" if version is None else f"version {version}"
        wish += "" if step is None else f" up to step {step:,}"
        numbers = ", ".join(map(str, sorted(whole)))
        raise ConfigError(
            f"{self.place} has no whole {wish}{f': it lacks {lack}' if lack else ''}. "
            f"{f'There are versions {numbers}' if numbers else 'diloco-node checkpoint copy REGION URL writes them'}"
        )

    def read(self, checkpoint: CheckpointCopy) -> tuple[list[F32], list[F32]]:
        """Parameters and momentum per fragment, each shape (n,), float32. Raises StorageError: as `fragment`."""
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            pairs = list(pool.map(lambda fragment: self.fragment(checkpoint, fragment), _fragments(checkpoint)))
        return [theta for theta, _ in pairs], [momentum for _, momentum in pairs]

    def faults(self, checkpoint: CheckpointCopy) -> list[str]:
        """Read all of a copy and keep none of it: a line for each fragment that has other bytes, or is gone."""

        def fault(fragment: int) -> str:
            try:
                self.fragment(checkpoint, fragment)
            except DamagedFile as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            return [line for line in pool.map(fault, _fragments(checkpoint)) if line]

    def fragment(self, checkpoint: CheckpointCopy, fragment: int) -> tuple[F32, F32]:
        """Parameters and momentum of a fragment; as `read`."""
        key = _key(checkpoint.version, _name(fragment))
        size_bytes = 8 * checkpoint.manifest.fragments[fragment].size
        content = self._objects.read(key, size_bytes)
        if len(content) == size_bytes:
            theta, momentum = np.split(content.view("<f4"), 2)
            if fragment_digest(theta, momentum).hex() == checkpoint.digests[fragment]:
                return theta, momentum
        raise DamagedFile(
            f"{self.place}/{key} is damaged: its bytes do not have the digest {checkpoint.digests[fragment][:16]} that "
            "the run gave them: copy that version again, with --force"
        )

    def check_run(self, run_id: str, run: str) -> list[CopyState]:
        """Check that the place has no other run's copies, and list what is there. Raises ConfigError, StorageError."""
        states = self.states()
        for state in states:
            if state.checkpoint is not None and state.checkpoint.run != run:
                same = ", another one of the same name" if state.checkpoint.run_id == run_id else ""
                raise ConfigError(
                    f"{self.place} has copies of run {state.checkpoint.run_id}{same}, not of {run_id}: "
                    "give each run a prefix of its own"
                )
        return states

    def write(
        self, checkpoint: CheckpointCopy, values: Callable[[int], tuple[F32, F32]], predecessor: CopyState | None
    ) -> None:
        """Write a copy; whole and durable when this returns. values: as `read` has those of a fragment.

        predecessor: of the same version; it is not whole any more from the first byte on.

        Raises StorageError: the store refuses; what was written until then is half a copy, and no other one changed.
        """
        key = _key(checkpoint.version, CHECKPOINT_NAME)
        if predecessor is not None and predecessor.checkpoint is not None:
            self._objects.remove(key)

        def put(fragment: int) -> None:
            chunks = [np.ascontiguousarray(vector, "<f4").view(np.uint8).data for vector in values(fragment)]
            self._objects.write(_key(checkpoint.version, _name(fragment)), chunks)

        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            list(pool.map(put, _fragments(checkpoint)))
        self._objects.write(key, [_encoded(checkpoint)])


def copies_at(place: str | Path) -> CheckpointCopies | None:
    """The copies at a URL, or in a folder that has some; None for any other folder."""
    is_place = is_url(place) or any(Path(place).glob(f"v*/{CHECKPOINT_NAME}"))
    return CheckpointCopies(place) if is_place else None


def _encoded(checkpoint: CheckpointCopy) -> bytes:
    values = {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}
    document = {"format": FORMAT, **values, "manifest": as_document(checkpoint.manifest)}
    return (json.dumps(document, indent=1) + "\n").encode()


def _checkpoint(document: Mapping[str, Any], version: int) -> CheckpointCopy:
    """Decode a checkpoint.json. Raises DilocoError, ValueError, KeyError, TypeError: a field is none, or too large."""
    lists = {name: tuple(document[name]) for name in ("versions", "digests")}
    checkpoint = CheckpointCopy(**{**document, **lists, "manifest": manifest_of(document["manifest"])})
    numbers = (checkpoint.version, checkpoint.step, checkpoint.tokens, *checkpoint.versions)
    texts = (checkpoint.run_id, checkpoint.run, checkpoint.region, checkpoint.written_at, *checkpoint.digests)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a number is none")
    if not all(type(text) is str for text in texts) or type(checkpoint.model) is not dict:
        raise ValueError("a text is none")
    if not checkpoint.version == version == min(checkpoint.versions):
        raise ValueError(f"it is of version {checkpoint.version}")
    if not len(checkpoint.versions) == len(checkpoint.digests) == len(checkpoint.manifest.fragments):
        raise ValueError(f"{len(checkpoint.versions)} versions of {len(checkpoint.manifest.fragments)} fragments")
    return checkpoint


def _fragments(checkpoint: CheckpointCopy) -> range:
    return range(len(checkpoint.versions))


def _name(fragment: int) -> str:
    return f"f{fragment:03d}.bin"


def _key(version: int, name: str) -> str:
    return f"v{version:08d}/{name}"
