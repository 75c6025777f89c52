"""Small worlds of real cores on virtual time, for tests of the region core as a whole."""

from dataclasses import replace

import pytest

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core import events as ev
from diloco_node.core.events import Note
from diloco_node.core.merge.fragments import build_manifest
from diloco_node.core.region import RegionCore
from diloco_node.core.types import CarryMode, Codec
from diloco_node.core.view import RegionView
from diloco_node.lab.sim import simulation as run
from diloco_node.lab.sim.daemon_host import DaemonHost
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.setup import draw_setup
from diloco_node.lab.sim.simulation import Simulation
from diloco_node.lab.sim.world import MS, SECOND, FakeLink

SEED = 4711
"""Of all worlds here; a world of this seed always has the same trace."""


class Small:
    """Regions on good links; H = 8, P = 4, steps of 100 ms, all learners at the same speed.

    Args:
        slower: how many times as long the steps of each region take, in the order of their names. Versions are then
            taken at the next step boundary, as real learners do.
        host_type: what carries the effects out.
        joiners: how many of the regions, the last by name, do not found the run.
        has_witness: two regions get one, as soon as the run has begun.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        regions: int = 4,
        *,
        loss: float = 0.0,
        slower: tuple[int, ...] = (),
        host_type: type[Host] = Host,
        joiners: int = 0,
        has_witness: bool = False,
        **settings: object,
    ) -> None:
        def setup(rng: object, *_: int) -> object:
            setup_ = draw_setup(rng, regions)  # type: ignore[arg-type]
            own_settings = {
                "fragments": 4,
                "sync_every": 8,
                "quorum_min": 0,
                "carry": CarryMode.CARRY,
                "rounds_in_flight_max": 2,
                "heartbeat_ns": 200 * MS,
                "election_timeout_ns": SECOND,
                "ballot_deadline_min_ns": 2 * SECOND,
                "summary_entries": 1024,
            } | settings
            run_settings = replace(setup_.settings, **own_settings)  # type: ignore[arg-type]
            manifest = build_manifest(setup_.manifest.tensors[:4], 4)
            layouts = tuple(FragmentBlocks(fragment.piece_sizes, Codec.BF16) for fragment in manifest.fragments)
            return replace(
                setup_,
                settings=run_settings,
                manifest=manifest,
                layouts=layouts,
                step_ns_min=100 * MS,
                step_ns_max=100 * MS,
                slower=dict(zip(setup_.regions, slower, strict=False)),
                apply_lag_max=0 if slower else setup_.apply_lag_max,
                is_theta_shared=False,
                joiners=setup_.regions[len(setup_.regions) - joiners :],
            )

        def links(_: object, setup_: object) -> dict[tuple[str, str], FakeLink]:
            names = setup_.regions  # type: ignore[attr-defined]
            return {
                (source, target): FakeLink(20 * MS, MS, loss, 0.0, 2_000_000)
                for source in names
                for target in names
                if source != target
            }

        patch.setattr(run, "draw_setup", setup)
        patch.setattr(run, "draw_links", links)
        self.sim = Simulation(SEED, host_type=host_type, has_witness=has_witness)
        self.world = self.sim.world
        self.hosts = self.sim.hosts
        self.notes: list[tuple[str, Note]] = []
        for name, host in self.hosts.items():
            host.effects.handlers[ev.Note] = lambda note, name=name: self.notes.append((name, note))
            if isinstance(host, DaemonHost):
                host._noted = host.effects.handlers[ev.Note]  # type: ignore[assignment, method-assign]
        self.sim.start()

    def go(self, seconds: float) -> None:
        """Let time pass; a rule that is broken fails the test."""
        until_ns = self.world.now_ns + int(seconds * SECOND)
        self.sim.run_until(lambda: self.world.now_ns > until_ns)
        assert self.sim.checkers.violations == [], f"seed {SEED}: {self.sim.checkers.violations[:2]}"

    def settle(self, seconds: float = 20) -> None:
        """Until everybody has caught up with everything."""
        until_ns = self.world.now_ns + int(seconds * SECOND)
        audit = self.sim.checkers.audit
        self.sim.run_until(
            lambda: (
                self.world.now_ns > until_ns or (self.sim.has_caught_up((0,) * 4) and not audit.open_lines(self.hosts))
            )
        )
        assert self.sim.checkers.violations == [], f"seed {SEED}"
        assert self.sim.has_caught_up((0,) * 4), f"seed {SEED}: not caught up"
        self.sim.check_equal()
        audit.close(self.hosts)
        self.sim.checkers.rows.close(self.hosts)
        assert self.sim.checkers.violations == [], f"seed {SEED}"

    def view(self, name: str) -> RegionView:
        core = self.hosts[name].core
        assert isinstance(core, RegionCore)
        return core.view()

    def leader(self) -> str:
        return next(name for name, host in sorted(self.hosts.items()) if host.is_leading)

    def others(self) -> list[str]:
        return [name for name in sorted(self.hosts) if name != self.leader()]

    def bodies(self) -> list[object]:
        return [entry.body for entry in self.sim.checkers.history]

    def cut(self, name: str) -> list[tuple[str, str]]:
        """Cut a region from all others, both directions."""
        pairs = [(name, peer) for peer in sorted(self.hosts) if peer != name]
        pairs += [(peer, name) for name, peer in pairs]
        self.sim.network.cut_all(pairs)
        return pairs

    def heal(self, pairs: list[tuple[str, str]]) -> None:
        for source, target in pairs:
            self.sim.network.mend(source, target)

    def pause(self, name: str, seconds: float, *, at_step: int = 0) -> None:
        """The learner of a region makes no step for so long, from this step on: it evaluates."""
        learner, world = self.hosts[name].learner, self.world
        boundary, ends_ns = learner._boundary, []

        def held() -> None:
            if learner.step >= at_step and not ends_ns:
                ends_ns.append(world.now_ns + int(seconds * SECOND))
            if ends_ns and world.now_ns < ends_ns[0]:
                world.after(100 * MS, learner.life, held)
            else:
                boundary()

        learner._boundary = held

    def alarms(self) -> list[Note]:
        return [note for _, note in self.notes if note.is_alarm]
