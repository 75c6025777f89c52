"""Effects carried out: bytes that don't change under way, what is refused, what waits for the disk, what is freed."""

from collections.abc import AsyncIterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_node.codec.digest import fragment_digest, payload_digest, stripe_digest
from diloco_node.codec.kernels import squared_norms
from diloco_node.codec.projection import project
from diloco_node.core.events import (
    AdoptState,
    ApplyVersion,
    CloseBallot,
    DigestComputed,
    Event,
    FetchFailed,
    FetchState,
    FinalWritten,
    InitialStateStored,
    LedgerPersisted,
    LinkChanged,
    MergedStripeArrived,
    Note,
    OfferVersion,
    PayloadNotStored,
    PayloadStored,
    PersistLedger,
    ReduceStripe,
    ReductionDone,
    Send,
    SendMerged,
    StopLearner,
    StorePayload,
    TakeSnapshot,
    VersionApplied,
    WriteFinal,
)
from diloco_node.core.messages import ContributionStripe, PayloadRequested
from diloco_node.core.projections import ContributionsProjected, Project, ProjectContributions, Projected, Window
from diloco_node.core.types import Ballot
from diloco_node.daemon.effects import disk_effects
from diloco_node.daemon.effects.open_stripes import MergedPart
from diloco_node.errors import DilocoError, LedgerLost, StorageError
from tests.kit.effects_kit import BALLOT, Bench, arrived, contribution_body, contribution_header
from tests.kit.node_kit import MANIFEST, HeldExecutor, contribution_of, make_parameters, settle, theta_of


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    parameters, store = await make_parameters(tmp_path)
    bench_ = Bench(tmp_path, parameters, store)
    yield bench_
    bench_.tasks.running and await bench_.tasks.finish()
    assert bench_.tasks.errors == []
    store.close()


# ---- contributions ---------------------------------------------------------------------------------------------------


async def test_stripes_of_a_contribution_go_to_their_reducers_and_the_own_one_stays_here(bench: Bench) -> None:
    events = await bench.do(bench.send_order())
    assert events == [arrived(bench, bench.own())]
    ((peer, header, body),) = bench.transport.transfers
    own_stripe, peer_stripe = bench.stripes()
    assert (peer, header) == (
        "b",
        ContributionStripe(BALLOT, 1, 1, bench.own(), peer_stripe.block_start, peer_stripe.block_stop),
    )
    copy = bench.table.contribution(1, bench.own(), own_stripe.block_start, own_stripe.block_stop)
    assert copy is not None
    assert copy.tobytes() + body == bench.learner.contribution_area[0].tobytes()


async def test_stripes_that_are_held_already_are_not_sent_again(bench: Bench) -> None:
    assert await bench.do(bench.send_order(skip=(0, 1))) == []
    assert bench.transport.transfers == []


async def test_a_snapshot_into_the_contribution_area_does_not_change_what_waits_for_a_slow_link(bench: Bench) -> None:
    bench.transport.is_slow = True
    before = bench.learner.contribution_area[0].tobytes()
    bench.effects.perform(bench.send_order())
    await settle()
    bench.learner.contribution_area[0][:] = 0
    await bench.transport.deliver()
    own_stripe, _ = bench.stripes()
    copy = bench.table.contribution(1, bench.own(), own_stripe.block_start, own_stripe.block_stop)
    assert copy is not None
    assert copy.tobytes() + bench.transport.transfers[0][2] == before


async def test_bytes_of_a_learner_that_was_restarted_meanwhile_are_not_sent(bench: Bench) -> None:
    bench.learner.incarnation = 2
    assert await bench.do(bench.send_order()) == []
    assert bench.transport.transfers == []


async def test_own_stripes_are_checked_side_by_side(bench: Bench) -> None:
    executor = HeldExecutor()
    bench.stripe_effects.pool = executor
    bench.effects.perform(bench.send_order(stripes=bench.stripes(reducers=("a", "a", "a"))))
    await settle()
    await executor.let_go(3)  # the copies
    assert len(executor.calls) == 3, "a check for each of them"
    await executor.let_go(3)
    await bench.tasks.finish()
    assert [event.stripe for event in bench.posted] == [0, 1, 2]


async def test_the_next_ballot_takes_the_place_of_the_transfers_of_the_one_before(bench: Bench) -> None:
    bench.transport.is_slow = True
    for number in (1, 2):
        bench.effects.perform(bench.send_order(Ballot(1, number)))
        await settle()
    assert [header.ballot for _, header in bench.transport.cancelled] == [Ballot(1, 1)]  # type: ignore[union-attr]
    bench.effects.perform(bench.send_order(Ballot(1, 2), stripes=bench.stripes(reducers=("b", "a"))))
    await settle()
    assert len(bench.transport.cancelled) == 1, "the same ballot gives nothing up"
    await bench.transport.deliver()
    assert {header.ballot for _, header, _ in bench.transport.transfers} == {Ballot(1, 2)}  # type: ignore[union-attr]


async def test_a_link_that_is_down_loses_the_stripe_and_nothing_else(bench: Bench) -> None:
    bench.transport.is_down = True
    assert len(await bench.do(bench.send_order())) == 1


async def test_a_contribution_that_arrives_whole_is_held(bench: Bench) -> None:
    header, body = contribution_header(bench), contribution_body(bench)
    assert await bench.receive("b", header, body, is_whole=False)
    assert bench.posted == []
    assert bench.table.buffered_bytes() == 0
    assert await bench.receive("b", header, body)
    assert bench.posted == [arrived(bench, header.contribution)]
    assert bench.table.buffered_bytes() == len(body)


async def test_an_own_stripe_that_does_not_decode_never_counts_as_held(bench: Bench) -> None:
    """It is written by another process: a round must not wait for its sum for ever."""
    bench.learner.contribution_area[0][:4] = np.frombuffer(np.float32("nan").tobytes(), np.uint8)
    assert await bench.do(bench.send_order()) == []
    assert bench.notes[-1].kind == "corrupt"
    assert bench.notes[-1].is_alarm
    assert bench.table.buffered_bytes() == 0
    assert bench.transport.rejected == [], "no peer has sent it"


async def test_what_the_learner_wrote_is_checked_before_another_region_could_be_harmed(bench: Bench) -> None:
    """Else a learner with damaged memory would cost its region strikes. Stripes that decode go all the same."""
    stripes = bench.stripes(reducers=("a", "b", "c"))
    start = bench.learner.blocks[0].span_bytes(0, stripes[1].block_start)
    bench.learner.contribution_area[0][start : start + 4] = np.frombuffer(np.float32("nan").tobytes(), np.uint8)
    assert len(await bench.do(bench.send_order(stripes=stripes))) == 1
    assert [peer for peer, *_ in bench.transport.transfers] == ["c"]
    [note] = bench.notes
    assert (note.kind, note.is_alarm) == ("corrupt", True)
    assert "not sent to b" in note.text


async def test_a_contribution_that_does_not_decode_never_counts_as_held(bench: Bench) -> None:
    body = bytearray(contribution_body(bench))
    body[:4] = np.float32("nan").tobytes()
    assert await bench.receive("b", contribution_header(bench), bytes(body))
    assert bench.posted == []
    assert bench.table.buffered_bytes() == 0
    assert [(note.kind, note.is_alarm) for note in bench.notes] == [("corrupt", True)]


async def test_a_contribution_that_does_not_decode_is_one_strike_however_often_it_comes(bench: Bench) -> None:
    """Several stripes of it, in one ballot after the other; the same of two fragments in turn is two."""
    for ballot in (Ballot(1, 1), Ballot(1, 2)):
        for index, (start, stop) in enumerate(((0, 1), (1, 2))):
            for fragment in (0, 1):
                header = ContributionStripe(ballot, index, 1, contribution_of("b", fragment), start, stop)
                span = bench.learner.blocks[fragment].byte_slice(start, stop)
                body = bench.learner.contribution_area[fragment][span].copy()
                body[:4] = np.frombuffer(np.float32("inf").tobytes(), np.uint8)
                assert await bench.receive("b", header, body.tobytes())
    assert [note.kind for note in bench.notes] == ["corrupt"] * 8
    assert [name for name, _ in bench.transport.rejected] == ["b"] * 2
    assert "stripe 0 of the contribution of b: block 0 " in str(bench.transport.rejected[0][1])


@pytest.mark.parametrize(
    ("peer", "changes", "extra_bytes", "is_strike"),
    [
        ("c", {}, 0, False),  # another learner's name: whose fault it is nobody knows
        ("b", {"version": 2}, 0, False),  # not the round of its base: nobody would free it
        ("b", {"version": 0, "contribution": contribution_of("b", base=-1)}, 0, False),
        ("b", {"version": 4, "contribution": contribution_of("b", base=3)}, 0, False),  # too far ahead
        # No region with this model makes these.
        ("b", {}, 1, True),
        ("b", {"block_start": -1}, 0, True),
        ("b", {"block_stop": 2**30}, 0, True),
        ("b", {"contribution": replace(contribution_of("b"), fragment=99)}, 0, True),
    ],
)
async def test_a_contribution_that_makes_no_sense_gets_no_memory(
    bench: Bench, peer: str, changes: dict[str, Any], extra_bytes: int, is_strike: bool
) -> None:
    header = contribution_header(bench, **changes)
    for _ in range(2):
        assert not await bench.receive(peer, header, contribution_body(bench) + b"\0" * extra_bytes)
    assert [note.kind for note in bench.notes] == (["corrupt", "refused"] if is_strike else ["refused"]) * 2
    assert [name for name, _ in bench.transport.rejected] == ["b"] * is_strike, "one for a contribution"
    assert bench.table.is_empty


async def test_a_contribution_that_comes_when_its_round_is_over_leaves_nothing(bench: Bench) -> None:
    header, body = contribution_header(bench), contribution_body(bench)
    buffer = bench.effects.transfer_opened("b", header, len(body))
    assert buffer is not None
    buffer[:] = body
    bench.parameters.versions[0] = 1  # applied while the bytes came in
    bench.effects.transfer_closed("b", header, buffer, is_whole=True)
    await bench.tasks.finish()
    assert bench.posted == []
    assert bench.table.is_empty


async def test_late_bytes_that_the_core_gives_back_are_freed(bench: Bench) -> None:
    assert await bench.receive("b", contribution_header(bench), contribution_body(bench))
    bench.parameters.versions[0] = 1
    await bench.do(CloseBallot(BALLOT, 0, 1, committed=False))
    assert bench.table.is_empty


async def test_a_failed_ballot_leaves_the_contributions_for_the_next_one(bench: Bench) -> None:
    assert await bench.receive("b", contribution_header(bench), contribution_body(bench))
    await bench.receive_payload()
    await bench.do(CloseBallot(BALLOT, 0, 1, committed=False))
    assert bench.table.buffered_bytes() == len(contribution_body(bench))


# ---- reduce and merged stripes ---------------------------------------------------------------------------------------


async def reduce_here(bench: Bench) -> list[Event]:
    own_stripe = bench.stripes()[0]
    assert await bench.receive("b", contribution_header(bench), contribution_body(bench))
    coefficients = (1.0,) * len(MANIFEST.fragments[0].pieces)
    names = (contribution_of("b"),)
    return await bench.do(
        ReduceStripe(BALLOT, 0, 1, 0, own_stripe.block_start, own_stripe.block_stop, names, (coefficients,), None)
    )


async def test_a_reduced_stripe_is_told_kept_and_sent(bench: Bench) -> None:
    reduction, body = await reduce_here(bench)
    assert isinstance(reduction, ReductionDone)
    assert isinstance(body, MergedStripeArrived)
    assert (body.ballot, body.stripe, body.digest) == (BALLOT, 0, reduction.digest)
    own_stripe = bench.stripes()[0]
    order = SendMerged(BALLOT, 0, 0, 1, reduction.digest, own_stripe.block_start, own_stripe.block_stop, ("b", "c"))
    assert await bench.do(order) == []
    assert [peer for peer, _, _ in bench.transport.transfers] == ["b", "c"]
    assert all(stripe_digest(body) == reduction.digest for _, _, body in bench.transport.transfers)


async def test_a_reduction_without_its_bytes_says_whose_are_missing(bench: Bench) -> None:
    own_stripe = bench.stripes()[0]
    names, coefficients = (contribution_of("c"),), (1.0,) * len(MANIFEST.fragments[0].pieces)
    order = ReduceStripe(BALLOT, 0, 1, 0, own_stripe.block_start, own_stripe.block_stop, names, (coefficients,), None)
    assert await bench.do(order) == []
    assert bench.notes[-1].text == "no bytes from c"
    assert bench.table.is_empty


async def test_merged_stripes_go_on_only_where_their_ballot_committed(bench: Bench) -> None:
    reduction = (await reduce_here(bench))[0]
    assert isinstance(reduction, ReductionDone)
    own_stripe = bench.stripes()[0]
    bench.transport.is_slow = True
    send = SendMerged(BALLOT, 0, 0, 1, reduction.digest, own_stripe.block_start, own_stripe.block_stop, ("b",))
    bench.effects.perform(send)
    await settle()
    bench.parameters.versions[0] = 1
    bench.effects.perform(CloseBallot(BALLOT, 0, 1, committed=True))
    bench.effects.perform(CloseBallot(BALLOT, 0, 1, committed=False))  # late bytes of the same ballot
    await settle()
    assert bench.transport.cancelled == [], "a slower region still waits for it"
    bench.effects.perform(CloseBallot(Ballot(1, 9), 1, 2, committed=True))
    await settle()
    assert bench.transport.cancelled == [], "another fragment"
    bench.parameters.versions[0] = 2
    bench.effects.perform(CloseBallot(Ballot(1, 3), 0, 2, committed=True))
    await settle()
    assert [peer for peer, _ in bench.transport.cancelled] == ["b"], "the next version is out: it would pile up"


async def test_a_failed_ballots_merged_stripe_stops_at_once(bench: Bench) -> None:
    reduction = (await reduce_here(bench))[0]
    assert isinstance(reduction, ReductionDone)
    own_stripe = bench.stripes()[0]
    bench.transport.is_slow = True
    bench.effects.perform(
        SendMerged(BALLOT, 0, 0, 1, reduction.digest, own_stripe.block_start, own_stripe.block_stop, ("b",))
    )
    await settle()
    bench.effects.perform(CloseBallot(BALLOT, 0, 1, committed=False))
    await settle()
    assert len(bench.transport.cancelled) == 1


async def test_a_merged_stripe_counts_when_it_matches_its_digest(bench: Bench) -> None:
    stripe = bench.stripes()[1]
    header, body = bench.merged_header(1), bench.merged_bytes(stripe)
    assert await bench.receive("b", replace(header, digest=b"x" * 32), body)
    assert bench.posted == []
    assert bench.notes[-1].kind == "corrupt"
    assert await bench.receive("b", header, body)
    norms = tuple(squared_norms(bench.parameters.blocks[0], body, stripe.block_start, stripe.block_stop))
    assert bench.posted == [MergedStripeArrived(BALLOT, 1, 0, 1, header.digest, stripe, norms)]
    assert any(norms)


async def test_once_the_ballot_is_known_a_merged_stripe_comes_from_its_reducer_only(bench: Bench) -> None:
    await bench.do(bench.send_order())
    body = bench.merged_bytes(bench.stripes()[1])
    assert not await bench.receive("c", bench.merged_header(1), body)
    assert await bench.receive("b", bench.merged_header(1), body)
    assert not await bench.receive("b", bench.merged_header(1), body), "it is here"


async def test_a_second_stripe_of_the_same_name_changes_nothing(bench: Bench) -> None:
    """Two that were begun before the first had been checked."""
    stripe = bench.stripes()[1]
    peer_stripe = bench.merged_bytes(stripe, seed=9)
    first, second = bench.merged_header(1), bench.merged_header(1, digest=stripe_digest(peer_stripe))
    buffers = [
        bench.effects.transfer_opened(peer, bench_, len(peer_stripe)) for peer, bench_ in (("b", first), ("b", second))
    ]
    for peer, header, buffer, body in zip(
        ("b", "b"), (first, second), buffers, (bench.merged_bytes(stripe), peer_stripe), strict=True
    ):
        assert buffer is not None
        buffer[:] = body
        bench.effects.transfer_closed(peer, header, buffer, is_whole=True)
    await bench.tasks.finish()
    (event,) = bench.posted
    assert isinstance(event, MergedStripeArrived)
    assert (event.digest, event.cut) == (first.digest, stripe)


# ---- disk ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_effects, "STORAGE_RETRY_S", 0.0)


async def test_the_ledger_is_written_in_order_also_while_the_disk_refuses(bench: Bench, no_wait: None) -> None:
    bench.store.refusals = {"persist 1": 2}
    events = await bench.do(*(PersistLedger(10 + term, term, "", 0, ()) for term in (1, 2, 3)))
    assert bench.store.persisted == [1, 2, 3]
    assert events == [LedgerPersisted(11), LedgerPersisted(12), LedgerPersisted(13)]


async def test_after_a_lost_ledger_nothing_is_answered(bench: Bench, no_wait: None) -> None:
    bench.store.is_ledger_lost = True
    for term in (1, 2):
        bench.effects.perform(PersistLedger(10 + term, term, "", 0, ()))
    await bench.tasks.finish()
    assert [type(error) for error in bench.tasks.errors] == [LedgerLost], "the daemon ends with it"
    bench.tasks.errors.clear()
    bench.store.is_ledger_lost = False
    await bench.do(PersistLedger(13, 3, "", 0, ()))
    assert bench.store.persisted == []
    assert bench.posted == [], "an answer to a later write answers for the lost one, too"


async def test_a_full_disk_is_said_once_and_its_end_too(bench: Bench, no_wait: None) -> None:
    bench.store.refusals = {"persist 1": 9}
    await bench.do(PersistLedger(1, 1, "", 0, ()))
    assert [(note.kind, note.is_alarm) for note in bench.notes] == [("disk", True), ("disk", False)]
    assert "full" in bench.notes[0].text
    assert "10 tries" in bench.notes[1].text


async def test_a_payload_is_stored_whole_and_told(bench: Bench, no_wait: None) -> None:
    digest = await bench.receive_payload()
    bench.store.refusals = {"payload": 2}
    assert await bench.do(StorePayload(BALLOT, 0, 1, digest, bench.stripes())) == [PayloadStored(0, 1, digest)]
    payload = b"".join(bench.merged_bytes(stripe) for stripe in bench.stripes())
    assert bench.store.read_payload(0, 1, digest).tobytes() == payload


async def test_stripes_that_are_no_whole_fragment_are_not_stored_under_their_digest(bench: Bench) -> None:
    stripe = bench.stripes()[0]
    assert await bench.receive("a2", bench.merged_header(0), bench.merged_bytes(stripe))
    digest = payload_digest([stripe_digest(bench.merged_bytes(stripe))])
    assert await bench.do(StorePayload(BALLOT, 0, 1, digest, bench.stripes())) == [PayloadNotStored(BALLOT, 0, 1)]
    assert bench.notes[-1].is_alarm
    with pytest.raises(StorageError):
        bench.store.read_payload(0, 1, digest)


async def test_a_payload_is_stored_though_its_ballot_is_closed_right_after(bench: Bench) -> None:
    digest = await bench.receive_payload()
    events = await bench.do(
        StorePayload(BALLOT, 0, 1, digest, bench.stripes()), CloseBallot(BALLOT, 0, 1, committed=False)
    )
    assert events == [PayloadStored(0, 1, digest)]
    assert bench.store.read_payload(0, 1, digest).nbytes > 0


async def test_stripes_of_another_digest_are_not_stored(bench: Bench) -> None:
    await bench.receive_payload()
    assert await bench.do(StorePayload(BALLOT, 0, 1, b"x" * 32, bench.stripes())) == [PayloadNotStored(BALLOT, 0, 1)]
    assert bench.notes[-1].is_alarm


def windows_of(bench: Bench) -> tuple[Window, ...]:
    """A window in each stripe of the payload."""
    stripes = bench.stripes()
    pieces = [bench.parameters.blocks[0].piece_of(stripe.block_stop - 1) for stripe in stripes]
    return tuple(
        Window(stripe.reducer, piece, stripe.block_stop - 1, stripe.block_stop, bytes([piece]) * 8)
        for stripe, piece in zip(stripes, pieces, strict=True)
    )


async def test_an_audited_payload_is_projected_with_the_own_contribution(bench: Bench) -> None:
    await bench.receive_payload()
    windows, own = windows_of(bench), bench.own()
    (event,) = await bench.do(Project(BALLOT, 0, 1, windows, bench.stripes(), own))
    assert isinstance(event, Projected)
    down, up = bench.parameters.blocks[0], bench.learner.blocks[0]
    payload = np.frombuffer(b"".join(bench.merged_bytes(stripe) for stripe in bench.stripes()), np.uint8)
    for place, window in enumerate(windows):
        cut = window.block_start, window.block_stop
        assert (event.projection.sums[place], event.projection.errors[place]) == project(
            down, payload[down.byte_slice(*cut)], window
        )
        body = bench.learner.contribution_area[0][up.byte_slice(*cut)]
        assert event.projection.contribution[place] == project(up, body, window)[0]


@pytest.mark.parametrize("is_here", [True, False])
async def test_with_error_feedback_a_payload_may_differ_by_what_the_version_before_lost(
    bench: Bench, is_here: bool
) -> None:
    bench.stripe_effects.keeps_residual = True
    digest, windows, stripes = await bench.receive_payload(), windows_of(bench), bench.stripes()
    bodies = [np.frombuffer(bench.merged_bytes(stripe), np.uint8) for stripe in stripes]
    if is_here:
        bench.store.store_payload(0, 1, digest, [memoryview(body) for body in bodies])
    parts = [
        MergedPart(body, stripe_digest(body), stripe.block_start, stripe.block_stop, stripe.reducer)
        for body, stripe in zip(bodies, stripes, strict=True)
    ]
    await bench.stripe_effects.project(Project(BALLOT, 0, 1, windows, stripes), parts)
    await bench.stripe_effects.project(Project(BALLOT, 0, 2, windows, stripes, before=digest), parts)
    first, second = (event.projection for event in bench.posted if isinstance(event, Projected))
    assert second.sums == first.sums
    assert second.errors == tuple(2 * error if is_here else inf for error in first.errors)


@pytest.mark.parametrize("is_restarted", [True, False])
async def test_an_own_contribution_that_was_written_over_is_not_projected(bench: Bench, is_restarted: bool) -> None:
    await bench.receive_payload()
    own = bench.own()
    if is_restarted:
        bench.learner.incarnation = 2
    else:
        bench.learner.contribution_area[0][:] = 0xFF
    (event,) = await bench.do(Project(BALLOT, 0, 1, windows_of(bench), bench.stripes(), own))
    assert isinstance(event, Projected)
    assert len(event.projection.sums) == 2
    assert event.projection.contribution == ()


async def test_a_payload_that_is_gone_is_not_projected_and_the_own_contribution_is(bench: Bench) -> None:
    (event,) = await bench.do(Project(BALLOT, 0, 1, windows_of(bench), bench.stripes(), bench.own()))
    assert isinstance(event, Projected)
    assert event.projection.sums == event.projection.errors == ()
    assert len(event.projection.contribution) == 2


async def test_contributions_that_were_reduced_here_are_projected(bench: Bench) -> None:
    stripes = bench.stripes(reducers=("a", "a"))
    await bench.do(bench.send_order(stripes=stripes))
    bench.posted.clear()
    (event,) = await bench.do(ProjectContributions(0, 1, (bench.own(),), stripes, windows_of(bench)))
    up = bench.learner.blocks[0]
    row = tuple(
        project(up, bench.learner.contribution_area[0][up.byte_slice(window.block_start, window.block_stop)], window)[0]
        for window in windows_of(bench)
    )
    assert event == ContributionsProjected(0, 1, windows_of(bench), (row,))
    bench.posted.clear()
    missing = replace(bench.own(), snapshot=99)
    (event,) = await bench.do(ProjectContributions(0, 1, (bench.own(), missing), stripes, windows_of(bench)))
    assert event == ContributionsProjected(0, 1, windows_of(bench), ())


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
    assert bench.posted == [InitialStateStored(MANIFEST.digest, digests)]
    assert area.taken == [2]


async def test_the_final_model_is_written(bench: Bench) -> None:
    assert await bench.do(WriteFinal((0, 0))) == [FinalWritten()]
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
