"""Liveness: who counts as alive, the matrix of who hears whom, round-trip times, learners that stand still."""

import pickle
from dataclasses import replace
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.events import Send
from diloco_node.core.membership.liveness import (
    OLD_SEQUENCES_MAX,
    RTT_NS_MAX,
    SENT_KEPT,
    SILENT_HEARTBEATS,
    SILENT_STRIDES,
    SPREAD_MAX,
    UNREAD_MAX,
)
from diloco_node.core.messages import Heartbeat
from diloco_node.core.types import FragmentDigest, RateLimits
from tests.kit.rounds_kit import MS, SETTINGS, Neighbourhood, status

SILENT_NS = SILENT_HEARTBEATS * SETTINGS.heartbeat_ns
BEAT = Heartbeat(1, 0, 0, ("a", "c"), None, 0, ())


def test_region_is_alive_for_exactly_the_silent_time() -> None:
    world = Neighbourhood()
    assert not world.liveness.is_alive("b", now_ns=0)
    world.hear("b", now_ns=13)
    assert world.liveness.is_alive("b", now_ns=13 + SILENT_NS - 1)
    assert not world.liveness.is_alive("b", now_ns=13 + SILENT_NS)
    assert world.liveness.is_alive("a", now_ns=10**18), "this region always is"


def test_every_region_tells_its_budget() -> None:
    world = Neighbourhood()
    assert world.liveness.budget("b") == world.liveness.budget("a") == RateLimits()
    world.hear("b", now_ns=13, budget=RateLimits(7, None))
    assert world.liveness.budget("b") == RateLimits(7, None)
    world.hear("b", now_ns=14)
    assert world.liveness.budget("b") == RateLimits(), "the last word counts"
    world.liveness.own_budget(RateLimits(None, 9))
    assert world.liveness.budget("a") == RateLimits(None, 9)
    world.liveness.beat(applied_index=0, digests=(), now_ns=15)
    beats = [effect.message for effect in world.effects.take() if isinstance(effect, Send)]
    assert [beat.budget for beat in beats if isinstance(beat, Heartbeat)] == [RateLimits(None, 9)] * 2


def test_a_region_that_is_about_to_stop_says_so_until_it_is_back() -> None:
    world = Neighbourhood()
    assert not world.liveness.has_left("b")
    world.hear("b", now_ns=13, leaving=True)
    assert world.liveness.has_left("b")
    world.liveness.link_changed("b", is_up=False)
    assert world.liveness.has_left("b"), "nothing more is heard of it, as it said"
    world.hear("b", now_ns=14)
    assert not world.liveness.has_left("b")
    world.hear("b", replace(status(9), leaving=True), now_ns=15)
    assert world.liveness.has_left("b"), "its learner stops first"
    world.liveness.is_leaving = True
    world.liveness.beat(applied_index=0, digests=(), now_ns=16)
    beats = [effect.message for effect in world.effects.take() if isinstance(effect, Send)]
    assert [beat.leaving for beat in beats if isinstance(beat, Heartbeat)] == [True] * 2


def test_lost_link_is_silence_at_once() -> None:
    world = Neighbourhood()
    world.hear("b", now_ns=13)
    world.liveness.link_changed("b", is_up=False)
    assert not world.liveness.is_alive("b", now_ns=14)
    world.hear("b", now_ns=15)
    assert world.liveness.is_alive("b", now_ns=15)


def test_regions_reach_each_other_only_when_both_say_so() -> None:
    world = Neighbourhood()
    world.hear("b", now_ns=1, hears=("a", "c"))
    world.hear("c", now_ns=1, hears=("a",))
    reaches, central_regions = world.liveness.reaches, world.liveness.central_regions
    assert reaches("a", now_ns=1)
    assert reaches("b", now_ns=1)
    assert world.liveness.hears("b", "c", now_ns=1)
    assert central_regions(("c", "b", "a")) == ["a"], "one direction is cut"
    assert central_regions(("a", "b")) == ["a", "b"]
    assert not reaches("b", now_ns=1 + SILENT_NS), "what a silent region said is void"
    assert not world.liveness.hears("b", "c", now_ns=1 + SILENT_NS)


@given(st.lists(st.frozensets(st.sampled_from("abcdef")), min_size=6, max_size=6))
def test_who_is_linked_with_all_is_by_the_words_of_both_sides(heard: list[frozenset[str]]) -> None:
    names = tuple("abcdef")
    world = Neighbourhood(regions=names)
    for name, peers in zip(names[1:], heard, strict=False):
        world.hear(name, now_ns=1, hears=peers)
    reached = [name for name in names if world.liveness.reaches(name, now_ns=1)]
    hears = partial(world.liveness.hears, now_ns=1)
    linked = ["a"] + [
        name
        for name in reached[1:]
        if all(hears(name, peer) and hears(peer, name) for peer in reached[1:] if peer != name)
    ]
    assert world.liveness.central_regions(reached) == linked


def test_region_that_does_not_hear_us_is_not_reached() -> None:
    world = Neighbourhood()
    world.hear("b", now_ns=1, hears=("c",))
    assert not world.liveness.reaches("b", now_ns=1)


def test_round_trip_time_is_what_is_left_of_the_echo_after_the_delay() -> None:
    world = Neighbourhood()
    world.liveness.beat(applied_index=0, digests=(), now_ns=1_000)
    world.liveness.heartbeat_arrived("b", replace(BEAT, echo=1, echo_delay_ns=300), now_ns=1_710)
    assert world.liveness.rtt_ns("b") == 410
    world.liveness.beat(applied_index=0, digests=(), now_ns=2_000)
    world.liveness.heartbeat_arrived("b", replace(BEAT, sequence=2, echo=2, echo_delay_ns=0), now_ns=2_490)
    assert world.liveness.rtt_ns("b") == 410 + (490 - 410) // 8


def test_no_lie_about_an_echo_makes_the_way_longer_than_a_limit() -> None:
    world = Neighbourhood()
    world.liveness.beat(applied_index=0, digests=(), now_ns=1_000)
    world.liveness.heartbeat_arrived("b", replace(BEAT, echo=1, echo_delay_ns=-(2**62)), now_ns=1_710)
    assert world.liveness.rtt_ns("b") == 0
    world.liveness.heartbeat_arrived("b", replace(BEAT, sequence=2, echo=1), now_ns=50 * 10**9)
    assert world.liveness.rtt_ns("b") == RTT_NS_MAX


def test_echo_of_an_unknown_heartbeat_measures_nothing() -> None:
    world = Neighbourhood()
    world.liveness.beat(applied_index=0, digests=(), now_ns=1)
    for _ in range(SENT_KEPT):
        world.liveness.beat(applied_index=0, digests=(), now_ns=2)
    world.liveness.heartbeat_arrived("b", replace(BEAT, echo=1), now_ns=10_000)
    assert world.liveness.rtt_ns("b") == 0


def test_an_echo_of_this_daemons_life_before_is_none() -> None:
    """A region that had begun again took it for the answer to its question, and refused an honest leader."""
    world = Neighbourhood()
    world.liveness.heartbeat_arrived("b", replace(BEAT, echo=664), now_ns=10_000)
    assert world.liveness.echo("b") == 0


def test_heartbeat_says_how_long_ago_the_echo_arrived() -> None:
    world = Neighbourhood()
    world.liveness.heartbeat_arrived("b", replace(BEAT, sequence=17), now_ns=1_000)
    world.liveness.beat(applied_index=5, digests=(), now_ns=1_600)
    sent = {effect.peer: effect.message for effect in world.effects.take() if isinstance(effect, Send)}
    to_b, to_c = sent["b"], sent["c"]
    assert isinstance(to_b, Heartbeat)
    assert isinstance(to_c, Heartbeat)
    assert (to_b.echo, to_b.echo_delay_ns, to_b.hears, to_b.applied_index) == (17, 600, ("b",), 5)
    assert (to_c.echo, to_c.echo_delay_ns) == (0, 0)


def test_overtaken_heartbeat_shows_that_a_region_lives_but_is_no_news() -> None:
    world = Neighbourhood()
    late = replace(BEAT, sequence=4, learner=status(9))
    assert world.liveness.heartbeat_arrived("b", replace(BEAT, sequence=5, learner=status(11)), now_ns=1)
    assert not world.liveness.heartbeat_arrived("b", late, now_ns=2)
    learner = world.liveness.learner("b")
    assert learner is not None
    assert learner.step == 11
    assert world.liveness.is_alive("b", now_ns=1 + SILENT_NS)


def test_new_process_counts_from_one_again_and_is_believed_soon() -> None:
    world = Neighbourhood()
    world.liveness.heartbeat_arrived("b", replace(BEAT, sequence=500), now_ns=1)
    news = [
        world.liveness.heartbeat_arrived("b", replace(BEAT, sequence=number), now_ns=number)
        for number in range(1, OLD_SEQUENCES_MAX + 2)
    ]
    assert news == [False] * (OLD_SEQUENCES_MAX - 1) + [True, True]


def test_stragglers_between_news_are_never_believed() -> None:
    world = Neighbourhood()
    for number in range(100, 104):
        assert world.liveness.heartbeat_arrived("b", replace(BEAT, sequence=number), now_ns=number)
        for _ in range(OLD_SEQUENCES_MAX - 1):
            assert not world.liveness.heartbeat_arrived("b", replace(BEAT, sequence=7), now_ns=number)


def test_new_link_believes_a_new_process_at_once() -> None:
    world = Neighbourhood()
    world.liveness.heartbeat_arrived("b", replace(BEAT, sequence=500), now_ns=1)
    world.liveness.link_changed("b", is_up=True)
    assert world.liveness.heartbeat_arrived("b", BEAT, now_ns=2)


def test_time_of_the_last_step_moves_only_with_steps() -> None:
    world = Neighbourhood()
    world.liveness.own_learner(status(3), now_ns=10 * MS)
    world.liveness.own_learner(status(3), now_ns=20 * MS)
    assert world.liveness.stepped_at_ns("a") == 10 * MS
    world.liveness.own_learner(status(3, incarnation=2), now_ns=30 * MS)
    assert world.liveness.stepped_at_ns("a") == 30 * MS
    world.liveness.own_learner(None, now_ns=40 * MS)
    assert world.liveness.stepped_at_ns("a") is None


def test_heartbeat_of_a_stranger_is_ignored() -> None:
    world = Neighbourhood()
    assert not world.liveness.heartbeat_arrived("nobody", BEAT, now_ns=1)
    world.liveness.link_changed("nobody", is_up=False)
    assert not world.liveness.is_alive("nobody", now_ns=1)


def test_a_region_hears_only_regions_of_the_run() -> None:
    world = Neighbourhood()
    liars = tuple(f"r{number}" for number in range(10_000))
    world.liveness.heartbeat_arrived("b", replace(BEAT, hears=("c", *liars, "a")), now_ns=1)
    assert world.liveness.hears_claimed("b") == ("a", "c")
    assert not world.liveness.hears("b", "r7", now_ns=1)


def test_nothing_is_kept_of_the_digests_in_a_heartbeat() -> None:
    """`DigestWatch` compares them; a peer that names other fragments each time must not make this region grow."""
    world = Neighbourhood()
    for number in range(1, 50):
        digests = tuple(FragmentDigest(1_000 * number + report, 2**62, b"x" * 16) for report in range(100))
        assert world.liveness.heartbeat_arrived("b", replace(BEAT, sequence=number, digests=digests), now_ns=number)
    assert len(pickle.dumps(world.liveness._peers["b"])) < 2_000


def test_with_many_regions_only_the_leader_hears_each_heartbeat() -> None:
    for count, spread in ((2, 1), (5, 1), (6, 2), (16, 4), (17, 4), (64, SPREAD_MAX)):
        names = tuple(f"r{number:02d}" for number in range(count))
        world, stride = Neighbourhood(names[0], names), max(spread, 2)
        receivers = [
            world.liveness.next_receiver("r01", number, is_last=False, now_ns=0) for number in range(2 * stride)
        ]
        assert receivers == [None, *["r01"] * (stride - 1), None, *["r01"] * (stride - 1)]
        assert world.liveness.next_receiver("r01", 0, is_last=True, now_ns=0) is None, "who goes says so to all"
        silent = max(SILENT_HEARTBEATS, SILENT_STRIDES * spread)
        assert world.liveness.silent_ns == silent * SETTINGS.heartbeat_ns


def test_between_heartbeats_to_all_the_leader_gets_those_that_tell_something_new() -> None:
    world = Neighbourhood()
    liveness = world.liveness

    def turn(applied_index: int = 7, now_ns: int = 0) -> list[str]:
        world.hear("b", now_ns=now_ns, echo=liveness.sequence)
        receiver = liveness.next_receiver("b", applied_index, is_last=False, now_ns=now_ns)
        liveness.beat(applied_index=applied_index, digests=(), now_ns=now_ns, only_to=receiver)
        return [effect.peer for effect in world.effects.take() if isinstance(effect, Send)]

    own = status()
    assert [turn() for _ in range(5)] == [["b", "c"], [], ["b", "c"], [], ["b", "c"]]
    assert [turn(8) for _ in range(4)] == [["b"], ["b", "c"], [], ["b", "c"]], "it has applied an entry"
    for learner in (own, replace(own, leaving=True), None):
        liveness.own_learner(learner, now_ns=0)
        assert [turn(8), turn(8)] == [["b"], ["b", "c"]]
    liveness.own_learner(own, now_ns=0)
    assert [turn(8), turn(8)] == [["b"], ["b", "c"]]
    liveness.own_learner(replace(own, step=own.step + 1), now_ns=0)
    assert [turn(8), turn(8)] == [[], ["b", "c"]], "steps alone can wait"
    liveness.is_leaving = True
    assert [turn(8), turn(8)] == [["b"], ["b", "c"]]
    liveness.own_budget(RateLimits(1, 1))
    assert [turn(8), turn(8)] == [["b"], ["b", "c"]]
    world.hear("c", now_ns=0)
    assert [turn(8), turn(8), turn(8), turn(8)] == [["b"], ["b", "c"], [], ["b", "c"]]
    assert turn(8, now_ns=liveness.silent_ns) == ["b"], "c is not heard any more"


def test_messages_of_the_ledger_show_that_a_region_lives_once_its_heartbeats_arrive() -> None:
    world = Neighbourhood()
    silent_ns = world.liveness.silent_ns
    world.liveness.hear("b", now_ns=1)
    assert not world.liveness.is_alive("b", now_ns=2), "nothing is known of it on this link"
    world.hear("b", now_ns=2)
    world.liveness.hear("b", now_ns=silent_ns // 2)
    assert world.liveness.is_alive("b", now_ns=silent_ns // 2 + silent_ns - 1)
    assert not world.liveness.is_alive("b", now_ns=silent_ns // 2 + silent_ns)
    world.liveness.link_changed("b", is_up=False)
    world.liveness.hear("b", now_ns=2 * silent_ns)
    assert not world.liveness.is_alive("b", now_ns=2 * silent_ns)
    world.liveness.hear("stranger", now_ns=2)


def test_who_reads_no_heartbeats_gets_only_those_that_go_to_all_until_it_reads_again() -> None:
    world = Neighbourhood()

    def receivers(only_to: str | None) -> list[str]:
        world.liveness.beat(applied_index=0, digests=(), now_ns=0, only_to=only_to)
        return [effect.peer for effect in world.effects.take() if isinstance(effect, Send)]

    assert [receivers("b") for _ in range(UNREAD_MAX)] == [["b"]] * UNREAD_MAX
    assert (receivers("b"), receivers(None), receivers("b")) == ([], ["b", "c"], [])
    world.hear("b", now_ns=1, echo=world.liveness.sequence)
    assert receivers("b") == ["b"]
    assert receivers("c") == []
    world.liveness.link_changed("c", is_up=True)
    assert receivers("c") == ["c"], "the first message on a new link"


def test_late_heartbeats_of_most_regions_are_no_reason_to_call_another_one_gone() -> None:
    names = ("a", "b", "c", "d", "e")
    world = Neighbourhood("a", names)
    world.hear("e", now_ns=0)
    for beat in range(4):
        for name in ("b", "c", "d"):
            world.hear(name, now_ns=beat * 2 * SILENT_NS)
    world.liveness.beat(applied_index=0, digests=(), now_ns=6 * SILENT_NS)
    world.hear("e", now_ns=6 * SILENT_NS)
    assert world.liveness.is_alive("e", now_ns=9 * SILENT_NS), "as late as the others are"
    one_late = Neighbourhood("a", names)
    one_late.hear("b", now_ns=0)
    one_late.hear("b", now_ns=3 * SILENT_NS)
    one_late.hear("e", now_ns=3 * SILENT_NS)
    one_late.liveness.beat(applied_index=0, digests=(), now_ns=3 * SILENT_NS)
    assert one_late.liveness.is_alive("b", now_ns=5 * SILENT_NS)
    assert not one_late.liveness.is_alive("e", now_ns=4 * SILENT_NS)


def test_a_process_that_stood_still_calls_nobody_gone() -> None:
    world = Neighbourhood()
    world.hear("b", now_ns=0)
    world.liveness.excuse(4 * SILENT_NS, now_ns=4 * SILENT_NS)
    assert world.liveness.is_alive("b", now_ns=4 * SILENT_NS)
    assert not world.liveness.is_alive("b", now_ns=13 * SILENT_NS)
    assert not world.liveness.is_alive("c", now_ns=4 * SILENT_NS), "it was never heard"


def test_vain_terms_make_the_regions_more_patient() -> None:
    world = Neighbourhood()
    world.hear("b", now_ns=0)
    world.liveness.patience = 4
    assert world.liveness.is_alive("b", now_ns=4 * SILENT_NS - 1)
    assert not world.liveness.is_alive("b", now_ns=4 * SILENT_NS)
