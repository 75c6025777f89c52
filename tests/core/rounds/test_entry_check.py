"""core/rounds/entry_check.py: every rule an entry must keep, and that the check can go back and forth with the log."""

from dataclasses import replace

import pytest

from diloco_node.core.bounds import REVOKED
from diloco_node.core.ledger.entries import ZERO_HASH
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.summary import encode_summary
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.rounds.claim_limits import INCARNATIONS_AHEAD_MAX
from diloco_node.core.rounds.entry_check import EntryCheck
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import (
    EVICTED,
    EXPELLED,
    Ballot,
    DiscardedBody,
    DiskNamedBody,
    Entry,
    EntryBody,
    ExtendedBody,
    FinishedBody,
    GenesisBody,
    LeaderBody,
    LedgerBase,
    RevokedBody,
    Stripe,
)
from diloco_node.lab.sim.planting import authority, signed
from tests.kit.entry_check_kit import BLOCKS, DISCARD, FIRST, RUN, a_round, check_after, fault_of, new_check
from tests.kit.rounds_kit import GENESIS, MANIFEST, REGIONS, SETTINGS, Ledger, history_of

SECOND = a_round("a", version=2, base=1, steps=(10, 20), snapshot=2)


def test_an_honest_ledger_is_accepted_whole() -> None:
    check_after(
        LeaderBody("a"),
        GENESIS,
        FIRST,
        a_round("c", fragment=1),
        DISCARD,
        LeaderBody("b"),
        SECOND,
        a_round("b", version=3, base=0, incarnation=2, steps=(0, 4)),
        FinishedBody((3, 1), "tokens"),
        LeaderBody("c"),
        DiscardedBody("c", 1, 0, 0, 9, 1, "died"),
        DiskNamedBody("b", b""),
        DiskNamedBody("b", b"x" * 16),
        RevokedBody("b", b"x" * 32),
        RevokedBody("b", b"x" * 32),
        MembershipBody("d", "contributor"),
        DiskNamedBody("d", b"y" * 16),
        MembershipBody("d", "voter"),
        LeaderBody("d"),
        MembershipBody("c", "former"),
        DiscardedBody("c", 1, 0, 9, 12, 1, "its last steps"),
        RevokedBody("c", b"z" * 32),
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (GENESIS, "a second genesis"),
        (LeaderBody("mallory"), "mallory is no region"),
        (replace(FIRST, fragment=99), "there is no fragment 99"),
        (replace(FIRST, version=2), "version 2 of fragment 0, the next is 1"),
        (replace(FIRST, ballot=Ballot(2, 1)), "ballot 2.1 in an entry of term 1"),
        (replace(FIRST, ballot=Ballot(0, 1)), "ballot 0.1 in an entry of term 1"),
        (replace(FIRST, members=()), "members (none)"),
        (replace(FIRST, members=FIRST.members[::-1]), "members b, a"),
        (replace(FIRST, members=FIRST.members[:1] * 2), "members a, a"),
        (a_round("a", "mallory"), "mallory is no region"),
        (replace(a_round(fragment=1), members=FIRST.members), "contributes to fragment 0"),
        (a_round("a", base=1), "base is version 1 for a round to version 1"),
        (a_round("a", base=-1), "base is version -1"),
        (a_round("a", steps=(1, 10)), "does not follow step 0"),
        (a_round("a", steps=(0, 0)), "covers 0 steps"),
        (a_round("a", norm=2.0**201), "squared norm of piece 0"),
        (a_round("a", incarnation=INCARNATIONS_AHEAD_MAX + 1), "incarnation 1048577 of a is too far ahead of 0"),
        (replace(FIRST, factors=FIRST.factors[1:]), "factors and"),
        (replace(FIRST, squared_norms=()), "0 norms for"),
        (replace(FIRST, squared_norms=(1e300,) * len(FIRST.factors)), "squared norms of the payload up to 1e+300"),
        (replace(FIRST, factors=(0.1, *FIRST.factors[1:])), "no float32"),
        (replace(FIRST, members=tuple(replace(member, weight=0.0) for member in FIRST.members)), "weights [0.0, 0.0]"),
        (replace(FIRST, members=tuple(replace(member, weight=0.1) for member in FIRST.members)), "no float32"),
        (replace(FIRST, share=0.0), "share 0.0"),
        (replace(FIRST, share=0.1), "no float32"),
        (replace(FIRST, stripes=()), "stripes of 0 blocks"),
        (replace(FIRST, stripes=FIRST.stripes[1:]), "a stripe from block 1 where 0 is next"),
        (replace(FIRST, stripes=FIRST.stripes[:1]), "stripes of 1 blocks for"),
        (replace(FIRST, stripes=(*FIRST.stripes, FIRST.stripes[1])), "where"),
        (replace(FIRST, stripes=(Stripe("mallory", 0, BLOCKS[0]),)), "mallory is no region"),
        (replace(DISCARD, learner="mallory", step_from=0), "mallory is no region"),
        (replace(DISCARD, fragment=2), "there is no fragment 2"),
        (DISCARD, "(10, 15] of b's incarnation 1 does not follow step 0"),
        (replace(DISCARD, step_from=0, step_to=0), "does not follow"),
        (replace(DISCARD, incarnation=1 << 40, step_from=0), "incarnation 1099511627776 of b is too far ahead of 0"),
        (DiskNamedBody("mallory", b"x" * 16), "mallory is no region"),
        (DiskNamedBody("b", b"x" * 16), "b's folder is 0202"),
        (RevokedBody("mallory", b"x" * 32), "mallory is no region"),
        (MembershipBody("d", "voter"), "d is no member: add it first"),
        (FinishedBody((1, 0), "x"), "ends at versions (1, 0), the ledger is at (0, 0)"),
        (FinishedBody((0,), "x"), "ends at versions (0,)"),
    ],
)
def test_what_can_not_follow_genesis(body: EntryBody, says: str) -> None:
    assert says in fault_of(body, GENESIS)


BESIDE_WITNESS = (
    GENESIS,
    MembershipBody("c", "former"),
    MembershipBody("witness", "witness", "s3://sites/run"),
    DiskNamedBody("witness", b"w" * 16),
)


@pytest.mark.parametrize(
    "body",
    [
        a_round("a", "witness"),
        replace(FIRST, stripes=(Stripe("witness", 0, BLOCKS[0]),)),
        replace(DISCARD, learner="witness", step_from=0),
        LeaderBody("witness"),
        DiskNamedBody("witness", EXPELLED),
        DiskNamedBody("witness", EVICTED),
        RevokedBody("witness", b"x" * 32),
    ],
)
def test_a_witness_is_no_region_of_an_entry(body: EntryBody) -> None:
    check_after(*BESIDE_WITNESS, DiskNamedBody("witness", b""), DiskNamedBody("witness", b"v" * 16))
    assert "witness is no region" in fault_of(body, *BESIDE_WITNESS)


def test_no_founder_has_the_name_of_a_witness() -> None:
    names = ("a", "b", "witness")
    check = EntryCheck((*RUN[:3], names), MANIFEST, SETTINGS)
    assert "witness is the witness's name" in check.fault(Ledger().add(replace(GENESIS, regions=names)))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (FIRST, "version 1 of fragment 0, the next is 2"),
        (replace(SECOND, version=3), "the next is 2"),
        (a_round("a", version=2, base=0, steps=(10, 20)), "base is version 0, it was included in 1"),
        (a_round("a", version=2, base=1, steps=(5, 20)), "(5, 20] of a's incarnation 1 does not follow step 10"),
        (a_round("a", version=2, base=1, incarnation=0, steps=(0, 9)), "incarnation 0 of a after 1 was included"),
        (replace(DISCARD, step_from=9), "does not follow step 10"),
        (DiskNamedBody("a", b"x" * 16), "a's folder is 0101"),
    ],
)
def test_what_can_not_follow_a_round(body: EntryBody, says: str) -> None:
    assert says in fault_of(body, GENESIS, FIRST)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (FIRST, "b is no region"),
        (replace(FIRST, members=FIRST.members[:1], stripes=(Stripe("b", 0, BLOCKS[0]),)), "b is no region"),
        (replace(a_round("a", "d", fragment=1), stripes=(Stripe("d", 0, BLOCKS[1]),)), ""),
        (LeaderBody("b"), "b is no region"),
        (LeaderBody("d"), "d leads, and does not vote"),
        (DiskNamedBody("b", b"x" * 16), "b is no region"),
        (MembershipBody("d", "voter"), "the disk of d does not hold yet"),
    ],
)
def test_the_roster_of_its_entry_says_who_may_be_in_one(body: EntryBody, says: str) -> None:
    fault = fault_of(body, GENESIS, MembershipBody("b", "former"), MembershipBody("d", "contributor"))
    assert says in fault if says else fault == ""


CHANGED = MembershipBody("b", "former")


def strict_check(*bodies: EntryBody) -> tuple[EntryCheck, Ledger]:
    """A check that knows the authority of the run, after these entries."""
    check, ledger = check_after(*bodies)
    check.roster_fault = lambda roster: authority(roster.statement("run"), roster.signature)
    return check, ledger


def base_of(*bodies: EntryBody, **changes: object) -> LedgerBase:
    summary = replace(history_of(*bodies).sum_up(), **changes)  # type: ignore[arg-type]
    return LedgerBase(len(bodies), 1, ZERO_HASH, encode_summary(summary))


FOUNDERS = Roster.of_voters(REGIONS)


TWO = FOUNDERS.changed(MembershipBody("b", "contributor"))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(CHANGED, id="not signed"),
        pytest.param(replace(CHANGED, signature=b"s" * 71), id="forged"),
        pytest.param(signed(FOUNDERS, CHANGED, "another-run"), id="for another run"),
        pytest.param(
            replace(signed(FOUNDERS, MembershipBody("c", "former"), "run"), region="b"), id="of another region"
        ),
        pytest.param(replace(signed(FOUNDERS, CHANGED, "run"), kind="contributor"), id="another kind"),
        pytest.param(
            replace(signed(FOUNDERS, MembershipBody("d", "contributor", "d:1"), "run"), address="mallory:1"),
            id="another address",
        ),
        pytest.param(signed(TWO, CHANGED, "run"), id="for a roster that will be"),
        pytest.param(signed(Roster.of_voters(("a", "b")), CHANGED, "run"), id="for other members"),
    ],
)
def test_a_leader_that_makes_up_a_change_of_the_members_is_refused(body: MembershipBody) -> None:
    check, ledger = strict_check(GENESIS)
    assert "no authority of the run has signed it" in check.fault(ledger.add(body))


def test_an_order_counts_once_and_for_the_members_that_it_was_given_for() -> None:
    there, back = MembershipBody("b", "contributor"), DiskNamedBody("b", b"y" * 16)
    first = signed(FOUNDERS, there, "run")
    check, ledger = strict_check(GENESIS, DiskNamedBody("b", b""), back)
    for body in (first, signed(TWO, MembershipBody("b", "voter"), "run")):
        entry = ledger.add(body)
        assert check.fault(entry) == ""
        check.take(entry)
    assert "no authority" in check.fault(ledger.add(first)), "replayed: the members are as they were then"
    other = signed(FOUNDERS, MembershipBody("c", "former"), "run")
    assert "no authority" in check.fault(ledger.add(other)), "given before, and never carried out"
    assert "b is a voter already" in check.fault(ledger.add(MembershipBody("b", "voter")))


def test_a_base_shows_that_an_operator_has_changed_its_members() -> None:
    change = signed(FOUNDERS, CHANGED, "run")
    check, _ = strict_check(GENESIS)
    assert check.base_fault(base_of(GENESIS)) == ""
    assert check.base_fault(base_of(GENESIS, change)) == ""
    lines = history_of(GENESIS).sum_up().members
    for base, says in (
        (base_of(GENESIS, CHANGED), "no authority"),
        (base_of(GENESIS, replace(change, region="c")), "no authority"),
        (base_of(GENESIS, change, changes=0), "its voters are a, c, and no change"),
        (base_of(GENESIS, change, changes=2), "no authority"),
        (base_of(GENESIS, change, members=lines), "no authority"),
        (base_of(GENESIS, members=(*lines, replace(lines[0], region="d", kind="contributor"))), "no change"),
    ):
        assert says in check.base_fault(base)
    check, _ = strict_check(GENESIS, change)
    assert check.base_fault(base_of(GENESIS, change)) == ""
    assert check.base_fault(base_of(GENESIS)) == "", "the change may still be truncated"
    check.settle(2)
    assert "changed 0 times, 1 changes are committed here" in check.base_fault(base_of(GENESIS))


def test_a_region_that_joins_takes_any_founders_of_its_run_for_right() -> None:
    check = EntryCheck((*RUN[:3], ()), MANIFEST, SETTINGS)
    ledger = Ledger()
    for body in (LeaderBody("c"), GENESIS, MembershipBody("d", "contributor")):
        entry = ledger.add(body)
        assert check.fault(entry) == ""
        check.take(entry)
    assert "mallory is no region" in check.fault(ledger.add(LeaderBody("mallory")))


def test_a_leader_can_not_fill_the_ledger_with_revoked_certificates() -> None:
    revocations = [RevokedBody("b", number.to_bytes(32, "big")) for number in range(REVOKED)]
    assert fault_of(RevokedBody("b", b"x" * 32), GENESIS, *revocations[1:]) == ""
    assert "are revoked already" in fault_of(RevokedBody("b", b"x" * 32), GENESIS, *revocations)
    assert fault_of(revocations[0], GENESIS, *revocations) == "", "once more is nothing more"


@pytest.mark.parametrize("body", [FIRST, DISCARD, FinishedBody((0, 0), "x")])
def test_nothing_but_leaders_before_genesis(body: EntryBody) -> None:
    assert "before genesis" in fault_of(body)
    assert "before genesis" in fault_of(body, LeaderBody("a"))


@pytest.mark.parametrize("body", [FIRST, GENESIS, FinishedBody((0, 0), "again")])
def test_nothing_merges_after_the_end(body: EntryBody) -> None:
    assert fault_of(body, GENESIS, FinishedBody((0, 0), "x"))


def test_an_extension_follows_an_end_with_narrower_limits_and_opens_rounds_again() -> None:
    end, further = FinishedBody((0, 0), "x", 400), ExtendedBody(800, 0)
    assert fault_of(further, GENESIS) == "an extension of a run that is not over"
    assert "no wider than (400, 0)" in fault_of(ExtendedBody(400, 0), GENESIS, end)
    assert fault_of(further, GENESIS, end) == ""
    assert fault_of(FIRST, GENESIS, end, further) == ""
    assert fault_of(further, GENESIS, end, further) != ""
    assert fault_of(FinishedBody((0, 0), "y", 800), GENESIS, end, further) == ""


def test_only_the_limits_that_a_region_was_started_with_extend_its_run() -> None:
    check, ledger = check_after(GENESIS, FinishedBody((0, 0), "x", 400))
    assert "this region was started with" in check.doubt(ledger.add(ExtendedBody(10**9, 0)))


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "other"},
        {"manifest_digest": "other"},
        {"regions": ("a", "b")},
        {"regions": ("b", "a", "c")},
        {"fragment_digests": GENESIS.fragment_digests[1:]},
        {"disks": ()},
        {"disks": GENESIS.disks[1:]},
        {"disks": GENESIS.disks[:1] * 3},
    ],
)
def test_genesis_is_of_this_run(change: dict[str, object]) -> None:
    assert fault_of(GENESIS) == ""
    assert fault_of(replace(GENESIS, **change))  # type: ignore[arg-type]


def test_settings_may_have_changed_since_genesis() -> None:
    assert fault_of(replace(GENESIS, settings_digest="other")) == ""


def test_a_body_without_a_rule_is_refused() -> None:
    check, _ = check_after(GENESIS)
    assert "int is not known here" in check.fault(Entry(2, 1, ZERO_HASH, 5, ZERO_HASH))  # type: ignore[arg-type]


def test_the_genesis_of_the_tests_is_of_the_run() -> None:
    assert isinstance(GENESIS, GenesisBody)
    assert (GENESIS.run_id, GENESIS.settings_digest, GENESIS.manifest_digest, GENESIS.regions) == RUN


def test_a_folder_is_taken_away_once_and_then_named_once() -> None:
    away = DiskNamedBody("b", b"")
    assert "b's folder is none, named is none" in fault_of(away, GENESIS, away)
    assert fault_of(DiskNamedBody("b", b"x" * 16), GENESIS, away) == ""


def test_a_vote_is_taken_for_an_absence_only_while_three_are_left_and_given_back_by_naming_the_folder() -> None:
    founders = tuple("abcd")
    genesis = replace(GENESIS, regions=founders, disks=tuple(bytes([number]) * 16 for number in range(1, 5)))
    check, ledger = EntryCheck((*RUN[:3], founders), MANIFEST, SETTINGS), Ledger()
    evicted, others = DiskNamedBody("d", EVICTED), DiskNamedBody("c", EVICTED)
    assert check.base_fault(base_of(genesis, evicted)) == "", "no change of the members: nobody signs it"
    for body in (genesis, evicted):
        entry = ledger.add(body)
        assert check.fault(entry) == ""
        check.take(entry)
    for body, says in (
        (DiskNamedBody("mallory", EVICTED), "mallory is no region"),
        (others, "2 voters would be left without c, and 3 must be"),
        (evicted, "d has no vote that could be taken"),
        (DiskNamedBody("d", b""), "d's folder is none, named is none"),
    ):
        assert says in check.fault(ledger.add(body))
    assert check.fault(ledger.add(DiskNamedBody("d", b"x" * 16))) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"overlap_steps": 7}, "must be less than rounds.sync_every, 7"),
        ({"quorum_min": 4}, "rounds.quorum_min is 4, and the run has 3 regions"),
        ({"ballot_deadline_min_ns": 1}, "rounds.ballot_deadline_min must be at least rounds.heartbeat"),
        ({}, ""),
    ],
)
@pytest.mark.parametrize("is_genesis", [True, False])
def test_settings_that_no_order_may_have_are_not_taken_from_a_leader(
    change: dict[str, int], words: str, is_genesis: bool
) -> None:
    body = replace(SettingsBody.of(SETTINGS), **change)  # type: ignore[arg-type]
    check, ledger = (new_check(), Ledger()) if is_genesis else check_after(GENESIS)
    doubt = check.doubt(ledger.add(replace(GENESIS, settings=(body,)) if is_genesis else body))
    assert words in doubt
    assert bool(words) == bool(doubt)
