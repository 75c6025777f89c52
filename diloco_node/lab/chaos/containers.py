"""The containers of a compose run: found by Compose's labels, and struck through the `docker` command.

| fault | of a region | of its daemon or learner |
|---|---|---|
| kill, stop | `docker kill` or `stop`, and `start` | a signal, sent inside |
| pause | `docker pause` and `unpause` | signals, sent inside |
| slow, partition, disk | inside | inside |

*Inside* is `docker exec` of `cli.chaos_inside`. A region's supervisor is what its container runs: who ends the one ends
the other.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diloco_node.errors import ConfigError, DilocoError, PeersUnreachable, StorageError
from diloco_node.lab.chaos.executor import Sleep, StruckFault
from diloco_node.lab.chaos.fault_plan import FaultTarget, PlannedFault, check_fault
from diloco_node.numeric import NS_PER_S

PROJECT_LABEL: Final = "com.docker.compose.project"
ONEOFF_LABEL: Final = "com.docker.compose.oneoff"
REGION_VARIABLE: Final = "WAN_REGION"
"""In the environment of a region's container: which region it is."""

USER: Final = "diloco"
"""Whose processes a region's are, in its container. Only the link is root's."""

INSIDE: Final = ("python", "-m", "diloco_node.lab.cli.chaos_inside")
FIRST_PROCESS: Final = 1
"""Whom a fault of a whole container strikes, by the numbers that hold inside."""

_ERRORS: Final[Mapping[int, type[DilocoError]]] = {
    one.exit_code: one for one in (ConfigError, PeersUnreachable, StorageError)
}
_NOT_FOUND: Final = (126, 127)
"""What `docker exec` ends with when the program can't be run."""


@dataclass(frozen=True, slots=True)
class RegionContainer:
    """One region's container.

    Attributes:
        key: the engine's own id of it. name: as in `docker ps`. project: of Compose. status: the engine's word.
    """

    key: str
    name: str
    project: str
    region: str
    status: str

    def check_running(self) -> None:
        """Refuse to strike what is not up.

        Raises:
            PeersUnreachable: it is not; how it gets up again.
        """
        if self.status == "paused":
            raise PeersUnreachable(f"{self.name} is paused: docker unpause {self.name}")
        if self.status == "restarting":
            raise PeersUnreachable(f"{self.name} is being started again: wait until it is up")
        if self.status != "running":
            raise PeersUnreachable(f"{self.name} does not run ({self.status}): docker start {self.name}")


@dataclass(frozen=True, slots=True)
class ComposeRun:
    """The containers of one project, by region."""

    project: str
    regions: Mapping[str, RegionContainer]

    async def strike(self, fault: PlannedFault, *, sleep: Sleep = asyncio.sleep) -> StruckFault:
        """Carry out one fault now; returns when it is over, and what was killed or stopped is started again.

        Cancelled, it ends a fault that lasts. The numbers of processes are those that hold inside the container.

        Raises:
            ConfigError: it can't be carried out here. PeersUnreachable: the container is not up.
            DilocoError: docker refused.
        """
        check_fault(fault)
        container = self.regions[fault.target.region]
        container.check_running()
        match fault:
            case PlannedFault(kind="kill" | "stop" as verb, target=FaultTarget(part="supervisor" | "region")):
                await _start_again_after(verb, container)
            case PlannedFault(kind="pause", target=FaultTarget(part="region")):
                await _pause(container, fault.lasts_ns / NS_PER_S, sleep)
            case _:
                return StruckFault(0, fault, await _inside(container, fault))
        return StruckFault(0, fault, (FIRST_PROCESS,))


async def find_run(project: str | None) -> ComposeRun:
    """The only compose run that is up on this engine, or the one of this name.

    Raises:
        ConfigError: there is no docker, no engine, no such run, or more than one.
    """
    try:
        keys = (await docker("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={PROJECT_LABEL}")).split()
    except OSError as error:
        raise ConfigError(f"docker can't be run ({error.strerror}): install it, or strike a demo: --folder") from None
    except DilocoError as error:
        raise ConfigError(f"the container engine does not answer: {error}") from None
    documents = json.loads(await docker("inspect", "--type", "container", *keys)) if keys else []
    found = [one for document in documents if (one := _region_container(document)) is not None]
    return _choose(found, project)


def _region_container(document: Mapping[str, Any]) -> RegionContainer | None:
    """A container as `docker inspect` shows it; None if it is no region's of a compose run."""
    config = document["Config"]
    labels = config["Labels"]
    environment = dict(one.partition("=")[::2] for one in config["Env"] or ())
    region = environment.get(REGION_VARIABLE, "")
    # `docker compose run` makes others, for one command each.
    if not region or labels.get(ONEOFF_LABEL, "").lower() == "true":
        return None
    name, status = document["Name"].removeprefix("/"), document["State"]["Status"]
    return RegionContainer(document["Id"], name, labels[PROJECT_LABEL], region, status)


def _choose(found: Sequence[RegionContainer], project: str | None) -> ComposeRun:
    projects = sorted({one.project for one in found})
    if project is not None:
        if project not in projects:
            there = f"there are {', '.join(projects)}" if projects else "there is none at all"
            raise ConfigError(f"there is no compose project {project!r} with regions on this engine; {there}")
        # An interrupted `docker compose up` leaves a second one of a region, which does not run.
        by_status = sorted(found, key=lambda one: one.status in ("running", "paused", "restarting"))
        return ComposeRun(project, {one.region: one for one in by_status if one.project == project})
    up = sorted({one.project for one in found if one.status != "exited"})
    if not up:
        raise ConfigError("no compose run is up on this engine: docker compose up --detach")
    if len(up) > 1:
        raise ConfigError(f"{len(up)} compose projects are up ({', '.join(up)}): name one with --project")
    return _choose(found, up[0])


async def _start_again_after(verb: str, container: RegionContainer) -> None:
    """For the engine both are stops by hand, after which it does not start a container again by itself."""
    try:
        await docker(verb, container.key)
    except asyncio.CancelledError:
        await _surely("start", container.key)
        raise
    await _surely("start", container.key)


async def _pause(container: RegionContainer, seconds: float, sleep: Sleep) -> None:
    try:
        await docker("pause", container.key)
        await sleep(seconds)
    except asyncio.CancelledError:
        try:
            await _surely("unpause", container.key)
        except DilocoError as error:
            # It may have come before the pause: then there is nothing to end.
            if "not paused" not in str(error):
                raise
        raise
    await _surely("unpause", container.key)


async def _surely(*words: str) -> None:
    """Have docker do it, also when this is cancelled meanwhile, however often. Then it is cancelled."""
    work, is_cancelled = asyncio.ensure_future(docker(*words)), False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            is_cancelled = True
    work.result()
    if is_cancelled:
        raise asyncio.CancelledError


async def _inside(container: RegionContainer, fault: PlannedFault) -> tuple[int, ...]:
    """The processes that were struck. A fault that lasts is over when this is, also when it is cancelled."""
    user = "root" if fault.kind == "partition" else USER
    order = (*INSIDE, fault.kind, str(fault.target), str(fault.lasts_ns))
    code, out, errors = await _run("exec", "--interactive", "--user", user, container.key, *order)
    if code == 0:
        return tuple(json.loads(out)["pids"])
    if code in _NOT_FOUND or "No module named" in errors:
        raise ConfigError(f"the image of {container.name} can't do that: docker compose build, then docker compose up")
    said = errors.strip().splitlines()
    raise _ERRORS.get(code, DilocoError)(said[-1] if said else f"docker exec {container.name} ended with {code}")


async def docker(*words: str) -> str:
    """What the command printed.

    Raises:
        DilocoError: it failed; what it said first.
        OSError: there is no such program.
    """
    code, out, errors = await _run(*words)
    if code:
        said = (errors.strip() or f"it ended with {code}").splitlines()[0]
        raise DilocoError(f"docker {words[0]}: {said.removeprefix('Error response from daemon: ')}")
    return out


async def _run(*words: str) -> tuple[int, str, str]:
    """Exit code and output. Cancelled, it closes the command's input, and waits until the command has ended."""
    reads, writes = os.pipe()
    with os.fdopen(writes, "wb") as given:
        try:
            # In a session of its own: Ctrl-C is for this process, which then ends in order.
            process = await asyncio.create_subprocess_exec(
                "docker", *words, stdin=reads, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(reads)
        try:
            out, errors = await process.communicate()
        except asyncio.CancelledError:
            given.close()
            await process.wait()
            raise
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace"), errors.decode(errors="replace")
