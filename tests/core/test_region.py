"""The region core as a whole: small worlds of real cores on virtual time, each scenario with one thing going wrong."""

import pytest

from diloco_node.core import events as ev
from diloco_node.core.types import (
    CarryMode,
    DiscardedBody,
    RoundBody,
)
from diloco_node.lab.sim.world import MS, SECOND
from tests.kit.small_world import Small

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
    # One audit of 32 looks at the contributions themselves, by a second ballot.
    ballots = [note.text for _, note in small.notes if note.kind in ("ballot", "abandoned")]
    assert all("the rows of this audit are compared" in text for text in ballots), ballots
    assert len(ballots) <= 0.1 * len(merged)
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
    assert all(round_.waiting and round_.members and round_.opened_at_ns for round_ in view.rounds)
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
