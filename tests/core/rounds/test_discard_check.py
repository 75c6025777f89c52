"""core/rounds/discard_check.py: steps that a leader books as lost, compared with what their region reports."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Effect
from diloco_node.core.messages import Heartbeat
from diloco_node.core.objections import Objections
from diloco_node.core.rounds.discard_check import DiscardCheck
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import DiscardedBody, FragmentPosition, LearnerStatus
from tests.kit.rounds_kit import context_of

STATUS = LearnerStatus(3, 90, 900, 10, (FragmentPosition(4, 40, 40, 400), FragmentPosition(4, 60, 60, 600)))
"""Of incarnation 3, at step 90."""


class Desk:
    """Region b, which hears c, and has heard what an entry says of the steps of c's learner."""

    def __init__(self) -> None:
        context = context_of(RoundHistory(2), region="b", effects=EffectBuffer("b"))
        self.liveness, self.sequence = context.liveness, 0
        self.check = DiscardCheck(context, {2: 50})

    def beat(self) -> int:
        self.liveness.beat(applied_index=0, digests=(), now_ns=0)
        return self.liveness.sequence

    def hear(self, status: LearnerStatus | None, echo: int = 0) -> None:
        self.sequence += 1
        beat = Heartbeat(self.sequence, echo, 0, (), status, 0, ())
        assert self.liveness.heartbeat_arrived("c", beat, now_ns=0)

    def doubt(self, body: DiscardedBody) -> str:
        return self.check.doubt(body, now_ns=0)

    def fault(self, body: DiscardedBody) -> str:
        return self.check.fault(body, now_ns=0)


def lost(incarnation: int, fragment: int, step_to: int, *, learner: str = "c") -> DiscardedBody:
    return DiscardedBody(learner, incarnation, fragment, 0, step_to, 10, "dead")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lost(3, 0, 40), ""),
        (lost(3, 1, 60), ""),
        (lost(2, 0, 9999), ""),
        (lost(3, 0, 91), "it has made 90 steps"),
        (lost(3, 1, 1 << 40), "it has made 90 steps"),
        (lost(4, 0, 1), "its incarnation is 3, not 4"),
    ],
)
def test_what_its_own_report_speaks_against_is_doubted(body: DiscardedBody, words: str) -> None:
    desk = Desk()
    assert desk.doubt(body) == "", "c was not heard yet"
    desk.hear(STATUS)
    assert desk.doubt(body) == words
    desk.liveness.link_changed("c", is_up=False)
    assert desk.doubt(body) == "", "what is no more heard may have changed"
    desk.hear(None)
    assert desk.doubt(body) == "", "there is no learner that reports"


def test_only_a_report_that_is_newer_than_the_entry_is_held_against_a_leader() -> None:
    desk, body = Desk(), lost(4, 0, 8)
    before = desk.beat()
    desk.hear(STATUS)
    assert desk.fault(body) == ""
    desk.hear(STATUS, echo=before)
    assert desk.fault(body) == "", "it was on its way when the entry came"
    desk.hear(STATUS, echo=desk.beat())
    assert desk.fault(body) == "c has not given up steps (0, 8]: its incarnation is 3, not 4"
    desk.hear(replace(STATUS, incarnation=4), echo=desk.beat())
    assert desk.fault(lost(4, 0, 40)) == desk.doubt(lost(4, 0, 40)) == ""


def test_the_reports_of_one_region_count_against_one_leader_only() -> None:
    desk, body = Desk(), lost(4, 0, 8)
    desk.hear(STATUS)
    assert desk.doubt(body)
    desk.check.heed(body)
    assert desk.doubt(body) == desk.doubt(lost(5, 0, 8)) == ""


class Ledger:
    """A log with one entry that waits; it counts refusals."""

    def __init__(self, body: DiscardedBody) -> None:
        self.body, self.refusals = body, 0

    def missing_payloads(self, *, rounds_max: int) -> tuple[DiscardedBody, ...]:
        return (self.body,)

    def is_staged(self, _: DiscardedBody) -> bool:
        return True

    def refuse(self, _body: DiscardedBody, _fault: str, *, now_ns: int) -> list[Effect]:
        self.refusals += 1
        return []


def test_no_region_has_leader_after_leader_refused() -> None:
    desk, ledger = Desk(), Ledger(lost(4, 0, 8))
    nothing = SimpleNamespace(payload_fault=lambda _: "", doubt=lambda _, now_ns: "")
    context = context_of(RoundHistory(2), region="b", effects=EffectBuffer("b"), liveness=desk.liveness)
    objections = Objections(context, nothing, nothing, {})  # type: ignore[arg-type]
    for body, refusals in ((ledger.body, 1), (lost(5, 0, 8), 1)):
        ledger.body = body
        desk.hear(STATUS)
        objections.raise_against(ledger, now_ns=0)  # type: ignore[arg-type]
        desk.hear(STATUS, echo=desk.beat())
        objections.raise_against(ledger, now_ns=0)  # type: ignore[arg-type]
        assert ledger.refusals == refusals


def test_what_a_majority_committed_is_doubted_no_more() -> None:
    desk, body = Desk(), lost(4, 0, 8)
    desk.hear(STATUS)
    desk.check.believe(body)
    assert desk.doubt(body) == ""
    assert desk.doubt(lost(4, 1, 8))


def test_of_its_own_learner_a_region_knows_at_once_how_far_each_life_came() -> None:
    desk = Desk()
    assert desk.doubt(lost(2, 0, 50, learner="b")) == ""
    assert "incarnation 2 made 50 steps" in desk.fault(lost(2, 0, 51, learner="b"))
    desk.liveness.own_learner(STATUS, now_ns=0)
    desk.check.heed(lost(3, 0, 91, learner="b"))
    assert "it has made 90 steps" in desk.fault(lost(3, 0, 91, learner="b"))
