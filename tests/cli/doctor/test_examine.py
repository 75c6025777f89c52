"""Findings about a region whose daemon runs, from what that daemon says."""

import threading
from pathlib import Path
from typing import Any

import pytest

from diloco_node.cli.doctor import doctor_command as command
from diloco_node.cli.doctor import examine, peer_probes
from diloco_node.cli.doctor.examine import Patient
from diloco_node.config.resolve import load_config
from diloco_node.health.finding import Finding
from diloco_node.transport.certificates import load_identity
from tests.kit.doctor_kit import OWN, PEER, Ward


def patient(folder: Path, status: dict[str, Any] | None) -> Patient:
    return Patient(load_config(Ward(folder).config), OWN, status)


def run_of(folder: Path, **status: Any) -> dict[str, Finding]:
    document = {"region": OWN, "role": "leader", "reason": "all is well"}
    return {finding.code: finding for finding in examine.examine_run(patient(folder, document | status))}


def test_the_daemon_and_its_alerts_are_reported(tmp_path: Path) -> None:
    findings = run_of(tmp_path, health={"alerts": [3, {"code": "A-X", "severity": "critical"}]})
    assert findings["daemon"].text == f"{OWN} is leader: all is well"
    assert findings["alert"].mark == "failed"


def test_peers_are_those_of_the_ledger_where_a_daemon_knows_it(tmp_path: Path) -> None:
    """A region that joined later is in no run.toml of the others, and one that was removed still is."""
    assert list(patient(tmp_path, None).addresses) == [PEER]
    joined = {"name": "joined", "address": "joined.example:7400"}
    assert patient(tmp_path, {"peers": [joined]}).addresses == {"joined": "joined.example:7400"}


async def test_peers_are_probed_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(2, timeout=120)

    def probe_mtu(address: str) -> None:
        barrier.wait()

    monkeypatch.setattr(peer_probes, "probe_mtu", probe_mtu)
    identity = load_identity(Ward(tmp_path).certify() / OWN)
    results = await peer_probes.look_at_peers(identity, {"x": "127.0.0.1:1", "y": "127.0.0.1:2"})
    assert {peer: mtu for peer, (_, mtu) in results.items()} == {"x": None, "y": None}


def test_what_answers_for_another_region_is_not_our_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diloco_node.cli import admin_client

    folder = tmp_path / "state" / OWN
    folder.mkdir(parents=True)
    (folder / admin_client.ADMIN_PORT_NAME).write_text("7401")
    ward = Ward(tmp_path)
    for region, is_ours in ((OWN, True), (PEER, False)):
        monkeypatch.setattr(admin_client, "ask", lambda target, region=region: {"region": region})
        assert (command.patient_of(ward.config, OWN, []).status is not None) is is_ours
