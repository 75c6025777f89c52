"""The first process of a container: what it reads, that it shapes and reshapes, and how it ends with its region.

Real devices, in a network namespace of the test's own, where that is allowed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_node.errors import ConfigError, DilocoError
from diloco_node.lab.wan import container as module
from diloco_node.lab.wan.container import ContainerLink, load_attachment
from diloco_node.lab.wan.uplink import Kernel
from tests.kit.waiting import until

RUN = """
[run]
id = "t"
[regions.a]
address = "10.211.77.11:7400"
[regions.b]
address = "10.211.77.12:7400"
[regions.c]
address = "10.211.77.13:7400"
"""
LINKS = """
[regions.a]
egress = "80Mbit/s"
[regions.b]
egress = "80Mbit/s"
[regions.c]
egress = "80Mbit/s"
[default_link]
rtt = "40ms"
"""
OUTAGE = """
[[outages]]
at = "2s"
for = "8s"
between = ["a", "c"]
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "links.toml").write_text(LINKS)
    return {"WAN_REGION": "a", "WAN_CONFIG": str(tmp_path / "run.toml"), "WAN_TOPOLOGY": str(tmp_path / "links.toml")}


def test_addresses_are_run_toml_s_and_links_the_topology_s(environment: dict[str, str]) -> None:
    found = load_attachment(environment)
    assert (found.region, found.address) == ("a", "10.211.77.11")
    assert found.peers == {"b": "10.211.77.12", "c": "10.211.77.13"}
    assert found.topology.names == ("a", "b", "c")


@pytest.mark.parametrize("name", ["WAN_REGION", "WAN_CONFIG", "WAN_TOPOLOGY"])
def test_what_is_not_set_is_named(environment: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not set"):
        load_attachment({**environment, name: ""})


@pytest.mark.parametrize("address", ['"us-b:7400"', '"[fd00::1]:7400"'])
def test_a_region_without_a_fixed_address_is_refused(environment: dict[str, str], address: str) -> None:
    file = Path(environment["WAN_CONFIG"])
    file.write_text(RUN.replace('"10.211.77.12:7400"', address))
    with pytest.raises(ConfigError, match=r"regions\.b\.address .* needs a fixed one"):
        load_attachment(environment)


def test_a_region_that_the_topology_does_not_have_is_refused(environment: dict[str, str]) -> None:
    file = Path(environment["WAN_TOPOLOGY"])
    file.write_text(LINKS.replace("regions.c", "regions.d"))
    with pytest.raises(ConfigError, match="region 'c' is not in topology links"):
        load_attachment(environment)


def _has_namespaces() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-n", "true"], check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _has_namespaces(), reason="network namespaces need root: a container's first process is NOT tested here"
)


class Container:
    """A namespace with a device as Docker gives it, and the first process in it."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.environment = {**os.environ, **environment}
        self.log = folder / "log"
        # Holds the namespace; the device's other end lies in it too.
        self.holder = subprocess.Popen(["unshare", "-n", "sleep", "3600"])
        self.process: subprocess.Popen[bytes] | None = None
        own = Path("/proc/self/ns/net").readlink()
        self._await(lambda: Path(f"/proc/{self.holder.pid}/ns/net").readlink() != own)

    def sh(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["nsenter", "-t", str(self.holder.pid), "-n", *words]
        return subprocess.run(command, check=check, capture_output=True, text=True, env=self.environment)

    def plug(self, device: str) -> None:
        self.sh("ip", "link", "add", device, "type", "veth", "peer", "name", "bridge0")
        self.sh("ip", "address", "add", "10.211.77.11/24", "dev", device)
        self.sh("ip", "link", "set", "bridge0", "up")
        self.sh("ip", "link", "set", device, "up")

    def start(self, *command: str, user: str = "nobody") -> None:
        words = [
            "nsenter",
            "-t",
            str(self.holder.pid),
            "-n",
            sys.executable,
            "-m",
            "diloco_node.lab.wan.container",
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*words, "--user", user, "--", *command], env=self.environment, stdout=log, stderr=log
            )

    def await_said(self, text: str, times: int = 1) -> None:
        self._await(lambda: self.log.read_text().count(text) >= times)

    def await_route(self, text: str, *, is_there: bool) -> None:
        self._await(lambda: (text in self.sh("ip", "route").stdout) == is_there)

    def classes(self, device: str) -> set[str]:
        return {line.split()[2] for line in self.sh("tc", "class", "show", "dev", device).stdout.splitlines()}

    def _await(self, condition) -> None:
        try:
            until(condition, within_s=240, every_s=0.1)
        except AssertionError:
            raise AssertionError(self.log.read_text() if self.log.exists() else "not started") from None

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()  # it ends its region; killed, it would leave that behind
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.holder.kill()
        self.holder.wait()


@pytest.fixture
def container(environment: dict[str, str], tmp_path: Path) -> Iterator[Container]:
    made = Container(environment, tmp_path)
    yield made
    made.stop()


@pytest.mark.system
@needs_namespaces
def test_the_device_is_shaped_before_the_start_and_again_with_a_new_network(container: Container) -> None:
    container.plug("eth0")
    container.start("sh", "-c", "echo region: $(id -un) $(grep CapEff /proc/self/status); exec sleep 3600")
    container.await_said("region: nobody CapEff: 0000000000000000")
    said = container.log.read_text()
    assert said.index("a on eth0 (10.211.77.11): out 80Mbit/s, in 80Mbit/s") < said.index("region:")
    if "PER-PAIR RATE" not in said:
        assert container.classes("eth0") == {"1:1", "1:11", "1:12"}
    container.sh("ip", "link", "delete", "eth0")
    container.await_said("cut off (docker network connect --ip 10.211.77.11")
    container.plug("eth7")
    container.await_said("a on eth7")
    if "PER-PAIR RATE" not in said:
        assert container.classes("eth7") == {"1:1", "1:11", "1:12"}
    assert "trying again" not in container.log.read_text()


@pytest.mark.system
@needs_namespaces
def test_a_device_that_gets_its_address_later_is_shaped_then(container: Container) -> None:
    container.sh("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "bridge0")
    container.start("sleep", "3600")
    container.await_said("no device has 10.211.77.11")
    container.sh("ip", "address", "add", "10.211.77.11/24", "dev", "eth0")
    container.await_said("a on eth0")
    assert container.log.read_text().count("no device has") == 1


def test_a_device_that_goes_away_half_way_is_shaped_at_the_next_look(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    refusals = [DilocoError("Cannot find device")]
    # It has its address at the second look, goes away during the first shaping, and is back at once.
    # Between the list of devices and the look at addresses it got its name: that is no reason to shape it again.
    found = iter([("", 0), ("eth0", 2), ("eth0", 2), ("eth0", 2), ("", 0)])
    devices = iter([{"lo": 1}, {"lo": 1, "veth1a2b": 2}, {"lo": 1, "veth1a2b": 2}, {"lo": 1, "eth0": 2}, {"lo": 1}])

    def tool(*_: str, script: str | None = None) -> str:
        if script and refusals:
            raise refusals.pop()
        return ""

    monkeypatch.setattr(module, "_devices", lambda: next(devices))
    monkeypatch.setattr(module, "find_device", lambda _: next(found))
    monkeypatch.setattr(module, "run_tool", tool)
    monkeypatch.setattr(module, "run_ip", tool)
    kernel = Kernel(netem=True, htb=True, tbf=True, redirect=True, ifb=True)
    link = ContainerLink(load_attachment(environment), kernel, said.append, now_ns=0)
    link.keep(now_ns=0)
    with pytest.raises(DilocoError, match="Cannot find device"):
        link.keep(now_ns=1)
    link.keep(now_ns=2)
    link.keep(now_ns=3)
    assert said[1:] == ["a on eth0 (10.211.77.11): out 80Mbit/s, in 80Mbit/s"]
    link.keep(now_ns=4)
    assert [line.split(":")[0] for line in said[2:]] == ["no device has 10.211.77.11"]


@pytest.mark.system
@needs_namespaces
def test_the_timetable_cuts_and_heals(container: Container, environment: dict[str, str]) -> None:
    Path(environment["WAN_TOPOLOGY"]).write_text(LINKS + OUTAGE)
    container.plug("eth0")
    container.start("sleep", "3600")
    container.await_said("a - c: cut")
    container.await_route("blackhole 10.211.77.13", is_there=True)
    assert "blackhole 10.211.77.12" not in container.sh("ip", "route").stdout
    container.await_said("a - c: healed")
    container.await_route("blackhole", is_there=False)


@pytest.mark.system
@needs_namespaces
@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_region_s_exit_code_is_the_container_s(container: Container, command: str, code: int) -> None:
    container.plug("eth0")
    container.start("sh", "-c", command)
    assert container.process is not None
    assert container.process.wait(timeout=240) == code


@pytest.mark.system
@needs_namespaces
def test_a_stop_is_handed_on_and_awaited(container: Container) -> None:
    container.plug("eth0")
    container.start("sh", "-c", "trap 'echo stopping; exit 5' TERM; echo ready; while :; do sleep 0.1; done")
    container.await_said("ready")
    assert container.process is not None
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(timeout=240) == 5
    assert "stopping" in container.log.read_text()


@pytest.mark.system
@needs_namespaces
def test_an_unknown_user_is_one_clear_error(container: Container) -> None:
    container.plug("eth0")
    container.start("sleep", "3600", user="nobody-here")
    assert container.process is not None
    assert container.process.wait(timeout=240) == 2
    assert "--user 'nobody-here' is not in the image" in container.log.read_text()
