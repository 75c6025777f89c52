"""A region's mind: the ledger, the rounds, the learner's versions and what is missing, put together without IO.

The caller's duties:

1. Call `handle` with one event at a time; start the effects in their order (`core/events.py` has the rules).
2. Send TimerFired when `wake_at_ns` has come; it may change with every call.
3. Do not keep anything of a core when its process ends: a new one is built from what the disk holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from diloco_node.core import events as ev
from diloco_node.core import messages as msg
from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Effect, Event
from diloco_node.core.genesis import Genesis, founders_of
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.roster import Authority, no_authority
from diloco_node.core.ledger.summary import decode_summary, summed_roster
from diloco_node.core.membership.farewell import Farewell
from diloco_node.core.membership.liveness import Liveness
from diloco_node.core.membership.replacement import DiskReplacement, next_incarnation
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.merge.schedule import due_fragments
from diloco_node.core.objections import Objections
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.projections import ContributionsProjected, Projected
from diloco_node.core.recovery.fetches import Fetches
from diloco_node.core.recovery.patience import PayloadPatience
from diloco_node.core.recovery.upkeep import Upkeep
from diloco_node.core.recovery.versions import MISSING_ROUNDS, Versions
from diloco_node.core.rounds.answers import BallotAnswer
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.discards import DiscardReporter
from diloco_node.core.rounds.entry_check import EntryCheck
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.leader import RoundLeader
from diloco_node.core.rounds.participant import RoundParticipant
from diloco_node.core.rounds.progress import RunProgress
from diloco_node.core.rounds.run_end import RunEnd
from diloco_node.core.types import Entry, EntryBody, GenesisBody, LearnerStatus, Recovered, RoundBody, RunSettings
from diloco_node.core.view import Participation, RegionView, region_view

TURNS_MAX: Final = 10_000
"""Messages to itself and commits that one event may cause. More is a loop, and a bug."""

ENTRIES_PER_EVENT: Final = 64
"""Committed entries that are applied in one call, some milliseconds: with thousands the event loop breathes between."""


class RegionCore:
    """All decisions of one region: events in, effects out.

    Args:
        regions: those that begin the run, the same on each of them, in any order; without this one if
            it joins a run that has begun.
        run_id, settings_digest: go into genesis; regions with others can't join.
        recovery: what the disk held at start.
        seed: of the election timeouts. secret: at random; of the nonces of audits. now_ns: monotonic time.
        authority: of the run, see `roster`.
    """

    def __init__(
        self,
        *,
        region: str,
        regions: tuple[str, ...],
        run_id: str,
        settings_digest: str,
        manifest: Manifest,
        settings: RunSettings,
        recovery: Recovered,
        seed: int,
        secret: bytes,
        now_ns: int,
        authority: Authority = no_authority,
    ) -> None:
        self._region, self._manifest = region, manifest
        fragments = len(manifest.fragments)
        # The time of the last event, and of the next heartbeat.
        self._now_ns = self._next_beat_ns = now_ns
        # Effects of the event at hand: empty between two calls of `handle`.
        self._effects = EffectBuffer(region)
        # The order below is that of use: each part reads those above it, and only `_settle` ties them together.
        peers = tuple(sorted(regions))
        self.history = RoundHistory(fragments, peers, settings=settings)
        if (base := recovery.base).index:
            self.history.restore(decode_summary(base.summary, fragments=fragments), base.index, now_ns=now_ns)
        run = (run_id, settings_digest, manifest.digest, founders_of(peers, region, self.history, recovery.entries))
        self.versions = Versions(
            region=region,
            fragments=fragments,
            manifest_digest=manifest.digest,
            recovery=recovery,
            history=self.history,
            effects=self._effects,
            payload_versions=settings.payload_versions,
        )
        self._fetches = Fetches(region=region, regions=self.history.roster.names, effects=self._effects)
        self.liveness = Liveness(
            region=region, regions=self.history.roster.names, heartbeat_ns=settings.heartbeat_ns, effects=self._effects
        )
        context = RoundContext(
            region=region,
            manifest=manifest,
            history=self.history,
            liveness=self.liveness,
            effects=self._effects,
            secret=secret,
        )
        progress = RunProgress(context)
        self.end = RunEnd(context, self.versions, progress)
        self.participant = RoundParticipant(context, self.versions)
        self._losses = DiscardReporter(context)
        self._objections = Objections(context, self.versions, self.end, self._losses.ended, lambda: self.ledger.leader)
        check = EntryCheck(run, manifest, settings, witness=self.participant.audits.entry_fault)
        self.ledger = LedgerCore(
            region=region,
            voters=peers,
            recovery=recovery,
            heartbeat_ns=settings.heartbeat_ns,
            election_timeout_ns=settings.election_timeout_ns,
            seed=seed,
            now_ns=now_ns,
            has_payload=self._has_payload,
            meaning=check,
            has_base=self.versions.has_base,
            base_fault=check.base_fault,
            named_by=lambda base: summed_roster(decode_summary(base.summary, fragments=fragments)),
        )
        check.roster_fault = lambda roster: authority(roster.statement(run_id), roster.signature)
        self.leader = RoundLeader(context, progress, self.participant)
        self._genesis = Genesis(
            run, context, ledger=self.ledger, leader=self.leader, versions=self.versions, fetches=self._fetches
        )
        self.replacement = DiskReplacement(context, self.ledger, self.leader, check.roster_fault)
        self.farewell = Farewell(context, self.ledger, check.roster_fault)
        self._upkeep = Upkeep(context, self.ledger, self.versions)
        self._objections.digests = self._upkeep.digests
        # As leader: since when its disk lacks what a majority has; None: it lacks nothing.
        self._behind_since_ns: int | None = None
        # Fragments that are due by the learner's last report: a further one is told to the leader at once.
        self._due: frozenset[int] = frozenset()
        self._participation = Participation(self.history, self.liveness)
        self.history.followers = (self.liveness.follow, self._fetches.follow)
        self._patience = PayloadPatience(self.participant, self.history)
        # (term, leader) of the last note about it.
        self._reported_leader = (0, "")
        # One call for each type of event: an event that is missing here is a KeyError, and a bug.
        self._arrows: dict[type[Any], Callable[[Any, int], None]] = {
            ev.TimerFired: self._timer_fired,
            ev.MessageArrived: self._message_arrived,
            ev.LinkChanged: self._link_changed,
            ev.BudgetChanged: lambda event, _: self.liveness.own_budget(event.limits),
            ev.LedgerPersisted: self._to_ledger,
            ev.InitialStateStored: lambda event, _: self.versions.initial_state_stored(event.fragment_digests),
            ev.LearnerReported: lambda event, now_ns: self._learner_is(event.status, now_ns),
            ev.LearnerAttached: self._learner_attached,
            ev.LearnerDetached: self._learner_detached,
            ev.SnapshotTaken: lambda event, _: self.participant.snapshot_taken(event.contribution),
            ev.SnapshotRefused: lambda event, _: self.participant.snapshot_refused(event),
            ev.ContributionStripeArrived: lambda event, _: self.participant.stripe_arrived(event),
            ContributionsProjected: lambda event, _: self.leader.on_projections(event),
            Projected: lambda event, _: self.participant.audits.projected(event),
            ev.ReductionDone: lambda event, _: self.participant.stripe_reduced(event),
            ev.MergedStripeArrived: lambda event, _: self.participant.merged_arrived(event),
            ev.PayloadStored: self._payload_stored,
            ev.PayloadNotStored: lambda event, _: self.participant.payload_not_stored(event.fragment, event.ballot),
            ev.StateStored: self._state_stored,
            ev.FetchFailed: lambda event, now_ns: self._fetches.on_failure(
                event.peer, event.fragment, event.reason, now_ns=now_ns
            ),
            ev.VersionApplied: self._version_applied,
            ev.CheckpointWritten: lambda event, _: self._upkeep.checkpoint_written(event),
            ev.StatesRenamed: lambda event, _: self.versions.states_renamed(event.fragment),
            ev.DigestComputed: lambda event, now_ns: self._upkeep.digest_computed(event, now_ns=now_ns),
            ev.FinishOrdered: self._finish_was_ordered,
            EntryOrdered: lambda event, now_ns: self._emit(self.replacement.carry_out(event, now_ns=now_ns)),
            ev.FinalWritten: lambda _event, _now_ns: self.end.on_final_written(),
        }

    def handle(self, event: Event, *, now_ns: int) -> list[Effect]:
        """Take a fact, return what to do; `now_ns` is monotonic time, never less than before."""
        self._now_ns = now_ns
        late_ns = now_ns - self._next_beat_ns
        if late_ns > self.history.settings.heartbeat_ns:
            self.ledger.excuse(late_ns, now_ns=now_ns)
            self.liveness.excuse(late_ns, now_ns=now_ns)
        self._arrows[type(event)](event, now_ns)
        if isinstance(event, ev.DISK_EVENTS):
            self._emit(self.ledger.payload_arrived(now_ns=now_ns))
        self._settle(now_ns)
        return self._effects.take()

    def hand_over(self, *, now_ns: int) -> list[Effect]:
        """This region is about to stop: say so, offer leadership to another one, and never stand for election again."""
        self.liveness.is_leaving = True
        self._beat(now_ns)
        self._emit(self.ledger.hand_over(now_ns=now_ns))
        self._settle(now_ns)
        return self._effects.take()

    @property
    def wake_at_ns(self) -> int:
        """When the next TimerFired is due."""
        if self.is_replaying:
            return self._now_ns + 1  # a nanosecond later: no timer that spins
        times = (self.ledger.wake_at_ns, self._next_beat_ns, self.leader.wake_at_ns, self._fetches.wake_at_ns)
        return min(at_ns for at_ns in times if at_ns is not None)

    @property
    def may_allot_incarnation(self) -> bool:
        """Whether this region's folder knows which incarnations of its learner there were; see `is_own_disk_sound`."""
        return self.ledger.is_own_disk_sound

    @property
    def incarnation_rule(self) -> Callable[[int], int]:
        """The number for a new life of this region's learner, by the newest life that its folder knows of; for any
        thread."""
        replacements = self.ledger.disks.roster.replacements(self._region)
        newest = self.history.account.newest_incarnation(self._region)
        return lambda newest_here: next_incarnation(newest, newest_here, replacements)

    @property
    def is_replaying(self) -> bool:
        """Committed entries wait for their turn: what the ledger says is not all known here yet."""
        return self.ledger.has_committed or self._upkeep.is_behind

    @property
    def wants_initial_state(self) -> bool:
        """Whether Theta_0 of a new learner is of use; see `Genesis`."""
        return self._genesis.wants_initial_state

    def _settle(self, now_ns: int) -> None:
        """Follow every consequence inside this region until nothing more follows."""
        budget = ENTRIES_PER_EVENT
        if self._upkeep.follow_base(now_ns=now_ns):
            self._emit(self.ledger.payload_arrived(now_ns=now_ns))
        for _ in range(TURNS_MAX):
            if self._effects.local:
                self._round_message(self._region, self._effects.local.popleft(), now_ns)
                continue
            is_news = False
            for entry in self.ledger.take_committed(budget):
                self._take_entry(entry, now_ns)
                is_news = True
                budget -= 1
            self._follow_role(now_ns)
            self._genesis.propose()
            self.leader.advance(now_ns=now_ns)
            if self.leader.is_ending:
                self.end.believe()  # it has judged by what it knew then: learners that are gone since change nothing
            while self.leader.proposals and self.ledger.is_leader and self._has_payload(self.leader.proposals[0]):
                self._propose(self.leader.proposals.popleft(), now_ns)
                is_news = True
            self.versions.pump()
            self.participant.pump()
            if not is_news and not self._effects.local:
                break
        else:
            raise AssertionError(f"one event caused more than {TURNS_MAX} turns")
        self._upkeep.learn()
        self._upkeep.compare()
        if (base := self._upkeep.compaction.next_base()) is not None:
            self._emit(self.ledger.compact(base))
            self._upkeep.compaction.on_base()
        self._emit(self._objections.raise_against(self.ledger, now_ns=now_ns))
        lacking = self._patience.lacking(self.ledger.missing_payloads(rounds_max=MISSING_ROUNDS), now_ns=now_ns)
        if lacking or self.versions.is_lacking or not self._fetches.is_idle or not self.versions.has_started:
            self.versions.plan_fetches(lacking, self._fetches)
            alive, witness = self.liveness.alive(now_ns=now_ns), self.history.roster.witness
            self._fetches.pump(leader=self.ledger.leader, alive=alive, now_ns=now_ns, witness=witness)
        self.end.pump()

    def _take_entry(self, entry: Entry, now_ns: int) -> None:
        body = entry.body
        self.history.apply(entry, now_ns=now_ns)
        self.versions.on_commit(entry)
        self._upkeep.on_commit(entry)
        if isinstance(body, RoundBody):
            self._participation.count(body)
            self.participant.on_commit(body)
            if self.versions.applied[body.fragment] >= body.version:
                # Recovered from a later state: nothing will be applied, and nobody waits for it.
                self.participant.on_apply(body.fragment, self.versions.applied[body.fragment])
                self.versions.offer(body.fragment)
        elif isinstance(body, GenesisBody):
            self._genesis.on_commit(body)
        self.end.on_commit(body)
        self.leader.on_commit(entry, now_ns=now_ns)

    def _propose(self, body: EntryBody, now_ns: int) -> None:
        last_index = self.ledger.last_index
        self._emit(self.ledger.propose(body, now_ns=now_ns))
        if self.ledger.last_index == last_index and isinstance(body, RoundBody):
            self.leader.rounds.pop(body.fragment, None)  # refused, with an alarm: opened again when it is due

    def _follow_role(self, now_ns: int) -> None:
        ledger = self.ledger
        self.liveness.patience = ledger.patience
        if ledger.leader and self._reported_leader != (ledger.term, ledger.leader):
            self._reported_leader = (ledger.term, ledger.leader)
            self._effects.note("leader", f"{ledger.leader} leads term {ledger.term}")
        if self.leader.is_acting and not ledger.is_leader:
            self.leader.end()
        is_early = self.leader.is_acting or not ledger.is_settled
        if is_early or ledger.has_committed or ledger.commit_index != ledger.cluster_commit_index:
            return
        # Everything that older leaders committed is known and applied to the history now.
        reopen, left_out = self.participant.open_versions(), self.participant.left_out
        self.leader.begin(
            ledger.term,
            reopen,
            now_ns=now_ns,
            left_out=left_out,
            predecessor=ledger.offered_by,
            end_reason=self.end.reason,
        )

    def _has_payload(self, body: EntryBody) -> bool:
        """Whether this region's disk can produce what an entry names, and nothing on its way may change that."""
        if isinstance(body, GenesisBody) and self._fetches.brings_other_initial(body.fragment_digests):
            return False
        return self.versions.has_payload(body) and not self._objections.doubt(body, now_ns=self._now_ns)

    def _timer_fired(self, event: ev.TimerFired, now_ns: int) -> None:
        self._to_ledger(event, now_ns)
        if now_ns >= self._next_beat_ns:
            self._next_beat_ns = now_ns + self.liveness.pause_ns(now_ns - self._next_beat_ns)
            if self.ledger.is_leader:  # with the ledger's heartbeat: one wake-up here, and one there
                self._next_beat_ns = min(self._next_beat_ns, self.ledger.wake_at_ns)
            leader, applied, is_last = self.ledger.leader, self.versions.applied_index(), self.end.is_final
            self._beat(now_ns, self.liveness.next_receiver(leader, applied, is_last=is_last, now_ns=now_ns))
            self.participant.tick()
            self.leader.tick()
            self._emit(self.replacement.propose(now_ns=now_ns))
            self.farewell.look(now_ns=now_ns)
            if reason := self._succession_reason(now_ns):
                self._emit(self.ledger.transfer_leadership(reason, now_ns=now_ns))
            if self.leader.is_acting:
                self.leader.proposals += self._upkeep.proposals({self._region, *self.liveness.alive(now_ns=now_ns)})
            self._repeat_requests()

    def _succession_reason(self, now_ns: int) -> str:
        """Return why another region should lead: the others wait for nothing but this one. Empty if it may go on."""
        ledger = self.ledger
        if not ledger.is_leader or ledger.commit_index >= ledger.cluster_commit_index:
            self._behind_since_ns = None
        elif self._behind_since_ns is None:
            self._behind_since_ns = now_ns
        if not ledger.is_leader:
            return ""
        if self._behind_since_ns is not None and now_ns - self._behind_since_ns >= self.leader.disk_patience_ns:
            return "its disk lacks what is committed"
        return self._upkeep.reason or ("it holds up the others: its disk, or its bulk" * self.leader.is_in_the_way)

    def _beat(self, now_ns: int, only_to: str | None = None) -> None:
        digests = self._upkeep.digests.to_report(now_ns=now_ns) if only_to is None else ()
        self.liveness.folder = self.ledger.folder
        self.liveness.beat(applied_index=self.versions.applied_index(), digests=digests, now_ns=now_ns, only_to=only_to)

    def _repeat_requests(self) -> None:
        leader = self.ledger.leader
        if not leader or self.history.genesis is None or self.is_replaying:
            return
        if bodies := self._losses.bodies():
            self._beat(self._now_ns, only_to=leader)  # a report that bears them out comes first
            self._effects.send_all(self.history.roster.names, msg.DiscardReported(bodies))
        self.end.ask(now_ns=self._now_ns)

    def _message_arrived(self, event: ev.MessageArrived, now_ns: int) -> None:
        message = event.message
        if event.peer in self.history.roster.expelled:
            return  # its links are about to be closed
        if isinstance(message, msg.LEDGER_MESSAGES):
            self.liveness.hear(event.peer, now_ns=now_ns)
            self._to_ledger(event, now_ns)
        elif isinstance(message, msg.RosterShown):
            self.farewell.take(event.peer, message)
        elif event.peer not in self.history.roster.names or event.peer == self._region:
            text = f"{type(message).__name__} from {event.peer}, which is not in this run by the ledger here"
            self._effects.note_change("stranger", event.peer, text)
        elif isinstance(message, msg.Heartbeat):
            self._heartbeat(event.peer, message, now_ns)
        else:
            self._round_message(event.peer, message, now_ns)

    def _round_message(self, peer: str, message: msg.Message, now_ns: int) -> None:
        if isinstance(message, msg.AuditDrawn):
            self.participant.audits.take(peer, message)
        if isinstance(message, msg.DiscardReported):
            bodies = self._objections.discards.hear(peer, message.bodies, now_ns=now_ns)
            self.leader.take_discards(bodies, now_ns=now_ns)
        if isinstance(message, BallotAnswer):
            self.leader.on_answer(peer, message, now_ns=now_ns)
        elif isinstance(message, msg.FinishRequested):
            if (reason := self.end.take(peer, message, now_ns=now_ns)) is not None:
                self.leader.request_finish(reason)
        elif isinstance(message, msg.BallotOpened) and self._is_of_leader(peer, message.ballot.term):
            self.participant.ballot_opened(peer, message)
        elif isinstance(message, msg.MergeDecided) and self._is_of_leader(peer, message.ballot.term):
            self.participant.merge_decided(message)

    def _is_of_leader(self, peer: str, term: int) -> bool:
        """Ballots of an older term are dead, and one of a newer term is repeated when the ledger knows it."""
        return peer == self.ledger.leader and term == self.ledger.term

    def _heartbeat(self, peer: str, beat: msg.Heartbeat, now_ns: int) -> None:
        if beat.learner and len(beat.learner.positions) != len(self._manifest.fragments):
            self._effects.note("report", f"{peer} reports {len(beat.learner.positions)} fragments", is_alarm=True)
            return
        self.replacement.hear(peer, beat.folder)
        if self.liveness.heartbeat_arrived(peer, beat, now_ns=now_ns):
            self._upkeep.digests.on_report(peer, beat.digests)
            self.leader.on_status(peer, now_ns=now_ns)

    def _link_changed(self, event: ev.LinkChanged, now_ns: int) -> None:
        self.liveness.link_changed(event.peer, is_up=event.is_up)
        self._to_ledger(event, now_ns)
        if event.is_up and not self.farewell.tell(event.peer):
            self._beat(now_ns, only_to=event.peer)

    def _to_ledger(self, event: Event, now_ns: int) -> None:
        self._emit(self.ledger.handle(event, now_ns=now_ns))

    def _emit(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._effects.emit(effect)

    def _learner_attached(self, event: ev.LearnerAttached, now_ns: int) -> None:
        status = event.status
        self._losses.on_attach(status, event.trained_before)
        self._effects.note("learner", f"incarnation {status.incarnation} attached at step {status.step}")
        self.versions.learner_attached(status)
        self._learner_is(status, now_ns)
        self.end.learner_attached(status.incarnation)
        self._genesis.listing = event.listing

    def _learner_detached(self, _: ev.LearnerDetached, now_ns: int) -> None:
        self._effects.note("learner", "detached")
        self.versions.learner_attached(None)
        self._learner_is(None, now_ns)

    def _learner_is(self, status: LearnerStatus | None, now_ns: int) -> None:
        """Pass it to every part of this region, and to the leader at once if a fragment became due."""
        self.liveness.own_learner(status, now_ns=now_ns)
        self.leader.on_status(self._region, now_ns=now_ns)
        self.participant.learner_changed(status)
        self._losses.learner_changed(status)
        self.versions.learner_changed(status)
        if self._losses.has_news():
            self._repeat_requests()
        before = self._due
        sync_every = self.history.settings.sync_every
        self._due = frozenset() if status is None else due_fragments(status, sync_every=sync_every)
        if not self._due <= before and self.ledger.leader not in ("", self._region):
            self._beat(now_ns, only_to=self.ledger.leader)

    def _payload_stored(self, event: ev.PayloadStored, _: int) -> None:
        norms = event.squared_norms or self.participant.payload_norms(event.fragment, event.digest)
        self.versions.payload_stored(event.fragment, event.version, event.digest, norms)
        self._fetches.on_end(event.fragment, version=event.version, is_state=False)
        self.participant.payload_stored(event)

    def _state_stored(self, event: ev.StateStored, _: int) -> None:
        self.versions.state_stored(event.fragment, event.version, event.digest)
        self._fetches.on_end(event.fragment, version=event.version, is_state=True)

    def _version_applied(self, event: ev.VersionApplied, _: int) -> None:
        self.versions.version_applied(event.fragment, event.version)
        self.participant.on_apply(event.fragment, event.version)

    def _finish_was_ordered(self, event: ev.FinishOrdered, _: int) -> None:
        self.end.want(event.reason, is_order=event.is_order)
        self._repeat_requests()

    def view(self) -> RegionView:
        """Everything that `status` shows, as of the last event."""
        return region_view(
            self,
            region=self._region,
            upkeep=self._upkeep,
            fetches=self._fetches,
            participation=self._participation,
            excess=self._losses.overbooked(),
            now_ns=self._now_ns,
        )
