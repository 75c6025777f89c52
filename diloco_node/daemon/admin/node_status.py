"""The status of a node: its document, its state in one word, and why it does not train in step."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from diloco_node.core.view import RegionView
from diloco_node.daemon.admin.members_document import MemberSigns, members_document
from diloco_node.daemon.admin.status_document import region_status
from diloco_node.health.alerts import STATE_BYTES

if TYPE_CHECKING:  # which has one of these
    from diloco_node.daemon.node import Node


class NodeStatus:
    """Reads the node's parts, and changes none of them."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def not_ready_reason(self, view: RegionView | None = None) -> str:
        """Why this region does not train in step with a leader; empty if it does, or has finished."""
        view = view or self._node.core.view()
        if view.is_final or (silence := self._node.learner.silence()):
            return "" if view.is_final else silence
        if not view.leader or self._node.reception.waits_for_peers:
            own_steps, now_ns = self._node.learner.steps_total, self._node.runtime.now_ns()
            if end_wait := self._node.core.end.unclosed_end(view.leader, now_ns=now_ns, own_steps=own_steps):
                return end_wait
            return self._behind(view) or view.ledger_reason
        if min(view.versions) < 0:
            return "waits for the first parameters (genesis)"
        return "" if view.learner is not None else "no learner is attached"

    def _behind(self, view: RegionView) -> str:
        """How far a joiner is behind; empty where something else is the reason to wait."""
        return self._node.catch_up.text if view.leader and not view.finished else ""

    def _state(self, view: RegionView) -> str:
        """The state in one word."""
        if view.is_final:
            return "finished"
        if view.finished or view.is_ending:  # what is stopped before the final model is on disk has not finished
            return "finishing"
        return "waiting" if self.not_ready_reason(view) else "training"

    def document(self) -> dict[str, Any]:
        """The status document."""
        node, runtime = self._node, self._node.runtime
        facts, store, view = node.facts.document(node.learner), runtime.store, node.core.view()
        own = {
            "pids": {"supervisor": os.getppid(), "daemon": os.getpid(), "learner": node.learner.pid},
            "budget_warning": node.budget_watch.text,
            "merge_pace": node.budget_watch.pace(),
            "buffered_bytes": node.effects.stripes.table.buffered_bytes(),
            "events": node.pump.events_total,
            "tasks": len(asyncio.all_tasks()),
            "manifest_digest": node.parameters.manifest.digest,
            **facts,
            **({"reason": behind} if (behind := self._behind(view)) else {}),
            "members": members_document(node.core.ledger.disks, self._signs(view)),
            "disk": facts["disk"] | {"files_set_aside": len(store.set_aside), "ledger_cut_bytes": store.cut_bytes},
            "measurement": node.measuring.describe(),
            "parameters": node.parameters.manifest.size,
        }
        return region_status(node, view, self._state(view), own)

    def _signs(self, view: RegionView) -> MemberSigns:
        node = self._node
        held = zip(node.parameters.manifest.fragments, node.core.versions.held, strict=True)
        return MemberSigns(
            view.region,
            frozenset(peer.region for peer in view.peers if peer.is_alive) | node.witness.there,
            frozenset(peer for peer, link in node.transport.peer_status().items() if link.certificate is not None),
            STATE_BYTES * sum(fragment.size for fragment, version in held if version >= 0),
            STATE_BYTES * node.parameters.manifest.size,
            node.facts.dates.since_unix,
            node.core.history.account.shards.waiting(),
            node.witness.fault,
            node.catch_up.text,
            bool(view.finished),
            frozenset(name for peer in view.peers if peer.is_alive for name in peer.hears),
        )
