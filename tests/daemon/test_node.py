"""Whole regions over in-memory links on a virtual clock: whatever drops, all end with one model and one account."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import Membership
from diloco_node.core.messages import FinishRequested, RosterShown
from diloco_node.core.types import RoundBody, RunSettings
from diloco_node.daemon import node as node_module
from diloco_node.daemon.end_wishes import EndWishes
from diloco_node.daemon.final_model import LINGER_S
from diloco_node.daemon.run_record import set_final_aside
from diloco_node.daemon.stopping import DRAIN_SHARE
from diloco_node.errors import ConfigError
from diloco_node.lab.demo.account_check import check_account
from diloco_node.state_names import FINAL_NAME, WISHES_NAME
from diloco_node.storage.trained import read_trained
from tests.kit.memory_transport import MemoryTransport, Network
from tests.kit.node_kit import MANIFEST, NO_BUDGET
from tests.kit.node_world import SOME_IDENTITY, FakeLearner, Region, VirtualLoop

MS = 1_000_000
SHM = Path("/dev/shm")
NAMES = ("a", "b", "c")
STEPS = 80
POLL_S = 0.03
SETTINGS = RunSettings(
    fragments=2,
    sync_every=8,
    steps_max=STEPS,
    heartbeat_ns=50 * MS,
    election_timeout_ns=400 * MS,
    ballot_deadline_min_ns=600 * MS,
    checkpoint_versions=3,
)


class World:
    def __init__(self, folder: Path, settings: RunSettings) -> None:
        self.network = Network()
        MemoryTransport.network = self.network
        self.regions = {
            name: Region(name, NAMES, folder / name, settings, seed) for seed, name in enumerate(NAMES, start=1)
        }

    async def start(self) -> None:
        for region in self.regions.values():
            await region.start()

    async def until(self, subject: str, is_so: Callable[[], bool], *, within_s: float = 60.0) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + within_s
        while not is_so():
            self.check()
            assert loop.time() < deadline_s, f"not within {within_s} s: {subject}; {self.describe()}"
            await asyncio.sleep(POLL_S)
        self.check()

    def check(self) -> None:
        for region in self.regions.values():
            assert region.errors == [], region.errors

    def describe(self) -> dict[str, Any]:
        views = {name: region.node.core.view() for name, region in self.regions.items()}
        return {name: (view.role, view.versions, view.waiting, view.finished) for name, view in views.items()}

    def committed(self) -> int:
        return max(region.node.core.history.rounds_committed for region in self.regions.values())

    async def finish(self) -> None:
        """Every region ends by itself; each goes when it wants to."""
        async with asyncio.TaskGroup() as group:
            for region in self.regions.values():
                group.create_task(self._leave(region))

    async def _leave(self, region: Region) -> None:
        await self.until(f"{region.name} ends", lambda: region.has_finished, within_s=120.0)
        self.network.disconnect(region.name)

    def judge(self) -> None:
        """Equal bytes, an account that balances, and nothing left in memory."""
        self.check()
        models = {(region.folder / "final.safetensors").read_bytes() for region in self.regions.values()}
        assert len(models) == 1
        entries = max((region.node.core.ledger.entries for region in self.regions.values()), key=len)
        counters = {
            (name, life.incarnation): (life.steps, life.tokens)
            for name, region in self.regions.items()
            for life in read_trained(region.folder)
        }
        positions = {name: region.node.learner.shown_status for name, region in self.regions.items()}
        report = check_account(
            entries,
            counters,
            fragment_sizes=[region.size for region in MANIFEST.fragments],
            positions={name: region for name, region in positions.items() if region is not None},
        )
        assert report.faults == ()
        assert report.merged > 0
        for region in self.regions.values():
            view = region.node.core.view()
            assert view.digest_differences == 0
            assert region.node.effects.stripes.table.buffered_bytes() == 0
            assert region.node.effects.fetcher.serves == 0
            # What a learner was given last is what the region holds.
            for fragment in range(len(MANIFEST.fragments)):
                if region.learner.positions[fragment].base_version == view.versions[fragment]:
                    assert region.learner.base[fragment].tobytes() == region.node.parameters.theta[fragment].tobytes()

    async def stop(self) -> None:
        for region in self.regions.values():
            await region.stop()


Play = Callable[[Callable[[World], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    monkeypatch.setattr(node_module, "GrpcTransport", MemoryTransport)
    monkeypatch.setattr(node_module, "load_identity", lambda *_, **__: SOME_IDENTITY)
    # In memory where possible: an fsync on a busy disk takes longer than everything else here.
    folder = Path(tempfile.mkdtemp(prefix="dl-", dir=SHM if SHM.is_dir() else None))

    def run(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            world = World(folder, SETTINGS)
            await world.start()
            try:
                await scenario(world)
                world.judge()
            finally:
                await world.stop()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())

    yield run
    shutil.rmtree(folder)


def test_three_regions_train_one_model_to_the_end(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.finish()
        rounds = world.committed()
        assert rounds >= 2 * STEPS // 8 - 2
        for region in world.regions.values():
            assert region.learner.step >= STEPS - 5
            assert (region.node.core.view().participation[0][1] or 0.0) > 0.9
            assert region.notes.alarms == 0, list(region.notes.last)

    play(scenario)


def test_a_roster_that_a_peer_shows_names_regions_to_link_with_until_the_ledger_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_module, "GrpcTransport", MemoryTransport)
    monkeypatch.setattr(node_module, "load_identity", lambda *_, **__: SOME_IDENTITY)
    calls: list[tuple[dict[str, str | None], set[str]]] = []

    async def show(folder: Path) -> None:
        region = Region("a", NAMES, folder, SETTINGS, 1)
        node = region.node
        authority = SimpleNamespace(signature_fault=lambda _, signature: signature.decode())
        monkeypatch.setattr(node.transport.credentials, "identity", authority, raising=False)
        monkeypatch.setattr(
            node.transport, "follow", lambda addresses, former, **_: calls.append((addresses, set(former)))
        )
        lines = (*Roster.of_voters(NAMES).lines, Membership("d", "voter", b"", 9, "d.example:7400", 1))
        node.control_arrived("b", RosterShown(2, lines, b"forged"))
        assert calls == []
        node.control_arrived("b", RosterShown(2, lines, b""))
        assert calls == [({"b": None, "c": None, "d": "d.example:7400"}, set())]
        node.control_arrived("b", RosterShown(3, (*lines[:-1], Membership("d", "former", b"", 12, "", 1)), b""))
        assert calls[1:] == [({"b": None, "c": None, "d": None}, {"d"})]
        node.control_arrived("c", RosterShown(2, lines, b""))
        assert len(calls) == 2, "an older one, from a peer that is behind"
        node.core.history.roster = Roster(node.core.history.roster.lines, 3)
        node.control_arrived("c", RosterShown(2, lines, b""))
        assert calls[2:] == [({"b": None, "c": None}, set())], "the ledger knows as much"
        region.store.close()
        region.memory.close()

    with tempfile.TemporaryDirectory(prefix="dl-") as folder, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(show(Path(folder)))
    assert len(calls) == 3


def test_a_leader_that_stops_hands_over_and_waits_for_nobody_when_it_is_alone(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.until(
            "all end", lambda: all(region.has_finished for region in world.regions.values()), within_s=120.0
        )
        clock, there, waits_s = asyncio.get_running_loop(), dict(world.regions), []
        while there:
            await world.until(
                "one leads",
                lambda: any(region.node.core.ledger.is_leader for region in there.values()) or len(there) == 1,
            )
            name = next((name for name, region in there.items() if region.node.core.ledger.is_leader), min(there))
            leader, began_s = there.pop(name).node, clock.time()
            await leader.drain(5.0)
            waits_s.append(clock.time() - began_s)
            assert not (leader.core.ledger.is_leader and there)
            await asyncio.sleep(0.5)  # a heartbeat's way
            assert all(region.node.core.liveness.has_left(name) for region in there.values())
            world.network.disconnect(name)
        assert 0 < max(waits_s) < DRAIN_SHARE * 5.0, "the supervisor gives a daemon 5 s"
        assert waits_s[-1] == 0

    play(scenario)


def test_a_learner_that_leaves_is_merged_at_once_though_nobody_else_is_due(play: Play) -> None:
    async def scenario(world: World) -> None:
        leaving = world.regions["b"].learner
        await world.until("the run is half over", lambda: leaving.step > STEPS // 2)
        clock = asyncio.get_running_loop()
        leaving.is_leaving, began_s, step = True, clock.time(), leaving.step
        includes = lambda: all(position.included_step == step for position in leaving.positions)  # noqa: E731
        await world.until("merges include all of its steps", includes, within_s=20.0)
        # A cycle takes longer than that: nobody else was due in every fragment.
        assert clock.time() - began_s < 8 * leaving.step_s + 2.0
        assert world.regions["a"].node.core.liveness.has_left("b")
        leaving.is_leaving = False
        leaving.attach()
        await world.until("b is back", lambda: not world.regions["a"].node.core.liveness.has_left("b"))
        await world.finish()

    play(scenario)


def test_each_learner_is_told_where_the_median_learner_is(play: Play) -> None:
    """The fast one and the slow one: both stand at the same place of the schedule, wherever their own steps are."""

    async def scenario(world: World) -> None:
        slow, fast = world.regions["b"].learner, world.regions["c"].learner
        slow.step_s *= 4
        fast.step_s /= 2
        await world.until("the run is half over", lambda: world.regions["a"].learner.step > STEPS // 2)
        for learner in (slow, fast):
            own_step, liveness = learner.told[-1]
            median = world.regions["a"].learner.step
            assert 0.6 * median < liveness.global_step <= median, (own_step, liveness)
            assert liveness.run_part == liveness.global_step / STEPS
        assert slow.step < 0.4 * median < 1.5 * median < fast.step
        await world.finish()

    play(scenario)


def test_stripes_follow_a_budget_that_is_set_while_the_run_goes_on(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = {"a": 10**9, "b": 10**9, "c": None}

    async def scenario(world: World) -> None:
        for name, region in world.regions.items():
            monkeypatch.setattr(
                region.node.transport,
                "budget_status",
                lambda name=name: NO_BUDGET | {"egress_bytes_per_s": budgets[name]},
            )
        await world.until("rounds go on", lambda: world.committed() >= 4)
        budgets["c"] = 10**6
        liveness = [region.node.core.liveness for region in world.regions.values()]
        await world.until("all know", lambda: all(region.budget("c").egress == 10**6 for region in liveness))
        entries = len(world.regions["a"].node.core.ledger.entries)
        await world.finish()
        bodies = [entry.body for entry in world.regions["a"].node.core.ledger.entries[entries + 4 :]]
        reducers = [{stripe.reducer for stripe in body.stripes} for body in bodies if isinstance(body, RoundBody)]
        assert reducers
        # On a busy machine a ballot may fail, and the next one has other reducers.
        usual = sum(region == {"a", "b"} for region in reducers)
        assert 2 * usual > len(reducers), "c has enough to do with its contribution"

    play(scenario)


async def finish_by_order_of_a_daemon_before(world: World) -> None:
    """Order the end of the run at a region that is cut off, start its daemon anew, and heal the links."""
    region = world.regions["a"]
    for peer in ("b", "c"):
        world.network.cut("a", peer)
    region.node.finish("enough")
    await region.stop_daemon()
    await region.start_daemon()
    for peer in ("b", "c"):
        world.network.heal("a", peer)
    await world.finish()
    assert {region.node.core.view().finished for region in world.regions.values()} == {"enough"}


def test_an_order_to_end_outlives_the_daemon_that_took_it(play: Play) -> None:
    async def scenario(world: World) -> None:
        region = world.regions["a"]
        await world.until("rounds go on", lambda: world.committed() >= 4)
        await finish_by_order_of_a_daemon_before(world)
        with pytest.raises(ConfigError, match=r"the run is over here already .* raise run\.steps or run\.tokens"):
            region.node.finish("once more")
        assert not (region.folder / WISHES_NAME).exists(), "an extension of the run is not ended by it"

    play(scenario)


def test_a_link_that_drops_in_the_middle_of_transfers_costs_no_round(play: Play) -> None:
    async def scenario(world: World) -> None:
        for pair in (("a", "b"), ("b", "c"), ("a", "c")):
            broken = world.network.broken_transfers
            way = frozenset(pair)
            await world.until("bytes are on their way", lambda way=way: world.network.under_way[way] > 0)  # type: ignore[misc]
            world.network.cut(*pair)
            await asyncio.sleep(1.0)
            assert world.network.broken_transfers > broken
            world.network.heal(*pair)
        await world.finish()

    play(scenario)


def test_a_learner_that_stands_still_through_several_versions_goes_on_with_its_own_work(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.until("rounds go on", lambda: world.committed() >= 4)
        learner = world.regions["b"].learner
        # Stopped right after it has contributed: what it is offered includes the snapshot, what follows does not.
        snapshots = learner.snapshots
        await world.until("it contributes", lambda: learner.snapshots > snapshots)
        learner.paused.clear()
        commits = world.committed()
        await world.until("the others go on", lambda: world.committed() >= commits + 6)
        learner.paused.set()
        await world.finish()

    play(scenario)


def test_a_region_that_is_cut_off_at_the_end_still_gets_what_it_lacks(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.until("the end is near", lambda: world.regions["a"].learner.step >= STEPS - 10)
        for peer in ("a", "b"):
            world.network.cut("c", peer)
        await world.until(
            "the others have finished",
            lambda: all(world.regions[name].node.core.view().is_final for name in ("a", "b")),
        )
        await asyncio.sleep(8.0)
        assert not world.regions["a"].has_finished
        assert not world.regions["c"].node.core.view().is_final
        for peer in ("a", "b"):
            world.network.heal("c", peer)
        await world.finish()

    play(scenario)


def test_a_region_that_comes_when_the_others_are_gone_gets_the_end_from_those_that_serve(play: Play) -> None:
    """Whoever serves waits for it, longer than it else would. Until then it trains alone, and does not take itself for
    the run."""

    async def scenario(world: World) -> None:
        late, regions = world.regions["c"], [world.regions[name] for name in ("a", "b")]
        await world.until("the end is near", lambda: world.regions["a"].learner.step >= STEPS - 10)
        for region in regions:
            world.network.cut("c", region.name)
        await world.until(
            "the others go", lambda: all(region.has_finished for region in regions), within_s=4 * LINGER_S
        )
        for region in regions:
            await region.stop_daemon()
            await region.start_daemon(is_serving=True)
        await asyncio.sleep(2 * LINGER_S)
        assert all(region.node.core.view().is_final and not region.has_finished for region in regions)
        assert late.learner.step > 2 * STEPS
        assert not late.node.core.view().finished
        for region in regions:
            world.network.heal("c", region.name)
        await world.finish()

    play(scenario)


async def extend(world: World, order: str = "") -> None:
    """Start all regions of a finished run with more steps; the first one earlier, if it is to take an order then."""
    versions = world.regions["a"].node.core.view().versions
    for region in world.regions.values():
        await region.stop_daemon()
    for seed, region in enumerate(world.regions.values(), start=11):
        set_final_aside(region.folder)
        if region.name == "c":  # as if its disk had refused to remove it
            EndWishes(region.folder, (STEPS, 0)).save([FinishRequested("an order of the first end", True)])
        region.settings = replace(region.settings, steps_max=STEPS + STEPS // 2)
        region.spec = replace(region.spec, settings=region.settings)
        region.learner = FakeLearner(region, seed, 0.05)
        await region.start_daemon()
        if region.name == "a" and order:
            region.node.finish(order)
            await region.stop_daemon()
            set_final_aside(region.folder)  # as the next daemon does, for the ledger still has the end
            await region.start_daemon()
        region.spawn(region.learner.live(), "learner")
    await world.until("the run goes on", lambda: world.regions["a"].node.core.view().versions > versions)


def test_an_order_is_for_the_end_to_come_and_outlives_the_daemon_that_took_it_before_the_extension(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.finish()
        region = world.regions["a"]
        with pytest.raises(
            ConfigError, match=r"over here already \(finished: the median .*; since 20.*raise run.steps"
        ):
            region.node.finish("too late")
        assert not (region.folder / WISHES_NAME).exists()
        await extend(world, order="enough")
        assert world.regions["c"].node.core.end.wishes == (), "it was for the first end"
        await world.finish()
        assert {region.node.core.view().finished for region in world.regions.values()} == {"enough"}
        assert not (region.folder / WISHES_NAME).exists()

    play(scenario)


def test_a_finished_run_goes_on_with_more_steps_and_keeps_its_momentum(play: Play) -> None:
    async def scenario(world: World) -> None:
        await world.finish()
        models = {name: (region.folder / FINAL_NAME).read_bytes() for name, region in world.regions.items()}
        await extend(world)
        parameters = world.regions["a"].node.parameters
        assert all(momentum.any() for momentum in parameters.momentum)
        await world.finish()
        for name, region in world.regions.items():
            assert (region.folder / "final-1.safetensors").read_bytes() == models[name]
            assert (region.folder / FINAL_NAME).read_bytes() != models[name]
            assert STEPS // 2 - 5 <= region.learner.step <= STEPS, "what is left of the way, not all of it"

    play(scenario)


def test_a_learner_that_attaches_anew_in_the_middle_of_everything_loses_nothing(play: Play) -> None:
    async def scenario(world: World) -> None:
        region = world.regions["b"]
        for _ in range(5):
            commits = world.committed()
            await world.until("rounds go on", lambda n=commits: world.committed() > n)  # type: ignore[misc]
            region.node.learner.on_detach()
            region.learner.attach()
        await world.finish()
        assert region.learner.step >= STEPS - 5

    play(scenario)


def test_a_counter_that_rots_while_the_daemon_runs_keeps_no_learner_out(play: Play) -> None:
    async def scenario(world: World) -> None:
        region = world.regions["b"]
        await world.until("rounds go on", lambda: world.committed() >= 4)
        (counter,) = region.folder.glob("learner/trained-*")
        rotten = bytearray(counter.read_bytes())
        rotten[3] ^= 1
        counter.write_bytes(rotten)
        region.node.learner.on_detach()
        region.learner.attach()
        await world.finish()
        assert counter.with_name(counter.name + ".damaged").read_bytes() == rotten
        alarms = [note["text"] for note in region.notes.last if "damaged" in note["text"]]
        assert alarms == [f"{counter.name} was damaged: it is set aside. Look at the disk"]

    play(scenario)


@pytest.mark.parametrize("lost", ["payloads/f000*", "state/f000*", "[ps]*/f*"])
def test_a_daemon_that_finds_files_missing_fetches_them_and_goes_on_with_the_same_learner(
    play: Play, lost: str
) -> None:
    """Also when Theta_0 is among them: the learner is in mid-run and can't write it down again."""

    async def scenario(world: World) -> None:
        region = world.regions["b"]
        await world.until("rounds go on", lambda: world.committed() >= 5)
        await region.stop_daemon()
        await asyncio.sleep(0.5)
        paths = sorted(region.folder.glob(lost))
        assert paths
        for path in paths:
            path.unlink()
        await region.start_daemon()
        base = region.learner.positions[0].base_version
        await world.until("it catches up", lambda: region.learner.positions[0].base_version > base)
        await world.finish()
        assert region.learner.incarnation == 1
        assert region.learner.step >= STEPS - 5

    play(scenario)
