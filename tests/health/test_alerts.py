"""Each fault raises its alert, with the command that helps; a sound region raises none; junk is no alert."""

from typing import Any

import pytest

from diloco_node.health import alert_kinds as kinds
from diloco_node.health.alerts import find_alerts
from diloco_node.health.health_summary import STATES, health_of
from diloco_node.wire.envelope import settings_difference
from tests.kit.health_kit import DOWN, LATE, changed, peers, standings

CASES = [
    (
        kinds.PEER_DOWN,
        changed(peers=peers(ap=DOWN)),
        "ap (ap:1) is down: Connection refused",
        "diloco-node start --region ap",
    ),
    (
        kinds.PEER_DOWN,
        changed(peers=peers(ap=DOWN | {"applied_index": 0})),
        "ap (ap:1) has not been heard yet: Connection refused",
        "diloco-node start --region ap",
    ),
    (kinds.LAST_MAJORITY, changed(peers=peers(ap=DOWN)), "2 of 3 regions are left", ""),
    (kinds.NO_MAJORITY, changed(peers=peers(ap=DOWN, eu=DOWN)), "1 of 3 regions are left, 2 are needed", ""),
    (
        kinds.NO_MAJORITY,
        changed(peers=peers(ap=DOWN, eu=DOWN), inner_steps=250),
        "2 are needed to merge. This region alone has made all 250 steps of the run: the others have probably finished",
        "",
    ),
    (kinds.NO_COMMIT, changed(commit_age_seconds=41.0), "for 41 s, usually one every 4.0 s", "diloco-node why us"),
    (
        kinds.NO_COMMIT,
        changed(commit_age_seconds=300.0, learner={"busy": None, "pause_age_seconds": 41.0}),
        "no round was committed for 5 min, usually one every 4.0 s",
        "",
    ),
    (
        kinds.NO_COMMIT,
        changed(commit_age_seconds=3600.0, learner={"busy": None, "pause_age_seconds": 5.0}),
        "no round was committed for 60 min",
        "",
    ),
    (
        kinds.NO_COMMIT,
        changed(commit_age_seconds=3600.0, learner={"busy": {"activity": "evaluation"}}),
        "no round was committed for 60 min",
        "",
    ),
    (
        kinds.LEFT_OUT,
        changed(left_out=[{"region": "ap", "part": "member", "reason": "its stripes did not come"}]),
        "ap is left out as member: its stripes did not come",
        "diloco-node measure mesh",
    ),
    (
        kinds.OUTWEIGHS,
        changed(standings=standings(ap={"tokens_per_step": 8192.0})),
        "ap counts 8192 tokens a step, the others' median is 1024 (8 times)",
        "diloco-node config show",
    ),
    (
        kinds.OUTWEIGHS,
        changed(standings=standings(ap={"weight_share": 0.5}, eu={"weight_share": 0.1}, us={"weight_share": 0.1})),
        "ap has 50% of the weight, the others' median is 10% (5 times)",
        "",
    ),
    (
        kinds.OUTWEIGHS,
        changed(standings=standings(ap={"weight_share": 0.5, "steps_share": 0.2})),
        "ap has 50% of the weight, but makes 20% of the steps",
        "",
    ),
    (
        kinds.OUTWEIGHS,
        changed(
            learner_warning={
                "text": "step(tokens=...) told of 16 tokens in 8 steps",
                "age_seconds": 3.0,
                "is_failure": False,
            }
        ),
        "step(tokens=...) told of 16 tokens in 8 steps (3.0 s ago)",
        "",
    ),
    (
        kinds.TOO_LONG,
        changed(standings=standings(ap={"length_ratio": 15.0})),
        "ap brings 15 times the length of the median region, step for step",
        "diloco-node why ap",
    ),
    (
        kinds.AGAINST,
        changed(standings=standings(ap={"cosine": -0.31, "cosines_negative": 60})),
        "ap points against the others: cosine -0.31, negative in 60 of 64",
        "diloco-node why ap",
    ),
    (
        kinds.AGAINST,
        changed(standings=standings(ap={"cosine": 0.2, "cosine_recent": -0.31, "cosines_negative": 6})),
        "ap points against the others: cosine 0.20, negative in 6 of 64",
        "diloco-node why ap",
    ),
    (
        kinds.AGAINST,
        changed(standings=standings(ap={"cosine": -0.1, "cosines_negative": 40, "is_opposed": True})),
        "negative in 40 of 64; nothing of it counts",
        "diloco-node why ap",
    ),
    (
        kinds.QUARANTINE,
        changed(quarantine={"eu": "for 600 s more"}),
        "eu is shut out: for 600 s more",
        "diloco-node quarantine lift eu us",
    ),
    (
        kinds.LEARNER_STOPPED,
        changed(learner=None, learner_process={"state": "stopped", "reason": "crashed 10 times", "exit_code": 1}),
        "the learner is stopped: crashed 10 times",
        "diloco-node learner start us",
    ),
    (
        kinds.LEARNER_ENDED,
        changed(learner=None, learner_process={"state": "done", "exit_code": 0}),
        "the learner ended at step 64, the run is at 64 of 250",
        "diloco-node learner start us",
    ),
    (
        kinds.LEARNER_ENDED,
        changed(learner={"finished": True}),
        "the learner ended at step 64, the run is at 64 of 250",
        "",
    ),
    (
        kinds.LEARNER_CRASHES,
        changed(learner=None, learner_process={"state": "waiting", "exit_code": 1, "restarts": 3, "reason": ""}),
        "exit code 1; 3 restarts",
        "tail -n 40 /s/us/logs/learner.log",
    ),
    (
        kinds.LEARNER_CRASHES,
        {"region": "us", "state": "starting", "learner_process": {"state": "waiting", "exit_code": 2, "restarts": 1}},
        "exit code 2; 1 restarts",
        "tail -n 40 state/us/logs/learner.log",
    ),
    (kinds.LEARNER_SILENT, changed(learner={"report_age_seconds": 75.0}), "no step for 75 s; a step takes 200 ms", ""),
    (
        kinds.LEARNER_SILENT,
        changed(learner={"report_age_seconds": None, "first_step_wait_seconds": 720.0}),
        "no step since it attached, and has its parameters for 12 min",
        "",
    ),
    (kinds.LEARNER_MISSING, changed(learner=None), "no learner is attached", ""),
    (
        kinds.LOSS_NAN,
        changed(learner_warning={"text": "the loss is nan", "age_seconds": 30.0, "is_failure": True}),
        "the loss is nan (30 s ago)",
        "tail -n 40 /s/us/logs/learner.log",
    ),
    (
        kinds.LOSS_SPIKE,
        changed(learner_warning={"text": "the loss is 9.1", "age_seconds": 30.0, "is_failure": False}),
        "the loss is 9.1 (30 s ago)",
        "tail -n 40 /s/us/logs/learner.log",
    ),
    (
        kinds.LEARNER_FAILED,
        changed(learner_warning={"text": "RuntimeError: size mismatch", "age_seconds": 30.0, "is_failure": True}),
        "RuntimeError: size mismatch (30 s ago)",
        "tail -n 40 /s/us/logs/learner.log",
    ),
    (
        kinds.LEARNER_WARNS,
        changed(learner_warning={"text": "the model has batch", "age_seconds": 30.0, "is_failure": False}),
        "the model has batch (30 s ago)",
        "tail -n 40 /s/us/logs/learner.log",
    ),
    (kinds.BASE_DIFFERS, changed(base_difference="frozen tensors: 2 of 9"), "frozen tensors: 2 of 9", "tail -n 40"),
    (kinds.MERGES_LATE, changed(merge_pace=LATE), "merged every 31 steps, H is 16", "diloco-node why us"),
    (kinds.BUDGET_SMALL, changed(budget_warning="H = 48 would fit"), "H = 48 would fit", "diloco-node plan"),
    (kinds.DISK_REFUSED, changed(disk={"refused": "ledger: No space left"}), "No space left", "df -h /s/us"),
    (kinds.DISK_LOW, changed(disk={"free_bytes": 2e9}), "2.0 GB of 100.0 GB are free", "df -h /s/us"),
    (kinds.DISK_LOW, changed(parameters=4_000_000_000), "50.0 GB of 100.0 GB are free", "df -h /s/us"),
    (kinds.DISK_LOW, changed(disk={"free_bytes": 73_728, "total_bytes": 8e6}), "73.7 kB of 8.0 MB are free", "df -h"),
    (
        kinds.STARVED,
        changed(machine={"late_seconds": 2.5, "cpu_pressure_percent": 98.7}),
        "late; processes waited",
        "cat",
    ),
    (kinds.STARVED, changed(machine={"late_seconds": 0.6, "cpu_pressure_percent": None}), "up to 600 ms late", "cat"),
    (kinds.CERTIFICATE_ENDS, changed(certificate={"days_left": 12.3}), "ends in 12 days", "diloco-node certs renew us"),
    (kinds.CERTIFICATE_ENDS, changed(certificate={"days_left": 99.0, "fault": "it is revoked"}), "it is revoked", ""),
    (kinds.CERTIFICATE_ENDS, changed(certificate={"days_left": -1.0}), "the certificate has ended", ""),
    (
        kinds.LEDGER_FORKS,
        changed(ledger_contradictions=[{"region": "eu", "reason": "eu and us both lead"}]),
        "eu and us both lead",
        "diloco-node ledger /s/us",
    ),
    (
        kinds.LEADER_WRONG,
        changed(wrong_leaders=[{"region": "eu", "reason": "entry 11: its factor 0 is 0"}]),
        "entries of eu were refused while it led: entry 11: its factor 0 is 0",
        "diloco-node quarantine add eu us",
    ),
    (kinds.OVERBOOKED, changed(overbooked="the ledger has steps"), "the ledger has steps", "diloco-node ledger /s/us"),
    (kinds.DIGEST_DIFFERS, changed(digest_differences=2), "2 digests differed", "diloco-node replay /s/us"),
    (
        kinds.SETTINGS_DIFFER,
        changed(peers=peers(eu=DOWN | {"error": "settings_digest: ours ab, theirs cd"})),
        "eu: settings_digest: ours ab, theirs cd",
        "diloco-node config show",
    ),
    (
        kinds.SETTINGS_DIFFER,
        changed(
            peers=peers(eu=DOWN | {"error": settings_difference(["rounds.codec_up=int4"], ["rounds.codec_up=int8"])})
        ),
        "eu: rounds.codec_up is int4 here, int8 there",
        "diloco-node config show",
    ),
    (
        kinds.VERSION_DIFFERS,
        changed(peers=peers(eu=DOWN | {"error": "protocol_version: ours 9, theirs 8"})),
        "eu: protocol_version: ours 9, theirs 8",
        "diloco-node --version",
    ),
]


@pytest.mark.parametrize(("kind", "document", "text", "command"), CASES, ids=lambda value: getattr(value, "code", None))
def test_a_fault_raises_its_alert(kind: kinds.AlertKind, document: dict[str, Any], text: str, command: str) -> None:
    (alert,) = [alert for alert in find_alerts(document) if alert.code == kind.code]
    assert text in alert.text
    assert alert.mark is kind.mark
    assert alert.command.startswith(command)
    assert "{" not in alert.hint + alert.command
    if kind in (kinds.LEDGER_FORKS, kinds.LEADER_WRONG):
        assert alert.regions == ("eu",)  # who is to be stopped, not who tells it
    health = health_of(document)
    assert health["state"] in STATES
    assert health["line"].startswith(health["state"])


@pytest.mark.parametrize(
    ("fields", "is_told"),
    [
        ({"versions": [-1, -1]}, False),  # it waits for the first start of all regions
        ({"versions": [-1, 0]}, True),
        ({"versions": [-1, -1], "learner_process": {"state": "waiting", "exit_code": None}}, True),
    ],
)
def test_a_learner_that_waits_for_the_first_parameters_is_not_missing(fields: dict[str, Any], is_told: bool) -> None:
    codes = [alert.code for alert in find_alerts(changed(learner=None, **fields))]
    assert ("A-LEARNER-MISSING" in codes) is is_told


def test_every_kind_has_a_case() -> None:
    joint_only = {kinds.CUT_OFF.code}
    assert {kind.code for kind, *_ in CASES} | joint_only == {kind.code for kind in kinds.ALERT_KINDS}
    assert len({kind.code for kind in kinds.ALERT_KINDS}) == len(kinds.ALERT_KINDS)


def test_a_follower_says_what_it_does_itself() -> None:
    alerts = find_alerts(changed(role="follower", standings=standings(us={"tokens_per_step": 8192.0})))
    assert [(alert.code, alert.region) for alert in alerts] == [("A-OUTWEIGHS", "us")]


def test_a_region_is_told_of_by_the_leader_and_itself_and_a_leader_by_all() -> None:
    too_many = standings(ap={"tokens_per_step": 8192.0})
    told = {
        (role, region, leader): [alert.code for alert in find_alerts(changed(**fields, standings=too_many))]
        for role, region, leader in (("leader", "us", "us"), ("follower", "eu", "us"), ("follower", "eu", "ap"))
        for fields in ({"role": role, "region": region, "leader": leader},)
    }
    told["follower", "ap", "us"] = [
        alert.code for alert in find_alerts(changed(role="follower", region="ap", leader="us", standings=too_many))
    ]
    assert {key: kinds.OUTWEIGHS.code in codes for key, codes in told.items()} == {
        ("leader", "us", "us"): True,
        ("follower", "eu", "us"): False,
        ("follower", "eu", "ap"): True,
        ("follower", "ap", "us"): True,
    }
