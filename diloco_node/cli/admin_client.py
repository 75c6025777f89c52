"""The client of a daemon's admin port: status documents, orders and measurements.

A daemon on this machine is asked over the Unix socket in its state folder, which reaches into other network namespaces
too, else over its port on loopback. Orders need the token of the state folder.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from diloco_node.errors import ConfigError, DilocoError, PeersUnreachable, StorageError
from diloco_node.escaping import escaped, escaped_document
from diloco_node.state_names import ADMIN_PORT_NAME, ADMIN_SOCKET_NAME, ADMIN_TOKEN_NAME
from diloco_node.unix_sockets import socket_path

STATUS_PATH: Final = "/api/v1/status"
TIMEOUT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 16 * 2**20
WORDS_BYTES_MAX: Final = 80
"""Length of what is shown of an answer that is no document."""


@dataclass(frozen=True, slots=True)
class Target:
    """A region whose admin port is asked. folder: its state folder; None: only the port is known."""

    name: str
    port: int
    folder: Path | None = None

    def connection(self) -> http.client.HTTPConnection:
        """A connection to the daemon; the first request opens it."""
        path = None if self.folder is None else socket_path(self.folder, ADMIN_SOCKET_NAME)
        if path is not None and path.exists():
            return _UnixConnection(path, TIMEOUT_S)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket instead of a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def target_in(folder: Path) -> Target:
    """The region with this state folder. Raises ConfigError: its port file is damaged. OSError: it can't be read."""
    file = folder / ADMIN_PORT_NAME
    text = file.read_text().strip()
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{file} holds {text[:20]!r}, not a port: start the region again")
    return Target(folder.resolve().name, int(text), folder)


def ask(target: Target, path: str = STATUS_PATH) -> dict[str, Any]:
    """Read a region's status document, or another one; {"region", "error"} when it does not answer."""
    try:
        with contextlib.closing(target.connection()) as connection:
            connection.request("GET", path)
            document = _document(connection.getresponse())
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        return {"region": target.name, "error": escaped(f"no status from 127.0.0.1:{target.port}: {error}")}
    for key, usual in (("region", target.name), ("error", "unknown error")):
        if not isinstance(document.get(key, usual), str):
            document[key] = usual
    answer: dict[str, Any] = escaped_document({"region": target.name, **document})
    return answer


def ask_all(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Read the status documents in order. A region that hangs delays the others by its own timeout only.

    When no daemon does, the folder answers for a region whose run is finished.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        return list(pool.map(_ask_or_read, targets))


def _ask_or_read(target: Target) -> dict[str, Any]:
    from diloco_node.cli.existing_state import finished_status
    from diloco_node.daemon.run_record import since_and_model

    document = ask(target)
    if target.folder is None:
        return document
    if "error" in document:
        return finished_status(target.folder) or document
    if document.get("state") == "finished":
        document["reason"] = f"{document.get('reason')}{since_and_model(target.folder)}"
    return document


def check_answers(documents: Sequence[Mapping[str, Any]]) -> None:
    """Raises PeersUnreachable: none of the regions answers."""
    if all("error" in document for document in documents):
        raise PeersUnreachable(
            f"none of {len(documents)} regions answers ({documents[0]['error']}): start one, or see its logs/daemon.log"
        )


def ask_in(folder: Path) -> dict[str, Any]:
    """Read the status document of the region with this state folder; {"error"} when no daemon answers for it."""
    try:
        return ask(target_in(folder))
    except (ConfigError, OSError) as error:
        return {"error": str(error)}


@contextlib.contextmanager
def post(
    folder: Path, path: str, document: Mapping[str, Any], *, timeout_s: float | None = None
) -> Iterator[http.client.HTTPResponse]:
    """POST a JSON object to /api/v1/PATH of the daemon with this state folder, and yield its answer to be read.

    Raises OSError, HTTPException: it does not answer, or its token can't be read.
    """
    token = (folder / ADMIN_TOKEN_NAME).read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    with contextlib.closing(_UnixConnection(socket_path(folder, ADMIN_SOCKET_NAME), timeout_s)) as connection:
        connection.request("POST", f"/api/v1/{path}", json.dumps(document), headers)
        yield connection.getresponse()


def order(folder: Path, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Give an order (/api/v1/PATH) to the daemon with this state folder, and return its answer.

    Raises ConfigError, StorageError, DilocoError: it refuses, its disk does, it fails. PeersUnreachable: no answer.
    """
    try:
        with post(folder, path, document) as answer:
            return order_answer(folder, answer)
    except PermissionError as error:
        raise ConfigError(
            f"{error.filename or folder} is closed to you: give orders as the user that runs {folder.name}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        from diloco_node.cli.existing_state import no_daemon

        raise no_daemon(folder, f"{error}") from None


def order_answer(folder: Path, answer: http.client.HTTPResponse) -> dict[str, Any]:
    """The JSON object by which a daemon accepts an order. Raises DilocoError: it refuses, or answers something else."""
    try:
        body = _document(answer)
    except ValueError as error:
        raise DilocoError(
            f"the daemon of {folder.name} has perhaps not done it: {error}. It is of another version, or failed: see "
            f"{folder}/logs/daemon.log, then start it again"
        ) from None
    if answer.status < http.client.MULTIPLE_CHOICES:
        return body
    kind = error_kind(body.get("exit_code"), ConfigError)
    raise kind(f"{folder.name} refuses: {body.get('error', answer.status)}")


def error_kind(exit_code: object, usual: type[DilocoError]) -> type[DilocoError]:
    """The kind of an error that a daemon tells by its exit code; the usual one where the code tells nothing."""
    kinds = (ConfigError, PeersUnreachable, StorageError)
    return next((kind for kind in kinds if kind.exit_code == exit_code), usual)


def _document(answer: http.client.HTTPResponse) -> dict[str, Any]:
    """The JSON object that an answer holds. Raises ValueError: it holds none; says the status and the first words."""
    text = answer.read(ANSWER_BYTES_MAX)
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(text)
        if isinstance(document, dict):
            return document
    words = text[:WORDS_BYTES_MAX].decode(errors="replace").strip().partition("\n")[0]
    raise ValueError(f"its answer is {answer.status} {answer.reason} and no JSON object, but {words!r}")
