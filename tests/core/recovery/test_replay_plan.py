"""Where a replay may begin, for every set of files that may be there."""

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.recovery.replay_plan import find_genesis, plan_replay
from diloco_node.core.types import Ballot, Entry, EntryBody, GenesisBody, LeaderBody, RoundBody, SnapshotBody, Stripe

LAST = 5
GENESIS = GenesisBody("run", "m", "s", ("a",), (b"0" * 32, b"1" * 32), (bytes(16),))


def round_of(fragment: int, version: int) -> RoundBody:
    digest = bytes([fragment, version]) * 16
    return RoundBody(fragment, version, Ballot(1, version), (), 1.0, (1.0,), (Stripe("a", 0, 1),), digest)


def entries_of(*bodies: EntryBody) -> tuple[Entry, ...]:
    return tuple(seal(index, 1, ZERO_HASH, body) for index, body in enumerate(bodies, start=1))


def payload_of(fragment: int, version: int) -> tuple[int, int, bytes]:
    return fragment, version, round_of(fragment, version).payload_digest


ROUNDS = entries_of(GENESIS, *(round_of(0, version) for version in range(1, LAST + 1)), SnapshotBody(0, 3, b"3" * 32))


def test_genesis_is_found_in_the_entries() -> None:
    assert find_genesis(None, ROUNDS) is GENESIS
    assert find_genesis(None, entries_of(LeaderBody("a"))) is None


@given(st.sets(st.integers(0, LAST)), st.sets(st.integers(1, LAST)), st.integers(0, LAST - 1))
def test_the_earliest_start_that_has_all_it_needs_is_taken(states: set[int], payloads: set[int], gone: int) -> None:
    """`gone`: entries of versions up to it are summed up."""
    entries_known = tuple(
        effect for effect in ROUNDS if not isinstance(effect.body, RoundBody) or effect.body.version > gone
    )
    on_disk = {payload_of(0, version) for version in payloads}
    plan, other = plan_replay(GENESIS, None, entries_known, [states, {0}], on_disk)
    there = {entry.body.version for entry in entries_known if isinstance(entry.body, RoundBody)}
    possible = [
        start
        for start in sorted(states & {0, 3})
        if all(version in payloads and version in there for version in range(start + 1, LAST + 1))
    ]
    assert plan.start == (possible[0] if possible else -1)
    if possible:
        assert [body.version for body in plan.rounds] == list(range(plan.start + 1, LAST + 1))
        assert dict(plan.digests) == {
            version: digest for version, digest in ((0, b"0" * 32), (3, b"3" * 32)) if version >= plan.start
        }
    assert bool(plan.lack) == (plan.start != 0)
    assert (other.start, other.rounds, other.lack) == (0, (), ""), "a fragment without rounds is where it began"


def test_what_is_missing_is_what_an_earlier_start_would_need() -> None:
    all_payloads = {payload_of(0, version) for version in range(1, LAST + 1)}

    def lack(states: set[int], payloads: set[tuple[int, int, bytes]], entries: tuple[Entry, ...] = ROUNDS) -> str:
        return plan_replay(GENESIS, None, entries, [states, {0}], payloads)[0].lack

    assert lack({0, 3}, all_payloads) == ""
    assert lack({3, 4}, all_payloads) == "the state of fragment 0 at version 0"
    assert lack({0, 3}, all_payloads - {payload_of(0, 2)}) == "the payload of fragment 0 version 2"
    assert (
        lack({0}, {(0, 1, b"another one"), *all_payloads} - {payload_of(0, 1)}) == "the payload of fragment 0 version 1"
    )
    assert "entry of fragment 0 version 1" in lack({0}, all_payloads, (ROUNDS[0], *ROUNDS[2:]))
    assert lack({4}, all_payloads) == "a state of fragment 0 whose digest the ledger names"


def test_every_subset_of_payloads_of_another_fragment_changes_nothing() -> None:
    mine = [payload_of(0, version) for version in range(1, LAST + 1)]
    others = [payload_of(1, version) for version in (1, 2)]
    for extra in chain.from_iterable(combinations(others, size) for size in range(3)):
        plan, _ = plan_replay(GENESIS, None, ROUNDS, [{0}, {0}], {*mine, *extra})
        assert plan.start == 0
