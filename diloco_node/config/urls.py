"""Places that may be a folder or a URL, and addresses. Every command imports this, so it imports nothing large."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
"""Also without the slashes, as other tools write it: taken for a folder, a copy would stay on this disk."""


def is_url(place: str | Path) -> bool:
    """Whether a place is a URL of any scheme; a `Path` never is."""
    return isinstance(place, str) and _URL.match(place) is not None and not os.path.lexists(place)


def host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT or [HOST]:PORT. Raises ValueError: the port is no number."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
