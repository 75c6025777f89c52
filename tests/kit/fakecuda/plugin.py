"""`pytest -p tests.kit.fakecuda.plugin`: tests run on fake devices, and make their tensors there.

A test that can't run on one says why: `@pytest.mark.no_device("reason")`. Files that know of no tensor are left out.
"""

from collections.abc import Iterator
from typing import Final

import pytest

from tests.kit.fakecuda import fake_device
from tests.kit.fakecuda.library import NoFakeDevice

TENSORS: Final = frozenset({"torch", "Toy", "LearnerFragments"})
"""Names of a file whose tests hold tensors."""

_missing = ""
try:
    fake_device.install()
except NoFakeDevice as error:
    _missing = str(error)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    strangers = {item for item in items if TENSORS.isdisjoint(vars(getattr(item, "module", object)))}
    config.hook.pytest_deselected(items=[*strangers])
    items[:] = [item for item in items if item not in strangers]
    for item in items:
        mark = item.get_closest_marker("no_device")
        if _missing or mark is not None:
            item.add_marker(pytest.mark.skip(reason=_missing or f"not on a device: {mark.args[0] if mark else ''}"))


@pytest.fixture(autouse=True)
def _on_a_device() -> Iterator[None]:
    """Tensors lie there unless a test says otherwise, and nothing that ran on it may have raced."""
    import torch

    if not fake_device.is_installed():
        yield
        return
    fake_device.schedule("late")
    fake_device.reset()
    torch.set_default_device("cuda")
    try:
        yield
    finally:
        torch.set_default_device(None)
    torch.cuda.synchronize()
    assert not fake_device.hazards()
