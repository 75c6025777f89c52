"""Each fault raises its alert, with the command that helps; a sound region raises none; junk is no alert."""

import re
import shlex
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import typer
from hypothesis import given

from diloco_node.errors import PeerIncompatible
from diloco_node.health import alert_kinds as kinds
from diloco_node.health.alerts import SILENT_MIN_S, find_alerts, learner_silence
from diloco_node.health.finding import SEVERITIES
from diloco_node.health.health_summary import STATES, health_of, joint_health
from diloco_node.main import app
from diloco_node.wire.envelope import Hello, Lane, check_hello, settings_difference
from diloco_node.wire.message_tables import PROTOCOL_VERSION
from tests.kit.repository import ROOT
from tests.kit.spoiled import spoiled

SOUND: dict[str, Any] = {
    "region": "us",
    "state": "training",
    "role": "leader",
    "leader": "us",
    "versions": [3, 3],
    "applied_index": 40,
    "inner_steps": 64,
    "parameters": 1000,
    "commit_age_seconds": 2.0,
    "usual_commit_seconds": 4.0,
    "peers": [
        {"name": "eu", "link": "up", "is_alive": True, "address": "eu:1", "error": ""},
        {"name": "ap", "link": "up", "is_alive": True, "address": "ap:1", "error": ""},
    ],
    "learner": {"step": 64, "step_seconds": 0.2, "report_age_seconds": 0.1, "finished": False},
    "learner_process": {"state": "running", "exit_code": None, "restarts": 0, "log": "/s/us/logs/learner.log"},
    "run": {"id": "try", "step": 64, "total_steps": 250},
    "disk": {"free_bytes": 50e9, "total_bytes": 100e9, "refused": ""},
    "certificate": {"days_left": 300.0},
    "left_out": [],
    "quarantine": {},
    "digest_differences": 0,
    "budget_warning": "",
    "learner_warning": None,
    "base_difference": "",
    "state_dir": "/s/us",
    "tokens_ratio_max": 4.0,
}
DOWN = {"link": "dialing", "is_alive": False, "error": "Connection refused", "applied_index": 38}


def changed(**changes: Any) -> dict[str, Any]:
    """SOUND with some fields replaced; a dict is merged into the one that is there."""
    document = deepcopy(SOUND)
    for key, value in changes.items():
        old = document.get(key)
        document[key] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    return document


def peers(**by_name: dict[str, Any]) -> list[dict[str, Any]]:
    return [peer | by_name.get(peer["name"], {}) for peer in SOUND["peers"]]


def standings(**by_name: dict[str, Any]) -> list[dict[str, Any]]:
    usual = {
        "rounds": 64,
        "tokens_per_step": 1024.0,
        "weight_share": 0.33,
        "steps_share": 0.33,
        "length_ratio": 1.1,
        "cosine": 0.4,
        "cosines": 64,
        "cosines_negative": 0,
    }
    return [{"region": name, **usual, **by_name.get(name, {})} for name in ("ap", "eu", "us")]


LATE = {"steps": 31.2, "sync_every": 16, "is_late": True, "is_starved": False}


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


EAGER = {"name": "eu", "link": "dialing", "is_alive": False, "rtt_seconds": None, "applied_index": 0, "address": "eu:1"}


def round_row(waited_for: str = "", outcome: str = "committed") -> dict[str, Any]:
    wait = {"region": waited_for, "phase": "gather"} if waited_for else None
    return {"outcome": outcome, "seconds": 1.0, "phases": {"gather": 0.8}, "waited_for": wait}


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "no region or phase is waited for in particular"),
        ({"round_log": [round_row("ap")] * 3 + [round_row()] * 5}, "3 of 8 rounds waited for ap in gather"),
        ({"round_log": [round_row("ap")] + [round_row()] * 7}, "no region or phase is waited for in particular"),
        ({"round_log": [round_row(), round_row(outcome="failed")]}, "1 ballots failed beside the last 1 rounds"),
        (
            {"merge_pace": LATE | {"is_starved": True}, "machine": {"late_seconds": 0.3, "cpu_pressure_percent": 97.0}},
            "the daemon's timers fire up to 300 ms late; processes waited for a processor 97 % of the last 10 s",
        ),
    ],
)
def test_late_merges_are_one_alert_with_the_cause_that_was_measured(changes: dict[str, Any], cause: str) -> None:
    document = changed(**({"merge_pace": LATE} | changes))
    (alert,) = find_alerts(document)
    assert (alert.code, alert.mark.value) == ("A-MERGES-LATE", "info")
    assert alert.text == f"each fragment is merged every 31 steps, H is 16; measured: {cause}"
    assert health_of(document)["state"] == "healthy"
    for other in ({"role": "follower"}, {"state": "finishing"}, {"learner": None, "learner_process": {}}):
        assert "A-MERGES-LATE" not in {alert.code for alert in find_alerts(document | other)}


def test_late_merges_of_a_small_budget_or_a_starved_machine_are_told_by_those_alerts_alone() -> None:
    (alert,) = find_alerts(changed(merge_pace=LATE, budget_warning="H = 48 would fit"))
    assert alert.code == "A-BUDGET-SMALL"
    starved = {
        "merge_pace": LATE | {"is_starved": True},
        "machine": {"late_seconds": 2.5, "cpu_pressure_percent": None},
    }
    (alert,) = find_alerts(changed(**starved))
    assert alert.code == "A-STARVED"
    assert alert.text == "the daemon's timers fire up to 2.5 s late; each fragment is merged every 31 steps, H is 16"
    assert "A-STARVED" not in {alert.code for alert in find_alerts(changed(**starved) | {"state": "finished"})}


def test_regions_that_only_start_are_not_down() -> None:
    both = [EAGER, EAGER | {"name": "ap", "error": "nobody listens there (Connection refused)"}]
    for versions in ([3, 3], [-1, -1]):
        starting = health_of(changed(peers=both, up_seconds=60.0, versions=versions, reason="waits for votes"))
        assert (starting["state"], starting["line"], starting["alerts"]) == (
            "starting",
            "starting: waits for votes",
            [],
        )
    assert health_of(changed(peers=[EAGER, SOUND["peers"][1]], up_seconds=60.0))["state"] == "healthy"


@pytest.mark.parametrize("up_s", [600.0, 3600.0, 86_400.0])
def test_a_region_that_was_started_long_before_the_others_starts_and_says_whom_to_start(up_s: float) -> None:
    both = [EAGER, EAGER | {"name": "ap", "address": "ap:1", "error": "nobody listens there (Connection refused)"}]
    early = changed(peers=both, up_seconds=up_s, versions=[-1, -1], learner=None, reason="the first start needs all")
    alerts = [alert for alert in find_alerts(early) if alert.code != "A-NO-LEARNER"]
    assert {alert.code for alert in alerts} == {"A-PEER-DOWN"}, "no majority is lost that never was"
    assert sorted(alert.command for alert in alerts) == [
        "diloco-node start --region ap",
        "diloco-node start --region eu",
    ]
    assert health_of(early)["state"] == "starting"


@pytest.mark.parametrize(
    ("up_s", "change"),
    [
        (121.0, {}),
        (None, {}),
        (60.0, {"rtt_seconds": 0.04}),
        (60.0, {"applied_index": 7}),
        (60.0, {"error": "its certificate is another run's"}),
        (60.0, {"error": "no answer within 10 s"}),
    ],
)
def test_a_region_that_was_there_or_is_out_of_reach_is_down_at_once(up_s: float | None, change: dict[str, Any]) -> None:
    alerts = find_alerts(changed(peers=[EAGER | change, SOUND["peers"][1]], up_seconds=up_s))
    assert [alert.code for alert in alerts] == ["A-LAST-MAJORITY", "A-PEER-DOWN"]


def failed(words: str) -> dict[str, Any]:
    return {"text": f"the learner failed: {words}", "age_seconds": 3.0, "is_failure": True}


def crashed(last_line: str, state: str = "waiting") -> dict[str, Any]:
    reason = f"exit code 1 after 3.2 s: {last_line}"
    return {"learner": None, "learner_process": {"state": state, "exit_code": 1, "restarts": 1, "reason": reason}}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("RuntimeError: the loss is not a scalar", "A-LEARNER-FAILED"),
        ("ValueError: I think the gradient norm is odd", "A-LEARNER-FAILED"),
        ("AssertionError: step 3: the loss is nan", "A-LEARNER-FAILED"),
        ("OutOfMemoryError: CUDA out of memory", "A-LEARNER-FAILED"),
        ("LearnerError: step 3: the loss is nan, 3 times in a row", "A-LOSS-NAN"),
        ("LearnerError: step 3: the gradient norm is inf", "A-LOSS-NAN"),
    ],
)
def test_an_error_of_the_script_is_no_fault_of_the_loss_and_raises_one_alert(words: str, code: str) -> None:
    assert [alert.code for alert in find_alerts(changed(learner_warning=failed(words)))] == [code]
    exit_too = changed(learner_warning=failed(words), **crashed(f"some.module.{words}"))
    assert [alert.code for alert in find_alerts(exit_too)] == [code], "the process ended with it"
    several_lines = changed(learner_warning=failed(rf"{words}\nand a second line"), **crashed(words))
    assert [alert.code for alert in find_alerts(several_lines)] == [code]
    crash_loop = changed(learner_warning=failed(words), **crashed(words, state="stopped"))
    assert [alert.code for alert in find_alerts(crash_loop)] == ["A-LEARNER-STOPPED"], "the graver, with the same words"


def test_a_crash_with_other_words_is_another_cause() -> None:
    document = changed(learner_warning=failed("ValueError: no data"), **crashed("Segmentation fault"))
    (crash, failure) = find_alerts(document)
    assert (crash.code, failure.code) == ("A-LEARNER-CRASHES", "A-LEARNER-FAILED")
    assert crash.text == "the learner's process ended: exit code 1 after 3.2 s: Segmentation fault; 1 restarts"


HELLO = Hello(PROTOCOL_VERSION, "run1", "01", "us", "ab", "cd", b"i" * 16, Lane.CONTROL, 3, settings=("H=24",))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"protocol_version": PROTOCOL_VERSION + 1}, kinds.VERSION_DIFFERS),
        ({"run_id": "run2"}, kinds.SETTINGS_DIFFER),
        ({"founding_digest": "ef"}, kinds.SETTINGS_DIFFER),
        ({"manifest_digest": "ef"}, kinds.SETTINGS_DIFFER),
        ({"settings_digest": "ef"}, kinds.SETTINGS_DIFFER),
        ({"settings_digest": "ef", "settings": ("H=16",)}, kinds.SETTINGS_DIFFER),
    ],
)
def test_the_words_in_which_a_link_refuses_are_understood(change: dict[str, Any], kind: kinds.AlertKind) -> None:
    with pytest.raises(PeerIncompatible) as refusal:
        check_hello(HELLO, replace(HELLO, region="eu", **change), certificate_region="eu")
    alerts = find_alerts(changed(peers=peers(eu=DOWN | {"error": str(refusal.value)})))
    assert {alert.code for alert in alerts if alert.region == "eu"} == {kind.code}


def test_other_words_of_a_link_are_no_difference() -> None:
    error = "the handshake ended before any HTTP/2 settings came; look at the proxy of run_id try"
    alerts = find_alerts(changed(peers=peers(eu=DOWN | {"error": error})))
    assert {alert.code for alert in alerts if alert.region == "eu"} == {kinds.PEER_DOWN.code}


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        (changed(commit_age_seconds=29.0, usual_commit_seconds=1.0), kinds.NO_COMMIT),
        (changed(commit_age_seconds=41.0, peers=peers(ap=DOWN, eu=DOWN)), kinds.NO_COMMIT),
        (changed(quarantine={"eu": "for 600 s more"}, peers=peers(eu=DOWN)), kinds.PEER_DOWN),
        (changed(peers=peers(eu=DOWN | {"has_left": True})), kinds.PEER_DOWN),
        (changed(role="follower", left_out=[{"region": "ap", "part": "member", "reason": "late"}]), kinds.LEFT_OUT),
        (changed(state="finished", left_out=[{"region": "ap", "part": "member", "reason": "left"}]), kinds.LEFT_OUT),
        (changed(role="follower", standings=standings(ap={"tokens_per_step": 8192.0})), kinds.OUTWEIGHS),
        (changed(standings=standings(ap={"tokens_per_step": 8192.0, "rounds": 7})), kinds.OUTWEIGHS),
        (changed(standings=standings(ap={"tokens_per_step": 8192.0}), tokens_ratio_max=8.0), kinds.OUTWEIGHS),
        (changed(standings=standings(ap={"weight_share": 0.6, "steps_share": 0.31})), kinds.OUTWEIGHS),
        (changed(standings=standings(ap={"cosine": -0.01, "cosines_negative": 40})), kinds.AGAINST),
        (changed(standings=standings(ap={"length_ratio": 2.0})), kinds.TOO_LONG),
        (changed(state="finished", standings=standings(ap={"length_ratio": 9.0})), kinds.TOO_LONG),
        (
            changed(
                left_out=[{"region": "eu", "part": "member", "reason": "it led before"}],
                peers=peers(eu=DOWN | {"has_left": True}),
            ),
            kinds.LEFT_OUT,
        ),
    ],
    ids=[
        "too soon",
        "no majority says it",
        "quarantine says it",
        "it said that it leaves",
        "the leader says it",
        "the run is over",
        "the leader says it of weights too",
        "few rounds",
        "the operator says so",
        "less than twice its steps",
        "negative half of the time",
        "as long as counts",
        "the last rates are tiny",
        "it stopped in order",
    ],
)
def test_what_is_usual_or_said_already_is_no_alert(document: dict[str, Any], kind: kinds.AlertKind) -> None:
    assert kind.code not in {alert.code for alert in find_alerts(document)}


def test_a_learner_that_is_started_again_after_it_ended_well_has_not_crashed() -> None:
    document = changed(learner=None, learner_process={"state": "running", "exit_code": 0, "restarts": 1})
    assert [alert.code for alert in find_alerts(document)] == ["A-LEARNER-MISSING"]


def test_a_learner_that_ended_is_said_so_before_its_link_is_gone() -> None:
    assert [alert.code for alert in find_alerts(changed(learner_process={"state": "done"}))] == ["A-LEARNER-ENDED"]


def test_a_command_can_be_copied_where_a_path_has_blanks() -> None:
    document = changed(learner=None, learner_process={"state": "waiting", "exit_code": 1, "log": "/my run/l.log"})
    (alert,) = find_alerts(document)
    assert alert.command == "tail -n 40 '/my run/l.log'"
    assert alert.hint == "Read the last lines of /my run/l.log."


def test_every_kind_has_a_case() -> None:
    joint_only = {kinds.CUT_OFF.code}
    assert {kind.code for kind, *_ in CASES} | joint_only == {kind.code for kind in kinds.ALERT_KINDS}
    assert len({kind.code for kind in kinds.ALERT_KINDS}) == len(kinds.ALERT_KINDS)


def test_a_follower_says_what_it_does_itself() -> None:
    alerts = find_alerts(changed(role="follower", standings=standings(us={"tokens_per_step": 8192.0})))
    assert [(alert.code, alert.region) for alert in alerts] == [("A-OUTWEIGHS", "us")]


def test_a_sound_region_is_healthy() -> None:
    assert find_alerts(SOUND) == find_alerts(changed(standings=standings())) == []
    assert health_of(SOUND) == {
        "state": "healthy",
        "line": "healthy: 3 of 3 regions, 1 more may fail, merged 2.0 s ago",
        "failure_tolerance": 1,
        "training_tolerance": 0,
        "alerts": [],
    }


def test_learners_that_are_gone_are_no_training() -> None:
    with_steps = [peer | {"step": 60} for peer in SOUND["peers"]]
    assert health_of(changed(peers=with_steps))["training_tolerance"] == 2
    assert health_of(changed(peers=with_steps, learner={"finished": True}))["training_tolerance"] == 1
    gone = [with_steps[0] | DOWN, with_steps[1] | {"step": None}]
    assert health_of(changed(peers=gone))["training_tolerance"] == 0
    assert joint_health([changed(peers=with_steps), changed(region="eu", peers=gone)])["training_tolerance"] == 0


def test_the_health_of_several_holds_since_the_first_that_had_it() -> None:
    documents = [changed(region=name) for name in ("ap", "eu", "us")]
    since = [
        document | {"health": health_of(document) | {"since_unix": 70.0 + at}} for at, document in enumerate(documents)
    ]
    assert joint_health(since)["since_unix"] == 70.0
    worse = since[1] | {"health": since[1]["health"] | {"state": "degraded", "since_unix": 90.0}}
    assert joint_health([since[0], worse])["since_unix"] == 90.0
    assert joint_health(documents)["since_unix"] is None


@pytest.mark.parametrize("changes", [{"inner_steps": 249}, {"inner_steps": 900, "run": {"total_steps": None}}])
def test_a_region_that_is_cut_off_before_the_end_does_not_take_the_run_for_finished(changes: dict[str, Any]) -> None:
    (alert, *_) = find_alerts(changed(peers=peers(ap=DOWN, eu=DOWN), **changes))
    assert alert.code == "A-NO-MAJORITY"
    assert "finished" not in alert.text


def test_the_worst_alert_stands_first_and_in_the_line() -> None:
    document = changed(peers=peers(ap=DOWN), learner=None, learner_process={"state": "done", "exit_code": 0})
    alerts = find_alerts(document)
    assert [alert.code for alert in alerts] == ["A-LEARNER-ENDED", "A-LAST-MAJORITY", "A-PEER-DOWN"]
    health = health_of(document)
    assert health["line"] == "degraded: us: the learner ended at step 64, the run is at 64 of 250 (and 2 more)"
    assert health["failure_tolerance"] == 0


def test_merging_that_stands_still_is_stalled() -> None:
    assert health_of(changed(peers=peers(ap=DOWN, eu=DOWN)))["state"] == "stalled"
    assert health_of(changed(commit_age_seconds=1000.0))["state"] == "stalled"
    assert health_of(changed(commit_age_seconds=1000.0, usual_commit_seconds=None))["state"] == "healthy", "not known"


def test_a_run_that_ends_needs_its_majority() -> None:
    ending = changed(state="finishing", peers=peers(ap=DOWN, eu=DOWN))
    assert health_of(ending)["state"] == "stalled"


def test_a_region_that_lost_its_folder_is_no_vote() -> None:
    health = health_of(changed(voters=["ap", "eu"]))
    assert health["failure_tolerance"] == 0
    assert health["line"] == "degraded: us: 2 of 3 regions can vote: the next failure stops merging"
    health = health_of(changed(voters=["ap", "eu"], peers=peers(ap=DOWN)))
    assert health["line"].startswith("stalled: us: 1 of 3 regions can vote, 2 are needed to merge")
    assert health_of(changed(voters=["ap", "eu", "us"]))["failure_tolerance"] == 1


def test_a_run_that_has_not_begun_has_no_majority_to_lose() -> None:
    document = changed(state="waiting", versions=[-1, -1], voters=None, peers=peers(ap=DOWN))
    health = health_of(document)
    assert health["line"] == "starting: ap (ap:1) is down: Connection refused"
    assert health["failure_tolerance"] == 0


def test_a_region_that_saw_no_merge_says_so_and_carries_no_run() -> None:
    fresh = changed(region="eu", commit_age_seconds=None, usual_commit_seconds=None)
    assert health_of(fresh)["line"] == "healthy: 3 of 3 regions, 1 more may fail, no merge seen yet"
    late = changed(commit_age_seconds=1000.0)
    assert joint_health([late, fresh])["state"] == "stalled"
    assert joint_health([late, changed(region="eu")])["state"] == "degraded", "eu merges"
    alone = changed(peers=peers(ap=DOWN, eu=DOWN))
    assert joint_health([alone, fresh])["state"] == "degraded", "eu has a majority, us has not"


def test_a_region_that_starts_has_no_say_in_the_tolerance() -> None:
    joint = joint_health([SOUND, {"region": "ap", "state": "starting", "reason": "waits"}])
    assert (joint["state"], joint["failure_tolerance"]) == ("starting", 1)
    assert joint_health([SOUND, changed(region="eu", peers=peers(ap=DOWN))])["failure_tolerance"] == 0, "the least"


def test_a_run_that_is_over_has_no_missing_learners_and_peers() -> None:
    over = changed(state="finished", reason="finished: enough steps", learner=None, peers=peers(ap=DOWN, eu=DOWN))
    assert health_of(over)["alerts"] == []
    assert health_of(over)["line"] == "finished: enough steps"
    ending = changed(state="finishing", learner=None, learner_process={"state": "done"})
    assert find_alerts(ending) == []


def test_a_spike_is_shown_but_the_run_is_healthy() -> None:
    health = health_of(changed(learner_warning={"text": "the loss is 9.1", "age_seconds": 30.0}))
    assert (health["state"], len(health["alerts"])) == ("healthy", 1)
    assert health["line"].startswith("healthy: 3 of 3 regions")
    assert health_of(changed(learner_warning={"text": "old", "age_seconds": 700.0}))["alerts"] == []


def test_a_region_that_has_no_learner_by_design_raises_nothing() -> None:
    witness = changed(learner=None, inner_steps=0)
    witness["learner_process"] = {}
    assert find_alerts(witness) == []


@pytest.mark.parametrize("regions", range(1, 8))
def test_tolerance_is_what_is_left_over_a_majority(regions: int) -> None:
    peer_list = [{"name": f"r{at}", "link": "up", "is_alive": True} for at in range(regions - 1)]
    assert health_of(changed(peers=peer_list))["failure_tolerance"] == (regions - 1) // 2


@pytest.mark.parametrize(("age_s", "step_s", "is_silent"), [(19.0, 0.1, False), (21.0, 0.1, True), (21.0, 5.0, False)])
def test_silence_is_measured_by_the_steps_before(age_s: float, step_s: float, is_silent: bool) -> None:
    assert bool(learner_silence(age_s, step_s)) == is_silent
    assert learner_silence(None, step_s) == ""
    assert SILENT_MIN_S == 20.0


def test_several_regions_show_each_alert_once_and_the_worst_state() -> None:
    first, second = changed(peers=peers(ap=DOWN)), changed(region="eu", peers=peers(ap=DOWN))
    joint = joint_health([first, second | {"health": health_of(second)}, {"region": "ap", "error": "refused"}])
    assert [(alert["code"], alert["region"]) for alert in joint["alerts"]] == [
        ("A-LAST-MAJORITY", "us"),
        ("A-PEER-DOWN", "ap"),
    ]
    assert joint["state"] == "degraded"
    assert joint_health([])["line"] == "no region answers"


def test_a_region_that_is_cut_off_does_not_stall_a_run_that_others_carry_on() -> None:
    names = [peer["name"] for peer in SOUND["peers"]]
    alone = changed(peers=peers(**dict.fromkeys(names, DOWN)))
    healthy = changed(region=names[0], peers=[SOUND["peers"][1], {"name": "us"} | DOWN])
    joint = joint_health([alone, healthy])
    assert joint["state"] == "degraded"
    assert joint["failure_tolerance"] == 0
    alerts = {(alert["code"], alert["region"]): alert for alert in joint["alerts"]}
    assert alerts["A-CUT-OFF", "us"]["text"] == "us hears 1 of 3 regions; the others merge on"
    assert ("A-NO-MAJORITY", "us") not in alerts
    assert joint_health([alone])["state"] == "stalled"
    over = joint_health([alone, changed(region="eu", state="finished")])
    assert ("A-NO-MAJORITY", "us") in {(alert["code"], alert["region"]) for alert in over["alerts"]}


ILL = changed(
    peers=peers(ap=DOWN),
    commit_age_seconds=41.0,
    left_out=[{"region": "ap", "part": "member", "reason": "its stripes did not come"}],
    quarantine={"eu": "for 600 s more"},
    learner_warning={"text": "the loss is nan", "age_seconds": 30.0, "is_failure": True},
)


@given(spoiled(ILL), spoiled(ILL | {"health": health_of(ILL)}))
def test_documents_of_other_versions_break_nothing(document: dict[str, Any], other_document: dict[str, Any]) -> None:
    assert health_of(document)["state"] in STATES
    joint = joint_health([document, other_document])
    assert joint["line"]
    assert joint["failure_tolerance"] >= 0


def test_a_line_names_the_region_though_its_letters_are_in_a_word() -> None:
    document = changed(disk={"refused": "ledger: No space left"})
    assert health_of(document)["line"] == "degraded: us: the disk refuses: ledger: No space left"


@pytest.mark.parametrize("kind", [kind for kind in kinds.ALERT_KINDS if "diloco-node" in kind.command], ids=str)
def test_a_command_to_copy_is_one_that_there_is(kind: kinds.AlertKind) -> None:
    """Its arguments are parsed as they would be; nothing is carried out."""
    words = shlex.split(kind.command.format(region="us", own="eu", log="l", state="s"))[1:]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        command = command.commands[words.pop(0)]
    if not {"--help", "--version"} & set(words):
        command.make_context(command.name, words)


def test_the_page_has_each_alert_once() -> None:
    """docs/alerts.md says of each what the code says, in the order of the code."""
    rows = re.findall(r"^\| `(A-[A-Z-]+)` \| (\w+) \| (.*) \| (.*) \|$", (ROOT / "docs/alerts.md").read_text(), re.M)

    def shown(text: str) -> str:
        return text.replace("{log}", "LOG")

    table = [(kind.code, SEVERITIES[kind.mark], shown(kind.meaning), shown(kind.hint)) for kind in kinds.ALERT_KINDS]
    assert rows == table


def test_contributors_count_for_no_majority() -> None:
    members = {
        "rows": [{"region": "us", "kind": "voter"}, *({"region": name, "kind": "contributor"} for name in ("ap", "eu"))]
    }
    down = changed(voters=["us"], members=members, peers=peers(ap=DOWN, eu=DOWN))
    assert "A-NO-MAJORITY" not in [alert.code for alert in find_alerts(down)], "the only voter commits alone"
    members["rows"][1]["kind"] = "voter"
    voters = ["us", "ap"]
    health = health_of(changed(voters=voters, members=members, peers=peers(ap=DOWN)))
    assert health["line"].startswith("stalled: us: 1 of 2 regions can vote, 2 are needed to merge")
