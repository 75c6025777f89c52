"""Who may end a run: an operator, the scripts of a majority of regions; and what a region at the end waits for."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Send, StopLearner, WriteFinal
from diloco_node.core.messages import FinishRequested
from diloco_node.core.rounds.progress import RunProgress
from diloco_node.core.rounds.run_end import RunEnd
from diloco_node.core.types import Entry, ExtendedBody, FinishedBody, RunSettings
from tests.kit.rounds_kit import (
    GENESIS,
    REGIONS,
    SETTINGS,
    Neighbourhood,
    committed_round,
    context_of,
    contribution,
    history_of,
    status,
)

BY_STEPS = replace(SETTINGS, steps_max=200)
FLAT = "the loss is flat"
VOTE = FinishRequested(FLAT, is_order=False)


class Bench:
    """The end of a run as region a sees it; everybody's learner has made some steps."""

    def __init__(
        self, settings: RunSettings = BY_STEPS, *, steps: int = 40, regions: tuple[str, ...] = REGIONS
    ) -> None:
        self.near = Neighbourhood("a", regions)
        self.near.all_hear(status(steps), now_ns=0)
        self.history = history_of(GENESIS)
        self.effects = EffectBuffer("a")
        context = context_of(
            self.history, liveness=self.near.liveness, regions=regions, settings=settings, effects=self.effects
        )
        self.versions: Any = SimpleNamespace(applied=[0, 0])
        self.end = RunEnd(context, self.versions, RunProgress(context))

    def hear(self, *regions: str, request: FinishRequested = VOTE, now_ns: int = 0) -> str | None:
        """The regions' wishes arrive; the reason to end the run with after the last."""
        return [self.end.take(region, request, now_ns=now_ns) for region in regions][-1]

    def asked(self) -> list[Any]:
        """What is passed on: messages to others, and to this region itself."""
        self.end.ask(now_ns=0)
        sent = [effect.message for effect in self.effects.take() if isinstance(effect, Send)]
        local = [*self.effects.local]
        self.effects.local.clear()
        return sent + local


def test_the_scripts_of_a_majority_of_the_regions_end_the_run_and_fewer_do_not() -> None:
    bench = Bench()
    assert bench.hear("b", "b", "b") is None, "a region has one vote"
    assert bench.end.waiting("b", now_ns=0) == (
        "scripts of 1 regions want the end: b (the loss is flat); it takes 2, or an operator"
    )
    assert bench.end.doubt(FinishedBody((0, 0), FLAT), now_ns=0).startswith("it ends 20% of the run, and no operator")
    assert (
        bench.hear("c", request=FinishRequested("no data is left", is_order=False))
        == "the loss is flat; no data is left"
    )
    assert bench.end.doubt(FinishedBody((0, 0), FLAT), now_ns=0) == ""
    assert bench.end.waiting("b", now_ns=0) == ""


def test_the_scripts_of_half_of_the_regions_do_not_end_the_run() -> None:
    bench = Bench(regions=(*REGIONS, "d"))
    assert bench.hear("b", "c") is None
    assert bench.hear("d") == FLAT


def test_votes_that_are_not_repeated_lapse() -> None:
    bench = Bench()
    later_ns = bench.near.liveness.silent_ns + 1
    assert bench.hear("b") is None
    assert bench.hear("c", now_ns=later_ns) is None
    assert bench.hear("b", now_ns=later_ns) == FLAT
    assert bench.hear("b", now_ns=9 * later_ns) == FLAT, "what began the end stays"


@pytest.mark.parametrize("reason", ["enough", ""])
def test_one_operator_is_enough(reason: str) -> None:
    bench = Bench()
    assert bench.hear("b", request=FinishRequested(reason)) == reason
    assert bench.end.doubt(FinishedBody((0, 0), reason), now_ns=0) == ""


def test_an_order_and_a_vote_are_repeated_until_the_run_ends() -> None:
    bench = Bench()
    assert bench.asked() == []
    bench.end.want(FLAT, is_order=False)
    bench.end.want("enough", is_order=True)
    assert bench.asked() == [FinishRequested("enough")] * 2 + [VOTE] * 2 + [FinishRequested("enough"), VOTE]
    bench.history.finished = FinishedBody((0, 0), FLAT)
    assert bench.asked() == []


def test_the_next_life_of_a_learner_does_not_vote_until_its_script_does() -> None:
    bench = Bench()
    bench.end.learner_attached(3)
    bench.end.want(FLAT, is_order=False)
    bench.end.learner_attached(3)
    assert len(bench.asked()) == len(REGIONS), "the same process, at another daemon's socket"
    bench.end.learner_attached(4)
    assert bench.asked() == []
    bench.end.want(FLAT, is_order=False)
    assert len(bench.asked()) == len(REGIONS)


def test_a_region_past_the_end_without_a_leader_says_what_it_waits_for() -> None:
    bench = Bench(steps=200)
    assert bench.end.unclosed_end("b", now_ns=0) == "", "the leader will close it"
    lack = bench.end.unclosed_end("", now_ns=0)
    assert lack.startswith("the run is at its end here (step 200 of 200), and no majority is there to close it")
    assert "--serve" in lack
    assert bench.end.waiting("", now_ns=0) == lack
    assert Bench(steps=199).end.unclosed_end("", now_ns=0) == ""
    assert "(step 200 of 200)" in Bench(steps=0).end.unclosed_end("", now_ns=0, own_steps=203), "after a restart alone"
    merged = Bench(replace(SETTINGS, tokens_max=64))
    for fragment in range(2):
        body = committed_round(fragment, 1, [contribution("a", fragment=fragment)])
        merged.history.account.take(Entry(2 + fragment, 1, b"", body, b""))
    assert "(64 tokens are merged)" in merged.end.unclosed_end("", now_ns=0)
    assert Bench(SETTINGS, steps=10**6).end.unclosed_end("", now_ns=0) == "", "nothing says where it ends"
    alone = Bench(steps=10)
    alone.near.liveness.own_learner(status(230), now_ns=1)
    assert "(step 200 of 200)" in alone.end.unclosed_end("", now_ns=1), "of the own learner, whatever the others did"


def test_the_learner_is_told_the_final_versions_once_they_are_here() -> None:
    bench = Bench()
    bench.history.finished = FinishedBody((2, 1), FLAT, steps_max=200)
    bench.versions.applied = [2, 0]
    bench.end.pump()
    assert bench.effects.take() == []
    bench.versions.applied = [2, 1]
    bench.end.pump()
    bench.end.pump()
    assert bench.effects.take() == [WriteFinal(), StopLearner(FLAT, (2, 1))]
    bench.end.learner_attached(2)
    assert bench.effects.take() == [StopLearner(FLAT, (2, 1))], "one that comes at the end has nothing to do"


def test_a_region_that_was_started_to_go_on_neither_writes_nor_stops() -> None:
    bench = Bench(replace(SETTINGS, steps_max=500))
    bench.history.finished = FinishedBody((0, 0), FLAT, steps_max=200)
    assert bench.end.end is None
    bench.end.pump()
    assert bench.effects.take() == []


def test_wishes_of_an_earlier_daemon_are_asked_again_but_for_the_vote_of_an_earlier_life() -> None:
    order = FinishRequested("an operator's", True)
    for incarnation, wishes in ((0, (order, VOTE)), (2, (order,))):
        bench = Bench()
        if incarnation:
            bench.end.learner_attached(incarnation)
        bench.end.recall([order, VOTE])
        assert bench.end.wishes == wishes
        bench.end.on_commit(FinishedBody((0, 0), FLAT, steps_max=200))
        assert bench.end.wishes == (), "they are carried out"
    bench.end.want("a newer one", is_order=True)
    bench.end.recall([order])
    assert bench.end.wishes == (FinishRequested("a newer one", True),)


def test_an_extension_begins_anew() -> None:
    bench = Bench()
    bench.end.want("enough", is_order=True)
    bench.hear("b", "c")
    bench.history.finished = FinishedBody((0, 0), FLAT, steps_max=200)
    bench.end.on_commit(bench.history.finished)
    bench.end.pump()
    bench.end.on_final_written()
    bench.history.finished = None
    bench.end.on_commit(ExtendedBody(500, 0))
    bench.effects.take()
    assert not bench.end.is_final
    assert bench.asked() == []
    assert bench.end.doubt(FinishedBody((0, 0), FLAT), now_ns=0) != "", "the end before is no reason for the next one"
    assert bench.hear("b", now_ns=1) is None


def test_an_order_between_an_end_and_its_extension_is_for_the_extension() -> None:
    bench = Bench()
    bench.end.on_commit(FinishedBody((0, 0), FLAT, steps_max=200))
    bench.end.want("enough", is_order=True)
    bench.end.on_commit(ExtendedBody(500, 0))
    bench.effects.take()
    assert {request.reason for request in bench.asked()} == {"enough"}


def test_an_order_before_a_region_knows_the_old_end_is_for_the_extension_and_ends_nothing_before_it() -> None:
    bench, end = Bench(replace(SETTINGS, steps_max=500)), FinishedBody((0, 0), FLAT, steps_max=200)
    bench.end.want("enough", is_order=True)
    bench.history.finished = end
    bench.end.on_commit(end)
    assert bench.hear("a", *"bc", request=FinishRequested("enough")) is None
    bench.history.finished = None
    bench.end.on_commit(ExtendedBody(500, 0))
    assert bench.end.reason is None
    bench.effects.take()
    assert bench.hear("a", request=bench.asked()[0]) == "enough"


def test_a_region_that_saw_the_run_at_its_end_believes_it_when_a_learner_is_gone_since() -> None:
    bench = Bench(steps=200, regions=REGIONS[:2])
    body = committed_round(0, 1, [contribution("b", steps=(0, 150))])
    bench.history.account.take(Entry(2, 1, b"", body, b""))
    bench.end.ask(now_ns=0)
    bench.near.hear("b", None, now_ns=1)
    assert bench.end.doubt(FinishedBody((0, 0), "200 of 200 steps"), now_ns=1) == ""
