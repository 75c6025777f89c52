"""config/budget_settings.py: `[budget]` of run.toml, and the plan that a region makes of it."""

from pathlib import Path

import pytest

from diloco_node.config.budget_plan import BudgetPlan, TimeWindow
from diloco_node.config.budget_settings import parse_ceiling_or_none
from diloco_node.config.resolve import load_config
from diloco_node.config.sources import Flag
from diloco_node.core.types import RateLimits
from diloco_node.errors import ConfigError

HEAD = '[run]\nid = "try"\n'
REGIONS = '[regions.eu]\naddress = "10.0.0.1:7400"\n[regions.us-east]\naddress = "10.0.0.2:7400"\n'
FULL = """
[budget]
egress = "2Gbit/s"
ingress = "25MB/s"
[budget.per_peer.us-east]
egress = "500Mbit/s"
[[budget.schedule]]
start = "22:30"
end = "06:00"
egress = "5Gbit/s"
"""


def plan(tmp_path: Path, text: str, region: str = "eu", regions: str = REGIONS) -> BudgetPlan:
    path = tmp_path / "run.toml"
    path.write_text(HEAD + text + regions)
    return load_config(path).budget_plan(region)


def test_no_budget_is_no_limit(tmp_path: Path) -> None:
    assert plan(tmp_path, "") == BudgetPlan()


def test_all_of_it(tmp_path: Path) -> None:
    night = TimeWindow(22 * 60 + 30, 6 * 60, RateLimits(625_000_000, None))
    limits = RateLimits(250_000_000, 25_000_000)
    assert plan(tmp_path, FULL) == BudgetPlan(limits, (("us-east", RateLimits(62_500_000, None)),), (night,))
    assert plan(tmp_path, FULL, "us-east") == BudgetPlan(limits, (), (night,)), "a region is no peer of its own"


def test_a_regions_own_ceiling_beats_that_of_all(tmp_path: Path) -> None:
    regions = REGIONS + 'egress = "1Gbit/s"\n'
    assert plan(tmp_path, FULL, "us-east", regions).limits == RateLimits(125_000_000, 25_000_000)
    assert plan(tmp_path, FULL, "eu", regions).limits == RateLimits(250_000_000, 25_000_000)


def test_flags_and_environment_work_and_the_digest_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(HEAD + FULL + REGIONS)
    before = load_config(path).settings_digest()
    monkeypatch.setenv("DILOCO_BUDGET__INGRESS", "1Gbit/s")
    config = load_config(path, [Flag("budget.egress", "3Gbit/s", "--set")])
    assert config.budget_plan("eu").limits == RateLimits(375_000_000, 125_000_000)
    assert config.settings_digest() == before


def test_what_is_set_is_shown_with_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(HEAD + FULL + REGIONS)
    rows = {key: (value, origin) for key, value, origin in load_config(path).rows() if key.startswith("budget")}
    assert rows["budget.egress"] == ('"2Gbit/s"', f"{path}:5")
    assert rows["budget.ingress"] == ('"200Mbit/s"', f"{path}:6")
    assert rows["budget.per_peer.us-east.egress"] == ('"500Mbit/s"', f"{path}:8")
    assert rows["budget.per_peer.us-east.ingress"][0] == "none"
    assert rows["budget.schedule"][0] == '"22:30-06:00 egress 5Gbit/s ingress as ever"'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[budget]\negress = 25\n", r'budget\.egress is 25 \(.*:4\): it has no unit; write "25Mbit/s" or "25MB/s"'),
        ('[budget]\negress = "25"\n', "it has no unit"),
        ('[budget]\ningress = "50kbit/s"\n', "less than 100kbit/s, the least that can be kept"),
        ('[budget]\negres = "5Gbit/s"\n', r"budget\.egres .* is not a setting, did you mean egress\?"),
        ('[budget.per_peer.us-eats]\negress = "5Gbit/s"\n', r"us-eats is not in \[regions\], did you mean us-east\?"),
        ("[budget.per_peer.us-east]\negress = 5\n", r"budget\.per_peer\.us-east\.egress is 5 .* no unit"),
        ('[budget.per_peer.us-east]\nrate = "5Gbit/s"\n', r"is not a setting; .* has egress, ingress"),
        ('[[budget.schedule]]\nstart = "24:00"\nend = "06:00"\n', 'time of day, such as "22:30"'),
        ('[[budget.schedule]]\nstart = "6:00"\nend = "07:00"\n', r"budget\.schedule\.0\.start is \"6:00\""),
        ('[[budget.schedule]]\nstart = "06:00"\nend = "06:00"\n', "holds at no time"),
        ('[[budget.schedule]]\nstart = "06:00"\n', r"budget\.schedule\.0\.end is not set: add end = \"06:00\""),
    ],
)
def test_what_is_wrong_is_said_with_what_would_work(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(tmp_path, text)


def test_commands_may_say_none() -> None:
    assert parse_ceiling_or_none("none") is None
    assert parse_ceiling_or_none("8Mbit/s") == 1_000_000
    with pytest.raises(ValueError, match="no unit"):
        parse_ceiling_or_none("8")
