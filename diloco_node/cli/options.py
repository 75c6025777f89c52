"""Options that several commands share, and how flags become settings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from diloco_node.errors import ConfigError
from diloco_node.escaping import escaped

if TYPE_CHECKING:
    from diloco_node.config.resolve import NodeConfig

T = TypeVar("T")

CONFIG_NAME: Final = "run.toml"

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", envvar="DILOCO_CONFIG", help="The run's settings [default: run.toml]."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as rounds.sync_every=16; may be repeated."),
]
OwnRegionOption = Annotated[
    str | None,
    typer.Option("--region", "-r", metavar="NAME", help="Who we are [default: the one whose key is here]."),
]


def load(
    config: Path | None,
    values: Mapping[str, tuple[str, Any]] | None = None,
    assignments: Sequence[str] | None = None,
) -> NodeConfig:
    """Resolve all settings. Raises ConfigError.

    values: dotted key -> (flag as written, value); a value of None or () was not given. assignments: "KEY=VALUE" of
    `--set`; a flag of its own beats it.
    """
    from diloco_node.config.resolve import load_config
    from diloco_node.config.sources import Flag

    flags = []
    for assignment in assignments or ():
        key, equals, value = assignment.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"--set {assignment!r}: write KEY=VALUE, for example --set rounds.sync_every=16")
        flags.append(Flag(key.strip(), value.strip(), f"--set {key.strip()}"))
    pairs = (values or {}).items()
    flags += [Flag(key, value, flag) for key, (flag, value) in pairs if value is not None and value != []]
    return load_config(config, flags)


def has_config(config: Path | None) -> bool:
    """Whether there is a run.toml: one that was named, or one here."""
    return config is not None or Path(CONFIG_NAME).exists()


def load_text(
    text: str,
    place: str,
    values: Mapping[str, tuple[str, Any]] | None = None,
    assignments: Sequence[str] | None = None,
) -> NodeConfig:
    """Resolve what a run.toml will say that is not written yet. place: before its name in messages; see `load`."""
    with tempfile.TemporaryDirectory() as trial:
        (Path(trial) / CONFIG_NAME).write_text(text)
        try:
            return load(Path(trial) / CONFIG_NAME, values, assignments)
        except ConfigError as error:
            raise ConfigError(escaped(str(error)).replace(f"{trial}/", place)) from None


def parse_option(flag: str, text: str, parse: Callable[[str], T]) -> T:
    """Parse the value of a flag by a function that raises ValueError with the reason. Raises ConfigError."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}: {error}") from None
