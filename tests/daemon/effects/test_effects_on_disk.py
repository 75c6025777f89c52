"""Effects that write or read the disk: entries in their order, payloads whole, an audit's projections."""

from dataclasses import replace

import numpy as np
import pytest

from diloco_node.codec.digest import payload_digest, stripe_digest
from diloco_node.codec.projection import project
from diloco_node.core.events import (
    CloseBallot,
    LedgerPersisted,
    PayloadNotStored,
    PayloadStored,
    PersistLedger,
    StorePayload,
)
from diloco_node.core.projections import ContributionsProjected, Project, ProjectContributions, Projected, Window
from diloco_node.daemon.effects import disk_writes
from diloco_node.errors import LedgerLost, StorageError
from tests.kit.effects_kit import BALLOT, Bench

# ---- disk ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writes, "STORAGE_RETRY_S", 0.0)


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
