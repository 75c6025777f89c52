"""lab/chaos/fault_script.py: what is written is read again, and nothing else is taken."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.errors import ConfigError
from diloco_node.lab.chaos import fault_script
from diloco_node.lab.chaos.fault_plan import DAEMON_ONLY, KINDS, LASTING, VICTIMS, FaultPlan, FaultTarget, PlannedFault
from diloco_node.lab.chaos.fault_script import read_script, script_text
from diloco_node.numeric import NS_PER_S

REGIONS = ("us-east", "us-west")
MS = NS_PER_S // 1000


@st.composite
def faults(draw: st.DrawFn) -> PlannedFault:
    kind = draw(st.sampled_from(KINDS))
    parts = ["daemon", "region"] if kind in DAEMON_ONLY else ["region"] if kind == "notice" else VICTIMS
    part = draw(st.sampled_from(parts))
    lasts_ms = draw(st.integers(1, 3_600_000)) if kind in LASTING else 0
    target = FaultTarget(draw(st.sampled_from(REGIONS)), part)
    return PlannedFault(draw(st.integers(0, 86_400_000)) * MS, kind, target, lasts_ms * MS)


@given(st.lists(faults(), max_size=20))
def test_a_plan_that_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[PlannedFault]
) -> None:
    ordered = tuple(sorted(drawn, key=lambda one: (one.at_ns, one.target, one.kind, one.lasts_ns)))
    file = tmp_path_factory.mktemp("script") / "script.jsonl"
    file.write_text(script_text(FaultPlan(ordered)))
    read = read_script(file, REGIONS).faults
    assert sorted(read, key=lambda one: (one.at_ns, one.target, one.kind, one.lasts_ns)) == list(ordered)
    assert [one.at_ns for one in read] == sorted(one.at_ns for one in read)


def test_a_script_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(
        '# comes second\n{"at_seconds": 3, "do": "pause", "target": "us-west"}\n\n'
        '{"at_seconds": 1.5, "do": "kill", "target": "us-east.learner"}\n'
    )
    first, second = read_script(file, REGIONS).faults
    assert first == PlannedFault(1500 * MS, "kill", FaultTarget("us-east", "learner"))
    assert second == PlannedFault(3000 * MS, "pause", FaultTarget("us-west"), 5 * NS_PER_S)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "kill us-east",
        '{"at_seconds": 1, "do": "kill"}',
        '{"at_seconds": 1, "do": "kill", "target": "us-east", "who": 1}',
        '{"at_seconds": "1", "do": "kill", "target": "us-east"}',
        '{"at_seconds": true, "do": "kill", "target": "us-east"}',
        '{"at_seconds": -1, "do": "kill", "target": "us-east"}',
        '{"at_seconds": NaN, "do": "kill", "target": "us-east"}',
        '{"at_seconds": Infinity, "do": "kill", "target": "us-east"}',
        '{"at_seconds": 1' + "0" * 400 + ', "do": "kill", "target": "us-east"}',
        '{"at_seconds": 1' + "0" * 9000 + ', "do": "kill", "target": "us-east"}',
        '{"at_seconds": 1, "do": "kill", "target": "eu-west"}',
        '{"at_seconds": 1, "do": "kill", "target": ["us-east"]}',
        '{"at_seconds": 1, "do": "kill", "target": "us-east", "seconds": 2}',
        '{"at_seconds": 1, "do": "pause", "target": "us-east", "seconds": 0}',
        '{"at_seconds": 1, "do": "disk", "target": "us-east.learner"}',
        '{"at_seconds": 1, "do": "burn", "target": "us-east"}',
        "[" * 100_000,
    ],
)
def test_lines_that_are_no_fault_are_named_and_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "script"
    file.write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match=r"line 2"):
        read_script(file, REGIONS)


def test_a_script_that_is_missing_too_long_or_no_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_script(tmp_path / "none", REGIONS)
    file = tmp_path / "script"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="can't be read"):
        read_script(file, REGIONS)
    file.write_text('{"at_seconds": 1, "do": "kill", "target": "us-east"}\n' * 3)
    monkeypatch.setattr(fault_script, "FAULTS_MAX", 2)
    with pytest.raises(ConfigError, match="3 faults"):
        read_script(file, REGIONS)
    monkeypatch.setattr(fault_script, "SCRIPT_BYTES_MAX", 10)
    with pytest.raises(ConfigError, match="longer than"):
        read_script(file, REGIONS)
