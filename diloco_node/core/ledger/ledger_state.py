"""The knowledge of one voter of the ledger: its log, who leads, what is committed, whose disk holds what; read-only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.election import Election, Role, TermClaims, majority_value
from diloco_node.core.ledger.entry_gate import EntryGate, Meaning, check_held
from diloco_node.core.ledger.folder_lives import FolderLives
from diloco_node.core.ledger.log import ReplicaLog
from diloco_node.core.ledger.replication import Follower, Following, WitnessFollower
from diloco_node.core.ledger.roster import NO_DISK, Roster, majority_of
from diloco_node.core.ledger.write_gate import WriteGate
from diloco_node.core.member_kind import MemberKind
from diloco_node.core.types import Entry, EntryBody, FolderLife, LeaderBody, LedgerBase, Recovered, RoundBody

WITNESS_HEARTBEATS: Final = 1500
"""After so many heartbeats without it, five minutes by default, a leader asks the witness: a bucket that is away, or
was emptied, is known before it is needed."""

LAG_TIMEOUTS: Final = 2
"""The witness is asked, too, where an entry is not acknowledged for so many election timeouts by a voter that answers:
its disk stalls, or it objects."""


class LedgerState:
    """The state of one voter, and the questions that change nothing.

    Args:
        region: this voter. voters: the regions that found the run, the same on every region; without this one if it
            joins a run that has begun.
        recovery: what the disk held; the chain of the entries is checked.
        heartbeat_ns: between two heartbeats of a leader.
        election_timeout_ns: a follower that hears no leader asks for votes after 1 to 2 times this; a leader that hears
            no majority for this long steps down. At least two heartbeats. Longer where messages come late (`Cadence`)
            or terms came to nothing (`TermBackoff`).
        seed: of the election timeouts; the region's name is mixed in.
        has_payload: whether what a body names is on this region's disk; True for bodies that name nothing. It must not
            turn False again for an entry of the log; `missing_payloads` has what a disk lost between two processes.
        meaning: of entries. Raises StorageError when what the disk held makes none.
        has_base: whether the disk holds the states that the base stands for. named_by: the members that the entries of
            a base name. base_fault: why a base can't be one of this run's ledger; empty if it can.
    """

    def __init__(
        self,
        *,
        region: str,
        voters: Sequence[str],
        recovery: Recovered,
        heartbeat_ns: int,
        election_timeout_ns: int,
        seed: int,
        now_ns: int,
        has_payload: Callable[[EntryBody], bool],
        meaning: Meaning,
        has_base: Callable[[], bool] = lambda: True,
        base_fault: Callable[[LedgerBase], str] = lambda _: "",
        named_by: Callable[[LedgerBase], Roster] = lambda _: Roster(),
    ) -> None:
        entries, base = recovery.entries, recovery.base
        self._region = region
        self._heartbeat_ns = heartbeat_ns
        self._election_timeout_ns = election_timeout_ns
        # The id of this region's folder. It goes with every vote and acknowledgement, and never changes.
        self._disk = recovery.disk
        # Questions to the rest of the core: is a body's payload on disk, is a base to be believed, whom does it name.
        self._has_payload = has_payload
        self._base_fault = base_fault
        self._named_by = named_by
        # This region is about to stop: it never stands for election again.
        self._is_draining = False
        # A base that a leader sent, until the rest of the core has taken it.
        self._new_base: LedgerBase | None = None
        check_held(base, entries, meaning)
        self.disks = DiskView(sorted(voters))
        if base.index:
            self.disks.begin(named_by(base), base.index)
        self._log = ReplicaLog(entries, self._may_persist, base=base, has_base=has_base)
        self.disks.follow(entries)
        # Signed by the run's authority: members of which the log here may not know yet. Their folders are unsigned.
        self.newer_roster = Roster()
        # What the others tell of their folders; and of this one, its life and where its log ended on disk then.
        self.folders = FolderLives(self.disks)
        self._life, self._end_index = recovery.life, self._log.last_index
        self._gate = WriteGate()
        self._entry_gate = EntryGate(self._log, meaning)
        self._election = Election(
            region=region,
            recovery=recovery,
            disks=self.disks,
            timeout_ns=election_timeout_ns,
            seed=seed,
            log=self._log,
            gate=self._gate,
            now_ns=now_ns,
        )

        # Known to be on a majority's disks; what is taken is on the own disk, too.
        self.cluster_commit_index = max(base.index, recovery.settled_index)
        self._taken_index = base.index

        # The part of a follower: begun anew in each term.
        self._following = Following(matched_index=base.index)
        # Up to then the leader's own offer lets others stand and be voted for.
        self._offered_until_ns = now_ns
        # Who offered its lead to the others, until a new leader is followed.
        self.offered_by = ""
        # The last term that it led.
        self._led_term = max((entry.term for entry in entries if entry.body == LeaderBody(region)), default=0)
        # Per peer, what can't be in Raft beside what this voter holds or did: a folder is an older copy, or one lies.
        self.contradictions: dict[str, str] = {}
        # Followers that claim a newer term, and how often they were heeded.
        self._claims = TermClaims(election_timeout_ns)
        # Only of a leader: the other members, the folders that voted for it (of use before genesis), the last message
        # to all, and the time of the next one. Begun anew in each term that it leads.
        self._followers: dict[str, Follower] = {}
        self._founders: dict[str, bytes] = {}
        self._sequence = 0
        self._heartbeat_at_ns = 0
        # Whether the witness is asked, and heartbeats since it was asked last.
        self._asks_witness = False
        self._witness_age = 0
        # The entry after which nothing was committed, and since when something waits.
        self._waiting = (0, now_ns)

    @property
    def role(self) -> Role:
        """The role of this voter now."""
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
        return self.is_leader and self._log.term_at(self.cluster_commit_index) == self.term

    @property
    def wrong_leaders(self) -> Mapping[str, str]:
        """Per peer that led with an entry that can't be, the reason."""
        return self._entry_gate.faults

    @property
    def patience(self) -> int:
        """Factor on timeouts, after terms that came to nothing (`TermBackoff`)."""
        return self._election.backoff.factor

    @property
    def commit_index(self) -> int:
        """Last entry that is committed and on this region's disk."""
        return min(self.cluster_commit_index, self._log.durable_index)

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
        """The base with which the log begins."""
        return self._log.base

    def entry(self, index: int) -> Entry:
        """Return an entry of the log, staged or not. Raises IndexError."""
        return self._log.entry(index)

    @property
    def durable_indexes(self) -> dict[str, int]:
        """Per member, sorted, what is on its disk: as leader for all, else only for this region."""
        indexes = {peer: follower.durable_index for peer, follower in self._followers.items()}
        indexes[self._region] = self._log.durable_index
        return dict(sorted(indexes.items()))

    @property
    def reported_disks(self) -> dict[str, bytes]:
        """As leader, the folders that the members answer from in this term, of those that have answered."""
        members = self.disks.roster.disks
        return {peer: follower.disk for peer, follower in self._followers.items() if follower.disk and peer in members}

    @property
    def folder(self) -> FolderLife:
        """This region's folder, as the others are to know it."""
        return FolderLife(self._disk, self._life, self._end_index, self.commit_index)

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
        return min(self._heartbeat_at_ns, self._leads_until_ns()) if self._has_rivals else self._heartbeat_at_ns

    @property
    def reason(self) -> str:
        """The leader or why there is none, and what is waited for: a line for status."""
        roster, disks = self.disks.roster, self.disks
        is_named = not disks.has_view or disks.counts(self._region, self._disk)
        if self._region not in roster.names or not is_named:
            lack = "its folder is not the one that the ledger names"
            if self._region not in roster.names:
                place = "of the run any more" if self._region in roster.memberships else "by the entries here yet"
                lack = f"it is no member {place}"
            source = self.leader or "nobody yet, for no leader reaches it: `doctor` dials each region"
            return f"{lack}: it catches up from {source}"
        if not self.disks.has_view and not self.leader:
            silent = [name for name in roster.voters if name not in (self._region, *self._election.votes)]
            return f"the first start needs every region: waits for {', '.join(silent) or 'its own disk'}"
        if self.is_leader:
            state = f"leads term {self.term}, entry {self.cluster_commit_index} of {self.last_index} is committed"
            indexes = ((name, index) for name, index in self.durable_indexes.items() if name != roster.witness)
            behind = [f"{name} at {index}" for name, index in indexes if index < self.last_index]
            return state + (f"; behind: {', '.join(behind)}" if behind else "")
        if self.role in (Role.ASKING, Role.CANDIDATE):
            request = "asks who would vote" if self.role is Role.ASKING else f"stands for election in term {self.term}"
            voters = ", ".join(sorted(self._election.votes))
            return f"no leader; {request}: {voters}; needs {majority_of(len(roster.voters))} of {len(roster.voters)}"
        if not self.leader:
            return f"no leader in term {self.term} yet{self._entry_gate.reason}"
        state = f"follows {self.leader} in term {self.term}, committed {self.commit_index} of {self.last_index}"
        missing = self.missing_payloads(rounds_max=1)
        return state + (f"; waits for {body_name(missing[0])}" if missing else "")

    def hear(self, peer: str, folder: FolderLife) -> str:
        """Take what a region tells of its folder. Return why it is an older copy, if that is news."""
        if self.folders.is_renewed(peer):
            self.contradictions.pop(peer, None)
        if fault := self.folders.hear(peer, folder):
            self.contradictions[peer] = f"the folder of {peer} is an older copy: {fault}"
            if follower := self._followers.get(peer):
                follower.disk, follower.durable_index = b"", 0
        return fault

    def take_committed(self, entries_max: int | None = None) -> list[Entry]:
        """Entries, so many at most, that are committed, on this region's disk and not taken before, in order."""
        first, last = self._taken_index + 1, self.commit_index
        if entries_max is not None:
            last = min(last, self._taken_index + entries_max)
        if last < first:
            return []
        self._taken_index = last
        return list(self._log.slice(first, last))

    def take_base(self) -> LedgerBase | None:
        """The base that a leader sent since the last call: go on from it, before anything is taken."""
        base, self._new_base = self._new_base, None
        return base

    def missing_payloads(self, *, rounds_max: int | None = None) -> tuple[EntryBody, ...]:
        """Bodies of entries that wait for a payload that is not on this region's disk, in the order of the ledger.

        Args:
            rounds_max: the first so many rounds of each fragment are enough. A region that was away for an hour lacks
                thousands, and asks after each event. None: all.
        """
        if not self._log.waiting:
            return ()
        missing: list[EntryBody] = []
        rounds: Counter[int] = Counter()
        for entry in self._log.waiting:
            body = entry.body
            fragment = body.fragment if isinstance(body, RoundBody) else -1
            if fragment >= 0 and rounds[fragment] == rounds_max:
                continue
            if not self._has_payload(body):
                missing.append(body)
                rounds[fragment] += 1
        return tuple(missing)

    def is_staged(self, body: EntryBody, *, leader: str = "", term: int = 0) -> bool:
        """Whether an entry waits that is not known to be committed; if given, of a term that a region leads or led, and
        of this term."""
        leaders = self._entry_gate.leaders
        return any(
            entry.body == body
            and term in (0, entry.term)
            and leader in ("", self.leader if entry.term == self.term else leaders.get(entry.term, ""))
            for entry in self._log.staged
        )

    @property
    def has_committed(self) -> bool:
        """Whether `take_committed` has more to give."""
        return self._taken_index < self.commit_index

    @property
    def has_caught_up(self) -> bool:
        """Whether all that the folder held at the start was given by `take_committed`, or is no more in the log."""
        return self._taken_index >= min(self._end_index, self._log.last_index)

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
        """Whether a candidate's log holds at least what this one does.

        From an entry on that takes this region's vote, and may not be committed, this log does not count: a majority
        without this region holds that entry, or lacks it and may need this vote. Any majority of the voters before has,
        also without this region, a voter in common with each majority after.
        """
        index, changed_at = self._log.last_index, self.disks.last_change_index
        if self._region not in self.disks.roster.voters and changed_at > self.cluster_commit_index:
            index = changed_at - 1
        return (last_term, last_index) >= (self._log.term_at(index), index)

    def _rival(self, peer: str) -> str:
        """The leader of this term, now or earlier, if it is another than the peer; empty if none is known."""
        leader = self._region if self._led_term == self.term else self.leader
        return "" if leader == peer else leader

    @property
    def _has_rivals(self) -> bool:
        """Whether other regions vote."""
        return self.disks.roster.voters not in ((), (self._region,))

    def _may_lead(self, peer: str) -> bool:
        """Whether a peer votes by a roster newer than the log, or by one that still may hold (dissertation, 4.2.3)."""
        roster, newer = self.disks.roster, self.newer_roster
        if newer.changes > roster.changes and newer.kind_of(peer) is MemberKind.VOTER:
            return True
        return roster.has_removed(peer) and roster.memberships[peer].since > self.cluster_commit_index

    def _voting_followers(self) -> dict[str, Follower]:
        """As leader, the followers that vote."""
        voters = self.disks.roster.voters
        return {peer: follower for peer, follower in self._followers.items() if peer in voters}

    def _follow_roster(self, now_ns: int) -> None:
        """As leader, begin to follow how far each new member is. A removed one is followed until it knows."""
        witness, next_index = self.disks.roster.witness, self._log.last_index + 1
        for name in self.disks.roster.names:
            if name not in self._followers and name != self._region:
                self._followers[name] = Follower(next_index=next_index, answered_ns=now_ns)
        for name in [name for name, follower in self._followers.items() if isinstance(follower, WitnessFollower)]:
            if name != witness:
                del self._followers[name]
        if witness and witness not in self._followers:
            self._followers[witness] = WitnessFollower(next_index=next_index, answered_ns=now_ns)

    def _follow_witness(self, now_ns: int) -> None:
        """As leader, find out with each heartbeat to all whether the witness is asked."""
        self._witness_age += 1
        if self.cluster_commit_index != self._waiting[0] or self.cluster_commit_index == self._log.last_index:
            self._waiting = (self.cluster_commit_index, now_ns)
        is_stuck = now_ns - self._waiting[1] >= LAG_TIMEOUTS * self._election.timeout_ns
        is_looked_at = self._witness_age >= WITNESS_HEARTBEATS
        self._asks_witness = self._needs_witness(now_ns) or is_stuck or is_looked_at

    def _settles_witness(self) -> bool:
        """Whether the witness can drop what both voters have on disk now."""
        roster = self.disks.roster
        witness, regions = self._followers[roster.witness], [name for name in roster.voters if name != roster.witness]
        indexes = self.durable_indexes
        return isinstance(witness, WitnessFollower) and witness.settle(min(indexes[name] for name in regions))

    def _needs_witness(self, now_ns: int) -> bool:
        """Whether the leader asks the witness: the other voter is silent, or from a folder that does not count; the
        leader was elected with it; or no folder of it is named yet."""
        roster = self.disks.roster
        if not roster.witness or self.disks.disk_of(roster.witness) == NO_DISK:
            return bool(roster.witness)
        peers = [(name, self._followers[name]) for name in roster.voters if name not in (self._region, roster.witness)]
        if roster.witness in self._founders and not all(follower.disk for _, follower in peers):
            return True
        # Half of the time after which the leader, without any answer, would step down.
        since_ns = now_ns - self._election.timeout_ns // 2
        return any(
            follower.answered_ns <= since_ns or (follower.disk != b"" and not self._counts(name, follower.disk))
            for name, follower in peers
        )

    def _successor(self, now_ns: int) -> str:
        """As leader, the live follower that votes, counts and has the most on disk; empty if there is none."""
        witness, since_ns = self.disks.roster.witness, now_ns - self._election_timeout_ns
        able = [
            (-follower.durable_index, peer)
            for peer, follower in self._voting_followers().items()
            if peer != witness and self._counts(peer, follower.disk) and follower.answered_ns > since_ns
        ]
        return min(able)[1] if able else ""

    def _may_stand(self) -> bool:
        """Whether it votes, from a folder that counts: another would only disturb. Before the run is founded each may
        try."""
        is_sound = not self.disks.has_view or self.disks.counts(self._region, self._disk)
        return is_sound and not self._is_draining and self._region in self.disks.roster.voters

    def _hears_leader(self, now_ns: int, *, but: str = "") -> bool:
        """Whether a leader of this term is there (another than `but`) and has not offered its place."""
        if now_ns < self._offered_until_ns or not self.leader or self.leader == but:
            return False
        return not self._has_rivals or now_ns < self._heard_until_ns()

    def _agreed_index(self) -> int:
        """Return the last entry on a majority of the disks, in folders that count; before genesis, on all of them."""
        durable = {peer: (follower.disk, follower.durable_index) for peer, follower in self._followers.items()}
        durable[self._region] = (self._disk, self._log.durable_index)
        votes = {name: durable[name] for name in self.disks.roster.voters}
        if not self.disks.has_view:
            return min(index for _, index in votes.values())
        return majority_value(index if self._counts(name, disk) else 0 for name, (disk, index) in votes.items())

    def _hear_majority(self, now_ns: int) -> None:
        """As leader, note when a majority, this voter counted, was last heard."""
        answered_ns = [follower.answered_ns for follower in self._voting_followers().values()]
        contact_ns, cadence = majority_value([now_ns, *answered_ns]), self._election.cadence
        if answered_ns and (cadence.heard_at_ns is None or contact_ns > cadence.heard_at_ns):
            cadence.hear(contact_ns)

    def _counts(self, region: str, disk: bytes) -> bool:
        """Whether this folder counts: the ledger names it, and it is no older copy, as far as is known."""
        return self.disks.counts(region, disk) and not self.folders.is_older(region)

    def _heard_until_ns(self) -> int:
        """Up to when the leader, or as leader a majority, was heard recently enough; 0: it was not."""
        election = self._election
        heard_at_ns = election.cadence.heard_at_ns
        return 0 if heard_at_ns is None else heard_at_ns + election.timeout_ns

    def _leads_until_ns(self) -> int:
        """Up to when a leader waits for answers of a majority: as long as the most patient follower for the leader.

        A follower asks for votes after one to two timeouts. And a silence that ends is learnt: answers that wait unread
        on a busy machine would depose one leader after the other, each at the first one.
        """
        return self._heard_until_ns() + self._election.timeout_ns


def body_name(body: EntryBody) -> str:
    """The body in a few words."""
    if isinstance(body, RoundBody):
        return f"the payload of fragment {body.fragment} version {body.version}"
    return f"what a {type(body).__name__} names"
