"""The emulation as it is used, on whatever back-end this machine has: what the file says is what is measured inside.

Needs root. The machine may be busy: it makes a round trip longer and a transfer slower, never the other way round. So
the least of many round trips and the best of some transfers count, and the rates are such that any machine routes them.
"""

import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco_node.errors import ConfigError, DilocoError, PeersUnreachable
from diloco_node.lab.wan import emulation
from diloco_node.lab.wan.control import request
from diloco_node.lab.wan.emulation_state import STATE_FOLDER, EmulationState, runs, start_ticks, state_file
from diloco_node.lab.wan.namespaces import (
    create,
    existing,
    namespaces_of,
    places,
    processes_in,
    remove,
    run_name,
    run_of,
)
from diloco_node.lab.wan.topology import Topology
from diloco_node.lab.wan.tun import inside
from tests.kit.wan_probe import ping, transfer

MS = 10**6
RUN = f"t{os.getpid()}"
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="network namespaces need root: NOTHING of the WAN emulation is tested on this machine"
)
real = [pytest.mark.system, needs_root]
measured = [*real, pytest.mark.alone]

TEXT = """
[wan]
queue = "50ms"
[regions.east]
egress = "200Mbit/s"
[regions.west]
egress = "60Mbit/s"
ingress = "120Mbit/s"
[regions.north]
egress = "40Mbit/s"
[[links]]
between = ["east", "west"]
rtt = "40ms"
[[links]]
from = "east"
to = "north"
delay = "5ms"
[[links]]
from = "north"
to = "east"
delay = "17ms"
rate = "20Mbit/s"
[[links]]
between = ["north", "west"]
rtt = "60ms"
jitter = "3ms"
loss = "20%"
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wan") / "trial.toml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def wan(file: Path) -> Iterator[EmulationState]:
    if fault := emulation.emulation_fault():
        pytest.skip(f"NOTHING of the WAN emulation is tested on this machine: {fault}")
    state = emulation.up(file, run=RUN, seed=7)
    yield state
    emulation.down(RUN)
    assert namespaces_of(RUN) == []
    assert RUN not in runs()


def rtt_ns(topology: Topology, source: str, target: str) -> int:
    return topology.paths[source, target].delay_ns + topology.paths[target, source].delay_ns


PATIENCE_S = 60.0
QUIET_S = 0.5
"""So long nothing is heard where nothing can be."""


def again(check: Callable[[], bool], *, times: int = 20) -> bool:
    return any(check() for _ in range(times))


def soon(check: Callable[[], bool]) -> bool:
    """Whether something becomes so."""
    return again(lambda: check() or pause(), times=int(PATIENCE_S / PAUSE_S))


def answers(wan: EmulationState, source: str, target: str, *, patience_s: float = PATIENCE_S) -> int:
    """Of three pings."""
    by_region = {place.region: place for place in wan.places()}
    return len(ping(by_region, [(source, target)], count=3, deadline_s=patience_s)[source, target])


class TestReal:
    """One emulation for all of these; each leaves it as it was."""

    pytestmark = measured

    def test_round_trips_are_those_of_the_file(self, wan: EmulationState) -> None:
        topology, by_region = wan.topology(), {place.region: place for place in wan.places()}
        pairs = list(topology.paths)
        assert {rtt_ns(topology, *pair) // MS for pair in pairs} == {40, 22, 60}
        # Jitter is up to 3 ms each way.
        jitter_ns = {pair: 6 * MS if set(pair) == {"north", "west"} else 0 for pair in pairs}
        least: dict[tuple[str, str], int] = {}

        def is_right() -> bool:
            for pair, rtts in ping(by_region, pairs).items():
                least[pair] = min([*rtts, *([least[pair]] if pair in least else [])])
                assert least[pair] >= rtt_ns(topology, *pair) - jitter_ns[pair] - MS // 2, pair
            print({pair: rtt / MS for pair, rtt in least.items()})
            return all(least[pair] <= rtt_ns(topology, *pair) * 21 // 20 + MS // 2 for pair in pairs)

        assert again(is_right)

    @pytest.mark.parametrize(
        ("source", "target", "mbit"),
        [("east", "west", 120), ("west", "east", 60), ("east", "north", 40), ("north", "east", 20)],
    )
    def test_the_rate_of_a_pair_is_that_of_the_file(
        self, wan: EmulationState, source: str, target: str, mbit: int
    ) -> None:
        by_region = {place.region: place for place in wan.places()}

        def is_right() -> bool:
            rate = transfer(wan.topology(), by_region[source], by_region[target])
            print(source, target, rate and rate * 8 / 1e6)
            return rate is not None and abs(rate * 8 / 1e6 - mbit) <= 0.05 * mbit

        assert again(is_right)

    def test_loss_is_that_of_the_file(self, wan: EmulationState) -> None:
        by_region = {place.region: place for place in wan.places()}
        count = 150
        pairs = [("north", "west"), ("west", "north")]
        for patience_s in (0.5, 5.0, 50.0):
            found = ping(by_region, pairs, count=count, gap_s=0.002, deadline_s=patience_s)
            # There and back: 36 %, within four standard deviations. What a busy machine answers too late looks lost.
            lost = 1 - sum(map(len, found.values())) / (count * len(pairs))
            assert lost > 0.25
            if lost < 0.47:
                return
        raise AssertionError(f"{lost:.0%} are lost; 36 % should be")

    def test_a_cut_region_hears_nobody_and_is_back_after_the_heal(self, wan: EmulationState) -> None:
        request(wan.socket, {"do": "cut", "region": "west"})
        for pair in (("east", "west"), ("west", "east")):
            assert answers(wan, *pair, patience_s=QUIET_S) == 0
        assert answers(wan, "east", "north") == 3
        healed = request(wan.socket, {"do": "heal", "region": "west"})
        assert healed == {"conditions": [], "healed": 1}
        assert answers(wan, "east", "west") == 3

    def test_a_one_way_cut_lets_the_other_way_pass(self, wan: EmulationState) -> None:
        request(wan.socket, {"do": "cut", "region": "east", "other": "west", "direction": "out"})
        try:
            assert self.received(wan, "west", "east", patience_s=PATIENCE_S) > 0
            assert self.received(wan, "east", "west", patience_s=QUIET_S) == 0
        finally:
            request(wan.socket, {"do": "heal", "region": "east"})
        assert answers(wan, "east", "west") == 3

    @staticmethod
    def received(wan: EmulationState, source: str, target: str, *, patience_s: float) -> int:
        """How many of a few datagrams arrive: one way, unlike a ping."""
        by_region = {place.region: place for place in wan.places()}
        with inside(by_region[target].namespace):
            receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with inside(by_region[source].namespace):
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with receiver, sender:
            receiver.bind((by_region[target].address, 9))
            receiver.settimeout(patience_s)
            for _ in range(5):
                sender.sendto(b"x", (by_region[target].address, 9))
            count = 0
            try:
                while count < 5:
                    receiver.recv(10)
                    count += 1
                    receiver.settimeout(QUIET_S)
            except TimeoutError:
                pass
            return count

    def test_a_stream_over_a_lossy_link_arrives_whole(self, wan: EmulationState) -> None:
        """Packets are lost out of the middle of large segments: what is left must still be the right bytes."""
        by_region = {place.region: place for place in wan.places()}
        data = random.Random(5).randbytes(3 << 20)
        with inside(by_region["west"].namespace):
            listener = socket.create_server((by_region["west"].address, 0))
        with inside(by_region["east"].namespace):
            sender = socket.socket()
        change = {"do": "set", "region": "east", "other": "west", "delay": "1ms", "loss": "0.5%"}
        request(wan.socket, change)
        try:
            with listener, sender:
                listener.settimeout(2 * PATIENCE_S)
                sender.settimeout(2 * PATIENCE_S)
                sender.connect(listener.getsockname())
                receiver, _ = listener.accept()
                thread = threading.Thread(target=lambda: (sender.sendall(data), sender.shutdown(socket.SHUT_WR)))
                thread.start()
                with receiver:
                    receiver.settimeout(2 * PATIENCE_S)
                    received = b"".join(iter(lambda: receiver.recv(1 << 20), b""))
                thread.join()
        finally:
            request(wan.socket, {"do": "heal", "region": "east"})
        assert hashlib.sha256(received).digest() == hashlib.sha256(data).digest()
        counters = next(
            pair
            for pair in request(wan.socket, {"do": "status"})["pairs"]
            if (pair["from"], pair["to"]) == ("east", "west")
        )
        assert counters["packets_lost"] > 0

    def test_a_degraded_link_has_its_new_delay_until_the_heal(self, wan: EmulationState) -> None:
        by_region = {place.region: place for place in wan.places()}
        request(wan.socket, {"do": "set", "region": "east", "other": "west", "delay": "60ms"})

        def rtt_ms() -> float:
            found = ping(by_region, [("east", "west")])["east", "west"]
            return min(found, default=0) / MS

        try:
            assert again(lambda: 119.5 <= rtt_ms() < 127)
        finally:
            request(wan.socket, {"do": "heal", "region": "east", "other": "west"})
        assert again(lambda: 39.5 <= rtt_ms() < 43)

    def test_status_tells_what_is_in_force(self, wan: EmulationState) -> None:
        told = request(wan.socket, {"do": "status"})
        assert told["pid"] == wan.keeper_pid
        assert told["conditions"] == []
        with pytest.raises(ConfigError, match="'mars' is not in topology trial"):
            request(wan.socket, {"do": "cut", "region": "mars"})
        with pytest.raises(ConfigError, match="no command 'dance'"):
            request(wan.socket, {"do": "dance"})

    def test_a_name_that_is_taken_is_refused_and_what_is_there_goes_on(self, wan: EmulationState, file: Path) -> None:
        with pytest.raises(ConfigError, match=f"diloco-node wan down {RUN}"):
            emulation.up(file, run=RUN)
        assert answers(wan, "east", "west") == 3
        assert emulation.find(RUN) == wan


class TestCrashes:
    """Each with an emulation of its own, two regions, never more than one at a time."""

    pytestmark = real

    @pytest.fixture
    def name(self) -> Iterator[str]:
        if fault := emulation.emulation_fault():
            pytest.skip(f"NOTHING of the WAN emulation is tested on this machine: {fault}")
        name = f"c{os.getpid()}"
        yield name
        if name in runs():
            emulation.down(name)

    def test_what_a_killed_keeper_leaves_is_removed_by_down(self, name: str, file: Path) -> None:
        state = emulation.up(file, run=name, regions=2)
        assert state.is_kept
        os.kill(state.keeper_pid, signal.SIGKILL)
        assert soon(lambda: gone(state.keeper_pid))
        assert not emulation.find(name).is_kept
        with pytest.raises(PeersUnreachable):
            request(state.socket, {"do": "status"})
        assert len(namespaces_of(name)) >= 2
        lines = emulation.down(name)
        assert lines[0] == f"the keeper of {name} was gone; cleaned up after it"
        assert namespaces_of(name) == []
        assert not any(STATE_FOLDER.glob(f"{name}.*"))

    def test_namespaces_without_any_file_are_found_by_their_names(self, name: str) -> None:
        namespace = places(name, ["lost"])[0].namespace
        create(namespace)
        assert name in runs()
        assert emulation.down(name) == [f"removed 1 namespaces of {name}"]
        assert namespace not in existing()

    def test_it_ends_with_its_owner_and_takes_the_owner_s_processes_with_it(self, name: str, file: Path) -> None:
        owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        state = emulation.up(file, run=name, regions=2, owner_pid=owner.pid)
        left = subprocess.Popen(["ip", "netns", "exec", state.places()[0].namespace, "sleep", "600"])
        try:
            assert soon(lambda: bool(processes_in(state.places()[0].namespace)))
            owner.kill()
            owner.wait()
            assert left.wait(2 * PATIENCE_S) == -signal.SIGTERM
            assert soon(lambda: gone(state.keeper_pid))
            assert namespaces_of(name) == []
            assert not state_file(name).exists()
        finally:
            left.kill()
            left.wait()
            assert owner.stdin is not None
            owner.stdin.close()

    def test_a_keeper_that_cannot_start_leaves_nothing(
        self, name: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = tmp_path / "broken"
        broken.write_text("#!/bin/sh\necho the kernel is on strike >&2\n")
        broken.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(broken))
        with pytest.raises(DilocoError, match="keeper did not start: the kernel is on strike"):
            emulation.up(file, run=name, regions=2)
        assert namespaces_of(name) == []
        assert name not in runs()

    def test_the_timetable_of_the_file_runs(self, name: str, tmp_path: Path) -> None:
        file = tmp_path / "timed.toml"
        file.write_text(TEXT + '[[outages]]\nat = "500ms"\nfor = "600ms"\ncut = "west"\n')
        state = emulation.up(file, run=name, starts_timetable=False)
        assert request(state.socket, {"do": "status"})["log"] == []
        request(state.socket, {"do": "timetable"})
        assert soon(lambda: len(request(state.socket, {"do": "status"})["log"]) == 2)
        log = request(state.socket, {"do": "status"})["log"]
        begin, end = (line.split("s ", 1) for line in log)
        assert (begin[1], end[1]) == ("west: cut", "west: healed")
        assert float(end[0]) - float(begin[0]) >= 0.599


PAUSE_S = 0.01


def pause() -> bool:
    time.sleep(PAUSE_S)
    return False


def gone(pid: int) -> bool:
    return start_ticks(pid) == 0


def test_names_tell_their_run_and_others_are_never_ours() -> None:
    assert [place.namespace for place in places("us4", ["us-east", "b"])] == ["diloco-us4-us-east", "diloco-us4-b"]
    assert run_of("diloco-us4-us-east") == "us4"
    for other in ("diloco", "diloco-us4", "diloco-us4-", "diloco--x", "docker-us4-x", "my-diloco-us4-x", "diloco-US-x"):
        assert run_of(other) is None
        with pytest.raises(DilocoError, match="not ours"):
            remove(other)
    assert run_name("us-4") == "us4"
    assert run_name("World 8") == "world8"
    for text in ("", "4", "--"):
        with pytest.raises(ConfigError, match="--name"):
            run_name(text)
    with pytest.raises(ConfigError, match="small letters"):
        places("a-b", ["x"])


def test_without_root_or_tun_nothing_is_emulated_and_it_says_why(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"can be emulated here.*sudo"):
        emulation.up(file, run="nobody")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(emulation, "_probe_tun", lambda: "no /dev/net/tun")
    with pytest.raises(ConfigError, match="can be emulated here: no /dev/net/tun"):
        emulation.up(file, run="nobody")
    monkeypatch.setattr(emulation, "_probe_tun", lambda: "")
    assert emulation.emulation_fault() == ""


def test_a_process_is_known_by_when_it_started(tmp_path: Path) -> None:
    assert start_ticks(os.getpid()) > 0
    assert start_ticks(2**22 + 1) == 0
    with pytest.raises(DilocoError, match="can't be read"):
        EmulationState.load(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"format": 99}')
    with pytest.raises(DilocoError, match="format 99, not 1"):
        EmulationState.load(tmp_path / "other.json")
