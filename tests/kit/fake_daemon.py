"""A daemon for learner tests: the real LearnerServer and memory store, and a region of one that commits what it likes.

Runs in a thread with its own event loop, so that the learner under test can block as a real one does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import numpy as np

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.fragments import Manifest, build_manifest
from diloco_node.core.types import CarryMode, Codec, FragmentPosition, MergeRule
from diloco_node.daemon.learner.learner_server import LearnerServer
from diloco_node.numeric import F32
from diloco_node.shared_memory import MemoryStore, request_area
from diloco_node.storage.trained import allot_incarnation
from diloco_node.unix_sockets import Process
from diloco_node.wire.learner_link import (
    CONTRIBUTION_AREA,
    NEW_PROCESS,
    NO_SLOT,
    NO_SNAPSHOT,
    VERSION_AREA,
    Attach,
    Done,
    InitialState,
    OfferApplied,
    Report,
    SnapshotDenied,
    SnapshotReady,
    SnapshotRequested,
    Stop,
    ToDaemon,
    ToLearner,
    VersionOffered,
    Welcome,
    merge_rules,
    version_slots,
)
from tests.kit.shards_given import shards_given

T = TypeVar("T")
PATIENCE_S = 180.0


class FakeDaemon:
    """One life of a daemon. `start` again makes the next one on the same folder.

    Attributes:
        said: everything the learner said, in order. attaches: its Attach messages.
        theta: per fragment the newest global parameters; empty until the learner's initial state has arrived.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fragments: int = 2,
        codec: Codec = Codec.INT4,
        carry: CarryMode = CarryMode.CARRY,
        carry_steps_limit: int = 1000,
        theta: list[F32] | None = None,
        versions: list[int] | None = None,
        is_genesis_automatic: bool = True,
        global_step: int = 0,
        steps_max: int = 0,
        fragment_digests: tuple[bytes, ...] = (),
    ) -> None:
        self.folder = folder
        self.fragments = fragments
        self.codec = codec
        self.carry = carry
        self.carry_steps_limit = carry_steps_limit
        self.theta: list[F32] = theta or []
        self.versions = versions or [0] * fragments
        self.is_genesis_automatic = is_genesis_automatic
        self.global_step = global_step
        self.steps_max = steps_max
        self.fragment_digests = fragment_digests
        self.members: tuple[str, ...] = ("eu-west", "us-east", "us-west")
        self.said: list[ToDaemon] = []
        self.attaches: list[Attach] = []
        self.detached: list[str] = []
        self.manifest: Manifest | None = None
        self.incarnation = 0
        self._changed = threading.Condition()
        # By fragment the slots of what is offered, and of the learner's bases.
        self._lent: dict[int, int] = {}
        self._bases: dict[int, int] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server = LearnerServer(folder / "learner.sock", self)

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        self._on_loop(self._server.start)
        return self

    def __exit__(self, *_: object) -> None:
        self._on_loop(self._server.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def _on_loop(self, make: Callable[[], object]) -> None:
        future: Future[None] = Future()

        async def run() -> None:
            try:
                await make()  # type: ignore[misc]
                future.set_result(None)
            except Exception as error:  # noqa: BLE001 - handed to the waiting thread
                future.set_exception(error)

        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(run()))
        future.result(PATIENCE_S)

    # ---- LearnerHandler ----------------------------------------------------------------------------------------------

    def rejection_reason(self, attach: Attach, process: Process | None) -> str:
        return ""

    def learner_attached(self, attach: Attach) -> None:
        self.manifest = build_manifest(merge_rules(attach.tensors, MergeRule.RDA), self.fragments)
        whole = attach.in_fragments(self.fragments)
        self._lent, self._bases = {}, {index: slot for index, slot in enumerate(attach.slots) if slot != NO_SLOT}
        self.incarnation = attach.incarnation
        if attach.incarnation == NEW_PROCESS:
            self.incarnation = allot_incarnation(self.folder)
        self._server.send(
            Welcome(
                region="us-east",
                region_index=1,
                regions=("eu-west", "us-east", "us-west"),
                incarnation=self.incarnation,
                run_id="run-1",
                fragments=self.fragments,
                sync_every=4,
                merge=MergeRule.RDA,
                codec_up=self.codec,
                carry=self.carry,
                carry_steps_limit=self.carry_steps_limit,
                global_step=self.global_step,
                manifest_digest=self.manifest.digest,
                wants_initial_state=not self.theta,
                state_dir=str(self.folder),
                steps_max=self.steps_max,
                fragment_digests=self.fragment_digests,
            )
        )
        self._server.send(shards_given("run-1", "us-east", self.members))
        if self.theta:
            self._offer_all(whole)
        self._note(lambda: self.attaches.append(attach))

    def _offer_all(self, attach: Attach) -> None:
        for index, position in enumerate(attach.positions):
            if position.base_version < self.versions[index]:
                self._offer(index, NO_SNAPSHOT)

    def on_learner_message(self, message: ToDaemon) -> None:
        if isinstance(message, Attach):
            self.learner_attached(message)
            return
        if isinstance(message, InitialState) and not self.theta:
            parts = zip(self._slots(), self.manifest.fragments, strict=False) if self.manifest else []
            self.theta = [slot[: fragment.size].copy() for slot, fragment in parts]
            if self.is_genesis_automatic:
                for index in range(self.fragments):
                    self._offer(index, NO_SNAPSHOT)
        if isinstance(message, OfferApplied) and message.version >= self.versions[message.fragment]:
            self._lent.pop(message.fragment, None)
            if message.slot != NO_SLOT:
                self._bases[message.fragment] = message.slot
        self._note(lambda: self.said.append(message))

    def learner_detached(self, reason: str) -> None:
        self._note(lambda: self.detached.append(reason))

    def _note(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    # ---- what a test does with it ------------------------------------------------------------------------------------

    def send(self, message: ToLearner) -> None:
        self._loop.call_soon_threadsafe(self._server.send, message)

    def want(self, fragment: int, *, version: int | None = None, base: int | None = None) -> None:
        base = self.versions[fragment] if base is None else base
        self.send(SnapshotRequested(fragment, base + 1 if version is None else version, base))

    def commit(self, fragment: int, theta: F32, included_snapshot: int, *, version: int | None = None) -> None:
        """The next version of a fragment, offered to the learner."""
        self.theta[fragment] = theta.astype(np.float32)
        self.versions[fragment] = self.versions[fragment] + 1 if version is None else version
        self._loop.call_soon_threadsafe(self._offer, fragment, included_snapshot)

    def _offer(self, fragment: int, included_snapshot: int) -> None:
        slots = self._slots()
        taken = {*self._bases.values(), *self._lent.values()}
        # With too many offers open, the one before of the fragment is written over.
        slot = next((slot for slot in range(len(slots)) if slot not in taken), self._lent.get(fragment, NO_SLOT))
        self._lent[fragment] = slot
        slots[slot, : self.theta[fragment].size] = self.theta[fragment]
        self._server.send(VersionOffered(fragment, self.versions[fragment], included_snapshot, slot=slot))

    def stop_learner(self, reason: str = "the run is finished", versions: tuple[int, ...] = ()) -> None:
        self.send(Stop(reason, versions))

    def wait_for(self, kind: type[T], count: int = 1) -> T:
        """The count-th message of a kind, when it has come."""
        deadline_s = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                messages = [message for message in self.said if isinstance(message, kind)]
                if len(messages) >= count:
                    return messages[count - 1]
                assert self._changed.wait(deadline_s - time.monotonic()), (
                    f"no {kind.__name__} number {count}: {self.said[-5:]}"
                )

    def wait_detached(self) -> None:
        """Wait until a learner is gone: all that it said is in `said` then."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.detached, PATIENCE_S), "the learner stays"

    def wait_attached(self, count: int = 1) -> Attach:
        deadline_s = time.monotonic() + PATIENCE_S
        with self._changed:
            while len(self.attaches) < count:
                assert self._changed.wait(deadline_s - time.monotonic()), "no learner came"
            return self.attaches[count - 1]

    def encoded(self, fragment: int) -> bytes:
        """What lies in the fragment's place of the contribution area."""
        assert self.manifest is not None
        sizes = [FragmentBlocks(fragment.piece_sizes, self.codec).encoded_bytes for fragment in self.manifest.fragments]
        area = request_area(self.folder / "memory.sock", CONTRIBUTION_AREA, sum(sizes))
        start = sum(sizes[:fragment])
        return bytes(area[start : start + sizes[fragment]])

    def decoded(self, fragment: int) -> F32:
        """The outer gradient in the contribution area."""
        assert self.manifest is not None
        blocks = FragmentBlocks(self.manifest.fragments[fragment].piece_sizes, self.codec)
        out = np.zeros(blocks.values, np.float32)
        kernels.decode(blocks, self.encoded(fragment), out)
        return out

    def blocks(self, fragment: int) -> FragmentBlocks:
        assert self.manifest is not None
        return FragmentBlocks(self.manifest.fragments[fragment].piece_sizes, self.codec)

    def _slots(self) -> F32:
        assert self.manifest is not None
        slots, values = version_slots(self.manifest)
        area = request_area(self.folder / "memory.sock", VERSION_AREA, 4 * slots * values)
        return np.frombuffer(area, np.float32).reshape(slots, values)


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run the learner beside the test."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


__all__ = [
    "Done",
    "FakeDaemon",
    "FragmentPosition",
    "MemoryStore",
    "OfferApplied",
    "Report",
    "SnapshotDenied",
    "SnapshotReady",
    "in_background",
]
