"""The demo's view: plain lines when not on a terminal, silence when asked for, no crash on what is not known yet."""

import io

import pytest

from diloco_node.cli.tables import COLUMNS, region_cells
from diloco_node.health.reading import human_bytes
from diloco_node.lab.demo.live import PLAIN_PERIOD_S, LiveView

STATUS = {
    "role": "leader",
    "learner": {"step": 499, "loss": 2.34567, "tokens_per_second": 12345.6},
    "rounds_committed": 12,
    "versions": [3, 4, 3],
    "wire_bytes_out": 1_234_567,
    "wire_bytes_in": 999,
    "reason": "waits for eu",
}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_234_567, "1.2 MB"),
        (999_940_000, "999.9 MB"),
        (5e9, "5.0 GB"),
        (7e15, "7000.0 TB"),
    ],
)
def test_bytes_are_shown_in_the_unit_that_fits(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_a_row_has_a_cell_for_each_column() -> None:
    cells = region_cells("us", STATUS)
    assert len(cells) == len(COLUMNS)
    assert dict(zip(COLUMNS, cells, strict=True)) == {
        "region": "us",
        "role": "leader",
        "step": "499",
        "loss": "2.346",
        "tokens/s": "12,346",
        "rounds": "12",
        "versions": "3-4",
        "sent": "1.2 MB",
        "received": "999 B",
        "now": "waits for eu",
    }


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"region": "us", "state": "starting"},
        {"learner": None, "versions": []},
        {"learner": {"step": 0, "loss": None, "tokens_per_second": None}},
    ],
)
def test_what_is_not_known_yet_is_a_dash(status: dict) -> None:
    cells = dict(zip(COLUMNS, region_cells("us", status), strict=True))
    assert (cells["loss"], cells["tokens/s"], cells["versions"]) == ("-", "-", "-")
    assert cells["role"] == "starting"


def test_a_loss_of_zero_is_a_loss() -> None:
    cells = dict(zip(COLUMNS, region_cells("us", {"learner": {"loss": 0.0, "tokens_per_second": 0.0}}), strict=True))
    assert (cells["loss"], cells["tokens/s"]) == ("0.000", "0")


def test_plain_lines_come_once_per_period() -> None:
    out = io.StringIO()
    view = LiveView("demo", is_quiet=False, stream=out)
    for elapsed_s in (0.0, 1.0, PLAIN_PERIOD_S - 0.01, PLAIN_PERIOD_S, PLAIN_PERIOD_S + 1):
        view.show(elapsed_s, [region_cells("us", STATUS), region_cells("eu", {})])
    view.line("a fact")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 * 2 + 1
    assert lines[0].split()[:3] == ["0.0s", "us", "role=leader"]
    assert lines[0].endswith("waits for eu")
    assert lines[-1] == "a fact"


def test_quiet_is_quiet() -> None:
    out = io.StringIO()
    view = LiveView("demo", is_quiet=True, stream=out)
    view.show(0.0, [region_cells("us", STATUS)])
    view.line("a fact")
    assert out.getvalue() == ""


@pytest.mark.parametrize(("width", "shows_bytes"), [(50, False), (80, True)])
def test_on_a_terminal_the_table_has_room_for_the_reason(
    width: int, shows_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    view = LiveView("demo of 2", is_quiet=False, stream=out)
    view.show(12.0, [region_cells("us", STATUS)])
    view.line("a fact")
    shown = out.getvalue()
    assert "demo of 2" in shown
    assert "12 s" in shown
    assert "leader" in shown
    assert "waits for eu" in shown
    assert ("1.2 MB" in shown) is shows_bytes
    assert "a fact" in shown


def test_versions_before_the_first_parameters_are_not_shown_as_numbers() -> None:
    column = COLUMNS.index("versions")
    assert region_cells("us-east", {"versions": [-1, -1]})[column] == "-"
    assert region_cells("us-east", {"versions": [0, 2]})[column] == "0-2"
