"""node/budget.py: what an operator asks for, and what run.toml says now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diloco_node.core.budget_plan import BudgetPlan
from diloco_node.core.types import RateLimits
from diloco_node.daemon.budget import changed_plan, plan_of_file
from diloco_node.errors import ConfigError

PLAN = BudgetPlan(RateLimits(1000, 2000), (("b", RateLimits(7, None)),))
PEERS = ("b", "c")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"egress": "8Mbit/s"}, BudgetPlan(RateLimits(10**6, 2000), PLAN.peers)),
        ({"egress": "none", "ingress": "1MB/s"}, BudgetPlan(RateLimits(None, 10**6), PLAN.peers)),
        ({"ingress": "1MB/s", "peer": "b"}, BudgetPlan(PLAN.limits, (("b", RateLimits(7, 10**6)),))),
        ({"egress": "1MB/s", "ingress": None, "peer": ""}, BudgetPlan(RateLimits(10**6, 2000), PLAN.peers)),
    ],
)
def test_what_is_asked_for_changes_and_nothing_else(document: dict[str, Any], expected: BudgetPlan) -> None:
    assert changed_plan(PLAN, document, PEERS) == expected


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({}, "nothing to set"),
        ({"peer": "b"}, "nothing to set"),
        ({"egress": "25"}, "egress is '25': it has no unit"),
        ({"egress": 25}, "egress is 25: write a rate with its unit"),
        ({"egress": ["1MB/s"]}, "write a rate"),
        ({"egress": "1kbit/s"}, "the least that can be kept"),
        ({"egress": "1MB/s", "peer": "z"}, "peer 'z' is none of this region's: b, c"),
        ({"egress": "1MB/s", "peer": 5}, "peer 5"),
        ({"outgress": "1MB/s"}, "'outgress' is no part of a budget; there are egress, ingress, peer"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(document: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        changed_plan(PLAN, document, PEERS)


def test_the_file_is_read_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = '[run]\nid = "try"\n[budget]\negress = "{}"\n[regions.eu]\naddress = "10.0.0.1:7400"\n'
    path.write_text(text.format("8Mbit/s"))
    assert plan_of_file(path, "eu").limits == RateLimits(10**6, None)
    path.write_text(text.format("16Mbit/s"))
    assert plan_of_file(path, "eu").limits == RateLimits(2 * 10**6, None)
    with pytest.raises(ConfigError, match="'us'"):
        plan_of_file(path, "us")
    path.write_text(text.format("16"))
    with pytest.raises(ConfigError, match="no unit"):
        plan_of_file(path, "eu")


def test_a_plan_says_itself_in_one_line() -> None:
    assert str(BudgetPlan()) == "no limit"
    assert str(PLAN) == "egress 8,000 bit/s, ingress 16,000 bit/s, b egress 56 bit/s"
