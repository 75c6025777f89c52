"""Faults within a daemon's process: put between its parts before it starts. Production daemons never import this.

| fault | what the daemon does then |
|---|---|
| partition | its sessions end, it dials nobody, and it refuses whoever dials |
| disk | every fsync and fdatasync fails with EIO |
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from diloco_node.errors import LinkLost, PeerError
from diloco_node.lab.chaos.fault_files import fault_file, is_on
from diloco_node.ticks import to_tick_s
from diloco_node.transport.link import PeerLink
from diloco_node.transport.peer_session import Session
from diloco_node.transport.streams import AcceptedStream
from diloco_node.wire.envelope import Hello

CUT_POLL_S: Final = 0.1
"""How often it is looked whether the links are cut."""

CUT: Final = "cut off on purpose"


def install(folder: Path, region: str) -> None:
    """Put the faults of this region into this process."""
    install_partition(partial(is_on, fault_file(folder, region, "partition")))
    install_disk(partial(is_on, fault_file(folder, region, "disk")))


def install_partition(is_cut: Callable[[], bool]) -> None:
    """Cut every link while it is so."""
    run_dialer, connect, accept = PeerLink.run_dialer, PeerLink._connect, PeerLink.accept
    links: list[PeerLink] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(to_tick_s(CUT_POLL_S))
            if is_cut():
                for link in links:
                    link.drop(CUT)

    async def run_watched(self: PeerLink) -> None:
        links.append(self)
        # For all links one task: its wake-ups would be a part of what a daemon costs.
        watching = asyncio.create_task(watch(), name="cuts") if links == [self] else None
        try:
            await run_dialer(self)
            await asyncio.Event().wait()  # a link that only the peer dials has no dialer
        finally:
            links.remove(self)
            if watching is not None:
                watching.cancel()

    def refuse(peer: str) -> None:
        if is_cut():
            raise LinkLost(f"{peer}: {CUT}")

    async def connect_or_not(self: PeerLink, dial_number: int, old: Session | None) -> Session:
        refuse(self.peer)
        return await connect(self, dial_number, old)

    async def accept_or_not(self: PeerLink, hello: Hello, stream: AcceptedStream) -> PeerError | None:
        refuse(self.peer)
        return await accept(self, hello, stream)

    PeerLink.run_dialer = run_watched  # type: ignore[method-assign]
    PeerLink._connect = connect_or_not  # type: ignore[method-assign]
    PeerLink.accept = accept_or_not  # type: ignore[method-assign]


def install_disk(is_failing: Callable[[], bool]) -> None:
    """Let every sync fail while it is so."""
    for name in ("fsync", "fdatasync"):
        setattr(os, name, _sync_or_not(getattr(os, name), is_failing))


def _sync_or_not(sync: Callable[[int], None], is_failing: Callable[[], bool]) -> Callable[[int], None]:
    def sync_or_not(descriptor: int) -> None:
        if is_failing():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    return sync_or_not
