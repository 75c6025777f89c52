"""Messages to systemd, or whatever started a region with NOTIFY_SOCKET: it is up, it stops, it lives (sd_notify(3))."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import Final

NOTIFY_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""They are the supervisor's alone: its children get none of them."""

US_PER_S: Final = 1_000_000

PATIENCE_S: Final = 2.0
"""With a manager whose queue is full. READY=1 is said once: lost, the region is killed as one that never came up."""


class ServiceManager:
    """The service manager that an environment names for the process `pid`, or none: then nothing is said.
    alive_every_s: between two WATCHDOG=1, half of what the manager allows; 0: it has no watchdog."""

    def __init__(self, env: Mapping[str, str], pid: int) -> None:
        place = env.get("NOTIFY_SOCKET", "")
        # "@" stands for the zero byte of an abstract name.
        self._address = "\0" + place[1:] if place.startswith("@") else place
        period_us = env.get("WATCHDOG_USEC", "")
        is_meant = env.get("WATCHDOG_PID", str(pid)) == str(pid)
        self.alive_every_s = int(period_us) / US_PER_S / 2 if period_us.isdecimal() and is_meant else 0.0

    def send(self, text: str) -> None:
        """Send a word of sd_notify(3): READY=1, STOPPING=1, WATCHDOG=1, or STATUS= and a line for people."""
        if not self._address:
            return
        # Nothing depends on whether somebody listens.
        with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(PATIENCE_S)
            sock.sendto(text.encode(), self._address)
