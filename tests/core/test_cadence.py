"""The failure detector: a floor on an idle machine, a multiple of the measured gaps, a ceiling, and what it forgets."""

from diloco_node.core.cadence import CEILING, FORGETTING, MARGIN, Cadence

FLOOR_NS = 1_000_000_000
BEAT_NS = 200_000_000


def heard(*gaps_ns: int) -> Cadence:
    cadence, now_ns = Cadence(FLOOR_NS), 7
    cadence.hear(now_ns)
    for gap_ns in gaps_ns:
        now_ns += gap_ns
        cadence.hear(now_ns)
    return cadence


def test_gaps_of_an_idle_machine_leave_the_limit_at_the_floor() -> None:
    assert heard().limit_ns == FLOOR_NS
    assert heard(*[BEAT_NS, 2 * BEAT_NS] * 100).limit_ns == FLOOR_NS, "one lost heartbeat is no reason"


def test_the_limit_follows_the_longest_gap_up_to_a_ceiling() -> None:
    assert heard(BEAT_NS, 3 * FLOOR_NS, BEAT_NS).limit_ns > MARGIN * 3 * FLOOR_NS * 95 // 100
    assert heard(1_000 * FLOOR_NS).limit_ns == CEILING * FLOOR_NS


def test_a_long_gap_is_forgotten_by_time_and_not_by_messages() -> None:
    few = heard(4 * FLOOR_NS, *[BEAT_NS] * (FORGETTING * FLOOR_NS // BEAT_NS))
    many = heard(4 * FLOOR_NS, *[BEAT_NS // 10] * (FORGETTING * FLOOR_NS // (BEAT_NS // 10)))
    assert 4 * FLOOR_NS * 30 // 100 < few.longest_ns < 4 * FLOOR_NS * 45 // 100
    assert abs(many.longest_ns - few.longest_ns) < few.longest_ns // 5
    assert heard(1_000 * FLOOR_NS, *[BEAT_NS] * 500).limit_ns == FLOOR_NS


def test_a_lost_link_ends_no_gap() -> None:
    cadence = heard(BEAT_NS)
    cadence.heard_at_ns = None
    cadence.hear(10**15)
    assert cadence.limit_ns == FLOOR_NS


def test_standing_still_for_longer_than_usual_begins_the_silence_anew_and_is_learned() -> None:
    cadence = heard(BEAT_NS)
    assert cadence.excuse(2 * FLOOR_NS, 5 * FLOOR_NS)
    assert (cadence.heard_at_ns, cadence.limit_ns) == (5 * FLOOR_NS, MARGIN * 2 * FLOOR_NS)
    assert not cadence.excuse(2 * FLOOR_NS, 9 * FLOOR_NS), "what is usual excuses nothing"
    assert cadence.heard_at_ns == 5 * FLOOR_NS
    cadence.heard_at_ns = None
    assert not cadence.excuse(3 * FLOOR_NS, 9 * FLOOR_NS), "there is nobody to be heard"
    assert cadence.limit_ns == MARGIN * 3 * FLOOR_NS
