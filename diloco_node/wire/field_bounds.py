"""One table of bounds for every field of every message: what the core says (`core.bounds`), and what the wire adds.

`rows` gives it as docs/protocol.md shows it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

from diloco_node.core.bounds import (
    CORE_BOUNDS,
    FRAGMENTS,
    INDEX,
    INDEX_MAX,
    PIECES,
    REGIONS,
    STEP_MAX,
)
from diloco_node.core.shapes import REGION_FIELDS, Bound, Items, Octets, Real, Text, Whole, bound_of

COUNT_MAX: Final = 2**63 - 1
"""Of numbers that were drawn at random, and of what a kernel counts."""

RATE_FREE_MAX: Final = 2**62
"""The share of who wants all that there is (`transport.pacing.grants`)."""

ANSWER_BYTES: Final = 4096
"""Of a string on the learner link."""

SETTINGS: Final = 64
"""Settings in a hello; there are some 25."""

SETTING_BYTES: Final = 128
"""Of one, "name=value"."""

MEASUREMENT: Final = Whole(0, COUNT_MAX)
COUNTED: Final = Whole(0, COUNT_MAX)
KERNEL_COUNTED: Final = Whole(-1, COUNT_MAX)
"""-1 where the kernel does not tell."""

NUMBER: Final = Real()

BOUNDS: Final[dict[str, Bound]] = {
    **CORE_BOUNDS,
    # The link
    "protocol_version": Whole(0, 127),
    "epoch": INDEX,
    "instance_id": Octets((16,)),
    "dial": INDEX,
    "connection": Whole(0, 7),
    "settings": Items(SETTINGS, Text(SETTING_BYTES)),
    "IngressGranted.bytes_per_s": Whole(0, RATE_FREE_MAX),
    "IngressDemand.bytes_per_s": Whole(0, RATE_FREE_MAX),
    # Measuring
    "measurement": MEASUREMENT,
    "sent_bytes": KERNEL_COUNTED,
    "retransmitted_bytes": KERNEL_COUNTED,
    "wire_bytes": KERNEL_COUNTED,
    "bytes_max": COUNTED,
    "mean": COUNTED,
    "median": COUNTED,
    "p10": COUNTED,
    "p90": COUNTED,
    "answered": COUNTED,
    "unanswered": COUNTED,
    "LinkMeasured.bytes_per_s": COUNTED,
    # The learner link
    "protocol": Whole(0, 65_535),
    "pid": Whole(0, 2**32),
    "tensors": Items(PIECES),
    "name": Text(ANSWER_BYTES),
    "shape": Items(8, Whole(0, 2**40)),
    "snapshots": Items(FRAGMENTS, Whole(-1, INDEX_MAX)),
    "included_snapshot": Whole(-1, INDEX_MAX),
    "loss": NUMBER,
    "val_loss": NUMBER,
    "val_loss_global": NUMBER,
    "carry_factor": Real(0.0, 1.0),
    "carried_steps": Whole(0, STEP_MAX),
    "global_step": Whole(0, STEP_MAX),
    "run_part": Real(0.0, 1.0),
    "region_index": Whole(0, REGIONS - 1),
    "fragments": Whole(1, FRAGMENTS),
    "sync_every": Whole(1, STEP_MAX),
    "carry_steps_limit": Whole(0, STEP_MAX),
    "state_dir": Text(ANSWER_BYTES),
    "Failed.reason": Text(ANSWER_BYTES),
    "Warned.text": Text(ANSWER_BYTES),
    "Refuse.reason": Text(ANSWER_BYTES),
    "Stop.reason": Text(ANSWER_BYTES),
}


def rows(classes: Iterable[type]) -> list[tuple[str, str, str]]:
    """(class, field, what is checked) of these dataclasses and those inside them, each once, as they are met.

    Raises:
        TypeError: a field has no bound.
    """
    fields: dict[type, list[tuple[str, str, str]]] = {}
    waiting = list(classes)
    while waiting:
        cls = waiting.pop(0)
        if cls in fields:
            continue
        hints = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        fields[cls] = [(cls.__name__, name, shape_of(cls, name, hints[name])) for name in names]
        leaves = (leaf for name in names for leaf in _leaves(hints[name]))
        waiting += [leaf for leaf in leaves if isinstance(leaf, type) and dataclasses.is_dataclass(leaf)]
    return [row for of_class in fields.values() for row in of_class]


def shape_of(cls: type, name: str, hint: Any) -> str:
    """What is checked of a field, in words. Raises TypeError: it has no bound."""
    bound = bound_of(BOUNDS, cls.__name__, name)
    (leaf, *more) = _leaves(hint)
    is_region = leaf is str and name in REGION_FIELDS
    if more or dataclasses.is_dataclass(leaf):
        content = (
            "one of " + ", ".join(f"`{member.__name__}`" for member in (leaf, *more)) if more else f"`{leaf.__name__}`"
        )
    elif leaf is bool:
        content = "true or false"
    elif issubclass(leaf, Enum):
        content = "one of " + ", ".join(str(member.value) for member in leaf)
    elif is_region:
        content = "a region's name"
    elif bound is None:
        raise TypeError(f"{cls.__name__}.{name} has no bound")
    else:
        content = str(bound)
    if isinstance(bound, Items) and bound.of is None:
        content = f"{bound}, each {content}"
    return content + (", or nothing" if types.NoneType in typing.get_args(hint) else "")


def _leaves(hint: Any) -> list[Any]:
    """The types at the ends of a hint: `tuple[tuple[float, ...], ...]` is float, `X | None` is X."""
    inner = [argument for argument in typing.get_args(hint) if argument not in (Ellipsis, types.NoneType)]
    return [leaf for argument in inner for leaf in _leaves(argument)] if inner else [hint]
