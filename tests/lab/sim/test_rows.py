"""Rows of the data through joins, leaves and kills: none merged twice, and none lost (`lab.sim.row_check`)."""

from collections.abc import Iterator

import pytest

from diloco_node.core.data_shards import SHARDS, region_shards
from diloco_node.core.ledger.shard_account import ShardAccount
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.types import RoundBody
from diloco_node.lab.sim.host import RUN_ID
from diloco_node.lab.sim.planting import signed
from tests.kit.small_world import Small

pytestmark = pytest.mark.world


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


def order(small: Small, region: str, kind: str) -> None:
    host = small.hosts[small.leader()]
    body = signed(host.core.ledger.disks.roster, MembershipBody(region, kind))
    change = EntryOrdered(body, is_cut_off=kind == "former", is_forced=kind == "former")
    assert host.core.replacement.order_fault(change, now_ns=small.world.now_ns) == ""
    host.post(change)
    small.go(2)
    assert host.core.history.roster.kind_of(region) == kind


def positions(small: Small) -> dict[int, int]:
    account = small.hosts[small.leader()].core.history.account.shards
    return {shard: account.position(shard) for shard in range(SHARDS)}


def live(small: Small) -> None:
    """A region joins while another trains on without a daemon, learners and a region die, another region leaves.

    The joiner begins where the other is just now. That one is away for so short a time that its steps are merged.
    """
    (joiner,) = small.sim.setup.joiners
    small.go(6)
    deaf = small.hosts[next(name for name in small.others() if name != joiner)]
    deaf.kill_daemon()
    small.sim.start_region(joiner)
    small.sim.honest[joiner] = small.hosts[joiner]
    while (learner := small.hosts[joiner].learner) is None:
        small.go(0.1)
    assert deaf.learner is not None
    learner._shard = deaf.learner._shard
    order(small, joiner, "contributor")
    small.go(1.5)
    deaf.start_daemon()
    small.go(8)
    for _ in range(3):
        small.go(3)
        for name in sorted(small.hosts):
            small.hosts[name].kill_learner()
            small.go(0.3)
            small.hosts[name].start_learner()
    first = small.others()[0]
    small.hosts[first].kill_daemon(is_power_cut=True)
    small.hosts[first].kill_learner(is_power_cut=True)
    small.go(2)
    small.hosts[first].start()
    small.go(4)
    leaver = next(name for name in small.others() if name not in (joiner, first))
    order(small, leaver, "former")
    small.hosts[leaver].kill_daemon()
    small.hosts[leaver].kill_learner()
    del small.sim.honest[leaver], small.hosts[leaver]
    small.go(4)


@pytest.mark.parametrize("summary_entries", [12, pytest.param(1024, marks=pytest.mark.seeds)])
def test_no_row_is_merged_twice_or_lost_through_joins_leaves_and_kills(
    patch: pytest.MonkeyPatch, summary_entries: int
) -> None:
    small = Small(patch, 4, joiners=1, summary_entries=summary_entries)
    names = set(small.hosts)
    live(small)
    small.settle()
    after = positions(small)
    assert sum(after.values()) > 300
    # Shards of who left, and of the founders that the joiner took, went on.
    (leaver,) = names - set(small.hosts)
    (joiner,) = small.sim.setup.joiners
    taken = set(region_shards(RUN_ID, joiner, small.hosts)) & {shard for shard, row in after.items() if row}
    assert taken
    learners = [
        {member.contribution.learner for member in body.members}
        for body in small.bodies()
        if isinstance(body, RoundBody)
    ]
    assert joiner in learners[-1]
    assert leaver not in learners[-1]


def test_who_begins_a_shard_before_its_owner_gives_it_up_is_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardAccount, "_hand_over", lambda *_: None)
    patch.setattr(ShardAccount, "fault", lambda *_: "")  # else nobody would merge it
    with pytest.raises(AssertionError, match="rows: row"):
        live(Small(patch, 4, joiners=1))
