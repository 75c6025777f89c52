"""The wiring of a region: core, pump, effects, links and learner, once the model is known."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

from diloco_node.core import events as ev
from diloco_node.core.events import Note
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.messages import BulkHeader, Message
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.region import RegionCore
from diloco_node.core.rounds.extension import WAY_ON
from diloco_node.core.types import EXPELLED, NO_LIMITS, DiskNamedBody, RateLimits, Recovered, RevokedBody
from diloco_node.core.view import RegionView
from diloco_node.daemon.admin.members_document import member_order
from diloco_node.daemon.admin.node_status import NodeStatus
from diloco_node.daemon.admin.run_facts import RunFacts
from diloco_node.daemon.catch_up import CatchUp
from diloco_node.daemon.console import console_line
from diloco_node.daemon.effects.effects import build_effects
from diloco_node.daemon.end_wishes import EndWishes
from diloco_node.daemon.final_model import Linger, write_final
from diloco_node.daemon.learner.proxy import LearnerProxy
from diloco_node.daemon.learner.reception import Reception
from diloco_node.daemon.learner.version_area import VersionArea
from diloco_node.daemon.node_runtime import NodeRuntime
from diloco_node.daemon.parameters import Parameters
from diloco_node.daemon.presence import Presence
from diloco_node.daemon.pump import Pump
from diloco_node.daemon.region_budget import BUDGET_POLL_S, BudgetWatch
from diloco_node.daemon.run_record import since_and_model
from diloco_node.daemon.settings_watch import SettingsWatch, settings_order
from diloco_node.daemon.stopping import DRAIN_SHARE
from diloco_node.daemon.witness_link import WitnessLink, WitnessRoute
from diloco_node.daemon.work import in_thread
from diloco_node.errors import ConfigError, IdentityError, PeerCertificateRefused, StorageError
from diloco_node.measure.measurement import MeasureCommand
from diloco_node.measure.measuring import Measuring
from diloco_node.numeric import NS_PER_S
from diloco_node.shared_memory import request_area
from diloco_node.storage.trained import read_trained, save_trained
from diloco_node.ticks import to_tick_s
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.credentials import fingerprint_text, pem_to_der
from diloco_node.transport.intake import messages_per_s
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire.measure_messages import MeasureMessage, Probe
from diloco_node.wire.run_shown import MemberShown, RunShown
from diloco_node.wire.tensor_listing import pack_tensors

END_POLL_S: Final = 0.1
"""Between two looks at whether a leader that drains, or a region that has finished, may go."""

COUNTERS_EVERY_S: Final = 5.0
"""Between two times that the learner's counters are saved. Rounds save them, too."""


class Node:
    """A region, assembled. All methods run on the event loop.

    Attributes:
        parameters: the model and its momentum. core: decides. effects: carry out what it orders.
        learner: the own one, as the core's effects see it. reception: takes its messages.
        transport: links to the other regions. witness: of the run, if it has one.
        measure: measures links, for an operator. status: what the region shows, of these and of `facts`.
        settings: of the run, for people. budget_watch: says when the budget is too small. catch_up: of a joiner.
    """

    def __init__(self, runtime: NodeRuntime, manifest: Manifest, recovery: Recovered) -> None:
        spec, threads, now_ns, spawn = runtime.spec, runtime.threads, runtime.now_ns, runtime.spawn
        note = runtime.notes.add
        self.runtime = runtime
        self._spec = spec
        self.parameters = Parameters(
            manifest, spec.settings, runtime.store, threads.pool, files=threads.files, background=threads.background
        )
        identity = load_identity(spec.identity_dir, region=spec.region, run_id=spec.run_id)
        self.core = RegionCore(
            region=spec.region,
            regions=spec.regions,
            run_id=spec.run_id,
            settings_digest=spec.settings_digest,
            manifest=manifest,
            settings=spec.settings,
            recovery=recovery,
            seed=spec.seed,
            secret=os.urandom(32),
            now_ns=now_ns(),
            authority=self._signature_fault,
        )
        self.core.farewell.joined = spec.joined
        # Learner and transport call back into effects, which are built on both: hence the methods below.
        self.learner = LearnerProxy(
            manifest=manifest,
            settings=spec.settings,
            parameters=self.parameters,
            memory=partial(request_area, spec.supervisor_socket),
            send=runtime.learner_server.send,
            post=self._post,
            spawn=spawn,
            now_ns=now_ns,
            save_counters=self._save_counters,
            store_initial_state=self._store_initial_state,
            region=spec.region,
            note=note,
        )
        self.reception = Reception(runtime, manifest, self.core, self.learner)
        self.transport = GrpcTransport(
            region=spec.region,
            run_id=spec.run_id,
            settings_digest=spec.settings_digest,
            founding_digest=spec.founding_digest,
            manifest_digest=manifest.digest,
            identity=identity,
            listen=(spec.listen_host, spec.listen_port),
            peers=self._addresses(),
            handler=self,
            executor=threads.pool,
            is_advertised=spec.address is not None,
            seed=spec.seed,
            budget=spec.budget,
            on_superseded=runtime.end,
            settings=spec.shared_settings,
            model=pack_tensors(manifest.tensors),
            messages_per_s=self._messages_per_s(),
            show_run=self._shown_run,
        )
        self.measuring = Measuring(
            region=spec.region,
            transport=self.transport,
            spawn=spawn,
            executor=threads.background,
            now_ns=now_ns,
        )
        self._measure_command = MeasureCommand(
            spec.region, self.measuring.peers, lambda _: self.measuring.own_links(), self._limit_to
        )
        self.measure = self._measure_command.run
        self.witness = WitnessLink(runtime, self.transport.pacer, self._post)
        self.effects = build_effects(
            region=spec.region,
            settings=spec.settings,
            init=spec.init,
            parameters=self.parameters,
            store=runtime.store,
            transport=WitnessRoute(self.transport, self.witness),
            learner=self.learner,
            threads=threads,
            spawn=spawn,
            post=self._post,
            note=note,
            write_final_file=partial(write_final, spec.state_dir),
            save_counter_file=partial(save_trained, spec.state_dir),
        )
        self.witness.fetcher = self.effects.fetcher
        self.facts = RunFacts(
            self.core,
            spec,
            certificate=self.transport.credentials.document,
            cosines=self.effects.stripes.cosines,
            refusals=self.effects.disk.writes.summary,
            now_ns=now_ns,
        )
        self.pump = Pump(self.core, self.effects.perform, now_ns, on_fault=runtime.end, observe=self._observe)
        self.budget_watch = BudgetWatch(manifest, spec.settings)
        self.catch_up = CatchUp(manifest, spec.settings)
        self._presence = Presence()
        self.settings = SettingsWatch(spec, note)
        # The log has the genesis of a run; never taken back.
        self._has_begun = False
        self._end_wishes = EndWishes(spec.state_dir, (spec.settings.steps_max, spec.settings.tokens_max))
        # The core has the wishes of an earlier daemon, if no end that lasts has carried them out.
        self._has_recalled = False
        # The budget of which the core knows.
        self._posted_limits = NO_LIMITS
        # As the links know them; see `_members`.
        self._rosters: tuple[Roster, ...] = ()
        # True from the final write on, for good; and once this region was removed from the run.
        self._is_lingering = False
        self._follow_rosters()
        self._follow_settings()
        self.status = NodeStatus(self)

    async def start(self) -> None:
        """Bind the port and start the core's clockwork. Raises BindError, IdentityError, StorageError."""
        await self.transport.start()
        self.pump.start()
        self._post_limits()
        self.runtime.spawn(self._watch_budget(), "budget watch")
        self.runtime.spawn(self._keep_counters(), "counters")

    async def drain(self, stop_s: float) -> None:
        """Tell the others that this region stops, and hand leadership over within DRAIN_SHARE of `stop_s`."""
        for effect in self.core.hand_over(now_ns=self.runtime.now_ns()):
            self.effects.perform(effect)
        if self.core.liveness.alive(now_ns=self.runtime.now_ns()):
            await asyncio.sleep(END_POLL_S)  # the heartbeat that says so must have left before the links go
        polls = round(DRAIN_SHARE * stop_s / END_POLL_S)
        while polls and self.core.ledger.is_leader and self.core.liveness.alive(now_ns=self.runtime.now_ns()):
            polls -= 1
            await asyncio.sleep(END_POLL_S)

    async def stop(self) -> None:
        """Close the links, drop the timer."""
        self.pump.close()
        self.witness.close()
        await self.transport.stop()
        with contextlib.suppress(StorageError):  # the memory outlives this daemon, if not its supervisor
            await in_thread(self.runtime.threads.disk, read_trained, self._spec.state_dir, self.learner.counters)
        self.learner.close()

    def _post(self, event: ev.Event) -> None:
        self.pump.post(event)
        self.transport.expel(self.core.history.roster.expelled)
        self.transport.credentials.revocations = self.core.history.revocations
        self._follow_settings()
        self._mend_initial_state()
        self.reception.core_changed()
        if not self._is_lingering and (isinstance(event, ev.FinalWritten) or self.core.farewell.reason):
            self._is_lingering = True
            self.runtime.spawn(self._leave() if self.core.farewell.reason else self._linger(), "linger")

    def _observe(self, event: ev.Event, effects: Sequence[ev.Effect]) -> None:
        self._follow_rosters()  # before the effects, which may be messages to a region that was just added
        self._follow_wishes()
        self.facts.observe(event, effects)

    @property
    def _knows_run(self) -> bool:
        """Before the last entry on disk is committed and replayed, what the history says may not hold any more."""
        return self.core.ledger.has_caught_up and not self.core.is_replaying

    def _follow_wishes(self) -> None:
        end, wishes = self.core.end, self._end_wishes
        if not self._has_recalled and self._knows_run:
            self._has_recalled = True
            if end.end is None:  # wishes since an end that is to be extended are for the one to come: see their limits
                end.recall(wishes.last)
        # What is on disk waits for the replay; an order that comes meanwhile is durable, too.
        wishes.save(end.wishes if self._has_recalled else (*wishes.last, *end.wishes))

    def _follow_settings(self) -> None:
        if not self._has_begun and self.core.ledger.disks.has_view:
            self._has_begun = True
            self.transport.begin_run(self.settings.agreed)
        settings = self.core.history.settings
        if self._knows_run and self.settings.look(settings):
            self.budget_watch.follow(settings)
            self._rosters = ()
            self._follow_rosters()

    def _mend_initial_state(self) -> None:
        """Have Theta_0 laid down again where what is on disk is of two regions: no run may begin with that."""
        versions = self.core.versions
        is_due = self.core.history.genesis is None and versions.initial.is_mixed and self.core.wants_initial_state
        if is_due and self.effects.disk.forget_fetched_initial():
            versions.forget_initial()
            text = "Theta_0 here is mixed of two regions': the learner lays its own down again"
            self.runtime.notes.add(Note("genesis", text))
            self.runtime.learner_server.refuse(text, is_final=False)

    def _follow_rosters(self) -> None:
        rosters = self._members()
        if rosters == self._rosters:
            return
        self._rosters = rosters
        self.witness.follow(self.core.ledger.disks.roster)
        addresses = self._addresses()
        members = {name for roster in rosters for name in roster.names}
        self.transport.follow(addresses, addresses.keys() - members, messages_per_s=self._messages_per_s())
        self._measure_command.peers = self.measuring.peers

    def _members(self) -> tuple[Roster, ...]:
        """The rosters that say who is linked with: as committed, by the log, and a newer one that a peer has shown."""
        ledger, roster = self.core.ledger, self.core.history.roster
        newer = (ledger.newer_roster,) if ledger.newer_roster.changes > roster.changes else ()
        return (roster, ledger.disks.roster, *newer)

    def _addresses(self) -> dict[str, str | None]:
        rosters = sorted(self._members(), key=lambda roster: roster.changes)
        addresses = {name: place for roster in rosters for name, place in roster.addresses(self._spec.peers).items()}
        addresses.pop(self._spec.region, None)
        return addresses

    def _shown_run(self) -> RunShown:
        roster = self.core.history.roster
        addresses = {**self.transport.addresses, self._spec.region: self._spec.address}
        members = tuple(MemberShown(name, addresses.get(name) or "") for name in roster.names)
        return RunShown(self.settings.joiner_settings, members, self.core.ledger.leader or None, roster.changes)

    def _messages_per_s(self) -> int:
        settings, regions = self.core.history.settings, len(self.core.ledger.disks.roster.names)
        return messages_per_s(
            regions, rounds_in_flight=settings.rounds_in_flight_max, heartbeat_ns=settings.heartbeat_ns
        )

    async def _leave(self) -> None:
        """End this region, which is no member any more: its learner stops, for nobody merges its steps."""
        reason = self.core.farewell.reason
        console_line(self._spec.region, f"{reason}: it ends, with exit code 0")
        if self.learner.status is None:
            self.runtime.learner_server.refuse(reason, is_final=True)
        # What was acknowledged last must have left before the links go.
        await asyncio.sleep(2 * self._spec.settings.heartbeat_ns / NS_PER_S)
        self.runtime.end(None)

    def _post_limits(self) -> None:
        """Have the core tell the others what this region may send and receive: stripes are cut by that."""
        budget = self.transport.budget_status()
        limits = RateLimits(budget["egress_bytes_per_s"], budget["ingress_bytes_per_s"])
        if limits != self._posted_limits:
            self._posted_limits = limits
            self._post(ev.BudgetChanged(limits))

    async def _watch_budget(self) -> None:
        while True:
            await asyncio.sleep(to_tick_s(BUDGET_POLL_S))
            self._post_limits()
            self.reception.compare_models(self.transport.other_models)
            self.facts.mark()
            await in_thread(self.runtime.threads.background, self.facts.look)
            look = partial(self.budget_watch.look, late_ns=self.core.liveness.late_ns)
            budget = self.transport.budget_status()
            note = await in_thread(self.runtime.threads.background, look, self.core.view(), budget)
            shut_out = [peer for peer in self.transport.addresses if self.transport.quarantine_reason(peer)]
            view = self.core.view()
            for news in (note, self._look_behind(view, budget), *self._presence.look(view.peers, shut_out)):
                if news is not None:
                    self.runtime.notes.add(news)

    def _look_behind(self, view: RegionView, budget: Mapping[str, Any]) -> ev.Note | None:
        learners = [peer.learner for peer in view.peers if peer.is_alive and peer.learner is not None]
        return self.catch_up.look(
            [[position.base_version for position in learner.positions] for learner in learners],
            self.core.versions.held,
            is_counted=self.core.ledger.is_own_disk_sound,
            bytes_in=sum(meter.bytes_in for meter in self.transport.traffic().values()),
            ingress=budget["ingress_bytes_per_s"],
            now_ns=self.runtime.now_ns(),
        )

    async def _linger(self) -> None:
        """Stay until the learner has said its last figures and no other region needs this one."""
        loop = asyncio.get_running_loop()
        linger = Linger(self.core.view().applied_index, now_s=loop.time(), is_patient=self._spec.is_serving)
        while not linger.is_over(  # noqa: ASYNC110 - most of what it looks at announces no change
            [peer.applied_index for peer in self.core.view().peers],
            learner_is_done=self.learner.status is None or self.learner.done is not None,
            serves=self.effects.fetcher.serves,
            now_s=loop.time(),
        ):
            await asyncio.sleep(END_POLL_S)
        # The last heartbeat that says so must have left before the links go.
        await asyncio.sleep(2 * self._spec.settings.heartbeat_ns / NS_PER_S)
        self.runtime.end(None)

    def control_arrived(self, peer: str, message: Message | MeasureMessage) -> None:
        """See TransportHandler."""
        if isinstance(message, MeasureMessage):
            self.measuring.control_arrived(peer, message)
        else:
            self.effects.control_arrived(peer, message)

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """See TransportHandler."""
        if is_up:
            self.transport.other_models.pop(peer, None)
        self.effects.link_changed(peer, is_up=is_up)
        self.measuring.link_changed(peer, is_up=is_up)

    def transfer_opened(self, peer: str, header: BulkHeader | Probe, raw_bytes: int) -> memoryview | None:
        """See TransportHandler."""
        if isinstance(header, Probe):
            return self.measuring.transfer_opened(peer, header, raw_bytes)
        return self.effects.transfer_opened(peer, header, raw_bytes)

    def transfer_closed(self, peer: str, header: BulkHeader | Probe, buffer: memoryview, *, is_whole: bool) -> None:
        """See TransportHandler."""
        if isinstance(header, Probe):
            self.measuring.transfer_closed(peer, header, buffer, is_whole=is_whole)
        else:
            self.effects.transfer_closed(peer, header, buffer, is_whole=is_whole)

    async def _save_counters(self, incarnation: int) -> None:
        await self.effects.disk.save_counters(incarnation, self.learner.counters)

    async def _keep_counters(self) -> None:
        """Save the counters now and then: little is forgotten when all processes of the region die at once."""
        while True:
            await asyncio.sleep(COUNTERS_EVERY_S)
            if self.learner.status is not None:
                await self._save_counters(self.learner.incarnation)

    def _store_initial_state(self, version_area: VersionArea, generation: int) -> Coroutine[Any, Any, None]:
        return self.effects.disk.store_initial_state(version_area, generation)

    def finish(self, reason: str) -> None:
        """Ask the run to end. Raises ConfigError: it is over."""
        if self._knows_run and (end := self.core.end.end) is not None:
            since = since_and_model(self._spec.state_dir)
            raise ConfigError(f"the run is over here already (finished: {end.reason}{since}): {WAY_ON}")
        self._post(ev.FinishOrdered(reason))

    def expel(self, peer: str, *, is_lifted: bool) -> None:
        """Have the ledger expel a peer, or readmit it. Raises ConfigError: why that can't be."""
        self._order(EntryOrdered(DiskNamedBody(peer, b"" if is_lifted else EXPELLED), is_cut_off=not is_lifted))

    def change_members(self, document: Mapping[str, Any]) -> None:
        """Have the ledger change a membership; a region hands over before it leaves. Raises ConfigError: why not."""
        addresses = {self._spec.region: self._spec.address, **self.transport.addresses}
        order = member_order(document, self.core.ledger.disks.roster, addresses)
        try:
            self._order(order)
        except ConfigError:
            if document.get("region") == self._spec.region == self.core.ledger.leader:
                self._post(order)
            raise

    def change_settings(self, document: Mapping[str, Any]) -> list[str]:
        """Have the ledger change settings of the run; each with both values. Raises ConfigError: why that can't be."""
        order, lines = settings_order(document, self.core.history.settings)
        self._order(order)
        return lines

    def _signature_fault(self, statement: bytes, signature: bytes) -> str:
        return self.transport.credentials.identity.signature_fault(statement, signature)

    def revoke(self, region: str, pem: bytes) -> str:
        """Have the ledger revoke a region's certificate, by default the one it showed last; the beginning of its
        fingerprint. Raises ConfigError."""
        credentials = self.transport.credentials
        own = credentials.identity.certificate
        current = own if region == own.region else credentials.shown.get(region)
        try:
            certificate = credentials.identity.admit(pem_to_der(pem), region) if pem else current
        except PeerCertificateRefused as error:
            raise ConfigError(f"this can't be revoked, or need not be: {error}") from None
        if certificate is None:
            raise ConfigError(
                f"{region} has shown {self._spec.region} no certificate since this daemon began: name its file with "
                "--certificate FILE"
            )
        self._order(EntryOrdered(RevokedBody(region, certificate.fingerprint), is_cut_off=certificate == current))
        return fingerprint_text(certificate)

    async def renew_identity(self) -> None:
        """Read this region's certificate again, and make the links again with it if it is another one."""
        spec, note, current = self._spec, self.runtime.notes.add, self.transport.credentials.identity
        load = partial(load_identity, spec.identity_dir, region=spec.region, run_id=spec.run_id)
        try:
            identity = await in_thread(self.runtime.threads.files, load)
        except IdentityError as error:
            note(Note("peer", f"SIGHUP: {spec.region} keeps the certificate that it has: {error}", is_alarm=True))
            return
        news = f"certificate {fingerprint_text(identity.certificate)}, until {identity.certificate.not_after:%Y-%m-%d}"
        if (identity.cert_pem, identity.ca_pem) == (current.cert_pem, current.ca_pem):
            note(Note("peer", f"SIGHUP: no other certificate in {spec.identity_dir}: {spec.region} has {news}"))
            return
        note(Note("peer", f"SIGHUP: {spec.region} has {news}, trusts {len(identity.authorities)} authorities"))
        for peer, reason in (await self.transport.renew(identity)).items():
            note(Note("peer", f"the link to {peer} goes on with the certificate before: {reason}", is_alarm=True))

    def _order(self, order: EntryOrdered) -> None:
        if fault := self.core.replacement.order_fault(order, now_ns=self.runtime.now_ns()):
            raise ConfigError(fault)
        self._post(order)

    def _limit_to(self, peer: str) -> tuple[int | None, str]:
        """The limit on sending to a peer now: wire bytes per second (None: no limit), and where it comes from."""
        row = self.transport.budget_status()["peers"][peer]
        rate = row["egress_bytes_per_s"]
        return rate, "" if rate is None else row["limited_by"] or "region"
