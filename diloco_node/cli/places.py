"""The regions that a command is about.

Each command that looks at regions or changes them takes them as arguments: the name of a REGION of run.toml, or a
STATE-FOLDER, as state/us-east. Commands for several regions also take a folder of state folders, such as a demo's. Only
processes that *are* a region (`start`, `doctor`, `measure`) have `--region` instead.

Every command imports this module, so the HTTP client is imported where it is used: help must be fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from diloco_node.cli.existing_state import no_daemon
from diloco_node.cli.options import has_config, load
from diloco_node.config.urls import is_url
from diloco_node.errors import ConfigError, PeersUnreachable
from diloco_node.state_names import ADMIN_PORT_NAME, NODE_NAME

if TYPE_CHECKING:
    from diloco_node.cli.admin_client import Target
    from diloco_node.config.resolve import NodeConfig

CONVENTION: Final = "give a region of run.toml, as us-east, or its state folder, as state/us-east"

RegionArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="REGION|STATE-FOLDER",
        help="A region of run.toml, or its state folder [default: the only one on this machine].",
    ),
]
RegionsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="REGION|STATE-FOLDER",
        help="Regions of run.toml, state folders, a demo's folder; admin ports of regions elsewhere. [default: all "
        "regions of run.toml on this machine]",
    ),
]
CopiesArgument = Annotated[
    str,
    typer.Argument(
        metavar="REGION|STATE-FOLDER|COPIES",
        help="A region of run.toml, its state folder, that of all regions, or where copies are: a URL or a folder.",
    ),
]


def find_targets(places: Sequence[str], config: Path | None) -> list[Target]:
    """Find the admin ports of some regions, or of all regions of run.toml.

    Raises ConfigError: a place is no region. PeersUnreachable: none of the run's regions has run here.
    """
    if not places:
        return _targets_of_run(config)
    targets = []
    for place in places:
        matches = targets_in(place)
        if not matches and has_config(config):
            matches = [target for target in _targets_of_run(config) if target.name == place]
        if not matches:
            raise ConfigError(
                f"{place!r} is no region of run.toml that has run here, and no folder with {ADMIN_PORT_NAME}: "
                f"{CONVENTION}; a region writes the file when it starts"
            )
        targets += matches
    return targets


def targets_in(place: str) -> list[Target]:
    """Find the regions in a folder, as `folders_with` does, or the one at an admin port; empty: it is neither. Raises
    ConfigError: a port file is damaged."""
    from diloco_node.cli.admin_client import Target, target_in
    from diloco_node.cli.existing_state import finished_status

    if place.isascii() and place.isdigit() and 1 <= int(place) <= 65_535:
        return [Target(f"port {place}", int(place))]
    targets = [target_in(folder) for folder in folders_with(ADMIN_PORT_NAME, Path(place))]
    folders = [folder for folder in folders_with(NODE_NAME, Path(place)) if not (folder / ADMIN_PORT_NAME).exists()]
    return targets + [
        Target(folder.resolve().name, 0, folder) for folder in folders if finished_status(folder) is not None
    ]


def region_folder(place: str | None, config: Path | None, *, file: str = ADMIN_PORT_NAME) -> Path:
    """Find the state folder of one region. place: None: the only one on this machine. file: the command needs it there.

    Raises ConfigError: the place is no region, or several; no such region has that file here; or its run is finished.
    PeersUnreachable: no such region's daemon runs here.
    """
    folders = [] if place is None else folders_with(file, Path(place))
    if not folders and file == ADMIN_PORT_NAME and place is not None:
        _check_runs(folders_with(NODE_NAME, Path(place)))
    if not folders:
        settings = _settings(place, config, file)
        candidates = [settings.state_dir(name) for name in (settings.regions if place is None else [place])]
        folders = [folder for folder in candidates if (folder / file).exists()]
        if not folders:
            if file == ADMIN_PORT_NAME:
                _check_runs([folder for folder in candidates if (folder / NODE_NAME).exists()])
            absent = PeersUnreachable if file == ADMIN_PORT_NAME else ConfigError
            raise absent(
                f"no region of run {settings.run.id} has run here: {candidates[0]} holds no {file}. Give the command "
                f"where the region runs, or start it: `diloco-node start --region {candidates[0].name}`"
            )
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise ConfigError(f"{len(folders)} regions are here ({names}), and this is about one: {CONVENTION}")
    return folders[0].resolve()


def _check_runs(folders: Sequence[Path]) -> None:
    """Say of regions without an admin port why they take no order. Raises ConfigError: their run is finished.
    PeersUnreachable: their daemons don't run."""
    if folders:
        raise no_daemon(folders[0], f"{folders[0]} holds no {ADMIN_PORT_NAME}")


def run_folder(place: str | None, config: Path | None) -> Path:
    """Find the folder of a region, or of all regions: that of run.toml without a place. It need not exist."""
    if place is not None and is_there(Path(place)):
        return Path(place)
    settings = _settings(place, config, NODE_NAME)
    return settings.run.state_dir if place is None else settings.state_dir(place)


def copies_or_run(place: str) -> str | Path:
    """The URL or folder that has copies or regions: a region of run.toml has a folder."""
    return place if is_url(place) else run_folder(place, None)


def _settings(place: str | None, config: Path | None, file: str) -> NodeConfig:
    if place is not None and not has_config(config):
        raise ConfigError(f"{place!r} is no folder with {file}, and there is no run.toml here: {CONVENTION}")
    settings = load(config)
    if place is not None and place not in settings.regions:
        names = ", ".join(settings.regions)
        raise ConfigError(
            f"{place!r} is no folder with {file}, and no region of run.toml, which has {names}: {CONVENTION}"
        )
    return settings


def folders_with(file: str, folder: Path) -> list[Path]:
    """Folders that hold a file, which may be named itself: this one, those one or two levels below it, or those in the
    folder of all regions of a machine, as `init` makes it."""
    if not is_there(folder):
        return []
    if folder.name == file and folder.is_file():
        return [folder.parent]
    paths = [path for depth in ("", "*/", "*/*/", "*/state/*/") for path in folder.glob(f"{depth}{file}")]
    return sorted(path.parent for path in paths)


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder that this user may see; another user's region may have left it."""
    try:
        return path.exists()
    except OSError:  # also of a name that is too long for a file
        return False


def _targets_of_run(config: Path | None) -> list[Target]:
    from diloco_node.cli.admin_client import Target, target_in
    from diloco_node.cli.existing_state import finished_status

    settings = load(config)
    targets = []
    for name, region in settings.regions.items():
        folder = settings.state_dir(name)
        if (folder / ADMIN_PORT_NAME).exists():
            targets.append(target_in(folder))
        elif (folder / NODE_NAME).exists() and finished_status(folder):
            targets.append(Target(name, 0, folder))
        elif region.admin_port:
            targets.append(Target(name, region.admin_port))
    if not targets:
        raise PeersUnreachable(
            f"no region of run {settings.run.id} has run here: {settings.run.state_dir} holds no {ADMIN_PORT_NAME}; "
            "start one, or give the admin port of one elsewhere"
        )
    return targets
