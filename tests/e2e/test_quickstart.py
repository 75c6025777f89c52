"""The quickstart's three namespaces: the page's own commands, run as they stand."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.commands import NO_FORK_SERVER
from tests.kit.repository import ROOT

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        os.geteuid() != 0 or any(shutil.which(name) is None for name in ("ip", "unshare")),
        reason="namespaces need root, ip and unshare: the quickstart is NOT tested on this machine",
    ),
]

WAIT_S = 1800
APART = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Whatever the commands leave behind is gone with the last process of these namespaces."""


def page_commands() -> str:
    """What the page has in its fences marked `sh`."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))


def programs(folder: Path) -> Path:
    """`diloco-node` and `python` as an activated environment has them."""
    folder.mkdir()
    python = shlex.quote(sys.executable)
    for name, command in (("python", python), ("diloco-node", f"{python} -m diloco_node.main")):
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def test_three_namespaces_by_init_alone(tmp_path: Path) -> None:
    script = tmp_path / "page.sh"
    script.write_text(f"mkdir -p /run/netns\nmount -t tmpfs tmpfs /run/netns\n{page_commands()}\necho the end\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    env |= NO_FORK_SERVER | {"PATH": f"{programs(tmp_path / 'bin')}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*APART, "sh", "-e", str(script)],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            out = process.communicate(timeout=WAIT_S)[0]
        finally:
            process.kill()
    lab = tmp_path / "lab"
    logs = "".join(f"\n{path.name}: {path.read_text()[-2000:]}" for path in lab.glob("*.log"))
    assert process.returncode == 0, out[-4000:] + logs
    assert out.endswith("the end\n")
    assert "nobody listens there (connection refused)" in out  # the first doctor
    healthy = (lab / "doctor.txt").read_text()
    assert "nothing failed" in healthy
    for peer in ("south", "west"):
        assert f"peer-reachable: {peer} answers at 10.99.0." in healthy
        assert f"settings-equal: {peer} has the same settings" in healthy
        assert f"packets of 1500 bytes reach {peer} whole" in healthy
    digests = re.findall(r"^([0-9a-f]{64})  machines/(\w+)/state/\2/final.safetensors$", out, re.MULTILINE)
    assert {region for _, region in digests} == {"east", "west", "south"}
    assert len({digest for digest, _ in digests}) == 1
