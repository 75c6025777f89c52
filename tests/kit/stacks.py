"""A bound for what must end by itself: what does not is reported with the stacks of all tasks and threads."""

import asyncio
import sys
import traceback
from collections.abc import Coroutine, Iterator
from typing import Any

STOP_S = 60.0
"""A stop that waits for nothing but this machine takes far less, on whatever machine."""


async def to_its_end(work: Coroutine[Any, Any, None], what: str, *, limit_s: float = STOP_S) -> None:
    """Await it, but not for ever.

    Raises:
        AssertionError: it hangs; says where each task and each thread stands.
    """
    task = asyncio.create_task(work, name=what)
    done, _ = await asyncio.wait((task,), timeout=limit_s)
    if not done:
        told = all_stacks()
        task.cancel()
        raise AssertionError(f"{what} did not end within {limit_s:.0f} s\n{told}")
    task.result()


def all_stacks() -> str:
    """Of every task its chain of coroutines down to what it waits for, and of every thread its stack."""
    lines = []
    for task in sorted(asyncio.all_tasks(), key=asyncio.Task.get_name):
        lines += [f"{task!r}, cancelled {task.cancelling()} times", *(f"    {one}" for one in _chain(task.get_coro()))]
    for number, frame in sys._current_frames().items():
        lines += [f"thread {number}", *(one.rstrip() for one in traceback.format_stack(frame))]
    return "\n".join(lines)


def _chain(one: Any) -> Iterator[str]:
    """What awaits what, outermost first. Coroutines of C extensions have no frame."""
    while one is not None:
        frame = next(
            (found for name in ("cr_frame", "gi_frame", "ag_frame") if (found := getattr(one, name, None))), None
        )
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}" if frame is not None else repr(one)
        one = next(
            (found for name in ("cr_await", "gi_yieldfrom", "ag_await") if (found := getattr(one, name, None))), None
        )
