"""The unit of a region for real: systemd starts two regions, keeps them, and stops them.

In namespaces on this machine. Not real: it is one machine for both regions, and its manager is one of a user, which the
test starts. So the unit runs without User= and PrivateTmp=.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diloco_node.cli.admin_client import ask_in
from diloco_node.errors import ConfigError
from diloco_node.transport.authority import init_run
from tests.kit import service_host
from tests.kit.repository import ROOT, module_command
from tests.kit.waiting import until

# Alone: control groups that are new when it ends are taken for its own.
pytestmark = [pytest.mark.system, pytest.mark.alone, pytest.mark.timeout(600)]

RUN_TOML = """
[run]
id = "try"
[model]
layers = 1
dim = 16
heads = 2
context = 16
batch = 2
step_time_min = "50ms"
[rounds]
fragments = 2
sync_every = 4
[log]
format = "json"
[regions.eu]
address = "127.0.0.1:17400"
admin_port = 17401
[regions.us]
address = "127.0.0.1:17402"
admin_port = 17403
"""
wait = partial(until, within_s=240.0, every_s=0.5)


def test_a_run_of_two_regions_is_kept_by_systemd(tmp_path: Path) -> None:
    if reason := service_host.missing():
        pytest.skip(f"NOT TESTED: {reason}")
    with service_host.cgroups_kept():
        words = service_host.command_in(tmp_path, [*module_command(scenario), str(tmp_path)])
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=550)
    if done.returncode == 77:
        pytest.skip(f"NOT TESTED: systemd does not start in a namespace here: {done.stderr[-500:]}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def scenario(folder: Path) -> None:
    """Runs on the machine of the test."""
    places = {"eu": folder / "eu-machine", "us": folder / "us-machine"}
    init_run(folder / "certs", "try", list(places))
    program = folder / "diloco-node"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} DILOCO_PYTHON=1 exec {sys.executable} -m diloco_node.main "$@"\n')
    program.chmod(0o755)
    for name, place in places.items():
        (place / "certs").mkdir(parents=True)
        (folder / "certs" / name).rename(place / "certs" / name)
        (place / "run.toml").write_text(RUN_TOML)
        install_unit(folder, name, place, program)
    systemctl("daemon-reload")
    systemctl("start", *(unit(name) for name in places))
    assert shown("eu")["ActiveState"] == "active", "it says READY=1 itself, so `start` has waited for it"
    wait(lambda: all(rounds(place, name) > 2 for name, place in places.items()), "both regions merge")
    # A supervisor that is killed is started again; SIGTERM is a clean end.
    first = shown("eu")["MainPID"]
    systemctl("kill", "--kill-whom=main", "--signal=KILL", unit("eu"))
    wait(lambda: shown("eu")["MainPID"] not in ("0", first), "systemd starts it again")
    wait(lambda: shown("eu")["ActiveState"] == "active", "it is up again")
    before = rounds(places["us"], "us")
    wait(lambda: rounds(places["us"], "us") > before, "merging goes on")
    pid = shown("us")["MainPID"]
    systemctl("start", unit("us"))
    assert shown("us")["MainPID"] == pid, "a region that runs goes on"
    systemctl("stop", *(unit(name) for name in places))
    for name, place in places.items():
        assert (shown(name)["ActiveState"], shown(name)["Result"]) == ("inactive", "success")
        lines = (place / "state" / name / "logs" / "daemon.log").read_text().splitlines()
        assert "started" in [json.loads(line)["event"] for line in lines]
        assert (place / "state" / name / "report.json").exists()


def install_unit(folder: Path, region: str, place: Path, program: Path) -> None:
    """With all of its limits: sockets, shared memory, compiled kernels and the learner work in it."""
    text = (ROOT / "deploy" / "systemd" / "diloco-node@.service").read_text()
    text = text.replace("/srv/diloco/.venv/bin/diloco-node", str(program)).replace("/srv/diloco", str(place))
    # ProtectSystem= and the like make mounts, which the manager of a user may do here as it is root.
    # The folder of the test lies in /tmp, which the region would have for itself.
    text = text.replace("User=diloco\n", "").replace("PrivateTmp=yes\n", f"ReadWritePaths={folder}\n")
    text = text.replace("multi-user.target", "default.target").replace("%i", region)
    units = folder / "home" / ".config" / "systemd" / "user"
    units.mkdir(parents=True, exist_ok=True)
    (units / unit(region)).write_text(text)


def unit(region: str) -> str:
    return f"diloco-node-{region}.service"


def systemctl(*words: str) -> str:
    done = subprocess.run(["systemctl", "--user", *words], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, f"systemctl {' '.join(words)}: {done.stderr}"
    return done.stdout


def shown(region: str) -> dict[str, str]:
    lines = systemctl("show", "--property=ActiveState,MainPID,Result", unit(region)).splitlines()
    return dict(line.split("=", 1) for line in lines)


def status(place: Path, region: str) -> dict[str, Any]:
    """Of a region that answers, or {}. Asked often, so not by a command: a process takes longer than the answer."""
    try:
        document = ask_in(place / "state" / region)
    except ConfigError:  # it has not started yet
        return {}
    return {} if "error" in document else document


def rounds(place: Path, region: str) -> int:
    return int(status(place, region).get("rounds_committed", 0))


if __name__ == "__main__":
    scenario(Path(sys.argv[1]))
