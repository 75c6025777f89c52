"""A path that swallows full packets, planted with a switch between two namespaces."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from diloco_node.transport.authority import init_run
from tests.kit.commands import COMMAND
from tests.kit.repository import ROOT

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root: a path with a small MTU is NOT tested here"),
]

APART = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
PROGRAM = shlex.join(COMMAND)
SCRIPT = f"""
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns
ip link add switch type bridge
ip link set switch up
for at in 1 2; do
  ip netns add at$at
  ip link add at$at type veth peer name eth0 netns at$at
  ip link set at$at master switch up
  ip -n at$at address add 10.98.0.$at/24 dev eth0
  ip -n at$at link set eth0 gso_max_segs 1 up
  ip -n at$at link set lo up
done
ip netns exec at2 {PROGRAM} measure serve --region there > serve.log 2>&1 &
until grep -q there serve.log; do sleep 0.2; done
ip netns exec at1 {PROGRAM} doctor --region here --json > whole.json || true
ip link set at2 mtu 1400
ip netns exec at1 {PROGRAM} doctor --region here --json > swallowed.json || true
"""


def mtu(file: Path) -> dict[str, str]:
    checks = json.loads(file.read_text())["checks"]
    matches = [check for check in checks if check["check"] == "mtu"]
    assert len(matches) == 1, checks
    return dict(matches[0])


def test_full_packets_that_vanish_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[run]\nid = "try"\n[regions.here]\naddress = "10.98.0.1:7400"\n[regions.there]\naddress = "10.98.0.2:7400"\n'
    )
    init_run(tmp_path / "certs", "try", ["here", "there"])
    env = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    process = subprocess.run(
        [*APART, "sh", "-e", "-c", SCRIPT],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    whole, lossy = mtu(tmp_path / "whole.json"), mtu(tmp_path / "swallowed.json")
    assert (whole["mark"], whole["text"]) == ("ok", "packets of 1500 bytes reach there whole")
    assert lossy["mark"] == "failed"
    assert "packets of 1500 bytes do not reach there" in lossy["text"]
