"""What the leader does about ballots that fail: who is to blame by the evidence, and who is left out for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.evidence import Pair, blame_norms, differing_norms, disputed_reducers, late_parts
from diloco_node.core.rounds.open_round import OpenRound, Questioned
from diloco_node.core.rounds.suspicion import BallotPart, Blame, SuspicionBook
from diloco_node.numeric import NS_PER_S


class Judge:
    """See the module.

    Attributes:
        book: who is left out, and for how long.
    """

    def __init__(self, context: RoundContext, book: SuspicionBook) -> None:
        self.book = book
        self._region, self._regions, self._effects = context.region, context.regions, context.effects
        self._passed_over: set[str] = set()
        self._disputes: dict[str, set[str]] = {}

    def deadline_passed(self, one: OpenRound, *, now_ns: int) -> bool:
        """A ballot was too late: leave out of its round whose fault it was.

        The short deadline of a ballot that tries a region is only that region's business.

        Returns:
            Whether the fault is this region's: merged stripes of the others do not come here.
        """
        found = late_parts(one)
        if not one.tried:
            self._blame_all(one, found.blames, now_ns=now_ns)
            return self._region in found.cut_off
        seen = {(blame.region, blame.part): blame for blame in found.blames}
        blames = []
        for name, part in one.tried:
            if (name, part) in seen:
                blames.append(seen[name, part])
            elif not self.book.is_doubted(
                name, part
            ):  # who was left out has to show more than that others are late too
                blames.append(Blame(name, part, "the ballot that tried it took too long"))
        self._blame_all(one, blames, now_ns=now_ns)
        return False

    def disputed(self, one: OpenRound, *, now_ns: int) -> str:
        """Reducers that told a wrong digest: the ballot can't commit. Why, in words; empty if there are none."""
        blames = disputed_reducers(one, len(self._regions))
        self._blame_all(one, blames, now_ns=now_ns)
        return _listed(blames)

    def renamed(self, one: OpenRound, *, now_ns: int) -> str:
        """Members that gave their contribution another name: it never arrives whole. Why, in words."""
        reason = "it gave its contribution another name in the same round"
        blames = [Blame(name, BallotPart.MEMBER, reason, is_proved=True) for name in sorted(one.renamed)]
        one.renamed.clear()
        self._blame_all(one, blames, now_ns=now_ns)
        return _listed(blames)

    def question_norms(self, one: OpenRound, mismatched: tuple[str, ...], *, now_ns: int) -> str:
        """The norms of some contributions do not add up. Who is wrong, the leader finds out with its own eyes.

        Nobody is put out of a round by the word of another region: the next ballot has the same stripes, all reduced by
        the leader. What mismatches then is the member's own fault, and so it is if nobody else reduced.

        Returns:
            What is wrong with members; empty if the leader is to reduce all and look.
        """
        assert one.decision is not None
        fault = "its stripes do not add up to the norms it named"
        if one.reducers != (self._region,):
            reports = tuple(one.merged[index] for index in range(len(one.stripes)))
            one.questioned = Questioned(one.stripes, reports, one.decision.contributions)
            self._note(one, f"norms of {', '.join(mismatched)} do not add up: the leader reduces all stripes itself")
            return ""
        blames = [Blame(name, BallotPart.MEMBER, fault, is_proved=True) for name in mismatched]
        self._blame_all(one, blames, now_ns=now_ns)
        return _listed(blames)

    def answer_norms(self, one: OpenRound, *, now_ns: int) -> None:
        """The leader has reduced the stripes in question itself: whose norms were wrong?"""
        before, one.questioned = one.questioned, None
        if (
            before is None
            or one.reducers != (self._region,)
            or before.blocks() != [(cut.block_start, cut.block_stop) for cut in one.stripes]
        ):
            return
        pairs = differing_norms(before, one)
        self._blame_all(one, blame_norms(pairs, self._disputes), now_ns=now_ns)
        self._remember(pairs)

    def committed(self, one: OpenRound) -> None:
        """A ballot led to a commit: each of its members and reducers did its part."""
        assert one.decision is not None
        members = [(offered.learner, BallotPart.MEMBER) for offered in one.decision.contributions]
        for name, part in [*members, *((name, BallotPart.REDUCER) for name in one.reducers)]:
            if self.book.did(name, part):
                self._effects.note("suspects", f"{name} takes part as {part} again")

    def next_probe(self, rounds: Iterable[OpenRound], *, now_ns: int) -> str:
        """The region that is tried in the next round; empty if there is none, or one is being tried."""
        if any(one.tried for one in rounds):
            return ""
        name = self.book.next_probe(now_ns=now_ns, without=self._passed_over)
        if not name and self._passed_over:
            self._passed_over.clear()
            name = self.book.next_probe(now_ns=now_ns)
        return name

    def tried_parts(
        self, probed: str, members: Collection[str], reducers: Collection[str], *, now_ns: int
    ) -> tuple[tuple[str, BallotPart], ...]:
        """Who is tried by a new ballot: the probed region in parts that it was left out of, and who failed once.

        A probed one that gets no part (a small fragment has fewer blocks than reducers) lets the others try first.
        """
        chosen = {BallotPart.MEMBER: members, BallotPart.REDUCER: reducers}
        found = tuple(
            (probed, part)
            for part, names in chosen.items()
            if probed in names and probed in self.book.held_back(part, now_ns=now_ns)
        )
        if probed and not found:
            self._passed_over.add(probed)
        doubted = (
            (name, part)
            for part, names in chosen.items()
            for name in sorted(set(names))
            if self.book.is_doubted(name, part)
        )
        return (*found, *doubted)

    def _remember(self, pairs: Iterable[Pair]) -> None:
        for member, reducer in pairs:
            self._disputes.setdefault(member, set()).add(reducer)

    def _blame_all(self, one: OpenRound, blames: Sequence[Blame], *, now_ns: int) -> None:
        for blame in blames:
            if blame.part is BallotPart.REDUCER:
                one.excluded.add(blame.region)
            else:
                one.rejected[blame.region] = blame.reason
            pause_ns = self.book.blame(blame, opened_at_ns=one.ballot_at_ns, now_ns=now_ns)
            text = f"{blame.region} as {blame.part}: {blame.reason}"
            if pause_ns is not None:
                self._note(one, f"{text}; left out for {pause_ns / NS_PER_S:.3g} s", is_alarm=True)
            else:
                self._note(one, text)
        if one.excluded >= set(self._regions):
            one.excluded.clear()
        if one.rejected.keys() >= set(one.members) and not any(blame.is_proved for blame in blames):
            one.rejected.clear()

    def _note(self, one: OpenRound, text: str, *, is_alarm: bool = False) -> None:
        self._effects.note("suspects", text, fragment=one.fragment, version=one.version, is_alarm=is_alarm)


def _listed(blames: Sequence[Blame]) -> str:
    return "; ".join(f"{blame.region}: {blame.reason}" for blame in blames)
