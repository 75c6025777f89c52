"""Which limits continue a run after its end."""

from dataclasses import replace

import pytest

from diloco_node.core.rounds.extension import extension, extension_fault
from diloco_node.core.types import ExtendedBody, FinishedBody
from tests.kit.rounds_kit import SETTINGS

END = FinishedBody((3, 4), "the median learner made 400 of 400 steps", steps_max=400)


@pytest.mark.parametrize(
    ("before", "after", "is_wider"),
    [
        ((400, 0), (800, 0), True),
        ((400, 0), (0, 0), True),
        ((400, 9_000), (400, 10_000), True),
        ((400, 9_000), (0, 9_000), True),
        ((0, 0), (500, 0), True),
        ((400, 0), (400, 0), False),
        ((400, 0), (399, 0), False),
        ((400, 9_000), (800, 8_000), False),
    ],
)
def test_limits_must_differ_and_none_may_shrink(
    before: tuple[int, int], after: tuple[int, int], is_wider: bool
) -> None:
    end = FinishedBody((1,), "x", *before)
    assert (extension_fault(end, ExtendedBody(*after)) == "") is is_wider


def test_settings_continue_a_run_that_is_over_and_no_other() -> None:
    wider = replace(SETTINGS, steps_max=800)
    assert extension(END, wider) == ExtendedBody(800, 0)
    assert extension(END, replace(SETTINGS, steps_max=400)) is None
    assert extension(None, wider) is None
    assert extension_fault(None, ExtendedBody(800, 0)) == "an extension of a run that is not over"
