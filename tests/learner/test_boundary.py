"""What ranks agree on at a boundary, beside what `attach` shows of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.learner.boundary import StepBoundaries


@pytest.mark.parametrize(("others", "are_idle"), [(b"1", True), (b"", False)])
def test_ranks_are_idle_only_together(others: bytes, are_idle: bool) -> None:
    """Else one would save the last checkpoint before a merge and the others after it: files of two moments."""
    ranks = SimpleNamespace(all_bytes=lambda own: [own, others])
    boundaries: Any = SimpleNamespace(ranks=ranks, checkpoints=SimpleNamespace(is_idle=True))
    assert StepBoundaries.are_idle(boundaries) is are_idle
    boundaries.checkpoints.is_idle = False
    assert not StepBoundaries.are_idle(boundaries)


@pytest.mark.parametrize("is_placed", [False, True])
def test_copies_are_compared_with_what_attach_has_written_and_not_with_a_scripts_own_start(is_placed: bool) -> None:
    """Ranks that are stopped before may hold a random start each."""
    begun: list[bool] = []
    boundaries: Any = SimpleNamespace(
        cross=lambda _: SimpleNamespace(is_stopping=True),
        ranks=SimpleNamespace(size=2),
        terminate=SimpleNamespace(is_holding=False),
        fragments=SimpleNamespace(is_placed=is_placed, replicas=SimpleNamespace(begin=lambda: begun.append(True))),
        _is_without_data=lambda: False,
    )
    assert StepBoundaries.place(boundaries).is_stopping
    assert bool(begun) is is_placed
    assert boundaries.terminate.is_holding, "an exit of the script's waits from now on"
