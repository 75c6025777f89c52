"""`diloco-node wan` and `demo --wan` at the command line: what is refused, and how."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from diloco_node.cli.admin_client import ask_in
from diloco_node.daemon.admin.admin_server import AdminServer
from diloco_node.errors import ConfigError
from diloco_node.lab.demo.demo_options import DemoOptions
from diloco_node.lab.demo.demo_wan import DemoWan, wan_lines
from diloco_node.lab.wan import control, emulation
from diloco_node.lab.wan import emulation_state as state
from diloco_node.lab.wan.namespaces import namespaces_of
from diloco_node.lab.wan.topology import Outage, Scope
from diloco_node.main import main
from diloco_node.numeric import NS_PER_S
from tests.kit.repository import ROOT

NETEM = ROOT / "netem"


@pytest.mark.parametrize(
    "arguments", [["up", str(NETEM / "us-4.toml")], ["down"], ["cut", "a"], ["heal", "a"], ["set", "a"], ["status"]]
)
def test_without_root_every_command_says_what_to_do(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["/home/me/my venv/bin/diloco-node", "wan", *arguments])
    assert main(["wan", *arguments]) == 2
    error = capsys.readouterr().err
    assert "need root" in error
    assert "sudo '/home/me/my venv/bin/diloco-node' wan" in error
    assert error.count("\n") == 1


def test_heal_without_a_region_takes_back_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[dict[str, Any]] = []

    def command(_: Any, document: dict[str, Any]) -> dict[str, Any]:
        sent.append(document)
        return {"conditions": [], "healed": len(sent)}

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    places = [SimpleNamespace(region=name) for name in ("a", "b")]
    monkeypatch.setattr(emulation, "find", lambda _: SimpleNamespace(places=lambda: places, socket=None))
    monkeypatch.setattr(control, "request", command)
    assert main(["wan", "heal", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"conditions": [], "healed": 3}
    assert [(one["do"], one["region"], one["direction"]) for one in sent] == [
        ("heal", "a", "both"),
        ("heal", "b", "both"),
    ]
    assert main(["wan", "heal", "--one-way", "out"]) == 2
    assert "name the region" in capsys.readouterr().err


def test_a_wrong_file_is_found_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulation, "emulation_fault", lambda: pytest.fail("nothing may be tried yet"))
    (tmp_path / "bad.toml").write_text('[regions.a]\negress = "fast"\n')
    assert main(["wan", "up", str(tmp_path / "bad.toml")]) == 2
    assert "it needs 2 to" in capsys.readouterr().err


def test_an_emulation_that_is_not_there_is_named_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(emulation, "runs", lambda: [])
    monkeypatch.setattr(state, "runs", lambda: [])
    assert main(["wan", "status"]) == 2
    assert "diloco-node wan up netem/us-4.toml" in capsys.readouterr().err
    assert main(["wan", "cut", "a", "--name", "x"]) == 2
    assert "no emulation x; there are: none" in capsys.readouterr().err
    assert main(["wan", "cut", "a", "--one-way", "up"]) == 2
    assert "use out or in" in capsys.readouterr().err
    assert main(["wan", "down"]) == 0
    monkeypatch.setattr(state, "runs", lambda: ["one", "probe7", "two"])
    assert main(["wan", "down"]) == 2
    assert "one, probe7, two; name one, or give --all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"wan": NETEM / "us-4.toml", "regions": 5}, "has 4 regions, not 5"),
        ({"wan": NETEM / "lossy.toml", "has_outage": True}, "timetable of outages already"),
        ({"wan": NETEM / "us-4.toml", "has_outage": True, "regions": 2}, "needs three regions"),
        ({"wan": NETEM / "none.toml"}, "can't be read"),
    ],
)
def test_a_demo_refuses_a_wan_that_it_cannot_have(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DemoWan(DemoOptions(**options))


def test_an_outage_without_a_wan_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--outage"]) == 2
    assert "add --wan" in capsys.readouterr().err


def test_a_demo_without_an_emulation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "emulation_fault", lambda: "no /dev/net/tun")
    with pytest.raises(ConfigError, match="no WAN can be emulated here: no /dev/net/tun"):
        DemoWan(DemoOptions(wan=NETEM / "us-4.toml"))


def test_an_outage_is_a_line_of_the_timetable_in_the_middle_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "emulation_fault", lambda: "")
    wan = DemoWan(DemoOptions(wan=NETEM / "us-4.toml", regions=3, has_outage=True, seconds=100))
    assert wan.topology.names == ("us-east", "us-central", "us-south")
    assert wan.topology.outages == (Outage(40 * NS_PER_S, 20 * NS_PER_S, Scope("us-south")),)
    assert wan.report()["timetable"] == [{"at_seconds": 40.0, "seconds": 20.0, "what": "cut us-south"}]
    outage = {"region": "us-south", "seconds": 20.0, "inner_steps": 8, "commits_of_others": 5, "seconds_to_merge": 1.5}
    report = {"wan": wan.report(), "outage": outage}
    assert (
        "us-south cut off for 20.0 s: 8 steps of its own, 5 rounds of the others, in a merge again 1.5 s"
        in (wan_lines(report)[-1])
    )
    assert "in no merge again" in wan_lines(report | {"outage": outage | {"seconds_to_merge": None}})[-1]


async def test_status_finds_a_region_in_another_namespace_by_its_socket(tmp_path: Path) -> None:
    folder = tmp_path / "us-east"
    folder.mkdir()
    handlers: Any = SimpleNamespace(
        status=lambda: {"region": "us-east", "step": 3},
        snapshot=dict,
        not_ready_reason=str,
        running_node=None,
        drain=print,
        set_budget=lambda change: change,
        measure=None,
        expel=None,
        revoke=None,
        lift_quarantine=None,
        start_learner=None,
    )
    server = AdminServer(handlers, CollectorRegistry(), port=0, state_dir=folder)
    await server.start()
    # Where that port is, this process is not: nothing listens on the one in the file.
    (folder / "admin.port").write_text("1\n")
    assert await asyncio.to_thread(ask_in, folder) == {"region": "us-east", "step": 3}
    await server.stop()
    answer = await asyncio.to_thread(ask_in, folder)
    assert (answer["region"], "no status from" in answer["error"]) == ("us-east", True)


@pytest.mark.system
@pytest.mark.skipif(
    os.geteuid() != 0, reason="network namespaces need root: NOTHING of `wan` is tested on this machine"
)
class TestReal:
    @pytest.fixture
    def name(self) -> Iterator[str]:
        name = f"k{os.getpid()}"
        yield name
        if name in state.runs():
            emulation.down(name)

    def test_the_commands_drive_an_emulation_from_up_to_down(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if fault := emulation.emulation_fault():
            pytest.skip(f"NOTHING of `wan` is tested on this machine: {fault}")
        file = tmp_path / "pair.toml"
        file.write_text(
            '[regions.a]\negress = "50Mbit/s"\n[regions.b]\negress = "50Mbit/s"\n[default_link]\nrtt = "20ms"\n'
        )

        def tell(*arguments: str) -> dict[str, Any]:
            assert main(["wan", *arguments, "--json"]) == 0
            document: dict[str, Any] = json.loads(capsys.readouterr().out)
            return document

        made = tell("up", str(file), "--name", name)
        assert [region["name"] for region in made["regions"]] == ["a", "b"]
        assert tell("cut", "a", "--from", "b", "--one-way", "in", "--name", name)["conditions"] == ["cut a <- b"]
        assert tell("set", "b", "--delay", "30ms", "--loss", "1%", "--rate", "1Mbit/s", "--name", name)[
            "conditions"
        ] == ["cut a <- b", "changed b"]
        assert tell("status", "--name", name)["conditions"] == ["cut a <- b", "changed b"]
        assert tell("heal", "b", "--name", name) == {"conditions": [], "healed": 2}
        assert main(["wan", "status", "--name", name]) == 0
        assert "in force: nothing, all links are as in the file" in capsys.readouterr().out
        assert main(["wan", "set", "a", "--name", name]) == 2
        assert "nothing to set" in capsys.readouterr().err
        assert main(["wan", "down", name]) == 0
        assert "removed" in capsys.readouterr().out
        assert namespaces_of(name) == []
        assert main(["wan", "down", name]) == 2
