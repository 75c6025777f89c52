"""`diloco-node measure` by way of a running daemon: a real admin socket, and what a daemon would say behind it."""

import asyncio
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from diloco_node.cli.measure import live_measurement as daemon
from diloco_node.cli.measure import own_links
from diloco_node.cli.measure.live_measurement import find_daemon
from diloco_node.cli.plan.inputs import read_mesh
from diloco_node.daemon.admin.admin_server import AdminServer
from diloco_node.errors import ConfigError, DilocoError, PeersUnreachable
from diloco_node.main import main
from diloco_node.measure.measurement import flow_document, latency_document, pair_document
from diloco_node.measure.requester import FlowMeasured
from diloco_node.measure.samples import summarise_rtts
from diloco_node.state_names import ADMIN_SOCKET_NAME, ADMIN_TOKEN_NAME
from diloco_node.transport.authority import init_run
from diloco_node.unix_sockets import socket_path
from diloco_node.wire.measure_messages import LinkMeasured, MeasurementReceived, MeasurementSent

COLUMNS = 100
RUN_TOML = '[run]\nid = "try"\n' + "".join(
    f'[regions.{name}]\naddress = "10.0.0.{number}:7400"\n' for number, name in enumerate(("asia", "eu", "us"), start=1)
)
PAIR = LinkMeasured(1, 5_000_000, 6_000_000, 1000, 40, 0, 10**7, 10**7, 10**7, 10**8, 10**5)
LATENCY = latency_document(
    "none", replace(summarise_rtts([5_000_000, 6_000_000], lost_count=1), retransmitted=0.01, tcp_rtt_min_ns=4_000_000)
)
FLOW = flow_document(
    FlowMeasured(
        MeasurementReceived(1, 10**7, 10**7, 9 * 10**6, 11 * 10**6, 10**9, 10**8, 10**9),
        MeasurementSent(1, 10**8, 10**9, 11 * 10**6, -1, -1),
        10**7,
    ),
    1,
)


class Region:
    """A daemon's admin port in a thread of its own; `says` makes the answer."""

    def __init__(self, name: str, folder: Path) -> None:
        self.asked: list[dict[str, Any]] = []
        self.says: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
        self.so_far: dict[str, Any] = {}
        self.was_seen = asyncio.Event()
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        handlers: Any = SimpleNamespace(
            status=dict,
            snapshot=dict,
            not_ready_reason=str,
            finish=print,
            set_budget=dict,
            measure=self._measure,
            expel=None,
            revoke=None,
            lift_quarantine=None,
            change_members=None,
            change_settings=None,
            start_learner=None,
            drain=None,
        )
        self._server = AdminServer(handlers, CollectorRegistry(), port=0, state_dir=self.folder)

    async def _measure(
        self, document: Mapping[str, Any], on_progress: Callable[[str], None], on_partial: Any
    ) -> Mapping[str, Any]:
        self.asked.append(dict(document))
        on_progress("round trips")
        if self.so_far:
            on_partial(self.so_far)
            await self.was_seen.wait()
        return {**self.says(document), "through": "daemon"}

    def go_on(self) -> None:
        self._loop.call_soon_threadsafe(self.was_seen.set)

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(120)
        (self.folder / "admin.port").write_text(f"{self._server.port}\n")

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(120)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)
        self._loop.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_TOML)
    init_run(tmp_path / "certs", "try", ["asia", "eu", "us"])
    return tmp_path


@pytest.fixture
def eu(folder: Path) -> Iterator[Region]:
    made = Region("eu", folder / "state")
    made.start()
    yield made
    made.stop()


def state_of(folder: Path) -> Path:
    from diloco_node.cli.options import load

    return load(folder / "run.toml").state_dir("eu")


def test_the_state_folder_is_where_these_tests_put_it(folder: Path) -> None:
    assert state_of(folder).resolve() == (folder / "state" / "eu").resolve()


# ---- what it asks and prints -----------------------------------------------------------------------------------------


def test_latency_goes_through_the_daemon_that_runs_here(eu: Region, capsys: pytest.CaptureFixture[str]) -> None:
    eu.says = lambda _: {"from": "eu", "to": "us", "address": None, "seconds": 2.0, "rows": [LATENCY]}
    assert main(["measure", "latency", "us", "--seconds", "2", "--load", "--most", "64", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["through"] == "daemon"
    assert document["rows"] == [LATENCY]
    assert eu.asked == [
        {
            "what": "latency",
            "peer": "us",
            "load": True,
            "seconds": 2.0,
            "warm_up_seconds": None,
            "bytes_max": 64 * 2**20,
        }
    ]
    assert main(["measure", "latency", "us"]) == 0
    assert "retrans." in capsys.readouterr().out


def test_bandwidth_goes_through_the_daemon_that_runs_here(eu: Region, capsys: pytest.CaptureFixture[str]) -> None:
    eu.says = lambda _: {
        "from": "eu",
        "to": "us",
        "address": "10.0.0.3:7400",
        "warm_up_seconds": 1.0,
        "seconds": 5.0,
        "rtt_seconds": 0.04,
        "congestion_control": {"here": "bbr", "there": None},
        "limit_bytes_per_second": 12_500_000,
        "limited_by": "region",
        **FLOW,
    }
    assert main(["measure", "bandwidth", "us", "-r", "eu", "--reverse", "--warm-up", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "through the running daemon, over the run's link, in its measurement lane; limited to 100 Mbit/s" in text
    assert ["1", "80.0"] in [line.split()[:2] for line in text.splitlines()]
    assert "…" not in text
    asked = {"what": "bandwidth", "peer": "us", "reverse": True, "seconds": 5.0, "warm_up_seconds": 0.5}
    assert eu.asked == [asked]


@pytest.mark.parametrize(("how", "code"), [("Ctrl-C", 130), ("the daemon ends", 5), ("an error", 1)])
def test_what_there_is_so_far_is_shown_when_it_is_cut_short(
    eu: Region, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str, code: int
) -> None:
    eu.so_far = {"from": "eu", "to": "us", "address": None, "seconds": 2.0, "rows": [LATENCY]}
    eu.says = failing(SystemError("broke") if how == "the daemon ends" else DilocoError("us can't"))  # type: ignore[arg-type]
    follow = daemon.follow

    def followed(
        answer: Any, on_progress: Callable[[str], None], on_partial: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        def kept(document: dict[str, Any]) -> None:
            on_partial(document)
            eu.go_on()
            if how == "Ctrl-C":
                raise KeyboardInterrupt

        return follow(answer, on_progress, kept)

    monkeypatch.setattr(daemon, "follow", followed)
    assert main(["measure", "latency", "us", "--load", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document == {**eu.so_far, "ended_early": True}


def test_the_mesh_of_a_daemon_is_what_plan_reads(eu: Region, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("asia", "eu", "us")
    pairs = [pair_document((a, b), PAIR) for a in names for b in names if a != b]
    eu.says = lambda _: {"regions": list(names), "pairs": pairs, "failures": [], "seconds": 5.0}
    assert main(["measure", "mesh", "--out", "mesh.json"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    assert len(read_mesh(folder / "mesh.json").goodput) == 6
    eu.says = lambda _: {
        "regions": list(names),
        "pairs": pairs[1:],
        "failures": [{"from": "asia", "to": "eu", "error": "eu has no link to asia at 10.0.0.1:7400: refused"}],
        "seconds": 5.0,
    }
    assert main(["measure", "mesh"]) == 5
    error = capsys.readouterr().err
    assert "1 of 6 pairs could not be measured, the first from asia to eu: eu has no link to asia at 10.0.0.1" in error


# ---- which way -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("latency", "us", "--alone"), ("bandwidth", "us", "--alone")])
def test_a_measuring_end_is_dialed_when_the_user_names_it(eu: Region, arguments: tuple[str, ...]) -> None:
    (Path.cwd() / "run.toml").write_text(RUN_TOML.replace("10.0.0.3:7400", "127.0.0.1:9"))
    assert main(["measure", *arguments, "-r", "eu"]) == 5
    assert eu.asked == []


def test_a_daemon_that_died_is_none(folder: Path) -> None:
    made = Region("eu", folder / "state")
    made.start()
    assert find_daemon(None, "eu") == made.folder.resolve()
    assert find_daemon(None, None) == made.folder.resolve()
    assert find_daemon(None, "us") is None
    made.stop()
    (made.folder / "admin.port").write_text("1\n")
    assert find_daemon(None, "eu") is None
    socket_path(made.folder, ADMIN_SOCKET_NAME).unlink(missing_ok=True)
    assert find_daemon(None, "eu") is None


def test_without_run_toml_nothing_is_measured(folder: Path) -> None:
    (folder / "run.toml").unlink()
    with pytest.raises(ConfigError, match=r"run.toml does not exist"):
        find_daemon(None, None)


def test_of_several_daemons_one_has_to_be_named(eu: Region, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    us = Region("us", folder / "state")
    us.start()
    try:
        assert main(["measure", "latency", "asia"]) == 2
        assert "2 regions run on this machine (eu, us): say from which one" in capsys.readouterr().err
        assert main(["measure", "latency", "asia", "-r", "us", "--json"]) == 0
        assert [len(one.asked) for one in (eu, us)] == [0, 1]
    finally:
        us.stop()


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def failing(error: DilocoError) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    def says(_: Mapping[str, Any]) -> dict[str, Any]:
        raise error

    return says


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PeersUnreachable("eu has no link to us at 10.0.0.3:7400: refused"), 5),
        (ConfigError("peer 'mars' is no region that eu knows: name one of asia, us"), 2),
        (DilocoError("us can't: us is busy with another measurement"), 1),
    ],
)
def test_what_the_daemon_says_is_the_commands_own_error(
    eu: Region, capsys: pytest.CaptureFixture[str], error: DilocoError, code: int
) -> None:
    eu.says = failing(error)
    assert main(["measure", "latency", "us"]) == code
    captured = capsys.readouterr()
    assert str(error) in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("bandwidth", "us", "--most", "0"), "Input should be greater than or equal to 16"),
        (("latency", "us", "-r", "mars"), "'mars' is not in [regions]"),
    ],
)
def test_what_there_is_not_is_refused(
    eu: Region, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str
) -> None:
    assert main(["measure", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert eu.asked == []


def test_a_wrong_token_is_said(eu: Region, capsys: pytest.CaptureFixture[str]) -> None:
    (eu.folder / ADMIN_TOKEN_NAME).write_text("another")
    assert main(["measure", "latency", "us"]) == 2
    assert "eu refuses: missing or wrong bearer token" in capsys.readouterr().err


def test_a_daemon_that_ends_in_the_middle_is_unreachable(eu: Region, capsys: pytest.CaptureFixture[str]) -> None:
    eu.says = failing(SystemError("the daemon broke"))  # type: ignore[arg-type]
    assert main(["measure", "latency", "us"]) == 5
    assert "went away in the middle of a measurement" in capsys.readouterr().err


def test_a_terminal_sees_what_goes_on_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with own_links.progress("asking") as on_progress:
        for now in ("pair 1 of 6", "pair 1 of 6", "pair 2 of 6"):
            on_progress(now)
    assert "pair 2 of 6" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "0:00:00" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with own_links.progress("asking") as on_progress:
        on_progress("pair 1 of 6")
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_cpu_time_is_that_of_both_ends() -> None:
    assert FLOW["cpu_seconds_per_gb"] == {"sender": 10.0, "receiver": 10.0}
    assert (FLOW["sent_bytes"], FLOW["retransmitted_bytes"]) == (None, None)
    assert FLOW["wire_bytes_per_second"] == 11 * 10**6
