"""Fetches of a region: the fake shell's part of asking peers for payloads and states, and of serving them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_node.core import events as ev
from diloco_node.core import messages as msg
from diloco_node.lab.sim import fake_tensors as tensors
from diloco_node.lab.sim.dataplane import block_ranges
from diloco_node.lab.sim.disk import DiskPayload, DiskState
from diloco_node.lab.sim.witness_bucket import WITNESS
from diloco_node.lab.sim.world import SECOND
from diloco_node.wire.envelope import encode_control

if TYPE_CHECKING:
    from diloco_node.lab.sim.host import Host

FETCH_SILENCE_NS = 4 * SECOND
"""A donor that has not sent what was asked for by then has forgotten it."""


class FakeFetches:
    """Both sides of a fetch, for one region.

    Attributes:
        is_busy: it sends nothing to anybody, and says so.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.is_busy = False
        # Orders that are not answered yet, by peer, fragment, and whether a payload is asked for.
        self._open: dict[tuple[str, int, bool], ev.FetchPayload | ev.FetchState] = {}

    def ask(self, effect: ev.FetchPayload | ev.FetchState) -> None:
        """Send the want; every order is answered once."""
        is_payload = isinstance(effect, ev.FetchPayload)
        key = (effect.peer, effect.fragment, is_payload)
        if key in self._open:
            self._failed(key, "asked again")
        self._open[key] = effect
        if isinstance(effect, ev.FetchPayload) and effect.peer == WITNESS and self._host.witness is not None:
            self._host.witness.fetch(effect)
            return
        kind = msg.PayloadRequested if is_payload else msg.StateRequested
        want = kind(effect.fragment, effect.version, effect.digest)
        self._host.network.send(self._host.name, effect.peer, encode_control(want))
        self._host.after(FETCH_SILENCE_NS, self._late, key, effect)

    def _late(self, key: tuple[str, int, bool], order: ev.FetchPayload | ev.FetchState) -> None:
        if self._open.get(key) is order:
            self._failed(key, "no answer in time")

    def _failed(self, key: tuple[str, int, bool], reason: str) -> None:
        order = self._open.pop(key, None)
        if order is not None:
            self._host.post(ev.FetchFailed(key[0], key[1], order.version, reason))

    def peer_lost(self, peer: str) -> None:
        """The link is down: nothing more will come from there."""
        for key in sorted(key for key in self._open if key[0] == peer):
            self._failed(key, "link lost")

    def forget(self) -> None:
        """A new daemon has asked for nothing."""
        self._open.clear()

    def refused(self, peer: str, message: msg.Refused) -> None:
        """The peer can't help."""
        for is_payload in (True, False):
            order = self._open.get((peer, message.fragment, is_payload))
            if order is not None and order.version == message.version:
                self._failed((peer, message.fragment, is_payload), message.reason)

    def arrived(self, peer: str, header: msg.Payload | msg.State, body: bytes) -> None:
        """Check and store what came."""
        key = (peer, header.fragment, isinstance(header, msg.Payload))
        order = self._open.get(key)
        if order is None or (header.version, header.digest) != (order.version, order.digest):
            # Late: the answer to an earlier question.
            return
        del self._open[key]
        if isinstance(order, ev.FetchPayload):
            payload = DiskPayload(block_ranges(order.stripes), body)
            if self._host.plane.digest_of(header.fragment, payload) != order.digest:
                self._host.post(ev.FetchFailed(peer, header.fragment, header.version, "other bytes than its digest"))
                return
            blocks = (0, self._host.setup.layouts[header.fragment].block_count)
            norms = self._host.plane.norms_of(header.fragment, blocks, body)
            self._host.write_payload(header.fragment, header.version, header.digest, payload, norms)
            return
        state = DiskState(header.version, *tensors.split_state(body))
        if state.digest() != order.digest:
            self._host.post(ev.FetchFailed(peer, header.fragment, header.version, "not what the ledger names"))
            return
        self._host.write_file(
            lambda: self._host.disk.keep_state(header.fragment, state),
            lambda: self._host.post(ev.StateStored(header.fragment, header.version, header.digest)),
        )

    def serve(self, peer: str, message: msg.PayloadRequested | msg.StateRequested) -> None:
        """A peer asks."""
        name, disk = (message.fragment, message.version, message.digest), self._host.disk
        state = disk.older_states.get((message.fragment, message.version))
        if self.is_busy:
            state = None
        elif isinstance(message, msg.PayloadRequested):
            if name in disk.payloads:
                self._host.transfer(peer, msg.Payload(*name), disk.payloads[name].data)
                return
        elif state is not None and state.digest() == message.digest:
            self._host.transfer(peer, msg.State(*name), state.theta.tobytes() + state.momentum.tobytes())
            return
        refusal = msg.Refused(message.fragment, message.version, "busy" if self.is_busy else "gone")
        self._host.network.send(self._host.name, peer, encode_control(refusal))
