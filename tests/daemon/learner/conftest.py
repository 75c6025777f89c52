"""Fixtures of the room."""

from tests.kit.proxy_kit import bench  # noqa: F401
