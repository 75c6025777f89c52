"""Fixtures of the room."""

from tests.kit.daemon_kit import nodes, spec  # noqa: F401
