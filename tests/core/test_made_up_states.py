"""A leader names states of its own making: who knows the majority's refuses it."""

import pytest

from diloco_node.lab.sim.cheats import CHEATS
from tests.core.test_gray_regions import rate
from tests.core.test_lies import is_liar, refused
from tests.kit.small_world import SEED, Small


@pytest.mark.world
def test_a_leader_that_makes_up_states_leads_no_longer_and_nobody_takes_them(patch: pytest.MonkeyPatch) -> None:
    # The checkers of the simulation compare each state with what the history gives.
    small = Small(patch, sync_every=16)
    small.go(8)
    usual, liar = rate(small, 8), small.leader()
    host = small.hosts[liar]
    CHEATS["states"].begin(host)
    is_liar(small, liar)
    assert host.spoil_core is not None
    host.spoil_core(host.core)  # from now on, and not only from its next start on
    small.go(8)
    assert small.leader() != liar
    assert len(refused(small, liar)) >= 2
    assert rate(small, 8) >= 0.9 * usual, f"seed {SEED}"


@pytest.mark.world
def test_a_made_up_state_waits_for_a_silent_region_where_the_own_one_differs(patch: pytest.MonkeyPatch) -> None:
    small = Small(patch, 3)
    small.go(8)
    liar, (there, silent) = small.leader(), small.others()
    host = small.hosts[liar]
    small.hosts[silent].kill_daemon()
    CHEATS["states"].begin(host)
    is_liar(small, liar)
    assert host.spoil_core is not None
    host.spoil_core(host.core)
    patch.setattr(host.core._upkeep.digests, "to_report", lambda *, now_ns: ())
    small.go(10)
    core = small.hosts[there].core
    assert any(
        "no majority told the state 0707" in core._objections.doubt(body, now_ns=small.world.now_ns)
        for body in core.ledger.missing_payloads()
    )
    assert core.ledger.leader == liar
    small.hosts[silent].start_daemon()
    small.go(10)
    assert small.leader() != liar
    assert not any(small.hosts[name].core.versions.healing for name in (there, silent))
    small.settle()
