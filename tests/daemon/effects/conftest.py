"""A daemon's effects on a bench, for each test its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.effects_kit import Bench
from tests.kit.node_kit import make_parameters


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    parameters, store = await make_parameters(tmp_path)
    bench_ = Bench(tmp_path, parameters, store)
    yield bench_
    bench_.tasks.running and await bench_.tasks.finish()
    assert bench_.tasks.errors == []
    store.close()
