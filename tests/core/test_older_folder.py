"""An older copy of a follower's folder comes back when its leader has just forgotten what it knew of that folder."""

import pytest

from diloco_node.lab.sim.cheats import older_copy, put_back
from diloco_node.lab.sim.daemon_host import DaemonHost
from diloco_node.lab.sim.host import Host
from tests.core.test_lies import is_liar
from tests.kit.small_world import Small

pytestmark = pytest.mark.world


@pytest.mark.parametrize("host_type", [Host, DaemonHost])
def test_a_leader_that_restarts_and_an_older_copy_of_a_followers_folder_lose_no_committed_round(
    patch: pytest.MonkeyPatch, host_type: type[Host]
) -> None:
    """That leader has on its disk all that the copy has forgotten, and the third region remembers."""
    small = Small(patch, 3, sync_every=16, host_type=host_type)
    small.go(6)
    leader = small.leader()
    follower, witness = small.others()
    is_liar(small, follower)
    older = older_copy(small.hosts[follower])
    length = len(small.bodies())
    small.go(6)
    assert len(small.bodies()) > length + 2
    before = small.bodies()
    small.hosts[leader].kill_daemon()
    put_back(small.hosts[follower], older)
    small.hosts[leader].start_daemon()
    small.go(12)
    assert small.bodies()[: len(before)] == before
    assert len(small.bodies()) > len(before) + 2
    words = f"the folder of {follower} is an older copy"
    assert {name for name, note in small.notes if words in note.text} == {witness}, "the others have forgotten it"
    small.settle()
    ledgers = [small.hosts[name].core.ledger for name in (leader, follower)]
    assert not any(ledger.contradictions for ledger in ledgers)
