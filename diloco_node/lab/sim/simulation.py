"""A simulated run: N real region cores in the fake world, first under faults, then healed.

Phase one checks safety while things go wrong. Phase two heals everything and demands progress: new rounds on every
fragment, all regions at equal versions with equal bytes, which each learner has or was offered, and a complete token
account, within a virtual deadline. Then the run is asked to end, and must: one last round per fragment, the final
files, and an account that still adds up. A fifth of the seeds is asked to end while things still go wrong.
The same seed gives the same trace, whatever PYTHONHASHSEED says.
"""

from __future__ import annotations

import contextlib
import gc
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from diloco_node.core.events import FinishOrdered
from diloco_node.core.types import CarryMode
from diloco_node.errors import ConfigError
from diloco_node.lab.sim import cheats
from diloco_node.lab.sim.audit import Identity
from diloco_node.lab.sim.cheats import Cheating
from diloco_node.lab.sim.checkers import Checkers
from diloco_node.lab.sim.daemon_host import DaemonHost
from diloco_node.lab.sim.fake_learner import update_pool
from diloco_node.lab.sim.fault_storm import ODDS, SCHEDULES, SWARM, Chaos
from diloco_node.lab.sim.host import CoreFactory, Host
from diloco_node.lab.sim.liar import TOLERATED, Liar
from diloco_node.lab.sim.limits import lowered_limits
from diloco_node.lab.sim.member_changes import MemberChanges
from diloco_node.lab.sim.planting import Fault, make_core
from diloco_node.lab.sim.seed_report import EVENTS, FAST, SimReport
from diloco_node.lab.sim.setting_orders import SettingOrders
from diloco_node.lab.sim.setup import HEAL_DEADLINE_NS, Setup, draw_links, draw_setup, hurry
from diloco_node.lab.sim.site_faults import SITES, add_witness
from diloco_node.lab.sim.world import SECOND, FakeNetwork, World
from diloco_node.numeric import F32

COMMITS_MIN = 10
FAULTS_MIN = 5
EVENTS_STRETCH = 4
"""A run whose schedule makes too few commits or faults goes on, up to this many times its events."""

ENDS_UNDER_FAULTS = 0.2
"""Part of the seeds whose run ends while things go wrong."""

LIE_RATES = (0.002, 0.01, 0.05)
"""Part of a liar's messages that it changes."""

WORDS = "words"
LIARS = (WORDS, *cheats.CHEATS)
"""How a region can lie: in words of its own (`liar`), or in right words about what it did wrongly (`cheats`)."""

LIARS_OF = {FAST: LIARS, "daemon": (cheats.OLD_FOLDER,)}
"""By effects: the daemon's own do what they say."""

LIARS_CHANCE = 0.2

JOINERS_CHANCE = 0.25
"""Part of the seeds in which regions come and go; none of these has a liar."""

SITES_CHANCE = 0.1
"""Part of the seeds that are of two regions and a witness."""

SWARMS_CHANCE = 0.4
"""Part of the others that draw their own kinds of faults."""

COMMITS_AFTER_HEALING = 2
"""New versions of every fragment that phase two waits for."""

HOSTS: dict[str, type[Host]] = {FAST: Host, "daemon": DaemonHost}
"""Hosts that carry out effects: fakes that are quick, or the daemon's own effects over a fake disk and links."""


class Simulation:
    """A world built from a seed; `simulate` drives it.

    Attributes:
        world, network, setup, hosts, checkers.
        honest: regions of which everything is demanded: members that are there, all but a liar.
    """

    def __init__(
        self,
        seed: int,
        *,
        regions: int = 0,
        joiners: int = 0,
        fault: Fault | None = None,
        host_type: type[Host] = Host,
        has_witness: bool = False,
        is_hurried: bool = False,
    ) -> None:
        self.world = World(seed)
        rng = self.world.rng
        self.setup = draw_setup(rng, regions, joiners)
        if is_hurried:
            self.setup = hurry(self.setup, rng)
        self.network = FakeNetwork(self.world, draw_links(rng, self.setup))
        self.checkers = Checkers(self.world, self.setup)
        pool = update_pool(self.world, self.setup.layouts)
        shared_theta = _theta(rng, self.setup)
        make_planted: CoreFactory = fault.make_core if fault is not None else make_core

        def make_watched(region: str, *arguments: Any) -> Any:
            # A core may fail over what its disk holds, before it gets its first event.
            self.checkers.busy = region
            return make_planted(region, *arguments)

        self.hosts: dict[str, Host] = {}
        for name in self.setup.regions:
            theta = shared_theta if self.setup.is_theta_shared else _theta(rng, self.setup)
            host = host_type(
                name,
                setup=self.setup,
                world=self.world,
                network=self.network,
                observer=self.checkers,
                make_core=make_watched,
                pool=pool,
                theta=theta,
            )
            if fault is not None:
                fault.plant(host)
            self.hosts[name] = host
            self.network.join(name, host)
        self.checkers.hosts = self.hosts
        if has_witness:
            add_witness(self.world, self.hosts, self.checkers)
        self.honest = {name: self.hosts[name] for name in self.setup.founders}

    def start(self) -> None:
        """Start the founders within a second of each other."""
        for name in self.setup.founders:
            self.start_region(name)

    def start_region(self, name: str) -> None:
        """Start a region within a second."""
        self.hosts[name].is_absent = False
        self.world.after(self.world.draw_ns(0, SECOND), None, self.hosts[name].start_learner)
        self.world.after(self.world.draw_ns(0, SECOND), None, self.hosts[name].start_daemon)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Let things happen until `is_done`, or until a checker found something."""
        with self.finding():
            while not (is_done() or self.checkers.violations) and self._step():
                pass

    def _step(self) -> bool:
        """One step; as `excusing_liars`, without what a context costs each time."""
        try:
            return self.world.step()
        except Exception:
            if not self._is_excused():
                raise
            return True

    @contextlib.contextmanager
    def excusing_liars(self) -> Iterator[None]:
        """A liar whose core fails is down from then on, and that is no finding: what it said to itself is its fault."""
        try:
            yield
        except Exception:
            if not self._is_excused():
                raise

    def _is_excused(self) -> bool:
        if self.checkers.busy not in self.checkers.liars:
            return False
        self.hosts[self.checkers.busy].kill_daemon()
        return True

    @contextlib.contextmanager
    def finding(self) -> Iterator[None]:
        """Whatever a core raises is a finding, told with its seed: also where a fault or its end starts a region."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - see above
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.checkers.violate(f"crash: {type(error).__name__}: {error} in {place.name}, {place.filename}")

    def begin_lies(self, kind: str = WORDS) -> Liar | Cheating:
        """Draw a region that lies from now on; the checks are about the others."""
        rng = self.world.rng
        region = rng.choice(self.setup.founders)
        liars = frozenset({region})
        checkers = self.checkers
        checkers.liars = checkers.oracle.liars = checkers.audit.liars = liars
        del self.honest[region]
        if kind != WORDS:
            cheat = cheats.CHEATS[kind]
            checkers.words, checkers.oracle.excuses_sums = cheat.words, cheat.commits_wrong
            return Cheating(self.hosts[region], cheat)
        checkers.oracle.forgers = liars
        checkers.tolerated.update(TOLERATED)
        return Liar(self.world, self.network, self.hosts, region, rate=rng.choice(LIE_RATES))

    def has_everybody(self, after: tuple[int, ...]) -> bool:
        """Each fragment has a round with every honest learner in it, after these versions."""
        fragments = {
            fragment
            for (fragment, version), body in self.checkers.oracle.committed.items()
            if version > after[fragment]
            and self.honest.keys() <= {member.contribution.learner for member in body.members}
        }
        return len(fragments) == len(after)

    def has_caught_up(self, versions_min: tuple[int, ...]) -> bool:
        """Every region is at the same versions, at least `versions_min`, and its learner too, or has been offered them.

        A late learner takes a version some steps after its offer: there may be no moment at which none waits.
        """
        versions = self.checkers.oracle.versions()
        if any(version < version_min for version, version_min in zip(versions, versions_min, strict=True)):
            return False
        return all(
            tuple(host.plane.versions) == versions and host.learner is not None and host.learner.versions == versions
            for host in self.honest.values()
        )

    def has_ended(self) -> bool:
        """Every region has its final file, every learner has stopped and holds those versions, and all is booked."""
        versions = self.checkers.oracle.versions()
        return (
            all(host.has_final and _is_at(host, versions) for host in self.honest.values())
            and all(host.learner is not None and host.learner.finished for host in self.honest.values())
            and not self.checkers.audit.open_lines(self.honest)
        )

    def is_booked(self, due: Mapping[Identity, int]) -> bool:
        """Whether what was due at one time is in the ledger, of regions that are still there."""
        return self.checkers.audit.is_booked({line: step for line, step in due.items() if line[0] in self.honest})

    def has_told_leavers(self) -> bool:
        """No region runs that was removed."""
        return all(self.hosts[name].core is None for name in self.checkers.members.former)

    def check_equal(self) -> None:
        """All regions hold the oracle's bytes."""
        for name, host in sorted(self.honest.items()):
            for fragment, version in enumerate(host.plane.versions):
                if host.plane.digest(fragment) != self.checkers.oracle.digest_of(fragment, version):
                    self.checkers.violate(f"digest: {name} ends with other bytes at {fragment}/{version}")


def simulate(
    seed: int,
    *,
    regions: int = 0,
    joiners: int | None = None,
    events: int = EVENTS,
    fault: Fault | None = None,
    schedule: str = "",
    liar: str | None = None,
    effects: str = FAST,
    commits_min: int = COMMITS_MIN,
    faults_min: int = FAULTS_MIN,
) -> SimReport:
    """Run one seed.

    Args:
        seed: any integer. regions: 1 to 7; 0 lets the seed choose 3 to 5.
        joiners: how many more may join; with any, members come and go. None lets the seed choose.
        events: facts given to cores in phase one; more if by then there are too few commits or faults, up to
            EVENTS_STRETCH times as many.
        fault: planted into every region. schedule: which faults (`fault_storm.SCHEDULES`); empty lets the seed choose.
        liar: how one region lies (`LIARS`); empty: none does; None lets the seed choose. It is turned honest, or cut
            off, before progress is demanded of the others.
        effects: who carries out what the cores want (`HOSTS`). commits_min, faults_min: of phase one.

    Raises ConfigError: there is no such schedule, are no such effects, or they don't go together.
    """
    _check_names(schedule, liar, effects)
    options = f" --events {events}" * (events != EVENTS) + f" --schedule {schedule}" * bool(schedule)
    options += f" --liar {liar!r}" * bool(liar) + ("" if joiners is None else f" --joiners {joiners}")
    options += f" --effects {effects}" * (effects != FAST)
    can_be_sites = effects == FAST and not liar and not joiners and regions in (0, 2)
    if not schedule:
        schedule = _draw_schedule(seed, can_be_sites=can_be_sites)
    if has_witness := schedule == SITES:
        if not can_be_sites:
            raise ConfigError(f"{SITES!r} is a schedule of two regions, with effects {FAST!r}: nobody lies or joins")
        regions, liar, joiners = 2, "", 0
    lies = _draw_lies(seed, regions, effects) if liar is None else liar
    if joiners is None:
        joiners = _draw_joiners(seed, regions, effects) if not lies else 0
    with _uncollected(), lowered_limits(seed) as limits:
        simulation = Simulation(
            seed,
            regions=regions,
            joiners=joiners,
            fault=fault,
            host_type=HOSTS[effects],
            has_witness=has_witness,
            is_hurried=schedule == SWARM,
        )
        world, checkers = simulation.world, simulation.checkers
        simulation.start()
        schedule_drawn = world.rng.choices(list(ODDS), list(ODDS.values()))[0]
        chaos = Chaos(
            world,
            simulation.network,
            simulation.hosts,
            checkers,
            schedule=schedule or schedule_drawn,
            mean_gap_events=world.rng.choice((150, 250, 400)),
        )
        orders = SettingOrders(seed, world, simulation.hosts, chaos.injected)
        culprit = simulation.begin_lies(lies) if lies else None
        changes = MemberChanges(world, simulation.hosts, simulation.honest, checkers) if joiners else None

        def has_seen_enough() -> bool:
            chaos.poll()
            orders.poll()
            if world.events < events:
                return False
            return world.events >= EVENTS_STRETCH * events or (
                checkers.commits >= commits_min and chaos.total >= faults_min
            )

        simulation.run_until(has_seen_enough)
        ends_under_faults = world.rng.random() < ENDS_UNDER_FAULTS and culprit is None
        if ends_under_faults:
            _ask_for_end(simulation)
            last_event = world.events + events // 5

            def has_gone_on() -> bool:
                chaos.poll()
                orders.poll()
                return world.events >= last_event

            simulation.run_until(has_gone_on)
        events_under_faults, healed_ns = world.events, world.now_ns
        if changes is not None:
            changes.is_over = True
        with simulation.finding():
            chaos.heal(simulation.excusing_liars)
        if culprit is not None:
            _end_lies(simulation, culprit)
        if not ends_under_faults:
            _demand_progress(simulation)
        _demand_end(simulation)
        return SimReport(
            seed=seed,
            regions=len(simulation.setup.founders),
            joiners=joiners,
            options=options,
            fault=fault.name if fault is not None else "",
            effects=effects,
            events=world.events,
            events_under_faults=events_under_faults,
            commits=checkers.commits,
            faults=dict(sorted((chaos.injected + (changes.ordered if changes is not None else Counter())).items())),
            virtual_seconds=world.now_ns / SECOND,
            heal_seconds=(world.now_ns - healed_ns) / SECOND,
            messages_dropped=simulation.network.dropped,
            violations=tuple(checkers.violations),
            trace_digest=world.trace_digest(),
            trace_tail=tuple(world.trace_tail()),
            schedule=chaos.schedule,
            liar=culprit.region if culprit is not None else "",
            lies=dict(sorted(culprit.lies.items())) if culprit is not None else {},
            wrong_sums=len(checkers.oracle.wrong_sums),
            accusations=checkers.accusations,
            limits=limits,
            lie=lies,
        )


def _check_names(schedule: str, liar: str | None, effects: str) -> None:
    if effects not in HOSTS:
        raise ConfigError(f"there are no effects {effects!r}; there are {', '.join(sorted(HOSTS))}")
    if schedule and schedule not in SCHEDULES:
        raise ConfigError(f"there is no schedule {schedule!r}; there are {', '.join(sorted(SCHEDULES))}")
    if liar and liar not in LIARS_OF[effects]:
        raise ConfigError(f"nobody lies about {liar!r} with effects {effects!r}: {', '.join(LIARS_OF[effects])}")


def _draw_lies(seed: int, regions: int, effects: str) -> str:
    if regions in (1, 2):
        return ""  # of two regions nobody knows who lies
    # A draw of its own, so that the other seeds' runs do not depend on it.
    rng = random.Random(f"liar of {seed}")
    return rng.choice(LIARS_OF[effects]) if rng.random() < LIARS_CHANCE else ""


def _draw_joiners(seed: int, regions: int, effects: str) -> int:
    rng = random.Random(f"joiners of {seed}")  # as for liars
    return rng.choice((1, 2)) if effects == FAST and regions <= 5 and rng.random() < JOINERS_CHANCE else 0


def _draw_schedule(seed: int, *, can_be_sites: bool) -> str:
    """One of these two, as for liars; empty: one of the others, from the world's chance."""
    if can_be_sites and random.Random(f"sites of {seed}").random() < SITES_CHANCE:
        return SITES
    return SWARM * (random.Random(f"swarm of {seed}").random() < SWARMS_CHANCE)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing of a run is worth collecting before its end, and the collector takes a twentieth of the time."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


def _end_lies(simulation: Simulation, liar: Liar | Cheating) -> None:
    """It tells the truth from now on, or is cut off for good; always the latter if its log is not what it said."""
    is_cut_off = simulation.world.rng.random() < 0.5 or liar.has_forged
    liar.end()
    # A first start needs every region.
    if is_cut_off and simulation.checkers.oracle.has_begun:
        host = simulation.hosts[liar.region]
        host.kill_daemon()
        host.kill_learner()


def _demand_progress(simulation: Simulation) -> None:
    world, checkers = simulation.world, simulation.checkers
    before = tuple(max(0, version) for version in checkers.oracle.versions())
    versions_min = tuple(version + COMMITS_AFTER_HEALING for version in before)
    deadline_ns = world.now_ns + HEAL_DEADLINE_NS
    due = checkers.audit.open_lines(simulation.honest)

    def has_gone_on() -> bool:
        return world.now_ns > deadline_ns or (
            simulation.has_caught_up(versions_min)
            and simulation.has_everybody(before)
            and simulation.is_booked(due)
            and simulation.has_told_leavers()
        )

    simulation.run_until(has_gone_on)
    if checkers.violations:
        return
    if world.now_ns > deadline_ns:
        at = {name: host.plane.versions for name, host in sorted(simulation.hosts.items())}
        checkers.violate(
            f"progress: {HEAL_DEADLINE_NS // SECOND} s after healing versions are {checkers.oracle.versions()}, "
            f"wanted {versions_min} with everybody in one of them; regions at {at}; "
            f"unbooked lines: {checkers.audit.open_lines(simulation.honest)}; members: {checkers.members.kinds}"
        )
        return
    simulation.check_equal()
    # Where versions overwrite what learners do, something always waits to be booked before the run ends.
    is_overwriting = simulation.setup.settings.carry is CarryMode.OVERWRITE
    if not is_overwriting or not checkers.audit.open_lines(simulation.honest):
        checkers.audit.close(simulation.honest)
        checkers.rows.close(simulation.honest)


def _ask_for_end(simulation: Simulation) -> None:
    """An operator asks every daemon that is up."""
    with simulation.finding():
        for name in simulation.setup.regions:
            with simulation.excusing_liars():
                simulation.hosts[name].post(FinishOrdered("the simulation is over"))


def _demand_end(simulation: Simulation) -> None:
    world, checkers = simulation.world, simulation.checkers
    if checkers.violations:
        return
    _ask_for_end(simulation)
    deadline_ns = world.now_ns + HEAL_DEADLINE_NS
    simulation.run_until(lambda: simulation.has_ended() or world.now_ns > deadline_ns)
    if checkers.violations:
        return
    if world.now_ns > deadline_ns:
        final = {name: host.has_final for name, host in sorted(simulation.hosts.items())}
        checkers.violate(f"end: {HEAL_DEADLINE_NS // SECOND} s after it was asked for, final files are there: {final}")
        return
    simulation.check_equal()
    checkers.audit.close(simulation.honest)
    checkers.rows.close(simulation.honest)


def _is_at(host: Host, versions: tuple[int, ...]) -> bool:
    """The region and its learner hold these versions."""
    return (
        tuple(host.plane.versions) == versions
        and host.learner is not None
        and tuple(local.position.base_version for local in host.learner.parts) == versions
    )


def _theta(rng: random.Random, setup: Setup) -> tuple[F32, ...]:
    generator = np.random.default_rng(rng.getrandbits(32))
    return tuple(generator.standard_normal(layout.values).astype(np.float32) for layout in setup.layouts)
