"""Causes that an alert names: late merges, regions that start or are away, errors of a script, links that refuse."""

from dataclasses import replace
from typing import Any

import pytest

from diloco_node.errors import PeerIncompatible
from diloco_node.health import alert_kinds as kinds
from diloco_node.health.alerts import find_alerts
from diloco_node.health.health_summary import health_of
from diloco_node.wire.envelope import Hello, Lane, check_hello
from diloco_node.wire.message_tables import PROTOCOL_VERSION
from tests.kit.health_kit import DOWN, LATE, SOUND, changed, peers, standings

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
    (again,) = find_alerts(changed(**crashed("Segmentation fault", state="running")))
    assert again.text == f"{crash.text}; it runs again, and has not attached yet", "the cause may be mended by now"


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
        (changed(commit_age_seconds=240.0, learner={"busy": {"activity": "evaluation"}}), kinds.NO_COMMIT),
        (changed(commit_age_seconds=260.0, learner={"pause_age_seconds": 20.0}), kinds.NO_COMMIT),
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
        "the own learner says why",
        "too soon after its pause",
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
    (alert,) = find_alerts(document)
    assert alert.code == "A-LEARNER-MISSING"
    assert alert.text == "no learner is attached: its process runs, and is not attached"


def test_a_learner_that_ended_is_said_so_before_its_link_is_gone() -> None:
    assert [alert.code for alert in find_alerts(changed(learner_process={"state": "done"}))] == ["A-LEARNER-ENDED"]


def test_a_script_that_ended_without_attach_has_not_run_out_of_data() -> None:
    process = {"state": "done", "exit_code": 0, "reason": "it ended before attach()"}
    (alert,) = find_alerts(changed(learner=None, learner_process=process))
    assert alert.code == "A-LEARNER-ENDED"
    assert alert.text.endswith(": it ended before attach()")


def test_a_command_can_be_copied_where_a_path_has_blanks() -> None:
    document = changed(learner=None, learner_process={"state": "waiting", "exit_code": 1, "log": "/my run/l.log"})
    (alert,) = find_alerts(document)
    assert alert.command == "tail -n 40 '/my run/l.log'"
    assert alert.hint == "Read the last lines of /my run/l.log."
