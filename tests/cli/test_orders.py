"""`diloco-node budget set`, `quarantine lift` and `learner start` against a real admin socket."""

import asyncio
import errno
import json
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from diloco_node.cli.orders import give_order
from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.types import RunSettings
from diloco_node.daemon.admin.admin_server import AdminServer
from diloco_node.daemon.admin.members_document import MemberSigns, members_document
from diloco_node.daemon.region_budget import changed_plan
from diloco_node.daemon.settings_watch import settings_order
from diloco_node.errors import ConfigError, DilocoError, DiskRefused
from diloco_node.main import main
from diloco_node.state_names import ADMIN_TOKEN_NAME
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import load_identity

RUN_TOML = """
[run]
id = "try"
[regions.eu]
address = "10.0.0.1:7400"
[regions.us]
address = "10.0.0.2:7400"
[regions.asia]
address = "10.0.0.3:7400"
"""


class Region:
    """An admin port in a thread of its own, as a daemon would have."""

    def __init__(self, folder: Path) -> None:
        self.plan = BudgetPlan()
        self.finished: list[str] = []
        self.expelled: list[str] = []
        self.revocations: list[tuple[str, str]] = []
        self.changes: list[Mapping[str, Any]] = []
        self.status: dict[str, Any] = {}
        self.fault: Exception | None = None
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        node = SimpleNamespace(
            finish=self.finished.append, change_members=self._change, change_settings=self._set_in_run
        )
        handlers: Any = SimpleNamespace(
            running_node=lambda purpose: node,
            status=lambda: self.status,
            snapshot=dict,
            not_ready_reason=str,
            drain=lambda: self.finished.append("drained"),
            set_budget=self._set,
            measure=None,
            expel=self._expel,
            revoke=self._revoke,
            lift_quarantine=self._lift,
            start_learner=lambda: "stopped",
        )
        self._server = AdminServer(handlers, CollectorRegistry(), port=0, state_dir=folder)

    def _set(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.fault is not None:
            raise self.fault
        self.plan = changed_plan(self.plan, document, ("us",))
        return self.plan.to_plain()

    def _expel(self, peer: str) -> None:
        if peer != "us":
            raise ConfigError(f"{peer} leads: stop it first")
        self.expelled.append(peer)

    def _change(self, document: Mapping[str, Any]) -> None:
        if document["region"] == "asia":
            raise ConfigError("3 voters, all are there: removing asia leaves 2; --force takes that risk")
        self.changes.append(document)

    def _set_in_run(self, document: Mapping[str, Any]) -> list[str]:
        order, lines = settings_order(document, RunSettings())
        self.changes.append(document)
        assert order.body is not None
        return lines

    def _revoke(self, region: str, pem: str) -> str:
        if region != "us":
            raise ConfigError(f"{region} has shown eu no certificate since this daemon began")
        self.revocations.append((region, pem))
        return "ab12"

    def _lift(self, peer: str) -> bool:
        if peer not in ("asia", "us"):
            raise ConfigError(f"{peer!r} is none of this region's peers: asia, us")
        return peer == "us"

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(120)
        (self._folder / "admin.port").write_text(f"{self._server.port}\n")

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(120)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)
        self._loop.close()


@pytest.fixture
def region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Region]:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    (tmp_path / "state" / "eu").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    server = Region(tmp_path / "state" / "eu")
    server.start()
    yield server
    server.stop()


def test_the_only_region_of_run_toml_here_is_meant(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget", "set", "--egress", "2Gbit/s"]) == 0
    assert capsys.readouterr().out == "eu: egress 2,000,000,000 bit/s\n"
    assert region.plan.limits.egress == 250_000_000


def test_help_of_an_order_is_about_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["quarantine", "add"],
        ["quarantine", "lift"],
        ["budget", "show"],
        ["finish"],
        ["drain"],
        ["learner", "start"],
        ["config", "set"],
    ):
        assert main([*words, "--help"]) == 0
        text = capsys.readouterr().out
        assert "measure" not in text
        assert f"diloco-node {' '.join(words)} " in text, "an example"


def test_a_region_is_expelled_or_the_refusal_says_why(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quarantine", "add", "us", "state/eu"]) == 0
    assert "eu expels us when a majority agrees" in capsys.readouterr().out
    assert region.expelled == ["us"]
    assert main(["quarantine", "add", "asia"]) == 2
    assert "eu refuses: asia leads: stop it first" in capsys.readouterr().err


def test_a_certificate_is_revoked_or_the_refusal_says_why(
    region: Region, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", "revoke", "us", "state/eu"]) == 0
    assert "eu revokes certificate ab12 of us when a majority agrees" in capsys.readouterr().out
    (tmp_path / "old.pem").write_text("-----BEGIN")
    assert main(["certs", "revoke", "us", "--certificate", "old.pem"]) == 0
    assert region.revocations == [("us", ""), ("us", "-----BEGIN")]
    capsys.readouterr()
    assert main(["certs", "revoke", "asia"]) == 2
    assert "eu refuses: asia has shown eu no certificate" in capsys.readouterr().err
    assert main(["certs", "revoke", "us", "--certificate", "absent.pem"]) == 2
    assert "absent.pem is no certificate that can be read" in capsys.readouterr().err


def test_settings_of_the_run_are_set_by_several_words(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "set", "rounds.sync_every=32", "rounds.overlap_steps=4", "eu"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "eu orders rounds.sync_every 24 -> 32",
        "eu orders rounds.overlap_steps 2 -> 4",
        "Each region says when it has it. Change run.toml in each, too: a start names what differs",
    ]
    assert region.changes == [{"set": ["rounds.sync_every=32", "rounds.overlap_steps=4"]}]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["rounds.codec_up=int8"], "eu refuses: rounds.codec_up can't be set in a run: a run keeps it"),
        (["rounds.sync_every=0"], 'eu refuses: rounds.sync_every is "0" (config set): it must be'),
        (["eu"], "eu: write KEY=VALUE for each setting, and at most one region"),
        (["rounds.sync_every=3", "eu", "us"], "at most one region"),
        (["x=1"] * 65, "eu refuses: the body must name 1 to 64 settings"),
    ],
)
def test_settings_that_can_not_be_set_are_refused(
    region: Region, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert main(["config", "set", *words]) == 2
    assert reason in capsys.readouterr().err
    assert region.changes == []


def test_a_run_is_ended_with_a_reason(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finish"]) == 0
    assert "eu asks the leader to end the run" in capsys.readouterr().out
    assert main(["finish", "state/eu", "--reason", "the loss is \x1b[2J flat"]) == 0
    assert region.finished == ["asked by the operator", r"the loss is \x1b[2J flat"]
    assert main(["finish", "--reason", ""]) == 2
    assert main(["finish", "--reason", "x" * 513]) == 2
    assert "eu refuses: reason must be a text of 1 to 512 bytes" in capsys.readouterr().err
    assert main(["finish", "us"]) == 5
    assert len(region.finished) == 2
    assert main(["drain", "state/eu"]) == 0
    assert region.finished[2:] == ["drained"]


def test_the_budget_in_force_is_shown(region: Region, capsys: pytest.CaptureFixture[str]) -> None:
    region.status = {"reason": "waits for the learner to list its tensors"}
    assert main(["budget", "show"]) == 5
    assert "eu has no budget in force: waits for the learner" in capsys.readouterr().err
    row = {"egress_bytes_per_s": 250_000_000, "ingress_bytes_per_s": None}
    region.status = {"budget": row | {"peers": {"us": {"egress_bytes_per_s": 10**6, "ingress_bytes_per_s": 2 * 10**6}}}}
    assert main(["budget", "show"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "eu           out               in",
        "in all   2Gbit/s  without a limit",
        "with us  8Mbit/s         16Mbit/s",
    ]
    assert main(["budget", "show", "eu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == region.status["budget"]


def test_by_name_by_folder_and_for_one_peer(region: Region) -> None:
    assert main(["budget", "set", "eu", "--ingress", "8Mbit/s"]) == 0
    assert (region.plan.limits.egress, region.plan.limits.ingress) == (None, 10**6)
    assert main(["budget", "set", "state/eu", "--egress", "8Mbit/s", "--peer", "us"]) == 0
    assert region.plan.peer_limits("us").egress == 10**6
    assert main(["budget", "set", "eu", "--ingress", "none"]) == 0
    assert region.plan.limits.ingress is None


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        ([], 2, "nothing to set"),
        (["--egress", "25"], 2, "--egress is '25': it has no unit"),
        (["--ingress", "unlimited"], 2, 'it must be a rate, such as "20Mbit/s" or "2MB/s"; "none" is no limit'),
        (["eu", "--egress", "1Gbit/s", "--peer", "mars"], 2, "eu refuses: peer 'mars'"),
        (["mars", "--egress", "1Gbit/s"], 2, "mars"),
        (["us", "--egress", "1Gbit/s"], 5, "holds no admin.port"),
    ],
)
def test_refusals(
    region: Region, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, reason: str
) -> None:
    assert main(["budget", "set", *arguments]) == code
    assert reason in capsys.readouterr().err
    assert region.plan == BudgetPlan()


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        (DiskRefused("node.json can't be written: no room"), 6, "eu refuses: node.json can't be written: no room"),
        (SystemError("a bug"), 1, "eu has perhaps not done it: its answer is 500 Internal Server Error and no JSON"),
    ],
)
def test_a_daemon_that_fails_is_there(
    region: Region, capsys: pytest.CaptureFixture[str], fault: Exception, code: int, reason: str
) -> None:
    region.fault = fault
    assert main(["budget", "set", "--egress", "1Gbit/s"]) == code
    error = capsys.readouterr().err
    assert reason in error
    assert "does not run" not in error


@pytest.mark.usefixtures("region")
def test_an_order_that_the_daemon_does_not_know() -> None:
    with pytest.raises(DilocoError, match=r"its answer is 404 Not Found and no JSON object, but '404: Not Found'.*log"):
        give_order(Path("state/eu"), "sing", {})


@pytest.mark.parametrize(
    "words",
    [
        ["budget", "set", "--egress", "1Gbit/s", "--peer", ""],
        ["budget", "set", "--egress", "1Gbit/s", "--peer="],
        ["members", "add", "ap", "--address", ""],
        ["finish", ""],
        ["drain", "--config", ""],
    ],
)
def test_a_variable_of_the_shell_that_is_not_set_widens_no_order(
    region: Region, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(words) == 2
    assert f"{words[0]} " in (error := capsys.readouterr().err)
    assert "this is empty, perhaps a variable that is not set: give a value, or leave it out" in error
    assert (region.plan, region.finished, region.changes) == (BudgetPlan(), [], [])


def test_a_daemon_that_is_gone(region: Region, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path(tmp_path / "state" / "eu").glob("admin.token"):
        path.unlink()
    assert main(["budget", "set", "eu", "--egress", "1Gbit/s"]) == 5
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.usefixtures("region")
def test_whoever_may_not_read_the_token_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that the region may be down."""
    read = Path.read_text

    def refuse(path: Path, *words: Any, **options: Any) -> str:
        if path.name == ADMIN_TOKEN_NAME:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, *words, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert main(["finish", "eu"]) == 2
    assert "admin.token is closed to you: give orders as the user that runs eu" in capsys.readouterr().err


@pytest.mark.usefixtures("region")
def test_a_lifted_quarantine_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quarantine", "lift", "us"]) == 0
    assert "eu readmits us: its strikes are forgotten" in capsys.readouterr().out
    assert main(["quarantine", "lift", "asia", "eu"]) == 0
    assert "eu has nothing against asia" in capsys.readouterr().out


@pytest.mark.usefixtures("region")
def test_a_learner_that_is_started_again_says_what_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learner", "start"]) == 0
    assert "eu starts its learner, which was stopped" in capsys.readouterr().out
    assert main(["learner", "start", "eu"]) == 0
    assert main(["learner", "start", "us"]) == 5


@pytest.mark.usefixtures("region")
def test_what_is_wrong_with_lifting_a_quarantine_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quarantine", "lift", "mars"]) == 2
    assert "eu refuses: 'mars' is none of this region's peers: asia, us" in capsys.readouterr().err
    assert main(["quarantine", "lift", "eu", "us"]) == 5
    assert "holds no admin.port" in capsys.readouterr().err
    (tmp_path / "state" / "eu" / ADMIN_TOKEN_NAME).write_text("another")
    assert main(["quarantine", "lift", "us"]) == 2
    assert "missing or wrong bearer token" in capsys.readouterr().err


def test_changes_of_the_members_are_signed_with_the_authoritys_key(
    region: Region, capsys: pytest.CaptureFixture[str]
) -> None:
    init_run(Path("certs"), "try", ["eu"])
    disks = DiskView("abc")
    disks.begin(Roster.of_voters(("asia", "eu", "us"), dict.fromkeys(("asia", "eu", "us"), b"d" * 16), since=2), 2)
    region.status = {
        "run_id": "try",
        "members": members_document(disks, MemberSigns("eu", frozenset(("us",)), since_unix={"us": 0.5})),
    }
    assert main(["members", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "region  kind   since                         now",
        "asia    voter  entry 2                       away",
        "eu      voter  entry 2                       there",
        f"us      voter  entry 2, {datetime.fromtimestamp(0.5):%Y-%m-%d %H:%M:%S}  there",
        "3 voters, 2 must be there; no vote comes from asia: the next failure stops merging; training goes on in each "
        "region",
    ]
    assert main(["members", "demote", "us"]) == 0
    assert "us is a contributor when a majority agrees. The voters are asia, eu then" in capsys.readouterr().out
    (change,) = region.changes
    after = disks.roster.changed(MembershipBody("us", "contributor"))
    identity = load_identity(Path("certs/eu"))
    assert identity.signature_fault(after.statement("try"), bytes.fromhex(change["signature"])) == ""
    assert (change["region"], change["kind"], change["force"]) == ("us", "contributor", False)
    assert main(["members", "remove", "asia", "--force"]) == 2
    assert "eu refuses: 3 voters, all are there: removing asia leaves 2" in capsys.readouterr().err
    assert main(["members", "promote", "us", "--ca-key", "nowhere"]) == 2
    assert "nowhere is missing: only the holder of the authority's key" in capsys.readouterr().err
    assert main(["members", "add", "ap", "--address", "ap.example:7400"]) == 0
    assert "in ap: diloco-node start --join HOST:PORT --region ap" in capsys.readouterr().out
    addition = region.changes[-1]
    after = disks.roster.changed(MembershipBody("ap", "contributor", "ap.example:7400"))
    assert identity.signature_fault(after.statement("try"), bytes.fromhex(addition["signature"])) == ""
    assert (addition["address"], addition["changes"]) == ("ap.example:7400", 1)
    assert main(["members", "add", "AP", "--address", "ap.example:7400"]) == 2
    assert "'AP' is no region's name" in capsys.readouterr().err
    assert main(["members", "add", "ap", "--address", "ap.example"]) == 2
    assert "--address is 'ap.example': it must be" in capsys.readouterr().err
    remedies = {"demote": "`members add` makes it one", "remove": "nothing is to be removed"}
    for command, remedy in remedies.items():
        assert main(["members", command, "ue"]) == 2
        assert f"ue is no member of the run, which has asia, eu, us: {remedy}" in capsys.readouterr().err
    assert main(["members", "promote", "witness"]) == 2
    assert "`members witness URL` makes it one" in capsys.readouterr().err
    region.status["members"]["rows"].append({"region": "witness", "kind": "witness", "address": "s3://b/w"})
    assert main(["members", "witness", "s3://b/w"]) == 2
    assert "the run has its witness at s3://b/w: for another one, `members remove witness` first" in (
        capsys.readouterr().err
    ), "and not to remove the record that it counts on"
    region.status = {"run_id": "try", "reason": "loads its kernels"}
    assert main(["members", "list"]) != 0
    assert "eu does not know the members of the run yet: loads its kernels" in capsys.readouterr().err
    assert len(region.changes) == 2
