"""What a leader does for rounds: opens ballots, decides merges, judges what comes back, puts rounds into the ledger.

Acts only between `begin` (it leads, and its log is settled) and `end`. Everything it needs it knows from the committed
past, the heartbeats, and the answers to its ballots; a new leader asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import assert_never

from diloco_node.core.merge.stripes import RoundLoad, block_count, cut_by_budget, cut_finer
from diloco_node.core.messages import BallotOpened, DiscardReported, LeftOut
from diloco_node.core.rounds.agenda import Agenda, GiveUp
from diloco_node.core.rounds.answers import Answers, BallotAnswer
from diloco_node.core.rounds.ballot import BallotClock, encoded_bytes, plan_next
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.eligibility import Eligibility, Reachability
from diloco_node.core.rounds.judge import Judge
from diloco_node.core.rounds.merging import MergeDecisions
from diloco_node.core.rounds.open_round import Deadline, OpenRound
from diloco_node.core.rounds.opening import Opening
from diloco_node.core.rounds.progress import RunProgress
from diloco_node.core.rounds.suspicion import SuspicionBook
from diloco_node.core.types import (
    Ballot,
    Entry,
    EntryBody,
    FinishedBody,
    RoundBody,
    Stripe,
)
from diloco_node.numeric import NS_PER_S

RoundMessage = BallotAnswer | DiscardReported


class RoundLeader:
    """See the module. After every call, hand `proposals` to the ledger and ask for `wake_at_ns`.

    Attributes:
        proposals: bodies for the ledger, in order.
        rounds: open rounds by fragment.
        progress: how far the run is; to be asked in every region, whoever leads.
        is_in_the_way: a majority has had a payload for a while, and this region has not; or the second ballot of a
            round failed, and the others had its merged stripes. Its disk is full or stands still, or bulk does not
            reach it: merging goes on when another leads.
    """

    def __init__(self, context: RoundContext) -> None:
        self.proposals: deque[EntryBody] = deque()
        self.rounds: dict[int, OpenRound] = {}
        self.is_in_the_way = False
        self._context = context
        self._region, self._regions = context.region, context.regions
        self._fragments, self._settings = context.fragments, context.settings
        self._history, self._liveness, self._effects = context.history, context.liveness, context.effects
        self._term = 0
        self._number = 0
        self._is_acting = False
        self._is_stale = True
        self._clock = BallotClock(context)
        self._book = SuspicionBook(ballot_ns=context.settings.ballot_deadline_min_ns)
        self._judge = Judge(context, self._book)
        self._eligibility = Eligibility(context, self._book)
        self._answers = Answers(context, self._eligibility, self.proposals)
        self.progress = RunProgress(context)
        self._merges = MergeDecisions(context)
        self._agenda = self._new_agenda()

    @property
    def is_acting(self) -> bool:
        """Whether this region decides about rounds now."""
        return self._is_acting

    @property
    def is_ending(self) -> bool:
        """Whether the last rounds are being held."""
        return self._agenda.is_ending

    @property
    def reason(self) -> str:
        """Why no (further) round is open, in words."""
        return self._agenda.reason

    @property
    def disk_patience_ns(self) -> int:
        """How long the others wait for nothing but this region's disk before another one is to lead."""
        return max(self._clock.patience_ns(fragment) for fragment in range(len(self._fragments)))

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Who takes no part in ballots for now, and why."""
        return self._book.left_out()

    def begin(
        self,
        term: int,
        reopen: Mapping[int, int],
        *,
        now_ns: int,
        left_out: tuple[LeftOut, ...] = (),
        yielded: str = "",
    ) -> None:
        """Take over.

        Args:
            term: of this leader.
            reopen: rounds (fragment to version) that are known to have been open under an older leader; they were due.
            left_out: by the leader before, as far as is known here.
            yielded: the leader before, if it gave its place to this region.
        """
        self._is_acting, self._is_stale = True, True
        self._book.begin(left_out, self._regions, yielded=yielded, now_ns=now_ns)
        self._term, self._number = term, 0
        self._agenda = self._new_agenda()
        for name in self._regions:
            self.status_changed(name, now_ns=now_ns)
        for fragment, version in sorted(reopen.items()):
            may_open = len(self.rounds) < self._settings.rounds_in_flight_max and self._history.finished is None
            if may_open and version == self._history.versions[fragment] + 1:
                self._open(Opening(fragment, "was open under the leader before"), now_ns=now_ns)

    def end(self) -> None:
        """Another region leads, or nobody: forget everything that only a leader may decide."""
        self._is_acting = self.is_in_the_way = False
        self.rounds.clear()
        self.proposals.clear()
        self._answers.clear()
        self._merges.clear()
        self._agenda = self._new_agenda()

    @property
    def wake_at_ns(self) -> int | None:
        """When something may have to be decided even if nothing happens."""
        if not self._is_acting:
            return None
        times = [one.deadline_ns for one in self.rounds.values() if not one.is_proposed]
        if self._agenda.wake_at_ns is not None:
            times.append(self._agenda.wake_at_ns)
        return min(times, default=None)

    def status_changed(self, region: str, *, now_ns: int) -> None:
        """A region reported: its learner, or what it has applied."""
        if region != self._region:
            self._eligibility.reported(region, now_ns=now_ns)
        status = self._liveness.learner(region)
        self._agenda.opener.status_changed(region, status, now_ns=now_ns)
        if status is not None:
            self._eligibility.saw_incarnation(region, status.incarnation)
        self._is_stale = True

    def tick(self) -> None:
        """A heartbeat has passed: who is alive may have changed, and messages may have been lost."""
        self._is_stale = True
        for one in self._open_rounds():
            self._repeat(one)

    def committed(self, entry: Entry, *, now_ns: int) -> None:
        """An entry is committed."""
        body = entry.body
        self._is_stale = True
        self._eligibility.committed(entry.index, now_ns=now_ns)
        self._answers.committed(body)
        if not isinstance(body, RoundBody):
            return
        one = self.rounds.get(body.fragment)
        if one is None or one.version > body.version:
            return
        del self.rounds[body.fragment]
        if one.ballot != body.ballot:
            return
        took_ns = now_ns - one.opened_at_ns
        self._agenda.committed(one, now_ns=now_ns)
        self._judge.committed(one)
        self._clock.took(body.fragment, now_ns - one.ballot_at_ns)
        names = ", ".join(member.contribution.learner for member in body.members)
        self._effects.note(
            "committed",
            f"ballot {body.ballot} with {names}, share {body.share:.3g}, after {took_ns / NS_PER_S:.3f} s",
            fragment=body.fragment,
            version=body.version,
        )

    def arrived(self, peer: str, message: RoundMessage, *, now_ns: int) -> None:
        """A region answered."""
        if not self._is_acting:
            return
        if isinstance(message, DiscardReported):
            self._answers.discards_reported(peer, message, self.rounds, now_ns=now_ns)
            return
        one = next((found for found in self._open_rounds() if found.ballot == message.ballot), None)
        if one is not None and not one.is_proposed:
            self._answers.take(one, peer, message)

    def finish_requested(self, reason: str) -> None:
        """An operator asks for the end of the run."""
        if self._is_acting:
            self._agenda.finish_requested(reason)
            self._is_stale = True

    def advance(self, *, now_ns: int) -> None:
        """Decide everything that can be decided now."""
        if not self._is_acting:
            return
        for one in self._open_rounds():
            self._advance_round(one, now_ns)
        wake_at_ns = self._agenda.wake_at_ns
        if self._is_stale or (wake_at_ns is not None and now_ns >= wake_at_ns):
            self._is_stale = False
            self._follow_agenda(now_ns)

    def _follow_agenda(self, now_ns: int) -> None:
        while (step := self._agenda.next_step(self.rounds, now_ns=now_ns)) is not None:
            match step:
                case Opening():
                    if not self._open(step, now_ns=now_ns):
                        self._agenda.abandoned(step.fragment, now_ns=now_ns)
                case GiveUp(fragment):
                    self._abandon(self.rounds[fragment], "the run ends without this round", now_ns=now_ns)
                case FinishedBody():
                    self.proposals.append(step)
                case _:
                    assert_never(step)

    def _advance_round(self, one: OpenRound, now_ns: int) -> None:
        if one.is_proposed:
            return
        lost = [name for name in one.reducers if not self._reaches(name, now_ns)]
        if one.renamed:
            self._next_ballot(one, self._judge.renamed(one, now_ns=now_ns), now_ns=now_ns)
        elif lost:
            self._next_ballot(one, f"reducer {', '.join(lost)} is lost", now_ns=now_ns)
        elif one.decision is None:
            self._try_decide(one, now_ns)
        else:
            self._try_propose(one, now_ns)
        if self.rounds.get(one.fragment) is one and not one.is_proposed and now_ns >= one.deadline_ns:
            reason = f"deadline passed while it {one.waiting()}"
            is_cut_off = self._judge.deadline_passed(one, now_ns=now_ns)
            self.is_in_the_way |= one.attempt > 0 and is_cut_off
            self._next_ballot(one, reason, now_ns=now_ns, is_late=True)

    def _try_decide(self, one: OpenRound, now_ns: int) -> None:
        for name in one.missing_members():
            if not self._reaches(name, now_ns):
                one.declined[name] = "lost before it contributed"
        if one.missing_members():
            return
        chosen = []
        for name, offered in sorted(one.contributions.items()):
            fault = self._answers.may_contribute(offered, one.version)
            if not fault and not self._reaches(name, now_ns) and not one.is_received(name):
                fault = "lost before its stripes arrived"
            if fault:
                one.declined[name] = fault
            else:
                chosen.append(offered)
        if chosen:
            decision = self._merges.decide(one, tuple(chosen))
            for reducer in one.reducers:
                self._effects.send(reducer, decision)
        else:
            reasons = ", ".join(f"{name}: {reason}" for name, reason in sorted(one.declined.items()))
            self._abandon(one, f"nobody contributes ({reasons})", now_ns=now_ns)

    def _try_propose(self, one: OpenRound, now_ns: int) -> None:
        assert one.decision is not None
        if not one.is_merged:
            for contribution in one.decision.contributions:
                name = contribution.learner
                if not self._reaches(name, now_ns) and not one.is_received(name):
                    self._next_ballot(one, f"{name} is lost before its stripes arrived", now_ns=now_ns)
                    return
            return
        if self._is_wrong(one, now_ns):
            return
        holders = one.payload_holders()
        if 2 * len(holders) <= len(self._regions):
            return
        if self._region in holders:
            one.is_proposed = True
            self.proposals.append(self._merges.body(one))
        elif one.held_since_ns is None:
            one.held_since_ns = now_ns
        elif now_ns - one.held_since_ns >= self._clock.patience_ns(one.fragment):
            self.is_in_the_way = True

    def _is_wrong(self, one: OpenRound, now_ns: int) -> bool:
        """Whether a merged ballot can't be what it says; then there is another one."""
        self._judge.answer_norms(one, now_ns=now_ns)
        mismatched = one.norm_mismatch()
        disputed = "" if mismatched else self._judge.disputed(one, now_ns=now_ns)
        if disputed:
            self._next_ballot(one, disputed, now_ns=now_ns)
        elif mismatched:
            text = self._judge.question_norms(one, mismatched, now_ns=now_ns)
            own = tuple(Stripe(self._region, cut.block_start, cut.block_stop) for cut in one.stripes)
            self._next_ballot(one, text or "norms are in question", now_ns=now_ns, stripes=None if text else own)
        return bool(disputed or mismatched)

    def _next_number(self) -> Ballot:
        """A ballot that never was before: one leader per term, one number per attempt of that leader."""
        self._number += 1
        return Ballot(self._term, self._number)

    def _open(self, opening: Opening, *, now_ns: int) -> bool:
        """Open a round with everybody who can contribute; returns False when nobody can."""
        fragment, version = opening.fragment, self._history.versions[opening.fragment] + 1
        probed = self._judge.next_probe(self.rounds.values(), now_ns=now_ns)
        reachability = self._eligibility.reachability(now_ns=now_ns, probed=probed)
        members, ineligible = self._eligibility.members(fragment, reachability, now_ns=now_ns)
        if not members:
            return False
        stripes = self._stripes(fragment, reachability)
        tried = self._judge.tried_parts(probed, members, [cut.reducer for cut in stripes], now_ns=now_ns)
        one = OpenRound(
            opened_at_ns=now_ns,
            is_last=opening.is_last,
            announcement=BallotOpened(
                self._next_number(), fragment, version, members, stripes, left_out=self._book.left_out()
            ),
            ballot_at_ns=now_ns,
            deadline=self._deadline(fragment, members, stripes, [name for name, _ in tried]),
            tried=tried,
        )
        self.rounds[fragment] = one
        self._agenda.opener.opened(opening, now_ns=now_ns)
        without = "; without " + ", ".join(f"{name} ({why})" for name, why in ineligible) if ineligible else ""
        self._effects.note(
            "open",
            f"ballot {one.ballot}: {opening.reason}; members {', '.join(members)}{without}; reducers "
            f"{', '.join(one.reducers)}; deadline {one.deadline.derivation}",
            fragment=fragment,
            version=version,
        )
        self._announce(one)
        return True

    def _deadline(
        self, fragment: int, members: tuple[str, ...], stripes: tuple[Stripe, ...], tried: Iterable[str]
    ) -> Deadline:
        deadline = self._clock.deadline(fragment, members, stripes, attempt=0)
        doublings = [self._book.doublings(name) for name in tried]
        return self._clock.of_probe(fragment, deadline, max(doublings)) if doublings else deadline

    def _next_ballot(
        self,
        one: OpenRound,
        reason: str,
        *,
        now_ns: int,
        is_late: bool = False,
        stripes: tuple[Stripe, ...] | None = None,
    ) -> None:
        """Try the round again with what there is; contributions keep their name, so what arrived is not sent again."""
        reachability = self._eligibility.reachability(now_ns=now_ns, excluded=one.excluded)
        stripes = stripes or self._stripes(one.fragment, reachability)
        able, _ = self._eligibility.members(one.fragment, reachability, now_ns=now_ns, rejected=one.rejected)
        usable = {
            name: offered
            for name, offered in one.contributions.items()
            if name not in one.rejected and not self._answers.may_contribute(offered, one.version)
        }
        plan = plan_next(one, stripes, usable=usable, able=able, reachable=reachability.reachable, is_late=is_late)
        if not plan.members:
            self._abandon(one, f"{reason}; nobody is left to contribute", now_ns=now_ns)
            return
        ballot, attempt = self._next_number(), one.attempt + 1
        one.begin_ballot(
            BallotOpened(ballot, one.fragment, one.version, plan.members, stripes, plan.reused, self._book.left_out()),
            deadline=self._clock.deadline(one.fragment, plan.members, stripes, attempt=attempt),
            contributions=plan.contributions,
            now_ns=now_ns,
        )
        self._effects.note(
            "ballot",
            f"ballot {ballot}: {reason}; members {', '.join(one.members)}; reducers {', '.join(one.reducers)}; "
            f"deadline {one.deadline.derivation}",
            fragment=one.fragment,
            version=one.version,
        )
        self._announce(one)
        self._try_decide(one, now_ns)

    def _abandon(self, one: OpenRound, reason: str, *, now_ns: int) -> None:
        """Give up; the fragment stays at its version and is opened again when it can be."""
        self._effects.note("abandoned", f"ballot {one.ballot}: {reason}", fragment=one.fragment, version=one.version)
        del self.rounds[one.fragment]
        self._agenda.abandoned(one.fragment, now_ns=now_ns)

    def _announce(self, one: OpenRound) -> None:
        for name in self._regions:
            self._effects.send(name, one.announcement)

    def _repeat(self, one: OpenRound) -> None:
        """Ask every region that is not done what it has; whatever was lost on the way is sent again."""
        if one.is_proposed:
            return
        done = one.payload_holders() if one.is_merged else one.holders
        for name in self._regions:
            if name not in done:
                self._effects.send(name, one.announcement)
        if one.decision is not None:
            for name in one.late_reducers():
                self._effects.send(name, one.decision)

    def _reaches(self, region: str, now_ns: int) -> bool:
        return self._eligibility.reaches(region, now_ns=now_ns)

    def _stripes(self, fragment: int, reachability: Reachability) -> tuple[Stripe, ...]:
        cut = self._fragments[fragment]
        up, down = (encoded_bytes(cut, codec) for codec in (self._settings.codec_up, self._settings.codec_down))
        load = RoundLoad(block_count(cut), up, down, len(reachability.reachable))
        budgets = {name: self._liveness.budget(name) for name in reachability.reducers}
        return cut_finer(cut_by_budget(load, reachability.reducers, budgets), encoded_bytes=down)

    def _open_rounds(self) -> list[OpenRound]:
        return [self.rounds[fragment] for fragment in sorted(self.rounds)]

    def _new_agenda(self) -> Agenda:
        return Agenda(self._context, self._eligibility, self.progress)
