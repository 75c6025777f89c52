"""The state of a run by its alerts: healthy, stalled, ending, over, and what several regions show together."""

import re
import shlex
from typing import Any

import pytest
import typer
from hypothesis import given

from diloco_node.health import alert_kinds as kinds
from diloco_node.health.alerts import FIRST_STEP_S, SILENT_MIN_S, find_alerts, learner_silence
from diloco_node.health.finding import SEVERITIES
from diloco_node.health.health_summary import STATES, health_of, joint_health
from diloco_node.main import app
from tests.kit.health_kit import DOWN, SOUND, changed, peers, standings
from tests.kit.repository import ROOT
from tests.kit.spoiled import spoiled


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
    closed = ending | {"peers": peers(ap=DOWN, eu=DOWN), "commit_age_seconds": 1000.0}
    assert find_alerts(closed) != []
    closed["end"] = {"reason": "enough steps", "is_written": False}
    assert find_alerts(closed) == [], "a large model is written here, and the others have gone"


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
    assert learner_silence(None, step_s) == learner_silence(None, step_s, FIRST_STEP_S) == ""
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


def test_a_voter_that_was_away_too_long_counts_for_no_majority() -> None:
    members: dict[str, Any] = {"rows": [{"region": name, "kind": "voter"} for name in ("us", "ap", "eu", "sa")]}
    away = changed(voters=["us", "ap", "eu"], members=members, peers=peers(ap={}, eu={}, sa=DOWN))
    assert "3 of 4 regions are left" in health_of(away)["line"]
    members["rows"][3]["counts"] = False
    assert health_of(away)["failure_tolerance"] == 1, "of three that count each may fail"
    assert not {"A-LAST-MAJORITY", "A-NO-MAJORITY"} & {alert.code for alert in find_alerts(away)}
