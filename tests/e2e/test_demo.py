"""The whole path: four regions as real processes train one model over mutual TLS, and what they leave is checked.

Nothing here trusts the report where files can be read: weights are hashed, ledgers recomputed, bytes compared with
what the kernel counted on the interface of a network namespace that holds this run only.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from diloco_node.core.types import RoundBody
from diloco_node.daemon.manifest_file import load_manifest
from diloco_node.daemon.run_history import COLUMNS
from diloco_node.errors import INTERRUPTED_CODE
from diloco_node.lab.chaos.demo_processes import DemoFile, is_alive
from diloco_node.lab.demo.demo_report import check_folder, learner_status, longest_ledger, read_region_report
from tests.kit.commands import COMMAND, NO_FORK_SERVER

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 25
REGIONS = 4


def has_namespaces() -> bool:
    return (
        os.geteuid() == 0
        and subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0
    )


class DemoRun:
    """One demo: its report, its folder, and the bytes that the loopback interface carried for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [
            *(*COMMAND, "demo", "--regions", str(REGIONS)),
            *("--seconds", str(SECONDS), "--folder", str(folder), "--json"),
        ]
        script = 'if [ "$1" = ns ]; then ip link set lo up; fi; shift; "$@"; code=$?; cat /proc/net/dev >&2; exit $code'
        self.is_isolated = has_namespaces()
        prefix = ["unshare", "-n"] if self.is_isolated else []
        mode = "ns" if self.is_isolated else "plain"
        done = subprocess.run(
            [*prefix, "sh", "-c", script, "sh", mode, *command],
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
            env=os.environ | NO_FORK_SERVER,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        self.report = json.loads(done.stdout)
        lo = next(line for line in done.stderr.splitlines() if line.strip().startswith("lo:"))
        self.interface_bytes = int(lo.split(":")[1].split()[8])

    @property
    def names(self) -> list[str]:
        return [region["name"] for region in self.report["regions"]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    return DemoRun(tmp_path_factory.mktemp("demo") / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_demo_that_is_interrupted_says_where_it_lies_and_leaves_no_process(tmp_path: Path, number: int) -> None:
    words = ("demo", "--regions", "2", "--seconds", "600", "--folder", str(tmp_path / "run"))
    with subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | NO_FORK_SERVER,
    ) as demo:
        try:
            while not (started := [*tmp_path.glob("run/*/supervisor.lock")]) and demo.poll() is None:
                time.sleep(0.02)
            supervisors = DemoFile.load(tmp_path / "run").supervisors
            demo.send_signal(number)
            said = demo.communicate(timeout=600)[1]
        finally:
            demo.kill()
    assert started
    folder = tmp_path / "run"
    way_on = f"To go on, for each region: diloco-node start --config {folder / 'run.toml'} --region NAME\n"
    assert f"diloco-node: interrupted; what there is lies in {folder}. {way_on}" in said
    assert demo.returncode == INTERRUPTED_CODE
    assert [one for one in supervisors.values() if one is not None and is_alive(one)] == []


@pytest.mark.long
def test_a_script_of_the_users_trains_in_every_region(tmp_path: Path) -> None:
    """examples/llama.py, with its own loss of the merged model in the report, also after the last merge."""
    script = [sys.executable, str(ROOT / "examples" / "llama.py"), "--size", "1m", "--batch", "2", "--context", "32"]
    words = ("demo", "--regions", "2", "--seconds", "12", "--folder", str(tmp_path / "run"), "--json", "--")
    done = subprocess.run(
        [*COMMAND, *words, *script, "--steps", "100", "--evaluate-every", "100000"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | NO_FORK_SERVER | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["equal_digests"]
    assert report["tokens"]["balanced"]
    assert report["tokens"]["merged"] / 32 <= report["data"]["rows"] <= report["tokens"]["trained"] / 32
    assert report["data"]["twice"] == 0
    logs = [(tmp_path / "run" / r["name"] / "logs" / "learner.log").read_text() for r in report["regions"]]
    said = {re.findall(r"held-out loss ([0-9.]+)", log)[-1] for log in logs}
    assert said == {f"{report['val_loss_global']:.4f}"}
    assert [line for log in logs for line in log.splitlines() if "no checkpoint keeps" in line] == []


def test_every_region_holds_the_same_bytes(demo: DemoRun) -> None:
    hashes = {
        hashlib.sha256((demo.folder / name / "final.safetensors").read_bytes()).hexdigest() for name in demo.names
    }
    assert len(hashes) == 1
    assert demo.report["equal_digests"] is True
    assert len({region["digest"] for region in demo.report["regions"]}) == 1
    assert len({tuple(region["versions"]) for region in demo.report["regions"]}) == 1
    tensors = load_file(demo.folder / demo.names[0] / "final.safetensors")
    assert all(values.dtype == np.float32 and np.isfinite(values).all() for values in tensors.values())


def test_the_ledgers_account_for_every_token(demo: DemoRun) -> None:
    positions = {name: learner_status(read_region_report(demo.folder / name)["learner"]) for name in demo.names}
    account = check_folder(demo.folder, demo.names, positions)
    assert account.faults == ()
    assert account.trained == sum(region["tokens"] for region in demo.report["regions"])
    assert account.trained == account.merged + account.carried + account.discarded
    assert account.merged > 0.5 * account.trained
    assert demo.report["tokens"]["balanced"] is True
    assert demo.report["tokens"]["merged"] == account.merged


def test_rounds_go_on_with_the_steps_and_everybody_takes_part(demo: DemoRun) -> None:
    """Most of what is possible, also where regions wait for a core.

    Nearly all of it is required on a virtual clock, in tests/daemon/test_node.py, and shown in docs/results.md.
    """
    manifest = load_manifest(demo.folder / demo.names[0])
    assert manifest is not None
    _, entries = longest_ledger([demo.folder / name for name in demo.names], len(manifest.fragments))
    rounds = [entry.body for entry in entries if isinstance(entry.body, RoundBody)]
    assert len(rounds) == demo.report["rounds_committed"] == sum(demo.report["regions"][0]["versions"])
    settings = json.loads((demo.folder / demo.names[0] / "node.json").read_text())["settings"]
    steps = float(np.mean([region["inner_steps"] for region in demo.report["regions"]]))
    assert len(rounds) >= 0.5 * steps * settings["fragments"] / settings["sync_every"]
    for name in demo.names:
        included = sum(any(m.contribution.learner == name for m in body.members) for body in rounds)
        assert included >= 0.5 * len(rounds), (name, included, len(rounds))
    assert all(region["participation"] >= 0.5 for region in demo.report["regions"])
    assert 1 <= demo.report["rounds_in_flight_max"] <= settings["rounds_in_flight_max"]


def test_the_page_of_the_run_lies_beside_it(demo: DemoRun) -> None:
    page = demo.folder / "report.html"
    assert demo.report["page"] == str(page.resolve())
    found = re.search(r'id="snapshot">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    shown = json.loads(found[1])
    assert [one["status"]["region"] for one in shown["regions"]] == demo.names
    assert shown["summary"]["tokens"] == demo.report["tokens"]
    for one in shown["regions"]:
        tokens = [row[COLUMNS.index("tokens")] for row in one["history"]["rows"]]
        assert len(tokens) > 1
        assert tokens == sorted(tokens)
        assert one["status"]["round_log"]
        assert ["rounds.sync_every", "16"] in [row[:2] for row in one["settings"]]


def test_wire_bytes_are_what_the_interface_carried(demo: DemoRun) -> None:
    if not demo.is_isolated:
        pytest.skip("needs root and network namespaces: on a shared loopback other traffic is counted too")
    sent = sum(region["wire_bytes_out"] for region in demo.report["regions"])
    received = sum(region["wire_bytes_in"] for region in demo.report["regions"])
    assert sent == pytest.approx(demo.interface_bytes, rel=0.10)
    assert received == pytest.approx(sent, rel=0.05)


def test_the_merged_model_is_better_than_any_region_alone(demo: DemoRun) -> None:
    merged = demo.report["val_loss_global"]
    # A region's own parameters are those from just before the run's last merges.
    assert all(merged < region["val_loss"] for region in demo.report["regions"]), demo.report
    assert all(region["loss_last"] < region["loss_first"] for region in demo.report["regions"])
    assert merged < control_loss(demo)


def control_loss(demo: DemoRun) -> float:
    """Held-out loss of one learner with the same model, data, schedule and number of steps that never merges."""
    name = demo.names[0]
    settings = json.loads((demo.folder / name / "trainer.json").read_text())
    model = settings["model"]
    model["schedule_steps"] = max(region["inner_steps"] for region in demo.report["regions"])
    model["step_time_min"] = 0
    model["threads"] = 1  # two that wait for each other take many times as long where others want the cores
    path = demo.folder / "control.json"
    path.write_text(json.dumps(settings))
    env = {**os.environ, "DILOCO_TRAINER": str(path)}
    env.pop("DILOCO_SOCKET", None)
    done = subprocess.run(
        [sys.executable, "-m", "diloco_node.learner"], env=env, capture_output=True, text=True, timeout=1200, check=True
    )
    return float(json.loads(done.stdout.strip().splitlines()[-1])["val_loss"])
