"""The reception of the region's learner: its welcome or refusal, the position of the run, and then its messages.

A learner is welcomed once its model is the run's, its counters can be true, and its incarnation is known. Until then
nothing that it says counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from diloco_node.core.bounds import STEP_MAX
from diloco_node.core.events import Note
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.region import RegionCore
from diloco_node.core.rounds.progress import RunPosition
from diloco_node.core.types import Contribution
from diloco_node.daemon.learner.proxy import LearnerProxy
from diloco_node.daemon.manifest_file import describe_difference
from diloco_node.daemon.node_runtime import NodeRuntime
from diloco_node.daemon.work import in_thread
from diloco_node.errors import ProtocolViolation, StorageError
from diloco_node.storage.trained import Trained, allot_incarnation, read_trained, set_damaged_aside
from diloco_node.wire.frozen_listing import frozen_difference
from diloco_node.wire.learner_link import (
    NEW_PROCESS,
    Attach,
    Report,
    RunAdvanced,
    SettingsChanged,
    ShardsGiven,
    SnapshotReady,
    ToDaemon,
    Warned,
    Welcome,
    merge_rules,
)

LACK_NS: Final = 10_000_000_000
"""An election may be on: a learner that is far ahead of the others goes on meanwhile."""

POSITION_EVERY_NS: Final = 250_000_000
"""The learner hears at most so often how far the run is: in between it advances at its own share."""


class Reception:
    """Answers each learner that attaches, and passes on the messages of the one that was welcomed."""

    def __init__(self, runtime: NodeRuntime, manifest: Manifest, core: RegionCore, learner: LearnerProxy) -> None:
        self._runtime = runtime
        # Both of the runtime, for as long as it lives.
        self._spec = runtime.spec
        # Tells people, in the log and the status.
        self._note = runtime.notes.add
        self._manifest = manifest
        self._core = core
        self._learner = learner
        # Grows with each attach and each detach: a welcome that was begun for an older number is dropped.
        self._attaches = 0
        self._is_welcomed = False
        # Of the learner that was welcomed last; 0: none was.
        self._incarnation = 0
        # One welcome at a time, so that a later learner has the greater incarnation.
        self._welcome_lock = asyncio.Lock()
        # A new process whose incarnation the other regions must tell first.
        self.waiting_attach: Attach | None = None
        self._sent_position = RunPosition(0, None)
        self._sent_position_ns = 0
        # The shards of the data as the learner was told, and by which entry of the ledger.
        self._sent_shards: ShardsGiven | None = None
        self._shards_index = -1
        # When the last learner was welcomed.
        self._welcomed_ns = 0
        # Of the run, as the learner was told.
        self._sent_settings = runtime.spec.settings
        # Why steps are of no use now, as the learner was told; and since when that is so, None: it is not.
        self._sent_lack = ""
        self._lack_since_ns: int | None = None
        # Why the run can't begin with this region's model; empty as far as is known.
        self._model_fault = ""
        # Of the learner that was welcomed last, until it was compared with those that the run began with.
        self._listing = b""

    @property
    def known_incarnation(self) -> int:
        """The newest incarnation of the own learner that the ledger knows of; -1 if none."""
        return self._core.history.account.newest_incarnation(self._spec.region)

    @property
    def waits_for_peers(self) -> bool:
        """Whether a new process waits until the other regions tell which incarnations there were."""
        return self.waiting_attach is not None and not self._core.may_allot_incarnation

    def rejection_reason(self, attach: Attach) -> str:
        """Why a process with this model can't be this region's learner; empty if it can."""
        difference = describe_difference(self._manifest, merge_rules(attach.tensors, self._spec.settings.merge))
        if difference:
            return f"this is not the run's model: {difference}{self._way_on()}"
        if self._model_fault:
            return self._model_fault
        try:
            by_fragment = attach.in_fragments(len(self._manifest.fragments))
        except ProtocolViolation as error:
            return str(error)
        fault = self._learner.attach_fault(by_fragment, run_id=self._spec.run_id)
        return f"what it says of itself can't be: {fault}" if fault else ""

    def compare_models(self, differences: Mapping[str, str]) -> None:
        """Refuse the learner while so few regions have its model that no run can begin. differences: by region."""
        regions, before = len(self._spec.regions), self._model_fault
        is_possible = self._core.history.genesis is not None or 2 * (regions - len(differences)) > regions
        self._model_fault = ""
        if not is_possible:
            self._model_fault = (
                f"{', '.join(sorted(differences))} would train another model in this run: "
                f"{differences[min(differences)]}. Have all scripts build the same one{self._way_on()}"
            )
        if self._model_fault and self._model_fault != before:
            self._note(Note("learner", self._model_fault, is_alarm=True))
            self._runtime.learner_server.refuse(self._model_fault, is_final=True)

    def _way_on(self) -> str:
        """The way to begin with another model, in words; empty once a run has begun here."""
        if self._core.history.genesis is not None:
            return ""
        folder = self._spec.state_dir
        return f". No run has begun here yet: to begin with another model, stop the region and remove {folder}"

    def on_message(self, message: ToDaemon) -> None:
        """Take a message of the learner: the welcome begins with Attach, everything later is the proxy's."""
        if isinstance(message, Attach):
            self._attaches += 1
            self._is_welcomed = False
            self._runtime.spawn(self._welcome(message, self._attaches), "welcome")
        elif not self._is_welcomed:
            # No learner does that: it knows neither its incarnation nor which versions are there.
            self._note(Note("learner", f"{type(message).__name__} before its welcome: ignored", is_alarm=True))
        elif isinstance(message, SnapshotReady) and (fault := self._rows_fault(message.contribution)):
            self._turn_away(f"its place in the data can't be: {fault}")
        else:
            self._learner.on_message(message)
            if isinstance(message, Report):
                self._send_news_of_position()

    def _turn_away(self, fault: str) -> None:
        """Refuse the learner of a folder that was lost, or of an older copy: nobody would merge what it trains."""
        text = f"{fault}. Its next start goes on where the run is"
        self._note(Note("learner", text, is_alarm=True))
        self._runtime.learner_server.refuse(text, is_final=True)

    def _rows_fault(self, contribution: Contribution) -> str:
        """Why no region would merge these rows; empty where the leader may know better: it is asked in any case."""
        shards = self._core.history.account.shards
        if not self._core.ledger.has_caught_up or shards.is_ahead(contribution):
            return ""
        return shards.fault(contribution)

    def on_detach(self) -> None:
        """Forget the learner: its connection is gone, whether or not it was welcomed."""
        self._attaches += 1
        self._is_welcomed = False
        self.waiting_attach = None
        self._learner.on_detach()

    def core_changed(self) -> None:
        """Welcome the learner that waits, once the core knows which incarnations there were."""
        if self.waiting_attach is not None and self._core.may_allot_incarnation:
            attach, self.waiting_attach = self.waiting_attach, None
            self._runtime.spawn(self._welcome(attach, self._attaches), "welcome")
        self._compare_frozen()
        if self._is_welcomed and self._core.history.account.index != self._shards_index:
            if (newest := self.known_incarnation) > self._incarnation:
                self._turn_away(f"incarnation {self._incarnation} of this learner was over when {newest} began")
                return
            self._send_shards()
        settings = self._core.history.settings
        if self._is_welcomed and settings is not self._sent_settings:
            self._sent_settings = settings
            self._runtime.learner_server.send(SettingsChanged(settings.sync_every, settings.carry_steps_limit))
        if self._sent_lack and self._is_welcomed and not self._lack():
            self._send_position(self._sent_position)

    async def _welcome(self, attach: Attach, number: int) -> None:
        """Welcome the learner, or say why not. Nothing is done for one that went, or was replaced, meanwhile."""
        server = self._runtime.learner_server
        async with self._welcome_lock:
            if number != self._attaches:
                return
            # Again: the node may not have been there when it was let in.
            rejection_reason = self.rejection_reason(attach)
            if rejection_reason:
                server.refuse(rejection_reason, is_final=True)
                return
            attach = attach.in_fragments(len(self._manifest.fragments))
            if attach.incarnation == NEW_PROCESS and not self._core.may_allot_incarnation:
                # A folder that was lost does not know which incarnations there were; the others tell it.
                self.waiting_attach = attach
                return
            lack = self._core.end.unclosed_end(self._core.ledger.leader, now_ns=self._runtime.now_ns())
            if attach.incarnation == NEW_PROCESS and lack:
                server.refuse(lack, is_final=False)
                return
            try:
                incarnation, predecessors, damaged_files = await in_thread(
                    self._runtime.threads.disk, self._read_counters, attach, self._core.incarnation_rule
                )
            except StorageError as error:
                self._note(Note("disk", f"no counters for a new learner: {error}", is_alarm=True))
                if number == self._attaches:
                    server.refuse(str(error), is_final=False)
                return
            for name in damaged_files:
                self._note(Note("disk", f"{name} was damaged: it is set aside. Look at the disk", is_alarm=True))
            if number == self._attaches:
                self._welcome_as(attach, incarnation, predecessors)

    def _read_counters(
        self, attach: Attach, rule: Callable[[int], int]
    ) -> tuple[int, tuple[Trained, ...], tuple[str, ...]]:
        """Read, in the disk's thread, what a welcome needs of the folder: the learner's incarnation, the counters of
        those before it, and the files that were set aside. Raises StorageError."""
        damaged_files = set_damaged_aside(self._spec.state_dir)
        incarnation = attach.incarnation
        if incarnation == NEW_PROCESS:
            incarnation = allot_incarnation(self._spec.state_dir, rule)
        counters = read_trained(self._spec.state_dir, self._learner.counters)
        return incarnation, tuple(life for life in counters if life.incarnation < incarnation), damaged_files

    def _welcome_as(self, attach: Attach, incarnation: int, predecessors: tuple[Trained, ...]) -> None:
        """Answer; from here on what the learner says counts."""
        # A learner in mid-run has nothing to write, and would leave the version area to itself for ever.
        is_placed = min(position.base_version for position in attach.positions) >= 0
        wants_initial_state = self._core.wants_initial_state and not is_placed
        settings = self._sent_settings = self._core.history.settings
        self._is_welcomed = True
        position = self._core.leader.progress.position(now_ns=self._runtime.now_ns())
        regions = self._core.ledger.disks.roster.places(self._spec.region)
        self._runtime.learner_server.send(
            Welcome(
                region=self._spec.region,
                region_index=regions.index(self._spec.region),
                regions=regions,
                incarnation=incarnation,
                run_id=self._spec.run_id,
                fragments=settings.fragments,
                sync_every=settings.sync_every,
                merge=settings.merge,
                codec_up=settings.codec_up,
                carry=settings.carry,
                carry_steps_limit=settings.carry_steps_limit,
                global_step=min(position.steps, STEP_MAX),
                manifest_digest=self._manifest.digest,
                wants_initial_state=wants_initial_state,
                state_dir=str(self._spec.state_dir.resolve()),
                steps_max=settings.steps_max,
                fragment_digests=self._first_digests(predecessors),
            )
        )
        self._incarnation, self._sent_shards, self._shards_index = incarnation, None, -1
        self._welcomed_ns = self._runtime.now_ns()
        self._send_shards()
        self._send_position(position)
        self._learner.on_attach(attach, incarnation, predecessors, writes_initial=wants_initial_state)
        self._listing = attach.listing
        self._compare_frozen()

    def _compare_frozen(self) -> None:
        """Say how frozen tensors differ from the run's. A warning: a region may hold some of its own on purpose."""
        genesis = self._core.history.genesis
        if genesis is not None and self._listing:
            listing, self._listing = self._listing, b""
            text = self._learner.facts.base_difference = frozen_difference(listing, genesis.listing, genesis.regions)
            if text:
                self._learner.on_message(Warned(text))

    def _first_digests(self, predecessors: tuple[Trained, ...]) -> tuple[bytes, ...]:
        """Return the digests that a new region's script is compared with; none where `run.init` stands for all."""
        genesis = self._core.history.genesis
        is_new = self.known_incarnation < 0 and not any(life.steps for life in predecessors)
        return genesis.fragment_digests if genesis is not None and is_new and self._spec.init is None else ()

    def _send_news_of_position(self) -> None:
        """Tell the learner how far the run is, if the last telling is long enough ago. Also where it stands still,
        as the median learner does: else one that goes on would come through its schedule alone, and never back."""
        now_ns = self._runtime.now_ns()
        if now_ns - self._sent_position_ns >= POSITION_EVERY_NS:
            self._send_position(self._core.leader.progress.position(now_ns=now_ns))

    def _send_position(self, position: RunPosition) -> None:
        self._sent_position, self._sent_position_ns, self._sent_lack = position, self._runtime.now_ns(), self._lack()
        news = RunAdvanced(min(position.steps, STEP_MAX), position.part, self._sent_lack)
        self._runtime.learner_server.send(news)

    def _send_shards(self) -> None:
        """Tell the learner its shards of the data, if that is news. A region that was removed keeps what it had.

        Before the ledger of this folder is committed to its end, the shards may be others' there. A learner waits for
        that as long as an election may take; one that trains goes back to no earlier members.
        """
        is_late = self._runtime.now_ns() - self._welcomed_ns >= LACK_NS
        if not self._core.ledger.has_caught_up and not is_late:
            return
        self._shards_index = self._core.history.account.index
        deal = ShardsGiven(*self._core.history.shards(self._spec.run_id, self._spec.region, self._incarnation))
        if deal.shards and deal != self._sent_shards:
            self._sent_shards = deal
            self._runtime.learner_server.send(deal)

    def _lack(self) -> str:
        """Return why the learner's further steps are of no use; empty while that is no older than an election."""
        now_ns = self._runtime.now_ns()
        own_steps = self._learner.steps_total
        lack = self._core.end.unclosed_end(self._core.ledger.leader, now_ns=now_ns, own_steps=own_steps)
        since_ns = self._lack_since_ns = (self._lack_since_ns or now_ns) if lack else None
        return lack if since_ns is not None and now_ns - since_ns >= LACK_NS else ""
