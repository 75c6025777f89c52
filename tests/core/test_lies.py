"""One region lies about sums, numbers or the end: nothing of it is committed, the others go on, its name is told."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diloco_node.core import events as ev
from diloco_node.core.merge import freivalds
from diloco_node.core.types import Contribution, DiscardedBody, EntryBody, FinishedBody, RoundBody
from diloco_node.lab.sim.cheats import CHEATS
from diloco_node.lab.sim.world import SECOND
from tests.core.test_gray_regions import rate, reducer
from tests.kit.small_world import SEED, Small

pytestmark = pytest.mark.world

Change = Callable[[RoundBody], EntryBody]


def reduces_times(small: Small, name: str, factor: float, *, with_right_words: bool) -> None:
    """The region multiplies its merged stripes, and reports their norms, or those that they should have."""
    plane = small.hosts[name].plane
    reduce = plane.reduce

    def lie(effect: ev.ReduceStripe) -> ev.ReductionDone | None:
        rows = tuple(tuple(factor * coefficient for coefficient in row) for row in effect.coefficients)
        answer = reduce(replace(effect, coefficients=rows))
        if answer is None or not with_right_words:
            return answer
        return replace(answer, squared_norms=tuple(norm / factor**2 for norm in answer.squared_norms))

    plane.reduce = lie  # type: ignore[method-assign]


SELDOM = pytest.mark.seeds
"""A case takes some seconds of a core: in the fast tier there is one of each kind."""


@pytest.mark.parametrize(
    ("factor", "with_right_words"),
    [(1000.0, True), pytest.param(1000.0, False, marks=SELDOM), pytest.param(1.5, True, marks=SELDOM)],
)
def test_a_reducer_that_multiplies_its_sums_is_left_out_and_none_of_them_is_merged(
    patch: pytest.MonkeyPatch, factor: float, with_right_words: bool
) -> None:
    small = Small(patch, sync_every=16)
    small.go(8)
    usual = rate(small, 8)
    liar = reducer(small)
    reduces_times(small, liar, factor, with_right_words=with_right_words)
    assert rate(small, 16) >= 0.9 * usual, f"seed {SEED}"
    (line,) = small.view(small.leader()).left_out
    assert (line.region, line.part) == (liar, "reducer")
    assert "its merged stripe" in line.reason
    small.settle()


@SELDOM
def test_a_leader_that_multiplies_its_own_sums_leads_no_longer(patch: pytest.MonkeyPatch) -> None:
    """It does not look at them, so they get into its log; every other region does."""
    small = Small(patch, sync_every=16)
    small.go(8)
    liar = small.leader()
    believes_itself(small, liar)
    small.hosts[liar].core.leader._judge.judge_sums = lambda *_args, **_named: ""
    reduces_times(small, liar, 1000.0, with_right_words=False)
    small.go(12)
    assert rate(small, 8) > 0, f"seed {SEED}"
    assert small.leader() != liar
    assert len(refused(small, liar)) >= 2


def wait(small: Small, is_over: Callable[[], bool]) -> None:
    """Let time pass until it is over, at most a minute."""
    until_ns = small.world.now_ns + 60 * SECOND
    while not is_over():
        small.go(0.25)
        assert small.world.now_ns < until_ns, f"seed {SEED}: not in a minute"


SUMS: dict[str, Callable[[Any], Any]] = {
    "flipped": np.negative,
    "biased": lambda values: np.float32(0.5) * (values + np.float32(np.sqrt(np.mean(np.square(values))))),
    "without the half": lambda values: np.where(np.arange(len(values)) % 2, values, np.float32(0)),
}


@pytest.mark.parametrize("change", [pytest.param(name, marks=() if name == "flipped" else SELDOM) for name in SUMS])
def test_a_reducer_with_a_wrong_sum_of_the_right_length_is_found_by_an_audit(
    patch: pytest.MonkeyPatch, change: str
) -> None:
    small = Small(patch, sync_every=16)
    small.go(8)
    usual = rate(small, 8)
    liar = reducer(small)
    is_liar(small, liar)
    rounds = len(small.bodies())
    small.hosts[liar].plane.spoil_sum = SUMS[change]
    wait(small, lambda: bool(small.leader() and small.view(small.leader()).left_out))
    # One of four payloads is audited.
    assert len(small.bodies()) - rounds <= 24, f"seed {SEED}"
    (line,) = small.view(small.leader()).left_out
    assert (line.region, line.part) == (liar, "reducer")
    assert "is not the sum of the contributions" in line.reason
    assert rate(small, 8) >= 0.8 * usual
    assert any(body.projections for body in small.bodies() if isinstance(body, RoundBody))


def test_a_member_that_tells_other_projections_is_left_out_and_no_reducer(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, sync_every=16)
    small.go(8)
    liar = reducer(small)
    is_liar(small, liar)
    CHEATS["projections"].begin(small.hosts[liar])
    wait(small, lambda: bool(small.leader() and small.view(small.leader()).left_out))
    (line,) = small.view(small.leader()).left_out
    assert (line.region, line.part) == (liar, "member")
    assert "other projections" in line.reason
    rounds = len(small.bodies())
    small.go(30)
    bodies = [body for body in small.bodies()[rounds:] if isinstance(body, RoundBody)]
    assert len(bodies) >= 30
    memberships = sum(member.contribution.learner == liar for body in bodies for member in body.members)
    assert memberships <= len(bodies) // 3, "that its contribution was merged all the same does not clear it"


def test_a_reducer_that_flips_sums_and_tells_no_projections_is_found_all_the_same(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, sync_every=16)
    small.go(8)
    usual = rate(small, 8)
    liar = reducer(small)
    is_liar(small, liar)
    CHEATS["no projections"].begin(small.hosts[liar])
    small.hosts[liar].plane.spoil_sum = np.negative
    wait(small, lambda: bool(small.leader() and small.view(small.leader()).left_out))
    (line,) = small.view(small.leader()).left_out
    assert (line.region, line.part) == (liar, "reducer")
    assert "is not the sum of the contributions" in line.reason
    assert rate(small, 8) >= 0.8 * usual
    assert all(liar not in note.text for note in small.alarms() if "follows it no more" in note.text)


def test_a_reducer_that_flips_sums_and_excuses_them_by_its_own_row_is_found(patch: pytest.MonkeyPatch) -> None:
    """Nobody else has the blocks of its contribution that it reduces itself, unless they are reduced again."""
    patch.setattr(freivalds, "CHECKED_EVERY", 1)
    small = Small(patch, sync_every=16)
    small.go(8)
    host = small.hosts[reducer(small)]
    is_liar(small, host.name)
    CHEATS["sum excused"].begin(host)
    assert host.spoil_core is not None
    host.spoil_core(host.core)
    host.plane.spoil_sum = host.spoil_sum
    rounds = len(small.bodies())
    wait(small, lambda: bool(small.leader() and small.view(small.leader()).left_out))
    lines = {(line.region, line.part): line.reason for line in small.view(small.leader()).left_out}
    assert "is not the sum of the contributions" in lines[host.name, "reducer"]
    assert "other projections" in lines[host.name, "member"]
    assert len(lines) == 2
    # One payload of eight is checked, and then each one that is audited.
    assert len(small.bodies()) - rounds <= 64, f"seed {SEED}"
    patch.setattr(freivalds, "CHECKED_EVERY", 1 << 20)
    wrong = len(small.sim.checkers.oracle.wrong_sums)
    rounds = len(small.bodies())
    small.go(30)
    assert len(small.sim.checkers.oracle.wrong_sums) - wrong <= (len(small.bodies()) - rounds) // 8


@SELDOM
def test_a_leader_that_flips_its_own_sums_and_audits_nothing_leads_no_longer(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, sync_every=16)
    small.go(8)
    liar = small.leader()
    believes_itself(small, liar)
    small.hosts[liar].core.leader._audit.question = lambda *_args, **_named: ""
    small.hosts[liar].plane.spoil_sum = np.negative
    others = [host for name, host in small.hosts.items() if name != liar]
    wait(small, lambda: any(host.core.ledger.is_leader for host in others))
    assert len(refused(small, liar)) >= 2
    assert any("is not the sum" in note.text for _, note in small.notes)


def is_liar(small: Small, name: str) -> None:
    """That others refuse it breaks no rule; the oracle goes on to work out what is committed."""
    checkers = small.sim.checkers
    checkers.liars = checkers.audit.liars = checkers.oracle.liars = frozenset({name})


def believes_itself(small: Small, name: str) -> None:
    """Its own check of what it proposes finds nothing."""
    is_liar(small, name)
    small.hosts[name].core.ledger._entry_gate._meaning.doubt = lambda _: ""
    small.hosts[name].core.end.believe()
    small.hosts[name].core.versions.payload_fault = lambda _: ""
    small.hosts[name].core._objections.discards.doubt = lambda *_args, **_named: ""


def proposes(small: Small, name: str, change: Change) -> list[EntryBody]:
    """As leader the region changes each round that it proposes. Returns what it proposed."""
    believes_itself(small, name)
    ledger = small.hosts[name].core.ledger
    propose, lies = ledger.propose, []

    def lie(body: Any, *, now_ns: int) -> Any:
        changed = change(body) if isinstance(body, RoundBody) else body
        if changed != body:
            lies.append(changed)
        return propose(changed, now_ns=now_ns)

    ledger.propose = lie
    return lies


def refused(small: Small, liar: str) -> set[str]:
    """The regions that say that they follow the liar no more."""
    words = f"ignored entries from {liar}, and follows it no more"
    names = {name for name, note in small.notes if note.is_alarm and words in note.text}
    assert names == {name for name in small.hosts if liar in dict(small.view(name).wrong_leaders)}
    return names


def lost(work: Contribution) -> DiscardedBody:
    return DiscardedBody(
        work.learner,
        work.incarnation,
        work.fragment,
        work.step_from,
        work.step_to + (1 << 20),
        work.tokens,
        "it pleases me",
    )


LIES: dict[str, Change] = {
    "factors": lambda body: replace(body, factors=(float(2**100),) * len(body.factors)),
    "share": lambda body: replace(body, share=2.0**-126),
    "discards": lambda body: lost(body.members[0].contribution),
    "the last round": lambda body: replace(body, is_last=True),
}
"""Each number is doubted in tests/core/rounds/test_entry_numbers.py."""


@pytest.mark.parametrize(
    "lie", [pytest.param(lie, marks=() if lie in ("factors", "discards") else SELDOM) for lie in LIES]
)
def test_a_leader_that_writes_wrong_numbers_leads_no_longer_and_commits_none(
    patch: pytest.MonkeyPatch, lie: str
) -> None:
    # The checkers of the simulation work out every number of a committed round: `go` fails if one is wrong.
    small = Small(patch, sync_every=16, steps_max=100_000)
    small.go(8)
    usual = rate(small, 8)
    liar = small.leader()
    lies = proposes(small, liar, LIES[lie])
    small.go(12)
    assert lies
    assert rate(small, 8) >= 0.9 * usual, f"seed {SEED}"
    assert small.leader() != liar
    assert len(refused(small, liar)) >= 2
    assert not set(map(id, lies)) & set(map(id, small.bodies()))


def test_a_leader_ends_no_run_in_the_middle(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, sync_every=16, steps_max=100_000)
    small.go(8)
    liar = small.leader()
    believes_itself(small, liar)
    small.hosts[liar].core.leader.request_finish("it pleases me")
    small.go(12)
    assert rate(small, 8) > 0, f"seed {SEED}"
    assert small.leader() != liar
    rounds = [body for body in small.bodies() if isinstance(body, RoundBody)]
    assert not any(body.is_last for body in rounds)
    assert not any(isinstance(body, FinishedBody) for body in small.bodies())
    assert len(refused(small, liar)) >= 2


def test_an_operators_order_ends_the_run_whoever_leads_and_wherever_it_is_given(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, sync_every=16, steps_max=100_000)
    small.go(8)
    small.hosts[small.others()[1]].post(ev.FinishOrdered("the loss is flat"))
    until_ns = small.world.now_ns + 30 * SECOND
    small.sim.run_until(
        lambda: small.world.now_ns > until_ns or any(isinstance(body, FinishedBody) for body in small.bodies())
    )
    assert [body.reason for body in small.bodies() if isinstance(body, FinishedBody)] == ["the loss is flat"]
    assert not small.alarms(), f"seed {SEED}"


@SELDOM
def test_a_region_that_heard_no_order_takes_the_end_from_the_majority(patch: pytest.MonkeyPatch) -> None:
    """No link leads from the region whose operator gives it to one of the others."""
    small = Small(patch, sync_every=16, steps_max=100_000)
    small.go(8)
    source, deaf = small.others()[:2]
    small.sim.network.cut(source, deaf)
    small.hosts[source].post(ev.FinishOrdered("the loss is flat"))
    until_ns = small.world.now_ns + 30 * SECOND
    small.sim.run_until(
        lambda: (
            small.world.now_ns > until_ns
            or (small.view(deaf).finished != "" and small.view(small.leader()).finished != "")
        )
    )
    assert small.view(deaf).finished == "the loss is flat", f"seed {SEED}"
