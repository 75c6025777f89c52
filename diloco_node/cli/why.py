"""`diloco-node why`: explain slow rounds, missing merges and regions that are behind."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from diloco_node.cli.options import ConfigOption
from diloco_node.cli.places import CONVENTION, RegionsArgument, find_targets, targets_in
from diloco_node.errors import ConfigError


def why(
    *,
    places: RegionsArgument = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say what is slow, what waits for what, and what would help.

    Folders and ports are asked about all regions. With the name of a region, findings about others are left out.
    """
    from diloco_node.cli.admin_client import ask_all, check_answers
    from diloco_node.cli.tables import finding_lines, output_width, wrap_text
    from diloco_node.health.explanation import explain, region_names

    folders = [place for place in places or () if targets_in(place)]
    names = [place for place in places or () if place not in folders]
    documents = ask_all(find_targets(folders, config))
    check_answers(documents)
    answers = [document for document in documents if "error" not in document]
    regions = region_names(answers)
    for name in names:
        if name not in regions:
            raise ConfigError(f"{name!r} is no region of this run, which has {', '.join(regions)}: {CONVENTION}")
    explanation = explain(answers, names)
    if as_json:
        typer.echo(json.dumps(explanation.document()))
        return
    width = output_width()
    lines = wrap_text(explanation.line, width)
    for finding in explanation.findings:
        lines += finding_lines(finding, width)
    if not explanation.findings:
        lines.append("nothing is slow, as far as these regions know")
    typer.echo("\n".join(lines))
