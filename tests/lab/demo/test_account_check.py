"""The independent checker of the token account against every single lost or doubled interval."""

import random
from dataclasses import replace

import pytest

from diloco_node.core.ledger.summary import Closed, RunSummary
from diloco_node.core.types import (
    Ballot,
    Contribution,
    DiscardedBody,
    EntryBody,
    FragmentPosition,
    LeaderBody,
    LearnerStatus,
    Member,
    RoundBody,
)
from diloco_node.lab.demo.account_check import AccountReport, check_account
from tests.kit.account_kit import TOKENS_PER_STEP, account_round, offer, seal_all


class Run:
    """A made-up run in which everything is right: learners contribute at random times, one dies and comes back."""

    def __init__(self, seed: int, fragments: int = 3) -> None:
        rng = random.Random(seed)
        self.fragments = fragments
        self.sizes = [100, 200, 300][:fragments]
        self.bodies: list[EntryBody] = [LeaderBody("a")]
        self.steps = {(name, 1): 0 for name in "abc"}
        self.tokens = {(name, 1): 0 for name in "abc"}
        self.marks: dict[tuple[str, int, int], tuple[int, int]] = {}
        versions = [0] * fragments
        bases: dict[tuple[str, int, int], int] = {}
        incarnations = dict.fromkeys("abc", 1)
        for number in range(30):
            for name in "abc":
                key = (name, incarnations[name])
                steps = rng.randrange(1, 9)
                self.steps[key] += steps
                self.tokens[key] += steps * rng.randrange(400, 500)
            if number == 17:
                self.kill("b", incarnations)
            fragment = rng.randrange(fragments)
            members = []
            for name in "abc":
                key = (name, incarnations[name])
                mark = self.marks.get((*key, fragment), (0, 0))
                if self.steps[key] > mark[0] and rng.random() < 0.7:
                    base = bases.get((*key, fragment), 0)
                    tokens = self.tokens[key] - mark[1]
                    made = Contribution(
                        name, incarnations[name], fragment, base, number, mark[0], self.steps[key], tokens, ()
                    )
                    members.append(Member(made, 1.0))
                    self.marks[(*key, fragment)] = (self.steps[key], self.tokens[key])
                    bases[(*key, fragment)] = versions[fragment] + 1
            if members:
                versions[fragment] += 1
                ballot = Ballot(1, number)
                body = RoundBody(fragment, versions[fragment], ballot, tuple(members), 1.0, (), (), bytes(32))
                self.bodies.append(body)
        self.incarnations = incarnations

    def kill(self, name: str, incarnations: dict[str, int]) -> None:
        key = (name, incarnations[name])
        for fragment in range(self.fragments):
            mark = self.marks.get((*key, fragment), (0, 0))
            if mark[0] < self.steps[key]:
                tokens = self.tokens[key] - mark[1]
                self.bodies.append(DiscardedBody(name, key[1], fragment, mark[0], self.steps[key], tokens, "killed"))
        incarnations[name] += 1
        self.steps[name, incarnations[name]] = self.tokens[name, incarnations[name]] = 0

    @property
    def trained(self) -> dict[tuple[str, int], tuple[int, int]]:
        return {key: (self.steps[key], self.tokens[key]) for key in self.steps}

    @property
    def positions(self) -> dict[str, LearnerStatus]:
        statuses = {}
        for name, incarnation in self.incarnations.items():
            marks = [self.marks.get((name, incarnation, fragment), (0, 0)) for fragment in range(self.fragments)]
            positions = tuple(FragmentPosition(0, step, step, tokens) for step, tokens in marks)
            key = (name, incarnation)
            statuses[name] = LearnerStatus(incarnation, self.steps[key], self.tokens[key], 0, positions)
        return statuses

    def check(self, bodies: list[EntryBody]) -> AccountReport:
        return check_account(seal_all(*bodies), self.trained, fragment_sizes=self.sizes, positions=self.positions)


@pytest.mark.parametrize("seed", range(20))
def test_a_correct_run_balances_and_the_parts_add_up(seed: int) -> None:
    run = Run(seed)
    report = run.check(run.bodies)
    assert report.faults == ()
    assert report.balanced
    assert report.merged + report.carried + report.discarded == report.trained
    assert min(report.merged, report.carried, report.discarded) > 0


def test_what_a_round_gave_no_weight_is_discarded() -> None:
    run = Run(5)
    before = run.check(run.bodies)
    place, body = next((place, body) for place, body in enumerate(run.bodies) if isinstance(body, RoundBody))
    weightless = replace(body, members=(replace(body.members[0], weight=0.0), *body.members[1:]))
    after = run.check([*run.bodies[:place], weightless, *run.bodies[place + 1 :]])
    assert after.balanced
    assert after.discarded - before.discarded == before.merged - after.merged > 0


def without_member(body: RoundBody, index: int) -> RoundBody:
    return replace(body, members=body.members[:index] + body.members[index + 1 :])


@pytest.mark.parametrize("seed", range(6))
def test_every_dropped_interval_is_found(seed: int) -> None:
    run = Run(seed)
    dropped = 0
    for at, body in enumerate(run.bodies):
        if isinstance(body, RoundBody):
            changes: list[list[EntryBody]] = [[without_member(body, index)] for index in range(len(body.members))]
        else:
            changes = [[]] if isinstance(body, DiscardedBody) else []
        for change in changes:
            dropped += 1
            assert not run.check([*run.bodies[:at], *change, *run.bodies[at + 1 :]]).balanced, (seed, at)
    assert dropped > 30


@pytest.mark.parametrize("seed", range(6))
def test_every_doubled_interval_is_found(seed: int) -> None:
    run = Run(seed)
    doubled = 0
    for at, body in enumerate(run.bodies):
        if isinstance(body, RoundBody):
            for member in body.members:
                doubled += 1
                # In the same round, and again as if it had been discarded.
                twice = replace(body, members=(*body.members, member))
                assert not run.check([*run.bodies[:at], twice, *run.bodies[at + 1 :]]).balanced, (seed, at)
                made = member.contribution
                again = DiscardedBody(
                    made.learner, made.incarnation, made.fragment, made.step_from, made.step_to, made.tokens, "again"
                )
                assert not run.check([*run.bodies[: at + 1], again, *run.bodies[at + 1 :]]).balanced, (seed, at)
        elif isinstance(body, DiscardedBody):
            doubled += 1
            assert not run.check([*run.bodies[: at + 1], body, *run.bodies[at + 1 :]]).balanced, (seed, at)
    assert doubled > 30


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("change", ["tokens", "step_to", "step_from"])
def test_every_changed_interval_is_found(seed: int, change: str) -> None:
    run = Run(seed)
    for at, body in enumerate(run.bodies):
        if not isinstance(body, RoundBody):
            continue
        for index, member in enumerate(body.members):
            wrong = replace(member.contribution, **{change: getattr(member.contribution, change) + 1})
            members = (*body.members[:index], Member(wrong, 1.0), *body.members[index + 1 :])
            changed = [*run.bodies[:at], replace(body, members=members), *run.bodies[at + 1 :]]
            assert not run.check(changed).balanced, (seed, at, index)


def faults(*bodies: EntryBody, trained: dict[tuple[str, int], tuple[int, int]] | None = None) -> str:
    counted = trained or {("a", 1): (30, 30 * TOKENS_PER_STEP)}
    return " | ".join(check_account(seal_all(*bodies), counted, fragment_sizes=[1]).faults)


def test_a_base_older_than_the_last_inclusion_is_a_fault() -> None:
    first = account_round(1, offer("a", 0, 0, 10))
    assert faults(first, account_round(2, offer("a", 0, 10, 20, base=1))) == ""
    assert "base version 0 for version 2, last included in 1" in faults(
        first, account_round(2, offer("a", 0, 10, 20, base=0))
    )
    assert "base version 2 for version 2" in faults(first, account_round(2, offer("a", 0, 10, 20, base=2)))


@pytest.mark.parametrize(
    ("version", "offers", "fault"),
    [
        (1, [offer("a", 0, 0, 30)], ""),
        (2, [offer("a", 0, 0, 10)], "goes to version 2, expected 1"),
        (1, [offer("zz", 0, 0, 10)], "zz incarnation 1 is in no learner's own count"),
        (1, [offer("a", 1, 0, 10)], "fragment 1 of 1"),
        (1, [offer("a", 0, 0, 31)], "31 steps"),
        (1, [offer("a", 0, 0, 0)], "(0, 0] with 0 tokens is no interval"),
        (1, [replace(offer("a", 0, 0, 29), tokens=30 * TOKENS_PER_STEP + 1)], "29 steps"),
        (1, [replace(offer("a", 0, 0, 30), tokens=1)], "all steps are covered"),
        # Two intervals that follow each other, so nothing counts twice, but in one round.
        (1, [offer("a", 0, 0, 10), offer("a", 0, 10, 20)], "a learner is in the round twice: a, a"),
    ],
)
def test_what_no_learner_can_have_trained_is_a_fault(version: int, offers: list[Contribution], fault: str) -> None:
    text = faults(account_round(version, *offers))
    assert fault in text if fault else text == ""


def test_a_dead_incarnation_must_be_covered_to_its_end() -> None:
    trained = {("a", 1): (30, 30 * TOKENS_PER_STEP), ("a", 2): (5, 5 * TOKENS_PER_STEP)}
    first = account_round(1, offer("a", 0, 0, 29))
    assert "dead, but only 29 steps" in faults(first, trained=trained)
    booked = DiscardedBody("a", 1, 0, 29, 30, TOKENS_PER_STEP, "killed")
    assert faults(first, booked, trained=trained) == ""


@pytest.mark.parametrize("seed", range(6))
def test_a_count_that_was_lost_with_its_folder_is_named_and_is_no_fault(seed: int) -> None:
    """The first life of b lies on a folder that was lost: nobody booked its last steps, and its count is gone."""
    run = Run(seed)
    bodies = [body for body in run.bodies if not isinstance(body, DiscardedBody)]
    trained = {identity: own for identity, own in run.trained.items() if identity != ("b", 1)}
    report = check_account(
        seal_all(*bodies), trained, fragment_sizes=run.sizes, positions=run.positions, lost_regions=frozenset({"b"})
    )
    assert (report.faults, report.uncounted) == ((), (("b", 1),))
    booked = max(
        sum(one.contribution.tokens for one in members if one.contribution.incarnation == 1)
        for members in (members_of(bodies, "b", fragment) for fragment in range(run.fragments))
    )
    assert report.trained == sum(own[1] for own in trained.values()) + booked
    assert report.trained == report.merged + report.carried + report.discarded
    assert not check_account(
        seal_all(*bodies), trained, fragment_sizes=run.sizes, lost_regions=frozenset({"a"})
    ).balanced


def members_of(bodies: list[EntryBody], learner: str, fragment: int) -> list[Member]:
    rounds = [body for body in bodies if isinstance(body, RoundBody) and body.fragment == fragment]
    return [member for body in rounds for member in body.members if member.contribution.learner == learner]


def test_what_closed_incarnations_trained_is_believed_where_their_counts_were_lost() -> None:
    summary = RunSummary(
        genesis=(),
        finished=(),
        versions=(3,),
        version_entries=(9,),
        snapshots=(),
        merged=(600,),
        discarded=(40,),
        covered=(),
        closed=(Closed("b", 4, 10, (640,)),),
        included=(),
        given_up=(),
        last_rounds=(-1,),
        rounds_committed=3,
        joined=(),
    )
    trained = {("b", 3): (2, 100), ("b", 5): (1, 7)}
    report = check_account([], trained, fragment_sizes=[1], summary=summary, lost_regions=("b",))
    assert report.faults == ()
    assert (report.trained, report.merged, report.discarded, report.carried) == (647, 600, 40, 7)
    missed = check_account([], trained, fragment_sizes=[1], summary=summary)
    assert "incarnations up to 4 trained 100 tokens, 640 are merged or discarded" in " ".join(missed.faults)


def test_what_is_booked_twice_is_a_fault_also_where_the_count_was_lost() -> None:
    twice = seal_all(account_round(1, offer("b", 0, 0, 10)), account_round(2, offer("b", 0, 5, 20, base=1)))
    report = check_account(twice, {}, fragment_sizes=[1], lost_regions=("b",))
    assert "counts (5, 10] twice" in " ".join(report.faults)


def test_a_learner_that_has_not_applied_the_last_version_yet_is_no_fault() -> None:
    entries = seal_all(account_round(1, offer("a", 0, 0, 10)), account_round(2, offer("a", 0, 10, 20, base=1)))
    trained = {("a", 1): (30, 30 * TOKENS_PER_STEP)}
    behind = LearnerStatus(1, 30, 30 * TOKENS_PER_STEP, 0, (FragmentPosition(1, 10, 10, 10 * TOKENS_PER_STEP),))
    assert check_account(entries, trained, fragment_sizes=[1], positions={"a": behind}).balanced
    ahead = LearnerStatus(1, 30, 30 * TOKENS_PER_STEP, 0, (FragmentPosition(1, 25, 25, 25 * TOKENS_PER_STEP),))
    assert not check_account(entries, trained, fragment_sizes=[1], positions={"a": ahead}).balanced


def test_the_report_weighs_fragments_with_their_sizes() -> None:
    bodies = (account_round(1, offer("a", 0, 0, 10)), account_round(1, offer("a", 1, 0, 20)))
    trained = {("a", 1): (30, 30 * TOKENS_PER_STEP)}
    report = check_account(seal_all(*bodies), trained, fragment_sizes=[3, 1])
    assert report.merged == round(TOKENS_PER_STEP * (10 * 3 + 20 * 1) / 4)
    assert report.trained == 30 * TOKENS_PER_STEP
    assert report.carried == report.trained - report.merged


def test_a_contribution_to_another_fragment_is_a_fault() -> None:
    body = replace(account_round(1, offer("a", 0, 0, 30)), members=(Member(offer("a", 1, 0, 30), 1.0),))
    report = check_account(seal_all(body), {("a", 1): (30, 30 * TOKENS_PER_STEP)}, fragment_sizes=[1, 1])
    assert "the contribution is of fragment 1" in " | ".join(report.faults)


def test_negative_intervals_are_no_entries() -> None:
    with pytest.raises(ValueError, match="step_to: 3 with step_from 5"):
        seal_all(account_round(1, replace(offer("a", 0, 5, 8), step_to=3)))
    with pytest.raises(ValueError, match="tokens: -1 is below 0"):
        seal_all(account_round(1, replace(offer("a", 0, 0, 10), tokens=-1)))


def test_an_interval_inside_another_does_not_move_the_account_back() -> None:
    text = faults(
        account_round(1, offer("a", 0, 0, 20)),
        DiscardedBody("a", 1, 0, 5, 10, 0, "x"),
        account_round(2, offer("a", 0, 20, 30, base=1)),
    )
    assert "discarded (5, 10] counts (5, 10] twice" in text
    assert "leaves out" not in text


@pytest.mark.parametrize("tokens", [10 * TOKENS_PER_STEP - 1, 10 * TOKENS_PER_STEP + 1])
def test_a_step_has_the_same_tokens_before_it_in_every_fragment(tokens: int) -> None:
    other = replace(offer("a", 1, 0, 10), tokens=tokens)
    bodies = (account_round(1, offer("a", 0, 0, 10)), account_round(1, other))
    report = check_account(seal_all(*bodies), {("a", 1): (30, 30 * TOKENS_PER_STEP)}, fragment_sizes=[1, 1])
    assert "up to step 10, another fragment's account" in " | ".join(report.faults)


def test_fewer_tokens_up_to_a_later_step_is_a_fault() -> None:
    bodies = (
        account_round(1, offer("a", 0, 0, 10)),
        account_round(1, replace(offer("a", 1, 0, 12), tokens=TOKENS_PER_STEP)),
    )
    report = check_account(seal_all(*bodies), {("a", 1): (30, 30 * TOKENS_PER_STEP)}, fragment_sizes=[1, 1])
    assert "fewer tokens up to step 12 than up to 10" in " | ".join(report.faults)


def test_the_order_of_booking_does_not_matter() -> None:
    discarded = DiscardedBody("a", 1, 0, 10, 12, 2 * TOKENS_PER_STEP, "overwritten")
    assert (
        faults(account_round(1, offer("a", 0, 0, 10)), account_round(2, offer("a", 0, 12, 20, base=1)), discarded) == ""
    )


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (LearnerStatus(1, 31, 30 * TOKENS_PER_STEP, 0, (FragmentPosition(0, 0, 0, 0),)), "says 31 steps"),
        (LearnerStatus(1, 30, 31 * TOKENS_PER_STEP, 0, (FragmentPosition(0, 0, 0, 0),)), "says 30 steps"),
        (LearnerStatus(2, 1, 1, 0, (FragmentPosition(0, 0, 0, 0),)), "counted None"),
        (LearnerStatus(1, 30, 1, 0, ()), "0 positions for 1 fragments"),
        (LearnerStatus(1, 30, 1, 0, (FragmentPosition(0, 0, 10, 1),)), "the ledger has no such"),
    ],
)
def test_what_a_learner_says_must_fit_its_count_and_the_ledger(status: LearnerStatus, text: str) -> None:
    report = check_account(
        seal_all(account_round(1, offer("a", 0, 0, 10))),
        {("a", 1): (30, 30 * TOKENS_PER_STEP)},
        fragment_sizes=[1],
        positions={"a": status},
    )
    assert text in " | ".join(report.faults)
    assert not report.balanced


def test_faults_are_sorted() -> None:
    text = faults(account_round(5, offer("zz", 0, 0, 10), offer("a", 0, 1, 10)), account_round(2, offer("a", 0, 0, 10)))
    assert text.split(" | ") == sorted(text.split(" | "))
    assert len(text.split(" | ")) > 3
