"""lab/chaos/fault_script.py: what is written is read again, and nothing else is taken."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.errors import ConfigError
from diloco_node.lab.chaos import fault_script
from diloco_node.lab.chaos.fault_plan import DAEMON_ONLY, KINDS, LASTING, VICTIMS, FaultPlan, FaultTarget, PlannedFault
from diloco_node.lab.chaos.fault_script import read_script, script_text
from diloco_node.numeric import NS_PER_S
from tests.kit.repository import ROOT

REGIONS = ("us-east", "us-west")
MS = NS_PER_S // 1000


@st.composite
def faults(draw: st.DrawFn) -> PlannedFault:
    kind = draw(st.sampled_from((*KINDS, "wipe")))
    parts = ["daemon", "region"] if kind in DAEMON_ONLY else ["region"] if kind in ("notice", "wipe") else VICTIMS
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


def test_the_example_lets_four_regions_grow_to_six_and_shrink_to_three() -> None:
    founders = ("us-east", "us-west", "eu-west", "ap-east")
    plan = read_script(ROOT / "examples" / "grow_and_shrink.jsonl", founders)
    assert plan.joiners == ("us-central", "eu-north")
    assert [len(plan.members(founders, at_s * NS_PER_S)) for at_s in (0, 3, 6, 45, 90)] == [4, 5, 6, 5, 3]
    assert plan.members(founders, 90 * NS_PER_S) == ["eu-west", "us-central", "us-east"]
    assert plan == plan.until(80 * NS_PER_S), "the last 10 s of the demo are calm"


def test_the_example_of_two_sites_hits_each_in_each_way() -> None:
    plan = read_script(ROOT / "examples" / "two_sites.jsonl", ("us-east", "us-west"))
    assert {fault.target.region for fault in plan.faults} == {"us-east", "us-west"}
    assert {fault.kind for fault in plan.faults} == {"partition", "kill", "pause", "wipe"}
    assert plan == plan.until(280 * NS_PER_S), "the last 10 s of the demo are calm"


def test_the_example_lets_four_regions_grow_to_ten_with_three_voters_and_shrink_to_three() -> None:
    founders = ("us-east", "us-west", "eu-west", "ap-east")
    plan = read_script(ROOT / "examples" / "ten_regions.jsonl", founders)
    assert [len(plan.members(founders, at_s * NS_PER_S)) for at_s in (0, 46, 74, 105)] == [4, 10, 10, 3]
    assert [fault.kind for fault in plan.faults if fault.kind in ("promote", "demote")] == ["demote"]
    assert plan.members(founders, 105 * NS_PER_S) == ["eu-west", "us-east", "us-west"], "the three voters"


def line(at_s: float, order: str, target: str) -> str:
    return json.dumps({"at_seconds": at_s, "do": order, "target": target})


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([line(5, "promote", "eu")], "line 1: there is no region 'eu'"),
        ([line(1, "join", "EU")], "line 1: 'EU' is no region's name"),
        ([line(1, "join", "x" * 64)], "line 1: 'x*' is no region's name"),
        ([line(1, "join", "us-east")], "line 1: us-east is a region of the demo already"),
        ([line(1, "join", "eu"), line(2, "join", "eu")], "line 2: eu is a region of the demo already"),
        ([line(1, "wipe", "us-east.daemon")], "line 1: wipe is given to a whole region: name us-east"),
    ],
)
def test_a_script_in_which_a_region_can_not_do_that_is_refused_with_the_line(
    lines: list[str], reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "script"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=reason):
        read_script(file, REGIONS)


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
