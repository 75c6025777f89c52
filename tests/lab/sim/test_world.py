"""The ground of the simulator: order of events, the network's tricks, a disk that loses what was not fsynced."""

import random

from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.types import LeaderBody
from diloco_node.lab.sim.disk import Disk, DiskPayload, DiskState, LedgerWrite
from diloco_node.lab.sim.world import MS, SECOND, FakeLink, FakeNetwork, Life, World


class Place:
    def __init__(self) -> None:
        self.life: Life | None = Life()
        self.frames: list[tuple[str, bytes]] = []
        self.transfers: list[bytes] = []
        self.links: list[tuple[str, bool]] = []

    @property
    def daemon_life(self) -> Life | None:
        return self.life

    def frame_arrived(self, peer: str, frame: bytes) -> None:
        self.frames.append((peer, frame))

    def transfer_arrived(self, peer: str, header: bytes, body: bytes) -> None:
        self.transfers.append(body)

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        self.links.append((peer, is_up))


def make_pair(seed: int = 1, **changes: float) -> tuple[World, FakeNetwork, Place, Place]:
    world = World(seed)
    values = {"delay_ns": 10 * MS, "jitter_ns": 0, "loss": 0.0, "duplicate": 0.0, "rate_bytes_per_s": 1000} | changes
    links = {pair: FakeLink(**values) for pair in (("a", "b"), ("b", "a"))}  # type: ignore[arg-type]
    network = FakeNetwork(world, links)
    places = Place(), Place()
    for name, place in zip("ab", places, strict=True):
        network.join(name, place)
    return world, network, *places


def run(world: World) -> None:
    while world.step():
        pass


def test_events_happen_in_order_of_time_and_then_of_scheduling() -> None:
    world = World(1)
    seen: list[str] = []
    for delay_ns, name in ((5, "c"), (3, "a"), (5, "d"), (3, "b"), (-7, "now")):
        world.after(delay_ns, None, seen.append, name)
    run(world)
    assert seen == ["now", "a", "b", "c", "d"]
    assert world.now_ns == 5


def test_what_was_scheduled_for_a_life_ends_with_it() -> None:
    world, life, seen = World(1), Life(), list[str]()
    world.after(5, life, seen.append, "dead")
    world.after(4, None, setattr, life, "is_over", True)
    world.after(6, None, seen.append, "alive")
    run(world)
    assert seen == ["alive"]


def test_a_frame_takes_the_delay_and_a_cut_direction_carries_nothing() -> None:
    world, network, a, b = make_pair()
    network.cut("b", "a")
    network.send("a", "b", b"1")
    network.send("b", "a", b"2")
    while not b.frames:
        world.step()
    assert world.now_ns == 10 * MS
    assert b.frames == [("a", b"1")]
    network.mend("b", "a")
    network.send("b", "a", b"3")
    run(world)
    assert a.frames == [("b", b"3")]


def test_cuts_of_two_faults_add_up() -> None:
    world, network, _, b = make_pair()
    network.cut("a", "b")
    network.cut("a", "b")
    network.mend("a", "b")
    network.send("a", "b", b"1")
    run(world)
    assert b.frames == []


def test_frames_are_lost_and_doubled_in_about_the_proportion_asked_for() -> None:
    world, network, _, b = make_pair(loss=0.25, duplicate=0.5)
    for _ in range(1000):
        network.send("a", "b", b"x")
    run(world)
    assert 1050 < len(b.frames) < 1200
    assert 200 < network.dropped < 300


def test_jitter_lets_frames_overtake_each_other() -> None:
    world, network, _, b = make_pair(jitter_ns=20 * MS)
    for number in range(50):
        network.send("a", "b", bytes([number]))
    run(world)
    arrived = [frame for _, frame in b.frames]
    assert sorted(arrived) != arrived
    assert len(arrived) == 50


def test_transfers_follow_each_other_at_the_rate_of_the_link() -> None:
    world, network, _, b = make_pair()
    for _ in range(2):
        network.transfer("a", "b", b"header", bytes(500))
    world.step()
    assert (world.now_ns, len(b.transfers)) == (SECOND // 2 + 10 * MS, 1)
    world.step()
    assert (world.now_ns, len(b.transfers)) == (SECOND + 10 * MS, 2)


def test_a_transfer_is_lost_when_its_direction_is_cut_on_the_way() -> None:
    world, network, _, b = make_pair()
    network.transfer("a", "b", b"header", bytes(500))
    world.after(100 * MS, None, network.cut, "a", "b")
    run(world)
    assert b.transfers == []


def test_both_sides_learn_that_a_link_is_up_or_down_and_never_twice() -> None:
    world, network, a, b = make_pair()
    network.daemon_changed("a")
    network.daemon_changed("b")
    run(world)
    network.cut("a", "b")
    run(world)
    network.mend("a", "b")
    network.cut("a", "b")
    network.mend("a", "b")
    run(world)
    assert a.links == [("b", True), ("b", False), ("b", True)]
    assert b.links == [("a", True), ("a", False), ("a", True)]


def test_a_frame_for_a_dead_daemon_does_not_reach_the_next_one() -> None:
    world, network, _, b = make_pair()
    network.send("a", "b", b"old")
    assert b.life is not None
    b.life.is_over = True
    b.life = Life()
    network.send("a", "b", b"new")
    run(world)
    assert b.frames == [("a", b"new")]


def test_equal_seeds_give_equal_traces_and_other_notes_other_ones() -> None:
    digests = []
    for text in (b"x", b"x", b"y"):
        world = World(7)
        world.note("a", "what", text)
        digests.append(world.trace_digest())
    assert digests[0] == digests[1] != digests[2]


def chain(count: int, term: int = 1) -> list[object]:
    entries = []
    previous = ZERO_HASH
    for index in range(1, count + 1):
        entry = seal(index, term, previous, LeaderBody("a"))
        entries.append(entry)
        previous = entry.hash
    return entries  # type: ignore[return-value]


def test_a_crash_leaves_a_prefix_of_what_was_not_fsynced() -> None:
    entries = chain(6)
    seen = set()
    for seed in range(200):
        disk = Disk(term=1, voted_for="a", entries=list(entries[:4]))  # type: ignore[arg-type]
        disk.ledger_queue.append(LedgerWrite(3, "b", 3, tuple(chain(6, term=3)[2:])))  # type: ignore[arg-type]
        disk.crash(random.Random(seed), is_power_cut=True)
        assert not disk.ledger_queue
        seen.add((disk.term, disk.voted_for, tuple(entry.term for entry in disk.entries)))
    whole = (3, "b", (1, 1, 3, 3, 3, 3))
    assert seen == {
        (1, "a", (1, 1, 1, 1)),
        (3, "b", (1, 1, 1, 1)),
        (3, "b", (1, 1)),
        (3, "b", (1, 1, 3)),
        (3, "b", (1, 1, 3, 3)),
        (3, "b", (1, 1, 3, 3, 3)),
        whole,
    }, "seeds 0 to 199"


def test_a_torn_write_takes_all_later_ones_with_it() -> None:
    for seed in range(100):
        disk = Disk()
        for term in (1, 2, 3):
            disk.ledger_queue.append(LedgerWrite(term, "a", 0, ()))
        terms = []
        disk.crash(random.Random(seed), is_power_cut=False)
        terms.append(disk.term)
        assert disk.term <= 3
    assert terms


def test_what_was_fsynced_survives_every_crash() -> None:
    disk = Disk()
    disk.ledger_queue.append(LedgerWrite(4, "b", 0, tuple(chain(2))))  # type: ignore[arg-type]
    disk.fsync_ledger()
    disk.crash(random.Random(0), is_power_cut=True)
    assert (disk.term, disk.voted_for, len(disk.entries)) == (4, "b", 2)


def test_a_planted_disk_forgets_the_vote_but_not_the_term() -> None:
    disk = Disk(keeps_vote=False)
    disk.ledger_queue.append(LedgerWrite(4, "b", 0, ()))
    disk.fsync_ledger()
    assert (disk.term, disk.voted_for) == (4, "")


def test_payloads_behind_the_state_on_disk_are_pruned() -> None:
    disk = Disk()
    stored = DiskPayload(((0, 1),), b"")
    for version in range(1, 7):
        disk.payloads[0, version, b"d"] = stored
        disk.payloads[1, version, b"d"] = stored
    for version in (3, 5):
        disk.keep_state(0, DiskState(version, None, None))  # type: ignore[arg-type]
    disk.prune(0, keep_from_version=4)
    assert sorted(key[1] for key in disk.payloads if key[0] == 0) == [4, 5, 6]
    assert sorted(disk.older_states) == [(0, 5)]
    disk.prune(0, keep_from_version=9)
    assert sorted(key[1] for key in disk.payloads if key[0] == 0) == [5, 6], "what follows the own state stays"
    assert sorted(key[1] for key in disk.payloads if key[0] == 1) == [1, 2, 3, 4, 5, 6]
