"""`diloco-node why`: why it is slow, why nobody merges, why a region is behind."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Annotated, Any

import typer

from diloco_node.cli.options import ConfigOption
from diloco_node.cli.status import ask_all, targets_of
from diloco_node.cli.tables import wrapped
from diloco_node.errors import ConfigError, PeersUnreachable
from diloco_node.health.explanation import explain, region_names
from diloco_node.health.reading import duration


def why(
    *,
    region: Annotated[str, typer.Argument(metavar="[REGION]", help="Only what is about this region.")] = "",
    places: Annotated[
        list[str] | None, typer.Option("--at", metavar="PLACE", help="Ask here, as `status` does; may be repeated.")
    ] = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say where the time of the last rounds went, what waits for what, and what would help."""
    documents = ask_all(targets_of(places or (), config))
    answered = [one for one in documents if "error" not in one]
    if not answered:
        raise PeersUnreachable(f"none of {len(documents)} regions answers ({documents[0]['error']}); is it running?")
    names = region_names(answered)
    if region and region not in names:
        raise ConfigError(f"no region {region!r} in this run: there are {', '.join(names)}")
    answer = explain(answered, region)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = shutil.get_terminal_size().columns if is_sized else None
    for line in why_lines(answer):
        for shown in wrapped(line, width):
            typer.echo(shown)


def why_lines(answer: dict[str, Any]) -> list[str]:
    """The answer of `health.why.explain` in words, a line for each cause."""
    lines = [str(answer["line"])]
    for one in answer["findings"]:
        saves = one["saves_seconds"]
        saved = f" Saves {duration(saves)} of a round." if saves else ""
        change = f" -> {one['change'].rstrip('.')}." if one["change"] else ""
        basis = f" ({one['basis']})" if one["basis"] else ""
        lines.append(f"{one['topic']}: {one['text']}{basis}.{change}{saved}")
    if not answer["findings"]:
        lines.append("nothing is slow, as far as these regions know")
    return lines
