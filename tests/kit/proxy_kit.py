"""A proxy of a learner on a bench, for tests."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from diloco_node.core.events import (
    Event,
    Note,
    OfferVersion,
)
from diloco_node.core.types import CarryMode
from diloco_node.daemon.learner.proxy import LearnerProxy
from diloco_node.daemon.learner.version_area import VersionArea
from diloco_node.shared_memory import MemoryStore, request_area
from diloco_node.wire.learner_link import (
    LINK_PROTOCOL,
    NEW_PROCESS,
    Attach,
    Report,
    ToLearner,
)
from tests.kit.node_kit import MANIFEST, SETTINGS, Tasks

SECOND = 1_000_000_000


FRAGMENTS = len(MANIFEST.fragments)


def attach(step: int = 0, tokens: int = 0, *, pid: int = 7) -> Attach:
    return Attach(LINK_PROTOCOL, pid, (), NEW_PROCESS, "", step, tokens, 0, (), ()).in_fragments(FRAGMENTS)


def report(step: int, tokens: int, *, loss: float | None = None, blocked_ns: int = 0) -> Report:
    return Report(step, tokens, loss, 50_000_000, blocked_ns, None, None, step, None)


class Bench:
    def __init__(self, memory: Path, carry: CarryMode = SETTINGS.carry) -> None:
        self.memory = memory
        self.said: list[ToLearner] = []
        self.posted: list[Event] = []
        self.notes: list[Note] = []
        self.now_ns = 0
        self.tasks = Tasks()
        self.synced: list[int] = []
        self.may_sync = asyncio.Event()
        self.may_sync.set()
        self.initial_states: list[int] = []
        self.side = LearnerProxy(
            manifest=MANIFEST,
            settings=replace(SETTINGS, carry=carry),
            parameters=None,  # type: ignore[arg-type] - nothing is offered here
            memory=partial(request_area, memory),
            send=lambda message: self.said.append(message) is None,
            post=self.posted.append,
            spawn=self.tasks.spawn,
            now_ns=lambda: self.now_ns,
            save_counters=self.sync,
            store_initial_state=self.store_initial_state,
            region="a",
            note=lambda note: self.notes.append(note),
        )

    async def sync(self, incarnation: int) -> None:
        await self.may_sync.wait()
        self.synced.append(incarnation)

    async def store_initial_state(self, area: VersionArea, generation: int) -> None:
        self.initial_states.append(generation)

    def offer(self, fragment: int, version: int) -> None:
        """As if the learner had been offered it."""
        self.side.version_area._offered[fragment] = OfferVersion(fragment, version, -1)
        self.side.version_area._lent_slots[fragment] = fragment

    def take_notes(self) -> str:
        texts, self.notes[:] = " | ".join(note.text for note in self.notes), []
        return texts

    def take(self) -> list[Event]:
        events, self.posted[:] = list(self.posted), []
        return events


@pytest.fixture
def bench() -> Iterator[Bench]:
    # A Unix socket's path is short; pytest's folders are not.
    folder = Path(tempfile.mkdtemp(prefix="dl-"))
    with MemoryStore(folder / "m.sock") as memory:
        bench_ = Bench(memory.path)
        yield bench_
        bench_.side.close()
    shutil.rmtree(folder)
