"""What hangs is told with its stacks, long before pytest's own limit."""

import asyncio

import pytest

from tests.kit.stacks import to_its_end


async def test_what_does_not_end_is_told_with_all_that_it_waits_for() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    async def stop() -> None:
        try:
            await waits_for_nobody()
        except asyncio.CancelledError:
            await waits_for_nobody()  # as who swallows a cancellation

    with pytest.raises(AssertionError, match=r"the end did not end within") as found:
        await to_its_end(stop(), "the end", limit_s=0.01)
    told = str(found.value)
    functions = [line.rpartition(" ")[2] for line in told.splitlines() if line.startswith("    /")]
    assert "stop waits_for_nobody wait" in " ".join(functions), "each awaits the next"
    assert "\nthread " in told


async def test_what_fails_fails_as_it_did() -> None:
    async def stop() -> None:
        raise ValueError("a fault of its own")

    with pytest.raises(ValueError, match="its own"):
        await to_its_end(stop(), "the end")
