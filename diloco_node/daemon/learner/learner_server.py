"""The daemon's end of the Unix socket to its learner: the newest process, as the handler decides, whichever attaches
last. The other gets a final `Refuse`, which makes it exit.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from diloco_node.errors import BindError, ProtocolViolation
from diloco_node.unix_sockets import peer_process, peer_uid
from diloco_node.wire.learner_link import (
    LENGTH_BYTES,
    LINK_PROTOCOL,
    TO_DAEMON,
    TO_LEARNER,
    Attach,
    Refuse,
    ToDaemon,
    ToLearner,
    frame,
    frame_length,
)

if TYPE_CHECKING:  # which takes the messages, and must not block
    from diloco_node.daemon.daemon import Daemon

ATTACH_TIMEOUT_S: Final = 10.0
"""From connect to a whole Attach."""

UNSENT_BYTES_MAX: Final = 4 * 2**20
"""A learner that leaves so much unread is stopped or broken: its connection is dropped, and it attaches again."""

CONNECTIONS_MAX: Final = 8


class LearnerServer:
    """Listens on a Unix socket, of mode 0600, for the region's learner; a stale file there is replaced."""

    def __init__(self, path: Path, handler: Daemon) -> None:
        self.path = path
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._attached: asyncio.StreamWriter | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._is_stopping = False

    @property
    def is_attached(self) -> bool:
        """Whether a learner is connected and has sent its Attach."""
        return self._attached is not None

    async def start(self) -> None:
        """Bind and listen. Raises BindError: the path can't be bound."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)
            listener.bind(os.fspath(self.path))
            self.path.chmod(0o600)
        except OSError as error:
            listener.close()
            raise BindError(
                f"learner socket {self.path}: {error.strerror or error}; choose another state folder"
            ) from error
        self._server = await asyncio.start_unix_server(self._connected, sock=listener)

    async def stop(self) -> None:
        """Close the socket and the learner's connection. The learner goes on and looks for the next daemon."""
        self._is_stopping = True
        if self._server is not None:
            self._server.close()
        # Hang up rather than cancel: asyncio's streams log a cancelled connection task as an error.
        tasks = list(self._connections)
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def send(self, message: ToLearner) -> bool:
        """Queue a message to the attached learner. False if there is none, or if it does not read."""
        writer = self._attached
        if writer is None or writer.is_closing():
            return False
        writer.write(frame(TO_LEARNER.encode(message)))
        if writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            writer.transport.abort()
            return False
        return True

    def refuse(self, reason: str, *, is_final: bool) -> None:
        """Tell the attached learner no, and hang up."""
        writer = self._attached
        if writer is None:
            return
        self._detach(writer, reason)
        _refuse(writer, reason, is_final=is_final)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        reason = "the learner closed the connection"
        try:
            # Only processes of the same user (or root) may speak, and not too many at once.
            is_ours = peer_uid(writer.get_extra_info("socket")) in (os.getuid(), 0)
            if is_ours and len(self._connections) <= CONNECTIONS_MAX:
                await self._converse(reader, writer)
        except (ProtocolViolation, TimeoutError) as error:  # before OSError, which TimeoutError is
            reason = f"{type(error).__name__}: {error}"
            _refuse(writer, reason, is_final=False)
        except (OSError, EOFError) as error:
            reason = "the daemon stops" if self._is_stopping else f"the learner is gone ({type(error).__name__})"
        finally:
            del self._connections[task]
            self._detach(writer, reason)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            first = await _read(reader)
        if not isinstance(first, Attach):
            raise ProtocolViolation(f"learner link: {type(first).__name__} before Attach")
        if first.protocol != LINK_PROTOCOL:
            _refuse(
                writer,
                f"the learner speaks protocol {first.protocol}, the daemon {LINK_PROTOCOL}: install one version of "
                "diloco-node for both and restart the region",
                is_final=True,
            )
            return
        rejection_reason = self._handler.rejection_reason(first, peer_process(writer.get_extra_info("socket")))
        if rejection_reason:
            _refuse(writer, rejection_reason, is_final=True)
            return
        self.refuse(f"a newer learner process (pid {first.pid}) has attached to this region", is_final=True)
        self._attached = writer
        message: ToDaemon = first
        while self._attached is writer:  # else replaced or refused meanwhile: what it says is void
            self._handler.on_learner_message(message)
            message = await _read(reader)
            if isinstance(message, Attach):
                raise ProtocolViolation("learner link: a second Attach on one connection")

    def _detach(self, writer: asyncio.StreamWriter, reason: str) -> None:
        if self._attached is writer:
            self._attached = None
            self._handler.learner_detached(reason)


async def _read(reader: asyncio.StreamReader) -> ToDaemon:
    length = frame_length(await reader.readexactly(LENGTH_BYTES))
    return TO_DAEMON.decode(await reader.readexactly(length))


def _refuse(writer: asyncio.StreamWriter, reason: str, *, is_final: bool) -> None:
    if not writer.is_closing():
        writer.write(frame(TO_LEARNER.encode(Refuse(reason[:1000], is_final))))
        writer.close()
