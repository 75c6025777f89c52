"""A setting in one place: its default, its bounds, and the words of docs/settings.md about it."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field
from pydantic.fields import FieldInfo

Changes = Literal["fixed", "same", "all", "set", "region", "running", "new run"]
"""When a setting may change in a run; docs/settings.md explains the words."""


def setting(default: Any, description: str, touch_when: str, *, changes: Changes = "region", **bounds: Any) -> Any:
    """Describe a field of a section.

    Args:
        default: `...`: the setting must be given.
        description: with the unit, where it has one. touch_when: completes "touch it when ...".
        bounds: such as `ge=1`, and `examples`, as for pydantic's `Field`.
    """
    extra = {"touch_when": touch_when, "changes": changes}
    return Field(default, description=description, json_schema_extra=cast(Any, extra), **bounds)


def touch_when(field: FieldInfo) -> str:
    """Occasion to touch the setting."""
    return str(cast(dict[str, str], field.json_schema_extra)["touch_when"])


def changes(field: FieldInfo) -> Changes:
    """When the setting may change in a run."""
    return cast(Changes, cast(dict[str, str], field.json_schema_extra)["changes"])
