"""Seeds that once found something: what it was stays found."""

from __future__ import annotations

import pytest

from diloco_node.sim.run import simulate

FOUND = {
    249: "versions that overwrite what learners do: something always waits to be booked",
    695: "a reducer's stripes of a learner that died were taken for those of the next one, ballot after ballot",
    1594: "the same with three regions, before the first commit",
    469: "behind a base an entry names an older sum, after a new leader's election",
}


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_found_something_finds_nothing_any_more(seed: int) -> None:
    report = simulate(seed)
    assert report.is_good, (FOUND[seed], report.violations)
