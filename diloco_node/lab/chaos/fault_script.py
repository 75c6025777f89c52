"""A script: a fault plan as a file, one JSON object a line, so that a storm can be had again or be written by hand.

{"at_seconds": 12.5, "do": "kill", "target": "us-east.learner"}
{"at_seconds": 20.0, "do": "pause", "target": "eu-west", "seconds": 3.0}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from diloco_node.errors import ConfigError
from diloco_node.lab.chaos.fault_plan import (
    AT_S_MAX,
    FAULTS_MAX,
    LASTING,
    LASTS_S_DEFAULT,
    FaultPlan,
    PlannedFault,
    check_fault,
    parse_target,
)
from diloco_node.numeric import NS_PER_S

SCRIPT_BYTES_MAX: Final = 256 * FAULTS_MAX
KEYS: Final = frozenset({"at_seconds", "do", "target", "seconds"})


def script_text(plan: FaultPlan) -> str:
    """The plan as lines of JSON."""
    return "".join(json.dumps(_document(fault)) + "\n" for fault in plan.faults)


def read_script(file: Path, regions: Sequence[str]) -> FaultPlan:
    """Read a script; its lines may stand in any order.

    Raises ConfigError: it can't be read, a line is wrong, or a target is not there.
    """
    try:
        if file.stat().st_size > SCRIPT_BYTES_MAX:
            raise ConfigError(f"{file} is longer than {SCRIPT_BYTES_MAX:,} bytes: no script")
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the script {file} can't be read ({error})") from None
    faults = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            try:
                faults.append(_fault(line, regions))
            except (ConfigError, ValueError) as error:
                raise ConfigError(f"{file}, line {number}: {error}") from None
    if len(faults) > FAULTS_MAX:
        raise ConfigError(f"{file} has {len(faults)} faults: at most {FAULTS_MAX}")
    return FaultPlan(tuple(sorted(faults, key=lambda fault: (fault.at_ns, fault.target, fault.kind))))


def _fault(line: str, regions: Sequence[str]) -> PlannedFault:
    try:
        document = json.loads(line)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(document, dict) or not {"at_seconds", "do", "target"} <= document.keys() <= KEYS:
        raise ValueError(f"a line is one object with {', '.join(sorted(KEYS))}; seconds may be left away")
    kind, target = document["do"], document["target"]
    if not isinstance(kind, str) or not isinstance(target, str):
        raise ValueError("do and target are texts")
    lasts_s = _seconds(document.get("seconds", LASTS_S_DEFAULT if kind in LASTING else 0.0))
    fault = PlannedFault(
        round(_seconds(document["at_seconds"]) * NS_PER_S),
        kind,
        parse_target(target, regions),
        round(lasts_s * NS_PER_S),
    )
    check_fault(fault)
    return fault


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= AT_S_MAX:
        raise ValueError("times are numbers of seconds, at most 30 days")
    return float(value)


def _document(fault: PlannedFault) -> dict[str, Any]:
    lasts = {"seconds": fault.lasts_ns / NS_PER_S} if fault.lasts_ns else {}
    return {"at_seconds": fault.at_ns / NS_PER_S, "do": fault.kind, "target": str(fault.target), **lasts}
