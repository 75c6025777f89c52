"""The status of a node: its document, its state in one word, and why it does not train in step."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.region import RegionCore
from diloco_node.core.view import RegionView
from diloco_node.daemon.admin.members_document import MemberSigns, members_document
from diloco_node.daemon.admin.run_facts import RunFacts
from diloco_node.daemon.admin.status_document import region_status
from diloco_node.daemon.effects.effects import Effects
from diloco_node.daemon.learner.proxy import LearnerProxy
from diloco_node.daemon.learner.reception import Reception
from diloco_node.daemon.node_runtime import NodeRuntime
from diloco_node.daemon.pump import Pump
from diloco_node.daemon.region_budget import BudgetWatch
from diloco_node.daemon.witness_link import WitnessLink
from diloco_node.health.alerts import STATE_BYTES
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
    witness: WitnessLink

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
        facts, store, view = self.facts.document(self.learner), self.runtime.store, self.core.view()
        return region_status(
            view,
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
                "members": members_document(self.core.ledger.disks, self._signs(view)),
                "disk": facts["disk"] | {"files_set_aside": len(store.set_aside), "ledger_cut_bytes": store.cut_bytes},
                "measurement": self.measuring.describe(),
                "parameters": self.manifest.size,
            },
        )

    def _signs(self, view: RegionView) -> MemberSigns:
        held = zip(self.manifest.fragments, view.versions, strict=True)
        return MemberSigns(
            view.region,
            frozenset(peer.region for peer in view.peers if peer.is_alive) | self.witness.there,
            frozenset(peer for peer, link in self.transport.peer_status().items() if link.certificate is not None),
            STATE_BYTES * sum(fragment.size for fragment, version in held if version >= 0),
            STATE_BYTES * self.manifest.size,
            self.facts.dates.since_unix,
            self.core.history.account.shards.waiting(),
            self.witness.fault,
        )
