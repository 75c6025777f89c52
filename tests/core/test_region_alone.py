"""One region core by itself: what it says, asks and refuses."""

from dataclasses import replace

import pytest

from diloco_node.core import events as ev
from diloco_node.core import messages as msg
from diloco_node.core.events import Note
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.region import RegionCore
from diloco_node.core.types import (
    Ballot,
    FragmentDigest,
    GenesisBody,
    RateLimits,
    Recovered,
)
from tests.kit.ledger_kit import disk_of
from tests.kit.rounds_kit import MANIFEST, REGIONS, SETTINGS, status
from tests.kit.small_world import SEED

# ---- one core by itself ----------------------------------------------------------------------------------------------


EMPTY = Recovered(0, "", (), (-1, -1), frozenset())


def a_core(recovered: Recovered = EMPTY) -> RegionCore:
    return RegionCore(
        region="a",
        regions=REGIONS,
        run_id="run",
        settings_digest="settings",
        manifest=MANIFEST,
        settings=SETTINGS,
        recovery=recovered,
        seed=SEED,
        secret=bytes(32),
        now_ns=0,
    )


def beat(learner: object = None, digests: tuple[FragmentDigest, ...] = ()) -> msg.Heartbeat:
    return msg.Heartbeat(1, 0, 0, ("a", "c"), learner, 0, digests)  # type: ignore[arg-type]


def alarms(effects: list[ev.Effect]) -> list[str]:
    return [effect.kind for effect in effects if isinstance(effect, Note) and effect.is_alarm]


@pytest.mark.parametrize(
    ("has_genesis", "states", "is_wanted"),
    [(False, (-1, -1), True), (False, (0, 0), True), (True, (0, 0), False), (True, (-1, 0), False)],
)
def test_theta_0_of_a_learner_is_wanted_only_before_there_is_a_genesis(
    has_genesis: bool, states: tuple[int, int], is_wanted: bool
) -> None:
    genesis = GenesisBody(
        "run", MANIFEST.digest, "settings", REGIONS, (b"1" * 32, b"2" * 32), tuple(disk_of(name) for name in REGIONS)
    )
    entries = (seal(1, 1, ZERO_HASH, genesis),) if has_genesis else ()
    core = a_core(Recovered(1, "", entries, states, frozenset()))
    assert core.wants_initial_state == is_wanted


def test_a_changed_budget_is_reported_with_the_next_heartbeat() -> None:
    core = a_core()
    assert core.handle(ev.BudgetChanged(RateLimits(5, None)), now_ns=1) == []
    effects = core.handle(ev.TimerFired(), now_ns=13)
    beats = [effect.message for effect in effects if isinstance(effect, ev.Send)]
    assert [beat.budget for beat in beats if isinstance(beat, msg.Heartbeat)] == [RateLimits(5, None)] * 2


def test_first_timer_sends_heartbeats_and_the_next_is_a_heartbeat_later() -> None:
    core = a_core()
    assert core.wake_at_ns == 0
    effects = core.handle(ev.TimerFired(), now_ns=13)
    beats = [effect for effect in effects if isinstance(effect, ev.Send) and isinstance(effect.message, msg.Heartbeat)]
    assert [effect.peer for effect in beats] == ["b", "c"]
    assert core.wake_at_ns == 13 + SETTINGS.heartbeat_ns + 13, "it was late, and says less"


def test_report_of_another_number_of_fragments_is_an_alarm_and_ignored() -> None:
    core = a_core()
    wrong = replace(status(3), positions=status(3).positions[:1])
    assert alarms(core.handle(ev.MessageArrived("b", beat(wrong)), now_ns=1)) == ["report"]
    assert core.liveness.learner("b") is None


def test_strangers_are_not_listened_to() -> None:
    core = a_core()
    effects = core.handle(ev.MessageArrived("mallory", beat(status(3))), now_ns=1)
    assert [effect.kind for effect in effects if isinstance(effect, Note)] == ["stranger"]


def test_other_bytes_at_an_equal_version_are_an_alarm() -> None:
    core = a_core()
    core.history.versions = [4, 4]
    core.handle(ev.DigestComputed(1, 4, b"x" * 32), now_ns=1)
    digests = beat(digests=(FragmentDigest(1, 4, b"y" * 32),))
    assert alarms(core.handle(ev.MessageArrived("b", digests), now_ns=2)) == ["digest"]
    assert core.view().digest_differences == 1


def test_ballot_of_somebody_who_does_not_lead_is_ignored() -> None:
    core = a_core()
    announcement = msg.BallotOpened(Ballot(1, 1), 0, 1, ("a",), ())
    core.handle(ev.LearnerAttached(status(3), ()), now_ns=1)
    assert core.handle(ev.MessageArrived("b", announcement), now_ns=2) == []


def test_core_that_becomes_due_tells_its_leader_at_once() -> None:
    core = a_core()
    core.handle(ev.MessageArrived("b", msg.AppendEntries(1, 1, 0, bytes(32), (), 0)), now_ns=1)
    core.handle(ev.LearnerAttached(status(3), ()), now_ns=2)
    effects = core.handle(ev.LearnerReported(status(4)), now_ns=3)
    assert [effect.peer for effect in effects if isinstance(effect, ev.Send)] == ["b"]
    assert core.handle(ev.LearnerReported(status(5)), now_ns=4) == [], "once"
