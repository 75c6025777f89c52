"""docs/settings.md: every setting with unit, default and bounds from the schema, and when to touch it.

After a change: `python -m diloco_node.config.reference > docs/settings.md`.
"""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from diloco_node.config.budget_settings import (
    RATE_BYTES_PER_S_MIN,
    BudgetSection,
    LimitsSection,
    WindowSection,
    parse_minute,
)
from diloco_node.config.resolve import toml_text
from diloco_node.config.schema import (
    NAME_PATTERN,
    DataSection,
    HistorySection,
    LearnerSection,
    LogSection,
    ModelSection,
    RegionSection,
    RoundsSection,
    RunSection,
)
from diloco_node.config.setting import changes, touch_when
from diloco_node.config.units import Duration, Rate

COMMAND: Final = "python -m diloco_node.config.reference > docs/settings.md"

_SECTIONS: Final[tuple[tuple[str, type[BaseModel], str], ...]] = (
    ("run", RunSection, "What the run is called, when it ends, and where things lie."),
    ("rounds", RoundsSection, "How regions merge. The same in all regions: those that differ refuse each other."),
    (
        "model",
        ModelSection,
        "The built-in trainer, or its recipe for a model of Hugging Face. Not for a command of your own.",
    ),
    ("data", DataSection, "Text for the built-in trainer and for the recipe of `[model] hf`."),
    ("learner", LearnerSection, "The process that trains, whichever it is."),
    ("log", LogSection, "The daemon's log in `logs/`."),
    ("history", HistorySection, "How the run went, in `history.jsonl` of each region's folder."),
    ("budget", BudgetSection, "What each region may send and receive, in bytes on the wire."),
    ("budget.per_peer.NAME", LimitsSection, "What goes to one region and comes from it."),
    (
        "budget.schedule",
        WindowSection,
        "Other ceilings between two times of day; `[[budget.schedule]]`, once for each.",
    ),
    ("regions.NAME", RegionSection, "One region, one table each."),
)

_HEAD: Final = f"""# Settings

Every setting of `run.toml`, made from the schema by `{COMMAND}`.
`config show --origin` shows what is in force and where it comes from. The few that matter most are on the page
[Run on real machines](run.md#2-write-runtoml).

Lengths of time are written with a unit, as `"200ms"`, `"5min"`. So are rates, as `"2Gbit/s"` or `"25MB/s"`.

## May it change in a run?

| in the tables | what it means |
|---|---|
| fixed | not in a run: `start` refuses it and names both values, of a model the daemon does |
| same | not in a run: it must be the same in all regions, and **nobody compares it** |
| all | yes: stop all regions, change it in each, start them. Regions that differ refuse each other and name it |
| region | yes: in one region, when that is started again |
| running | yes: SIGHUP to `start`, or `diloco-node budget set` |
| new run | it has no effect once a run has begun |

A change takes effect with the rounds that are opened from then on. `start` says what it was and what it is, and the
log that the settings were changed since the run began.
"""

_KINDS: Final[dict[Any, str]] = {
    Duration: "a time",
    Rate: f"a rate, at least {Rate(RATE_BYTES_PER_S_MIN)}",
    Path: "a path",
    dict: "a table",
}


def settings_page() -> str:
    """The page, as it is in docs/."""
    lines = [_HEAD]
    for prefix, section, about in _SECTIONS:
        lines.append(f"## [{prefix}]\n\n{about}\n")
        lines.append(
            "| setting | default | allowed | changes | what it is | touch it when |\n|---|---|---|---|---|---|"
        )
        lines += _rows(section)
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Key and field of every setting: "rounds.sync_every", "regions.NAME.address"."""
    for prefix, section, _ in _SECTIONS:
        for name, field in section.model_fields.items():
            if not _is_table(section, name):
                yield f"{prefix}.{name}", field


def explanation(key: str) -> str:
    """Words about one setting, such as "rounds.sync_every" or "regions.eu.address"."""
    prefix, _, name = key.rpartition(".")
    prefix = re.sub(r"^(regions|budget\.per_peer)\..*", r"\1.NAME", prefix)
    field = dict(settings()).get(f"{prefix}.{name}")
    if field is None:
        return "docs/settings.md has a table of its parts."
    bounds, default = _allowed(field).replace("`", ""), _default(field).strip("`")
    words = f"Allowed: {bounds}. Default: {default}. Touch it when: {touch_when(field)}."
    return f"{field.description}. {words}"


def _is_table(section: type[BaseModel], name: str) -> bool:
    return section is BudgetSection and name in {"per_peer", "schedule"}


def _rows(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        if not _is_table(section, name):
            words = (changes(field), field.description or "", touch_when(field))
            cells = (f"`{name}`", _default(field), _allowed(field), *words)
            yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "must be set"
    return "none" if field.default is None else f"`{toml_text(field.default)}`"


def _allowed(field: FieldInfo) -> str:
    """Type and bounds in words."""
    kind, more = _plain(field.annotation)
    marks = (*more, *field.metadata)
    bounds = {type(mark).__name__: mark for mark in marks}
    choices = _choices(kind)
    if choices:
        return ", ".join(f"`{mark}`" for mark in choices)
    if any(getattr(mark, "pattern", None) == NAME_PATTERN for mark in marks):
        return "1 to 63 of a-z, 0-9, `-`"
    if any(getattr(mark, "func", None) is parse_minute for mark in marks):
        return "a time of day"
    if kind in (int, float):
        return _range(bounds, "a whole number" if kind is int else "a number")
    if typing.get_origin(kind) is tuple:
        most = bounds.get("MaxLen")
        return f"a list, at most {most.max_length:,}" if most is not None else "a list"
    return _KINDS.get(typing.get_origin(kind) or kind, "text")


def _choices(kind: Any) -> tuple[str, ...]:
    if kind is bool:
        return ("true", "false")
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(str(member.value) for member in kind)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def _plain(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type without `None` and `Annotated`, and what was annotated."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, *more = typing.get_args(hint)
        kind, deeper = _plain(inner)
        return kind, (*more, *deeper)
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if type(None) in typing.get_args(hint) and len(options) == 1:
        return _plain(options[0])
    return hint, ()


def _range(bounds: dict[str, Any], kind: str) -> str:
    forms = {"Ge": "{}", "Gt": "above {}", "Le": "to {}", "Lt": "and below {}"}
    words = [
        form.format(_number(getattr(bounds[name], name.lower()))) for name, form in forms.items() if name in bounds
    ]
    return " ".join(words) or kind


def _number(value: float) -> str:
    is_power = isinstance(value, int) and value > 1 << 16 and value.bit_count() == 1
    return f"2^{int(value).bit_length() - 1}" if is_power else f"{value:,}"


if __name__ == "__main__":
    sys.stdout.write(settings_page())
