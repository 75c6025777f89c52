"""Fetches: the leader first, then the others in turn, few at once, back off when all failed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Effect, FetchPayload, FetchState, Note
from diloco_node.core.recovery.fetches import FETCHES_MAX, LATE, RETRY_NS, RETRY_NS_MAX, Fetches
from diloco_node.core.recovery.versions import PAYLOADS_RATHER_MAX, Versions
from diloco_node.core.types import SnapshotBody
from tests.kit.rounds_kit import committed_round

OTHERS = ("b", "c", "d")


class Desk:
    """Fetches of region a, with the effects of the last call."""

    def __init__(self) -> None:
        self.effects = EffectBuffer("a")
        self.fetches = Fetches(region="a", regions=("a", *OTHERS), effects=self.effects)

    def pump(
        self, *, leader: str = "c", alive: tuple[str, ...] = OTHERS, now_ns: int = 0, witness: str = ""
    ) -> list[Effect]:
        self.fetches.pump(leader=leader, alive=alive, now_ns=now_ns, witness=witness)
        return [effect for effect in self.effects.take() if isinstance(effect, FetchPayload | FetchState)]


BODY = committed_round(0, 3, ())


def test_leader_is_asked_first_and_only_once() -> None:
    desk = Desk()
    desk.fetches.request(0, 3, BODY)
    assert desk.pump() == [FetchPayload("c", 0, 3, BODY.payload_digest, BODY.stripes)]
    desk.fetches.request(0, 3, BODY)
    assert desk.pump() == []
    assert desk.fetches.in_flight() == ((0, 3, "c"),)


def test_states_do_not_wait_for_payloads_of_which_each_round_makes_another() -> None:
    desk = Desk()
    for fragment in range(FETCHES_MAX):
        desk.fetches.request(fragment, 3, replace(BODY, fragment=fragment))
    desk.fetches.request(9, 3, None, digest=b"d" * 32)
    assert [effect.fragment for effect in desk.pump()] == [9, *range(FETCHES_MAX - 1)]


def test_failure_moves_on_to_the_others_by_name() -> None:
    desk = Desk()
    desk.fetches.request(0, 3, BODY)
    peers = []
    for _ in range(3):
        (effect,) = desk.pump()
        assert isinstance(effect, FetchPayload)
        peers.append(effect.peer)
        desk.fetches.on_failure(effect.peer, 0, "busy", now_ns=0)
    assert peers == ["c", "b", "d"]


@pytest.mark.parametrize(("body", "what"), [(BODY, "payload"), (None, "state")])
def test_whoever_does_not_have_it_any_more_has_not_failed_to_send_it(body: Any, what: str) -> None:
    """A ledger that catches up asks for what is pruned elsewhere."""
    for reason, text in (("gone", f"c does not have this {what}: another"), ("busy", "c could not send it: busy")):
        desk = Desk()
        desk.fetches.request(0, 3, body, digest=b"d" * 32)
        desk.pump()
        desk.fetches.on_failure("c", 0, reason, now_ns=0)
        (note,) = [effect for effect in desk.effects.take() if isinstance(effect, Note)]
        assert note.text.startswith(text)


def test_after_everybody_failed_it_waits_longer_each_time() -> None:
    desk = Desk()
    desk.fetches.request(0, 3, BODY)
    now_ns, waits = 0, []
    for _ in range(8):
        for _ in OTHERS:
            (effect,) = desk.pump(now_ns=now_ns)
            assert isinstance(effect, FetchPayload)
            desk.fetches.on_failure(effect.peer, 0, "busy", now_ns=now_ns)
        assert desk.pump(now_ns=now_ns) == []
        wake_at_ns = desk.fetches.wake_at_ns
        assert wake_at_ns is not None
        assert desk.pump(now_ns=wake_at_ns - 1) == []
        waits.append(wake_at_ns - now_ns)
        now_ns = wake_at_ns
    assert waits[:3] == [RETRY_NS, 2 * RETRY_NS, 4 * RETRY_NS]
    assert waits[-1] == RETRY_NS_MAX


def test_payload_is_gone_only_when_everybody_says_so() -> None:
    desk = Desk()
    desk.fetches.request(0, 3, BODY)
    for peer, reason in (("c", "gone"), ("b", "link lost"), ("d", "unknown")):
        desk.pump()
        desk.fetches.on_failure(peer, 0, reason, now_ns=0)
    assert not desk.fetches.is_gone(0, 3)
    wake_at_ns = desk.fetches.wake_at_ns
    assert wake_at_ns is not None
    (effect,) = desk.pump(now_ns=wake_at_ns)
    assert isinstance(effect, FetchPayload)
    assert effect.peer == "b", "those that no longer have it are not asked again"
    desk.fetches.on_failure("b", 0, "gone", now_ns=wake_at_ns)
    assert desk.fetches.is_gone(0, 3)
    assert not desk.fetches.is_gone(0, 4)


def test_a_leader_that_came_after_what_is_read_of_the_ledger_is_asked_too() -> None:
    """A region may join when all those that its first entries name have left."""
    desk = Desk()
    desk.fetches.request(0, 5, None, digest=b"s")
    assert desk.pump(leader="", alive=()) == []
    assert desk.pump(leader="z", alive=()) == [FetchState("z", 0, 5, b"s")]
    desk.fetches.on_failure("z", 0, "gone", now_ns=0)
    assert desk.pump(leader="z", alive=()) == [], "it is asked again after a pause"
    assert desk.pump(leader="z", alive=(), now_ns=RETRY_NS) == [FetchState("z", 0, 5, b"s")]
    desk.fetches.on_failure("z", 0, "gone", now_ns=RETRY_NS)
    assert desk.pump(leader="b", alive=("b",), now_ns=RETRY_NS) == [FetchState("b", 0, 5, b"s")], "it leads no longer"


def test_a_payload_is_not_gone_before_the_witness_was_asked() -> None:
    """The only other region had a new folder, and was asked for state and payload in turn, for ever."""
    desk, now_ns = Desk(), RETRY_NS
    desk.fetches.request(0, 3, BODY)
    for peer in ("b", "w"):
        (effect,) = desk.pump(alive=("b",), now_ns=now_ns, witness="w")
        assert isinstance(effect, FetchPayload)
        assert effect.peer == peer
        assert not desk.fetches.is_gone(0, 3)
        desk.fetches.on_failure(peer, 0, "gone" if peer == "b" else "not in the bucket", now_ns=now_ns)
        now_ns += RETRY_NS_MAX
    assert desk.fetches.is_gone(0, 3)


def test_a_state_that_nobody_has_is_refused_where_a_witness_has_payloads() -> None:
    for witness, is_refused in (("w", True), ("", False)):
        desk = Desk()
        desk.fetches.request(0, 5, None, digest=b"s")
        assert desk.pump(alive=("b",), witness=witness) == [FetchState("b", 0, 5, b"s")]
        assert not desk.fetches.is_refused(0, 5)
        desk.fetches.on_failure("b", 0, "gone", now_ns=0)
        assert desk.fetches.is_refused(0, 5) is is_refused
        assert not desk.fetches.is_refused(0, 6)
        assert not desk.fetches.is_refused(1, 5)
        desk.pump(alive=(), witness=witness)
        assert desk.fetches.is_refused(1, 5) is is_refused, "nobody is there to send it"


@pytest.mark.parametrize(
    ("many", "is_refused", "is_gone", "is_better"),
    [(True, False, False, True), (True, True, False, False), (True, True, True, True), (False, False, False, False)],
)
def test_payloads_are_fetched_where_their_state_was_refused(
    many: bool, is_refused: bool, is_gone: bool, is_better: bool
) -> None:
    lacking = [committed_round(0, version, ()) for version in range(3, 4 + PAYLOADS_RATHER_MAX * many)]
    fetches: Any = SimpleNamespace(is_refused=lambda *_: is_refused, is_gone=lambda *_: is_gone)
    assert Versions._is_state_better(SnapshotBody(0, 5, b"s"), lacking, fetches) is is_better


def test_state_replaces_a_payload_that_is_gone() -> None:
    desk = Desk()
    desk.fetches.request(0, 3, BODY)
    for peer in ("c", "b", "d"):
        desk.pump()
        desk.fetches.on_failure(peer, 0, "gone", now_ns=0)
    desk.fetches.request(0, 4, None, digest=b"state")
    assert desk.pump() == [FetchState("c", 0, 4, b"state")]


def test_whoever_took_too_long_is_asked_last_until_it_has_sent_something_in_time() -> None:
    """Each payload from a leader on a bad link cost 300 s before another was asked."""
    desk, asked = Desk(), []

    def fetch(fragment: int, *failures: str) -> None:
        desk.fetches.request(fragment, 3, replace(BODY, fragment=fragment))
        for reason in (*failures, ""):
            (effect,) = desk.pump()
            asked.append(effect.peer)
            if reason:
                desk.fetches.on_failure(effect.peer, fragment, reason, now_ns=0)
        desk.fetches.on_end(fragment, version=3, is_state=False)

    fetch(0, LATE)
    fetch(1)
    fetch(2, "busy", "busy")
    fetch(3)
    assert asked == ["c", "b", "b", "b", "d", "c", "c"]


def test_few_fetches_are_in_flight_at_once() -> None:
    desk = Desk()
    for fragment in range(FETCHES_MAX + 2):
        desk.fetches.request(fragment, 0, None)
    assert len(desk.pump()) == FETCHES_MAX
    desk.fetches.on_end(1, version=5, is_state=True)
    assert desk.pump() == [], "another version than was asked for"
    desk.fetches.on_end(1, version=0, is_state=True)
    assert desk.pump() == [FetchState("c", FETCHES_MAX, 0, b"")], "Theta_0: the leader has it"


def test_the_state_of_a_snapshot_comes_from_several_regions_and_the_leader_is_the_first() -> None:
    desk = Desk()
    for fragment in range(FETCHES_MAX):
        desk.fetches.request(fragment, 3, None)
    peers = [effect.peer for effect in desk.pump() if isinstance(effect, FetchState)]
    assert peers == ["c", "b", "d", "c"]
    desk.fetches.on_failure("b", 1, "link lost", now_ns=0)
    (effect,) = desk.pump(alive=("c", "d"))
    assert isinstance(effect, FetchState)
    assert (effect.fragment, effect.peer) == (1, "d"), "a donor that dies costs its own fragments alone"


def test_only_what_was_asked_for_ends_a_fetch() -> None:
    desk = Desk()
    desk.fetches.request(0, 3, BODY)
    desk.pump()
    desk.fetches.on_end(0, version=2, is_state=False)
    desk.fetches.on_end(0, version=3, is_state=True)
    desk.fetches.on_failure("b", 0, "busy", now_ns=0)
    assert desk.fetches.in_flight() == ((0, 3, "c"),)
    desk.fetches.on_end(0, version=3, is_state=False)
    assert desk.fetches.in_flight() == ()


def test_regions_that_are_away_are_not_asked_and_keep_their_turn() -> None:
    desk = Desk()
    desk.fetches.request(0, 3, BODY)
    assert desk.pump(alive=()) == []
    (effect,) = desk.pump(alive=("d",))
    assert isinstance(effect, FetchPayload)
    assert effect.peer == "d"
    desk.fetches.on_failure("d", 0, "link lost", now_ns=0)
    (effect,) = desk.pump(alive=("b", "d"))
    assert isinstance(effect, FetchPayload)
    assert effect.peer == "b"


def test_forgotten_request_is_not_started() -> None:
    desk = Desk()
    desk.fetches.request(0, 3, BODY)
    desk.fetches.forget(0)
    assert desk.pump() == []


def test_theta_0_is_asked_for_by_its_digest_and_another_one_on_its_way_is_known() -> None:
    desk = Desk()
    desk.fetches.request(1, 0, None, digest=b"first")
    assert not desk.fetches.brings_other_initial([b"", b"second"]), "nothing is on its way yet"
    assert desk.pump() == [FetchState("c", 1, 0, b"first")]
    assert desk.fetches.brings_other_initial([b"", b"second"])
    assert not desk.fetches.brings_other_initial([b"", b"first"])
    desk.fetches.request(1, 0, None, digest=b"second")
    assert desk.pump() == [], "the first one must end before"
    desk.fetches.on_failure("c", 1, "the Theta_0 of another genesis", now_ns=0)
    desk.fetches.request(1, 0, None, digest=b"second")
    assert not desk.fetches.brings_other_initial([b"", b"second"])
    assert desk.pump() == [FetchState("c", 1, 0, b"second")]


def test_what_may_come_by_itself_is_asked_for_after_its_patience_only() -> None:
    desk = Desk()
    desk.fetches.request(1, 0, None, digest=b"first", patience_ns=500)
    assert desk.pump(now_ns=1000) == []
    assert desk.fetches.wake_at_ns == 1500
    desk.fetches.request(1, 0, None, digest=b"first", patience_ns=500)
    assert desk.pump(now_ns=1499) == [], "and asking again does not begin it anew"
    assert desk.pump(now_ns=1500) == [FetchState("c", 1, 0, b"first")]
    desk.fetches.on_failure("c", 1, "busy", now_ns=1600)
    assert desk.pump(now_ns=1600) == [FetchState("b", 1, 0, b"first")], "it is waited for once"


def test_what_came_by_itself_in_time_is_not_asked_for() -> None:
    desk = Desk()
    desk.fetches.request(1, 0, None, digest=b"first", patience_ns=500)
    desk.pump(now_ns=1000)
    desk.fetches.forget(1)
    assert desk.pump(now_ns=2000) == []
    assert desk.fetches.wake_at_ns is None


def test_what_waits_behind_the_fetches_in_flight_does_not_wake_the_core() -> None:
    desk = Desk()
    for fragment in range(FETCHES_MAX + 3):
        desk.fetches.request(fragment, 0, None, digest=b"0", patience_ns=RETRY_NS)
    assert desk.pump() == []
    assert desk.fetches.wake_at_ns == RETRY_NS
    assert len(desk.pump(now_ns=RETRY_NS)) == FETCHES_MAX
    assert desk.fetches.wake_at_ns is None, "a time that has passed would wake it again and again"


def test_the_only_ones_that_can_be_asked_are_not_asked_again_at_once() -> None:
    desk = Desk()
    desk.fetches.request(0, 3, BODY)
    for retry in range(3):
        now_ns = retry * RETRY_NS_MAX
        assert [effect.peer for effect in desk.pump(alive=("b",), now_ns=now_ns)] == ["b"]
        desk.fetches.on_failure("b", 0, "no link", now_ns=now_ns)
        assert desk.pump(alive=("b",), now_ns=now_ns) == []
        assert desk.fetches.wake_at_ns == now_ns + (RETRY_NS << retry)
    assert [effect.peer for effect in desk.pump(alive=("b", "d"), now_ns=now_ns)] == ["d"], "another one is back"


def test_whoever_could_not_send_is_asked_again_when_the_others_failed_too() -> None:
    for body in (BODY, None):
        desk = Desk()
        desk.fetches.request(0, 3, body, digest=b"d" * 32)
        now_ns, asked = 0, []
        for _ in range(9):
            (effect,) = desk.pump(now_ns=now_ns)
            assert isinstance(effect, FetchPayload | FetchState)
            asked.append(effect.peer)
            desk.fetches.on_failure(effect.peer, 0, "broke off", now_ns=now_ns)
            now_ns += RETRY_NS_MAX
        assert asked == ["c", "b", "d"] * 3


def test_a_state_that_a_peer_does_not_have_yet_is_asked_for_again_and_a_pruned_payload_is_not() -> None:
    for body, peers in ((BODY, []), (None, ["c", "b", "d"])):
        desk = Desk()
        desk.fetches.request(0, 3, body, digest=b"d" * 32)
        now_ns = 0
        for peer in ("c", "b", "d"):
            desk.pump(now_ns=now_ns)
            desk.fetches.on_failure(peer, 0, "gone", now_ns=now_ns)
            now_ns += RETRY_NS_MAX
        asked = []
        for _ in range(3):
            for effect in desk.pump(now_ns=now_ns):
                assert isinstance(effect, FetchPayload | FetchState)
                asked.append(effect.peer)
                desk.fetches.on_failure(effect.peer, 0, "broke off", now_ns=now_ns)
            now_ns += RETRY_NS_MAX
        assert asked == peers
