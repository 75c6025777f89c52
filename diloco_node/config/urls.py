"""Places that may be a folder or a URL. Every command imports this, so it imports nothing large."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")


def is_url(place: str | Path) -> bool:
    """Whether a place is a URL of any scheme; a `Path` never is."""
    return isinstance(place, str) and _URL.match(place) is not None
