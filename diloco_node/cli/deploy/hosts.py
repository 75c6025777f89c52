"""hosts.toml: on which machine each region runs, and how that machine is reached."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco_node.errors import ConfigError

EXAMPLE = '[hosts.us-east]\naddress = "203.0.113.10"\nuser = "trainer"'

# What reaches the words of a command line: no option, no space, nothing that a shell reads.
_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:\[\]][A-Za-z0-9_.:\[\]@%-]*$", max_length=255)]
_RemotePath = Annotated[str, Field(pattern=r"^[A-Za-z0-9_./][A-Za-z0-9_./+-]*$", max_length=1000)]


class SshHost(BaseModel):
    """`[hosts.REGION]` of hosts.toml.

    Attributes:
        address: what ssh dials; a name, a number, or an alias of its configuration. user, port: of ssh there.
        folder: for run.toml, certificates and state; below the user's home unless it begins with a slash; none:
            `diloco/RUN`. program: `diloco-node` there, by name or path.
        command: what trains, as after `--` of `start`; none: the built-in trainer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: _Word
    user: _Word
    port: Annotated[int, Field(ge=1, le=65_535)] = 22
    folder: _RemotePath | None = None
    program: _RemotePath = "diloco-node"
    command: tuple[str, ...] = ()


class _HostsFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    hosts: Annotated[dict[str, SshHost], Field(min_length=1)]


def read_hosts(path: Path) -> dict[str, SshHost]:
    """The hosts by region, in the order of the file.

    Raises:
        ConfigError: the file is not there, or something in it is wrong; says what and where.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); write one table a region:\n{EXAMPLE}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    try:
        return _HostsFile.model_validate(document).hosts
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {place}: {first['msg']}; a table a region, such as\n{EXAMPLE}") from None
