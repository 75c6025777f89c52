"""A region of the fake world: a disk, a daemon that comes and goes, a learner that comes and goes.

`Host` is to the simulator what `daemon/node.py` is to the real daemon: it feeds facts to the region core, carries its
effects out in virtual time, and answers each effect once unless the daemon dies first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from diloco_node.core import events as ev
from diloco_node.core import messages as msg
from diloco_node.core.data_shards import ShardRows
from diloco_node.core.ledger.folder_lives import next_life
from diloco_node.core.types import DISK_ID_BYTES, GenesisBody, Recovered, Stripe
from diloco_node.lab.sim.dataplane import DataPlane
from diloco_node.lab.sim.disk import Disk, DiskPayload, DiskState, LedgerWrite
from diloco_node.lab.sim.fake_effects import FakeEffects
from diloco_node.lab.sim.fake_learner import FakeLearner, FakeSnapshot, Pool
from diloco_node.lab.sim.fetching import FakeFetches
from diloco_node.lab.sim.setup import Setup
from diloco_node.lab.sim.witness_bucket import FakeBucket, FakeWitness
from diloco_node.lab.sim.world import LOCAL_NS, MS, SECOND, FakeNetwork, Life, World
from diloco_node.numeric import F32
from diloco_node.wire.envelope import TransferBegin, decode_bulk, decode_control, encode_begin

if TYPE_CHECKING:
    from diloco_node.lab.sim.checkers import Checkers

WAKES_MAX = 20
"""A core that wants its timer more often than that at one and the same time spins."""

RUN_ID = "simulated"

CoreFactory = Callable[[str, Setup, Recovered, int, int], Any]
"""(region, setup, recovered, seed of this life, now_ns) -> Core."""


class Host:
    """A region.

    Attributes:
        name, setup, world, network, disk. observer: is called at once, and changes nothing here.
        core: of the daemon's current life, None while it is down. plane: that daemon's data plane.
        learner: the current incarnation, None while it is down.
        theta_0: what this region's learner begins with if there is no run yet, per fragment.
        is_absent: nothing starts here: it has not joined yet, has left, or its machine is lost.
        disk_factor, step_factor: how many times slower than usual the disk is, and outer steps are.
        contribution_area: what the learner encoded last, by fragment; it lies in the supervisor's memory.
        make_core: builds the core of each life of the daemon. effects, fetches: carry out what the core wants.
        fsync_is_late: plants a fault: writes are answered before they are durable.
    """

    learner_type: type[FakeLearner] = FakeLearner

    def __init__(
        self,
        name: str,
        *,
        setup: Setup,
        world: World,
        network: FakeNetwork,
        observer: Checkers,
        make_core: CoreFactory,
        pool: Pool,
        theta: tuple[F32, ...],
    ) -> None:
        self.name = name
        self.setup = setup
        self.world = world
        self.network = network
        self.disk = Disk(id=world.rng.randbytes(DISK_ID_BYTES))
        self.core: Any = None
        self.plane = DataPlane(setup, self.disk, self.complain)
        self.learner: FakeLearner | None = None
        self.is_absent = name in setup.joiners
        self.disk_factor = self.step_factor = 1
        # The run's witness, and this daemon's way to it, if it has any.
        self.bucket: FakeBucket | None = None
        self.witness: FakeWitness | None = None
        # True only under a planted fault; the last two go to each life's data plane.
        self.fsync_is_late = self.is_order_loose = False
        # Of a cheat (`cheats`): what its reducer, learner and leader do.
        self.spoil_sum: Callable[[F32], F32] | None = None
        self.token_factor = 1
        self.spoil_core: Callable[[Any], None] | None = None
        self.has_final = False  # survives the daemon: the file is on the disk
        self.observer = observer
        self.make_core = make_core
        self._pool = pool
        self.theta_0 = theta
        # Of the daemon: None while it is down, as `core` is.
        self._life: Life | None = None
        # Daemons started so far; it only grows.
        self._lives = 0
        # Which of them has the wishes for the run's end that were on disk.
        self._recalled = 0
        # Events of this life that the core has not had yet.
        self._events: deque[ev.Event] = deque()
        # Until then the loop stands still, and events wait.
        self._stalled_until_ns = 0
        # The core is handling an event; no second one enters it meanwhile.
        self._is_busy = False
        # When the core is woken next; -1 while nothing wakes it.
        self._armed_ns = -1
        # Wakes at `_woken_ns`: more than WAKES_MAX are a core that spins.
        self._wakes = 0
        self._woken_ns = -1
        # When the disk has done all ledger writes so far: they are durable in their order.
        self._ledger_free_ns = 0
        self.contribution_area: dict[int, FakeSnapshot] = {}
        # Of which learner, daemon and entry the shards were asked for last; which learner was told which.
        self._shards_asked: tuple[object, ...] = ()
        self._shards_told: tuple[object, ...] = ()
        self.fetches = FakeFetches(self)
        self.effects = FakeEffects(self)

    @property
    def daemon_life(self) -> Life | None:
        """The current life of the daemon."""
        return self._life

    @property
    def is_leading(self) -> bool:
        """Whether its daemon is up and leads, as far as it knows itself."""
        return self.core is not None and self.core.ledger.is_leader

    def start(self) -> None:
        """Start what is down of the daemon and the learner."""
        self.start_daemon()
        self.start_learner()

    def leave(self, *, is_power_cut: bool = False) -> None:
        """End daemon and learner; neither starts again."""
        self.is_absent = True
        self.kill_daemon(is_power_cut=is_power_cut)
        self.kill_learner(is_power_cut=is_power_cut)

    def start_daemon(self) -> None:
        """Start a daemon from what the disk holds."""
        if self._life is not None or self.is_absent:
            return
        self._begin_life()
        self.plane = DataPlane(self.setup, self.disk, self.complain)
        self.plane.is_order_loose = self.is_order_loose
        self.plane.spoil_sum = self.spoil_sum
        self.witness = FakeWitness(self, self.bucket) if self.bucket is not None else None
        self._events.clear()
        self._stalled_until_ns = 0
        self.fetches.forget()
        self._armed_ns = -1
        self._ledger_free_ns = self.world.now_ns
        recovery = self.disk.recovered(len(self.setup.layouts))
        seed = self.world.rng.getrandbits(63)
        self.core = self.make_core(self.name, self.setup, recovery, seed, self.world.now_ns)
        if self.spoil_core is not None:
            self.spoil_core(self.core)
        self.world.note(self.name, f"daemon {self._lives} started", b"start")
        self.observer.daemon_started(self)
        self.network.daemon_changed(self.name)
        if not recovery.base.index and not any(isinstance(entry.body, GenesisBody) for entry in recovery.entries):
            self.after(LOCAL_NS, self._tell_initial)
        self.post(ev.TimerFired())
        self._attach_learner()

    def _begin_life(self) -> Life:
        self._lives += 1
        self._life = Life()
        self.disk.life = next_life(self.disk.life, self._lives)
        return self._life

    def kill_daemon(self, *, is_power_cut: bool = False) -> None:
        """SIGKILL: memory is gone, what was not fsynced may be."""
        if self._life is None:
            return
        self._life.is_over = True
        self._life = None
        self.core = None
        self.disk.crash(self.world.rng, is_power_cut=is_power_cut)
        self.world.note(self.name, "daemon died", b"kill")
        self.network.daemon_changed(self.name)
        if self.learner is not None:
            self.learner.forget_daemon()

    def lose_disk(self) -> None:
        """The machine is lost with everything on it; the next daemon finds an empty folder."""
        self.kill_daemon(is_power_cut=True)
        self.kill_learner(is_power_cut=True)
        self.disk = type(self.disk)(id=self.world.rng.randbytes(DISK_ID_BYTES), lost=self.disk)
        self.has_final = False

    def stop_daemon(self) -> None:
        """SIGTERM: offer leadership to another region, then die."""
        if self._life is None:
            return
        self.world.note(self.name, "daemon is asked to stop", b"stop")
        for effect in self.core.hand_over(now_ns=self.world.now_ns):
            self.observer.effect_seen(self, effect)
            self.effects.perform(effect)
        self._arm()
        self.after(self.world.draw_ns(50 * MS, 600 * MS), self.kill_daemon)

    def start_learner(self) -> None:
        """Start a new incarnation of the learner."""
        if self.learner is not None or self.is_absent:
            return
        incarnation = max(self.disk.all_counters, default=0) + 1
        self.disk.counters[incarnation] = (0, 0)
        self.learner = self.make_learner(incarnation)
        self.world.note(self.name, f"learner {incarnation} started", b"learner")
        if not self.disk.states:
            self.world.after(self.fsync_ns(), self.learner.life, self._store_initial)
        self._attach_learner()

    def make_learner(self, incarnation: int) -> FakeLearner:
        """A learner process of this region."""
        learner = self.learner_type(
            self.world,
            self.setup,
            self,
            region=self.name,
            incarnation=incarnation,
            pool=self._pool,
            row_marks=self.disk.row_marks,
        )
        learner.token_factor = self.token_factor
        return learner

    def kill_learner(self, *, is_power_cut: bool = False) -> None:
        """The learner process dies; its counters live in the supervisor's memory unless the power is cut."""
        if self.learner is None:
            return
        learner, self.learner = self.learner, None
        learner.life.is_over = True
        if is_power_cut:
            self.contribution_area.clear()
        elif learner.incarnation:
            self.disk.counters[learner.incarnation] = (learner.step, learner.tokens)
        self.world.note(self.name, "learner died", b"learner-kill")
        self.tell_daemon(ev.LearnerDetached())

    def complain(self, text: str) -> None:
        """A rule of the seam was broken."""
        self.observer.complaint(self.name, text)

    def post(self, event: ev.Event) -> None:
        """Hand a fact to the core, now or right after the one it is busy with."""
        if self._life is None:
            return
        self._events.append(event)
        if not self._is_busy and self._stalled_until_ns <= self.world.now_ns:
            self._give_all()

    def stall(self, for_ns: int) -> None:
        """The daemon's loop gets no time for so long: what happens meanwhile reaches the core only then."""
        self._stalled_until_ns = self.world.now_ns + for_ns
        self.after(for_ns, self._go_on)

    def _go_on(self) -> None:
        if self._stalled_until_ns <= self.world.now_ns and not self._is_busy:
            self._give_all()

    def _give_all(self) -> None:
        self._is_busy = True
        try:
            while self._events and self._life is not None:
                self._give(self._events.popleft())
        finally:
            self._is_busy = False
        self._arm()

    def _give(self, event: ev.Event) -> None:
        self.world.events += 1
        self.observer.event_given(self, event)
        for effect in self.core.handle(event, now_ns=self.world.now_ns):
            self.observer.effect_seen(self, effect)
            self.effects.perform(effect)
        self.settle()

    def settle(self) -> None:
        """Do what follows an event and its effects."""
        self.observer.settled(self)
        self._follow_wishes()
        self.tell_shards()

    def _follow_wishes(self) -> None:
        """Keep the wishes for the run's end on disk, as `daemon.node` does."""
        end = self.core.end
        if self._recalled != self._lives:
            if not self.core.ledger.has_caught_up or self.core.is_replaying:
                return
            self._recalled = self._lives
            end.recall(() if end.end is not None else self.disk.wishes)
        self.disk.wishes = end.wishes

    def tell_shards(self) -> None:
        """Tell the learner its shards of the data, as `daemon.learner.reception` does."""
        learner, history = self.learner, self.core.history
        if learner is None or not learner.incarnation:
            return
        news = (learner, self._lives, history.account.index)
        if news != self._shards_asked and self.core.ledger.has_caught_up:
            self._shards_asked = news
            deal = history.shards(RUN_ID, self.name, learner.incarnation)
            if deal[1] and (learner, deal) != self._shards_told:
                self._shards_told = (learner, deal)
                self.world.after(LOCAL_NS, learner.life, learner.follow_shards, *deal)

    def has_refused(self, event: ev.Event) -> bool:
        """Whether the learner is started anew, for its rows are not to be merged: as `reception` does."""
        shards, is_known = self.core.history.account.shards, self.core.ledger.has_caught_up
        if not isinstance(event, ev.SnapshotTaken) or not is_known or shards.is_ahead(event.contribution):
            return False
        if not shards.fault(event.contribution):
            return False
        self.kill_learner()
        self.after(SECOND, self.start_learner)
        return True

    def rows_trained(self, incarnation: int, ranges: list[ShardRows]) -> None:
        """A step of the learner is made with these rows of the data."""
        self.observer.rows.trained(self.name, incarnation, ranges)

    def frame_arrived(self, peer: str, frame: bytes) -> None:
        """An encoded control message."""
        message = decode_control(frame)
        self.world.note(self.name, message, frame)
        match message:
            case msg.PayloadRequested() | msg.StateRequested():
                self.fetches.serve(peer, message)
            case msg.Refused():
                self.fetches.refused(peer, message)
            case _:
                assert isinstance(message, msg.Message), "only the cores speak here"
                self.post(ev.MessageArrived(peer, message))

    def transfer_arrived(self, peer: str, header: bytes, body: bytes) -> None:
        """A whole bulk transfer."""
        begin = decode_bulk(header)
        assert isinstance(begin, TransferBegin)
        self.world.note(self.name, begin.header, header)
        match begin.header:
            case msg.ContributionStripe() as stripe:
                if self.plane.keep_contribution(stripe, body):
                    blocks = (stripe.block_start, stripe.block_stop)
                    self.post(ev.ContributionStripeArrived(stripe.ballot, stripe.stripe, stripe.contribution, blocks))
            case msg.MergedStripe() as merged_stripe:
                if self.plane.keep_merged(merged_stripe, body):
                    blocks = (merged_stripe.block_start, merged_stripe.block_stop)
                    norms = self.plane.norms_of(merged_stripe.fragment, blocks, body)
                    name = (merged_stripe.ballot, merged_stripe.stripe, merged_stripe.fragment, merged_stripe.version)
                    self.post(ev.MergedStripeArrived(*name, merged_stripe.digest, Stripe(peer, *blocks), norms))
            case msg.Payload() | msg.State() as fetched:
                self.fetches.arrived(peer, fetched, body)

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """The connection to a peer came up or went down."""
        self.world.note(self.name, f"link to {peer} {'up' if is_up else 'down'}", b"link%d" % is_up)
        if not is_up:
            self.fetches.peer_lost(peer)
        self.post(ev.LinkChanged(peer, is_up))

    def _arm(self) -> None:
        """Wake the core when it asked for it. An earlier wake-up that is still under way re-arms itself."""
        if self._life is None:
            return
        wake_at_ns = max(self.core.wake_at_ns, self.world.now_ns)
        if self._armed_ns >= 0 and self._armed_ns <= wake_at_ns:
            return
        self._armed_ns = wake_at_ns
        self.after(wake_at_ns - self.world.now_ns, self._wake, wake_at_ns)

    def _wake(self, armed_ns: int) -> None:
        if armed_ns != self._armed_ns:
            return
        self._armed_ns = -1
        if self.core.wake_at_ns > self.world.now_ns:
            self._arm()
            return
        self.count_wake()
        self.post(ev.TimerFired())

    def count_wake(self) -> None:
        """The core's timer fires."""
        self.world.note(self.name, "timer", b"timer")
        self._wakes = self._wakes + 1 if self.world.now_ns == self._woken_ns else 0
        self._woken_ns = self.world.now_ns
        if self._wakes > WAKES_MAX:
            self.complain(f"the core asks for its timer again and again at {self.core.wake_at_ns} ns")

    def tell_daemon(self, event: ev.Event) -> None:
        """A fact from the learner, over the Unix socket."""
        if self._life is not None:
            self.after(LOCAL_NS, self._learner_event, event)

    def offer_contribution(self, snapshot: FakeSnapshot) -> None:
        """The learner's encoded contribution lies in shared memory."""
        self.contribution_area[snapshot.contribution.fragment] = snapshot
        self.observer.snapshot_seen(self, snapshot)

    def persist_counters(self, incarnation: int, steps: int, tokens: int, on_done: Callable[[], None] | None) -> None:
        """Write the trained counters, which never go back, and the rows that were named."""
        row_marks = self.learner.book.marks if self.learner is not None else {}

        def write() -> None:
            self.disk.row_marks = {**self.disk.row_marks, **row_marks}
            self.disk.counters[incarnation] = max(self.disk.counters.get(incarnation, (0, 0)), (steps, tokens))
            if on_done is not None:
                on_done()

        self.world.after(self.fsync_ns(), self.learner.life if self.learner else None, write)

    def _learner_event(self, event: ev.Event) -> None:
        self.world.note(self.name, event, type(event).__name__.encode())
        if not self.has_refused(event):
            self.post(event)

    def _attach_learner(self) -> None:
        if self.learner is None or self._life is None:
            return
        self.tell_daemon(self.learner.attachment(self.trained_before(self.learner.incarnation)))

    def trained_before(self, incarnation: int) -> tuple[tuple[int, int, int], ...]:
        """Number, steps and tokens of each earlier incarnation."""
        return tuple((number, *count) for number, count in sorted(self.disk.counters.items()) if number < incarnation)

    def _store_initial(self) -> None:
        """The learner's Theta_0 reaches the disk, unless there is something better."""
        if self.disk.states:
            return
        for fragment, theta in enumerate(self.theta_0):
            self.disk.keep_state(fragment, DiskState(0, theta, np.zeros_like(theta)))
        self._tell_initial()

    def _tell_initial(self) -> None:
        states = [self.disk.states.get(fragment) for fragment in range(len(self.setup.layouts))]
        genesis = [state for state in states if state is not None and state.version == 0]
        if len(genesis) == len(states):
            self.post(ev.InitialStateStored(tuple(state.digest() for state in genesis)))

    def after(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        """Call it in `delay_ns`, if this daemon still lives then."""
        self.world.after(delay_ns, self._life, call, *args)

    def fsync_ns(self) -> int:
        """Draw the time of the next fsync."""
        return self.disk_factor * self.world.draw_ns(self.setup.fsync_ns_min, self.setup.fsync_ns_max)

    def write_ledger(self, write: LedgerWrite, on_done: Callable[[], None]) -> None:
        """Append to the ledger, one write after the other; `on_done` comes when it is durable."""
        self.disk.ledger_queue.append(write)
        self._ledger_free_ns = max(self._ledger_free_ns, self.world.now_ns) + self.fsync_ns()
        delay_ns = self._ledger_free_ns - self.world.now_ns
        if self.fsync_is_late:
            self.after(LOCAL_NS, on_done)
            self.after(delay_ns + SECOND // 2, self.disk.fsync_ledger)
            return

        def fsynced() -> None:
            self.disk.fsync_ledger()
            on_done()

        self.after(delay_ns, fsynced)

    def write_file(self, write: Callable[[], None], on_done: Callable[[], None]) -> None:
        """A file that is there once it is fsynced and renamed; `on_done` comes then."""
        self.disk.late_writes.append(write)

        def fsynced() -> None:
            self.disk.fsync_write(write)
            if not self.fsync_is_late:
                on_done()

        self.after(self.fsync_ns() + (SECOND // 2 if self.fsync_is_late else 0), fsynced)
        if self.fsync_is_late:
            self.after(LOCAL_NS, on_done)

    def write_payload(
        self, fragment: int, version: int, digest: bytes, payload: DiskPayload, squared_norms: tuple[float, ...] = ()
    ) -> None:
        """Write a payload and tell the core when it is durable; of a fetched one, its norms too."""
        self.write_file(
            lambda: self.disk.payloads.__setitem__((fragment, version, digest), payload),
            lambda: self.post(ev.PayloadStored(fragment, version, digest, squared_norms)),
        )

    def transfer(self, peer: str, header: msg.BulkHeader, body: bytes) -> None:
        """Stream bytes to a peer."""
        self.network.transfer(self.name, peer, encode_begin(0, header, len(body)), body)
