"""Settings that an operator changes in a whole run: at one entry, in every region, whatever it missed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco_node.core.membership import replacement
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.region import RegionCore
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import RoundBody
from diloco_node.lab.sim.world import SECOND
from tests.kit.small_world import Small

pytestmark = pytest.mark.world


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


def core_of(small: Small, name: str) -> RegionCore:
    core = small.hosts[name].core
    assert isinstance(core, RegionCore)
    return core


def changed(small: Small, **values: Any) -> SettingsBody:
    return replace(SettingsBody.of(core_of(small, small.leader()).history.settings), **values)


def order(small: Small, name: str = "", **values: Any) -> SettingsBody:
    body = changed(small, **values)
    small.hosts[name or small.leader()].post(EntryOrdered(body))
    return body


def orders(small: Small) -> list[SettingsBody]:
    return [body for body in small.bodies() if isinstance(body, SettingsBody)]


def rounds(small: Small) -> list[RoundBody]:
    return [body for body in small.bodies() if isinstance(body, RoundBody)]


def test_a_cadence_that_is_ordered_holds_in_all_regions_from_one_entry_on(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3)
    small.go(10)
    before = len(rounds(small))
    body = order(small, sync_every=16, overlap_steps=4)
    small.go(1)
    assert orders(small) == [body]
    assert {SettingsBody.of(core_of(small, name).history.settings) for name in small.hosts} == {body}
    count = len(rounds(small))
    small.go(10)
    assert (len(rounds(small)) - count) < 0.7 * before, "half as often"
    small.settle()


def test_outer_steps_before_the_entry_keep_its_rates_and_those_after_have_the_new_ones(
    patch: pytest.MonkeyPatch,
) -> None:
    small = Small(patch, regions=3)
    small.go(6)
    order(small, outer_lr=0.25, outer_momentum=0.125)
    small.go(6)
    bodies = small.bodies()
    at = next(place for place, body in enumerate(bodies) if isinstance(body, SettingsBody))
    rates = [
        [(b.outer_lr, b.outer_momentum) for b in part if isinstance(b, RoundBody)]
        for part in (bodies[:at], bodies[at:])
    ]
    assert set(rates[0]) == {(0.5, 0.6)}
    assert set(rates[1]) == {(0.25, 0.125)}
    small.settle()


def test_open_rounds_wait_for_the_entry_and_none_is_lost(patch: pytest.MonkeyPatch) -> None:
    """Weights follow from the settings at the entry of their round: a leader that mixed them up would be refused."""
    small = Small(patch, regions=4, rounds_in_flight_max=4, overlap_steps=1)
    small.go(5)
    for share in (0.4, 0.9, 0.5, 1.0, 0.45):
        order(small, weight_share_max=share, weight_cap=1.0 + share)
        small.go(1.5)
    assert len(orders(small)) == 5
    assert not [note for _, note in small.notes if note.is_alarm and "settings" not in note.text]
    small.settle()


@pytest.mark.parametrize("summary_entries", [12, 1024])
def test_a_region_that_was_away_comes_back_to_the_settings_of_the_run(
    patch: pytest.MonkeyPatch, summary_entries: int
) -> None:
    small = Small(patch, regions=3, summary_entries=summary_entries)
    small.go(5)
    away = small.others()[0]
    small.hosts[away].kill_daemon(is_power_cut=True)
    body = order(small, sync_every=4, overlap_steps=1)
    small.go(12)
    small.hosts[away].start()
    small.go(5)
    assert SettingsBody.of(core_of(small, away).history.settings) == body
    assert (core_of(small, away).ledger.base.index > 0) is (summary_entries == 12)
    small.hosts[away].kill_daemon()
    small.hosts[away].start_daemon()
    assert SettingsBody.of(core_of(small, away).history.settings) in (body, changed(small)), "its disk has them"
    small.settle()


def test_the_runs_settings_win_over_those_that_a_region_was_started_with(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3)
    other = sorted(small.hosts)[0]
    host = small.hosts[other]
    host.setup = replace(host.setup, settings=replace(host.setup.settings, sync_every=80, outer_lr=0.1))
    small.world.after(SECOND // 2, None, host.kill_daemon)
    small.world.after(6 * SECOND, None, host.start_daemon)
    small.go(12)
    assert {core_of(small, name).history.settings.sync_every for name in small.hosts} == {8}
    small.settle()


def test_a_leader_that_dies_with_an_order_loses_it_or_has_it_everywhere(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3)
    small.go(5)
    leader = small.leader()
    order(small, sync_every=12)
    small.hosts[leader].kill_daemon()
    small.go(4)
    small.hosts[leader].start()
    small.go(4)
    values = {core_of(small, name).history.settings.sync_every for name in small.hosts}
    assert values == {12 if orders(small) else 8}
    order(small, sync_every=10)
    small.go(3)
    assert {core_of(small, name).history.settings.sync_every for name in small.hosts} == {10}
    small.settle()


def test_orders_that_can_not_be_carried_out_are_refused_with_the_remedy(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3)
    small.go(5)
    leader, other = small.leader(), small.others()[0]

    def fault(name: str, **values: Any) -> str:
        core = core_of(small, name)
        order_ = EntryOrdered(changed(small, **values))
        return core.replacement.order_fault(order_, now_ns=small.world.now_ns)

    assert fault(leader, sync_every=16) == ""
    assert fault(other, sync_every=16) == f"only the leader can do it: give the order to {leader}"
    assert fault(leader) == "the run has these settings already"
    assert "must be less than rounds.sync_every, 8" in fault(leader, overlap_steps=8)
    assert "must be at least rounds.heartbeat" in fault(leader, ballot_deadline_min_ns=1)
    assert fault(leader, quorum_min=4) == (
        "rounds.quorum_min is 4, and the run has 3 regions: set it as well; 0 means a majority of those alive"
    )
    order(small, name=other, sync_every=16)
    small.go(2)
    assert orders(small) == []
    assert [note.text for name, note in small.notes if name == other and note.kind == "settings"] == [
        f"an operator changes the settings: refused, only the leader can do it: give the order to {leader}"
    ]
    small.hosts[leader].post(EntryOrdered(changed(small, sync_every=16)))
    assert fault(leader, sync_every=12) == "another change of the settings is not committed yet: try again"
    small.settle()


def test_an_order_waits_until_the_one_before_is_applied_here_as_well(patch: pytest.MonkeyPatch) -> None:
    """An order holds all the settings: made of those before the first one, it would undo that in silence."""
    small = Small(patch, regions=3)
    small.go(5)
    core = core_of(small, small.leader())
    body = order(small, sync_every=16)
    small.go(2)
    change = core.replacement._settings
    assert change.order_fault(replace(body, sync_every=24)) == ""
    # A slow disk: a majority of the others has it.
    patch.setattr(core.history.account, "index", change._index - 1)
    assert "not committed yet: try again" in change.order_fault(replace(body, sync_every=24))


def test_an_order_is_dropped_when_a_merge_that_was_decided_does_not_end(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, regions=3)
    small.go(5)
    core = core_of(small, small.leader())
    change = core.replacement._settings
    patch.setattr(replacement, "HOLD_NS", 2 * SECOND)
    patch.setattr(type(core.leader), "hold_merges", lambda *_, **__: False)
    while not (decided := [r for r in core.leader.rounds.values() if r.decision is not None]):
        small.go(0.02)
    order(small, sync_every=16)
    small.go(0.001)
    assert change._limit_ns == 2 * SECOND + decided[0].deadline_ns
    while small.world.now_ns < change._limit_ns:
        assert change._body is not None
        small.go(0.2)
    small.go(0.3)
    assert change._body is None
    assert orders(small) == []
    (text,) = [note.text for _, note in small.notes if note.kind == "settings"]
    assert "a merge that was decided before is not committed: look at `status`, and order it again" in text
    small.settle()
