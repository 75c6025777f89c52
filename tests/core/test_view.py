"""core/view.py: a learner's participation counts the rounds that were committed while it was live."""

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.membership.liveness import Liveness
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import RoundBody
from diloco_node.core.view import Participation
from tests.kit.rounds_kit import MS, REGIONS, Ledger, committed_round, contribution, status


def test_rounds_count_for_those_that_are_in_them_and_for_live_learners() -> None:
    liveness = Liveness(region="a", regions=REGIONS, heartbeat_ns=199 * MS, effects=EffectBuffer("a"))
    history, ledger = RoundHistory(2, REGIONS), Ledger()
    participation = Participation(history, liveness)

    def commit(body: RoundBody) -> None:
        history.apply(ledger.add(body), now_ns=1)
        participation.count(body)

    commit(committed_round(0, 1, [contribution("b")]))
    liveness.own_learner(status(), now_ns=1)
    commit(committed_round(1, 1, [contribution("b"), contribution("a")]))
    commit(committed_round(0, 2, [contribution("b")]))
    assert participation.ratios() == (("a", 0.5), ("b", 1.0), ("c", None))
    history.apply(ledger.add(MembershipBody("b", "former")), now_ns=1)
    commit(committed_round(1, 2, [contribution("a")]))
    history.apply(ledger.add(MembershipBody("b", "contributor")), now_ns=1)
    assert dict(participation.ratios()) == {"a": 2 / 3, "b": None, "c": None}, "one that comes back is counted anew"
