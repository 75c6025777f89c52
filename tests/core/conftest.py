"""What most tests of the core use."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """For the faults of a simulated run."""
    with pytest.MonkeyPatch.context() as context:
        yield context
