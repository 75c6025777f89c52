"""Words about every setting, from the schema: for `config show SETTING`, and for docs/settings.md."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from diloco_node.config.budget_settings import RATE_BYTES_PER_S_MIN, LimitsSection, WindowSection, parse_minute
from diloco_node.config.field_types import touch_when
from diloco_node.config.schema import NAME_PATTERN, RegionSection, Tree
from diloco_node.config.setting_texts import toml_text
from diloco_node.config.units import Duration, Rate

_NAMES: Final = ("run", "rounds", "model", "data", "learner", "log", "history", "budget")

SECTIONS: Final[dict[str, Any]] = {
    **{name: Tree.model_fields[name].annotation for name in _NAMES},
    "budget.per_peer.NAME": LimitsSection,
    "budget.schedule": WindowSection,
    "regions.NAME": RegionSection,
}

_KINDS: Final[dict[Any, str]] = {
    Duration: "a time",
    Rate: f"a rate, at least {Rate(RATE_BYTES_PER_S_MIN)}",
    Path: "a path",
    dict: "a table",
}


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Key and field of every setting: "rounds.sync_every", "regions.NAME.address"."""
    for prefix, section in SECTIONS.items():
        for name, field in section.model_fields.items():
            if f"{prefix}.{name}" not in {"budget.per_peer", "budget.schedule"}:  # tables of their own
                yield f"{prefix}.{name}", field


def setting_of(key: str) -> FieldInfo | None:
    """The field of one setting, such as "rounds.sync_every" or "regions.eu.address"; None: there is none."""
    prefix, _, name = key.rpartition(".")
    prefix = re.sub(r"^(regions|budget\.per_peer)\..*", r"\1.NAME", prefix)
    return dict(settings()).get(f"{prefix}.{name}")


def explanation(key: str) -> str:
    """Words about one setting."""
    field = setting_of(key)
    if field is None:
        return "docs/settings.md has a table of its parts."
    bounds, default = allowed(field).replace("`", ""), default_text(field).strip("`")
    words = f"Allowed: {bounds}. Default: {default}. Touch it when: {touch_when(field)}."
    return f"{field.description}. {words}"


def default_text(field: FieldInfo) -> str:
    """The default as it would be written, in backquotes."""
    if field.default is PydanticUndefined:
        return "must be set"
    return "none" if field.default is None else f"`{toml_text(field.default)}`"


def allowed(field: FieldInfo) -> str:
    """Type and bounds in words."""
    kind, more = _plain(field.annotation)
    marks = (*more, *field.metadata)
    bounds = {type(mark).__name__: mark for mark in marks}
    choices = ("true", "false") if kind is bool else typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = tuple(str(member.value) for member in kind)
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
