"""What lies under deploy/: each file is read by the tool of its field, and says what the program needs."""

import configparser
import fnmatch
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from diloco_node import __version__
from diloco_node.main import app
from diloco_node.supervisor.supervisor_spec import FINAL_CODES, LEARNER_SHARE, SupervisorSpec
from tests.kit.repository import ROOT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "diloco-node@.service"
SBATCH = DEPLOY / "slurm" / "region.sbatch"

_SPEC = SupervisorSpec("us", Path(), [], None)
STOP_S = (2 - LEARNER_SHARE) * _SPEC.stop_s
"""What `start` takes at most after SIGTERM."""


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: NOT CHECKED (.ci/system installs it)")
    return found


def flags_of_start() -> set[str]:
    command: Any = typer.main.get_command(app)
    return {flag for one in command.commands["start"].params for flag in one.opts}


def service(text: str) -> configparser.SectionProxy:
    unit = configparser.RawConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    return unit["Service"]


def test_the_unit_leaves_time_to_stop_and_does_not_repeat_what_no_restart_cures() -> None:
    unit = service(UNIT.read_text())
    assert (unit["Type"], unit["KillMode"], unit["OOMPolicy"]) == ("notify", "mixed", "continue")
    assert unit["UMask"] == "0077", "tokens and logs are for its user only"
    assert STOP_S < int(unit["TimeoutStopSec"]) == 40
    assert {int(code) for code in unit["RestartPreventExitStatus"].split()} == FINAL_CODES
    assert unit["WatchdogSec"] == "2min", "twice the longest time that the supervisor waits for a child"
    assert set(re.findall(r"--[a-z-]+", unit["ExecStart"])) <= flags_of_start()


def test_systemd_reads_the_unit_without_a_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    verify = [tool("systemd-analyze"), "--system", "verify"]
    # It looks for the program and the user on this machine.
    text = (
        UNIT.read_text().replace("/srv/diloco/.venv/bin/diloco-node", "/bin/true").replace("User=diloco", "User=daemon")
    )
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace("/srv/diloco", str(tmp_path)))
    done = subprocess.run([*verify, str(unit)], capture_output=True, text=True, check=False)
    if "Failed to initialize manager" in done.stderr:
        pytest.skip(f"systemd-analyze can't run here: {done.stderr.strip()}")
    complaints = [line for line in done.stderr.splitlines() if UNIT.stem[:-1] in line]
    assert (done.returncode, complaints) == (0, [])
    unit.write_text(text.replace("Type=notify", "Type=notfy"))
    done = subprocess.run([*verify, str(unit)], capture_output=True, text=True, check=False)
    assert "notfy" in done.stderr, "the tool would find a mistake"


# ---- Ansible ---------------------------------------------------------------------------------------------------------

ANSIBLE = DEPLOY / "ansible"
INVENTORY = ANSIBLE / "inventory.yml"
PLAYBOOK = ANSIBLE / "region.yml"
MODULES = {"command", "copy", "file", "systemd_service"}


def test_ansible_s_own_parser_takes_the_playbook() -> None:
    check = [tool("ansible-playbook"), "--syntax-check", "-i", str(INVENTORY), str(PLAYBOOK)]
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_playbook_copies_what_a_region_needs_and_starts_its_unit() -> None:
    (play,) = yaml.safe_load(PLAYBOOK.read_text())
    modules = [next(key for key in task if key.startswith("ansible.builtin.")) for task in play["tasks"]]
    assert {name.removeprefix("ansible.builtin.") for name in modules} == MODULES
    tasks = {task["name"]: task[module] for task, module in zip(play["tasks"], modules, strict=True)}
    certificate = tasks["Copy the region's certificate and key"]
    assert certificate["mode"] == "0600", "the key is for the region's user"
    (names,) = [task["loop"] for task in play["tasks"] if "certs" in str(task) and "loop" in task]
    assert names == ["ca.pem", "node.pem", "node.key"]
    folder = play["vars"]["folder"]
    unit = service(UNIT.read_text())
    assert (unit["WorkingDirectory"], unit["User"]) == (folder, certificate["owner"])
    assert unit["ExecStart"].split()[0] == play["vars"]["program"].replace("{{ folder }}", folder)
    source = tasks["Install the unit"]["src"].replace("{{ playbook_dir }}", str(ANSIBLE))
    assert Path(source).resolve() == UNIT
    assert tasks["Start the region, and wait until its daemon is up"]["name"] == f"{UNIT.stem}{{{{ region }}}}"
    command = tasks["Write the training command"]["content"]
    assert set(re.findall(r"(?<= )--[a-z-]+", command)) <= flags_of_start()


def test_every_variable_of_the_playbook_is_set_somewhere() -> None:
    text = PLAYBOOK.read_text()
    (play,) = yaml.safe_load(text)
    inventory = yaml.safe_load(INVENTORY.read_text())[play["hosts"]]
    names = {
        name for inner in re.findall(r"\{\{(.*?)\}\}", text) for name in re.findall(r"\b[a-z_]+\b", quoteless(inner))
    }
    own = set(play["vars"]) | {"scripts", "command", "restart", "item"}
    facts = {"inventory_hostname", "inventory_dir", "playbook_dir"}
    words = {"if", "else", "is", "defined", "default", "bool", "false"}
    assert names == own | facts | words
    settings = set(inventory["vars"]).union(*inventory["hosts"].values())
    assert {name for name in settings if not name.startswith("ansible_")} == {"scripts", "command"}


def quoteless(expression: str) -> str:
    return re.sub(r"'[^']*'", "", expression)


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / "region.yaml").read_text()))


def test_kubernetes_takes_the_manifests() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: NOT CHECKED")
    for one in manifests():
        for version in ("1.28", "1.31"):
            validate.validate(one, version, strict=True)
    broken = manifests()[1]
    broken["spec"]["replica"] = 1
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.31", strict=True)


def test_a_region_in_kubernetes_is_one_pod_with_its_folder_its_port_and_time_to_stop() -> None:
    service_, stateful = manifests()
    assert (service_["kind"], service_["spec"]["type"]) == ("Service", "LoadBalancer")
    assert [port["port"] for port in service_["spec"]["ports"]] == [7400]
    pod = stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (stateful["kind"], stateful["spec"]["replicas"]) == ("StatefulSet", 1)
    assert STOP_S < pod["terminationGracePeriodSeconds"] == 40
    assert stateful["spec"]["selector"]["matchLabels"] == service_["spec"]["selector"]
    assert "/readyz" in container["readinessProbe"]["exec"]["command"][-1]
    assert "/livez" in container["livenessProbe"]["exec"]["command"][-1]
    assert {word.split("=")[0] for word in container["args"]} <= flags_of_start()
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    volumes = {one["name"] for one in pod["volumes"]}
    assert mounts == volumes | {one["metadata"]["name"] for one in stateful["spec"]["volumeClaimTemplates"]}
    (secret,) = [one["secret"] for one in pod["volumes"] if "secret" in one]
    assert secret["defaultMode"] & 0o037 == 0, "the key is for the region's user, and for the group that makes it his"
    uid = re.search(r"--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert uid is not None
    assert pod["securityContext"]["runAsUser"] == int(uid[1])


# ---- Slurm -----------------------------------------------------------------------------------------------------------


def test_shellcheck_has_nothing_to_say_about_the_slurm_job() -> None:
    done = subprocess.run([tool("shellcheck"), str(SBATCH)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_slurm_job_is_told_in_time_and_its_script_alone() -> None:
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", SBATCH.read_text(), re.MULTILINE))
    assert options["signal"] == "B:TERM@60"
    assert STOP_S < 60


PROGRAM = """#!{python}
import signal, sys, time, pathlib
place = pathlib.Path({place!r})
(place / "words").write_text(" ".join(sys.argv[1:]))
def stop(*_):
    time.sleep(0.3)
    (place / "stopped").touch()
    sys.exit({code})
signal.signal(signal.SIGTERM, stop)
(place / "up").touch()
time.sleep(120)
"""


@pytest.mark.parametrize("code", [0, 7])
def test_the_slurm_script_passes_sigterm_on_waits_for_the_region_and_ends_with_its_code(
    tmp_path: Path, code: int
) -> None:
    """Without Slurm: the script is what Slurm runs and signals."""
    program = tmp_path / "diloco-node"
    program.write_text(PROGRAM.format(python=sys.executable, place=str(tmp_path), code=code))
    program.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "REGION": "eu", "DILOCO_FOLDER": str(tmp_path), "DILOCO_PROGRAM": str(program)}
    with subprocess.Popen(["bash", str(SBATCH), "python", "train.py", "--lr", "0.1"], env=env) as job:
        while not (tmp_path / "up").exists():
            assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        assert job.wait(120) == code
    assert (tmp_path / "stopped").exists()
    assert (tmp_path / "words").read_text() == "start --region eu -- python train.py --lr 0.1"


@pytest.mark.parametrize(
    ("change", "said"), [({"REGION": ""}, "name the region"), ({"DILOCO_PROGRAM": "gone"}, "no gone")]
)
def test_the_slurm_script_says_what_is_missing(tmp_path: Path, change: dict[str, str], said: str) -> None:
    env = {"PATH": "/usr/bin:/bin", "REGION": "eu", "DILOCO_FOLDER": str(tmp_path), "DILOCO_PROGRAM": "true"} | change
    done = subprocess.run(["bash", str(SBATCH)], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert said in done.stderr


# ---- SkyPilot --------------------------------------------------------------------------------------------------------

SKY = DEPLOY / "skypilot" / "region.yaml"


def test_skypilot_s_own_loader_takes_the_task() -> None:
    sky = pytest.importorskip("sky", reason="skypilot is not installed: its loader is NOT TRIED, only the YAML is read")
    task = sky.Task.from_yaml(str(SKY))
    assert task.envs["REGION"] == "us-east"
    assert task.num_nodes == 1


def test_a_skypilot_task_opens_the_port_and_runs_one_region() -> None:
    task = yaml.safe_load(SKY.read_text())
    assert set(task) == {"name", "envs", "resources", "num_nodes", "workdir", "setup", "run"}
    assert task["resources"]["ports"] == 7400
    assert set(re.findall(r"(--[a-z][a-z-]+)", task["run"].split("diloco-node start")[1])) <= flags_of_start()
    (wheel,) = re.findall(r"pip install --quiet ~/sky_workdir/(\S+)", task["setup"])
    assert fnmatch.fnmatch(f"diloco_node-{__version__}-py3-none-any.whl", wheel), "what `make dist` makes, and no index"
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)
