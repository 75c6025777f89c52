"""A setting: its type, how a value of it is read or refused, and the words of docs/settings.md about it."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from diloco_node.config.units import Duration, parse_duration


def _whole(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("it must be a whole number")
    return value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


def paths_of(value: object) -> object:
    """A list, or (from the environment and flags) paths with `:` between them, of which that in `hf:NAME` is none."""
    if isinstance(value, str) and re.match(r"\[\s*[\"']", value):
        raise ValueError("that is a list, as run.toml has it: write PATH here, or PATH:PATH")
    return tuple(path for path in re.split(r"(?<!\bhf):", value) if path) if isinstance(value, str) else value


def modules_of(value: object) -> object:
    """A list, or (from the environment and flags) names with `,` between them."""
    names = tuple(word.strip() for word in value.split(",") if word.strip()) if isinstance(value, str) else value
    for name in names if isinstance(names, list | tuple) else ():
        if not isinstance(name, str) or not all(word.isidentifier() for word in name.split(".")):
            raise ValueError(f"{name!r} is not the name of a module, as one writes it after `import`")
    return names


def host_port_of(value: object) -> object:
    """Take "HOST:PORT". Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError('it must be "HOST:PORT", such as "10.0.0.1:7400"')
    host, _, port = value.rpartition(":")
    # It ends up in the arguments of ssh and in lines to copy: no option, and nothing that a shell reads.
    if not re.fullmatch(r"\w[\w.-]*|\[[0-9A-Fa-f:.]+(%\w[\w.-]*)?\]", host):
        raise ValueError('it must be "HOST:PORT", such as "10.0.0.1:7400" or "[fd00::1]:7400"')
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise ValueError(f"port {port!r} is not from 1 to 65535")
    return value


def _admin_host(value: object) -> object:
    try:
        address = ipaddress.ip_address(value) if isinstance(value, str) else None
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_multicast:
        # 0.0.0.0 would also open it to the network between regions.
        raise ValueError("it must be one address of this machine, as a number, and not all of them")
    return value


class Section(BaseModel):
    """A table of run.toml: unknown keys are refused, values don't change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Span = Annotated[Duration, NoDecode, PlainValidator(parse_duration)]
AdminHost = Annotated[str, BeforeValidator(_admin_host)]
HostPort = Annotated[str, BeforeValidator(host_port_of)]

Changes = Literal["fixed", "same", "all", "set", "region", "running", "new run"]
"""When a setting may change in a run; docs/settings.md explains the words."""


def setting(default: Any, description: str, touch_when: str, *, changes: Changes = "region", **bounds: Any) -> Any:
    """Describe a field of a section. default: `...`: the setting must be given. description: with the unit, where it
    has one. touch_when: completes "touch it when ...". bounds: such as `ge=1`, and `examples`, as for pydantic's
    `Field`."""
    extra = {"touch_when": touch_when, "changes": changes}
    return Field(default, description=description, json_schema_extra=cast(Any, extra), **bounds)


def touch_when(field: FieldInfo) -> str:
    """Occasion to touch the setting."""
    return str(cast(dict[str, str], field.json_schema_extra)["touch_when"])


def changes(field: FieldInfo) -> Changes:
    """When the setting may change in a run."""
    return cast(Changes, cast(dict[str, str], field.json_schema_extra)["changes"])
