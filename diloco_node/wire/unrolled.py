"""Encoder and decoder of one dataclass as source without a loop, like that of `dataclasses`: twice as fast.

Only what is right goes this way. What is wrong in any field is looked at once more by the loop, which names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Convert = Callable[[Any], Any]
Field = tuple[str, Convert]


def unrolled(
    cls: type,
    encoders: Sequence[Field],
    decoders: Sequence[Field],
    *,
    skip: int,
    slow: tuple[Convert, Convert],
    error: type[Exception],
    written_out: Mapping[Convert, str],
) -> tuple[Convert, Convert]:
    """The same two conversions as `slow`.

    Args:
        cls: the dataclass. encoders, decoders: of its fields, by name, in their order.
        skip: places at the front of the array that are left for a tag.
        slow: encoder and decoder with a loop, for what is not right.
        error: what a conversion raises.
        written_out: of conversions that leave a right value as it is: their condition, `{v}` is the value.
    """
    names = [f"v{at}" for at in range(len(encoders))]
    space: dict[str, Any] = {"cls": cls, "refused": error, "slow_encode": slow[0], "slow_decode": slow[1]}
    conditions, values = _converted(encoders, names, "to", space, written_out)
    lines = ["def encode(value):", " if type(value) is cls:"]
    lines += [f"  {name} = value.{field}" for name, (field, _) in zip(names, encoders, strict=True)]
    lines += [f"  if {conditions}:", "   try:", f"    return [{', '.join(['None'] * skip + values)}]"]
    lines += ["   except refused:", "    pass", " return slow_encode(value)"]
    conditions, values = _converted(decoders, names, "from", space, written_out)
    places = ["_"] * skip + names
    lines += ["def decode(fields):", f" if type(fields) is list and len(fields) == {len(places)}:"]
    lines += [f"  [{', '.join(places)}] = fields"]
    lines += [f"  if {conditions}:", "   try:", f"    return cls({', '.join(values)})"]
    lines += ["   except refused:", "    pass", " return slow_decode(fields)"]
    exec("\n".join(lines), space)
    return space["encode"], space["decode"]


def _converted(
    fields: Sequence[Field], names: Sequence[str], way: str, space: dict[str, Any], written_out: Mapping[Convert, str]
) -> tuple[str, list[str]]:
    """The condition under which the fields are right, and the converted values, as source."""
    conditions, values = [], []
    for name, (_, convert) in zip(names, fields, strict=True):
        condition = written_out.get(convert)
        if condition is None:
            space[f"{way}_{name}"] = convert
            values.append(f"{way}_{name}({name})")
        else:
            conditions.append(condition.format(v=name))
            values.append(name)
    return " and ".join(conditions) or "True", values
