"""Network namespaces from inside a process: entering one for a moment, and tun devices in it. Linux and root only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from diloco_node.errors import DilocoError
from diloco_node.lab.wan.segments import VNET_BYTES

NETNS_FOLDER: Final = Path("/run/netns")
DEVICE: Final = "wan0"

_CLONE_NEWNET: Final = 0x4000_0000
_TUNSETIFF: Final = 0x4004_54CA
_TUNSETOFFLOAD: Final = 0x4004_54D0
_TUNSETVNETHDRSZ: Final = 0x4004_54D8
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_IFF_VNET_HDR: Final = 0x4000
_OFFLOAD_CHECKSUM: Final = 0x01
_OFFLOAD_TSO4: Final = 0x02
_OFFLOAD_ECN: Final = 0x08

_libc: Final = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Run a block with this thread in a network namespace: sockets and tun devices opened there stay there.

    Raises DilocoError: there is no such namespace, or it may not be entered.
    """
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            namespace_fd = os.open(NETNS_FOLDER / namespace, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DilocoError(f"network namespace {namespace} can't be opened ({error.strerror})") from error
        try:
            _setns(namespace_fd, namespace)
        finally:
            os.close(namespace_fd)
        try:
            yield
        finally:
            _setns(home, "of this process")
    finally:
        os.close(home)


def _setns(fd: int, name: str) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        raise DilocoError(f"network namespace {name} can't be entered ({os.strerror(ctypes.get_errno())})")


def open_tun(namespace: str) -> int:
    """Create a tun device in a namespace, with segmentation and checksums left to us; it lives as long as the
    descriptor.

    Returns: the descriptor, non-blocking: each read gives one packet (see `segments`), each write takes one.

    Raises DilocoError: the kernel has no tun, or it is not allowed here.
    """
    with inside(namespace):
        try:
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise DilocoError(f"/dev/net/tun can't be opened ({error.strerror})") from error
        try:
            flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
            fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", VNET_BYTES))
            fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM | _OFFLOAD_TSO4 | _OFFLOAD_ECN)
        except OSError as error:
            os.close(fd)
            raise DilocoError(f"no tun device with offload in {namespace} ({error.strerror})") from error
    return fd
