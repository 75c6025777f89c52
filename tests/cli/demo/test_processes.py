"""cli/demo/processes.py: the ports that a command picks for its regions."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from diloco_node.cli.demo import processes
from diloco_node.cli.demo.processes import EPHEMERAL_PORTS, PORT_MIN, free_ports

COUNT = 200


@pytest.fixture
def some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> range:
    """A machine that hands out all but some of its ports by itself."""
    first = free_ports(1)[0]
    (tmp_path / "range").write_text(f"{first + COUNT}\t60999\n")
    monkeypatch.setattr(processes, "EPHEMERAL_PORTS", tmp_path / "range")
    monkeypatch.setattr(processes, "PORT_MIN", first)
    return range(first, first + COUNT)


def test_ports_are_different_and_none_that_the_kernel_hands_out() -> None:
    ports = free_ports(64)
    assert len(set(ports)) == 64
    least = int(EPHEMERAL_PORTS.read_text().split()[0])
    if least > PORT_MIN + 10_000:
        assert all(PORT_MIN <= port < least for port in ports)


def test_ports_that_are_taken_are_passed_over(some: range) -> None:
    taken = []
    try:
        for port in some[::2]:
            sock = socket.socket()
            taken.append(sock)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue  # somebody else's
        ports = free_ports(COUNT // 10)
        assert set(ports) <= set(some[1::2])
    finally:
        for sock in taken:
            sock.close()


def test_where_there_are_none_the_kernel_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("1024 60999", "none"):
        (tmp_path / "range").write_text(text)
        monkeypatch.setattr(processes, "EPHEMERAL_PORTS", tmp_path / "range")
        assert len(set(free_ports(5))) == 5
    monkeypatch.setattr(processes, "EPHEMERAL_PORTS", tmp_path / "missing")
    assert min(free_ports(3)) > 0
