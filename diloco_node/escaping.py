"""Text from outside, as it may be shown: in a log, a status document, a table on a terminal, a metric's label.

A peer chooses the words of its reasons and errors. A terminal obeys escape sequences, a log is read line by line, and
bidirectional marks show a text in another order than it has. So wherever text leaves for people's eyes it goes through
here. Stored and hashed texts stay as they came.
"""

from __future__ import annotations

from typing import Any, Final

_NUMBERS: Final = frozenset({int, float, bool, type(None)})
"""Most of a status document, which is made several times a second."""


def escaped(text: str) -> str:
    """The text with everything that is not printable written out, as in `\\x1b` or `\\u202e`. Doing it twice changes
    nothing: backslashes stay."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def escaped_document(value: Any) -> Any:
    """A JSON-like value with all of its texts, keys too, escaped. Values that are no text stay the same objects."""
    if isinstance(value, str):
        return escaped(value)
    # A call for each number or text would take most of the time.
    if isinstance(value, dict):
        return {
            escaped_document(key): item
            if (kind := type(item)) in _NUMBERS or (kind is str and item.isprintable())
            else escaped_document(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            item if (kind := type(item)) in _NUMBERS or (kind is str and item.isprintable()) else escaped_document(item)
            for item in value
        ]
    return value
