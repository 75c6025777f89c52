"""Lines that repeat themselves are counted."""

from diloco_node.daemon.repeats import WINDOW_NS, Repeats, numberless


class Clock:
    now_ns = 5

    def __call__(self) -> int:
        return self.now_ns


def test_one_line_of_a_cause_in_a_window_and_then_how_many_there_were() -> None:
    clock = Clock()
    repeats = Repeats(clock)
    assert [repeats.is_new("refused", "b") for _ in range(500)] == [True, *[False] * 499]
    assert repeats.is_new("refused", "c"), "another peer is another cause"
    assert repeats.is_new("peer", "b"), "another kind, too"
    clock.now_ns += WINDOW_NS - 1
    assert repeats.end_window() == []
    clock.now_ns += 1
    assert repeats.end_window() == [("refused", 499)]
    assert repeats.is_new("refused", "b"), "a new window"
    clock.now_ns += WINDOW_NS
    assert repeats.end_window() == [], "nothing was held back in it"


def test_lines_that_all_differ_are_bounded_and_take_no_more_memory() -> None:
    clock = Clock()
    repeats = Repeats(clock, causes_max=20)
    assert sum(repeats.is_new("refused", f"{number}") for number in range(10_000)) == 20
    assert len(repeats._counts["refused"]) == 21
    assert repeats.is_new("committed", "1"), "what another kind says is not lost"
    clock.now_ns += WINDOW_NS
    assert repeats.end_window() == [("refused", 9_980)]


def test_numbers_are_no_cause_and_names_are() -> None:
    assert numberless("State of 123 bytes from us-4") == numberless("State of 4567 bytes from us-4")
    assert numberless("State of 123 bytes from us-4") != numberless("State of 123 bytes from us-5")
    assert numberless("b2: (-5, 1.5e9]") == "b2: (#, #]"
