"""How benchmarks/link_wan.py counts: nothing can show more than the line carries, whatever it reads at once."""

import argparse
import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import link_count
import link_wan
import pytest
from link_count import Sample

from diloco_node.config.units import parse_rate
from diloco_node.lab.wan.control import request
from diloco_node.lab.wan.topology import parse_topology
from diloco_node.lab.wan.tun import inside
from tests.kit.wan_probe import rate_of

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="network namespaces need root: NOTHING of the benchmark's counting is tested here"
)
SO_RCVBUFFORCE = 33


def samples(*, until_s: float, rate: float, step_s: float = 0.05, cpu_out: float = 0.0) -> list[Sample]:
    """A line that carries `rate` bytes a second from second 10 on, 2 % of it again."""
    count = round(until_s / step_s)
    times = [10.0 + step_s * number for number in range(count + 1)]
    return [Sample(at, rate * (at - 10.0), 0.02 * rate * (at - 10.0), cpu_out * (at - 10.0), 0.0) for at in times]


def test_window_begins_a_warm_up_after_the_first_bytes_and_lasts_as_long_as_asked() -> None:
    slow = [Sample(one.at_s - 2.0, one.arrived, 0.0, 0.0, 0.0) for one in samples(until_s=2.0, rate=1e6)]
    fast = [
        Sample(one.at_s, 2e6 + one.arrived, one.again, one.cpu_out_s, 3.0 * one.at_s)
        for one in samples(until_s=7.02, rate=1e8, cpu_out=0.25)[1:]
    ]
    # By hand: 64 KiB are there at second 8.1; two seconds later the fast part has begun.
    found = link_count.figures([*slow, *fast], warm_up_s=2.0, seconds=4.99)
    assert found["bits_per_s"] == pytest.approx(8e8)
    assert found["sent_again"] == pytest.approx(0.02)
    assert found["cpu_seconds_per_gb_out"] == pytest.approx(2.5)
    assert found["cpu_seconds_per_gb_in"] == pytest.approx(30.0)
    framed = link_count.figures([*slow, *fast], warm_up_s=2.0, seconds=4.99, framing=1.25)
    assert framed["bits_per_s"] == pytest.approx(6.4e8)
    assert framed["cpu_seconds_per_gb_out"] == pytest.approx(3.125)


def test_flow_that_ends_within_the_window_gives_no_figures() -> None:
    with pytest.raises(ValueError, match=r"ended 1\.1 s too early"):
        link_count.figures(samples(until_s=3.0, rate=1e8), warm_up_s=1.0, seconds=3.05)
    with pytest.raises(ValueError, match="nothing arrived"):
        link_count.figures(samples(until_s=3.0, rate=10.0), warm_up_s=1.0, seconds=1.0)


def test_processor_time_of_a_process_is_all_of_it() -> None:
    before = link_count.cpu_seconds(os.getpid())
    times = os.times()
    assert before == pytest.approx(times.user + times.system, abs=0.05)
    with pytest.raises(FileNotFoundError):
        link_count.cpu_seconds(2**22 + 1)


def test_arms_and_the_topology_of_the_benchmark_are_valid() -> None:
    options = argparse.Namespace(arms="bare,ours,iperf3", connections="1,auto")
    assert link_wan.arms(options) == [("bare", ""), ("ours", "1"), ("ours", "auto"), ("iperf3", "")]
    text = link_wan.TOPOLOGY.format(queue_ms=50, rtt="40ms", loss="1%", rate="5Gbit/s")
    assert rate_of(parse_topology(text, name="link"), "a", "b") == parse_rate("5Gbit/s")


@pytest.mark.system
@needs_root
def test_what_is_read_late_does_not_count_for_more_than_the_line_carries(tmp_path: Path) -> None:
    """A receiver that reads nothing until the window begins, as one does behind a gap, and then all of it."""
    warm_up_s, seconds, rate = 1.0, 1.0, parse_rate("50Mbit/s").bytes_per_s
    options = argparse.Namespace(
        rate="50Mbit/s", rtt="20ms", loss="0%", queue_ms=50, congestion="reno", buffer_mib=None
    )
    with link_wan.shaped(options, tmp_path) as state, contextlib.ExitStack() as stack:
        here, there = state.places()
        with inside(there.namespace):
            listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        listener.bind((there.address, link_wan.PORT))
        listener.listen()
        with inside(here.namespace):
            sender = stack.enter_context(socket.socket())
        sender.connect((there.address, link_wan.PORT))
        receiver = stack.enter_context(listener.accept()[0])
        own = os.getpid()
        watch = link_count.Watch(here.namespace, (there.address, link_wan.PORT), sender=own, receiver=own)
        sending = threading.Thread(target=_send_for, args=(sender, warm_up_s + seconds + 1.0))
        sending.start()
        while not watch.samples or watch.samples[-1].arrived < link_count.START_BYTES:
            time.sleep(0.01)
        starts_s = watch.samples[-1].at_s + warm_up_s
        time.sleep(max(0.0, starts_s - time.monotonic()))
        read = _read_until(receiver, starts_s + seconds)
        _read_until(receiver, time.monotonic() + 2.0)
        sending.join()
        watch.close()
        late_s = request(state.socket, {"do": "status"})["late_seconds_max"]
    payload = 1448 / 1500
    # What the router's queues held, or held too long on a busy machine, may come in addition.
    most = rate * payload * (seconds + 0.05 + late_s + link_count.SAMPLE_S)
    found = link_count.figures(watch.samples, warm_up_s=warm_up_s, seconds=seconds)
    print(f"read {read / 1e6:.2f} MB, arrived {found['bits_per_s'] / 8e6:.2f} MB, at most {most / 1e6:.2f} MB")
    held = link_count.at(watch.samples, starts_s).arrived
    assert read >= held > 0, "what came before the window is in the reader's own count"
    assert 0 < found["bits_per_s"] * seconds / 8 <= most


def _send_for(connection: socket.socket, seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        connection.sendall(bytes(2**16))
    connection.shutdown(socket.SHUT_WR)


def _read_until(connection: socket.socket, ends_s: float) -> int:
    """Read all that there is until then; the bytes."""
    read = 0
    while time.monotonic() < ends_s:
        got = connection.recv(2**20)
        if not got:
            break
        read += len(got)
    return read
