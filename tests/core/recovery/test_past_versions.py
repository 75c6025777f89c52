"""Versions of the whole model: when each was reached, and from which files it can be had, for every set of files."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.recovery.past_versions import ReachableVersions, past_versions
from diloco_node.core.types import (
    Ballot,
    Contribution,
    Entry,
    EntryBody,
    GenesisBody,
    LeaderBody,
    Member,
    RoundBody,
    SnapshotBody,
    Stripe,
)

GENESIS = GenesisBody("run", "m", "s", ("a", "b"), (b"0" * 32, b"1" * 32), (bytes(16), bytes(16)))
TOKENS = 10


def round_of(fragment: int, version: int, learners: Sequence[str] = ()) -> RoundBody:
    members = [
        Contribution(name, 1, fragment, version - 1, version, version - 1, version, TOKENS, ()) for name in learners
    ]
    digest = bytes([fragment, version]) * 16
    weighted = tuple(Member(contribution, 1.0) for contribution in members)
    return RoundBody(fragment, version, Ballot(1, version), weighted, 1.0, (1.0,), (Stripe("a", 0, 1),), digest)


def entries_of(*bodies: EntryBody) -> tuple[Entry, ...]:
    return tuple(seal(index, 1, ZERO_HASH, body) for index, body in enumerate(bodies, start=1))


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[RoundBody], list[tuple[int, int]]]:
    """Rounds of two fragments in any order, and the versions of both after each."""
    versions, rounds, course = [0, 0], [], [(0, 0)]
    for fragment in draw(st.lists(st.integers(0, 1), max_size=14)):
        versions[fragment] += 1
        rounds.append(round_of(fragment, versions[fragment], draw(st.sampled_from([("a",), ("a", "b")]))))
        course.append((versions[0], versions[1]))
    return rounds, course


def test_the_step_of_a_version_is_that_of_the_members_of_its_day() -> None:
    rounds = [round_of(fragment, version, ("a", "b")) for version in (1, 2) for fragment in (0, 1)]
    changes = [MembershipBody(name, "contributor") for name in "cd"] + [MembershipBody(name, "former") for name in "ab"]
    later = [round_of(fragment, version, ("c", "d")) for version in range(3, 9) for fragment in (0, 1)]
    past = past_versions(GENESIS, None, 0, entries_of(LeaderBody("a"), GENESIS, *rounds, *changes, *later))
    assert past[2].step < past[-1].step == 8


@given(runs())
def test_a_version_is_the_first_moment_at_which_every_fragment_has_it(
    run: tuple[list[RoundBody], list[tuple[int, int]]],
) -> None:
    rounds, course = run
    past = past_versions(GENESIS, None, 0, entries_of(LeaderBody("a"), GENESIS, *rounds))
    assert [item.number for item in past] == list(range(min(course[-1]) + 1)), "without gaps"
    for item in past:
        at = course.index(item.versions)
        assert min(course[at]) == item.number
        assert at == 0 or min(course[at - 1]) < item.number
        tokens = sum(len(body.members) * TOKENS for body in rounds[:at])
        assert item.tokens == tokens // 2
    assert [item.step for item in past] == sorted(item.step for item in past)


def test_the_step_is_the_median_learners_as_far_as_it_is_booked() -> None:
    first, second = round_of(0, 1, ("a", "b")), round_of(1, 1, ("a",))
    third = round_of(0, 2, ("a",))
    past = past_versions(GENESIS, None, 0, entries_of(GENESIS, first, second, third, round_of(1, 2, ("a",))))
    assert [(item.number, item.step) for item in past] == [(0, 0), (1, 1), (2, 1)], "the lower of two"


def test_uncommitted_kinds_of_entries_change_nothing() -> None:
    entries = entries_of(LeaderBody("a"), GENESIS, SnapshotBody(0, 0, bytes(32)), LeaderBody("b"))
    assert [item.versions for item in past_versions(GENESIS, None, 0, entries)] == [(0, 0)]


@given(
    runs(),
    st.sets(st.integers(0, 8)),
    st.sets(st.integers(0, 8)),
    st.sets(st.tuples(st.integers(0, 1), st.integers(1, 8))),
)
def test_a_version_can_be_had_where_a_state_and_all_payloads_after_it_are_there(
    run: tuple[list[RoundBody], list[tuple[int, int]]],
    first_states: set[int],
    second_states: set[int],
    payloads: set[tuple[int, int]],
) -> None:
    rounds, _ = run
    entries = entries_of(GENESIS, *rounds)
    states = [first_states, second_states]
    on_disk = {(*place, round_of(*place).payload_digest) for place in payloads}
    reachable = ReachableVersions(GENESIS, None, entries, states, on_disk)
    for item in past_versions(GENESIS, None, 0, entries):
        starts = []
        for fragment, version in enumerate(item.versions):
            possible = [
                start
                for start in states[fragment]
                if start <= version and all((fragment, step) in payloads for step in range(start + 1, version + 1))
            ]
            starts.append(max(possible, default=-1))
        assert bool(reachable.lack(item)) == (-1 in starts)
        if -1 not in starts:
            plan = reachable.plan(item)
            assert [fragment.start for fragment in plan] == starts, "the nearest one"
            for fragment, version in zip(plan, item.versions, strict=True):
                assert [body.version for body in fragment.rounds] == list(range(fragment.start + 1, version + 1))


def test_a_payload_of_another_round_is_none_and_what_is_missing_is_named() -> None:
    entries = entries_of(GENESIS, round_of(0, 1), round_of(1, 1))
    (_, item) = past_versions(GENESIS, None, 0, entries)
    wrong = {(0, 1, b"another" + bytes(25)), (1, 1, round_of(1, 1).payload_digest)}
    assert (
        ReachableVersions(GENESIS, None, entries, [{0}, {0}], wrong).lack(item) == "the payload of fragment 0 version 1"
    )
    gone = ReachableVersions(GENESIS, None, entries, [{1}, {5}], wrong)
    assert gone.lack(item) == "a state of fragment 1 at version 1 or earlier"
