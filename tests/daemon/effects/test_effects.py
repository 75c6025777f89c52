"""Effects carried out: bytes that don't change under way, what is refused, what waits for the disk, what is freed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diloco_node.codec.digest import stripe_digest
from diloco_node.codec.kernels import squared_norms
from diloco_node.core.events import (
    CloseBallot,
    Event,
    MergedStripeArrived,
    ReduceStripe,
    ReductionDone,
    SendMerged,
)
from diloco_node.core.messages import ContributionStripe, MergedStripe
from diloco_node.core.types import Ballot
from tests.kit.effects_kit import BALLOT, Bench, arrived, contribution_body, contribution_header
from tests.kit.node_kit import MANIFEST, HeldExecutor, contribution_of, settle

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
    assert not bench.table._rounds


async def test_a_contribution_that_comes_when_its_round_is_over_leaves_nothing(bench: Bench) -> None:
    header, body = contribution_header(bench), contribution_body(bench)
    buffer = bench.effects.transfer_opened("b", header, len(body))
    assert buffer is not None
    buffer[:] = body
    bench.parameters.versions[0] = 1  # applied while the bytes came in
    bench.effects.transfer_closed("b", header, buffer, is_whole=True)
    await bench.tasks.finish()
    assert bench.posted == []
    assert not bench.table._rounds


async def test_late_bytes_that_the_core_gives_back_are_freed(bench: Bench) -> None:
    assert await bench.receive("b", contribution_header(bench), contribution_body(bench))
    bench.parameters.versions[0] = 1
    await bench.do(CloseBallot(BALLOT, 0, 1, committed=False))
    assert not bench.table._rounds


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
        ReduceStripe(BALLOT, 0, 1, 0, own_stripe.block_start, own_stripe.block_stop, names, (coefficients,))
    )


def header_of(bench: Bench, reduction: ReductionDone) -> MergedStripe:
    own_stripe = bench.stripes()[0]
    return MergedStripe(BALLOT, 0, 0, 1, reduction.digest, own_stripe.block_start, own_stripe.block_stop)


async def test_a_reduced_stripe_is_told_kept_and_sent(bench: Bench) -> None:
    reduction, body = await reduce_here(bench)
    assert isinstance(reduction, ReductionDone)
    assert isinstance(body, MergedStripeArrived)
    assert (body.ballot, body.stripe, body.digest) == (BALLOT, 0, reduction.digest)
    order = SendMerged(header_of(bench, reduction), ("b", "c"))
    assert await bench.do(order) == []
    assert [peer for peer, _, _ in bench.transport.transfers] == ["b", "c"]
    assert all(stripe_digest(body) == reduction.digest for _, _, body in bench.transport.transfers)


async def test_a_reduction_without_its_bytes_says_whose_are_missing(bench: Bench) -> None:
    own_stripe = bench.stripes()[0]
    names, coefficients = (contribution_of("c"),), (1.0,) * len(MANIFEST.fragments[0].pieces)
    order = ReduceStripe(BALLOT, 0, 1, 0, own_stripe.block_start, own_stripe.block_stop, names, (coefficients,))
    assert await bench.do(order) == []
    assert bench.notes[-1].text == "no bytes from c"
    assert not bench.table._rounds


async def test_merged_stripes_go_on_only_where_their_ballot_committed(bench: Bench) -> None:
    reduction = (await reduce_here(bench))[0]
    assert isinstance(reduction, ReductionDone)
    bench.transport.is_slow = True
    bench.effects.perform(SendMerged(header_of(bench, reduction), ("b",)))
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
    bench.transport.is_slow = True
    bench.effects.perform(SendMerged(header_of(bench, reduction), ("b",)))
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
