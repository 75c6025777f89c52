"""Judgement of failed ballots: the evidence tells whom to blame, and the book whom to suspend for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.evidence import blame_norms, blame_sums, differing_norms, dispute_reducers, judge_absences
from diloco_node.core.rounds.open_round import OpenRound, QuestionedBallot, cuts_of
from diloco_node.core.rounds.suspicion import BallotRole, Blame, SuspicionBook
from diloco_node.numeric import NS_PER_S


class Judge:
    """Blame and pardon for failed ballots. book: regions that are suspended, and for how long."""

    def __init__(self, context: RoundContext, book: SuspicionBook) -> None:
        self.book = book
        self._region, self._context, self._effects = context.region, context, context.effects
        self._history = context.history
        self._probes_without_role: set[str] = set()
        self._disputes: dict[str, set[str]] = {}

    def judge_late(self, round_: OpenRound, *, now_ns: int) -> bool:
        """Find the culprits of a ballot that missed its deadline, and take them out of its round.

        A ballot that tries a region has a short deadline. When it misses that, only those on trial are blamed.

        Returns: whether this region is at fault itself: merged stripes of the others do not come here.
        """
        findings = judge_absences(round_, len(self._context.regions))
        if not round_.trials:
            self.blame_all(round_, findings.blames, now_ns=now_ns)
            return self._region in findings.cut_off
        blames_by_role = {(blame.region, blame.role): blame for blame in findings.blames}
        blames = []
        for name, role in round_.trials:
            if (name, role) in blames_by_role:
                blames.append(blames_by_role[name, role])
            elif not self.book.is_doubted(name, role):
                # A region that was left out has to show more than that others are late too.
                blames.append(Blame(name, role, "the ballot that tried it took too long"))
        self.blame_all(round_, blames, now_ns=now_ns)
        return False

    def judge_digests(self, round_: OpenRound, *, now_ns: int) -> str:
        """Blame reducers that told a wrong digest: the ballot can't commit. Return why, in words; empty if none did."""
        return self.blame_all(round_, dispute_reducers(round_, len(self._context.regions)), now_ns=now_ns)

    def judge_sums(
        self, round_: OpenRound, stripes: Mapping[int, tuple[bytes, tuple[float, ...]]], *, now_ns: int
    ) -> str:
        """Blame reducers whose merged stripes can't be the sum. Return why, in words; empty if all can."""
        return self.blame_all(round_, blame_sums(round_, stripes, self._history.settings), now_ns=now_ns)

    def judge_renamers(self, round_: OpenRound, *, now_ns: int) -> str:
        """Blame members that renamed their contribution: it never arrives whole. Return why, in words."""
        reason = "it gave its contribution another name in the same round"
        blames = [Blame(name, BallotRole.MEMBER, reason, is_proved=True) for name in sorted(round_.renamers)]
        round_.renamers.clear()
        return self.blame_all(round_, blames, now_ns=now_ns)

    def question_norms(self, round_: OpenRound, members: tuple[str, ...], *, now_ns: int) -> str:
        """Question the norms of contributions that do not add up.

        No region is put out of a round on another region's word. Where others reduced, the leader reduces the same
        stripes alone in the next ballot. Where it reduced alone, the fault is the member's own.

        Returns: the members' fault, in words; empty if the leader is to reduce all stripes first.
        """
        assert round_.decision is not None
        fault = "its stripes do not add up to the norms it named"
        if round_.reducers != (self._region,):
            reports = tuple(round_.reports[index] for index in range(len(round_.stripes)))
            round_.question = QuestionedBallot(round_.stripes, reports, round_.decision.contributions)
            self._note(round_, f"norms of {', '.join(members)} do not add up: the leader reduces all stripes itself")
            return ""
        blames = [Blame(name, BallotRole.MEMBER, fault, is_proved=True) for name in members]
        return self.blame_all(round_, blames, now_ns=now_ns)

    def answer_norms(self, round_: OpenRound, *, now_ns: int) -> None:
        """Compare the norms in question with those that the leader found itself, and blame the liars."""
        question, round_.question = round_.question, None
        if (
            question is None
            or round_.reducers != (self._region,)
            or cuts_of(question.stripes) != cuts_of(round_.stripes)
        ):
            return
        pairs = differing_norms(question, round_)
        self.blame_all(round_, blame_norms(pairs, self._disputes), now_ns=now_ns)
        for member, reducer in pairs:
            self._disputes.setdefault(member, set()).add(reducer)

    def on_commit(self, round_: OpenRound) -> None:
        """Clear the members and reducers of a committed ballot: each did its part, but who is blamed for this round."""
        assert round_.decision is not None
        members = {contribution.learner for contribution in round_.decision.contributions} - round_.rejections.keys()
        roles = [(name, BallotRole.MEMBER) for name in sorted(members)]
        for name, role in [*roles, *((name, BallotRole.REDUCER) for name in round_.reducers)]:
            if self.book.on_success(name, role):
                self._effects.note("suspects", f"{name} takes part as {role} again")

    def next_probe(self, rounds: Iterable[OpenRound], *, now_ns: int) -> str:
        """Return the region to try in the next round; empty if there is none, or one is being tried."""
        if any(round_.trials for round_ in rounds):
            return ""
        name = self.book.next_probe(now_ns=now_ns, without=self._probes_without_role)
        if not name and self._probes_without_role:
            self._probes_without_role.clear()
            name = self.book.next_probe(now_ns=now_ns)
        return name

    def trials(
        self, probe: str, members: Collection[str], reducers: Collection[str], *, now_ns: int
    ) -> tuple[tuple[str, BallotRole], ...]:
        """Find who is tried by a new ballot: the probed region in its suspended roles, and those that failed once.

        A small fragment may have fewer blocks than reducers, and no role for the probed region: then others go first.
        """
        names_by_role = {BallotRole.MEMBER: members, BallotRole.REDUCER: reducers}
        probes = tuple(
            (probe, role)
            for role, names in names_by_role.items()
            if probe in names and probe in self.book.suspensions(role, now_ns=now_ns)
        )
        if probe and not probes:
            self._probes_without_role.add(probe)
        suspects = (
            (name, role)
            for role, names in names_by_role.items()
            for name in sorted(set(names))
            if self.book.is_doubted(name, role)
        )
        return (*probes, *suspects)

    def blame_all(self, round_: OpenRound, blames: Sequence[Blame], *, now_ns: int) -> str:
        """Take blamed regions out of this round, and suspend them. Return the blames in words; empty if none."""
        for blame in blames:
            if blame.role is BallotRole.REDUCER:
                round_.exclusions.add(blame.region)
            else:
                round_.rejections[blame.region] = blame.reason
            pause_ns = self.book.blame(blame, opened_at_ns=round_.ballot_at_ns, now_ns=now_ns)
            pause = "" if pause_ns is None else f"; left out for {pause_ns / NS_PER_S:.3g} s"
            text = f"{blame.region} as {blame.role}: {blame.reason}{pause}"
            self._note(round_, text, is_alarm=pause_ns is not None)
        # With everybody out no ballot could follow: then all are asked again.
        if round_.exclusions >= set(self._context.regions):
            round_.exclusions.clear()
        if round_.rejections.keys() >= set(round_.members) and not any(blame.is_proved for blame in blames):
            round_.rejections.clear()
        return "; ".join(f"{blame.region}: {blame.reason}" for blame in blames)

    def _note(self, round_: OpenRound, text: str, *, is_alarm: bool = False) -> None:
        self._effects.note("suspects", text, fragment=round_.fragment, version=round_.version, is_alarm=is_alarm)
