"""The region core as a whole: small worlds of real cores on virtual time, each scenario with one thing going wrong."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from diloco_node.core import events as ev
from diloco_node.core import messages as msg
from diloco_node.core import region
from diloco_node.core.events import Note
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.region import RegionCore
from diloco_node.core.types import (
    Ballot,
    CarryMode,
    DiscardedBody,
    FragmentDigest,
    GenesisBody,
    RateLimits,
    Recovered,
    RoundBody,
    SnapshotBody,
)
from diloco_node.lab.sim.world import MS, SECOND
from tests.kit.ledger_kit import disk_of
from tests.kit.rounds_kit import MANIFEST, REGIONS, SETTINGS, status
from tests.kit.small_world import SEED, Small

pytestmark = pytest.mark.world

# ---- nothing goes wrong ----------------------------------------------------------------------------------------------


def test_quiet_run_merges_at_the_pace_of_its_schedule_with_everybody(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    before, step = len(small.bodies()), small.hosts["asia-ne"].learner.step
    small.go(10)
    steps = small.hosts["asia-ne"].learner.step - step
    merged = [body for body in small.bodies()[before:] if isinstance(body, RoundBody)]
    assert len(merged) >= 0.8 * steps * 4 / 8
    assert all(len(body.members) == 4 for body in merged)
    assert small.alarms() == []
    assert not [note for _, note in small.notes if note.kind in ("ballot", "abandoned")]
    small.settle()


def test_what_overwrite_throws_away_is_booked_and_everybody_stays_a_member(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, carry=CarryMode.OVERWRITE)
    small.go(4)
    before = small.sim.checkers.commits
    small.go(8)
    assert small.sim.checkers.commits - before >= 24
    bodies = small.bodies()
    assert all(len(body.members) >= 3 for body in bodies[-30:] if isinstance(body, RoundBody))
    lost = [body for body in bodies if isinstance(body, DiscardedBody)]
    assert {body.incarnation for body in lost} == {1}
    assert {body.learner for body in lost} == set(small.hosts)


def test_every_learner_starts_from_the_first_leaders_theta(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    learners = [host.learner for host in small.hosts.values()]
    assert all(learner.is_training for learner in learners)
    assert {view.versions >= (0,) * 4 for view in map(small.view, small.hosts)} == {True}
    assert len({small.view(name).leader for name in small.hosts}) == 1


@pytest.mark.parametrize("regions", [2, 3])
def test_fewer_regions_merge_as_well(patch: pytest.MonkeyPatch, regions: int) -> None:
    small = Small(patch, regions)
    small.go(8)
    assert small.sim.checkers.commits >= 10
    small.settle()


def test_status_shows_peers_rounds_and_reasons(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    leader = small.leader()
    view = small.view(leader)
    assert (view.role, view.leader, view.is_ending, view.finished) == ("leader", leader, False, "")
    assert [peer.region for peer in view.peers] == small.others()
    assert all(peer.is_alive and 40 * MS <= peer.rtt_ns <= 60 * MS for peer in view.peers)
    assert all(set(peer.hears) == set(small.hosts) - {peer.region} for peer in view.peers)
    assert view.rounds_committed == small.sim.checkers.commits
    assert view.rounds
    assert all(round_.waiting and round_.members and round_.deadline_ns > round_.opened_at_ns for round_ in view.rounds)
    follower = small.view(small.others()[0])
    assert (follower.role, follower.leader) == ("follower", leader)
    assert follower.waiting.startswith("follows")
    assert view.digest_differences == 0
    assert [version for version, _ in view.digests] == list(view.versions)


# ---- something goes wrong --------------------------------------------------------------------------------------------


def test_lost_messages_and_transfers_only_cost_time(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, loss=0.02)
    small.go(16)
    assert small.sim.checkers.commits >= 16
    small.settle()


def test_death_of_the_leader_is_bridged_within_seconds(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    dead = small.leader()
    small.hosts[dead].kill_daemon()
    small.go(6)
    before = small.sim.checkers.commits
    small.go(4)
    assert small.leader() != dead
    assert small.sim.checkers.commits >= before + 4
    small.hosts[dead].start_daemon()
    small.go(4)
    small.settle()
    assert min(small.view(dead).versions) > 0


def test_death_of_a_member_and_reducer_does_not_wait_for_the_deadline(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, ballot_deadline_min_ns=30 * SECOND)
    small.go(4)
    victim = small.others()[0]
    small.hosts[victim].kill_daemon()
    small.go(4)
    before = small.sim.checkers.commits
    small.go(4)
    assert small.sim.checkers.commits >= before + 8
    last = next(body for body in reversed(small.bodies()) if isinstance(body, RoundBody))
    assert victim not in {member.contribution.learner for member in last.members}


def test_region_that_is_cut_off_trains_on_and_what_it_did_alone_is_in_the_ledger(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    alone = small.others()[0]
    pairs = small.cut(alone)
    small.go(3)
    step, commits = small.hosts[alone].learner.step, small.sim.checkers.commits
    versions = small.view(alone).versions
    small.go(6)
    assert small.hosts[alone].learner.step >= step + 50, "it never waits"
    assert small.view(alone).versions == versions, "it merges nothing"
    assert small.sim.checkers.commits >= commits + 12, "the others go on"
    small.heal(pairs)
    small.go(6)
    spans = [
        (member.contribution.step_from, member.contribution.step_to)
        for body in small.bodies()
        if isinstance(body, RoundBody)
        for member in body.members
        if member.contribution.learner == alone
    ]
    given_up = [
        (body.step_from, body.step_to)
        for body in small.bodies()
        if isinstance(body, DiscardedBody) and body.learner == alone
    ]
    # After so many missed versions nothing of it is worth carrying; merged or given up, it is booked as what it is.
    assert max(stop - start for start, stop in spans + given_up) >= 60
    assert max(stop - start for start, stop in spans) < 60
    small.settle()


def test_leader_without_majority_merges_nothing_and_its_ballots_die(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    old = small.leader()
    pairs = small.cut(old)
    small.go(8)
    small.heal(pairs)
    small.go(5)
    assert small.leader() != old
    small.settle()


def test_one_way_cut_between_two_keeps_both_as_members(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    first_region, second_region = small.others()[:2]
    small.sim.network.cut(first_region, second_region)
    small.go(8)
    last = next(body for body in reversed(small.bodies()) if isinstance(body, RoundBody))
    assert len(last.members) == 4
    assert {stripe.reducer for stripe in last.stripes} == set(small.hosts) - {first_region, second_region}
    small.sim.network.mend(first_region, second_region)
    small.go(3)
    small.settle()


def test_dead_learner_is_booked_as_discarded_and_the_new_one_goes_on(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    victim = small.others()[1]
    small.hosts[victim].kill_learner()
    small.go(2)
    small.hosts[victim].start_learner()
    small.go(8)
    discards = [body for body in small.bodies() if isinstance(body, DiscardedBody)]
    assert {(body.learner, body.incarnation) for body in discards} == {(victim, 1)}
    assert set() < {body.fragment for body in discards} <= {0, 1, 2, 3}, "where it had steps that no round included"
    last = next(body for body in reversed(small.bodies()) if isinstance(body, RoundBody))
    assert {member.contribution.incarnation for member in last.members if member.contribution.learner == victim} == {2}
    small.settle()


@pytest.mark.seeds
def test_daemon_restarts_under_its_learner_and_no_step_counts_twice(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(6)
    for _ in range(4):
        victim = small.others()[0]
        small.hosts[victim].kill_daemon()
        small.go(0.7)
        small.hosts[victim].start_daemon()
        small.go(3.1)
    assert small.hosts[victim].learner.incarnation == 1
    small.settle()


def test_late_region_catches_up(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    late = "us-east"
    small.go(1.5)
    small.hosts[late].kill_daemon()
    small.go(8)
    small.hosts[late].start_daemon()
    small.go(4)
    small.settle()
    assert any(note.kind == "fetch" for name, note in small.notes if name == late)
    last = [body for body in small.bodies() if isinstance(body, RoundBody)][-4:]
    assert all(late in {member.contribution.learner for member in body.members} for body in last)


def test_region_that_lost_the_merged_stripes_fetches_the_payload(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(3)
    victim = small.others()[0]
    plane, lost = small.hosts[victim].plane, []
    with patch.context() as broken:
        broken.setattr(plane, "assemble", lambda effect: lost.append((effect.fragment, effect.version)))
        small.go(3)
    assert lost
    small.go(3)
    after = small.view(victim).versions
    assert all(after[fragment] >= version for fragment, version in lost), (after, lost)
    assert any(note.kind == "fetch" for name, note in small.notes if name == victim)
    small.settle()


@pytest.mark.parametrize(
    "stuck",
    [
        *(pytest.param((kind,), marks=pytest.mark.seeds) for kind in (ev.StorePayload, ev.PersistLedger)),
        (ev.StorePayload, ev.PersistLedger),
    ],
)
def test_a_leader_whose_disk_stands_still_makes_way(patch: pytest.MonkeyPatch, stuck: tuple[type, ...]) -> None:
    """A full disk of one region must not stop the merging of the others."""
    small = Small(patch)
    small.go(4)
    victim = small.leader()
    host = small.hosts[victim]
    usual = {kind: host.effects.handlers[kind] for kind in stuck}
    host.effects.handlers |= dict.fromkeys(stuck, lambda _: None)
    small.go(6)
    assert not host.core.ledger.is_leader
    commits = small.sim.checkers.commits
    small.go(6)
    assert small.sim.checkers.commits >= commits + 6, "slowly: the region is taken for a member until it is 1 s behind"
    host.effects.handlers |= usual
    host.kill_daemon()
    small.go(1)
    host.start_daemon()
    small.settle()


def test_a_leader_that_only_waits_for_the_others_keeps_the_lead(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    leader, peers = small.leader(), small.others()
    usual = {name: small.hosts[name].effects.handlers[ev.StorePayload] for name in peers}
    for name in peers[:2]:
        small.hosts[name].effects.handlers[ev.StorePayload] = lambda _: None
    commits = small.sim.checkers.commits
    small.go(12)
    assert small.sim.checkers.commits <= commits + 2, "no majority has a payload"
    assert small.leader() == leader
    for name in peers[:2]:
        small.hosts[name].effects.handlers[ev.StorePayload] = usual[name]
        small.hosts[name].kill_daemon()
        small.hosts[name].start_daemon()
    small.settle()


@pytest.mark.parametrize("who", ["leader", pytest.param("follower", marks=pytest.mark.seeds)])
@pytest.mark.parametrize("lost", ["payloads", "states"])
def test_region_whose_disk_lost_files_fetches_them_before_it_acknowledges_what_they_hold(
    patch: pytest.MonkeyPatch, who: str, lost: str
) -> None:
    small = Small(patch, checkpoint_versions=8)
    small.go(12)
    victim = small.leader() if who == "leader" else small.others()[0]
    host = small.hosts[victim]
    host.kill_daemon()
    small.go(2)
    disk = host.disk
    after_states = [key for key in disk.payloads if key[1] == disk.states[key[0]].version + 1]
    assert len(after_states) == 4
    if lost == "payloads":
        for key in after_states:
            del disk.payloads[key]
    else:
        disk.states.clear()
    host.start_daemon()
    small.settle(30)
    assert any(note.kind == "fetch" for name, note in small.notes if name == victim)
    small.go(3)
    small.settle()


# ---- the end ---------------------------------------------------------------------------------------------------------


def ended(small: Small) -> set[tuple[int, ...]]:
    """The final versions of all regions; every learner has stopped and every file is written."""
    assert all(host.has_final and host.learner.finished for host in small.hosts.values())
    assert all(small.view(name).is_final for name in small.hosts)
    return {small.view(name).versions for name in small.hosts}


def test_run_ends_by_steps_with_equal_final_versions(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, steps_max=80)
    small.go(14)
    assert len(ended(small)) == 1
    view = small.view(small.leader())
    assert "80 steps" in view.finished
    assert view.waiting == "the run is finished"
    last = {body.fragment: body for body in small.bodies() if isinstance(body, RoundBody)}
    assert all(len(body.members) == 4 for body in last.values()), "everybody is in the last round of each fragment"
    assert all(host.learner.step <= 110 for host in small.hosts.values())


def test_run_ends_by_tokens(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, tokens_max=10_000)
    small.go(12)
    ended(small)
    assert small.view(small.leader()).tokens_merged >= 10_000


def test_operator_of_any_region_ends_the_run_even_if_a_region_is_gone(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch)
    small.go(4)
    dead, orderer = small.others()[:2]
    small.hosts[dead].kill_daemon()
    small.hosts[orderer].post(ev.FinishOrdered("the operator has seen enough"))
    small.go(15)
    assert small.view(orderer).finished == "the operator has seen enough"
    small.hosts[dead].start_daemon()
    small.go(5)
    assert len(ended(small)) == 1


def test_leader_that_dies_while_the_run_ends_is_replaced(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, steps_max=80)
    small.sim.run_until(
        lambda: any(host.core is not None and host.core.leader.is_ending for host in small.hosts.values())
    )
    dead = small.leader()
    small.hosts[dead].kill_daemon()
    small.go(15)
    small.hosts[dead].start_daemon()
    small.go(6)
    assert len(ended(small)) == 1


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
    assert small.view(small.leader()).committed_versions[1] > reached, "the others go on"


# ---- one core by itself ----------------------------------------------------------------------------------------------


EMPTY = Recovered(0, "", (), (-1, -1), frozenset())


def a_core(recovered: Recovered = EMPTY) -> RegionCore:
    return RegionCore(
        region="a",
        regions=REGIONS,
        run_id="run",
        settings_digest="settings",
        manifest=MANIFEST,
        settings=SETTINGS,
        recovery=recovered,
        seed=SEED,
        secret=bytes(32),
        now_ns=0,
    )


def beat(learner: object = None, digests: tuple[FragmentDigest, ...] = ()) -> msg.Heartbeat:
    return msg.Heartbeat(1, 0, 0, ("a", "c"), learner, 0, digests)  # type: ignore[arg-type]


def alarms(effects: list[ev.Effect]) -> list[str]:
    return [effect.kind for effect in effects if isinstance(effect, Note) and effect.is_alarm]


@pytest.mark.parametrize(
    ("has_genesis", "states", "is_wanted"),
    [(False, (-1, -1), True), (False, (0, 0), True), (True, (0, 0), False), (True, (-1, 0), False)],
)
def test_theta_0_of_a_learner_is_wanted_only_before_there_is_a_genesis(
    has_genesis: bool, states: tuple[int, int], is_wanted: bool
) -> None:
    genesis = GenesisBody(
        "run", MANIFEST.digest, "settings", REGIONS, (b"1" * 32, b"2" * 32), tuple(disk_of(name) for name in REGIONS)
    )
    entries = (seal(1, 1, ZERO_HASH, genesis),) if has_genesis else ()
    core = a_core(Recovered(1, "", entries, states, frozenset()))
    assert core.wants_initial_state == is_wanted


def test_a_changed_budget_is_reported_with_the_next_heartbeat() -> None:
    core = a_core()
    assert core.handle(ev.BudgetChanged(RateLimits(5, None)), now_ns=1) == []
    effects = core.handle(ev.TimerFired(), now_ns=13)
    beats = [effect.message for effect in effects if isinstance(effect, ev.Send)]
    assert [beat.budget for beat in beats if isinstance(beat, msg.Heartbeat)] == [RateLimits(5, None)] * 2


def test_first_timer_sends_heartbeats_and_the_next_is_a_heartbeat_later() -> None:
    core = a_core()
    assert core.wake_at_ns == 0
    effects = core.handle(ev.TimerFired(), now_ns=13)
    beats = [effect for effect in effects if isinstance(effect, ev.Send) and isinstance(effect.message, msg.Heartbeat)]
    assert [effect.peer for effect in beats] == ["b", "c"]
    assert core.wake_at_ns == 13 + SETTINGS.heartbeat_ns + 13, "it was late, and says less"


def test_report_of_another_number_of_fragments_is_an_alarm_and_ignored() -> None:
    core = a_core()
    wrong = replace(status(3), positions=status(3).positions[:1])
    assert alarms(core.handle(ev.MessageArrived("b", beat(wrong)), now_ns=1)) == ["report"]
    assert core.liveness.learner("b") is None


def test_strangers_are_not_listened_to() -> None:
    core = a_core()
    effects = core.handle(ev.MessageArrived("mallory", beat(status(3))), now_ns=1)
    assert [effect.kind for effect in effects if isinstance(effect, Note)] == ["stranger"]


def test_theta_of_another_model_is_an_alarm() -> None:
    core = a_core()
    event = ev.InitialStateStored("another manifest", (b"x" * 32, b"y" * 32))
    assert alarms(core.handle(event, now_ns=1)) == ["genesis"]
    assert core.versions.initial_digests is None


def test_other_bytes_at_an_equal_version_are_an_alarm() -> None:
    core = a_core()
    core.history.versions = [4, 4]
    core.handle(ev.DigestComputed(1, 4, b"x" * 32), now_ns=1)
    digests = beat(digests=(FragmentDigest(1, 4, b"y" * 32),))
    assert alarms(core.handle(ev.MessageArrived("b", digests), now_ns=2)) == ["digest"]
    assert core.view().digest_differences == 1


def test_ballot_of_somebody_who_does_not_lead_is_ignored() -> None:
    core = a_core()
    announcement = msg.BallotOpened(Ballot(1, 1), 0, 1, ("a",), ())
    core.handle(ev.LearnerAttached(status(3), (-1, -1), ()), now_ns=1)
    assert core.handle(ev.MessageArrived("b", announcement), now_ns=2) == []


def test_core_that_becomes_due_tells_its_leader_at_once() -> None:
    core = a_core()
    core.handle(ev.MessageArrived("b", msg.AppendEntries(1, 1, 0, bytes(32), (), 0)), now_ns=1)
    core.handle(ev.LearnerAttached(status(3), (-1, -1), ()), now_ns=2)
    effects = core.handle(ev.LearnerReported(status(4)), now_ns=3)
    assert [effect.peer for effect in effects if isinstance(effect, ev.Send)] == ["b"]
    assert core.handle(ev.LearnerReported(status(5)), now_ns=4) == [], "once"
