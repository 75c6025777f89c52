"""The transcripts of docs/operate.md: each command of members and certificates says what stands there."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.types import DiskNamedBody, Entry
from diloco_node.daemon.admin.members_document import MemberSigns, member_order, members_document
from diloco_node.main import main
from diloco_node.transport.authority import init_run
from tests.cli.test_orders import Region
from tests.kit.repository import ROOT
from tests.kit.s3_server import s3_server

FOUNDERS = ("eu-west", "us-east", "us-west")
FOLDER = b"f" * 16
RUN_TOML = '[run]\nid = "my-run"\n' + "".join(
    f'[regions.{name}]\naddress = "{name}:7400"\n' for name in (*FOUNDERS, "spot-1")
)
JOINED_AT = datetime(2026, 11, 26, 14, 2, 11)  # local, as `members list` shows it


def transcript(title: str) -> list[tuple[str, str, str]]:
    """(region, command, what it says) of each prompt in a section."""
    section = (ROOT / "docs" / "operate.md").read_text().split(f"### {title}\n")[1].split("\n### ")[0]
    blocks = re.findall(r"^```\n(.*?)^```\n", section, re.DOTALL | re.MULTILINE)
    prompt = re.compile(r"^([a-z0-9-]+)\$ (.*)\n((?:(?![a-z0-9-]+\$ ).*\n)*)", re.MULTILINE)
    steps = [step for block in blocks for step in prompt.findall(block)]
    return [step for step in steps if re.match("diloco-node (certs|members|drain) ", step[1])]


class Leader(Region):
    """us-east, which takes each change at once. A contributor that is asked for a vote has its folder by then."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.index = 214
        self.found(FOUNDERS)

    def found(self, founders: tuple[str, ...]) -> None:
        self.disks = DiskView(founders, Roster.of_voters(founders, dict.fromkeys(founders, FOLDER), since=1))
        self.show()

    def show(self) -> None:
        signs = MemberSigns(
            "us-east", frozenset(self.disks.roster.disks), since_unix={"ap-south": JOINED_AT.timestamp()}
        )
        members = members_document(self.disks, signs)
        for row in members["rows"]:
            if row["kind"] != "contributor":
                row["since_unix"] = None
        self.status = {"run_id": "my-run", "members": members}

    def _change(self, document: Mapping[str, Any]) -> None:
        addresses = dict.fromkeys(self.disks.roster.names, "x:1")
        body = member_order(document, self.disks.roster, addresses).body
        assert isinstance(body, MembershipBody)
        roster = self.disks.roster
        if body.kind == "voter":
            line = replace(roster.memberships[body.region], disk=FOLDER, address="", folders=1)
            roster = Roster((roster.memberships | {body.region: line}).values(), roster.changes)
        assert roster.change_fault(body) == ""
        roster = roster.changed(body, self.index)
        if body.kind == "witness":
            roster = roster.after(Entry(self.index, 1, b"", DiskNamedBody(body.region, FOLDER), b""))
        self.disks.begin(roster, self.index)
        self.index += 1
        self.show()

    def with_member(self, name: str, kind: str) -> None:
        self.disks.begin(self.disks.roster.changed(MembershipBody(name, kind, f"{name}:7400"), self.index), self.index)
        self.show()


@pytest.fixture
def leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leader]:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    (tmp_path / "state" / "us-east").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    init_run(Path("certs"), "my-run", FOUNDERS)
    server = Leader(tmp_path / "state" / "us-east")
    server.start()
    yield server
    server.stop()


def check(title: str, capsys: pytest.CaptureFixture[str]) -> int:
    """Run the commands of a section; how many they are."""
    steps = transcript(title)
    for region, command, said in steps:
        words = shlex.split(command)[1:]
        assert main(words if region == "us-east" else [word.replace(region, "us-east") for word in words]) == 0, command
        output = " ".join(capsys.readouterr().out.split())
        output = output if region == "us-east" else output.replace("us-east", region)
        assert not said or output == " ".join(said.split()), command
    return len(steps)


def test_growing_and_then_shrinking_say_what_the_page_shows(leader: Leader, capsys: pytest.CaptureFixture[str]) -> None:
    assert check("Grow a run", capsys) == 4
    assert check("Shrink a run", capsys) == 4


def test_a_spot_machine_leaves_as_the_page_shows(leader: Leader, capsys: pytest.CaptureFixture[str]) -> None:
    leader.with_member("spot-1", "contributor")
    assert check("Spot machines", capsys) == 2


def test_two_sites_get_a_witness_and_give_it_back_as_the_page_shows(
    leader: Leader, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    leader.found(FOUNDERS[:2])
    with s3_server("bucket") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert check("Two sites", capsys) == 3
