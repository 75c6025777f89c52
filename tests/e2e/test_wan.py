"""The demo inside an emulated WAN: three regions in namespaces of their own, one cut off and back."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from diloco_node.lab.wan import emulation
from diloco_node.lab.wan.namespaces import namespaces_of
from tests.kit.commands import COMMAND, NO_FORK_SERVER, SMALL_MODEL

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        os.geteuid() != 0,
        reason="network namespaces need root: the demo on an emulated WAN is NOT tested on this machine",
    ),
]

TEXT = """
[regions.east]
egress = "200Mbit/s"
[regions.west]
egress = "100Mbit/s"
[regions.south]
egress = "200Mbit/s"
[default_link]
rtt = "40ms"
"""


def run_demo(file: Path, folder: Path, seconds: int) -> dict[str, Any]:
    """One demo with an outage: its report. Its namespaces are gone when it has ended."""
    with subprocess.Popen(
        [
            *(*COMMAND, "demo", "--wan", str(file), "--outage"),
            *("--seconds", str(seconds), "--folder", str(folder), "--json"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | NO_FORK_SERVER | SMALL_MODEL,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds + 600)
        finally:
            process.kill()
    assert process.returncode == 0, err[-4000:]
    assert namespaces_of(f"demo{process.pid}") == []
    report: dict[str, Any] = json.loads(out)
    return report


def check_what_always_holds(report: dict[str, Any]) -> None:
    """However busy the machine was."""
    assert report["equal_digests"]
    assert report["tokens"]["balanced"], report["tokens"]["faults"]


def has_shown_all(report: dict[str, Any], seconds: int) -> bool:
    """Whether the cut was long enough on this machine, and the rest of the training after it."""
    outage = report["outage"]
    assert (outage["region"], outage["seconds"]) == ("south", 0.2 * seconds)
    # It is in none of the rounds that the others committed meanwhile, but for those that were under way at the cut.
    ratios = {region["name"]: region["participation"] for region in report["regions"]}
    committed, in_flight_max = report["rounds_committed"], 2
    included = round(ratios[outage["region"]] * committed)
    assert included <= committed - outage["commits_of_others"] + in_flight_max
    return (
        outage["inner_steps"] > 0
        and outage["commits_of_others"] > in_flight_max
        and included > 0
        and outage["seconds_to_merge"] is not None
    )


def test_a_region_that_is_cut_off_trains_on_and_is_merged_again_after_the_heal(tmp_path: Path) -> None:
    if fault := emulation.emulation_fault():
        pytest.skip(f"the demo on an emulated WAN is NOT tested on this machine: {fault}")
    file = tmp_path / "three.toml"
    file.write_text(TEXT)
    shown = []
    for seconds in (20, 60, 180):  # a busy machine needs longer to come so far
        report = run_demo(file, tmp_path / f"run{seconds}", seconds)
        check_what_always_holds(report)
        if has_shown_all(report, seconds):
            return
        shown.append(report["outage"])
    raise AssertionError(f"outages that showed too little: {shown}")
