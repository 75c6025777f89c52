"""Names of the files in a region's state folder that several rooms read or write. Standard library only."""

from __future__ import annotations

from typing import Final

NODE_NAME: Final = "node.json"
"""The daemon's settings, which `start` writes and the daemon completes."""

TRAINER_NAME: Final = "trainer.json"
"""The built-in trainer's settings."""

LEDGER_NAME: Final = "ledger.log"

FINAL_NAME: Final = "final.safetensors"
"""The model, once the run is finished."""

WISHES_NAME: Final = "end.json"
"""Wishes of this region for the run's end."""

ADMIN_PORT_NAME: Final = "admin.port"
"""The daemon writes it when its admin port is bound, and removes it at its end."""

ADMIN_TOKEN_NAME: Final = "admin.token"

ADMIN_SOCKET_NAME: Final = "admin.sock"
"""Not the path: a long folder has its sockets elsewhere (`unix_sockets.socket_path`)."""

DAEMON_SOCKET_NAME: Final = "learner.sock"
"""The daemon listens there for its learner."""

MEMORY_SOCKET_NAME: Final = "memory.sock"
"""The supervisor hands out shared memory there."""
