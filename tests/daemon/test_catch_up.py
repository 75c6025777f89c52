"""daemon/catch_up.py: a joiner that gets less than the run's rounds need is told so, with what would help."""

from collections.abc import Sequence

import pytest

from diloco_node.core.events import Note
from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.core.types import RunSettings
from diloco_node.daemon.catch_up import WINDOW_S, CatchUp
from diloco_node.daemon.console import LINE_CHARS_MAX
from diloco_node.numeric import NS_PER_S

FRAGMENTS = 2
POLL_S = 2
MANIFEST = build_manifest([TensorSpec(f"layers.{at}.w", (1000,)) for at in range(FRAGMENTS)], FRAGMENTS)


class Joiner:
    """A region that looks every POLL_S while the run takes each fragment `pace` versions further."""

    def __init__(self, *, pace: int = 1, ingress: int | None = None) -> None:
        self.catch_up = CatchUp(MANIFEST, RunSettings())
        self.ingress, self.pace = ingress, pace
        self.now_s = self.bytes_in = 0
        self.version = 1000
        self.held = [-1] * FRAGMENTS

    def look(self, *, received: int, seconds: float = POLL_S, is_counted: bool = False, gain: int = 0) -> list[Note]:
        """Look for so long; `received` bytes and `gain` versions come between two looks."""
        notes = []
        for _ in range(int(seconds) // POLL_S):
            self.now_s += POLL_S
            self.version += self.pace
            self.bytes_in += received
            self.held = [held + gain for held in self.held]
            positions: Sequence[Sequence[int]] = [[self.version - 1] * FRAGMENTS, [self.version] * FRAGMENTS]
            note = self.catch_up.look(
                positions,
                self.held,
                is_counted=is_counted,
                bytes_in=self.bytes_in,
                ingress=self.ingress,
                now_ns=self.now_s * NS_PER_S,
            )
            notes += [] if note is None else [note]
        return notes


@pytest.mark.parametrize(
    ("ingress", "remedy"),
    [
        (50, "raise budget.ingress (400 bit/s) or "),
        (None, "widen its line, free its processor or "),
        (10**6, "widen its line, free its processor or "),
    ],
)
def test_a_line_that_is_narrower_than_the_rounds_is_told_once_with_the_remedy(ingress: int | None, remedy: str) -> None:
    joiner = Joiner(ingress=ingress)
    (note,) = joiner.look(received=100, seconds=3 * WINDOW_S)
    assert note.is_alarm
    assert "rounds behind, the gap grows: rounds need " in note.text
    assert f" here, 400 bit/s arrive; so it never joins: {remedy}`config set rounds.sync_every`" in note.text
    assert len(f"does not merge yet: {joiner.catch_up.text}") <= LINE_CHARS_MAX, "else the terminal cuts the remedy off"


def test_a_wide_line_is_no_alarm_while_the_state_is_on_its_way() -> None:
    """The gap in rounds grows until the first fragment is there: bytes say whether it will close."""
    joiner = Joiner()
    assert joiner.look(received=10**6, seconds=WINDOW_S // 2) == []
    assert joiner.catch_up.text == f"{FRAGMENTS * joiner.version} rounds behind", "no verdict before a window"
    assert joiner.look(received=10**6, seconds=2 * WINDOW_S) == []
    assert "the gap grows" in joiner.catch_up.text
    assert "4.00 Mbit/s arrive" in joiner.catch_up.text
    assert "never" not in joiner.catch_up.text


def test_a_gap_that_closes_and_the_end_of_the_trouble_are_told() -> None:
    joiner = Joiner()
    assert [note.is_alarm for note in joiner.look(received=100, seconds=2 * WINDOW_S)] == [True]
    (note,) = joiner.look(received=10**6, seconds=2 * WINDOW_S, gain=5)
    assert note.text == "the gap to the run grows no more"
    assert "the gap closes" in joiner.catch_up.text
    joiner.held = [joiner.version] * FRAGMENTS
    assert joiner.look(received=100) == []
    assert joiner.catch_up.text == ""


def test_a_region_whose_folder_counts_and_a_run_that_has_not_begun_say_nothing() -> None:
    joiner = Joiner()
    assert joiner.look(received=0, seconds=3 * WINDOW_S, is_counted=True) == []
    assert joiner.catch_up.text == ""
    joiner.version, joiner.pace = 0, 0
    assert joiner.look(received=0, seconds=3 * WINDOW_S) == []
    assert joiner.catch_up.text == ""
