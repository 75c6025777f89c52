"""The seams of the shell: what `node/` needs, and adapters or fakes provide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diloco_node.core.messages import BulkHeader, Message
from diloco_node.core.types import Entry


class Clock(Protocol):
    """Monotonic time."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""
        ...


class TransportHandler(Protocol):
    """Who gets what the transport receives. All calls are made on the event loop, and must not block it."""

    def control_arrived(self, peer: str, message: Message) -> None:
        """A decoded control message."""
        ...

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """The connections to the peer are up (hello done), or one of them is gone."""
        ...

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        """A transfer begins: return a writable buffer of exactly `raw_bytes`, or None to skip its bytes."""
        ...

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        """The buffer is full and every chunk passed its checksum, or (not whole) the transfer broke off."""
        ...


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """Wire bytes exchanged with one peer since start, headers included; measured by the kernel where it tells."""

    bytes_out: int
    bytes_in: int
    is_measured: bool


class Transport(Protocol):
    """Links to all other regions: mutual TLS, one connection for control and some for bulk each."""

    async def start(self) -> None:
        """Bind the port and begin to dial. Raises BindError, IdentityError."""
        ...

    async def stop(self) -> None:
        """Close all links; pending sends fail with LinkLost."""
        ...

    def send(self, peer: str, message: Message) -> bool:
        """Queue a control message; False if it was dropped, for the link is down or its queue is full."""
        ...

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        """Stream a body in chunks (zstd where it pays). Returns when the last chunk is handed to the link.

        Raises:
            LinkLost: the link is down, or went down on the way.
        """
        ...

    def traffic(self) -> dict[str, PeerTraffic]:
        """Bytes per peer."""
        ...


class LedgerStore(Protocol):
    """Durable term, vote and log of one region."""

    def persist(self, term: int, voted_for: str, truncate_from: int, entries: Sequence[Entry]) -> None:
        """Make it durable (fsync) before returning. Called from one thread at a time. Raises StorageError."""
        ...
