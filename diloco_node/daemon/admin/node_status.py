"""The status of a node: its document, its state in one word, and why it does not train in step."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.region import RegionCore
from diloco_node.daemon.admin.run_facts import RunFacts
from diloco_node.daemon.admin.status_document import region_status
from diloco_node.daemon.effects.effects import Effects
from diloco_node.daemon.learner.proxy import LearnerProxy
from diloco_node.daemon.learner.reception import Reception
from diloco_node.daemon.node_runtime import NodeRuntime
from diloco_node.daemon.pump import Pump
from diloco_node.daemon.region_budget import BudgetWatch
from diloco_node.measure.measuring import Measuring
from diloco_node.transport.transport import GrpcTransport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeStatus:
    """Reads the node's parts, and changes none of them."""

    runtime: NodeRuntime
    manifest: Manifest
    core: RegionCore
    learner: LearnerProxy
    reception: Reception
    transport: GrpcTransport
    measuring: Measuring
    effects: Effects
    facts: RunFacts
    pump: Pump
    budget_watch: BudgetWatch

    def not_ready_reason(self) -> str:
        """Why this region does not train in step with a leader; empty if it does, or has finished."""
        view = self.core.view()
        if view.is_final or (silence := self.learner.silence()):
            return "" if view.is_final else silence
        if not view.leader or self.reception.waits_for_peers:
            own_steps, now_ns = self.learner.steps_total, self.runtime.now_ns()
            return self.core.end.lack(view.leader, now_ns=now_ns, own_steps=own_steps) or view.ledger_reason
        if min(view.versions) < 0:
            return "waits for the first parameters (genesis)"
        return "" if view.learner is not None else "no learner is attached"

    def state(self) -> str:
        """The state in one word, as the status document has it."""
        view = self.core.view()
        if view.is_final or view.finished:
            return "finished"
        if view.is_ending:
            return "finishing"
        return "waiting" if self.not_ready_reason() else "training"

    def document(self) -> dict[str, Any]:
        """The status document."""
        facts, store = self.facts.document(self.learner), self.runtime.store
        return region_status(
            self.core.view(),
            run_id=self.runtime.spec.run_id,
            state=self.state(),
            learner=self.learner,
            transport=self.transport,
            notes=self.runtime.notes,
            round_log=self.facts.rounds.rows(),
            now_ns=self.runtime.now_ns(),
            extra={
                "pids": {"supervisor": os.getppid(), "daemon": os.getpid(), "learner": self.learner.pid},
                "budget_warning": self.budget_watch.text,
                "merge_pace": self.budget_watch.pace(),
                "buffered_bytes": self.effects.stripes.table.buffered_bytes(),
                "events": self.pump.events_total,
                "tasks": len(asyncio.all_tasks()),
                "manifest_digest": self.manifest.digest,
                **facts,
                "disk": facts["disk"] | {"files_set_aside": len(store.set_aside), "ledger_cut_bytes": store.cut_bytes},
                "measurement": self.measuring.describe(),
                "parameters": self.manifest.size,
            },
        )
