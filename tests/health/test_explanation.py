"""Each cause is named with its figures, and what would help by how much; nothing is claimed that can't be computed."""

from typing import Any

import pytest
from hypothesis import given

from diloco_node.health import alert_kinds as kinds
from diloco_node.health import explanation
from diloco_node.health.critical_path import ROUNDS_SEEN, critical_path
from diloco_node.health.explanation import region_names
from tests.kit.spoiled import spoiled


def row(gather: float, region: str = "ap", phase: str = "gather", outcome: str = "committed") -> dict[str, Any]:
    return {
        "fragment": 0,
        "version": 1,
        "outcome": outcome,
        "seconds": gather + 1.5,
        "phases": {"gather": gather, "reduce": 1.0, "commit": 0.4, "apply": 0.1},
        "waited_for": {"region": region, "phase": phase},
    }


LEADER: dict[str, Any] = {
    "region": "us",
    "state": "training",
    "role": "leader",
    "leader": "us",
    "term": 4,
    "applied_index": 100,
    "inner_steps": 200,
    "reason": "fragment 1 to 5: waits",
    "steps_of": {"us": 200, "eu": 190, "ap": 100},
    "participation_of": {"us": 1.0, "eu": 0.99, "ap": 0.5},
    "peers": [
        {"name": "eu", "link": "up", "is_alive": True, "rtt_seconds": 0.09, "applied_index": 99},
        {"name": "ap", "link": "up", "is_alive": True, "rtt_seconds": 0.21, "applied_index": 60},
    ],
    "learner": {"step_seconds": 0.5, "report_age_seconds": 0.2},
    "round_log": [row(3.0), row(3.0), row(1.0, "eu"), row(9.0, outcome="failed")],
    "rounds": [{"fragment": 1, "version": 5, "reason": "waits for contributions of ap", "open_seconds": 3.0}],
}
OTHER = LEADER | {
    "region": "ap",
    "role": "follower",
    "rounds": [],
    "round_log": [row(8.0, "eu")] * 9,
    "learner": {"step_seconds": 2.5, "report_age_seconds": 0.2},
    "peers": [{"name": "us", "link": "up", "is_alive": True, "rtt_seconds": 0.2}],
    "fetching": [{"fragment": 0, "version": 4, "peer": "us"}],
}


def explain(documents: list[dict[str, Any]], region: str = "") -> dict[str, Any]:
    return explanation.explain(documents, [region] if region else ()).document()


def topics(answer: dict[str, Any], topic: str) -> list[dict[str, Any]]:
    return [finding for finding in answer["findings"] if finding["topic"] == topic]


def test_the_critical_path_is_the_leaders() -> None:
    path = critical_path([OTHER, LEADER])
    assert path is not None
    assert (path.seen_from, path.rounds, path.failed) == ("us", 3, 1)
    assert path.phases[0] == ("gather", pytest.approx(7 / 3))
    assert [name for name, _ in path.phases] == ["gather", "reduce", "commit", "apply"]
    assert path.waits[0] == (("ap", "gather"), 2)
    assert critical_path([{}]) is None
    assert critical_path([{"round_log": [row(1.0, outcome="failed")]}]) is None


def test_the_region_that_rounds_wait_for_is_named_with_its_cost() -> None:
    phases, late = topics(explain([LEADER, OTHER]), "rounds")
    assert phases["text"].startswith("a round takes 3.8 s: gather 2.3 s (61 %), reduce 1.0 s")
    assert phases["text"].endswith("1 further ballots failed")
    assert late["text"] == "2 of 3 rounds waited for ap in gather"
    assert late["saves_seconds"] == pytest.approx(2.0 * 2 / 3), "median 3.0 s against 1.0 s, in two of three rounds"
    assert late["basis"].startswith("2.0 s each: ")
    assert "ap" in late["change"]


def test_a_region_that_holds_up_few_rounds_costs_little() -> None:
    log = [row(1.0) | {"waited_for": None}] * 31 + [row(4.0)]
    (_, late) = topics(explain([LEADER | {"round_log": log}]), "rounds")
    assert late["saves_seconds"] == pytest.approx(3.0 / 32)
    assert late["change"] == ""


def test_the_last_committed_rounds_count_and_what_failed_since() -> None:
    log = [row(9.0)] * 10 + [row(1.0, "eu")] * ROUNDS_SEEN + [row(9.0, outcome="failed")] * 40
    phases, late = topics(explain([LEADER | {"round_log": log}]), "rounds")
    assert phases["text"].startswith("a round takes 2.5 s")
    assert phases["text"].endswith("40 further ballots failed")
    assert late["saves_seconds"] is None, "no other round to compare with: the nine seconds are too long ago"


def test_a_wait_that_makes_no_round_longer_saves_nothing() -> None:
    (_, late) = topics(explain([LEADER | {"round_log": [row(1.0), row(1.0), row(3.0, "eu")]}]), "rounds")
    assert (late["text"], late["saves_seconds"]) == ("2 of 3 rounds waited for ap in gather", 0.0)


def test_of_two_that_lead_the_later_one_knows() -> None:
    old = LEADER | {"region": "eu", "term": 3, "round_log": [row(8.0)] * 20}
    path = critical_path([old, LEADER | {"term": 4}])
    assert path is not None
    assert path.seen_from == "us"


def test_rounds_without_a_time_are_no_figure() -> None:
    timeless = {"outcome": "committed", "phases": {"gather": 1.0}}
    assert topics(explain([LEADER | {"round_log": [timeless]}]), "rounds") == []


def test_without_rounds_to_compare_no_saving_is_claimed() -> None:
    (_, late) = topics(explain([LEADER | {"round_log": [row(3.0)]}]), "rounds")
    assert (late["saves_seconds"], late["basis"]) == (None, "")


def test_the_slowest_link_is_compared_with_the_next() -> None:
    (link,) = topics(explain([LEADER, OTHER]), "link")
    assert link["text"].startswith("the link that costs most is ap to us: 210 ms there and back, 840 ms of 3.8 s")
    assert link["saves_seconds"] == pytest.approx(4 * (0.21 - 0.09))


def test_a_link_between_two_followers_costs_one_round_trip() -> None:
    aside = OTHER | {"peers": [{"name": "eu", "link": "up", "is_alive": True, "rtt_seconds": 0.5}]}
    (link,) = topics(explain([LEADER, aside]), "link")
    assert link["text"].startswith("the link that costs most is ap to us: 210 ms there and back, 840 ms")
    assert link["saves_seconds"] == pytest.approx(4 * 0.21 - 0.5)
    far = aside | {"peers": [aside["peers"][0] | {"rtt_seconds": 1.5}]}
    (link,) = topics(explain([LEADER, far]), "link")
    assert link["text"].startswith("the link that costs most is ap to eu: 1.5 s there and back, 1.5 s of 3.8 s")
    assert link["saves_seconds"] == pytest.approx(1.5 - 4 * 0.21)


def test_a_link_that_is_down_or_slower_than_whole_rounds_promises_nothing() -> None:
    eu, ap = LEADER["peers"]
    (link,) = topics(explain([LEADER | {"peers": [eu, ap | {"link": "dialing"}]}]), "link")
    assert link["text"].startswith("the link that costs most is eu to us: 90 ms")
    assert link["saves_seconds"] is None, "there is no other"
    (link,) = topics(explain([LEADER | {"peers": [eu, ap | {"rtt_seconds": 1.0}]}]), "link")
    assert link["text"].endswith("1.0 s there and back, 4.0 s")
    assert link["saves_seconds"] is None


def test_where_a_processor_is_starved_no_link_and_no_bandwidth_is_to_blame() -> None:
    starved = OTHER | {"machine": {"late_seconds": 2.5, "cpu_pressure_percent": 98.0}}
    log = [row(3.0, "ap"), row(3.0, "ap"), row(1.0)]
    answer = explain([LEADER | {"round_log": log}, starved])
    (machine,) = [finding for finding in answer["findings"] if finding["topic"] == "machine"]
    assert machine["text"].startswith(
        "ap: the daemon's timers fire up to 2.5 s late; processes waited for a processor 98 %"
    )
    assert machine["change"] == kinds.STARVED.hint
    (waits,) = [finding for finding in answer["findings"] if "rounds waited for ap" in finding["text"]]
    assert waits["change"] == kinds.STARVED.hint, "not its bandwidth"
    (link,) = [finding for finding in answer["findings"] if finding["topic"] == "link"]
    assert link["text"].startswith("the link that costs most is eu to us"), (
        "ap's round trips are those of its processor"
    )


def test_a_loopback_link_costs_nothing_worth_a_line() -> None:
    peers = [peer | {"rtt_seconds": 0.0004} for peer in LEADER["peers"]]
    assert not [finding for finding in explain([LEADER | {"peers": peers}])["findings"] if finding["topic"] == "link"]


@pytest.mark.parametrize("state", [{"has_left": True}, {"link": "waiting", "is_alive": False}])
def test_a_region_that_is_away_has_no_slow_disk(state: dict[str, Any]) -> None:
    answer = explain([LEADER | {"peers": [peer | state for peer in LEADER["peers"]]}])
    (behind,) = [finding for finding in topics(answer, "region") if "entries" in finding["text"]]
    assert behind["change"] == "it is away: start it"


def test_steps_that_differ_a_little_are_no_cause() -> None:
    near = OTHER | {"learner": {"step_seconds": 0.6, "report_age_seconds": 0.2}}
    assert topics(explain([LEADER, near]), "learner") == []


def test_a_slow_learner_and_a_region_behind_are_named() -> None:
    answer = explain([LEADER, OTHER])
    (learner,) = topics(answer, "learner")
    assert learner["text"] == "a step of ap takes 2.5 s, of the others 500 ms"
    assert learner["saves_seconds"] == pytest.approx(1.0)
    assert [finding["text"] for finding in topics(answer, "region")] == [
        "ap has 40 ledger entries still to apply",
        "ap fetches 1 versions that it lacks",
        "ap has made 100 steps, the median region 190",
        "ap was in 50 % of the merges while its learner was there",
    ]


def test_what_is_not_known_of_a_region_is_not_said() -> None:
    unheard = LEADER["peers"][1] | {"is_alive": False, "link": "dialing", "applied_index": 0}
    never = LEADER | {"peers": [LEADER["peers"][0], unheard], "steps_of": {"us": 200, "eu": 190, "ap": 0}}
    assert [finding["text"] for finding in topics(explain([never]), "region")] == [
        "ap was in 50 % of the merges while its learner was there"
    ]


def test_open_rounds_say_what_they_wait_for() -> None:
    (merging,) = topics(explain([LEADER, OTHER]), "merging")
    assert merging["text"] == "fragment 1 to version 5 waits for contributions of ap"
    (idle,) = topics(explain([LEADER | {"rounds": [], "reason": "0 of 3 due"}]), "merging")
    assert idle["text"] == "no round is open: 0 of 3 due"


def test_a_lost_majority_comes_first() -> None:
    down = [{"name": name, "link": "dialing", "is_alive": False} for name in ("eu", "ap")]
    answer = explain([LEADER | {"peers": down}])
    assert answer["findings"][0]["text"] == "us: 1 of 3 regions are left, 2 are needed to merge"
    assert answer["line"].startswith("stalled: ")


def test_causes_name_their_region_and_no_hint_is_to_ask_again() -> None:
    ill = LEADER | {"disk": {"refused": "ledger: full"}, "commit_age_seconds": 900.0, "usual_commit_seconds": 1.0}
    silent = OTHER | {"learner": {"step_seconds": 0.5, "report_age_seconds": 75.0}}
    findings = explain([ill, silent])["findings"]
    late, disk = [finding for finding in findings if finding["topic"] == "merging"][:2]
    assert (late["text"].split(":")[0], late["change"]) == ("us", "")
    assert (disk["text"], disk["regions"]) == ("us: the disk refuses: ledger: full", ("us",))
    assert [finding["text"].split(":")[0] for finding in findings if finding["topic"] == "learner"] == ["ap"]


def test_what_waits_for_the_budget_is_counted() -> None:
    lanes = {"rounds": {"wanted_bytes": 9_000_000, "used_bytes": 1_000_000}}  # compressed, or given up
    rows = {"ap": {"waiting_bytes": 8_000_000, "lanes": lanes}, "eu": {"waiting_bytes": 0, "lanes": lanes}}
    budget = {"peers": {name: row | {"egress_bytes_per_s": 1_000_000} for name, row in rows.items()}}
    findings = topics(explain([LEADER | {"budget": budget, "budget_warning": "H = 48 would fit"}]), "budget")
    assert findings[0]["text"] == "8.0 MB wait to be sent from us to ap"
    assert findings[0]["basis"] == "8.0 s at the budget of 8.0 Mbit/s"
    assert [finding["text"] for finding in findings[1:]] == ["H = 48 would fit"]


def test_one_region_shows_only_what_is_about_it() -> None:
    answer = explain([LEADER, OTHER], "eu")
    assert all(not finding["regions"] or "eu" in finding["regions"] for finding in answer["findings"])
    assert answer["findings"], "what is about all is about it, too"
    assert region_names([LEADER]) == ["ap", "eu", "us"]


BUDGET = {"peers": {"ap": {"waiting_bytes": 9, "egress_bytes_per_s": 1}}}


@given(spoiled(LEADER | {"budget": BUDGET, "budget_warning": "H = 48 would fit"}))
def test_documents_of_other_versions_break_nothing(document: dict[str, Any]) -> None:
    assert isinstance(explain([document, OTHER])["line"], str)
