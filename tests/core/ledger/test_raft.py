"""The ledger core: what it is made of and takes, how it hands the lead over, what the operator sees."""

import pytest

from diloco_node.core.events import LearnerDetached, TimerFired
from diloco_node.core.ledger.election import Role, ballot_paper
from diloco_node.core.messages import Refused, TimeoutNow
from diloco_node.errors import InvalidTransition
from tests.kit.ledger_kit import (
    HEARTBEAT_NS,
    TIMEOUT_NS,
    a_core,
    a_leader,
    a_round,
    ack,
    alarms,
    append_entries,
    arrive,
    chain,
    disk_of,
    sends,
    vote,
    vote_request,
    write_all,
    writes,
)
from tests.kit.ledger_network import Network

# ---- what it takes ---------------------------------------------------------------------------------------------------


def test_events_and_messages_that_are_not_the_ledgers_are_bugs() -> None:
    core = a_core()
    with pytest.raises(InvalidTransition, match="LearnerDetached"):
        core.handle(LearnerDetached(), now_ns=0)
    with pytest.raises(InvalidTransition, match="Refused"):
        arrive(core, "b", Refused(0, 0, "gone"))


def test_who_is_no_voter_is_not_listened_to() -> None:
    core = a_core()
    effects = arrive(core, "z", vote_request(9, False, 99, 9))
    assert core.term == 0
    assert sends(effects) == []
    assert "no voter" in alarms(effects)[0]


# ---- handing over ----------------------------------------------------------------------------------------------------


def test_who_is_offered_the_lead_by_its_leader_stands_at_once() -> None:
    core = a_core(term=1)
    arrive(core, "b", append_entries(chain(1), 1, 0, term=1))
    for peer, term in (("c", 1), ("b", 0), ("b", 2)):
        arrive(core, peer, TimeoutNow(term, "a"))
        assert core.role is Role.FOLLOWER
    effects = arrive(core, "b", TimeoutNow(1, "a"))
    assert (core.role, core.term) == (Role.CANDIDATE, 2)
    assert sends(write_all(core, effects))[0] == ("b", vote_request(2, False, 0, 0))


def test_a_leader_that_stops_hands_over_to_who_has_most() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    arrive(core, "c", ack(1, 2, True, 1), now_ns)
    assert sends(core.hand_over(now_ns=now_ns)) == [(peer, TimeoutNow(1, "c")) for peer in ("b", "c")]


def test_a_leader_does_not_hand_over_to_who_is_silent() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    arrive(core, "c", ack(1, 2, True, 1), now_ns)
    arrive(core, "b", ack(1, 1, True, 0), now_ns + TIMEOUT_NS)
    assert sends(core.hand_over(now_ns=now_ns + TIMEOUT_NS)) == [(peer, TimeoutNow(1, "b")) for peer in ("b", "c")]


def test_after_handing_over_a_voter_never_stands_again_but_votes() -> None:
    core = a_core()
    core.hand_over(now_ns=0)
    assert core.handle(TimerFired(), now_ns=core.wake_at_ns) == []
    assert core.role is Role.FOLLOWER
    arrive(core, "b", append_entries(chain(1), 1, 0, term=1))
    arrive(core, "b", TimeoutNow(1, "a"))
    assert core.role is Role.FOLLOWER
    assert writes(arrive(core, "c", vote_request(2, False, 0, 0)))[0].voted_for == ballot_paper("c", disk_of("c"))


def test_a_hand_over_takes_a_few_delays_and_no_timeout() -> None:
    network = Network(3)
    old = network.elect()
    network.run(TIMEOUT_NS)
    began_ns = network.now_ns
    network.perform(old, network.cores[old].hand_over(now_ns=network.now_ns))
    network.run_until(lambda: network.leader not in ("", old) and network.cores[network.leader].is_settled)
    assert network.now_ns - began_ns < TIMEOUT_NS / 3
    assert network.cores[old].role is Role.FOLLOWER


def test_an_offer_that_was_lost_is_repeated() -> None:
    network = Network(3)
    old = network.elect()
    network.loss = 1.0
    network.perform(old, network.cores[old].hand_over(now_ns=network.now_ns))
    network.run(HEARTBEAT_NS)
    network.loss = 0.0
    network.run_until(lambda: network.leader not in ("", old), limit_ns=3 * HEARTBEAT_NS)


# ---- what the operator sees ------------------------------------------------------------------------------------------


def test_reasons_say_what_is_waited_for() -> None:
    core = a_core()
    assert core.reason == "no leader in term 0 yet"
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert core.reason == "no leader; asks who would vote: a; needs 2 of 3"
    arrive(core, "b", vote(1, True, True))
    assert core.reason == "no leader; stands for election in term 1: a; needs 2 of 3"
    core, _, now_ns = a_leader()
    arrive(core, "b", ack(1, 1, True, 1), now_ns)
    assert core.reason == "leads term 1, entry 0 of 1 is committed; behind: a at 0, c at 0"
    core = a_core(term=1, has_payload=lambda body: False)
    arrive(core, "b", append_entries(chain(1, bodies=lambda index, term: a_round(7, 3)), 1, 1, term=1))
    assert core.reason == "follows b in term 1, committed 0 of 0; waits for the payload of fragment 3 version 7"
