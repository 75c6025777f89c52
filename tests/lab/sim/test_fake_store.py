"""The fake folder keeps what the real one promises: the same steps give the same answers on both."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_node.codec.digest import fragment_digest, payload_digest, stripe_digest
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.types import Entry, FinishedBody, LedgerBase
from diloco_node.errors import StorageError
from diloco_node.lab.sim.fake_store import DiskTime, FakeStore, FolderDisk
from diloco_node.lab.sim.world import MS
from diloco_node.storage.durable import DamagedFile
from diloco_node.storage.store import RegionStore

FRAGMENTS = 2
DIGEST = b"d" * 32


class Fake:
    """A fake folder whose writes are durable at once."""

    def __init__(self) -> None:
        self.disk = FolderDisk()
        self.time = DiskTime()
        self.rng = random.Random(5)

    def open(self) -> Any:
        store = FakeStore(self.disk, self.time, lambda: MS, lambda _ns, _call: None)
        return Durable(store, self.time)

    def damage(self, kind: str, fragment: int, version: int) -> None:
        keys = self.disk.payloads if kind == "payload" else self.disk.older_states
        self.disk.damaged.update(key for key in keys if key[:2] == (fragment, version))


class Durable:
    """Carries out what each call has the disk do, as a thread's call does when it ends."""

    def __init__(self, store: Any, time: DiskTime) -> None:
        self._store, self._time = store, time

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def run(*args: Any) -> Any:
            self._time.begin()
            try:
                return call(*args)
            finally:
                for write in self._time.writes if self._time.ns else ():
                    write()

        return run


class Real:
    """The real folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store: RegionStore | None = None

    def open(self) -> Any:
        if self.store is not None:
            self.store.close()
        self.store = RegionStore(self.folder)
        return self.store

    def damage(self, kind: str, fragment: int, version: int) -> None:
        folder = "payloads" if kind == "payload" else "state"
        (path,) = (self.folder / folder).glob(f"f{fragment:03d}-v{version:08d}*.bin")
        data = bytearray(path.read_bytes())
        data[600] ^= 1
        path.write_bytes(data)


@pytest.fixture(params=["real", "fake"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "fake":
        yield Fake()
        return
    real = Real(tmp_path)
    yield real
    assert real.store is not None
    real.store.close()


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(100).astype(np.float32)


def chain(count: int, *, term: int = 1, after: tuple[Entry, ...] = ()) -> tuple[Entry, ...]:
    entries = list(after)
    for _ in range(count):
        previous = entries[-1].hash if entries else ZERO_HASH
        entries.append(seal(len(entries) + 1, term, previous, FinishedBody((), f"reason {len(entries)}")))
    return tuple(entries[len(after) :])


def test_a_new_folder_is_empty(place: Any) -> None:
    recovered = place.open().load(FRAGMENTS)
    assert (recovered.term, recovered.voted_for, recovered.entries) == (0, "", ())
    assert (recovered.states, recovered.payloads) == ((-1, -1), frozenset())


def test_term_vote_and_entries_are_there_again_after_a_cut(place: Any) -> None:
    store = place.open()
    store.load(FRAGMENTS)
    first = chain(3)
    store.persist(1, "a", 0, first)
    second = chain(1, term=2, after=first[:1])
    store.persist(2, "b", 2, second)
    store.persist(3, "", 0, ())
    recovered = place.open().load(FRAGMENTS)
    assert (recovered.term, recovered.voted_for) == (3, "")
    assert recovered.entries == first[:1] + second


def test_a_ledger_that_begins_with_sums_is_there_again_with_what_follows_them(place: Any) -> None:
    store = place.open()
    store.load(FRAGMENTS)
    entries = chain(8)
    store.persist(1, "a", 0, entries[:6])
    base = LedgerBase(4, 1, entries[3].hash, b"sums")
    store.persist(2, "b", 6, entries[5:], base)
    recovered = place.open().load(FRAGMENTS)
    assert (recovered.term, recovered.voted_for) == (2, "b")
    assert (recovered.base, recovered.entries) == (base, entries[4:])


def test_payloads_are_read_as_they_were_written(place: Any) -> None:
    store = place.open()
    store.load(FRAGMENTS)
    parts = [values(1).tobytes(), values(2).tobytes()]
    digest = payload_digest([stripe_digest(part) for part in parts])
    store.store_payload(0, 1, digest, parts)
    store.store_payload(1, 4, digest, parts)
    for fragment, version in ((0, 1), (1, 4)):
        assert bytes(store.read_payload(fragment, version, digest)) == b"".join(parts)
    assert place.open().load(FRAGMENTS).payloads == {(0, 1, digest), (1, 4, digest)}
    with pytest.raises(DamagedFile):
        store.read_payload(0, 2, digest)


def test_a_damaged_state_falls_back_and_a_damaged_payload_after_it_is_missing(place: Any) -> None:
    store = place.open()
    store.load(FRAGMENTS)
    part = values(1).tobytes()
    digest = payload_digest([stripe_digest(part)])
    for version in (1, 2, 3):
        store.store_state(0, version, values(version), values(9), DIGEST)
        store.store_payload(0, version, digest, [part])
    place.damage("state", 0, 3)
    place.damage("payload", 0, 3)
    store = place.open()
    recovered = store.load(FRAGMENTS)
    assert recovered.states == (2, -1)
    assert recovered.payloads == {(0, 1, digest), (0, 2, digest)}
    theta, momentum = store.read_state(0, 2)
    assert np.array_equal(theta, values(2))
    assert np.array_equal(momentum, values(9))
    with pytest.raises(DamagedFile):
        store.read_state(0, 3)
    place.damage("state", 0, 2)
    with pytest.raises(DamagedFile):
        store.read_state(0, 2)
    assert store.state_versions(0) == (1,)


def test_a_state_is_given_by_its_digest_and_those_that_are_set_aside_are_gone(place: Any) -> None:
    store = place.open()
    store.load(FRAGMENTS)
    digests = {version: fragment_digest(values(version), values(9)) for version in (1, 2, 3)}
    for version, digest in digests.items():
        store.store_state(0, version, values(version), values(9), digest)
    both = np.concatenate((values(2), values(9)))
    assert bytes(store.read_state_bytes(0, 2, digests[2])) == both.tobytes()
    with pytest.raises(DamagedFile):
        store.read_state_bytes(0, 2, digests[3])
    assert store.state_versions(0) == (1, 2, 3), "another digest is no damage"
    store.set_states_aside(0, 2)
    assert store.state_versions(0) == (1,)
    recovered = place.open().load(FRAGMENTS)
    assert (recovered.states, recovered.state_digests) == ((1, -1), (digests[1], b""))


def test_pruning_keeps_two_states_and_the_payloads_after_the_older_one(place: Any) -> None:
    store = place.open()
    store.load(FRAGMENTS)
    part = values(1).tobytes()
    digest = payload_digest([stripe_digest(part)])
    for version in range(1, 7):
        store.store_payload(0, version, digest, [part])
        if version % 2 == 0:
            store.store_state(0, version, values(version), values(9), DIGEST)
    store.prune(0, 100)
    recovered = place.open().load(FRAGMENTS)
    assert store.state_versions(0) == (4, 6)
    assert {version for _, version, _ in recovered.payloads} == {5, 6}


@pytest.mark.parametrize("fault", ["is_full", "fsync_failures"])
def test_what_the_disk_refuses_is_not_there_and_goes_through_later(fault: str) -> None:
    fake = Fake()
    store = fake.open()
    entries = chain(2)

    def calls() -> list[Callable[[], None]]:
        return [
            lambda: store.persist(1, "", 0, entries),
            lambda: store.store_payload(0, 1, DIGEST, [b"abcd"]),
            lambda: store.store_state(0, 1, values(1), values(2), DIGEST),
        ]

    setattr(fake.disk, fault, 1)
    for call in calls():
        setattr(fake.disk, fault, 1)
        with pytest.raises(StorageError):
            call()
    assert (fake.disk.entries, fake.disk.payloads, fake.disk.states) == ([], {}, {})
    setattr(fake.disk, fault, 0)
    for call in calls():
        call()
    assert tuple(fake.disk.entries) == entries
    assert (0, 1, DIGEST) in fake.disk.payloads
    assert fake.disk.states[0].version == 1


def test_a_crash_leaves_each_write_whole_or_not_at_all_and_a_prefix_of_the_ledger() -> None:
    seen = set()
    for seed in range(60):
        fake = Fake()
        store = FakeStore(fake.disk, fake.time, lambda: MS, lambda _ns, _call: None)
        fake.time.begin()
        store.persist(1, "a", 0, chain(2))
        store.store_state(0, 1, values(1), values(2), DIGEST)
        assert not fake.disk.entries
        assert not fake.disk.states
        fake.disk.crash(random.Random(seed), is_power_cut=seed % 2 == 0)
        assert tuple(fake.disk.entries) == chain(2)[: len(fake.disk.entries)]
        seen.add((len(fake.disk.entries), bool(fake.disk.states), fake.disk.voted_for))
    assert len(seen) >= 4
