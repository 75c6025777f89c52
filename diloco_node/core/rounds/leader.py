"""The leader of rounds: it opens ballots, decides merges, judges answers, and puts rounds into the ledger.

It acts only between `begin` (this region leads, and its log is settled) and `end`. It knows only the committed past,
the heartbeats and the answers to its own ballots; a new leader asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import assert_never

from diloco_node.core.merge.stripes import RoundLoad, block_count, cut_by_budget, cut_finer
from diloco_node.core.messages import BallotOpened, LeftOut, ReusedStripe
from diloco_node.core.projections import ContributionsProjected
from diloco_node.core.rounds.agenda import Agenda, GiveUp
from diloco_node.core.rounds.answers import Answers, BallotAnswer
from diloco_node.core.rounds.ballot import BallotClock, encoded_bytes, plan_next
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.eligibility import Eligibility, Reachability
from diloco_node.core.rounds.judge import Judge
from diloco_node.core.rounds.merge_decisions import MergeDecisions
from diloco_node.core.rounds.open_round import OpenRound
from diloco_node.core.rounds.opening import Opening
from diloco_node.core.rounds.participant import RoundParticipant
from diloco_node.core.rounds.payload_audit import PayloadAudit
from diloco_node.core.rounds.progress import RunProgress
from diloco_node.core.rounds.suspicion import SuspicionBook
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import (
    Ballot,
    DiscardedBody,
    Entry,
    EntryBody,
    ExtendedBody,
    FinishedBody,
    RoundBody,
    Stripe,
)
from diloco_node.numeric import NS_PER_S


class RoundLeader:
    """The leader's rounds. After every call, hand `proposals` to the ledger and ask for `wake_at_ns`.

    Attributes:
        proposals: bodies for the ledger, in order. rounds: open rounds by fragment.
        progress: how far the run is; to be asked in every region, whoever leads.
        is_in_the_way: this region holds up the others. A majority has had a payload for a while and this region has
            not, or a second ballot of a round failed because merged stripes did not come here. Its disk is full or
            stands still, or bulk does not reach it: merging goes on when another region leads.
    """

    def __init__(self, context: RoundContext, progress: RunProgress, payloads: RoundParticipant) -> None:
        self.proposals: deque[EntryBody] = deque()
        self.rounds: dict[int, OpenRound] = {}
        self.is_in_the_way = False
        self._context, self._payloads = context, payloads
        self._region, self._fragments = context.region, context.fragments
        self._history, self._liveness, self._effects = context.history, context.liveness, context.effects
        # The leader's term, and the number of its last ballot in it; no two ballots share both.
        self._term = 0
        self._number = 0
        # Between `begin` and `end`. Outside of it `rounds` and `proposals` are empty.
        self.is_acting = False
        # Since when no merge is decided, for other settings come first; None: merges are decided.
        self._held_since_ns: int | None = None
        # Something happened since the agenda was asked, so that its answer may have changed.
        self._is_stale = True
        # Measured times outlive a term. Suspects do not: `SuspicionBook.begin` starts from those of the leader before.
        self._clock = BallotClock(context)
        self._book = SuspicionBook(ballot_ns=context.settings.ballot_deadline_min_ns)
        self._judge = Judge(context, self._book)
        self._audit = PayloadAudit(context, self._judge, payloads.audits)
        self._eligibility = Eligibility(context, self._book)
        self._answers = Answers(context, self._eligibility, self.proposals, self.rounds)
        self.progress = progress
        self._merges = MergeDecisions(context)
        # One for each term.
        self._agenda = self._new_agenda()

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
        """How long this region's disk alone may hold up the others before another region is to lead."""
        return max(self._clock.patience_ns(fragment) for fragment in range(len(self._fragments)))

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """Regions that take no part in ballots for now, each with the reason."""
        return self._book.left_out()

    def begin(
        self,
        term: int,
        reopen: Mapping[int, int],
        *,
        now_ns: int,
        left_out: tuple[LeftOut, ...] = (),
        predecessor: str = "",
        end_reason: str | None = None,
    ) -> None:
        """Take over in a term.

        reopen: rounds (fragment to version) that are known to have been open under an older leader; they were due.
        left_out: by the leader before, as far as is known here. predecessor: it, if it handed leadership to this
        region. end_reason: why the run is to end, if that was ordered.
        """
        self.is_acting, self._is_stale = True, True
        self._book.ballot_ns = self._history.settings.ballot_deadline_min_ns
        self._book.begin(left_out, self._context.regions, predecessor=predecessor, now_ns=now_ns)
        self._term, self._number = term, 0
        self._agenda = self._new_agenda()
        if end_reason is not None:
            self._agenda.request_finish(end_reason)
        for name in self._context.regions:
            self.on_status(name, now_ns=now_ns)
        if self._agenda.has_ended(now_ns=now_ns):
            return  # what was open comes again as last rounds: an ordinary merge would not be the learners' mean
        for fragment, version in sorted(reopen.items()):
            may_open = len(self.rounds) < self._history.settings.rounds_in_flight_max and self._history.finished is None
            if may_open and version == self._history.versions[fragment] + 1:
                self._open(Opening(fragment, "was open under the leader before"), now_ns=now_ns)

    def end(self) -> None:
        """Another region leads, or nobody: forget everything that only a leader may decide."""
        self.is_acting = self.is_in_the_way = False
        self._held_since_ns = None
        self.rounds.clear()
        self.proposals.clear()
        self._answers.clear()
        self._eligibility.region_to_remove = ""
        self._merges.clear()
        self._audit.clear()
        self._agenda = self._new_agenda()

    @property
    def wake_at_ns(self) -> int | None:
        """When something may have to be decided even if nothing happens."""
        if not self.is_acting:
            return None
        times = [round_.deadline_ns for round_ in self.rounds.values() if self._is_timed(round_)]
        if self._agenda.wake_at_ns is not None:
            times.append(self._agenda.wake_at_ns)
        return min(times, default=None)

    def on_status(self, region: str, *, now_ns: int) -> None:
        """Take a region's report: about its learner, or how far it has applied the ledger."""
        if region != self._region:
            self._eligibility.on_report(region, now_ns=now_ns)
        status = self._liveness.learner(region)
        if status is not None:
            self._eligibility.observe_incarnation(region, status.incarnation)
        # The rest of a report can wait for this region's next heartbeat: the agenda looks at every pair of regions.
        self._is_stale |= self._agenda.opener.on_status(region, status, now_ns=now_ns) or self._agenda.is_ending

    def tick(self) -> None:
        """Repeat what may have been lost, and decide again: who is alive may have changed in a heartbeat."""
        self._is_stale = True
        for round_ in self._open_rounds():
            if round_.asks_again(spacing_max=self._context.liveness.spread**2):
                self._repeat(round_)

    def on_commit(self, entry: Entry, *, now_ns: int) -> None:
        """Take a committed entry."""
        body = entry.body
        self._is_stale = True
        self._eligibility.on_commit(entry.index, now_ns=now_ns)
        self._answers.on_commit(body)
        if isinstance(body, SettingsBody):
            self.go_on(now_ns=now_ns)
        if isinstance(body, ExtendedBody):
            self._agenda = self._new_agenda()  # an order before it was for the end before
        if not isinstance(body, RoundBody):
            return
        round_ = self.rounds.get(body.fragment)
        if round_ is None or round_.version > body.version:
            return
        del self.rounds[body.fragment]
        if round_.ballot != body.ballot:
            return
        self._agenda.on_commit(round_, now_ns=now_ns)
        self._judge.on_commit(round_)
        names = [member.contribution.learner for member in body.members]
        self._clock.observe(body.fragment, now_ns - round_.ballot_at_ns, names if round_.attempt == 0 else ())
        took_s = (now_ns - round_.opened_at_ns) / NS_PER_S
        text = f"ballot {body.ballot} with {', '.join(names)}, share {body.share:.3g}, after {took_s:.3f} s"
        self._note("committed", text, round_)

    def on_answer(self, peer: str, message: BallotAnswer, *, now_ns: int) -> None:
        """Take a region's answer to a ballot."""
        if not self.is_acting:
            return
        round_ = next((candidate for candidate in self._open_rounds() if candidate.ballot == message.ballot), None)
        if round_ is not None and not round_.is_proposed:
            self._answers.take(round_, peer, message)

    def take_discards(self, bodies: Iterable[DiscardedBody], *, now_ns: int) -> None:
        """Book lost steps that their regions have reported."""
        if self.is_acting:
            self._answers.take_discards(bodies, now_ns=now_ns)

    def let_go(self, region: str) -> bool:
        """Leave a region that is about to go, or none, out of new ballots; whether no open round has it."""
        self._eligibility.region_to_remove = region
        return not any(region in (*round_.members, *round_.reducers) for round_ in self.rounds.values())

    def hold_merges(self, *, now_ns: int) -> bool:
        """Decide no merge until `go_on`: a merge goes by the settings of the entry before it.

        Returns: whether every merge that was decided is committed, or given up.
        """
        self._held_since_ns = now_ns if self._held_since_ns is None else self._held_since_ns
        return all(round_.decision is None for round_ in self.rounds.values())

    def go_on(self, *, now_ns: int) -> None:
        """Decide merges again. The time in between counts for no ballot."""
        since_ns, self._held_since_ns = self._held_since_ns, None
        for round_ in self._open_rounds():
            if since_ns is not None and round_.decision is None:
                round_.ballot_at_ns += now_ns - max(since_ns, round_.ballot_at_ns)

    def _is_timed(self, round_: OpenRound) -> bool:
        return not round_.is_proposed and (self._held_since_ns is None or round_.decision is not None)

    def request_finish(self, reason: str) -> None:
        """End the run, as an operator or the scripts of a majority ask."""
        if self.is_acting:
            self._agenda.request_finish(reason)
            self._is_stale = True

    def advance(self, *, now_ns: int) -> None:
        """Decide everything that can be decided now."""
        if not self.is_acting:
            return
        for round_ in self._open_rounds():
            self._advance_round(round_, now_ns)
        wake_at_ns = self._agenda.wake_at_ns
        if self._is_stale or (wake_at_ns is not None and now_ns >= wake_at_ns):
            self._is_stale = False
            self._follow_agenda(now_ns)

    def _follow_agenda(self, now_ns: int) -> None:
        while (step := self._agenda.next_step(self.rounds, now_ns=now_ns)) is not None:
            match step:
                case Opening():
                    if not self._open(step, now_ns=now_ns):
                        self._agenda.on_abandon(step.fragment, now_ns=now_ns)
                case GiveUp(fragment):
                    self._abandon(self.rounds[fragment], "the run ends without this round", now_ns=now_ns)
                case FinishedBody() | ExtendedBody():
                    self.proposals.append(step)
                case _:
                    assert_never(step)

    def _advance_round(self, round_: OpenRound, now_ns: int) -> None:
        if round_.is_proposed:
            return
        lost_reducers = [name for name in round_.reducers if not self._liveness.reaches(name, now_ns=now_ns)]
        if round_.renamers:
            self._next_ballot(round_, self._judge.judge_renamers(round_, now_ns=now_ns), now_ns=now_ns)
        elif lost_reducers:
            self._next_ballot(round_, f"reducer {', '.join(lost_reducers)} is lost", now_ns=now_ns)
        elif round_.decision is None:
            self._try_decide(round_, now_ns)
        else:
            self.try_propose(round_, now_ns)
        if self.rounds.get(round_.fragment) is round_ and self._is_timed(round_) and now_ns >= round_.deadline_ns:
            reason = f"deadline passed while it {round_.wait_reason()}"
            if self._leaves_to_pause(round_, reason, now_ns):
                return
            is_cut_off = self._judge.judge_late(round_, now_ns=now_ns)
            self.is_in_the_way |= round_.attempt > 0 and is_cut_off
            self._next_ballot(round_, reason, now_ns=now_ns, is_late=True)

    def _try_decide(self, round_: OpenRound, now_ns: int) -> None:
        for name in round_.missing_members():
            if not self._liveness.reaches(name, now_ns=now_ns):
                round_.refusals[name] = "lost before it contributed"
        if round_.missing_members() or self._held_since_ns is not None:
            return
        contributions = []
        for name, contribution in sorted(round_.contributions.items()):
            fault = self._answers.merge_fault(contribution, round_.version)
            if not fault and not self._liveness.reaches(name, now_ns=now_ns) and not round_.is_received(name):
                fault = "lost before its stripes arrived"
            if fault:
                self._answers.drop(round_, name, fault)
            else:
                contributions.append(contribution)
        if contributions:
            decision = self._merges.decide(round_, tuple(contributions))
            for reducer in round_.reducers:
                self._effects.send(reducer, decision)
        else:
            reasons = ", ".join(f"{name}: {reason}" for name, reason in sorted(round_.refusals.items()))
            self._abandon(round_, f"nobody contributes ({reasons})", now_ns=now_ns)

    def try_propose(self, round_: OpenRound, now_ns: int) -> None:
        """Propose the round as an entry of the ledger, once everything that it needs is there."""
        assert round_.decision is not None
        if not round_.is_merged:
            for contribution in round_.decision.contributions:
                name = contribution.learner
                if not self._liveness.reaches(name, now_ns=now_ns) and not round_.is_received(name):
                    self._next_ballot(round_, f"{name} is lost before its stripes arrived", now_ns=now_ns)
                    return
            return
        if self._is_wrong(round_, now_ns):
            return
        roster, reaches = self._history.roster, partial(self._liveness.reaches, now_ns=now_ns)
        self._audit.draw(round_, now_ns=now_ns)
        if not roster.is_majority((*round_.payload_holders(), roster.stand_in(reaches))):
            return
        if self._region in round_.payload_holders():
            self._propose_audited(round_, now_ns)
        elif round_.held_since_ns is None:
            round_.held_since_ns = now_ns
        elif now_ns - round_.held_since_ns >= self._clock.patience_ns(round_.fragment):
            self.is_in_the_way = True

    def _propose_audited(self, round_: OpenRound, now_ns: int) -> None:
        self._audit.request(round_)
        round_.audit_lack = self._audit.lack(round_, now_ns=now_ns)
        if round_.audit_lack:
            return
        doubt = self._audit.question(round_, now_ns=now_ns)
        has_tried = round_.windows in round_.own_rows  # in vain: the contributions are gone
        if doubt and round_.reducers == (self._region,) and not has_tried:
            self._audit.request(round_)  # All contributions are here already.
        elif doubt:
            self._reduce_alone(round_, doubt, now_ns)
        else:
            round_.is_proposed = True
            self.proposals.append(self._merges.body(round_, self._audit.rows(round_)))

    def on_projections(self, event: ContributionsProjected) -> None:
        """Take this region's own projections of the contributions to a round."""
        round_ = self.rounds.get(event.fragment)
        if round_ is not None and round_.version == event.version and round_.decision is not None:
            self._audit.projected(round_, event.windows, event.rows)

    def _reduce_alone(self, round_: OpenRound, reason: str, now_ns: int) -> None:
        """Nobody is to blame yet: reduce every stripe here, and compare."""
        stripes = tuple(Stripe(self._region, stripe.block_start, stripe.block_stop) for stripe in round_.stripes)
        self._next_ballot(round_, reason, now_ns=now_ns, stripes=stripes)

    def _is_wrong(self, round_: OpenRound, now_ns: int) -> bool:
        """Check a merged ballot for contradictions; if there is one, open the next ballot and return True."""
        stripes_here = self._payloads.merged_stripes(round_.fragment, round_.ballot)
        facts = (stripes_here, dict(round_.merged_digests))
        if facts == round_.judged:
            return False
        round_.judged = facts
        self._judge.answer_norms(round_, now_ns=now_ns)
        mismatch = round_.norm_mismatch()
        dispute = "" if mismatch else self._judge.judge_digests(round_, now_ns=now_ns)
        if not mismatch and not dispute:
            dispute = self._judge.judge_sums(round_, stripes_here, now_ns=now_ns)
        if dispute:
            self._next_ballot(round_, dispute, now_ns=now_ns)
        elif mismatch:
            fault = self._judge.question_norms(round_, mismatch, now_ns=now_ns)
            if fault:
                self._next_ballot(round_, fault, now_ns=now_ns)
            else:
                self._reduce_alone(round_, "norms are in question", now_ns)
        return bool(dispute or mismatch)

    def _announcement(
        self,
        fragment: int,
        version: int,
        members: tuple[str, ...],
        stripes: tuple[Stripe, ...],
        reused: tuple[ReusedStripe, ...] = (),
    ) -> BallotOpened:
        """Return the next ballot, with a number that none had before: a term has one leader, which counts them."""
        self._number += 1
        ballot, left_out = Ballot(self._term, self._number), self._book.left_out()
        commitment = self._audit.commitment(ballot)
        return BallotOpened(ballot, fragment, version, members, stripes, reused, left_out, commitment)

    def _open(self, opening: Opening, *, now_ns: int) -> bool:
        """Open a round with everybody who can contribute; return False when nobody can."""
        fragment, version = opening.fragment, self._history.versions[opening.fragment] + 1
        probe = self._judge.next_probe(self.rounds.values(), now_ns=now_ns)
        reachability = self._eligibility.reachability(now_ns=now_ns, probe=probe)
        members, ineligible = self._eligibility.members(fragment, reachability, now_ns=now_ns)
        if not members:
            return False
        stripes = self._stripes(fragment, reachability)
        trials = self._judge.trials(probe, members, [stripe.reducer for stripe in stripes], now_ns=now_ns)
        failed_probes = [self._book.doublings(name) for name, _ in trials]
        round_ = OpenRound(
            opened_at_ns=now_ns,
            is_last=opening.is_last,
            announcement=self._announcement(fragment, version, members, stripes),
            ballot_at_ns=now_ns,
            deadline=self._clock.first_deadline(fragment, members, stripes, failed_probes),
            trials=trials,
        )
        self.rounds[fragment] = round_
        self._agenda.opener.on_open(opening, now_ns=now_ns)
        without = "; without " + ", ".join(f"{name} ({why})" for name, why in ineligible) if ineligible else ""
        self._announce(round_, "open", opening.reason, without)
        return True

    def _next_ballot(
        self,
        round_: OpenRound,
        reason: str,
        *,
        now_ns: int,
        is_late: bool = False,
        stripes: tuple[Stripe, ...] | None = None,
    ) -> None:
        """Try the round again. Contributions keep their names: stripes that have arrived are not sent again."""
        if self._leaves_to_pause(round_, reason, now_ns):
            return
        reachability = self._eligibility.reachability(now_ns=now_ns, exclude=round_.exclusions)
        stripes = stripes or self._stripes(round_.fragment, reachability)
        able, _ = self._eligibility.members(round_.fragment, reachability, now_ns=now_ns, rejections=round_.rejections)
        usable = {
            name: contribution
            for name, contribution in round_.contributions.items()
            if name not in round_.rejections and not self._answers.merge_fault(contribution, round_.version)
        }
        plan = plan_next(round_, stripes, usable=usable, able=able, reachable=reachability.reachable, is_late=is_late)
        if not plan.members:
            self._abandon(round_, f"{reason}; nobody is left to contribute", now_ns=now_ns)
            return
        round_.begin_ballot(
            self._announcement(round_.fragment, round_.version, plan.members, stripes, plan.reused),
            deadline=self._clock.deadline(round_.fragment, plan.members, stripes, attempt=round_.attempt + 1),
            contributions=plan.contributions,
            now_ns=now_ns,
        )
        self._announce(round_, "ballot", reason)
        self._try_decide(round_, now_ns)

    def _leaves_to_pause(self, round_: OpenRound, reason: str, now_ns: int) -> bool:
        """Abandon a last round whose members pause, until they go on; whether that is so."""
        names = self._agenda.pausing_members(round_, now_ns=now_ns)
        if names:
            self._abandon(round_, f"{reason}; {', '.join(names)} make no steps", now_ns=now_ns)
        return bool(names)

    def _abandon(self, round_: OpenRound, reason: str, *, now_ns: int) -> None:
        """Give the round up. The fragment stays at its version and is opened again when it can be."""
        self._note("abandoned", f"ballot {round_.ballot}: {reason}", round_)
        del self.rounds[round_.fragment]
        self._agenda.on_abandon(round_.fragment, now_ns=now_ns)

    def _note(self, kind: str, text: str, round_: OpenRound) -> None:
        self._effects.note(kind, text, fragment=round_.fragment, version=round_.version)

    def _announce(self, round_: OpenRound, kind: str, reason: str, without: str = "") -> None:
        text = f"{reason}; members {', '.join(round_.members)}{without}; reducers {', '.join(round_.reducers)}"
        self._note(kind, f"ballot {round_.ballot}: {text}; deadline {round_.deadline.derivation}", round_)
        self._effects.send_all(self._context.regions, round_.announcement)

    def _repeat(self, round_: OpenRound) -> None:
        """Announce the ballot again to every region that is not done, and the decision to late reducers."""
        if round_.is_proposed:
            return
        names_done = round_.payload_holders() if round_.is_merged else round_.holders
        self._effects.send_all((name for name in self._context.regions if name not in names_done), round_.announcement)
        self._audit.disclose(round_)
        if round_.decision is not None:
            self._effects.send_all(round_.late_reducers(), round_.decision)

    def _stripes(self, fragment: int, reachability: Reachability) -> tuple[Stripe, ...]:
        layout = self._fragments[fragment]
        settings = self._history.settings
        up, down = (encoded_bytes(layout, codec) for codec in (settings.codec_up, settings.codec_down))
        load = RoundLoad(block_count(layout), up, down, len(reachability.reachable))
        budgets = {name: self._liveness.budget(name) for name in reachability.reducers}
        return cut_finer(cut_by_budget(load, reachability.reducers, budgets), encoded_bytes=down)

    def _open_rounds(self) -> list[OpenRound]:
        return [self.rounds[fragment] for fragment in sorted(self.rounds)]

    def _new_agenda(self) -> Agenda:
        return Agenda(self._context, self._eligibility, self.progress)
