"""Networks of ledger cores: scenarios, and random faults."""

import pytest

from diloco_node.core.types import LeaderBody
from tests.kit.ledger_kit import TIMEOUT_NS, a_discard, a_round
from tests.kit.ledger_network import Network, shake

# ---- scenarios -------------------------------------------------------------------------------------------------------


def test_three_voters_elect_a_leader_and_commit_on_all() -> None:
    network = Network(3)
    network.elect()
    body = a_round(1)
    network.give_payload(body, "a", "b", "c")
    network.propose(body)
    network.run_until(lambda: network.has_all(2))
    assert [entry.body for entry in network.committed["a"]] == [LeaderBody(network.leader), body]
    assert network.alarms == []


def test_an_undisturbed_leader_leads_for_ever_and_writes_nothing_more() -> None:
    network = Network(5)
    leader = network.elect()
    network.run(5 * TIMEOUT_NS)
    term = network.cores[leader].term
    sizes = {name: (disk.term, len(disk.entries)) for name, disk in network.disks.items()}
    network.run(200 * TIMEOUT_NS)
    assert network.leader == leader
    assert {name: (disk.term, len(disk.entries)) for name, disk in network.disks.items()} == sizes
    assert sizes[leader] == (term, 1)


def test_a_commit_takes_two_delays_and_one_fsync() -> None:
    network = Network(3)
    leader = network.elect()
    network.run(TIMEOUT_NS)
    began_ns = network.now_ns
    network.propose(a_discard(1))
    network.run_until(lambda: network.cores[leader].commit_index == 2)
    assert network.now_ns - began_ns == 2 * network.delay_ns + network.fsync_ns
    network.run_until(lambda: network.has_all(2))
    assert network.now_ns - began_ns == 3 * network.delay_ns + network.fsync_ns


def test_killing_the_leader_brings_another_within_a_few_timeouts() -> None:
    for seed in range(20):
        network = Network(3, seed=seed)
        old = network.elect()
        network.propose(a_discard(1))
        network.run_until(lambda network=network: network.has_all(2))  # type: ignore[misc]
        network.crash(old)
        killed_ns = network.now_ns
        network.elect()
        assert network.now_ns - killed_ns < 5 * TIMEOUT_NS, seed
        network.start(old)
        network.propose(a_discard(2))
        network.run_until(lambda network=network: network.has_all(4))  # type: ignore[misc]
        assert [entry.body for entry in network.truth][1::2] == [a_discard(1), a_discard(2)]


def test_a_cut_off_leader_steps_down_and_what_it_could_not_commit_is_replaced() -> None:
    network = Network(3, seed=3)
    old = network.elect()
    network.run(TIMEOUT_NS)
    network.isolate(old)
    network.perform(old, network.cores[old].propose(a_discard(66), now_ns=network.now_ns))
    network.run_until(lambda: network.leader not in ("", old))
    new = network.elect()
    network.propose(a_discard(77))
    network.run_until(lambda: network.cores[new].commit_index == 3)
    network.run_until(lambda: not network.cores[old].is_leader)
    network.heal()
    network.run_until(lambda: network.has_all(3))
    assert [entry.body for entry in network.committed[old]][2:] == [a_discard(77)]
    assert a_discard(66) not in [entry.body for entry in network.disks[old].entries]


def test_a_cut_off_follower_disturbs_nobody_when_it_returns() -> None:
    network = Network(3)
    leader = network.elect()
    term = network.cores[leader].term
    away = next(name for name in network.names if name != leader)
    network.isolate(away)
    network.run(50 * TIMEOUT_NS)
    network.heal()
    network.run(10 * TIMEOUT_NS)
    assert network.leader == leader
    assert {core.term for core in network.cores.values()} == {term}


def test_one_way_cuts_do_not_stop_the_majority() -> None:
    for seed in range(10):
        network = Network(3, seed=seed)
        old = network.elect()
        for region in network.names:
            if region != old:
                network.cut.add((region, old))  # the leader is heard, but hears nobody
        network.run(4 * TIMEOUT_NS)
        network.run_until(lambda network=network, old=old: network.leader not in ("", old))  # type: ignore[misc]
        network.elect()
        network.propose(a_discard(1))
        last = network.cores[network.leader].last_index
        network.run_until(lambda network=network, last=last: network.cores[network.leader].commit_index == last)  # type: ignore[misc]


def test_without_a_majority_nothing_is_committed_and_nobody_leads() -> None:
    network = Network(4)
    leader = network.elect()
    committed = len(network.truth)
    for name in [name for name in network.names if name != leader][:2]:
        network.crash(name)
    network.perform(leader, network.cores[leader].propose(a_discard(1), now_ns=network.now_ns))
    network.run(20 * TIMEOUT_NS)
    assert network.leader == ""
    assert len(network.truth) == committed
    network.start(next(name for name in network.names if name not in network.cores))
    network.elect()
    assert a_discard(1) in [entry.body for entry in network.truth]


def test_two_voters_need_each_other() -> None:
    network = Network(2)
    leader = network.elect()
    region = next(name for name in network.names if name != leader)
    network.crash(region)
    network.run(20 * TIMEOUT_NS)
    assert network.leader == ""
    network.start(region)
    network.elect()


def test_a_round_is_committed_when_a_majority_has_its_payload_and_reaches_the_rest_later() -> None:
    network = Network(3)
    leader = network.elect()
    network.run(TIMEOUT_NS)
    second, third = (name for name in network.names if name != leader)
    body = a_round(1)
    network.give_payload(body, leader)
    network.propose(body)
    network.run(10 * TIMEOUT_NS)
    assert network.cores[leader].commit_index == 1
    network.give_payload(body, second)
    network.run_until(lambda: network.cores[second].commit_index == 2)
    network.run(10 * TIMEOUT_NS)
    assert network.cores[third].commit_index == 1
    assert network.cores[third].cluster_commit_index == 2
    assert network.cores[third].missing_payloads() == (body,)
    assert network.leader == leader
    network.give_payload(body, third)
    network.run_until(lambda: network.has_all(2))


def test_a_region_far_behind_catches_up_in_batches() -> None:
    network = Network(3)
    leader = network.elect()
    late = next(name for name in network.names if name != leader)
    network.crash(late)
    for number in range(700):
        network.propose(a_discard(number))
    network.run_until(lambda: network.cores[leader].commit_index == 701)
    network.start(late)
    network.run_until(lambda: network.has_all(701), limit_ns=6 * TIMEOUT_NS)


# ---- random faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("voters", [3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_under_random_faults_there_is_one_order_and_nothing_committed_is_lost(voters: int, seed: int) -> None:
    print(f"seed {seed}")
    network = Network(voters, seed=seed)
    shake(network)
    assert len(network.truth) >= 20
