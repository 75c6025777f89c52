"""The region's bandwidth budget while it runs: as settings have it, as an operator sets it, as run.toml says now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from diloco_node.core.budget_plan import BudgetPlan
from diloco_node.core.types import Direction
from diloco_node.errors import ConfigError

_KEYS = frozenset({"egress", "ingress", "peer"})


def changed_plan(plan: BudgetPlan, document: Mapping[str, Any], peers: Collection[str]) -> BudgetPlan:
    """The plan after what an operator asked for.

    Args:
        document: "egress" and "ingress" as text ("2Gbit/s", or "none" for no limit), at least one of them; "peer": only
            that peer's. peers: names that there are.

    Raises:
        ConfigError: what is wrong with it.
    """
    from diloco_node.config.budget import parse_ceiling_or_none  # brings pydantic, which the daemon else does without

    unknown = sorted(document.keys() - _KEYS)
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no part of a budget; there are {', '.join(sorted(_KEYS))}")
    peer = document.get("peer") or ""
    if not isinstance(peer, str) or (peer and peer not in peers):
        raise ConfigError(f"peer {peer!r} is none of this region's: {', '.join(sorted(peers))}")
    given = {direction: document[direction] for direction in Direction if document.get(direction) is not None}
    if not given:
        raise ConfigError('nothing to set: give egress or ingress, such as "2Gbit/s", or "none"')
    for direction, text in given.items():
        if not isinstance(text, str):
            raise ConfigError(f'{direction} is {text!r}: write a rate with its unit, such as "2Gbit/s", or "none"')
        try:
            rate = parse_ceiling_or_none(text)
        except ValueError as error:
            raise ConfigError(f"{direction} is {text!r}: {error}") from None
        plan = plan.with_rate(direction, rate, peer=peer)
    return plan


def plan_of_file(path: Path, region: str) -> BudgetPlan:
    """The budget that run.toml and the environment have for a region now.

    Raises:
        ConfigError: the file is missing or wrong, or the region is not in it any more.
    """
    from diloco_node.config import load_config

    config = load_config(path)
    config.check_region(region)
    return config.budget_plan(region)
