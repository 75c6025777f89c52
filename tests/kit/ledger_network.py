"""Some ledger cores on a virtual clock, with disks, links and faults; what must hold is checked after every event."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

from diloco_node.core.events import Effect, LedgerPersisted, MessageArrived, Note, PersistLedger, Send, TimerFired
from diloco_node.core.ledger.entry_gate import Meaning
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.membership.replacement import DiskReplacement
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.leader import RoundLeader
from diloco_node.core.types import Entry, EntryBody, GenesisBody, RoundBody, RunSettings
from tests.kit.ledger_kit import HEARTBEAT_NS, TIMEOUT_NS, a_core, a_discard, a_round, disk_of
from tests.kit.rounds_kit import context_of

NO_ROUNDS = cast(RoundLeader, SimpleNamespace(let_go=lambda _: True))
"""Of a leader that merges nothing."""


@dataclass
class Disk:
    id: bytes = b""
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
        meaning: Callable[[str], Meaning | None] = lambda name: None,
        is_founded: bool = True,
    ) -> None:
        self.names = tuple("abcde"[:voters])
        self.rng = random.Random(seed)
        self.seed = seed
        self.cls = cls
        self.meaning = meaning
        self.delay_ns, self.fsync_ns = delay_ns, fsync_ns
        self.loss = self.duplicates = 0.0
        self.jitter_ns = 0
        self.now_ns = 0
        self.queue: list[tuple[int, int, Callable[[], None]]] = []
        self.counter = 0
        self.is_founded = is_founded
        self.disks = {name: Disk(disk_of(name)) for name in self.names}
        self.replacements: dict[str, DiskReplacement] = {}
        self.incarnations = dict.fromkeys(self.names, 0)
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
            disk=disk.id,
            is_founded=self.is_founded,
            entries=tuple(disk.entries),
            term=disk.term,
            voted_for=disk.voted_for,
            has_payload=lambda body: not isinstance(body, RoundBody) or body.payload_digest in disk.payloads,
            cls=self.cls,
            now_ns=self.now_ns,
            seed=self.seed,
            meaning=self.meaning(name),
        )

        self.replacements[name] = DiskReplacement(
            context_of(RoundHistory(1), settings=RunSettings(heartbeat_ns=HEARTBEAT_NS)),
            self.cores[name],
            NO_ROUNDS,
            lambda _: "",
        )

    def crash(self, name: str) -> None:
        self.incarnations[name] += 1
        del self.cores[name]

    def wipe(self, name: str) -> None:
        """The folder is emptied: what comes back has another id and knows nothing."""
        if name in self.cores:
            self.crash(name)
        self.disks[name] = Disk(self.rng.randbytes(16))

    def lead(self, name: str) -> None:
        """The work of a region's leader beside rounds: found the run, have the ledger name new folders."""
        core = self.cores[name]
        if core.is_settled and core.founders and not any(isinstance(e.body, GenesisBody) for e in core.entries):
            founders = core.founders
            genesis = GenesisBody("run", "m", "s", self.names, (bytes(32),), tuple(founders[one] for one in self.names))
            self.perform(name, core.propose(genesis, now_ns=self.now_ns))
        due = self.replacements[name].due(now_ns=self.now_ns)
        if due is not None:
            self.perform(name, core.propose(due, now_ns=self.now_ns))

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        self.counter += 1
        heapq.heappush(self.queue, (self.now_ns + delay_ns, self.counter, action))

    def perform(self, name: str, effects: list[Effect]) -> None:
        incarnation = self.incarnations[name]
        for effect in effects:
            if isinstance(effect, PersistLedger):
                self.later(self.fsync_ns, lambda effect=effect: self.written(name, incarnation, effect))  # type: ignore[misc]
            elif isinstance(effect, Send):
                self.transmit(name, effect)
            elif isinstance(effect, Note) and effect.is_alarm:
                self.alarms.append(effect.text)
        self.check(name)

    def written(self, name: str, incarnation: int, effect: PersistLedger) -> None:
        if self.incarnations[name] == incarnation:
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
        """Check the promises that hold after every event."""
        core = self.cores[name]
        if core.is_leader:
            assert self.leaders.setdefault(core.term, name) == name, (
                f"two leaders in term {core.term}, seed {self.seed}"
            )
        entries = core.take_committed()
        self.committed[name] += entries
        for entry in entries:
            if entry.index > len(self.truth):
                self.truth.append(entry)
            assert self.truth[entry.index - 1].hash == entry.hash, f"entry {entry.index} differs, seed {self.seed}"
            assert self.disks[name].entries[entry.index - 1].hash == entry.hash, f"not on disk, seed {self.seed}"
        for entry in self.disks[name].entries[: core.durable_indexes[name]]:
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
            if not self.is_founded:
                self.lead(name)

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
            for body in self.cores[name].missing_payloads():
                assert isinstance(body, RoundBody)
                self.give_payload(body, name)

    def propose(self, body: EntryBody) -> None:
        name = self.leader
        self.perform(name, self.cores[name].propose(body, now_ns=self.now_ns))

    def isolate(self, name: str) -> None:
        for peer in self.names:
            if peer != name:
                self.cut |= {(name, peer), (peer, name)}

    def heal(self) -> None:
        self.cut.clear()

    def has_all(self, index: int) -> bool:
        return all(len(entries) >= index for entries in self.committed.values())


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
