"""Promises that must always hold, checked while a simulated run goes on.

`Checkers` looks at the world from above: at every core's committed entries, at what each core sends, at the disks. It
keeps one committed history for all regions and lets independent witnesses follow it: the token account (`audit.py`)
and an oracle that recomputes every merged payload and every version (`oracle.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from diloco_node.core import events as ev
from diloco_node.core import messages as msg
from diloco_node.core.ledger.entries import ZERO_HASH
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.recovery.fetches import RETRY_NS_MAX
from diloco_node.core.types import (
    Ballot,
    Contribution,
    DiscardedBody,
    Entry,
    GenesisBody,
    RoundBody,
    SnapshotBody,
)
from diloco_node.lab.sim import core_parts as view
from diloco_node.lab.sim.audit import Audit
from diloco_node.lab.sim.disk import Disk
from diloco_node.lab.sim.fake_learner import FakeSnapshot
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.member_check import MemberCheck
from diloco_node.lab.sim.oracle import Oracle
from diloco_node.lab.sim.region_memory import RegionMemory
from diloco_node.lab.sim.row_check import RowCheck
from diloco_node.lab.sim.setting_orders import SettingCheck
from diloco_node.lab.sim.setup import Setup
from diloco_node.lab.sim.witness_bucket import WITNESS, FakeBucket
from diloco_node.lab.sim.world import SECOND, World

VIOLATIONS_MAX = 20
"""More than that of one run tell nothing new."""

UNASKED_NS_MAX = 2 * RETRY_NS_MAX
"""So long a region may ask nobody for what it lacks, though others are there."""

_REFUSED = ("does not append what can't be", "follows it no more")
"""Words of a core about an entry that it refuses, its own or its leader's."""

_PROOFS = (
    "it told another digest of its merged stripe",
    "another name in the same round",
    "do not add up to the norms it named",
    "got other bytes of its contribution than the leader",
)
"""Words of a core about what only a liar does."""


class Checkers:
    """All checks of one run.

    Attributes:
        violations: in order of discovery, at most VIOLATIONS_MAX.
        history: the committed entries, as the first core to commit each one showed it.
        commits: committed rounds. is_end_due: the settings name an end, or an operator has asked for it.
        busy: the region whose core got the last event.
        liars: regions that send what their cores never said; nothing is demanded of them.
        words: of what the liars do wrong. accusations: alarms with them that name a liar.
        tolerated: complaints of fakes that hold these words are no violations: a fault makes them on purpose.
    """

    def __init__(self, world: World, setup: Setup) -> None:
        self.violations: list[str] = []
        self.history: list[Entry] = []
        self.commits = 0
        self.is_end_due = bool(setup.settings.steps_max or setup.settings.tokens_max)
        # Set by the simulation before the first event.
        self.hosts: dict[str, Host] = {}
        self.bucket: FakeBucket | None = None
        self.busy = ""
        self.liars: frozenset[str] = frozenset()
        self.words: tuple[str, ...] = ()
        self.accusations = 0
        self.tolerated: set[str] = set()
        self.audit = Audit(setup, self.violate)
        self.members = MemberCheck(setup.founders, self.violate)
        self._settings = SettingCheck(setup.settings, self.violate)
        self.rows = RowCheck(len(setup.layouts), self.violate)
        self.oracle = Oracle(setup, self.violate, self._payload_of)
        self._world = world
        self._setup = setup
        # One for each region, made anew when its daemon starts again.
        self._memories = {name: RegionMemory() for name in setup.regions}
        # These keep the first value of a key; another value later is a violation.
        # By (voter, term), the candidate.
        self._votes: dict[tuple[str, int], str] = {}
        # By term, the region.
        self._leaders: dict[int, str] = {}
        # With the region that opened it.
        self._ballots: dict[Ballot, tuple[str, msg.BallotOpened]] = {}
        self._decisions: dict[Ballot, msg.MergeDecided] = {}
        self._snapshots: dict[tuple[str, int, int, int], int] = {}
        # By folder, the last committed entry that it acknowledged.
        self._promised: dict[bytes, int] = {}
        self._message_checks: dict[type, Callable[[Host, str, Any], None]] = {
            msg.AppendEntries: self._leads,
            msg.AppendEntriesReply: self._acknowledges,
            msg.RequestVoteReply: self._votes_for,
            msg.PayloadDurable: self._holds_payload,
            msg.BallotOpened: self._opens,
            msg.MergeDecided: self._decides,
            msg.Contributed: self._contributes,
        }
        # One check for each kind of effect; a kind without one is never checked.
        self._effect_checks: dict[type, Callable[[Host, Any], None]] = {
            ev.Send: self._send,
            ev.PersistLedger: self._proposes,
            ev.ApplyVersion: self._applies,
            ev.OfferVersion: self._offers,
            ev.Note: self._notes,
            ev.FetchPayload: self._fetches,
        }

    def _notes(self, host: Host, note: ev.Note) -> None:
        """Nobody honest makes an entry that can't be: that it is refused everywhere does not excuse it."""
        # Booked by one of two regions while the other and the bucket were away: nobody else could bear it out.
        is_excused = self.bucket is not None and "has not reported them here" in note.text
        is_excused |= self.members.is_belated(note.text, now_ns=self._world.now_ns)
        if note.is_alarm and not self.liars and not is_excused and any(words in note.text for words in _REFUSED):
            self.violate(f"meaning: {host.name}: {note.text}")
        accuses = note.is_alarm and any(words in note.text for words in self.words)
        self.accusations += accuses and any(name in note.text for name in self.liars)
        region = note.text.split(" ", 1)[0]
        if region in self.hosts and region not in self.liars and any(words in note.text for words in _PROOFS):
            self.violate(f"blame: {host.name} takes an honest region's fault for proved: {note.text}")

    def violate(self, text: str) -> None:
        """Note a violation."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(f"{self._world.now_ns / SECOND:.4f}s: {text}")
            self._world.note("world", f"VIOLATION {text}", b"violation")

    def daemon_started(self, host: Host) -> None:
        """A new life begins: its memory starts from the disk."""
        self._memories[host.name] = RegionMemory()

    def event_given(self, host: Host, event: ev.Event) -> None:
        """Versions grow, digests agree."""
        self.busy = host.name
        if host.name in self.liars:
            return
        is_question = isinstance(event, ev.MessageArrived) and isinstance(event.message, msg.RequestVote)
        # In the same event entries may join the log that waited for a leader who is gone.
        self._memories[host.name].asked_end = view.counted_end(host.core) if is_question else None
        self.is_end_due |= isinstance(event, ev.FinishOrdered)
        if isinstance(event, ev.VersionApplied):
            versions = self._memories[host.name].versions
            if event.version <= versions.get(event.fragment, -1):
                self.violate(f"versions: {host.name} went from {versions[event.fragment]} to {event}")
            versions[event.fragment] = event.version
        elif isinstance(event, ev.DigestComputed):
            self._sync(host)
            self.oracle.digest_seen(host.name, event)
        elif isinstance(event, ev.MessageArrived):
            self._memories[host.name].hear(event.peer, event.message)
            self._check_asked(host)

    def _check_asked(self, host: Host) -> None:
        """Regions that failed once are asked again, after a pause."""
        memory, now_ns = self._memories[host.name], self._world.now_ns
        memory.unasked = {at: memory.unasked.get(at, now_ns) for at in view.unasked(host.core)}
        if memory.unasked and now_ns - min(memory.unasked.values()) > UNASKED_NS_MAX:
            self.violate(f"fetch: {host.name} asks nobody for what it lacks, by fragment since {memory.unasked} ns")

    def effect_seen(self, host: Host, effect: ev.Effect) -> None:
        """Whether the core may want this."""
        if isinstance(effect, ev.FetchPayload | ev.FetchState):
            self._memories[host.name].unasked.clear()  # its answer may come before the next message does
        check = self._effect_checks.get(type(effect))
        if check is not None and host.name not in self.liars:
            check(host, effect)

    def settled(self, host: Host) -> None:
        """Look for newly committed entries."""
        if host.name not in self.liars:
            self._sync(host)

    def snapshot_seen(self, host: Host, snapshot: FakeSnapshot) -> None:
        """Remember the bytes of every contribution, and what its learner has really trained."""
        if self.oracle.contribution_made(snapshot.contribution, snapshot.encoded) and host.learner is not None:
            learner = host.learner
            position = learner.parts[snapshot.contribution.fragment].position
            claim = (snapshot.contribution.step_from, snapshot.contribution.step_to, snapshot.contribution.tokens)
            tokens = (learner.tokens - position.included_tokens) // learner.token_factor
            work = (position.included_step, learner.step, tokens)
            if claim != work and snapshot.contribution.learner not in self.liars:
                self.violate(f"work: {snapshot.contribution} names {claim}, its learner has trained {work}")

    def complaint(self, region: str, text: str) -> None:
        """A fake found a broken rule of the seam."""
        if not any(words in text for words in self.tolerated):
            self.violate(f"seam: {region}: {text}")

    def _sync(self, host: Host) -> None:
        if host.core is None:
            return
        ledger = host.core.ledger
        commit_index = ledger.commit_index
        memory = self._memories[host.name]
        if ledger.is_leader:
            self._check_own_term(host, memory)
        if ledger.cluster_commit_index != memory.known_index:
            self._check_known(host, memory, ledger.cluster_commit_index)
        if commit_index == memory.commit_index:
            return
        if commit_index < memory.commit_index:
            self.violate(f"commit: {host.name} went back from {memory.commit_index} to {commit_index}")
        for index in range(max(memory.commit_index, ledger.base.index) + 1, commit_index + 1):
            entry = ledger.entry(index)
            if index <= len(self.history):
                self._check_same(host, entry)
            else:
                self._committed(host, entry)
        memory.commit_index = commit_index
        self._settings.look(host.name, host.core, commit_index)
        # What a base sums up, lives that it closes too, is still what the entries say.
        if memory.base_index < ledger.base.index and self.audit.has_compared(host.name, host.core.history.account):
            memory.base_index = ledger.base.index

    def _check_own_term(self, host: Host, memory: RegionMemory) -> None:
        """An entry that a leader commits by counting disks must be of its own term."""
        ledger = host.core.ledger
        index, term = ledger.cluster_commit_index, ledger.term
        if index > memory.counted_index and memory.led_term == term:
            entry = ledger.entry(index)
            if entry.term != term:
                self.violate(f"old term: {host.name} in term {term} commits entry {index} of term {entry.term}")
        memory.counted_index, memory.led_term = index, term

    def _check_known(self, host: Host, memory: RegionMemory, index: int) -> None:
        """An entry that a core takes as committed must be in its log as it was committed, on its own disk or not yet.

        The last such entry is enough: the hashes of all before are in its own.
        """
        ledger = host.core.ledger
        index_max = min(index, ledger.last_index, len(self.history))
        if index_max > ledger.base.index:
            self._check_same(host, ledger.entry(index_max))
        memory.known_index = index

    def _check_same(self, host: Host, entry: Entry) -> None:
        first_entry = self.history[entry.index - 1]
        if first_entry.hash != entry.hash:
            self.violate(f"one value: entry {entry.index} at {host.name} is {entry}, committed before: {first_entry}")

    def _committed(self, host: Host, entry: Entry) -> None:
        """The first core shows this entry as committed."""
        before = self.history[-1].hash if self.history else ZERO_HASH
        if entry.previous != before:
            self.violate(f"chain: entry {entry.index} at {host.name} does not follow the committed history")
        self.history.append(entry)
        holders = [name for name in sorted(self.hosts) if self.keeps(self.hosts[name].disk, entry)]
        holders += [WITNESS] * (self.bucket is not None and self.bucket.keeps(entry))
        if not self.members.is_majority(host.core, holders, entry.index - 1):
            self.violate(f"durable: {host.name} commits entry {entry.index}, which is only on the disks of {holders}")
        body = entry.body
        self.members.committed(body, self._leaders.get(entry.term, ""))
        self._settings.committed(entry.index, body)
        self.oracle.settings = self._settings.settings
        if isinstance(body, GenesisBody):
            self.oracle.genesis(body, [self.hosts[name].theta_0 for name in self._setup.founders])
        if isinstance(body, RoundBody):
            self.commits += 1
            if body.is_last and not self.is_end_due:
                self.violate(f"end: {body.fragment}/{body.version} is the last round, and nobody asked for the end")
            if body.ballot not in self._ballots and not self.liars and not self.members.has_been_alone:
                self.violate(f"ballot: {body.ballot} was never opened but committed {body.fragment}/{body.version}")
            self.oracle.round_committed(body)
            self.rows.committed(body, self.hosts, self.liars)
        if isinstance(body, DiscardedBody):
            self.oracle.discarded(body)
        counters = {name: self.hosts[name].disk.all_counters for name in self.hosts if name not in self.liars}
        self.audit.committed(body, counters)

    def _send(self, host: Host, effect: ev.Send) -> None:
        if check := self._message_checks.get(type(effect.message)):
            check(host, effect.peer, effect.message)

    def _leads(self, host: Host, _: str, message: msg.AppendEntries) -> None:
        leader = self._leaders.setdefault(message.term, host.name)
        if leader != host.name:
            self.violate(f"leaders: {leader} and {host.name} both lead term {message.term}")
        self._check_vote(host, message.term, host.name, f"leads term {message.term}")

    def _check_vote(self, host: Host, term: int, candidate: str, action: str) -> None:
        disk = host.disk
        if disk.votes.get(term, "").split(" ")[0] != candidate:
            self.violate(f"vote: {host.name} {action}, its disk has {disk.term} {disk.voted_for!r}")

    def _acknowledges(self, host: Host, peer: str, message: msg.AppendEntriesReply) -> None:
        if not message.accepted or not message.durable_index:
            return
        ledger, index = host.core.ledger, message.durable_index
        memory, is_late = self._memories[host.name], message.term < ledger.term
        if index > ledger.last_index:
            if is_late:
                return  # as below
            self.violate(f"durable: {host.name} acknowledges {index}, beyond its log")
            return
        entry = self.history[index - 1] if index == ledger.base.index else ledger.entry(index)
        if memory.acknowledged == (entry.index, entry.hash):
            return
        if is_late and entry.hash != message.durable_hash:
            return  # it waited until a newer term was on disk, whose leader overwrites what it names
        memory.acknowledged = (entry.index, entry.hash)
        self._check_age(host, f"acknowledges entry {entry.index}")
        self._promised[message.disk] = max(self._promised.get(message.disk, 0), min(entry.index, len(self.history)))
        if not host.disk.holds(entry):
            self.violate(f"durable: {host.name} acknowledges entry {entry.index} to {peer}, its disk does not have it")
            return
        if host.disk.term < message.term:
            self.violate(f"durable: {host.name} answers in term {message.term}, its disk has {host.disk.term}")
        if fault := self._unproducible(host.disk, entry.index):
            self.violate(f"durable: acknowledgement to {peer}: {host.name} {fault}")

    def _check_age(self, host: Host, action: str) -> None:
        """A folder never comes back as it was before it acknowledged what is committed."""
        last_index, promise = host.core.ledger.last_index, self._promised.get(host.disk.id, 0)
        if last_index < promise:
            self.violate(f"age: {host.name} {action}, its folder ends at {last_index}, and has acknowledged {promise}")

    def _votes_for(self, host: Host, peer: str, message: msg.RequestVoteReply) -> None:
        if message.pre_vote or not message.granted:
            return
        vote = self._votes.setdefault((host.name, message.term), peer)
        if vote != peer:
            self.violate(f"vote: {host.name} votes for {vote} and {peer} in term {message.term}")
        self._check_up_to_date(host, peer, message.term)
        self._check_age(host, f"votes for {peer}")
        self._check_vote(host, message.term, peer, f"votes for {peer} in {message.term}")

    def _check_up_to_date(self, host: Host, peer: str, term: int) -> None:
        """A voter elects nobody whose log ends before its own."""
        candidate, ends = self.hosts[peer].core, self._memories[peer].voted
        if peer in self.liars or candidate is None or candidate.ledger.term != term:
            return
        if term not in ends and self.hosts[peer].disk.votes.get(term) != peer:
            return  # it asked for the vote before it lost its folder
        # While the vote is written, entries may join the log that waited for their payload. They are acknowledged to
        # nobody before the new leader has them. With one of this very term somebody else was elected meanwhile.
        own_end = self._memories[host.name].voted.get(term, view.counted_end(host.core))
        candidate_end = ends.get(term, view.log_end(candidate))
        if own_end > candidate_end and own_end[0] < term:
            self.violate(
                f"vote: {host.name} at {own_end} votes for {peer}, whose log ends at {candidate_end} (term, index)"
            )

    def _holds_payload(self, host: Host, peer: str, message: msg.PayloadDurable) -> None:
        ballot = self._ballots.get(message.ballot)
        if ballot is None:
            if not self.liars:
                self.violate(f"ballot: {host.name} holds {message.ballot}, which was never opened")
            return
        key = (ballot[1].fragment, ballot[1].version, message.digest)
        if key not in host.disk.payloads:
            self.violate(f"payload: {host.name} tells {peer} that it holds {key[:2]}, its disk does not have it")

    def _opens(self, host: Host, _: str, message: msg.BallotOpened) -> None:
        message = replace(message, reused=())
        owner, first_message = self._ballots.setdefault(message.ballot, (host.name, message))
        if owner != host.name or first_message != message:
            self.violate(
                f"ballot: {message.ballot} opened by {owner} as {first_message} and by {host.name} as {message}"
            )

    def _decides(self, host: Host, _: str, message: msg.MergeDecided) -> None:
        first_decision = self._decisions.get(message.ballot)
        if first_decision is not None:
            if first_decision != message:
                self.violate(f"ballot: {message.ballot} decided as {first_decision} and by {host.name} as {message}")
            return
        self._decisions[message.ballot] = message
        for contribution in message.contributions:
            status = host.core.liveness.learner(contribution.learner)
            merged_incarnation = host.core.history.account.newest_incarnation(contribution.learner)
            known_incarnation = max(merged_incarnation, 0 if status is None else status.incarnation)
            if known_incarnation > contribution.incarnation:
                self.violate(
                    f"incarnation: {host.name} merges {contribution.incarnation} of {contribution.learner} into "
                    f"{message.fragment}/{message.version}, but knows {known_incarnation}"
                )
            if self._is_booking(host, contribution):
                self.violate(f"booking: {host.name} merges {contribution}, whose steps are in its log as discarded")

    def _is_booking(self, host: Host, contribution: Contribution) -> bool:
        """Whether steps of the same account are in the leader's log as discarded, but not committed yet."""
        ledger = host.core.ledger
        bodies = [ledger.entry(at).body for at in range(ledger.cluster_commit_index + 1, ledger.last_index + 1)]
        account = (contribution.learner, contribution.incarnation, contribution.fragment)
        return any(
            isinstance(body, DiscardedBody) and (body.learner, body.incarnation, body.fragment) == account
            for body in bodies
        )

    def _contributes(self, host: Host, _: str, message: msg.Contributed) -> None:
        """In all ballots of a round an incarnation contributes the same snapshot: what arrived is not sent again."""
        ballot = self._ballots.get(message.ballot)
        if ballot is None:
            return
        contribution = message.contribution
        key = (host.name, contribution.incarnation, contribution.fragment, ballot[1].version)
        snapshot = self._snapshots.setdefault(key, contribution.snapshot)
        if snapshot != contribution.snapshot:
            self.violate(f"snapshot: {host.name} offers {snapshot}, then {contribution.snapshot} to {key[2]}/{key[3]}")

    def _proposes(self, host: Host, effect: ev.PersistLedger) -> None:
        """A leader proposes only what a majority has: a round's payload on disk, a snapshot's bytes as it was told."""
        memory = self._memories[host.name]
        if effect.voted_for:
            memory.voted.setdefault(effect.term, memory.asked_end or view.log_end(host.core))
        ledger = host.core.ledger
        if not ledger.is_leader:
            return
        for entry in effect.entries:
            body = entry.body
            if entry.term != ledger.term:
                continue
            if isinstance(body, RoundBody):
                key = (body.fragment, body.version, body.payload_digest)
                claimants = {host.name, *memory.claims.get((body.ballot, body.payload_digest), ())}
                holders = {name for name in claimants if self.hosts[name].disk.has_had(key)} | self.liars
                self._check_majority(host, "holders", key, holders)
            elif isinstance(body, MembershipBody):
                self.members.check_leader(host.core, ledger.cluster_commit_index)
            elif isinstance(body, SnapshotBody):
                key = (body.fragment, body.version, body.digest)
                self._check_majority(host, "snapshot", key, {host.name, *memory.claims.get(key, ())} | self.liars)

    def _check_majority(self, host: Host, label: str, key: tuple[int, int, bytes], names: set[str]) -> None:
        # The witness takes no entry without its payload, and compares no states: it has no say here.
        if not self.members.is_agreed(host.core, {*names, WITNESS}, len(self.history)):
            self.violate(f"{label}: {host.name} proposes {key[:2]}, which only {sorted(names)} have")

    def _fetches(self, host: Host, effect: ev.FetchPayload) -> None:
        key = (effect.fragment, effect.version, effect.digest)
        if key in host.disk.payloads:
            self.violate(f"fetch: {host.name} asks {effect.peer} for payload {key[:2]}, which its own disk has")

    def _applies(self, host: Host, effect: ev.ApplyVersion) -> None:
        self._sync(host)
        body = effect.body
        round_body = self.oracle.committed.get((body.fragment, body.version))
        if round_body is None:
            self.violate(f"apply: {host.name} applies {body.fragment}/{body.version}, which is not committed")
        elif round_body != body:
            self.violate(f"apply: {host.name} applies another {body.fragment}/{body.version} than was committed")

    def _offers(self, host: Host, effect: ev.OfferVersion) -> None:
        learner = host.learner
        if learner is not None and effect.version < learner.parts[effect.fragment].position.base_version:
            self.violate(f"offer: {host.name} offers {effect}, its learner is at {learner.status().positions}")

    def _payload_of(self, body: RoundBody) -> bytes | None:
        """The payload of a committed round, from any disk."""
        key = (body.fragment, body.version, body.payload_digest)
        payloads = (self.hosts[name].disk.payloads.get(key) for name in sorted(self.hosts))
        return next((payload.data for payload in payloads if payload is not None), None)

    def is_whole(self, disk: Disk) -> bool:
        """Whether a disk has all that is committed, and what each entry on it needs."""
        return disk.holds(self.history[-1]) and not self._unproducible(disk, disk.base.index + len(disk.entries))

    def keeps(self, disk: Disk, entry: Entry) -> bool:
        """Whether the disk has the entry and what that needs, or one that was lost had: what it acknowledged counts."""
        if disk.holds(entry) and not self._unproducible(disk, entry.index):
            return True
        return disk.lost is not None and self.keeps(disk.lost, entry)

    def _unproducible(self, disk: Disk, index: int) -> str:
        """Say what this disk lacks to produce parameters and momentum at entry `index` (or later ones) from it
        alone; empty if nothing is."""
        newest = {fragment: state.version for fragment, state in disk.states.items()}
        for fragment, version, *digest in disk.rotten:
            if not digest:
                newest[fragment] = max(version, newest.get(fragment, 0))
        own = (entry for entry in disk.entries if entry.index <= index)
        for entry in chain(islice(self.history, disk.base.index), own):
            body = entry.body
            if isinstance(body, RoundBody) and body.version > newest.get(body.fragment, 0):
                key = (body.fragment, body.version, body.payload_digest)
                if key not in disk.payloads and key not in disk.rotten:
                    return f"can't produce {body.fragment}/{body.version} of entry {index} from its disk"
            elif isinstance(body, GenesisBody) and (missing := disk.missing_theta_0(body)):
                return f"has no Theta_0 of fragments {missing} on its disk"
        return ""
