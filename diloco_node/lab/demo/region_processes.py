"""Regions as child processes of one command: started, watched over their admin ports, ended by their process ids."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from diloco_node.cli.admin_client import Target, ask, order
from diloco_node.errors import DilocoError

STOP_S: Final = 30.0
ORDER_POLL_S: Final = 0.25
"""A daemon that is not there refuses an order at once."""

EPHEMERAL_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
THREADS: Final = {"OMP_NUM_THREADS": "1"}
"""Defaults of its environment. Four learners of 10 M parameters with all threads each take three times as long."""

PORT_MIN: Final = 12_000
"""Below are the ports of well-known services, ours among them."""


@dataclass(slots=True)
class RegionProcess:
    """A `diloco-node start` as a child process.

    Attributes:
        name: the region. admin_port: of its daemon. state_dir: its folder.
        namespace: the network namespace it runs in, "" for this process's own. It is asked over its Unix socket, which
            reaches into any namespace and puts no bytes on the interface that carries the run.
        program: what Python runs instead of `diloco-node`. env: added to this process's environment,
            and THREADS where that has none.
        settings: for `start --set`, beyond those of the file.
        options: further words of `start`. config: a run.toml of its own; None: that of the other regions.
        process: the supervisor; None before the start.
        status: the last status document that was read; {} before the first.
        answered_s: when it was read, on the monotonic clock; minus infinity if the last try read none.
        asking: the try that is under way, or the last one.
    """

    name: str
    admin_port: int
    state_dir: Path
    namespace: str = ""
    program: Sequence[str] = ("-m", "diloco_node.main")
    env: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    config: Path | None = None
    process: asyncio.subprocess.Process | None = None
    status: dict[str, Any] = field(default_factory=dict)
    answered_s: float = -math.inf
    asking: asyncio.Task[dict[str, Any]] | None = None

    async def start(self, config: Path, command: Sequence[str] = ()) -> None:
        """Start the region with the built-in trainer or a command; what it prints goes to `logs/start.log`."""
        logs = self.state_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "start.log").open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                # `ip netns exec` replaces itself by the command: the process is still the supervisor.
                *(("ip", "netns", "exec", self.namespace) if self.namespace else ()),
                sys.executable,
                *self.program,
                "start",
                "--region",
                self.name,
                "--config",
                str(self.config or config),
                *(word for setting in self.settings for word in ("--set", setting)),
                *self.options,
                *(("--", *command) if command else ()),
                stdout=output,
                stderr=output,
                stdin=asyncio.subprocess.DEVNULL,
                # An own group: a Ctrl-C in the terminal reaches the demo, which then ends the regions in order.
                start_new_session=True,
                # Regions share the processors, and threads of one that spin hold up the others: as torchrun does.
                env={**THREADS, **os.environ, "PYTHONUNBUFFERED": "1", **self.env},
            )

    @property
    def has_exited(self) -> bool:
        """Whether the supervisor is gone."""
        return self.process is not None and self.process.returncode is not None

    async def poll(self) -> dict[str, Any]:
        """Read the status; keeps the last one when the daemon does not answer just now."""
        target = Target(self.name, self.admin_port, self.state_dir)
        document = await asyncio.to_thread(ask, target)
        if "error" in document:
            self.answered_s = -math.inf
        else:
            self.answered_s, self.status = time.monotonic(), document
        return self.status

    async def finish(self) -> bool:
        """Ask this region to end the run; whether it took the order."""
        try:
            await asyncio.to_thread(order, self.state_dir, "finish", {})
        except DilocoError:
            return False
        return True

    async def stop(self) -> None:
        """SIGTERM, a deadline, SIGKILL."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    def last_lines(self, count: int = 12) -> str:
        """The end of its output, for the message when it failed."""
        path = self.state_dir / "logs" / "start.log"
        if not path.exists():
            return ""
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:])


def attached_learner(status: Mapping[str, Any]) -> int | None:
    """The process that a status document names as its learner."""
    pids = status.get("pids")
    pid = pids.get("learner") if isinstance(pids, dict) else None
    return pid if isinstance(pid, int) else None


async def poll_all(regions: Sequence[RegionProcess], *, wait_s: float) -> None:
    """Ask every region; who does not answer in time is asked on, and not waited for."""
    for region in regions:
        if region.asking is None or region.asking.done():
            region.asking = asyncio.create_task(region.poll(), name=f"ask {region.name}")
    asking = [region.asking for region in regions if region.asking is not None]
    if asking:
        answers, _ = await asyncio.wait(asking, timeout=wait_s)
        for answer in answers:
            answer.result()


async def order_finish(
    regions: Sequence[RegionProcess], *, limit_s: float, is_given_up: Callable[[], bool] = lambda: False
) -> None:
    """Ask the regions to end the run until one of them takes the order, or it is given up.

    A daemon that was just killed takes no order; another one does, or all are asked again.

    Raises TimeoutError: none took it within the limit.
    """
    async with asyncio.timeout(limit_s):
        while not is_given_up():
            if any([await region.finish() for region in regions]):
                return
            await asyncio.sleep(ORDER_POLL_S)


def free_ports(count: int) -> list[int]:
    """Ports on loopback that are free now; all different.

    Where there are some, none of those that the kernel hands out by itself: until a daemon binds its port, seconds go
    by, and any connection of this machine might get it meanwhile.
    """
    least = first_ephemeral_port()
    candidates = iter(random.sample(range(PORT_MIN, least), least - PORT_MIN) if least > PORT_MIN else ())
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            sock = socket.socket()
            try:
                sock.bind(("127.0.0.1", next(candidates, 0)))
            except OSError:
                sock.close()
                continue
            sockets.append(sock)
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def first_ephemeral_port() -> int:
    """Return the first port that the kernel gives to outgoing connections."""
    try:
        return int(EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
