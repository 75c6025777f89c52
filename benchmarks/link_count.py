"""What one end of a link has got across, counted from outside in the same way for every program.

A program's own count of what it received shows more than the line carries: on a line with loss bytes arrive behind a
gap and can't be read before it is filled, so a window begins with a burst of what came before it (iperf3's four streams
showed 1,017 Mbit/s of a line that carries 956 of payload). The sender's kernel knows what the far end has, behind gaps
too: each byte once, and when it arrived, less half a round trip.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from sock_diag import read_sockets_to

from diloco_node.lab.wan.tun import inside
from diloco_node.transport.kernel.tcp_info import Address, SocketCounters

SAMPLE_S = 0.05
START_BYTES = 64 * 2**10
"""What has to arrive before the warm-up begins: handshakes are not the flow."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """Totals at one moment.

    Attributes:
        at_s: monotonic. arrived: bytes that the far end has. again: sent once more.
        cpu_out_s, cpu_in_s: processor time of the sending and the receiving process, user and system.
    """

    at_s: float
    arrived: float
    again: float
    cpu_out_s: float
    cpu_in_s: float


class Watch:
    """Samples of one flow. `close` ends it; `samples` may be read then.

    Args:
        namespace: of the sender. remote: where its connections go. sender, receiver: process ids.
    """

    def __init__(self, namespace: str, remote: Address, *, sender: int, receiver: int) -> None:
        self._namespace = namespace
        self._remote = remote
        self._pids = (sender, receiver)
        self._sockets: dict[int, SocketCounters] = {}
        self._ended = threading.Event()
        self.samples: list[Sample] = []
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with inside(self._namespace):
            while not self._ended.wait(SAMPLE_S):
                try:
                    cpu_out_s, cpu_in_s = (cpu_seconds(pid) for pid in self._pids)
                except OSError:  # one has ended
                    return
                for one in read_sockets_to([self._remote], pid=self._pids[0]):
                    self._sockets[one.cookie] = one  # one that is closed keeps what it had
                self.samples.append(
                    Sample(
                        time.monotonic(),
                        sum(one.bytes_acked for one in self._sockets.values()),
                        sum(one.bytes_retransmitted for one in self._sockets.values()),
                        cpu_out_s,
                        cpu_in_s,
                    )
                )


def cpu_seconds(pid: int) -> float:
    """Of a process, all threads. Raises OSError: it is gone."""
    text = Path(f"/proc/{pid}/stat").read_text()
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS_PER_S


def figures(samples: Sequence[Sample], *, warm_up_s: float, seconds: float, framing: float = 1.0) -> dict[str, float]:
    """Goodput and processor time per GB over a window that begins so long after the first bytes.

    Args:
        samples: in order of time. framing: arrived bytes per byte of the bodies: TLS, HTTP/2 and headers of our own.

    Raises:
        ValueError: nothing arrived, or the samples end before the window does.
    """
    flowing = [one for one in samples if one.arrived >= START_BYTES]
    if not flowing:
        raise ValueError("nothing arrived")
    start_s = flowing[0].at_s + warm_up_s
    if samples[-1].at_s < start_s + seconds:
        raise ValueError(f"the flow ended {start_s + seconds - samples[-1].at_s:.1f} s too early")
    first, last = at(samples, start_s), at(samples, start_s + seconds)
    arrived = (last.arrived - first.arrived) / framing
    return {
        "bits_per_s": 8 * arrived / seconds,
        "cpu_seconds_per_gb_out": (last.cpu_out_s - first.cpu_out_s) / (arrived / 1e9),
        "cpu_seconds_per_gb_in": (last.cpu_in_s - first.cpu_in_s) / (arrived / 1e9),
        "sent_again": (last.again - first.again) / max(1.0, last.arrived - first.arrived),
    }


def at(samples: Sequence[Sample], at_s: float) -> Sample:
    """The totals at a moment between the first and the last sample, by the straight line between two of them."""
    for before, after in itertools.pairwise(samples):
        if before.at_s <= at_s <= after.at_s:
            share = (at_s - before.at_s) / (after.at_s - before.at_s)
            return Sample(
                *(
                    getattr(before, field.name) + share * (getattr(after, field.name) - getattr(before, field.name))
                    for field in fields(Sample)
                )
            )
    raise ValueError(f"no samples around {at_s}")
