"""Audit of merged payloads: the leader compares them with the projections that the members tell.

A deviation says that a reducer or a member is wrong, not which. So the leader reduces the same stripes alone in the
next ballot. Then it has all contributions, projects them itself, and knows. It does the same where rows that are due
(`freivalds.are_rows_due`) do not come: a region that tells none may be the one whose sum is wrong. And it does so now
and then where nothing is wrong (`freivalds.is_checked`), for a reducer may tell a row that excuses its sum.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from diloco_node.core.merge.freivalds import (
    are_rows_due,
    draw_windows,
    has_other_projections,
    is_checked,
    lacking_rows,
    wrong_reducers,
)
from diloco_node.core.merge.stripes import piece_blocks
from diloco_node.core.messages import AuditDrawn, MergeDecided
from diloco_node.core.projections import ProjectContributions, Projection, Window
from diloco_node.core.rounds.audit_draw import commitment_of, drawer_of, nonce_of
from diloco_node.core.rounds.audit_part import AuditPart
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.judge import Judge
from diloco_node.core.rounds.open_round import OpenRound, cuts_of
from diloco_node.core.rounds.suspicion import BallotRole, Blame
from diloco_node.core.types import Ballot, MergeRule

Rows = tuple[tuple[float, ...], ...]

PROBATION_AUDITS: Final = 16
"""A region that was wrong once may be so again: else it would excuse its sums for some 64 rounds after each pause."""


@dataclass(frozen=True, slots=True)
class QuestionedPayload:
    """A payload that deviates from the sum, or may do so, with all that was known of it in its ballot.

    cuts: blocks of its stripes. projection: the leader's. rows: in the order of the decision.
    """

    cuts: tuple[tuple[int, int], ...]
    windows: tuple[Window, ...]
    projection: Projection
    decision: MergeDecided
    rows: Rows


class PayloadAudit:
    """The leader's audit. Between two calls all its state is in the round, but for the questions, by fragment."""

    def __init__(self, context: RoundContext, judge: Judge, audits: AuditPart) -> None:
        self._region, self._effects, self._judge = context.region, context.effects, judge
        self._liveness, self._audits = context.liveness, audits
        self._piece_blocks = [piece_blocks(fragment.piece_sizes) for fragment in context.fragments]
        self._secret, self._context = context.secret, context
        self._is_on = context.settings.merge is not MergeRule.TRIMMED
        self._questions: dict[int, tuple[int, QuestionedPayload]] = {}
        # By region that was wrong, of how many of its next audits as reducer the rows are checked.
        self._probation: Counter[str] = Counter()

    def clear(self) -> None:
        """Forget all questions: this region leads no longer."""
        self._questions.clear()

    def commitment(self, ballot: Ballot) -> bytes:
        """Return what commits this region to its nonce of a ballot that it opens."""
        return commitment_of(nonce_of(self._secret, ballot))

    def draw(self, round_: OpenRound, *, now_ns: int) -> None:
        """Draw the audit of a merged ballot, once the drawer has told its nonce, is away, or has had half of the
        ballot's time."""
        if round_.nonces or not self._is_on:
            return
        drawer = drawer_of(round_.announcement, self._region)
        answer = round_.draws.get(drawer)
        if answer is not None and answer.digest == round_.digest:
            nonces = answer.nonces[:1]
        else:
            is_late = 2 * (now_ns - round_.ballot_at_ns) >= round_.deadline.duration_ns
            if drawer and not is_late and self._liveness.reaches(drawer, now_ns=now_ns):
                return
            nonces = ()
        round_.nonces = (nonce_of(self._secret, round_.ballot), *nonces)
        round_.windows = draw_windows(round_.nonces, round_.stripes, self._piece_blocks[round_.fragment])
        self.disclose(round_)

    def disclose(self, round_: OpenRound) -> None:
        """Tell the nonces of an audit to those who have told no row; before it is drawn, ask the drawer again."""
        if self._is_on and round_.is_merged and not round_.nonces:
            self._effects.send(drawer_of(round_.announcement, self._region) or self._region, round_.announcement)
        elif round_.windows:
            for name in self._context.regions:
                if name not in round_.projections:
                    self._effects.send(name, AuditDrawn(round_.ballot, round_.digest, round_.nonces))

    def lack(self, round_: OpenRound, *, now_ns: int) -> str:
        """Return what of the audit is on its way, from members that are there, in words; empty if nothing.

        All rows get three quarters of the ballot's time. Asked for a payload that a majority and this region have.
        """
        if self._to_project(round_):
            return f"{self._region}'s own projections of the contributions"
        assert round_.decision is not None
        is_late = 4 * (now_ns - round_.ballot_at_ns) >= 3 * round_.deadline.duration_ns
        windows = round_.windows
        if is_late or not windows:
            is_drawn = bool(round_.nonces) or not self._is_on
            return "" if is_drawn else f"the nonce of {drawer_of(round_.announcement, self._region)}"
        names = {contribution.learner for contribution in round_.decision.contributions} - round_.projections.keys()
        late = sorted(name for name in names if self._liveness.reaches(name, now_ns=now_ns))
        if late and not round_.own_rows.get(windows):
            return f"projections of {', '.join(late)}"
        return "" if len(self._projection(round_).sums) == len(windows) else f"{self._region}'s projection of it"

    def question(self, round_: OpenRound, *, now_ns: int) -> str:
        """Judge a question of the ballot before, then compare this region's projection of the payload with the rows.

        Returns: why the leader has to reduce all stripes alone, in words; empty if the payload may commit.
        """
        assert round_.decision is not None
        self._answer(round_, now_ns=now_ns)
        windows = round_.windows
        if not windows or round_.own_rows.get(windows):
            return ""
        rows, projection = self.rows(round_), self._projection(round_)
        contributions, coefficients = round_.decision.contributions, round_.decision.coefficients
        reasons = wrong_reducers(windows, projection, coefficients, rows)
        for place in lacking_rows(coefficients, rows) if are_rows_due(round_.nonces) else ():
            reasons[contributions[place].learner] = "it has not told its projections, which are due"
        suspects = [name for name in round_.reducers if self._probation[name] > 0]
        self._probation.subtract(suspects)
        if not reasons and (suspects or is_checked(round_.nonces)) and round_.reducers != (self._region,):
            reasons[self._region] = "the rows of this audit are compared with the contributions"
        if reasons:
            payload = QuestionedPayload(cuts_of(round_.stripes), windows, projection, round_.decision, rows)
            self._questions[round_.fragment] = (round_.version, payload)
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())

    def projected(self, round_: OpenRound, windows: tuple[Window, ...], rows: Rows) -> None:
        """Take the rows that this region worked out itself; none: the bytes are gone, and the question with them."""
        round_.own_rows[windows] = rows
        assert round_.decision is not None
        if not rows:
            self._questions.pop(round_.fragment, None)

    def request(self, round_: OpenRound) -> None:
        """Have the contributions projected, if this ballot is to answer a question."""
        assert round_.decision is not None
        for windows in self._to_project(round_):
            if windows not in round_.projecting:
                round_.projecting.add(windows)
                self._effects.emit(
                    ProjectContributions(
                        round_.fragment, round_.version, round_.decision.contributions, round_.stripes, windows
                    )
                )

    def _to_project(self, round_: OpenRound) -> list[tuple[Window, ...]]:
        """Return the windows in which this region is to project the contributions, and has not."""
        question = self._question_of(round_)
        if question is None:
            return []
        return [
            windows
            for windows in dict.fromkeys((question.windows, round_.windows))
            if windows and windows not in round_.own_rows
        ]

    def _question_of(self, round_: OpenRound) -> QuestionedPayload | None:
        """The question that this ballot answers: the leader reduced the same blocks of the same contributions alone."""
        version, question = self._questions.get(round_.fragment, (-1, None))
        if question is None or version != round_.version or round_.decision is None:
            return None
        is_same = round_.reducers == (self._region,) and question.cuts == cuts_of(round_.stripes)
        return question if is_same and question.decision.contributions == round_.decision.contributions else None

    def _projection(self, round_: OpenRound) -> Projection:
        return self._audits.projection(round_.fragment, round_.ballot)

    def rows(self, round_: OpenRound) -> Rows:
        """Return a row per member if the payload is audited, else nothing.

        They are the members', or this region's own of their contributions if it has worked them out.
        """
        assert round_.decision is not None
        windows = round_.windows
        if not windows or round_.own_rows.get(windows):
            return round_.own_rows.get(windows, ())
        rows = (round_.projections.get(contribution.learner, ()) for contribution in round_.decision.contributions)
        return tuple(row if len(row) == len(windows) else () for row in rows)

    def _answer(self, round_: OpenRound, *, now_ns: int) -> None:
        question = self._question_of(round_)
        truth = round_.own_rows.get(question.windows) if question is not None else ()
        if question is None or not truth:
            return
        del self._questions[round_.fragment]
        blames = [
            Blame(
                contribution.learner,
                BallotRole.MEMBER,
                "it told other projections of its contribution than the leader finds",
                is_proved=True,
            )
            for contribution, claims, values in zip(question.decision.contributions, question.rows, truth, strict=True)
            if claims and has_other_projections(contribution, question.windows, claims, values)
        ]
        wrong = wrong_reducers(question.windows, question.projection, question.decision.coefficients, truth)
        blames += [Blame(name, BallotRole.REDUCER, reason, is_proved=True) for name, reason in wrong.items()]
        self._probation.update({blame.region: PROBATION_AUDITS - self._probation[blame.region] for blame in blames})
        self._judge.blame_all(round_, blames, now_ns=now_ns)
