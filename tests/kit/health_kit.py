"""Status documents of a sound region, and what differs in one with a fault."""

from copy import deepcopy
from typing import Any

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
