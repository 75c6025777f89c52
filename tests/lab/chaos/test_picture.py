"""lab/chaos/picture.py: well-formed, without script, and what it shows lies where it belongs."""

import re
from xml.etree import ElementTree

import pytest

from diloco_node.lab.chaos.executor import StruckFault
from diloco_node.lab.chaos.fault_plan import FaultTarget, PlannedFault
from diloco_node.lab.chaos.picture import COLOURS, LEFT, RIGHT, WIDTH, draw_life
from diloco_node.lab.chaos.story import LifeSpan, LifeState, MergeMember, TimedMerge
from diloco_node.numeric import NS_PER_S

S = NS_PER_S
SVG = "{http://www.w3.org/2000/svg}"


def struck(at_s: int, region: str, pids: tuple[int, ...] = (5,)) -> StruckFault:
    return StruckFault(at_s * S, PlannedFault(at_s * S, "kill", FaultTarget(region, "learner")), pids)


def drawn() -> ElementTree.Element:
    spans = {
        "us-<east>": [LifeSpan(0, 50 * S, LifeState.TRAINING), LifeSpan(50 * S, 100 * S, LifeState.DEAD)],
        "b&b": [LifeSpan(0, 100 * S, LifeState.ALONE)],
    }
    merges = [TimedMerge(at * S, {"us-<east>": MergeMember(1, 1, 1.0)}) for at in (-1, 10, 25, 101)]
    faults = [struck(50, "us-<east>"), struck(60, "us-<east>", ()), struck(200, "us-<east>"), struck(1, "elsewhere")]
    return ElementTree.fromstring(draw_life('4 "regions" & <more>', spans, merges, faults, end_ns=100 * S))


def test_it_is_well_formed_and_has_no_script() -> None:
    root = drawn()
    assert root.tag == f"{SVG}svg"
    assert root.findtext(f"{SVG}title") == '4 "regions" & <more>'
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "title", "rect", "text", "path", "g"}
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"us-<east>", "b&b", "0 s", "100 s"} <= texts


def test_spans_lie_at_their_times() -> None:
    bands = [one for one in drawn().iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    found = [
        (one.findtext(f"{SVG}title"), one.get("fill"), float(one.get("x", 0)), float(one.get("width", 0)))
        for one in bands
    ]
    half = (WIDTH - LEFT - RIGHT) / 2
    assert found == [
        ("training for 50.0 s", COLOURS[LifeState.TRAINING], LEFT, half),
        ("dead for 50.0 s", COLOURS[LifeState.DEAD], LEFT + half, half),
        ("training without its daemon for 100.0 s", COLOURS[LifeState.ALONE], LEFT, 2 * half),
    ]


def test_merges_and_faults_of_the_window_are_marked() -> None:
    root = drawn()
    ticks = [one.get("d", "") for one in root.iter(f"{SVG}path") if one.get("stroke-width") == "0.6"]
    places = [[float(place) for place in re.findall(r"M([\d.]+)", path)] for path in ticks]
    scale = (WIDTH - LEFT - RIGHT) / 100
    assert places == [[pytest.approx(LEFT + 10 * scale), pytest.approx(LEFT + 25 * scale, abs=0.06)]]
    assert [one.findtext(f"{SVG}title") for one in root.iter(f"{SVG}g")] == ["kill us-<east>.learner at 50.0 s"]


@pytest.mark.parametrize("end_s", [1, 30, 120, 300, 3600, 86_400, 30 * 86_400])
def test_a_run_of_any_length_has_some_marks_on_its_axis(end_s: int) -> None:
    root = ElementTree.fromstring(draw_life("t", {}, [], [], end_ns=end_s * S))
    marks = [one for one in root.iter(f"{SVG}text") if re.fullmatch(r"\d+ s", one.text or "")]
    assert 1 < len(marks) <= 32
