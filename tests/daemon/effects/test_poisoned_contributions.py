"""Over the real listener: who sends poisoned contributions is refused, and shut out after three; the others go on."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from diloco_node.core.events import ContributionStripeArrived
from diloco_node.core.types import Contribution
from diloco_node.transport.transport import GrpcTransport
from tests.kit.effects_kit import Bench, contribution_body, contribution_header
from tests.kit.node_kit import contribution_of, make_parameters
from tests.kit.transport_kit import Mesh, Recorder, address, meshed
from tests.kit.waiting import eventually


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with meshed(tmp_path) as mesh_:
        yield mesh_


async def contribute(sender: GrpcTransport, bench: Bench, name: str, snapshot: int, *, is_poisoned: bool) -> None:
    """A stripe of a region's contribution to region b, looked at there."""
    header = contribution_header(bench, contribution=contribution_of(name, snapshot=snapshot))
    body = np.frombuffer(contribution_body(bench), np.uint8).copy()
    if is_poisoned:
        body[:4] = np.frombuffer(np.float32("nan").tobytes(), np.uint8)
    counts = len(taken(bench)), len(bench.notes)
    await sender.transfer("b", header, body.data)
    await eventually(lambda: (len(taken(bench)), len(bench.notes)) != counts)


def taken(bench: Bench) -> list[Contribution]:
    """The contributions of which a stripe counts as arrived."""
    return [event.contribution for event in bench.posted if isinstance(event, ContributionStripeArrived)]


async def test_three_poisoned_contributions_shut_out_who_sends_them_and_nobody_else(mesh: Mesh) -> None:
    parameters, store = await make_parameters(mesh.folder)
    bench = Bench(mesh.folder, parameters, store, region="b")
    b, _ = await mesh.start("b", {"a": None, "c": None}, handler=bench.effects)
    bench.stripe_effects.reject = b.reject
    senders: dict[str, tuple[GrpcTransport, Recorder]] = {}
    for name in ("a", "c"):
        senders[name] = await mesh.start(name, {"b": address(b)})
    a, at_a = senders["a"]
    c, at_c = senders["c"]
    for place in (at_a, at_c):
        await place.until(lambda place=place: place.is_up.get("b"))

    await contribute(a, bench, "a", 1, is_poisoned=True)
    await contribute(a, bench, "a", 1, is_poisoned=True)  # as the next ballot asks for it
    assert b.rejections == {("a", "corrupt"): 1}
    await contribute(a, bench, "a", 2, is_poisoned=True)
    assert at_a.is_up["b"], "two are no reason to let go of it"
    await contribute(a, bench, "a", 3, is_poisoned=True)
    await at_a.until(lambda: not at_a.is_up["b"])
    why = b.quarantine_reason("a")
    assert "after 3 strikes; stripe 0 of the contribution of a: block 0" in why, "status shows this"
    assert b.rejections == {("a", "corrupt"): 3}
    assert [note.kind for note in bench.notes if note.is_alarm] == ["corrupt"] * 4

    await contribute(c, bench, "c", 1, is_poisoned=False)
    assert [contribution.learner for contribution in taken(bench)] == ["c"]
    assert at_c.changes == [("b", True)], "the link of the others never went down"
    assert not b.quarantine_reason("c")

    assert b.lift_quarantine("a")
    await at_a.until(lambda: at_a.is_up["b"])
    await contribute(a, bench, "a", 4, is_poisoned=False)
    assert taken(bench)[1:] == [contribution_of("a", snapshot=4)]
    assert bench.tasks.errors == []
    store.close()
