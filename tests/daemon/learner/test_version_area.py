"""The version area: a slot that anybody reads is not written, and every version is offered to its learner."""

import asyncio

import numpy as np
import pytest

from diloco_node.core.events import OfferVersion
from diloco_node.daemon.learner.version_area import VersionArea
from diloco_node.wire.learner_link import NO_SLOT, SPARE_SLOTS, ToLearner, VersionOffered
from tests.kit.node_kit import Tasks, settle

SIZES = (5, 7)
SLOTS = len(SIZES) + SPARE_SLOTS


class FakeParameters:
    """Theta of each fragment is its version; copies wait for the test, in the order of a lock."""

    def __init__(self) -> None:
        self.versions = [0, 0]
        self.gates: list[asyncio.Event] = []
        self.is_slow = False
        self._locks = [asyncio.Lock(), asyncio.Lock()]

    async def move_theta(self, fragment: int, place: np.ndarray) -> int:
        async with self._locks[fragment]:
            if self.is_slow:
                gate = asyncio.Event()
                self.gates.append(gate)
                await gate.wait()
            place[:] = self.versions[fragment]
            return self.versions[fragment]


class Bench:
    def __init__(self) -> None:
        self.area = np.full((SLOTS, max(SIZES)), -1.0, np.float32)
        self.parameters = FakeParameters()
        self.said: list[VersionOffered] = []
        self.tasks = Tasks()
        self.version_area = VersionArea(
            self.area,
            SIZES,
            parameters=self.parameters,  # type: ignore[arg-type]
            send=self.send,
            spawn=self.tasks.spawn,
            now_ns=lambda: 7,
        )
        self.version_area.begin_learner(writes_initial=False)

    def send(self, message: ToLearner) -> bool:
        assert isinstance(message, VersionOffered)
        # What a learner would read at this very moment.
        place = self.version_area.place(message.fragment, message.slot)
        assert (place == message.version).all(), (message, place)
        self.said.append(message)
        return True

    async def offer(self, fragment: int, version: int, snapshot: int = -1) -> None:
        self.version_area.offer(OfferVersion(fragment, version, snapshot))
        await settle()

    def step(self, fragment: int, version: int) -> bool:
        """An outer step. Whether it found a slot."""
        place = self.version_area.free_place(fragment, version)
        if place is not None:
            place[:] = version
        self.parameters.versions[fragment] = version
        self.version_area.place_written(fragment)
        return place is not None

    async def commit(self, fragment: int, version: int) -> bool:
        """An outer step, and the offer of what it made. Whether it found a slot."""
        has_slot = self.step(fragment, version)
        await self.offer(fragment, version)
        return has_slot

    async def apply(self, number: int = -1, *, is_shared: bool = True) -> int:
        """The learner takes what it was offered there; the slot of its base."""
        offer = self.said[number]
        slot = offer.slot if is_shared else NO_SLOT
        self.version_area.release(offer.fragment, offer.version, slot)
        await settle()
        return slot

    def value(self, slot: int) -> float:
        return float(self.area[slot, 0])

    def versions(self) -> list[tuple[int, int, int]]:
        return [(offer.fragment, offer.version, offer.included_snapshot) for offer in self.said]


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_parameters_are_moved_into_a_slot_and_offered_there(bench: Bench) -> None:
    bench.parameters.versions[1] = 3
    await bench.offer(1, 3, 9)
    assert bench.versions() == [(1, 3, 9)]
    assert bench.area[bench.said[0].slot].tolist() == [3.0] * 7
    assert list(bench.version_area.offered_at_ns) == [(1, 3, 7)]


async def test_what_the_outer_step_wrote_is_offered_without_a_copy(bench: Bench) -> None:
    bench.parameters.is_slow = True
    assert await bench.commit(0, 1)
    assert bench.versions() == [(0, 1, -1)]


async def test_a_version_that_daemon_and_learner_hold_lies_in_one_slot(bench: Bench) -> None:
    """In a run that goes on, each fragment has one slot, and the spare ones go round."""
    for fragment in (0, 1):
        await bench.offer(fragment, 0)
        await bench.apply()
    for version in range(1, 20):
        for fragment in (0, 1):
            bases = dict(bench.version_area._base)
            assert await bench.commit(fragment, version)
            assert all(bench.value(slot) in (version, version - 1) for slot in bases.values()), (
                "a base was written over"
            )
            await bench.apply()
    assert bench.version_area._own == bench.version_area._base
    assert len(set(bench.version_area._own.values())) == 2


async def test_without_a_free_slot_parameters_stay_where_they_are_until_one_is_free(bench: Bench) -> None:
    for fragment in (0, 1):
        await bench.offer(fragment, 0)
        await bench.apply()
    held = {slot: bench.value(slot) for slot in bench.version_area._base.values()}
    assert await bench.commit(0, 1)
    assert await bench.commit(1, 1)
    assert not await bench.commit(0, 2), "two bases and two offers"
    assert bench.versions()[2:] == [(0, 1, -1), (1, 1, -1)]
    assert {slot: bench.value(slot) for slot in held} == held
    await bench.apply(2)
    assert bench.versions()[4:] == [(0, 2, -1)]


async def test_a_new_daemon_keeps_no_slot_for_what_its_learner_has_already(bench: Bench) -> None:
    """Nobody offers it: until the next rounds of those fragments no other version would have reached the learner."""
    bench.version_area.begin_learner(writes_initial=False, base_slots=(0, 1), base_versions=(3, 2))
    assert not any(bench.step(fragment, version) for fragment, version in ((0, 2), (0, 3), (1, 1), (1, 2)))
    assert await bench.commit(0, 4)
    assert await bench.commit(1, 3)
    assert bench.versions() == [(0, 4, -1), (1, 3, -1)]


async def test_a_learner_with_a_base_of_its_own_holds_no_slot(bench: Bench) -> None:
    for version in range(1, 5):
        assert await bench.commit(0, version)
        await bench.apply(is_shared=False)
    assert bench.version_area._base == {}


async def test_a_slot_that_the_learner_was_not_offered_does_not_become_its_base(bench: Bench) -> None:
    await bench.commit(0, 1)
    own = await bench.apply()
    await bench.commit(0, 2)
    bench.version_area.release(0, 2, own)  # it had that version already
    assert bench.version_area._base == {0: own}


async def test_a_newer_offer_waits_for_the_answer_to_the_one_before(bench: Bench) -> None:
    await bench.offer(0, 0)
    for version in (1, 2):
        await bench.commit(0, version)
    assert bench.versions() == [(0, 0, -1)]
    await bench.apply(0)
    assert bench.versions() == [(0, 0, -1), (0, 2, -1)]


async def test_an_older_answer_frees_nothing(bench: Bench) -> None:
    await bench.commit(0, 2)
    bench.version_area.release(0, 1, bench.said[0].slot)
    assert bench.version_area.is_offered(0, 2)
    await bench.apply()
    assert not bench.version_area.is_offered(0, 2)


async def test_a_snapshot_that_the_version_before_has_resolved_is_not_named_again(bench: Bench) -> None:
    """The learner was busy through two commits: both offers were decided against the base that it had then."""
    bench.parameters.versions[0] = 5
    await bench.offer(0, 5, snapshot=3)
    bench.version_area.free_place(0, 6)[:] = 6  # type: ignore[index]
    bench.parameters.versions[0] = 6
    bench.version_area.place_written(0)
    await bench.offer(0, 6, snapshot=3)
    await bench.apply()
    assert bench.versions() == [(0, 5, 3), (0, 6, -1)]


async def test_an_offer_that_never_reached_the_learner_resolves_nothing(bench: Bench) -> None:
    bench.parameters.is_slow = True
    bench.parameters.versions[0] = 5
    await bench.offer(0, 5, snapshot=3)
    await bench.offer(0, 6, snapshot=3)
    bench.parameters.versions[0] = 6
    bench.parameters.gates.pop().set()
    await settle()
    assert bench.versions() == [(0, 6, 3)]


async def test_a_version_that_the_parameters_have_left_is_not_offered(bench: Bench) -> None:
    await bench.commit(0, 1)
    await bench.apply()
    bench.version_area.free_place(0, 2)[:] = 2  # type: ignore[index]
    bench.parameters.versions[0] = 2
    bench.version_area.place_written(0)
    await bench.offer(0, 1)
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
    assert (bench.version_area.free_place(0, 2) is not None) is is_back


async def test_the_next_learner_gets_its_own_offer_after_a_void_copy(bench: Bench) -> None:
    bench.parameters.is_slow = True
    await bench.offer(0, 0, snapshot=4)
    bench.version_area.begin_learner(writes_initial=False)
    await bench.offer(0, 0)
    assert len(bench.version_area._copying) == 2, "none of the two is given out meanwhile"
    bench.parameters.gates.pop().set()
    await settle()
    for gate in bench.parameters.gates:
        gate.set()
    await settle()
    assert bench.versions() == [(0, 0, -1)]
    assert not bench.version_area._copying


async def test_offers_that_wait_for_the_slots_of_void_copies_are_made_when_those_end(bench: Bench) -> None:
    """A learner attaches again while both spare slots are being written: nothing else would wake its offers."""
    area, parameters = bench.version_area, bench.parameters
    parameters.versions, parameters.is_slow = [1, 1], True
    area.begin_learner(writes_initial=False, base_slots=(0, 1))
    for fragment in (0, 1):
        await bench.offer(fragment, 1)
    assert len(parameters.gates) == 2
    area.end_learner()
    area.begin_learner(writes_initial=False, base_slots=(0, 1))
    for fragment in (0, 1):
        await bench.offer(fragment, 1)
    assert bench.said == []
    for gate in parameters.gates:
        gate.set()
    await settle()
    assert sorted(bench.versions()) == [(0, 1, -1), (1, 1, -1)]


async def test_an_offer_that_waited_for_one_learner_is_not_made_to_the_next(bench: Bench) -> None:
    await bench.offer(0, 0)
    await bench.commit(0, 1)
    bench.version_area.begin_learner(writes_initial=False)
    await settle()
    assert bench.versions() == [(0, 0, -1)]


async def test_nothing_is_written_while_no_learner_is_attached(bench: Bench) -> None:
    """A connection may end while the learner reads: what it names is safe when it, or another, has attached."""
    await bench.commit(0, 1)
    base = await bench.apply()
    bench.version_area.end_learner()
    assert bench.version_area.free_place(0, 2) is None
    assert not await bench.commit(0, 2)
    bench.version_area.begin_learner(writes_initial=False, base_slots=(base, NO_SLOT))
    for version in range(2, 12):
        await bench.commit(1, version)
        await bench.apply()
    assert bench.value(base) == 1.0
    bench.version_area.begin_learner(writes_initial=False)
    assert bench.version_area._base == {}, "another process: it has none yet"


async def test_all_slots_are_the_learners_while_it_writes_theta_0(bench: Bench) -> None:
    bench.version_area.begin_learner(writes_initial=True)
    assert bench.version_area.is_lent
    assert bench.version_area.free_place(0, 2) is None
    await bench.offer(0, 0)
    await bench.offer(1, 0, 2)
    assert bench.said == []
    bench.area[:] = 77.0
    assert [place.tolist() for place in bench.version_area.initial_places()] == [[77.0] * 5, [77.0] * 7]
    bench.version_area.release_initial()
    await settle()
    assert not bench.version_area.is_lent
    assert bench.versions() == [(0, 0, -1), (1, 0, 2)]


async def test_a_learner_that_died_writing_theta_0_leaves_nothing_that_counts_as_written(bench: Bench) -> None:
    bench.version_area.begin_learner(writes_initial=True)
    bench.area[:] = 77.0
    bench.version_area.end_learner()
    bench.version_area.begin_learner(writes_initial=False)
    bench.parameters.versions[0] = 1
    await bench.offer(0, 1)
    assert bench.versions() == [(0, 1, -1)]


async def test_each_coming_and_going_is_another_life(bench: Bench) -> None:
    lives = [bench.version_area.generation]
    bench.version_area.end_learner()
    lives.append(bench.version_area.generation)
    bench.version_area.begin_learner(writes_initial=False)
    lives.append(bench.version_area.generation)
    assert lives == sorted(set(lives))
