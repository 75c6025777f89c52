"""core/rounds/audit_part.py and audit_draw.py: chance of two regions, told when all is fixed; what entries lack."""

from dataclasses import replace

import pytest

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Note, Send
from diloco_node.core.merge.freivalds import draw_windows
from diloco_node.core.messages import AuditDrawn, BallotOpened, ContributionProjected
from diloco_node.core.projections import Project, Projected, Projection
from diloco_node.core.rounds.audit_draw import commitment_of, drawer_of, nonce_of
from diloco_node.core.rounds.audit_part import LAPSES_TOLD, AuditPart
from diloco_node.core.rounds.followed import FollowedBallot, FollowedRound
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import Ballot, Member, MergeRule, RoundBody, Stripe
from tests.kit.rounds_kit import REGIONS, SETTINGS, context_of, contribution

STRIPES = (Stripe("a", 0, 1), Stripe("b", 1, 2), Stripe("c", 2, 3))
DIGEST = b"d" * 32


def announced(number: int, leader: str = "a") -> BallotOpened:
    ballot = Ballot(3, number)
    return BallotOpened(ballot, 0, 1, REGIONS, STRIPES, commitment=commitment_of(nonce_of(leader.encode(), ballot)))


def number_where(*, is_audited: bool, drawer: str) -> int:
    """A ballot of the leader a, by whose nonces the payload is audited or not."""
    for number in range(1, 1000):
        ballot = Ballot(3, number)
        nonces = (nonce_of(b"a", ballot), nonce_of(drawer.encode(), ballot))
        if drawer_of(announced(number), "a") == drawer and bool(draw_windows(nonces, STRIPES, (3,))) is is_audited:
            return number
    raise AssertionError(drawer)


class Desk:
    """Region b in a ballot of the leader a, all merged stripes here, unless a test says otherwise."""

    def __init__(self, number: int, *, merge: MergeRule = MergeRule.RDA, region: str = "b") -> None:
        self.effects = EffectBuffer(region)
        context = context_of(
            RoundHistory(2), region=region, settings=replace(SETTINGS, merge=merge), effects=self.effects
        )
        self.ballot = FollowedBallot("a", announced(number), has_contributed=True, digest=DIGEST)
        self.round = FollowedRound(version=1, ballot=self.ballot, contribution=contribution(region))
        self.audits = AuditPart(context, [self.round, FollowedRound()])

    def follow(self) -> list[object]:
        self.audits.follow(self.round, self.ballot)
        return [effect.message if isinstance(effect, Send) else effect for effect in self.effects.take()]

    def take(self, peer: str, *nonces: bytes) -> list[object]:
        self.audits.take(peer, AuditDrawn(self.ballot.number, DIGEST, nonces))
        return self.follow()

    def nonce(self, region: str) -> bytes:
        return nonce_of(region.encode(), self.ballot.number)

    def next_ballot(self, number: int) -> None:
        self.ballot = self.round.ballot = FollowedBallot("a", announced(number), has_contributed=True, digest=DIGEST)

    def body(self, *nonces: bytes, without: str = "", digest: bytes = DIGEST) -> RoundBody:
        """An entry of the ballot, with a row of each member but one."""
        members = tuple(Member(contribution(name), 1.0) for name in REGIONS)
        windows = len(draw_windows(nonces, STRIPES, self.audits._piece_blocks[0]))
        rows = tuple((0.0,) * windows if name != without else () for name in REGIONS) if windows else ()
        return RoundBody(0, 1, self.ballot.number, members, 1.0, (1.0,), STRIPES, digest, False, (1.0,), nonces, rows)

    def fault(self, body: RoundBody) -> str:
        return self.audits.entry_fault(body, ((1.0,),) * len(REGIONS))

    def alarms(self) -> list[str]:
        return [effect.text for effect in self.effects.take() if isinstance(effect, Note) and effect.is_alarm]


def test_reducers_take_turns_and_the_leader_never_draws_alone_where_another_region_is() -> None:
    assert [drawer_of(announced(number), "a") for number in range(4)] == ["b", "c", "b", "c"]
    alone = replace(announced(1), stripes=(Stripe("a", 0, 3),))
    assert drawer_of(alone, "a") in {"b", "c"}, "the leader reduces alone: a member draws"
    assert drawer_of(replace(alone, members=("a",)), "a") == ""
    assert len({nonce_of(b"a", Ballot(3, 1)), nonce_of(b"a", Ballot(3, 2)), nonce_of(b"a", Ballot(1, 3))}) == 3


def test_nothing_is_told_before_every_merged_stripe_is_here() -> None:
    desk = Desk(number_where(is_audited=True, drawer="b"))
    desk.ballot.digest = b""
    assert desk.follow() == []
    desk.ballot.digest = DIGEST
    drawn = AuditDrawn(desk.ballot.number, DIGEST, (desk.nonce("b"),))
    assert desk.follow() == [drawn, drawn]
    assert desk.effects.local.pop() == drawn, "to itself, too"
    assert desk.follow() == []
    desk.audits.repeat(desk.ballot)
    assert desk.effects.take() == [Send("a", drawn)]
    assert Desk(number_where(is_audited=True, drawer="c")).follow() == [], "another region draws"
    assert Desk(desk.ballot.number.number, merge=MergeRule.TRIMMED).follow() == []


def test_the_row_is_projected_before_the_payload_is_here_and_told_again_when_asked() -> None:
    desk = Desk(number_where(is_audited=True, drawer="c"))
    desk.ballot.digest = b""
    assert desk.take("d", b"x" * 32) == []
    assert desk.ballot.drawn is None, "d draws nothing in this ballot"
    assert desk.take("c", desk.nonce("c")) == []
    assert desk.take("c", b"x" * 32) == []
    assert desk.ballot.drawn is not None
    assert desk.ballot.drawn.nonces == (desk.nonce("c"),), "the first counts"
    (order,) = desk.take("a", desk.nonce("a"), desk.nonce("c"))
    assert isinstance(order, Project)
    assert (order.stripes, order.contribution) == ((), desk.round.contribution)
    desk.ballot.digest = DIGEST
    (order,) = desk.follow()
    assert isinstance(order, Project)
    assert (order.stripes, order.contribution) == (STRIPES, None)
    desk.audits.projected(Projected(desk.ballot.number, Projection(contribution=(0.5,))))
    row = Send("a", ContributionProjected(desk.ballot.number, (0.5,)))
    assert desk.effects.take() == [row]
    desk.audits.projected(Projected(desk.ballot.number, Projection((1.0,), (2.0,))))
    assert desk.effects.take() == []
    assert desk.audits.projection(0, desk.ballot.number) == Projection((1.0,), (2.0,), (0.5,))
    assert desk.take("a", desk.nonce("a"), desk.nonce("c")) == [row.message]


@pytest.mark.parametrize("nonces", [(), (b"x" * 32,)])
def test_a_nonce_that_the_leader_did_not_commit_to_draws_nothing_and_is_refused(nonces: tuple[bytes, ...]) -> None:
    desk = Desk(number_where(is_audited=True, drawer="c"))
    assert desk.take("a", *nonces) == []
    assert desk.ballot.nonces == ()
    assert "another nonce than it committed to" in desk.fault(desk.body(*nonces))


def test_entries_that_go_on_to_lack_what_two_regions_told_are_an_alarm_and_taken() -> None:
    desk, count = Desk(1, region="d"), 0
    for number in range(1, 4 * LAPSES_TOLD + 1):
        desk.next_ballot(number)
        drawer = drawer_of(desk.ballot.announcement, "a")
        desk.take(drawer, desk.nonce(drawer))
        assert desk.fault(desk.body(desk.nonce("a"))) == ""
        alarms = " ".join(desk.alarms())
        assert ("lack the nonce" in alarms) is (number in (2 * LAPSES_TOLD - 1, 2 * LAPSES_TOLD)), number
        count += alarms.count("lack the nonce")
        assert desk.fault(desk.body(desk.nonce("a"))) == "", "asked again, it is no further lapse"
    assert count == 2, "one alarm for each region"


def test_one_region_that_tells_each_another_nonce_or_no_row_deposes_nobody() -> None:
    desk, lapses = Desk(1, region="d"), 0
    for number in range(1, 200):
        desk.next_ballot(number)
        drawer = drawer_of(desk.ballot.announcement, "a")
        nonce = b"x" * 32 if drawer == "b" else desk.nonce(drawer)
        desk.take(drawer, nonce)
        body = desk.body(desk.nonce("a"), desk.nonce(drawer), without="b")
        assert desk.fault(body) == ""
        lapses += any("of b:" in alarm for alarm in desk.alarms())
    assert lapses >= 1


def test_an_entry_with_all_that_was_told_lacks_nothing() -> None:
    desk = Desk(1, region="d")
    for number in range(1, 200):
        desk.next_ballot(number)
        drawer = drawer_of(desk.ballot.announcement, "a")
        desk.take(drawer, desk.nonce(drawer))
        assert desk.fault(desk.body(desk.nonce("a"), desk.nonce(drawer))) == ""
    assert desk.alarms() == []


def test_a_leader_that_gives_up_what_would_be_audited_is_told_once_and_one_that_seldom_does_is_not() -> None:
    desk, alarms = Desk(1, region="d"), list[str]()
    for number in range(1, 80):
        desk.next_ballot(number)
        drawer = drawer_of(desk.ballot.announcement, "a")
        if number % 4 == 0:
            desk.audits.give_up(desk.ballot, "a", STRIPES)
            assert desk.alarms() == [], "nothing was drawn, so the leader knows nothing"
        desk.take(drawer, desk.nonce(drawer))
        if number % 4 == 0:
            desk.audits.give_up(desk.ballot, "b", STRIPES)
            desk.audits.give_up(desk.ballot, "a", (Stripe("a", 0, 3),))
            desk.audits.give_up(desk.ballot, "a", STRIPES)
            alarms += desk.alarms()
            assert len(alarms) == (number >= 4 * LAPSES_TOLD)
    assert f"a gave up {LAPSES_TOLD} ballots once they were drawn" in alarms[0]
    seldom = Desk(1, region="d")
    for number in range(1, 400):
        seldom.next_ballot(number)
        drawer = drawer_of(seldom.ballot.announcement, "a")
        seldom.take(drawer, seldom.nonce(drawer))
        if number % 40 == 0:
            seldom.audits.give_up(seldom.ballot, "a", STRIPES)
    assert seldom.alarms() == []
