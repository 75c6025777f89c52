"""`diloco-node measure` as a user meets it: real ends on loopback, tests of a fifth of a second."""

import asyncio
import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from diloco_node.cli.measure import own_links
from diloco_node.cli.measure.own_links import own_folder, with_hidden
from diloco_node.cli.plan.inputs import read_mesh
from diloco_node.errors import LinkLost
from diloco_node.lab.demo.region_processes import free_ports
from diloco_node.main import main
from diloco_node.measure import echoes, ends, probes, requester
from diloco_node.measure.ends import Dialer, measuring_end
from diloco_node.measure.measuring import Measuring
from diloco_node.measure.requester import FlowMeasured, MeasurementRequester
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import load_identity
from tests.kit.commands import COMMAND
from tests.kit.ports import free_port

COLUMNS = 100
QUICK = ("--seconds", "0.2", "--warm-up", "0.1")
PATIENCE_S = 60.0
ATTEMPTS = 5


class Ends:
    """Measuring ends of regions eu and us, in a thread with a loop of their own. `asia` is us, without an address."""

    def __init__(self, folder: Path) -> None:
        self.ports = dict(zip(("eu", "us"), free_ports(2), strict=True))
        regions = "".join(f'[regions.{name}]\naddress = "127.0.0.1:{port}"\n' for name, port in self.ports.items())
        (folder / "run.toml").write_text(f'[run]\nid = "try"\n[regions.asia]\n{regions}')
        init_run(folder / "certs", "try", ["asia", "eu", "us"])
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        addresses = {name: f"127.0.0.1:{port}" for name, port in self.ports.items()}
        async with contextlib.AsyncExitStack() as stack:
            for name, port in self.ports.items():
                identity = load_identity(self._folder / "certs" / name)
                others = dict.fromkeys({"asia", "eu", "us"} - {name})
                end = measuring_end(identity, others, dial=Dialer(identity, addresses), listen=("127.0.0.1", port))
                await stack.enter_async_context(end)
            self._ready.set()
            await self._stop.wait()

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(120)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(120)
        self._loop.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ends_of_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    # Patience with a machine that stands still: of a probe that comes back late, and of ends that come late.
    for module, name in ((ends, "LINK_S"), (requester, "REPLY_S"), (echoes, "UNANSWERED_AFTER_S"), (probes, "START_S")):
        monkeypatch.setattr(module, name, PATIENCE_S)
    with structlog.testing.capture_logs():  # they are in this process, and what they log is not what the command prints
        made = Ends(folder)
        made.start()
        yield made
        made.stop()


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a measurement prints; again where the machine stood still for longer than the whole of it takes."""
    for _ in range(ATTEMPTS):
        code = main(["measure", *arguments])
        said = capsys.readouterr()
        if code == 0:
            return said.out
    raise AssertionError(f"{arguments} ended with {code}: {said.err}")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(shown(capsys, *arguments, "--json"))
    return document


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    assert main(["measure", *arguments]) == code
    return capsys.readouterr().err


# ---- what it says ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ends_of_run")
def test_latency_of_a_region_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    document = told(capsys, "latency", "eu", "--region", "asia", "--load", *QUICK)
    assert (document["from"], document["to"]) == ("asia", "eu")
    assert [row["load"] for row in document["rows"]] == ["none", "out", "in"]
    for row in document["rows"]:
        assert row["answered"] + row["unanswered"] == 20
        assert 0 < row["min_seconds"] <= row["p50_seconds"] <= row["p99_seconds"] <= row["max_seconds"]
        assert row["jitter_seconds"] >= 0
        assert 0 <= row["retransmitted_share"] < 1


@pytest.mark.usefixtures("ends_of_run")
def test_latency_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "latency", "us", "-r", "eu", "--seconds", "0.2")
    assert max(len(line) for line in text.splitlines()) <= COLUMNS
    assert "TCP, which hides loss" in text
    assert "p99" in text
    assert "…" not in text


@pytest.mark.usefixtures("ends_of_run")
def test_bandwidth_of_a_region_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    document = told(capsys, "bandwidth", "us", "-r", "asia", *QUICK)
    assert (document["from"], document["to"]) == ("asia", "us")
    assert (document["seconds"], document["warm_up_seconds"]) == (0.2, 0.1)
    assert document["bytes_per_second"] > 0
    assert document["bytes_per_second_p10"] <= document["bytes_per_second_median"] <= document["bytes_per_second_p90"]
    assert set(document["cpu_seconds_per_gb"]) == {"sender", "receiver"}
    assert 0 <= document["retransmitted_bytes"] <= document["sent_bytes"]


@pytest.mark.usefixtures("ends_of_run")
def test_bandwidth_the_other_way_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "bandwidth", "us", "-r", "asia", "--reverse", *QUICK)
    assert "us -> asia, round trip" in text
    assert "Mbit/s" in text
    assert "…" not in text


@pytest.mark.usefixtures("ends_of_run")
def test_what_was_measured_until_ctrl_c_is_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = Measuring.link

    async def interrupted_at_us(measuring: Measuring, peer: str, asked: Any, **how: Any) -> Any:
        if peer == "us":
            raise KeyboardInterrupt
        return await link(measuring, peer, asked, **how)

    monkeypatch.setattr(Measuring, "link", interrupted_at_us)
    assert main(["measure", "mesh", "-r", "asia", "--out", "mesh.json", "--json", *QUICK]) == 130
    document = json.loads(capsys.readouterr().out)
    assert [(one["from"], one["to"]) for one in document["pairs"]] == [("asia", "eu")]
    assert document["ended_early"] is True
    assert not (folder / "mesh.json").exists(), "half a mesh is none"
    assert main(["measure", "mesh", "-r", "asia", *QUICK]) == 130
    assert "ended early: this is what was measured until then" in capsys.readouterr().out


@pytest.mark.usefixtures("ends_of_run")
def test_round_trips_are_shown_when_those_under_load_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def breaks(*_: Any, **__: Any) -> FlowMeasured:
        raise LinkLost("us: the stream ended")

    monkeypatch.setattr(MeasurementRequester, "flow", breaks)
    assert main(["measure", "latency", "us", "-r", "asia", "--load", *QUICK]) == 5
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()[:2]] == ["load", "none"]
    assert "us: the stream ended" in said.err


@pytest.mark.usefixtures("ends_of_run")
def test_a_mesh_that_can_not_be_written_in_the_end_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "mesh", "-r", "asia", "--out", "/dev/full", "--json", *QUICK]) == 6
    said = capsys.readouterr()
    assert len(json.loads(said.out)["pairs"]) == 6
    assert "--out /dev/full can't be written (No space left on device): what was measured is above" in said.err


@pytest.mark.usefixtures("ends_of_run")
def test_the_mesh_is_what_plan_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = shown(capsys, "mesh", "-r", "asia", "--out", "mesh.json", *QUICK)
    assert "…" not in table
    found = read_mesh(folder / "mesh.json")
    assert found.regions == ("asia", "eu", "us")
    assert len(found.goodput) == 6
    assert all(rate > 0 for rate in found.goodput.values())
    assert all(rtt > 0 for rtt in found.rtt_ns.values())
    document = json.loads((folder / "mesh.json").read_text())
    assert document["failures"] == []
    assert main(["plan", "--parameters", "1e6", "--mesh", "mesh.json", "--step-time", "1h"]) == 0


def test_a_mesh_with_a_region_missing_says_which(
    ends_of_run: Ends, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace(str(ends_of_run.ports["eu"]), str(free_port())))
    assert main(["measure", "mesh", "-r", "asia", "--json", *QUICK]) == 5
    told = capsys.readouterr()
    document = json.loads(told.out)
    measured = {(pair["from"], pair["to"]) for pair in document["pairs"]}
    assert measured == {("asia", "us"), ("us", "asia"), ("us", "eu")}, "us has another run.toml"
    assert len(document["failures"]) == 3
    assert "3 of 6 pairs could not be measured, the first from asia to eu" in told.err
    assert "connection refused" in told.err


def test_a_mesh_leaves_out_regions_that_nobody_can_dial_and_says_where_to_run_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = with_hidden({"regions": ["eu", "us"], "pairs": [1, 2], "failures": []}, ("asia",))
    assert (found["regions"], found["pairs"]) == (["asia", "eu", "us"], [1, 2])
    pairs = [(one["from"], one["to"]) for one in found["failures"]]
    assert pairs == [("asia", "eu"), ("asia", "us"), ("eu", "asia"), ("us", "asia")]
    assert with_hidden({"regions": ["eu", "us"]}, ()) == {"regions": ["eu", "us"]}
    address = f'address = "127.0.0.1:{free_port()}"'
    (folder / "run.toml").write_text(f'[run]\nid = "try"\n[regions.asia]\n[regions.eu]\n{address}\n')
    init_run(folder / "certs", "try", ["asia", "eu"])
    error = refused(capsys, 2, "mesh", "-r", "eu")
    assert "asia has no address, so nobody can ask it to measure: run `diloco-node measure mesh` in asia" in error


# ---- who we are, and who is there ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("latency", "eu"), 2, "certs has the keys of asia, eu, us: say who we are with --region NAME"),
        (("latency", "eu", "-r", "mars"), 2, "'mars' is not in [regions]"),
        (("latency", "eu", "-r", "eu"), 2, "PEER is 'eu': write another region of run.toml, one of asia, us"),
        (("latency", "asia", "-r", "eu"), 2, "asia has no address in run.toml"),
        (("latency", "venus", "-r", "eu"), 2, "PEER is 'venus': write another region of run.toml, one of asia, us"),
        (("mesh", "-r", "us", "--out", "no/where.json"), 2, "--out no/where.json can't be written"),
    ],
)
def test_what_is_wrong_is_said_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, text: str
) -> None:
    ports = free_ports(2)
    (folder / "run.toml").write_text(
        f'[run]\nid = "try"\n[regions.asia]\n[regions.eu]\naddress = "127.0.0.1:{ports[0]}"\n'
        f'[regions.us]\naddress = "127.0.0.1:{ports[1]}"\n'
    )
    init_run(folder / "certs", "try", ["asia", "eu", "us"])
    assert text in refused(capsys, code, *arguments)


@pytest.mark.parametrize(
    ("regions", "text"),
    [
        ((), "run.toml does not exist"),
        (("eu",), "there is one region in run.toml"),
        (("asia", "us"), "'eu' is not in [regions]"),
    ],
)
def test_a_mesh_needs_regions_and_to_be_one_of_them(
    folder: Path, capsys: pytest.CaptureFixture[str], regions: tuple[str, ...], text: str
) -> None:
    init_run(folder / "certs", "try", ["eu"])
    if regions:
        rows = [f'[regions.{name}]\naddress = "10.0.0.{number}:1"\n' for number, name in enumerate(regions)]
        (folder / "run.toml").write_text('[run]\nid = "try"\n' + "".join(rows))
    assert text in refused(capsys, 2, "mesh")


def write_run(folder: Path, **ports: int) -> None:
    regions = [f'[regions.{name}]\naddress = "127.0.0.1:{port}"\n' for name, port in ports.items()]
    (folder / "run.toml").write_text('[run]\nid = "try"\n' + "".join(regions))


def test_nobody_there_ends_with_5(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init_run(folder / "certs", "try", ["eu", "us"])
    write_run(folder, eu=free_port(), us=free_port())
    assert "is `diloco-node measure serve` running there" in refused(capsys, 5, "latency", "us", "-r", "eu")


@pytest.mark.usefixtures("ends_of_run")
def test_a_certificate_of_another_run_ends_with_4(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "certs").rename(folder / "old")
    init_run(folder / "certs", "try", ["us"])
    assert "another run's authority" in refused(capsys, 4, "latency", "eu", "-r", "us")


def test_our_key_is_found_where_it_lies(folder: Path) -> None:
    init_run(folder / "certs", "try", ["eu"])
    own = folder / "certs" / "eu"
    assert own_folder(folder / "certs", None) == own
    assert own_folder(own, None) == own
    assert own_folder(folder / "certs", "us") == folder / "certs" / "us"


def test_serve_says_where_and_ends_at_sigterm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init_run(folder / "certs", "try", ["eu", "us"])
    port = free_port()
    write_run(folder, eu=port, us=free_port())
    command = [*COMMAND, "measure", "serve", "-r", "eu", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"region": "eu", "host": "127.0.0.1", "port": port}
        assert told(capsys, "latency", "eu", "-r", "us", "--seconds", "0.2")["to"] == "eu"
        taken = subprocess.run(command, check=False, capture_output=True, text=True)
        assert taken.returncode == 3
        assert "Beside a running daemon `measure serve` needs a port of its own" in taken.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def test_serve_listens_at_measure_port_and_is_dialed_there(folder: Path) -> None:
    init_run(folder / "certs", "try", ["eu", "us"])
    (folder / "run.toml").write_text(
        '[run]\nid = "try"\n[regions.eu]\naddress = "10.0.0.1:7400"\nmeasure_port = 7402\n'
        '[regions.us]\naddress = "10.0.0.2:7400"\n'
    )
    eu, us = (own_links.Here.find(None, name) for name in ("eu", "us"))
    assert eu.listen()[1] == 7402
    assert us.listen()[1] == 7400
    assert us.addresses() == {"eu": "10.0.0.1:7402"}
    assert eu.addresses() == {"us": "10.0.0.2:7400"}
    assert eu.others() == ("us",)
