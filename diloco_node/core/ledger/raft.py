"""The replicated ledger of one member: Raft with pre-vote, without IO. The log itself names who votes (`roster`).

This ledger adds to Raft's rules:

- An entry is written only when what it names (the payload of a round, Theta_0 of genesis) is on the own disk. Until
  then it is staged in memory: neither acknowledged nor in any vote. To acknowledge entry n means: from my own disk
  alone I can produce parameters and momentum at n.
- Heartbeats are answered at once all the same, with the index that is on disk, and again when that index has grown.
- No message names a term or a vote that is not on disk: it is held back until the write is done.
- Votes and acknowledgements count for the folder that gave them (`disks`), and name the hash of what is acknowledged.
- Logs that part as none can in Raft (an older copy of a folder, a lie) are told, and nothing is overwritten.
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

from dataclasses import replace
from typing import Final

from diloco_node.core.events import Effect, Event, LedgerPersisted, LinkChanged, MessageArrived, TimerFired
from diloco_node.core.ledger.election import TERMS_AHEAD, Role
from diloco_node.core.ledger.entries import ZERO_HASH
from diloco_node.core.ledger.ledger_state import LedgerState, body_name
from diloco_node.core.ledger.replication import Follower, Following, fault_in, fork_in, is_fork
from diloco_node.core.messages import (
    AppendEntries,
    AppendEntriesReply,
    BaseSent,
    Message,
    RequestVote,
    RequestVoteReply,
    TimeoutNow,
)
from diloco_node.core.types import EntryBody, LeaderBody, LedgerBase
from diloco_node.errors import InvalidTransition

DISTRUST_TIMEOUTS: Final = 16
"""Whoever sent what can't be is not followed for so long. Then its entries are asked about as anybody's."""


class LedgerCore(LedgerState):
    """The ledger of one voter. The module has the caller's duties, and `LedgerState` for the arguments."""

    def handle(self, event: Event, *, now_ns: int) -> list[Effect]:
        """Take note of TimerFired, MessageArrived with a message of the ledger, LedgerPersisted or LinkChanged.

        Raises InvalidTransition: an event or message that is not the ledger's.
        """
        match event:
            case TimerFired():
                self._timer_fired(now_ns)
            case MessageArrived(peer, message):
                self._message_arrived(peer, message, now_ns)
            case LedgerPersisted(token):
                self._on_persisted(token, now_ns)
            case LinkChanged(peer, is_up):
                self._link_changed(peer, is_up, now_ns)
            case _:
                raise InvalidTransition(f"the ledger has no arrow for {type(event).__name__}")
        return self._flush()

    def excuse(self, late_ns: int, *, now_ns: int) -> None:
        """This process stood still for so long: what others said meanwhile is not read yet, and silence is no proof."""
        self._election.excuse(late_ns, now_ns=now_ns)

    def payload_arrived(self, *, now_ns: int) -> list[Effect]:
        """Something has reached the disk: try the entries that wait again."""
        if not self._log.waiting and self._log.is_whole:
            return []
        self._log.find_lost(self._may_persist)
        self._log.promote(self._may_persist, committed_index=self.cluster_commit_index)
        self._report_growth(now_ns)
        return self._flush()

    def propose(self, body: EntryBody, *, now_ns: int) -> list[Effect]:
        """Append an entry as the leader, if its disk can apply it. A body that makes no sense gives an alarm
        instead."""
        assert self.is_leader, f"{self._region} is {self.role} and can't propose"
        assert self._has_payload(body), f"proposed without its payload: {body_name(body)}"
        self._append(body, now_ns)
        return self._flush()

    def refuse(self, body: EntryBody, fault: str, *, now_ns: int) -> list[Effect]:
        """Drop an entry that waits, and follow its leader no more: it is not what it says."""
        entry = next((entry for entry in self._log.staged if entry.body == body), None)
        if entry is not None and self.leader:
            self._log.truncate(entry.index)
            self.disks.on_truncation(entry.index)
            self._distrust(self.leader, f"entry {entry.index}: {fault}", now_ns)
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

    def compact(self, base: LedgerBase) -> list[Effect]:
        """Begin the log with this: entries up to its index were taken, and this region's disk needs none of them."""
        assert base.index <= self._taken_index, (base.index, self._taken_index)
        self._log.compact(base)
        return self._flush()

    def _timer_fired(self, now_ns: int) -> None:
        if self.is_leader:
            if self._has_rivals and now_ns >= self._leads_until_ns():
                self._note("no majority answers: steps down")
                self._become_follower("", now_ns)
            elif now_ns >= self._heartbeat_at_ns:
                late_ns = now_ns - self._heartbeat_at_ns
                self._broadcast(now_ns)
                # Where this process is late, it does less: up to twice the time between two heartbeats.
                self._heartbeat_at_ns += min(late_ns, self._heartbeat_ns)
                if self._is_draining:
                    self._offer_leadership("is about to stop", now_ns)
        elif now_ns >= self._election.due_at_ns:
            self._election.restart_timer(now_ns)
            if self._may_stand():
                self._election.start_pre_vote(now_ns=now_ns)

    def _message_arrived(self, peer: str, message: Message, now_ns: int) -> None:
        members = self.disks.roster.disks
        is_answer = isinstance(message, (RequestVoteReply, AppendEntriesReply))
        is_known = peer in members or peer in self._followers or (self._may_lead(peer) and not is_answer)
        if not is_known and self._region in members:
            is_alarm = not self.disks.roster.has_removed(peer)
            self._note(f"{type(message).__name__} from {peer}, which is no voter: ignored", is_alarm=is_alarm)
            return
        match message:
            case RequestVote():
                self._request_vote(peer, message, now_ns)
            case RequestVoteReply():
                self._request_vote_reply(peer, message, now_ns)
            case AppendEntries() if peer == self.disks.roster.witness:
                self._tail_shown(message, now_ns)
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

    def _on_persisted(self, token: int, now_ns: int) -> None:
        self._gate.on_persisted(token)
        self._log.on_written(token)
        self._report_growth(now_ns)
        if not self.is_leader:
            self._count_votes(now_ns)

    def _link_changed(self, peer: str, is_up: bool, now_ns: int) -> None:
        self._entry_gate.link_changed(peer)
        self.folders.link_changed(peer)
        if self.is_leader and peer in self._followers:
            self._followers[peer].link_changed()
            if is_up:
                self._send_append(peer)
        elif not is_up and peer == self.leader:
            # Most likely it died: do not wait for the whole timeout. If it lives, the others still hear it and refuse.
            self._election.cadence.heard_at_ns = None
            self._election.hasten(now_ns + self._heartbeat_ns)
        elif is_up and self.role is not Role.CANDIDATE and not self._hears_leader(now_ns):
            # Perhaps a majority lacked this one. If it leads, its next message puts the election off again.
            self._election.hasten(now_ns + self._heartbeat_ns)

    def _adopt_term(self, term: int, now_ns: int) -> None:
        if self._election.adopt_term(term, now_ns=now_ns):
            self._become_follower("", now_ns)

    def _become_follower(self, leader: str, now_ns: int) -> None:
        """Follow the leader (or nobody yet) of the current term."""
        self._election.follow(leader, now_ns=now_ns)
        self._following = Following(matched_index=min(self.cluster_commit_index, self._log.known_index))
        self._followers.clear()
        if leader:
            self.offered_by = ""
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
            is_up_to_date=self._is_up_to_date(request.last_index, request.last_term)
            and self._entry_gate.trusts(peer, now_ns=now_ns)
            and not self.folders.is_older(peer),
            has_leader_contact=hears_leader,
            now_ns=now_ns,
        )

    def _request_vote_reply(self, peer: str, answer: RequestVoteReply, now_ns: int) -> None:
        is_older = self.folders.is_older(peer)
        if not is_older:  # else its vote counts for nothing, and the witness is needed
            self._election.hear(peer, answer)
        if not answer.granted:
            if not self._hears_leader(now_ns):
                self._adopt_term(answer.term, now_ns)
        elif not is_older and self._election.take_vote(peer, answer):
            self._count_votes(now_ns)

    def _count_votes(self, now_ns: int) -> None:
        if self._election.count_votes(now_ns=now_ns):
            self._become_leader(now_ns)

    def _leadership_offered(self, peer: str, offer: TimeoutNow, now_ns: int) -> None:
        if offer.term != self.term or peer != self.leader or self.is_leader:
            return
        self._offered_until_ns, self.offered_by = now_ns + self._election.timeout_ns, peer
        if offer.successor == self._region and self._may_stand():
            self._election.stand(now_ns=now_ns)

    def _become_leader(self, now_ns: int) -> None:
        self._founders = dict(self._election.votes)
        self._led_term = self.term
        self._offered_until_ns = now_ns
        self._election.lead(now_ns=now_ns)
        self._log.drop_staged()
        self._followers = {}
        self._follow_roster(now_ns)
        self._note("leads")
        self._append(LeaderBody(self._region), now_ns)
        self._broadcast(now_ns)

    def _append(self, body: EntryBody, now_ns: int) -> None:
        entry = self._entry_gate.sealed(body, term=self.term, committed_index=self.cluster_commit_index)
        if isinstance(entry, str):
            self._note(f"does not append what can't be: {entry}", is_alarm=True)
            return
        self._log.append(entry)
        self.disks.follow([entry])
        self._follow_roster(now_ns)
        for peer in self._followers:
            if self._followers[peer].has_more(self._log, commit_index=self.cluster_commit_index):
                self._send_append(peer)

    def _broadcast(self, now_ns: int) -> None:
        self._heartbeat_at_ns = now_ns + self._heartbeat_ns
        self._follow_witness(now_ns)
        for peer in self._followers:
            self._send_append(peer)

    def _send_append(self, peer: str) -> None:
        if peer == self.disks.roster.witness:
            if not self._asks_witness and not self._settles_witness():
                return
            self._witness_age = 0
        self._sequence += 1
        message = self._followers[peer].next_message(
            self._log, term=self.term, sequence=self._sequence, commit_index=self.cluster_commit_index
        )
        self._gate.send(peer, message)

    def _append_entries_reply(self, peer: str, answer: AppendEntriesReply, now_ns: int) -> None:
        if answer.term > self.term and (not self._hears_leader(now_ns) or self._claims.is_heeded(peer, now_ns=now_ns)):
            self._adopt_term(answer.term, now_ns)
        if not self.is_leader or answer.term != self.term:
            return
        index, entry_hash = answer.durable_index, answer.durable_hash
        if (answer.accepted or entry_hash != ZERO_HASH) and self._log.contradicts(index, entry_hash):
            verb = "acknowledges" if answer.accepted else "holds"
            self._contradict(peer, f"{peer} {verb} {self._log.difference(index, entry_hash)}: not counted")
            is_vote = not answer.accepted and peer in self.disks.roster.voters
            if is_vote and self._claims.is_heeded(peer, now_ns=now_ns):
                # Perhaps this folder is the older copy: the others may elect who has forgotten nothing.
                self._become_follower("", now_ns)
            return
        if answer.accepted and index >= self.cluster_commit_index and not self.folders.is_older(peer):
            self.contradictions.pop(peer, None)
        follower = self._followers[peer]
        is_whole = follower.answered(answer, now_ns=now_ns)
        self._hear_majority(now_ns)
        if not is_whole:
            self._note(f"{peer} has lost entries that it had acknowledged; its disk must be looked at", is_alarm=True)
        if not self.disks.has_view and answer.disk != self._founders[peer]:
            self._note(f"the folder of {peer} is another one than that which voted: begins again")
            self._become_follower("", now_ns)
            return
        self._advance_commit(now_ns)
        self.folders.hold(peer, min(follower.durable_index, self.cluster_commit_index))
        if peer not in self.disks.roster.disks and self._bids_farewell(peer, follower, answer.sequence):
            del self._followers[peer]
            return
        if follower.has_more(self._log, commit_index=self.cluster_commit_index):
            self._send_append(peer)

    def _bids_farewell(self, peer: str, follower: Follower, sequence: int) -> bool:
        """Whether a removed region knows that it is: that entry is on its disk, and it was told that it is
        committed."""
        since = self.disks.roster.memberships[peer].since
        if follower.farewell_sequence == 0 and since <= min(follower.durable_index, self.cluster_commit_index):
            self._send_append(peer)
            follower.farewell_sequence = self._sequence
        return 0 < follower.farewell_sequence <= sequence

    def _note_commit(self, index: int) -> None:
        """So much is committed now, on the disks of a majority."""
        if index > self.cluster_commit_index:
            if self._log.term_at(self.cluster_commit_index) == self.term:
                self._election.backoff.succeed()
            self.cluster_commit_index = index

    def _advance_commit(self, now_ns: int) -> None:
        index = self._agreed_index()
        if index > self.cluster_commit_index and self._may_commit(index):
            self._note_commit(index)
            # Tell the followers now: a round is applied when its region knows that it is committed.
            self._broadcast(now_ns)

    def _offer_leadership(self, why: str, now_ns: int) -> None:
        """Ask the live follower with the most on disk to take over; repeated with each heartbeat while it is needed."""
        if successor := self._successor(now_ns):
            self._note(f"{why}: offers its place to {successor}")
            self._offered_until_ns = now_ns + self._election.timeout_ns
            for peer in self._followers:
                self._gate.send(peer, TimeoutNow(self.term, successor))

    def _append_entries(self, peer: str, request: AppendEntries, now_ns: int) -> None:
        if not self._may_follow(peer, request.term, request.sequence, now_ns):
            return
        committed_index = self.cluster_commit_index
        fault = fault_in(request)
        if not fault and (fork := fork_in(request, self._log, committed_index=self.cluster_commit_index)):
            self._part_from(peer, *fork, request.sequence, now_ns)
            return
        if fault or (fault := self._entry_gate.fault(request, peer=peer, committed_index=committed_index)):
            self._distrust(peer, fault, now_ns)
            return
        following = self._follow(peer, request.sequence, now_ns)
        if self._log.has(request.previous_index, request.previous_hash):
            conflict = following.take(self._log, request)
            if conflict:
                self.disks.on_truncation(conflict)
            following.commit_index = max(following.commit_index, request.commit_index)
            index = min(following.commit_index, following.matched_index)
            self._note_commit(index)
            self._log.promote(self._may_persist, committed_index=self.cluster_commit_index)
            self._acknowledge(request.sequence)
        else:
            # What is committed is in the leader's log: no need to search before it.
            self._refuse(
                peer, request.sequence, hint=max(self._log.search_hint(request.previous_index), self.commit_index)
            )

    def _tail_shown(self, tail: AppendEntries, now_ns: int) -> None:
        """Take what the witness has and this log lacks; without it the witness gives no vote.

        A log that ends later, by its last term and index, is one of a later leader: what it has otherwise was never
        committed. So this is as safe as a vote for who has it. Nothing is acknowledged, for nobody asks.
        """
        log, committed_index = self._log, self.cluster_commit_index
        if self.is_leader or self._hears_leader(now_ns) or not tail.entries or fault_in(tail):
            return
        known_index, base = log.known_index, log.base
        if (tail.term, tail.entries[-1].index) <= (log.term_at(known_index), known_index):
            return
        if tail.previous_index < base.index and any(entry.hash == base.hash for entry in tail.entries):
            entries = tuple(entry for entry in tail.entries if entry.index > base.index)
            tail = replace(tail, previous_index=base.index, previous_hash=base.hash, entries=entries)
        conflict = log.first_conflict(tail.entries)
        if not log.has(tail.previous_index, tail.previous_hash) or 0 < conflict <= committed_index:
            return
        if fault := self._entry_gate.fault(tail, peer="", committed_index=committed_index):
            self._note(f"ignored the tail that the witness keeps: {fault}", is_alarm=True)
            return
        matched_index = self._following.matched_index
        if self._following.take(log, tail):
            self.disks.on_truncation(conflict)
            matched_index = min(matched_index, conflict - 1)
        self._following.matched_index = matched_index
        # Behind these entries this log may have others than the tail's next ones, of a leader before.
        self._note_commit(min(tail.commit_index, tail.previous_index + len(tail.entries), log.known_index))
        log.promote(self._may_persist, committed_index=self.cluster_commit_index)

    def _distrust(self, peer: str, fault: str, now_ns: int) -> None:
        self._note(f"ignored entries from {peer}, and follows it no more: {fault}", is_alarm=True)
        # Without contact to a leader it asks for votes, and grants pre-votes.
        self._entry_gate.refuse(peer, fault, until_ns=now_ns + DISTRUST_TIMEOUTS * self._election_timeout_ns)
        self._become_follower("", now_ns)

    def _may_follow(self, peer: str, term: int, sequence: int, now_ns: int) -> bool:
        """Whether a peer may lead the term of its message; it is refused when that is not this voter's."""
        if term > self.term and not self._hears_leader(now_ns, but=peer):
            self._adopt_term(term, now_ns)
        if term != self.term:
            # Also when it is far ahead: the next message finds this voter closer.
            self._refuse(peer, sequence, hint=0)
            return False
        if rival := self._rival(peer):
            self._contradict(peer, f"{peer} and {rival} both lead term {self.term}: ignored {peer}")
        return not rival and self._entry_gate.trusts(peer, now_ns=now_ns)

    def _follow(self, peer: str, sequence: int, now_ns: int) -> Following:
        """Take a message of the term's leader for one."""
        if self.leader != peer:
            self._become_follower(peer, now_ns)
        self._election.restart_timer(now_ns)
        self._election.cadence.hear(now_ns)
        self._following.requested_sequence = max(self._following.requested_sequence, sequence)
        return self._following

    def _part_from(self, peer: str, index: int, entry_hash: bytes, sequence: int, now_ns: int) -> None:
        """Follow no more who leads with a log that can't be beside this one, and tell it: nothing here is dropped."""
        settled = ", which is committed here" if index <= self.cluster_commit_index else ""
        text = f"{peer} leads with {self._log.difference(index, entry_hash)}{settled}: not followed"
        is_signed = self.newer_roster.changes > self.disks.roster.changes
        if is_signed and self.term - self._log.last_term > TERMS_AHEAD // 2:
            text += f". It is `members recover` that dropped what this folder holds: empty that of {self._region}"
        self._contradict(peer, text)
        own_hash = self._log.hash_at(index)
        self._gate.send(peer, AppendEntriesReply(self.term, sequence, False, index, own_hash, self._disk))
        self._entry_gate.distrust(peer, until_ns=now_ns + DISTRUST_TIMEOUTS * self._election_timeout_ns)
        self._become_follower("", now_ns)

    def _contradict(self, peer: str, contradiction: str) -> None:
        if self.contradictions.get(peer) != contradiction:
            self.contradictions[peer] = contradiction
            self._note(contradiction, is_alarm=True)

    def _refuse(self, peer: str, sequence: int, *, hint: int) -> None:
        self._gate.send(peer, AppendEntriesReply(self.term, sequence, False, hint, ZERO_HASH, self._disk))

    def _base_sent(self, peer: str, message: BaseSent, now_ns: int) -> None:
        if not self._may_follow(peer, message.term, message.sequence, now_ns):
            return
        base = LedgerBase(message.index, message.base_term, message.hash, message.summary)
        fault = ""
        if base.index > self.cluster_commit_index:
            fault = self._base_fault(base) if base.term <= message.term else f"it is of term {base.term}"
        if not fault and is_fork(
            self._log, base.index, base.hash, (base.term, message.term), committed_index=self.cluster_commit_index
        ):
            self._part_from(peer, base.index, base.hash, message.sequence, now_ns)
            return
        if fault:
            self._note(f"ignored a base from {peer}: {fault}", is_alarm=True)
            return
        following = self._follow(peer, message.sequence, now_ns)
        if base.index > self.cluster_commit_index:
            self._log.install(base, committed_index=self.commit_index)
            self.disks.begin(self._named_by(base), base.index)
            self._entry_gate.begin(base)
            self.cluster_commit_index = self._taken_index = base.index
            self._new_base = base
            following.matched_index = base.index
            self._note(f"begins its ledger at entry {base.index}, which {peer} sent it")
        self._acknowledge(message.sequence)

    def _acknowledge(self, sequence: int) -> None:
        index = self._following.reported_index = self._following.acknowledged_index(self._log)
        if index == self._log.known_index and not self.folders.is_older(self.leader):  # all here is the leader's
            self.contradictions.pop(self.leader, None)
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
