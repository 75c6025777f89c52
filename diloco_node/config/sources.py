"""Read run.toml, the environment and flags into one tree of raw values, and remember where each value came from."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from pydantic_settings import EnvSettingsSource, SettingsError

from diloco_node.config.schema import Tree
from diloco_node.config.urls import is_url
from diloco_node.errors import ConfigError

ENV_PREFIX: Final = "DILOCO_"
CONFIG_BYTES_MAX: Final = 1 << 20
MODEL_KEY: Final = ("model", "hf")
INIT_KEY: Final = ("run", "init")
PATH_KEYS: Final = (("run", "state_dir"), ("run", "certs_dir"), INIT_KEY, MODEL_KEY, ("data", "paths"))
HUB: Final = "hf:"
"""Prefix of a data path that is the name of a dataset (see `integrations.hf_recipe`)."""


_HUB_NAME: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HEADER: Final = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
_KEY: Final = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_PART: Final = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting from the command line. key: dotted, as "run.steps". flag: as the user wrote it, for messages."""

    key: str
    value: Any
    flag: str


@dataclass(frozen=True, slots=True)
class Sources:
    """Raw values, merged, and where each leaf came from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)

    def add(self, tree: Mapping[str, Any], origins: Mapping[Key, str]) -> None:
        """Lay a tree over what is there; a later one wins."""
        for key, value in leaves(tree):
            put(self.values, key, value)
            self.origins[key] = nearest(origins, key)

    def origin(self, key: Key) -> str:
        """Origin of the key, else of a table above it, else of the first value below it."""
        below = next((origin for other_key, origin in self.origins.items() if other_key[: len(key)] == key), "default")
        above = nearest(self.origins, key)
        return below if above == "default" else above


def leaves(tree: Mapping[str, Any], above: Key = ()) -> list[tuple[Key, Any]]:
    """All values that are not tables, with their keys, in order; an empty table is a leaf."""
    rows: list[tuple[Key, Any]] = []
    for name, value in tree.items():
        key = (*above, name)
        if isinstance(value, Mapping) and value:
            rows += leaves(value, key)
        else:
            rows.append((key, value))
    return rows


def put(tree: dict[str, Any], key: Key, value: Any) -> None:
    """Set a leaf, making tables on the way; a value in the way is replaced by a table."""
    for name in key[:-1]:
        below = tree.get(name)
        if not isinstance(below, dict):
            below = tree[name] = {}
        tree = below
    if value == {} and isinstance(tree.get(key[-1]), dict):
        return
    tree[key[-1]] = value


def nearest(origins: Mapping[Key, str], key: Key) -> str:
    """The origin of a key, or of the closest table above it."""
    for length in range(len(key), -1, -1):
        if key[:length] in origins:
            return origins[key[:length]]
    return "default"


def read_file(path: Path) -> tuple[dict[str, Any], dict[Key, str]]:
    """run.toml as a tree, relative paths taken from its folder, and "FILE:LINE" per key. Raises ConfigError."""
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ConfigError(f"{path} has more than {CONFIG_BYTES_MAX} bytes: that is no run.toml")
        text = path.read_bytes().decode()
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: name the run's settings with --config run.toml, or let `init` write them, or "
            "`start --join`"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read ({error.strerror}): name the settings with --config run.toml"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for key in PATH_KEYS:
        table, name = tree.get(key[0]), key[1]
        if isinstance(table, dict) and isinstance(value := table.get(name), str):
            table[name] = _path_from(path.parent, value, key)
        elif isinstance(table, dict) and isinstance(value, list):
            table[name] = [_path_from(path.parent, item, key) if isinstance(item, str) else item for item in value]
    origins = {key: f"{path}:{line}" for key, line in _lines(text).items()}
    return tree, {(): str(path), **origins}


def _path_from(folder: Path, value: str, key: Key) -> str:
    if key == MODEL_KEY:
        return folder_or_name(folder, value)
    is_no_path = value.startswith(HUB) or (not value and key[0] == "data") or (key == INIT_KEY and is_url(value))
    return value if is_no_path else str(folder / value)


def folder_or_name(folder: Path, value: str) -> str:
    """Tell a model's folder from its name on the hub: a name stays as it is, a folder gets its full path.

    A name looks like one, and there is no such folder below `folder`: that of run.toml, or the current one for flags.
    """
    is_name = not value or (_HUB_NAME.fullmatch(value) and not (folder / value).exists())
    return value if is_name else str((folder / value).absolute())


def _lines(text: str) -> dict[Key, int]:
    """Line of every header and key. `tomllib` does not tell, and only messages depend on it."""
    lines: dict[Key, int] = {}
    table: Key = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _split_key(header[1])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault((*table, *_split_key(key[1])), number)
    return lines


def _split_key(text: str) -> Key:
    return tuple(word.strip("\"'") for word in _PART.findall(text))


def read_environment() -> tuple[dict[str, Any], dict[Key, str]]:
    """`DILOCO_SECTION__KEY=value` as a tree, and the variable's name per key. Raises ConfigError.

    In the name of a region `_` stands for `-` (`DILOCO_REGIONS__US_EAST__ADMIN_PORT`), for shells allow nothing else.
    """
    names = sorted(name for name in os.environ if name.upper().startswith(ENV_PREFIX))
    origins: dict[Key, str] = {}
    for name in names:
        key = tuple(word.lower() for word in name[len(ENV_PREFIX) :].split("__"))
        _check_variable(name, key)
        origins[_region_key(key)] = name
    try:
        tree = EnvSettingsSource(cast(Any, Tree), env_prefix=ENV_PREFIX, env_nested_delimiter="__")()
    except SettingsError as error:
        raise ConfigError(f"a DILOCO_ variable can't be read ({error}): write DILOCO_ROUNDS__SYNC_EVERY=24") from error
    result: dict[str, Any] = {}
    for key, value in leaves(tree):
        put(result, _region_key(key), folder_or_name(Path(), value) if key == MODEL_KEY else value)
    return result, origins


def _check_variable(name: str, key: Key) -> None:
    """Variables that diloco-node sets for its own children (DILOCO_SOCKET, ...) are none of ours here."""
    if len(key) > 1:
        if key[0] not in Tree.model_fields:
            sections = ", ".join(section.upper() for section in Tree.model_fields)
            raise ConfigError(f"{name} is no setting: there is no section {key[0]!r}; sections are {sections}")
        return
    for section, info in Tree.model_fields.items():
        fields = getattr(info.annotation, "model_fields", {})
        if key[0] in fields and (section, key[0]) != ("run", "id"):
            right = f"{ENV_PREFIX}{section.upper()}__{key[0].upper()}"
            raise ConfigError(f"{name} has no effect: it lacks its section; set {right} instead")


def _region_key(key: Key) -> Key:
    return (key[0], key[1].replace("_", "-"), *key[2:]) if key[0] == "regions" and len(key) > 1 else key
