"""What tests of the state folder share: chains of entries, and what a folder has."""

import os
from collections.abc import Callable
from pathlib import Path

from diloco_node.codec.digest import payload_digest, stripe_digest
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.types import Entry, LeaderBody, LedgerBase, Recovered
from diloco_node.storage.store import RegionStore
from diloco_node.storage.tensor_files import named_version

FRAGMENTS = 2
DIGEST = bytes(range(32))


def digest_of(*parts) -> bytes:
    return payload_digest([stripe_digest(bytes(part)) for part in parts if len(part)])


def chain(count: int, *, term: int = 1, after: tuple[Entry, ...] = (), name: str = "a") -> tuple[Entry, ...]:
    """`after`, and `count` entries more."""
    entries = list(after)
    for _ in range(count):
        previous = entries[-1].hash if entries else ZERO_HASH
        entries.append(seal(len(entries) + 1, term, previous, LeaderBody(f"{name}-{len(entries)}")))
    return tuple(entries)


def load(folder: Path) -> Recovered:
    store = RegionStore(folder)
    try:
        return store.load(FRAGMENTS)
    finally:
        store.close()


def flip(path: Path, bit: int) -> None:
    """Flip one bit in place (writing the whole file anew makes some file systems wait for the disk)."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def base_of(entry: Entry, summary: bytes = bytes(2000) + b"sums") -> LedgerBase:
    return LedgerBase(entry.index, entry.term, entry.hash, summary)


def refusing(code: int) -> Callable[..., int]:
    def call(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


def payload_versions(store: RegionStore, fragment: int) -> list[int]:
    places = (named_version(path) for path in sorted((store.folder / "payloads").glob("f*.bin")))
    return [place[1] for place in places if place is not None and place[0] == fragment]
