"""`diloco-node doctor`: the command line of the examination."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from diloco_node.cli.options import ConfigOption, SetOption
from diloco_node.errors import ConfigError
from diloco_node.state_names import ADMIN_PORT_NAME

if TYPE_CHECKING:
    from diloco_node.cli.doctor.examine import Patient
    from diloco_node.cli.doctor.finding import CheckResult

FAILED_CODE: Final = 1


def doctor(
    *,
    region: Annotated[
        str | None,
        typer.Option("--region", "-r", metavar="NAME", help="Who we are [default: the one whose key is here]."),
    ] = None,
    config: ConfigOption = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="Your training command, as `start` gets it; it is not run."),
    ] = None,
    assignments: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Find what keeps a region from running well, before and during a run. Exit code 1 if a check failed."""
    from diloco_node.cli.doctor.finding import finding_document, finding_lines, has_failed

    findings = list(examination(config, region, assignments or [], command=command or ()))
    if as_json:
        typer.echo(json.dumps(finding_document(findings), indent=1))
    else:
        for line in finding_lines(findings, encoding=sys.stdout.encoding or "ascii"):
            typer.echo(line)
    raise typer.Exit(FAILED_CODE if has_failed(findings) else 0)


def examination(
    config: Path | None, region: str | None, assignments: list[str], *, command: Sequence[str]
) -> Iterator[CheckResult]:
    """All findings, category by category. What needs run.toml or a certificate is left out when that is wrong."""
    import datetime as dt

    from diloco_node.cli.doctor import examine, membership

    try:
        patient = _patient(config, region, assignments)
    except ConfigError as error:
        path, hint = str(config or "run.toml"), "do what it says, or write a new one: diloco-node init"
        yield membership.settings_read(path, str(error), hint)
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


def _patient(config: Path | None, region: str | None, assignments: list[str]) -> Patient:
    """Raises ConfigError."""
    from diloco_node.cli.doctor.examine import Patient
    from diloco_node.cli.doctor.machine_facts import is_there
    from diloco_node.cli.measure.own_links import own_folder
    from diloco_node.cli.options import load
    from diloco_node.cli.status import ask, find_targets

    resolved = load(config, {}, assignments)
    try:
        name = region if region is not None else own_folder(resolved.run.certs_dir, None).name
    except OSError as error:
        raise ConfigError(
            f"{resolved.run.certs_dir} can't be read ({error.strerror}): say who we are with --region NAME"
        ) from None
    if name not in resolved.regions and region is None:
        raise ConfigError(
            f"{resolved.run.certs_dir} has no key of a region: say who we are with --region NAME, one of "
            f"{', '.join(resolved.regions)}"
        )
    resolved.check_region(name)
    folder = resolved.state_dir(name)
    status = ask(find_targets(str(folder))[0]) if is_there(folder / ADMIN_PORT_NAME) else {"error": "never started"}
    is_own = "error" not in status and status.get("region") == name
    return Patient(resolved, name, status if is_own else None)
