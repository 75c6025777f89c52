"""transport/quarantine.py: three strikes in ten minutes, ten minutes doubling to a day."""

from hypothesis import given
from hypothesis import strategies as st

from diloco_node.numeric import NS_PER_S
from diloco_node.transport.quarantine import FIRST_NS, FORGIVEN_AFTER_NS, LONGEST_NS, STRIKES, WINDOW_NS, Quarantine

MINUTE = 60 * NS_PER_S


def struck(quarantine: Quarantine, now_ns: int, peer: str = "b") -> list[bool]:
    return [quarantine.strike(peer, "protocol", now_ns=now_ns) for _ in range(STRIKES)]


def test_the_third_strike_shuts_out_for_ten_minutes() -> None:
    quarantine = Quarantine(["b", "c"])
    assert struck(quarantine, MINUTE) == [False, False, True]
    assert quarantine.left_ns("b", now_ns=MINUTE) == FIRST_NS == 10 * MINUTE
    assert quarantine.left_ns("b", now_ns=MINUTE + FIRST_NS - 1) == 1
    assert quarantine.left_ns("b", now_ns=MINUTE + FIRST_NS) == 0
    assert quarantine.left_ns("c", now_ns=MINUTE) == 0
    assert "in quarantine for 10 min more, after 3 strikes; protocol" in quarantine.describe("b", now_ns=MINUTE)
    assert quarantine.describe("b", now_ns=MINUTE + FIRST_NS) == ""


def test_strikes_count_within_ten_minutes_only() -> None:
    quarantine = Quarantine(["b"])
    at = [0, WINDOW_NS // 2, WINDOW_NS + 1, WINDOW_NS + WINDOW_NS // 2]
    assert [quarantine.strike("b", "x", now_ns=one) for one in at] == [False, False, False, True]
    edge = Quarantine(["b"])
    assert [edge.strike("b", "x", now_ns=one) for one in (0, 0, WINDOW_NS)] == [False, False, True]


def test_each_quarantine_is_twice_as_long_up_to_a_day() -> None:
    quarantine, now_ns, lengths = Quarantine(["b"]), 0, []
    for _ in range(10):
        assert struck(quarantine, now_ns)[-1]
        lengths.append(quarantine.left_ns("b", now_ns=now_ns))
        now_ns += lengths[-1]
    assert lengths[:4] == [10 * MINUTE, 20 * MINUTE, 40 * MINUTE, 80 * MINUTE]
    assert lengths[-1] == LONGEST_NS == 24 * 60 * MINUTE


def test_a_day_of_good_conduct_makes_the_next_one_short_again() -> None:
    quarantine = Quarantine(["b"])
    struck(quarantine, 0)
    struck(quarantine, FIRST_NS)
    free_ns = FIRST_NS + 2 * FIRST_NS
    again = Quarantine(["b"])
    struck(again, 0)
    struck(again, FIRST_NS)
    assert struck(quarantine, free_ns + FORGIVEN_AFTER_NS)[-1]
    assert quarantine.left_ns("b", now_ns=free_ns + FORGIVEN_AFTER_NS) == 4 * FIRST_NS
    assert struck(again, free_ns + FORGIVEN_AFTER_NS + 1)[-1]
    assert again.left_ns("b", now_ns=free_ns + FORGIVEN_AFTER_NS + 1) == FIRST_NS


def test_what_is_found_during_a_quarantine_does_not_count() -> None:
    quarantine = Quarantine(["b"])
    struck(quarantine, 0)
    assert struck(quarantine, FIRST_NS - 1) == [False] * STRIKES
    assert struck(quarantine, FIRST_NS)[:2] == [False, False], "nor do the strikes that led to it"


def test_a_lifted_quarantine_forgets_everything() -> None:
    quarantine = Quarantine(["b"])
    assert not quarantine.lift("b")
    struck(quarantine, 0)
    assert quarantine.lift("b")
    assert quarantine.left_ns("b", now_ns=0) == 0
    assert struck(quarantine, 0) == [False, False, True]
    assert quarantine.left_ns("b", now_ns=0) == FIRST_NS
    assert not quarantine.lift("nobody")


def test_who_is_expelled_is_shut_out_until_the_ledger_says_otherwise() -> None:
    quarantine = Quarantine(["b", "c"])
    quarantine.expelled = frozenset({"b"})
    assert "an operator's order is in the ledger" in quarantine.describe("b", now_ns=10**18)
    assert quarantine.describe("c", now_ns=0) == ""
    assert not quarantine.lift("b"), "it has no strikes"
    quarantine.expelled = frozenset()
    assert quarantine.describe("b", now_ns=0) == ""


def test_strangers_are_not_counted() -> None:
    quarantine = Quarantine(["b"])
    assert struck(quarantine, 0, "mallory") == [False] * STRIKES
    assert quarantine.left_ns("mallory", now_ns=0) == 0


@given(st.lists(st.integers(0, 20 * MINUTE), max_size=40))
def test_nobody_is_shut_out_without_three_strikes_in_a_window(waits_ns: list[int]) -> None:
    quarantine, now_ns = Quarantine(["b"]), 0
    since: list[int] = []
    for wait_ns in waits_ns:
        now_ns += wait_ns
        if quarantine.left_ns("b", now_ns=now_ns):
            assert not quarantine.strike("b", "x", now_ns=now_ns)
            continue
        since.append(now_ns)
        is_out = quarantine.strike("b", "x", now_ns=now_ns)
        assert is_out == (len(since) >= STRIKES and now_ns - since[-STRIKES] <= WINDOW_NS)
        if is_out:
            since.clear()
