"""The kernel's real `sch_netem`, also where the host's kernel has none: in User-Mode Linux, on the host's own files.

The guest (`uml_guest`) makes two namespaces, starts in each what is the first process of a container, and measures.
It takes minutes, so it runs where DILOCO_CI_UML=1 asks for it, as .ci/run does.
"""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit import uml_kernel
from tests.kit.commands import COMMAND, NO_FORK_SERVER, SMALL_MODEL
from tests.kit.engine_kit import Skipped
from tests.kit.repository import ROOT, module_command
from tests.kit.uml_guest import main as measure_in_guest

MODULES = (
    *("drivers/net/veth", "drivers/net/ifb"),
    *("net/sched/sch_netem", "net/sched/sch_htb", "net/sched/sch_tbf", "net/sched/sch_ingress"),
    *("net/sched/cls_u32", "net/sched/act_mirred"),
)
INSTALLED = uml_kernel.installed()
MISSING = (
    "it needs root"
    if os.geteuid() != 0
    else "User-Mode Linux is missing: .ci/system installs it"
    if INSTALLED is None or not INSTALLED.modules.is_dir() or shutil.which("insmod") is None
    else "ip and tc are missing: .ci/system installs them"
    if shutil.which("tc") is None
    else "set DILOCO_CI_UML=1 (two to five minutes), as .ci/run does"
    if os.environ.get("DILOCO_CI_UML") != "1"
    else ""
)
BOOT_S = 1500.0
"""Far more than is needed: the end is a fact that is waited for."""

# Alone: a guest that gets less of a processor measures that, and trains in it too slowly for what is asked of it.
pytestmark = [
    pytest.mark.system,
    pytest.mark.alone,
    pytest.mark.timeout(1600),
    pytest.mark.skipif(bool(MISSING), reason=f"the kernel's netem is NOT tested on this machine: {MISSING}"),
]

INIT = """#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
# Namespaces and sockets of the guest are not the host's.
mount -t tmpfs tmp /run
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1
exec > '{folder}/log' 2>&1
for module in {modules}; do insmod {modules_folder}/$(uname -r)/kernel/$module.ko; done
ip link set lo up
cd '{repository}'
{command}
echo "guest ended with $?"
echo o > /proc/sysrq-trigger
sleep 60
"""


ALONE = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", '"$@"; exit $?', "guest"),
)
"""All processes of the guest end with the first, and that one with pytest. The first is a shell: a kernel that panics
aborts itself, which the first process of a namespace can't do. It would try for ever."""


def _come_first() -> None:
    """A kernel whose processor is taken away measures that: it goes before whatever else is busy here."""
    with contextlib.suppress(OSError):
        # The session's own weight, where the kernel groups processes by session.
        Path("/proc/self/autogroup").write_text("-20")
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def boot(folder: Path, command: str, *, memory: str) -> str:
    """Run a shell command in a guest, in the repository; the guest's log. The guest ends with this process.

    Where the installed kernel can't run on this processor, a newer one does it.
    """
    assert INSTALLED is not None
    said = _boot(INSTALLED, folder, command, memory=memory)
    if uml_kernel.TOO_MANY_REGISTERS in said:
        try:
            said = _boot(uml_kernel.newer(), folder, command, memory=memory)
        except Skipped as why:
            pytest.skip(f"the kernel's netem is NOT tested: the installed kernel can't run on this processor; {why}")
    return said


def _boot(kernel: uml_kernel.Kernel, folder: Path, command: str, *, memory: str) -> str:
    """The guest's log, or what its console said if it never got so far."""
    init = folder / "init.sh"
    text = INIT.format(
        folder=folder,
        modules=" ".join(MODULES),
        modules_folder=kernel.modules,
        repository=ROOT,
        command=command,
    )
    init.write_text(text)
    init.chmod(0o700)
    root = ("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw")
    console_of_guest = ("con=null", "con0=fd:0,fd:1", f"uml_dir={folder}")
    words = [str(kernel.program), f"mem={memory}", *root, f"init={init}", *console_of_guest]
    with (folder / "console").open("wb") as console:
        guest = subprocess.Popen(
            [*ALONE, *words],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
            preexec_fn=_come_first,
        )
    ended = "in time"
    try:
        guest.wait(timeout=BOOT_S)
    except subprocess.TimeoutExpired:
        ended = f"not within {BOOT_S:.0f} s"
    finally:
        guest.kill()
        guest.wait()
    log = folder / "log"
    text = log.read_text() if log.exists() else (folder / "console").read_text(errors="replace")
    assert ended == "in time", text[-4000:]
    return text


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("uml")
    log = boot(folder, shlex.join([*module_command(measure_in_guest), f"{folder}/answer.json"]), memory="1G")
    assert (folder / "answer.json").exists(), log[-4000:]
    answer = json.loads((folder / "answer.json").read_text())
    print({key: value for key, value in answer.items() if key != "logs"})
    return answer


def test_the_guest_has_every_part_and_nothing_is_said_to_be_missing(found: dict) -> None:
    assert found["probe"] == ""
    for log in found["logs"].values():
        assert "NOT EMULATED" not in log
        assert "trying again" not in log


def test_round_trips_are_those_of_the_file(found: dict) -> None:
    # Each side delays what it sends: 25 ms one way, 15 ms the other.
    assert 40 <= found["rtt_ms"] < 42 + found["rtt_bare_ms"]


@pytest.mark.parametrize(
    ("measured", "mbit"), [("rate_west_to_east_mbit", 8), ("rate_east_to_west_mbit", 4)], ids=["egress", "ingress"]
)
def test_rates_are_those_of_the_slower_end(found: dict, measured: str, mbit: float) -> None:
    # Goodput of TCP with full packets: 1,448 of 1,514 bytes.
    assert found[measured] == pytest.approx(mbit * 1448 / 1514, rel=0.05)


def test_a_cut_lets_nothing_pass_and_a_heal_gives_the_same_link_back(found: dict) -> None:
    assert found["rtt_cut_ms"] is None
    assert found["rtt_cut_one_ms"] is None
    assert 40 <= found["rtt_healed_ms"] < 42 + found["rtt_bare_ms"]


def test_a_network_that_is_taken_away_and_given_back_is_shaped_again(found: dict) -> None:
    assert 40 <= found["rtt_plugged_again_ms"] < 42 + found["rtt_bare_ms"]
    assert "cut off (docker network connect --ip 10.211.77.11 gives it back)" in found["logs"]["us-east"]


TWO = """
[regions.us-east]
egress = "50Mbit/s"
[regions.us-west]
egress = "50Mbit/s"
[default_link]
rtt = "40ms"
"""


JUMPS = """(until grep -Eqs '"rounds": ?[1-9]' '{history}'; do sleep 1; done
for jump in '+1 hour' '-2 hours' '+1 hour'; do sleep 5; date -s "$jump"; done) &
"""
"""The guest's own clock, from when rounds are committed; the host's stays."""


def test_two_regions_train_over_the_kernel_s_netem_while_their_clock_jumps_and_end_equal(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TWO)
    history = tmp_path / "run" / "us-east" / "history.jsonl"
    environment = " ".join(f"{name}={value}" for name, value in (NO_FORK_SERVER | SMALL_MODEL).items())
    demo = f"{environment} {shlex.join(COMMAND)} demo --wan '{tmp_path}/two.toml' --seconds 35"
    command = f"{JUMPS.format(history=history)}{demo} --folder '{tmp_path}/run' --json > '{tmp_path}/report.json'"
    log = boot(tmp_path, command, memory="4G")
    assert "guest ended with 0" in log, log[-4000:]
    rows = [json.loads(line) for line in history.read_text().splitlines()[1:]]
    check_that_rounds_went_on([row for row in rows if "mark" not in row])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["wan"]["backend"] == "netem"
    for pair in report["wan"]["pairs"]:
        # How near they are to the file is measured above, where there is time to do it more than once.
        assert pair["rtt_measured_ms"] is None or pair["rtt_measured_ms"] >= 40
        rate = pair["goodput_bits_per_s"]
        assert rate is None or 0 < rate < 1.5 * pair["rate_bits_per_s"]
    assert report["rounds_committed"] >= 4
    assert report["equal_digests"]
    assert report["tokens"]["balanced"], report["tokens"]["faults"]


def check_that_rounds_went_on(points: list[dict]) -> None:
    """Before the clock jumped, an hour ahead, an hour behind, and when it was right again."""
    jumps = [at for at in range(1, len(points)) if abs(points[at]["unix"] - points[at - 1]["unix"]) > 3000]
    assert len(jumps) == 3, [point["unix"] for point in points]
    rounds = [points[at]["rounds"] for at in (0, *jumps, -1)]
    assert sorted(set(rounds)) == rounds, rounds
