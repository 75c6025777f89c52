"""Many seeds in several processes, for a night: what each found, as soon as it is known."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from itertools import islice
from typing import Any

from diloco_node.errors import ConfigError
from diloco_node.lab.sim.seed_report import SimReport
from diloco_node.lab.sim.simulation import simulate

AHEAD = 2
"""Seeds a process that are handed out before they are asked for: a process never waits for the next one."""


def seed_range(text: str) -> tuple[int, int]:
    """First and last seed of `A..B`, or of one number. Raises ConfigError: it is something else, or empty."""
    first, dots, last = text.partition("..")
    if not first.isdecimal() or not (last if dots else first).isdecimal():
        raise ConfigError(f"seeds are given as A..B, both counted, not as {text!r}")
    low, high = int(first), int(last if dots else first)
    if low > high:
        raise ConfigError(f"seeds {text}: the first is beyond the last")
    return low, high


def reports(seeds: Iterable[int], *, jobs: int, **options: Any) -> Generator[SimReport, None, None]:
    """Run every seed; reports come in the order in which they are done. Close the iterator to end it early.

    Args:
        jobs: processes; 1 runs everything in this one. options: of `simulate`.
    """
    run, seeds = partial(simulate, **options), iter(seeds)
    if jobs == 1:
        yield from map(run, seeds)
        return
    # Not forked: a child of a process with threads may stand still for ever.
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        running: set[Future[SimReport]] = {pool.submit(run, seed) for seed in islice(seeds, AHEAD * jobs)}
        while running:
            futures, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(run, seed) for seed in islice(seeds, len(futures))}
            yield from (future.result() for future in futures)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
