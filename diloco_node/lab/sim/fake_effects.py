"""Effects of the fake daemon when its core wants something done: the simulator's `daemon/effects/effects.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from diloco_node.core import events as ev
from diloco_node.core import messages as msg
from diloco_node.core.projections import ContributionsProjected, Project, ProjectContributions, Projected, Projection
from diloco_node.core.types import Stripe
from diloco_node.lab.sim.disk import LedgerWrite
from diloco_node.lab.sim.fake_learner import Offer
from diloco_node.lab.sim.fake_tensors import byte_range
from diloco_node.lab.sim.witness_bucket import WITNESS
from diloco_node.lab.sim.world import LOCAL_NS, MS
from diloco_node.wire.envelope import encode_control

if TYPE_CHECKING:
    from diloco_node.lab.sim.host import Host


class FakeEffects:
    """Carries out the effects of one host's core, in virtual time.

    Attributes:
        handlers: what is done for each kind of effect; tests put others in.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.handlers: dict[type, Callable[[Any], None]] = {
            ev.Send: self._send,
            ev.PersistLedger: self._persist,
            ev.TakeSnapshot: self._take_snapshot,
            ev.SendContribution: self._send_contribution,
            ev.ReduceStripe: partial(self._do_soon, self._report_reduction),
            ev.SendMerged: self._send_merged,
            ev.StorePayload: self._store_payload,
            Project: self._project,
            ProjectContributions: self._project_contributions,
            ev.ApplyVersion: partial(self._do_soon, self._applied),
            ev.AdoptState: partial(self._do_soon, self._adopted),
            ev.OfferVersion: self._offer,
            ev.FetchPayload: host.fetches.ask,
            ev.FetchState: host.fetches.ask,
            ev.PruneFiles: lambda effect: host.disk.prune(effect.fragment, effect.keep_from_version),
            ev.SetStatesAside: self._set_aside,
            ev.CloseBallot: self._close_ballot,
            ev.StopLearner: self._stop_learner,
            ev.WriteFinal: self._write_final,
            ev.Note: lambda effect: host.world.note(host.name, effect, effect.kind.encode()),
        }

    def perform(self, effect: ev.Effect) -> None:
        """Start it; what comes of it is told to the core later."""
        self.handlers[type(effect)](effect)

    def _send(self, effect: ev.Send) -> None:
        if effect.peer == WITNESS and self._host.witness is not None:
            self._host.witness.send(effect.message)
            return
        self._host.network.send(self._host.name, effect.peer, encode_control(effect.message))

    def _persist(self, effect: ev.PersistLedger) -> None:
        write = LedgerWrite(effect.term, effect.voted_for, effect.truncate_from, effect.entries, effect.base)
        self._host.write_ledger(write, lambda: self._host.post(ev.LedgerPersisted(effect.token)))

    def _store_payload(self, effect: ev.StorePayload) -> None:
        payload = self._host.plane.assemble(effect)
        if payload is None:
            self._host.post(ev.PayloadNotStored(effect.ballot, effect.fragment, effect.version))
        else:
            self._host.write_payload(effect.fragment, effect.version, effect.digest, payload)

    def _project(self, effect: Project) -> None:
        plane, settings = self._host.plane, self._host.setup.settings
        pairs: list[tuple[float, float]] = []
        row: list[tuple[float, float]] = []
        if effect.stripes:
            body = plane.merged_payload(effect.ballot).data
            pairs = plane.project(effect.windows, effect.fragment, body, settings.codec_down)
        snapshot = self._host.contribution_area.get(effect.fragment)
        if effect.contribution is not None and snapshot is not None and snapshot.contribution == effect.contribution:
            row = plane.project(effect.windows, effect.fragment, snapshot.encoded, settings.codec_up)
        sums, errors = tuple(value for value, _ in pairs), tuple(error for _, error in pairs)
        answer = Projected(effect.ballot, Projection(sums, errors, tuple(value for value, _ in row)))
        self._host.after(LOCAL_NS, self._host.post, answer)

    def _project_contributions(self, effect: ProjectContributions) -> None:
        rows = self._host.plane.project_contributions(effect)
        answer = ContributionsProjected(effect.fragment, effect.version, effect.windows, rows)
        self._host.after(LOCAL_NS, self._host.post, answer)

    def _take_snapshot(self, effect: ev.TakeSnapshot) -> None:
        if self._host.learner is None:
            self._host.after(
                LOCAL_NS, self._host.post, ev.SnapshotRefused(effect.fragment, effect.version, "no learner is attached")
            )
            return
        self._host.world.after(LOCAL_NS, self._host.learner.life, self._host.learner.ask_snapshot, effect)

    def _send_contribution(self, effect: ev.SendContribution) -> None:
        snapshot = self._host.contribution_area.get(effect.contribution.fragment)
        if snapshot is None or snapshot.contribution != effect.contribution:
            self._host.complain(
                f"asked to send a contribution that is not in the contribution area: {effect.contribution}"
            )
            return
        layout, codec = self._host.setup.layouts[effect.contribution.fragment], self._host.setup.settings.codec_up
        for index, stripe in enumerate(effect.stripes):
            if index in effect.skip:
                continue
            low, high = byte_range(layout, stripe.block_start, stripe.block_stop, codec)
            header = msg.ContributionStripe(
                effect.ballot, index, effect.version, effect.contribution, stripe.block_start, stripe.block_stop
            )
            body = snapshot.encoded[low:high]
            if stripe.reducer == self._host.name:
                self._host.plane.keep_contribution(header, body)
                blocks = (stripe.block_start, stripe.block_stop)
                self._host.post(ev.ContributionStripeArrived(effect.ballot, index, effect.contribution, blocks))
            else:
                self._host.transfer(stripe.reducer, header, body)

    def _do_soon(self, work: Callable[[Any], None], effect: ev.Effect) -> None:
        factor = self._host.step_factor if isinstance(effect, ev.ApplyVersion) else 1
        self._host.after(factor * self._host.world.draw_ns(MS // 2, 4 * MS), work, effect)

    def _report_reduction(self, effect: ev.ReduceStripe) -> None:
        answer = self._host.plane.reduce(effect)
        if answer is None:
            return
        self._host.world.note(self._host.name, answer, answer.digest)
        self._host.post(answer)
        cut = Stripe(self._host.name, effect.block_start, effect.block_stop)
        name = (effect.ballot, effect.stripe, effect.fragment, effect.version)
        self._host.post(ev.MergedStripeArrived(*name, answer.digest, cut, answer.squared_norms))

    def _send_merged(self, effect: ev.SendMerged) -> None:
        blocks = self._host.plane.merged_part(effect.header.ballot, effect.header.stripe)
        if blocks is None:
            self._host.complain(f"asked to send a merged stripe that is not here: {effect}")
            return
        for peer in effect.peers:
            self._host.transfer(peer, effect.header, blocks.encoded)

    def _close_ballot(self, effect: ev.CloseBallot) -> None:
        self._host.plane.close(effect)

    def _applied(self, effect: ev.ApplyVersion) -> None:
        body = effect.body
        if self._host.plane.apply(body):
            self._version_ready(body.fragment, body.version, is_on_disk=False)

    def _adopted(self, effect: ev.AdoptState) -> None:
        if self._host.plane.adopt(effect.fragment, effect.version):
            self._version_ready(effect.fragment, effect.version, is_on_disk=True)

    def _version_ready(self, fragment: int, version: int, *, is_on_disk: bool) -> None:
        digest = self._host.plane.digest(fragment)
        self._host.world.note(self._host.name, f"version {fragment}/{version}", digest)
        self._host.post(ev.VersionApplied(fragment, version))
        self._host.after(MS, self._host.post, ev.DigestComputed(fragment, version, digest))
        if not is_on_disk and version % self._host.setup.settings.checkpoint_versions == 0:
            state = self._host.plane.state(fragment)
            self._host.write_file(
                lambda: self._host.disk.keep_state(fragment, state),
                lambda: self._host.post(ev.CheckpointWritten(fragment, version, digest)),
            )

    def _set_aside(self, effect: ev.SetStatesAside) -> None:
        self._host.disk.set_states_aside(effect.fragment, effect.version_min)
        self._host.after(MS, self._host.post, ev.StatesRenamed(effect.fragment))

    def _offer(self, effect: ev.OfferVersion) -> None:
        if self._host.plane.versions[effect.fragment] != effect.version:
            at = self._host.plane.versions[effect.fragment]
            self._host.complain(f"asked to offer {effect.fragment}/{effect.version} while Theta is at {at}")
            return
        if self._host.learner is None:
            return
        offer = Offer(
            effect.fragment, effect.version, effect.included_snapshot, self._host.plane.theta[effect.fragment]
        )
        self._host.world.after(LOCAL_NS, self._host.learner.life, self._host.learner.offer, offer)

    def _stop_learner(self, effect: ev.StopLearner) -> None:
        if self._host.learner is not None:
            self._host.world.after(LOCAL_NS, self._host.learner.life, self._host.learner.stop, effect.reason)

    def _write_final(self, _: ev.WriteFinal) -> None:
        self._host.write_file(
            lambda: setattr(self._host, "has_final", True), lambda: self._host.post(ev.FinalWritten())
        )
