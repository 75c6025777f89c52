"""The version area: a place is touched by one side at a time, and every version is offered to its learner."""

import asyncio

import numpy as np
import pytest

from diloco_node.core.events import OfferVersion
from diloco_node.daemon.learner.version_area import VersionArea
from diloco_node.wire.learner_link import ToLearner, VersionOffered
from tests.kit.node_kit import Tasks, settle

OFFSETS = (0, 5, 12)


class FakeParameters:
    """Theta of each fragment is its version; copies wait for the test, in the order of a lock."""

    def __init__(self) -> None:
        self.versions = [0, 0]
        self.gates: list[asyncio.Event] = []
        self.is_slow = False
        self._locks = [asyncio.Lock(), asyncio.Lock()]

    async def copy_theta(self, fragment: int, out: np.ndarray) -> int:
        async with self._locks[fragment]:
            if self.is_slow:
                gate = asyncio.Event()
                self.gates.append(gate)
                await gate.wait()
            out[:] = self.versions[fragment]
            return self.versions[fragment]


class Bench:
    def __init__(self) -> None:
        self.area = np.full(OFFSETS[-1], -1.0, np.float32)
        self.parameters = FakeParameters()
        self.said: list[ToLearner] = []
        self.tasks = Tasks()
        self.version_area = VersionArea(
            self.area,
            OFFSETS,
            parameters=self.parameters,  # type: ignore[arg-type]
            send=self.send,
            spawn=self.tasks.spawn,
            now_ns=lambda: 7,
        )
        self.version_area.begin_learner(writes_initial=False)

    def send(self, message: ToLearner) -> bool:
        assert isinstance(message, VersionOffered)
        # What a learner would read at this very moment.
        place = self.version_area.place(message.fragment)
        assert (place == message.version).all(), (message, place)
        self.said.append(message)
        return True

    async def offer(self, fragment: int, version: int, snapshot: int = -1) -> None:
        self.version_area.offer(OfferVersion(fragment, version, snapshot))
        await settle()

    def versions(self) -> list[tuple[int, int, int]]:
        return [(offer.fragment, offer.version, offer.included_snapshot) for offer in self.said]  # type: ignore[union-attr]


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_an_offer_is_copied_into_its_own_place(bench: Bench) -> None:
    bench.parameters.versions[1] = 3
    await bench.offer(1, 3, 9)
    assert bench.versions() == [(1, 3, 9)]
    assert bench.area.tolist() == [-1.0] * 5 + [3.0] * 7
    assert list(bench.version_area.offered_at_ns) == [(1, 3, 7)]


async def test_what_the_outer_step_wrote_is_offered_without_a_copy(bench: Bench) -> None:
    place = bench.version_area.free_place(0)
    assert place is not None
    place[:] = 1.0
    bench.version_area.place_written(0, 1)
    bench.parameters.versions[0] = 99  # a copy would be of this
    await bench.offer(0, 1)
    assert bench.versions() == [(0, 1, -1)]


async def test_a_place_that_is_read_is_not_free_and_the_newest_offer_waits_for_it(bench: Bench) -> None:
    await bench.offer(0, 0)
    assert bench.version_area.free_place(0) is None
    assert bench.version_area.free_place(1) is not None
    for version in (1, 2):
        bench.parameters.versions[0] = version
        await bench.offer(0, version)
    assert bench.versions() == [(0, 0, -1)]
    bench.version_area.release(0, 0)
    await settle()
    assert bench.versions() == [(0, 0, -1), (0, 2, -1)]


async def test_an_older_answer_frees_nothing(bench: Bench) -> None:
    bench.parameters.versions[0] = 2
    await bench.offer(0, 2)
    bench.version_area.release(0, 1)
    assert bench.version_area.free_place(0) is None
    bench.version_area.release(0, 2)
    assert bench.version_area.free_place(0) is not None


async def test_a_snapshot_that_the_version_before_has_resolved_is_not_named_again(bench: Bench) -> None:
    """The learner was busy through two commits: both offers were decided against the base that it had then."""
    bench.parameters.versions[0] = 5
    await bench.offer(0, 5, snapshot=3)
    bench.parameters.versions[0] = 6
    await bench.offer(0, 6, snapshot=3)
    bench.version_area.release(0, 5)
    await settle()
    assert bench.versions() == [(0, 5, 3), (0, 6, -1)]


async def test_an_offer_that_never_reached_the_learner_resolves_nothing(bench: Bench) -> None:
    bench.parameters.is_slow = True
    bench.parameters.versions[0] = 5
    await bench.offer(0, 5, snapshot=3)
    await bench.offer(0, 6, snapshot=3)
    bench.parameters.versions[0] = 6
    bench.parameters.gates.pop().set()
    await settle()
    bench.parameters.gates.pop().set() if bench.parameters.gates else None
    await settle()
    assert bench.versions() == [(0, 6, 3)]


async def test_an_offer_that_came_while_the_replica_moved_on_is_not_forgotten(bench: Bench) -> None:
    bench.parameters.is_slow = True
    await bench.offer(0, 0)
    bench.parameters.versions[0] = 1
    await bench.offer(0, 1)
    bench.parameters.gates.pop().set()  # version 1 is copied, version 0 was asked for
    await settle()
    assert bench.versions() == [(0, 1, -1)]


@pytest.mark.parametrize("is_back", [False, True])
async def test_an_offer_for_a_learner_that_is_gone_is_not_told_to_the_next_one(bench: Bench, is_back: bool) -> None:
    bench.parameters.is_slow = True
    await bench.offer(0, 0, snapshot=4)
    bench.version_area.end_learner()
    if is_back:
        bench.version_area.begin_learner(writes_initial=False)
    bench.parameters.gates.pop().set()
    await settle()
    assert bench.said == []
    assert (bench.version_area.free_place(0) is not None) is is_back


async def test_the_next_learner_gets_its_own_offer_after_a_void_copy(bench: Bench) -> None:
    bench.parameters.is_slow = True
    await bench.offer(0, 0, snapshot=4)
    bench.version_area.begin_learner(writes_initial=False)
    await bench.offer(0, 0)
    bench.parameters.gates.pop().set()
    await settle()
    for gate in bench.parameters.gates:
        gate.set()
    await settle()
    assert bench.versions() == [(0, 0, -1)]


async def test_an_offer_that_waited_for_one_learner_is_not_made_to_the_next(bench: Bench) -> None:
    await bench.offer(0, 0)
    bench.parameters.versions[0] = 1
    await bench.offer(0, 1, snapshot=4)
    bench.version_area.begin_learner(writes_initial=True)
    bench.version_area.release_initial()
    await settle()
    assert bench.versions() == [(0, 0, -1)]


async def test_nothing_is_written_while_no_learner_is_attached(bench: Bench) -> None:
    """A connection may end while the learner reads: the place is safe again when it, or another, has attached."""
    await bench.offer(0, 0)
    bench.version_area.end_learner()
    assert bench.version_area.free_place(0) is None
    await bench.offer(0, 1)
    assert bench.versions() == [(0, 0, -1)]
    bench.version_area.begin_learner(writes_initial=False)
    assert bench.version_area.free_place(0) is not None


async def test_the_whole_version_area_is_the_learners_while_it_writes_theta_0(bench: Bench) -> None:
    place = bench.version_area.free_place(0)
    assert place is not None
    place[:] = 1.0
    bench.version_area.place_written(0, 1)
    bench.parameters.versions[:] = [1, 1]
    bench.version_area.begin_learner(writes_initial=True)
    assert bench.version_area.free_place(0) is None
    await bench.offer(0, 1)
    await bench.offer(1, 1, 2)
    assert bench.said == []
    bench.area[:] = 77.0  # the learner writes over what was there before
    bench.version_area.release_initial()
    await settle()
    assert bench.versions() == [(0, 1, -1), (1, 1, 2)]


async def test_a_learner_that_died_writing_theta_0_leaves_nothing_that_counts_as_written(bench: Bench) -> None:
    place = bench.version_area.free_place(0)
    assert place is not None
    place[:] = 1.0
    bench.version_area.place_written(0, 1)
    bench.parameters.versions[0] = 1
    bench.version_area.begin_learner(writes_initial=True)
    bench.area[:] = 77.0
    bench.version_area.end_learner()
    bench.version_area.begin_learner(writes_initial=False)
    await bench.offer(0, 1)
    assert bench.versions() == [(0, 1, -1)]


async def test_each_coming_and_going_is_another_life(bench: Bench) -> None:
    lives = [bench.version_area.generation]
    bench.version_area.end_learner()
    lives.append(bench.version_area.generation)
    bench.version_area.begin_learner(writes_initial=False)
    lives.append(bench.version_area.generation)
    assert lives == sorted(set(lives))


async def test_the_places_are_lent_for_theta_0_once_and_only_when_it_is_wanted() -> None:
    bench = Bench()
    assert not bench.version_area.is_lent
    bench.version_area.begin_learner(writes_initial=True)
    assert bench.version_area.is_lent
    bench.version_area.release_initial()
    assert not bench.version_area.is_lent
