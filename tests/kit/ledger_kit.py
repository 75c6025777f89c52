"""Ledger cores for tests, one at a time: made, elected, and what came out of them."""

from collections.abc import Callable
from dataclasses import replace

from diloco_node.core.events import Effect, LedgerPersisted, MessageArrived, Note, PersistLedger, Send, TimerFired
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.entry_gate import Meaning
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.messages import AppendEntries, AppendEntriesReply, Message, RequestVote, RequestVoteReply
from diloco_node.core.types import Ballot, DiscardedBody, Entry, EntryBody, LeaderBody, LedgerBase, Recovered, RoundBody


def disk_of(name: str) -> bytes:
    """The folder of a region."""
    return name.encode().ljust(16, b".")


class AnyMeaning:
    """A meaning that every entry has."""

    index = 0

    def fault(self, entry: Entry) -> str:
        return ""

    doubt = fault

    def take(self, entry: Entry) -> None:
        self.index = entry.index

    def back_to(self, index: int) -> None:
        self.index = index

    def settle(self, index: int) -> None:
        """Nothing is kept."""

    def begin(self, base: LedgerBase) -> None:
        self.index = base.index


HEARTBEAT_NS = 199
TIMEOUT_NS = 997


def a_round(version: int, fragment: int = 0) -> RoundBody:
    return RoundBody(fragment, version, Ballot(1, version), (), 1.0, (), (), bytes([version % 256]) * 32)


def a_discard(number: int) -> DiscardedBody:
    return DiscardedBody("a", 1, 0, number, number + 1, 7, "test")


def chain(*terms: int, bodies: Callable[[int, int], EntryBody] | None = None) -> tuple[Entry, ...]:
    """Entries of these terms, from index 1."""
    entries: list[Entry] = []
    for index, term in enumerate(terms, start=1):
        body = bodies(index, term) if bodies else LeaderBody(f"leader-of-{term}")
        entries.append(seal(index, term, entries[-1].hash if entries else ZERO_HASH, body))
    return tuple(entries)


def a_core(
    region: str = "a",
    voters: tuple[str, ...] = ("a", "b", "c"),
    *,
    entries: tuple[Entry, ...] = (),
    term: int | None = None,
    voted_for: str = "",
    has_payload: Callable[[EntryBody], bool] = lambda body: True,
    cls: type[LedgerCore] = LedgerCore,
    now_ns: int = 0,
    seed: int = 1,
    meaning: Meaning | None = None,
    disk: bytes = b"",
    is_founded: bool = True,
    settled_index: int = 0,
) -> LedgerCore:
    """A voter of a run that is founded already, unless said otherwise: each voter's folder is named."""
    if term is None:
        term = entries[-1].term if entries else 0
    core = cls(
        region=region,
        voters=voters,
        recovery=Recovered(term, voted_for, entries, (), frozenset(), disk=disk or disk_of(region)),
        heartbeat_ns=HEARTBEAT_NS,
        election_timeout_ns=TIMEOUT_NS,
        seed=seed,
        now_ns=now_ns,
        has_payload=has_payload,
        meaning=meaning or AnyMeaning(),
    )
    core.cluster_commit_index = max(core.cluster_commit_index, settled_index)
    if is_founded:
        core.disks.begin(Roster.of_voters(voters, {name: disk_of(name) for name in voters}), 0)
        core.disks.follow(entries)
    return core


def sends(effects: list[Effect]) -> list[tuple[str, Message]]:
    """Return the sent messages, without folders and hashes of acknowledgements."""
    return [(effect.peer, _plain(effect.message)) for effect in effects if isinstance(effect, Send)]


def _plain(message: Message) -> Message:
    if isinstance(message, AppendEntriesReply):
        return replace(message, disk=b"", durable_hash=b"")
    return replace(message, disk=b"") if isinstance(message, RequestVote | RequestVoteReply) else message


def writes(effects: list[Effect]) -> list[PersistLedger]:
    return [effect for effect in effects if isinstance(effect, PersistLedger)]


def alarms(effects: list[Effect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Note) and effect.is_alarm]


def arrive(core: LedgerCore, peer: str, message: Message, now_ns: int = 0) -> list[Effect]:
    """Deliver it, from the peer's folder unless it names another."""
    if isinstance(message, AppendEntriesReply | RequestVote | RequestVoteReply) and not message.disk:
        message = replace(message, disk=disk_of(peer))
    if isinstance(message, AppendEntriesReply) and not message.durable_hash:
        is_known = message.accepted and 1 <= message.durable_index <= core.last_index
        message = replace(message, durable_hash=core.entry(message.durable_index).hash if is_known else ZERO_HASH)
    return core.handle(MessageArrived(peer, message), now_ns=now_ns)


def write_all(core: LedgerCore, effects: list[Effect], now_ns: int = 0) -> list[Effect]:
    """Answer every write in the effects, and those that follow; returns all effects that came of it."""
    out: list[Effect] = []
    todo = writes(effects)
    while todo:
        new = core.handle(LedgerPersisted(todo.pop(0).token), now_ns=now_ns)
        todo += writes(new)
        out += new
    return out


def a_candidate(**kwargs: object) -> tuple[LedgerCore, list[Effect]]:
    """A core of three that has won the pre-vote; and the effects of that."""
    core = a_core(**kwargs)  # type: ignore[arg-type]
    now_ns = core.wake_at_ns
    core.handle(TimerFired(), now_ns=now_ns)
    return core, arrive(core, "b", vote(core.term + 1, True, True), now_ns)


def a_leader(**kwargs: object) -> tuple[LedgerCore, list[Effect], int]:
    """A core of three that leads; the effects of its election; the time."""
    core, effects = a_candidate(**kwargs)
    now_ns = core.wake_at_ns - 1
    write_all(core, effects, now_ns)
    effects = arrive(core, "b", vote(core.term, False, True), now_ns)
    assert core.is_leader
    return core, effects, now_ns


def vote_request(term: int, pre_vote: bool, last_index: int, last_term: int, *, has_view: bool = True) -> RequestVote:
    """A candidate's question; `arrive` fills in its folder."""
    return RequestVote(term, pre_vote, last_index, last_term, b"", has_view)


def vote(term: int, pre_vote: bool, is_granted: bool) -> RequestVoteReply:
    """A voter's answer; `arrive` fills in its folder."""
    return RequestVoteReply(term, pre_vote, is_granted, b"")


def ack(term: int, sequence: int, is_accepted: bool, durable_index: int) -> AppendEntriesReply:
    """A follower's answer; `arrive` fills in its folder, and the hash that the leader has there."""
    return AppendEntriesReply(term, sequence, is_accepted, durable_index, b"", b"")


def append_entries(
    entries: tuple[Entry, ...], first: int, last: int, *, term: int, sequence: int = 1, commit: int = 0
) -> AppendEntries:
    """A leader's message with entries first..last of its log."""
    previous = entries[first - 2].hash if first > 1 else ZERO_HASH
    return AppendEntries(term, sequence, first - 1, previous, entries[first - 1 : last], commit)
