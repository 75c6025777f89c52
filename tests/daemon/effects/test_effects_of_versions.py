"""Effects of a committed version: it is applied, told and hashed; checkpoints, states and the final model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_node.codec.digest import fragment_digest, payload_digest, stripe_digest
from diloco_node.core.events import (
    AdoptState,
    ApplyVersion,
    DigestComputed,
    FetchFailed,
    FetchState,
    FinalWritten,
    InitialStateStored,
    LinkChanged,
    Note,
    OfferVersion,
    Send,
    StopLearner,
    StorePayload,
    TakeSnapshot,
    VersionApplied,
    WriteFinal,
)
from diloco_node.core.messages import PayloadRequested
from diloco_node.core.types import Ballot
from diloco_node.errors import DilocoError
from tests.kit.effects_kit import BALLOT, Bench, contribution_body, contribution_header
from tests.kit.node_kit import MANIFEST, HeldExecutor, settle, theta_of

# ---- versions --------------------------------------------------------------------------------------------------------


async def apply(bench: Bench) -> np.ndarray:
    """The committed payload applied; theta afterwards."""
    return bench.parameters.theta[0].copy()


async def stored_payload(bench: Bench) -> bytes:
    digest = await bench.receive_payload()
    await bench.do(StorePayload(BALLOT, 0, 1, digest, bench.stripes()))
    return digest


async def test_a_version_is_applied_told_and_hashed(bench: Bench) -> None:
    digest = await stored_payload(bench)
    place = bench.learner.version_area.places[0] = np.zeros(MANIFEST.fragments[0].size, np.float32)
    version_event, digest_event = await bench.do(ApplyVersion(bench.round(digest)))
    assert version_event == VersionApplied(0, 1)
    assert isinstance(digest_event, DigestComputed)
    assert (digest_event.fragment, digest_event.version) == (0, 1)
    theta = await apply(bench)
    assert place.tobytes() == theta.tobytes() != theta_of(0).tobytes()
    assert bench.parameters.theta[0] is place, "it lies there alone"
    assert bench.learner.version_area.written == [0]


async def test_memory_and_disk_give_the_same_parameters(bench: Bench, tmp_path: Path) -> None:
    digest = await stored_payload(bench)
    await bench.do(ApplyVersion(bench.round(digest)))
    from_memory = await apply(bench)
    await bench.parameters.adopt(0, 0)
    bench.table.close(BALLOT, 0, 1, is_committed=True)
    await bench.do(ApplyVersion(bench.round(digest)))
    assert (await apply(bench)).tobytes() == from_memory.tobytes()
    assert bench.learner.version_area.written == [0, 0], "told where they are, also if it is nowhere there"


async def test_other_stripes_of_the_same_ballot_are_never_applied(bench: Bench) -> None:
    """A reducer that sent this region other bytes than the majority: the ledger's payload counts."""
    digest = await stored_payload(bench)
    await bench.do(ApplyVersion(bench.round(digest)))
    right = await apply(bench)
    await bench.parameters.adopt(0, 0)
    bench.table.close(BALLOT, 0, 1, is_committed=True)
    for index, stripe in enumerate(bench.stripes()):
        peer_stripe = bench.merged_bytes(stripe, seed=99)
        header = bench.merged_header(index, digest=stripe_digest(peer_stripe))
        assert await bench.receive(stripe.reducer, header, peer_stripe)
    await bench.do(ApplyVersion(bench.round(digest)))
    assert (await apply(bench)).tobytes() == right.tobytes()


@pytest.mark.parametrize("effect", ["apply", "adopt"])
async def test_what_is_lost_on_disk_ends_the_daemon_with_a_code_that_it_is_restarted_after(
    bench: Bench, effect: str
) -> None:
    if effect == "apply":
        await bench.do(ApplyVersion(bench.round(b"y" * 32)))
    else:
        await bench.do(AdoptState(0, 5))
    (error,) = bench.tasks.errors
    bench.tasks.errors.clear()
    assert isinstance(error, DilocoError)
    assert error.exit_code == 1, "the supervisor gives a region up whose daemon says that its disk is at fault"
    assert "fetches" in str(error)


async def test_checkpoints_are_written_every_so_many_versions(bench: Bench) -> None:
    digest = await stored_payload(bench)
    await bench.do(ApplyVersion(bench.round(digest)))
    assert bench.store.state_versions(0) == (0,)
    bench.parameters.versions[0] = 1
    digest = payload_digest([stripe_digest(bench.merged_bytes(stripe)) for stripe in bench.stripes()])
    for index, stripe in enumerate(bench.stripes()):
        assert await bench.receive(
            stripe.reducer, bench.merged_header(index, Ballot(1, 2), version=2), bench.merged_bytes(stripe)
        )
    await bench.do(ApplyVersion(bench.round(digest, 2, Ballot(1, 2))))
    assert bench.store.state_versions(0) == (0, 2)


async def test_an_adopted_state_is_told_and_hashed(bench: Bench) -> None:
    events = await bench.do(AdoptState(1, 0))
    assert events[0] == VersionApplied(1, 0)
    assert isinstance(events[1], DigestComputed)


async def test_the_rest_goes_where_it_belongs(bench: Bench) -> None:
    message, offer = PayloadRequested(0, 1, b"d" * 32), OfferVersion(0, 0, -1)
    snapshot, note = TakeSnapshot(0, 1, 0), Note("kind", "text")
    await bench.do(Send("b", message), offer, snapshot, StopLearner("end", (4, 7)), note)
    assert bench.transport.sent == [("b", message)]
    assert bench.learner.version_area.offered == [offer]
    assert bench.learner.asked == [snapshot]
    assert bench.learner.stopped == [("end", (4, 7))]
    assert bench.notes == [note]


class FakeArea:
    """The version area with one learner's Theta_0 after the other."""

    def __init__(self) -> None:
        self.generation = 1
        self.seed = 1
        self.taken: list[int] = []

    def initial_places(self) -> list[np.ndarray]:
        return [theta_of(fragment, self.seed) for fragment in range(len(MANIFEST.fragments))]

    def release_initial(self) -> None:
        self.taken.append(self.generation)


async def test_theta_0_of_a_learner_that_is_gone_is_not_read_from_what_the_next_one_writes(bench: Bench) -> None:
    area: Any = FakeArea()
    disk, executor = bench.effects.disk, HeldExecutor()
    disk.files = executor
    store = disk.store_initial_state
    bench.tasks.spawn(store(area, area.generation), "first")
    bench.tasks.spawn(store(area, area.generation), "told again, and waits for the first")
    await settle()
    area.generation, area.seed = 2, 2  # another learner begins to write
    await executor.let_go()
    fragments = 1
    while executor.calls:
        await executor.let_go()
        fragments += 1
    assert fragments == 2, "the first goes on; who waited reads and writes nothing"
    assert area.taken == []
    assert bench.posted == []
    bench.tasks.spawn(store(area, area.generation), "second")
    await settle()
    while executor.calls:
        await executor.let_go()
    zeros = [np.zeros_like(theta_of(fragment)) for fragment in range(2)]
    digests = tuple(fragment_digest(theta_of(fragment, 2), zeros[fragment]) for fragment in range(2))
    assert bench.posted == [InitialStateStored(digests)]
    assert area.taken == [2]


async def test_the_final_model_is_written(bench: Bench) -> None:
    assert await bench.do(WriteFinal()) == [FinalWritten()]
    assert (bench.folder / "final.safetensors").exists()


async def test_the_loop_is_not_held_up_by_copies_and_checks(bench: Bench) -> None:
    """Whatever is in proportion to the fragment runs in the pool: while it stands still nothing has happened."""
    executor = HeldExecutor()
    bench.stripe_effects.pool = executor
    bench.effects.perform(bench.send_order())
    await settle()
    assert bench.posted == []
    assert len(executor.calls) == 2, "a copy for each of the stripes"
    await executor.let_go(2)
    assert bench.transport.transfers == []
    await executor.let_go()
    assert len(bench.transport.transfers) == 1, "what the other one gets was checked"
    assert bench.posted == []
    await executor.let_go()
    assert len(bench.posted) == 1, "the own stripe was checked"
    body = contribution_body(bench)
    buffer = bench.effects.transfer_opened("b", contribution_header(bench), len(body))
    assert buffer is not None
    buffer[:] = body
    bench.effects.transfer_closed("b", contribution_header(bench), buffer, is_whole=True)
    await settle()
    assert len(bench.posted) == 1
    await executor.let_go()
    assert len(bench.posted) == 2


async def test_the_core_hears_of_a_lost_link_before_the_fetches_that_fail_with_it(bench: Bench) -> None:
    bench.effects.perform(FetchState("b", 0, 1, b"d" * 32))
    bench.effects.link_changed("b", is_up=False)
    kinds = [type(event) for event in bench.posted]
    assert kinds == [LinkChanged, FetchFailed], "else it asks b again, which fails at once, and again"
