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
from diloco_node.daemon.admin.admin_server import AdminHandlers, AdminServer
from diloco_node.errors import ConfigError
from diloco_node.lab.demo.demo_options import DemoOptions
from diloco_node.lab.demo.demo_wan import DemoOutage, DemoWan, wan_lines
from diloco_node.lab.demo.region_processes import RegionProcess
from diloco_node.lab.wan import emulation
from diloco_node.lab.wan import emulation_state as state
from diloco_node.lab.wan.namespaces import namespaces_of
from diloco_node.main import main
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
    monkeypatch.setattr(emulation, "find", lambda _: SimpleNamespace(places=lambda: places))
    monkeypatch.setattr(emulation, "command", command)
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
    monkeypatch.setattr(emulation, "choose_backend", lambda wanted: pytest.fail("nothing may be tried yet"))
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
        ({"wan": NETEM / "us-4.toml", "has_outage": True, "wan_backend": "none"}, "can't cut anything"),
        ({"wan": NETEM / "none.toml"}, "can't be read"),
        ({"wan": NETEM / "us-4.toml", "wan_backend": "magic"}, "'magic' is unknown"),
    ],
)
def test_a_demo_refuses_a_wan_that_it_cannot_have(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        DemoWan(DemoOptions(**options))


def test_an_outage_without_a_wan_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--outage"]) == 2
    assert "add --wan" in capsys.readouterr().err


async def test_a_demo_without_a_back_end_says_so_and_runs_on_loopback() -> None:
    wan = DemoWan(DemoOptions(wan=NETEM / "us-4.toml", wan_backend="none", regions=3))
    said: list[str] = []
    await wan.up(said.append)
    assert "back-end none" in said[0]
    assert "neither delay nor rate is emulated" in said[0]
    assert wan.names == ("us-east", "us-central", "us-south")
    assert wan.place("us-east") is None
    report = {"wan": wan.report(), "outage": None}
    assert report["wan"]["pairs"] == []
    assert "back-end none" in wan_lines(report)[0]
    await wan.down()


class FakeWan:
    def __init__(self) -> None:
        self.commands: list[tuple[str, str]] = []

    async def cut(self, region: str) -> None:
        self.commands.append(("cut", region))

    async def heal(self, region: str) -> None:
        self.commands.append(("heal", region))


class FakeRegion(RegionProcess):
    """Its status as a function of how often it was asked, and of what the WAN was told."""

    def __init__(self, name: str, wan: FakeWan) -> None:
        super().__init__(name, 1, Path("/nowhere"))
        self.wan = wan
        self.asked = 0
        self.asked_since_heal = 0

    async def poll(self) -> dict[str, Any]:
        self.asked += 1
        is_victim = ("cut", self.name) in self.wan.commands
        is_healed = ("heal", "c") in self.wan.commands
        self.asked_since_heal += is_healed
        version = 10 * self.asked
        if is_victim:
            # Stands at 10 while it is cut; catches up answer by answer, and its digest comes later still.
            version = 10 if not is_healed else min(10 + 10 * self.asked_since_heal, 40)
        self.status = {
            "role": "leader" if self.name == "b" else "follower",
            "inner_steps": 100 * self.asked,
            "val_loss": 2.0 if not is_healed else 1.9 + 0.01 * self.asked_since_heal,
            "rounds_committed": 7 * self.asked,
            "versions": [version, version],
            "digest": None if is_victim and self.asked_since_heal < 5 else f"digest of {version}",
        }
        return self.status


async def test_an_outage_cuts_a_follower_and_watches_it_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_wait(seconds: float) -> None:
        waits.append(seconds)

    waits: list[float] = []
    monkeypatch.setattr(asyncio, "sleep", no_wait)
    wan = FakeWan()
    regions = [FakeRegion(name, wan) for name in "abc"]
    outage = DemoOutage(wan, regions, lambda line: None, cycle_steps=300)  # type: ignore[arg-type]
    await outage.run(100)
    assert wan.commands == [("cut", "c"), ("heal", "c")]
    assert waits[:2] == [40, pytest.approx(20)]
    document = outage.document
    assert (document["region"], document["inner_steps"], document["commits_of_others"]) == ("c", 100, 7)
    assert document["seconds_to_versions_at_heal"] <= document["seconds_to_equal_digests"]
    # The others stood at 30 when it was healed; its digest is known from its fifth answer on, and two cycles of 300
    # steps are over with the sixth.
    assert regions[2].asked_since_heal == 6
    assert document["val_loss_at_heal"] == dict.fromkeys("abc", 2.0)
    assert document["val_loss_one_cycle_later"] == {name: pytest.approx(1.96) for name in "abc"}
    assert document["val_loss_change_worst"] == pytest.approx(-0.02)
    lines = wan_lines({"wan": {"backend": "tun", "why": "x", "pairs": []}, "outage": document})
    assert "cut off for" in lines[1]
    assert "-2.0% in the worst region" in lines[2]


async def test_status_finds_a_region_in_another_namespace_by_its_socket(tmp_path: Path) -> None:
    folder = tmp_path / "us-east"
    folder.mkdir()
    handlers = AdminHandlers(
        status=lambda: {"region": "us-east", "step": 3},
        snapshot=dict,
        not_ready_reason=str,
        finish=print,
        drain=print,
        set_budget=lambda change: change,
        measure=None,
        expel=None,
        revoke=None,
        lift_quarantine=None,
        change_members=None,
        change_settings=None,
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
        choice = emulation.choose_backend()
        if choice.backend == "none":
            pytest.skip(f"NOTHING of `wan` is tested on this machine: {choice.why}")
        file = tmp_path / "pair.toml"
        file.write_text(
            '[regions.a]\negress = "50Mbit/s"\n[regions.b]\negress = "50Mbit/s"\n[default_link]\nrtt = "20ms"\n'
        )

        def tell(*arguments: str) -> dict[str, Any]:
            assert main(["wan", *arguments, "--json"]) == 0
            document: dict[str, Any] = json.loads(capsys.readouterr().out)
            return document

        made = tell("up", str(file), "--name", name, "--probe")
        assert made["backend"] == choice.backend
        assert [region["name"] for region in made["regions"]] == ["a", "b"]
        assert len(made["pairs"]) == 2
        for pair in made["pairs"]:  # how near they are to the file is test_wan_emulation's
            assert (pair["rtt_ms"], pair["rate_bits_per_s"], pair["loss"]) == (20.0, 50_000_000, 0.0)
            assert pair["rtt_measured_ms"] > 19.5
            assert 0 < pair["goodput_bits_per_s"] < 1.5 * pair["rate_bits_per_s"]
            assert pair["probes"] > pair["unanswered"] >= 0
        assert tell("cut", "a", "--from", "b", "--one-way", "in", "--name", name)["conditions"] == ["cut a <- b"]
        assert tell("set", "b", "--delay", "30ms", "--loss", "1%", "--rate", "1Mbit/s", "--name", name)[
            "conditions"
        ] == ["cut a <- b", "changed b"]
        assert tell("status", "--name", name.upper())["conditions"] == ["cut a <- b", "changed b"]
        assert tell("heal", "b", "--name", name) == {"conditions": [], "healed": 2}
        assert main(["wan", "status", "--name", name]) == 0
        assert "in force: nothing, all links are as in the file" in capsys.readouterr().out
        assert main(["wan", "set", "a", "--name", name]) == 2
        assert "nothing to set" in capsys.readouterr().err
        assert main(["wan", "down", f"{name[:1]}-{name[1:]}"]) == 0
        assert "removed" in capsys.readouterr().out
        assert namespaces_of(name) == []
        assert main(["wan", "down", name]) == 2
