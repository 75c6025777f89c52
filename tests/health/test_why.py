"""Each cause is named with its figures, and what would help by how much; nothing is claimed that can't be computed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.health.critical_path import critical_path
from diloco_node.health.why import explain, region_names


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


def topics(answer: dict[str, Any], topic: str) -> list[dict[str, Any]]:
    return [one for one in answer["findings"] if one["topic"] == topic]


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
    assert late["saves_seconds"] == pytest.approx(2.0), "median 3.0 s against 1.0 s"
    assert "ap" in late["change"]


def test_without_rounds_to_compare_no_saving_is_claimed() -> None:
    (_, late) = topics(explain([LEADER | {"round_log": [row(3.0)]}]), "rounds")
    assert (late["saves_seconds"], late["basis"]) == (None, "")


def test_the_slowest_link_is_compared_with_the_next() -> None:
    (link,) = topics(explain([LEADER, OTHER]), "link")
    assert link["text"].startswith("the slowest link is ap to us: 210 ms there and back, 840 ms of 3.8 s")
    assert link["saves_seconds"] == pytest.approx(4 * (0.21 - 0.09))


def test_a_slow_learner_and_a_region_behind_are_named() -> None:
    answer = explain([LEADER, OTHER])
    (learner,) = topics(answer, "learner")
    assert learner["text"] == "a step of ap takes 2.5 s, of the others 500 ms"
    assert learner["saves_seconds"] == pytest.approx(1.0)
    assert [one["text"] for one in topics(answer, "region")] == [
        "ap has 40 ledger entries still to apply",
        "ap fetches 1 versions that it lacks",
        "ap has made 100 steps, the median region 190",
        "ap was in 50 % of the merges while its learner was there",
    ]


def test_open_rounds_say_what_they_wait_for() -> None:
    (merging,) = topics(explain([LEADER, OTHER]), "merging")
    assert merging["text"] == "fragment 1 to version 5 waits for contributions of ap"
    (idle,) = topics(explain([LEADER | {"rounds": [], "reason": "0 of 3 due"}]), "merging")
    assert idle["text"] == "no round is open: 0 of 3 due"


def test_a_lost_majority_comes_first() -> None:
    down = [{"name": name, "link": "dialing", "is_alive": False} for name in ("eu", "ap")]
    answer = explain([LEADER | {"peers": down}])
    assert answer["findings"][0]["text"] == "1 of 3 regions are left, 2 are needed to merge"
    assert answer["line"].startswith("stalled: ")


def test_what_waits_for_the_budget_is_counted() -> None:
    lanes = {"rounds": {"wanted_bytes": 9_000_000, "used_bytes": 1_000_000}}
    budget = {"peers": {"ap": {"egress_bytes_per_s": 1_000_000, "lanes": lanes}}}
    found = topics(explain([LEADER | {"budget": budget, "budget_warning": "H = 48 would fit"}]), "budget")
    assert found[0]["text"] == "8.0 MB wait to be sent from us to ap"
    assert found[0]["basis"] == "8.0 s at the budget of 8.0 Mbit/s"
    assert found[1]["text"] == "H = 48 would fit"


def test_one_region_shows_only_what_is_about_it() -> None:
    answer = explain([LEADER, OTHER], "eu")
    assert all(not one["regions"] or "eu" in one["regions"] for one in answer["findings"])
    assert answer["findings"], "what is about all is about it, too"
    assert region_names([LEADER]) == ["ap", "eu", "us"]


JUNK = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.dictionaries(st.text(max_size=3), st.integers()))


@given(st.dictionaries(st.sampled_from(sorted(LEADER)), JUNK))
def test_documents_of_other_versions_break_nothing(junk: dict[str, Any]) -> None:
    assert isinstance(explain([LEADER | junk, OTHER])["line"], str)
