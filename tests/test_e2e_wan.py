"""The demo inside an emulated WAN: three regions in namespaces of their own, one cut off and back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_node.wan import emulation
from diloco_node.wan.namespaces import existing

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.wan,
    pytest.mark.timeout(300),
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


def test_a_region_that_is_cut_off_trains_on_and_holds_the_same_bytes_after_the_heal(tmp_path: Path) -> None:
    choice = emulation.choose_backend()
    if choice.backend == "none":
        pytest.skip(f"the demo on an emulated WAN is NOT tested on this machine: {choice.why}")
    file, folder = tmp_path / "three.toml", tmp_path / "run"
    file.write_text(TEXT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "diloco_node.cli.main", "demo", "--wan", str(file), "--outage"),
            *("--seconds", "20", "--folder", str(folder), "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    wan, outage = report["wan"], report["outage"]
    assert wan["backend"] == choice.backend
    assert len(wan["pairs"]) == 6
    for pair in wan["pairs"]:
        assert pair["rtt_ms"] == 40
        assert 39.5 <= pair["rtt_measured_ms"] < 45, "the machine is too busy to answer a ping in time"
        assert pair["rate_measured_bits_per_s"] == pytest.approx(pair["rate_bits_per_s"], rel=0.1)
    assert outage["region"] in {"east", "west", "south"}
    assert 3.5 < outage["seconds"] < 12
    assert outage["inner_steps"] > 0
    assert outage["commits_of_others"] > 0
    # It is in none of the rounds that the others committed meanwhile, but for those that were under way at the cut.
    ratios = {region["name"]: region["participation"] for region in report["regions"]}
    committed, in_flight_max = report["rounds_committed"], 2
    included = round(ratios[outage["region"]] * committed)
    assert 0 < included <= committed - outage["commits_of_others"] + in_flight_max
    assert outage["seconds_to_equal_digests"] is not None
    assert set(outage["val_loss_at_heal"]) == {"east", "west", "south"}
    assert report["equal_digests"]
    assert report["tokens"]["balanced"], report["tokens"]["faults"]
    assert not [name for name in existing() if name.startswith("diloco-demo") and name.split("-")[2] in ratios]
