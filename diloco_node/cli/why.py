"""`diloco-node why`: why it is slow, why nobody merges, why a region is behind."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from diloco_node.cli.findings import finding_lines
from diloco_node.cli.options import ConfigOption
from diloco_node.cli.status import ask_all, targets_of
from diloco_node.cli.tables import output_width, wrapped
from diloco_node.errors import ConfigError, PeersUnreachable
from diloco_node.health.explanation import Explanation, explain, region_names


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
    explanation = explain(answered, region)
    if as_json:
        typer.echo(json.dumps(explanation.document()))
        return
    for line in why_lines(explanation, output_width()):
        typer.echo(line)


def why_lines(explanation: Explanation, width: int | None) -> list[str]:
    """Show the health, then each cause."""
    lines = wrapped(explanation.line, width)
    for finding in explanation.findings:
        lines += finding_lines(finding, width)
    if not explanation.findings:
        lines.append("nothing is slow, as far as these regions know")
    return lines
