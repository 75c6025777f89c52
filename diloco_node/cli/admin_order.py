"""Orders to a daemon that runs on this machine, over its admin socket, with the token of its state folder."""

from __future__ import annotations

import contextlib
import http.client
import json
from pathlib import Path
from typing import Any, Final

from diloco_node.cli.status import SOCKET_FILE, UnixConnection
from diloco_node.errors import ConfigError, PeersUnreachable
from diloco_node.memory import socket_path

TOKEN_FILE: Final = "admin.token"
ANSWER_BYTES_MAX: Final = 2**20


def order(folder: Path, region: str, path: str, document: dict[str, Any]) -> dict[str, Any]:
    """POST a JSON object; what the daemon answers.

    Args:
        folder: its state folder. region: its name, for people. path: as /api/v1/budget.

    Raises:
        ConfigError: it refuses. PeersUnreachable: it does not answer.
    """
    try:
        token = (folder / TOKEN_FILE).read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        with contextlib.closing(UnixConnection(socket_path(folder, SOCKET_FILE))) as connection:
            connection.request("POST", path, json.dumps(document), headers)
            answer = connection.getresponse()
            body = json.loads(answer.read(ANSWER_BYTES_MAX))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PeersUnreachable(
            f"the daemon of {region} in {folder} does not answer ({error}); is it running?"
        ) from None
    if answer.status != http.client.OK:
        raise ConfigError(f"{region} refuses: {body.get('error', answer.status)}")
    return dict(body)
