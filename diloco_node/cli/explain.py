"""`diloco-node help CODE`: the meaning of the code of an error or an alert, and what to do."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from diloco_node import errors
from diloco_node.errors import ConfigError, DilocoError
from diloco_node.health.alert_kinds import ALERT_KINDS

PAGE: Final = "docs/errors.md"


@dataclass(frozen=True, slots=True)
class CodeHelp:
    """A code for people. meaning: one or two sentences. exit_code: None: it ends no command. link: the page that says
    more."""

    code: str
    meaning: str
    exit_code: int | None
    remedy: str
    link: str


def explanations() -> dict[str, CodeHelp]:
    """Collect the explanations of errors and alerts, by code."""
    entries = [CodeHelp(kind.code, kind.meaning, None, kind.hint, "docs/alerts.md") for kind in ALERT_KINDS]
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, DilocoError):
            meaning = inspect.getdoc(kind) or kind.__name__
            entries.append(CodeHelp(kind.code, meaning, kind.exit_code, kind.remedy, f"{PAGE}#{kind.code.lower()}"))
    return {entry.code: entry for entry in sorted(entries, key=lambda entry: entry.code)}


def explain(
    *,
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="As it stands behind an error; default: list them all.")
    ] = None,
) -> None:
    """Explain a code such as E-PEER-CERT."""
    entries = explanations()
    if code is None:
        for entry in entries.values():
            typer.echo(f"{entry.code:<{max(map(len, entries))}}  {entry.meaning}")
        return
    key = code.upper()
    if key not in entries:
        close = difflib.get_close_matches(key, entries, n=1)
        hint = f"did you mean {close[0]}?" if close else "diloco-node help lists them all"
        raise ConfigError(f"there is no code {code!r}: {hint}")
    typer.echo("\n".join(lines_of(entries[key])))


def lines_of(entry: CodeHelp) -> Iterator[str]:
    """Lay out the explanation of a code."""
    yield entry.code
    yield f"  what    {entry.meaning}"
    yield f"  do      {entry.remedy}"
    if entry.exit_code is not None:
        yield f"  exit    code {entry.exit_code}"
    yield f"  more    {entry.link}"
