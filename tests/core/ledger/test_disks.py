"""The folders that count: a run is founded once, by all; a folder that was lost is replaced by two entries."""

from collections.abc import Callable

import pytest

from diloco_node.core.events import Effect, TimerFired
from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.election import TERM_STEP_MAX, Role
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.member_kind import WITNESS_NAME, MemberKind, MembershipBody
from diloco_node.core.membership.replacement import LIVES_UNKNOWN_MAX, REST_HEARTBEATS, next_incarnation
from diloco_node.core.messages import AppendEntriesReply, RequestVote, RequestVoteReply
from diloco_node.core.rounds.claim_limits import is_plausible_incarnation
from diloco_node.core.types import DiskNamedBody, Entry, EntryBody, GenesisBody
from tests.kit.ledger_kit import (
    HEARTBEAT_NS,
    TIMEOUT_NS,
    a_core,
    a_discard,
    a_leader,
    ack,
    alarms,
    append_entries,
    arrive,
    chain,
    disk_of,
    sends,
    vote,
    vote_request,
    write_all,
)
from tests.kit.ledger_network import Network

GENESIS = GenesisBody("run", "m", "s", ("a", "b", "c"), (bytes(32),), (disk_of("a"), disk_of("b"), disk_of("c")))
OTHER = b"another folder.."


def log_of(*bodies: EntryBody) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for index, body in enumerate(bodies, start=1):
        entries.append(seal(index, 1, entries[-1].hash if entries else ZERO_HASH, body))
    return tuple(entries)


# ---- the view --------------------------------------------------------------------------------------------------------


def test_the_view_follows_the_log_and_goes_back_with_it() -> None:
    view = DiskView("abc")
    assert not view.has_view
    assert not view.counts("a", disk_of("a"))
    log = log_of(GENESIS, a_discard(1), DiskNamedBody("b", b""), DiskNamedBody("b", OTHER))
    view.follow(log[:2])
    assert view.has_view
    assert view.counts("b", disk_of("b"))
    assert not view.counts("b", OTHER)
    view.follow(log)
    assert (view.last_change_index, view.disk_of("b")) == (4, OTHER)
    assert view.counts("a", disk_of("a"))
    assert [view.roster.replacements(name) for name in "abz"] == [0, 1, 0]
    view.on_truncation(4)
    assert view.disk_of("b") == b""
    assert not view.counts("b", b""), "no folder is not a folder"
    view.on_truncation(3)
    assert view.disk_of("b") == disk_of("b")
    view.on_truncation(1)
    assert not view.has_view


def test_a_view_names_only_regions_of_the_run() -> None:
    view = DiskView("abc")
    view.follow(log_of(GENESIS, DiskNamedBody("z", OTHER)))
    assert view.last_change_index == 1


# ---- votes and acknowledgements --------------------------------------------------------------------------------------


def test_a_vote_of_another_folder_than_the_named_one_does_not_count() -> None:
    core = a_core()
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    arrive(core, "b", RequestVoteReply(1, True, True, OTHER))
    assert core.role is Role.ASKING
    arrive(core, "c", vote(1, True, True))
    assert core.role is Role.CANDIDATE


def test_the_witness_is_asked_where_the_other_voter_answers_from_a_folder_that_does_not_count() -> None:
    witness = MembershipBody(WITNESS_NAME, MemberKind.WITNESS.value, "s3://bucket/object")
    core, asked = a_core(voters=("a", "b"), entries=chain(1, bodies=lambda *_: witness)), list[set[str]]()
    for disk in (disk_of("b"), OTHER, OTHER):
        requests = sends(core.handle(TimerFired(), now_ns=core.wake_at_ns))
        asked.append({peer for peer, message in requests if isinstance(message, RequestVote)})
        arrive(core, "b", RequestVoteReply(1, True, False, disk), core.wake_at_ns - 1)
    assert asked == [{"b"}, {"b"}, {"b", WITNESS_NAME}]


def test_a_vote_goes_to_a_folder_and_not_to_the_next_one_of_its_region() -> None:
    core = a_core()
    write_all(core, arrive(core, "b", vote_request(1, False, 0, 0)))
    for disk, granted in ((OTHER, False), (disk_of("b"), True)):
        request = vote_request(1, False, 0, 0)
        answer = sends(arrive(core, "b", type(request)(1, False, 0, 0, disk, True)))
        assert answer == [("b", vote(1, False, granted))]


def test_an_acknowledgement_of_another_folder_or_of_another_entry_does_not_count() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    own = core.entry(1).hash
    arrive(core, "b", AppendEntriesReply(1, 1, True, 1, own, OTHER), now_ns)
    assert core.cluster_commit_index == 0
    effects = arrive(core, "b", AppendEntriesReply(1, 1, True, 1, b"x" * 32, disk_of("b")), now_ns)
    assert "acknowledges another entry" in alarms(effects)[0]
    effects = arrive(core, "b", AppendEntriesReply(1, 1, True, 99, own, disk_of("b")), now_ns)
    assert "acknowledges another entry" in alarms(effects)[0]
    assert core.cluster_commit_index == 0
    arrive(core, "c", ack(1, 2, True, 1), now_ns)
    assert core.cluster_commit_index == 1


def test_a_follower_that_comes_back_with_another_folder_starts_from_nothing() -> None:
    core, effects, now_ns = a_leader(entries=chain(1, 1))
    write_all(core, effects, now_ns)
    arrive(core, "b", ack(2, 1, True, 3), now_ns)
    assert core.durable_indexes["b"] == 3
    arrive(core, "b", AppendEntriesReply(2, 2, False, 0, ZERO_HASH, OTHER), now_ns)
    assert core.durable_indexes["b"] == 0
    assert core.reported_disks == {"b": OTHER}


def test_a_folder_that_the_log_does_not_name_does_not_stand_and_says_so() -> None:
    core = a_core(disk=OTHER)
    for _ in range(5):
        assert core.handle(TimerFired(), now_ns=core.wake_at_ns) == []
    assert core.role is Role.FOLLOWER
    assert "is not the one that the ledger names" in core.reason
    assert not core.is_own_disk_sound


def test_a_follower_whose_log_is_overwritten_goes_back_to_the_view_before() -> None:
    core = a_core()
    log = log_of(GENESIS, DiskNamedBody("c", b""))
    write_all(core, arrive(core, "b", append_entries(log, 1, 2, term=1)))
    assert core.disks.disk_of("c") == b""
    other = (log[0], seal(2, 2, log[0].hash, a_discard(1)))
    arrive(core, "b", append_entries(other, 2, 2, term=2))
    assert core.disks.disk_of("c") == disk_of("c")


def test_who_knows_a_view_helps_nobody_to_found_the_run_again() -> None:
    """Also a candidate whose log is as long: genesis may be on its way to it."""
    core = a_core()
    for pre_vote in (True, False):
        request = vote_request(1, pre_vote, 9, 9, has_view=False)
        (answer,) = [message for _, message in sends(write_and_send(core, arrive(core, "b", request)))]
        assert isinstance(answer, RequestVoteReply)
        assert not answer.granted


def write_and_send(core: LedgerCore, effects: list[Effect]) -> list[Effect]:
    return [*effects, *write_all(core, effects)]


# ---- terms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", [2**62, 10 * TERM_STEP_MAX])
def test_a_term_grows_in_bounded_steps_whatever_is_claimed(claim: int) -> None:
    beat = append_entries(chain(1), 1, 0, term=claim)
    for message in (vote_request(claim, False, 0, 0), ack(claim, 1, False, 0), beat):
        core = a_core(term=5)
        arrive(core, "b", message)
        assert core.term <= 5 + TERM_STEP_MAX
    core = a_core(term=5)
    assert sends(arrive(core, "b", vote_request(claim, True, 0, 0))) == [("b", vote(5, True, False))]


def test_a_region_that_was_away_for_many_elections_follows_after_some_messages() -> None:
    core = a_core(entries=chain(1))
    term = 86_400
    for sequence in range(100):
        write_all(core, arrive(core, "b", append_entries(chain(1), 2, 1, term=term, sequence=sequence)))
    assert (core.term, core.leader) == (term, "b")


def test_who_hears_its_leader_heeds_no_newer_term_of_another() -> None:
    log = chain(1)
    core = a_core(entries=log)
    arrive(core, "b", append_entries(log, 2, 1, term=1))
    for message in (vote_request(2, False, 9, 9), vote(2, False, False), append_entries(log, 2, 1, term=2)):
        arrive(core, "c", message, TIMEOUT_NS - 1)
        assert (core.term, core.leader) == (1, "b")
    arrive(core, "c", vote_request(2, False, 9, 9), TIMEOUT_NS)
    assert core.term == 2


# ---- founding --------------------------------------------------------------------------------------------------------


def founded(voters: int = 3, *, seed: int = 0) -> Network:
    network = Network(voters, seed=seed, is_founded=False)
    network.run_until(lambda: network.has_all(2))
    return network


def test_a_run_is_founded_by_all_regions_and_not_by_a_majority() -> None:
    network = Network(3, is_founded=False)
    network.crash("c")
    network.run(50 * TIMEOUT_NS)
    assert network.leader == ""
    assert any("waits for c" in core.reason for core in network.cores.values())
    network.start("c")
    network.run_until(lambda: network.has_all(2))
    assert network.truth[1].body == GENESIS
    # From then on a majority is enough.
    network.crash(network.leader)
    network.run_until(lambda: bool(network.leader) and network.cores[network.leader].is_settled)


def test_a_folder_that_was_emptied_does_not_found_the_run_again() -> None:
    for seed in range(20):
        network = founded(seed=seed)
        holder, wiped, away = network.names
        network.crash(away)
        network.wipe(wiped)
        network.start(wiped)
        network.crash(holder)
        network.start(away)
        network.run(30 * TIMEOUT_NS)
        # `away` may have genesis: then it knows a view, and needs the folder that it names.
        assert network.leader == ""
        network.start(holder)
        network.run_until(lambda network=network: network.has_all(len(network.truth)))  # type: ignore[misc]
        assert sum(isinstance(entry.body, GenesisBody) for entry in network.truth) == 1


def test_a_folder_that_is_lost_before_genesis_does_not_keep_the_others_from_founding() -> None:
    network = Network(3, is_founded=False)
    leader = network.elect()
    network.run_until(lambda: network.cores[network.leader].is_settled)
    # Nobody has proposed genesis yet: the folder of a follower goes.
    lost = next(name for name in network.names if name != leader)
    network.wipe(lost)
    network.start(lost)
    network.run_until(lambda: any(isinstance(entry.body, GenesisBody) for entry in network.truth))
    genesis = next(entry.body for entry in network.truth if isinstance(entry.body, GenesisBody))
    assert genesis.disks[genesis.regions.index(lost)] in (network.disks[lost].id, disk_of(lost))
    network.run_until(lambda: network.cores[lost].is_own_disk_sound)


# ---- lost folders ----------------------------------------------------------------------------------------------------

LONG_NS = 1000 * TIMEOUT_NS


def is_named(network: Network, name: str) -> Callable[[], bool]:
    def look() -> bool:
        leader = network.leader
        return bool(leader) and network.cores[leader].disks.disk_of(name) == network.disks[name].id

    return look


@pytest.mark.parametrize("voters", [3, 5])
def test_an_emptied_folder_comes_back_by_itself_and_counts_again(voters: int) -> None:
    network = founded(voters)
    network.propose(a_discard(1))
    for name in network.names[: voters // 2]:  # one after the other, the leader too
        network.wipe(name)
        network.start(name)
        network.run_until(is_named(network, name), LONG_NS)
        network.run_until(lambda name=name: network.cores[name].is_own_disk_sound, LONG_NS)  # type: ignore[misc]
    # Those that came back carry the run when others are away now.
    for name in network.names[-(voters // 2) :]:
        network.crash(name)
    network.elect()
    network.propose(a_discard(9))
    network.run_until(lambda: network.truth[-1].body == a_discard(9))


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.seeds) for seed in range(20, 30))])
def test_emptied_folders_never_let_two_entries_commit_at_one_index(seed: int) -> None:
    """`Network.check` compares every committed entry with the one committed first; folders are lost one at a time."""
    network = founded(3 + 2 * (seed % 2), seed=seed)
    rng = network.rng
    lost = ""
    for number in range(60):
        network.loss, network.jitter_ns = rng.choice([0.0, 0.1, 0.3]), rng.choice([0, 50, 400])
        action = rng.randrange(8)
        if lost and is_named(network, lost)() and network.has_all(len(network.truth)):
            lost = ""
        if action == 0 and not lost:
            lost = rng.choice(network.names)
            network.wipe(lost)
        elif action == 1 and network.cores:
            network.crash(rng.choice(sorted(network.cores)))
        elif action == 2:
            network.isolate(rng.choice(network.names))
        elif action < 6:
            network.heal()
            for name in network.names:
                if name not in network.cores:
                    network.start(name)
        if network.leader:
            network.propose(a_discard(number))
        network.run(rng.randrange(4 * TIMEOUT_NS))
    network.heal()
    network.loss, network.jitter_ns = 0.0, 0
    for name in network.names:
        if name not in network.cores:
            network.start(name)
    network.elect()
    network.propose(a_discard(1000))
    last = len(network.truth)
    network.run_until(lambda: len(network.truth) > last and network.has_all(len(network.truth)), LONG_NS)
    network.run_until(lambda: all(core.is_own_disk_sound for core in network.cores.values()), LONG_NS)


def test_changes_of_one_region_are_told_apart_by_a_rest() -> None:
    """A region that tells another folder each time must not fill the ledger."""
    network = founded()
    network.elect()
    name = next(region_ for region_ in network.names if region_ != network.leader)
    for _ in range(20):
        network.wipe(name)
        network.start(name)
        network.run(3 * TIMEOUT_NS)
    changes = sum(isinstance(entry.body, DiskNamedBody) for entry in network.truth)
    rests = 60 * TIMEOUT_NS / (REST_HEARTBEATS * HEARTBEAT_NS)
    assert 1 <= changes <= 2 * (rests + 1), "each folder takes two entries"


def test_each_folder_hands_out_numbers_of_lives_that_none_before_it_has() -> None:
    """The first folder's third life contributed, and no entry says so: its bytes are in other regions' memory."""
    assert next_incarnation(-1, -1, 0) == 0
    assert next_incarnation(-1, -1, 1) > 3
    assert next_incarnation(7, -1, 2) > next_incarnation(7, -1, 1) + 3


@pytest.mark.parametrize("newest", [-1, 0, 997, 998, 999, 1998, 999_998])
@pytest.mark.parametrize("lives", [1, 2, 5, 900])
def test_no_folder_hands_out_a_number_of_another_though_no_entry_names_any(newest: int, lives: int) -> None:
    numbers: set[int] = set()
    for replacements in range(40):
        newest_here = -1
        for _ in range(lives):
            newest_here = next_incarnation(newest, newest_here, replacements)
            assert newest_here not in numbers
            numbers.add(newest_here)
            assert is_plausible_incarnation(newest_here, newest)


@pytest.mark.parametrize("newest", [-1, 5, 998, 999, 1001])
@pytest.mark.parametrize("replacements", [0, 1, 3])
def test_no_learner_is_barred_by_lives_of_which_no_entry_says_anything(newest: int, replacements: int) -> None:
    """Of lives that end in their first step."""
    newest_here = -1
    for _ in range(5000):
        number = next_incarnation(newest, newest_here, replacements)
        assert max(newest, newest_here) < number
        assert is_plausible_incarnation(number, newest)
        newest_here = number


@pytest.mark.parametrize("newest", [-1, 0, 998, 999, 4321, 550_000_123])
def test_no_number_of_a_life_is_handed_out_twice_or_implausible_however_often_the_folder_was_lost(newest: int) -> None:
    """A machine without a disk of its own was barred for good after 1,049 of them."""
    highest = newest
    for replacements in range(newest // LIVES_UNKNOWN_MAX + 1, newest // LIVES_UNKNOWN_MAX + 3000):
        life = next_incarnation(newest, -1, replacements)
        assert highest < life
        assert is_plausible_incarnation(life + LIVES_UNKNOWN_MAX - 1, newest)
        highest = life + LIVES_UNKNOWN_MAX // 2
        if replacements % 400 == 0:  # an entry names this life; the folder's next one has the next number
            newest = life + 3
            assert next_incarnation(newest, -1, replacements) == newest + 1


def test_a_run_from_an_earlier_version_has_numbers_left() -> None:
    for newest in range(0, 3_000_000, 77_777):
        for replacements in (0, 1, 999, 1000, 1048, 1049, 5000):
            life = next_incarnation(newest, -1, replacements)
            assert newest < life
            assert is_plausible_incarnation(life + LIVES_UNKNOWN_MAX, newest)
