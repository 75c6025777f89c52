"""A long run: sums in the ledger, states at snapshots, restarts in slices, bytes that heal."""

from itertools import pairwise

import numpy as np
import pytest

from diloco_node.core import events as ev
from diloco_node.core import region
from diloco_node.core.types import (
    Ballot,
    RoundBody,
    SnapshotBody,
)
from tests.kit.small_world import Small

pytestmark = pytest.mark.world


# ---- a long run ------------------------------------------------------------------------------------------------------


@pytest.mark.seeds
def test_the_ledger_gets_snapshots_and_stays_short(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, checkpoint_versions=2, summary_entries=20)
    small.go(28)
    small.settle()
    snapshots = [body for body in small.bodies() if isinstance(body, SnapshotBody)]
    assert {body.fragment for body in snapshots} == {0, 1, 2, 3}
    assert all(body.version % 2 == 0 for body in snapshots)
    assert len({(body.fragment, body.version) for body in snapshots}) == len(snapshots), "each once"
    assert len(small.bodies()) > 100
    for host in small.hosts.values():
        assert host.disk.base.index >= len(small.bodies()) - 60
        assert len(host.disk.entries) < 60
        assert len(host.disk.older_states) <= 4 * 5
    assert small.alarms() == []


@pytest.mark.seeds
def test_a_region_that_was_away_too_long_for_entries_gets_sums_and_a_state_at_a_snapshot(
    patch: pytest.MonkeyPatch,
) -> None:
    small = Small(patch, checkpoint_versions=2, summary_entries=20)
    small.go(4)
    late = small.others()[0]
    small.hosts[late].kill_daemon()
    small.go(20)
    assert small.hosts[late].disk.base.index == 0
    small.hosts[late].start_daemon()
    small.go(5)
    small.settle()
    assert small.hosts[late].disk.base.index > 20
    assert any("begins its ledger at entry" in note.text for name, note in small.notes if name == late)
    fetched = [note for name, note in small.notes if name == late and note.text.startswith("state from")]
    assert fetched
    assert all(note.version % 2 == 0 for note in fetched)
    for name in small.hosts:
        small.hosts[name].kill_daemon()
        small.hosts[name].start_daemon()
    small.go(5)
    small.settle()


SLICE = 8
"""Entries, instead of the 64 of a region: a ledger of a minute would take a quarter of one to make."""


def test_a_restart_applies_the_ledger_in_slices(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(region, "ENTRIES_PER_EVENT", SLICE)
    small = Small(patch)
    small.go(7)
    name = small.others()[0]
    count = len(small.bodies())
    assert count > 2 * SLICE
    host = small.hosts[name]
    host.kill_daemon()
    host.start_daemon()
    steps = [0, host.core.history.account.index]
    give = host._give

    def watched(event: ev.Event) -> None:
        give(event)
        steps.append(host.core.history.account.index)

    patch.setattr(host, "_give", watched)
    small.go(3)
    small.settle()
    assert max(after - before for before, after in pairwise(steps)) <= SLICE
    assert steps[-1] >= count


@pytest.mark.seeds
def test_a_region_whose_bytes_are_others_than_the_ledgers_heals_from_the_others(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, checkpoint_versions=2)
    # The oracle and the order of versions are about regions that do as they should.
    patch.setattr(small.sim.checkers.oracle, "digest_seen", lambda *_: None)
    check = small.sim.checkers.event_given
    is_checked = lambda event: not isinstance(event, ev.VersionApplied)  # noqa: E731
    patch.setattr(small.sim.checkers, "event_given", lambda at, event: check(at, event) if is_checked(event) else None)
    small.go(5)
    for name in (small.others()[0], small.leader()):
        plane = small.hosts[name].plane
        plane.theta[1] = plane.theta[1] + np.float32(0.5)
        small.go(8)
        mine = [note for name_, note in small.notes if name_ == name and note.kind == "diverged"]
        assert [note.fragment for note in mine] == [1]
        assert small.view(name).digest_differences > 0
        assert small.hosts[name].core.versions.healing == ()
        small.settle()
        assert small.leader() != name
    commits = small.sim.checkers.commits
    small.go(5)
    assert small.sim.checkers.commits > commits


def test_while_a_fragment_is_wrong_its_rounds_are_not_acknowledged_and_the_others_are(
    patch: pytest.MonkeyPatch,
) -> None:
    small = Small(patch, checkpoint_versions=2)
    patch.setattr(small.sim.checkers.oracle, "digest_seen", lambda *_: None)
    small.go(5)
    name = small.others()[0]
    host = small.hosts[name]
    host.effects.handlers[ev.FetchState] = lambda _: None
    host.plane.theta[1] = host.plane.theta[1] + np.float32(0.5)
    small.go(8)
    assert host.core.versions.healing == (1,)
    assert "fragment 1 differs" in small.view(name).waiting
    reached = host.core.versions._healing[1].reached
    assert not host.core.versions.has_payload(RoundBody(1, reached + 1, Ballot(1, 1), (), 1.0, (), (), b"d" * 32))
    digests = {report.fragment for report in host.core._upkeep.digests.to_report(now_ns=small.world.now_ns)}
    assert 1 not in digests
    assert small.hosts[small.leader()].core.history.versions[1] > reached, "the others go on"
