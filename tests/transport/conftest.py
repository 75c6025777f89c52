"""What most tests of the transport use."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.transport_kit import Mesh, meshed


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """Transports of one run, which leave no task behind."""
    async with meshed(tmp_path) as made:
        yield made
