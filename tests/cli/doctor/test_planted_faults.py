"""Faults planted for real, each named by the right check with what was found and a remedy."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_node.state_names import NODE_NAME
from diloco_node.wire.envelope import LinkRole
from tests.kit.doctor_kit import OWN, PEER, Sheet, Ward

Plant = Callable[[Ward], None]


@pytest.fixture
def ward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ward:
    return Ward(tmp_path)


def expired(ward: Ward) -> None:
    ward.certify(days_ago=400)


def ends_soon(ward: Ward) -> None:
    ward.certify(days_ago=350)


def not_yet_valid(ward: Ward) -> None:
    ward.certify(days_ago=-3)


def wrong_name(ward: Ward) -> None:
    ward.certify()
    shutil.rmtree(ward.certs / OWN)
    (ward.certs / PEER).rename(ward.certs / OWN)


def wrong_run(ward: Ward) -> None:
    ward.certify(run="another")


def wrong_authority(ward: Ward) -> None:
    ward.certify()
    authority = ward.certify(folder=ward.folder / "other")
    shutil.copy(authority / "ca.pem", ward.certs / OWN / "ca.pem")


def wrong_key(ward: Ward) -> None:
    ward.certify()
    shutil.copy(ward.certs / PEER / "node.key", ward.certs / OWN / "node.key")


def no_certificate(ward: Ward) -> None:
    del ward


def open_key(ward: Ward) -> None:
    ward.certify()
    (ward.certs / OWN / "node.key").chmod(0o644)


def unknown_setting(ward: Ward) -> None:
    ward.certify()
    ward.add("[rounds.sync_evry]")


def misspelt_setting(ward: Ward) -> None:
    ward.certify()
    ward.write(ward.text().replace("sync_every", "sync_evry"))


def another_region(ward: Ward) -> None:
    ward.certify()
    ward.write(ward.text().replace(f"[regions.{OWN}]", "[regions.elsewhere]"))


def unknown_preload(ward: Ward) -> None:
    ward.certify()
    ward.add('[learner]\npreload = ["no_such_module_of_mine"]')


def missing_data(ward: Ward) -> None:
    ward.certify()
    ward.add('[data]\npaths = ["no-such-folder"]')


def missing_init(ward: Ward) -> None:
    ward.certify()
    ward.write(ward.text().replace("steps = 100", 'steps = 100\ninit = "no-such.safetensors"'))


def state_is_a_file(ward: Ward) -> None:
    ward.certify()
    ward.write(ward.text().replace("steps = 100", 'steps = 100\nstate_dir = "/proc/diloco-state"'))


def huge_model(ward: Ward) -> None:
    ward.certify()
    ward.add("[model]\nlayers = 128\ndim = 16384\nheads = 128")


def nobody_listens(ward: Ward) -> None:
    ward.certify()


def no_such_name(ward: Ward) -> None:
    ward.certify()
    ward.write(ward.text(peer="no-such-host.invalid:7400"))


@pytest.mark.parametrize(
    ("plant", "check", "mark", "text", "hint"),
    [
        (expired, "certificate", "failed", "expired on", "certs renew REGION"),
        (ends_soon, "certificate-dates", "warning", "14 days more", "certs renew REGION"),
        (not_yet_valid, "certificate", "failed", "is valid from", "chrony"),
        (wrong_name, "certificate", "failed", f"is for region {PEER}, this node is region {OWN}", "folder"),
        (wrong_run, "certificate", "failed", "is for run another, this node is run try", "folder"),
        (wrong_authority, "certificate", "failed", "was not signed by", "folder"),
        (wrong_key, "certificate", "failed", "is not the key of", "folder"),
        (no_certificate, "certificate", "failed", "is missing", "folder"),
        (open_key, "key-mode", "warning", "can be read by others (mode 644)", "chmod 600"),
        (unknown_setting, "run-toml", "failed", "rounds.sync_evry", "do what it says"),
        (misspelt_setting, "run-toml", "failed", "did you mean sync_every?", "do what it says"),
        (another_region, "run-toml", "failed", f"'{OWN}' is not in [regions]", "do what it says"),
        (unknown_preload, "preload", "failed", "no_such_module_of_mine: there is no such module", "preload"),
        (missing_data, "learner-files", "failed", "no-such-folder", "correct the path"),
        (missing_init, "learner-files", "failed", "no-such.safetensors", "correct the path"),
        (state_is_a_file, "disk-space", "failed", "/proc/diloco-state/here can't be written", "run.state_dir"),
        (huge_model, "disk-space", "failed", " TB and has 0 B", "make room"),
        (huge_model, "memory", "failed", "the daemon and its shared memory need", "more memory"),
        (nobody_listens, "peer-reachable", "failed", "nobody listens there (connection refused)", f"start {PEER}"),
        (no_such_name, "peer-reachable", "failed", "the name can't be resolved", f"regions.{PEER}.address"),
    ],
)
def test_a_planted_fault_is_named(ward: Ward, plant: Plant, check: str, mark: str, text: str, hint: str) -> None:
    plant(ward)
    sheet = ward.examine()
    result = sheet.one(check)
    assert (result["mark"], result["link"]) == (mark, f"docs/doctor.md#{check}")
    assert text in result["text"]
    assert hint in result["hint"]
    # Of what was planted nothing else is said to be broken; where nobody listens is said each time.
    neighbours = {"memory", "disk-space"} if plant is huge_model else {check}
    assert sheet.failed() <= neighbours | {"peer-reachable"}
    assert sheet.exit_code == (1 if sheet.failed() else 0)


@pytest.mark.parametrize("which", ["port", "admin_port"])
def test_a_port_that_is_taken(ward: Ward, which: str) -> None:
    ward.certify()
    number = getattr(ward, which)
    with socket.create_server(("127.0.0.1", number)):
        sheet = ward.examine()
    assert sheet.exit_code == 1
    failures = [result for result in sheet.of("port") if result["mark"] == "failed"]
    assert [result["text"].startswith(f"127.0.0.1:{number}: ") for result in failures] == [True]
    assert "ss -ltnp" in failures[0]["hint"]


def test_few_open_files_allowed(ward: Ward) -> None:
    ward.certify()
    sheet = ward.examine_apart("prlimit", "--nofile=256:256")
    assert sheet.one("descriptors")["mark"] == "warning"
    assert "256 open files allowed" in sheet.one("descriptors")["text"]


# Root may see everything, unless it can't.
NO_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()


DENIED = {
    "disk-space": "can't be written: Permission denied",
    "certificate": "can't be read (Permission denied)",
    "learner-files": "run.init: ",
}


@pytest.mark.parametrize("names", [("state", "certs", "models"), (f"state/{OWN}", f"certs/{OWN}/node.key", "models")])
def test_what_belongs_to_another_user(ward: Ward, names: tuple[str, ...]) -> None:
    ward.certify()
    (ward.folder / "state" / OWN).mkdir(parents=True)
    (ward.folder / "models").mkdir()
    (ward.folder / "models" / "first").touch()
    ward.write(ward.text().replace("steps = 100", 'steps = 100\ninit = "models/first"'))
    for name in names:
        (ward.folder / name).chmod(0)
    sheet = ward.examine_apart(*NO_RIGHTS)
    for name in names:
        (ward.folder / name).chmod(0o700)
    for check, text in DENIED.items():
        assert sheet.one(check)["mark"] == "failed"
        assert text in sheet.one(check)["text"]
    assert sheet.failed() <= {*DENIED, "peer-reachable"}


def test_who_we_are_is_asked_where_no_key_can_be_seen(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    ward.certify()
    monkeypatch.setattr(ward, "arguments", lambda: ["doctor", "--config", str(ward.config), "--json"])
    ward.certs.chmod(0)
    sheet = ward.examine_apart(*NO_RIGHTS)
    ward.certs.chmod(0o700)
    assert sheet.failed() == {"run-toml"}
    assert "say who we are with --region NAME" in sheet.one("run-toml")["text"]


def test_a_model_file_that_is_damaged_is_no_reason_to_stop(ward: Ward) -> None:
    from diloco_node.daemon.manifest_file import MANIFEST_NAME

    ward.certify()
    folder = ward.folder / "state" / OWN
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).write_text("{")
    sheet = ward.examine()
    assert sheet.failed() == {"peer-reachable"}
    assert "the model's size is not known" in sheet.one("disk-space")["text"]


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(ward: Ward) -> None:
    ward.certify()
    small = ward.folder / "state"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], check=False)
    if mount.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        (small / OWN).mkdir()
        result = ward.examine().one("disk-space")
        assert result["mark"] == "failed"  # there is room, but not for the run
        assert "65.5 kB free" in result["text"]
        fill(small / "filler")
        result = ward.examine().one("disk-space")
        assert result["mark"] == "failed"
        assert "No space left on device" in result["text"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_settings_that_changed_since_the_start_are_named_with_both_values(ward: Ward) -> None:
    from diloco_node.cli.start import node_spec
    from diloco_node.config.resolve import load_config

    ward.certify()
    folder = ward.folder / "state" / OWN
    folder.mkdir(parents=True)
    node_spec(load_config(ward.config), OWN, folder).save(folder / NODE_NAME)
    assert ward.examine().one("settings-changed")["mark"] == "ok"
    ward.write(ward.text().replace("sync_every = 24", "sync_every = 16"))
    result = ward.examine().one("settings-changed")
    assert result["mark"] == "warning"
    assert "sync_every was 24, is 16" in result["text"]


def test_a_training_command_that_is_not_there(ward: Ward) -> None:
    ward.certify()
    result = ward.examine("no-such-program", "train.py").one("learner-files")
    assert (result["mark"], result["text"].partition(";")[0]) == ("failed", "command 'no-such-program' is not found")
    result = ward.examine("python3", "-u", "trian.py").one("learner-files")
    assert (result["mark"], result["text"].partition(" in ")[0]) == ("failed", "script 'trian.py' is not found")
    assert ward.examine("python3", "-m", "module", "new.py").one("learner-files")["mark"] == "ok"
    assert ward.examine("sh", "train.sh").one("learner-files")["mark"] == "ok"


# ---- peers that answer -----------------------------------------------------------------------------------------------


async def test_nothing_is_wrong_with_a_peer_that_runs_and_it_takes_no_notice(ward: Ward) -> None:
    ward.certify()
    async with ward.peer() as peer:
        sheet = await ward.examine_beside()
        assert peer.rejections == {}
    assert sheet.exit_code == 0, sheet.checks
    checks = ("peer-reachable", "peer-version", "settings-equal", "mtu", "clock-peers")
    assert {sheet.one(check)["mark"] for check in checks} == {"ok"}


async def test_a_peer_with_other_settings(ward: Ward) -> None:
    ward.certify()
    async with ward.peer():
        ward.write(ward.text().replace("sync_every = 24", "sync_every = 16"))
        sheet = await ward.examine_beside()
    assert sheet.failed() == {"settings-equal"}
    text = f"{PEER} runs with other settings: rounds.sync_every is 16 here, 24 there"
    assert sheet.one("settings-equal")["text"].startswith(text)


async def test_a_peer_of_another_authority(ward: Ward) -> None:
    ward.certify()
    authority = ward.certify(folder=ward.folder / "other")
    async with ward.peer(certs=authority):
        sheet = await ward.examine_beside()
    assert sheet.failed() == {"peer-reachable"}
    assert "it was signed by another run's authority" in sheet.one("peer-reachable")["text"]
    assert "of one authority" in sheet.one("peer-reachable")["hint"]


async def test_another_region_answers(ward: Ward) -> None:
    ward.certify()
    async with ward.peer(region=OWN):
        sheet = await ward.examine_beside()
    assert sheet.failed() == {"peer-reachable"}
    assert "belongs to another region or run" in sheet.one("peer-reachable")["text"]


async def test_measure_serves_where_the_daemon_should(ward: Ward) -> None:
    ward.certify()
    async with ward.peer(role=LinkRole.MEASURING, settings_digest="", manifest_digest=""):
        sheet = await ward.examine_beside()
    result = sheet.one("peer-reachable")
    assert result["mark"] == "warning"
    assert "diloco-node measure of there answers" in result["text"]
    assert list(sheet.of("settings-equal")) == [], "it has none"


async def test_a_peer_that_has_quarantined_us(ward: Ward) -> None:
    from diloco_node.errors import ProtocolViolation

    ward.certify()
    async with ward.peer() as peer:
        for _ in range(3):
            peer.reject(OWN, ProtocolViolation("planted"))
        result = (await ward.examine_beside()).one("peer-reachable")
    assert result["mark"] == "failed"
    assert "in quarantine" in result["text"]
    assert "quarantine lift" in result["hint"]


async def test_a_clock_that_is_wrong(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco_node.transport import asking, transport

    ward.certify()
    hour_ago = (asking.CLOCK_KEY, str(int(asking.clock_metadata()[0][1]) - 2 * 3600 * 10**9))
    monkeypatch.setattr(transport, "clock_metadata", lambda: (hour_ago,))
    async with ward.peer():
        sheet = await ward.examine_beside()
    assert sheet.failed() == {"clock-peers"}
    assert f"{PEER}'s clock is 72" in sheet.one("clock-peers")["text"]
    assert "behind ours" in sheet.one("clock-peers")["text"]


async def talk(port: int, answer: bytes) -> asyncio.Server:
    """A server that is none of ours: it says something to everybody, or nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer:
            writer.write(answer)
        await reader.read()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", port)


@pytest.mark.parametrize(
    ("answer", "text"),
    [(b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak TLS"), (b"", "no answer to connect or TLS handshake")],
)
async def test_something_else_listens_there(ward: Ward, answer: bytes, text: str) -> None:
    ward.certify()
    async with await talk(ward.peer_port, answer):
        sheet: Sheet = await ward.examine_beside()
    assert sheet.failed() == {"peer-reachable"}
    assert text in sheet.one("peer-reachable")["text"]
    assert PEER in sheet.one("peer-reachable")["hint"]
