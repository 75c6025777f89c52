"""core/rounds/discard_check.py: steps that a leader books as lost, compared with what their region reports."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Effect, Note, Send
from diloco_node.core.messages import DiscardReported, Heartbeat
from diloco_node.core.objections import Objections
from diloco_node.core.rounds.claim_limits import STEP_NS_MIN, STEPS_AHEAD_MAX
from diloco_node.core.rounds.discard_check import DiscardCheck
from diloco_node.core.rounds.discards import BOOKING_MAX
from diloco_node.core.types import (
    EVICTED,
    DiscardedBody,
    DiskNamedBody,
    FragmentPosition,
    LearnerStatus,
    SnapshotBody,
)
from tests.kit.rounds_kit import committed_round, context_of, history_of

STATUS = LearnerStatus(3, 90, 900, 10, (FragmentPosition(4, 40, 40, 400), FragmentPosition(4, 60, 60, 600)))
"""Of incarnation 3, at step 90."""

NOT_HERE = "c has not reported them here"


def lost(incarnation: int, fragment: int, step_to: int, *, learner: str = "c") -> DiscardedBody:
    return DiscardedBody(learner, incarnation, fragment, 0, step_to, 10, "dead")


class Desk:
    """Region b, which hears c, and has heard what an entry says of the steps of c's learner."""

    def __init__(self) -> None:
        self.effects = EffectBuffer("b")
        context = context_of(history_of(), region="b", effects=self.effects)
        self.liveness, self.sequence = context.liveness, 0
        self.leader, self.patience_ns = "a", context.settings.election_timeout_ns
        self.check = DiscardCheck(context, {2: 50}, lambda: self.leader)

    def tell(self, peer: str, *bodies: DiscardedBody, now_ns: int = 0) -> list[DiscardedBody]:
        return self.check.hear(peer, bodies, now_ns=now_ns)

    def beat(self) -> int:
        self.liveness.beat(applied_index=0, digests=(), now_ns=0)
        return self.liveness.sequence

    def hear(self, status: LearnerStatus | None, echo: int = 0, *, now_ns: int = 0) -> None:
        self.sequence += 1
        beat = Heartbeat(self.sequence, echo, 0, (), status, 0, ())
        assert self.liveness.heartbeat_arrived("c", beat, now_ns=now_ns)

    def doubt(self, body: DiscardedBody) -> str:
        return self.check.doubt(body, now_ns=0)

    def fault(self, body: DiscardedBody, *, is_late: bool = False) -> str:
        return self.check.fault(body, is_late=is_late, now_ns=0)


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
    assert desk.doubt(body) == NOT_HERE, "who has just started vouches for nobody"
    desk.hear(STATUS)
    desk.tell("c", body)
    assert desk.doubt(body) == words
    desk.liveness.link_changed("c", is_up=False)
    is_impossible = body.step_to == 1 << 40
    assert desk.doubt(body) == words * is_impossible, "its report is remembered, and nothing is heard against it"
    desk.hear(None)
    assert desk.doubt(body) == "", "there is no learner that speaks against it"


def test_a_silent_region_can_not_have_made_any_number_of_steps() -> None:
    desk = Desk()
    desk.hear(STATUS)
    desk.liveness.link_changed("c", is_up=False)
    most = STATUS.step + STEPS_AHEAD_MAX
    assert (desk.doubt(lost(3, 0, most)), desk.fault(lost(3, 0, most))) == (NOT_HERE, "")
    assert desk.fault(lost(3, 0, most + 1)) == f"c has not given up steps (0, {most + 1}]: it has made 90 steps"
    assert desk.fault(lost(4, 0, most + 1)) == "", "it may have begun anew"
    assert desk.check.fault(lost(3, 0, most + 1), is_late=False, now_ns=STEP_NS_MIN) == "", "it may have gone on"


@pytest.mark.parametrize(
    "report",
    [
        lost(3, 1, 40),
        lost(4, 0, 40),
        lost(3, 0, 39),
        replace(lost(3, 0, 40), tokens=9),
        replace(lost(3, 0, 40), tokens=11),
        replace(lost(3, 0, 41), tokens=9),
        lost(3, 0, 40, learner="d"),
        lost(3, 0, 40, learner="a"),
    ],
)
def test_only_a_report_of_the_region_itself_that_covers_the_steps_bears_them_out(report: DiscardedBody) -> None:
    desk, body = Desk(), lost(3, 0, 40)
    desk.tell("c", report)
    desk.tell("a", body)
    assert desk.doubt(body) == NOT_HERE
    desk.tell("c", replace(body, step_from=30, step_to=50, tokens=1))
    assert desk.doubt(body) == "", "it reports later ones: what it reported before came to others"
    desk.leader = "b"
    assert desk.doubt(lost(3, 1, 1)) == "", "a leader books what it has got a report of"


def test_of_a_region_that_reports_without_an_end_the_last_lines_are_remembered() -> None:
    desk = Desk()
    for incarnation in range(BOOKING_MAX + 2):
        desk.tell("c", lost(incarnation, 0, 1), lost(0, 1, 1))
    assert desk.doubt(lost(BOOKING_MAX + 1, 0, 1)) == desk.doubt(lost(0, 1, 1)) == ""
    assert desk.doubt(lost(1, 0, 1)) == NOT_HERE


def test_a_voter_passes_a_report_on_to_the_leader_and_nobody_reports_for_others() -> None:
    desk, body = Desk(), lost(3, 0, 40)
    assert desk.tell("c", body, lost(3, 1, 40, learner="a")) == []
    assert desk.effects.take() == [Send("a", DiscardReported((body,)))]
    assert desk.tell("d", body) == desk.tell("b", lost(3, 0, 40, learner="b")) == []
    assert desk.effects.take() == [], "only at first hand, and never its own a second time"


def test_a_leader_books_what_a_majority_can_bear_out_if_their_region_dies_at_once() -> None:
    desk, body = Desk(), lost(3, 0, 40)
    desk.leader = "b"
    desk.hear(STATUS)
    assert desk.liveness.heartbeat_arrived("a", Heartbeat(1, 0, 0, (), STATUS, 0, ()), now_ns=0)
    assert desk.tell("a", body) == [], "its region has not said so"
    assert desk.tell("c", body) == [body], "a and the leader have it"
    later = replace(body, step_to=50)
    assert desk.tell("c", later) == [], "a has an older report"
    assert desk.tell("a", replace(later, step_to=49)) == desk.tell("a", replace(later, tokens=9)) == []
    assert desk.tell("a", later) == [later]


def test_the_word_of_the_region_itself_is_enough_where_others_are_silent_or_after_a_while() -> None:
    desk, body = Desk(), lost(3, 0, 40)
    desk.leader = "b"
    assert desk.tell("c", body) == [body], "without c there is no majority anyway"
    assert desk.liveness.heartbeat_arrived("a", Heartbeat(1, 0, 0, (), STATUS, 0, ()), now_ns=0)
    other = lost(3, 1, 40)
    half_ns = desk.patience_ns // 2
    assert desk.tell("c", other) == [], "a is there, and may have it soon"
    assert desk.liveness.heartbeat_arrived("a", Heartbeat(2, 0, 0, (), STATUS, 0, ()), now_ns=2 * half_ns)
    assert desk.tell("c", other, now_ns=half_ns) == []
    assert desk.tell("c", other, now_ns=2 * half_ns) == [other]
    after_ns = 2 * half_ns + desk.patience_ns
    assert desk.liveness.heartbeat_arrived("a", Heartbeat(3, 0, 0, (), STATUS, 0, ()), now_ns=after_ns)
    assert desk.tell("c", other, now_ns=after_ns) == [], "it was away meanwhile"


def test_of_a_region_that_is_no_member_any_more_nobody_waits_for_a_word() -> None:
    assert Desk().doubt(lost(4, 0, 1, learner="d")) == ""


def test_a_region_that_trained_on_and_never_reported_them_refuses_the_leader_though_it_answered_nothing() -> None:
    desk, body = Desk(), lost(2, 0, 1 << 20)
    desk.hear(STATUS)
    assert desk.fault(body) == desk.fault(body, is_late=True) == "", "it may have died as it reported"
    desk.hear(replace(STATUS, step=91), now_ns=1)
    assert desk.fault(body) == ""
    assert desk.fault(body, is_late=True) == f"c has not given up steps (0, {1 << 20}]: {NOT_HERE}"


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
    assert desk.fault(body) == "", "it has not reported them here, but it may have elsewhere"


def test_the_reports_of_one_region_count_against_one_leader_only() -> None:
    desk, body = Desk(), lost(4, 0, 8)
    desk.hear(STATUS)
    assert desk.doubt(body)
    desk.check.heed(body)
    assert desk.doubt(body), "of the two one lies: it is no loss if the same leader is refused again"
    desk.leader = "d"
    assert desk.doubt(body) == desk.doubt(lost(5, 0, 8)) == ""


class Ledger:
    """A log with entries that wait; it notes which leaders were refused, and what was taken."""

    def __init__(self, *bodies: DiscardedBody) -> None:
        self.bodies, self.leader, self.refused, self.taken = list(bodies), "a", list[str](), 0

    def missing_payloads(self, *, rounds_max: int) -> tuple[DiscardedBody, ...]:
        return tuple(self.bodies)

    term, is_own, is_of_this_term = 2, True, True

    def is_staged(self, _: DiscardedBody, *, leader: str = "", term: int = 0) -> bool:
        return (not leader or self.is_own) and (not term or (self.is_own and self.is_of_this_term))

    def refuse(self, _body: DiscardedBody, _fault: str, *, now_ns: int) -> list[Effect]:
        self.refused.append(self.leader)
        return []

    def payload_arrived(self, *, now_ns: int) -> list[Effect]:
        self.taken += 1
        return []


class Bench(Desk):
    """A desk with a log, whose entries it is asked about again and again."""

    def __init__(self, *bodies: DiscardedBody) -> None:
        super().__init__()
        self.ledger = Ledger(*bodies)
        nothing: Any = SimpleNamespace(
            payload_fault=lambda _: "", doubt=lambda _, now_ns: "", believe=lambda _: None, healing=()
        )
        context = context_of(history_of(), region="b", effects=self.effects, liveness=self.liveness)
        self.objections = Objections(context, nothing, nothing, {}, lambda: self.ledger.leader)
        self.objections.digests = nothing

    def ask(self, now_ns: int = 0) -> None:
        log: Any = self.ledger
        self.objections.raise_against(log, now_ns=now_ns)


def test_no_region_has_leader_after_leader_refused() -> None:
    bench = Bench()
    for leader, incarnation in (("a", 4), ("d", 5), ("a", 6)):
        bench.ledger.leader, bench.ledger.bodies = leader, [lost(incarnation, 0, 8)]
        bench.hear(STATUS)
        bench.ask()
        bench.hear(STATUS, echo=bench.beat())
        bench.ask()
    assert bench.ledger.refused == ["a", "a"]


def test_of_two_entries_that_wait_the_first_is_asked_about_until_there_is_an_answer() -> None:
    bench = Bench(lost(4, 0, 8), lost(4, 1, 8))
    bench.hear(STATUS)
    bench.ask()
    bench.hear(STATUS, echo=bench.beat())
    bench.ask()
    assert bench.ledger.refused == ["a"]


def test_steps_of_a_region_that_stays_silent_are_taken_in_the_end_with_an_alarm() -> None:
    bench = Bench(lost(4, 0, 8))
    bench.ask(1)
    bench.ask(16 * bench.patience_ns)
    assert (bench.ledger.taken, bench.effects.take()) == (0, [])
    bench.ask(16 * bench.patience_ns + 1)
    (note,) = [effect for effect in bench.effects.take() if isinstance(effect, Note)]
    assert (bench.ledger.taken, bench.ledger.refused, note.is_alarm) == (1, [], True)


def test_the_word_of_another_region_is_waited_for_anew() -> None:
    bench = Bench(lost(4, 0, 8), lost(4, 1, 8), lost(4, 0, 8, learner="a"))
    bench.ask(1)
    bench.ask(16 * bench.patience_ns + 1)
    assert bench.ledger.taken == 2, "both of c, who is silent; and a has been asked about just now"
    bench.ledger.bodies = [lost(4, 0, 8, learner="a")]
    bench.ask(32 * bench.patience_ns)
    assert bench.ledger.taken == 2
    bench.ask(32 * bench.patience_ns + 1)
    assert bench.ledger.taken == 3


def test_what_the_disk_held_at_the_start_was_acknowledged_before() -> None:
    bench, body = Bench(), lost(4, 0, 8)
    digests, bench.objections.digests = bench.objections.digests, None
    assert bench.objections.doubt(body, now_ns=0) == ""
    bench.objections.digests = digests
    assert bench.objections.doubt(body, now_ns=0)


def digest_watch(**answers: object) -> Any:
    """Of a region that knows nothing of a state, but for these answers."""
    usual = {"doubt": lambda _: "not known here", "is_refuted": lambda _, is_voter: False}
    return SimpleNamespace(**usual | dict.fromkeys(("is_due", "differs"), lambda _: False) | answers)


@pytest.mark.parametrize("is_refuted", [False, True])
def test_a_state_that_nobody_knows_waits_for_a_timeout_and_one_that_is_refuted_for_none(is_refuted: bool) -> None:
    bench = Bench()
    body: Any = SnapshotBody(0, 4, b"n" * 32)
    bench.ledger.bodies = [body]
    bench.objections.digests = digest_watch(is_refuted=lambda _, is_voter: is_refuted)
    bench.ask()
    assert (bench.ledger.taken, bench.ledger.refused) == (0, ["a"] if is_refuted else [])
    if not is_refuted:
        bench.ask(bench.patience_ns - 1)
        assert bench.ledger.taken == 0
        bench.ask(bench.patience_ns)
        assert bench.ledger.taken == 1
        assert bench.objections.doubt(body, now_ns=bench.patience_ns) == "", "it may be acknowledged now"


def test_a_state_that_is_another_one_here_waits_as_long_as_lost_steps_do() -> None:
    bench = Bench()
    body: Any = SnapshotBody(0, 4, b"n" * 32)
    bench.ledger.bodies = [body]
    bench.objections.digests = digest_watch(differs=lambda _: True)
    bench.ask()
    bench.ask(16 * bench.patience_ns - 1)
    assert bench.ledger.taken == 0
    bench.ask(16 * bench.patience_ns)
    assert bench.ledger.taken == 1


@pytest.mark.parametrize("is_round_lacking", [False, True])
def test_a_state_that_this_region_will_reach_is_not_taken_before_it_knows_its_own(is_round_lacking: bool) -> None:
    """It was a made-up one: the region led with it, and those that knew better followed it no more."""
    bench = Bench()
    body: Any = SnapshotBody(0, 4, b"n" * 32)
    lacking: list[Any] = [committed_round(0, 4, ())] if is_round_lacking else []
    bench.ledger.bodies = [*lacking, body]
    watch = bench.objections.digests = digest_watch(is_due=lambda _: not is_round_lacking)
    for timeouts in range(40):
        bench.ask(timeouts * bench.patience_ns)
    assert (bench.ledger.taken, bench.ledger.refused) == (0, [])
    # It has passed that version, and never knew its state.
    bench.ledger.bodies, watch.is_due = [body], lambda _: False
    bench.ask(40 * bench.patience_ns - 1)
    assert bench.ledger.taken == 0
    bench.ask(40 * bench.patience_ns)
    assert bench.ledger.taken == 1


def test_an_entry_that_waited_is_taken_once_it_is_not_doubted_also_where_no_leader_sends_more() -> None:
    """A tail of the witness ended with a state that was not known yet: its reader never got a vote."""
    bench = Bench()
    body: Any = SnapshotBody(0, 4, b"n" * 32)
    bench.ledger.bodies = [body]
    bench.objections.digests = digest_watch(is_due=lambda _: True)
    bench.ask()
    bench.ask(1)
    assert bench.ledger.taken == 0
    bench.ledger.bodies = []  # nothing is missing now
    bench.ask(2)
    bench.ask(3)
    assert bench.ledger.taken == 1


def test_a_region_that_heals_takes_a_state_that_it_may_never_reach() -> None:
    bench = Bench()
    body: Any = SnapshotBody(0, 4, b"n" * 32)
    bench.ledger.bodies = [body]
    versions: Any = bench.objections._versions
    bench.objections.digests, versions.healing = digest_watch(is_due=lambda _: True), (0,)
    bench.ask()
    bench.ask(bench.patience_ns)
    assert bench.ledger.taken == 1


def test_what_a_former_leader_booked_is_taken_late_from_who_hands_it_on() -> None:
    """Its region trains on and reports it no more: it has the entry itself. So too if that leader leads again."""
    for is_own, is_of_this_term, taken, refused in (
        (True, True, 0, ["a"]),
        (True, False, 1, []),
        (False, False, 1, []),
    ):
        bench = Bench(lost(3, 0, 40))
        bench.hear(STATUS)
        bench.ledger.is_own, bench.ledger.is_of_this_term = is_own, is_of_this_term
        bench.ask()
        bench.hear(replace(STATUS, step=STATUS.step + 1), now_ns=5)
        bench.ask(16 * bench.patience_ns)
        assert (bench.ledger.taken, bench.ledger.refused) == (taken, refused)


@pytest.mark.parametrize(("is_own", "taken", "refused"), [(True, 0, ["a"]), (False, 1, [])])
def test_no_region_holds_up_all_others_for_what_an_honest_leader_took_in_good_faith(
    is_own: bool, taken: int, refused: list[str]
) -> None:
    bench = Bench(lost(3, 0, 91))
    bench.hear(STATUS)
    bench.ledger.is_own = is_own
    bench.ask()
    bench.hear(STATUS, echo=bench.beat())
    bench.ask()
    assert (bench.ledger.taken, bench.ledger.refused) == (0, refused)
    bench.ledger.refused.clear()
    bench.ask(16 * bench.patience_ns)
    assert bench.ledger.taken == taken


@pytest.mark.parametrize(
    ("is_of_this_term", "was_away", "is_taken"), [(True, True, False), (False, True, True), (False, False, False)]
)
def test_a_vote_that_was_taken_in_a_former_term_from_who_was_away_is_taken(
    is_of_this_term: bool, was_away: bool, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader may date an entry back: who is always heard keeps its vote."""
    bench = Bench()
    body: Any = DiskNamedBody("c", EVICTED)
    bench.ledger.bodies, bench.ledger.is_of_this_term = [body], is_of_this_term
    bench.hear(STATUS)
    bench.beat()
    monkeypatch.setattr(bench.liveness.absence, "has_missed", lambda region, *, now_ns: was_away and region == "c")
    bench.ask()
    assert (bench.ledger.taken, bench.ledger.refused) == (0, [])
    bench.ask(bench.patience_ns)
    assert (bench.ledger.taken, bench.ledger.refused) == ((1, []) if is_taken else (0, ["a"]))


def test_more_steps_than_can_be_are_refused_of_whoever_hands_them_on() -> None:
    bench = Bench(lost(3, 0, STATUS.step + (1 << 20)))
    bench.hear(STATUS)
    bench.ledger.is_own = False
    bench.ask()
    bench.hear(STATUS, echo=bench.beat())
    bench.ask()
    assert (bench.ledger.taken, bench.ledger.refused) == (0, ["a"])


def test_nobody_is_refused_while_nobody_leads_and_the_objection_stays() -> None:
    bench = Bench(lost(4, 0, 8))
    bench.hear(STATUS)
    bench.ledger.leader = bench.leader = ""
    bench.ask()
    bench.hear(STATUS, echo=bench.beat())
    bench.ask()
    assert (bench.ledger.taken, bench.ledger.refused) == (0, [])
    bench.ledger.leader = bench.leader = "a"
    bench.ask()
    assert (bench.ledger.taken, bench.ledger.refused) == (0, ["a"])


def test_what_a_majority_committed_is_doubted_no_more() -> None:
    desk, body = Desk(), lost(4, 0, 8)
    desk.hear(STATUS)
    desk.check.believe(body)
    assert desk.doubt(body) == ""
    assert desk.doubt(lost(4, 1, 8))


def test_of_its_own_learner_a_region_knows_at_once_how_far_each_life_came() -> None:
    desk = Desk()
    assert desk.doubt(lost(2, 0, 50, learner="b")) == ""
    assert desk.doubt(lost(3, 0, 1, learner="b")) == "b has not reported them here", "it has not attached"
    assert not desk.fault(lost(3, 0, 1, learner="b"))
    assert "incarnation 2 made 50 steps" in desk.fault(lost(2, 0, 51, learner="b"))
    desk.liveness.own_learner(STATUS, now_ns=0)
    desk.check.heed(lost(3, 0, 91, learner="b"))
    assert "it has made 90 steps" in desk.fault(lost(3, 0, 91, learner="b"))


def test_a_link_that_comes_up_is_no_answer_against_an_honest_leader() -> None:
    """What was heard before the link says less than the entry; the leader was refused for it."""
    desk, body = Desk(), lost(3, 0, 91)
    desk.hear(STATUS)
    desk.tell("c", body)
    assert desk.fault(body) == "", "its next heartbeat may say more"
    desk.beat()
    desk.liveness.link_changed("c", is_up=True)
    assert desk.fault(body) == ""
    desk.hear(STATUS, echo=desk.beat())
    assert "it has made 90 steps" in desk.fault(body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (replace(lost(3, 0, 40), tokens=400), ""),
        (replace(lost(3, 0, 40), tokens=401), NOT_HERE),
        (replace(lost(3, 0, 40), tokens=399), NOT_HERE),
        (replace(lost(3, 0, 40), tokens=400, step_from=1), NOT_HERE),
        (replace(lost(3, 0, 39), tokens=400), NOT_HERE),
        (lost(3, 0, 41), NOT_HERE),
        (lost(2, 0, 40), NOT_HERE),
    ],
)
def test_a_learner_that_goes_on_behind_the_steps_bears_them_out(body: DiscardedBody, words: str) -> None:
    """Its daemon has started anew, and reports nothing before it knows the version that ended them."""
    desk = Desk()
    desk.hear(STATUS)
    assert desk.doubt(body) == words
