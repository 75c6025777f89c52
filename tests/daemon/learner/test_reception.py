"""Who is welcomed when: a learner that would train past the run's end waits, and is told why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core.types import RunSettings
from diloco_node.daemon.learner import reception as reception_module
from diloco_node.daemon.learner.reception import Reception
from diloco_node.errors import StorageError
from diloco_node.wire.learner_link import LINK_PROTOCOL, NEW_PROCESS, NO_SNAPSHOT, UNATTACHED, Attach
from tests.kit.node_kit import MANIFEST

LACK = "the run is at its end here, and no majority is there to close it"


@pytest.mark.parametrize(
    ("incarnation", "lack", "reason"),
    [(NEW_PROCESS, LACK, LACK), (NEW_PROCESS, "", "welcomed"), (3, LACK, "welcomed")],
    ids=["a new process waits", "before the end", "one that trains goes on"],
)
async def test_a_new_process_past_the_end_waits_for_a_majority(
    monkeypatch: pytest.MonkeyPatch, incarnation: int, lack: str, reason: str
) -> None:
    refusals: list[tuple[str, bool]] = []
    tasks: list[Any] = []

    async def read(*_: object) -> None:
        raise StorageError("welcomed")  # the next that a welcome asks for

    monkeypatch.setattr(reception_module, "in_thread", read)
    runtime: Any = SimpleNamespace(
        spec=SimpleNamespace(settings=RunSettings(), run_id="run"),
        notes=SimpleNamespace(add=lambda _: None),
        spawn=lambda work, _: tasks.append(work),
        threads=SimpleNamespace(disk=None),
        now_ns=lambda: 0,
        learner_server=SimpleNamespace(refuse=lambda text, *, is_final: refusals.append((text, is_final))),
    )
    core: Any = SimpleNamespace(
        may_allot_incarnation=True,
        incarnation_min=1,
        ledger=SimpleNamespace(leader=""),
        end=SimpleNamespace(lack=lambda _leader, *, now_ns: lack),
    )
    learner: Any = SimpleNamespace(attach_fault=lambda *_, **__: "")
    fragments = len(MANIFEST.fragments)
    positions = () if incarnation == NEW_PROCESS else (UNATTACHED,) * fragments
    snapshots = () if incarnation == NEW_PROCESS else (NO_SNAPSHOT,) * fragments
    attach = Attach(LINK_PROTOCOL, 1, MANIFEST.tensors, incarnation, "", 0, 0, 0, positions, snapshots)
    Reception(runtime, MANIFEST, core, learner).on_message(attach)
    await tasks[0]
    assert refusals == [(reason, False)]
