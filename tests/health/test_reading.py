"""Durations as people read them."""

import pytest

from diloco_node.health.reading import duration, number, rows, section, text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0 ms"), (0.25, "250 ms"), (4.5, "4.5 s"), (45, "45 s"), (119, "119 s"), (720, "12 min"), (12_600, "3.5 h")],
)
def test_a_duration_has_the_unit_that_fits(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_what_is_not_as_expected_is_not_there() -> None:
    document = {"a": True, "b": float("nan"), "c": 3, "d": "text", "e": [1, {"f": 1}], "g": {"h": 1}, "i": 10**400}
    assert [number(document, key) for key in ("a", "b", "c", "d", "i", "x")] == [None, None, 3.0, None, None, None]
    assert (text(document, "d"), text(document, "c")) == ("text", "")
    assert (rows(document, "e"), rows(document, "c")) == ([{"f": 1}], [])
    assert (section(document, "g"), section(document, "e")) == ({"h": 1}, {})
