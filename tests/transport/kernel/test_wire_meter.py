"""transport/kernel/wire_meter.py: bytes per peer, and which sockets are held back."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_node.errors import LinkLost
from diloco_node.transport.kernel import congestion, tcp_info, wire_meter
from diloco_node.transport.kernel.tcp_info import SocketCounters, read_sockets
from diloco_node.transport.kernel.wire_meter import LinkCounters, PeerTraffic, WireMeter
from tests.kit.socket_kit import PACED, REMOTE, counters_of, send


def counters(cookie: int, *, sent: int, received: int, remote: tuple[str, int] = REMOTE) -> SocketCounters:
    return SocketCounters(cookie, -1, ("10.0.0.1", 1), remote, sent, 0, received, 2, 3)


class FakeKernel:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: list[SocketCounters] = []
        monkeypatch.setattr(wire_meter, "read_sockets", lambda: self.now)


def test_a_peer_is_the_sum_of_its_sockets_living_and_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(monkeypatch)
    meter = WireMeter()
    meter.assign("b", REMOTE)
    meter.assign("c", ("10.0.0.3", 7400))
    kernel.now = [counters(1, sent=1000, received=10), counters(2, sent=1, received=1, remote=("10.0.0.3", 7400))]
    meter.sample()
    assert meter.traffic("b") == PeerTraffic(1000 + 2 * 52, 10 + 3 * 52, is_measured=True)
    kernel.now = [counters(3, sent=500, received=20), counters(4, sent=7, received=7)]  # 1 and 2 are gone
    meter.sample()
    assert meter.traffic("b") == PeerTraffic(1507 + 6 * 52, 37 + 9 * 52, is_measured=True)
    assert meter.traffic("c") == PeerTraffic(1 + 2 * 52, 1 + 3 * 52, is_measured=True)
    kernel.now = []
    meter.sample()
    meter.sample()
    assert meter.traffic("b") == PeerTraffic(1507 + 6 * 52, 37 + 9 * 52, is_measured=True)


def test_addresses_of_incoming_calls_are_forgotten_when_their_sockets_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(monkeypatch)
    meter = WireMeter()
    meter.assign("b", REMOTE, is_lasting=False)
    for _ in range(2):  # accepted, and not in the list yet
        meter.sample()
    for sent in (100, 200, 300, 400, 1000):
        kernel.now = [counters(1, sent=sent, received=0)]
        meter.sample()
    kernel.now = []
    for _ in range(3):
        meter.sample()
    kernel.now = [counters(2, sent=5, received=0)]  # the same port, another peer's now
    meter.sample()
    assert meter.traffic("b") == PeerTraffic(1000 + 2 * 52, 3 * 52, is_measured=True)


async def test_two_peers_behind_one_address_keep_their_own_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, meter = FakeKernel(monkeypatch), WireMeter()
    for cookie, peer in enumerate("bc"):
        async with meter.opening(peer, is_bulk=True):
            kernel.now = [*kernel.now, counters(cookie, sent=1000 * (cookie + 1), received=0)]
            meter.sample()  # before its dial is over
            meter.assign(peer, REMOTE)
    meter.sample()
    assert meter.traffic("b") == PeerTraffic(1000 + 2 * 52, 3 * 52, is_measured=True)
    assert meter.traffic("c") == PeerTraffic(2000 + 2 * 52, 3 * 52, is_measured=True)


def test_sockets_of_nobody_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(monkeypatch)
    meter = WireMeter()
    meter.assign("b", ("10.0.0.2", 7401))
    kernel.now = [counters(1, sent=1000, received=10)]
    meter.sample()
    assert meter.traffic("b") is None


def test_ipv6_has_longer_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, meter = FakeKernel(monkeypatch), WireMeter()
    meter.assign("b", ("fe80::2", 1))
    kernel.now = [counters(1, sent=100, received=0, remote=("fe80::2", 1))]
    meter.sample()
    assert meter.traffic("b") == PeerTraffic(100 + 2 * 72, 3 * 72, is_measured=True)


def test_a_link_counts_what_an_interface_does_and_parts_what_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, meter = FakeKernel(monkeypatch), WireMeter()
    assert meter.link("b") is None
    assert meter.traffic("b") is None
    meter.assign("b", REMOTE)
    one = SocketCounters(1, -1, ("10.0.0.1", 1), REMOTE, 10_000, 1_000, 300, 7, 3, 5, 40, 8_000)
    kernel.now = [one, replace(one, cookie=2, rtt_min_us=0)]
    meter.sample()
    both = LinkCounters(
        2 * (9_000 + 5 * 66), 2 * (1_000 + 2 * 66), 2 * (300 + 3 * 66), 2 * (8_000 + 7 * 66), 14, 6, 40_000
    )
    assert meter.link("b") == both
    kernel.now = []
    meter.sample()
    assert meter.link("b") == replace(both, rtt_min_ns=0)


IN_A_NAMESPACE = """
import asyncio, os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
subprocess.run(["ip", "link", "set", "lo", "up", "mtu", "1500"], check=True)
sys.path.insert(0, sys.argv[1])
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.transport import GrpcTransport
from diloco_node.core.messages import Payload

def interface():
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    fields = line.split(":")[1].split()
    return int(fields[8]), int(fields[9])

class Handler:
    def __init__(self): self.up, self.done = asyncio.Event(), asyncio.Event()
    def control_arrived(self, peer, message): pass
    def link_changed(self, peer, *, is_up): self.up.set()
    def transfer_opened(self, peer, header, raw_bytes): return memoryview(bytearray(raw_bytes))
    def transfer_closed(self, peer, header, buffer, *, is_whole): self.done.set()

async def main():
    folder = Path(sys.argv[2])
    init_run(folder, "run1", ["a", "b"])
    made, handlers, address = {}, {}, None
    for region, peer in (("b", "a"), ("a", "b")):
        handlers[region] = Handler()
        made[region] = GrpcTransport(
            region=region, run_id="run1", settings_digest="", manifest_digest="",
            identity=load_identity(folder / region), listen=("127.0.0.1", 0), peers={peer: address},
            handler=handlers[region], executor=ThreadPoolExecutor(1),
        )
        await made[region].start()
        address = f"127.0.0.1:{made[region].port}"
    await handlers["a"].up.wait()
    for _ in range(3):
        handlers["b"].done.clear()
        await made["a"].transfer("b", Payload(0, 0, bytes(32)), memoryview(os.urandom(8 * 2**20)))
        await handlers["b"].done.wait()
    await made["b"].transfer("a", Payload(0, 0, bytes(32)), memoryview(os.urandom(4 * 2**20)))
    await handlers["a"].done.wait()
    await made["a"].stop()
    await made["b"].stop()
    ours = sum(made[r].traffic()[p].bytes_out for r, p in (("a", "b"), ("b", "a")))
    back = sum(made[r].traffic()[p].bytes_in for r, p in (("a", "b"), ("b", "a")))
    print(ours, back, *interface(), made["a"].traffic()["b"].is_measured)

asyncio.run(main())
"""


def test_wire_bytes_agree_with_the_interface_within_a_tenth(tmp_path: object) -> None:
    """Everything on `lo` of a fresh network namespace is our own links: TLS, HTTP/2 and TCP headers included."""
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("needs root and unshare to make a network namespace")
    done = subprocess.run(
        [unshare, "-n", sys.executable, "-c", IN_A_NAMESPACE, str(Path.cwd()), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if "Operation not permitted" in done.stderr and not done.stdout:
        pytest.skip("this machine lets nobody make a network namespace")
    assert done.returncode == 0, done.stderr
    ours, back, interface, packets, is_measured = done.stdout.splitlines()[-1].split()
    print(f"counted {ours} out, {back} in; the interface {interface} in {packets} packets")
    assert is_measured == "True"
    without_link_layer = int(interface) - 14 * int(packets)
    assert abs(int(ours) - without_link_layer) < 0.1 * without_link_layer
    assert abs(int(back) - without_link_layer) < 0.1 * without_link_layer


def test_sockets_of_the_bulk_lane_are_paced_and_control_is_not(connection: tuple[socket.socket, socket.socket]) -> None:
    control, far = connection
    with socket.create_server(("127.0.0.1", 0)) as listening:
        meter = WireMeter()
        meter.assign("b", far.getsockname())
        meter.assign("b", listening.getsockname())
        meter.assign_lane("b", is_bulk=False)
        with socket.create_connection(listening.getsockname()) as bulk:
            meter.pace("b", 1_000_000)  # before it is told what it is for nothing is known of it
            meter.assign_lane("b", is_bulk=True)
            send(control, far, b"x" * 100_000)
            meter.sample()
            before, unlimited = control.getsockopt(*PACED, 8), bulk.getsockopt(*PACED, 8)
            meter.pace("b", 1_000_000)
            assert bulk.getsockopt(*PACED, 8) == tcp_info.PACE.pack(1_000_000)
            assert control.getsockopt(*PACED, 8) == before, "it has sent more"
            meter.pace("b", None)
            assert bulk.getsockopt(*PACED, 8) == unlimited


def congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_socket_with_a_long_round_trip_goes_by_bbr_once_and_another_stays(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = connection
    for sock in connection:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    send(near, far, b"x" * 1000)
    own, other = counters_of(near), counters_of(far)
    expected = b"bbr"
    try:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, expected)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    except OSError:
        expected = b"cubic"  # any that this kernel allows
        monkeypatch.setattr(congestion, "LONG_RTT_CONGESTION_CONTROL", expected)
    meter, kernel = WireMeter(), FakeKernel(monkeypatch)
    meter.assign("b", own.remote)
    meter.assign("c", other.remote)
    kernel.now = [replace(own, rtt_min_us=5_000), replace(other, rtt_min_us=4_999)]
    meter.sample()
    assert congestion_control(near) == expected
    assert congestion_control(far) == b"reno"
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    meter.sample()
    assert congestion_control(near) == b"reno", "the operator's later choice stays"
    kernel.now = [replace(own, rtt_min_us=5_000, cookie=own.cookie + 10**6)]
    meter.sample()
    assert congestion_control(near) == b"reno", "another socket has this descriptor now"


def test_a_socket_that_may_not_change_its_congestion_control_is_known_to_go_by_loss(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, _ = connection
    monkeypatch.setattr(congestion, "LONG_RTT_CONGESTION_CONTROL", b"no such")
    meter, kernel = WireMeter(), FakeKernel(monkeypatch)
    own = next(found for found in read_sockets() if found.local == near.getsockname())
    meter.assign("b", own.remote)
    kernel.now = [replace(own, rtt_min_us=4_999)]
    meter.sample()
    assert not meter.goes_by_loss
    kernel.now = [replace(own, rtt_min_us=5_000)]
    meter.sample()
    assert meter.goes_by_loss


def test_a_bulk_connection_that_has_just_joined_is_paced_and_control_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, meter, paced = FakeKernel(monkeypatch), WireMeter(), dict[int, int | None]()
    monkeypatch.setattr(wire_meter, "pace_socket", lambda _fd, cookie, rate: paced.update({cookie: rate}) is None)
    meter.assign("b", REMOTE)
    control, first, further = (
        counters(cookie, sent=sent, received=0) for cookie, sent in ((7, 10_000), (3, 900_000), (9, 0))
    )
    for opened, is_bulk in (([control], False), ([control, first], True), ([control, first, further], True)):
        kernel.now = list(opened)
        meter.assign_lane("b", is_bulk=is_bulk)
    meter.pace("b", 3_000_000, connections=2)
    assert paced == {3: 1_500_000, 9: 1_500_000}
    meter.pace("b", 3_000_000)
    assert paced == {3: 3_000_000, 9: 3_000_000}, "each of all there are gets the part of one"
    kernel.now = [control, further]
    meter.sample()
    kernel.now = [control, further, counters(3, sent=0, received=0)]
    meter.assign_lane("b", is_bulk=False)
    paced.clear()
    meter.pace("b", None)
    assert paced == {9: None}, "what a number once was does not count"


async def test_connections_of_two_lanes_that_are_opened_at_once_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, meter, paced = FakeKernel(monkeypatch), WireMeter(), dict[int, int | None]()
    monkeypatch.setattr(wire_meter, "pace_socket", lambda _fd, cookie, rate: paced.update({cookie: rate}) is None)
    meter.assign("b", REMOTE)
    tasks, connected, order = [], asyncio.Event(), list[int]()

    async def opens(cookie: int, *, is_bulk: bool) -> None:
        async with meter.opening("b", is_bulk=is_bulk):
            order.append(cookie)
            kernel.now = [*kernel.now, counters(cookie, sent=0, received=0)]
            await connected.wait()

    for cookie, is_bulk in ((1, True), (2, False), (3, True)):
        tasks.append(asyncio.create_task(opens(cookie, is_bulk=is_bulk)))
        await asyncio.sleep(0)
    assert order == [1], "the next one waits"
    async with meter.opening("c", is_bulk=True):
        pass  # one to another peer does not
    connected.set()
    await asyncio.gather(*tasks)
    meter.pace("b", 3_000_000)
    assert paced == {1: 3_000_000, 3: 3_000_000}


async def test_a_dial_that_fails_lets_the_next_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeKernel(monkeypatch)
    meter = WireMeter()
    with pytest.raises(LinkLost):
        async with meter.opening("b", is_bulk=True):
            raise LinkLost("b: nobody listens there")
    async with meter.opening("b", is_bulk=False):
        pass


def test_lane_of_an_incoming_call_comes_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, meter, paced = FakeKernel(monkeypatch), WireMeter(), dict[int, int | None]()
    monkeypatch.setattr(wire_meter, "pace_socket", lambda _fd, cookie, rate: paced.update({cookie: rate}) is None)
    callers = [("10.0.0.2", port) for port in (5001, 5002, 5003)]
    for remote, is_bulk in zip(callers, (False, True, True), strict=True):
        meter.assign("b", remote, is_lasting=False, is_bulk=is_bulk)
    kernel.now = [counters(cookie, sent=1, received=0, remote=remote) for cookie, remote in enumerate(callers, start=1)]
    meter.assign_lane("b", is_bulk=True)  # one that we dial ourselves, and that is not there: these are not it
    meter.pace("b", 2_000_000, connections=2)
    assert paced == {2: 1_000_000, 3: 1_000_000}
