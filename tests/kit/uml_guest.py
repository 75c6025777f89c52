"""Runs inside a User-Mode Linux guest, where `sch_netem` is real: two regions, each in a namespace as in a container.

Run as a module with ANSWER: it writes what it measured to the file ANSWER, as JSON. Started by e2e/test_uml_netem.py.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diloco_node.lab.wan.netem import probe_netem
from diloco_node.lab.wan.tun import inside

NAMES = ("us-east", "us-west")
NAMESPACES = dict(zip(NAMES, ("diloco-uml-a", "diloco-uml-b"), strict=True))
ADDRESSES = dict(zip(NAMES, ("10.211.77.11", "10.211.77.12"), strict=True))
START_S = 2.0
MEASURE_S = 8.0
MANY = 1000
ATTEMPTS = 4
GOODPUT = 1448 / 1514
"""Of TCP with full packets."""

TOPOLOGY = """
[wan]
queue = "100ms"
[regions.us-east]
egress = "12Mbit/s"
[regions.us-west]
egress = "8Mbit/s"
ingress = "4Mbit/s"
[[links]]
from = "us-east"
to = "us-west"
delay = "25ms"
[[links]]
from = "us-west"
to = "us-east"
delay = "15ms"
"""
RUN = "[run]\nid = 'uml'\n" + "".join(f"[regions.{n}]\naddress = '{a}:7400'\n" for n, a in ADDRESSES.items())


def sh(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def plug(*, is_first: bool) -> None:
    """A veth pair between the namespaces: what `docker network connect` makes."""
    a, b = NAMESPACES.values()
    if is_first:
        for namespace in (a, b):
            sh("ip", "netns", "add", namespace)
            sh("ip", "-n", namespace, "link", "set", "lo", "up")
    sh("ip", "-n", a, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", b)
    for name in NAMES:
        sh("ip", "-n", NAMESPACES[name], "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
        sh("ip", "-n", NAMESPACES[name], "link", "set", "eth0", "up")


@contextlib.contextmanager
def regions(folder: Path) -> Iterator[dict[str, dict[str, str]]]:
    """The first process of each container, with a region that sleeps; its environment, for commands beside it."""
    (folder / "run.toml").write_text(RUN)
    (folder / "links.toml").write_text(TOPOLOGY)
    environments = {
        name: {
            **os.environ,
            "WAN_REGION": name,
            "WAN_CONFIG": str(folder / "run.toml"),
            "WAN_TOPOLOGY": str(folder / "links.toml"),
        }
        for name in NAMES
    }
    started = [
        subprocess.Popen(
            [*in_container(name, "run"), "--user", "nobody", "--", "sleep", "3600"],
            env=environments[name],
            stderr=(folder / f"{name}.log").open("w"),
        )
        for name in NAMES
    ]
    try:
        for name in NAMES:
            await_line(folder / f"{name}.log", ": out ", 1)
        yield environments
    finally:
        for process in started:
            process.terminate()
        for process in started:
            # The region ends by SIGTERM, which its first process hands on.
            assert process.wait(timeout=240) == 143, process.returncode


def in_container(name: str, verb: str) -> list[str]:
    return ["ip", "netns", "exec", NAMESPACES[name], sys.executable, "-m", "diloco_node.lab.wan.container", verb]


def await_line(log: Path, text: str, times: int) -> None:
    ends_s = time.monotonic() + 600
    while log.read_text().count(text) < times:
        assert time.monotonic() < ends_s, log.read_text()
        time.sleep(0.2)


class Echo:
    """UDP, answered in one region and asked from the other."""

    def __init__(self) -> None:
        west, east = NAMES[1], NAMES[0]
        with inside(NAMESPACES[west]):
            self.answering = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.answering.bind((ADDRESSES[west], 7))
        with inside(NAMESPACES[east]):
            self.asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.asking.settimeout(1.0)
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            data, address = self.answering.recvfrom(64)
            with contextlib.suppress(OSError):
                self.answering.sendto(data, address)

    def rtt_ms(self, enough_ms: float = 0.0, *, count: int = 50) -> float | None:
        """The least of some, or of many if that is more than enough; None when none comes back."""
        best = None
        for number in range(MANY if enough_ms else count):
            if number >= count and best is not None and best < enough_ms:
                break
            mark = number.to_bytes(4, "big") + os.urandom(4)
            begun_ns = time.monotonic_ns()
            try:
                self.asking.sendto(mark, (ADDRESSES[NAMES[1]], 7))
                while self.asking.recv(64) != mark:
                    pass
            except OSError:
                continue
            took_ms = (time.monotonic_ns() - begun_ns) / 1e6
            best = took_ms if best is None else min(best, took_ms)
        return best


def rate_mbit(source: str, target: str) -> float:
    """TCP goodput when the queue is full. The rates are low, because the guest has a part of one processor."""
    with inside(NAMESPACES[target]):
        listener = socket.create_server((ADDRESSES[target], 0))
    with inside(NAMESPACES[source]):
        sending = socket.socket()
    sending.connect(listener.getsockname())
    receiving, _ = listener.accept()
    begun_s = time.monotonic() + START_S
    ends_s = begun_s + MEASURE_S

    def send() -> None:
        with contextlib.suppress(OSError):
            while time.monotonic() < ends_s:
                sending.sendall(bytes(65_536))
        sending.close()

    thread = threading.Thread(target=send)
    thread.start()
    counted, first_s, last_s = 0, 0.0, 0.0
    while (now_s := time.monotonic()) < ends_s:
        got = len(receiving.recv(65_536))
        if now_s >= begun_s:
            # The first one only starts the clock.
            counted += got if first_s else 0
            first_s, last_s = first_s or time.monotonic(), time.monotonic()
    receiving.close()
    listener.close()
    thread.join()
    return counted * 8 / (last_s - first_s) / 1e6


def nearest_mbit(source: str, target: str, mbit: float) -> float:
    """The nearest to what it should be of a few: a processor that is taken away slows one down, or bunches it."""
    wanted, found = mbit * GOODPUT, [rate_mbit(source, target)]
    while abs(found[-1] - wanted) > 0.04 * wanted and len(found) < ATTEMPTS:
        found.append(rate_mbit(source, target))
    return min(found, key=lambda one: abs(one - wanted))


def main(answer: Path) -> None:
    found: dict[str, Any] = {"kernel": os.uname().release, "probe": probe_netem()}
    plug(is_first=True)
    echo = Echo()
    found["rtt_bare_ms"] = echo.rtt_ms()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with regions(folder) as environments:
            east, west = NAMES
            enough_ms = 42 + (found["rtt_bare_ms"] or 0.0)
            found["rtt_ms"] = echo.rtt_ms(enough_ms)
            # Held by the sender's rate below the receiver's, and the other way round.
            found["rate_west_to_east_mbit"] = nearest_mbit(west, east, 8)
            found["rate_east_to_west_mbit"] = nearest_mbit(east, west, 4)
            sh_in(environments, west, "cut")
            found["rtt_cut_ms"] = echo.rtt_ms(count=2)
            sh_in(environments, west, "heal")
            found["rtt_healed_ms"] = echo.rtt_ms(enough_ms)
            sh_in(environments, east, "cut", west)
            found["rtt_cut_one_ms"] = echo.rtt_ms(count=2)
            sh_in(environments, east, "heal")
            # The network is taken away and given back: another device, shaped again.
            sh("ip", "-n", NAMESPACES[east], "link", "delete", "eth0")
            await_line(folder / f"{east}.log", "cut off", 1)
            plug(is_first=False)
            for region in NAMES:
                await_line(folder / f"{region}.log", ": out ", 2)
            found["rtt_plugged_again_ms"] = echo.rtt_ms(enough_ms)
        found["logs"] = {region: (folder / f"{region}.log").read_text() for region in NAMES}
    answer.write_text(json.dumps(found))


def sh_in(environments: dict[str, dict[str, str]], name: str, verb: str, *others: str) -> None:
    subprocess.run([*in_container(name, verb), *others], env=environments[name], check=True, capture_output=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
