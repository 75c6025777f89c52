"""The ledger core: one test per rule of Raft and of the design, scenarios on small networks, and random faults."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from diloco_node.core.entries import ZERO_HASH, encode_entry, seal
from diloco_node.core.events import (
    Effect,
    LearnerDetached,
    LedgerPersisted,
    LinkChanged,
    MessageArrived,
    Note,
    PersistLedger,
    Send,
    TimerFired,
)
from diloco_node.core.followers import BATCH_ENTRIES_MAX
from diloco_node.core.ledger import LedgerCore, Role
from diloco_node.core.log import STAGED_BYTES_MAX, STAGED_ENTRIES_MAX
from diloco_node.core.messages import (
    AppendAnswered,
    AppendAsked,
    LeadershipOffered,
    Message,
    Refused,
    VoteAnswered,
    VoteAsked,
)
from diloco_node.core.types import Ballot, DiscardedBody, Entry, EntryBody, LeaderBody, RoundBody
from diloco_node.core.write_gate import HELD_MESSAGES_MAX
from diloco_node.errors import InvalidTransition

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
) -> LedgerCore:
    return cls(
        region=region,
        voters=voters,
        heartbeat_ns=HEARTBEAT_NS,
        election_timeout_ns=TIMEOUT_NS,
        term=term if term is not None else (entries[-1].term if entries else 0),
        voted_for=voted_for,
        entries=entries,
        seed=seed,
        now_ns=now_ns,
        has_payload=has_payload,
    )


def sends(effects: list[Effect]) -> list[tuple[str, Message]]:
    return [(effect.peer, effect.message) for effect in effects if isinstance(effect, Send)]


def writes(effects: list[Effect]) -> list[PersistLedger]:
    return [effect for effect in effects if isinstance(effect, PersistLedger)]


def alarms(effects: list[Effect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Note) and effect.is_alarm]


def arrive(core: LedgerCore, peer: str, message: Message, now_ns: int = 0) -> list[Effect]:
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
    return core, arrive(core, "b", VoteAnswered(core.term + 1, True, True), now_ns)


def a_leader(**kwargs: object) -> tuple[LedgerCore, list[Effect], int]:
    """A core of three that leads; the effects of its election; the time."""
    core, effects = a_candidate(**kwargs)
    now_ns = core.wake_at_ns - 1
    write_all(core, effects, now_ns)
    effects = arrive(core, "b", VoteAnswered(core.term, False, True), now_ns)
    assert core.is_leader
    return core, effects, now_ns


def asked(
    entries: tuple[Entry, ...], first: int, last: int, *, term: int, sequence: int = 1, commit: int = 0
) -> AppendAsked:
    """A leader's message with entries first..last of its log."""
    previous = entries[first - 2].hash if first > 1 else ZERO_HASH
    return AppendAsked(term, sequence, first - 1, previous, entries[first - 1 : last], commit)


# ---- a network of cores ----------------------------------------------------------------------------------------------


@dataclass
class Disk:
    term: int = 0
    voted_for: str = ""
    entries: list[Entry] = field(default_factory=list)
    payloads: set[bytes] = field(default_factory=set)

    def write(self, effect: PersistLedger) -> None:
        self.term, self.voted_for = effect.term, effect.voted_for
        if effect.truncate_from:
            del self.entries[effect.truncate_from - 1 :]
        for entry in effect.entries:
            assert entry.index == len(self.entries) + 1, (entry.index, len(self.entries))
            self.entries.append(entry)


class Network:
    """Some cores on a virtual clock. Messages take `delay_ns`, writes `fsync_ns`; faults are drawn from `rng`."""

    def __init__(
        self,
        voters: int = 3,
        *,
        seed: int = 0,
        cls: type[LedgerCore] = LedgerCore,
        delay_ns: int = 23,
        fsync_ns: int = 7,
    ) -> None:
        self.names = tuple("abcde"[:voters])
        self.rng = random.Random(seed)
        self.seed = seed
        self.cls = cls
        self.delay_ns, self.fsync_ns = delay_ns, fsync_ns
        self.loss = self.duplicates = 0.0
        self.jitter_ns = 0
        self.now_ns = 0
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.counter = 0
        self.disks = {name: Disk() for name in self.names}
        self.lives = dict.fromkeys(self.names, 0)
        self.cores: dict[str, LedgerCore] = {}
        self.cut: set[tuple[str, str]] = set()
        self.committed: dict[str, list[Entry]] = {}
        self.truth: list[Entry] = []
        self.leaders: dict[int, str] = {}
        self.alarms: list[str] = []
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        disk = self.disks[name]
        self.committed[name] = []
        self.cores[name] = a_core(
            name,
            self.names,
            entries=tuple(disk.entries),
            term=disk.term,
            voted_for=disk.voted_for,
            has_payload=lambda body: not isinstance(body, RoundBody) or body.payload_digest in disk.payloads,
            cls=self.cls,
            now_ns=self.now_ns,
            seed=self.seed,
        )

    def crash(self, name: str) -> None:
        self.lives[name] += 1
        del self.cores[name]

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        self.counter += 1
        heapq.heappush(self.queue, (self.now_ns + delay_ns, self.counter, action))

    def perform(self, name: str, effects: list[Effect]) -> None:
        life = self.lives[name]
        for effect in effects:
            if isinstance(effect, PersistLedger):
                self.later(self.fsync_ns, lambda effect=effect: self.written(name, life, effect))  # type: ignore[misc]
            elif isinstance(effect, Send):
                self.transmit(name, effect)
            elif isinstance(effect, Note) and effect.is_alarm:
                self.alarms.append(effect.text)
        self.check(name)

    def written(self, name: str, life: int, effect: PersistLedger) -> None:
        if self.lives[name] == life:
            self.disks[name].write(effect)
            self.perform(name, self.cores[name].handle(LedgerPersisted(effect.token), now_ns=self.now_ns))

    def transmit(self, sender: str, effect: Send) -> None:
        for _ in range(2 if self.rng.random() < self.duplicates else 1):
            if self.rng.random() >= self.loss:
                delay_ns = self.delay_ns + (self.rng.randrange(self.jitter_ns) if self.jitter_ns else 0)
                self.later(delay_ns, lambda: self.deliver(sender, effect))

    def deliver(self, sender: str, effect: Send) -> None:
        receiver = effect.peer
        if receiver in self.cores and (sender, receiver) not in self.cut:
            event = MessageArrived(sender, effect.message)
            self.perform(receiver, self.cores[receiver].handle(event, now_ns=self.now_ns))

    def check(self, name: str) -> None:
        """What must hold after every event."""
        core = self.cores[name]
        if core.is_leader:
            assert self.leaders.setdefault(core.term, name) == name, (
                f"two leaders in term {core.term}, seed {self.seed}"
            )
        taken = core.take_committed()
        self.committed[name] += taken
        for entry in taken:
            if entry.index > len(self.truth):
                self.truth.append(entry)
            assert self.truth[entry.index - 1].hash == entry.hash, f"entry {entry.index} differs, seed {self.seed}"
            assert self.disks[name].entries[entry.index - 1].hash == entry.hash, f"not on disk, seed {self.seed}"
        for entry in self.disks[name].entries:
            if isinstance(entry.body, RoundBody):
                assert entry.body.payload_digest in self.disks[name].payloads, f"no payload, seed {self.seed}"

    def step(self) -> None:
        wakes = [(core.wake_at_ns, name) for name, core in self.cores.items()]
        wake_ns, name = min(wakes) if wakes else (1 << 62, "")
        if self.queue and self.queue[0][0] <= wake_ns:
            at_ns, _, action = heapq.heappop(self.queue)
            self.now_ns = max(self.now_ns, at_ns)
            action()
        else:
            self.now_ns = max(self.now_ns, wake_ns)
            self.perform(name, self.cores[name].handle(TimerFired(), now_ns=self.now_ns))

    def run(self, duration_ns: int) -> None:
        until_ns = self.now_ns + duration_ns
        while True:
            next_ns = min(
                [core.wake_at_ns for core in self.cores.values()] + ([self.queue[0][0]] if self.queue else []),
                default=until_ns,
            )
            if next_ns >= until_ns:
                self.now_ns = until_ns
                return
            self.step()

    def run_until(self, condition: Callable[[], bool], limit_ns: int = 100 * TIMEOUT_NS) -> None:
        until_ns = self.now_ns + limit_ns
        while not condition():
            assert self.now_ns < until_ns, f"it never came, seed {self.seed}: {self.reasons()}"
            self.step()

    def reasons(self) -> list[str]:
        return [f"{name}: {core.reason}" for name, core in self.cores.items()]

    @property
    def leader(self) -> str:
        """The leader of the newest term among the living; empty if none."""
        return max(((core.term, name) for name, core in self.cores.items() if core.is_leader), default=(0, ""))[1]

    def elect(self) -> str:
        self.run_until(lambda: bool(self.leader) and self.cores[self.leader].is_settled)
        return self.leader

    def give_payload(self, body: RoundBody, *names: str) -> None:
        for name in names:
            self.disks[name].payloads.add(body.payload_digest)
            if name in self.cores:
                self.perform(name, self.cores[name].payload_arrived(now_ns=self.now_ns))

    def fetch(self, name: str) -> None:
        """Give the core the payloads that it waits for."""
        if name in self.cores:
            for body in self.cores[name].wanted():
                assert isinstance(body, RoundBody)
                self.give_payload(body, name)

    def propose(self, body: EntryBody) -> None:
        name = self.leader
        self.perform(name, self.cores[name].propose(body, now_ns=self.now_ns))

    def isolate(self, name: str) -> None:
        for other in self.names:
            if other != name:
                self.cut |= {(name, other), (other, name)}

    def heal(self) -> None:
        self.cut.clear()

    def has_all(self, index: int) -> bool:
        return all(len(entries) >= index for entries in self.committed.values())


# ---- construction ----------------------------------------------------------------------------------------------------


def test_settings_that_can_not_work_are_refused() -> None:
    with pytest.raises(ValueError, match="not exactly once"):
        a_core("z")
    with pytest.raises(ValueError, match="not exactly once"):
        a_core("a", ("a", "b", "a"))
    with pytest.raises(ValueError, match="older than the last entry"):
        a_core(entries=chain(1, 2), term=1)
    with pytest.raises(ValueError, match="election timeout"):
        LedgerCore(
            region="a",
            voters=("a",),
            heartbeat_ns=500,
            election_timeout_ns=999,
            term=0,
            voted_for="",
            entries=(),
            seed=0,
            now_ns=0,
            has_payload=lambda body: True,
        )


def test_events_and_messages_that_are_not_the_ledgers_are_bugs() -> None:
    core = a_core()
    with pytest.raises(InvalidTransition, match="LearnerDetached"):
        core.handle(LearnerDetached(), now_ns=0)
    with pytest.raises(InvalidTransition, match="Refused"):
        arrive(core, "b", Refused(0, 0, "gone"))


def test_who_is_no_voter_is_not_listened_to() -> None:
    core = a_core()
    effects = arrive(core, "z", VoteAsked(9, False, 99, 9))
    assert core.term == 0
    assert sends(effects) == []
    assert "no voter" in alarms(effects)[0]


# ---- pre-vote and elections (Raft 5.2, 5.4.1; dissertation 9.6) ------------------------------------------------------


def test_a_follower_that_hears_nobody_asks_after_one_to_two_timeouts() -> None:
    wakes = {a_core(seed=seed).wake_at_ns for seed in range(300)}
    assert min(wakes) >= TIMEOUT_NS
    assert max(wakes) <= 2 * TIMEOUT_NS
    assert len(wakes) > 200
    assert min(wakes) < 1.05 * TIMEOUT_NS
    assert max(wakes) > 1.95 * TIMEOUT_NS


def test_voters_with_one_seed_still_draw_different_timeouts() -> None:
    assert len({a_core(name, tuple("abcde")).wake_at_ns for name in "abcde"}) == 5


def test_before_its_time_a_timer_does_nothing() -> None:
    core = a_core()
    wake_ns = core.wake_at_ns
    assert core.handle(TimerFired(), now_ns=wake_ns - 1) == []
    assert core.handle(TimerFired(), now_ns=wake_ns) != []


def test_a_pre_vote_is_asked_for_the_next_term_and_changes_nothing() -> None:
    core = a_core(entries=chain(1, 3))
    effects = core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert sends(effects) == [(peer, VoteAsked(4, True, 2, 3)) for peer in ("b", "c")]
    assert writes(effects) == []
    assert core.term == 3
    assert core.role is Role.ASKING


def test_answering_a_pre_vote_changes_nothing() -> None:
    core = a_core(entries=chain(1))
    effects = arrive(core, "b", VoteAsked(7, True, 1, 1))
    assert effects == [Send("b", VoteAnswered(7, True, True))]
    assert core.term == 1


def test_a_pre_vote_is_granted_to_two_candidates_at_once() -> None:
    core = a_core()
    assert sends(arrive(core, "b", VoteAsked(1, True, 0, 0))) == [("b", VoteAnswered(1, True, True))]
    assert sends(arrive(core, "c", VoteAsked(1, True, 0, 0))) == [("c", VoteAnswered(1, True, True))]


@pytest.mark.parametrize(("term", "granted"), [(2, False), (3, False), (4, True)])
def test_a_pre_vote_needs_a_term_above_the_voters_own(term: int, granted: bool) -> None:
    core = a_core(entries=chain(3))
    effects = arrive(core, "b", VoteAsked(term, True, 1, 3))
    assert sends(effects) == [("b", VoteAnswered(term if granted else 3, True, granted))]


def test_who_hears_a_leader_refuses_pre_votes_for_one_election_timeout() -> None:
    core = a_core()
    log = chain(1)
    write_all(core, arrive(core, "b", asked(log, 1, 1, term=1), now_ns=100), now_ns=100)
    for now_ns, granted in ((100 + TIMEOUT_NS - 1, False), (100 + TIMEOUT_NS, True)):
        effects = arrive(core, "c", VoteAsked(2, True, 1, 1), now_ns)
        assert sends(effects) == [("c", VoteAnswered(2 if granted else 1, True, granted))]


def test_a_leader_refuses_pre_votes() -> None:
    core, _, now_ns = a_leader()
    effects = arrive(core, "c", VoteAsked(core.term + 1, True, 99, 99), now_ns)
    assert sends(effects) == [("c", VoteAnswered(core.term, True, False))]
    assert core.is_leader


def test_who_is_refused_with_a_newer_term_adopts_it() -> None:
    core = a_core()
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    effects = arrive(core, "b", VoteAnswered(8, True, False), core.wake_at_ns)
    assert core.term == 8
    assert core.role is Role.FOLLOWER
    assert writes(effects)[0].term == 8


def test_a_majority_of_pre_votes_starts_the_election_and_a_minority_does_not() -> None:
    core = a_core("a", tuple("abcde"))
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    arrive(core, "b", VoteAnswered(1, True, True))
    arrive(core, "b", VoteAnswered(1, True, True))
    assert core.role is Role.ASKING
    arrive(core, "c", VoteAnswered(1, True, True))
    assert core.role is Role.CANDIDATE
    assert core.term == 1


def test_pre_votes_are_no_votes_and_the_other_way_round() -> None:
    core, _ = a_candidate()
    arrive(core, "c", VoteAnswered(1, True, True))
    assert core.role is Role.CANDIDATE
    core = a_core()
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    arrive(core, "b", VoteAnswered(1, False, True))
    assert core.role is Role.ASKING


def test_a_candidate_asks_only_when_term_and_own_vote_are_on_disk() -> None:
    core, effects = a_candidate()
    assert writes(effects) == [PersistLedger(1, 1, "a", 0, ())]
    assert sends(effects) == []
    effects = core.handle(LedgerPersisted(1), now_ns=0)
    assert sends(effects) == [(peer, VoteAsked(1, False, 0, 0)) for peer in ("b", "c")]


def test_a_vote_is_told_only_when_it_is_on_disk() -> None:
    core = a_core()
    effects = arrive(core, "b", VoteAsked(4, False, 0, 0))
    assert writes(effects) == [PersistLedger(1, 4, "b", 0, ())]
    assert sends(effects) == []
    assert sends(core.handle(LedgerPersisted(1), now_ns=0)) == [("b", VoteAnswered(4, False, True))]


def test_a_newer_term_is_told_only_when_it_is_on_disk() -> None:
    core = a_core(entries=chain(1))
    effects = arrive(core, "b", asked(chain(1), 2, 1, term=5))
    assert writes(effects) == [PersistLedger(1, 5, "", 0, ())]
    assert sends(effects) == []
    # Also what is asked meanwhile waits.
    assert sends(arrive(core, "c", VoteAsked(6, True, 1, 1))) == []
    assert sends(core.handle(LedgerPersisted(1), now_ns=0)) == [
        ("b", AppendAnswered(5, 1, True, 1)),
        ("c", VoteAnswered(5, True, False)),
    ]


def test_messages_that_wait_for_the_disk_are_limited() -> None:
    core = a_core()
    arrive(core, "b", VoteAsked(4, False, 0, 0))
    for _ in range(HELD_MESSAGES_MAX + 100):
        arrive(core, "c", VoteAsked(9, True, 0, 0))
    assert len(sends(core.handle(LedgerPersisted(1), now_ns=0))) == HELD_MESSAGES_MAX


def test_one_vote_per_term_first_come_first_served() -> None:
    core = a_core()
    write_all(core, arrive(core, "b", VoteAsked(1, False, 0, 0)))
    assert sends(arrive(core, "c", VoteAsked(1, False, 0, 0))) == [("c", VoteAnswered(1, False, False))]
    assert sends(arrive(core, "b", VoteAsked(1, False, 0, 0))) == [("b", VoteAnswered(1, False, True))]
    assert sends(write_all(core, arrive(core, "c", VoteAsked(2, False, 0, 0)))) == [("c", VoteAnswered(2, False, True))]


def test_a_vote_in_a_term_that_is_known_already_is_written_too() -> None:
    core = a_core(term=1)
    effects = arrive(core, "b", VoteAsked(1, False, 0, 0))
    assert (writes(effects), sends(effects)) == ([PersistLedger(1, 1, "b", 0, ())], [])


def test_a_candidate_of_an_older_term_gets_no_vote() -> None:
    core = a_core(term=5)
    effects = arrive(core, "b", VoteAsked(4, False, 9, 4))
    assert effects == [Send("b", VoteAnswered(5, False, False))]


def test_a_vote_that_comes_before_the_own_one_is_on_disk_has_to_wait_for_it() -> None:
    core, effects = a_candidate()
    arrive(core, "b", VoteAnswered(1, False, True))
    assert not core.is_leader
    write_all(core, effects)
    assert core.is_leader


def test_the_vote_survives_a_restart() -> None:
    core = a_core(term=1, voted_for="b")
    assert sends(arrive(core, "c", VoteAsked(1, False, 0, 0))) == [("c", VoteAnswered(1, False, False))]
    assert sends(arrive(core, "b", VoteAsked(1, False, 0, 0))) == [("b", VoteAnswered(1, False, True))]


@pytest.mark.parametrize(
    ("last_index", "last_term", "granted"),
    [(3, 2, True), (2, 2, False), (4, 2, True), (99, 1, False), (1, 3, True), (3, 1, False)],
)
@pytest.mark.parametrize("pre_vote", [True, False])
def test_a_vote_goes_only_to_a_log_at_least_as_complete(
    last_index: int, last_term: int, granted: bool, pre_vote: bool
) -> None:
    core = a_core(entries=chain(1, 1, 2))
    effects = arrive(core, "b", VoteAsked(9, pre_vote, last_index, last_term))
    answers = sends(effects) + sends(write_all(core, effects))
    assert [message.granted for _, message in answers if isinstance(message, VoteAnswered)] == [granted]


def test_staged_entries_are_in_no_vote() -> None:
    log = chain(1, 1, bodies=lambda index, term: a_round(index))
    core = a_core(has_payload=lambda body: body == log[0].body)
    write_all(core, arrive(core, "b", asked(log, 1, 2, term=1)))
    now_ns = core.wake_at_ns
    effects = core.handle(TimerFired(), now_ns=now_ns)
    assert sends(effects)[0] == ("b", VoteAsked(2, True, 1, 1))
    # Nor do they make this voter refuse a candidate that does not have them.
    assert sends(arrive(core, "c", VoteAsked(2, True, 1, 1), now_ns)) == [("c", VoteAnswered(2, True, True))]


def test_granting_a_vote_puts_off_the_own_election_and_refusing_does_not() -> None:
    core = a_core(entries=chain(1))
    wake_ns = core.wake_at_ns
    arrive(core, "b", VoteAsked(2, False, 0, 0), now_ns=wake_ns - 1)
    assert core.wake_at_ns == wake_ns
    arrive(core, "b", VoteAsked(3, False, 1, 1), now_ns=wake_ns - 1)
    assert core.wake_at_ns >= wake_ns - 1 + TIMEOUT_NS


def test_a_candidate_that_gets_no_majority_asks_again_with_a_pre_vote() -> None:
    core, effects = a_candidate()
    write_all(core, effects)
    effects = core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert sends(effects) == [(peer, VoteAsked(2, True, 0, 0)) for peer in ("b", "c")]
    assert core.term == 1


def test_votes_of_another_term_do_not_count() -> None:
    core, effects = a_candidate()
    write_all(core, effects)
    arrive(core, "b", VoteAnswered(0, False, True))
    arrive(core, "b", VoteAnswered(2, False, True))
    assert core.role is Role.CANDIDATE
    arrive(core, "b", VoteAnswered(1, False, True))
    assert core.is_leader


def test_a_candidate_follows_the_leader_of_its_term() -> None:
    core, effects = a_candidate()
    write_all(core, effects)
    arrive(core, "c", asked(chain(1), 1, 1, term=1))
    assert (core.role, core.leader, core.term) == (Role.FOLLOWER, "c", 1)


def test_a_single_voter_leads_by_itself_and_never_steps_down() -> None:
    core = a_core("a", ("a",))
    effects = core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert not core.is_leader  # its own vote is not on disk yet
    write_all(core, effects)
    assert core.is_settled
    assert [entry.body for entry in core.take_committed()] == [LeaderBody("a")]
    for _ in range(20):
        core.handle(TimerFired(), now_ns=core.wake_at_ns + 5)
    assert core.is_leader


# ---- the leader (Raft 5.3, 5.4.2; dissertation 6.2) ------------------------------------------------------------------


def test_a_new_leader_appends_an_entry_of_its_term_at_once() -> None:
    core, effects, _ = a_leader(entries=chain(1, 1))
    entry = core.entries[-1]
    assert (entry.index, entry.term, entry.body) == (3, 2, LeaderBody("a"))
    assert writes(effects)[0].entries == (entry,)
    previous = core.entries[1].hash
    expected = [AppendAsked(2, sequence, 2, previous, (entry,), 0) for sequence in (1, 2)]
    assert [message for _, message in sends(effects)][:2] == expected


def test_a_leader_does_not_count_itself_before_its_own_disk_has_the_entry() -> None:
    core, effects, now_ns = a_leader()
    assert core.durable_indexes == {"a": 0, "b": 0, "c": 0}
    arrive(core, "b", AppendAnswered(1, 1, True, 1), now_ns)
    assert core.cluster_commit_index == 0
    write_all(core, effects, now_ns)
    assert core.cluster_commit_index == 1
    assert core.is_settled


def test_an_entry_on_a_majority_without_the_leader_is_committed_but_not_taken_from_its_own_disk() -> None:
    core, effects, now_ns = a_leader()
    arrive(core, "b", AppendAnswered(1, 1, True, 1), now_ns)
    arrive(core, "c", AppendAnswered(1, 2, True, 1), now_ns)
    assert core.cluster_commit_index == 1
    assert core.commit_index == 0
    assert core.take_committed() == []
    write_all(core, effects, now_ns)
    assert [entry.index for entry in core.take_committed()] == [1]
    assert core.take_committed() == []


def test_half_of_four_voters_is_no_majority() -> None:
    core = a_core("a", tuple("abcd"))
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    arrive(core, "b", VoteAnswered(1, True, True))
    assert core.role is Role.ASKING
    write_all(core, arrive(core, "c", VoteAnswered(1, True, True)))
    arrive(core, "b", VoteAnswered(1, False, True))
    assert not core.is_leader
    write_all(core, arrive(core, "c", VoteAnswered(1, False, True)))
    assert core.is_leader
    arrive(core, "b", AppendAnswered(1, 1, True, 1))
    assert core.cluster_commit_index == 0
    arrive(core, "c", AppendAnswered(1, 2, True, 1))
    assert core.cluster_commit_index == 1


def test_entries_of_older_terms_are_never_committed_by_counting() -> None:
    core, effects, now_ns = a_leader(entries=chain(1, 1))
    write_all(core, effects, now_ns)
    for sequence, peer in ((1, "b"), (2, "c")):
        arrive(core, peer, AppendAnswered(2, sequence, True, 2), now_ns)
    assert core.cluster_commit_index == 0
    assert not core.is_settled
    arrive(core, "b", AppendAnswered(2, 1, True, 3), now_ns)
    assert core.cluster_commit_index == 3
    assert core.is_settled


def test_a_commit_is_told_at_once() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    effects = arrive(core, "b", AppendAnswered(1, 1, True, 1), now_ns)
    assert [(peer, message.commit_index) for peer, message in sends(effects) if isinstance(message, AppendAsked)] == [
        ("b", 1),
        ("c", 1),
    ]


def test_heartbeats_go_out_in_time_also_while_a_batch_is_on_its_way() -> None:
    core, _, now_ns = a_leader()
    for _ in range(3):
        now_ns = core.wake_at_ns
        effects = core.handle(TimerFired(), now_ns=now_ns)
        assert [(peer, message.entries) for peer, message in sends(effects) if isinstance(message, AppendAsked)] == [
            ("b", ()),
            ("c", ()),
        ]
        assert core.wake_at_ns <= now_ns + HEARTBEAT_NS


def test_one_batch_is_on_its_way_at_a_time() -> None:
    core, _, now_ns = a_leader()
    effects = core.propose(a_discard(1), now_ns=now_ns)
    assert sends(effects) == []
    effects = arrive(core, "b", AppendAnswered(1, 1, True, 0), now_ns)
    (peer, message) = sends(effects)[0]
    assert isinstance(message, AppendAsked)
    assert (peer, message.previous_index, [entry.body for entry in message.entries]) == ("b", 1, [a_discard(1)])


def test_a_batch_holds_at_most_so_many_entries_and_the_next_follows_its_answer() -> None:
    entries = chain(*[1] * 200)
    core, effects, now_ns = a_leader(entries=entries)
    effects = arrive(core, "b", AppendAnswered(2, 1, False, 0), now_ns)
    counts = []
    while batch := [m for _, m in sends(effects) if isinstance(m, AppendAsked) and m.entries]:
        counts.append(len(batch[0].entries))
        durable = batch[0].previous_index + len(batch[0].entries)
        effects = arrive(core, "b", AppendAnswered(2, batch[0].sequence, True, durable), now_ns)
    assert counts == [BATCH_ENTRIES_MAX, BATCH_ENTRIES_MAX, BATCH_ENTRIES_MAX, 201 - 3 * BATCH_ENTRIES_MAX]


def test_a_leader_sends_no_more_than_a_follower_may_stage() -> None:
    core, effects, now_ns = a_leader(entries=chain(*[1] * 500))
    effects = arrive(core, "b", AppendAnswered(2, 1, False, 0), now_ns)
    sent = 0
    while batch := [m for _, m in sends(effects) if isinstance(m, AppendAsked) and m.entries]:
        sent += len(batch[0].entries)
        effects = arrive(core, "b", AppendAnswered(2, batch[0].sequence, True, 10), now_ns)
    assert sent == 10 + STAGED_ENTRIES_MAX
    effects = core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert [m.entries for peer, m in sends(effects) if peer == "b" and isinstance(m, AppendAsked)] == [()]


def test_a_leader_searches_the_common_part_with_the_followers_hint() -> None:
    core, _, now_ns = a_leader(entries=chain(1, 1, 1, 2, 2))
    effects = arrive(core, "b", AppendAnswered(3, 1, False, 3), now_ns)
    message = sends(effects)[0][1]
    assert isinstance(message, AppendAsked)
    assert message.previous_index == 3
    assert [entry.index for entry in message.entries] == [4, 5, 6]


def test_refusals_that_come_late_or_twice_are_old_news() -> None:
    core, _, now_ns = a_leader(entries=chain(1, 1, 1, 2, 2))
    arrive(core, "b", AppendAnswered(3, 1, False, 3), now_ns)
    assert sends(arrive(core, "b", AppendAnswered(3, 1, False, 1), now_ns)) == []
    assert sends(arrive(core, "b", AppendAnswered(3, 99, False, 0), now_ns)) == []


def test_an_acknowledgement_ends_the_search() -> None:
    core, _, now_ns = a_leader(entries=chain(*[1] * 200))
    arrive(core, "b", AppendAnswered(2, 1, False, 0), now_ns)
    # Late news from before the refusal: the follower has 150 entries, no need to send them from the first on.
    arrive(core, "b", AppendAnswered(2, 1, True, 150), now_ns)
    core.handle(LinkChanged("b", False), now_ns=now_ns)
    message = sends(core.handle(LinkChanged("b", True), now_ns=now_ns))[0][1]
    assert isinstance(message, AppendAsked)
    assert message.previous_index == 150


def test_acknowledgements_never_go_back_and_never_beyond_the_log() -> None:
    core, effects, now_ns = a_leader(entries=chain(1))
    write_all(core, effects, now_ns)
    arrive(core, "b", AppendAnswered(2, 1, True, 999), now_ns)
    assert core.durable_indexes["b"] == 2
    arrive(core, "b", AppendAnswered(2, 1, True, 1), now_ns)
    assert core.durable_indexes["b"] == 2
    assert core.cluster_commit_index == 2


def test_answers_of_another_term_are_not_counted() -> None:
    core, effects, now_ns = a_leader(entries=chain(1, 2), term=2)
    write_all(core, effects, now_ns)
    arrive(core, "b", AppendAnswered(2, 1, True, 3), now_ns)
    assert core.durable_indexes["b"] == 0
    arrive(core, "b", AppendAnswered(4, 1, True, 3), now_ns)
    assert (core.role, core.term, core.cluster_commit_index) == (Role.FOLLOWER, 4, 0)


def test_a_leader_that_hears_no_majority_for_one_timeout_steps_down() -> None:
    core, _, now_ns = a_leader()
    silent_since_ns = now_ns
    while core.is_leader:
        now_ns = core.wake_at_ns
        effects = core.handle(TimerFired(), now_ns=now_ns)
    assert now_ns == silent_since_ns + TIMEOUT_NS
    assert (core.role, core.leader) == (Role.FOLLOWER, "")
    assert "no majority answers" in str(effects)
    assert core.wake_at_ns >= now_ns + TIMEOUT_NS


def test_a_leader_that_hears_one_of_two_followers_leads_on() -> None:
    core, _, now_ns = a_leader()
    for _ in range(50):
        now_ns = core.wake_at_ns
        for peer, message in sends(core.handle(TimerFired(), now_ns=now_ns)):
            if peer == "c" and isinstance(message, AppendAsked):
                arrive(core, "c", AppendAnswered(1, message.sequence, True, 0), now_ns)
    assert core.is_leader


def test_a_leader_of_five_that_hears_one_steps_down() -> None:
    network = Network(5)
    leader = network.elect()
    others = [name for name in network.names if name != leader]
    for other in others[1:]:
        network.cut |= {(other, leader)}
    network.run_until(lambda: not network.cores[leader].is_leader, limit_ns=2 * TIMEOUT_NS)


def test_only_a_leader_proposes_and_only_what_its_disk_can_apply() -> None:
    with pytest.raises(AssertionError, match="can't propose"):
        a_core().propose(a_discard(1), now_ns=0)
    core, _, now_ns = a_leader(has_payload=lambda body: not isinstance(body, RoundBody))
    with pytest.raises(AssertionError, match="fragment 0 version 1"):
        core.propose(a_round(1), now_ns=now_ns)


def test_a_leader_that_sees_a_newer_term_follows() -> None:
    for message in (
        VoteAsked(9, False, 0, 0),
        VoteAnswered(9, False, False),
        AppendAnswered(9, 1, False, 0),
        asked(chain(9), 1, 1, term=9),
    ):
        core, _, now_ns = a_leader()
        effects = arrive(core, "c", message, now_ns)
        assert (core.role, core.term) == (Role.FOLLOWER, 9)
        assert writes(effects)[0].term == 9


def test_two_leaders_in_one_term_are_an_alarm() -> None:
    core, _, now_ns = a_leader()
    effects = arrive(core, "c", asked(chain(1), 1, 1, term=1), now_ns)
    assert "both lead" in alarms(effects)[0]
    assert core.is_leader


def test_a_follower_that_lost_what_it_acknowledged_is_an_alarm_and_is_filled_again() -> None:
    core, effects, now_ns = a_leader(entries=chain(1, 1))
    write_all(core, effects, now_ns)
    arrive(core, "b", AppendAnswered(2, 1, True, 3), now_ns)
    assert core.durable_indexes["b"] == 3
    beat = next(m for peer, m in sends(core.handle(TimerFired(), now_ns=core.wake_at_ns)) if peer == "b")
    assert isinstance(beat, AppendAsked)
    effects = arrive(core, "b", AppendAnswered(2, beat.sequence, False, 0), now_ns)
    assert "has lost entries" in alarms(effects)[0]
    message = sends(effects)[0][1]
    assert isinstance(message, AppendAsked)
    assert [entry.index for entry in message.entries] == [1, 2, 3]
    assert core.durable_indexes["b"] == 0
    assert core.cluster_commit_index == 3


# ---- the follower (Raft 5.3; design part 6) --------------------------------------------------------------------------


def test_a_follower_writes_first_and_acknowledges_then() -> None:
    core = a_core(term=1)
    log = chain(1, 1)
    effects = arrive(core, "b", asked(log, 1, 2, term=1, sequence=8))
    assert sends(effects) == [("b", AppendAnswered(1, 8, True, 0))]
    assert writes(effects) == [PersistLedger(1, 1, "", 0, log)]
    assert sends(core.handle(LedgerPersisted(1), now_ns=0)) == [("b", AppendAnswered(1, 8, True, 2))]


def test_an_entry_whose_payload_is_missing_is_neither_written_nor_acknowledged() -> None:
    log = chain(1, 1, 1, bodies=lambda index, term: a_round(index))
    held = {a_round(1).payload_digest}
    core = a_core(term=1, has_payload=lambda body: isinstance(body, RoundBody) and body.payload_digest in held)
    effects = arrive(core, "b", asked(log, 1, 3, term=1, commit=3))
    assert [entry.index for write in writes(effects) for entry in write.entries] == [1]
    write_all(core, effects)
    assert core.wanted() == (a_round(2), a_round(3))
    assert (core.last_index, core.commit_index, core.cluster_commit_index) == (1, 1, 3)
    # The third is there before the second: it still has to wait for it.
    held.add(a_round(3).payload_digest)
    assert core.payload_arrived(now_ns=0) == []
    assert core.wanted() == (a_round(2),)
    held.add(a_round(2).payload_digest)
    effects = core.payload_arrived(now_ns=0)
    assert [entry.index for write in writes(effects) for entry in write.entries] == [2, 3]
    assert sends(write_all(core, effects)) == [("b", AppendAnswered(1, 1, True, 3))]
    assert [entry.index for entry in core.take_committed()] == [1, 2, 3]
    assert core.payload_arrived(now_ns=0) == []


def test_heartbeats_are_answered_at_once_while_a_payload_is_missing() -> None:
    log = chain(1, bodies=lambda index, term: a_round(index))
    core = a_core(term=1, has_payload=lambda body: False)
    arrive(core, "b", asked(log, 1, 1, term=1))
    for sequence in range(2, 6):
        effects = arrive(core, "b", asked(log, 2, 1, term=1, sequence=sequence))
        assert effects == [Send("b", AppendAnswered(1, sequence, True, 0))]


def test_what_is_staged_is_limited_in_entries() -> None:
    log = chain(*[1] * 300, bodies=lambda index, term: a_round(index))
    core = a_core(term=1, has_payload=lambda body: False)
    for first in range(1, 300, 60):
        arrive(core, "b", asked(log, first, first + 59, term=1, commit=300))
    assert len(core.wanted()) == STAGED_ENTRIES_MAX
    assert core.cluster_commit_index == STAGED_ENTRIES_MAX


def test_what_is_staged_is_limited_in_bytes() -> None:
    body = replace(a_round(1), payload_digest=bytes(2_700_000))
    log = chain(*[1] * 12, bodies=lambda index, term: replace(body, version=index))
    core = a_core(term=1, has_payload=lambda body: False)
    for index in range(1, 13):
        arrive(core, "b", asked(log, index, index, term=1))
    assert len(core.wanted()) == STAGED_BYTES_MAX // len(encode_entry(log[0]))


def test_a_follower_refuses_what_does_not_fit_and_says_where_to_look() -> None:
    core = a_core(entries=chain(1, 1, 2, 2), term=3)
    log = chain(1, 1, 3, 3, 3, 3)
    effects = arrive(core, "b", asked(log, 6, 6, term=3))
    assert sends(effects) == [("b", AppendAnswered(3, 1, False, 4))]  # its log is shorter
    effects = arrive(core, "b", asked(log, 5, 5, term=3, sequence=2))
    assert sends(effects) == [("b", AppendAnswered(3, 2, False, 2))]  # before the term that differs
    assert core.entries == chain(1, 1, 2, 2)
    effects = arrive(core, "b", asked(log, 3, 6, term=3, sequence=3))
    assert writes(effects) == [PersistLedger(1, 3, "", 3, log[2:])]
    assert core.entries == log


def test_logs_that_differ_from_the_first_entry_on_are_replaced_as_a_whole() -> None:
    core = a_core(entries=chain(1, 1), term=3)
    log = chain(2, 3)
    effects = arrive(core, "b", asked(log, 3, 2, term=3))
    assert sends(effects) == [("b", AppendAnswered(3, 1, False, 0))]
    effects = arrive(core, "b", asked(log, 1, 2, term=3))
    assert writes(effects) == [PersistLedger(1, 3, "", 1, log)]


def test_only_entries_that_differ_are_forgotten() -> None:
    log = chain(1, 1, 1)
    core = a_core(entries=log)
    assert writes(arrive(core, "b", asked(log, 1, 2, term=1))) == []
    assert core.last_index == 3


def test_old_entries_are_acknowledged_only_as_far_as_they_are_known_to_match() -> None:
    core = a_core(entries=chain(1, 1, 2, 2), term=3)
    log = chain(1, 1, 3)
    effects = arrive(core, "b", asked(log, 2, 2, term=3))
    assert sends(effects) == [("b", AppendAnswered(3, 1, True, 2))]


def test_a_conflicting_entry_is_forgotten_even_while_the_new_one_lacks_its_payload() -> None:
    core = a_core(entries=chain(1, 2), term=3, has_payload=lambda body: not isinstance(body, RoundBody))
    log = chain(1, 3, bodies=lambda index, term: a_round(index) if term == 3 else LeaderBody("leader-of-1"))
    effects = arrive(core, "b", asked(log, 2, 2, term=3))
    assert writes(effects) == [PersistLedger(1, 3, "", 2, ())]
    assert core.last_index == 1
    assert core.wanted() == (a_round(2),)


def test_a_write_under_way_of_a_forgotten_entry_acknowledges_nothing() -> None:
    core = a_core(term=1)
    old = chain(1, 1, 1)
    first = arrive(core, "b", asked(old, 1, 3, term=1))
    new = chain(1, 2)
    second = arrive(core, "c", asked(new, 2, 2, term=2))
    assert writes(second) == [PersistLedger(2, 2, "", 2, new[1:])]
    core.handle(LedgerPersisted(writes(first)[0].token), now_ns=0)
    assert core.durable_indexes == {"a": 1}
    effects = core.handle(LedgerPersisted(2), now_ns=0)
    assert sends(effects)[-1] == ("c", AppendAnswered(2, 1, True, 2))


def test_a_follower_commits_what_the_leader_committed_as_far_as_it_matches_and_is_on_disk() -> None:
    core = a_core(entries=chain(1, 1, 2), term=3)
    log = chain(1, 1, 3)
    arrive(core, "b", asked(log, 2, 2, term=3, commit=3))
    assert core.commit_index == 2
    effects = arrive(core, "b", asked(log, 3, 3, term=3, commit=3))
    assert core.commit_index == 2
    write_all(core, effects)
    assert core.commit_index == 3


def test_what_is_committed_is_never_forgotten_whoever_asks() -> None:
    core = a_core(entries=chain(1, 1))
    arrive(core, "b", asked(chain(1, 1), 2, 2, term=1, commit=2))
    for term, other in ((2, asked(chain(2), 1, 1, term=2)), (3, asked(chain(1, 3), 2, 2, term=3))):
        effects = arrive(core, "c", other)
        assert "committed here" in alarms(effects)[0]
        assert (core.term, core.entries) == (term, chain(1, 1))


def test_messages_of_an_older_term_are_refused_with_the_newer() -> None:
    core = a_core(term=5)
    effects = arrive(core, "b", asked(chain(1), 1, 1, term=4, sequence=9))
    assert sends(effects) == [("b", AppendAnswered(5, 9, False, 0))]
    assert core.leader == ""


def test_an_old_message_that_comes_late_changes_nothing() -> None:
    log = chain(1, 1, 1)
    core = a_core(term=1)
    write_all(core, arrive(core, "b", asked(log, 1, 3, term=1, sequence=5, commit=3)))
    effects = arrive(core, "b", asked(log, 1, 1, term=1, sequence=2))
    assert effects == [Send("b", AppendAnswered(1, 2, True, 3))]
    assert (core.last_index, core.commit_index) == (3, 3)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (AppendAsked(1, 1, 0, ZERO_HASH, (replace(chain(1)[0], body=LeaderBody("x")),), 0), "does not match its hash"),
        (AppendAsked(1, 1, 0, ZERO_HASH, chain(1, 1)[1:], 0), "missing"),
        (AppendAsked(1, 1, 0, ZERO_HASH, (chain(1)[0], chain(1, 2)[1]), 0), "of term 2"),
        (AppendAsked(1, 1, -1, ZERO_HASH, (), 0), "entries after -1"),
        (AppendAsked(1, 1, 0, ZERO_HASH, (), -1), "-1 committed"),
        (AppendAsked(1, 1, 0, ZERO_HASH, chain(*[1] * (BATCH_ENTRIES_MAX + 1)), 0), "entries after 0"),
    ],
)
def test_a_message_no_leader_sends_is_an_alarm_and_not_answered(message: AppendAsked, fault: str) -> None:
    core = a_core(term=1)
    effects = arrive(core, "b", message)
    assert fault in alarms(effects)[0]
    assert sends(effects) == writes(effects) == []
    assert core.leader == ""


def test_hearing_the_leader_puts_off_the_election() -> None:
    core = a_core(term=1)
    arrive(core, "b", asked(chain(1), 1, 0, term=1), now_ns=500)
    assert core.wake_at_ns >= 500 + TIMEOUT_NS
    assert core.leader == "b"


def test_when_the_link_to_the_leader_breaks_the_election_comes_earlier() -> None:
    core = a_core(term=1)
    arrive(core, "b", asked(chain(1), 1, 0, term=1), now_ns=0)
    core.handle(LinkChanged("c", False), now_ns=10)
    assert sends(arrive(core, "c", VoteAsked(2, True, 0, 0), 10)) == [("c", VoteAnswered(1, True, False))]
    core.handle(LinkChanged("b", False), now_ns=10)
    assert 10 + HEARTBEAT_NS <= core.wake_at_ns < 10 + HEARTBEAT_NS + TIMEOUT_NS
    assert sends(arrive(core, "c", VoteAsked(2, True, 0, 0), 10)) == [("c", VoteAnswered(2, True, True))]


def test_a_follower_whose_link_comes_back_hears_the_leader_at_once() -> None:
    core, _, now_ns = a_leader()
    core.handle(LinkChanged("b", False), now_ns=now_ns)
    effects = core.handle(LinkChanged("b", True), now_ns=now_ns)
    assert [peer for peer, _ in sends(effects)] == ["b"]


# ---- a disk that lost a payload --------------------------------------------------------------------------------------


def test_an_entry_whose_payload_the_disk_has_lost_counts_in_votes_and_is_not_acknowledged() -> None:
    log = chain(1, 1, 1, 1, bodies=lambda index, term: a_round(index))
    held = {log[0].body, log[1].body, log[3].body}
    core = a_core(entries=log, has_payload=lambda body: body in held)
    assert core.wanted() == (log[2].body,)
    answers = sends(write_all(core, arrive(core, "b", VoteAsked(2, False, 3, 1))))
    assert answers == [("b", VoteAnswered(2, False, False))], "a shorter log gets no vote"
    effects = arrive(core, "c", asked(log, 5, 4, term=2, sequence=7, commit=4))
    assert sends(effects) == [("c", AppendAnswered(2, 7, True, 2))]
    assert core.take_committed() == list(log[:2])
    assert core.cluster_commit_index == 4
    held.add(log[2].body)
    assert sends(core.payload_arrived(now_ns=0)) == [("c", AppendAnswered(2, 7, True, 4))]
    assert core.take_committed() == list(log[2:])
    assert core.wanted() == ()


def test_a_leader_whose_disk_has_lost_a_payload_counts_itself_when_it_is_back() -> None:
    log = chain(1, 1, bodies=lambda index, term: a_round(index))
    held = {log[0].body}
    core, effects, now_ns = a_leader(
        entries=log, has_payload=lambda body: not isinstance(body, RoundBody) or body in held
    )
    write_all(core, effects, now_ns)
    assert core.durable_indexes["a"] == 1
    arrive(core, "b", AppendAnswered(core.term, 1, True, 3), now_ns)
    assert core.commit_index == 0
    held.add(log[1].body)
    assert sends(core.payload_arrived(now_ns=now_ns)), "the followers hear of the commit"
    assert core.commit_index == 3


def test_a_lost_payload_of_an_entry_that_is_replaced_is_not_missed() -> None:
    log = chain(1, 1, 1, bodies=lambda index, term: a_round(index))
    other = chain(1, 2, 2, bodies=lambda index, term: a_round(index + 10 * (term > 1)))
    core = a_core(entries=log, has_payload=lambda body: body != log[1].body)
    effects = write_all(core, arrive(core, "b", asked(other, 2, 3, term=2)))
    assert core.wanted() == ()
    assert sends(effects)[-1] == ("b", AppendAnswered(2, 1, True, 3))


# ---- handing over ----------------------------------------------------------------------------------------------------


def test_who_is_offered_the_lead_by_its_leader_stands_at_once() -> None:
    core = a_core(term=1)
    arrive(core, "b", asked(chain(1), 1, 0, term=1))
    for peer, term in (("c", 1), ("b", 0), ("b", 2)):
        arrive(core, peer, LeadershipOffered(term))
        assert core.role is Role.FOLLOWER
    effects = arrive(core, "b", LeadershipOffered(1))
    assert (core.role, core.term) == (Role.CANDIDATE, 2)
    assert sends(write_all(core, effects))[0] == ("b", VoteAsked(2, False, 0, 0))


def test_a_leader_that_stops_hands_over_to_who_has_most() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    arrive(core, "c", AppendAnswered(1, 2, True, 1), now_ns)
    assert sends(core.hand_over(now_ns=now_ns)) == [("c", LeadershipOffered(1))]


def test_a_leader_does_not_hand_over_to_who_is_silent() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    arrive(core, "c", AppendAnswered(1, 2, True, 1), now_ns)
    arrive(core, "b", AppendAnswered(1, 1, True, 0), now_ns + TIMEOUT_NS)
    assert sends(core.hand_over(now_ns=now_ns + TIMEOUT_NS)) == [("b", LeadershipOffered(1))]


def test_after_handing_over_a_voter_never_stands_again_but_votes() -> None:
    core = a_core()
    core.hand_over(now_ns=0)
    assert core.handle(TimerFired(), now_ns=core.wake_at_ns) == []
    assert core.role is Role.FOLLOWER
    arrive(core, "b", asked(chain(1), 1, 0, term=1))
    arrive(core, "b", LeadershipOffered(1))
    assert core.role is Role.FOLLOWER
    assert writes(arrive(core, "c", VoteAsked(2, False, 0, 0)))[0].voted_for == "c"


def test_a_hand_over_takes_a_few_delays_and_no_timeout() -> None:
    network = Network(3)
    old = network.elect()
    network.run(TIMEOUT_NS)
    began_ns = network.now_ns
    network.perform(old, network.cores[old].hand_over(now_ns=network.now_ns))
    network.run_until(lambda: network.leader not in ("", old) and network.cores[network.leader].is_settled)
    assert network.now_ns - began_ns < TIMEOUT_NS / 3
    assert network.cores[old].role is Role.FOLLOWER


def test_an_offer_that_was_lost_is_repeated() -> None:
    network = Network(3)
    old = network.elect()
    network.loss = 1.0
    network.perform(old, network.cores[old].hand_over(now_ns=network.now_ns))
    network.run(HEARTBEAT_NS)
    network.loss = 0.0
    network.run_until(lambda: network.leader not in ("", old), limit_ns=3 * HEARTBEAT_NS)


# ---- what the operator sees ------------------------------------------------------------------------------------------


def test_reasons_say_what_is_waited_for() -> None:
    core = a_core()
    assert core.reason == "no leader in term 0 yet"
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert core.reason == "no leader; asks who would vote: a; needs 2 of 3"
    arrive(core, "b", VoteAnswered(1, True, True))
    assert core.reason == "no leader; stands for election in term 1: a; needs 2 of 3"
    core, _, now_ns = a_leader()
    arrive(core, "b", AppendAnswered(1, 1, True, 1), now_ns)
    assert core.reason == "leads term 1, entry 0 of 1 is committed; behind: a at 0, c at 0"
    core = a_core(term=1, has_payload=lambda body: False)
    arrive(core, "b", asked(chain(1, bodies=lambda index, term: a_round(7, 3)), 1, 1, term=1))
    assert core.reason == "follows b in term 1, committed 0 of 0; waits for the payload of fragment 3 version 7"


# ---- scenarios -------------------------------------------------------------------------------------------------------


def test_three_voters_elect_a_leader_and_commit_on_all() -> None:
    network = Network(3)
    network.elect()
    body = a_round(1)
    network.give_payload(body, "a", "b", "c")
    network.propose(body)
    network.run_until(lambda: network.has_all(2))
    assert [entry.body for entry in network.committed["a"]] == [LeaderBody(network.leader), body]
    assert network.alarms == []


def test_an_undisturbed_leader_leads_for_ever_and_writes_nothing_more() -> None:
    network = Network(5)
    leader = network.elect()
    network.run(5 * TIMEOUT_NS)
    term = network.cores[leader].term
    sizes = {name: (disk.term, len(disk.entries)) for name, disk in network.disks.items()}
    network.run(200 * TIMEOUT_NS)
    assert network.leader == leader
    assert {name: (disk.term, len(disk.entries)) for name, disk in network.disks.items()} == sizes
    assert sizes[leader] == (term, 1)


def test_a_commit_takes_two_delays_and_one_fsync() -> None:
    network = Network(3)
    leader = network.elect()
    network.run(TIMEOUT_NS)
    began_ns = network.now_ns
    network.propose(a_discard(1))
    network.run_until(lambda: network.cores[leader].commit_index == 2)
    assert network.now_ns - began_ns == 2 * network.delay_ns + network.fsync_ns
    network.run_until(lambda: network.has_all(2))
    assert network.now_ns - began_ns == 3 * network.delay_ns + network.fsync_ns


def test_killing_the_leader_brings_another_within_a_few_timeouts() -> None:
    for seed in range(20):
        network = Network(3, seed=seed)
        old = network.elect()
        network.propose(a_discard(1))
        network.run_until(lambda network=network: network.has_all(2))  # type: ignore[misc]
        network.crash(old)
        killed_ns = network.now_ns
        network.elect()
        assert network.now_ns - killed_ns < 5 * TIMEOUT_NS, seed
        network.start(old)
        network.propose(a_discard(2))
        network.run_until(lambda network=network: network.has_all(4))  # type: ignore[misc]
        assert [entry.body for entry in network.truth][1::2] == [a_discard(1), a_discard(2)]


def test_a_cut_off_leader_steps_down_and_what_it_could_not_commit_is_replaced() -> None:
    network = Network(3, seed=3)
    old = network.elect()
    network.run(TIMEOUT_NS)
    network.isolate(old)
    network.perform(old, network.cores[old].propose(a_discard(66), now_ns=network.now_ns))
    network.run_until(lambda: network.leader not in ("", old))
    new = network.elect()
    network.propose(a_discard(77))
    network.run_until(lambda: network.cores[new].commit_index == 3)
    assert not network.cores[old].is_leader
    network.heal()
    network.run_until(lambda: network.has_all(3))
    assert [entry.body for entry in network.committed[old]][2:] == [a_discard(77)]
    assert a_discard(66) not in [entry.body for entry in network.disks[old].entries]


def test_a_cut_off_follower_disturbs_nobody_when_it_returns() -> None:
    network = Network(3)
    leader = network.elect()
    term = network.cores[leader].term
    away = next(name for name in network.names if name != leader)
    network.isolate(away)
    network.run(50 * TIMEOUT_NS)
    network.heal()
    network.run(10 * TIMEOUT_NS)
    assert network.leader == leader
    assert {core.term for core in network.cores.values()} == {term}


def test_one_way_cuts_do_not_stop_the_majority() -> None:
    for seed in range(10):
        network = Network(3, seed=seed)
        old = network.elect()
        for other in network.names:
            if other != old:
                network.cut.add((other, old))  # the leader is heard, but hears nobody
        network.run(4 * TIMEOUT_NS)
        network.run_until(lambda network=network, old=old: network.leader not in ("", old))  # type: ignore[misc]
        network.elect()
        network.propose(a_discard(1))
        last = network.cores[network.leader].last_index
        network.run_until(lambda network=network, last=last: network.cores[network.leader].commit_index == last)  # type: ignore[misc]


def test_without_a_majority_nothing_is_committed_and_nobody_leads() -> None:
    network = Network(4)
    leader = network.elect()
    committed = len(network.truth)
    for name in [name for name in network.names if name != leader][:2]:
        network.crash(name)
    network.perform(leader, network.cores[leader].propose(a_discard(1), now_ns=network.now_ns))
    network.run(20 * TIMEOUT_NS)
    assert network.leader == ""
    assert len(network.truth) == committed
    network.start(next(name for name in network.names if name not in network.cores))
    network.elect()
    assert a_discard(1) in [entry.body for entry in network.truth]


def test_two_voters_need_each_other() -> None:
    network = Network(2)
    leader = network.elect()
    other = next(name for name in network.names if name != leader)
    network.crash(other)
    network.run(20 * TIMEOUT_NS)
    assert network.leader == ""
    network.start(other)
    network.elect()


def test_a_round_is_committed_when_a_majority_has_its_payload_and_reaches_the_rest_later() -> None:
    network = Network(3)
    leader = network.elect()
    network.run(TIMEOUT_NS)
    second, third = (name for name in network.names if name != leader)
    body = a_round(1)
    network.give_payload(body, leader)
    network.propose(body)
    network.run(10 * TIMEOUT_NS)
    assert network.cores[leader].commit_index == 1
    network.give_payload(body, second)
    network.run_until(lambda: network.cores[second].commit_index == 2)
    network.run(10 * TIMEOUT_NS)
    assert network.cores[third].commit_index == 1
    assert network.cores[third].cluster_commit_index == 2
    assert network.cores[third].wanted() == (body,)
    assert network.leader == leader
    network.give_payload(body, third)
    network.run_until(lambda: network.has_all(2))


def test_a_region_far_behind_catches_up_in_batches() -> None:
    network = Network(3)
    leader = network.elect()
    late = next(name for name in network.names if name != leader)
    network.crash(late)
    for number in range(700):
        network.propose(a_discard(number))
    network.run_until(lambda: network.cores[leader].commit_index == 701)
    network.start(late)
    network.run_until(lambda: network.has_all(701), limit_ns=6 * TIMEOUT_NS)


# ---- random faults ---------------------------------------------------------------------------------------------------


def shake(network: Network, *, rounds: int = 40) -> None:
    """Faults of all kinds while entries are proposed; then heal, and demand that everything arrives everywhere."""
    rng = network.rng
    version = 0
    for _ in range(rounds):
        network.loss = rng.choice([0.0, 0.0, 0.1, 0.4])
        network.duplicates = rng.choice([0.0, 0.2])
        network.jitter_ns = rng.choice([0, 50, 400])
        action = rng.randrange(10)
        if action == 0 and network.cores:
            network.crash(rng.choice(sorted(network.cores)))
        elif action < 4:
            for name in network.names:
                if name not in network.cores and rng.random() < 0.7:
                    network.start(name)
        elif action == 4:
            first, second = rng.sample(network.names, 2)
            network.cut.add((first, second))
        elif action < 8:
            network.heal()
        elif action == 8:
            network.isolate(rng.choice(network.names))
        for _ in range(rng.randrange(4)):
            if network.leader:
                version += 1
                body = a_round(version, fragment=version % 3)
                body = replace(body, payload_digest=version.to_bytes(32, "big"))
                network.disks[network.leader].payloads.add(body.payload_digest)
                network.propose(body)
                for name in network.names:
                    if rng.random() < 0.6:
                        network.give_payload(body, name)
            network.run(rng.randrange(TIMEOUT_NS))
            if rng.random() < 0.5:
                network.fetch(rng.choice(network.names))
        network.run(rng.randrange(3 * TIMEOUT_NS))
    network.heal()
    network.loss = network.duplicates = 0.0
    network.jitter_ns = 0
    for name in network.names:
        if name not in network.cores:
            network.start(name)

    def is_settled() -> bool:
        for name in network.names:
            network.fetch(name)
        return bool(network.leader) and network.cores[network.leader].is_settled

    network.run_until(is_settled)
    network.propose(a_discard(0))
    last = network.cores[network.leader].last_index
    network.run_until(lambda: is_settled() and network.has_all(last))
    assert network.truth[-1].body == a_discard(0)
    for name in network.names:
        hashes = [entry.hash for entry in network.committed[name]]
        assert hashes == [entry.hash for entry in network.truth], f"seed {network.seed}"
    assert network.alarms == [], f"seed {network.seed}"


@pytest.mark.parametrize("voters", [3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_under_random_faults_there_is_one_order_and_nothing_committed_is_lost(voters: int, seed: int) -> None:
    print(f"seed {seed}")
    network = Network(voters, seed=seed)
    shake(network)
    assert len(network.truth) >= 20


# ---- planted faults: the checks above must find them -----------------------------------------------------------------


class ForgottenVote(LedgerCore):
    def _vote_to_persist(self) -> str:
        return ""


class CommitByCounting(LedgerCore):
    def _may_commit(self, index: int) -> bool:
        return True


class AcknowledgedWithoutPayload(LedgerCore):
    def _may_persist(self, entry: Entry) -> bool:
        return True


class VoteForAnyLog(LedgerCore):
    def _is_up_to_date(self, last_index: int, last_term: int) -> bool:
        return True


class NoFsync(Network):
    """A disk that answers at once and writes later; what was not written yet is lost in a crash."""

    def perform(self, name: str, effects: list[Effect]) -> None:
        writes_first = [effect for effect in effects if isinstance(effect, PersistLedger)]
        super().perform(name, [effect for effect in effects if not isinstance(effect, PersistLedger)])
        life = self.lives[name]
        for effect in writes_first:
            self.later(self.fsync_ns, lambda effect=effect: self.on_disk(name, life, effect))  # type: ignore[misc]
            if name in self.cores and self.lives[name] == life:
                self.perform(name, self.cores[name].handle(LedgerPersisted(effect.token), now_ns=self.now_ns))

    def on_disk(self, name: str, life: int, effect: PersistLedger) -> None:
        if self.lives[name] == life:
            self.disks[name].write(effect)

    def check(self, name: str) -> None:
        core = self.cores[name]
        if core.is_leader:
            assert self.leaders.setdefault(core.term, name) == name, "two leaders in a term"
        for entry in core.take_committed():
            self.committed[name].append(entry)
            if entry.index > len(self.truth):
                self.truth.append(entry)
            assert self.truth[entry.index - 1].hash == entry.hash, "entries differ"


def is_found(build: Callable[[int], Network], seeds: int) -> bool:
    for seed in range(seeds):
        try:
            shake(build(seed))
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("cls", [AcknowledgedWithoutPayload, VoteForAnyLog])
def test_a_planted_fault_in_the_core_is_found(cls: type[LedgerCore]) -> None:
    assert is_found(lambda seed: Network(5, seed=seed, cls=cls), 30)


@pytest.mark.parametrize(("cls", "leaders"), [(LedgerCore, 1), (ForgottenVote, 2)])
def test_a_vote_that_is_forgotten_in_a_crash_makes_two_leaders(cls: type[LedgerCore], leaders: int) -> None:
    candidates = {}
    for name in ("a", "b"):
        core = a_core(name)
        core.handle(TimerFired(), now_ns=core.wake_at_ns)
        write_all(core, arrive(core, "c", VoteAnswered(1, True, True)))
        candidates[name] = core
    disk = Disk()
    for name, core in candidates.items():
        voter = a_core("c", cls=cls, term=disk.term, voted_for=disk.voted_for)
        effects = arrive(voter, name, VoteAsked(1, False, 0, 0))
        for write in writes(effects):
            disk.write(write)
        for _, answer in sends(effects) + sends(write_all(voter, effects)):
            arrive(core, "c", answer)
    assert sum(core.is_leader for core in candidates.values()) == leaders


@pytest.mark.parametrize(("cls", "committed"), [(LedgerCore, 0), (CommitByCounting, 2)])
def test_figure_8_an_old_entry_on_a_majority_is_not_committed_for_it_may_be_overwritten(
    cls: type[LedgerCore], committed: int
) -> None:
    # S1 to S5 of the paper are a to e. (a) a led term 2 and reached only b; (b) e led term 3 and reached nobody;
    # (c) a leads term 4 and brings its entry of term 2 to c: on a majority, and yet not committed.
    voters = tuple("abcde")
    a = a_core("a", voters, entries=chain(1, 2), term=3, cls=cls)
    a.handle(TimerFired(), now_ns=a.wake_at_ns)
    for pre_vote in (True, False):
        for peer in ("b", "c"):
            write_all(a, arrive(a, peer, VoteAnswered(4, pre_vote, True)))
    assert a.is_leader
    for sequence, peer in ((1, "b"), (2, "c")):
        arrive(a, peer, AppendAnswered(4, sequence, True, 2))
    assert a.cluster_commit_index == committed
    # (d) a dies; e stands in term 5, and c, which has the entry on disk, votes for it and forgets the entry.
    voter = a_core("c", voters, entries=chain(1, 2), term=4)
    effects = arrive(voter, "e", VoteAsked(5, False, 2, 3))
    assert sends(write_all(voter, effects)) == [("e", VoteAnswered(5, False, True))]
    effects = arrive(voter, "e", asked(chain(1, 3, 5), 2, 3, term=5))
    assert writes(effects) == [PersistLedger(2, 5, "e", 2, chain(1, 3, 5)[1:])]


def test_a_disk_that_answers_before_it_has_written_is_found() -> None:
    assert is_found(lambda seed: NoFsync(3, seed=seed, fsync_ns=8 * TIMEOUT_NS), 20)
