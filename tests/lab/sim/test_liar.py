"""A region that lies, and the worst moments: what they change of a run, and what they leave as it is."""

from typing import Any

import pytest

from diloco_node.core import messages as msg
from diloco_node.core.types import Ballot
from diloco_node.errors import ConfigError
from diloco_node.lab.sim import simulation as module
from diloco_node.lab.sim.fault_storm import SCHEDULES, SWARM, Chaos
from diloco_node.lab.sim.liar import COUNTED, Liar
from diloco_node.lab.sim.seed_report import format_report
from diloco_node.lab.sim.simulation import Simulation, simulate
from diloco_node.wire.envelope import decode_bulk, decode_control, encode_begin, encode_control

pytestmark = pytest.mark.world


def a_liar(rate: float = 1.0) -> tuple[Simulation, Liar]:
    simulation = Simulation(5, regions=3)
    liar = simulation.begin_lies()
    liar.rate = rate
    return simulation, liar


def sent(simulation: Simulation, liar: Liar, message: Any) -> Any:
    return decode_control(simulation.network.frame_spoilers[liar.region]("anybody", encode_control(message)))


def test_a_lie_is_another_message_of_the_same_type_that_the_schema_lets_pass() -> None:
    simulation, liar = a_liar()
    truth = msg.PayloadDurable(Ballot(3, 2), bytes(32))
    told = [sent(simulation, liar, truth) for _ in range(60)]
    assert {type(one) for one in told} == {msg.PayloadDurable}
    assert len(set(told)) > 10
    assert sum(liar.lies.values()) == 60


def test_fields_by_which_majorities_are_counted_are_left_as_they_are() -> None:
    simulation, liar = a_liar()
    truth = msg.RequestVote(7, False, 12, 6, bytes(16), True)
    told = [sent(simulation, liar, truth) for _ in range(60)]
    assert {(one.last_index, one.last_term) for one in told} == {(12, 6)}
    assert len({one.term for one in told}) > 5
    assert set(COUNTED) <= {msg.RequestVote, msg.RequestVoteReply, msg.AppendEntries, msg.AppendEntriesReply}


def test_no_stripe_is_of_a_fragment_or_blocks_that_there_are_not() -> None:
    simulation, liar = a_liar()
    truth, layouts = msg.MergedStripe(Ballot(3, 2), 0, 0, 1, bytes(32), 0, 1), simulation.setup.layouts
    spoil = simulation.network.bulk_spoilers[liar.region]
    headers = [decode_bulk(spoil("anybody", encode_begin(0, truth, 512), bytes(512))[0]).header for _ in range(200)]
    assert len(set(headers)) > 10
    for header in headers:
        assert 0 <= header.block_start < header.block_stop <= layouts[header.fragment].block_count


def test_an_honest_region_says_what_it_said() -> None:
    simulation, liar = a_liar()
    liar.is_over = True
    truth = msg.PayloadDurable(Ballot(3, 2), bytes(32))
    assert [sent(simulation, liar, truth) for _ in range(20)] == [truth] * 20
    assert sorted([liar.region, *simulation.honest]) == sorted(simulation.hosts)


def test_an_exception_in_a_core_is_a_finding_with_its_seed() -> None:
    simulation = Simulation(5, regions=3)

    def boom() -> None:
        raise IndexError("one too many")

    simulation.world.after(10, None, boom)
    simulation.run_until(lambda: False)
    assert "crash: IndexError: one too many in boom" in simulation.checkers.violations[0]


@pytest.mark.parametrize("is_liar", [True, False])
def test_a_core_that_fails_when_all_is_healed_is_a_finding_unless_it_is_a_liars(
    monkeypatch: pytest.MonkeyPatch, is_liar: bool
) -> None:
    real_core = module.make_core

    def make_core(region: str, *given: Any) -> Any:
        if region == failing:
            raise IndexError("one too many")
        return real_core(region, *given)

    monkeypatch.setattr(module, "make_core", make_core)
    simulation = Simulation(5, regions=3)
    liar = simulation.begin_lies()
    failing = liar.region if is_liar else min(simulation.honest)
    chaos = Chaos(
        simulation.world,
        simulation.network,
        simulation.hosts,
        simulation.checkers,
        schedule="usual",
        mean_gap_events=100,
    )
    with simulation.finding():
        chaos.heal(simulation.excusing_liars)
    if is_liar:
        assert not simulation.checkers.violations
        assert [name for name, host in simulation.hosts.items() if host.core is None] == [failing]
    else:
        assert "crash: IndexError: one too many" in simulation.checkers.violations[0]


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"usual", SWARM}))
def test_a_schedule_keeps_every_promise(schedule: str) -> None:
    report = simulate(31, regions=2 if schedule == "sites" else 3, joiners=0, schedule=schedule, events=1500)
    assert report.is_good, format_report(report)
    assert set(report.faults) <= set(SCHEDULES[schedule])
    assert f"--schedule {schedule}" in report.command


def test_an_unknown_schedule_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="elections"):
        simulate(1, schedule="no-such")


def test_bulk_of_a_gray_link_is_lost_while_control_lives() -> None:
    simulation = Simulation(5, regions=3)
    network, (one, other, _) = simulation.network, simulation.setup.regions
    simulation.hosts[other].start_daemon()
    network.links[one, other].loss = 0.0
    arrived: list[str] = []
    network.places[other] = _Recorder(simulation.hosts[other].daemon_life, arrived)
    for cuts, bytes_max in ((1, 0), (0, 10), (0, 0)):
        link = network.links[one, other]
        link.bulk_cuts, link.bulk_bytes_max = cuts, bytes_max
        network.transfer(one, other, b"header", bytes(20))
        network.send(one, other, b"frame")
    while simulation.world.now_ns < 10**9 and simulation.world.step():
        pass
    assert arrived.count("transfer") == 1
    assert arrived.count("frame") >= 3


class _Recorder:
    def __init__(self, life: Any, arrived: list[str]) -> None:
        self.daemon_life = life
        self._arrived = arrived

    def frame_arrived(self, peer: str, frame: bytes) -> None:
        self._arrived.append("frame")

    def transfer_arrived(self, peer: str, header: bytes, body: bytes) -> None:
        self._arrived.append("transfer")

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        self._arrived.append("link")


def test_the_seed_of_a_report_with_a_liar_runs_it_again() -> None:
    first, again = (simulate(3, regions=3, events=300, liar="words") for _ in range(2))
    assert first == again
    assert first.liar
    assert " --liar 'words'" in first.command
