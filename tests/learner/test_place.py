"""Which region this is, before `attach`."""

import pytest

import diloco_node
from diloco_node.errors import LearnerError


def test_the_place_is_the_one_that_start_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_PLACE", "1/3")
    assert diloco_node.place() == (1, 3)
    monkeypatch.delenv("DILOCO_PLACE")
    assert diloco_node.place() == (0, 1)


@pytest.mark.parametrize("text", ["", "1", "3/3", "-1/3", "a/b", "1/"])
def test_a_place_that_nobody_wrote_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DILOCO_PLACE", text)
    with pytest.raises(LearnerError, match="INDEX/COUNT"):
        diloco_node.place()
