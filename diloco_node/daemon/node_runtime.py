"""Parts of the daemon's process that its node works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diloco_node.daemon.admin.status_document import NoteBook
from diloco_node.daemon.learner.learner_server import LearnerServer
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.work import Spawn, Threads
from diloco_node.storage.store import RegionStore


@dataclass(frozen=True, slots=True)
class NodeRuntime:
    """Parts of the process that exist before the model is known, and outlive each node.

    now_ns: monotonic. end: ends the process; None: nobody needs it any more, else what broke it.
    """

    spec: NodeSpec
    store: RegionStore
    threads: Threads
    learner_server: LearnerServer
    notes: NoteBook
    spawn: Spawn
    now_ns: Callable[[], int]
    end: Callable[[BaseException | None], None]
