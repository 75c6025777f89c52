"""A leader says what the others have: states, payloads, folders. Who has it bears it out, and else it is refused."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core.corroboration import Corroboration
from diloco_node.core.messages import ContributionProjected, Refused
from diloco_node.core.types import DiskNamedBody, EntryBody, RoundBody, SnapshotBody
from diloco_node.lab.sim import core_parts
from diloco_node.lab.sim.cheats import CHEATS
from diloco_node.wire.envelope import decode_control, encode_control
from tests.core.test_gray_regions import rate, reducer
from tests.core.test_lies import is_liar, refused
from tests.kit.rounds_kit import context_of, history_of
from tests.kit.small_world import SEED, Small


def spoil(small: Small, name: str) -> None:
    """The region does it from now on, and not only from its next start on."""
    host = small.hosts[name]
    is_liar(small, name)
    if host.spoil_core is not None:
        host.spoil_core(host.core)


@pytest.mark.world
@pytest.mark.parametrize("cheat", ["states", "payloads"])
def test_a_leader_that_makes_up_what_others_have_leads_no_longer_and_commits_none(
    patch: pytest.MonkeyPatch, cheat: str
) -> None:
    # The checkers of the simulation compare each state and payload with what the history gives.
    small = Small(patch, sync_every=16)
    small.go(8)
    usual, liar = rate(small, 8), small.leader()
    CHEATS[cheat].begin(small.hosts[liar])
    small.sim.checkers.oracle.excuses_sums = False
    spoil(small, liar)
    small.go(8)
    assert small.leader() != liar
    assert len(refused(small, liar)) >= 2
    assert rate(small, 8) >= 0.9 * usual, f"seed {SEED}"


@pytest.mark.world
def test_a_leader_that_names_ballots_which_it_held_with_nobody_is_left_after_as_many_as_are_open_at_once(
    patch: pytest.MonkeyPatch,
) -> None:
    small = Small(patch, sync_every=16)
    small.go(8)
    liar = small.leader()

    def rename(body: EntryBody) -> EntryBody:
        if not isinstance(body, RoundBody):
            return body
        return replace(body, ballot=replace(body.ballot, number=body.ballot.number + 1000), nonces=(), projections=())

    small.hosts[liar].spoil_core = partial(core_parts.spoil_proposals, spoil=rename)
    spoil(small, liar)
    small.go(12)
    rounds = [body for body in small.bodies() if isinstance(body, RoundBody) and body.ballot.number > 1000]
    assert small.leader() != liar
    assert len(rounds) <= 2, "rounds_in_flight_max"


@pytest.mark.world
def test_a_member_that_withholds_its_projections_is_left_out_and_rounds_go_on(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, sync_every=16)
    small.go(8)
    usual, liar = rate(small, 8), reducer(small)
    is_liar(small, liar)

    def withhold(_: str, frame: bytes) -> bytes:
        return encode_control(Refused(0, 0, "")) if type(decode_control(frame)) is ContributionProjected else frame

    small.sim.network.frame_spoilers[liar] = withhold
    small.go(8)
    assert any("does not tell the projections" in line.reason for line in small.view(small.leader()).left_out)
    assert rate(small, 16) >= 0.8 * usual, f"seed {SEED}"


LEADER = "c"


def word(*, own_digest: bytes = b"", told: int = 0, disk: bytes = b"") -> Corroboration:
    """What a region asks that has this digest and folder, where so many others told what is named."""
    anything: Any = SimpleNamespace(
        doubt=lambda body: "" if own_digest == body.digest or told >= 2 else "it is another one here",
        contradicts=lambda body: own_digest not in (b"", body.digest),
        applied=[0, 0],
        states=[0, 0],
        has_assembled=lambda _body, another=False: False,
        disk_of=lambda _region: disk,
    )
    context = replace(context_of(history_of()), liveness=anything)
    return Corroboration(context, anything, anything, anything, lambda: LEADER, payloads_before=())


NAMED = SnapshotBody(0, 3, b"n" * 32)


@pytest.mark.parametrize(
    ("asked", "is_doubted", "is_refused"),
    [
        (word(own_digest=NAMED.digest), False, False),
        (word(own_digest=b"o" * 32, told=2), False, False),
        (word(own_digest=b"o" * 32, told=1), True, True),
        (word(told=1), True, False),
    ],
)
def test_a_snapshot_is_refused_only_where_another_state_is_known(
    asked: Corroboration, is_doubted: bool, is_refused: bool
) -> None:
    assert bool(asked.doubt(NAMED, now_ns=5)) is is_doubted
    assert not asked.is_late(NAMED, now_ns=5)
    if is_doubted:
        assert asked.is_late(NAMED, now_ns=5 + 10**12)
        assert bool(asked.fault(NAMED)) is is_refused
    asked.accept(NAMED)
    assert asked.doubt(NAMED, now_ns=6) == ""
    assert asked.take_news() is is_doubted


def test_a_folder_is_named_that_its_region_has_told() -> None:
    for disk, named, is_doubted in (
        (b"x" * 16, b"x" * 16, False),
        (b"x" * 16, b"y" * 16, True),
        (b"x" * 16, b"", False),
        (b"", b"y" * 16, False),
    ):
        body = DiskNamedBody("b", named)
        asked = word(disk=disk)
        assert bool(asked.doubt(body, now_ns=0)) is is_doubted
        assert bool(asked.fault(body)) is is_doubted
