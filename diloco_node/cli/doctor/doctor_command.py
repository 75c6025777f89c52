"""`diloco-node doctor`: the command line of the examination."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_node.cli.options import ConfigOption, OwnRegionOption, SetOption
from diloco_node.errors import ConfigError

if TYPE_CHECKING:
    from diloco_node.cli.doctor.examine import Patient
    from diloco_node.health.finding import Finding


def doctor(
    *,
    region: OwnRegionOption = None,
    config: ConfigOption = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="Your training command, as `start` gets it; it is not run."),
    ] = None,
    assignments: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Find what keeps a region from running well. Exit code 1 if a check failed."""
    from diloco_node.cli.doctor.topics import examination_document, examination_lines, has_failed

    findings = list(examination(config, region, assignments or [], command=command or ()))
    if as_json:
        typer.echo(json.dumps(examination_document(findings), indent=1))
    else:
        typer.echo("\n".join(examination_lines(findings)))
    raise typer.Exit(1 if has_failed(findings) else 0)


def examination(
    config: Path | None, region: str | None, assignments: list[str], *, command: Sequence[str]
) -> Iterator[Finding]:
    """Examine category by category. Checks that need run.toml or a certificate are left out when that is wrong."""
    import datetime as dt

    from diloco_node.cli.doctor import examine, topics

    try:
        patient = patient_of(config, region, assignments)
    except ConfigError as error:
        yield topics.RUN_TOML.failed(str(error), "do what it says, or write a new one: diloco-node init")
        yield from examine.examine_machine(None)
        return
    yield from examine.examine_settings(patient)
    yield from examine.examine_machine(patient)
    findings, identity = examine.examine_identity(patient, dt.datetime.now(dt.UTC))
    yield from findings
    yield from examine.examine_ports(patient)
    if identity is not None:
        yield from examine.examine_peers(patient, identity)
    yield from examine.examine_learner(patient, command)
    yield from examine.examine_run(patient)


def patient_of(config: Path | None, region: str | None, assignments: list[str]) -> Patient:
    """Find the region to examine. Raises ConfigError."""
    from diloco_node.cli.admin_client import ask_in
    from diloco_node.cli.doctor.examine import Patient
    from diloco_node.cli.measure.own_links import own_folder
    from diloco_node.cli.options import load

    settings = load(config, assignments=assignments)
    try:
        name = region if region is not None else own_folder(settings.run.certs_dir, None).name
    except OSError as error:
        raise ConfigError(
            f"{settings.run.certs_dir} can't be read ({error.strerror}): say who we are with --region NAME"
        ) from None
    if name not in settings.regions and region is None:
        raise ConfigError(
            f"{settings.run.certs_dir} has no key of a region: say who we are with --region NAME, one of "
            f"{', '.join(settings.regions)}"
        )
    settings.check_region(name)
    status = ask_in(settings.state_dir(name))
    is_own = "error" not in status and status.get("region") == name
    return Patient(settings, name, status if is_own else None)
