"""lab/demo/region_processes.py: the ports that a command picks for its regions, and its order to finish."""

import math
import socket
import time
from pathlib import Path

import pytest

from diloco_node.lab.demo import region_processes as processes
from diloco_node.lab.demo.region_processes import EPHEMERAL_PORTS, PORT_MIN, RegionProcess, free_ports, order_finish

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


class RefusingRegion(RegionProcess):
    """Takes the order to finish when it is given for the `takes`-th time."""

    def __init__(self, takes: int) -> None:
        super().__init__("a", 0, Path())
        self.takes, self.orders = takes, 0

    async def finish(self) -> bool:
        self.orders += 1
        return self.orders >= self.takes


async def test_the_order_to_finish_is_given_until_one_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ORDER_POLL_S", 0.001)
    regions = [RefusingRegion(3), RefusingRegion(5)]
    await order_finish(regions, limit_s=60)
    assert [region.orders for region in regions] == [3, 3]


async def test_the_order_to_finish_has_a_pause_between_two_tries_and_a_limit() -> None:
    region = RefusingRegion(10**9)
    with pytest.raises(TimeoutError):
        await order_finish([region], limit_s=0.05)
    assert region.orders == 1


async def test_the_order_to_finish_can_be_given_up() -> None:
    region = RefusingRegion(10**9)
    await order_finish([region], limit_s=60, is_given_up=lambda: region.orders > 0)
    assert region.orders == 1


@pytest.mark.parametrize(("env", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")])
async def test_a_region_is_started_with_its_program_environment_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    code = "import os, sys; print(os.environ['SHOWN'], os.environ['OMP_NUM_THREADS'], *sys.argv[1:])"
    region = RegionProcess("a", 0, tmp_path / "a", program=("-c", code), env={"SHOWN": "yes"}, settings=("x.y=1",))
    await region.start(tmp_path / "run.toml", ["train"])
    assert region.process is not None
    assert await region.process.wait() == 0
    assert (
        region.last_lines() == f"yes {threads} start --region a --config {tmp_path / 'run.toml'} --set x.y=1 -- train"
    )


async def test_who_does_not_answer_any_more_keeps_only_what_it_last_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[dict[str, object]] = [{"step": 5}, {"error": "refused"}]
    monkeypatch.setattr(processes, "ask", lambda _: answers.pop(0))
    region = RegionProcess("a", 0, tmp_path)
    began_s = time.monotonic()
    assert await region.poll() == {"step": 5}
    assert region.answered_s >= began_s
    assert await region.poll() == {"step": 5}
    assert region.answered_s == -math.inf
