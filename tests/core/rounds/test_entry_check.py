"""core/rounds/entry_check.py: every rule an entry must keep, and that the check can go back and forth with the log."""

import random
import struct
from dataclasses import replace

import pytest

from diloco_node.core.bounds import REVOKED
from diloco_node.core.ledger.account import INCARNATIONS_KEPT
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.summary import encode_summary
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.merge.numbers import MergeNumbers, merge_numbers
from diloco_node.core.merge.outer import outer_rates
from diloco_node.core.merge.outliers import ROUNDS_KEPT, RecentRounds
from diloco_node.core.merge.weights import to_float32
from diloco_node.core.rounds.claim_limits import INCARNATIONS_AHEAD_MAX
from diloco_node.core.rounds.entry_check import EntryCheck
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import (
    EVICTED,
    EXPELLED,
    Ballot,
    Contribution,
    DiscardedBody,
    DiskNamedBody,
    Entry,
    EntryBody,
    ExtendedBody,
    FinishedBody,
    GenesisBody,
    LeaderBody,
    LedgerBase,
    Member,
    RevokedBody,
    RoundBody,
    SnapshotBody,
    Stripe,
    SummaryBody,
)
from diloco_node.lab.sim.planting import authority, signed
from tests.kit.rounds_kit import GENESIS, MANIFEST, REGIONS, SETTINGS, Ledger, committed_round, contribution, history_of

RUN = ("run", "settings", MANIFEST.digest, REGIONS)
BLOCKS = [sum(-(-size // 256) for size in fragment.piece_sizes) for fragment in MANIFEST.fragments]


def whole(body: RoundBody) -> RoundBody:
    return replace(body, stripes=(Stripe("a", 0, 1), Stripe("b", 1, BLOCKS[body.fragment])))


def a_round(*learners: str, fragment: int = 0, version: int = 1, **fields: object) -> RoundBody:
    members = [contribution(name, fragment, **fields) for name in learners or ("a", "b")]  # type: ignore[arg-type]
    return whole(committed_round(fragment, version, members, ballot=Ballot(1, version)))


SUM_EVERY = 4


def new_check() -> EntryCheck:
    return EntryCheck(RUN, MANIFEST, replace(SETTINGS, summary_entries=SUM_EVERY))


def check_after(*bodies: EntryBody) -> tuple[EntryCheck, Ledger]:
    check, ledger = new_check(), Ledger()
    for body in bodies:
        entry = ledger.add(body)
        assert check.fault(entry) == ""
        check.take(entry)
    return check, ledger


def fault_of(body: EntryBody, *before: EntryBody) -> str:
    check, ledger = check_after(*before)
    return check.fault(ledger.add(body))


FIRST = a_round()
SECOND = a_round("a", version=2, base=1, steps=(10, 20), snapshot=2)
DISCARD = DiscardedBody("b", 1, 0, 10, 15, 64, "died")


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
        (replace(FIRST, ballot=Ballot(0, 1)), "ballot 0.1"),
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


LIVES = INCARNATIONS_KEPT + 3


def candidates(rng: random.Random, check: EntryCheck) -> list[EntryBody]:
    """Bodies of which some can follow, whatever came before."""
    steps = sorted({0, 10, 20, 30})
    result: list[EntryBody] = [LeaderBody("a"), GENESIS, FinishedBody((1, 0), "x")]
    for _ in range(12):
        step_from, step_to = sorted(rng.sample(steps, 2))
        name, fragment, version = rng.choice(REGIONS), rng.randrange(2), rng.randint(1, 3)
        base, life = rng.randrange(version), rng.randint(1, LIVES)
        result.append(
            a_round(name, fragment=fragment, version=version, base=base, incarnation=life, steps=(step_from, step_to))
        )
        result.append(DiscardedBody(name, life, fragment, step_from, step_to, 5, "x"))
    return result


@pytest.mark.parametrize("seed", range(20))
def test_after_going_back_it_answers_as_one_that_never_went_there(seed: int) -> None:
    rng = random.Random(seed)
    taken: list[Entry] = []
    check, settled = new_check(), 0
    for _ in range(60):
        if taken[settled:] and rng.random() < 0.3:
            keep = rng.randint(settled, len(taken))
            del taken[keep:]
            check.back_to(keep)
        if rng.random() < 0.2:
            settled = rng.randint(settled, len(taken))
            check.settle(settled)
        fresh = new_check()
        for entry in taken:
            fresh.take(entry)
        for body in candidates(rng, check):
            entry = seal(len(taken) + 1, 1, taken[-1].hash if taken else ZERO_HASH, body)
            fault = check.fault(entry)
            assert fault == fresh.fault(entry), f"seed {seed}"
            if not fault:
                check.take(entry)
                taken.append(entry)
                break
    assert check.index == len(taken) > 5


@pytest.mark.parametrize("seed", range(20))
def test_behind_any_base_the_answers_are_those_of_a_whole_ledger(seed: int) -> None:
    """Regions compact at different times: what one accepts that has all entries, all accept, and nothing else."""
    rng = random.Random(seed)
    whole_check, ledger = check_after(GENESIS)
    history = RoundHistory(2)
    history.apply(ledger.entries[0], now_ns=0)
    behind: dict[int, EntryCheck] = {}
    refused = 0
    for _ in range(120):
        index = whole_check.index
        if index % SUM_EVERY == 0 and index not in behind:
            last, summary = ledger.entries[-1], history.sum_up()
            behind[index] = new_check()
            behind[index].begin(LedgerBase(index, last.term, last.hash, encode_summary(summary)))
        result = [*candidates(rng, whole_check), *sums(rng, index)]
        rng.shuffle(result)
        for body in result:
            entry = seal(index + 1, 1, ledger.entries[-1].hash, body)
            fault = whole_check.fault(entry)
            # Which sum was named last before it, a base does not say: it accepts one more.
            answers = {at: "" if isinstance(body, SummaryBody) else check.fault(entry) for at, check in behind.items()}
            expected = "" if isinstance(body, SummaryBody) else fault
            assert answers == dict.fromkeys(behind, expected), f"seed {seed}"
            if fault:
                refused += 1
                continue
            if isinstance(body, SummaryBody):
                assert {check.fault(entry) for check in behind.values()} <= {""}
            ledger.entries.append(entry)
            history.apply(entry, now_ns=0)
            for check in (whole_check, *behind.values()):
                check.take(entry)
            break
    assert len(behind) > 5
    assert refused > 20
    assert any(history.account.is_closed(name, 1) for name in REGIONS), "no sum closed anything"


def test_an_incarnation_that_a_sum_has_closed_is_booked_no_more_by_anybody() -> None:
    lives = [DiscardedBody("b", life, 0, 0, 10, 64, "died") for life in range(1, LIVES)]
    late = DiscardedBody("b", 1, 0, 10, 15, 64, "died")
    fillers = [LeaderBody("a")] * (-(1 + len(lives)) % SUM_EVERY)
    assert "incarnation 1 of b is closed" in fault_of(late, GENESIS, *lives, *fillers)
    check, _ = check_after(GENESIS, *lives, *fillers)
    check.back_to(1 + len(lives[:-1]))
    assert "is closed" not in check.fault(seal(check.index + 1, 1, ZERO_HASH, late)), "the sum was truncated"


def sums(rng: random.Random, index: int) -> list[EntryBody]:
    """Snapshots, and sums up to entries of before."""
    made = [SnapshotBody(rng.randrange(2), rng.randint(1, 3), bytes(32)) for _ in range(2)]
    return [*made, *(SummaryBody(rng.randint(1, index), bytes(32)) for _ in range(2))]


def test_the_genesis_of_the_tests_is_of_the_run() -> None:
    assert isinstance(GENESIS, GenesisBody)
    assert (GENESIS.run_id, GENESIS.settings_digest, GENESIS.manifest_digest, GENESIS.regions) == RUN


def test_a_folder_is_taken_away_once_and_then_named_once() -> None:
    away = DiskNamedBody("b", b"")
    assert "b's folder is none, named is none" in fault_of(away, GENESIS, away)
    assert fault_of(DiskNamedBody("b", b"x" * 16), GENESIS, away) == ""


RDA = 1
"""The fragment whose factors depend on the sum."""

THREE = tuple(
    replace(contribution(name, RDA, steps=(0, steps), norm=norm), tokens=tokens)
    for name, steps, tokens, norm in (("a", 10, 640, 4.0), ("b", 12, 3000, 5.0), ("c", 7, 450, 3.0))
)


def numbers_of(
    members: tuple[Contribution, ...], *before: EntryBody, version: int = 1, is_last: bool = False
) -> MergeNumbers:
    """What a leader works out after these entries."""
    history = history_of(*before)
    return merge_numbers(
        MANIFEST.fragments[RDA],
        SETTINGS,
        members,
        carried_since=[history.account.carried_since(member) for member in members],
        recent=history.recent[RDA],
        version=version,
        is_last=is_last,
    )


def honest(
    members: tuple[Contribution, ...] = THREE,
    *before: EntryBody,
    version: int = 1,
    is_last: bool = False,
    part: float = 0.5,
) -> RoundBody:
    """The entry that an honest leader makes of a sum which is so long, as a part of the longest that it can be."""
    numbers = numbers_of(members, *before, version=version, is_last=is_last)
    norms = tuple((part * radius) ** 2 for radius in numbers.radii())
    entry_members = tuple(map(Member, members, numbers.weights))
    body = replace(
        a_round("a", fragment=RDA, version=version), members=entry_members, share=numbers.share, is_last=is_last
    )
    lr, mu = outer_rates(SETTINGS, is_last=is_last)
    return replace(body, squared_norms=norms, factors=numbers.factors(norms), outer_lr=lr, outer_momentum=mu)


def doubt_of(body: EntryBody, *before: EntryBody) -> str:
    check, ledger = check_after(*before)
    entry = ledger.add(body)
    assert check.fault(entry) == "", "nothing but its numbers is wrong"
    return check.doubt(entry)


AFTER = honest((replace(THREE[1], step_from=12, step_to=20, base_version=1, snapshot=2),), GENESIS, honest(), version=2)
"""Of b alone."""

BACK = (
    replace(THREE[0], step_from=10, step_to=30, base_version=2, snapshot=2),
    replace(THREE[1], step_from=20, step_to=30, base_version=2, snapshot=3),
)
"""a comes back after a version without it: it weighs more, and the share is below one."""


def test_a_round_has_the_rates_of_the_settings_at_its_entry() -> None:
    settings = replace(SettingsBody.of(SETTINGS), outer_lr=0.25)
    words = "its outer step has the rates 0.5 and 0.6, the settings say (0.25, 0.6)"
    assert doubt_of(honest(), GENESIS, settings) == words
    assert doubt_of(replace(honest(), outer_lr=0.25), GENESIS, settings) == ""
    assert doubt_of(honest(), GENESIS, settings, SettingsBody.of(SETTINGS)) == ""
    assert doubt_of(honest(), replace(GENESIS, settings=(settings,))) == words


def test_settings_that_change_nothing_or_come_after_the_end_are_refused() -> None:
    settings = replace(SettingsBody.of(SETTINGS), sync_every=99)
    assert fault_of(settings, GENESIS) == ""
    assert fault_of(settings, GENESIS, settings) == "settings that change nothing"
    assert fault_of(settings) == "a SettingsBody before genesis"
    assert fault_of(settings, GENESIS, FinishedBody((0, 0), "x")) == "settings after the end"


@pytest.mark.parametrize("is_last", [False, True])
def test_an_honest_leaders_numbers_are_not_doubted(is_last: bool) -> None:
    assert doubt_of(honest(is_last=is_last), GENESIS) == ""
    third = honest(BACK, GENESIS, honest(), AFTER, version=3, is_last=is_last)
    assert third.share == 1.0 if is_last else third.share < 1.0
    assert doubt_of(third, GENESIS, honest(), AFTER) == ""
    assert doubt_of(DISCARD, GENESIS, FIRST) == ""


def scaled(body: RoundBody, factor: float) -> RoundBody:
    return replace(body, members=tuple(replace(member, weight=factor * member.weight) for member in body.members))


LIES = {
    "huge factors": lambda body: replace(body, factors=(to_float32(1e30),) * len(body.factors)),
    "no step": lambda body: replace(body, factors=(0.0,) * len(body.factors)),
    "a denormal factor": lambda body: replace(body, factors=(2.0**-140, *body.factors[1:])),
    "factors a little off": lambda body: replace(body, factors=tuple(to_float32(1.0001 * f) for f in body.factors)),
    "one factor of two": lambda body: replace(body, factors=(2.0 * body.factors[0], *body.factors[1:])),
    "a tiny share": lambda body: replace(body, share=2.0**-126),
    "half the share": lambda body: replace(body, share=body.share / 2),
    "weights of others": lambda body: replace(
        body,
        members=tuple(
            replace(member, weight=other.weight)
            for member, other in zip(body.members, (*body.members[1:], body.members[0]), strict=True)
        ),
    ),
    "equal weights": lambda body: replace(body, members=tuple(replace(member, weight=1.0) for member in body.members)),
    "one weight is nothing": lambda body: replace(
        body, members=(replace(body.members[0], weight=0.0), *body.members[1:])
    ),
    "a denormal weight": lambda body: replace(
        body, members=(replace(body.members[0], weight=2.0**-149), *body.members[1:])
    ),
    "weights of another scale": lambda body: scaled(body, 2.0),
    "a plain mean in the middle": lambda body: replace(body, is_last=True),
    "a sum of nothing": lambda body: replace(body, squared_norms=(0.0,) * len(body.squared_norms)),
    "a sum that is longer than its members": lambda body: with_norms(body, 1.3),
    "a sum a thousand times too long": lambda body: with_norms(body, 1e6),
    "tokens that count double": lambda body: with_member(body, tokens=2 * body.members[1].contribution.tokens),
    "norms of another": lambda body: with_member(body, squared_norms=body.members[0].contribution.squared_norms),
    "steps that count less": lambda body: with_member(body, step_to=body.members[1].contribution.step_to - 1),
}


def with_norms(body: RoundBody, factor: float) -> RoundBody:
    """The norms are beyond the bound, and the factors are what follows from them."""
    numbers = numbers_of(tuple(member.contribution for member in body.members), is_last=body.is_last)
    norms = tuple(factor * radius * radius for radius in numbers.radii())
    return replace(body, squared_norms=norms, factors=numbers.factors(norms))


def with_member(body: RoundBody, **changed: object) -> RoundBody:
    member = body.members[1]
    other = replace(member, contribution=replace(member.contribution, **changed))  # type: ignore[arg-type]
    return replace(body, members=(body.members[0], other, *body.members[2:]))


@pytest.mark.parametrize("lie", LIES)
def test_a_leader_that_writes_other_numbers_is_doubted(lie: str) -> None:
    body = LIES[lie](honest())
    assert body != honest()
    assert doubt_of(body, GENESIS), lie


@pytest.mark.parametrize("lie", ["half the share", "a plain mean in the middle", "weights of others"])
def test_the_versions_that_a_member_missed_are_part_of_it(lie: str) -> None:
    before = (GENESIS, honest(), AFTER)
    body = honest(BACK, *before, version=3)
    assert doubt_of(LIES[lie](body), *before)
    assert doubt_of(replace(body, share=1.0), *before) == f"its share 0 is 1, {body.share:.9g} follows from its members"


def test_a_sum_as_long_as_all_together_is_welcome_with_what_rounding_adds() -> None:
    assert doubt_of(honest(part=1.0), GENESIS) == ""
    assert doubt_of(honest(part=1.0 + 15 / 254), GENESIS) == ""
    assert "members can't exceed" in doubt_of(honest(part=1.08), GENESIS)


def test_what_the_rounds_before_make_of_a_contribution_is_worked_out_behind_a_base_too() -> None:
    """How long gradients usually are decides how much of one counts: a summary must say it."""
    rounds: list[EntryBody] = [GENESIS]
    for version in range(1, ROUNDS_KEPT + 1):
        steps = {"step_from": 10 * version - 10, "step_to": 10 * version}
        member = replace(THREE[0], base_version=version - 1, snapshot=version, **steps)
        rounds.append(honest((member,), *rounds, version=version))
    steps = {"step_from": 10 * ROUNDS_KEPT, "step_to": 10 * ROUNDS_KEPT + 10}
    long = replace(THREE[0], base_version=ROUNDS_KEPT, snapshot=99, squared_norms=(4e6, 4e6), **steps)
    body = honest((long,), *rounds, version=ROUNDS_KEPT + 1, part=0.9)
    assert doubt_of(body, *rounds) == ""
    history = history_of(*rounds)
    ledger = Ledger()
    for earlier in rounds:
        ledger.add(earlier)
    behind = new_check()
    base = LedgerBase(len(rounds), 1, ledger.entries[-1].hash, encode_summary(history.sum_up()))
    assert behind.base_fault(base) == ""
    behind.begin(base)
    entry = ledger.add(body)
    assert (behind.fault(entry), behind.doubt(entry)) == ("", "")
    unclipped = numbers_of((long,), version=body.version).factors(body.squared_norms)
    assert unclipped != body.factors
    assert "follows from its members" in behind.doubt(ledger.add(replace(body, factors=unclipped)))


@pytest.mark.parametrize(
    "recent",
    [
        b"",
        struct.pack("<II", 1, 1),
        struct.pack("<II3f", 1, 1, 1.0, float("nan"), 1.0),
        struct.pack("<II3f", 1, 1, 1.0, -1.0, 1.0),
        struct.pack("<II5f", 1, 2, 1.0, 1.0, 1.0, 1.0, 1.0),
        struct.pack("<II", 2**31, 2**31),
    ],
)
def test_a_base_whose_norms_are_none_is_refused(recent: bytes) -> None:
    summary = replace(history_of(GENESIS).sum_up(), recent=(recent, RecentRounds().packed()))
    base = LedgerBase(1, 1, ZERO_HASH, encode_summary(summary))
    assert "norms of" in new_check().base_fault(base)


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
