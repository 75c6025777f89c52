"""lab/chaos/fault_plan.py: a storm follows from its seed, is as dense as asked for, and strikes everyone alike."""

import math
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.errors import ConfigError
from diloco_node.lab.chaos.fault_plan import (
    KINDS,
    LASTING,
    LASTS_S_MAX,
    PARTS,
    REGION,
    VICTIMS,
    FaultPlan,
    FaultTarget,
    PlannedFault,
    check_fault,
    draw_gap,
    draw_one,
    parse_target,
    storm,
)
from diloco_node.numeric import NS_PER_S

REGIONS = ("us-west", "eu-west", "ap-east", "us-east")


def drawn(seed: int = 7, *, mtbf_s: float = 5.0, end_s: float = 300.0, victims: tuple[str, ...] = VICTIMS) -> FaultPlan:
    return storm(REGIONS, seed=seed, mtbf_ns=int(mtbf_s * NS_PER_S), end_ns=int(end_s * NS_PER_S), victims=victims)


def test_the_same_seed_draws_the_same_storm_whatever_the_order_of_names() -> None:
    again = storm(
        sorted(REGIONS), seed=7, mtbf_ns=5 * NS_PER_S, end_ns=300 * NS_PER_S, victims=tuple(reversed(VICTIMS))
    )
    assert again == drawn()
    assert drawn(8) != drawn()


def test_another_process_draws_the_same_storm() -> None:
    """Nothing in it hangs on the order of a set of texts."""
    code = (
        "from diloco_node.lab.chaos.fault_plan import storm, VICTIMS\n"
        f"print(storm({REGIONS!r}, seed=7, mtbf_ns=5 * 10**9, end_ns=300 * 10**9))"
    )
    for seed in "12":
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == str(drawn())


def test_times_are_those_of_independent_failures() -> None:
    """Mean of the gaps, their spread, and how many are shorter than half the mean: those of an exponential law."""
    faults = drawn(3, mtbf_s=2.0, end_s=20_000.0).faults
    times = [fault.at_ns / NS_PER_S for fault in faults]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(2.0, rel=0.05)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert spread == pytest.approx(2.0, rel=0.07)
    assert sum(gap < 1.0 for gap in gaps) / len(gaps) == pytest.approx(1 - math.exp(-0.5), abs=0.02)
    assert times == sorted(times)
    assert times[-1] < 20_000.0


def test_every_region_and_every_victim_is_struck_alike() -> None:
    faults = drawn(1, mtbf_s=1.0, end_s=8000.0).faults
    found = Counter((fault.target.region, fault.target.part) for fault in faults)
    assert set(found) == {(region, part) for region in REGIONS for part in VICTIMS}
    expected = len(faults) / len(found)
    assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in found.values()), found
    assert {fault.kind for fault in faults} == {"kill"}


@given(victims=st.sets(st.sampled_from(VICTIMS), min_size=1), seed=st.integers(0, 1000))
def test_only_the_victims_asked_for_are_struck(victims: set[str], seed: int) -> None:
    faults = drawn(seed, mtbf_s=1.0, end_s=60.0, victims=tuple(sorted(victims))).faults
    assert {fault.target.part for fault in faults} <= victims


def test_nothing_begins_or_lasts_beyond_the_end() -> None:
    target = FaultTarget("us-east")
    plan = FaultPlan(
        (PlannedFault(1, "kill", target), PlannedFault(5, "pause", target, 9), PlannedFault(8, "kill", target))
    )
    assert plan.until(8).faults == (PlannedFault(1, "kill", target), PlannedFault(5, "pause", target, 3))


@pytest.mark.parametrize(
    "wrong",
    [
        {"victims": ("daemons",)},
        {"victims": ()},
        {"mtbf_ns": 0},
        {"regions": ()},
        {"mtbf_ns": 1},
    ],
)
def test_a_storm_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    asked = {"regions": REGIONS, "seed": 1, "mtbf_ns": NS_PER_S, "end_ns": 60 * NS_PER_S, **wrong}
    with pytest.raises(ConfigError):
        storm(asked.pop("regions"), **asked)  # type: ignore[arg-type]


def test_gaps_and_choices_are_those_the_simulator_always_drew() -> None:
    """Its traces of a seed stay what they were."""
    rng = random.Random(5)
    assert [draw_gap(rng, 7.5) for _ in range(3)] == [7.314370269482953, 10.154778087594726, 11.892674761305576]
    assert "".join(draw_one(rng, {"a": 5, "b": 1, "c": 3}) for _ in range(20)) == "cccaacbcaaaabaaaccac"


def test_targets_are_a_region_or_one_of_its_parts() -> None:
    assert parse_target("us-east", REGIONS) == FaultTarget("us-east")
    for part in PARTS:
        assert parse_target(f"us-east.{part}", REGIONS) == FaultTarget("us-east", part)
        assert str(FaultTarget("us-east", part)) == f"us-east.{part}"
    assert parse_target("dc.1", ["dc.1"]) == FaultTarget("dc.1")
    assert parse_target("dc.1.daemon", ["dc.1"]) == FaultTarget("dc.1", "daemon")


@pytest.mark.parametrize("text", ["us", "us-east.", ".daemon", "us-east.region", "us-east.disk", "", "us.east.daemon"])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_target(text, REGIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_lasts_if_its_kind_does(kind: str) -> None:
    daemon = FaultTarget("us-east", REGION if kind == "notice" else "daemon")
    lasts = kind in LASTING
    check_fault(PlannedFault(0, kind, daemon, NS_PER_S if lasts else 0))
    for lasts_ns in (0, -1, int(LASTS_S_MAX + 1) * NS_PER_S) if lasts else (1, -1):
        with pytest.raises(ConfigError):
            check_fault(PlannedFault(0, kind, daemon, lasts_ns))


@pytest.mark.parametrize("part", ["learner", "supervisor"])
def test_links_and_disk_are_the_daemons(part: str) -> None:
    for kind in ("partition", "disk"):
        with pytest.raises(ConfigError, match=r"us-east\.daemon"):
            check_fault(PlannedFault(0, kind, FaultTarget("us-east", part), NS_PER_S))


def test_unknown_kinds_and_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no fault"):
        check_fault(PlannedFault(0, "reboot", FaultTarget("us-east")))
    with pytest.raises(ConfigError, match="must lie between"):
        check_fault(PlannedFault(-1, "kill", FaultTarget("us-east")))


def test_a_storm_of_notices_takes_whole_machines() -> None:
    plan = storm(REGIONS, seed=7, mtbf_ns=5 * NS_PER_S, end_ns=300 * NS_PER_S, notice_ns=30 * NS_PER_S)
    assert {(fault.kind, fault.target.part, fault.lasts_ns) for fault in plan.faults} == {
        ("notice", REGION, 30 * NS_PER_S)
    }
    assert {fault.target.region for fault in plan.faults} == set(REGIONS)
    for fault in plan.faults:
        check_fault(fault)
    with pytest.raises(ConfigError, match="notice is given to a whole region: name eu"):
        check_fault(PlannedFault(0, "notice", FaultTarget("eu", "daemon"), NS_PER_S))


def test_a_storm_strikes_the_members_of_each_moment() -> None:
    joins, leaves = (
        PlannedFault(100 * NS_PER_S, kind, FaultTarget(name)) for kind, name in (("join", "new"), ("leave", "us-east"))
    )
    plan = storm(
        REGIONS, seed=7, mtbf_ns=NS_PER_S, end_ns=200 * NS_PER_S, victims=VICTIMS, script=FaultPlan((joins, leaves))
    )
    struck = Counter((fault.target.region, fault.at_ns >= joins.at_ns) for fault in plan.faults)
    assert struck["new", True] > 5 < struck["us-east", False]
    assert struck["new", False] == struck["us-east", True] == 0
    assert len(plan.faults) > 150, "it is as dense as asked for, however many there are"
