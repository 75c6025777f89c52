"""Two regions and a witness: each goes on alone, the other returns by itself, and what is new is never on one disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diloco_node.core.ledger import ledger_state
from diloco_node.core.types import RoundBody
from diloco_node.lab.sim.cheats import older_copy, put_back
from diloco_node.lab.sim.witness_bucket import WITNESS, FakeBucket
from tests.core.test_lies import is_liar
from tests.kit.small_world import Small

pytestmark = pytest.mark.world


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


def two_sites(patch: pytest.MonkeyPatch) -> tuple[Small, FakeBucket]:
    """A run of two regions whose witness has its vote."""
    small = Small(patch, 2, has_witness=True)
    small.go(10)
    bucket = small.sim.checkers.bucket
    assert bucket is not None
    record = bucket.record
    assert record is not None
    for host in small.hosts.values():
        disks = host.core.ledger.disks
        assert disks.roster.voters == ("asia-ne", "eu-west", WITNESS)
        assert disks.counts(WITNESS, record.disk)
    return small, bucket


def rounds(small: Small) -> int:
    return sum(isinstance(body, RoundBody) for body in small.bodies())


def stop(small: Small, name: str) -> None:
    small.hosts[name].kill_daemon(is_power_cut=True)
    small.hosts[name].kill_learner(is_power_cut=True)


def test_a_bucket_is_asked_for_nothing_while_both_regions_are_there(patch: pytest.MonkeyPatch) -> None:
    small, bucket = two_sites(patch)
    writes, count = bucket.tag, rounds(small)
    bucket.is_away = True
    small.go(20)
    assert rounds(small) > count + 3
    assert bucket.tag == writes
    small.settle()


@pytest.mark.parametrize("leads", [True, False])
def test_the_region_that_is_left_goes_on_and_the_other_returns(patch: pytest.MonkeyPatch, leads: bool) -> None:
    small, bucket = two_sites(patch)
    name = small.leader() if leads else small.others()[0]
    stop(small, name)
    count = rounds(small)
    small.go(20)
    assert rounds(small) > count + 3
    record = bucket.record
    assert record is not None
    assert len(record.payloads) > 0
    assert record.payloads <= bucket.payloads.keys(), "the newest rounds are there too"
    small.hosts[name].start()
    small.settle()
    small.go(2)
    record = bucket.record
    assert record is not None
    assert not record.entries, "both have them now"
    count = len(bucket.payloads)
    assert count <= 2, "what was on its way stays until the tail begins anew"
    small.go(10)
    assert len(bucket.payloads) <= count


def test_without_the_bucket_one_region_merges_nothing(patch: pytest.MonkeyPatch) -> None:
    small, bucket = two_sites(patch)
    bucket.is_away = True
    stop(small, small.others()[0])
    small.go(1)
    count = len(small.bodies())
    small.go(20)
    assert len(small.bodies()) == count
    bucket.is_away = False
    small.go(20)
    assert len(small.bodies()) > count


def test_a_region_that_lost_its_folder_comes_back(patch: pytest.MonkeyPatch) -> None:
    small, _ = two_sites(patch)
    host = small.hosts[small.others()[0]]
    host.lose_disk()
    small.go(2)
    host.start()
    small.go(30)
    small.settle()
    assert all(other.core.ledger.disks.counts(host.name, host.disk.id) for other in small.hosts.values())


def test_a_leader_whose_folder_comes_back_as_an_older_copy_keeps_nobody_from_the_witness(
    patch: pytest.MonkeyPatch,
) -> None:
    small, _ = two_sites(patch)
    leader, (other,) = small.leader(), small.others()
    is_liar(small, leader)
    older = older_copy(small.hosts[leader])
    small.go(6)
    put_back(small.hosts[leader], older)
    count = rounds(small)
    small.go(20)
    assert f"the folder of {leader} is an older copy" in "".join(note.text for note in small.alarms())
    assert rounds(small) > count + 3, f"{other} and the witness go on, and {leader} is named anew"


def test_a_region_that_returns_while_the_other_is_gone_takes_what_it_lacks_from_the_bucket(
    patch: pytest.MonkeyPatch,
) -> None:
    small, _ = two_sites(patch)
    first, second = small.others()[0], small.leader()
    stop(small, first)
    small.go(5)
    stop(small, second)
    count = rounds(small)
    small.hosts[first].start()
    small.go(30)
    assert small.leader() == first
    assert rounds(small) > count + 3
    small.hosts[second].start()
    small.settle()


def test_of_two_regions_that_do_not_hear_each_other_the_same_goes_on(patch: pytest.MonkeyPatch) -> None:
    small, _ = two_sites(patch)
    pairs = small.cut(small.leader())
    small.go(15)
    before = {host.core.ledger.term for host in small.hosts.values()}
    count = rounds(small)
    small.go(15)
    assert rounds(small) > count + 3
    assert {host.core.ledger.term for host in small.hosts.values()} == before, "nobody deposes it"
    small.heal(pairs)
    small.settle()


def test_a_bucket_that_was_emptied_is_named_again_and_serves(patch: pytest.MonkeyPatch) -> None:
    small, bucket = two_sites(patch)
    patch.setattr(ledger_state, "WITNESS_HEARTBEATS", 50)
    bucket.empty()
    small.go(30)
    record = bucket.record
    assert record is not None, "it is looked at every few minutes"
    assert small.hosts[small.leader()].core.ledger.disks.counts(WITNESS, record.disk)
    stop(small, small.leader())
    count = rounds(small)
    small.go(20)
    assert rounds(small) > count + 3
