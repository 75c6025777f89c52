"""Metrics say what the document says, keep the rules of names, and are all in docs/operate.md."""

import re
import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from diloco_node import __version__
from diloco_node.daemon.admin.metrics import StatusCollector
from diloco_node.health.health_summary import health_of
from diloco_node.health.phase_times import PhaseTimes
from tests.daemon.admin.test_status_document import learner_of, status_of, view_of
from tests.kit.repository import ROOT


def whole_document() -> dict[str, Any]:
    """With every fact that metrics are made of."""
    times = PhaseTimes()
    times.add({"gather": 0.2, "commit": 5.0})
    document = status_of(view_of(), learner_of(view_of().learner, loss_last=2.5, last_report_ns=4_000_000_000)) | {
        "run": {"id": "run1", "step": 70, "total_steps": 250, "eta_seconds": 60.0},
        "commit_age_seconds": 1.5,
        "phase_seconds": times.document(),
        "token_account": {"trained": 15_000, "carried": 500, "run_merged": 900, "run_discarded": 7},
        "learner_process": {"state": "running", "restarts": 2, "crashes": 1, "exit_code": 1},
        "disk": {"free_bytes": 5e9, "total_bytes": 10e9, "refused": ""},
        "certificate": {"days_left": 12.0, "expires_unix": 1.5e9},
    }
    document["learner"]["current_tokens_per_second"] = 250.0
    return document | {"health": health_of(document)}


def collected(document: dict[str, Any]) -> bytes:
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: document))
    return generate_latest(registry)


def families() -> list[Metric]:
    return list(text_string_to_metric_families(collected(whole_document()).decode()))


LINES = [
    f'diloco_build_info{{region="us",run="run1",version="{__version__}"}} 1.0',
    'diloco_alerts{code="A-CERT-ENDS",severity="warning"} 1.0',
    "diloco_commit_age_seconds 1.5",
    "diloco_failure_tolerance 0.0",
    "diloco_run_step 70.0",
    "diloco_run_eta_seconds 60.0",
    "diloco_learner_tokens_total 15000.0",
    "diloco_learner_tokens_carried 500.0",
    'diloco_run_tokens_total{state="merged"} 900.0',
    'diloco_run_tokens_total{state="discarded"} 7.0',
    'diloco_round_phase_seconds_bucket{le="0.1",phase="gather"} 0.0',
    'diloco_round_phase_seconds_bucket{le="0.3",phase="gather"} 1.0',
    'diloco_round_phase_seconds_sum{phase="commit"} 5.0',
    'diloco_round_phase_seconds_count{phase="commit"} 1.0',
    "diloco_participation_ratio 1.0",
    "diloco_learner_steps_total 150.0",
    "diloco_learner_step_seconds 0.1",
    "diloco_learner_loss 2.5",
    "diloco_learner_tokens_per_second 250.0",
    "diloco_learner_report_age_seconds 1.0",
    "diloco_learner_restarts_total 2.0",
    "diloco_learner_crashes_total 1.0",
    "diloco_ledger_term 4.0",
    "diloco_rounds_committed_total 6.0",
    "diloco_ledger_is_leader 1.0",
    'diloco_peer_link_up{peer="eu"} 1.0',
    'diloco_peer_wire_sent_bytes_total{peer="eu"} 1000.0',
    'diloco_peer_rtt_seconds{peer="eu"} 0.04',
    'diloco_fragment_version{fragment="1"} 3.0',
    'diloco_rejections_total{peer="eu",reason="corrupt"} 2.0',
    'diloco_budget_ceiling_bytes_per_second{direction="egress"} 125000.0',
    "diloco_budget_allowed_bytes_total 1000.0",
    "diloco_budget_used_bytes_total 970.0",
    'diloco_peer_budget_bytes_per_second{direction="egress",peer="eu"} 60000.0',
    'diloco_lane_wanted_bytes_total{lane="rounds",peer="eu"} 9.0',
    'diloco_lane_used_bytes_total{lane="rounds",peer="eu"} 8.0',
    'diloco_peer_correction_bytes_total{peer="eu"} 31.0',
]


def test_metrics_say_what_the_document_says() -> None:
    text = collected(whole_document()).decode().splitlines()
    assert not [line for line in LINES if line not in text]
    assert not any('direction="ingress"' in line for line in text), "no limit, no sample"


def test_before_the_model_is_known_the_process_is_counted_already() -> None:
    process = {"state": "waiting", "restarts": 3, "crashes": 3, "exit_code": 1}
    document = {"region": "us", "run_id": "run1", "state": "starting", "learner_process": process}
    text = collected(document | {"health": health_of(document)}).decode()
    assert "diloco_learner_restarts_total 3.0" in text
    assert 'diloco_alerts{code="A-LEARNER-CRASHES",severity="warning"} 1.0' in text
    assert "diloco_ledger_term" not in text


def test_without_a_learner_nothing_is_said_of_it_but_its_totals() -> None:
    text = collected(status_of(view_of(learner=None), learner_of(None))).decode()
    assert "diloco_learner_attached 0.0" in text
    assert "diloco_learner_steps_total 150.0" in text
    for name in ("step_seconds", "loss", "tokens_per_second", "report_age_seconds"):
        assert f"\ndiloco_learner_{name} " not in text


def test_a_follower_leads_nothing_and_a_silent_peer_is_not_alive() -> None:
    peer = whole_document()["peers"][0] | {"is_alive": False, "link": "dialing"}
    document = whole_document() | {"role": "follower", "peers": [peer, peer | {"name": "ap"}]}
    alarm = {"code": "A-PEER-DOWN", "severity": "warning"}
    text = collected(document | {"health": {"alerts": [alarm, alarm]}}).decode().splitlines()
    assert "diloco_ledger_is_leader 0.0" in text
    assert 'diloco_peer_alive{peer="ap"} 0.0' in text
    assert 'diloco_peer_link_up{peer="ap"} 0.0' in text
    assert 'diloco_alerts{code="A-PEER-DOWN",severity="warning"} 2.0' in text


def test_names_keep_the_rules() -> None:
    names = families()
    assert len(names) > 40
    for family in names:
        assert family.name.startswith("diloco_")
        assert len(family.documentation) > 8
        assert family.documentation.replace(" ", "_") != family.name
        assert not re.search(r"_(bits|ms|milliseconds|kb|percent)(_|$)", family.name)
        is_counter = any(sample.name.endswith("_total") for sample in family.samples)
        assert is_counter == (family.type == "counter"), family.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_fault() -> None:
    process = subprocess.run(
        ["promtool", "check", "metrics"],
        input=collected(whole_document()),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_page_names_each_metric() -> None:
    """`_x` stands for the group's name with `_x`, as in `diloco_ledger_term`, `_commit_index`."""
    text = (ROOT / "docs/operate.md").read_text()
    table = text[text.index("| group | metrics |") : text.index("## Logs")]
    metric_names = set()
    for row in (line for line in table.splitlines() if line.startswith("|")):
        names = re.findall(r"`(\w+)`", row)
        group = "_".join(next((name for name in names if name.startswith("diloco_")), "").split("_")[:2])
        metric_names |= {
            f"{group}{name}" if name.startswith("_") else name for name in names if "diloco" in name or name[0] == "_"
        }
    counters = {"counter": "_total"}
    assert metric_names == {family.name + counters.get(family.type, "") for family in families()}
