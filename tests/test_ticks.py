"""Ticks: waits of one period end together, whenever they begin."""

import pytest

from diloco_node import ticks


@pytest.mark.parametrize(("passed_s", "wait_s"), [(0.0, 1.0), (0.3, 0.7), (0.9, 0.1), (0.997, 1.003), (7.25, 0.75)])
def test_a_wait_ends_at_the_next_multiple_of_its_period(
    passed_s: float, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticks.time, "monotonic", lambda: ticks._BEGAN_S + passed_s)
    assert ticks.to_tick_s(1.0) == pytest.approx(wait_s, abs=1e-6), "one that fired early waits for the tick after"
    shorter_s = ticks.to_tick_s(0.2)
    assert ticks.GRAIN_S < shorter_s <= 0.2 + ticks.GRAIN_S
    assert (passed_s + shorter_s) / 0.2 == pytest.approx(round((passed_s + shorter_s) / 0.2), abs=1e-4)
