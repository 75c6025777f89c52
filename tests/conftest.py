"""For all tests: nothing here depends on how fast this machine is."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from diloco_node.cli import status as status_cmd

# An example that takes long, or is made slowly, says something about the machine only.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for a status in this process waits for it: a region that answers late is there."""
    monkeypatch.setattr(status_cmd, "TIMEOUT_S", 120.0)


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    yield near, far
    near.close()
    far.close()
