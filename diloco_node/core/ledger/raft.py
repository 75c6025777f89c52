"""The replicated ledger of one voter: Raft with pre-vote for a fixed set of voters, without IO.

What is particular to this ledger, beside Raft's rules:

- An entry is written only when what it names (the payload of a round, Theta_0 of genesis) is on the own disk. Until
  then it is staged in memory: neither acknowledged nor in any vote. To acknowledge entry n means: from my own disk
  alone I can produce parameters and momentum at n.
- Heartbeats are answered at once all the same, with the index that is on disk, and again when that index has grown.
- No message names a term or a vote that is not on disk: it is held back until the write is done.
- Votes and acknowledgements count for the folder that gave them (`disks`), and name the hash of what is acknowledged.
- A voter that hears its leader heeds no newer term of anybody else: one wrong peer must not depose a leader at will.

The caller's duties:

1. Carry out the effects in order; answer each PersistLedger with LedgerPersisted(token), in the order of the tokens.
2. Send a TimerFired when `wake_at_ns` has come; it may change with every call.
3. Call `payload_arrived` when something that `missing_payloads()` named has reached the disk.
4. After every call take `take_committed()` and apply it, in order.

Source: Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm" (2014). From Ongaro's dissertation
(2014): pre-vote (9.6), the leader's check of its majority (6.2), the transfer of leadership (3.10), voters that ignore
who disturbs (4.2.3).
Deviations: entries are matched by the hash of the previous entry instead of its term; acknowledgements name what is
durable and may come unasked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from diloco_node.core.events import (
    Effect,
    Event,
    LedgerPersisted,
    LinkChanged,
    MessageArrived,
    TimerFired,
)
from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.election import Election, Role, TermClaims, majority_of, majority_value
from diloco_node.core.ledger.entries import ZERO_HASH
from diloco_node.core.ledger.entry_gate import EntryGate, Meaning, check_held
from diloco_node.core.ledger.log import ReplicaLog
from diloco_node.core.ledger.replication import Follower, Following, fault_in, majority_contact_ns, most_complete
from diloco_node.core.ledger.write_gate import WriteGate
from diloco_node.core.messages import (
    AppendEntries,
    AppendEntriesReply,
    BaseSent,
    Message,
    RequestVote,
    RequestVoteReply,
    TimeoutNow,
)
from diloco_node.core.types import NO_BASE, Entry, EntryBody, LeaderBody, LedgerBase, RoundBody
from diloco_node.errors import InvalidTransition


class LedgerCore:
    """One voter's ledger. See the module for the caller's duties.

    Args:
        region: this voter. voters: all of them, this one too; the same on every region.
        disk: id of this voter's folder.
        named: the folders that count before entry 1, by region; None: the log itself begins the run.
        heartbeat_ns: between two heartbeats of a leader.
        election_timeout_ns: a follower that hears no leader asks for votes after 1 to 2 times this; a leader that hears
            no majority for this long steps down. At least two heartbeats.
        term, voted_for, entries: what the disk held (`Recovered`), chain checked.
        seed: of the election timeouts; the region's name is mixed in.
        now_ns: monotonic time.
        has_payload: whether what a body names is on this region's disk; True for bodies that name nothing. It must not
            turn False again for an entry of the log; `missing_payloads` has what a disk lost between two processes.
        meaning: of entries; None: each makes sense. Raises StorageError when what the disk held makes none.
        base: what the disk held instead of the first entries. has_base: whether it holds the states that the base
            stands for. base_fault: why a base can't be one of this run's ledger; empty if it can.
        named_by: the folders that the entries of a base name.
    """

    def __init__(
        self,
        *,
        region: str,
        voters: Sequence[str],
        disk: bytes,
        heartbeat_ns: int,
        election_timeout_ns: int,
        term: int,
        voted_for: str,
        entries: Sequence[Entry],
        seed: int,
        now_ns: int,
        has_payload: Callable[[EntryBody], bool],
        named: Mapping[str, bytes] | None = None,
        meaning: Meaning | None = None,
        base: LedgerBase = NO_BASE,
        has_base: Callable[[], bool] = lambda: True,
        base_fault: Callable[[LedgerBase], str] = lambda _: "",
        named_by: Callable[[LedgerBase], Mapping[str, bytes]] = lambda _: {},
    ) -> None:
        if region not in voters or len(set(voters)) != len(voters):
            raise ValueError(f"{region!r} is not exactly once among the voters {sorted(voters)}")
        if not 0 < 2 * heartbeat_ns <= election_timeout_ns:
            raise ValueError(f"an election timeout of {election_timeout_ns} ns for heartbeats of {heartbeat_ns} ns")
        if entries and entries[-1].term > term:
            raise ValueError(f"term {term} is older than the last entry, of term {entries[-1].term}")
        self._region = region
        self._voters = tuple(sorted(voters))
        self._peers = tuple(peer for peer in self._voters if peer != region)
        self._heartbeat_ns = heartbeat_ns
        self._election_timeout_ns = election_timeout_ns
        self._has_payload = has_payload
        self._disk = disk
        self._is_draining = False

        self._base_fault = base_fault
        self._new_base: LedgerBase | None = None
        self._named_by = named_by
        if base.index and meaning is not None:
            meaning.begin(base)
        check_held(entries, meaning)
        self.disks = DiskView(self._voters, named_by(base) if base.index else named)
        self.disks.known_index = base.index
        self._log = ReplicaLog(entries, self._may_persist, base=base, has_base=has_base)
        self.disks.follow(entries)
        self._gate = WriteGate()
        self._entry_gate = EntryGate(self._log, meaning)
        self._election = Election(
            region=region,
            peers=self._peers,
            disk=disk,
            disks=self.disks,
            timeout_ns=election_timeout_ns,
            term=term,
            voted_for=voted_for,
            seed=seed,
            log=self._log,
            gate=self._gate,
            now_ns=now_ns,
        )

        # Known to be on a majority's disks; what is taken is on the own disk, too.
        self._cluster_commit_index = base.index
        self._taken_index = base.index

        self._following = Following(matched_index=base.index)
        # Up to then the leader's own offer lets others stand and be voted for.
        self._offered_until_ns = now_ns
        self._claims = TermClaims(election_timeout_ns)
        # Only of a leader.
        self._followers: dict[str, Follower] = {}
        self._founders: dict[str, bytes] = {}
        self._sequence = 0
        self._heartbeat_at_ns = 0

    @property
    def role(self) -> Role:
        """What this voter is now."""
        return self._election.role

    @property
    def term(self) -> int:
        """The newest term it knows of."""
        return self._election.term

    @property
    def leader(self) -> str:
        """The leader of that term; empty if unknown."""
        return self._election.leader

    @property
    def is_leader(self) -> bool:
        """Whether this voter leads, as far as it knows."""
        return self._election.role is Role.LEADER

    @property
    def is_settled(self) -> bool:
        """It leads, and an entry of its own term is committed: its commit index is the true one."""
        return self.is_leader and self._log.term_at(self._cluster_commit_index) == self.term

    @property
    def commit_index(self) -> int:
        """Last entry that is committed and on this region's disk."""
        return min(self._cluster_commit_index, self._log.durable_index)

    @property
    def cluster_commit_index(self) -> int:
        """Last entry that is known here to be committed; the own disk may lack its payload still."""
        return self._cluster_commit_index

    @property
    def last_index(self) -> int:
        """Last entry of the log, staged ones not counted."""
        return self._log.last_index

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The log after its base, committed or not, staged entries not counted."""
        return self._log.entries

    @property
    def base(self) -> LedgerBase:
        """What the log begins with."""
        return self._log.base

    @property
    def is_base_lacking(self) -> bool:
        """This region's disk does not hold yet what the base stands for."""
        return not self._log.is_whole

    def entry(self, index: int) -> Entry:
        """One entry of the log, staged ones not counted. Raises IndexError."""
        if index > self._log.last_index:
            raise IndexError(f"entry {index} of {self._log.base.index + 1}..{self._log.last_index}")
        return self._log.entry(index)

    @property
    def durable_indexes(self) -> dict[str, int]:
        """Per voter, sorted, what is on its disk: as leader for all, else only for this region."""
        known = {peer: follower.durable_index for peer, follower in self._followers.items()}
        known[self._region] = self._log.durable_index
        return dict(sorted(known.items()))

    @property
    def told_disks(self) -> dict[str, bytes]:
        """As leader, the folders that the followers answer from in this term, of those that have answered."""
        return {peer: follower.disk for peer, follower in self._followers.items() if follower.disk}

    @property
    def founders(self) -> dict[str, bytes]:
        """As the leader of a run that is not founded yet, the folder of every region: all have voted for it."""
        return {} if self.disks.has_view or not self.is_leader else dict(sorted(self._founders.items()))

    @property
    def is_own_disk_sound(self) -> bool:
        """Whether this region's folder has forgotten nothing that counts, as far as can be known.

        The log names it; or the run is being founded with its vote, for then no region knows of an earlier one.
        """
        if self.disks.has_view:
            return self.disks.counts(self._region, self._disk)
        return bool(self.leader) and self._election.founder_term == self.term

    @property
    def wake_at_ns(self) -> int:
        """When the next TimerFired is due."""
        if not self.is_leader:
            return self._election.due_at_ns
        until_ns = self._majority_until_ns()
        return self._heartbeat_at_ns if until_ns is None else min(self._heartbeat_at_ns, until_ns)

    @property
    def reason(self) -> str:
        """One line for status: who leads, or why nobody does, and what is waited for."""
        needed = majority_of(len(self._voters))
        if self.disks.has_view and not self.disks.counts(self._region, self._disk):
            return f"its folder is not the one that the ledger names: it catches up from {self.leader or 'nobody yet'}"
        if not self.disks.has_view and not self.leader:
            silent = [name for name in self._peers if name not in self._election.granted]
            return f"the first start needs every region: waits for {', '.join(silent) or 'its own disk'}"
        if self.is_leader:
            state = f"leads term {self.term}, entry {self._cluster_commit_index} of {self.last_index} is committed"
            behind = [f"{name} at {index}" for name, index in self.durable_indexes.items() if index < self.last_index]
            return state + (f"; behind: {', '.join(behind)}" if behind else "")
        if self.role in (Role.ASKING, Role.CANDIDATE):
            request = "asks who would vote" if self.role is Role.ASKING else f"stands for election in term {self.term}"
            granted = ", ".join(sorted(self._election.granted))
            return f"no leader; {request}: {granted}; needs {needed} of {len(self._voters)}"
        if not self.leader:
            return f"no leader in term {self.term} yet{self._entry_gate.reason}"
        state = f"follows {self.leader} in term {self.term}, committed {self.commit_index} of {self.last_index}"
        missing = self.missing_payloads()
        return state + (f"; waits for {_named(missing[0])}" if missing else "")

    def missing_payloads(self) -> tuple[EntryBody, ...]:
        """Bodies of entries that wait for a payload that is not on this region's disk, in the order of the ledger."""
        waiting = self._log.waiting
        return tuple(entry.body for entry in waiting if not self._has_payload(entry.body)) if waiting else ()

    def handle(self, event: Event, *, now_ns: int) -> list[Effect]:
        """Take note of a fact.

        Args:
            event: TimerFired, MessageArrived with a message of the ledger, LedgerPersisted or LinkChanged.
            now_ns: never less than before.

        Raises:
            InvalidTransition: an event or message that is not the ledger's.
        """
        match event:
            case TimerFired():
                self._timer_fired(now_ns)
            case MessageArrived(peer, message):
                self._message_arrived(peer, message, now_ns)
            case LedgerPersisted(token):
                self._persisted(token, now_ns)
            case LinkChanged(peer, is_up):
                self._link_changed(peer, is_up, now_ns)
            case _:
                raise InvalidTransition(f"the ledger has no arrow for {type(event).__name__}")
        return self._flush()

    def payload_arrived(self, *, now_ns: int) -> list[Effect]:
        """Something has reached the disk: try the entries that wait again."""
        if not self._log.waiting and self._log.is_whole:
            return []
        self._log.find_lost(self._may_persist)
        self._log.promote(self._may_persist, committed_index=self._cluster_commit_index)
        self._report_growth(now_ns)
        return self._flush()

    def propose(self, body: EntryBody, *, now_ns: int) -> list[Effect]:
        """Append an entry: the leader, what its disk can apply. What makes no sense gives an alarm and no entry."""
        assert self.is_leader, f"{self._region} is {self.role} and can't propose"
        assert self._has_payload(body), f"proposed without its payload: {_named(body)}"
        self._append(body, now_ns)
        return self._flush()

    def hand_over(self, *, now_ns: int) -> list[Effect]:
        """This region is about to stop: never stand for election again, and if it leads, offer that to a follower."""
        self._is_draining = True
        return self.transfer_leadership("is about to stop", now_ns=now_ns)

    def transfer_leadership(self, why: str, *, now_ns: int) -> list[Effect]:
        """Offer the lead to a follower, if this region leads; it stays a voter. Repeat it while it still leads."""
        if self.is_leader:
            self._offer_leadership(why, now_ns)
        return self._flush()

    def take_committed(self, entries_max: int | None = None) -> list[Entry]:
        """Entries that are committed and on this region's disk and were not taken before, in order.

        Args:
            entries_max: how many at most; the others are there for the next call.
        """
        first, last = self._taken_index + 1, self.commit_index
        if entries_max is not None:
            last = min(last, self._taken_index + entries_max)
        if last < first:
            return []
        self._taken_index = last
        return list(self._log.slice(first, last))

    @property
    def has_committed(self) -> bool:
        """Whether `take_committed` has more to give."""
        return self._taken_index < self.commit_index

    def take_base(self) -> LedgerBase | None:
        """The base that a leader sent since the last call: go on from it, before anything is taken."""
        base, self._new_base = self._new_base, None
        return base

    def compact(self, base: LedgerBase) -> list[Effect]:
        """Begin the log with this: entries up to its index were taken, and this region's disk needs none of them."""
        assert base.index <= self._taken_index, (base.index, self._taken_index)
        self._log.compact(base)
        return self._flush()

    def _may_persist(self, entry: Entry) -> bool:
        """Whether an entry may go to disk (and so be acknowledged): its payload is there."""
        return self._has_payload(entry.body)

    def _may_commit(self, index: int) -> bool:
        """Whether an entry that is on a majority's disks may be committed for that: only one of the own term.

        An older one may be on a majority and still be overwritten (figure 8 of the paper); it is committed by the first
        entry of this term after it.
        """
        return self._log.term_at(index) == self.term

    def _vote_to_persist(self) -> str:
        """The vote as it goes to disk."""
        return self._election.voted_for

    def _is_up_to_date(self, last_index: int, last_term: int) -> bool:
        """Whether a candidate's log holds at least what this one does."""
        return (last_term, last_index) >= (self._log.last_term, self._log.last_index)

    def _timer_fired(self, now_ns: int) -> None:
        if self.is_leader:
            until_ns = self._majority_until_ns()
            if until_ns is not None and now_ns >= until_ns:
                self._note("no majority answers: steps down")
                self._become_follower("", now_ns)
            elif now_ns >= self._heartbeat_at_ns:
                self._broadcast(now_ns)
                if self._is_draining:
                    self._offer_leadership("is about to stop", now_ns)
        elif now_ns >= self._election.due_at_ns:
            self._election.restart_timer(now_ns)
            if self._may_stand():
                self._election.start_pre_vote(now_ns=now_ns)

    def _message_arrived(self, peer: str, message: Message, now_ns: int) -> None:
        if peer not in self._peers:
            self._note(f"{type(message).__name__} from {peer}, which is no voter: ignored", is_alarm=True)
            return
        match message:
            case RequestVote():
                self._request_vote(peer, message, now_ns)
            case RequestVoteReply():
                self._request_vote_reply(peer, message, now_ns)
            case AppendEntries():
                self._append_entries(peer, message, now_ns)
            case AppendEntriesReply():
                self._append_entries_reply(peer, message, now_ns)
            case BaseSent():
                self._base_sent(peer, message, now_ns)
            case TimeoutNow():
                self._leadership_offered(peer, message, now_ns)
            case _:
                raise InvalidTransition(f"the ledger has no arrow for the message {type(message).__name__}")

    def _persisted(self, token: int, now_ns: int) -> None:
        self._gate.persisted(token)
        self._log.written(token)
        self._report_growth(now_ns)
        if not self.is_leader:
            self._count_votes(now_ns)

    def _link_changed(self, peer: str, is_up: bool, now_ns: int) -> None:
        self._entry_gate.link_changed(peer)
        if self.is_leader and peer in self._followers:
            self._followers[peer].link_changed()
            if is_up:
                self._send_append(peer)
        elif not is_up and peer == self.leader:
            # Most likely it died: do not wait for the whole timeout. If it lives, the others still hear it and refuse.
            self._following.contact_ns = None
            self._election.hasten(now_ns + self._heartbeat_ns)

    def _may_stand(self) -> bool:
        """A folder that does not count would only disturb; before the run is founded each may try."""
        is_sound = not self.disks.has_view or self.disks.counts(self._region, self._disk)
        return is_sound and not self._is_draining

    def _hears_leader(self, now_ns: int, *, but: str = "") -> bool:
        """Whether a leader of this term is there (another than `but`) and has not offered its place."""
        if now_ns < self._offered_until_ns or not self.leader or self.leader == but:
            return False
        if self.is_leader:
            until_ns = self._majority_until_ns()
            return until_ns is None or now_ns < until_ns
        contact_ns = self._following.contact_ns
        return contact_ns is not None and now_ns - contact_ns < self._election_timeout_ns

    def _adopt_term(self, term: int, now_ns: int) -> None:
        if self._election.adopt_term(term):
            self._become_follower("", now_ns)

    def _become_follower(self, leader: str, now_ns: int) -> None:
        """Follow the leader (or nobody yet) of the current term."""
        self._election.follow(leader, now_ns=now_ns)
        self._following = Following(
            matched_index=min(self._cluster_commit_index, self._log.known_index), contact_ns=now_ns if leader else None
        )
        self._followers.clear()
        if leader:
            self._note(f"follows {leader}")

    def _request_vote(self, peer: str, request: RequestVote, now_ns: int) -> None:
        hears_leader = self._hears_leader(now_ns)
        if not request.pre_vote and request.term > self.term:
            if hears_leader:
                return
            self._adopt_term(request.term, now_ns)
        self._election.answer(
            peer,
            request,
            is_up_to_date=self._is_up_to_date(request.last_index, request.last_term) and self._entry_gate.trusts(peer),
            has_leader_contact=hears_leader,
            now_ns=now_ns,
        )

    def _request_vote_reply(self, peer: str, answer: RequestVoteReply, now_ns: int) -> None:
        if not answer.granted:
            if not self._hears_leader(now_ns):
                self._adopt_term(answer.term, now_ns)
        elif self._election.take_vote(peer, answer):
            self._count_votes(now_ns)

    def _count_votes(self, now_ns: int) -> None:
        if self._election.count_votes(now_ns=now_ns):
            self._become_leader(now_ns)

    def _leadership_offered(self, peer: str, offered: TimeoutNow, now_ns: int) -> None:
        if offered.term != self.term or peer != self.leader or self.is_leader:
            return
        self._offered_until_ns = now_ns + self._election_timeout_ns
        if offered.successor == self._region and self._may_stand():
            self._election.stand(now_ns=now_ns)

    def _become_leader(self, now_ns: int) -> None:
        self._founders = dict(self._election.granted)
        self._offered_until_ns = now_ns
        self._election.lead()
        self._log.drop_staged()
        next_index = self._log.last_index + 1
        self._followers = {peer: Follower(next_index=next_index, answered_ns=now_ns) for peer in self._peers}
        self._note("leads")
        self._append(LeaderBody(self._region), now_ns)
        self._broadcast(now_ns)

    def _append(self, body: EntryBody, now_ns: int) -> None:
        entry = self._entry_gate.sealed(body, term=self.term, committed_index=self._cluster_commit_index)
        if isinstance(entry, str):
            self._note(f"does not append what can't be: {entry}", is_alarm=True)
            return
        self._log.append(entry)
        self.disks.follow([entry])
        for peer in self._peers:
            if self._followers[peer].has_more(self._log, commit_index=self._cluster_commit_index):
                self._send_append(peer)

    def _broadcast(self, now_ns: int) -> None:
        self._heartbeat_at_ns = now_ns + self._heartbeat_ns
        for peer in self._peers:
            self._send_append(peer)

    def _send_append(self, peer: str) -> None:
        self._sequence += 1
        message = self._followers[peer].next_message(
            self._log, term=self.term, sequence=self._sequence, commit_index=self._cluster_commit_index
        )
        self._gate.send(peer, message)

    def _append_entries_reply(self, peer: str, answer: AppendEntriesReply, now_ns: int) -> None:
        if answer.term > self.term and (not self._hears_leader(now_ns) or self._claims.is_heeded(peer, now_ns=now_ns)):
            self._adopt_term(answer.term, now_ns)
        if not self.is_leader or answer.term != self.term:
            return
        if answer.accepted and self._log.contradicts(answer.durable_index, answer.durable_hash):
            self._note(f"{peer} acknowledges another entry {answer.durable_index}: not counted", is_alarm=True)
            return
        follower = self._followers[peer]
        if not follower.answered(answer, now_ns=now_ns):
            self._note(f"{peer} has lost entries that it had acknowledged; its disk must be looked at", is_alarm=True)
        if not self.disks.has_view and answer.disk != self._founders[peer]:
            self._note(f"the folder of {peer} is another one than that which voted: begins again")
            self._become_follower("", now_ns)
            return
        self._advance_commit(now_ns)
        if follower.has_more(self._log, commit_index=self._cluster_commit_index):
            self._send_append(peer)

    def _advance_commit(self, now_ns: int) -> None:
        index = self._agreed_index()
        if index > self._cluster_commit_index and self._may_commit(index):
            self._cluster_commit_index = index
            # Tell the followers now: a round is applied when its region knows that it is committed.
            self._broadcast(now_ns)

    def _agreed_index(self) -> int:
        """What is on the disks of a majority of all regions, in folders that count; before genesis, of all of them."""
        durable = {peer: (follower.disk, follower.durable_index) for peer, follower in self._followers.items()}
        durable[self._region] = (self._disk, self._log.durable_index)
        if not self.disks.has_view:
            return min(index for _, index in durable.values())
        return majority_value(index if self.disks.counts(name, disk) else 0 for name, (disk, index) in durable.items())

    def _majority_until_ns(self) -> int | None:
        """Up to when a majority has answered recently enough to lead on; None for a majority by itself."""
        contact_ns = majority_contact_ns(self._followers.values())
        return None if contact_ns is None else contact_ns + self._election_timeout_ns

    def _offer_leadership(self, why: str, now_ns: int) -> None:
        """Ask the live follower with the most on disk to take over; repeated with each heartbeat while it is needed."""
        able = {peer: one for peer, one in self._followers.items() if self.disks.counts(peer, one.disk)}
        successor = most_complete(able, answered_after_ns=now_ns - self._election_timeout_ns)
        if successor:
            self._note(f"{why}: offers its place to {successor}")
            self._offered_until_ns = now_ns + self._election_timeout_ns
            for peer in self._peers:
                self._gate.send(peer, TimeoutNow(self.term, successor))

    def _append_entries(self, peer: str, request: AppendEntries, now_ns: int) -> None:
        if request.term > self.term and not self._hears_leader(now_ns, but=peer):
            self._adopt_term(request.term, now_ns)
        if request.term != self.term:
            # Also when it is far ahead: the next message finds this voter closer.
            self._refuse(peer, request.sequence, hint=0)
            return
        if self.leader not in ("", peer):
            self._note(f"{peer} and {self.leader} both lead this term: ignored {peer}", is_alarm=True)
            return
        if not self._entry_gate.trusts(peer):
            return
        committed_index = self._cluster_commit_index
        fault = fault_in(request, self._log, committed_index=committed_index)
        if fault or (fault := self._entry_gate.fault(request, committed_index=committed_index)):
            self._note(f"ignored entries from {peer}, and follows it no more: {fault}", is_alarm=True)
            self._entry_gate.distrust(peer)  # without contact to a leader it asks for votes, and grants pre-votes
            self._become_follower("", now_ns)
            return
        if self.leader != peer:
            self._become_follower(peer, now_ns)
        self._election.restart_timer(now_ns)
        following = self._following
        following.contact_ns = now_ns
        following.requested_sequence = max(following.requested_sequence, request.sequence)
        if self._log.has(request.previous_index, request.previous_hash):
            conflict = following.take(self._log, request)
            if conflict:
                self.disks.truncated(conflict)
            following.commit_index = max(following.commit_index, request.commit_index)
            reached = min(following.commit_index, following.matched_index)
            self._cluster_commit_index = max(self._cluster_commit_index, reached)
            self._log.promote(self._may_persist, committed_index=self._cluster_commit_index)
            self._acknowledge(request.sequence)
        else:
            # What is committed is in the leader's log: no need to search before it.
            self._refuse(
                peer, request.sequence, hint=max(self._log.search_hint(request.previous_index), self.commit_index)
            )

    def _refuse(self, peer: str, sequence: int, *, hint: int) -> None:
        self._gate.send(peer, AppendEntriesReply(self.term, sequence, False, hint, ZERO_HASH, self._disk))

    def _base_sent(self, peer: str, sent: BaseSent, now_ns: int) -> None:
        if sent.term > self.term and not self._hears_leader(now_ns, but=peer):
            self._adopt_term(sent.term, now_ns)
        if sent.term != self.term:
            self._refuse(peer, sent.sequence, hint=0)
            return
        if not self._entry_gate.trusts(peer):
            return
        base = LedgerBase(sent.index, sent.base_term, sent.hash, sent.summary)
        fault = f"{self.leader} leads this term" if self.leader not in ("", peer) else ""
        if not fault and base.index > self._cluster_commit_index:
            fault = self._base_fault(base) if base.term <= sent.term else f"it is of term {base.term}"
        if fault:
            self._note(f"ignored a base from {peer}: {fault}", is_alarm=True)
            return
        if self.leader != peer:
            self._become_follower(peer, now_ns)
        self._election.restart_timer(now_ns)
        following = self._following
        following.contact_ns = now_ns
        following.requested_sequence = max(following.requested_sequence, sent.sequence)
        if base.index > self._cluster_commit_index:
            self._log.install(base)
            self.disks.begin(self._named_by(base), base.index)
            self._entry_gate.begin(base)
            self._cluster_commit_index = self._taken_index = base.index
            self._new_base = base
            following.matched_index = base.index
            self._note(f"begins its ledger at entry {base.index}, which {peer} sent it")
        self._acknowledge(sent.sequence)

    def _acknowledge(self, sequence: int) -> None:
        index = self._following.reported_index = self._following.acknowledged_index(self._log)
        answer = AppendEntriesReply(self.term, sequence, True, index, self._log.hash_at(index), self._disk)
        self._gate.send(self.leader, answer)

    def _report_growth(self, now_ns: int) -> None:
        """More is on disk: a follower reports it to its leader at once."""
        if self.is_leader:
            self._advance_commit(now_ns)
        elif self.leader and self._following.acknowledged_index(self._log) > self._following.reported_index:
            self._acknowledge(self._following.requested_sequence)

    def _note(self, text: str, *, is_alarm: bool = False) -> None:
        self._gate.note(f"term {self.term}: {self._region} {text}", is_alarm=is_alarm)

    def _flush(self) -> list[Effect]:
        self.disks.follow(self._log.slice(self.disks.known_index + 1, self._log.last_index))
        return self._gate.flush(self._log, term=self.term, voted_for=self._vote_to_persist())


def _named(body: EntryBody) -> str:
    """The body in a few words."""
    if isinstance(body, RoundBody):
        return f"the payload of fragment {body.fragment} version {body.version}"
    return f"what a {type(body).__name__} names"
