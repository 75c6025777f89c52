"""Rank 0's conversation with its daemon, seen from the training thread: join, and what is asked at a step boundary."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from diloco_node.core.merge.fragments import Manifest, TensorSpec, build_manifest
from diloco_node.core.merge.schedule import next_news_step
from diloco_node.errors import LearnerError, StorageError
from diloco_node.learner.contribution_area import area_sizes
from diloco_node.learner.daemon_link import LearnerLink, check_memory
from diloco_node.learner.layouts.shard_map import ShardMap
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.leaving import mark_of_earlier, note_end, remember
from diloco_node.learner.local_fragments import Answer, LearnerFragments
from diloco_node.learner.process_signals import TerminateFlag
from diloco_node.learner.rank_exchange import RankExchange
from diloco_node.learner.ranks import Orders, Ranks
from diloco_node.learner.region_shards import HERE
from diloco_node.learner.run_clock import RunClock, StepTimer
from diloco_node.learner.snapshots import FragmentSettings
from diloco_node.shared_memory import COUNTERS_AREA, PLACE_AREA, PLACE_BYTES, PlaceMark, area_inode, request_area
from diloco_node.storage.trained import AREA_BYTES, TrainedCounter
from diloco_node.wire.learner_link import (
    CONTRIBUTION_AREA,
    LINK_PROTOCOL,
    NEW_PROCESS,
    NO_SNAPSHOT,
    TO_LEARNER,
    VERSION_AREA,
    Attach,
    Done,
    EndWanted,
    Failed,
    OfferApplied,
    Report,
    RunAdvanced,
    SettingsChanged,
    ShardsGiven,
    SnapshotDenied,
    SnapshotRequested,
    Stop,
    ToLearner,
    VersionOffered,
    Warned,
    Welcome,
    merge_rules,
)

log = logging.getLogger("diloco_node.learner")

ENCODER_VARIABLE: Final = "DILOCO_ENCODER"
"""`[learner] encode`, as `diloco-node start` tells it."""

WAIT_SLICE_S: Final = 0.2
NOTE_EVERY_S: Final = 10.0
FLUSH_S: Final = 2.0
REPORT_EVERY_NS: Final = 100_000_000
"""Steps shorter than this are reported when a round may wait for them, else not all: each report costs this process a
tenth of a millisecond, and the daemon half of one. Its next heartbeat is as far away."""

_INCLUDED_STEP: Final = attrgetter("included_step")


class LearnerSession:
    """Rank 0's conversation with its daemon, for the training thread.

    memory: the supervisor's socket. listing: of the frozen tensors of all ranks. specs: of their parameters.

    Attributes:
        welcome: the daemon's answer; None before `join`.
        stop_reason: why the daemon wants the learner to stop; None while it does not.
        final_versions: of all fragments, once the run is over; else empty.
        hold_reason: why further steps are of no use now; empty: go on.
        place: as the supervisor and the daemon see it in shared memory.
    """

    def __init__(
        self,
        socket: Path,
        memory: Path,
        tensors: ModelTensors,
        listing: bytes,
        *,
        specs: tuple[TensorSpec, ...],
        shards: ShardMap,
        ranks: Ranks,
    ) -> None:
        self.welcome: Welcome | None = None
        self.stop_reason: str | None = None
        self.final_versions: tuple[int, ...] = ()
        self.hold_reason = ""
        self.timer = StepTimer()
        self.run_clock = RunClock()
        self.place = PlaceMark(os.getpid())
        # Whether a signal asked this process to stop of late.
        self._has_stop: Callable[[], bool] = lambda: False
        # PLACE_BYTES, from the first Welcome on; and its inode.
        self._place_area: mmap.mmap | None = None
        self._memory_inode = 0
        self._forget_end: Callable[[], object] = lambda: None
        self._memory, self._tensors, self._specs, self._listing = memory, tensors, specs, listing
        self._shards, self._ranks = shards, ranks
        # Both from the first Welcome on, for the life of the process.
        self._fragments: LearnerFragments | None = None
        self._counter: TrainedCounter | None = None
        # Other shards and settings, and a Welcome with a wish for Theta_0, until a boundary takes them.
        self._news: list[ToLearner] = []
        # Fragments whose offer this daemon has made and not been answered; an older daemon's are forgotten.
        self._offered: set[int] = set()
        # Set by the encoder's thread: parameters are not finite, and the next boundary raises.
        self._denied: SnapshotDenied | None = None
        # The script's wish for the end of the run: every daemon is told.
        self._end_wanted: EndWanted | None = None
        # The next step that rounds may wait for, by what was reported and applied last; None: no step is news.
        self._news_step: int | None = None
        # When the last report was due, by the clock of `step`.
        self._reported_ns = 0
        # An attach() before this one had its part, which holds until a daemon welcomes this one.
        self._is_second = False
        self.link = LearnerLink(socket, self._make_attach)

    @property
    def fragments(self) -> LearnerFragments:
        """The fragments; only after `join`."""
        assert self._fragments is not None
        return self._fragments

    def join(self, is_stopping: Callable[[], bool], tell_waiting: Callable[[], object]) -> Welcome | None:
        """Wait for the daemon's Welcome. None if `is_stopping` says so first. Calls `tell_waiting` now and then.

        Raises LearnerError: the daemon refuses this learner, or cuts the model in another way.
        """
        noted_s = time.monotonic()
        if (mark := mark_of_earlier(self._memory)) is not None:
            # The supervisor would let this one wait for ever, or end it.
            self._place_area, self._is_second = mark
            self._write_place(self.place)
        while True:
            self.hear()
            if self.welcome is not None:
                return self.welcome
            if is_stopping() or self.stop_reason is not None:
                return None
            self.link.wait(WAIT_SLICE_S)
            if time.monotonic() - noted_s > NOTE_EVERY_S:
                noted_s = time.monotonic()
                log.info("waiting for the daemon")
                tell_waiting()

    def hear(self) -> bool:
        """Take in what the daemon has told: `stop_reason`, `run_clock`. Returns whether it has asked for something.

        Raises LearnerError: the daemon refuses this learner.
        """
        if not self.link.may_have_commands:
            return bool(self._news)
        with self.link.lock:
            requests = []
            for command in list(self.link.commands()):
                if isinstance(command, SnapshotRequested | VersionOffered):
                    requests.append(command)
                else:
                    self._take_news(command)
            self.link.put_back(*requests)
        return bool(requests or self._news)

    def _make_attach(self) -> Attach:
        """In the link's thread, with its lock held."""
        # The wish of the daemon before is void: the new one's parameters may lie there.
        self._news = [news for news in self._news if not isinstance(news, Welcome)]
        fragments, welcome = self._fragments, self.welcome
        if fragments is not None:
            fragments.finish_reading()
        new = Attach(LINK_PROTOCOL, os.getpid(), self._specs, NEW_PROCESS, "", 0, 0, 0, (), (), self._listing)
        if fragments is None or welcome is None:
            return new
        check_memory(self._memory, self._memory_inode)
        return replace(
            new,
            incarnation=welcome.incarnation,
            run_id=welcome.run_id,
            step=fragments.step,
            tokens=fragments.tokens,
            step_time_ns=self.timer.average_ns,
            positions=tuple(fragments.positions),
            snapshots=fragments.unresolved(),
            slots=tuple(fragments.slots),
        )

    def _welcomed(self, welcome: Welcome) -> None:
        if self.welcome is None or self._fragments is None:
            self._fragments = self._build(welcome)
            HERE.begin(welcome, is_first=True)
            self.run_clock.limit(welcome.steps_max)
            self.run_clock.resume(welcome.global_step)
        elif _identity(welcome) != _identity(self.welcome):
            raise LearnerError(
                f"the new daemon's run is {_identity(welcome)}, this learner's is {_identity(self.welcome)}: "
                "restart the learner"
            )
        self.welcome = welcome
        if self._end_wanted is not None:
            self.link.send(self._end_wanted)
        # Offers of the daemon before are none of this one's.
        self._offered.clear()
        self._news.append(welcome)

    def _build(self, welcome: Welcome) -> LearnerFragments:
        manifest = manifest_of(self._specs, welcome)
        version_area_bytes, contributions_bytes = area_sizes(manifest, welcome.codec_up)
        self._memory_inode = area_inode(self._memory, PLACE_AREA, PLACE_BYTES)
        area = request_area(self._memory, COUNTERS_AREA, AREA_BYTES)
        self._counter = counter = TrainedCounter(Path(welcome.state_dir), welcome.incarnation, area)
        self._place_area = request_area(self._memory, PLACE_AREA, PLACE_BYTES)
        self._write_place(self.place)
        self._forget_end = note_end(self._place_area)

        def make_durable() -> None:
            # A full or failing disk must not stop training; the daemon takes the larger of counter and ledger.
            with contextlib.suppress(StorageError):
                counter.flush()
            with contextlib.suppress(StorageError):
                HERE.save(Path(welcome.state_dir))

        versions = request_area(self._memory, VERSION_AREA, version_area_bytes)
        contributions = request_area(self._memory, CONTRIBUTION_AREA, contributions_bytes)
        return fragments_of(
            welcome,
            self._tensors,
            manifest,
            shards=self._shards,
            ranks=self._ranks,
            version_area=np.frombuffer(versions, np.float32),
            contribution_area=np.frombuffer(contributions, np.uint8),
            answer=self._answer,
            before_ready=make_durable,
        )

    def count(self) -> None:
        """A step was made: count it, durably against a kill, before anybody hears of it."""
        assert self._counter is not None
        self._counter.write(self.fragments.step, self.fragments.tokens)

    @property
    def has_unmerged_steps(self) -> bool:
        """Whether steps of this learner are in no merge yet, and a daemon is there that may bring them into one."""
        fragments = self.fragments
        is_behind = any(position.included_step < fragments.step for position in fragments.positions)
        return self.link.is_up and self.stop_reason is None and fragments.is_placed and is_behind

    @property
    def has_snapshot_out(self) -> bool:
        """Whether a snapshot was taken for a merge whose version has not come."""
        return any(number != NO_SNAPSHOT for number in self.fragments.unresolved())

    def stand(self, checkpoint_step: int) -> None:
        """Write where this learner stands after a boundary. `checkpoint_step`: of the last one on disk; -1: none."""
        place, fragments = self.place, self.fragments
        included_step = min(map(_INCLUDED_STEP, fragments.positions), default=0)
        checkpoint_step = max(checkpoint_step, place.checkpoint_step)
        pause = place.since_s, place.limit_s, place.activity, self._has_stop()
        self._write_place(PlaceMark(place.pid, fragments.step, included_step, checkpoint_step, *pause))

    def pause(self, activity: str, *, since_s: float, limit_s: float) -> None:
        """Write that the loop makes no steps for a while, and why; an empty activity: it goes on."""
        mark = replace(self.place, is_interrupted=self._has_stop())
        self._write_place(replace(mark, activity=activity, since_s=since_s, limit_s=limit_s))

    def fail(self, reason: str) -> None:
        """Write why this learner ends: its script may catch the error, and exit as if nothing had happened."""
        if self.welcome is not None or not self._is_second:
            self._write_place(replace(self.place, fault=reason))

    def follow_stop(self, terminate: TerminateFlag) -> None:
        """Write with each place whether a signal asked this process to stop, and at once when one does."""
        self._has_stop, terminate.note = lambda: terminate.has_stop, self._note_stop

    def _note_stop(self) -> None:
        # In the signal's handler: the script may end in its own.
        self._write_place(replace(self.place, is_interrupted=True))

    def _write_place(self, place: PlaceMark) -> None:
        self.place = place
        if self._place_area is not None:
            self._place_area[:] = place.encode()

    @contextlib.contextmanager
    def boundary(self) -> Iterator[None]:
        """Within it `orders` are carried out, the link is silent. Raises LearnerError: parameters are not finite."""
        with self.link.lock:
            yield
        if self._denied is not None:
            raise LearnerError(
                f"fragment {self._denied.fragment}: {self._denied.reason}. The next start takes the global parameters"
            )

    def orders(self) -> Orders:
        """Return the daemon's orders, within `boundary`: at most one for a fragment. An order that can't be carried
        out yet waits, and so do those behind it. Raises LearnerError: the daemon refuses this learner.
        """
        orders: dict[int, SnapshotRequested | VersionOffered] = {}
        waiting: set[int] = set()
        later: list[ToLearner] = []
        for command in list(self.link.commands()):
            if not isinstance(command, SnapshotRequested | VersionOffered):
                self._take_news(command)
                continue
            index, is_offer = command.fragment, isinstance(command, VersionOffered)
            count = sum(isinstance(order, VersionOffered) is is_offer for order in orders.values())
            is_early = (is_offer and self.fragments.is_busy(index)) or not self.fragments.has_room(command, ahead=count)
            if is_early or index in waiting or index in orders or index in self.fragments.incoming:
                waiting.add(index)
                later.append(command)
                continue
            orders[index] = command
            if is_offer:
                self._offered.add(index)
        self.link.put_back(*later)
        news, self._news = self._news, []
        offers_first = sorted(orders.values(), key=lambda order: (isinstance(order, SnapshotRequested), order.fragment))
        return (*news, *offers_first)

    def _take_news(self, command: ToLearner) -> None:
        match command:
            case Welcome():
                self._welcomed(command)
            case Stop():
                self.stop_reason, self.final_versions = command.reason, command.versions
            case ShardsGiven():
                self._news.append(HERE.recall(command))
            case SettingsChanged() if self.welcome is not None:
                self.welcome = replace(self.welcome, sync_every=command.sync_every)
                self._news.append(command)
            case RunAdvanced():
                self.run_clock.told(command.global_step, command.run_part)
                self.hold_reason = command.reason

    def reply(self, answer: Answer) -> None:
        """Tell the daemon what was carried out; not of an offer that another daemon made."""
        if isinstance(answer, OfferApplied):
            if answer.fragment not in self._offered:
                return
            self._offered.discard(answer.fragment)
            self._note_news(self.fragments.step - 1)
        self.link.send(answer)

    def _answer(self, answer: Answer) -> None:
        """From the encoder's thread."""
        if isinstance(answer, SnapshotDenied):
            self._denied = answer
        self.link.send(answer)

    def report(self, loss: float | None, blocked_ns: int, global_step: int, **held_out: Any) -> None:
        """Tell the daemon how the step went."""
        self.link.send(
            Report(
                step=self.fragments.step,
                tokens=self.fragments.tokens,
                loss=loss,
                step_time_ns=self.timer.average_ns,
                blocked_ns=blocked_ns,
                global_step=global_step,
                **held_out,
            )
        )
        self._note_news(self.fragments.step)

    def want_end(self, reason: str) -> None:
        """Tell the daemon, and those after it, that the script wants the run to end."""
        self._end_wanted = EndWanted(reason)
        self.link.send(self._end_wanted)

    def warn(self, text: str) -> None:
        """Tell the daemon what people should know."""
        self.link.send(Warned(text))

    def is_report_due(self, now_ns: int) -> bool:
        """Whether to report this step: after a while, or if rounds may wait for it or one that was not reported."""
        is_news = self._news_step is not None and self.fragments.step >= self._news_step
        if is_due := is_news or now_ns - self._reported_ns >= REPORT_EVERY_NS:
            self._reported_ns = now_ns
        return is_due

    def _note_news(self, reported_step: int) -> None:
        assert self.welcome is not None
        sync_every = self.welcome.sync_every
        self._news_step = next_news_step(self.fragments.positions, reported_step, sync_every=sync_every)

    def close(self, last: Done | Failed | None, *, has_stop: bool) -> None:
        """Say the last word, let go of everything. has_stop: a signal asked this process, or another rank, to stop."""
        if self._fragments is not None and self._fragments.step and not self.final_versions:
            log.warning("the run goes on: the model does not hold its merged parameters. `export` has them")
        is_interrupted = has_stop and not isinstance(last, Done)
        if is_interrupted and self._place_area is None:  # before the first Welcome
            self._place_area = request_area(self._memory, PLACE_AREA, PLACE_BYTES)
        if last is not None:
            self._forget_end()
        is_over = (self._is_second and self.welcome is None) or (last is None and bool(self.final_versions))
        has_left = isinstance(last, Done) or (is_over and not has_stop)
        self._write_place(remember(replace(self.place, activity="", is_interrupted=is_interrupted, has_left=has_left)))
        if last is not None:
            self.link.send(last)
        self.link.close(FLUSH_S)
        if self._fragments is not None:
            self._fragments.close()
        if self._counter is not None:
            self._counter.close()


def join(session: LearnerSession | None, ranks: Ranks, is_stopping: Callable[[], bool]) -> Welcome | None:
    """The daemon's Welcome on every rank, by rank 0's session; None if `is_stopping` says so first. Raises as that."""
    welcome = session.join(is_stopping, ranks.say_wait) if session is not None else None
    body = ranks.share_late(b"" if welcome is None else TO_LEARNER.encode(welcome))
    if not body:
        return None
    message = TO_LEARNER.decode(body)
    assert isinstance(message, Welcome)
    return message


def manifest_of(specs: tuple[TensorSpec, ...], welcome: Welcome) -> Manifest:
    """How the run cuts this model. Raises LearnerError: the run has another one."""
    manifest = build_manifest(merge_rules(specs, welcome.merge), welcome.fragments)
    if manifest.digest != welcome.manifest_digest:
        raise LearnerError(
            f"this model gives manifest {manifest.digest[:12]}, the run's is {welcome.manifest_digest[:12]}: "
            "the training script builds another model than the run was started with"
        )
    return manifest


def fragments_of(
    welcome: Welcome, tensors: ModelTensors, manifest: Manifest, *, shards: ShardMap, ranks: Ranks, **daemon: Any
) -> LearnerFragments:
    """The fragments of a rank. daemon: on rank 0, what `LearnerFragments` shares with it."""
    group = ranks.bulk_group
    return LearnerFragments(
        tensors,
        manifest,
        FragmentSettings(
            region=welcome.region,
            incarnation=welcome.incarnation,
            codec_up=welcome.codec_up,
            carry=welcome.carry,
            carry_steps_limit=welcome.carry_steps_limit,
            encode="device" if os.environ.get(ENCODER_VARIABLE) == "device" else "host",
        ),
        shards=shards,
        rank=ranks.rank,
        exchange=None if group is None else RankExchange(group, ranks.rank, shards, manifest),
        **daemon,
    )


def _identity(welcome: Welcome) -> tuple[str, str, int, str]:
    return welcome.run_id, welcome.region, welcome.incarnation, welcome.manifest_digest[:12]
