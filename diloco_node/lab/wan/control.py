"""The emulation's control socket: one JSON object per line in, one per line out. Root's own, mode 0600.

Commands: `{"do": "status"}`, `cut` and `heal` with `region`, `other`, `direction` (see `topology.Scope`), `set` with
those and `delay`, `jitter`, `loss`, `rate` as a file has them, `timetable` (start the file's outages now).
The answer has `"ok": true`, or `"ok": false` and `"error"`.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from diloco_node.errors import ConfigError, DilocoError, PeersUnreachable
from diloco_node.lab.wan.topology import Scope

LINE_BYTES_MAX: Final = 1 << 20
CONNECTIONS_MAX: Final = 16
REQUEST_TIMEOUT_S: Final = 10.0

Handler = Callable[[dict[str, Any]], Mapping[str, Any]]


class ControlServer:
    """Serves commands from within a select loop: give `sockets` to select, each readable one to `serve`.

    A client that sends half a line or does not read its answer is closed, never waited for.

    Args:
        path: of the socket; a stale one is replaced. handle: a command to an answer; DilocoError becomes an error
            answer.
    """

    def __init__(self, path: Path, handle: Handler) -> None:
        self._path = path
        self._handle = handle
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(CONNECTIONS_MAX)
        self._received: dict[socket.socket, bytes] = {}

    @property
    def sockets(self) -> list[socket.socket]:
        """Return the sockets to wait for."""
        return [self._listener, *self._received]

    def serve(self, sock: socket.socket) -> None:
        """Accept, or read and answer whole lines."""
        if sock is self._listener:
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._received[connection] = b""
            for extra in list(self._received)[:-CONNECTIONS_MAX]:
                self._drop(extra)
        elif sock in self._received:
            self._read(sock)

    def close(self) -> None:
        """Close everything and remove the socket."""
        for sock in self.sockets:
            sock.close()
        self._received.clear()
        self._path.unlink(missing_ok=True)

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        pending = self._received[sock] + data
        if not data or len(pending) > LINE_BYTES_MAX:
            self._drop(sock)
            return
        *lines, self._received[sock] = pending.split(b"\n")
        for line in lines:
            answer = json.dumps(self._answer(line)).encode() + b"\n"
            try:
                count = sock.send(answer)
            except OSError:
                count = 0
            if count < len(answer):
                self._drop(sock)
                return

    def _answer(self, line: bytes) -> Mapping[str, Any]:
        try:
            command = json.loads(line)
            if not isinstance(command, dict):
                raise ConfigError("a command is a JSON object")
            return {"ok": True, **self._handle(command)}
        except (ValueError, RecursionError, DilocoError) as error:
            return {"ok": False, "error": str(error)}

    def _drop(self, sock: socket.socket) -> None:
        self._received.pop(sock, None)
        sock.close()


def request(path: Path, command: Mapping[str, Any], *, timeout_s: float = REQUEST_TIMEOUT_S) -> dict[str, Any]:
    """Send one command; the answer, without its "ok".

    Raises PeersUnreachable: nobody serves the socket, or not in time. ConfigError: the command was refused.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            # Without Python's timeout: that would refuse at once where the queue of the listener is full.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", math.ceil(timeout_s), 0))
            sock.connect(str(path))
            sock.settimeout(timeout_s)
            sock.sendall(json.dumps(dict(command)).encode() + b"\n")
            with sock.makefile("rb") as file:
                line = file.readline(LINE_BYTES_MAX)
    except OSError as error:
        raise PeersUnreachable(
            f"the control socket {path} does not answer ({error.strerror or error}); if the keeper is gone, "
            f"clean up with: diloco-node wan down {path.stem}"
        ) from error
    if not line.endswith(b"\n"):
        raise PeersUnreachable(f"the emulation closed its control socket {path}; is it ending?")
    answer: dict[str, Any] = json.loads(line)
    if not answer.pop("ok"):
        raise ConfigError(answer["error"])
    return answer


def scope_of(command: Mapping[str, Any]) -> Scope:
    """The scope that a command names.

    Raises ConfigError: it is malformed; whether its regions exist is checked by `Conditions`.
    """
    region, peer = command.get("region"), command.get("other", "")
    direction = command.get("direction", "both")
    if not isinstance(region, str) or not isinstance(peer, str) or direction not in ("both", "out", "in"):
        raise ConfigError("a command names a region, perhaps an other, and a direction: both, out or in")
    if region == peer:
        raise ConfigError(f"{region} can't be cut from itself")
    return Scope(region, peer, direction)
