"""Elections of one voter: its term, its vote, the timer after which it asks for votes, and who said yes.

Pre-vote: a follower first asks whether it would get votes, so that nobody is disturbed by a new term of a region that
can't win. The timer is drawn at random, so that two voters rarely stand at the same moment.

A vote counts for the folder that gave it (`disks`), and is given to a folder: one that lost its term and vote is
another voter and another candidate. A term grows by at most TERM_STEP_MAX at a time, whatever a message claims.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from diloco_node.core.cadence import CEILING, Cadence
from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.log import ReplicaLog
from diloco_node.core.ledger.roster import majority_of
from diloco_node.core.ledger.write_gate import WriteGate
from diloco_node.core.messages import RequestVote, RequestVoteReply
from diloco_node.core.types import Recovered

TERM_STEP_MAX: Final = 1024
"""A term that somebody claims is approached in steps of this. A region that was away while the others held an election
each second for a day follows within 90 messages; one that lies would need 2^53 of them to use up the numbers."""

TERMS_AHEAD: Final = 1 << 16
"""Terms between a ledger and what a region adds that goes on alone. The others come to no such term in 18 hours without
a leader, with an election each second."""

CLAIM_RESTS_MAX: Final = 512
"""Election timeouts between two claims of one follower that are heeded, at most: ten minutes of them by default."""

CLAIM_QUIET_MIN: Final = 64
"""Election timeouts without a claim, at least, before the next rest of a follower is a shorter one: longer than a
follower distrusts a leader, or each of its objections would be heeded."""

CLAIM_QUIET_RESTS: Final = 8
"""At least so many rests, too."""

_MASK: Final = (1 << 64) - 1


UNANSWERED_MIN: Final = 2
"""The witness is asked with the pre-vote after so many, this one counted, that no voting region answered: it costs a
request to a bucket, and would have a region that was just cut off depose a leader."""

LASTING_TIMEOUTS: Final = 60
"""A term that lasted for so many election timeouts did not come to nothing, though perhaps nobody had work for it."""


def majority_value(values: Iterable[int]) -> int:
    """The largest number that a majority of the values, one per voter, reach: 7 of (9, 7, 3), 3 of (9, 7, 3, 3)."""
    in_order = sorted(values, reverse=True)
    return in_order[majority_of(len(in_order)) - 1]


class TermClaims:
    """When a leader heeds a single follower's claim of a newer term, for which it has to step down.

    Honest followers have one after they stood for election in vain, and can be led only in a newer term. A follower
    that claims it again and again would stop the run. So it is heeded at once, then after one election timeout, after
    two more, and so on.
    """

    def __init__(self, timeout_ns: int) -> None:
        self._timeout_ns = timeout_ns
        self._rests: dict[str, tuple[int, int]] = {}

    def is_heeded(self, peer: str, *, now_ns: int) -> bool:
        """Whether this claim is; the next one of the same peer then rests twice as long."""
        until_ns, rest_ns = self._rests.get(peer, (now_ns, self._timeout_ns))
        if now_ns < until_ns:
            return False
        if now_ns - until_ns > max(CLAIM_QUIET_MIN * self._timeout_ns, CLAIM_QUIET_RESTS * rest_ns):
            rest_ns = max(self._timeout_ns, rest_ns // 2)
        self._rests[peer] = (now_ns + rest_ns, min(2 * rest_ns, CLAIM_RESTS_MAX * self._timeout_ns))
        return True


class TermBackoff:
    """How much longer than measured a voter waits, as TCP does: twice as long after each term that came to nothing.

    Terms come to nothing where votes and answers take longer than the timeouts. Each further commit of a term takes one
    of them back. The first two elections after a success wait no longer.

    Attributes:
        factor: on the timeout; at most `cadence.CEILING`.
    """

    def __init__(self, timeout_ns: int, now_ns: int) -> None:
        self.factor = 1
        self._lasting_ns = LASTING_TIMEOUTS * timeout_ns
        self._vain_terms = 0
        self._began_at_ns = now_ns

    def begin(self, *, now_ns: int) -> None:
        """A new term begins: the one before came to nothing, unless `succeed` says otherwise or it lasted."""
        is_lasting = now_ns - self._began_at_ns > self._lasting_ns
        self._began_at_ns = now_ns
        self._set(self._vain_terms + (-1 if is_lasting else 1))

    def succeed(self) -> None:
        """More than its leader's own entry was committed in this term."""
        self._set(self._vain_terms - 1)

    def _set(self, vain_terms: int) -> None:
        self._vain_terms = max(0, min(vain_terms, CEILING.bit_length() + 1))
        self.factor = 1 << max(0, self._vain_terms - 2)


def ballot_paper(region: str, disk: bytes) -> str:
    """The candidate of a vote as it goes to disk: its region and its folder."""
    return f"{region} {disk.hex()}"


class Dice:
    """Random integers from a seed (SplitMix64): the same seed and name give the same throws on every machine."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self._state = int.from_bytes(digest[:8], "little")

    def below(self, limit: int) -> int:
        """A number in [0, limit); the bias of the remainder is below 2^-30 for limits up to 2^34 (17 s in ns)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        bits = self._state
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
        return (bits ^ (bits >> 31)) % limit


class Role(StrEnum):
    """The role of a voter in its term. `ASKING` is a follower that asks whether it would get votes (pre-vote)."""

    FOLLOWER = "follower"
    ASKING = "asking"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Election:
    """Term, vote, role and election timer. The ledger calls it and replicates as the role says.

    Args:
        region: this voter. recovery: what its disk held.
        timeout_ns: the timer is drawn from 1 to 2 times this, or times what `timeout_ns` grows to.
        seed: of the timer; the region's name is mixed in.
        log, disks: read only; the latter knows who votes. gate: takes the messages, and holds them back until term and
            vote are on disk.

    Attributes:
        role, term: as they are now, on disk or not.
        voted_for: region and folder that got the vote of the term (`ballot_paper`); empty while nobody did.
        leader: of the term; empty while it is unknown.
        due_at_ns: when this voter asks for votes unless it hears a leader.
        votes: regions that said yes, this voter too, each with its folder; of use while it asks or stands.
        cadence: of the leader's messages, or as leader of a majority's answers.
        backoff: after terms that came to nothing.
        founder_term: the term for which this voter gave its vote to a founder (or stands as one); 0: none.
    """

    def __init__(
        self,
        *,
        region: str,
        recovery: Recovered,
        timeout_ns: int,
        seed: int,
        log: ReplicaLog,
        disks: DiskView,
        gate: WriteGate,
        now_ns: int,
    ) -> None:
        self.role = Role.FOLLOWER
        self.term = recovery.term
        self.voted_for = recovery.voted_for
        self.leader = ""
        self.votes: dict[str, bytes] = {}
        # Pre-votes in a row, the last one counted, that no other voting region answered.
        self._unanswered = 0
        self.founder_term = 0
        self.due_at_ns = 0
        self._region = region
        # The id of its folder, for which votes count.
        self._disk = recovery.disk
        self._disks = disks
        self._timeout_ns = timeout_ns
        self.cadence = Cadence(timeout_ns)
        self.backoff = TermBackoff(timeout_ns, now_ns)
        # Thrown once for each restart of the timer: the same seed gives the same elections.
        self._dice = Dice(seed, region)
        self._log = log
        self._gate = gate
        self.restart_timer(now_ns)

    @property
    def timeout_ns(self) -> int:
        """How long a leader, or a majority that answers one, may be silent now."""
        return min(self.backoff.factor * self.cadence.limit_ns, CEILING * self._timeout_ns)

    def restart_timer(self, now_ns: int) -> None:
        """A leader's message came, or a vote was given: wait for a whole timeout from now on."""
        timeout_ns = self.timeout_ns
        self.due_at_ns = now_ns + timeout_ns + self._dice.below(timeout_ns + 1)
        self._may_hasten = True

    def hasten(self, not_before_ns: int) -> None:
        """Nobody seems to lead: start a pre-vote within one timeout after this time, if that is earlier.

        Once after each start of the timer: the earliest of many draws would be nearly the same for all voters. And not
        by who has just given its vote: it waits for that one to lead.
        """
        if self._may_hasten:
            self._may_hasten = False
            spread_ns = self.backoff.factor * self._timeout_ns
            self.due_at_ns = min(self.due_at_ns, not_before_ns + self._dice.below(spread_ns))

    def excuse(self, late_ns: int, *, now_ns: int) -> None:
        """This process stood still: the leader's messages, or the answers to one, wait to be read."""
        if self.cadence.excuse(late_ns, now_ns) and self.role is Role.FOLLOWER:
            self.restart_timer(now_ns)

    def adopt_term(self, term: int, *, now_ns: int) -> bool:
        """Take a newer term, or a step towards it, with a free vote; the caller then follows nobody.

        False for one that is not newer.
        """
        if term <= self.term:
            return False
        self.term, self.voted_for = min(term, self.term + TERM_STEP_MAX), ""
        self.backoff.begin(now_ns=now_ns)
        self._gate.change_hard_state()
        return True

    def follow(self, leader: str, *, now_ns: int) -> None:
        """Follow the leader of this term; empty: nobody yet."""
        if self.role is not Role.FOLLOWER:
            self.restart_timer(now_ns)
        self.role, self.leader = Role.FOLLOWER, leader
        self._unanswered = 0
        self.cadence.heard_at_ns = now_ns if leader else None

    def lead(self, *, now_ns: int) -> None:
        """This voter was elected."""
        self.role, self.leader = Role.LEADER, self._region
        self.cadence.heard_at_ns = now_ns

    def start_pre_vote(self, *, now_ns: int) -> None:
        """Request pre-votes before disturbing anybody with a new term."""
        self.role, self.leader = Role.ASKING, ""
        self.cadence.heard_at_ns = None
        self.votes = {self._region: self._disk}
        self._unanswered += 1
        self._request_votes(self.term + 1, pre_vote=True)
        self.count_votes(now_ns=now_ns)

    def stand(self, *, now_ns: int) -> None:
        """Begin a term as its candidate. The question leaves when the own vote is on disk."""
        self.term += 1
        self.backoff.begin(now_ns=now_ns)
        self.voted_for = ballot_paper(self._region, self._disk)
        self._gate.change_hard_state()
        self.role, self.leader = Role.CANDIDATE, ""
        self.cadence.heard_at_ns = None
        self.votes = {self._region: self._disk}
        self.founder_term = 0 if self._disks.has_view else self.term
        self.restart_timer(now_ns)
        self._gate.note(f"term {self.term}: {self._region} stands for election")
        self._request_votes(self.term, pre_vote=False)

    def count_votes(self, *, now_ns: int) -> bool:
        """Stand with a majority of pre-votes; True with a majority of votes and the own one on disk: it has won."""
        if self.missing_votes() > 0:
            return False
        if self.role is Role.ASKING:
            self.stand(now_ns=now_ns)
            return False
        return self.role is Role.CANDIDATE and self._gate.is_hard_durable

    def missing_votes(self) -> int:
        """How many votes are missing: for a majority of the folders that count, or for all of them to found a run."""
        voters = self._disks.roster.voters
        if not self._disks.has_view:
            return sum(name not in self.votes for name in voters)
        votes = (name in voters and self._disks.counts(name, disk) for name, disk in self.votes.items())
        return majority_of(len(voters)) - sum(votes)

    def answer(
        self, peer: str, request: RequestVote, *, is_up_to_date: bool, has_leader_contact: bool, now_ns: int
    ) -> None:
        """Answer a candidate whose term was adopted, or a pre-vote, which changes nothing here.

        is_up_to_date: its log holds at least what this voter's does. has_leader_contact: it would disturb a leader.
        """
        # Who knows a view has seen the run founded: nobody may found it again.
        is_welcome = is_up_to_date and (request.has_view or not self._disks.has_view)
        if request.pre_vote:
            is_granted = self.term < request.term <= self.term + TERM_STEP_MAX and is_welcome and not has_leader_contact
            self._reply(peer, request.term if is_granted else self.term, pre_vote=True, is_granted=is_granted)
            return
        paper = ballot_paper(peer, request.disk)
        is_granted = request.term == self.term and self.voted_for in ("", paper) and is_welcome
        if is_granted and self.voted_for != paper:
            self.voted_for = paper
            self._gate.change_hard_state()
        if is_granted:
            self.founder_term = 0 if request.has_view else self.term
            self.restart_timer(now_ns)
            self._may_hasten = False
        self._reply(peer, self.term, pre_vote=False, is_granted=is_granted)

    def take_vote(self, peer: str, answer: RequestVoteReply) -> bool:
        """Note who said yes; False if it answers no open request. See `hear`, too."""
        expected_term = {Role.ASKING: self.term + 1, Role.CANDIDATE: self.term}.get(self.role)
        if answer.term != expected_term or answer.pre_vote != (self.role is Role.ASKING):
            return False
        self.votes[peer] = answer.disk
        return True

    def hear(self, peer: str, answer: RequestVoteReply) -> None:
        """A voter has answered, yes or no: with it the witness is not needed."""
        if peer != self._disks.roster.witness and self._disks.counts(peer, answer.disk):
            self._unanswered = 0

    def _reply(self, peer: str, term: int, *, pre_vote: bool, is_granted: bool) -> None:
        self._gate.send(peer, RequestVoteReply(term, pre_vote, is_granted, self._disk))

    def _request_votes(self, term: int, *, pre_vote: bool) -> None:
        log = self._log
        request = RequestVote(term, pre_vote, log.last_index, log.last_term, self._disk, self._disks.has_view)
        witness = "" if self._unanswered >= UNANSWERED_MIN else self._disks.roster.witness
        for peer in self._disks.roster.voters:
            if peer not in (self._region, witness):
                self._gate.send(peer, request)
